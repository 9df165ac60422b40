"""Which pictures belong to a run: its curves, and what its model attends to on held-out examples."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from regard import masks, positions
from regard.inspection import Call, Trace, figures
from regard.training import metrics, tasks
from regard.training.compilation import run_once
from regard.training.heads import read_heads

Picture = tuple[str, figures.Drawing]
NUM_SCANS = 12
NUM_TOKENS = 32
END_OF_DOCUMENT = "■"
VISIBLE = {" ": "␣", "\n": "⏎", "\t": "→", "\r": "←"}
KNOWN = {END_OF_DOCUMENT, *VISIBLE.values()}
POSITIONS_SHOWN = 50


def draw_run(task: tasks.Task, model: Any, lines: list[metrics.Line]) -> Iterator[Picture]:
    """Draws every picture of one run, one at a time: a name and a drawing."""
    if lines:
        yield "curves", figures.training_curves(lines, title=f"{task.name}: training and held-out data")
    yield from _draw_histories(task, lines)
    yield from _PAINTERS[type(task)](task, model)
    if task.config.positions == "learned":
        yield from _draw_learned_positions(task, model)


def draw_trace(trace: Trace) -> Iterator[Picture]:
    """Draws all heads of a trace as thumbnails, those of one kind of sequence in a picture."""
    groups: dict[tuple[str, int, int], list[Call]] = {}
    for call in trace.calls:
        groups.setdefault((call.kind, call.rows, call.keys), []).append(call)
    for number, ((_, rows, keys), calls) in enumerate(groups.items()):
        if calls[0].heads and rows > 1 and keys > 1:
            drawing = figures.head_atlas(
                [call.readout() for call in calls],
                layer_labels=[shorten_name(call.name) for call in calls],
                title=trace.title,
            )
            yield f"atlas-{number}" if number else "atlas", drawing


def draw_comparison(runs: Mapping[str, list[metrics.Line]]) -> figures.Drawing:
    """Draws the curves of several runs in one figure."""
    return figures.training_curves(runs)


def draw_masks(size: int = 16) -> Iterator[Picture]:
    """Draws masks of the algebra, one picture each."""
    documents = jnp.repeat(jnp.arange(4), size // 4)
    chosen = {
        "causal": masks.causal(),
        "causal-window": masks.causal() & masks.sliding_window(3),
        "prefix": masks.causal() | masks.prefix(5),
        "documents": masks.causal() & masks.segments(documents[None]),
        "global-and-dilated": masks.global_tokens(1) | masks.dilated(3),
    }
    titles = {"documents": "causal() & segments of four documents"}
    for name, mask in chosen.items():
        dense = np.asarray(mask.dense(size, size)).reshape(-1, size, size)[0]
        yield f"mask-{name}", figures.mask_picture(dense, title=titles.get(name, repr(mask)))


def draw_sinusoids(d_model: int) -> Iterator[Picture]:
    """Draws the sinusoidal positions of one width."""
    table = positions.sinusoidal(POSITIONS_SHOWN, d_model)
    title = f"Sinusoidal positions, d_model = {d_model}"
    yield "sinusoidal-positions", figures.position_table(table, title=title)


def _draw_histories(task: tasks.Task, lines: list[metrics.Line]) -> Iterator[Picture]:
    """What became of every head in training, where the run looked at them."""
    labels = {"entropy": "Entropy (nats)", "max_score": "Largest logit"}
    for name, label in labels.items():
        steps, heads, values = read_heads(lines, name)
        if steps:
            title = f"{task.name}: {label[0].lower()}{label[1:]} of every head"
            drawing = figures.head_history(steps, heads, values, label=label, title=title)
            yield f"heads-{name.replace('_', '-')}", drawing


def shorten_name(name: str) -> str:
    """encoder.blocks.3 for encoder.stack.blocks.3.attention."""
    parts = (part.removesuffix("_attention") for part in name.split("."))
    return ".".join(part for part in parts if part not in ("stack", "attention", "trunk")) or name


def _draw_learned_positions(task: tasks.Task, model: Any) -> Iterator[Picture]:
    """The table that a model learned, and how alike its positions became."""
    # The model reads its table times sqrt(d_model).
    table = model.encoder.embedding.position_table.embedding[...] * math.sqrt(task.config.d_model)
    title = f"{task.name}: learned positions"
    yield "learned-positions", figures.position_table(table, title=title)
    yield "learned-position-similarity", figures.position_similarity(table, title=title)


def _draw_threshold(task: tasks.ThresholdTask, model: Any) -> Iterator[Picture]:
    """The first held-out sequence; every token weighs the same in a sum, and attention learns to be even."""
    tokens = task.held_out["inputs"][:1]
    logits, aux = run_once(lambda inputs: model(inputs, aux=("weights",)), tokens)
    labels = [str(token) for token in np.asarray(tokens[0])]
    above = ("not above", "above")[int(logits[0].argmax())]
    title = f"threshold: the sum is {int(tokens.sum())}, predicted {above} {task.preset.threshold}"
    yield from _draw_heads(np.asarray(aux["blocks"][-1]["weights"][0]), labels, labels, title)


def _draw_copy(task: tasks.CopyTask, model: Any) -> Iterator[Picture]:
    """The first held-out sequence; a solved task looks one position to the right."""
    inputs = task.held_out["inputs"][:1]
    logits, aux = run_once(lambda inputs: model(inputs, aux=("weights",)), inputs)
    read = ["SOS" if token == task.start_token else str(token) for token in np.asarray(inputs[0])]
    written = ["EOS" if token == task.end_token else str(token) for token in np.asarray(logits[0].argmax(-1))]
    queries = [f"{before} → {after}" for before, after in zip(read, written, strict=True)]
    weights = np.asarray(aux["blocks"][-1]["weights"][0])
    focus = np.trace(weights, offset=1, axis1=1, axis2=2)
    yield from _draw_heads(weights, queries, read, "copy: what each position reads → writes", focus)


def _draw_reverse(task: tasks.ReverseTask, model: Any) -> Iterator[Picture]:
    """The longest held-out sequence, and where each written token looks in the source."""
    batch = task.held_out
    row = int(jnp.argmax(batch["lengths"]))
    example = {name: values[row : row + 1] for name, values in batch.items()}
    length = int(example["lengths"][0])
    logits, aux = run_once(lambda example: task.read(model, example, aux=("weights",)), example)
    logits = logits[:, : length + 1]
    read = [str(token) for token in np.asarray(example["source"][0, :length])]
    written = np.asarray(logits[0].argmax(-1))
    answers = ["EOS" if token == task.end_token else str(token) for token in written]
    weights = np.asarray(aux["decoder"][-1]["cross"]["weights"][0])[:, : length + 1, :length]
    focus = np.trace(weights[:, :, ::-1], axis1=1, axis2=2)
    for name, drawing in _draw_heads(
        weights, answers, read, "reverse: each token written reads the source backwards", focus
    ):
        yield name.replace("attention", "cross-attention"), drawing


def _draw_digits(task: tasks.DigitsTask, model: Any) -> Iterator[Picture]:
    """Held-out scans, mistakes first, with the patches that the pooled prediction reads."""
    batch = task.held_out
    logits, aux = run_once(lambda inputs: model(inputs, aux=("weights",)), batch["inputs"])
    predicted, labels = np.asarray(logits.argmax(-1)), np.asarray(batch["labels"])
    wrong, right = np.flatnonzero(predicted != labels), np.flatnonzero(predicted == labels)
    # Mistakes fill at most a third: the picture shows what is usual as well as what is hard.
    mistakes = wrong[: NUM_SCANS // 3]
    rows = np.concatenate([right[: NUM_SCANS - len(mistakes)], mistakes])
    pooling = np.asarray(aux["pooling"]["weights"])
    yield (
        "scans",
        figures.scan_attention_grid(
            np.asarray(batch["scans"])[rows],
            pooling[rows, :, 0].mean(1),
            patch_grid=task.PATCHES,
            predicted_labels=predicted[rows].tolist(),
            true_labels=labels[rows].tolist(),
            title=f"digits: attention of the pooled prediction ({len(wrong)} of {len(labels)} wrong)",
        ),
    )
    patches = np.asarray(aux["blocks"][-1]["weights"])[rows[0]]
    yield "attention-heads", figures.head_grid(patches, title="digits: patches of the first scan, last block")


def _draw_text(task: tasks.TextTask, model: Any) -> Iterator[Picture]:
    """The beginning of the held-out text: what each token reads to predict the next."""
    inputs = task.held_out["inputs"][:1, :NUM_TOKENS]
    _, aux = run_once(lambda inputs: task.read(model, inputs, aux=("weights",)), inputs)
    labels = [_label_token(task.vocabulary.spell(int(token))) for token in np.asarray(inputs[0])]
    weights = np.asarray(aux["blocks"][-1]["weights"][0])
    focus = np.trace(weights, offset=-1, axis1=1, axis2=2)
    yield from _draw_heads(weights, labels, labels, "text: what each token reads", focus)


def _label_token(spelled: bytes) -> str:
    """A token as a label: spaces and ends of lines made visible, what fonts may lack as its code."""
    text = spelled.decode("utf-8", errors="backslashreplace") if spelled else END_OF_DOCUMENT
    shown = (VISIBLE.get(letter, letter) for letter in text)
    return "".join(s if s in KNOWN or s.isascii() else ascii(s)[1:-1] for s in shown)


def _draw_heads(
    weights: np.ndarray, queries: list[str], keys: list[str], title: str, focus: np.ndarray | None = None
) -> Iterator[Picture]:
    """One head as an annotated heatmap (the one with most focus) and all heads side by side."""
    head = 0 if focus is None else int(np.argmax(focus))
    yield (
        "attention",
        figures.attention_heatmap(
            weights[head], query_labels=queries, key_labels=keys, title=f"{title} (head {head})"
        ),
    )
    yield "attention-heads", figures.head_grid(weights, query_labels=queries, key_labels=keys, title=title)


_PAINTERS: dict[type, Callable[[Any, Any], Iterator[Picture]]] = {
    tasks.ThresholdTask: _draw_threshold,
    tasks.CopyTask: _draw_copy,
    tasks.ReverseTask: _draw_reverse,
    tasks.DigitsTask: _draw_digits,
    tasks.TextTask: _draw_text,
}


def save_pictures(pictures: Iterator[Picture], folder: Path, kind: str, prefix: str = "") -> list[Path]:
    """Writes pictures as they are drawn; returns the paths in drawing order."""
    return [figures.save(drawing, folder / f"{prefix}{name}.{kind}") for name, drawing in pictures]
