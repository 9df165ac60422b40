"""Traces: what a model attended to, watched while it ran, kept in a file, read again."""

from regard.inspection.traces.calls import Call as Call
from regard.inspection.traces.captures import capture as capture
from regard.inspection.traces.captures import record as record
from regard.inspection.traces.trace import Trace as Trace
from regard.inspection.traces.trace import load as load
