"""The README's example prints what the README says."""

import contextlib
import io
import re
from pathlib import Path

import jax

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_prints_what_is_shown():
    code, shown = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.S).groups()
    printed = io.StringIO()
    with jax.numpy_dtype_promotion("standard"), contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == shown


def test_its_links_and_pictures_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert "docs/seeds.md" in links
    for link in links:
        assert (Path(__file__).parents[1] / link).is_file(), link


def test_it_stays_short():
    assert len(README.splitlines()) <= 150
