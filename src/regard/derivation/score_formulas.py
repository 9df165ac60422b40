"""What each score function does, as a formula and in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from regard.derivation.formulas import Call, Equation, Formula, Fraction, Number, Row, Symbol, product
from regard.scores import Score
from regard.scores.distances import Alibi, RelativeBias
from regard.scores.pointwise import HoistedModifier, Modifier, Softcap, Temperature


class Setting(NamedTuple):
    """The symbols that a score function reads."""

    before: Symbol
    query_position: Symbol
    key_position: Symbol
    example: str  # the letter of the first leading axis; "" without one
    head: str


class Telling(NamedTuple):
    """A score function told."""

    name: str
    formula: Equation
    words: str


def tell(score: Score, after: Symbol, setting: Setting) -> Telling:
    """What a score function makes of the scores before it."""
    for kind, teller in _TELLERS.items():
        if isinstance(score, kind):
            name, formula, words = teller(score, setting)
            return Telling(name, Equation(after, formula), words)
    return Telling("score", Equation(after, Call("score", (setting.before,))), f"{score!r} of every score.")


def _per_head(name: str, parameter: Any) -> Symbol:
    return Symbol(name, "h" if parameter.size > 1 else "")


def _softcap(score: Softcap, setting: Setting) -> tuple[str, Formula, str]:
    cap = _per_head("cap", score.cap)
    formula = product(cap, Call("tanh", (Fraction(setting.before, cap),)))
    return "softcap", formula, f"{score!r} bends scores smoothly: none leaves -cap..cap."


def _temperature(score: Temperature, setting: Setting) -> tuple[str, Formula, str]:
    words = f"{score!r}: below 1 weights sharpen, above 1 they spread."
    return "temperature", Fraction(setting.before, _per_head("temperature", score.value)), words


def _alibi(score: Alibi, setting: Setting) -> tuple[str, Formula, str]:
    distance = Call("abs", (Row((setting.query_position, setting.key_position), "-"),))
    formula = Row((setting.before, product(_per_head("slope", score.slopes), distance)), "-")
    return "alibi", formula, f"{score!r}: a key loses in proportion to its distance."


def _relative_bias(score: RelativeBias, setting: Setting) -> tuple[str, Formula, str]:
    bucket = Call("bucket", (Row((setting.key_position, setting.query_position), "-"),))
    entry = Call("table", (bucket, *([Symbol("h")] if score.table.shape[1] > 1 else [])))
    words = f"{score!r}: a learned number for each distance, near ones apart, far ones in coarse buckets."
    return "relative_bias", Row((setting.before, entry), "+"), words


def _modifier(score: Modifier | HoistedModifier, setting: Setting) -> tuple[str, Formula, str]:
    name = repr(score).removeprefix("modifier(").removesuffix(")").rpartition(".")[2]
    leading = tuple(Symbol(letter) if letter else Number("0") for letter in (setting.example, setting.head))
    formula = Call(name, (setting.before, *leading, setting.query_position, setting.key_position))
    return "modifier", formula, f"{score!r} of each score and its place: batch, head, query, key."


_TELLERS: dict[type[Score], Callable[..., tuple[str, Formula, str]]] = {
    Softcap: _softcap,
    Temperature: _temperature,
    Alibi: _alibi,
    RelativeBias: _relative_bias,
    Modifier: _modifier,
    HoistedModifier: _modifier,
}
