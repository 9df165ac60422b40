"""Models that read text: their tokens, and readers of one text after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.inspection import Paths, ScoreParts, Tokens, Trace, decompose_score
from regard.inspection.recorders import Recorder
from regard.models import Decoder
from regard.training import runs, tasks
from regard.training.history import training_document

DEFAULT_TEXT = "The cat sat on the mat because it was tired."
TITLE_LENGTH = 80


class TextReader(NamedTuple):
    """A model that reads texts."""

    title: str
    """For people."""
    record: Callable[..., Trace]
    """Gives the trace of a text, heads cut by `cut` and `by` as of `Recorder.record`; raises a ValueError
    for one that cannot be read."""
    training: dict[str, Any] | None
    """The log of a run."""
    explain: Callable[..., ScoreParts] | None
    """Splits a score of a text, as `decompose_score` does; None, of a model that is no decoder."""
    trace: Callable[[str, int], tuple[Paths, str, Sequence[str]]] | None
    """Gives the paths to what is predicted behind a position, the predicted token and all tokens, or None."""


def open_text_reader(directory: Path) -> TextReader | None:
    """Load a run of text or a pretrained model of text; None for a run of something else."""
    if runs.is_run(directory):
        task, model = runs.load_run(directory)
        if not isinstance(task, tasks.Text):
            return None
        recorder = Recorder(model, task.length, task.spell)

        def record(text: str, **cut: Any) -> Trace:
            example = task.read_text(text)
            return recorder.record(example.tokens[""], example.title, **cut)

        def tokenize(text: str) -> Tokens:
            return task.read_text(text).tokens[""]

        questions = _answer_questions(model, recorder, tokenize, task.spell)
        return TextReader(str(directory), record, training_document(directory), *questions)
    from regard.interop import huggingface

    loaded = huggingface.load(directory)
    demand_text_reader(loaded)
    config = loaded.config
    spell = loaded.tokenizer.id_to_token
    most = config.max_length if config.positions == "learned" else None

    def spell_token(token: int) -> str:
        return spell(token) or f"<{token}>"

    def tokenize_text(text: str) -> Tokens:
        return name_tokens(encode(loaded, text))

    recorder = Recorder(loaded.model, most, spell_token)

    def read(text: str, **cut: Any) -> Trace:
        return recorder.record(tokenize_text(text), shorten_title(text), **cut)

    questions = _answer_questions(loaded.model, recorder, tokenize_text, spell_token)
    return TextReader(f"{directory} ({loaded.kind})", read, None, *questions)


def _answer_questions(
    model: Any, recorder: Recorder, tokenize: Callable[[str], Tokens], spell: Callable[[int], str]
) -> tuple[Any, Any]:
    """Return the functions that explain and trace a text; None and None for a model that is no decoder."""
    if not isinstance(model, Decoder):
        return None, None

    def explain(text: str, **indices: Any) -> ScoreParts:
        return decompose_score(model, np.asarray(tokenize(text).ids, np.int32), **indices)

    def trace(text: str, query: int) -> tuple[Paths, str, Sequence[str]]:
        tokens = tokenize(text)
        paths = recorder.trace_paths(np.asarray(tokens.ids), query)
        return paths, spell(paths.target), tokens.texts

    return explain, trace


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
