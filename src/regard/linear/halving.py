"""Decay and the delta rule between the rows of a chunk, by halving the chunk.

Decay factors are only ever multiplied: no ratio overflows, no difference cancels, and a factor of 0 forgets.
Blocks are stacked on the first axis, which keeps matrix products at one batch axis.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from regard.axes import Array, Float


class Decayed(NamedTuple):
    """Products of rows with keys, and of decay factors, over blocks of C rows."""

    products: Array  # (N, C, R, C): of row t with key s, decayed from s to t; 0 where s > t
    until: Array  # (N, C, W): factors of rows 0..t, what row t still sees of the state before the block
    after: Array  # (N, C, W): factors of rows t+1..C-1, what the end still sees of what row t wrote


def decay_products(
    rows: Float[Array, "N C R D"],
    key: Float[Array, "N C D"],
    factors: Float[Array, "N C D"],
    precision: Any = None,
) -> Decayed:
    """Multiply rows and keys, channel d of key s decayed by the factors of rows s+1..t on its way to row t.

    products_trs = sum_d rows_trd key_sd prod_(s < i <= t) factor_id
    """
    count, size, heads, width = rows.shape
    if size == 1:
        return Decayed(jnp.sum(rows * key[:, :, None], -1, keepdims=True), factors, jnp.ones_like(factors))
    half = size // 2
    parts = decay_products(_halve(rows), _halve(key), _halve(factors), precision)
    # Rows of the later half read what keys of the earlier half wrote.
    reading = rows[:, half:] * _pair(parts.until)[1][:, :, None]
    written = key[:, :half] * _pair(parts.after)[0]
    lower = jnp.einsum(
        "nrd,nsd->nrs", reading.reshape((count, half * heads, width)), written, precision=precision
    )
    return _join(parts, lower.reshape((count, half, heads, half)))


def decay_weights(factors: Float[Array, "N C 1"]) -> Decayed:
    """Weigh at row t what row s wrote: `decay_products` of products of 1, with one factor per row."""
    if factors.shape[1] == 1:
        return Decayed(jnp.ones_like(factors)[..., None], factors, jnp.ones_like(factors))
    parts = decay_weights(_halve(factors))
    lower = _pair(parts.until)[1][:, :, None] * jnp.swapaxes(_pair(parts.after)[0], -1, -2)[:, None]
    return _join(parts, lower)


def invert(below: Float[Array, "N C C"], precision: Any = None) -> Array:
    """Invert 1 + what `below` holds below its diagonal; the rest of it is not read."""
    # Not in `_invert`, whose rule would have the axis of `vmap` that ones have not.
    return jnp.ones_like(below) if below.shape[-1] == 1 else _invert(below, precision)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _invert(below: Array, precision: Any) -> Array:
    half = below.shape[-1] // 2
    corners = jnp.stack((below[:, :half, :half], below[:, half:, half:]), 1)
    inverse = invert(corners.reshape((2 * below.shape[0], half, half)), precision)
    first, last = _pair(inverse)
    lower = jnp.matmul(below[:, half:, :half], first, precision=precision)
    lower = -jnp.matmul(last, lower, precision=precision)
    return _corners(first, lower, last)


@_invert.defjvp
def _differentiate_inverse(
    precision: Any, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    """Change the inverse X by -X dB X: two products, where the halves' own derivatives are many programs."""
    inverse = invert(*primals, precision)
    change = jnp.matmul(jnp.tril(tangents[0], -1), inverse, precision=precision)
    return inverse, -jnp.matmul(inverse, change, precision=precision)


def _halve(array: Array) -> Array:
    """Halve blocks (N, C, ...) to (2N, C/2, ...): neighbours are the halves of one block."""
    # In two steps, each of which an explicitly divided first axis survives.
    count, size, *rest = array.shape
    return array.reshape((count, 2, size // 2, *rest)).reshape((2 * count, size // 2, *rest))


def _pair(array: Array) -> tuple[Array, Array]:
    """Return the first and the second of every two neighbours."""
    pairs = array.reshape((array.shape[0] // 2, 2, *array.shape[1:]))
    return pairs[:, 0], pairs[:, 1]


def _join(parts: Decayed, lower: Array) -> Decayed:
    """Join neighbouring blocks, given what the later one reads of the earlier."""
    (first_until, last_until), (first_after, last_after) = _pair(parts.until), _pair(parts.after)
    first_products, last_products = _pair(parts.products)
    until = jnp.concatenate((first_until, last_until * first_until[:, -1:]), 1)
    after = jnp.concatenate((first_after * last_until[:, -1:], last_after), 1)
    return Decayed(_corners(first_products, lower, last_products), until, after)


def _corners(first: Array, lower: Array, last: Array) -> Array:
    """Build [[first, 0], [lower, last]], rows on axis 1 and columns on the last."""
    above = jnp.concatenate((first, jnp.zeros_like(lower)), -1)
    return jnp.concatenate((above, jnp.concatenate((lower, last), -1)), 1)
