"""`regard view`: the explorer's page of a trace, served until somebody has seen enough."""

from __future__ import annotations

import dataclasses
import errno
import os
import sys
import threading
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from regard.cli.console import Console, UsageError, expected_errors
from regard.cli.declaration import Command, Output, conf, option
from regard.cli.interruption import leave_at_once

if TYPE_CHECKING:
    from regard.inspection import Trace
    from regard.inspection.explorer.server import Serving

PATIENCE_SECONDS = 1.0


@dataclass(frozen=True)
class View(Command):
    """Look around in what a model attends to, in the browser, exactly at every zoom; Ctrl-C ends it.

    A model of text reads what you type, and what changes when you change a word. The page is served to this
    machine alone, at an address that holds a secret.

    Example: regard view out/text
    """

    ALIASES: ClassVar = {"path": "FILE"}

    source: Annotated[conf.Positional[Path], option("FILE|RUN|DIR")]
    """A run of text or a folder with a Hugging Face model of text, which read what is typed; a file of
    `regard inspect --save` or `Trace.save`; or another run, of which a held-out example is watched."""
    compare: Annotated[Path | None, option("FILE|RUN", "nothing")] = None
    """Another one, to be laid beside it; of runs, held-out examples are."""
    text: Annotated[str | None, option("TEXT", "a sentence")] = None
    """The first text that a model of text reads."""
    port: Annotated[int, option("N", "one that is free")] = 0
    """Port to serve at."""
    no_browser: bool = False
    """Print the address only."""
    output: Output = Output()

    def run(self, console: Console) -> int:
        """Serve the page until Ctrl-C, which is how it ends."""
        with expected_errors():
            try:
                page = self._serve(console)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                message = f"--port {self.port} is in use; leave --port out for one that is free"
                raise UsageError(message) from error
        try:
            console.emit("serving", url=page.url, port=page.port)
            console.note("open", page.url)
            console.say("served to this machine alone; Ctrl-C ends it")
            if not self.no_browser and _has_browser():
                webbrowser.open(page.url)
            threading.Event().wait()
        except KeyboardInterrupt:
            with leave_at_once():
                page.close()
                console.say("\nended")
                if page.is_busy(PATIENCE_SECONDS):
                    # Under threads in compiled code the interpreter cannot end in good order.
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(0)
        finally:
            page.close()
        return 0

    def _serve(self, console: Console) -> Serving:
        """Begin to serve: a model that reads what is typed, or what was seen."""
        from regard.cli.text_readers import DEFAULT_TEXT, open_text_reader
        from regard.inspection.explorer.live import serve_live
        from regard.inspection.explorer.server import serve

        if self.text is not None and not self.text.strip():
            raise UsageError("--text is empty; give a sentence")
        if self.compare is None and (reader := open_text_reader(self.source)):
            console.note("model", reader.title)
            options = {"title": reader.title, "port": self.port, "training": reader.training}
            options |= {"cuts": True, "explain": reader.explain, "trace": reader.trace}
            return serve_live(reader.record, text=self.text or DEFAULT_TEXT, **options)
        if self.text is not None:
            readers = "give a run of text or a pretrained model, without --compare"
            raise UsageError(f"--text is what a model of text reads; {readers}")
        trace, training = open_source(self.source)
        other = None if self.compare is None else open_source(self.compare)[0]
        if other is not None and other.title == trace.title:
            trace, other = _name_source(trace, self.source), _name_source(other, self.compare)
        console.note("trace", repr(trace))
        if other is not None:
            console.note("beside", repr(other))
        console.say("preparing the page ...")
        return serve(trace, compare=other, port=self.port, training=training)


def open_source(path: Path) -> tuple[Trace, dict[str, Any] | None]:
    """Return a trace from a file, or of a run with what it logged."""
    from regard import inspection
    from regard.cli.continuation import spell_command
    from regard.cli.sources import demand_run, load_run
    from regard.training.history import training_document

    if path.is_dir():
        watching = spell_command("inspect", path, "--save", f"{path.name or 'trace'}.regard")
        demand_run(path, f", or a file: {watching}")
        task, model = load_run(path)
        return task.watch(model), training_document(path)
    if not path.exists():
        raise UsageError(f"there is no {path}; give a file of `regard inspect --save`, or a run")
    if path.suffix.lower() in (".html", ".htm"):
        wanted = "`regard view` takes .regard files and runs"
        raise UsageError(f"{path} is a page; open it in a browser. {wanted}")
    return inspection.load(path), None


def _name_source(trace: Trace, path: Path | None) -> Trace:
    """Return a trace whose title says where it comes from, for one beside it that is titled alike."""
    return dataclasses.replace(trace, title=f"{trace.title} ({path})".strip())


def _has_browser() -> bool:
    """Return whether a window can open: without a screen, a browser of text would take the terminal."""
    has_screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return bool(has_screen) or sys.platform in ("win32", "darwin")
