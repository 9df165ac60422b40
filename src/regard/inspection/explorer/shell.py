"""The page without its data: HTML, style and script, joined from the files in `web`."""

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
        """Return the script that stands in the page and opens it."""
        packed = zlib.compress(f"{self.style}\0{self.script}".encode(), 9)
        return f'{self.boot}await openPage("{base64.b64encode(packed).decode()}");'

    def policy(self, connect: str) -> str:
        """Return the content policy: the page runs its own scripts alone and loads nothing from elsewhere."""
        digests = [hashlib.sha256(script.encode()).digest() for script in (self.opening, self.script)]
        own = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
        return (
            f"default-src 'none'; script-src {own}; style-src 'unsafe-inline';"
            f" img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
        )

    def fill(self, *, title: str, document: str, chunks: str, connect: str) -> str:
        """Return the page; title, document and chunks are HTML already."""
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


@cache
def load_shell() -> Shell:
    """Join main.js and what it imports, each module after those that it needs; the files are read once."""
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
            modules[name] = strip_comments(detach_module(text))

    join("main.js")
    # A function of its own: nothing of it is a name of the page.
    script = f'(()=>{{"use strict";\n{"".join(modules.values())}}})();\n//# sourceURL=regard-explorer.js\n'
    style = "".join(strip_comments(read(name)) for name in STYLES)
    return Shell(
        strip_comments(read("page.html")), style, script, strip_comments(detach_module(read("boot.js")))
    )


def detach_module(text: str) -> str:
    """Return a module, with imports of one line each, without them and with exports as plain names.

    Example:
        >>> from regard.inspection.explorer.shell import detach_module
        >>> detach_module('import { a } from "./b.js";\\nexport const c = a;\\n')
        'const c = a;\\n'
    """
    return re.sub(r"^export ", "", _IMPORT.sub("", text), flags=re.MULTILINE)


def strip_comments(text: str) -> str:
    """Leave out block comments, comments on lines of their own, and indentation.

    The JavaScript or CSS must have no `/*` in a string and no strings over several lines.

    Example:
        >>> from regard.inspection.explorer.shell import strip_comments
        >>> strip_comments('/** Half. */\\n  const a = b / 2;\\n  // why\\n  f("// no");\\n')
        'const a = b / 2;\\nf("// no");\\n'
    """
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return re.sub(r"^(\s*//.*)?\s+", "", text, flags=re.MULTILINE)
