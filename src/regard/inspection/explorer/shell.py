"""The page without its data: HTML, style and script, joined from the files in `web` and made small."""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources

STYLES = ("style.css", "panels.css")
_IMPORT = re.compile(r'^import [^;]* from "\./(.*)";\n', re.MULTILINE)
# After these, a slash begins a regular expression, not a division.
_BEFORE_REGEX = set("(,=:[!&|?{};+-*%<>~^\n")
_WORDS_BEFORE_REGEX = (
    "return",
    "typeof",
    "case",
    "in",
    "of",
    "delete",
    "void",
    "throw",
    "await",
    "else",
    "do",
)
_TIGHT = set("{}()[],;:=<>!?&|*%")


@dataclass(frozen=True)
class Shell:
    """The parts of a page that do not depend on its data."""

    skeleton: str
    style: str
    script: str
    boot: str
    """Puts style and script into the page, where they are stored deflated."""

    @cached_property
    def opening(self) -> str:
        """The script as it stands in the page."""
        packed = zlib.compress(f"{self.style}\0{self.script}".encode(), 9)
        return f'{self.boot}await openPage("{base64.b64encode(packed).decode()}");'

    def policy(self, connect: str) -> str:
        """What the page may load and run: its own scripts alone, and nothing from elsewhere."""
        digests = [hashlib.sha256(script.encode()).digest() for script in (self.opening, self.script)]
        own = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
        return (
            f"default-src 'none'; script-src {own}; style-src 'unsafe-inline';"
            f" img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
        )

    def fill(self, *, title: str, document: str, chunks: str, connect: str) -> str:
        """The page; title, document and chunks are HTML already."""
        parts = {
            "CSP": self.policy(connect),
            "TITLE": title,
            "STYLE": "",
            "DOCUMENT": document,
            "CHUNKS": chunks,
            "SCRIPT": self.opening,
        }
        # In one pass: a part is never looked into for places.
        return re.sub(r"<!--([A-Z]+)-->", lambda place: parts[place[1]], self.skeleton)

    @cached_property
    def size(self) -> int:
        """Bytes of a page without data."""
        return len(self.fill(title="", document="", chunks="", connect="'none'").encode())


@cache
def load_shell() -> Shell:
    """Join the files, those of order.txt and, before each, what it imports; they are read once."""
    folder = resources.files("regard.inspection.explorer") / "web"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8").replace("\r\n", "\n")

    modules: dict[str, str] = {}

    def join(name: str) -> None:
        if name not in modules:
            text = read(name)
            modules[name] = ""
            for needed in _IMPORT.findall(text):
                join(needed)
            del modules[name]  # after what it needs
            modules[name] = shorten_script(detach_module(text))

    for line in read("order.txt").splitlines():
        if line.strip():
            join(line.strip())
    # A function of its own: nothing of it is a name of the page.
    script = f'(()=>{{"use strict";\n{"".join(modules.values())}}})();\n//# sourceURL=regard-explorer.js\n'
    boot = shorten_script(detach_module(read("boot.js")))
    style = "".join(shorten_style(read(name)) for name in STYLES if (folder / name).is_file())
    for ending in ("</script", "<!--"):
        if ending in boot.lower():
            raise ValueError(f"boot.js: expected nothing that ends a script element, got {ending!r}")
    skeleton = "".join(line.strip() + "\n" for line in read("page.html").splitlines() if line.strip())
    return Shell(skeleton, style, script, boot)


def detach_module(text: str) -> str:
    """A module as a part of one script: without imports, and with exports as plain names.

    Args:
        text: of a module whose imports are one line each.

    Returns:
        The text.

    Example:
        >>> from regard.inspection.explorer.shell import detach_module
        >>> detach_module('import { a } from "./b.js";\\nexport const c = a;\\n')
        'const c = a;\\n'
    """
    return re.sub(r"^export ", "", _IMPORT.sub("", text), flags=re.MULTILINE)


def shorten_script(text: str) -> str:
    """Leave out comments, indentation, and spaces around brackets and most operators.

    Strings, template literals and regular expressions stay as they are, and lines stay lines: where a
    statement ends does not change.

    Args:
        text: JavaScript.

    Returns:
        JavaScript that does the same.

    Example:
        >>> from regard.inspection.explorer.shell import shorten_script
        >>> shorten_script('const a = b / 2;  // half\\n\\n  f("// no", /[/]\\\\//);\\n')
        'const a=b / 2;\\nf("// no",/[/]\\\\//);\\n'
    """
    kept: list[str] = []
    at = 0
    while at < len(text):
        char = text[at]
        if text.startswith("//", at):
            at = _end(text, "\n", at, 0)
        elif text.startswith("/*", at):
            end = _end(text, "*/", at + 2, 2)
            # A comment over several lines ends one.
            kept.append("\n" if "\n" in text[at:end] else " ")
            at = end
        elif char in "\"'":
            end = _end_of_string(text, at)
            kept.append(text[at:end])
            at = end
        elif char == "`":
            end = _end_of_template(text, at)
            kept.append(text[at:end])
            at = end
        elif char == "/" and _begins_regex(kept):
            end = _end_of_regex(text, at)
            kept.append(text[at:end])
            at = end
        else:
            kept.append(char)
            at += 1
    return _tighten(kept)


def shorten_style(text: str) -> str:
    """Leave out comments, indentation and empty lines of a style sheet without strings over several lines."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    lines = (re.sub(r"\s*([{};,])\s*", r"\1", line.strip()) for line in text.split("\n"))
    return re.sub(r"([{};,])\n", r"\1", "".join(f"{line}\n" for line in lines if line)).replace(";}", "}")


def _tighten(kept: list[str]) -> str:
    """Parts joined; runs of blanks among single characters become one, or none beside tight operators."""
    out: list[str] = []
    for part in kept:
        blank = part.isspace()
        before = out[-1] if out else "\n"
        if not blank:
            if before == " " and part in _TIGHT:
                out.pop()
            out.append(part)
        elif "\n" in part:
            if before == " ":
                out.pop()
                before = out[-1] if out else "\n"
            if before != "\n":
                out.append("\n")
        elif before not in ("\n", " ") and before not in _TIGHT:
            out.append(" ")
    return "".join(out)


def _begins_regex(kept: list[str]) -> bool:
    before = "".join(kept[-40:]).rstrip()
    if not before or before[-1] in _BEFORE_REGEX:
        return True
    word = re.search(r"[\w$]+$", before)
    return word is not None and word[0] in _WORDS_BEFORE_REGEX


def _end(text: str, mark: str, start: int, more: int) -> int:
    found = text.find(mark, start)
    return len(text) if found < 0 else found + more


def _end_of_string(text: str, at: int) -> int:
    quote, at = text[at], at + 1
    while at < len(text) and text[at] != quote:
        at += 2 if text[at] == "\\" else 1
    return at + 1


def _end_of_regex(text: str, at: int) -> int:
    at, inside = at + 1, False
    while at < len(text) and (inside or text[at] != "/"):
        inside = {"[": True, "]": False}.get(text[at], inside)
        at += 2 if text[at] == "\\" else 1
    return at + 1


def _end_of_template(text: str, at: int) -> int:
    """Templates may hold expressions, which hold strings and templates."""
    at += 1
    while at < len(text) and text[at] != "`":
        if text[at] == "\\":
            at += 2
        elif text.startswith("${", at):
            at, depth = at + 2, 1
            while at < len(text) and depth:
                if text[at] in "\"'":
                    at = _end_of_string(text, at)
                    continue
                if text[at] == "`":
                    at = _end_of_template(text, at)
                    continue
                depth += {"{": 1, "}": -1}.get(text[at], 0)
                at += 1
        else:
            at += 1
    return at + 1
