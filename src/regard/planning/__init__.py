"""Planning: the best mesh of devices for attention at a length, by a roofline that says its assumptions.

Start from `plan`, whose `Report` gives memory, work and time of every mesh; `CHIPS` describes devices, and
`measure_host` the one at hand.
"""

from regard.planning.chips import CHIPS, Chip, measure_host
from regard.planning.estimates import Assumptions, Estimate
from regard.planning.planner import MemoryTooSmallError, plan, read_amount
from regard.planning.reports import Report

__all__ = [
    "CHIPS",
    "Assumptions",
    "Chip",
    "Estimate",
    "MemoryTooSmallError",
    "Report",
    "measure_host",
    "plan",
    "read_amount",
]
