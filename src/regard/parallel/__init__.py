"""Attention over several devices, each with a part of the sequence: ring and all-to-all.

Start from `attend`, which chooses between `ring_attend` and `all_to_all_attend`; `explain` counts what a call
would compute and send, and `with use(mesh, axis):` makes layers and models divide their calls. `build_mesh`
arranges devices, of several hosts too, and `find_topology` those that are elsewhere, to compile for.
"""

from regard.parallel.attending import all_to_all_attend, attend, explain, ring_attend, use
from regard.parallel.cost_reports import CostReport
from regard.parallel.meshes import build_mesh
from regard.parallel.order import from_zigzag, to_zigzag
from regard.parallel.topologies import find_topology

__all__ = ["CostReport", "all_to_all_attend", "attend", "build_mesh", "explain", "find_topology"]
__all__ += ["from_zigzag", "ring_attend", "to_zigzag", "use"]
