"""Pictures that cells draw are shown at the size that they were drawn for, in inches, not pixel by pixel."""

from pathlib import Path
from typing import Any

from docutils import nodes
from PIL import Image
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

SCREEN_DPI = 96


class Measure(SphinxPostTransform):
    """Give pictures without a width the one that they have on paper."""

    default_priority = 20  # after myst-nb has chosen what of an output is shown

    def run(self, **kwargs: Any) -> None:
        for node in self.document.findall(nodes.image):
            path = Path(self.app.srcdir, node["uri"])
            if "width" in node or path.suffix != ".png" or not path.is_file():
                continue
            with Image.open(path) as picture:
                dots = picture.info.get("dpi", (SCREEN_DPI,))[0]
                node["width"] = f"{round(picture.width * SCREEN_DPI / float(dots))}px"
            if not node.get("alt"):
                node["alt"] = "what the cell above draws"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the transform."""
    app.add_post_transform(Measure)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
