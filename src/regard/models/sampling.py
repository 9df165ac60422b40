"""Sampling of the next token: temperature, top-k, top-p, min-p, repetition penalty, and the draw."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import LARGEST, check_kind, read_size
from regard.axes import Array, ArrayLike, Bool, Float, Int, Size
from regard.engine.call.problem import accumulation_dtype
from regard.models.logits import add_bias, are_sound, keep_largest, spread
from regard.models.sampling_settings import Sampling

NO_TOKEN = -1


def repetition_penalty(
    logits: Float[Array, "*B V"], seen: Bool[Array, "*B V"], penalty: ArrayLike
) -> Float[Array, "*B V"]:
    """Make tokens seen before less probable.

    logit' = logit / penalty where logit > 0, logit times penalty elsewhere, for the tokens seen

    Args:
        logits: of the next token.
        seen: True for tokens of the prompt and of what was written.
        penalty: above 0; above 1 avoids what was seen, below 1 seeks it. As all settings here, a number, or
            one for each index along the first axis.

    Returns:
        Logits in the same dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.models import sampling
        >>> logits, seen = jnp.array([[3.0, -1.0, 2.0]]), jnp.array([[True, True, False]])
        >>> sampling.repetition_penalty(logits, seen, 1.5).tolist()
        [[2.0, -1.5, 2.0]]

    Reference: Keskar et al., "CTRL", 2019, section 4.1, which divides negative logits, too.
    """
    penalty = spread("penalty", penalty, logits)
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def temperature(logits: Float[Array, "*B V"], degree: ArrayLike) -> Float[Array, "*B V"]:
    """Sharpen or flatten a distribution.

    logit' = logit / degree

    Args:
        logits: of the next token.
        degree: above 0; 0 leaves the most probable token alone, the first of equals.

    Returns:
        Logits in the same dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.models import sampling
        >>> sampling.temperature(jnp.array([[1.0, 3.0]]), 0.5).tolist()
        [[2.0, 6.0]]

    Reference: Ackley et al., "A Learning Algorithm for Boltzmann Machines", 1985.
    """
    degree, none = spread("degree", degree, logits), jnp.full_like(logits, -jnp.inf)
    tokens = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_cold, best = degree == 0, jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
    return jnp.where(
        is_cold & (tokens != best), none, logits / jnp.where(is_cold, jnp.ones_like(degree), degree)
    )


def top_k(logits: Float[Array, "*B V"], count: ArrayLike) -> Float[Array, "*B V"]:
    """Leave the `count` most probable tokens, and those as probable as the last of them.

    Args:
        logits: of the next token.
        count: at least 1, may be traced; V or more leaves all.

    Returns:
        Logits in the same dtype, -inf for the tokens removed.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.models import sampling
        >>> sampling.top_k(jnp.array([[1.0, 3.0, 2.0, 0.0]]), 2).tolist()
        [[-inf, 3.0, 2.0, -inf]]

    Reference: Fan et al., "Hierarchical Neural Story Generation", 2018.
    """
    count = min(count, LARGEST) if isinstance(count, int) else count
    least = jnp.minimum(spread("count", count, logits, jnp.int32), logits.shape[-1])
    return keep_largest(logits, lambda mask: jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.int32) >= least)


def top_p(logits: Float[Array, "*B V"], share: ArrayLike) -> Float[Array, "*B V"]:
    """Leave the nucleus: the fewest most probable tokens whose probabilities sum to `share`.

    At least one token stays, and those as probable as the last one that stays do, too.

    Args:
        logits: of the next token.
        share: in (0, 1], may be traced.

    Returns:
        Logits in the same dtype, -inf for the tokens removed.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.models import sampling
        >>> logits = jnp.log(jnp.array([[0.125, 0.5, 0.25, 0.125]]))
        >>> jnp.isfinite(sampling.top_p(logits, 0.6)).tolist()
        [[False, True, True, False]]

    Reference: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, section 3.1.
    """
    probability = jax.nn.softmax(logits.astype(accumulation_dtype(logits)), axis=-1)
    # A share that rounds to 0 would be reached without a token.
    least = jnp.maximum(spread("share", share, probability), jnp.finfo(probability.dtype).tiny)
    zero = jnp.zeros_like(probability)

    def is_nucleus(mask: Array) -> Array:
        return jnp.sum(jnp.where(mask, probability, zero), axis=-1, keepdims=True) >= least

    return keep_largest(logits, is_nucleus)


def min_p(logits: Float[Array, "*B V"], share: ArrayLike) -> Float[Array, "*B V"]:
    """Leave the tokens at least `share` times as probable as the most probable one.

    logit' = logit where logit >= max_v logit_v + log(share), -inf elsewhere

    Args:
        logits, share: as in `top_p`.

    Returns:
        Logits in the same dtype, -inf for the tokens removed.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.models import sampling
        >>> logits = jnp.log(jnp.array([[0.1, 0.5, 0.3, 0.1]]))
        >>> jnp.isfinite(sampling.min_p(logits, 0.5)).tolist()
        [[False, True, True, False]]

    Reference: Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024, section 3.
    """
    least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(spread("share", share, logits))
    return jnp.where(logits >= least, logits, jnp.full_like(logits, -jnp.inf))


def adjust(
    logits: Float[Array, "*B V"], sampling: Sampling, seen: Bool[Array, "*B V"] | None = None
) -> Float[Array, "*B V"]:
    """Apply settings to logits: bias, repetition penalty, temperature, top-k, top-p, min-p, in this order.

    Probabilities are those of the tokens that the one before left. At temperature 0 the first two apply.

    Args:
        logits: of the next token.
        sampling: the settings.
        seen: tokens that the repetition penalty applies to; None is none of them.

    Returns:
        Logits of the distribution to draw from, in the same dtype, -inf for tokens removed.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.models import Sampling, sampling
        >>> settings = Sampling(temperature=0.5, top_k=2)
        >>> sampling.adjust(jnp.array([[1.0, 3.0, 2.0]]), settings).tolist()
        [[-inf, 6.0, 4.0]]
    """
    check_kind("sampling", sampling, Sampling)
    sampling.check_rows(logits.shape[0])
    logits = add_bias(logits, sampling.logit_bias)
    if sampling.repetition_penalty is not None and seen is not None:
        logits = repetition_penalty(logits, seen, sampling.repetition_penalty)
    if sampling.greedy:
        return logits
    logits = temperature(logits, sampling.temperature)
    chain: Any = ((top_k, sampling.top_k), (top_p, sampling.top_p), (min_p, sampling.min_p))
    for change, setting in chain:
        if setting is not None:
            logits = change(logits, setting)
    return logits


def choose(
    logits: Float[Array, "batch V"],
    sampling: Sampling,
    *,
    rng: Array | None = None,
    seen: Bool[Array, "batch V"] | None = None,
) -> Int[Array, " batch"]:
    """Choose a token for every row.

    token_b = argmax_v (logit'_bv + gumbel_bv),  logit' = adjust(logits), float32 noise from the key of row b

    Args:
        logits, sampling, seen: as in `adjust`.
        rng: one random key per row, `(batch,)`, as `row_keys` gives them; may be None at temperature 0.

    Returns:
        int32 tokens, none whose logit is -inf; -1 where a logit is NaN or inf, or all are -inf.

    Raises:
        ValueError: a temperature above 0 without random keys.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from regard.models import Sampling, sampling
        >>> logits = jnp.array([[0.0, 4.0, 2.0], [0.0, jnp.nan, 2.0]])
        >>> sampling.choose(logits, Sampling()).tolist()
        [1, -1]
        >>> keys = sampling.row_keys(jax.random.key(0), 2)
        >>> sampling.choose(logits, Sampling(temperature=1.0), rng=keys).tolist()
        [1, -1]
    """
    # Few digits would make many tokens equal, and the noise coarse.
    logits = logits.astype(accumulation_dtype(logits))
    adjusted = adjust(logits, sampling, seen)
    is_sound = are_sound(add_bias(logits, sampling.logit_bias))
    if not sampling.greedy:
        if rng is None:
            use = "row_keys(jax.random.key(0), batch)"
            raise ValueError(f"rng: expected one random key per row above temperature 0, got None; use {use}")
        draw = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))
        adjusted = adjusted + draw(_draw_apart(rng)).astype(logits.dtype)
    token = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
    return jnp.where(is_sound, token, jnp.int32(NO_TOKEN))


def row_keys(rng: ArrayLike, batch: Size) -> Array:
    """Make one random key per row.

    key_b = fold_in(rng, b)

    What row b draws is then a matter of rng and b alone, not of how many rows there are or what they hold.

    Args:
        rng: one random key, or one per row, `(batch,)`, which is given back. Of another kind
            than threefry, such as rbg, they give keys of threefry, as all rows would draw by the first one.
        batch: number of rows.

    Returns:
        Typed keys `(batch,)`.

    Raises:
        TypeError: no random key.
        ValueError: another number of keys.

    Example:
        >>> import jax
        >>> from regard.models import sampling
        >>> sampling.row_keys(jax.random.key(0), 3).shape
        (3,)
    """
    typed: Any = rng
    if getattr(rng, "dtype", None) == np.uint32:  # keys of jax.random.PRNGKey
        typed = jax.random.wrap_key_data(jnp.asarray(rng))
    elif not jnp.issubdtype(getattr(rng, "dtype", np.float32), jax.dtypes.prng_key):
        kind = getattr(rng, "dtype", type(rng).__name__)
        raise TypeError(f"rng: expected a random key, such as jax.random.key(0); got {kind}")
    batch, typed = read_size("batch", batch, 0), _draw_apart(typed)
    if typed.shape == (batch,):
        return typed
    if typed.shape != ():
        raise ValueError(f"rng: expected one random key or one per row, shape ({batch},); got {typed.shape}")
    return jax.vmap(lambda row: jax.random.fold_in(typed, row))(jnp.arange(batch, dtype=jnp.uint32))


def _draw_apart(keys: Array) -> Array:
    """Return keys by which rows draw apart: of threefry, drawn from those of other kinds one by one."""
    if jax.random.key_impl(keys) == "threefry2x32":
        return keys
    draw = functools.partial(jax.random.bits, shape=(2,), dtype=jnp.uint32)
    return jax.random.wrap_key_data(jax.lax.map(draw, keys) if keys.ndim else draw(keys), impl="threefry2x32")
