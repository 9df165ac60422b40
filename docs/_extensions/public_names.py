"""`public:: regard.masks`: every public name of a module, as a table and with its documentation."""

import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

from docstrings import process, restore, show_attribute, show_signature, translate
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from names import list_objects, place
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from regard.cache.rows import Rows


def read_summary(value: Any, text: str) -> str:
    """The first sentence of a documentation; the one of a constant's type says nothing of the constant."""
    documented = isinstance(value, type) or inspect.isroutine(value) or inspect.ismodule(value)
    lines = (text or (inspect.getdoc(value) if documented else None) or "").split("\n\n")[0]
    return translate(lines.split("\n"))[0] if lines else ""


def tabulate(module: str) -> Iterator[str]:
    """A table of the names and their first lines, in reStructuredText."""
    yield from (".. list-table::", "   :class: names", "   :widths: auto", "")
    for name, value, text in list_objects(module):
        yield f"   * - :py:obj:`{name} <{place(module, name, value)}>`"
        yield f"     - {read_summary(value, text)}"


def document(module: str, name: str, value: Any, text: str) -> Iterator[str]:
    """The directive that documents one name."""
    path = f"{module}.{name}"
    if isinstance(value, type):
        # What the two caches have in common is shown with each: their base class has no page.
        inherited = ["   :inherited-members:"] if issubclass(value, Rows) else []
        members = ["   :members:", *inherited, "   :special-members: __call__"]
        yield from (f".. autoclass:: {path}", *([] if issubclass(value, BaseException) else members))
    elif callable(value):
        yield f".. autofunction:: {path}"
    else:
        yield from (
            f".. py:data:: {name}",
            f"   :module: {module}",
            "",
            *(f"   {line}" for line in translate(text.split("\n"))),
        )


class Public(SphinxDirective):
    """All public names of one module."""

    required_arguments = 1
    option_spec: ClassVar[Any] = {"table": directives.flag}

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        only_table = "table" in self.options
        lines = [*([] if only_table else [f".. py:module:: {module}", ""]), *tabulate(module)]
        for name, value, text in [] if only_table else list_objects(module):
            if place(module, name, value) != f"{module}.{name}":
                continue
            lines += ["", *document(module, name, value, text)]
        self.env.note_dependency(str(importlib.import_module(module).__file__))
        found = nodes.Element()
        self.state.nested_parse(StringList(lines, source=module), self.content_offset, found)
        return found.children


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive, and the translation of docstrings."""
    app.add_directive("public", Public)
    # Autodoc prints types of attributes by itself, each time it has looked up what an annotation means.
    for name, module in list(sys.modules.items()):
        if name.startswith("sphinx.ext.autodoc") and hasattr(module, "stringify_annotation"):
            module.stringify_annotation = show_attribute
    app.connect("autodoc-process-docstring", process, priority=400)
    app.connect("autodoc-process-docstring", restore, priority=600)
    app.connect("autodoc-process-signature", show_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
