"""Encoder: hidden states of inputs, each from all positions or from those before it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from regard.arguments import guided
from regard.axes import Array, ArrayLike
from regard.engine.dispatch.placement import take_here
from regard.layers import EncoderBlock
from regard.layers.heads import as_mask
from regard.masks import Mask
from regard.masks.documents import Documents, Segments
from regard.masks.grid import is_concrete
from regard.masks.positional import Causal
from regard.models.config import TransformerConfig, check_config
from regard.models.embedding import TokenEmbedding
from regard.models.padding import blank_padding, mask_padding
from regard.models.stack import Stack


@guided
class Encoder(nnx.Module):
    """Embedding and `config.num_layers` encoder blocks.

    hidden = norm(block_L(... block_1(embedding(inputs))))    (the last norm not for `norm="post"`)

    Args:
        config: sizes and choices.
        causal: whether no position may attend to later ones.
        rngs: random streams: "params", and "dropout" where something drops.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard.models import Encoder, TransformerConfig
        >>> config = TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=2, vocab_size=13)
        >>> encoder = Encoder(config, rngs=nnx.Rngs(0))
        >>> encoder(jnp.array([[1, 2, 3, 4], [5, 6, 0, 0]]), lengths=jnp.array([4, 2])).shape
        (2, 4, 6)

    Reference: Vaswani et al., "Attention Is All You Need", 2017, section 3.1.
    """

    def __init__(self, config: TransformerConfig, *, causal: bool = False, rngs: nnx.Rngs):
        check_config(config)
        self.config = config
        self.embedding = TokenEmbedding(config, rngs=rngs)
        self.stack = Stack(config, EncoderBlock, causal=causal, rngs=rngs)

    def __call__(
        self,
        inputs: ArrayLike,
        *,
        lengths: ArrayLike | None = None,
        mask: Mask | ArrayLike | None = None,
        token_types: ArrayLike | None = None,
        positions: ArrayLike | None = None,
        aux: tuple[str, ...] = (),
    ) -> Array | Any:
        """Encode the inputs.

        Args:
            inputs: tokens `(batch, T)` or real vectors `(batch, T, W)`, as configured, or one example.
            lengths: number of valid positions per row, at its start; None means all. What the padding
                holds, NaN included, changes no result and no gradient.
            mask: who else may not attend to whom; as in `MultiHeadAttention`. Where `config.mixers` has more
                than attention, none or `masks.segments`, which layers of the delta rule know as well.
            token_types: segment of each token, `(batch, T)`, with `num_token_types`; None means 0.
            positions: where each token sits, `(T,)` or `(batch, T)`; None means 0..T-1. Packed documents
                start again at 0, under `mask=masks.segments(ids, ids)`.
            aux: names as in `attend`, or "hidden", the residual stream after each block.

        Returns:
            Hidden states `(batch, T, M)`, zero in the padding, T one more with a `class_token`; with `aux`,
            also {"blocks": one dict per block}, and with "hidden" "embedding": what the first block reads.

        Raises:
            TypeError, ValueError: as in `TokenEmbedding`: tokens out of range outside jit, wrong shapes,
                positions beside a `class_token`, whose own would be a guess.
        """
        options = {"lengths": lengths, "token_types": token_types, "positions": positions}
        hidden = embedding = self.embedding(inputs, **options)
        lengths = self.hidden_lengths(lengths)
        mask = as_mask(mask, hidden.shape[:-2], hidden.shape[-2], hidden.shape[-2])
        segments = find_segments(mask) if self.config.is_hybrid else None
        segments = None if segments is None else take_here(segments, hidden.shape[-2])
        mask = mask_padding(lengths, mask, hidden.shape[-2] if positions is not None else None)
        hidden, seen = self.stack(hidden, mask=mask, positions=positions, segments=segments, aux=aux)
        hidden = blank_padding(hidden, lengths)
        if "hidden" in aux:
            return hidden, {"blocks": seen, "embedding": embedding}
        return (hidden, {"blocks": seen}) if aux else hidden

    def hidden_lengths(self, lengths: ArrayLike | None) -> ArrayLike | None:
        """Count the valid hidden states of rows of these lengths, a `class_token` included."""
        if lengths is None or not self.config.class_token:
            return lengths
        return jnp.asarray(lengths, jnp.int32) + 1


def find_segments(mask: Mask | None) -> Any:
    """Return the numbers of packed documents, of a mask that asks for no more than the delta rule can do."""
    parts = () if mask is None else mask.parts
    match [part for part in parts if not isinstance(part, Causal)]:
        case []:
            return None
        case [Documents(ids=ids)]:
            return ids
        case [Segments(query_ids=ids, key_ids=others)]:
            # Equal, as far as is known.
            if ids is others or not is_concrete((ids, others)) or np.array_equal(ids, others):
                return ids
    raise ValueError(
        "mask: expected None or masks.segments(ids), as layers of the delta rule read all that came before in"
        f" a document; got {mask!r}. Padding is said by lengths"
    )
