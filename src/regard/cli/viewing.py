"""`regard view`: the explorer's page of a trace, served until somebody has seen enough."""

import os
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Any

from regard import inspection
from regard.cli.commands import View
from regard.cli.console import Console, UsageError
from regard.cli.training import expected_errors
from regard.inspection import Trace
from regard.inspection.explorer.server import serve
from regard.training import runs
from regard.training.history import training_document


def run_viewing(command: View, console: Console) -> int:
    """Serves the page until Ctrl-C, which is how it ends."""
    with expected_errors():
        trace, training = open_source(command.source)
        other = None if command.compare is None else open_source(command.compare)[0]
        console.note("trace", repr(trace))
        if other is not None:
            console.note("beside", repr(other))
        console.say("preparing the page ...")
        page = serve(trace, compare=other, port=command.port, training=training)
    with page:
        try:
            console.emit("serving", url=page.url, port=page.port)
            console.note("open", page.url)
            console.say("served to this machine alone; Ctrl-C ends it")
            if not command.no_browser and _has_browser():
                webbrowser.open(page.url)
            threading.Event().wait()
        except KeyboardInterrupt:
            console.say("\nended")
    return 0


def open_source(path: Path) -> tuple[Trace, dict[str, Any] | None]:
    """A trace from a file, or of a run with what it logged.

    Raises:
        UsageError: for anything else.
    """
    if path.is_dir():
        if not runs.is_run(path):
            raise UsageError(
                f"{path} is not a run; give one of `regard train`, or a file: regard inspect {path} --save"
                f" {path.name or 'trace'}.regard"
            )
        task, model = runs.load_run(path)
        return task.watch(model), training_document(path)
    if not path.exists():
        raise UsageError(f"there is no {path}; give a file of `regard inspect --save`, or a run")
    if path.suffix.lower() in (".html", ".htm"):
        raise UsageError(
            f"{path} is a page; open it in a browser. `regard view` takes .regard files and runs"
        )
    return inspection.load(path), None


def _has_browser() -> bool:
    """Whether a window can open: without a screen, a browser of text would take the terminal."""
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
