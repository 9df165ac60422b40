"""The page without its data: HTML, style and script, joined from the files in `web`."""

import base64
import hashlib
import re
import zlib
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources

import numpy as np

STYLES = ("style.css", "panels.css")
# Of base 85, without what means something to HTML.
_DIGITS = str.maketrans("&<>`", ".[]:")
_IMPORT = re.compile(r'^import [^;]* from "\./(.*)";\n', re.MULTILINE)


@dataclass(frozen=True)
class Shell:
    """The parts of a page that do not depend on its data."""

    skeleton: str
    style: str
    script: str
    boot: str  # puts style and script into the page, where they are stored deflated

    @cached_property
    def opening(self) -> str:
        """Return the script that stands in the page and opens it."""
        packed = zlib.compress(f"{self.style}\0{self.script}".encode(), 9)
        digits = base64.b85encode(packed).decode().translate(_DIGITS)
        return f'{self.boot}await openPage("{digits}");'

    def policy(self, connect: str) -> str:
        """Return the content policy: the page runs its own scripts alone and loads nothing from elsewhere."""
        return write_policy(connect, self.opening, self.script)

    def fill(self, *, title: str, document: str, chunks: str, connect: str) -> str:
        """Return the page; title, document and chunks are HTML already."""
        parts = {"TITLE": title, "STYLE": "", "DOCUMENT": document, "CHUNKS": chunks}
        return fill_places(self.skeleton, parts | {"CSP": self.policy(connect), "SCRIPT": self.opening})


def fill_places(skeleton: str, parts: dict[str, str]) -> str:
    """Fill the places of a page, such as <!--TITLE-->, in one pass: no part is looked into for places."""
    return re.sub(r"<!--([A-Z]+)-->", lambda match: parts[match[1]], skeleton)


def write_policy(connect: str, *scripts: str) -> str:
    """Return the content policy of a page that runs these scripts alone and loads nothing from elsewhere."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    own = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {own}; style-src 'unsafe-inline';"
        f" img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


@cache
def load_shell() -> Shell:
    """Join the parts of the page; the files are read once."""
    script = join_modules("main.js", "regard-explorer.js")
    style = "".join(shrink_style(read_source(name)) for name in STYLES)
    boot = shrink_script(detach_module(read_source("boot.js")))
    return Shell(read_source("page.html"), style, script, boot)


def read_source(name: str) -> str:
    """Return the text of a file of `web`."""
    folder = resources.files("regard.inspection.explorer") / "web"
    return (folder / name).read_text(encoding="utf-8").replace("\r\n", "\n")


def join_modules(start: str, title: str) -> str:
    """Join a module of `web` and what it imports, each after those that it needs, to a script of a title."""
    modules: dict[str, str] = {}

    def join(name: str) -> None:
        if name not in modules:
            text = read_source(name)
            modules[name] = ""
            for needed in _IMPORT.findall(text):
                join(needed)
            del modules[name]  # after what it needs
            modules[name] = detach_module(text)

    join(start)
    script = shrink_script(shorten_names("".join(modules.values())))
    # A function of its own: nothing of it is a name of the page.
    return f'(()=>{{"use strict";\n{script}}})();\n//# sourceURL={title}\n'


def shorten_names(text: str) -> str:
    """Give short names to what is declared at the outermost level, where a name can mean nothing else.

    A name stays that stands after a dot, in a string or template, or where a key or method of an object may:
    all others mean a variable wherever they stand, so that a local one of the same name is renamed with it.
    """
    text = _strip_comments(text)
    code = _SPACE.sub(lambda match: '""' if match["kept"] else " " * bool(match["needed"]), text)
    taken = {name for match in _SPACE.finditer(text) for name in re.findall(r"\w+", match["kept"] or "")}
    taken.update(name for pattern in _KEYS for name in pattern.findall(code))
    assert "$" not in code, "short names begin with it"
    uses = Counter(re.findall(r"\w+", code))
    names = sorted(set(_DECLARED.findall(text)) - taken, key=lambda name: (-uses[name], name))
    short = {name: f"${np.base_repr(number, 36).lower()}" for number, name in enumerate(names)}
    return _NAMES.sub(lambda match: short.get(match[0], match[0]), text)


def detach_module(text: str) -> str:
    """Return a module, with imports of one line each, without them and with exports as plain names."""
    return re.sub(r"^export ", "", _IMPORT.sub("", text), flags=re.MULTILINE)


def shrink_script(text: str) -> str:
    """Leave out comments, and white space that JavaScript does not need; names stay as they are.

    Every statement must end in a semicolon or a brace; no `/*` may stand in a string, no string over several
    lines, and no comment after code.
    """
    spaced = _strip_comments(text)
    return _SPACE.sub(lambda match: match["kept"] or " " * bool(match["needed"]), spaced).strip()


def shrink_style(text: str) -> str:
    """Leave out comments, and white space that CSS does not need; no string may hold signs of CSS."""
    text = re.sub(r"\s*([{};,>])\s*", r"\1", _strip_comments(text))
    return text.replace(": ", ":").replace(";}", "}").strip()


def _strip_comments(text: str) -> str:
    """Leave out block comments, and others on lines of their own."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return re.sub(r"^\s*//.*\n", "", text, flags=re.MULTILINE)


def _keep_literals() -> str:
    """Return a pattern of strings, templates in templates, and regular expressions."""
    string, template = r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", "(?!)"
    for _ in range(4):
        inner = rf'\$\{{(?:[^`"{{}}]|{string}|{template}|\{{[^{{}}]*\}})*\}}'
        template = rf"`(?:\\.|[^`\\$]|\$(?!\{{)|{inner})*`"
    # After a name, a number or a closing bracket, and one space, a slash divides; it does not begin a line.
    starts = r"(?<=[^\s\w)\]] )|(?<=[(\[!])|(?<=return )|(?<=  )"
    return rf"{string}|{template}|(?:{starts})/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\[\n])+/"


_DECLARED = re.compile(r"^(?:async )?(?:function\*? |const |let |class )([A-Za-z_]\w*)", re.MULTILINE)
_NAMES = re.compile(rf"{_keep_literals()}|\w+")
# Names that may be those of properties: after a dot or #, in an object or pattern, of a method.
_KEYS = (
    re.compile(r"[.#](\w+)"),
    re.compile(r"(?<=[{,])(\w+)(?=[,}:=])"),
    re.compile(r"(?<!function )(?<!function\*)\b(\w+)\((?:[^()]|\([^()]*\))*\)\{"),
)
# White space between names, and between signs that would become another one, is needed.
_SPACE = re.compile(
    rf"(?P<kept>{_keep_literals()})|(?P<needed>(?<=[\w$])\s+(?=[\w$#])|(?<=\+)\s+(?=\+)|(?<=-)\s+(?=-))|\s+"
)
