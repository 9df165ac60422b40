"""Models that read text: their tokens, and readers of one text after another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.inspection import ScoreParts, Tokens, Trace, decompose_score
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

        def identify(text: str) -> Any:
            return task.read_text(text).tokens[""].ids

        return TextReader(
            str(directory), record, training_document(directory), _explain_scores(model, identify)
        )
    from regard.interop import huggingface

    loaded = huggingface.load(directory)
    demand_text_reader(loaded)
    config = loaded.config
    spell = loaded.tokenizer.id_to_token
    most = config.max_length if config.positions == "learned" else None
    recorder = Recorder(loaded.model, most, lambda token: spell(token) or f"<{token}>")

    def read(text: str, **cut: Any) -> Trace:
        return recorder.record(name_tokens(encode(loaded, text)), shorten_title(text), **cut)

    explain = _explain_scores(loaded.model, lambda text: encode(loaded, text).ids)
    return TextReader(f"{directory} ({loaded.kind})", read, None, explain)


def _explain_scores(model: Any, identify: Callable[[str], Any]) -> Callable[..., ScoreParts] | None:
    """Return the function of a text and a place that splits a score, given that of a text's token ids."""
    if not isinstance(model, Decoder):
        return None
    return lambda text, **indices: decompose_score(model, np.asarray(identify(text), np.int32), **indices)


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
