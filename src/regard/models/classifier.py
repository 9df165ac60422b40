"""Classifier: an encoder, pooling, and a linear head."""

from __future__ import annotations

from typing import Any

from flax import nnx

from regard.arguments import guided, whole_number
from regard.axes import ArrayLike
from regard.layers.multi_head import unpack
from regard.models.config import TransformerConfig
from regard.models.encoder import Encoder
from regard.models.pooling import build_pooling


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
    ) -> Any:
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
            hidden, seen_pooling = self.pooling(hidden, self.encoder.hidden_lengths(lengths), aux)
            if seen_pooling:
                seen = {**seen, "pooling": seen_pooling}
        logits = self.head(hidden)
        return (logits, seen) if aux else logits
