"""Watching calls of `attend`: who is told of them, and whose calls they are. Watching changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

from regard.axes import Array
from regard.engine.call.problem import Problem


class CallEvent(NamedTuple):
    """One call that ran; inside a trace, its arrays are tracers."""

    problem: Problem
    output: Array
    backend: str
    owner: Any  # the layer that called; None, unknown
    kind: str | None  # "self" or "cross"; None, unknown


Watcher = Callable[[CallEvent], None]

_WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())
_OWNER: ContextVar[tuple[Any, str | None]] = ContextVar("owner", default=(None, None))


@contextmanager
def watch(callback: Watcher) -> Iterator[None]:
    """Tell `callback` of every call of `attend` in the block, on this thread, after it ran."""
    token = _WATCHERS.set((*_WATCHERS.get(), callback))
    try:
        yield
    finally:
        _WATCHERS.reset(token)


@contextmanager
def _set_owner(owner: Any, kind: str | None) -> Iterator[None]:
    token = _OWNER.set((owner, kind))
    try:
        yield
    finally:
        _OWNER.reset(token)


def called_by(owner: Any, kind: str | None = None) -> AbstractContextManager[None]:
    """Say whose calls those in the block are, and of which kind; the innermost owner counts."""
    return _set_owner(owner, kind) if _WATCHERS.get() else nullcontext()


def report(problem: Problem, output: Array, backend: str) -> None:
    """Tell all watchers of a call."""
    watchers = _WATCHERS.get()
    if watchers:
        seen = CallEvent(problem.with_arrays(), output, backend, *_OWNER.get())
        for watcher in watchers:
            watcher(seen)
