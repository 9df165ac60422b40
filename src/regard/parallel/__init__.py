"""Floor 5. Attention over several devices, each with a part of the sequence: ring and all-to-all."""

from regard.parallel.order import from_zigzag as from_zigzag
from regard.parallel.order import to_zigzag as to_zigzag
