"""Traces: attention calls of a model, recorded while it ran, kept in a file, read again.

Start from `capture` and `load`; `record` runs a model under `capture`.
"""

from regard.inspection.traces.calls import Call
from regard.inspection.traces.captures import capture, record, record_repeats
from regard.inspection.traces.trace import Trace, load

__all__ = ["Call", "Trace", "capture", "load", "record", "record_repeats"]
