"""Formulas that docstrings and the theory page write in plain text, as MathML.

Names get their indices (`Q^{ia}`, `query_td`), sums their sign, roots their bar. What stands between spaces
is a formula by itself, so that a long line breaks like a sentence.

Several letters are a name, but in an index, where up to four are an index each. Behind ^ stands an exponent
if it is in round brackets, or if it hangs on e, whose exponent may be one name with its index: `e^lse_it`;
else an index, in braces if it is longer than a letter. A letter and a digit are a name with its number: `W1`.
A dot between spaces is a scalar product, * multiplies number by number, // rounds down. Sums have an index;
without one, "sum" is a word, and so is any word that is no name elsewhere in the block. Backticks hold code.
"""

import re
from collections.abc import Set
from html import escape
from itertools import repeat

# Names may hold words, and end with the letters of indices: query_position_t, output_lhte.
WHOLE = r"(?:fold_in|min_p|top_[kp]|turn_back)\b"
NAMES = r"[A-Za-z]+(?:_(?:[a-z]{5,}|(?:bias|ids|mask|mod|norm|rule|size)(?![a-z])))*'*"
TOKEN = re.compile(rf"\s+|\d+(?:\.\d+)?(?:e-?\d+)?|{WHOLE}|[A-Za-z]\d\b|{NAMES}|==|<=|>=|!=|->|<-|:=|\S")
SIGNS = {"<=": "≤", ">=": "≥", "!=": "≠", "->": "→", "<-": "←", "-": "−", "*": "⊙", "~": "∼", "==": "="}
LETTERS = {"inf": "∞", "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "eta": "η"}
LETTERS |= {"theta": "θ", "lambda": "λ", "mu": "μ", "xi": "ξ", "pi": "π", "rho": "ρ", "sigma": "σ"}
LETTERS |= {"tau": "τ", "phi": "φ", "omega": "ω", "partial": "∂", "Delta": "Δ"}
BIG = {"sum": "∑", "prod": "∏"}
PAIRS = {"(": ")", "[": "]", "{": "}", "⌊": "⌋"}
QUOTIENT = re.compile(r"(\w+) // (\w+|\([^()]*\))")
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
NAMED = {*LETTERS, *FUNCTIONS}
SIGN = '<mo stretchy="false">{}</mo>'.format
DOT = "<mo>⋅</mo>"
GROUPS = re.compile(r"[_^][({]|sqrt\(")
# dX, and what stands for no word of a sentence: s', Wo, scale.
DIFFERENTIAL = re.compile(r"d([A-Z]|[gpsxy]|sink|bias|slope|scale|cap|logZ)")
NAME = re.compile(rf"{DIFFERENTIAL.pattern}|[A-Za-z]+'+|W[a-z]|b[gkoqrv]|scale|slope|cap")
BELOW = {"row", "sink"}  # short, and names in an index, too
JOINING = {"and", "in", "is", "not", "of", "or", "over", "where"}


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
            if "^" in hung:
                raise UnreadableError(f"an index behind an exponent of {name}: which has it?")
            self.take()
            is_exponent = mark == "^" and (name == "e" or self.peek() == "(")
            hung[mark] = self.hanging(is_exponent)
        kind = {"_": "sub", "^": "sup"}
        if not hung:
            return base
        if base.endswith("′</mo></msup>") and "^" not in hung:  # a prime stands above the index
            return base.replace("msup>", "msubsup>").replace("<mo>′", f"{hung['_']}<mo>′")
        if name in BIG:
            kind = {"_": "under", "^": "over"}
        order = [mark for mark in ("_", "^") if mark in hung]
        element = "m" + "".join(kind[mark] for mark in order)
        return f"<{element}>{base}{''.join(hung[mark] for mark in order)}</{element}>"

    def hanging(self, is_exponent: bool) -> str:
        """An index or exponent: a group, whose brackets are left out, or one thing with its sign."""
        was, self.is_index = self.is_index, not is_exponent
        opening, is_raised = self.peek(), self.tokens[self.place - 1] == "^"
        if opening in ("{", "("):
            self.take()
            inside = self.row(PAIRS[opening])
            self.take(PAIRS[opening])
        else:
            sign = f"<mo>{SIGNS['-']}</mo>" if opening == "-" and self.take() else ""
            first = self.peek()
            is_long = is_raised and len(first) > 1 and first not in LETTERS and not first.isdigit()
            if not first[:1].isalnum() or (is_long and not is_exponent):
                raise UnreadableError(f"braces are missing around what begins with {first!r}")
            inside = f"<mrow>{sign}{self.scripted() if is_exponent else self.atom()}</mrow>"
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
        if not self.is_index and (found := DIFFERENTIAL.fullmatch(token)):
            names = found[1].replace("logZ", "log Z").split()
            return f"<mrow><mi>d</mi>{''.join(f'<mi>{name}</mi>' for name in names)}</mrow>"
        if self.is_index and token in JOINING:
            return f"<mtext>{token}</mtext>"
        if self.is_index and token.isalpha() and len(token) < 5 and token not in NAMED | BELOW:
            return "".join(f"<mi>{letter}</mi>" for letter in token)
        if token.endswith("'") and token[0].isalpha():
            bare = token.rstrip("'")
            return f"<msup><mi>{LETTERS.get(bare, bare)}</mi><mo>{'′' * (len(token) - len(bare))}</mo></msup>"
        if token[0].isalpha() and token[-1].isdigit():
            return f"<msub><mi>{token[0]}</mi><mn>{token[1]}</mn></msub>"
        if token[0].isalpha():
            return f"<mi>{LETTERS.get(token, token)}</mi>"
        if token in PAIRS:
            inside = self.row(PAIRS[token])
            return f"<mrow>{SIGN(token)}{inside}{SIGN(self.take(PAIRS[token]))}</mrow>"
        if token in "_^":
            raise UnreadableError(f"an index without a name: {token}")
        if token == "`":
            raise UnreadableError("a backtick without another")
        if [*self.tokens, ""][self.place - 2 : self.place + 1] == [" ", ".", " "]:
            return DOT
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


def is_word(text: str, names: Set[str] = frozenset()) -> bool:
    """Whether it is a word of a sentence, not a name of the formula."""
    bare = text.rstrip(",.;:")
    return bool(WORD.fullmatch(text)) and not (bare in NAMED or bare in names or NAME.fullmatch(bare))


def collect_names(text: str) -> set[str]:
    """Names of more than a letter that stand in a block of formulas among signs."""
    signed = (word.strip("()[]{}|") for word in re.sub(r"`[^`]+`", "", text).split() if not is_word(word))
    names = {token.rstrip("'") for word in signed if not is_word(word) for token in TOKEN.findall(word)}
    return {name for name in names if name.isalpha() and len(name) > 1 and name not in {*BIG, *JOINING}}


def typeset_word(word: str, following: str, names: Set[str]) -> str:
    """One word as MathML, or as it is where it is a word."""
    is_article = word == "a" and is_word(following, names) and following not in JOINING
    if not word or is_word(word, names) or is_article:
        return escape(word)
    if word == ".":
        return f"<math>{DOT}</math>"
    # Brackets that a space divides are signs here.
    pieces, reader = [], Reader(word)
    while reader.peek():
        at = reader.place
        try:
            pieces.append(reader.scripted())
        except UnreadableError:
            reader.place = at
            token = reader.take()
            if token not in "()[]{}⌊⌋|,":
                raise
            pieces.append(SIGN(token))
    return f"<math>{''.join(pieces)}</math>"


def typeset_part(text: str, names: Set[str]) -> str:
    """A formula, in which what backticks hold is code."""
    pieces = re.split(r"`([^`]+)`", text)
    for number, piece in enumerate(pieces):
        if number % 2:
            pieces[number] = f"<code>{escape(piece)}</code>"
        else:
            words = split_words(QUOTIENT.sub(r"⌊\1 / \2⌋", piece))
            pieces[number] = " ".join(map(typeset_word, words, [*words[1:], ""], repeat(names)))
    return "".join(pieces)


def typeset(text: str) -> str:
    """A block of lines; several formulas on a line are divided by wide gaps."""
    lines, names = [], collect_names(text)
    for line in text.rstrip().split("\n"):
        indent = len(line) - len(line.lstrip())
        parts = (part for part in re.split(r" {2,}", line.strip()) if part)
        joined = "".join(f"<span>{typeset_part(part, names)}</span>" for part in parts)
        lines.append(f'<div style="margin-left: {indent / 2:g}em">{joined}</div>')
    return f'<div class="formula">{"".join(lines)}</div>'
