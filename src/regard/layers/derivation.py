"""Derivation of one call of a multi-head layer, step by step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from regard.axes import Array, ArrayLike
from regard.derivation import Derivation, Step
from regard.derivation.course import Course
from regard.derivation.deriving import assemble, check_known, check_size, name_axes
from regard.derivation.letters import spell
from regard.engine.call.canonicalization import check_chosen_rows
from regard.engine.call.hooks import CallEvent, watch
from regard.formulas import Formula, Function, Row, Sum, Symbol, product
from regard.layers.heads import merge_heads
from regard.layers.multi_head import Memory, MultiHeadAttention, project_memory
from regard.layers.projections import FEATURES, Line
from regard.scores.bilinear_forms import Bilinear
from regard.scores.score import compose, split_product


def derive(
    layer: nnx.Module,
    query: ArrayLike,
    key: ArrayLike | Memory | None = None,
    value: ArrayLike | None = None,
    *,
    rows: ArrayLike | Sequence[int] | None = None,
    heads: ArrayLike | Sequence[int] | None = None,
    **options: Any,
) -> Derivation:
    """Derive one call of a multi-head layer step by step, with a tensor for each projection.

    Q^{hia} = sum_c X^{ic} W_Q^{hca} + b_Q^{ha},  K and V likewise,  norms and rotary turns,  attention
    Output^{ic} = sum_h C^{hic} + b_O^{c},  C^{hic} = sum_b O^{hib} W_O^{hbc}

    The layer is called once, with the arguments given, and the attention derived is that of its call. Heads
    are not joined side by side: the sum over them is what joining and projecting computes.

    Args:
        layer: the `MultiHeadAttention` to be called. Where its dropout is on, the call draws from its stream.
        query, key, value: as in a call of the layer.
        rows: which rows of the query to derive; None means all, of at most about a million scores.
        heads: which query heads to derive; None means all. The output is that of all heads either way.
        **options: all others of a call of the layer, but for aux, cache and counts.

    Returns:
        A `regard.derivation.Derivation`, whose last step is the layer's output at the rows.

    Raises:
        TypeError: as the layer does; another layer; inside `jax.jit`, where there are no numbers.
        ValueError: as the layer does; more scores than can be written out, and no rows chosen.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard import layers, positions
        >>> rotary = positions.Rotary()
        >>> layer = layers.MultiHeadAttention(6, num_heads=3, rotary=rotary, rngs=nnx.Rngs(0))
        >>> derivation = layers.derive(layer, jnp.ones((5, 6)))
        >>> for name in ("projected_query", "query", "contributions", "output"):
        ...     print(derivation[name].expression, derivation[name].shape)
        Q_0^{hia} = sum_c X^{ic} W_Q^{hca} + b_Q^{ha} (3, 5, 2)
        Q^{hia} = turn(Q_0^{hia}, p^{i}) (3, 5, 2)
        C^{hic} = sum_b O^{hib} W_O^{hbc} (3, 5, 6)
        Y^{ic} = sum_h C^{hic} + b_O^{c} (5, 6)

    Reference: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2.
    """
    if not isinstance(layer, MultiHeadAttention):
        raise TypeError(
            f"layer: expected a MultiHeadAttention, got {type(layer).__name__}; of a block or a model,"
            " pass its attention layer"
        )
    if layer.gate_projection is not None:
        raise ValueError("layer: expected one without output_gate, which is not derived; got one with")
    if strange := options.keys() & {"aux", "cache", "counts"}:
        raise TypeError(
            f"{min(strange)}: expected none, as a derivation is of a call without it; leave it out"
        )
    check_known((query, key, value, options, rows, heads, nnx.state(layer, nnx.Param)))
    seen: list[CallEvent] = []
    with watch(seen.append):
        output = layer(query, key, value, **options)
    problem = seen[-1].problem
    rows = check_chosen_rows("rows", rows, problem.T, ("weights",))
    heads = check_chosen_rows("heads", heads, problem.leading[-1], ("weights",))
    problem = dataclasses.replace(problem, rows=rows, heads=heads)
    check_size(problem)
    metric, _ = split_product(compose(options.get("score")))
    width = layer.head_dim
    sizes = {"c": layer.d_model, "d": layer.memory_width, "e": width, "f": layer.num_heads * width}
    notation = name_axes(problem, **sizes)
    alone = output.ndim == 2
    if alone:
        notation = dataclasses.replace(notation, leading=("", *notation.leading[1:]))
    course = Course(problem, notation)
    _enter(course, layer, _spread(query, key, value), metric)
    course.walk("heads")
    _leave(course, layer, output)
    if alone:
        course.steps = [_without_batch(step) for step in course.steps]
    return assemble(course, "Multi-head attention")


def _spread(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any, Memory | None]:
    """Return the inputs with the layer's number of axes, and a memory projected before."""
    memory = key if isinstance(key, Memory) else None
    arrays = [None if x is None or x is memory else jnp.asarray(x) for x in (query, key, value)]
    rank = max(3 if memory is None else memory.key.ndim - 1, *(x.ndim for x in arrays if x is not None))
    inputs = [None if x is None else jax.lax.broadcast_to_rank(x, rank) for x in arrays]
    return inputs[0], inputs[1], inputs[2], memory


def _without_batch(step: Step) -> Step:
    """Return the step without the batch of one that an unbatched example runs in."""
    if not step.indices or step.indices[0] != "" or step.value.ndim != len(step.indices):
        return step
    return dataclasses.replace(step, value=step.value[0], indices=step.indices[1:])


def _enter(course: Course, layer: MultiHeadAttention, inputs: Any, metric: Bilinear | None) -> None:
    """Derive query, key and value from the inputs."""
    problem, (query, key, value, memory) = course.problem, inputs
    grid = problem.grid()
    words = "What the layer is given: a row of features for each position."
    asking = _give_input(course, "hidden", "X", "ic", query, words)
    if layer.rotary is not None:
        course.add_positions()
    line = Line(course, "query", "Q", "i", "a" if metric is None else "e")
    line.project(layer.query_projection, nnx.Linear.__call__, asking, query, layer.num_heads)
    line.adjust(layer.query_norm, layer.rotary, grid.query_position[..., 0])
    if metric is not None:
        line.measure(metric, problem.query)
    line.finish(problem.query)

    read, array, apply = Symbol("X", asking.indices.replace("i", "j")), query, nnx.Linear.__call__
    if key is not None:
        words = "What is read: a row of features for each position of the memory."
        read = _give_input(course, "memory", "Y", "jd", key, words)
        array, apply = key, project_memory

    def begin(line: Line, projection: nnx.Linear, read: Symbol, array: Any) -> Line:
        if memory is None:
            line.project(projection, apply, read, array, layer.num_key_heads)
        else:
            line.begin(getattr(memory, line.name))
        return line

    line = begin(Line(course, "key", "K", "j", "a"), layer.key_projection, read, array)
    norm = layer.key_norm if memory is None else None
    line.adjust(norm, layer.rotary, grid.key_position[..., 0, :])
    line.finish(problem.key)
    if value is not None:
        words = "What the values are made of, in place of the memory."
        read, array = _give_input(course, "value_memory", "Z", "jd", value, words), value
    line = begin(Line(course, "value", "V", "j", "b"), layer.value_projection, read, array)
    line.finish(problem.value)


def _leave(course: Course, layer: MultiHeadAttention, output: Array) -> None:
    """Derive the output from the heads."""
    problem, notation = course.problem, course.notation
    outer = dataclasses.replace(notation, leading=notation.leading[:-1])
    step = course.steps[-1]
    heads, joined = Symbol("O", "".join(step.indices)), merge_heads(step.value)
    chosen = output if problem.rows is None else jnp.take(output, problem.rows, -2)
    if layer.output_projection is None:
        sides = Function("join", (heads,))
        words = "The heads side by side: what the layer returns without an output projection."
        value = joined if problem.heads is None else chosen
        names = outer.name((*problem.leading[:-1], problem.T, layer.num_heads * layer.head_dim), "if")
        names = names[len(names) - value.ndim :]
        course.add("output", Symbol("Y"), sides, words, FEATURES, value, names)
        return
    linear = layer.output_projection
    names, words = ("h", "b", "c"), "How each head writes into the features of the layer."
    kernel = linear.kernel[...].reshape((layer.num_heads, layer.head_dim, layer.d_model))
    kernel = course.pick(kernel, names)
    weight = course.add("output_weight", Symbol("W", below="O"), None, words, "", kernel, names)
    names = notation.name((*problem.leading, problem.T, layer.d_model), "ic")
    parts = jnp.einsum("...ib,...bc->...ic", step.value, kernel.astype(step.value.dtype))
    right: Formula = Sum("b", product(heads, weight))
    words, subscripts = "What each head contributes to the output.", f"{heads.indices},hbc->{spell(names)}"
    share = course.add("contributions", Symbol("C"), right, words, FEATURES, parts, names, subscripts)
    names = outer.name((*problem.leading[:-1], problem.T, layer.d_model), "ic")
    right = Sum("h", share)
    if linear.bias is not None:
        words, symbol = "Added whatever is read.", Symbol("b", below="O")
        bias = course.add("output_bias", symbol, None, words, "", linear.bias[...], ("c",))
        right = Row((right, bias), "+")
    value, words = chosen, "All heads together, those not derived included."
    if problem.heads is None:
        value, words = linear(joined), "All heads together."
        value = value[0] if value.ndim > output.ndim else value
    names = names[len(names) - value.ndim :]  # an example alone has none for the batch
    subscripts = f"{share.indices}->{spell(names)}"
    course.add("output", Symbol("Y"), right, words, FEATURES, value, names, subscripts)


def _give_input(course: Course, name: str, letter: str, tail: str, array: Array, words: str) -> Symbol:
    outer = dataclasses.replace(course.notation, leading=course.notation.leading[:-1])
    names = outer.name(array.shape, tail)
    return course.add(name, Symbol(letter), None, words, FEATURES, course.pick(array, names), names)
