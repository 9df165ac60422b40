"""Arrays on manual mesh axes, whose types say over which they vary, as inside `jax.shard_map`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax._src import config  # has no public name
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


def varying_axes(*trees: Any) -> tuple[str, ...]:
    """Return the manual mesh axes over which any of the arrays varies."""
    names = (jax.typeof(leaf).mat.varying for leaf in jax.tree.leaves(trees))
    return tuple(sorted(frozenset().union(*names)))


def vary(tree: Any, names: Sequence[str]) -> Any:
    """Mark all arrays as varying over these axes; nothing is sent."""

    def one(array: Any) -> Any:
        missing = tuple(name for name in names if name not in jax.typeof(array).mat.varying)
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(one, tree)


def vary_alike(arrays: Sequence[Any]) -> list[Any]:
    """Mark all arrays as varying where one does."""
    return vary(list(arrays), varying_axes(arrays))


def trace_anywhere(function: Callable[..., Any], *arguments: Any) -> ClosedJaxpr:
    """Make a program that `run_anywhere` computes with, whatever varies: its types do not say."""
    with config._check_vma(False):
        return jax.make_jaxpr(function)(*arguments)


def run_anywhere(program: Jaxpr, constants: Sequence[Any], *arguments: Any) -> list[Array]:
    """Compute a program of `trace_anywhere`; results vary over mesh axes where what they depend on does."""
    if not varying_axes(constants, arguments):
        return list(eval_jaxpr(program, constants, *arguments))
    values = dict(zip((*program.constvars, *program.invars), (*constants, *arguments), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in program.eqns:
        operands = vary_alike([read(atom) for atom in equation.invars])
        inner = equation.params.get("jaxpr")
        if equation.primitive.name in ("jit", "pjit") and inner is not None:
            results = run_anywhere(inner.jaxpr, inner.consts, *operands)
        else:
            parameters = equation.primitive.get_bind_params(equation.params)
            results = equation.primitive.bind(*operands, **parameters)
        several = equation.primitive.multiple_results
        values |= zip(equation.outvars, results if several else [results], strict=True)
    return [read(atom) for atom in program.outvars]
