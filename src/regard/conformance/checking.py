"""Check a function: all promises in order, whatever it does."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

from regard.arguments import read_number
from regard.conformance.edges import EDGES
from regard.conformance.judging import Judge
from regard.conformance.promises import FIRST, FULL, OPTIONS
from regard.conformance.report import Report, Row
from regard.conformance.runners import RUNNERS
from regard.conformance.subjects import KEYWORDS, Features, Subject, find_features

DTYPES = ("float32", "float64", "bfloat16", "float16")


def check(
    fn: Callable[..., Any],
    *,
    layout: str = "BHTD",
    features: Features | Iterable[str] | None = None,
    dtypes: Sequence[str] = DTYPES,
    sizes: Literal["quick", "full"] = "quick",
    tolerance: float = 2.0,
    arrays: Literal["jax", "numpy", "torch"] = "jax",
    seconds: float = 60.0,
    only: str = "",
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Check what a function of attention promises, against the definition.

    Every promise is one row: it holds, differs by a convention that has a name, is wrong, or is refused by
    an error of the function's own. Conventions that are found, such as a mask whose True hides, are followed
    from then on. A value holds when its error is at most `tolerance` times that of a plain evaluation in the
    same dtype, in NumPy, of `theory.definition`, which is also what its line is of.

    Args:
        fn: called as `fn(query, key, value, **options)`; returns the output, or a tuple that begins with it.
        layout: the axes of query in order: B batch, H heads, T tokens, D width; B and H may be absent.
            The letters of jax.nn, such as BTNH, are understood as well.
        features: what else the function takes, as mask, causal, lse: a mapping from feature to keyword,
            or to a function that makes keywords of an option; or names alone, which are keywords.
            None reads the signature; a function with `**options` is tried with the names of features.
        dtypes: the dtypes that are checked.
        sizes: "quick", or "full", which takes lengths on both sides of what kernels have for blocks.
        tolerance: how many times the error of the plain evaluation is allowed.
        arrays: what the function takes: JAX's arrays, NumPy's, or tensors of PyTorch.
        seconds: the longest that one call may take, its compilation included; then it counts as refused.
        only: checks the promises whose name holds these words; conventions that others find are not known.
        progress: called with the promises done, all promises, and the name of the next one.

    Returns:
        `Report`; nothing that the function raises is raised here.

    Raises:
        ValueError: for a layout, features, dtypes, sizes or arrays that are none of the above.
        TypeError: for what cannot be called.

    Example:
        >>> import jax
        >>> from regard import conformance
        >>> report = conformance.check(jax.nn.dot_product_attention, layout="BTHD", only="lse in bfloat16")
        >>> [row.finding for row in report.wrong]
        ['lse is bfloat16, its sums are float32', 'the gradient of lse is stopped']
    """
    axes = read_layout(layout)
    if arrays not in RUNNERS:
        raise ValueError(f"arrays: expected one of {', '.join(RUNNERS)}; got {arrays!r}")
    if sizes not in ("quick", "full"):
        raise ValueError(f"sizes: expected 'quick' or 'full'; got {sizes!r}")
    unknown = sorted(set(dtypes) - set(DTYPES))
    if unknown:
        raise ValueError(f"dtypes: expected some of {', '.join(DTYPES)}; got {', '.join(unknown)}")
    if not callable(fn):
        raise TypeError(f"fn: expected a function of query, key and value; got {type(fn).__name__}")
    started = time.monotonic()
    taken = find_features(fn, features)
    for word, number in (("tolerance", tolerance), ("seconds", seconds)):
        if not 0 < read_number(word, number) < math.inf:
            raise ValueError(f"{word}: expected a number above 0, got {number}")
    subject = Subject(fn, axes, taken, arrays, seconds)
    imported, name = name_function(fn)
    judge = Judge(subject, imported, name, tolerance)
    rows = tuple(_run(judge, sizes, tuple(dtypes), only, progress))
    absent = tuple(feature for feature in KEYWORDS if feature not in (*taken, "rng", "grouped"))
    return Report(name, axes, rows, absent, time.monotonic() - started)


def _run(
    judge: Judge,
    sizes: str,
    dtypes: tuple[str, ...],
    only: str,
    progress: Callable[[int, int, str], None] | None,
) -> Iterator[Row]:
    """Yield the rows of all promises that the function can be asked for."""
    promises = [
        (promise.name, partial(judge.keep_promise, promise))
        for promise in [*FIRST, *OPTIONS, *(FULL if sizes == "full" else [])]
        if judge.subject.takes(promise.options) and promise.dtype in dtypes
    ]
    promises += [(name, partial(check, judge)) for name, check in EDGES.items()]
    if not any(only in name or name in only for name, _ in promises):
        names = ", ".join(repr(name) for name, _ in promises)
        raise ValueError(
            f"only: expected words of a promise that can be checked, among {names}; got {only!r}"
        )
    promises = [(name, ask) for name, ask in promises if only in name or (name in EDGES and name in only)]
    for number, (name, ask) in enumerate(promises):
        if progress is not None:
            progress(number, len(promises), name)
        rows = [row for row in ask() if only in row.promise or only in name]
        yield from rows
        if name == FIRST[0].name and rows[0].verdict == "refused":
            return  # nothing can be said of a function that refuses the plainest call


def read_layout(layout: str) -> str:
    """Return the axes of query in letters of BHTD, from those or from the letters of jax.nn, such as BTNH."""
    axes = layout.upper().replace("S", "T")
    if "N" in axes and "D" not in axes:
        axes = axes.replace("H", "D")
    axes = axes.replace("N", "H")
    if not {"T", "D"} <= set(axes) <= set("BHTD") or len(set(axes)) != len(axes):
        raise ValueError(f"layout: expected letters of BHTD, each once, T and D among them; got {layout!r}")
    return axes


def name_function(fn: Callable[..., Any]) -> tuple[str, str]:
    """Return the line that imports a function, and its name."""
    name, home = getattr(fn, "__name__", ""), getattr(fn, "__module__", "")
    if not name.isidentifier() or not home or home == "__main__":
        return "# fn: the function that was checked", "fn"
    # Where users import it from, and not where it is written.
    family = [module for module in sys.modules if module.partition(".")[0] == home.partition(".")[0]]
    public = [
        module
        for module in sorted(family, key=lambda module: (len(module), module))
        if "._" not in module and getattr(sys.modules[module], "__dict__", {}).get(name) is fn
    ]
    return f"from {(public or [home])[0]} import {name}", name
