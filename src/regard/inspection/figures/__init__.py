"""The figures of Regard in one place: each takes the caller's axes or makes a figure, returns a `Drawing`.

Nothing here touches pyplot: no window opens and no figure stays behind. `save(drawing, "name.png")`, or
`.svg` or `.pdf`, writes a file that is the same every time.
"""

from regard.inspection.figures.atlases import head_atlas as head_atlas
from regard.inspection.figures.atlases import head_map as head_map
from regard.inspection.figures.canvas import Drawing as Drawing
from regard.inspection.figures.canvas import render as render
from regard.inspection.figures.canvas import save as save
from regard.inspection.figures.curves import training_curves as training_curves
from regard.inspection.figures.head_curves import distance_profile as distance_profile
from regard.inspection.figures.head_curves import entropy_profile as entropy_profile
from regard.inspection.figures.head_curves import head_history as head_history
from regard.inspection.figures.heatmaps import attention_heatmap as attention_heatmap
from regard.inspection.figures.heatmaps import head_grid as head_grid
from regard.inspection.figures.matrices import mask_picture as mask_picture
from regard.inspection.figures.matrices import position_similarity as position_similarity
from regard.inspection.figures.matrices import position_table as position_table
from regard.inspection.figures.patches import scan_attention as scan_attention
from regard.inspection.figures.patches import scan_attention_grid as scan_attention_grid
