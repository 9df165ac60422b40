"""Models that read text: their tokens, and readers of one text after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.cli.sources import load_run
from regard.cli.text_models import is_pretrained
from regard.inspection import Paths, ScoreParts, Tokens, Trace, decompose_score
from regard.inspection.recorders import Recorder
from regard.models import Decoder
from regard.training import history, runs, tasks

DEFAULT_TEXT = "The cat sat on the mat because it was tired."
TITLE_LENGTH = 80


class TextReader(NamedTuple):
    """A model that reads texts."""

    title: str
    """For people."""
    record: Callable[..., Trace]
    """Gives the trace of a text, heads cut by `cut`, `by` and the text `source` as of `Recorder.record`;
    raises a ValueError for one that cannot be read."""
    training: dict[str, Any] | None
    """The log of a run."""
    explain: Callable[..., ScoreParts] | None
    """Splits a score of a text, as `decompose_score` does; None, of a model that is no decoder."""
    trace: Callable[[str, int], tuple[Paths, str, Sequence[str]]] | None
    """Gives the paths to what is predicted behind a position, the predicted token and all tokens, or None."""


def open_text_reader(directory: Path) -> TextReader | None:
    """Load a run of text or a pretrained model of text; None for anything else."""
    if not runs.is_run(directory) and not is_pretrained(directory):
        return None
    if runs.is_run(directory):
        task, model = load_run(directory)
        if not isinstance(task, tasks.Text):
            return None
        title, training = str(directory), history.training_document(directory)
        most, spell = task.length, task.spell

        def read(text: str) -> tuple[Tokens, str]:
            example = task.read_text(text)
            return example.tokens[""], example.title

    else:
        from regard.interop import huggingface

        loaded = huggingface.load(directory)
        demand_text_reader(loaded)
        model, title, training = loaded.model, f"{directory} ({loaded.kind})", None
        most = loaded.config.max_length if loaded.config.positions == "learned" else None
        spell = partial(spell_token, loaded)

        def read(text: str) -> tuple[Tokens, str]:
            return name_tokens(encode(loaded, text)), shorten_title(text)

    recorder = Recorder(model, most, spell)

    def record(text: str, source: str | None = None, **cut: Any) -> Trace:
        return recorder.record(*read(text), source=None if source is None else read(source)[0], **cut)

    def explain(text: str, **indices: Any) -> ScoreParts:
        return decompose_score(model, np.asarray(read(text)[0].ids, np.int32), **indices)

    def trace(text: str, query: int) -> tuple[Paths, str, Sequence[str]]:
        tokens, _ = read(text)
        paths = recorder.trace_paths(np.asarray(tokens.ids), query)
        return paths, spell(paths.target), tokens.texts

    questions = (explain, trace) if isinstance(model, Decoder) else (None, None)
    return TextReader(title, record, training, *questions)


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


def spell_token(loaded: Any, token: int) -> str:
    """Return the text of a pretrained model's token."""
    return loaded.tokenizer.id_to_token(token) or f"<{token}>"


def name_tokens(encoding: Any) -> Tokens:
    """Return what was encoded, for people to read."""
    return Tokens(encoding.tokens, ids=encoding.ids, spans=encoding.offsets)


def shorten_title(text: str) -> str:
    """Return a text as a title."""
    return text if len(text) <= TITLE_LENGTH else f"{text[: TITLE_LENGTH - 1]}…"
