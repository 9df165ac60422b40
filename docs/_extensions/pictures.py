"""Pictures that cells draw are shown at the size that they were drawn for, in inches, not pixel by pixel.

On dark pages those of a few colours change to light on dark; shades keep the light sheet they are drawn on.
"""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from PIL import Image
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

SCREEN_DPI = 96
WIDE = 640  # pixels above which a picture is moved sideways on a phone rather than made small
FLAT = 0.93  # share of its six commonest colours from which a picture is lines and areas: masks, charts
TITLE = re.compile(r"title(?:=|\()\"([^\"{}]+)\"")


def describe(node: nodes.image) -> str:
    """The words that stand for a picture: the one title that its cell gives, or the heading above it."""
    cell = node.parent
    while cell.parent is not None and "cell" not in cell.get("classes", []):
        cell = cell.parent
    section = node.parent
    while section.parent is not None and not isinstance(section, nodes.section):
        section = section.parent
    titles = TITLE.findall("\n".join(code.astext() for code in cell.findall(nodes.literal_block)))
    if len(titles) == 1:
        return titles[0]
    heading = next(section.findall(nodes.title), None)
    return f"{heading.astext()}: what the cell above draws" if heading else "what the cell above draws"


def is_flat(picture: Image.Image) -> bool:
    """Whether few colours fill it, so that it may change from dark on light to light on dark."""
    colours = picture.convert("RGB").getcolors(picture.width * picture.height) or []
    return sum(sorted(count for count, _ in colours)[-6:]) >= FLAT * picture.width * picture.height


class Measure(SphinxPostTransform):
    """Give pictures without a width the one that they have on paper, and words."""

    default_priority = 20  # after myst-nb has chosen what of an output is shown

    def run(self, **kwargs: Any) -> None:
        for node in self.document.findall(nodes.image):
            path = Path(self.app.srcdir, node["uri"])
            if "width" in node or path.suffix != ".png" or not path.is_file():
                continue
            with Image.open(path) as picture:
                dots = picture.info.get("dpi", (SCREEN_DPI,))[0]
                width = round(picture.width * SCREEN_DPI / float(dots))
                node["classes"] += ["flat"] if is_flat(picture) else []
            node["width"] = f"{width}px"
            node["classes"] += ["wide"] if width > WIDE else []
            if not node.get("alt"):
                node["alt"] = describe(node)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the transform."""
    app.add_post_transform(Measure)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
