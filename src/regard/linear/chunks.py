"""A sequence in chunks: matrix products within one, and a scan that hands the state to the next."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from regard.axes import Array, Size
from regard.linear.halving import decay_products, decay_weights, invert
from regard.linear.problem import FEATURE_MAPS, LinearConfig, LinearProblem


class Chunk(NamedTuple):
    """The rows of one chunk, or of all with a first axis of chunks."""

    query: Array | None  # (..., K, C, G, D)
    key: Array  # (..., K, C, D)
    value: Array  # (..., K, C, E)
    decay: Array | None  # (..., K, C, 1 or D)
    rate: Array | None  # (..., K, C, 1)
    valid: Array | None  # (..., K, C, 1)


class Carried(NamedTuple):
    """The state that a chunk hands to the next."""

    memory: Array  # (L, D, E)
    key_sum: Array | None  # (L, D)


@jax.jit
def run(problem: LinearProblem) -> tuple[Array, Carried]:
    """Compute the output and the state after the last row, with the axes of the call."""
    config = problem.config
    lines = partial(_join_lines, config)
    carried = _vary(Carried(*jax.tree.map(lines, (problem.memory, problem.key_sum))), problem)
    chunks = _cut(problem)
    advance = partial(_advance, config, problem.scale)
    if chunks.key.shape[0] == 1:
        carried, output = advance(carried, jax.tree.map(lambda array: array[0], chunks))
        output = jax.tree.map(lambda array: array[None], output)
    else:
        # A chunk is computed again for its gradient, so that only the states between chunks are kept.
        carried, output = jax.lax.scan(jax.checkpoint(advance, prevent_cse=False), carried, chunks)
    output = _read_all(problem, carried) if output is None else _mend(output, config)
    # In two steps, each of which explicitly divided axes survive.
    output = output.reshape((*config.batch, *output.shape[1:]))
    carried = jax.tree.map(lambda array: array.reshape((*config.batch, *array.shape[1:])), carried)
    return output.reshape((*config.leading, *output.shape[-2:])), carried


def _vary(carried: Carried, problem: LinearProblem) -> Carried:
    """Let a first state lie on the mesh as later ones do, in `shard_map` and on explicit axes."""
    # Sums of no numbers: zeros of which JAX knows what they depend on, and where they lie.
    leaves = [leaf for leaf in jax.tree.leaves(problem) if jnp.ndim(leaf)]
    zero: Any = sum(jnp.sum(leaf[..., :0].astype(problem.config.dtype)) for leaf in leaves)
    for array in (problem.key, problem.value):
        zero = zero + jnp.sum(_line_up(problem.config, array[..., :0, :]).astype(zero.dtype), (1, 2))
    return jax.tree.map(lambda array: array + jnp.expand_dims(zero, range(1, array.ndim)), carried)


def _cut(problem: LinearProblem) -> Chunk:
    config = problem.config
    length: Size = problem.key.shape[-2]
    size, valid = config.chunk, problem.valid
    count = -(-length // size)
    is_cut = is_symbolic_dim(length) or length % size != 0
    if is_cut and valid is None:
        valid = jnp.ones((*(1,) * (problem.key.ndim - 2), length, 1), bool)

    def cut(array: Array | None) -> Array | None:
        if array is None:
            return None
        if array.shape[-2] != length:  # one row for all
            array = jnp.broadcast_to(array, (*array.shape[:-2], length, array.shape[-1]))
        if is_cut:
            array = jnp.pad(array, [*[(0, 0)] * (array.ndim - 2), (0, count * size - length), (0, 0)])
        array = array.reshape((*array.shape[:-2], count, size, array.shape[-1]))
        return jnp.moveaxis(array, -3, 0)

    query = None
    if config.causal:
        *batch, heads, _, width = problem.query.shape
        query = problem.query.reshape((*batch, heads // config.group, config.group, length, width))
        query = jnp.swapaxes(cut(query), -2, -3)  # pyright: ignore
    return Chunk(query, *map(cut, (problem.key, problem.value, problem.decay, problem.rate, valid)))  # pyright: ignore


def _mend(output: Array, config: LinearConfig) -> Array:
    """Join chunks (N, L, C, G, E) to (L, G, T, E)."""
    count, lines, size, group, width = output.shape
    output = jnp.transpose(output, (1, 3, 0, 2, 4)).reshape((lines, group, count * size, width))
    return output[:, :, : config.num_queries]


def _advance(
    config: LinearConfig, scale: Array, carried: Carried, chunk: Chunk
) -> tuple[Carried, Array | None]:
    """Compute what the queries of one chunk read, and the state after it."""
    memory, key_sum = carried
    query, key, value, decay, rate = _prepare(config, chunk)
    # The delta rule reads what is stored under a key, as one more query would.
    rows = [] if query is None else [query * scale]
    rows += [] if rate is None else [key[:, :, None]]
    rows = jnp.concatenate(rows, 2) if rows else key[:, :, None][:, :, :0]
    products, until, after = _decay_rows(config, rows, key, decay)
    reaching, leaving, whole = rows, key, None
    if until is not None:
        reaching, leaving, whole = rows * until[:, :, None], key * after, until[:, -1]
    reads = _product(config, reaching, memory)

    written = value
    if rate is not None:
        # What a token writes lacks what is stored under its key by then, also by tokens of this chunk:
        # written = (1 + rate K K^T below the diagonal)^-1 rate (value - K memory).
        inverse = invert(rate * products[:, :, -1], config.precision)
        written = jnp.matmul(inverse, rate * (value - reads[:, :, -1]), precision=config.precision)
    output = None
    if chunk.query is not None:
        products = products[:, :, : config.group]
        output = reads[:, :, : config.group] + _product(config, products, written)
        if key_sum is not None:
            total = _product(config, reaching, key_sum[..., None]) + products.sum(-1, keepdims=True)
            output = _divide(output, total)
        output = output.astype(chunk.query.dtype)

    added = jnp.einsum("ncd,nce->nde", leaving, written, precision=config.precision)
    memory = added + (memory if whole is None else memory * whole[..., None])
    if key_sum is not None:
        key_sum = leaving.sum(1) + (key_sum if whole is None else key_sum * whole)
    return Carried(memory, key_sum), output


def _prepare(config: LinearConfig, chunk: Chunk) -> tuple[Any, Array, Array, Any, Any]:
    """Prepare the arrays of a chunk, so that tokens that are not valid read and change nothing."""
    valid = None if chunk.valid is None else _line_up(config, chunk.valid)

    def real(array: Array) -> Array:
        if valid is None:
            return array
        return jnp.where(valid if array.ndim == valid.ndim else valid[:, :, None], array, 0)

    def enter(array: Array | None) -> Any:
        return None if array is None else real(_line_up(config, array).astype(config.dtype))

    query, key, value, decay, rate = map(enter, chunk[:-1])
    if config.feature_map != "identity":
        # A feature map need not keep 0 at 0, so tokens that are not valid are zeroed again.
        feature_map = FEATURE_MAPS[config.feature_map]
        query, key = None if query is None else real(feature_map(query)), real(feature_map(key))
    return query, key, value, decay, rate


def _line_up(config: LinearConfig, array: Array) -> Array:
    """Spread over *B and K, which become one axis: matrix products of many batch axes fail on some CPUs."""
    return _join_lines(config, jnp.broadcast_to(array, (*config.batch, *array.shape[len(config.batch) :])))


def _join_lines(config: LinearConfig, array: Array) -> Array:
    return array.reshape((math.prod(config.batch), *array.shape[len(config.batch) :]))


def _decay_rows(config: LinearConfig, rows: Array, key: Array, decay: Array | None) -> tuple[Array, Any, Any]:
    """Multiply rows with the keys up to their own; find the decay from start and to end of the chunk."""
    if decay is not None and decay.shape[-1] > 1:
        return decay_products(rows, key, jnp.exp(decay), config.precision)
    products = _product(config, rows, jnp.swapaxes(key, -1, -2))
    if decay is None:
        row = jax.lax.broadcasted_iota(jnp.int32, products.shape, 1)
        column = jax.lax.broadcasted_iota(jnp.int32, products.shape, 3)
        return jnp.where(row >= column, products, 0), None, None
    weights, until, after = decay_weights(jnp.exp(decay))
    return products * weights, until, after


def _product(config: LinearConfig, rows: Array, matrix: Array) -> Array:
    """Multiply (L, C, R, X) by (L, X, Y), with the heads of a group as rows of one matrix."""
    folded = rows.reshape((rows.shape[0], rows.shape[1] * rows.shape[2], rows.shape[3]))
    product = jnp.matmul(folded, matrix, precision=config.precision)
    return product.reshape((*rows.shape[:3], matrix.shape[-1]))


def _divide(output: Array, total: Array) -> Array:
    """Divide the output by the sum of its weights; 0 where that is 0."""
    some = total != 0
    return jnp.where(some, output / jnp.where(some, total, 1), 0)


def _read_all(problem: LinearProblem, carried: Carried) -> Array:
    """Let every query read the last state: (L, G, T, E)."""
    config = problem.config
    *batch, heads, length, width = problem.query.shape
    query = problem.query.reshape((*batch, heads // config.group, config.group, length, width))
    query = _line_up(config, query).astype(config.dtype)
    query = FEATURE_MAPS[config.feature_map](query) * problem.scale
    output = _product(config, query, carried.memory)
    if carried.key_sum is not None:
        output = _divide(output, _product(config, query, carried.key_sum[..., None]))
    return output.astype(problem.query.dtype)
