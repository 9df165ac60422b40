"""Decoder: a causal language model."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from regard import masks
from regard.axes import ArrayLike
from regard.layers.heads import name_mask
from regard.layers.multi_head import unpack
from regard.models.config import TransformerConfig
from regard.models.encoder import Encoder


class Decoder(nnx.Module):
    """Predict the next token at every position from the positions up to it.

    logits_t = head(hidden_t),  hidden = encoder under causal()

    Args:
        config: sizes and choices; `vocab_size` is required.
        rngs: random streams: "params", and "dropout" where something drops.

    Raises:
        ValueError: a config without `vocab_size`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard.models import Decoder, TransformerConfig
        >>> config = TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=2, vocab_size=13)
        >>> Decoder(config, rngs=nnx.Rngs(0))(jnp.array([[1, 2, 3, 4]])).shape
        (1, 4, 13)
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        if config.vocab_size is None:
            raise ValueError("config: expected vocab_size, as a Decoder predicts tokens; got input_width")
        self.config = config
        self.trunk = Encoder(config, rngs=rngs)
        self.head = nnx.Linear(config.d_model, config.vocab_size, rngs=rngs)

    def __call__(
        self,
        tokens: ArrayLike,
        *,
        lengths: ArrayLike | None = None,
        mask: masks.Mask | ArrayLike | None = None,
        aux: tuple[str, ...] = (),
    ) -> Any:
        """Logits of the next token at every position.

        Args:
            tokens: tokens in 0..V-1.
            lengths: as in `Encoder`.
            mask: what else may not be attended to, beside the future.
            aux: names as in `attend`.

        Returns:
            Logits `(batch, T, V)`; with `aux`, also {"blocks": one dict per block}.

        Raises:
            TypeError, ValueError: as in `TokenEmbedding`.
        """
        tokens = jnp.asarray(tokens)
        mask = name_mask(mask, tokens.shape[:-1], tokens.shape[-1], tokens.shape[-1])
        mask = masks.causal() if mask is None else masks.causal() & mask
        hidden, seen = unpack(self.trunk(tokens, lengths=lengths, mask=mask, aux=aux), aux)
        return (self.head(hidden), seen) if aux else self.head(hidden)
