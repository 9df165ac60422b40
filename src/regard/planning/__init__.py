"""Planning: the best mesh of devices for attention or a training step, by a roofline that tells its sources.

Start from `plan`, whose `Report` gives memory, work and time of every mesh, or from `plan_step` for a whole
decoder; `CHIPS` describes devices, and `measure_host` the one at hand.
"""

from regard.planning.chips import CHIPS, Chip, measure_host
from regard.planning.estimates import Assumptions, Estimate
from regard.planning.parameters import count_parameters
from regard.planning.planner import MemoryTooSmallError, plan, read_amount
from regard.planning.reports import Report
from regard.planning.training_steps import Step, plan_step

__all__ = ["CHIPS", "Assumptions", "Chip", "Estimate", "MemoryTooSmallError", "Report", "Step"]
__all__ += ["count_parameters", "measure_host", "plan", "plan_step", "read_amount"]
