"""Score: what every score function can do, and how they follow one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.masks.grid import is_concrete
from regard.records import record
from regard.scores.cells import Cells


class Score:
    """A function of scaled scores, evaluated before bias and mask, tile by tile.

    A score is a frozen pytree: its floating-point leaves are parameters and have gradients.

    Example:
        >>> from regard import scores
        >>> scores.softcap(50)
        softcap(50.0)
    """

    @property
    def reads_positions(self) -> bool:
        """Whether the answer depends on where queries and keys sit."""
        return False

    @property
    def adds(self) -> bool:
        """Whether it only adds finite numbers to scores: -inf stays, with derivatives that are 0 times 1."""
        return False

    def apply(self, scores: Array, cells: Cells) -> Array:
        """The new scores, of the same shape and dtype."""
        raise NotImplementedError

    def closure_convert(self, dtype: Any) -> Score:
        """The score with what its functions close over as leaves, for scores of this dtype."""
        del dtype
        return self

    def check(self, leading: tuple[int, ...]) -> None:
        """Raise ValueError where a parameter does not fit a call with these leading axes."""

    def expression(self) -> str:
        """The code that makes this score."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.expression()


@record
class Chain(Score):
    """Scores one after the other."""

    parts: tuple[Score, ...]

    @property
    def reads_positions(self) -> bool:
        return any(part.reads_positions for part in self.parts)

    @property
    def adds(self) -> bool:
        return all(part.adds for part in self.parts)

    def apply(self, scores: Array, cells: Cells) -> Array:
        for part in self.parts:
            scores = part.apply(scores, cells)
        return scores

    def closure_convert(self, dtype: Any) -> Score:
        return Chain(tuple(part.closure_convert(dtype) for part in self.parts))

    def check(self, leading: tuple[int, ...]) -> None:
        for part in self.parts:
            part.check(leading)

    def expression(self) -> str:
        return f"[{', '.join(map(repr, self.parts))}]"


def compose(score: Score | Sequence[Score] | None) -> Chain | None:
    """One score, or several from left to right, as a chain; none is None."""
    if score is None:
        return None
    parts = (score,) if isinstance(score, Score) else score
    flat: list[Score] = []
    try:
        for part in parts:
            flat.extend(part.parts if isinstance(part, Chain) else [part])
    except TypeError:
        flat = [score]  # type: ignore[list-item]
    for part in flat:
        if not isinstance(part, Score):
            raise TypeError(
                f"score: expected a scores.Score or a sequence of them, got {type(part).__name__}; wrap a"
                " function as scores.modifier(fn)"
            )
    return Chain(tuple(flat)) if flat else None


def parameter(name: str, value: Any, *, positive: bool = True) -> Any:
    """A number, or one per head."""
    array: Any = value if hasattr(value, "dtype") else np.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.integer) or (
        array.dtype == np.float64 and not hasattr(value, "dtype")
    ):
        array = array.astype(np.float32)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name}: expected a number or one per head, got {array.dtype}")
    if array.ndim > 1:
        raise ValueError(f"{name}: expected a number or an array (H,), got shape {tuple(array.shape)}")
    if positive and is_concrete(array) and not np.all(np.asarray(array) > 0):
        raise ValueError(f"{name}: expected more than 0, got {np.asarray(array).tolist()}")
    return array


def check_heads(name: str, count: int, leading: tuple[int, ...]) -> None:
    heads = leading[-1] if leading else 1
    if count not in (1, heads):
        raise ValueError(f"{name}: expected one entry per query head, {heads}, or a single one; got {count}")


def spell(value: Any) -> str:
    """A parameter as code when it is small and known, else its type."""
    if is_concrete(value) and np.size(value) <= 16:
        return str(np.asarray(value).tolist())
    return f"<{value.dtype}{list(np.shape(value))}>"
