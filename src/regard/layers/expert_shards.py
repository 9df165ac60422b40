"""Experts divided over devices: tokens travel to the kernels, which stay where they are."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from regard.axes import Array
from regard.engine.call.problem import accumulation_dtype
from regard.engine.dispatch.placement import ExpertAxes
from regard.manual_meshes import vary

# Maps the rows `(R, M)` of a tile by the parameters of one expert, with a key for its dropout.
Branch = Callable[[Any, Array, Any], Array]


class _Order(NamedTuple):
    """Choices of one device's experts, sorted by expert, in tiles of one expert each."""

    choices: Array  # their numbers, those of the device's experts first
    counts: Array  # of each expert
    starts: Array  # of each expert in `choices`
    ends: Array  # tiles of each expert and of those before it


def share_experts(
    axes: ExpertAxes, branch: Branch, params: Any, specs: Any, tokens: Array, routes: Any, key: Any
) -> Array:
    """Return the weighted sums of what experts give to the tokens `(G, N, M)` of each device.

    Tokens are gathered along the experts' axis, and sums go back to the devices that the tokens are of. A
    device computes as many tiles as the choices of its own experts fill. Nothing is kept but tokens: the
    backward pass computes each tile again, by a rule of its own, so that there is no forward mode.
    """
    travels = set(axes.experts) <= set(axes.tokens)
    every = tuple(dict.fromkeys((*axes.tokens, *axes.experts, *axes.widths)))
    shards = math.prod(axes.mesh.shape[axis] for axis in axes.experts)

    def compute(params: Any, tokens: Array, routes: tuple[Array, Array], key: Any) -> Array:
        arrays = vary([array.reshape((-1, array.shape[-1])) for array in (tokens, *routes)], every)
        if travels:
            arrays = [jax.lax.all_gather(array, axes.experts, tiled=True) for array in arrays]
        params, (tokens, weights, chosen) = vary(params, every), arrays
        own = jax.tree.leaves(params)[0].shape[0]
        # Half the mean: of an expert half a tile is empty on average, a quarter of its choices.
        size = -(-chosen.size // (2 * own * shards))
        order = _sort_choices(chosen.reshape(-1) - own * jax.lax.axis_index(axes.experts), own, size)
        key = None if key is None else jax.random.fold_in(key, jax.lax.axis_index(every))
        sums = _run_tiles(branch, size, params, tokens, weights, order, key)
        if travels:
            sums = jax.lax.psum_scatter(sums, axes.experts, tiled=True)
        rest = axes.widths if travels else (*axes.experts, *axes.widths)
        total: Any = jax.lax.psum(sums, rest) if rest else sums
        return total[None]

    rows = PartitionSpec(axes.tokens)
    specs = specs, rows, (rows, rows), PartitionSpec()
    return jax.shard_map(compute, mesh=axes.mesh, in_specs=specs, out_specs=rows)(params, tokens, routes, key)


def _sort_choices(experts: Array, own: int, size: int) -> _Order:
    """Sort choices of experts, of which this device has the numbers from 0 on, and count their tiles."""
    experts = jnp.where((experts >= 0) & (experts < own), experts, own)
    counts = jnp.bincount(experts, length=own + 1)[:own].astype(experts.dtype)
    return _Order(jnp.argsort(experts), counts, jnp.cumsum(counts) - counts, jnp.cumsum(-(-counts // size)))


def _take_tile(order: _Order, tile: Array, size: int, per_token: int) -> tuple[Array, Array, Array]:
    """Return a tile's expert, and the tokens and choices that its rows are of: beyond all in empty ones."""
    expert = jnp.searchsorted(order.ends, tile, side="right").astype(tile.dtype)
    first = order.ends[expert] - -(-order.counts[expert] // size)
    rows = jnp.arange(size, dtype=tile.dtype)
    ranks = (tile - first) * size + rows
    choices = order.choices.at[order.starts[expert] + ranks].get(mode="clip").astype(tile.dtype)
    # Each another number, lest sums be a race.
    beyond = len(order.choices) + rows
    is_row = ranks < order.counts[expert]
    return expert, jnp.where(is_row, choices // per_token, beyond), jnp.where(is_row, choices, beyond)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run_tiles(
    branch: Branch, size: int, params: Any, tokens: Array, weights: Array, order: _Order, key: Any
) -> Array:
    """Return for all tokens the weighted sums of what this device's experts give."""

    def add(tile: Array, sums: Array) -> Array:
        expert, rows, choices = _take_tile(order, tile, size, weights.shape[1])
        outputs = _compute_tile(
            branch, key, tile, *_read_tile(expert, rows, choices, params, tokens, weights)
        )
        return _add_rows(sums, rows, outputs)

    sums = jnp.zeros_like(tokens, accumulation_dtype(tokens))
    return jax.lax.fori_loop(0, order.ends[-1], add, sums).astype(tokens.dtype)


def _compute_tile(branch: Branch, key: Any, tile: Array, params: Any, tokens: Array, weights: Array) -> Array:
    outputs = branch(params, tokens, None if key is None else jax.random.fold_in(key, tile))
    return weights.astype(outputs.dtype)[:, None] * outputs


def _read_tile(
    expert: Array, rows: Array, choices: Array, params: Any, tokens: Array, weights: Array
) -> tuple[Any, Array, Array]:
    params = jax.tree.map(lambda leaf: leaf[expert], params)
    return params, _read_rows(tokens, rows), _read_rows(weights.reshape(-1), choices)


def _read_rows(array: Array, rows: Array) -> Array:
    return array.at[rows].get(mode="fill", fill_value=0, unique_indices=True)


def _add_rows(sums: Array, rows: Array, array: Array) -> Array:
    return sums.at[rows].add(array.astype(sums.dtype), mode="drop", unique_indices=True)


def _keep_inputs(branch: Branch, size: int, *inputs: Any) -> tuple[Array, Any]:
    return _run_tiles(branch, size, *inputs), inputs


def _differentiate_tiles(branch: Branch, size: int, inputs: Any, cotangent: Array) -> tuple[Any, ...]:
    params, tokens, weights, order, key = inputs

    def add(tile: Array, sums: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
        expert, rows, choices = _take_tile(order, tile, size, weights.shape[1])
        compute = functools.partial(_compute_tile, branch, key, tile)
        _, pull = jax.vjp(compute, *_read_tile(expert, rows, choices, params, tokens, weights))
        of_params, of_tokens, of_weights = pull(_read_rows(cotangent, rows))
        grown = jax.tree.map(lambda total, part: total.at[expert].add(part), sums[0], of_params)
        return grown, _add_rows(sums[1], rows, of_tokens), _add_rows(sums[2], choices, of_weights)

    flat = jnp.zeros_like(weights.reshape(-1))
    start = jax.tree.map(jnp.zeros_like, params), jnp.zeros_like(tokens, accumulation_dtype(tokens)), flat
    of_params, of_tokens, of_weights = jax.lax.fori_loop(0, order.ends[-1], add, start)
    return of_params, of_tokens.astype(tokens.dtype), of_weights.reshape(weights.shape), None, None


_run_tiles.defvjp(_keep_inputs, _differentiate_tiles)
