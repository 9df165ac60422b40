"""Encoder: inputs to hidden states, every position reading every valid one."""

from __future__ import annotations

from typing import Any

from flax import nnx

from regard.axes import ArrayLike
from regard.layers import EncoderBlock
from regard.layers.heads import name_mask
from regard.masks import Mask
from regard.models.config import TransformerConfig
from regard.models.embedding import TokenEmbedding
from regard.models.padding import blank_padding, mask_padding
from regard.models.stack import Stack


class Encoder(nnx.Module):
    """Embed the inputs and run them through `config.num_layers` encoder blocks.

    hidden = norm(block_L(... block_1(embedding(inputs))))    (the last norm only for norm="pre")

    Args:
        config: sizes and choices.
        rngs: random streams: "params", and "dropout" where something drops.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard.models import Encoder, TransformerConfig
        >>> config = TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=2, vocab_size=13)
        >>> encoder = Encoder(config, rngs=nnx.Rngs(0))
        >>> encoder(jnp.array([[1, 2, 3, 4], [5, 6, 0, 0]]), lengths=jnp.array([4, 2])).shape
        (2, 4, 6)
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = TokenEmbedding(config, rngs=rngs)
        self.stack = Stack(config, EncoderBlock, rngs=rngs)

    def __call__(
        self,
        inputs: ArrayLike,
        *,
        lengths: ArrayLike | None = None,
        mask: Mask | ArrayLike | None = None,
        aux: tuple[str, ...] = (),
    ) -> Any:
        """Encode the inputs.

        Args:
            inputs: tokens `(batch, T)` or real vectors `(batch, T, W)`, as configured; one example without
                the batch axis works too.
            lengths: number of valid positions per row, at its start; None means all. What the padding
                holds, NaN included, changes no result and no gradient.
            mask: who else may not attend to whom; as in `MultiHeadAttention`.
            aux: names as in `attend`.

        Returns:
            Hidden states `(batch, T, M)`, zero in the padding; with `aux`, also {"blocks": one dict per
            block}.

        Raises:
            TypeError, ValueError: as in `TokenEmbedding`: tokens out of range outside jit, wrong shapes.
        """
        hidden = self.embedding(inputs, lengths=lengths)
        mask = name_mask(mask, hidden.shape[:-2], hidden.shape[-2], hidden.shape[-2])
        hidden, seen = self.stack(hidden, mask=mask_padding(lengths, mask), aux=aux)
        hidden = blank_padding(hidden, lengths)
        return (hidden, {"blocks": seen}) if aux else hidden
