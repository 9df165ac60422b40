"""Beam search."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from regard.arguments import LARGEST, guided, whole_number
from regard.axes import Array, ArrayLike, Bool, Float, Int, Size
from regard.engine.call.canonicalization import float_array
from regard.engine.call.problem import accumulation_dtype
from regard.models.decoder import Decoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.logits import add_bias, are_sound
from regard.models.prefill import Structure, merge_model, read_prompts, split_model
from regard.models.prompts import Request, TextCache, canonicalize, end_with, sort_stops, vocabulary_size
from regard.models.sampling import NO_TOKEN
from regard.records import record


@record
class Beams:
    """Texts that `beam_search` found, best first; a pytree.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.models.beams import Beams
        >>> tokens, lengths = jnp.array([[[5, 2], [7, 8]]]), jnp.array([[2, 2]])
        >>> Beams(tokens, lengths, jnp.array([[-0.5, -0.9]]), jnp.array([[True, False]])).rows()
        [[[5, 2], [7, 8]]]
    """

    tokens: Int[Array, "batch W N"]
    """Texts, without the prompt; a stop token belongs to its text. 0 behind the end."""
    lengths: Int[Array, "batch W"]
    """Tokens per text; 0 where fewer texts were found than asked for, or where a logit was NaN or inf."""
    scores: Float[Array, "batch W"]
    """Log-probability in nats over `length^length_penalty`; -inf where there is no text."""
    finished: Bool[Array, "batch W"]
    """True where a stop token ends the text."""

    def rows(self) -> list[list[list[int]]]:
        """Return the texts found for each prompt as lists, best first."""
        tokens, lengths = jax.device_get(jax.block_until_ready((self.tokens, self.lengths)))
        return [
            [text[:length].tolist() for text, length in zip(*row, strict=True) if length]
            for row in zip(tokens, lengths, strict=True)
        ]

    def __repr__(self) -> str:
        return f"Beams(tokens={self.tokens!r}, scores={self.scores!r})"


@record
class Search:
    """The search so far: texts that may go on, and texts that have ended."""

    live: Array  # (batch, W, N) tokens
    sums: Array  # (batch, W) log-probabilities; -inf, no text
    ended: Beams
    searching: Array  # (batch,) bool
    step: Array


@guided
def beam_search(
    model: Decoder | EncoderDecoder,
    prompts: ArrayLike,
    *,
    num_beams: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    stop_tokens: Sequence[int | Sequence[int]] | ArrayLike = (),
    logit_bias: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    start_token: int | None = None,
    capacity: Size | None = None,
    chunk: int | None = None,
    padding: str = "right",
    cache_dtype: DTypeLike | None = None,
    cache: TextCache | None = None,
) -> Beams:
    """Find likely texts: at every step, go on with the `num_beams` likeliest beginnings of each prompt.

    score(text) = sum_t log p(token_t | prompt, token_{<t}) / |text|^{length_penalty}

    Every beginning is tried with every token. Of the `num_beams` best trials, those that end with a stop
    token are put aside; the best that do not end go on. A prompt's search is over when `num_beams` texts are
    aside and no beginning can come to a better score than the worst of them up to `max_tokens`, where what
    was going on counts as found, too. One beam is greedy writing; as many as there are texts are exhaustive.

    Args:
        model, prompts, lengths, start_token, capacity, chunk, padding, cache_dtype, cache: as in `generate`.
            The cache stays as it is: to go on with a text found, give it with the prompts and the same cache.
        num_beams: W, how many beginnings go on, and how many texts are returned, at least 1.
        max_tokens: tokens per text at most, at least 1.
        length_penalty: 0 compares log-probabilities of whole texts, 1 those per token; more favours long.
        stop_tokens: tokens, or sequences of tokens, that end a text, in which they are kept.
        logit_bias: as in `Sampling`; scores are of the logits with it.

    Returns:
        Texts, lengths, scores and ends, `(batch, num_beams, ...)`, sorted by score, in float32 at least.

    Raises:
        TypeError, ValueError: as in `generate`; fewer than one beam, too many, or an infinite penalty.

    Example:
        >>> from flax import nnx
        >>> from regard.models import Decoder, TransformerConfig, beam_search
        >>> config = TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=1, vocab_size=13)
        >>> beams = beam_search(Decoder(config, rngs=nnx.Rngs(0)), [[1, 2, 3]], num_beams=4, max_tokens=5)
        >>> beams.tokens.shape, bool((beams.scores[:, 1:] <= beams.scores[:, :-1]).all())
        ((1, 4, 5), True)

    Reference: Graves, "Sequence Transduction with Recurrent Neural Networks", 2012, section 2.3; Wu et al.,
    "Google's Neural Machine Translation System", 2016, section 7, with another length normalisation.
    """
    num_beams = whole_number("num_beams", num_beams, 1)
    if isinstance(length_penalty, bool) or not isinstance(length_penalty, int | float):
        raise TypeError(f"length_penalty: expected a number, got {length_penalty!r}")
    if not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty: expected a finite number, got {length_penalty}")
    sizes = {"max_tokens": max_tokens, "capacity": capacity, "chunk": chunk, "cache_dtype": cache_dtype}
    options = {"lengths": lengths, "start_token": start_token, "padding": padding, "cache": cache}
    request = canonicalize(model, prompts, **options, **sizes)
    vocab_size = vocabulary_size(model)
    if num_beams * vocab_size > LARGEST:
        raise ValueError(
            f"num_beams: expected at most {LARGEST // vocab_size}, as int32 counts the trials of every beam"
            f" with each of {vocab_size} tokens; got {num_beams}"
        )
    stops = sort_stops(stop_tokens, vocab_size)
    bias = None if logit_bias is None else float_array("logit_bias", logit_bias, 1)
    return _search(*split_model(model), request, stops, bias, float(length_penalty), num_beams)


@functools.partial(jax.jit, static_argnames=("structure", "num_beams"))
def _search(
    structure: Structure,
    arrays: list[Any],
    request: Request,
    stops: Array,
    bias: Any,
    penalty: Array | float,
    num_beams: int,
) -> Beams:
    model = merge_model(structure, arrays)
    hidden, cache = read_prompts(model, request)
    batch, width = hidden.shape[0], num_beams
    rows = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), width)
    cache = jax.tree.map(lambda leaf: leaf[rows], cache)
    none = jnp.full((batch, width), -jnp.inf, accumulation_dtype(hidden))
    tokens = jnp.zeros((batch, width, request.max_tokens), jnp.int32)
    ended = Beams(tokens, jnp.zeros((batch, width), jnp.int32), none, jnp.zeros((batch, width), bool))
    # One empty beginning per prompt; the other beams hold nothing yet.
    search = Search(tokens, none.at[:, 0].set(0), ended, jnp.ones(batch, bool), jnp.int32(0))
    logits = add_bias(model.predict(hidden)[:, 0], bias)
    search, _ = _extend(search, logits[rows], stops, penalty)
    bias = bias if bias is None or bias.ndim == 1 else bias[rows]

    def is_open(state: tuple[Any, Search]) -> Array:
        return (state[1].step < request.max_tokens) & jnp.any(state[1].searching)

    def advance(state: tuple[Any, Search]) -> tuple[Any, Search]:
        cache, search = state
        newest = jax.lax.dynamic_index_in_dim(search.live, search.step - 1, axis=2, keepdims=False)
        hidden, cache = model.read(newest.reshape((-1, 1)), cache)
        search, parents = _extend(search, add_bias(model.predict(hidden)[:, 0], bias), stops, penalty)
        origin = (parents + width * jnp.arange(batch, dtype=jnp.int32)[:, None]).reshape(-1)
        return jax.tree.map(lambda leaf: leaf[origin], cache), search

    _, search = jax.lax.while_loop(is_open, advance, (cache, search))
    # The texts that were going on when the tokens ran out count, too.
    search = dataclasses.replace(search, step=search.step - 1)
    return _keep_best(search, search.live, search.sums, penalty, stopped=False)


def _extend(
    search: Search, logits: Array, stops: Array, penalty: Array | float
) -> tuple[Search, Int[Array, "batch W"]]:
    """Try every beginning with every token; return the best, and the beam that each goes on from."""
    batch, width, _ = search.live.shape
    vocab_size = logits.shape[-1]
    logits = logits.astype(accumulation_dtype(logits))
    gains = jax.nn.log_softmax(logits, axis=-1)
    gains = jnp.where(are_sound(logits)[..., None], gains, jnp.full_like(gains, -jnp.inf))
    gains = gains.reshape((batch, width, vocab_size))
    trials = (search.sums[..., None] + gains).reshape((batch, width * vocab_size))
    # Every beam may end with every stop token or sequence, and width others must be left.
    sums, index = jax.lax.top_k(trials, min((1 + stops.shape[0]) * width, width * vocab_size))
    parents = index // vocab_size
    tokens = index - parents * vocab_size
    texts = jnp.take_along_axis(search.live, parents[..., None], axis=1)
    texts = jax.lax.dynamic_update_slice_in_dim(texts, tokens[..., None], search.step, axis=2)
    places = search.step + jnp.arange(1 - stops.shape[1], 1, dtype=jnp.int32)
    newest = jnp.take(texts, jnp.maximum(places, 0), axis=2)
    stopped = end_with(jnp.where(places < 0, jnp.int32(NO_TOKEN), newest), stops)
    none = jnp.full_like(sums, -jnp.inf)
    # Only the best may end: with lesser ends, one beam would find other texts than greedy writing.
    ends = jnp.where(stopped, sums, none)[:, :width]
    ended = _keep_best(search, texts[:, :width], ends, penalty, stopped=True)
    sums, chosen = jax.lax.top_k(jnp.where(stopped, none, sums), width)
    live = jnp.take_along_axis(texts, chosen[..., None], axis=1)
    # No token adds to a sum, and scores rise or fall with the length: the best that a beginning comes to is
    # at the next length, or at the last, if all tokens to come are certain.
    length, last = search.step + 1, jnp.int32(search.live.shape[-1])
    reachable = (jnp.minimum(length + 1, last), last)
    hopes = [sums[:, 0] / _length_factor(end, penalty, sums.dtype) for end in reachable]
    hope = jnp.maximum(*hopes)
    searching = search.searching & (hope > ended.scores[:, -1])
    parents = jnp.take_along_axis(parents, chosen, axis=1)
    return Search(live, sums, ended, searching, search.step + 1), parents


def _keep_best(search: Search, texts: Array, sums: Array, penalty: Array | float, *, stopped: bool) -> Beams:
    """Keep the best of the texts put aside and those that join them, where the search is not over."""
    old, length = search.ended, search.step + 1
    scores = sums / _length_factor(length, penalty, sums.dtype)
    scores = jnp.where(search.searching[:, None], scores, jnp.full_like(scores, -jnp.inf))
    valid = scores > -jnp.inf
    lengths = jnp.where(valid, length, jnp.zeros_like(length))
    new = Beams(texts, lengths, scores, valid & stopped)
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), old, new)
    _, chosen = jax.lax.top_k(joined.scores, old.scores.shape[1])
    return jax.vmap(lambda row, best: jax.tree.map(lambda leaf: leaf[best], row))(joined, chosen)


def _length_factor(length: Array, penalty: Array | float, dtype: Any) -> Array:
    return length.astype(dtype) ** jnp.asarray(penalty, dtype)
