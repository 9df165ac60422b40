"""Predictions: what each layer of a language model would predict, and what heads add to a logit, as kept."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.inspection.traces.codec import wrong


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions behind each layer at each position; tokens are numbers of `texts`.

    A layer is a call of the trace; of a hybrid, L also counts layers without attention, as `Call.layer` does.
    """

    texts: tuple[str, ...]
    tokens: np.ndarray  # (L, T, k) int32, the likeliest next ones behind each layer, likeliest first
    probabilities: np.ndarray  # (L, T, k) float32, of them
    targets: np.ndarray  # (T,) int32, the tokens whose logits `contributions` are parts of
    contributions: np.ndarray | None = None
    """(calls, H, T) float32, what each head adds to the logit of the target; None where a norm or a gate
    follows heads, so that it is no sum of such parts."""
    next_log_probability: np.ndarray | None = field(default=None, metadata={"optional": True})
    """(T - 1,) float32, of each token that came next, by the whole model: its mean is less the loss."""


def check_predictions(path: str, predictions: Predictions | None, calls: Sequence[Any]) -> None:
    """Refuse predictions of a file that do not fit its calls."""
    if predictions is None:
        return
    sizes = {(call.heads, call.rows, call.keys) for call in calls}
    heads, rows, keys = next(iter(sizes), (0, 0, 0))
    if len(sizes) != 1 or rows != keys:
        wrong(path, "calls that are all of one shape, rows as keys", sorted(sizes)[:3])
    tokens = predictions.tokens
    # Of a hybrid there are more than calls: layers without attention, the last one perhaps among them.
    layers = max(len(calls), *(call.layer + 1 for call in calls), tokens.shape[0] if tokens.ndim else 0)
    shape = (layers, rows, tokens.shape[-1] if tokens.ndim else 0)
    shapes = {"tokens": shape, "probabilities": shape, "targets": (rows,)}
    shapes |= {"contributions": (len(calls), heads, rows), "next_log_probability": (max(rows - 1, 0),)}
    for name, wanted in shapes.items():
        array, kind = getattr(predictions, name), "i" if name in ("tokens", "targets") else "f"
        if array is not None and (array.dtype.kind != kind or array.shape != wanted):
            wrong(f"{path}.{name}", f"{kind} numbers of shape {wanted}", f"{array.dtype} {array.shape}")
    for name, array in (("tokens", predictions.tokens), ("targets", predictions.targets)):
        if array.size and not 0 <= array.min() <= array.max() < len(predictions.texts):
            named = f"numbers of the {len(predictions.texts)} texts"
            wrong(f"{path}.{name}", named, f"{array.min()}..{array.max()}")
    # Of a model whose logits are not numbers, these are none either.
    if np.any((predictions.probabilities < 0) | (predictions.probabilities > 1 + 1e-5)):
        wrong(f"{path}.probabilities", "numbers in 0..1", "others")
