"""Floor 5. Statistics of one attention call in linear memory, and exact windows of its weights."""

from regard.readouts.labels import LABELS as LABELS
from regard.readouts.labels import Label as Label
from regard.readouts.labels import average as average
from regard.readouts.labels import label as label
from regard.readouts.reading import read as read
from regard.readouts.record import Level as Level
from regard.readouts.record import Readout as Readout
from regard.readouts.windows import window as window
