"""Formulas that docstrings and the theory page write in plain text, as MathML.

Names get their indices (`Q^{ia}`, `query_td`), sums their sign, roots their bar. What stands between spaces
is a formula by itself, so that a long line breaks like a sentence.
"""

import re
from html import escape

# Names may hold words, and end with the letters of indices: query_position_t.
TOKEN = re.compile(r"\s+|\d+(?:\.\d+)?(?:e-?\d+)?|[A-Za-z]+(?:_[a-z]{4,})*'*|<=|>=|!=|->|<-|:=|\S")
SIGNS = {"<=": "≤", ">=": "≥", "!=": "≠", "->": "→", "<-": "←", "-": "−", "*": "∗"}
LETTERS = {"inf": "∞", "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "eta": "η"}
LETTERS |= {"theta": "θ", "lambda": "λ", "mu": "μ", "xi": "ξ", "pi": "π", "rho": "ρ", "sigma": "σ"}
LETTERS |= {"tau": "τ", "phi": "φ", "omega": "ω", "partial": "∂"}
BIG = {"sum": "∑", "prod": "∏"}
PAIRS = {"(": ")", "[": "]", "{": "}"}
WORD = re.compile(r"[A-Za-z][A-Za-z'-]+[,.;:]?")
FUNCTIONS = {
    "log",
    "exp",
    "max",
    "min",
    "sin",
    "cos",
    "tanh",
    "tr",
    "Var",
    "cov",
    "argmax",
    "softmax",
    "diag",
}
SIGN = '<mo stretchy="false">{}</mo>'.format
GROUPS = re.compile(r"[_^][({]|sqrt\(")


class UnreadableError(ValueError):
    """Raised for a text that is no formula of ours."""


class Reader:
    """A reader of one formula."""

    def __init__(self, text: str):
        self.tokens, self.place, self.is_index = TOKEN.findall(text), 0, False

    def peek(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self, wanted: str = "") -> str:
        token = self.peek()
        if not token or (wanted and token != wanted):
            raise UnreadableError(f"expected {wanted or 'more'}, got {token!r}")
        self.place += 1
        return token

    def row(self, end: str = "") -> str:
        """Everything up to a closing bracket, which is left."""
        parts = []
        while self.peek() != end:
            parts.append(self.scripted())
        return f"<mrow>{''.join(parts)}</mrow>"

    def scripted(self) -> str:
        """A name, number or sign with what hangs on it."""
        name, base = self.peek(), self.atom()
        hung = {}
        while (mark := self.peek()) in ("_", "^") and mark not in hung:
            self.take()
            hung[mark] = self.hanging()
        kind = {"_": "sub", "^": "sup"}
        if not hung:
            return base
        if name in BIG:
            kind = {"_": "under", "^": "over"}
        order = [mark for mark in ("_", "^") if mark in hung]
        element = "m" + "".join(kind[mark] for mark in order)
        return f"<{element}>{base}{''.join(hung[mark] for mark in order)}</{element}>"

    def hanging(self) -> str:
        """An index or exponent: a group, whose brackets are left out, or one thing with its sign."""
        was, self.is_index = self.is_index, True
        opening = self.peek()
        if opening in ("{", "("):
            self.take()
            inside = self.row(PAIRS[opening])
            self.take(PAIRS[opening])
        else:
            sign = f"<mo>{SIGNS['-']}</mo>" if opening == "-" and self.take() else ""
            inside = f"<mrow>{sign}{self.atom()}</mrow>"
        self.is_index = was
        return inside

    def atom(self) -> str:
        token = self.take()
        if token.isspace():
            return '<mspace width="0.4em"/>'
        if token == "sqrt" and self.peek() == "(":
            self.take()
            inside = self.row(")")
            self.take(")")
            return f"<msqrt>{inside}</msqrt>"
        if token in BIG:
            return f"<mo>{BIG[token]}</mo>"
        if token[0].isdigit():
            return f"<mn>{token}</mn>"
        if re.fullmatch(r"d[A-Z]", token):
            return f"<mrow><mi>d</mi><mi>{token[1]}</mi></mrow>"
        if self.is_index and token.isalpha() and len(token) < 4 and token not in {*LETTERS, *FUNCTIONS}:
            return "".join(f"<mi>{letter}</mi>" for letter in token)
        if token[0].isalpha():
            return f"<mi>{LETTERS.get(token, token)}</mi>"
        if token in PAIRS:
            inside = self.row(PAIRS[token])
            return f"<mrow>{SIGN(token)}{inside}{SIGN(self.take(PAIRS[token]))}</mrow>"
        if token in "_^":
            raise UnreadableError(f"an index without a name: {token}")
        return SIGN(escape(SIGNS.get(token, token)))


def split_words(text: str) -> list[str]:
    """Split at spaces, but not within indices, exponents and roots."""
    words, held = [], ""
    for word in text.split(" "):
        held = f"{held} {word}" if held else word
        starts = [found.end() - 1 for found in GROUPS.finditer(held)]
        if all(_is_closed(held[start:]) for start in starts):
            words.append(held)
            held = ""
    if held:
        raise UnreadableError(f"a bracket is open in {text!r}")
    return words


def _is_closed(text: str) -> bool:
    depth = 0
    for letter in text:
        depth += (letter in "({[") - (letter in ")}]")
        if depth == 0:
            return True
    return False


def typeset_word(word: str) -> str:
    """One word as MathML, or as it is where it is a word."""
    known = {*LETTERS, *FUNCTIONS, *BIG, "dL"}
    if WORD.fullmatch(word) and word.rstrip(",.;:") not in known:
        return escape(word)
    # Brackets that a space divides are signs here.
    pieces, reader = [], Reader(word)
    while reader.peek():
        at = reader.place
        try:
            pieces.append(reader.scripted())
        except UnreadableError:
            reader.place = at
            token = reader.take()
            if token not in "()[]{}|,":
                raise
            pieces.append(SIGN(token))
    return f"<math>{''.join(pieces)}</math>"


def typeset(text: str) -> str:
    """A block of lines; several formulas on a line are divided by wide gaps."""
    lines = []
    for line in text.rstrip().split("\n"):
        indent = len(line) - len(line.lstrip())
        parts = (split_words(part) for part in re.split(r" {2,}", line.strip()) if part)
        joined = "".join(f"<span>{' '.join(map(typeset_word, part))}</span>" for part in parts)
        lines.append(f'<div style="margin-left: {indent / 2:g}em">{joined}</div>')
    return f'<div class="formula">{"".join(lines)}</div>'
