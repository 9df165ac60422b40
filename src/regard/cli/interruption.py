"""Ctrl-C while training: the first asks for a checkpoint, the second leaves at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

INTERRUPTED = 130
SHOW_CURSOR = b"\x1b[?25h"


class Interruption:
    """A `with` block that catches interrupts; outside the main thread it catches nothing.

    Args:
        ask: called at the first one, where more than this process must know.
    """

    def __init__(self, ask: Callable[[], None] | None = None) -> None:
        self._ask = ask
        self._previous: Any = None
        self.requested = False

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            # No exception: half-finished saves on other threads would print their troubles over it.
            os.write(sys.stderr.fileno(), SHOW_CURSOR if sys.stderr.isatty() else b"")
            os._exit(INTERRUPTED)
        self.requested = True
        # Not through the console: the interrupted code may be in the middle of printing.
        when = b"within seconds, together" if self._ask else b"after this step"
        os.write(sys.stderr.fileno(), b"\nstopping " + when + b"; Ctrl-C again leaves at once\n")
        if self._ask:
            self._ask()

    def is_requested(self) -> bool:
        """Return whether somebody asked to stop."""
        return self.requested
