"""Decoder: a causal language model."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import regard.masks as masks
from regard.arguments import guided
from regard.axes import Array, ArrayLike, Float, Size
from regard.layers.multi_head import unpack
from regard.models.config import TransformerConfig, check_config
from regard.models.embedding import TokenEmbedding, TokenTable
from regard.models.encoder import Encoder
from regard.models.stack import DecodingCache


@guided
class Decoder(nnx.Module):
    """Causal language model: predicts the next token at every position from the positions up to it.

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

    Reference: Liu et al., "Generating Wikipedia by Summarizing Long Sequences", 2018, for a decoder without
    an encoder.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        check_config(config)
        if config.vocab_size is None:
            raise ValueError("config: expected vocab_size, as a Decoder predicts tokens; got input_width")
        self.config = config
        self.trunk = Encoder(config, causal=True, rngs=rngs)
        self.head = build_head(config, config.vocab_size, rngs)

    def __call__(
        self,
        tokens: ArrayLike,
        *,
        lengths: ArrayLike | None = None,
        mask: masks.Mask | ArrayLike | None = None,
        positions: ArrayLike | None = None,
        aux: tuple[str, ...] = (),
    ) -> Array | Any:
        """Compute the logits of the next token at every position.

        Args:
            tokens: tokens in 0..V-1.
            mask: what else may not be attended to, beside the future.
            lengths, positions, aux: as in `Encoder`.

        Returns:
            Logits `(batch, T, V)`; with `aux`, also the dict of `Encoder`.

        Raises:
            TypeError, ValueError: as in `TokenEmbedding`.
        """
        options = {"lengths": lengths, "mask": mask, "positions": positions, "aux": aux}
        hidden, seen = unpack(self.trunk(tokens, **options), aux)
        return (self.predict(hidden), seen) if aux else self.predict(hidden)

    def predict(self, hidden: Float[Array, "*B T M"]) -> Float[Array, "*B T V"]:
        """Compute the logits of hidden states."""
        return predict_tokens(self.config, self.head, self.trunk.embedding, hidden)

    def start_cache(
        self,
        batch: Size,
        capacity: Size,
        *,
        chunk: Size | None = None,
        rewind: int = 0,
        dtype: DTypeLike | None = None,
    ) -> DecodingCache:
        """Make room for tokens that `read` will read.

        Args:
            batch: number of rows.
            capacity: tokens per row, prompt included. Blocks with a window keep no more than they need.
            chunk: most tokens that one `read` will read; None means any number.
            rewind: most tokens that `rewind` will take back beside those of the last `read`.
            dtype: int8 keeps keys and values in bytes, as in `KVCache.create`; None, as a call has them.

        Returns:
            An empty cache.

        Raises:
            TypeError, ValueError: sizes that are no integers of at least 1, a negative rewind, another dtype,
                int8 for latent attention.
        """
        options = {"rewind": rewind, "dtype": dtype}
        chunk = capacity if chunk is None else chunk
        return self.trunk.stack.start_cache(self.trunk.embedding, batch, capacity, chunk, **options)

    def read(
        self, tokens: ArrayLike, cache: DecodingCache, counts: ArrayLike | None = None
    ) -> tuple[Float[Array, "batch n M"], DecodingCache]:
        """Read more tokens after those in the cache: a prompt in one go or in chunks, then one by one.

        What `predict` makes of the hidden states are the logits of a call with all tokens at once.

        Args:
            tokens: `(batch, n)`, in 0..V-1.
            cache: what `start_cache` or an earlier `read` returned.
            counts: how many of the n tokens are real, `(batch,)`, before those of padding; None means all.

        Returns:
            Hidden states and the longer cache.

        Raises:
            TypeError, ValueError: as in `TokenEmbedding` and `KVCache.append`; outside jit, no room left, or
                no learned position. Under jit, hidden states there are NaN.

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> from regard.models import Decoder, TransformerConfig
            >>> config = TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=2, vocab_size=13)
            >>> model = Decoder(config, rngs=nnx.Rngs(0))
            >>> tokens = jnp.array([[1, 2, 3, 4]])
            >>> cache = model.start_cache(batch=1, capacity=4)
            >>> _, cache = model.read(tokens[:, :3], cache)
            >>> hidden, cache = model.read(tokens[:, 3:], cache)
            >>> bool(jnp.allclose(model.predict(hidden), model(tokens)[:, 3:], atol=1e-5))
            True
        """
        return self.trunk.stack.read(self.trunk.embedding, tokens, cache, counts)


def build_head(config: TransformerConfig, vocab_size: int, rngs: nnx.Rngs) -> nnx.Linear | None:
    """Build the map from hidden states to logits; None where the embedding table serves."""
    if config.tied_output:
        return None
    return nnx.Linear(config.d_model, vocab_size, use_bias=config.head_bias, rngs=rngs)


def predict_tokens(
    config: TransformerConfig, head: nnx.Linear | None, embedding: TokenEmbedding, hidden: Array
) -> Array:
    """Compute logits by the head, or by the table of the embedding."""
    if config.output_scale != 1.0:
        hidden = hidden * config.output_scale
    if head is None:
        assert isinstance(embedding.entry, TokenTable)
        logits = embedding.entry.table.attend(hidden)
    else:
        logits = head(hidden)
    cap = config.output_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)
