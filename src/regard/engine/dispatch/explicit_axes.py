"""Explicit mesh axes: calls on arrays whose types say how they are divided."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from regard.axes import Array
from regard.engine.call.problem import Problem
from regard.explicit_meshes import explicit_mesh, in_automatic_axes

Run = Callable[[Problem], tuple[Array, dict[str, Array]]]


def run_in_automatic_axes(run: Run, problem: Problem) -> tuple[Array, dict[str, Array]]:
    """Run a call with the compiler dividing the work, and results divided as query's type says."""
    if explicit_mesh(problem) is None:
        return run(problem)
    problem = problem.with_arrays()
    rows = divided_rows(problem)
    widths = {"weights": (None,), "scores": (None,)}
    chosen = {"weights", "scores"} if problem.rows is not None or problem.heads is not None else set()

    def place_result(name: str) -> PartitionSpec:
        axes = (None,) * len(rows) if name in chosen else rows
        return PartitionSpec(*axes, *widths.get(name, ()))

    specs = PartitionSpec(*rows, None), {name: place_result(name) for name in problem.aux}
    return run_with_specs(run, (problem,), specs)


def run_with_specs(run: Callable[..., Any], arguments: tuple[Any, ...], specs: Any) -> Any:
    """Run a function with the compiler dividing the work, and results divided as these say."""
    mesh = explicit_mesh(arguments)
    if mesh is None:
        return run(*arguments)
    leaves, structure = jax.tree.flatten(arguments)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def run_leaves(*arrays: Array) -> Any:
        whole = list(leaves)
        for index, array in zip(places, arrays, strict=True):
            whole[index] = array
        return run(*jax.tree.unflatten(structure, whole))

    return in_automatic_axes(mesh, run_leaves, specs)(*(leaves[index] for index in places))


def divided_rows(problem: Any) -> tuple[Any, ...]:
    """Return how the leading axes and T are divided: as query's, or else as key's and value's are."""
    rank = len(problem.leading)
    rows: list[Any] = [None] * (rank + 1)
    for array in (problem.query, problem.key, problem.value):
        spec = jax.typeof(array).sharding.spec[: array.ndim - 1][-rank - 1 :]
        sizes = array.shape[: array.ndim - 1][-rank - 1 :]
        first = rank + 1 - len(sizes)
        for axis, (names, size) in enumerate(zip(spec, sizes, strict=True), first):
            is_length = axis == rank
            whole = problem.T if is_length else problem.leading[axis]
            fits = size == whole and not (is_length and array is not problem.query)
            if rows[axis] is None and fits and not _names(names) & set(itertools.chain(*map(_names, rows))):
                rows[axis] = names
    return tuple(rows)


def _names(entry: Any) -> set[str]:
    return set() if entry is None else {entry} if isinstance(entry, str) else set(entry)
