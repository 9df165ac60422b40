"""Formulas in index notation: written once, read as text, LaTeX or MathML."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Literal

Roles = Mapping[str, str]  # what each index does, for its colour in MathML
Form = Literal["text", "latex", "mathml"]

_GREEK = {"gamma": "γ", "eps": "ε"}
_LATEX = {"gamma": r"\gamma", "eps": r"\epsilon"}
_FUNCTIONS = ("tanh", "log")
_TIGHT = '<mo stretchy="false" lspace="0" rspace="0">'


class Formula:
    """A part of a formula."""

    @property
    def text(self) -> str:
        """Return text as `regard.theory` writes it: S^{ij} = sum_a Q^{ia} K^{ja}."""
        return self.write("text", {})

    @property
    def latex(self) -> str:
        """Return LaTeX for math mode; no package is needed."""
        return self.write("latex", {})

    def mathml(self, roles: Roles) -> str:
        """Return MathML elements; an index has the class of its role."""
        return self.write("mathml", roles)

    def write(self, form: Form, roles: Roles) -> str:
        """Write the formula in one of the three forms; roles are for MathML."""
        raise NotImplementedError


@dataclass(frozen=True)
class Symbol(Formula):
    """A letter or a word with indices above and a mark below."""

    name: str
    indices: str = ""
    below: str = ""

    def write(self, form: Form, roles: Roles) -> str:
        if form != "mathml":
            name = _upright(self.name) if form == "latex" else self.name
            if self.below:
                name += f"_{{{_upright(self.below)}}}" if form == "latex" else f"_{self.below}"
            return f"{name}^{{{self.indices}}}" if self.indices else name
        base = f"<mi>{escape(_GREEK.get(self.name, self.name))}</mi>"
        above = f"<mrow>{_index_elements(self.indices, roles)}</mrow>"
        below = f"<mi>{escape(self.below)}</mi>"
        if self.below and self.indices:
            return f"<msubsup>{base}{below}{above}</msubsup>"
        if self.below:
            return f"<msub>{base}{below}</msub>"
        return f"<msup>{base}{above}</msup>" if self.indices else base


@dataclass(frozen=True)
class Number(Formula):
    """A number, as written."""

    written: str

    def write(self, form: Form, roles: Roles) -> str:
        number, _, power = self.written.partition("e")
        if form == "text" or not power:
            return f"<mn>{escape(self.written)}</mn>" if form == "mathml" else self.written
        if form == "latex":
            return rf"{number} \cdot 10^{{{int(power)}}}"
        return f"<mn>{number}</mn><mo>·</mo><msup><mn>10</mn><mn>{int(power)}</mn></msup>"


@dataclass(frozen=True)
class Sum(Formula):
    """A sum over indices."""

    over: str
    body: Formula

    def write(self, form: Form, roles: Roles) -> str:
        body = self.body.write(form, roles)
        if form == "mathml":
            return f"<munder><mo>∑</mo><mrow>{_index_elements(self.over, roles)}</mrow></munder>{body}"
        return rf"\sum_{{{self.over}}} {body}" if form == "latex" else f"sum_{self.over} {body}"


@dataclass(frozen=True)
class Row(Formula):
    """Parts side by side with a sign between them; no sign is a product."""

    parts: tuple[Formula, ...]
    sign: str = ""

    def write(self, form: Form, roles: Roles) -> str:
        parts = [part.write(form, roles) for part in self.parts]
        if form == "mathml":
            shown = {"-": "−"}.get(self.sign, self.sign)
            # U+2062 is a product without a sign; a word beside a letter needs room.
            between = f"<mo>{shown}</mo>" if shown else '<mo rspace="0.18em">&#x2062;</mo>'
            return between.join(f"<mrow>{part}</mrow>" for part in parts)
        between = r" \, " if form == "latex" else " "
        return (f" {self.sign} " if self.sign else between).join(parts)


@dataclass(frozen=True)
class Fraction(Formula):
    """One over the other."""

    above: Formula
    below: Formula

    def write(self, form: Form, roles: Roles) -> str:
        above, below = self.above.write(form, roles), self.below.write(form, roles)
        if form == "mathml":
            return f"<mfrac><mrow>{above}</mrow><mrow>{below}</mrow></mfrac>"
        if form == "latex":
            return rf"\frac{{{above}}}{{{below}}}"
        above = f"({above})" if isinstance(self.above, Row) and self.above.sign else above
        return f"{above} / ({below})" if isinstance(self.below, Row) else f"{above} / {below}"


@dataclass(frozen=True)
class Exponential(Formula):
    """e to the power of something."""

    power: Formula

    def write(self, form: Form, roles: Roles) -> str:
        power = self.power.write(form, roles)
        return f"<msup><mi>e</mi><mrow>{power}</mrow></msup>" if form == "mathml" else f"e^{{{power}}}"


@dataclass(frozen=True)
class Function(Formula):
    """A function of something; "sqrt" and "abs" have signs of their own."""

    name: str
    arguments: tuple[Formula, ...]

    def write(self, form: Form, roles: Roles) -> str:
        parts = [part.write(form, roles) for part in self.arguments]
        # Parentheses can be left out, as in log Z.
        is_bare = self.name == "log" and isinstance(self.arguments[0], Symbol)
        inner = ", ".join(parts)
        if form == "text":
            if self.name == "abs":
                return f"|{inner}|"
            return f"{self.name} {inner}" if is_bare else f"{self.name}({inner})"
        if form == "latex":
            if self.name == "sqrt":
                return rf"\sqrt{{{inner}}}"
            if self.name == "abs":
                return rf"\left| {inner} \right|"
            name = f"\\{self.name}" if self.name in _FUNCTIONS else _upright(self.name)
            return f"{name} {inner}" if is_bare else rf"{name}\left( {inner} \right)"
        inner = "<mo>,</mo>".join(f"<mrow>{part}</mrow>" for part in parts)
        if self.name == "sqrt":
            return f"<msqrt>{inner}</msqrt>"
        if self.name == "abs":
            return f"<mrow><mo>|</mo>{inner}<mo>|</mo></mrow>"
        # U+2061 applies a function.
        applied = f"<mo>&#x2061;</mo>{inner}" if is_bare else f"<mrow><mo>(</mo>{inner}<mo>)</mo></mrow>"
        return f"<mi>{escape(self.name)}</mi>{applied}"


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
class Equation(Formula):
    """A symbol and its definition; without one it is given."""

    left: Formula
    right: Formula | None = None

    def write(self, form: Form, roles: Roles) -> str:
        left_side = self.left.write(form, roles)
        equals = "<mo>=</mo>" if form == "mathml" else " = "
        return left_side if self.right is None else f"{left_side}{equals}{self.right.write(form, roles)}"


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
    elements = []
    for index in indices:
        kind = f' class="{roles[index]}"' if index in roles else ""
        elements.append(f"<mi{kind}>{escape(index)}</mi>" if index.isalpha() else f"{_TIGHT}{index}</mo>")
    return "".join(elements)
