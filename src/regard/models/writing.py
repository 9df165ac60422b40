"""Texts being written: the tokens so far, how the next are chosen, and what ends a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array, Bool, Float, Int
from regard.models.prompts import TextCache, end_with
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
    """Tokens written per row, stop tokens among them."""
    log_probabilities: Float[Array, "batch N"]
    """Log-probabilities by the model alone, in nats: before penalty, temperature, cuts. 0 behind the end."""
    finished: Bool[Array, " batch"]
    """True where a stop token, or a sequence of some, ended the row."""
    healthy: Bool[Array, " batch"]
    """False where a logit was NaN or inf, or all were -inf: the row ends there, with a token -1 beyond it."""
    cache: TextCache | None = None
    """The text read and written, for the next call; None unless `return_cache`."""
    reads: Int[Array, " batch"] | None = None
    """Times that the model read for each row, the prompt in one, `(batch,)`; None without a draft."""

    def rows(self) -> list[list[int]]:
        """Return the tokens of each row as a list, its end included, the padding left out."""
        tokens, lengths = jax.device_get(jax.block_until_ready((self.tokens, self.lengths)))
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
    stop_tokens: Any  # (n, L) int32, of `sort_stops`
    pad_token: Any  # int32
    keep: bool = static()  # rows that have ended read nothing, as the cache is wanted


@record
class Writing:
    """The text so far, and the rest that the next step needs beside the cache."""

    written: Generated
    newest: Array  # (batch,) the token to read next
    alive: Array  # (batch,) bool
    seen: Any  # (batch, V) bool, tokens that a penalty applies to; None without one


State = tuple[Any, Writing]  # what was read, as the cache of the model or also that of the draft; the text


def write_next(writing: Writing, logits: Array, rules: Rules) -> Writing:
    """Write one more token on each row that has not ended."""
    keys = rules.keys
    if keys is not None:
        keys = jax.vmap(jax.random.fold_in)(keys, writing.written.lengths)
    token = choose(logits, rules.sampling, rng=keys, seen=writing.seen)
    return write(writing, token[:, None], logits[:, None], writing.alive.astype(jnp.int32), rules)


def write(writing: Writing, tokens: Array, logits: Array, counts: Array, rules: Rules) -> Writing:
    """Write the first `counts` of tokens `(batch, n)`, or up to where they end the row."""
    written, index = writing.written, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    stops = end_with(_read_back(writing, tokens, rules.stop_tokens.shape[1]), rules.stop_tokens)
    final = (stops | (tokens == NO_TOKEN)).astype(jnp.int32)
    counted = (index < counts[:, None]) & (jnp.cumsum(final, axis=1) == final)
    real = counted & (tokens != NO_TOKEN)
    chosen, added = jnp.maximum(tokens, 0), jnp.sum(real, axis=1, dtype=jnp.int32)
    logits = logits.astype(written.log_probabilities.dtype)
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits), chosen[..., None], axis=-1)[..., 0]
    columns, beyond = written.lengths[:, None] + index, jnp.int32(written.tokens.shape[1])

    def put(old: Array, new: Array, where: Array) -> Array:
        put_row = jax.vmap(lambda row, places, values: row.at[places].set(values, mode="drop"))
        return put_row(old, jnp.where(where, columns, beyond), new)

    texts = jnp.concatenate((writing.newest[:, None], chosen), axis=1)
    return Writing(
        written=dataclasses.replace(
            written,
            tokens=put(written.tokens, tokens, counted),
            lengths=written.lengths + added,
            log_probabilities=put(written.log_probabilities, scores, real),
            finished=written.finished | jnp.any(counted & stops, axis=1),
            healthy=written.healthy & ~jnp.any(counted & ~real, axis=1),
            reads=None if written.reads is None else written.reads + (counts > 0).astype(jnp.int32),
        ),
        newest=jnp.take_along_axis(texts, added[:, None], axis=1)[:, 0],
        alive=writing.alive & ~jnp.any(counted & (final > 0), axis=1),
        seen=None if writing.seen is None else mark_tokens(writing.seen, chosen, real),
    )


def _read_back(writing: Writing, tokens: Array, count: int) -> Int[Array, "batch n L"]:
    """Return the last `count` tokens written up to each of those that come next; -1 before the first."""
    places = writing.written.lengths[:, None] + jnp.arange(1 - count, 0, dtype=jnp.int32)[None]
    before = jnp.take_along_axis(writing.written.tokens, jnp.maximum(places, 0), axis=1)
    text = jnp.concatenate((jnp.where(places < 0, jnp.int32(NO_TOKEN), before), tokens), axis=1)
    return text[:, np.arange(tokens.shape[1])[:, None] + np.arange(count)]


def write_on(advance: Callable[[State], State], state: State, least: Array) -> State:
    """Run `advance` until every row has `least` more tokens, or has ended or is full."""
    written = state[1].written
    goal = jnp.minimum(written.lengths + least, written.tokens.shape[1])

    def is_open(state: State) -> Array:
        return jnp.any(state[1].alive & (state[1].written.lengths < goal))

    return jax.lax.while_loop(is_open, advance, state)


def mark_tokens(seen: Array, tokens: Array, real: Array) -> Array:
    rows = jnp.arange(seen.shape[0], dtype=jnp.int32)[:, None]
    beyond = jnp.asarray(seen.shape[1], tokens.dtype)
    return seen.at[rows, jnp.where(real, tokens, beyond)].set(True, mode="drop")
