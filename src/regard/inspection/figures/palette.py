"""Colours of the figures, chosen for colour blindness and grey printing, and the ink readable on each."""

import re
from functools import cache
from importlib import resources

import numpy as np
from matplotlib.colors import Colormap, LinearSegmentedColormap, ListedColormap, to_hex, to_rgb
from matplotlib.typing import ColorType
from numpy.typing import NDArray

KEPT, MASKED = "#0072B2", "#E9E9E9"
MISSING = "#9EA3A0"  # NaN cells: a grey that neither map contains
QUIET = "#4D4D4D"  # secondary lines and legend keys
# Okabe and Ito's order without black and yellow, which vanish against axes and paper.
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


# OKLab (Ottosson, 2020): linear sRGB to cone responses, and their cube roots to lightness, a and b.
_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_LAB = np.array(
    [
        [0.2104542553, 0.793617785, -0.0040720468],
        [1.9779984951, -2.428592205, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.808675766],
    ]
)


def weight_colors() -> Colormap:
    """Return the explorer's map for weights: paper for none, darker the more."""
    colors = walk_colors(read_anchors("sequential"), 256)
    return ListedColormap(colors, name="weights").with_extremes(bad=MISSING)


def signed_colors() -> Colormap:
    """Return the explorer's map for values of either sign: paper at zero, orange above, blue below."""
    anchors = read_anchors("diverging")
    middle = len(anchors) // 2
    below, above = walk_colors(anchors[: middle + 1], 256), walk_colors(anchors[middle:], 256)
    both = np.concatenate([below[::2], above[1::2]])  # 0 lies between the two
    return ListedColormap(both, name="signed").with_extremes(bad=MISSING)


@cache
def read_anchors(name: str) -> tuple[str, ...]:
    """Read the colours that a map of the explorer's page joins, from the page's own script."""
    script = resources.files("regard.inspection.explorer").joinpath("web", "colours.js").read_text()
    listed = re.search(rf"export const {name} = \w+\(\[(.*?)\]", script, re.DOTALL)
    assert listed is not None
    return tuple(re.findall(r"#[0-9a-f]{6}", listed[1]))


def walk_colors(anchors: tuple[str, ...], count: int) -> NDArray[np.float64]:
    """Compute so many sRGB colours through the anchors, at equal distances in OKLab along the way."""
    srgb = np.array([to_rgb(anchor) for anchor in anchors])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    points = np.cbrt(linear @ _CONES.T) @ _LAB.T
    way = np.concatenate([[0], np.cumsum(np.linalg.norm(np.diff(points, axis=0), axis=-1))])
    steps = np.linspace(0, way[-1], count)
    lab = np.stack([np.interp(steps, way, part) for part in points.T], -1)
    linear = np.clip((lab @ np.linalg.inv(_LAB).T) ** 3 @ np.linalg.inv(_CONES).T, 0, 1)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def scan_greys(large_is_dark: bool = True) -> Colormap:
    """Return white to a middle grey: strokes stay light enough to take on the colour of a veil."""
    return LinearSegmentedColormap.from_list("scan", ["1.0", "0.5"][:: 1 if large_is_dark else -1])


def veil_colors() -> Colormap:
    """Return a map that only varies in opacity, to lay weights over a picture without hiding it."""
    ramp = [(*to_rgb(KEPT), alpha) for alpha in np.linspace(0.0, 0.8, 256)]
    return ListedColormap(ramp, name="veil").with_extremes(bad=(0.0, 0.0, 0.0, 0.0))


def series_colors(count: int) -> tuple[ColorType, ...]:
    """Return one colour a series: the named ones while they last, then steps through the map for weights."""
    if count <= len(SERIES):
        return SERIES[:count]
    steps = np.linspace(1.0, 0.25, count)  # the first colours are too pale for a line on white
    return tuple(to_hex(rgba) for rgba in weight_colors()(steps))


def relative_luminance(color: ColorType) -> float:
    """Compute the luminance of an sRGB colour, 0 for black to 1 for white (WCAG 2.2)."""
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast_ratio(first: ColorType, second: ColorType) -> float:
    """Compute the contrast of two opaque colours, 1 (equal) to 21; text needs 4.5 (WCAG 2.2, 1.4.3)."""
    dark, light = sorted((relative_luminance(first), relative_luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def readable_ink(background: ColorType) -> str:
    """Return black or white, whichever stands out more; the better one always reaches sqrt(21) = 4.58."""
    return max(("black", "white"), key=lambda ink: contrast_ratio(ink, background))
