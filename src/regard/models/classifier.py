"""Classifier: an encoder, pooling of one vector per position to one per example, and a linear head."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from flax import nnx

from regard.arguments import guided, whole_number
from regard.axes import Array, ArrayLike
from regard.engine.call.problem import accumulation_dtype
from regard.engine.dispatch.placement import demand_whole
from regard.layers import MultiHeadAttention
from regard.layers.choices import check_choice
from regard.layers.multi_head import unpack
from regard.models.config import TransformerConfig
from regard.models.encoder import Encoder
from regard.models.padding import blank_padding, mask_padding


class MeanPooling(nnx.Module):
    """The mean over the valid positions; zeros where there are none."""

    def __call__(self, hidden: Array, lengths: Any, aux: tuple[str, ...]) -> tuple[Array, dict[str, Any]]:
        # In half precision a sum overflows before the mean does.
        total = jnp.sum(blank_padding(hidden, lengths), axis=-2, dtype=accumulation_dtype(hidden))
        if lengths is None:
            return (total / max(hidden.shape[-2], 1)).astype(hidden.dtype), {}
        count = jnp.maximum(jnp.asarray(lengths, jnp.int32), 1).astype(total.dtype)
        return (total / count[..., None]).astype(hidden.dtype), {}


class FirstPooling(nnx.Module):
    """The first position; zeros where there is none."""

    def __call__(self, hidden: Array, lengths: Any, aux: tuple[str, ...]) -> tuple[Array, dict[str, Any]]:
        if hidden.shape[-2] == 0:
            return jnp.zeros((*hidden.shape[:-2], hidden.shape[-1]), hidden.dtype), {}
        return blank_padding(hidden, lengths)[..., 0, :], {}


class AttentionPooling(nnx.Module):
    """One learned query that attends over the valid positions."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        start = nnx.initializers.normal(1.0 / math.sqrt(config.d_model))
        self.query = nnx.Param(start(rngs.params(), (1, config.d_model), jnp.float32))
        self.attention = MultiHeadAttention(
            config.d_model,
            config.num_heads,
            num_key_heads=config.num_key_heads,
            head_dim=config.head_dim,
            use_bias=config.attention_bias,
            dropout_rate=config.attention_dropout_rate,
            rngs=rngs,
        )

    def __call__(self, hidden: Array, lengths: Any, aux: tuple[str, ...]) -> tuple[Array, dict[str, Any]]:
        query = self.query[...] * math.sqrt(hidden.shape[-1])
        query = jnp.broadcast_to(query, (*hidden.shape[:-2], 1, hidden.shape[-1]))
        pooled, seen = unpack(self.attention(query, hidden, mask=mask_padding(lengths), aux=aux), aux)
        return pooled[..., 0, :], seen


def build_pooling(name: str | None, config: TransformerConfig, rngs: nnx.Rngs) -> Any:
    if name is None:
        return None
    check_choice("pooling, if not None", name, ("mean", "attention", "first"))
    if name == "attention":
        return AttentionPooling(config, rngs=rngs)
    return MeanPooling() if name == "mean" else FirstPooling()


@guided
class Classifier(nnx.Module):
    """Encoder that predicts one class per example, or with `pooling=None` one per position.

    logits = head(pool(encoder(inputs)))

    Args:
        config: sizes and choices.
        num_classes: C.
        pooling: "mean" over the valid positions, the "first" position, "attention" (one learned query
            attends over the valid positions), or None for logits at every position.
        rngs: random streams: "params", and "dropout" where something drops.

    Raises:
        TypeError, ValueError: an unknown pooling, a number of classes that is no integer of at least 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard.models import Classifier, TransformerConfig
        >>> config = TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=1, vocab_size=13)
        >>> model = Classifier(config, 5, pooling="attention", rngs=nnx.Rngs(0))
        >>> logits, aux = model(jnp.array([[1, 2, 3, 4]]), aux=("weights",))
        >>> logits.shape, aux["pooling"]["weights"].shape
        ((1, 5), (1, 3, 1, 4))

    Reference: Devlin et al., "BERT", 2019, for the first position; Lee et al., "Set Transformer", 2019, for
    pooling by attention.
    """

    def __init__(
        self, config: TransformerConfig, num_classes: int, *, pooling: str | None = "mean", rngs: nnx.Rngs
    ):
        num_classes = whole_number("num_classes", num_classes, 1)
        self.config = config
        self.encoder = Encoder(config, rngs=rngs)
        self.pooling = build_pooling(pooling, config, rngs)
        self.head = nnx.Linear(config.d_model, num_classes, rngs=rngs)

    def __call__(
        self, inputs: ArrayLike, *, lengths: ArrayLike | None = None, aux: tuple[str, ...] = ()
    ) -> Array | Any:
        """Compute the logits of the classes.

        Args:
            inputs, aux: as in `Encoder`.
            lengths: as in `Encoder`. An example of length 0 pools to zeros, or by attention to the bias of
                its output projection, so that its logits are finite; a `class_token` is pooled alone.

        Returns:
            Logits `(batch, C)`, or `(batch, T, C)` with `pooling=None`; with `aux`, also {"blocks": one
            dict per block}, and with attention pooling "pooling": dict, weights `(batch, H, 1, T)`.

        Raises:
            TypeError, ValueError: as in `TokenEmbedding`.
        """
        hidden, seen = unpack(self.encoder(inputs, lengths=lengths, aux=aux), aux)
        if self.pooling is not None:
            demand_whole("pooling")
            hidden, seen_pooling = self.pooling(hidden, self.encoder.hidden_lengths(lengths), aux)
            if seen_pooling:
                seen = {**seen, "pooling": seen_pooling}
        logits = self.head(hidden)
        return (logits, seen) if aux else logits
