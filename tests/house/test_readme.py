"""The README's example prints what the README says."""

import contextlib
import io
import re
import tomllib
from pathlib import Path

import jax

from wheel import LOCAL_LINK, read_blocks

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_examples_print_what_is_shown(tmp_path, monkeypatch):
    """One after the other, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    examples = read_blocks(README)
    assert len(examples) == README.count("```python") == 5
    names = {}
    for code, shown in examples:
        printed = io.StringIO()
        with jax.numpy_dtype_promotion("standard"), contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == shown
    assert (tmp_path / "attention.html").stat().st_size > 10_000


def test_its_links_and_pictures_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert "docs/seeds.md" in links
    for link in links:
        assert (Path(__file__).parents[2] / link).exists(), link


def test_a_package_index_is_shown_no_link_into_the_repository():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    shown = README
    for one in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        shown = re.sub(one["pattern"], one["replacement"], shown)
    assert not LOCAL_LINK.search(shown)
    assert "- docs/start.md, and the tutorials" in shown
    assert "its every step in index notation |" in shown
    assert "digits classifier" not in shown, "a caption goes with its picture"
    assert read_blocks(shown) == read_blocks(README)


def test_it_stays_short():
    assert len(README.splitlines()) <= 190
