"""Generation: a model reads a prompt once, then writes a token at a time, all in compiled loops."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from regard.arguments import guided, whole_number
from regard.axes import Array, ArrayLike, Size
from regard.engine.call.problem import accumulation_dtype
from regard.models.decoder import Decoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.prefill import Structure, merge_model, read_prompts, split_model
from regard.models.prompts import Request, TextCache, canonicalize, check_token, sort_stops, vocabulary_size
from regard.models.sampling import Sampling, row_keys
from regard.models.speculation import read_draft, speculate
from regard.models.writing import Generated, Rules, State, Writing, mark_tokens, write_next, write_on


@guided
def generate(
    model: Decoder | EncoderDecoder,
    prompts: ArrayLike,
    *,
    max_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    stop_tokens: Sequence[int | Sequence[int]] | ArrayLike = (),
    rng: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    start_token: int | None = None,
    pad_token: int = 0,
    capacity: Size | None = None,
    chunk: int | None = None,
    padding: str = "right",
    cache_dtype: DTypeLike | None = None,
    cache: Any = None,
    return_cache: bool = False,
    draft: Decoder | EncoderDecoder | None = None,
    draft_tokens: int = 4,
) -> Generated:
    """Write tokens after prompts: the most probable ones, or drawn ones.

    token_t ~ sampling(logits(prompt, token_0, ..., token_(t-1)))

    The prompt is read by one compiled program, and a second one writes until every row has ended or is full.
    Both serve all calls of equal shapes, whatever the parameters of the model, the numbers in `sampling`, the
    rng, or which tokens stop. Dropout is off. Works under `jax.jit` and `nnx.jit`, with prompts as an array.

    With a `draft`, decoding is speculative: the model reads `draft_tokens` tokens of the draft at once, and
    keeps each with probability r,

    r = min(1, p(token) / q(token))

    of its own probability p and the draft's q, both after `sampling`. In place of the first one refused comes
    a token ~ max(0, p - q), normalised; after all of them, one ~ p. Texts then have the same distribution as
    without a draft, other ones for an rng; at temperature 0, the same ones, but for ties within rounding.
    A model, or draft, with layers of the delta rule reads what was kept once more where a token was refused.

    Args:
        model: what writes: a `Decoder` after its prompts; an `EncoderDecoder`, which reads them as sources.
        prompts: a list with a sequence of tokens per row, of any lengths; or an integer array `(batch, P)`,
            for an encoder-decoder that reads real vectors `(batch, S, W)`.
        max_tokens: how many tokens to write per row at most, at least 1.
        sampling: how tokens are chosen; by default the most probable ones. Penalties count the prompt, too.
        stop_tokens: tokens, or sequences of tokens, that end a row, in which they are kept, such as
            `(2, [13, 13])`; only what this call writes ends one. Rows that have ended do not change.
        rng: a random key, or keys `(batch,)`, as in `sampling.row_keys`. Token t of a row depends on its key,
            its prompt and t, not on other rows. None serves temperature 0 only.
        lengths: real tokens per row of an array of prompts; None means all.
        start_token: put before every prompt, which may then be empty; an encoder-decoder needs one, before
            every target.
        pad_token: what `tokens` holds behind the end of a row.
        capacity: places per row in the cache; equal ones spare new compilations. None means as needed.
        chunk: tokens of the prompt that are read at once, for less memory; None means all.
        padding: "right" or "left": the side of an array of prompts on which rows shorter than it are padded.
        cache_dtype: int8 keeps keys and values in a byte each, with a scale for each token and head, for a
            quarter of float32's memory, at the cost of rounding; None keeps what a call computes.
        cache: `cache` of an earlier call, whose rows go on with these prompts, which may be empty.
        return_cache: whether the result has a `cache`, of the draft, too; `capacity` is then that of the
            whole conversation.
        draft: a smaller model of the same kind and vocabulary, which proposes tokens.
        draft_tokens: how many it proposes at a time, at least 1.

    Returns:
        Tokens, lengths, log-probabilities, and how each row ended.

    Raises:
        TypeError: a model that does not write; prompts, tokens or keys of another type.
        ValueError: an empty prompt without `start_token`; a token out of range (in an array under jit: token
            -1); `max_tokens` below 1 or beyond learned positions; a capacity or a cache that is too small; a
            temperature above 0 without `rng`; a cache of another batch; a draft of another vocabulary, or one
            with a cache that no draft has read.

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> from regard.models import Decoder, Sampling, TransformerConfig, generate
        >>> config = TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=1, vocab_size=13)
        >>> model = Decoder(config, rngs=nnx.Rngs(0))
        >>> warm = Sampling(temperature=1.0, top_p=0.9)
        >>> written = generate(model, [[1, 2, 3], [4]], max_tokens=5, sampling=warm, rng=jax.random.key(0))
        >>> written.tokens.shape, written.lengths.tolist()
        ((2, 5), [5, 5])

    Reference: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, algorithm
    1; Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
    """
    sizes = {"max_tokens": max_tokens, "capacity": capacity, "chunk": chunk, "cache_dtype": cache_dtype}
    text = {"lengths": lengths, "start_token": start_token, "padding": padding, "cache": cache, **sizes}
    choice = (sampling, stop_tokens, rng, pad_token, return_cache)
    start, write = _canonicalize(model, prompts, text, choice, draft, draft_tokens)
    state = start()
    if max_tokens > 1:
        state = write(*state, np.int32(max_tokens))
    written = state[1].written
    return dataclasses.replace(written, cache=_keep(*state, draft)) if return_cache else written


class TextStream(Iterator[list[list[int]]]):
    """Tokens that `stream` hands over, as an iterator over lists with the new tokens of each row.

    Args:
        parts: what makes them, and returns the cache or None.

    Attributes:
        cache: the text read and written, after the last tokens; None before, and unless `return_cache`.

    Example:
        >>> from flax import nnx
        >>> from regard.models import Decoder, TransformerConfig, stream
        >>> config = TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=1, vocab_size=13)
        >>> model = Decoder(config, rngs=nnx.Rngs(0))
        >>> parts = stream(model, [[1, 2, 3]], max_tokens=5, capacity=16, return_cache=True)
        >>> len([*parts]), [*stream(model, [[4]], max_tokens=1, cache=parts.cache)] != []
        (5, True)
    """

    def __init__(self, parts: Generator[list[list[int]], None, TextCache | None]):
        self._parts, self.cache = parts, None

    def __next__(self) -> list[list[int]]:
        try:
            return next(self._parts)
        except StopIteration as end:
            self.cache = end.value or self.cache
            raise


@guided
def stream(
    model: Decoder | EncoderDecoder,
    prompts: ArrayLike,
    *,
    max_tokens: int,
    burst: int = 1,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    stop_tokens: Sequence[int | Sequence[int]] | ArrayLike = (),
    rng: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    start_token: int | None = None,
    capacity: Size | None = None,
    chunk: int | None = None,
    padding: str = "right",
    cache_dtype: DTypeLike | None = None,
    cache: Any = None,
    return_cache: bool = False,
    draft: Decoder | EncoderDecoder | None = None,
    draft_tokens: int = 4,
) -> TextStream:
    """Write as `generate` does, and hand over tokens as they are made.

    Args:
        burst: tokens per step, after the first token, and with a draft at least so many. More cost less each.
        return_cache: whether the iterator has a `cache` at its end.
        model, prompts, max_tokens, sampling, stop_tokens, rng, lengths: as in `generate`.
        start_token, capacity, chunk, padding, cache_dtype, cache, draft, draft_tokens: as in `generate`.

    Returns:
        An iterator over lists with the new tokens of each row; joined they are `generate(...).rows()`.

    Raises:
        TypeError, ValueError: as in `generate`, at the call; a burst below 1.

    Example:
        >>> from flax import nnx
        >>> from regard.models import Decoder, TransformerConfig, stream
        >>> config = TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=1, vocab_size=13)
        >>> model = Decoder(config, rngs=nnx.Rngs(0))
        >>> [len(rows[0]) for rows in stream(model, [[1, 2, 3]], max_tokens=5, burst=2)]
        [1, 2, 2]
    """
    burst = min(whole_number("burst", burst, 1), whole_number("max_tokens", max_tokens, 1))
    sizes = {"max_tokens": max_tokens, "capacity": capacity, "chunk": chunk, "cache_dtype": cache_dtype}
    text = {"lengths": lengths, "start_token": start_token, "padding": padding, "cache": cache, **sizes}
    choice = (sampling, stop_tokens, rng, 0, return_cache)
    start, write = _canonicalize(model, prompts, text, choice, draft, draft_tokens)

    def hand_over() -> Generator[list[list[int]], None, TextCache | None]:
        state = start()
        sent = np.zeros(state[1].newest.shape, np.int32)
        while True:
            done = state[1]
            if max_tokens > 1:
                # Begun before the last tokens are handed over. It does nothing where all rows have ended.
                state = write(*state, np.int32(burst))
            # Waited for: where memory was too small, this raises, while reading the results may never end.
            shown = jax.block_until_ready((done.written.tokens, done.written.lengths, done.alive))
            tokens, lengths, alive = jax.device_get(shown)
            yield [row[a:b].tolist() for row, a, b in zip(tokens, sent, lengths, strict=True)]
            if not (alive & (lengths < max_tokens)).any():
                return _keep(*state, draft) if return_cache else None
            sent = lengths

    return TextStream(hand_over())


def _canonicalize(
    model: Any, prompts: Any, options: dict[str, Any], choice: tuple[Any, ...], draft: Any, draft_tokens: Any
) -> tuple[Callable[[], State], Callable[..., State]]:
    """Check what is asked; return what reads the prompts and chooses the first tokens, and what writes on."""
    burst, shared = 1, options | {"return_cache": choice[-1]}
    if draft is not None:
        _check_draft(model, draft, options["cache"])
        burst += whole_number("draft_tokens", draft_tokens, 1)
    request = canonicalize(model, prompts, **shared, burst=burst)
    rules = _check_rules(model, request, *choice)
    structure, arrays = split_model(model)
    prefill = functools.partial(_prefill, structure, arrays, request, rules)
    if draft is None:
        return prefill, functools.partial(_decode, structure, arrays, rules)
    proposer, weights = split_model(draft)
    if request.cache is not None:
        shared["cache"] = dataclasses.replace(request.cache, model=request.cache.draft)
    # The draft reads token after token what it may have to forget at once.
    proposal = canonicalize(draft, prompts, **shared, burst=burst, rewind=burst - 1)

    def start() -> State:
        read, writing = prefill()
        reads = dataclasses.replace(writing.written, reads=jnp.ones_like(writing.written.lengths))
        return (read, read_draft(proposer, weights, proposal)), dataclasses.replace(writing, written=reads)

    models = (structure, proposer), (arrays, weights)
    return start, functools.partial(speculate, *models, rules, most=min(request.burst, request.max_tokens))


def _keep(cache: Any, writing: Writing, draft: Any) -> TextCache:
    read, drafts = (cache, None) if draft is None else cache
    return TextCache(read, writing.newest, writing.seen, drafts)


@functools.partial(jax.jit, static_argnames="structure")
def _prefill(structure: Structure, arrays: list[Any], request: Request, rules: Rules) -> State:
    """Read the prompts, and choose the first tokens."""
    model = merge_model(structure, arrays)
    hidden, cache = read_prompts(model, request)
    batch, size = request.start.shape
    shape, yes = (batch, request.max_tokens), jnp.ones(batch, bool)
    seen = None
    if rules.keep or rules.sampling.repetition_penalty is not None:  # a later call may have one
        count = size if request.counts is None else request.counts[:, None]
        real = jnp.arange(size, dtype=jnp.int32)[None] < count
        before = None if request.cache is None else request.cache.seen
        before = jnp.zeros((batch, vocabulary_size(model)), bool) if before is None else before
        seen = mark_tokens(before, jnp.asarray(request.start), real)
    tokens = jnp.full(shape, rules.pad_token, jnp.int32)
    lengths = jnp.zeros(batch, jnp.int32)
    scores = jnp.zeros(shape, accumulation_dtype(hidden))
    written = Generated(tokens, lengths, scores, finished=~yes, healthy=yes)
    writing = Writing(written, jnp.zeros(batch, jnp.int32), yes, seen)
    return cache, write_next(writing, model.predict(hidden)[:, 0], rules)


@functools.partial(jax.jit, static_argnames="structure", donate_argnames="cache")
def _decode(
    structure: Structure, arrays: list[Any], rules: Rules, cache: Any, writing: Writing, least: Array
) -> State:
    """Read the newest token and choose the next, again and again."""
    model = merge_model(structure, arrays)

    def advance(state: State) -> State:
        cache, writing = state
        # Rows that have ended read on, for nobody: there is room, and one shape of work is fastest.
        counts = writing.alive.astype(jnp.int32) if rules.keep else None
        hidden, cache = model.read(writing.newest[:, None], cache, counts)
        return cache, write_next(writing, model.predict(hidden)[:, 0], rules)

    return write_on(advance, (cache, writing), least)


def _check_rules(
    model: Any, request: Request, sampling: Any, stop_tokens: Any, rng: Any, pad_token: Any, keep: bool
) -> Rules:
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling: expected a Sampling, such as Sampling(temperature=0.8); got {sampling!r}")
    keys = None
    if not sampling.greedy:
        if rng is None:
            raise ValueError(
                "rng: expected a random key, such as jax.random.key(0), because tokens are drawn at"
                f" temperature={sampling.temperature}; got None"
            )
        keys = row_keys(rng, request.start.shape[0])
    check_token("pad_token", pad_token, 2**31)
    stops = sort_stops(stop_tokens, vocabulary_size(model))
    return Rules(sampling, keys, stops, np.int32(pad_token), keep)


def _check_draft(model: Any, draft: Any, cache: Any) -> None:
    """Raise for a draft that cannot propose tokens to the model."""
    expected, got = vocabulary_size(model), vocabulary_size(draft, "draft")
    if isinstance(model, Decoder) != isinstance(draft, Decoder):
        raise TypeError(f"draft: expected a {type(model).__name__}, as model is; got {type(draft).__name__}")
    if got != expected:
        raise ValueError(
            f"draft: expected the model's vocabulary, {expected} tokens, as it proposes some of them; got"
            f" {got}"
        )
    if isinstance(cache, TextCache) and cache.draft is None:
        raise ValueError(
            "cache: expected one of a call with a draft, whose own cache it has, too; give the first call of"
            " a conversation the draft, or leave it out"
        )
