"""Pictures of masks on a standard output that lacks the marks of others."""

import io
import os
import subprocess
import sys

import pytest

from regard import masks

DRAW = """
import numpy as np
from regard import derive, masks
print(masks.causal().picture(3))
print(masks.causal().picture(96))
print(derive(*3 * [np.eye(2, dtype=np.float32)], mask=masks.causal()))
"""


def test_a_picture_is_printed_where_the_code_page_has_no_blocks():
    environment = os.environ | {"PYTHONIOENCODING": "cp1252"}
    done = subprocess.run([sys.executable, "-c", DRAW], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode("cp1252").splitlines()
    assert lines[:4] == ["3 queries x 3 keys   # may attend  . may not", "0 # . .", "1 # # .", "2 # # #"]
    assert lines[4] == "96 queries x 96 keys, one mark per 3 x 3   # all may attend  + some  . none"
    assert lines[6] == "# +" + " ." * 30
    assert any(line.split() == ["i=0", "#", "·"] for line in lines[40:])


@pytest.mark.parametrize("encoding", ["utf-8", "cp437", None])
def test_a_picture_has_blocks_where_they_can_be_printed(monkeypatch, encoding):
    stream = io.StringIO() if encoding is None else io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    for output in (stream, None):
        monkeypatch.setattr(sys, "stdout", output)
        assert masks.causal().picture(2).splitlines()[1:] == ["0 ■ ·", "1 ■ ■"]
