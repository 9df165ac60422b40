"""Promises of any function of attention, checked against the definition: `check` returns a `Report`."""

from regard.conformance.checking import check
from regard.conformance.report import Report, Row

__all__ = ["Report", "Row", "check"]
