"""Attention over disjoint sets of keys, merged into attention over their union."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import check_kind
from regard.axes import Array, ArrayLike, Float
from regard.engine.softmax.exponential import finite_base


def merge(parts: Iterable[Sequence[ArrayLike]]) -> tuple[Float[Array, "*B T E"], Float[Array, "*B T"]]:
    """Merge attention over disjoint sets of keys into attention over all of them.

    lse_t = log(sum_i e^lse_it)
    output_te = sum_i e^(lse_it - lse_t) output_ite

    Softmax over a union of keys is the mean of the softmaxes over its parts, weighted by their sums of
    exponentials: a prefix that many rows share is attended to once, keys on another device where they lie.

    Args:
        parts: at least one pair (output, lse), all of the same queries: output `(*B, T, E)` and lse
            `(*B, T)`, as `output, aux = attend(..., aux=("lse",))` returns them, `aux["lse"]` being the
            second. No key may be in two parts. Sinks count as a key: give them to one part's call alone.

    Returns:
        The output `(*B, T, E)` and lse `(*B, T)`: another part, to be merged again. Sums are float32, float64
        where any array is; the output has the dtype of the outputs, that of the sums where they differ. A
        query to which every part is empty (lse -inf) gets output 0, lse -inf and zero gradients; what a part
        holds where its lse is -inf is never read. Differentiable in outputs and lse, to any order.

    Raises:
        TypeError: a part that is no pair of arrays, or whose arrays are not floating point.
        ValueError: no part, an lse whose shape is not that of its output without the last axis, or outputs
            of different shapes.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import attend, merge
        >>> x = jnp.eye(3)
        >>> halves = [attend(x, x[part], x[part], aux=("lse",)) for part in (slice(2), slice(2, 3))]
        >>> output, lse = merge([(output, aux["lse"]) for output, aux in halves])
        >>> bool(jnp.allclose(output, attend(x, x, x), atol=1e-6))
        True

    Reference: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.1; shared
    prefixes as in Juravsky et al., "Hydragen", 2024, section 3.1.
    """
    pairs = _check(parts)
    arrays = [array for pair in pairs for array in pair]
    dtype = np.float64 if any(array.dtype == np.float64 for array in arrays) else np.float32
    outputs, sums = zip(*((output.astype(dtype), lse.astype(dtype)) for output, lse in pairs), strict=True)

    # The peak cancels, also in derivatives. It may have lost NaN, so `present` says who is alive.
    base = finite_base(jax.lax.stop_gradient(functools.reduce(jnp.maximum, sums)))
    present = [lse != -jnp.inf for lse in sums]
    alive = functools.reduce(jnp.logical_or, present)
    weights = [
        jnp.where(nonempty, jnp.exp(jnp.where(nonempty, lse - base, 0)), 0)
        for nonempty, lse in zip(present, sums, strict=True)
    ]
    total = jnp.where(alive, sum(weights), 1)
    weighted = (
        (weight / total)[..., None] * jnp.where(nonempty[..., None], output, 0)
        for nonempty, weight, output in zip(present, weights, outputs, strict=True)
    )
    own = {output.dtype for output, _ in pairs}
    lse = jnp.where(alive, base + jnp.log(total), -jnp.inf)
    output = functools.reduce(jnp.add, weighted)
    return output.astype(own.pop() if len(own) == 1 else dtype), lse


def _check(parts: Iterable[Sequence[ArrayLike]]) -> list[tuple[Array, Array]]:
    """Return the parts as arrays that fit each other."""
    check_kind("parts", parts, Iterable, hint="pass pairs (output, lse)")
    pairs = []
    for index, part in enumerate(parts):
        name = f"parts[{index}]"
        try:
            output, lse = map(jnp.asarray, part)  # a dictionary is no array
        except (TypeError, ValueError):
            raise TypeError(
                f"{name}: expected a pair of arrays (output, lse), got {jax.tree.map(jnp.shape, part)}"
            ) from None
        if not all(jnp.issubdtype(array.dtype, jnp.floating) for array in (output, lse)):
            raise TypeError(f"{name}: expected floating-point arrays, got {output.dtype} and {lse.dtype}")
        if output.ndim == 0 or lse.shape != output.shape[:-1]:
            raise ValueError(
                f"{name}: expected output (*B, T, E) and lse (*B, T), got shapes {output.shape} and"
                f" {lse.shape}"
            )
        pairs.append((output, lse))
        if output.shape != pairs[0][0].shape:
            raise ValueError(
                f"{name}: expected an output of shape {pairs[0][0].shape}, as that of parts[0], got"
                f" {output.shape}; the parts differ in keys, not in queries"
            )
    if not pairs:
        raise ValueError("parts: expected at least one pair (output, lse), got none")
    return pairs
