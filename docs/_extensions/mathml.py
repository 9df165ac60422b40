"""Formulas as MathML, which browsers draw by themselves: no script, nothing to fetch."""

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from formulas import UnreadableError, typeset
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.logging import getLogger

logger = getLogger(__name__)


def write_inline(writer: Any, node: nodes.math) -> None:
    """A formula within a line."""
    writer.body.append(tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def write_block(writer: Any, node: nodes.math_block) -> None:
    """A formula of its own."""
    writer.body.append(f'<div class="display-math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


class Formulas(SphinxPostTransform):
    """Formulas in place of the blocks that are some; one that cannot be read fails the build."""

    default_priority = 30

    def run(self, **kwargs: Any) -> None:
        for node in list(self.document.findall(nodes.literal_block)):
            of_theory = self.env.docname == "theory" and node.get("language", "none") in ("none", "default")
            if "formula" not in node["classes"] and not of_theory:
                continue
            try:
                drawn = typeset(node.astext())
            except UnreadableError as error:
                logger.warning("a formula that cannot be read, %s: %s", error, node.astext(), location=node)
                continue
            node.replace_self(nodes.raw("", drawn, format="html"))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer and the transform."""
    app.add_post_transform(Formulas)
    app.add_html_math_renderer("mathml", (write_inline, None), (write_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
