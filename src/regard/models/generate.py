"""Writing with a trained model, one token at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from regard.axes import Array, ArrayLike, Int
from regard.models.encoder_decoder import EncoderDecoder


def greedy(
    model: EncoderDecoder,
    source: ArrayLike,
    *,
    start_token: int,
    num_tokens: int,
    source_lengths: ArrayLike | None = None,
) -> Int[Array, "batch num_tokens"]:
    """Write the most probable token, again and again.

    token_t = argmax_v logits(source, [start, token_0, ..., token_(t-1)])_v

    The source is encoded once; every step reads a buffer of `num_tokens` places of which the causal mask
    shows the written ones. Dropout is off whatever the model's mode. Works under `nnx.jit` and `jax.jit`,
    with `num_tokens` static.

    Args:
        model: a trained model.
        source: batch of sources, `(batch, S)` tokens or `(batch, S, W)` vectors.
        start_token: what the target begins with, the same for every row.
        num_tokens: how many tokens to write, at least 1.
        source_lengths: number of valid positions per source row; None means all.

    Returns:
        int32 tokens `(batch, num_tokens)`, without the start token; -1 from where the model's logits are not
        finite.

    Raises:
        ValueError: a start token outside the target vocabulary, `num_tokens` below 1 or beyond learned
            positions, a bad source outside jit.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard.models import EncoderDecoder, TransformerConfig
        >>> from regard.models.generate import greedy
        >>> config = TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=1, vocab_size=13)
        >>> model = EncoderDecoder(config, rngs=nnx.Rngs(0))
        >>> greedy(model, jnp.array([[1, 2, 3, 4, 5]]), start_token=12, num_tokens=7).shape
        (1, 7)
    """
    _check_request(model, start_token, num_tokens)
    model = _copy_without_dropout(model)
    memory = model.encoder(source, lengths=source_lengths)
    written = jnp.full((memory.shape[0], num_tokens + 1), start_token, jnp.int32)

    def write_next(t: Array, written: Array) -> Array:
        hidden = model.decode(written[:, :num_tokens], memory, source_lengths=source_lengths)
        logits = model.predict(jax.lax.dynamic_index_in_dim(hidden, t, axis=1, keepdims=False))
        # argmax would give NaN an index like any other; -1 is no token, and what follows it is NaN again.
        healthy = jnp.all(jnp.isfinite(logits), axis=-1)
        token = jnp.where(healthy, jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.int32(-1))
        return jax.lax.dynamic_update_slice_in_dim(written, token[:, None], t + 1, axis=1)

    return jax.lax.fori_loop(0, num_tokens, write_next, written)[:, 1:]


def _check_request(model: EncoderDecoder, start_token: int, num_tokens: int) -> None:
    """Raise for what no model could write."""
    last = model.target_vocab_size - 1
    if isinstance(start_token, int) and not 0 <= start_token <= last:
        raise ValueError(f"start_token: expected a target token in 0..{last}, got {start_token}")
    if num_tokens < 1:
        raise ValueError(f"num_tokens: expected at least 1, got {num_tokens}")


def _copy_without_dropout(model: EncoderDecoder) -> EncoderDecoder:
    """The same parameters in evaluation mode; the caller's model keeps its own."""
    copy = nnx.merge(*nnx.split(model))
    copy.eval()
    return copy
