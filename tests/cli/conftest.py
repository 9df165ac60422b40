"""Tiny runs that many tests of commands read; who writes takes a copy."""

import contextlib
import io

import pytest

from regard.cli import main
from small_runs import COPY, share_programs


@pytest.fixture(scope="module", autouse=True)
def _shared():
    with share_programs():
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cli") / "copy"
    with share_programs(), contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*COPY, "--out", str(directory)]) == 0
    return directory, printed.getvalue()


@pytest.fixture(scope="session")
def copied(trained):
    return trained[0]
