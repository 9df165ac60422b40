"""Layer predictions: what a model would predict behind each layer, and what each head adds to a logit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import check_kind, integers, whole_number
from regard.axes import Array, ArrayLike
from regard.engine.call.hooks import CallEvent, watch
from regard.inspection.contributions import check_decoder
from regard.inspection.traces import Trace
from regard.inspection.traces.predictions import Predictions

if TYPE_CHECKING:
    from regard.models import Decoder


def predict_layers(
    trace: Trace,
    model: Decoder,
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
        model, tokens: as in `decompose_score`.
        spell: gives the text of a token, for people to read.
        targets: `(T,)`, tokens whose logits heads add to; None means those that the model predicts.
        top_k: how many tokens are kept of each layer and position.
        **options: of the model's call: lengths, mask, positions.

    Returns:
        The trace with `predictions`, of a hybrid also of layers without attention; `contributions` are None
        where a norm follows heads ("post" or "both"), or a layer gates their output (`output_gate`, as in
        Qwen3.5 and Qwen3-Next) before it is projected.

    Raises:
        TypeError: a model of another kind; targets that are not integers.
        ValueError: a trace of other calls; targets of another shape, or that the model has no logits of.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard import inspection, models
        >>> config = models.TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=2, vocab_size=13)
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> _, trace = inspection.record(model, jnp.array([[1, 2, 3, 4]]))
        >>> found = inspection.predict_layers(trace, model, [1, 2, 3, 4]).predictions
        >>> found.tokens.shape, found.contributions.shape
        ((2, 4, 3), (2, 3, 4))

    Reference: nostalgebraist, "Interpreting GPT: the Logit Lens", 2020; Elhage et al., "A Mathematical
    Framework for Transformer Circuits", 2021.
    """
    from regard.models.padding import check_range

    check_decoder(model)
    check_kind("trace", trace, Trace)
    ids = jnp.atleast_2d(integers("tokens", tokens))
    events: list[CallEvent] = []
    with watch(events.append, reads=True):
        _, seen = model.trunk(ids, aux=("hidden",), **options)
    ran = [event.output.shape for event in events]
    recorded = [(1, call.heads, call.rows) for call in trace.calls]
    if [shape[:3] for shape in ran] != recorded:
        raise ValueError(f"trace: expected calls of the shapes {ran}, as the model has them; got {recorded}")
    vocab_size = model.config.vocab_size or 1  # which a decoder always has
    count = min(whole_number("top_k", top_k, 1), vocab_size)
    named = None if targets is None else np.asarray(integers("targets", targets))
    if named is not None:
        if named.shape != ids.shape[1:]:
            raise ValueError(f"targets: expected shape {ids.shape[1:]}, got {named.shape}")
        check_range("targets", "tokens", named, vocab_size - 1, f"vocab_size={vocab_size}")
    streams = [block["hidden"][0] for block in seen["blocks"]]
    reading = read_streams(model, ids[0], streams, events, count, named)
    return dataclasses.replace(trace, predictions=name_predictions(reading, ids.shape[1], spell))


class StreamReading(NamedTuple):
    """The predictions of one row's streams, as arrays, which a compiled program may return."""

    tokens: Array  # (L, T, k) int32, likeliest first
    probabilities: Array  # (L, T, k) float32
    next_log_probability: Array  # (T - 1,) float32, of the token that comes next, by the model
    targets: Array  # (T,) int32
    contributions: Array | None  # (calls, H, T) float32


def read_streams(
    model: Any,
    ids: Array,
    streams: Sequence[Array],
    events: Sequence[CallEvent],
    count: int,
    targets: ArrayLike | None = None,
) -> StreamReading:
    """Read each layer's stream, `(T, M)`, as the last one is, and project what heads wrote on the targets."""
    norm = model.trunk.stack.final_norm

    def predict(stream: Array) -> Array:
        return model.predict(stream if norm is None else norm(stream)).astype(jnp.float32)

    tops = [jax.lax.top_k(jax.nn.softmax(predict(stream)), count) for stream in streams]
    probabilities, tokens = map(jnp.stack, zip(*tops, strict=True))
    logits = predict(streams[-1])
    targets = tokens[-1, :, 0] if targets is None else jnp.asarray(targets, jnp.int32)
    coming = jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), ids[1:, None], -1)[:, 0]
    contributions = None
    if model.config.norm == "pre" and all(event.projection is not None for event in events):
        directions = find_directions(model, streams[-1].astype(jnp.float32), targets)
        contributions = jnp.stack([_project(event, directions) for event in events])
    return StreamReading(tokens, probabilities, coming, targets, contributions)


def name_predictions(reading: StreamReading, count: int, spell: Callable[[int], str]) -> Predictions:
    """Return what was read of the first tokens, with texts for people to read."""
    tokens, contributions = np.asarray(reading.tokens)[:, :count], reading.contributions
    named = np.concatenate([np.ravel(tokens), np.asarray(reading.targets)[:count]])
    tokens_named, numbers = np.unique(named, return_inverse=True)
    numbers = numbers.astype(np.int32)
    return Predictions(
        texts=tuple(spell(int(token)) for token in tokens_named),
        tokens=numbers[: tokens.size].reshape(tokens.shape),
        probabilities=np.asarray(reading.probabilities)[:, :count],
        targets=numbers[tokens.size :],
        contributions=None if contributions is None else np.asarray(contributions)[..., :count],
        next_log_probability=np.asarray(reading.next_log_probability)[: count - 1],
    )


def find_directions(model: Any, stream: Array, targets: Array) -> Array:
    """Return u_t, (T, M): what the stream at t is multiplied by for the logit of its target."""
    head, norm = model.head, model.trunk.stack.final_norm
    rows = model.trunk.embedding.entry.table.embedding[...] if head is None else head.kernel[...].T
    scale = model.config.output_scale * norm.scale[...].astype(stream.dtype)
    directions = rows[targets].astype(stream.dtype) * scale[None]
    if "rms" not in model.config.norm_kind:
        directions = directions - directions.mean(-1, keepdims=True)
        stream = stream - stream.mean(-1, keepdims=True)
    return directions / jnp.sqrt((stream**2).mean(-1, keepdims=True) + norm.epsilon)


def _project(event: CallEvent, directions: Array) -> Array:
    """Return what each head's output adds along the directions, (H, T)."""
    output = event.output[0].astype(jnp.float32)
    heads, _, width = output.shape
    kernel = event.projection.kernel[...].astype(jnp.float32).reshape(heads, width, -1)
    with jax.default_matmul_precision("highest"):
        return jnp.sum(output * jnp.einsum("tm,hem->hte", directions, kernel), -1)
