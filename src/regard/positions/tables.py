"""Position tables: sinusoidal and learned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import LARGEST, integers, read_number, whole_number
from regard.axes import Array, Float, Int
from regard.positions.scaling import frequencies, turns


def sinusoidal(
    length: int, d_model: int, *, base: float = 10000.0, start: int = 0, dtype: jnp.dtype | type = jnp.float32
) -> Float[Array, "T M"]:
    """Tabulate sines and cosines of geometrically spaced frequencies over positions.

    table[p, 2i] = sin(p / base^(2i/M)),  table[p, 2i+1] = cos(p / base^(2i/M))

    The angles are computed in float64 on the host, so the table is correctly rounded at any position; under
    `jit` it is a constant. An odd M ends with a sine that has no cosine.

    Args:
        length: number of positions, at least 0.
        d_model: M, at least 1.
        base: ratio between the longest and the shortest wavelength, above 0.
        start: first position.
        dtype: of the result.

    Returns:
        The table; row 0 belongs to position `start`.

    Raises:
        ValueError: a length below 0, d_model below 1, or a base that is not positive.

    Example:
        >>> from regard import positions
        >>> print(positions.sinusoidal(2, 4)[1].round(3))
        [0.841 0.54  0.01  1.   ]

    Reference: Vaswani et al., "Attention Is All You Need", 2017, section 3.5.
    """
    length, d_model = whole_number("length", length, 0), whole_number("d_model", d_model, 1)
    start = whole_number("start", start, -LARGEST)
    angles = np.arange(start, start + length, dtype=np.float64)[:, None] * frequencies(d_model, base)[None]
    return jnp.asarray(_interleave(np.sin(angles), np.cos(angles))[:, :d_model].astype(dtype))


def sinusoidal_at(
    position: Int[Array, "*B T"],
    d_model: int,
    *,
    base: float = 10000.0,
    dtype: jnp.dtype | type = jnp.float32,
) -> Float[Array, "*B T M"]:
    """Evaluate the sinusoidal table at given positions, which may be traced and differ from row to row.

    result[..., 2i] = sin(position / base^(2i/M)),  result[..., 2i+1] = cos(position / base^(2i/M))

    In float32 the error stays below 2e-6 for every int32 position, where the product position x frequency
    would have lost its fraction; in float64, below 1e-12 up to position 4096, and it grows with the position.

    Args:
        position: integers, of any shape.
        d_model: M, at least 1.
        base, dtype: as in `sinusoidal`.

    Returns:
        Values with one more axis than `position`.

    Raises:
        TypeError: positions that are not integers.
        ValueError: d_model below 1, a base that is not positive, or positions beyond int32; traced ones count
            as the nearest that it holds.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import positions
        >>> bool(jnp.allclose(positions.sinusoidal_at(jnp.arange(3), 4), positions.sinusoidal(3, 4)))
        True

    Reference: Vaswani et al., "Attention Is All You Need", 2017, section 3.5.
    """
    position, d_model = jnp.asarray(integers("position", position)), whole_number("d_model", d_model, 1)
    working = jax.dtypes.canonicalize_dtype(np.promote_types(dtype, np.float32))
    sine, cosine = turns(position, frequencies(d_model, base), working)
    return _interleave(sine, cosine)[..., :d_model].astype(jax.dtypes.canonicalize_dtype(dtype))


def learned(
    rng: Array, length: int, d_model: int, *, stddev: float = 0.02, dtype: jnp.dtype | type = jnp.float32
) -> Float[Array, "T M"]:
    """Draw the starting values of a learned position table.

    table[p, i] ~ Normal(0, stddev^2)

    Args:
        rng: random key.
        length: number of positions, at least 0; a learned table ends there.
        d_model: M, at least 1.
        stddev: standard deviation of the entries.
        dtype: of the result.

    Returns:
        The table, to be used as a parameter.

    Raises:
        TypeError: a stddev that is not a number.
        ValueError: a length below 0 or d_model below 1.

    Example:
        >>> import jax
        >>> from regard import positions
        >>> positions.learned(jax.random.key(0), 7, 4).shape
        (7, 4)

    Reference: Gehring et al., "Convolutional Sequence to Sequence Learning", 2017, section 3.1.
    """
    length, d_model = whole_number("length", length, 0), whole_number("d_model", d_model, 1)
    # A strongly typed factor, so that the table keeps its dtype under strict promotion.
    factor = jnp.asarray(read_number("stddev", stddev), dtype)
    return jax.random.normal(rng, (length, d_model), dtype) * factor


def _interleave(sine: Any, cosine: Any) -> Any:
    """Interleave columns to s0 c0 s1 c1 ..., of NumPy or JAX alike."""
    stack = jnp.stack if isinstance(sine, jax.Array) else np.stack
    return stack((sine, cosine), axis=-1).reshape((*sine.shape[:-1], 2 * sine.shape[-1]))
