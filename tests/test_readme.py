"""The README's example prints what the README says."""

import contextlib
import io
import re
from pathlib import Path

import jax

from wheel import read_blocks

README = (Path(__file__).parents[1] / "README.md").read_text()


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
        assert (Path(__file__).parents[1] / link).exists(), link


def test_it_stays_short():
    assert len(README.splitlines()) <= 190
