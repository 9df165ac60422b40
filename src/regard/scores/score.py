"""Score: what every score function can do, and chains of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from regard.arguments import keep_array, read_array
from regard.axes import Array
from regard.formulas import Formula, Function, Symbol, Terms
from regard.masks.data import snake_case, spell_record, suggest_call
from regard.masks.grid import is_concrete
from regard.masks.mask import Mask
from regard.records import record
from regard.scores.cells import Cells


class Score:
    """A function of scaled scores, evaluated before bias and mask, tile by tile.

    A score is a frozen pytree: its floating-point leaves are parameters and have gradients. A score of your
    own is a class with `apply` under `regard.records.record`; other methods have safe answers.

    Example:
        >>> from regard import scores
        >>> scores.softcap(50)
        softcap(50.0)
    """

    maker: ClassVar[Callable[..., Score] | None] = None
    """The function that makes such a score from its fields and checks them; None, the class."""
    replaces_product: ClassVar[bool] = False
    """True if it stands where the product of query and key does, and has `transform` instead of `apply`."""
    reads_batch: ClassVar[bool] = True
    """True if the answer depends on the index on the first leading axis."""
    reads_positions: ClassVar[bool] = True
    """True if the answer depends on where queries and keys sit."""
    adds: ClassVar[bool] = False
    """True if it only adds finite numbers: -inf stays, with derivatives that are 0 times 1."""
    bounded: ClassVar[bool] = False
    """True if it makes a finite number of every score but NaN, and has a `derivative`."""
    casts_parameters: ClassVar[bool] = False
    """True if it uses its parameters in the dtype of scores alone, whatever they come in."""
    head_axes: ClassVar[Mapping[str, int]] = {}
    """Fields that may hold an entry per query head, and on which axis; `Cells` takes them out."""
    meaning: ClassVar[str] = " of every score."
    """The end of a sentence that begins with its expression, for a derivation."""

    @property
    def caps(self) -> float | Array | None:
        """Return c of a score that is c tanh(s / c), which kernels of libraries know; of others, None."""
        return None

    @property
    def parts(self) -> tuple[Score, ...]:
        """Return the scores that follow one another."""
        return (self,)

    def apply(self, scores: Array, cells: Cells) -> Array:
        """Return the new scores, of the same shape and dtype."""
        raise NotImplementedError

    def derivative(self, scores: Array, cells: Cells) -> Array:
        """Return the derivative by the scores before it, told from those that it made; any number at -inf."""
        raise NotImplementedError

    def transform(self, query: Array) -> Array:
        """Return the queries as they meet the keys."""
        raise NotImplementedError

    def pin(self, dtype: DTypeLike) -> Score:
        """Return the score with functions as they are now, by what they compute of scores of this dtype."""
        return self

    def closure_convert(self, dtype: DTypeLike) -> Score:
        """Return the score with arrays that its functions close over as leaves, for scores of this dtype.

        A function sees each parameter in the dtype that it has; one that is cast anyway may be so beforehand.
        """
        return jax.tree.map(lambda leaf: _cast(leaf, dtype), self) if self.casts_parameters else self

    def check(self, leading: tuple[int, ...]) -> None:
        """Raise ValueError where a parameter does not fit a call with these leading axes."""
        heads = leading[-1] if leading else 1
        for name, axis in self.head_axes.items():
            count = (*np.shape(getattr(self, name)), 1)[axis]
            if count not in (1, heads):
                raise ValueError(
                    f"{self.title} {name}: expected one entry per query head, {heads}, or a single one; got"
                    f" {count}"
                )

    @property
    def title(self) -> str:
        """Return the name of the step that it is in a derivation."""
        return snake_case(type(self).__name__)

    def formula(self, terms: Terms) -> Formula:
        """Return what it makes of the scores before it."""
        return Function(self.title, (terms.before,))

    @property
    def words(self) -> str:
        """Return the same in a sentence."""
        return f"{self!r}{self.meaning}"

    def expression(self) -> str:
        """Return the code that makes this score."""
        return spell_record(self)

    def __or__(self, other: Any) -> Score:
        if isinstance(other, Mask):
            return NotImplemented  # which knows what to say
        raise TypeError(
            "score: expected a list of scores, left to right, score=[first, second]; got |, & or +"
        )

    __and__ = __add__ = __ror__ = __rand__ = __radd__ = __or__

    def __repr__(self) -> str:
        return self.expression()


@record
class Chain(Score):
    """Scores one after the other."""

    members: tuple[Score, ...]

    @property
    def parts(self) -> tuple[Score, ...]:
        return self.members

    @property
    def reads_positions(self) -> bool:
        return any(part.reads_positions for part in self.parts)

    @property
    def adds(self) -> bool:
        return all(part.adds for part in self.parts)

    @property
    def bounded(self) -> bool:
        return len(self.parts) == 1 and self.parts[0].bounded

    def apply(self, scores: Array, cells: Cells) -> Array:
        for part in self.parts:
            scores = part.apply(scores, cells)
        return scores

    def derivative(self, scores: Array, cells: Cells) -> Array:
        return self.parts[0].derivative(scores, cells)

    def pin(self, dtype: DTypeLike) -> Score:
        return Chain(tuple(part.pin(dtype) for part in self.parts))

    def closure_convert(self, dtype: DTypeLike) -> Score:
        return Chain(tuple(part.closure_convert(dtype) for part in self.parts))

    def check(self, leading: tuple[int, ...]) -> None:
        for part in self.parts:
            part.check(leading)

    def expression(self) -> str:
        return f"[{', '.join(map(repr, self.parts))}]"


def _cast(leaf: Any, dtype: Any) -> Any:
    return jnp.asarray(leaf).astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def compose(score: Score | Sequence[Score] | None) -> Chain | None:
    """Chain one score, or several from left to right; none is None."""
    if score is None:
        return None
    parts = (score,) if isinstance(score, Score) else score
    flat: list[Score] = []
    try:
        for part in parts:
            flat.extend(part.parts if isinstance(part, Score) else [part])
    except TypeError:
        flat = [score]  # type: ignore[list-item]
    for part in flat:
        if not isinstance(part, Score):
            hint = suggest_call("scores", score if isinstance(score, str) else part)
            raise TypeError(
                f"score: expected a scores.Score or a sequence of them, got {type(part).__name__}"
                f"{hint or '; wrap a function as scores.modifier(fn)'}"
            )
    return Chain(tuple(flat)) if flat else None


def split_product(score: Chain | None) -> tuple[Any, Chain | None]:
    """Return the score that replaces the product, if there is one, and those after it."""
    if score is None:
        return None, None
    first = score.parts[0] if score.parts[0].replaces_product else None
    rest = score.parts if first is None else score.parts[1:]
    if any(part.replaces_product for part in rest):
        raise ValueError(
            f"score: expected bilinear first and once, because it replaces the product; got {score!r}"
        )
    return first, Chain(rest) if rest else None


def parameter(name: str, value: Any, *, positive: bool = True) -> Any:
    """Return a parameter as an array: a number, or one per head."""
    array = read_array(name, value)
    if jnp.issubdtype(array.dtype, jnp.integer):
        array = array.astype(float)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name}: expected a number or one per head, got {array.dtype}")
    if array.ndim > 1:
        raise ValueError(f"{name}: expected a number or an array (H,), got shape {tuple(array.shape)}")
    if positive and is_concrete(array) and not np.all(np.asarray(array) > 0):
        raise ValueError(f"{name}: expected more than 0, got {np.asarray(array).tolist()}")
    return keep_array(array)


def per_head_symbol(name: str, parameter: Any) -> Symbol:
    """Return the symbol of a parameter, with an index where it differs between heads."""
    return Symbol(name, "h" if parameter.size > 1 else "")
