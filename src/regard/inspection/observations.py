"""Observations: numbers of a function's attention calls, returned beside its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive
from jax.interpreters import ad, batching, mlir

from regard import readouts
from regard.arguments import check_kind
from regard.axes import Array
from regard.engine.call.canonicalization import AUX
from regard.engine.call.hooks import Finish, rewrite
from regard.engine.call.problem import Problem
from regard.inspection.traces.calls import options

Measure = Callable[[Problem, Array], Any]
STATISTICS = (*AUX, "readout")
Found = list[tuple[Any, list[Any]]]  # of each call, the tree of its numbers and its leaves

# The output of a call, as it is, with numbers that `_evaluate` takes out: so they stay where the output does.
_tag = Primitive("attention_observation")
_tag.def_impl(lambda output, *numbers, **about: output)
_tag.def_abstract_eval(lambda output, *numbers, **about: output)
mlir.register_lowering(_tag, mlir.lower_fun(lambda output, *numbers, **about: output, multiple_results=False))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **about: Any) -> tuple[Any, Any]:
    return _tag.bind(*primals, **about), ad.instantiate_zeros(tangents[0])


def _batch(operands: Sequence[Any], axes: Sequence[Any], **about: Any) -> tuple[Any, int]:
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    return _tag.bind(*moved, **about), 0


ad.primitive_jvps[_tag] = _jvp
batching.primitive_batchers[_tag] = _batch


def observe(
    fn: Callable[..., Any], measure: Measure | Sequence[str] = ("lse", "entropy", "max_score")
) -> Callable[..., Any]:
    """Return a function that gives fn's result and numbers of every call of `attend` that it made.

    result, numbers = `observe(fn)(*args)`,  numbers = (measure(call_0), measure(call_1), ...)

    The numbers are a pytree like any other, so that it works inside `jit`, `vmap` and `grad`, and what it
    calls may be jitted, rematerialized (`jax.checkpoint`), mapped (`vmap`) or a loop (`lax.scan`): a call in
    a loop has one entry, whose arrays have the loop's steps as their first axis.

    Args:
        fn: any function of arrays; what is no array among its arguments, such as a model, goes through.
        measure: names of statistics, which give a dict of each call, or a function of a call, as (problem,
            output), to a pytree of arrays: `problem.query`, `.key`, `.value` and what else `attend` was
            given. Names are those of `attend(..., aux=)`, from the backend that runs, for little more than
            the call alone; one that lacks a statistic, as cuDNN does all but lse, makes way for another.
            "readout" is that of `readouts.read`, with the backend's lse: a model runs three times as long.

    Returns:
        A function of the same arguments, that returns a pair.

    Raises:
        ValueError: an unknown statistic. When it is called: a call inside `lax.while_loop`, `shard_map` or
            a function with derivatives of its own, or in one branch of `lax.cond` alone.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from regard import attend, inspection, masks
        >>> @jax.jit
        ... def run(x):
        ...     step = lambda x, _: (attend(x, x, x, mask=masks.causal()), None)
        ...     return jax.lax.scan(step, x, None, length=3)[0]
        >>> out, (statistics,) = inspection.observe(run)(jnp.eye(4))
        >>> out.shape, statistics["entropy"].shape
        ((4, 4), (3, 4))
    """
    is_named = not callable(measure)
    if is_named and (isinstance(measure, str) or not measure or not {*measure} <= {*STATISTICS}):
        expected = f"a function, or names among {', '.join(STATISTICS)}"
        raise ValueError(f"measure: expected {expected}; got {measure!r}")
    names = tuple(measure) if is_named else ()
    asked = tuple(dict.fromkeys("lse" if name == "readout" else name for name in names))

    def run(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        key = object()  # tells this observation's tags from those of others

        def rewriter(problem: Problem) -> tuple[Problem, Finish]:
            def finish(output: Array, extra: Any) -> Array:
                if callable(measure):
                    values = measure(problem.with_arrays(), output)
                else:
                    values = {name: extra[name] if name in extra else _read(problem, extra) for name in names}
                numbers, tree = jax.tree.flatten(jax.lax.stop_gradient(values))
                return _tag.bind(output, *map(jnp.asarray, numbers), key=key, tree=tree)

            more = tuple(name for name in asked if name not in problem.aux)
            return (dataclasses.replace(problem, aux=problem.aux + more) if more else problem), finish

        call, arrays = close_over(fn, args, kwargs)
        with rewrite(rewriter, one_by_one=False):
            traced, shape = jax.make_jaxpr(call, return_shape=True)(arrays)
        outputs, observed = _evaluate(traced, arrays, key)
        numbers = tuple(jax.tree.unflatten(tree, leaves) for tree, leaves in observed)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs), numbers

    return run


def close_over(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[list[Any]], Any], list[Any]]:
    """Return fn as a function of the arrays among its arguments, and those arrays."""
    check_kind("fn", fn, Callable)
    leaves, tree = jax.tree.flatten((args, kwargs))
    indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

    def call(arrays: list[Any]) -> Any:
        filled = dict(zip(indices, arrays, strict=True))
        mine = [filled.get(index, leaf) for index, leaf in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(tree, mine)
        return fn(*args, **kwargs)

    return call, [leaves[index] for index in indices]


def _read(problem: Problem, extra: dict[str, Array]) -> readouts.Readout:
    problem = problem.with_arrays()
    return readouts.read(problem.query, problem.key, lse=extra["lse"], **options(problem))


def _evaluate(closed: Any, operands: Sequence[Any], key: object) -> tuple[list[Any], Found]:
    """Evaluate a program, and take out what is tagged with the key."""
    jaxpr, observed = closed.jaxpr, []
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *operands), strict=True))

    def value_of(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [value_of(atom) for atom in equation.invars]
        if equation.primitive is _tag and equation.params["key"] is key:
            outputs, more = inputs[:1], [(equation.params["tree"], inputs[1:])]
        elif _is_tagged(equation.params, key) and not equation.params.get("differentiated"):
            outputs, more = _evaluate_inner(equation, inputs, key)
        else:
            params = equation.primitive.get_bind_params(equation.params)
            with equation.ctx.manager:
                outputs, more = equation.primitive.bind(*inputs, **params), []
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        observed += more
        values.update(zip(equation.outvars, outputs, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars], observed


def _evaluate_inner(equation: Any, inputs: list[Any], key: object) -> tuple[list[Any], Found]:
    """Evaluate an equation whose program has tags, as one that returns what they hold."""
    name, params, trees = equation.primitive.name, equation.params, []

    def run(closed: Any, *operands: Any) -> tuple[list[Any], list[list[Any]]]:
        outputs, observed = _evaluate(closed, operands, key)
        trees.append([tree for tree, _ in observed])
        return outputs, [leaves for _, leaves in observed]

    if name in ("jit", "pjit", "closed_call"):
        outputs, leaves = run(params.get("jaxpr", params.get("call_jaxpr")), *inputs)
    elif name in ("checkpoint", "remat", "remat2"):
        settings = {name: params[name] for name in ("policy", "prevent_cse")}
        again = jax.checkpoint(lambda *operands: run(ClosedJaxpr(params["jaxpr"], []), *operands), **settings)
        outputs, leaves = again(*inputs)
    elif name == "scan":
        if "ft_in" in params:  # jax 0.12
            consts, start, xs = map(list, params["ft_in"].update(inputs).unpack())
        else:
            ends = params["num_consts"], params["num_consts"] + params["num_carry"]
            consts, start, xs = inputs[: ends[0]], inputs[ends[0] : ends[1]], inputs[ends[1] :]

        def body(carried: list[Any], xs: list[Any]) -> tuple[list[Any], Any]:
            outputs, leaves = run(params["jaxpr"], *consts, *carried, *xs)
            return outputs[: len(start)], (outputs[len(start) :], leaves)

        settings = {name: params[name] for name in ("length", "reverse", "unroll")}
        last, (stacked, leaves) = jax.lax.scan(body, start, xs, **settings)
        outputs = [*last, *stacked]
    elif name == "cond" and all(_is_tagged({"branch": branch}, key) for branch in params["branches"]):
        branches = [lambda *operands, branch=branch: run(branch, *operands) for branch in params["branches"]]
        outputs, leaves = jax.lax.switch(inputs[0], branches, *inputs[1:])
    else:
        raise ValueError(
            "observe: expected calls of attend in jit, scan, vmap, grad, checkpoint or every branch of cond,"
            f" got one inside {name}, which cannot return what was observed; observe the function inside it"
        )
    return outputs, list(zip(trees[0], leaves, strict=True))


def _is_tagged(params: dict[str, Any], key: object) -> bool:
    """Return whether a program among the parameters of an equation holds a tag with the key."""
    for param in params.values():
        for candidate in param if isinstance(param, tuple | list) else (param,):
            jaxpr = candidate.jaxpr if isinstance(candidate, ClosedJaxpr) else candidate
            if isinstance(jaxpr, Jaxpr) and any(
                (inner.primitive is _tag and inner.params["key"] is key) or _is_tagged(inner.params, key)
                for inner in jaxpr.eqns
            ):
                return True
    return False
