"""Traces of attention, watched while a model runs, kept in files. Start from `record`, `capture`, `load`."""

from regard.inspection.traces.calls import Call as Call
from regard.inspection.traces.captures import capture as capture
from regard.inspection.traces.captures import record as record
from regard.inspection.traces.trace import Trace as Trace
from regard.inspection.traces.trace import load as load
