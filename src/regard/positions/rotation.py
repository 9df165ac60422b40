"""Rotary positions: pairs of features turned by an angle that grows with the position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import LARGEST, as_array, check_flag, check_reach, guided, integers, read_number
from regard.axes import Array, ArrayLike, Float
from regard.positions.scaling import Scaling, turns


@guided
def rotary(
    features: Float[Array, "*B T D"],
    position: ArrayLike = 0,
    *,
    base: float = 10_000.0,
    width: int | None = None,
    interleaved: bool = False,
    scaling: Scaling | None = None,
) -> Float[Array, "*B T D"]:
    """Turn pairs of features by position times frequency; then q . k depends on distance alone.

    (a, b) -> (a cos - b sin, a sin + b cos) of the angle position base^(-2i/width), i = 0..width/2-1

    Queries and keys are turned before attention. Sines and cosines are exact at every int32 position, and
    the turn is computed in float32 at least, whatever the dtype of the features.

    Args:
        features: queries or keys; heads are one more leading axis.
        position: where row 0 stands, an integer that may be traced; or one integer per row, `(T,)` or
            `(batch..., T)` aligned with the first leading axes.
        base: ratio between the longest and the shortest wavelength, above 1.
        width: how many of the D features, from the first, are turned; even. None means all.
        interleaved: pair feature 2i with 2i + 1 (the paper, GPT-J, Llama as released) instead of i with
            i + width/2 (GPT-NeoX, Llama in Hugging Face's layout).
        scaling: a rule for longer sequences: `Linear`, `DynamicNTK`, `Llama3` or `YaRN`.

    Returns:
        The turned features, in their dtype.

    Raises:
        TypeError: features that are not floating-point, positions that are not integers, an unknown scaling,
            a flag that is none.
        ValueError: an odd width or one above D, a base of at most 1, positions of another
            shape.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import positions
        >>> [f"{x:.3f}" for x in positions.rotary(jnp.ones((2, 4)))[1]]
        ['-0.301', '0.990', '1.382', '1.010']

    Reference: Su et al., "RoFormer", 2021, section 3.2.2.
    """
    return Rotary(base, width, interleaved, scaling)(features, position)


@dataclass(frozen=True)
class Rotary:
    """The settings of `rotary` as a value, for layers that turn their queries and keys.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import positions
        >>> turn = positions.Rotary(base=100.0, width=2)
        >>> [f"{x:.3f}" for x in turn(jnp.ones((2, 4)))[1]]
        ['-0.301', '1.382', '1.000', '1.000']

    Reference: Su et al., "RoFormer", 2021, section 3.2.2.
    """

    base: float = 10_000.0
    """Ratio between the longest and the shortest wavelength, above 1."""
    width: int | None = None
    """The number of features, from the first, that are turned; even. None means all."""
    interleaved: bool = False
    """Pair feature 2i with 2i + 1 instead of i with i + width/2."""
    scaling: Scaling | None = None
    """A rule for longer sequences."""

    def __post_init__(self) -> None:
        if not read_number("base", self.base) > 1:
            raise ValueError(f"base: expected more than 1, got {self.base}")
        check_flag("interleaved", self.interleaved)
        if self.scaling is not None and not isinstance(self.scaling, Scaling):
            kinds = ", ".join(kind.__name__ for kind in Scaling.__subclasses__())
            raise TypeError(
                f"scaling: expected None or one of {kinds} of regard.positions, got {self.scaling!r}"
            )

    def __call__(self, features: Float[Array, "*B T D"], position: ArrayLike = 0) -> Float[Array, "*B T D"]:
        """Turn features; see `rotary`."""
        features = as_array("features", "a floating-point array", jnp.asarray, features)
        if not jnp.issubdtype(features.dtype, jnp.floating) or features.ndim < 2:
            raise TypeError(
                "features: expected a floating-point array (..., length, width),"
                f" got {features.dtype} of shape {features.shape}"
            )
        width, rule = self.fit(features.shape[-1]), self.scaling or Scaling()
        row_position, limit = _place_rows(position, features.shape)
        working = np.promote_types(features.dtype, np.float32)
        sine, cosine = turns(row_position, rule.frequencies(width, self.base), working, limit)
        amplitude = np.asarray(rule.amplitude, working)
        return rotate(features, cosine * amplitude, sine * amplitude, interleaved=self.interleaved)

    def fit(self, features: int, name: str = "width") -> int:
        """Return how many of so many features are turned, if there are as many."""
        return check_width(features if self.width is None else self.width, features, name)


def rotate(
    features: Float[Array, "*B T D"], cosine: Array, sine: Array, *, interleaved: bool = False
) -> Float[Array, "*B T D"]:
    """Turn the first 2F features by angles `(*b, T, F)`, where b are the first leading axes."""
    width = check_width(2 * cosine.shape[-1], features.shape[-1])
    between = (1,) * (features.ndim - cosine.ndim)  # heads, and others behind those of the angles
    cosine = cosine.reshape((*cosine.shape[:-2], *between, *cosine.shape[-2:]))
    sine = sine.reshape((*sine.shape[:-2], *between, *sine.shape[-2:]))
    turning = features[..., :width].astype(cosine.dtype)
    pairs, axis = ((width // 2, 2), -1) if interleaved else ((2, width // 2), -2)
    turning = turning.reshape((*turning.shape[:-1], *pairs))
    a = jax.lax.index_in_dim(turning, 0, axis, keepdims=False)
    b = jax.lax.index_in_dim(turning, 1, axis, keepdims=False)
    turned = jnp.stack((a * cosine - b * sine, a * sine + b * cosine), axis)
    turned = turned.reshape((*turned.shape[:-2], width)).astype(features.dtype)
    return turned if width == features.shape[-1] else jnp.concatenate((turned, features[..., width:]), -1)


def check_width(width: int, features: int, name: str = "width") -> int:
    """Check that the width is an even number of features, no more than there are."""
    if not isinstance(width, int | np.integer) or width % 2 or not 0 < width <= features:
        raise ValueError(
            f"{name}: expected an even number in 2..{features}, the features there are; got {width!r}"
        )
    return width


def _place_rows(position: Any, shape: tuple[int, ...]) -> tuple[Array, int]:
    """Return one integer per row, and a bound of their magnitude that is known before tracing."""
    length, leading = shape[-2], shape[:-2]
    position = integers("position", position)
    if position.ndim == 0:
        rows = jnp.arange(length, dtype=jnp.int32)
        if isinstance(position, jax.Array):
            return jnp.minimum(position, LARGEST - length) + rows, 1 << 31
        first = int(position)
        check_reach("position", first + length)
        if not isinstance(length, int):  # symbolic
            return position + rows, 1 << 31
        return position + rows, max(abs(first), abs(first + length)) + 1
    own = position.shape[:-1]
    fits = position.shape[-1] == length and len(own) <= len(leading)
    if not fits or any(n not in (1, m) for n, m in zip(own, leading, strict=False)):
        rows = f"({length},)" + (f" or ({leading[0]}, {length})" if leading else "")
        raise ValueError(f"position: expected an integer or integers of shape {rows}, got {position.shape}")
    return jnp.asarray(position), 1 << 31
