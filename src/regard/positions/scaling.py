"""Frequencies, their scalings for longer sequences than those of training, and turns at any position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from regard.arguments import check_flag, read_number
from regard.axes import Array, Float, Int
from regard.explicit_meshes import take_rows

# An int32 is seven digits of base 32: |position| < 2**31 = 2 * 32**6.
_DIGIT_BITS = 5
_NUM_DIGITS = 7


def frequencies(width: int, base: float) -> np.ndarray:
    """Compute one frequency per pair of columns, in float64."""
    if not read_number("base", base) > 0:
        raise ValueError(f"base: expected a positive number, got {base}")
    return float(base) ** (-np.arange(0, width, 2, dtype=np.float64) / width)


def turns(
    position: Int[Array, "*B T"],
    frequencies: np.ndarray,
    dtype: jnp.dtype | type = jnp.float32,
    limit: int = 1 << 31,
) -> tuple[Float[Array, "*B T F"], Float[Array, "*B T F"]]:
    """Compute sine and cosine of position * frequency, exact to `dtype` at any |position| below `limit`.

    The product would lose its fraction in float32 at long positions. The position is split into digits of
    base 32 instead, and the turns of the digits, tabulated in float64, are composed.
    """
    magnitude = jnp.abs(position).astype(jnp.uint32)
    sine = jnp.zeros((*position.shape, len(frequencies)), dtype)
    cosine = jnp.ones_like(sine)
    for digit in range(_NUM_DIGITS):
        shift = _DIGIT_BITS * digit
        if limit <= 1 << shift:
            break
        angles = np.arange(1 << _DIGIT_BITS)[:, None] * (2.0**shift) * frequencies[None]
        rows = (magnitude >> jnp.uint32(shift)) & jnp.uint32((1 << _DIGIT_BITS) - 1)
        step_sine = take_rows(jnp.asarray(np.sin(angles), dtype), rows)
        step_cosine = take_rows(jnp.asarray(np.cos(angles), dtype), rows)
        sine, cosine = sine * step_cosine + cosine * step_sine, cosine * step_cosine - sine * step_sine
    return jnp.where((position < 0)[..., None], -sine, sine), cosine


@dataclass(frozen=True)
class Scaling:
    """A rule that changes rotary frequencies; hand one to `rotary`. This one changes nothing.

    Example:
        >>> from regard import positions
        >>> positions.Scaling().frequencies(4, 100.0).tolist()
        [1.0, 0.1]
    """

    def frequencies(self, width: int, base: float) -> np.ndarray:
        """Compute one frequency per pair of features, in float64; without a rule `base^(-2i/width)`."""
        return frequencies(width, base)

    @property
    def amplitude(self) -> float:
        """The factor on sines and cosines; scores grow by its square."""
        return 1.0


@dataclass(frozen=True)
class Linear(Scaling):
    """Position interpolation: every frequency divided by `factor`.

    Args:
        factor: how many times longer than in training, at least 1.

    Raises:
        ValueError: a factor below 1.

    Example:
        >>> from regard import positions
        >>> print(positions.Linear(4.0).frequencies(4, 10_000.0))
        [0.25   0.0025]

    Reference: Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation",
    2023.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_at_least_one(factor=self.factor)

    def frequencies(self, width: int, base: float) -> np.ndarray:
        return super().frequencies(width, base) / self.factor


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """A larger base, so that slow features stretch and fast ones stay, once `length` exceeds the training's.

    base' = base (factor length / trained_length - (factor - 1))^(width / (width - 2))

    `length` is fixed for a sequence: cached keys that were turned by other frequencies would not fit.

    Args:
        factor: strength, at least 1.
        trained_length: tokens of a training sequence.
        length: tokens to serve; up to `trained_length` nothing changes.

    Raises:
        ValueError: a factor below 1, or a length below 1.

    Example:
        >>> from regard import positions
        >>> print(positions.DynamicNTK(2.0, 2048, 8192).frequencies(4, 100.0).round(4))
        [1.     0.0143]

    Reference: Peng et al., "YaRN", 2023, section 3.3.
    """

    factor: float
    trained_length: int
    length: int

    def __post_init__(self) -> None:
        _check_at_least_one(factor=self.factor, trained_length=self.trained_length, length=self.length)

    def frequencies(self, width: int, base: float) -> np.ndarray:
        if width > 2:
            stretch = self.factor * max(self.length, self.trained_length) / self.trained_length
            base = base * (stretch - (self.factor - 1)) ** (width / (width - 2))
        return super().frequencies(width, base)


@dataclass(frozen=True)
class Llama3(Scaling):
    """Long waves stretched, those longer than the training sequence; short ones kept, with a ramp between.

    With w the wavelength 2 pi / frequency and L the trained length: divided by `factor` where
    w > L / low_frequency, kept where w < L / high_frequency, between them a weighted mean of both.

    Args:
        factor: how much long waves are stretched, at least 1.
        trained_length: tokens of a training sequence.
        low_frequency: turns within the trained length below which a wave counts as long.
        high_frequency: turns above which it counts as short; more than `low_frequency`.

    Raises:
        ValueError: a factor below 1, a length below 1, or turns out of order.

    Example:
        >>> from regard import positions
        >>> print(positions.Llama3(8.0).frequencies(4, 1e8))
        [1.00e+00 1.25e-05]

    Reference: Grattafiori et al., "The Llama 3 Herd of Models", 2024; the rule is in the released model code.
    """

    factor: float
    trained_length: int = 8192
    low_frequency: float = 1.0
    high_frequency: float = 4.0

    def __post_init__(self) -> None:
        _check_at_least_one(factor=self.factor, trained_length=self.trained_length)
        _check_order(low_frequency=self.low_frequency, high_frequency=self.high_frequency)

    def frequencies(self, width: int, base: float) -> np.ndarray:
        plain = super().frequencies(width, base)
        turns = self.trained_length * plain / (2 * np.pi)
        keep = np.clip((turns - self.low_frequency) / (self.high_frequency - self.low_frequency), 0, 1)
        return plain * (keep + (1 - keep) / self.factor)


@dataclass(frozen=True)
class YaRN(Scaling):
    """Interpolation of features that turn seldom, those that turn often kept; scores are sharpened.

    A feature i that turns `fast_turns` times or more within the trained length keeps its frequency, one that
    turns `slow_turns` times or less has it divided by `factor`; in between the share is linear in i.
    Sines and cosines are multiplied by 0.1 ln(factor) + 1.

    Args:
        factor: how many times longer than in training, at least 1.
        trained_length: tokens of a training sequence.
        fast_turns: often (the paper's beta).
        slow_turns: seldom (the paper's alpha); less than `fast_turns`.
        sharpness: replaces what sines and cosines are multiplied by; None takes the formula.
        whole_features: round the ends of the ramp outwards to whole features, as the paper's code does.

    Raises:
        ValueError: a factor below 1, a length below 1, or turns out of order.

    Example:
        >>> from regard import positions
        >>> print(positions.YaRN(4.0, 2048).frequencies(8, 10_000.0))
        [1.00e+00 1.00e-01 6.25e-03 2.50e-04]

    Reference: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023.
    Its code moves both ends of the ramp to features that there are; here a ramp beyond them all stays there.
    """

    factor: float
    trained_length: int
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    sharpness: float | None = None
    whole_features: bool = True

    def __post_init__(self) -> None:
        _check_at_least_one(factor=self.factor, trained_length=self.trained_length)
        _check_order(slow_turns=self.slow_turns, fast_turns=self.fast_turns)
        check_flag("whole_features", self.whole_features)
        if self.sharpness is not None:
            read_number("sharpness", self.sharpness)

    def frequencies(self, width: int, base: float) -> np.ndarray:
        plain = super().frequencies(width, base)

        def feature(count: float) -> float:  # that turns so often over the trained length
            return width * math.log(self.trained_length / (count * 2 * math.pi)) / (2 * math.log(base))

        first, last = feature(self.fast_turns), feature(self.slow_turns)
        if self.whole_features:
            first, last = math.floor(first), math.ceil(last)
        if first <= width - 1 and last >= 0:  # else one rule holds for all features
            first, last = max(first, 0), min(last, width - 1)
        # Two ends at one feature would divide by zero.
        ramp = (np.arange(len(plain)) - first) / (last - first if last != first else 1e-3)
        seldom = np.clip(ramp, 0, 1)
        return plain * (1 - seldom) + plain / self.factor * seldom

    @property
    def amplitude(self) -> float:
        return 0.1 * math.log(self.factor) + 1 if self.sharpness is None else self.sharpness


def _check_at_least_one(**numbers: float) -> None:
    for name, number in numbers.items():
        if not read_number(name, number) >= 1:
            raise ValueError(f"{name}: expected at least 1, got {number}")


def _check_order(**turns: float) -> None:
    (less, low), (more, high) = turns.items()
    if not 0 < read_number(less, low) < read_number(more, high):
        raise ValueError(f"{less}, {more}: expected 0 < {less} < {more}, got {low} and {high}")
