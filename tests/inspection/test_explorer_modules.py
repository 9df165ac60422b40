"""The explorer's JavaScript by its own tests, which run in Node: decoding, colours, tiles, state, plots."""

import os
import subprocess
from pathlib import Path

import pytest

from javascript import NODE

FOLDER = Path(__file__).parent / "explorer"
TESTS = sorted(path.name for path in FOLDER.glob("*.test.js"))


def test_the_tests_of_the_modules_are_found():
    assert {"codes.test.js", "colours.test.js", "source.test.js", "state.test.js"} <= set(TESTS)


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize("name", TESTS)
def test_modules_pass_their_tests_in_node(name):
    assert NODE is not None
    # A colour would be an escape sequence in the report of a failure.
    environment = {**os.environ, "NO_COLOR": "1", "FORCE_COLOR": "0"}
    done = subprocess.run(
        [NODE, "--test", str(FOLDER / name)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
