"""Floor 5. Attention over several devices, each with a part of the sequence: ring and all-to-all."""

from regard.parallel.calls import all_to_all_attend as all_to_all_attend
from regard.parallel.calls import attend as attend
from regard.parallel.calls import explain as explain
from regard.parallel.calls import ring_attend as ring_attend
from regard.parallel.calls import use as use
from regard.parallel.cost_reports import CostReport as CostReport
from regard.parallel.order import from_zigzag as from_zigzag
from regard.parallel.order import to_zigzag as to_zigzag
