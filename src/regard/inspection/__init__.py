"""Looking at attention: traces of what a model attends to, figures of it, and the explorer page.

`capture` watches a model run and gives a `Trace` of `Call`s: every head's statistics and, at any length,
exact windows of its weights. `Trace.save` and `load` keep it in a file, `Trace.explore` writes a page to look
around in. Figures are in `inspection.figures`. Names load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.inspection.tokens import Tokens as Tokens
    from regard.inspection.traces.calls import Call as Call
    from regard.inspection.traces.captures import capture as capture
    from regard.inspection.traces.captures import record as record
    from regard.inspection.traces.trace import Trace as Trace
    from regard.inspection.traces.trace import load as load

_HOMES = {
    "Call": "traces",
    "Tokens": "tokens",
    "Trace": "traces",
    "capture": "traces",
    "load": "traces",
    "record": "traces",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'regard.inspection' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}"
        )
    value = getattr(import_module(f"regard.inspection.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
