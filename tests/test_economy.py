"""What a run of fewer cases leaves out."""

import types

import pytest

import economy

CASES = [
    "one.py::first[0]",
    "one.py::alone",
    *(f"one.py::many[{case}]" for case in "abcde"),
    "two.py::many[[]",
]


@pytest.mark.parametrize(
    ("step", "kept"),
    [
        (1, CASES),
        (
            2,
            [
                "one.py::first[0]",
                "one.py::alone",
                *(f"one.py::many[{case}]" for case in "ace"),
                "two.py::many[[]",
            ],
        ),
        (7, ["one.py::first[0]", "one.py::alone", "one.py::many[a]", "two.py::many[[]"]),
    ],
)
def test_every_test_runs_from_its_first_case_on(step, kept):
    items = [types.SimpleNamespace(nodeid=name) for name in CASES]
    assert [item.nodeid for item in economy.take_every(items, step)] == kept
