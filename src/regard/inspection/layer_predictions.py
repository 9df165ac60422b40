"""Layer predictions: what a model would predict behind each layer, and what each head adds to a logit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import check_kind, integers, whole_number
from regard.axes import Array, ArrayLike
from regard.engine.call.hooks import CallEvent, watch
from regard.inspection.traces import Trace
from regard.inspection.traces.predictions import Predictions


def predict_layers(
    trace: Trace,
    model: Any,
    tokens: ArrayLike,
    spell: Callable[[int], str] = str,
    *,
    targets: ArrayLike | None = None,
    top_k: int = 3,
    **options: Any,
) -> Trace:
    """Add to a trace what each layer would predict (logit lens), and what each head adds to a logit.

    p_l = softmax(head(final_norm(stream_l))),  c_lht = sum_em output_lhte Wo_lhem u_tm

    u_t is the target's column of the matrix that makes logits, times the scale of the final norm and divided
    by the size of the last stream at t (without its mean, for a LayerNorm): a logit, before a softcap, is the
    sum of what all heads and layers add along u_t, and a constant. What later layers make of a head's output
    is not in it. The model runs once more, outside `jit`.

    Args:
        trace: of `capture`, of the same model and tokens.
        model: a `regard.models.Decoder`, in evaluation mode.
        tokens: `(T,)` or `(1, T)`.
        spell: gives the text of a token, for people to read.
        targets: `(T,)`, tokens whose logits heads add to; None means those that the model predicts.
        top_k: how many tokens are kept of each layer and position.
        **options: of the model's call: lengths, mask, positions.

    Returns:
        The trace with `predictions`. Their `contributions` are None where a norm stands between the heads
        and the stream (`norm="post"` or `"both"`).

    Raises:
        TypeError: a model of another kind; targets that are not integers.
        ValueError: a trace of other calls; targets of another shape, or that the model has no logits of.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard import inspection
        >>> from regard.models import Decoder, TransformerConfig
        >>> config = TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=2, vocab_size=13)
        >>> model = Decoder(config, rngs=nnx.Rngs(0))
        >>> _, trace = inspection.record(model, jnp.array([[1, 2, 3, 4]]))
        >>> found = inspection.predict_layers(trace, model, jnp.array([1, 2, 3, 4])).predictions
        >>> found.tokens.shape, found.contributions.shape
        ((2, 4, 3), (2, 3, 4))

    Reference: nostalgebraist, "Interpreting GPT: the Logit Lens", 2020; Elhage et al., "A Mathematical
    Framework for Transformer Circuits", 2021.
    """
    from regard.models import Decoder
    from regard.models.padding import check_range

    if not isinstance(model, Decoder):
        raise TypeError(f"model: expected a regard.models.Decoder, got {type(model).__name__}")
    check_kind("trace", trace, Trace)
    ids = jnp.atleast_2d(integers("tokens", tokens))
    events: list[CallEvent] = []
    with watch(events.append):
        _, seen = model.trunk(ids, aux=("hidden",), **options)
    ran = [event.output.shape for event in events]
    kept = [(1, call.heads, call.rows) for call in trace.calls]
    if [shape[:3] for shape in ran] != kept:
        raise ValueError(f"trace: expected calls of the shapes {ran}, as the model has them; got {kept}")
    vocab_size = model.config.vocab_size or 1  # which a decoder always has
    count = min(whole_number("top_k", top_k, 1), vocab_size)
    norm = model.trunk.stack.final_norm
    streams = [block["hidden"][0] for block in seen["blocks"]]
    likeliest, probabilities = [], []
    for stream in streams:
        logits = model.predict(stream if norm is None else norm(stream))
        shares, found = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), count)
        likeliest.append(np.asarray(found))
        probabilities.append(np.asarray(shares))
    named = likeliest[-1][:, 0] if targets is None else np.asarray(integers("targets", targets))
    if named.shape != ids.shape[1:]:
        raise ValueError(f"targets: expected shape {ids.shape[1:]}, got {named.shape}")
    check_range("targets", "tokens", named, vocab_size - 1, f"vocab_size={vocab_size}")
    contributions = None
    if model.config.norm == "pre" and all(event.projection is not None for event in events):
        directions = _find_directions(model, streams[-1], named)
        contributions = np.stack([_project(event, directions) for event in events])
    known, numbers = np.unique(np.concatenate([np.ravel(likeliest), named]), return_inverse=True)
    numbers = numbers.astype(np.int32)
    top = np.stack(probabilities)
    return dataclasses.replace(
        trace,
        predictions=Predictions(
            texts=tuple(spell(int(token)) for token in known),
            tokens=numbers[: top.size].reshape(top.shape),
            probabilities=top,
            targets=numbers[top.size :],
            contributions=contributions,
        ),
    )


def _find_directions(model: Any, stream: Array, targets: np.ndarray) -> np.ndarray:
    """Return u_t, float64 (T, M): what the stream at t is multiplied by for the logit of its target."""
    head, norm = model.head, model.trunk.stack.final_norm
    rows = model.trunk.embedding.entry.table.embedding[...] if head is None else head.kernel[...].T
    directions = np.asarray(rows[targets], np.float64) * model.config.output_scale
    directions = directions * np.asarray(norm.scale[...], np.float64)
    wide = np.asarray(stream, np.float64)
    if model.config.norm_kind != "rms":
        directions = directions - directions.mean(-1, keepdims=True)
        wide = wide - wide.mean(-1, keepdims=True)
    return directions / np.sqrt((wide**2).mean(-1, keepdims=True) + norm.epsilon)


def _project(event: CallEvent, directions: np.ndarray) -> np.ndarray:
    """Return what each head's output adds along the directions, float32 (H, T)."""
    output = np.asarray(event.output[0], np.float64)
    heads, _, width = output.shape
    kernel = np.asarray(event.projection.kernel[...], np.float64).reshape(heads, width, -1)
    return np.stack([((directions @ w.T) * o).sum(-1) for o, w in zip(output, kernel, strict=True)]).astype(
        np.float32
    )
