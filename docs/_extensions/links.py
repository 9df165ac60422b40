"""Code within a line that names something public leads to where that is documented: `masks.causal()`."""

import re
from typing import Any

from docutils import nodes
from names import find_home
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

# A name with its module, one of several words, a class, or what is called; a word alone may be anything, and
# what stands before = is an argument.
NAME = re.compile(r"(?<![\w./-])(?:(?:[a-z]\w*\.)+\w+|\w*[A-Z_]\w*|\w+(?=\())(?![\w./=-])")
OTHERS = ("theory", "seeds")  # pages whose tables have the names of other packages, too


class Link(SphinxPostTransform):
    """Put references into literals outside of headings and of other references."""

    default_priority = 5  # before references are resolved

    def run(self, **kwargs: Any) -> None:
        for node in list(self.document.findall(nodes.literal)):
            if not self._is_within(node, nodes.reference, nodes.title, pending_xref):
                is_ours = self.env.docname not in OTHERS or not self._is_within(node, nodes.table)
                node[:] = self._split(node.astext(), is_ours)

    def _is_within(self, node: nodes.Node, *kinds: type[nodes.Node]) -> bool:
        while node := node.parent:
            if isinstance(node, kinds):
                return True
        return False

    def _split(self, code: str, is_ours: bool) -> list[nodes.Node]:
        """Code in parts; names without a module are ours unless others may have them, too."""
        parts, start = [], 0
        for match in NAME.finditer(code):
            home = find_home(match[0])
            is_shared = not is_ours or str(home).startswith("regard.interop.")
            if home and ("." in match[0] or not is_shared):
                parts += [nodes.Text(code[start : match.start()]), self._refer(match[0], home)]
                start = match.end()
        return [*parts, nodes.Text(code[start:])]

    def _refer(self, name: str, home: str) -> pending_xref:
        options = {"refdomain": "py", "reftype": "obj", "reftarget": home, "refdoc": self.env.docname}
        return pending_xref("", nodes.inline("", name), refexplicit=True, refwarn=False, **options)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the transform."""
    app.add_post_transform(Link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
