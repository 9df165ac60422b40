"""Requests to stop: Ctrl-C, a cluster's SIGTERM and a closed terminal's SIGHUP ask for a checkpoint."""

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from regard.cli import INTERRUPTED

PATIENCE_SECONDS = 1.0  # for Python to end what an interrupt ends
SHOW_CURSOR = b"\x1b[?25h"
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], Any] | signal.Handlers, *signals: signal.Signals
) -> Iterator[None]:
    """Handle signals while a block runs; outside the main thread none come, and nothing is changed.

    A hang-up that is ignored, as below nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [sig for sig in signals if sig.name != "SIGHUP" or signal.getsignal(sig) != signal.SIG_IGN]
    before = [(sig, signal.signal(sig, handler)) for sig in wanted]
    try:
        yield
    finally:
        for sig, previous in before:
            signal.signal(sig, signal.SIG_DFL if previous is None else previous)


@contextmanager
def catch_interrupts(ask: Callable[[], None] | None = None) -> Iterator[Callable[[], bool]]:
    """Catch requests to stop while a block runs; yield a function that says if there was one.

    `ask` is called at the first one, where more than this process must know; SIGTERM is then left to JAX. A
    second Ctrl-C leaves at once, even while compiled code runs; a second SIGTERM or SIGHUP does not, as
    closing a terminal may send two.
    """
    is_requested = was_heard = False

    def hear(number: int) -> None:
        nonlocal was_heard
        if was_heard and number == signal.SIGINT:
            _leave()
        was_heard = True

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_requested
        if is_requested:
            if number == signal.SIGINT:
                _leave()
            return
        is_requested = True
        # Not through the console: the interrupted code may be in the middle of printing.
        when = "within seconds, together" if ask else "after this step"
        by, leaving = "", "Ctrl-C again"
        if number != signal.SIGINT:
            by, leaving = f"{signal.Signals(number).name}: ", "Ctrl-C"
        _write(f"\n{by}stopping {when}; {leaving} leaves at once\n".encode())
        _leave_lost_terminal()
        if ask:
            ask()

    signals = [sig for sig in STOPPING if ask is None or sig != signal.SIGTERM]
    with handle_signals(handle, *signals), _listen(hear):
        yield lambda: is_requested


@contextmanager
def leave_at_once(last_words: str = "") -> Iterator[None]:
    """Leave at the first interrupt while a block runs, even if a compiler keeps Python from hearing of it."""
    with (
        handle_signals(lambda number, frame: None, signal.SIGINT),
        _listen(lambda number: _leave(last_words) if number == signal.SIGINT else None),
    ):
        yield


@contextmanager
def leave_soon(last_words: str) -> Iterator[None]:
    """Leave if a block does not end by the KeyboardInterrupt of an interrupt, as while a compiler runs."""
    ended = threading.Event()

    def is_raised() -> bool:
        return signal.getsignal(signal.SIGINT) == signal.default_int_handler

    def hear(number: int) -> None:
        if number == signal.SIGINT and is_raised() and not ended.wait(PATIENCE_SECONDS) and is_raised():
            _leave(last_words)

    with _listen(hear):
        try:
            yield
        finally:
            ended.set()


@contextmanager
def _listen(hear: Callable[[int], None]) -> Iterator[None]:
    """Call a function with each signal that Python handles while a block runs, from a thread, at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while number := os.read(reader, 1):
            hear(number[0])

    watching = threading.Thread(target=watch, name="regard-interrupts", daemon=True)
    watching.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        watching.join()
        os.close(reader)


def _leave(last_words: str = "") -> None:
    # No exception: half-finished work on other threads would print its troubles over it.
    _write(SHOW_CURSOR if sys.stderr.isatty() else b"")
    _write(last_words.encode())
    os._exit(INTERRUPTED)


def _write(text: bytes) -> None:
    with suppress(OSError):  # the terminal may be gone
        os.write(sys.stderr.fileno(), text)


def _leave_lost_terminal() -> None:
    """Send to nowhere what would go to a terminal that was closed, where every write fails."""
    for stream in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)
