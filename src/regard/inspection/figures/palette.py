"""Colours of the figures, chosen for colour blindness and grey printing, and the ink readable on each."""

import matplotlib
import numpy as np
from matplotlib.colors import Colormap, LinearSegmentedColormap, ListedColormap, to_hex, to_rgb
from matplotlib.typing import ColorType

KEPT, MASKED = "#0072B2", "#E9E9E9"
MISSING = "#C9C9C9"  # NaN cells: a grey that neither map contains
QUIET = "#4D4D4D"  # secondary lines and legend keys
# Okabe and Ito's order without black and yellow, which vanish against axes and paper.
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


def weight_colors() -> Colormap:
    """Return the map for weights: lightness grows with the weight, so it also reads in grey."""
    return matplotlib.colormaps["viridis"].with_extremes(bad=MISSING)


def signed_colors() -> Colormap:
    """Return the map for values of either sign: white at zero, red above, blue below."""
    return matplotlib.colormaps["RdBu_r"].with_extremes(bad=MISSING)


def scan_greys(large_is_dark: bool = True) -> Colormap:
    """Return white to a middle grey: strokes stay light enough to take on the colour of a veil."""
    return LinearSegmentedColormap.from_list("scan", ["1.0", "0.5"][:: 1 if large_is_dark else -1])


def veil_colors(color: ColorType = KEPT, strongest: float = 0.8) -> Colormap:
    """Return a map that only varies in opacity, to lay weights over a picture without hiding it."""
    ramp = [(*to_rgb(color), alpha) for alpha in np.linspace(0.0, strongest, 256)]
    return ListedColormap(ramp, name="veil").with_extremes(bad=(0.0, 0.0, 0.0, 0.0))


def series_colors(count: int) -> tuple[ColorType, ...]:
    """Return one colour a series: the named ones while they last, then even steps through viridis."""
    if count <= len(SERIES):
        return SERIES[:count]
    steps = np.linspace(0.0, 0.9, count)  # the last tenth is too pale for a line on white
    return tuple(to_hex(rgba) for rgba in matplotlib.colormaps["viridis"](steps))


def relative_luminance(color: ColorType) -> float:
    """Compute the luminance of an sRGB colour, 0 for black to 1 for white (WCAG 2.2)."""
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast_ratio(one: ColorType, other: ColorType) -> float:
    """Compute the contrast of two opaque colours, 1 (equal) to 21; text needs 4.5 (WCAG 2.2, 1.4.3)."""
    dark, light = sorted((relative_luminance(one), relative_luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def readable_ink(background: ColorType) -> str:
    """Return black or white, whichever stands out more; the better one always reaches sqrt(21) = 4.58."""
    return max(("black", "white"), key=lambda ink: contrast_ratio(ink, background))
