"""Ctrl-C while training: the first asks for a checkpoint, the second leaves; before any step, the first."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED = 130
SHOW_CURSOR = b"\x1b[?25h"


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], Any], *signals: signal.Signals
) -> Iterator[None]:
    """Handle signals while a block runs; outside the main thread none come, and nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(one, signal.signal(one, handler)) for one in signals]
    try:
        yield
    finally:
        for one, previous in before:
            signal.signal(one, previous)


@contextmanager
def leave_at_once() -> Iterator[None]:
    """Leave the process at once at an interrupt that comes while a block runs."""
    with handle_signals(_leave, signal.SIGINT):
        yield


def _leave(number: int, frame: FrameType | None) -> None:
    # No exception: half-finished work on other threads would print its troubles over it.
    os.write(sys.stderr.fileno(), SHOW_CURSOR if sys.stderr.isatty() else b"")
    os._exit(INTERRUPTED)


@contextmanager
def catch_interrupts(ask: Callable[[], None] | None = None) -> Iterator[Callable[[], bool]]:
    """Catch interrupts while a block runs; yield a function that says if there was one.

    `ask` is called at the first one, where more than this process must know.
    """
    is_requested = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_requested
        if is_requested:
            _leave(number, frame)
        is_requested = True
        # Not through the console: the interrupted code may be in the middle of printing.
        when = b"within seconds, together" if ask else b"after this step"
        os.write(sys.stderr.fileno(), b"\nstopping " + when + b"; Ctrl-C again leaves at once\n")
        if ask:
            ask()

    with handle_signals(handle, signal.SIGINT):
        yield lambda: is_requested


@contextmanager
def leave_at_once() -> Iterator[None]:
    """Leave at the first interrupt while a block runs, even if a compiler keeps Python from hearing of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)

    def watch() -> None:
        while number := os.read(heard, 1):
            if number[0] == signal.SIGINT:
                os.write(sys.stderr.fileno(), SHOW_CURSOR if sys.stderr.isatty() else b"")
                os.write(sys.stderr.fileno(), b"\ninterrupted before the first step; nothing is lost\n")
                os._exit(INTERRUPTED)

    watching = threading.Thread(target=watch, name="regard-interrupts", daemon=True)
    watching.start()
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    try:
        with handle_signals(lambda number, frame: None, signal.SIGINT):
            yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(told)
        watching.join()
        os.close(heard)
