"""EncoderDecoder: one sequence from another, by cross-attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from regard.arguments import guided
from regard.axes import Array, ArrayLike, Float, Size
from regard.layers import DecoderBlock
from regard.layers.multi_head import unpack
from regard.models.config import TransformerConfig, check_config
from regard.models.decoder import build_head, predict_tokens
from regard.models.embedding import TokenEmbedding
from regard.models.encoder import Encoder
from regard.models.padding import blank_padding, check_lengths, mask_padding
from regard.models.stack import DecodingCache, Stack


@guided
class EncoderDecoder(nnx.Module):
    """Encoder and decoder that predict the next target token from a source and the target so far.

    memory = encoder(source);  logits_t = head(decoder(target_{0..t}, memory))

    Args:
        config: sizes and choices of both halves; the source is tokens or real vectors, as it says.
        rngs: random streams: "params", and "dropout" where something drops.
        target_vocab_size: None means `config.vocab_size`.

    Raises:
        ValueError: no vocabulary for the target, sizes that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard.models import EncoderDecoder, TransformerConfig
        >>> config = TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=1, vocab_size=13)
        >>> model = EncoderDecoder(config, rngs=nnx.Rngs(0))
        >>> model(jnp.array([[1, 2, 3, 4, 5]]), jnp.array([[12, 5, 4]])).shape
        (1, 3, 13)

    Reference: Vaswani et al., "Attention Is All You Need", 2017, section 3. `shared_embedding` and
    `tied_output` share weights between the two embeddings and the head, as its section 3.4 does.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        rngs: nnx.Rngs,
        target_vocab_size: int | None = None,
    ):
        check_config(config)
        vocab_size = config.vocab_size if target_vocab_size is None else target_vocab_size
        if vocab_size is None:
            raise ValueError(
                "target_vocab_size: expected a size, as the source is real vectors and has no vocabulary to"
                " share; got None"
            )
        if config.shared_embedding and vocab_size != config.vocab_size:
            raise ValueError(
                f"target_vocab_size: expected {config.vocab_size}, that of the source, for shared_embedding;"
                f" got {vocab_size}"
            )
        num_layers = config.num_decoder_layers or config.num_layers
        target_config = dataclasses.replace(
            config, vocab_size=vocab_size, input_width=None, class_token=False, num_layers=num_layers
        )
        self.config, self.target_vocab_size = config, vocab_size
        self.encoder = Encoder(config, rngs=rngs)
        shared = config.shared_embedding
        self.target_embedding = None if shared else TokenEmbedding(target_config, rngs=rngs)
        self.decoder = Stack(target_config, DecoderBlock, causal=True, rngs=rngs)
        self.head = build_head(config, vocab_size, rngs)

    def __call__(
        self,
        source: ArrayLike,
        target: ArrayLike,
        *,
        source_lengths: ArrayLike | None = None,
        target_lengths: ArrayLike | None = None,
        aux: tuple[str, ...] = (),
    ) -> Array | Any:
        """Compute the logits of the next target token at every target position (teacher forcing).

        Args:
            source: what is read.
            target: what was written so far; position t sees targets 0..t.
            source_lengths, target_lengths: number of valid positions per row; None means all.
            aux: names as in `attend`.

        Returns:
            Logits `(batch, T, V)`; with `aux`, also {"encoder": one dict per block, "decoder": one
            {"self": dict, "cross": dict} per block}.

        Raises:
            TypeError, ValueError: as in `TokenEmbedding`.
        """
        memory, seen_encoder = unpack(self.encoder(source, lengths=source_lengths, aux=aux), aux)
        hidden = self._target_embedding(target, lengths=target_lengths)
        if hidden.shape[:-2] != memory.shape[:-2]:
            raise ValueError(
                f"target: expected the batch of source, {memory.shape[:-2]}; got {hidden.shape[:-2]}"
            )
        mask = mask_padding(target_lengths)
        memory_mask = mask_padding(self.encoder.hidden_lengths(source_lengths))
        hidden, seen_decoder = self.decoder(hidden, memory, mask=mask, memory_mask=memory_mask, aux=aux)
        logits = self.predict(blank_padding(hidden, target_lengths))
        return (logits, {"encoder": seen_encoder["blocks"], "decoder": seen_decoder}) if aux else logits

    def predict(self, hidden: Float[Array, "*B T M"]) -> Float[Array, "*B T V"]:
        """Compute the logits of hidden states."""
        return predict_tokens(self.config, self.head, self._target_embedding, hidden)

    def start_cache(
        self,
        memory: Array,
        capacity: Size,
        *,
        source_lengths: ArrayLike | None = None,
        dtype: DTypeLike | None = None,
    ) -> DecodingCache:
        """Make room for target tokens that `read` will read against a memory.

        Args:
            memory: encoded source, `(batch, S, M)`; its keys and values are computed once, here.
            capacity: target tokens per row, at least 1.
            source_lengths: as in a call.
            dtype: of target tokens, as in `Decoder.start_cache`.

        Returns:
            An empty cache.

        Raises:
            TypeError, ValueError: a capacity that is no such integer, a memory or lengths of the wrong shape,
                another dtype.
        """
        if memory.ndim != 3:
            raise ValueError(f"memory: expected (batch, S, {self.config.d_model}), got shape {memory.shape}")
        blocks: Any = self.decoder.blocks
        remembered = tuple(block.cross_attention.remember(memory) for block in blocks)
        longest = memory.shape[1] - self.config.class_token
        lengths = check_lengths("source_lengths", source_lengths, memory.shape[:1], longest)
        lengths = None if lengths is None else jnp.asarray(self.encoder.hidden_lengths(lengths))
        sizes = (memory.shape[0], capacity, capacity)
        return self.decoder.start_cache(self._target_embedding, *sizes, remembered, lengths, dtype=dtype)

    def read(
        self, tokens: ArrayLike, cache: DecodingCache, counts: ArrayLike | None = None
    ) -> tuple[Float[Array, "batch n M"], DecodingCache]:
        """Read more target tokens after those in the cache; as `Decoder.read`, against the memory."""
        return self.decoder.read(self._target_embedding, tokens, cache, counts)

    @property
    def _target_embedding(self) -> TokenEmbedding:
        return self.encoder.embedding if self.target_embedding is None else self.target_embedding
