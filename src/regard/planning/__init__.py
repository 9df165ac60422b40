"""Planning: the best mesh of devices for attention at a length, by a roofline that says its assumptions.

Start with `plan`, which returns a `Report`. `CHIPS` has kinds of devices; `measure_host` measures this one.
"""

from regard.planning.chips import CHIPS as CHIPS
from regard.planning.chips import Chip as Chip
from regard.planning.chips import measure_host as measure_host
from regard.planning.estimates import Assumptions as Assumptions
from regard.planning.estimates import Estimate as Estimate
from regard.planning.planner import MemoryTooSmallError as MemoryTooSmallError
from regard.planning.planner import plan as plan
from regard.planning.planner import read_amount as read_amount
from regard.planning.reports import Report as Report
