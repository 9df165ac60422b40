"""The start of every generation: a model split for compiled programs, and prompts read into its cache."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.export import is_symbolic_dim

from regard.axes import Array
from regard.models.prompts import Request


class Structure:
    """A model without its arrays, static in compiled programs; hashed once, as that takes milliseconds."""

    def __init__(self, graph: Any, tree: Any):
        self.graph, self.tree, self._hash = graph, tree, hash(graph)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Structure) and (self.graph, self.tree) == (other.graph, other.tree)


def split_model(model: Any) -> tuple[Structure, list[Any]]:
    """Split a model into what programs are compiled for, and the arrays that they are called with."""
    graph, state = nnx.split(model)
    # A list of arrays is passed in microseconds, a tree of Flax's variables in a millisecond.
    arrays, tree = jax.tree.flatten(state)
    return Structure(graph, tree), arrays


def merge_model(structure: Structure, arrays: list[Any]) -> Any:
    """Merge a model from its parts, with dropout off."""
    model = nnx.merge(structure.graph, jax.tree.unflatten(structure.tree, arrays))
    model.eval()
    return model


def read_prompts(model: Any, request: Request) -> tuple[Array, Any]:
    """Read prompts; return the hidden state of each row's last token, `(batch, 1, M)`, and the cache."""
    start, counts = jnp.asarray(request.start), request.counts
    batch, size = start.shape
    capacity, chunk = request.capacity, request.chunk
    is_known = not is_symbolic_dim(chunk)
    if request.cache is not None:
        cache = request.cache.model
    elif request.source is None:
        # As many at once, or more where the length of prompts is symbolic.
        most = max(chunk, request.burst) if is_known else chunk + request.burst
        options = {"rewind": request.rewind, "dtype": request.cache_dtype}
        cache = model.start_cache(batch, capacity, chunk=most, **options)
    else:
        memory = model.encoder(jnp.asarray(request.source), lengths=request.source_lengths)
        options = {"source_lengths": request.source_lengths, "dtype": request.cache_dtype}
        cache = model.start_cache(memory, capacity, **options)
    counts = None if counts is None else jnp.asarray(counts)

    def read_chunk(carry: tuple[Any, Any], piece: tuple[Array, Any]) -> tuple[tuple[Any, Any], None]:
        (last, cache), (tokens, first) = carry, piece
        if counts is None:
            hidden, cache = model.read(tokens, cache)
            return (hidden[:, -1:], cache), None
        hidden, cache = model.read(tokens, cache, jnp.clip(counts - first, 0, chunk))
        places = jnp.clip(counts - 1 - first, 0, hidden.shape[1] - 1)
        newest = jnp.take_along_axis(hidden, places[:, None, None], axis=1)
        ends_here = (counts > first)[:, None, None]
        return (newest if last is None else jnp.where(ends_here, newest, last), cache), None

    read, _ = read_chunk((None, cache), (start[:, :chunk], 0))
    if size == chunk:
        return read
    pieces = jnp.swapaxes(start[:, chunk:].reshape((batch, -1, chunk)), 0, 1)
    firsts = jnp.arange(chunk, size, chunk, dtype=jnp.int32)
    return jax.lax.scan(read_chunk, read, (pieces, firsts))[0]
