"""Docstrings as they are written in Regard, told to Sphinx.

In a docstring single backticks mean code, a paragraph of equations is a formula that keeps its lines, and
stars and bars are nothing but stars and bars.
"""

import ast
import enum
import inspect
import re
import sys
from typing import Any, ForwardRef

from names import find_home
from numpy.typing import ArrayLike
from sphinx.application import Sphinx

SECTION = re.compile(r"(Args|Returns|Raises|Attributes|Example|Reference|Yields):")
EQUATION = re.compile(r"(?:`[^`]*`: +)?[A-Za-z_(][\w', \[\](){}^|.,*/=\":>+-]{0,60}? (=|<=|:=|->|<-|~) \S")
COLON = "\N{MODIFIER LETTER COLON}"  # stands for a colon that is one
ARRAY_LIKE = re.sub(r"^Union\[(.*)\]$", r"\1", inspect.formatannotation(ArrayLike))
FIELD = re.compile(r"Alias for field number \d+")  # what Python says of a field without words


def is_formula(paragraph: list[str]) -> bool:
    """Whether every line of a paragraph is an equation, or goes on with one."""
    return bool(EQUATION.match(paragraph[0])) and not paragraph[-1].endswith((".", ":"))


def escape(line: str) -> str:
    """One line of prose: code in backticks, a link where it is a public name, the rest as it stands."""
    pieces = re.split(r"(``[^`]+``|`[^`]+`)", line)
    for number, piece in enumerate(pieces):
        if piece.startswith("``"):
            continue
        if number % 2:
            code = piece[1:-1]
            home = find_home(code)
            pieces[number] = f":py:obj:`{code} <{home}>`" if home else f"``{code}``"
        else:
            words = re.split(r"(?<![\w*])(\*[a-z][a-z ]*\*)(?![\w*])", piece)  # an emphasised word is one
            words[::2] = [re.sub(r"(?<=\w)_(?!\w)|[*|\\]", r"\\\g<0>", word) for word in words[::2]]
            pieces[number] = "".join(words)
    # A letter with a full stop begins no list; markup has to be set off from what it touches: `x`s.
    pieces[0] = re.sub(r"^(\s*(?:[\w, *\\]+: )?)(?=[A-Za-z][.)](?:\s|$))", r"\1\\", pieces[0])
    for number in range(1, len(pieces), 2):
        before, after = pieces[number - 1][-1:], pieces[number + 1][:1]
        start = "" if not before or before.isspace() or before in "-:/'\"<([{" else "\\ "
        end = "\\ " if re.match(r"[\w-]", after) else ""
        pieces[number] = f"{start}{pieces[number]}{end}"
    return "".join(pieces)


def tabulate(lines: list[str]) -> list[str]:
    """A table as Markdown has it, in reStructuredText."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]
    starts = ("   * -", *["     -"] * (len(rows[0]) - 1))
    cells = [f"{start} {escape(cell)}" for row in rows for start, cell in zip(starts, row, strict=True)]
    return [".. list-table::", "   :header-rows: 1", "   :widths: auto", "", *cells, ""]


def translate(lines: list[str]) -> list[str]:
    """A whole docstring."""
    text, paragraph, told, example = [], [], False, False

    def close() -> None:
        if not paragraph:
            return
        if not told and text and is_formula(paragraph):
            text.extend([".. code-block:: text", "   :class: formula", ""])
            text.extend(f"    {line}" for line in paragraph)
        elif not told and all(line.startswith("|") for line in paragraph):
            text.extend(tabulate(paragraph))
        else:
            joined = "\n".join(paragraph)
            # A span of code may go over the end of a line.
            joined = re.sub(r"`[^`]+`", lambda found: re.sub(r"\n\s*", " ", found[0]), joined)
            text.extend(map(escape, joined.split("\n")))
        paragraph.clear()

    for line in lines:
        line = re.sub(r"^Example: (regard .*)", r"Example: `\1`", line)
        section = SECTION.match(line)
        if section:
            close()
            told, example = True, line.strip() == "Example:"
            if section[1] == "Reference":
                line = line.replace("Reference:", "REFERENCE", 1)
        if example:
            text.append(escape(line) if line.startswith("Example: ") else line)
        elif line.strip():
            paragraph.append(line)
        else:
            close()
            text.append("")
    close()
    return [line.replace("REFERENCE", "**Reference:**", 1) for line in text]


def show_annotation(annotation: Any) -> str:
    """A type as the source has it, without the range that may be declared beside it."""
    if hasattr(annotation, "__metadata__"):
        annotation = annotation.__origin__
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(rf"Union\[{re.escape(ARRAY_LIKE)}\]|{re.escape(ARRAY_LIKE)}", "ArrayLike", text)
    text = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", text)
    text = re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", text)
    text = re.sub(r"\bNoneType\b", "None", text)
    return re.sub(r"' (\w+)'", r"'\1'", text)  # jaxtyping's mark of a single axis


def show_attribute(annotation: Any, *args: Any, **options: Any) -> str:
    """The type of an attribute, and the range of its values in words: int (at least 1).

    The first range is the one that a reader may leave; others are the limits of int32.
    """
    words = [f" ({mark.words})" for mark in getattr(annotation, "__metadata__", ()) if hasattr(mark, "words")]
    return "".join([show_annotation(annotation), *words[:1]])


def show_default(value: Any) -> str:
    """A default as an expression: its name, where its text is none; of a lambda, that there is one."""
    text = repr(value)
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return getattr(value, "__name__", type(value).__name__).replace("<lambda>", "...")
    return text


def resolve_alias(annotation: Any, module: str) -> Any:
    """What a name in an annotation stands for, where a range belongs to it: `Count`."""
    named = vars(sys.modules[module]).get(annotation) if isinstance(annotation, str) else None
    return named if hasattr(named, "__metadata__") else annotation


def show_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, arguments: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """Arguments with their types as written: aliases keep their names, arrays their shapes."""
    if not arguments:
        return None
    if isinstance(obj, type) and issubclass(obj, enum.Enum):
        return "", None
    # Where a metaclass takes anything, `__init__` knows better.
    called = obj.__init__ if isinstance(obj, type) and arguments.startswith("(*args") else obj
    signature = inspect.signature(called)
    taken = [one for one in signature.parameters.values() if one.name != "self"]
    parts, kinds = [], [one.kind for one in taken]
    for number, one in enumerate(taken):
        if one.kind is one.KEYWORD_ONLY and not {one.KEYWORD_ONLY, one.VAR_POSITIONAL} & set(kinds[:number]):
            parts.append("*")
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        annotation = resolve_alias(one.annotation, obj.__module__)
        typed = "" if annotation is one.empty else f": {show_annotation(annotation)}"
        preset = "" if one.default is one.empty else f" = {show_default(one.default)}"
        parts.append(f"{stars}{one.name}{typed}{preset}")
        if one.kind is one.POSITIONAL_ONLY and one.POSITIONAL_ONLY not in kinds[number + 1 :]:
            parts.append("/")
    result = None
    if not isinstance(obj, type) and signature.return_annotation is not signature.empty:
        result = show_annotation(signature.return_annotation)
    return f"({', '.join(parts)})", result


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Before napoleon reads the sections; it would take what stands before a colon for a type."""
    lines[:] = [] if FIELD.fullmatch("".join(lines).strip()) else translate(lines)
    plain = [0] if what in ("attribute", "property", "data") else []
    plain += [number + 1 for number, line in enumerate(lines) if line.strip() == "Returns:"]
    for number in plain:
        if number < len(lines):
            lines[number] = re.sub(r":(?=\s|$)", COLON, lines[number])


def restore(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """After napoleon."""
    lines[:] = [line.replace(COLON, ":") for line in lines]
