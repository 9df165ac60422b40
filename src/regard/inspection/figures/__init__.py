"""Figures of attention: each function takes the caller's axes or makes a figure, and returns a `Drawing`.

Start from `attention_heatmap` and `head_grid`; `save(drawing, "name.png")`, or `.svg` or `.pdf`, writes a
file. Nothing touches pyplot: no window opens, no figure stays behind. Needs the extra `regard[look]`.
"""

from typing import TYPE_CHECKING

from regard.loading import defer

if TYPE_CHECKING:
    from regard.inspection.figures.atlases import head_atlas, head_map
    from regard.inspection.figures.canvas import Drawing, render, save
    from regard.inspection.figures.curves import training_curves
    from regard.inspection.figures.head_curves import distance_profile, entropy_profile, head_history
    from regard.inspection.figures.heatmaps import attention_heatmap, head_grid
    from regard.inspection.figures.matrices import mask_picture, position_similarity, position_table
    from regard.inspection.figures.patches import scan_attention, scan_attention_grid

__all__ = ["Drawing"]
__all__ += ["attention_heatmap", "distance_profile", "entropy_profile", "head_atlas", "head_grid"]
__all__ += ["head_history", "head_map", "mask_picture", "position_similarity", "position_table", "render"]
__all__ += ["save", "scan_attention", "scan_attention_grid", "training_curves"]

__getattr__, __dir__ = defer(
    __name__,
    "look",
    __all__,
    atlases="head_atlas head_map",
    canvas="Drawing render save",
    curves="training_curves",
    head_curves="distance_profile entropy_profile head_history",
    heatmaps="attention_heatmap head_grid",
    matrices="mask_picture position_similarity position_table",
    patches="scan_attention scan_attention_grid",
)
