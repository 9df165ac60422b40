"""What every way of writing begins with: the model as compiled programs take it, and the prompts read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from regard.axes import Array
from regard.models.prompts import Request


class Structure:
    """A model without its arrays, as compiled programs know it; hashed once, which takes milliseconds."""

    def __init__(self, graph: Any, tree: Any):
        self.graph, self.tree, self._hash = graph, tree, hash(graph)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Structure) and (self.graph, self.tree) == (other.graph, other.tree)


def take_apart(model: Any) -> tuple[Structure, list[Any]]:
    """What programs are compiled for, and the arrays they are called with."""
    graph, state = nnx.split(model)
    # A list of arrays is passed in microseconds, a tree of Flax's variables in a millisecond.
    arrays, tree = jax.tree.flatten(state)
    return Structure(graph, tree), arrays


def put_together(structure: Structure, arrays: list[Any]) -> Any:
    """The model from its parts, with dropout off."""
    model = nnx.merge(structure.graph, jax.tree.unflatten(structure.tree, arrays))
    model.eval()
    return model


def read_prompts(model: Any, request: Request) -> tuple[Array, Any]:
    """The hidden state of each row's last prompt token, `(batch, 1, M)`, and the cache behind it."""
    start, counts = jnp.asarray(request.start), request.counts
    batch, size = start.shape
    capacity, chunk = request.capacity, request.chunk
    if request.source is None:
        cache = model.start_cache(batch, capacity, chunk=chunk)
    else:
        memory = model.encoder(jnp.asarray(request.source), lengths=request.source_lengths)
        cache = model.start_cache(memory, capacity, source_lengths=request.source_lengths)
    if counts is None:
        hidden, cache = model.read(start[:, :chunk], cache)
    else:
        counts = jnp.asarray(counts)
        hidden, cache = model.read(start[:, :chunk], cache, jnp.minimum(counts, chunk))
    last = hidden[:, -1:] if counts is None else _pick(hidden, counts - 1)
    if size == chunk:
        return last, cache

    def read_chunk(carry: tuple[Array, Any], piece: tuple[Array, Array]) -> tuple[tuple[Array, Any], None]:
        (last, cache), (tokens, first) = carry, piece
        if counts is None:
            hidden, cache = model.read(tokens, cache)
            return (hidden[:, -1:], cache), None
        hidden, cache = model.read(tokens, cache, jnp.clip(counts - first, 0, chunk))
        ends_here = (counts > first)[:, None, None]
        return (jnp.where(ends_here, _pick(hidden, counts - 1 - first), last), cache), None

    pieces = jnp.swapaxes(start[:, chunk:].reshape((batch, -1, chunk)), 0, 1)
    firsts = jnp.arange(chunk, size, chunk, dtype=jnp.int32)
    return jax.lax.scan(read_chunk, (last, cache), (pieces, firsts))[0]


def _pick(hidden: Array, places: Array) -> Array:
    """One position per row, `(batch, 1, M)`; places outside are moved inside."""
    places = jnp.clip(places, 0, hidden.shape[1] - 1)
    return jnp.take_along_axis(hidden, places[:, None, None], axis=1)
