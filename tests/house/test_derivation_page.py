"""docs/derive.md prints what it says."""

import contextlib
import io
import re
from pathlib import Path

import jax
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "derive.md").read_text()


def run_blocks():
    """What each block prints, one after the other, as a reader would type them."""
    names, found = {}, []
    for code, shown in re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.S):
        printed = io.StringIO()
        with jax.numpy_dtype_promotion("standard"), contextlib.redirect_stdout(printed):
            exec(code, names)
        found.append((shown, printed.getvalue()))
    return found


@pytest.mark.slow
def test_the_blocks_print_what_is_shown():
    blocks = run_blocks()
    assert len(blocks) == PAGE.count("```python") == 4
    for shown, printed in blocks:
        assert printed == shown


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / link).is_file(), link
