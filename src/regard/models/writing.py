"""Texts being written: the tokens so far, how the next are chosen, and what ends a row."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array, Bool, Float, Int
from regard.engine.call.problem import accumulation_dtype
from regard.models.prompts import TextCache
from regard.models.sampling import NO_TOKEN, Sampling, choose
from regard.records import record, static


@record
class Generated:
    """Tokens that `generate` wrote; a pytree.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.models import Generated
        >>> tokens, yes = jnp.array([[5, 2, 0], [7, 8, 9]]), jnp.array([True, True])
        >>> written = Generated(tokens, jnp.array([2, 3]), jnp.zeros((2, 3)), jnp.array([True, False]), yes)
        >>> written.rows(), written.reasons()
        ([[5, 2], [7, 8, 9]], ['stop token', 'max_tokens'])
    """

    tokens: Int[Array, "batch N"]
    """Tokens written, without the prompt, a stop token included. Behind the end `pad_token`."""
    lengths: Int[Array, " batch"]
    """Tokens written per row, the stop token among them."""
    log_probabilities: Float[Array, "batch N"]
    """Log-probabilities by the model alone, in nats: before penalty, temperature, cuts. 0 behind the end."""
    finished: Bool[Array, " batch"]
    """True where a stop token ended the row."""
    healthy: Bool[Array, " batch"]
    """False where a logit was NaN or infinite: the row ends there, with a token -1 that is not counted."""
    cache: TextCache | None = None
    """The text read and written, for the next call; None unless `return_cache`."""
    reads: Any = None
    """Times that the model read for each row, the prompt in one, `(batch,)`; None without a draft."""

    def rows(self) -> list[list[int]]:
        """Return the tokens of each row as a list, its end included, the padding left out."""
        tokens, lengths = jax.device_get((self.tokens, self.lengths))
        return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]

    def reasons(self) -> list[str]:
        """Say why each row ended: "stop token", "max_tokens" or "not finite"."""
        finished, healthy = jax.device_get((self.finished, self.healthy))
        ends = np.where(finished, "stop token", np.where(healthy, "max_tokens", "not finite"))
        return ends.tolist()

    def __repr__(self) -> str:
        return f"Generated(tokens={self.tokens!r}, lengths={self.lengths!r})"


@record
class Rules:
    """Settings by which tokens are chosen, and tokens that end a row."""

    sampling: Sampling
    keys: Any  # one random key per row; None where nothing is drawn
    stop_tokens: Any  # (n,) int32
    pad_token: Any  # int32
    keep: bool = static()  # rows that have ended read nothing, as the cache is wanted


@record
class Writing:
    """The text so far, and the rest that the next step needs beside the cache."""

    written: Generated
    newest: Array  # (batch,) the token to read next
    alive: Array  # (batch,) bool
    step: Array  # columns written
    seen: Any  # (batch, V) bool, tokens that a penalty applies to; None without one


def write_column(writing: Writing, logits: Array, rules: Rules) -> Writing:
    """Write one more column: a token for each row that has not ended."""
    logits, written, alive = logits.astype(accumulation_dtype(logits)), writing.written, writing.alive
    keys = rules.keys
    if keys is not None:
        keys = jax.vmap(lambda key: jax.random.fold_in(key, writing.step))(keys)
    token = choose(logits, rules.sampling, rng=keys, seen=writing.seen)
    healthy = token != NO_TOKEN
    chosen = jnp.maximum(token, 0)
    log_probability = jnp.take_along_axis(jax.nn.log_softmax(logits), chosen[:, None], axis=-1)[:, 0]
    stopped = jnp.any(token[:, None] == rules.stop_tokens[None], axis=-1)
    counts = alive & healthy
    pad = jnp.broadcast_to(rules.pad_token, token.shape)
    zero = jnp.zeros_like(log_probability)
    seen = writing.seen
    return Writing(
        written=dataclasses.replace(
            written,
            tokens=_put(written.tokens, jnp.where(alive, token, pad), writing.step),
            lengths=written.lengths + counts.astype(jnp.int32),
            log_probabilities=_put(
                written.log_probabilities, jnp.where(counts, log_probability, zero), writing.step
            ),
            finished=written.finished | (counts & stopped),
            healthy=written.healthy & (healthy | ~alive),
        ),
        newest=jnp.where(alive, chosen, writing.newest),
        alive=counts & ~stopped,
        step=writing.step + 1,
        seen=None if seen is None else mark_tokens(seen, chosen[:, None], counts[:, None]),
    )


def _put(columns: Array, column: Array, index: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(columns, column[:, None], index, axis=1)


def mark_tokens(seen: Array, tokens: Array, real: Array) -> Array:
    """Mark the real tokens as seen."""
    rows = jnp.arange(seen.shape[0], dtype=jnp.int32)[:, None]
    beyond = jnp.asarray(seen.shape[1], tokens.dtype)
    return seen.at[rows, jnp.where(real, tokens, beyond)].set(True, mode="drop")
