"""Hooks into calls of `attend`: who is told of them, whose calls they are, and who changes them."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.call.problem import Problem
from regard.masks.grid import is_concrete


class CallEvent(NamedTuple):
    """One call that ran; inside a trace, its arrays are tracers."""

    problem: Problem
    output: Array
    backend: str
    owner: Any  # the layer that called; None, unknown
    kind: str | None  # "self" or "cross"; None, unknown
    projection: Any  # what the layer maps the heads' outputs with; None, unknown
    run: object  # the same for all calls of one run of a model; None, unknown


Watcher = Callable[[CallEvent], None]
Finish = Callable[[Array, Any], Array]  # of a call's output, and the statistics that it was asked for
Rewriter = Callable[[Problem], tuple[Problem, Finish]]

_WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())
_READS: ContextVar[bool] = ContextVar("reads", default=False)
_REWRITERS: ContextVar[tuple[tuple[Rewriter, bool], ...]] = ContextVar("rewriters", default=())
# What `jit` traced with changes belongs to one block, and to the calls that came before it there: elsewhere
# the number is another one, and it traces anew.
_RETRACE = jax.make_user_context()
_BLOCK: ContextVar[Any] = ContextVar("block", default=None)
_numbers, _lock = itertools.count(), threading.Lock()
_free_numbers: list[int] = []
_OWNER: ContextVar[tuple[Any, str | None, Any]] = ContextVar("owner", default=(None, None, None))
_RUN: ContextVar[object] = ContextVar("run", default=None)


@contextmanager
def hold(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Let a variable have this value in the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def watch(callback: Watcher, *, reads: bool = False) -> Iterator[None]:
    """Tell `callback` of every call of `attend` in the block, on this thread, after it ran.

    `reads` says that arrays of the calls are read after them in the same trace, where a loop or recomputation
    around them would have its own: models then run block after block.
    """
    with hold(_WATCHERS, (*_WATCHERS.get(), callback)), hold(_READS, reads or _READS.get()):
        yield


def is_watched() -> bool:
    """Return whether anyone is told of calls now."""
    return bool(_WATCHERS.get())


def is_read() -> bool:
    """Return whether anyone reads arrays of the calls after them."""
    return _READS.get()


@contextmanager
def rewrite(rewriter: Rewriter, *, one_by_one: bool = True) -> Iterator[None]:
    """Let `rewriter` change every call of `attend` in the block, on this thread; `jit` traces anew in it.

    `one_by_one` says that it changes layers each in its own way, so that no loop may stand for them.
    """
    with _lock:
        number = _free_numbers.pop() if _free_numbers else next(_numbers)
    block = SimpleNamespace(number=number, calls=0, around=_BLOCK.get(), contexts=ExitStack())
    rewriters = (*_REWRITERS.get(), (rewriter, one_by_one))
    try:
        with hold(_REWRITERS, rewriters), hold(_BLOCK, block), _RETRACE((number, 0)), block.contexts:
            yield
    finally:
        if block.calls:
            _count_call(block.around)
        else:
            with _lock:
                _free_numbers.append(number)


def _count_call(block: Any) -> None:
    """Let what `jit` traces from here on in a block be another program than before."""
    if block is not None:
        block.calls += 1
        block.contexts.enter_context(_RETRACE((block.number, block.calls)))


def is_hooked() -> bool:
    """Return whether anyone is told of calls, or changes them, now."""
    return bool(_WATCHERS.get() or _REWRITERS.get())


def is_rewriting() -> bool:
    """Return whether anyone changes calls now, one by one."""
    return any(one_by_one for _, one_by_one in _REWRITERS.get())


def rewritten(problem: Problem) -> tuple[Problem, Finish]:
    """Return the call as it is changed, and what becomes of its output: who only looks at it comes last."""
    finishes: dict[bool, list[Finish]] = {True: [], False: []}
    # Arrays that a jitted function closes over are known, but what is made there is not.
    is_traced = _REWRITERS.get() and not is_concrete((problem, jnp.zeros(())))
    for rewriter, one_by_one in _REWRITERS.get():
        problem, finish = rewriter(problem)
        finishes[one_by_one].append(finish)
    if is_traced:
        _count_call(_BLOCK.get())

    def finish_all(output: Array, extra: Any) -> Array:
        for finish in (*finishes[True], *finishes[False]):
            output = finish(output, extra)
        return output

    return problem, finish_all


def called_by(owner: Any, kind: str | None = None, projection: Any = None) -> AbstractContextManager[None]:
    """Say whose calls those in the block are, of which kind, and what maps their outputs.

    The innermost owner counts.
    """
    return hold(_OWNER, (owner, kind, projection)) if _WATCHERS.get() else nullcontext()


def one_run() -> AbstractContextManager[None]:
    """Say that the calls in the block are of one run of a model; the outermost block counts."""
    is_new = _WATCHERS.get() and _RUN.get() is None
    return hold(_RUN, object()) if is_new else nullcontext()


def report(problem: Problem, output: Array, backend: str) -> None:
    """Tell all watchers of a call."""
    watchers = _WATCHERS.get()
    if watchers:
        seen = CallEvent(problem.with_arrays(), output, backend, *_OWNER.get(), _RUN.get())
        for watcher in watchers:
            watcher(seen)
