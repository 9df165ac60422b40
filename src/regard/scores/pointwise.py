"""Scores that look at one score at a time: softcap, temperature, any function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, use_abstract_mesh

from regard.axes import Array, ArrayLike
from regard.explicit_meshes import explicit_mesh
from regard.formulas import Formula, Fraction, Function, Number, Symbol, Terms, product
from regard.manual_meshes import run_anywhere, trace_anywhere
from regard.masks.closures import Pinned, demand_unchanged, pin, reads_argument, trace_pinned
from regard.masks.grid import is_concrete
from regard.masks.predicates import call_closure
from regard.records import record, static
from regard.scores.cells import Cells
from regard.scores.score import Score, parameter, per_head_symbol


def softcap(cap: float | ArrayLike) -> Score:
    """Keep scores within -cap..cap, smoothly.

    s' = cap tanh(s / cap)

    Args:
        cap: a finite number above 0, or one per query head `(H,)`; may be traced, and has a gradient.

    Returns:
        A score.

    Raises:
        TypeError, ValueError: a cap that is no number, not above 0, infinite, or of a wrong shape.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import attend, scores
        >>> x = 100 * jnp.eye(2)
        >>> attend(x, x, x, score=scores.softcap(1.0), scale=1.0)[0].round(1)
        Array([73.1, 26.9], dtype=float32)

    Reference: Gemma Team, "Gemma 2", 2024, section 2.
    """
    if cap is None or (isinstance(cap, int | float) and cap == 0):
        raise (TypeError if cap is None else ValueError)(
            f"cap: expected a number above 0, got {cap!r}; without a cap, score=None"
        )
    caps = parameter("cap", cap)
    if is_concrete(caps) and np.isinf(np.asarray(caps)).any():
        raise ValueError(
            f"cap: expected finite numbers, got {np.asarray(caps).tolist()}; without a cap, no score"
        )
    return Softcap(caps)


@record
class Softcap(Score):
    """Scores bent to lie within a bound."""

    cap: Any
    maker = staticmethod(softcap)
    head_axes: ClassVar = {"cap": 0}
    meaning = " bends scores smoothly: none leaves -cap..cap."
    reads_batch = False
    reads_positions = False
    bounded = True
    casts_parameters = True

    @property
    def caps(self) -> float | Array | None:
        return self.cap

    def apply(self, scores: Array, cells: Cells) -> Array:
        return _bend(scores, self._cap_of(scores, cells))

    def derivative(self, scores: Array, cells: Cells) -> Array:
        cap = self._cap_of(scores, cells)
        return _slope(jnp.maximum(scores, -cap), cap)

    def _cap_of(self, scores: Array, cells: Cells) -> Array:
        return cells.per_head(jnp.asarray(self.cap).astype(scores.dtype))

    def formula(self, terms: Terms) -> Formula:
        cap = per_head_symbol("cap", self.cap)
        return product(cap, Function("tanh", (Fraction(terms.before, cap),)))


# tanh x / x as a fraction of polynomials in x^2, constants first: relative error 2e-8 up to x = 9.
_NUMERATOR = (0.999999979, 0.133810258, 0.00349558827, 2.06090844e-05, 1.33546636e-08)
_DENOMINATOR = (1.0, 0.467143413, 0.0258769827, 0.000328563504, 7.77655933e-07)


@jax.custom_jvp
def _bend(scores: Array, cap: Array) -> Array:
    """Compute cap tanh(scores / cap), in float32 faster than XLA on CPUs (`benchmarks/NOTES.md`), to 4e-7."""
    if scores.dtype != jnp.float32:
        return cap * jnp.tanh(scores * (1 / cap))
    square = jnp.minimum(jnp.square(scores * (1 / cap)), np.float32(81))

    def polynomial(coefficients: tuple[float, ...]) -> Array:
        total = jnp.full_like(square, coefficients[-1])
        for coefficient in coefficients[-2::-1]:
            total = total * square + np.float32(coefficient)
        return total

    bent = scores * polynomial(_NUMERATOR) / polynomial(_DENOMINATOR)
    # Not a minimum and a maximum, which lose NaN where XLA's CPU makes them part of a product's kernel.
    return jax.lax.clamp(jnp.broadcast_to(-cap, bent.shape), bent, jnp.broadcast_to(cap, bent.shape))


_bend.defjvps(
    lambda tangent, bent, scores, cap: tangent * _slope(bent, cap),
    # tanh x - x (1 - tanh^2 x), of x = scores / cap
    lambda tangent, bent, scores, cap: tangent * (bent - scores * _slope(bent, cap)) * (1 / cap),
)


def _slope(bent: Array, cap: Array) -> Array:
    """Compute 1 - tanh^2 from cap tanh."""
    return 1 - jnp.square(bent * (1 / cap))


def temperature(value: float | ArrayLike) -> Score:
    """Divide scores: below 1 attention sharpens, above 1 it spreads.

    s' = s / value

    Args:
        value: a number above 0, or one per query head `(H,)`; may be traced, and has a gradient.

    Returns:
        A score.

    Raises:
        TypeError, ValueError: a value that is no number, not above 0, or of a wrong shape.

    Example:
        >>> from regard import scores
        >>> scores.temperature([0.5, 2.0])
        temperature([0.5, 2.0])

    Reference: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, section 2, of a softmax
    over classes.
    """
    return Temperature(parameter("temperature", value))


@record
class Temperature(Score):
    """Scores divided by a number."""

    value: Any
    maker = staticmethod(temperature)
    head_axes: ClassVar = {"value": 0}
    meaning = ": below 1 weights sharpen, above 1 they spread."
    reads_batch = False
    reads_positions = False
    casts_parameters = True

    def apply(self, scores: Array, cells: Cells) -> Array:
        return scores * (1 / cells.per_head(jnp.asarray(self.value).astype(scores.dtype)))

    def formula(self, terms: Terms) -> Formula:
        return Fraction(terms.before, per_head_symbol("temperature", self.value))


# One score, and four integers: batch, head, query position, key position.
Modify = Callable[[Array, Array, Array, Array, Array], Array]


# Names that say which of a modifier's numbers a parameter is: they come in this order.
_PLACES = {"score": 0, "batch": 1, "head": 2, "query": 3, "query_position": 3, "key": 4, "key_position": 4}


def modifier(fn: Modify) -> Score:
    """Let `fn` say what becomes of each score.

    s'_ts = fn(s_ts, batch, head, query_position, key_position)

    Args:
        fn: called on scalars (it is mapped over all pairs): the score in the accumulation dtype, and int32
            `batch` (index on the first leading axis; 0 where heads are the only one), `head` (query head),
            `query_position` and `key_position`. It returns the new score. Arrays that it closes over may be
            traced, and it sees them in the dtype they have; floating-point ones have gradients, which are
            added up in that dtype: of a table in bfloat16 read `table.astype(score.dtype)[index]`. Every
            call looks at what it reads from around it; programs are compiled for what it computes.

    Returns:
        A score.

    Raises:
        TypeError: something that cannot be called with the five, or that has them in another order, or (when
            evaluated) an answer that is not one score.

    Example:
        >>> from regard import scores
        >>> def nearby(score, batch, head, query, key):
        ...     return score - 0.1 * abs(query - key)
        >>> scores.modifier(nearby)
        modifier(nearby)

    Reference: `score_mod` in PyTorch's FlexAttention has the same arguments, with indices for positions.
    """
    if not callable(fn):
        raise TypeError(
            f"fn: expected a function of (score, batch, head, query_position, key_position), got {fn!r}"
        )
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of functions that are not Python's
        return Modifier(fn)
    try:
        signature.bind(*range(5))
        for position, name in enumerate(signature.parameters):
            if _PLACES.get(name, position) != position:
                raise TypeError(f"{name} is not in its place")
    except TypeError:
        name = getattr(fn, "__qualname__", repr(fn))
        raise TypeError(
            "fn: expected fn(score, batch, head, query_position, key_position), got"
            f" {name}{signature}; bind others with functools.partial"
        ) from None
    return Modifier(fn)


class Modified(Score):
    """A score that a function makes of each one and its place."""

    meaning = " of each score and its place: batch, head, query, key."

    @property
    def title(self) -> str:
        return "modifier"

    def formula(self, terms: Terms) -> Formula:
        name = repr(self).removeprefix("modifier(").removesuffix(")").rpartition(".")[2]
        leading = tuple(Symbol(letter) if letter else Number("0") for letter in (terms.example, terms.head))
        return Function(name, (terms.before, *leading, terms.query_position, terms.key_position))


@record
class Modifier(Modified):
    """A modifier as a function of Python's."""

    fn: Modify = static()
    constants: tuple[Any, ...] = ()  # what fn closes over, once it is pinned

    @property
    def reads_positions(self) -> bool:
        return reads_argument(self._modify, 3, _arguments(np.float32))

    def pin(self, dtype: Any) -> Score:
        if isinstance(self.fn, Pinned):
            demand_unchanged(self.fn, self._modify, _arguments(dtype))
            return self
        return Modifier(*pin(self.fn, self._modify, _arguments(dtype)))

    def apply(self, scores: Array, cells: Cells) -> Array:
        program = self.closure_convert(scores.dtype)  # refuses what returns no score
        if self.constants:
            return program.apply(scores, cells)
        return _map_scores(functools.partial(call_closure, "modifier", self.fn), scores, cells)

    def closure_convert(self, dtype: Any) -> Score:
        shapes, modify = _arguments(dtype), functools.partial(call_closure, "modifier", self.fn)
        program = trace_pinned(self._modify, self.constants, *shapes)
        if explicit_mesh(program.consts) is not None:
            program = trace_anywhere(modify, *shapes)  # which says what it cannot compute with
        answers = program.out_avals
        if len(answers) != 1 or answers[0].shape or not jnp.issubdtype(answers[0].dtype, jnp.floating):
            returned = ", ".join(map(str, answers)) or "nothing"
            raise TypeError(f"modifier: expected fn to return one floating-point score, got {returned}")
        return HoistedModifier(tuple(map(_fix_dtype, program.consts)), program.jaxpr, self.expression())

    def _modify(self, *arguments: Any) -> Any:
        # A program keeps the mesh that it is made in, and computes with no array of another.
        with use_abstract_mesh(AbstractMesh((), ())):
            return call_closure("modifier", self.fn, *arguments)

    def expression(self) -> str:
        return f"modifier({getattr(self.fn, '__qualname__', repr(self.fn))})"


def _arguments(dtype: Any) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of a modifier's five arguments."""
    return [jax.ShapeDtypeStruct((), dtype), *[jax.ShapeDtypeStruct((), jnp.int32)] * 4]


def _map_scores(modify: Callable[..., Array], scores: Array, cells: Cells) -> Array:
    """Compute a function of every score and its place."""
    places = (cells.batch, cells.head, cells.query_position, cells.key_position)
    return jnp.vectorize(modify)(scores, *places).astype(scores.dtype)


def _fix_dtype(constant: Any) -> Any:
    """Return a constant of a program, whose dtype the program knows: it may not follow that of scores."""
    return constant.astype(constant.dtype) if jax.typeof(constant).weak_type else constant


@record
class HoistedModifier(Modified):
    """A modifier as a program; the arrays that its function closes over are leaves."""

    constants: tuple[Any, ...]
    program: Any = static()
    text: str = static()

    def apply(self, scores: Array, cells: Cells) -> Array:
        def one(*arguments: Array) -> Array:
            return run_anywhere(self.program, self.constants, *arguments)[0]

        return _map_scores(one, scores, cells)

    def expression(self) -> str:
        return self.text
