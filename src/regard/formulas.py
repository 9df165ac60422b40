"""Formulas in index notation: written once, read as text, LaTeX or MathML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Protocol

Roles = Mapping[str, str]  # what each index does, for its colour in MathML

_GREEK = {"gamma": "γ", "eps": "ε"}
_LATEX = {"gamma": r"\gamma", "eps": r"\epsilon"}
_FUNCTIONS = ("tanh", "log")
_TIGHT = '<mo stretchy="false" lspace="0" rspace="0">'


class Formula(Protocol):
    """A part of a formula."""

    @property
    def text(self) -> str:
        """Return text as `regard.theory` writes it: S^{ij} = sum_a Q^{ia} K^{ja}."""
        ...

    @property
    def latex(self) -> str:
        """Return LaTeX for math mode; no package is needed."""
        ...

    def mathml(self, roles: Roles) -> str:
        """Return MathML elements; an index has the class of its role."""
        ...


@dataclass(frozen=True)
class Symbol:
    """A letter or a word with indices above and a mark below."""

    name: str
    indices: str = ""
    below: str = ""

    @property
    def text(self) -> str:
        below = f"_{self.below}" if self.below else ""
        return f"{self.name}{below}{f'^{{{self.indices}}}' if self.indices else ''}"

    @property
    def latex(self) -> str:
        below = f"_{{{_upright(self.below)}}}" if self.below else ""
        return f"{_upright(self.name)}{below}{f'^{{{self.indices}}}' if self.indices else ''}"

    def mathml(self, roles: Roles) -> str:
        base = f"<mi>{escape(_GREEK.get(self.name, self.name))}</mi>"
        above = f"<mrow>{_index_elements(self.indices, roles)}</mrow>"
        below = f"<mi>{escape(self.below)}</mi>"
        if self.below and self.indices:
            return f"<msubsup>{base}{below}{above}</msubsup>"
        if self.below:
            return f"<msub>{base}{below}</msub>"
        return f"<msup>{base}{above}</msup>" if self.indices else base


@dataclass(frozen=True)
class Number:
    """A number, as written."""

    written: str

    @property
    def text(self) -> str:
        return self.written

    @property
    def latex(self) -> str:
        return self.written

    def mathml(self, roles: Roles) -> str:
        del roles
        return f"<mn>{escape(self.written)}</mn>"


@dataclass(frozen=True)
class Sum:
    """A sum over indices."""

    over: str
    body: Formula

    @property
    def text(self) -> str:
        return f"sum_{self.over} {self.body.text}"

    @property
    def latex(self) -> str:
        return rf"\sum_{{{self.over}}} {self.body.latex}"

    def mathml(self, roles: Roles) -> str:
        over = _index_elements(self.over, roles)
        return f"<munder><mo>∑</mo><mrow>{over}</mrow></munder>{self.body.mathml(roles)}"


@dataclass(frozen=True)
class Row:
    """Parts side by side with a sign between them; no sign is a product."""

    parts: tuple[Formula, ...]
    sign: str = ""

    @property
    def text(self) -> str:
        return (f" {self.sign} " if self.sign else " ").join(part.text for part in self.parts)

    @property
    def latex(self) -> str:
        return (f" {self.sign} " if self.sign else r" \, ").join(part.latex for part in self.parts)

    def mathml(self, roles: Roles) -> str:
        shown = {"-": "−"}.get(self.sign, self.sign)
        # U+2062 is a product without a sign; a word beside a letter needs room.
        between = f"<mo>{shown}</mo>" if shown else '<mo rspace="0.18em">&#x2062;</mo>'
        return between.join(f"<mrow>{part.mathml(roles)}</mrow>" for part in self.parts)


@dataclass(frozen=True)
class Fraction:
    """One over the other."""

    above: Formula
    below: Formula

    @property
    def text(self) -> str:
        above = f"({self.above.text})" if isinstance(self.above, Row) and self.above.sign else self.above.text
        below = f"({self.below.text})" if isinstance(self.below, Row) else self.below.text
        return f"{above} / {below}"

    @property
    def latex(self) -> str:
        return rf"\frac{{{self.above.latex}}}{{{self.below.latex}}}"

    def mathml(self, roles: Roles) -> str:
        above, below = (f"<mrow>{part.mathml(roles)}</mrow>" for part in (self.above, self.below))
        return f"<mfrac>{above}{below}</mfrac>"


@dataclass(frozen=True)
class Exponential:
    """e to the power of something."""

    power: Formula

    @property
    def text(self) -> str:
        return f"e^{{{self.power.text}}}"

    @property
    def latex(self) -> str:
        return f"e^{{{self.power.latex}}}"

    def mathml(self, roles: Roles) -> str:
        return f"<msup><mi>e</mi><mrow>{self.power.mathml(roles)}</mrow></msup>"


@dataclass(frozen=True)
class Function:
    """A function of something; "sqrt" and "abs" have signs of their own."""

    name: str
    arguments: tuple[Formula, ...]

    @property
    def text(self) -> str:
        inner = ", ".join(part.text for part in self.arguments)
        if self.name == "abs":
            return f"|{inner}|"
        return f"{self.name} {inner}" if self._is_bare else f"{self.name}({inner})"

    @property
    def latex(self) -> str:
        inner = ", ".join(part.latex for part in self.arguments)
        if self.name == "sqrt":
            return rf"\sqrt{{{inner}}}"
        if self.name == "abs":
            return rf"\left| {inner} \right|"
        name = f"\\{self.name}" if self.name in _FUNCTIONS else _upright(self.name)
        if self._is_bare:
            return f"{name} {inner}"
        return rf"{name}\left( {inner} \right)"

    def mathml(self, roles: Roles) -> str:
        inner = "<mo>,</mo>".join(f"<mrow>{part.mathml(roles)}</mrow>" for part in self.arguments)
        if self.name == "sqrt":
            return f"<msqrt>{inner}</msqrt>"
        if self.name == "abs":
            return f"<mrow><mo>|</mo>{inner}<mo>|</mo></mrow>"
        name = f"<mi>{escape(self.name)}</mi>"
        # U+2061 applies a function.
        return (
            f"{name}<mo>&#x2061;</mo>{inner}"
            if self._is_bare
            else f"{name}<mrow><mo>(</mo>{inner}<mo>)</mo></mrow>"
        )

    @property
    def _is_bare(self) -> bool:
        """Return whether parentheses can be left out, as in log Z."""
        return self.name == "log" and isinstance(self.arguments[0], Symbol)


@dataclass(frozen=True)
class Terms:
    """The symbols that the formula of a score function reads."""

    before: Symbol
    """The scores that it is given."""
    query_position: Symbol
    key_position: Symbol
    example: str = ""
    """The letter of the first leading axis; "" without one."""
    head: str = ""
    """The letter of the heads; "" without them."""


@dataclass(frozen=True)
class Equation:
    """A symbol and its definition; without one it is given."""

    left: Formula
    right: Formula | None = None

    @property
    def text(self) -> str:
        return self.left.text if self.right is None else f"{self.left.text} = {self.right.text}"

    @property
    def latex(self) -> str:
        return self.left.latex if self.right is None else f"{self.left.latex} = {self.right.latex}"

    def mathml(self, roles: Roles) -> str:
        left = self.left.mathml(roles)
        return left if self.right is None else f"{left}<mo>=</mo>{self.right.mathml(roles)}"


def product(*parts: Formula) -> Row:
    """Multiply the parts."""
    return Row(parts)


def _upright(name: str) -> str:
    """Write a letter as it is, a word in upright letters."""
    if name in _LATEX:
        return _LATEX[name]
    if len(name) == 1:
        return name
    # A name of the user's: nothing in it may be taken for a command.
    plain = "".join(c if c.isascii() and (c.isalnum() or c in " .<>") else r"\_" for c in name)
    return rf"\mathrm{{{plain}}}"


def _index_elements(indices: str, roles: Roles) -> str:
    """Write one element per index, so that each has the colour of its role."""
    found = []
    for index in indices:
        kind = f' class="{roles[index]}"' if index in roles else ""
        found.append(f"<mi{kind}>{escape(index)}</mi>" if index.isalpha() else f"{_TIGHT}{index}</mo>")
    return "".join(found)
