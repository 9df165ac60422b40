"""Statistics of one attention call in linear memory, and exact windows of its weights.

Start from `read`, which counts all weights of a call without storing them, and `window`, which forms chosen
ones; `average` and `label` say what each head does, `spread` over many examples. `choose_keys` is the choice
of an indexer, and `index_divergence` what it is trained on.
"""

from regard.readouts.indexing import choose_keys, index_divergence, index_scores
from regard.readouts.labels import LABELS, Label, average, label, spread
from regard.readouts.reading import read, window
from regard.readouts.readout import Level, Readout

__all__ = ["LABELS", "Label", "Level", "Readout", "average", "choose_keys", "index_divergence"]
__all__ += ["index_scores", "label", "read", "spread", "window"]
