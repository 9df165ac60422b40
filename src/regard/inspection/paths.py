"""Paths: what flows from token to token, over the layers, towards one prediction."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import integers, whole_number
from regard.axes import Array, ArrayLike
from regard.engine.call.hooks import CallEvent, Finish, rewrite, watch
from regard.engine.call.problem import Problem
from regard.inspection.contributions import check_decoder
from regard.inspection.layer_predictions import find_directions
from regard.readouts.reading import weigh

if TYPE_CHECKING:
    from regard.models import Decoder

MOST_CELLS = 2**22  # weights that are formed at once


@dataclass(frozen=True)
class Edge:
    """Hold what one head passes from a key to a query, towards a logit.

    Example:
        >>> from regard.inspection import Edge
        >>> Edge(call=1, head=0, query=3, key=2, total=0.5, direct=0.25).total
        0.5
    """

    call: int
    """Number of the layer's call of `attend`."""
    head: int
    """Number of the head."""
    query: int
    """The position that reads."""
    key: int
    """The position that is read."""
    total: float
    """Its part of the logit by all ways to it, to first order."""
    direct: float
    """Its part by no other layer, exactly: 0 but at the query that predicts; NaN where a norm or an
    output gate follows heads, in all layers if in one."""


@dataclass(frozen=True)
class Paths:
    """The largest edges to one prediction, and those of them that are connected to it.

    Example:
        >>> from regard.inspection import Edge, Paths
        >>> edges = (Edge(1, 0, 3, 2, 0.5, 0.25), Edge(0, 1, 2, 0, 0.3, 0.0), Edge(0, 0, 1, 0, 0.2, 0.0))
        >>> paths = Paths(query=3, target=7, logit=1.5, edges=edges)
        >>> [edge.key for edge in paths.connected(0.1)]
        [2, 0]
    """

    query: int
    """The position that predicts."""
    target: int
    """The token whose logit it is."""
    logit: float
    edges: tuple[Edge, ...]
    """Those of largest total, of either sign, largest first."""

    def connected(self, threshold: float = 0.05, most: int = 1000) -> tuple[Edge, ...]:
        """Return the edges from which others lead on to the prediction, last layers first.

        threshold: the part of the largest total that an edge must have; most: how many edges are looked at.
        """
        least = threshold * max((abs(edge.total) for edge in self.edges), default=0.0)
        reached, edges = {self.query}, []
        large = [edge for edge in self.edges[:most] if abs(edge.total) >= least]
        for number in sorted({edge.call for edge in large}, reverse=True):
            # The edges of one layer do not lead into each other.
            layer = [edge for edge in large if edge.call == number and edge.query in reached]
            edges += layer
            reached |= {edge.key for edge in layer}
        return tuple(edges)

    def __str__(self) -> str:
        title = f"logit {self.logit:.3f} of token {self.target} behind position {self.query}"
        row = "{0.total:+8.3f} {0.direct:+8.3f}  call {0.call} head {0.head}, query {0.query}, key {0.key}"
        return "\n".join([f"{title}: in all, directly", *(row.format(edge) for edge in self.edges[:12])])


def trace_paths(
    model: Decoder,
    tokens: ArrayLike,
    *,
    query: int = -1,
    target: int | None = None,
    count: int = 256,
    **options: Any,
) -> Paths:
    """Attribute one logit to what every head passes from token to token (attribution by edge).

    total_lhts = p_lhts v_lgs . d logit / d output_lht,  direct_lhts = [t = query] p_lhts v_lgs Wo_lh . u

    The derivative takes in all that later layers make of a head's output, but to first order alone: an edge
    that were cut changes the logit by about its total. The direct part is exact: u is the target's column of
    the matrix that makes logits behind the final norm, whose size is held. It is NaN where a norm follows
    heads ("post" or "both"), or a layer gates their output (`output_gate`, as in Qwen3.5 and Qwen3-Next).
    Memory is linear in T.

    Args:
        model, tokens, **options: as in `decompose_score`.
        query: the position behind which the token is predicted; negative ones count from the end.
        target: the token whose logit is attributed; None means the likeliest.
        count: how many edges are kept, those of largest total.

    Returns:
        The edges, of which `connected` finds those that lead to the prediction.

    Raises:
        TypeError: a model of another kind, numbers that are none.
        ValueError: tokens of several rows; a position or token that there is not.

    Example:
        >>> from flax import nnx
        >>> from regard import inspection, models
        >>> config = models.TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=2, vocab_size=13)
        >>> paths = inspection.trace_paths(models.Decoder(config, rngs=nnx.Rngs(0)), [1, 2, 3])
        >>> len(paths.edges), paths.query
        (27, 2)

    Reference: Syed et al., "Attribution Patching Outperforms Automated Circuit Discovery", 2023; Ferrando
    and Voita, "Information Flow Routes", 2024.
    """
    from flax import nnx

    from regard.models.padding import check_range

    check_decoder(model)
    ids = jnp.atleast_2d(integers("tokens", tokens))
    if ids.shape[0] != 1 or not ids.size:
        raise ValueError(f"tokens: expected those of one row, (T,) or (1, T), got shape {ids.shape}")
    row = whole_number("query", query, -ids.shape[1]) % ids.shape[1]
    if query >= ids.shape[1]:
        raise ValueError(f"query: expected a position below {ids.shape[1]}, got {query}")
    wanted = -1 if target is None else np.asarray(integers("target", target))
    if target is not None:
        last = (model.config.vocab_size or 1) - 1
        check_range("target", "tokens", wanted, last, f"vocab_size={last + 1}")
    graph, state = nnx.split(model)
    return trace_padded(graph, state, ids, row, wanted, whole_number("count", count, 1), **options)


def trace_padded(
    graph: Any, state: Any, ids: ArrayLike, query: int, target: Any = -1, count: int = 256, **options: Any
) -> Paths:
    """Trace the paths of a row that may have padding behind it; a target of -1 is the likeliest token."""
    reading = _read_edges(graph, state, ids, query, target, options, count=count)
    token, logit, calls = jax.device_get(reading)
    edges = [
        Edge(number, head, row, key, total, part)
        for number, arrays in enumerate(calls)
        for total, part, (head, row, key) in zip(*(array.tolist() for array in arrays), strict=True)
        if total
    ]
    edges.sort(key=lambda edge: -abs(edge.total))
    return Paths(query, int(token), float(logit), tuple(edges[:count]))


@functools.partial(jax.jit, static_argnames=("graph", "count"))
def _read_edges(
    graph: Any, state: Any, ids: Array, query: Any, target: Any, options: dict[str, Any], *, count: int
) -> tuple[Array, Array, list[tuple[Array, Array, Array]]]:
    """Find the token, its logit behind a position, and the largest edges to it.

    Of each call these are totals, direct parts and cells (head, query, key).
    """
    from flax import nnx

    model = nnx.merge(graph, state)
    outputs: list[Any] = []

    def run(added: Sequence[Array] | None) -> tuple[Array, Any]:
        calls: list[tuple[Problem, Array]] = []
        events: list[CallEvent] = []
        with rewrite(_add_to_outputs(calls, added)), watch(events.append, reads=True):
            hidden, seen = model.trunk(ids, aux=("hidden",), **options)
        outputs[:] = [event.output for event in events]
        logits = model.predict(hidden[0, query][None])[0]
        token = jnp.where(target < 0, jnp.argmax(logits), target)
        # That of the final norm, whose size is held for the direct parts.
        direction = None
        if model.config.norm == "pre" and all(event.projection is not None for event in events):
            stream = seen["blocks"][-1]["hidden"][0, query]
            wide = jnp.promote_types(stream.dtype, jnp.float32)
            direction = find_directions(model, stream[None].astype(wide), token[None])[0]
        maps = [event.projection and event.projection.kernel[...] for event in events]
        return logits[token], (token, calls, maps, direction)

    jax.eval_shape(run, None)
    zeros = [jnp.zeros(output.shape, output.dtype) for output in outputs]
    edges = []
    with jax.default_matmul_precision("highest"):
        (logit, (token, calls, maps, direction)), cotangents = jax.value_and_grad(run, has_aux=True)(zeros)
        for (problem, lse), kernel, cotangent in zip(calls, maps, cotangents, strict=True):
            wide = problem.accumulation
            straight = jnp.full((problem.leading[-1], problem.E), jnp.nan, wide)
            if direction is not None:
                straight = (kernel.astype(wide) @ direction.astype(wide)).reshape(straight.shape)
            edges.append(_find_largest(problem, lse, cotangent[0].astype(wide), straight, query, count))
    return token, logit, edges


def _add_to_outputs(calls: list[tuple[Problem, Array]], added: Sequence[Array] | None) -> Any:
    """Keep the calls with their lse, and add an array to the output of each."""

    def change(problem: Problem) -> tuple[Problem, Finish]:
        number = len(calls)

        def finish(output: Array, extra: Any) -> Array:
            calls.append((problem.with_arrays(), extra["lse"]))
            return output if added is None else output + added[number]

        return replace(problem, aux=(*problem.aux, "lse")), finish

    return change


def _find_largest(
    problem: Problem, lse: Array, cotangent: Array, straight: Array, query: Any, count: int
) -> tuple[Array, Array, Array]:
    """Return the largest edges of one call: totals, direct parts and cells, (C,), (C,) and (C, 3)."""
    heads, keys = problem.leading[-1], problem.S
    value = problem.with_heads(problem.value)[0].astype(problem.accumulation)
    value = jnp.repeat(value, heads // value.shape[0], 0)
    direct = jnp.einsum("hse,he->hs", value, straight)
    size = max(1, min(problem.T, MOST_CELLS // (heads * keys)))
    all_heads, all_keys = jnp.arange(heads), jnp.arange(keys)

    def read(start: Array) -> tuple[Array, Array, Array]:
        rows = start + jnp.arange(size)
        at = jnp.minimum(rows, problem.T - 1)
        weights = weigh(problem, lse, at, all_keys, all_heads)[0]
        totals = jnp.einsum("hre,hse->hrs", jnp.take(cotangent, at, 1), value)
        # A value that nobody attends to may be no number.
        totals = jnp.where((weights > 0) & (rows < problem.T)[None, :, None], weights * totals, 0).ravel()
        most = jax.lax.top_k(jnp.abs(totals), min(count, totals.size))[1]
        head, row, key = jnp.unravel_index(most, weights.shape)
        parts = jnp.where(at[row] == query, weights[head, row, key] * direct[head, key], 0)
        return totals[most], parts, jnp.stack([head, at[row], key], -1)

    blocks = jax.lax.map(read, jnp.arange(0, problem.T, size))
    joined = [array.reshape((-1, *array.shape[2:])) for array in blocks]
    most = jax.lax.top_k(jnp.abs(joined[0]), min(count, joined[0].size))[1]
    return joined[0][most], joined[1][most], joined[2][most]
