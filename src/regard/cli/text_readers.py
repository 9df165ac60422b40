"""Models that read text: their tokens, and readers of one text after another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from regard.inspection import Tokens, Trace
from regard.inspection.recorders import Recorder
from regard.training import runs, tasks
from regard.training.history import training_document

DEFAULT_TEXT = "The cat sat on the mat because it was tired."
TITLE_LENGTH = 80


class TextReader(NamedTuple):
    """A model that reads texts."""

    title: str
    """For people."""
    record: Callable[[str], Trace]
    """Gives the trace of a text; raises a ValueError for one that cannot be read."""
    training: dict[str, Any] | None
    """The log of a run."""


def open_text_reader(directory: Path) -> TextReader | None:
    """Load a run of text or a pretrained model of text; None for a run of something else."""
    if runs.is_run(directory):
        task, model = runs.load_run(directory)
        if not isinstance(task, tasks.Text):
            return None
        recorder = Recorder(model, task.length)

        def record(text: str) -> Trace:
            example = task.read_text(text)
            return recorder.record(example.tokens[""], example.title)

        return TextReader(str(directory), record, training_document(directory))
    from regard.interop import huggingface

    loaded = huggingface.load(directory)
    demand_text_reader(loaded)
    config = loaded.config
    recorder = Recorder(loaded.model, config.max_length if config.positions == "learned" else None)

    def read(text: str) -> Trace:
        return recorder.record(name_tokens(encode(loaded, text)), shorten_title(text))

    return TextReader(f"{directory} ({loaded.kind})", read, None)


def demand_text_reader(loaded: Any) -> None:
    """Raise a ValueError for a pretrained model that has no tokenizer, or reads no single text."""
    if loaded.tokenizer is None:
        raise ValueError(f"{loaded.directory} has no tokenizer; put its tokenizer.json there")
    if loaded.kind in ("t5", "vit"):
        raise ValueError(f"{loaded.directory} holds {loaded.kind}; give an encoder or a decoder of text")


def encode(loaded: Any, text: str) -> Any:
    """Encode a text by a pretrained model's tokenizer; raise a ValueError where it has no token."""
    encoding = loaded.tokenizer.encode(text)
    if not encoding.ids:
        raise ValueError("text: expected at least one token, got none")
    return encoding


def name_tokens(encoding: Any) -> Tokens:
    """Return what was encoded, for people to read."""
    return Tokens(encoding.tokens, ids=encoding.ids, spans=encoding.offsets)


def shorten_title(text: str) -> str:
    """Return a text as a title."""
    return text if len(text) <= TITLE_LENGTH else f"{text[: TITLE_LENGTH - 1]}…"
