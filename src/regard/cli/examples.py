"""One example of a run's task, read by its model and watched: what there is to inspect and to view."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from regard import inspection
from regard.cli.pictures import END_OF_DOCUMENT
from regard.inspection import Tokens, Trace
from regard.training import tasks
from regard.training.task import Batch


class Example(NamedTuple):
    """An example as the task's model takes it, and what people read in it."""

    batch: Batch
    tokens: Mapping[Any, Tokens]
    title: str


def watch_run(task: tasks.Task, model: Any, text: str | None = None) -> Trace:
    """Let a trained model read one held-out example, or a text, and keep what it attended to.

    Args:
        task: of the run.
        model: in evaluation mode.
        text: what a model of text reads; None means the beginning of its held-out text.

    Returns:
        The trace.

    Raises:
        ValueError: a text for a model that reads none, or one that is too long.
    """
    if text is not None and not isinstance(task, tasks.TextTask):
        raise ValueError(f"--text is for models that read text; {task.name} reads examples of its own")
    take = _TAKERS[type(task)]
    specimen = take(task, text) if isinstance(task, tasks.TextTask) else take(task)
    with inspection.capture(model, tokens=specimen.tokens, title=specimen.title) as trace:
        task.look(model, specimen.batch, ("lse",))
    return trace


def _take_threshold(task: tasks.ThresholdTask) -> Example:
    """The first held-out sequence."""
    batch = _pick(task.held_out, 0)
    row = np.asarray(batch["inputs"][0])
    said = "above" if int(batch["labels"][0]) else "not above"
    title = f"threshold: {task.preset.length} tokens with sum {row.sum()}, {said} {task.preset.threshold}"
    return Example(batch, {"": Tokens([str(token) for token in row], ids=row)}, title)


def _take_copy(task: tasks.CopyTask) -> Example:
    """The first held-out sequence, with its start mark."""
    batch = _pick(task.held_out, 0)
    row = np.asarray(batch["inputs"][0])
    texts = ["SOS" if token == task.start_token else str(token) for token in row]
    return Example(
        batch, {"": Tokens(texts, ids=row)}, "copy: what each position reads to write its neighbour"
    )


def _take_reverse(task: tasks.ReverseTask) -> Example:
    """The longest held-out sequence, with the right answer given to the decoder one place to the right."""
    batch = _pick(task.held_out, int(jnp.argmax(task.held_out["lengths"])))
    names = {task.start_token: "SOS", task.end_token: "EOS", task.pad_token: "PAD"}
    source = np.asarray(batch["source"][0])
    given = np.concatenate([[task.start_token], np.asarray(batch["target"][0])[:-1]])
    read, written = (
        Tokens([names.get(int(token), str(token)) for token in row], ids=row) for row in (source, given)
    )
    title = "reverse: the decoder reads the source backwards"
    return Example(batch, {"encoder": read, "memory": read, "decoder": written}, title)


def _take_digits(task: tasks.DigitsTask) -> Example:
    """The first held-out scan in its patches, and the query that pools them."""
    batch = _pick(task.held_out, 0)
    rows, columns = task.PATCHES
    scan = np.asarray(batch["scans"][0])
    patches = Tokens(
        [f"{row},{column}" for row in range(rows) for column in range(columns)],
        patch_grid=task.PATCHES,
        picture=1 - scan / max(float(scan.max()), 1e-6),  # ink on paper
    )
    tokens = {rows * columns: patches, 1: Tokens(["prediction"])}
    return Example(
        batch, tokens, f"digits: a scan of {int(batch['labels'][0])} in {rows} x {columns} patches"
    )


def _take_text(task: tasks.TextTask, text: str | None) -> Example:
    """A row of held-out text, or a text as the beginning of a document."""
    vocabulary = task.vocabulary
    if text is None:
        row, title = np.asarray(task.held_out["inputs"][0]), "text: what each token of held-out text reads"
    else:
        row = np.concatenate([[vocabulary.mark], np.asarray(vocabulary.encode(text))]).astype(np.int32)
        title = f"text: {text if len(text) <= 60 else text[:59] + '…'}"
        if len(row) > task.preset.length:
            most = task.preset.length - 1
            raise ValueError(f"--text: expected at most {most} tokens, as in training, got {len(row) - 1}")
    spelled = (vocabulary.spell(int(token)) for token in row)
    texts = [piece.decode("utf-8", "backslashreplace") if piece else END_OF_DOCUMENT for piece in spelled]
    return Example({"inputs": jnp.asarray(row)[None]}, {"": Tokens(texts, ids=row)}, title)


def _pick(batch: Batch, row: int) -> Batch:
    return jax.tree.map(lambda values: values[row : row + 1], batch)


_TAKERS: dict[type, Callable[..., Example]] = {
    tasks.ThresholdTask: _take_threshold,
    tasks.CopyTask: _take_copy,
    tasks.ReverseTask: _take_reverse,
    tasks.DigitsTask: _take_digits,
    tasks.TextTask: _take_text,
}
