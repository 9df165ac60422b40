"""Messages between devices: keys on their way, heads for sequence, halves for balance."""

from typing import Any

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.parallel.division import Division

_HEADS, _SEQUENCE = -3, -2


def bring_in(array: Array, division: Division) -> Array:
    """Bring the caller's (..., heads, part of the sequence, x) to what a member of the ring works on."""
    if division.size(division.exchange) > 1:
        array = _exchange(array, division.exchange, _HEADS, _SEQUENCE)
    return _balance(array, division) if division.layout == "balanced" else array


def bring_in_pairs(array: Array, division: Division) -> Array:
    """Bring the caller's pairs (..., heads | 1, rows | 1, S | 1) to what a member of the ring works on."""
    heads, rows = array.shape[_HEADS], array.shape[_SEQUENCE]
    devices = division.size(division.exchange)
    if devices > 1 and heads > 1 and rows > 1:
        array = _exchange(array, division.exchange, _HEADS, _SEQUENCE)
    elif devices > 1 and heads > 1:
        first = jax.lax.axis_index(division.exchange) * (heads // devices)
        array = jax.lax.dynamic_slice_in_dim(array, first, heads // devices, _HEADS)
    elif devices > 1 and rows > 1:
        array = jax.lax.all_gather(array, division.exchange, axis=array.ndim + _SEQUENCE, tiled=True)
    return _balance(array, division) if division.layout == "balanced" and rows > 1 else array


def bring_out(array: Array, division: Division) -> Array:
    array = _balance(array, division, back=True) if division.layout == "balanced" else array
    if division.size(division.exchange) > 1:
        array = _exchange(array, division.exchange, _SEQUENCE, _HEADS)
    return array


def _exchange(array: Array, axis: Any, split: int, join: int) -> Array:
    return jax.lax.all_to_all(array, axis, array.ndim + split, array.ndim + join, tiled=True)


def _balance(array: Array, division: Division, *, back: bool = False) -> Array:
    ring = division.size(division.ring)
    if ring == 1:
        return array
    halves = jnp.split(array, 2, _SEQUENCE)
    halves = _swap_if_odd(halves, division) if back else halves
    # Of 2 n half chunks, member i has 2 i and 2 i + 1, and works on i and 2 n - 1 - i. One of the latter is
    # even, the other odd: the even halves are a permutation, and so are the odd ones.
    owners = [*range(ring), *reversed(range(ring))]
    routes = [[pair[::-1] if back else pair for pair in enumerate(owners[odd::2])] for odd in (0, 1)]
    sent = [jax.lax.ppermute(half, division.ring, to) for half, to in zip(halves, routes, strict=True)]
    return jnp.concatenate(sent if back else _swap_if_odd(sent, division), _SEQUENCE)


def _swap_if_odd(halves: list[Array], division: Division) -> list[Array]:
    odd = jax.lax.axis_index(division.ring) & 1 == 1
    first, second = halves
    return [jnp.where(odd, second, first), jnp.where(odd, first, second)]


def move(tree: Any, division: Division, steps: int) -> Any:
    """Send arrays so many members up the ring."""
    ring = division.size(division.ring)
    if steps % ring == 0:
        return tree
    route = [(i, (i + steps) % ring) for i in range(ring)]
    return jax.tree.map(lambda array: jax.lax.ppermute(array, division.ring, route), tree)


def moved_halves(division: Division) -> float:
    """Compute the share of a device's data that balance sends elsewhere, on average."""
    ring = division.size(division.ring)
    # Member i has halves 2 i and 2 i + 1 and works on i and 2 n - 1 - i: one stays where i = 0, and one where
    # 3 i is 2 n - 1 or 2 n - 2.
    return 1 - (1 + (ring % 3 != 0)) / (2 * ring)
