"""Common ground of the figures: arrays as they are read, axes in the house style, reproducible files."""

import io
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure, SubFigure
from matplotlib.image import AxesImage
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text
from numpy.typing import NDArray

from regard.arguments import check_kind
from regard.inspection.visible_text import show_text
from regard.paths import read_path, replacing

DPI = 160
TITLE_SIZE, LABEL_SIZE, TICK_SIZE = 10.0, 9.0, 8.0
BAR_WIDTH, ROW_GAP = 0.12, 0.3  # inches
LONGEST_LABEL, LONGEST_NAME = 24, 40  # characters: of a token, as the page shows it; of a layer or head
LETTER = 0.11  # inches, of the widest one in a label
Size = tuple[float, float]  # width and height in inches
Arrow = Literal["max", "min", "neither"]  # of a colour bar

# Dates and versions left out: the same figure gives the same bytes tomorrow.
METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


@dataclass(frozen=True, eq=False, repr=False)
class Drawing:
    """A finished figure: the figure to save and the artists to restyle.

    A figure made here is laid out once and then stays as it is, so that saving it twice gives the same file.
    After adding to it, `figure.set_layout_engine("constrained")` lays it out anew.

    Args:
        figure: the whole figure, also when the axes given lie in a sub-figure.
        axes: the panels in reading order; colour bars are not among them.
        images: pictures and matrices, panel by panel.
        lines: curves, panel by panel.
        texts: numbers written into cells, row by row.
        outlines: lines around cells or patches.
        colorbar: the one colour bar, or None.
        legend: the one legend, or None.

    Example:
        >>> from regard.inspection import figures
        >>> drawing = figures.attention_heatmap([[1.0, 0.0], [0.25, 0.75]], title="Two tokens")
        >>> drawing
        Drawing(axes=1, images=1, texts=4, outlines=2, colorbar)
        >>> drawing.axes[0].get_title()
        'Two tokens'
    """

    figure: Figure
    axes: tuple[Axes, ...]
    images: tuple[AxesImage, ...] = ()
    lines: tuple[Line2D, ...] = ()
    texts: tuple[Text, ...] = ()
    outlines: tuple[LineCollection, ...] = ()
    colorbar: Colorbar | None = None
    legend: Legend | None = None

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the figure to `path`; see `save`."""
        return save(self, path)

    def __repr__(self) -> str:
        counts = {name: len(getattr(self, name)) for name in ("axes", "images", "lines", "texts", "outlines")}
        parts = [f"{name}={count}" for name, count in counts.items() if count]
        parts += [name for name in ("colorbar", "legend") if getattr(self, name)]
        return f"Drawing({', '.join(parts)})"

    def _repr_png_(self) -> bytes:
        """Return the picture that a notebook shows for this object."""
        return render(self, "png")


def render(figure: Figure | Drawing, kind: str = "png") -> bytes:
    """Turn a figure into the bytes of a file.

    The bytes depend on the figure, the fonts and the version of matplotlib: no date, no random identifiers.

    Args:
        figure: a figure, or what a figure function returned.
        kind: "png", "svg" or "pdf".

    Returns:
        The whole file as bytes, for a socket, standard output or a notebook.

    Raises:
        ValueError: `kind` is not one of the three.

    Example:
        >>> from regard.inspection import figures
        >>> figures.render(figures.attention_heatmap([[1.0]]), "svg")[:5]
        b'<?xml'
    """
    if kind not in METADATA:
        raise ValueError(f"kind: expected one of {', '.join(METADATA)}, got {kind!r}")
    check_kind("figure", figure, Figure, Drawing)
    sheet = figure.figure if isinstance(figure, Drawing) else figure
    buffer = io.BytesIO()
    # fonttype 42 embeds outlines that journals accept; matplotlib's Type 3 default is often refused.
    with matplotlib.rc_context({"svg.hashsalt": "regard", "pdf.fonttype": 42}):
        sheet.savefig(buffer, format=kind, metadata=METADATA[kind])
    return buffer.getvalue()


def save(figure: Figure | Drawing, path: str | os.PathLike[str]) -> Path:
    """Write a figure to a file whose ending chooses the kind: .png, .svg or .pdf.

    Parent folders are made. The file appears whole or not at all, and is the same for the same figure.

    Args:
        figure: a figure, or what a figure function returned.
        path: where to write; an existing file is replaced.

    Returns:
        The path written.

    Raises:
        ValueError: the ending is none of the three; nothing is drawn or created.

    Example:
        >>> import tempfile
        >>> from regard.inspection import figures
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     figures.save(figures.attention_heatmap([[1.0]]), f"{folder}/new/weights.png").name
        'weights.png'
    """
    target = read_path("path", path)
    kind = target.suffix.lower().removeprefix(".")
    if kind not in METADATA:
        endings = ", ".join(f".{suffix}" for suffix in METADATA)
        raise ValueError(f"path: expected a name ending in {endings}, got {str(target)!r}")
    content = render(figure, kind)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as draft:
        draft.write_bytes(content)
    return target


def style_axes(ax: Axes, labels: float = LABEL_SIZE, ticks: float = TICK_SIZE, length: float = 3.0) -> None:
    """Set sizes of labels and ticks, and thin lines."""
    for axis in (ax.xaxis, ax.yaxis):
        axis.label.set_fontsize(labels)
    ax.tick_params(labelsize=ticks, length=length, width=0.6)
    ax.spines[:].set_linewidth(0.6)


@dataclass(frozen=True)
class Panels:
    """The panels of one figure function: the caller's, or of a figure made here and fitted around them."""

    axes: tuple[Axes, ...]
    size: Size  # of each
    owned: bool  # True if the figure was made here
    rows: int = 1
    columns: int = 1

    def add_colorbar(self, mappable: ScalarMappable, label: str, extend: Arrow = "neither") -> Colorbar:
        """Add a thin colour bar beside the panels, as tall as they are; a longer label takes more lines."""
        height = self.rows * (self.size[1] + ROW_GAP) - ROW_GAP
        style: dict[str, Any] = {"pad": 0.02, "aspect": height / BAR_WIDTH, "extend": extend}
        bar = self.axes[0].figure.colorbar(mappable, ax=list(self.axes), **style)
        letters = max(8, int(height * 72.0 / (0.55 * LABEL_SIZE)))
        lines = [part for line in label.split("\n") for part in textwrap.wrap(line, letters)]
        bar.set_label(escape_formulas("\n".join(lines)))
        style_axes(bar.ax)
        return bar

    def fit(self) -> None:
        """Resize a figure that was made here so that panels have their size and all else fits; keep it so."""
        sheet = self.axes[0].figure.figure
        engine = sheet.get_layout_engine()
        if not self.owned or engine is None:
            return
        aspects: list[Any] = [ax.get_aspect() for ax in self.axes]
        for ax in self.axes:
            ax.set_aspect("auto")  # a panel shrunk in its slot hides what its labels need: twice the rounds
        for _ in range(6):  # wrapped titles and tick labels move the goal; two rounds usually reach it
            engine.execute(sheet)
            slot = self.axes[0].get_position(original=True)
            width, height = sheet.get_size_inches()
            wider, taller = self.size[0] - slot.width * width, self.size[1] - slot.height * height
            if max(abs(wider), abs(taller)) < 0.02:
                break
            sheet.set_size_inches(width + self.columns * wider, height + self.rows * taller)
        else:
            engine.execute(sheet)
        for ax, aspect in zip(self.axes, aspects, strict=True):
            ax.set_aspect(aspect)
        # Each draw would move things by a hair, and a file depend on how often the figure was drawn before.
        sheet.set_layout_engine("none")

    def finish(self, **drawn: Any) -> Drawing:
        """Lay the figure out and return it with what was drawn."""
        self.fit()
        return Drawing(**{"figure": self.axes[0].figure.figure, "axes": self.axes, **drawn})


def open_panel(
    ax: Axes | None, size: Size, title: str | None = None, room: Size = (0.0, 0.0)
) -> tuple[Axes, Panels]:
    """Return the caller's axes, or new ones with some more room around them until they are fitted."""
    target = open_panels(None, size, 1, 1, 1, None, room).axes[0] if ax is None else ax
    set_title(target, title)
    return target, Panels((target,), size, ax is None)


def open_panels(
    fig: Figure | SubFigure | None,
    size: Size,
    count: int,
    rows: int,
    columns: int,
    title: str | None,
    room: Size = (0.0, 0.0),
) -> Panels:
    """Return panels row by row, in the caller's figure or a new one with more room, under a common title."""
    whole = (columns * size[0] + 1.2 + room[0], rows * (size[1] + ROW_GAP) + 0.4 + room[1])
    # Pyplot does not know it: no window and no leak.
    sheet = fig or Figure(figsize=whole, dpi=DPI, layout="constrained")
    if title:
        sheet.suptitle(escape_formulas(title), fontsize=TITLE_SIZE, wrap=True)
    axes = tuple(sheet.add_subplot(rows, columns, index + 1) for index in range(count))
    for ax in axes:
        style_axes(ax)
    return Panels(axes, size, fig is None, rows, columns)


def add_side_legend(ax: Axes, handles: Sequence[Artist], **settings: Any) -> Legend:
    """Add a legend of what has labels at the right of a panel."""
    settings = {"loc": "upper left", "bbox_to_anchor": (1.02, 1.0), "borderaxespad": 0.0, **settings}
    # Placeholders first: matplotlib leaves out entries whose name starts with an underscore.
    legend = ax.legend(handles, ["name"] * len(handles), frameon=False, fontsize=TICK_SIZE, **settings)
    for text, handle in zip(legend.get_texts(), handles, strict=True):
        text.set_text(str(handle.get_label()))
    return legend


def open_frame(ax: Axes) -> None:
    """Give a panel of curves a grid, and leave out its frame above and at the right."""
    ax.grid(color="0.88", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def set_title(ax: Axes, title: str | None, size: float = TITLE_SIZE, **style: Any) -> None:
    """Name a panel, on several lines where one would leave the figure."""
    if title:
        ax.set_title(escape_formulas(title), fontsize=size, wrap=True, **style)


def read_numbers(
    value: object, name: str, shape: str, rank: int, *, fewer: str = "", more: str = ""
) -> NDArray[np.float64]:
    """Read an array of this rank without empty axes as float64, from what NumPy reads, bfloat16 too.

    The advice `fewer` is given where an axis is missing, `more` where there are too many; in it, {one} is an
    index that leaves the axes wanted, {several} one that leaves one more.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name}: expected shape {shape}, got {type(value).__name__}: {error}") from error
    if array.dtype.kind in "OSUTcmM":
        raise TypeError(f"{name}: expected real numbers of shape {shape}, got {describe(value, array)}")
    if array.ndim != rank:
        single = f"[{', '.join('0' * (array.ndim - rank))}]"
        several = f"[{', '.join('0' * (array.ndim - rank - 1))}]"
        advice = fewer if array.ndim == rank - 1 else ""
        if array.ndim > rank:
            chosen = more or f"choose one, for example {name}{{one}}"
            advice = chosen.format(one=single, several=several.replace("[]", ""))
        raise ValueError(f"{name}: expected shape {shape}, got {array.shape}{advice and '; ' + advice}")
    if array.size == 0:
        raise ValueError(f"{name}: expected shape {shape} with no axis of length 0, got {array.shape}")
    return array.astype(np.float64)


def read_labels(
    labels: Sequence[object] | None, name: str, count: int, what: str, counted: str = "{}"
) -> list[str]:
    """Return one text for each of `count` things; without labels, their numbers in the words of `counted`."""
    if labels is None:
        return [counted.format(index) for index in range(count)]
    if len(labels) != count:
        raise ValueError(f"{name}: expected {count} labels, one a {what}, got {len(labels)}")
    return [literal(shorten_name(label)) for label in labels]


def shorten(label: object) -> str:
    """Return the label of a token as the page shows it: what is long loses its end."""
    text = show_text(label)
    return text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 1]}…"


def shorten_name(name: object) -> str:
    """Return the name of a layer or head: what is long keeps its end, which tells it from others."""
    text = show_text(name)
    return text if len(text) <= LONGEST_NAME else f"…{text[1 - LONGEST_NAME :]}"


def measure_room(labels: Sequence[str] | None) -> float:
    """Return the inches that long labels need beside a panel until it is fitted; 0 for short ones."""
    longest = max(map(len, labels or ()), default=0)
    return LETTER * longest if longest > LONGEST_LABEL // 2 else 0.0


def describe(value: object, array: NDArray) -> str:
    """Describe an argument for an error: its type, dtype and shape."""
    return f"{type(value).__name__} of dtype {array.dtype} and shape {array.shape}"


def literal(text: object) -> str:
    """Return `text` to be drawn as it is: no formula at dollar signs, whatever would not show visible."""
    return show_text(text).replace("$", r"\$")


def escape_formulas(text: object) -> str:
    """Return a title without formulas: dollar signs are escaped, unless they are already, as by `literal`."""
    return re.sub(r"(?<!\\)\$", r"\$", "\n".join(map(show_text, str(text).split("\n"))))
