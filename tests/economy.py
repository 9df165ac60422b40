"""Fewer cases in the quick run."""

import pytest

# For a process of several devices: such programs may wait for one another for ever when they come from a
# file (benchmarks/NOTES.md).
WITHOUT_CACHE = {"JAX_ENABLE_COMPILATION_CACHE": "false"}


def mostly_slow(cases, *quick):
    """Cases of a test, by their names: all but `quick` are marked slow. Of several arguments, tuples."""
    cases = list(cases)
    assert set(quick) <= set(cases), set(quick) - set(cases)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[] if case in quick else [pytest.mark.slow]
        )
        for case in cases
    ]
