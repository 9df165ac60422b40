"""Statistics of every head on a fixed probe, step by step: the entropy of its weights, its largest logit.

Collapsing entropy and growing logits announce a training that is about to fail, and show which head it is.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.training.metrics import HEADS
from regard.training.task import Batch, Task

AUX = ("entropy", "max_score")
DIGITS = 6
HeadStats = dict[str, dict[str, jax.Array]]


def measure_heads(task: Task, model: Any, batch: Batch) -> HeadStats:
    """Measure "entropy", in nats, and "max_score" of every head of every attention layer on a batch.

    entropy = mean over queries t of -sum_s p_ts log p_ts,  max_score = max over t, s of score_ts

    Each is a dict from the layer's name to `(H,)`. Queries that may attend to nothing are left out; where
    there is no other, entropy is NaN and the score -inf.
    """
    stats: HeadStats = {name: {} for name in AUX}
    aux = task.read(model, batch, AUX)[1]
    layers = jax.tree.leaves_with_path(aux, is_leaf=lambda part: isinstance(part, dict) and AUX[0] in part)
    for path, seen in layers:
        layer = jax.tree_util.keystr(path, simple=True, separator=".")
        entropy, largest = seen["entropy"], seen["max_score"]
        reads = largest != -jnp.inf
        stats["entropy"][layer] = jnp.mean(entropy, axis=(0, 2), where=reads)
        # XLA's CPU loses NaN in a maximum.
        diverged = jnp.isnan(largest).any(axis=(0, 2))
        stats["max_score"][layer] = jnp.where(diverged, jnp.nan, jnp.max(largest, axis=(0, 2)))
    return stats


def describe_stats(step: int, stats: HeadStats) -> dict[str, Any]:
    """Return the line of metrics.jsonl for what `measure_heads` found: {"split": "heads", ...}."""
    line: dict[str, Any] = {"step": step, "split": HEADS}
    for name, layers in jax.device_get(stats).items():
        ordered = sorted(layers, key=_number_parts)
        line[name] = {layer: [float(f"{value:.{DIGITS}g}") for value in layers[layer]] for layer in ordered}
    return line


def read_heads(lines: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[str], np.ndarray]:
    """Gather the "entropy" or "max_score" of the heads in the lines of a metrics.jsonl into one matrix.

    Returns steps, names, and float64 values `(heads, steps)`, NaN where not finite or not logged.
    """
    by_step: dict[int, dict[str, float]] = {}
    for line in lines:
        if line.get("split") == HEADS and name in line:
            by_step[line["step"]] = {
                f"{layer} head {head}": math.nan if value is None else value
                for layer, heads in line[name].items()
                for head, value in enumerate(heads)
            }
    steps = sorted(by_step)
    names = list(dict.fromkeys(name for step in steps for name in by_step[step]))
    values = [[by_step[step].get(name, math.nan) for step in steps] for name in names]
    return steps, names, np.asarray(values, np.float64).reshape(len(names), len(steps))


def _number_parts(layer: str) -> list[tuple[int, str]]:
    """Return a key that sorts layers by number: compiled functions return dicts sorted by letter."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in layer.split(".")]
