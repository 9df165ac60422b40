"""The pictures of a run: its curves, and what its model attends to on held-out examples."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from regard import masks, positions
from regard.inspection import Call, Trace, figures
from regard.training import head_statistics, metrics
from regard.training.task import Picture, Task

POSITIONS_SHOWN = 50


def draw_run(task: Task, model: Any, lines: list[metrics.Line]) -> Iterator[Picture]:
    """Draw every picture of one run, one at a time: a name and a drawing."""
    if lines:
        yield "curves", figures.training_curves(lines, title=f"{task.name}: training and held-out data")
    for name, label in (("entropy", "Entropy (nats)"), ("max_score", "Largest logit")):
        steps, heads, values = head_statistics.read_heads(lines, name)
        if heads:
            title = f"{task.name}: {label[0].lower()}{label[1:]} of every head"
            drawing = figures.head_history(steps, heads, values, label=label, title=title)
            yield f"heads-{name.replace('_', '-')}", drawing
    yield from task.pictures(model)
    if task.config.positions == "learned":
        # The model reads its table times sqrt(d_model).
        table = model.encoder.embedding.position_table.embedding[...] * math.sqrt(task.config.d_model)
        title = f"{task.name}: learned positions"
        yield "learned-positions", figures.position_table(table, title=title)
        yield "learned-position-similarity", figures.position_similarity(table, title=title)


def draw_trace(trace: Trace) -> Iterator[Picture]:
    """Draw all heads of a trace as thumbnails, those of one kind of sequence in a picture."""
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


def draw_masks(size: int = 16) -> Iterator[Picture]:
    """Draw masks of the algebra, one picture each."""
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
    """Draw the sinusoidal positions of one width."""
    table = positions.sinusoidal(POSITIONS_SHOWN, d_model)
    title = f"Sinusoidal positions, d_model = {d_model}"
    yield "sinusoidal-positions", figures.position_table(table, title=title)


def shorten_name(name: str) -> str:
    """Shorten the name of a layer: encoder.blocks.3 for encoder.stack.blocks.3.attention."""
    parts = (part.removesuffix("_attention") for part in name.split("."))
    return ".".join(part for part in parts if part not in ("stack", "attention", "trunk")) or name


def save_pictures(pictures: Iterator[Picture], folder: Path, kind: str, prefix: str = "") -> list[Path]:
    """Write pictures as they are drawn; return the paths in drawing order."""
    return [figures.save(drawing, folder / f"{prefix}{name}.{kind}") for name, drawing in pictures]
