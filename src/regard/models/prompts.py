"""Prompts, checked and padded."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from regard.arguments import LARGEST, integers, read_size, whole_number
from regard.axes import Array, ArrayLike, Bool, Int, Size
from regard.cache import KVCache
from regard.layers.choices import check_choice
from regard.masks.grid import is_concrete
from regard.models.decoder import Decoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.padding import check_lengths, check_range
from regard.models.stack import DecodingCache, read_cache_dtype
from regard.records import record, static

# Lists of prompts are padded to a multiple of this, so that prompts of similar lengths share a program.
STRIDE = 16

ANY_TOKEN = -2  # in front of a sequence that ends a text, and no token of one


@record
class TextCache:
    """Text that `generate` or `stream` has read and written, for the next call; a pytree, batch first.

    Example:
        >>> from flax import nnx
        >>> from regard.models import Decoder, TransformerConfig, generate
        >>> config = TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=1, vocab_size=13)
        >>> model = Decoder(config, rngs=nnx.Rngs(0))
        >>> written = generate(model, [[1, 2, 3]], max_tokens=4, capacity=32, return_cache=True)
        >>> more = generate(model, [[5]], max_tokens=2, cache=written.cache)
        >>> again = generate(model, [[1, 2, 3, *written.rows()[0], 5]], max_tokens=2)
        >>> more.rows() == again.rows()
        True
    """

    model: DecodingCache
    """Keys and values of all that was read."""
    pending: Int[Array, " batch"]
    """The last token of each row, which was written and not read yet."""
    seen: Bool[Array, "batch V"] | None = None
    """Tokens that a repetition penalty applies to, `(batch, V)` booleans."""
    draft: DecodingCache | None = None
    """Keys and values of the draft, of the same text; None without one."""


@record
class Request:
    """Prompts to read, and how much to write."""

    start: Any  # (batch, P) tokens that the decoder reads first; padding at the end
    counts: Any  # (batch,) real tokens of start; None, all
    source: Any  # of an encoder-decoder: (batch, S) tokens or (batch, S, W) vectors
    source_lengths: Any
    cache: TextCache | None  # what was read before
    max_tokens: int = static()
    capacity: Size = static()
    chunk: Size = static()  # tokens of the prompt read at once
    burst: int = static()  # tokens that the cache has room to read at once while writing, in later calls too
    rewind: int = static()  # tokens that it can take back which were read one by one
    cache_dtype: Any = static()  # int8; or None, that of a call


def canonicalize(
    model: Any,
    prompts: Any,
    lengths: Any,
    max_tokens: int,
    start_token: int | None,
    capacity: Size | None,
    chunk: int | None,
    cache_dtype: Any = None,
    cache: Any = None,
    padding: str = "right",
    burst: int = 1,
    rewind: int = 0,
    return_cache: bool = False,
) -> Request:
    """Check what a model is to write after, and fill in how much its cache holds and reads at once."""
    vocab_size = vocabulary_size(model)
    max_tokens = whole_number("max_tokens", max_tokens, 1)
    if start_token is not None:
        check_token("start_token", start_token, vocab_size)
    check_choice("padding", padding, ("right", "left"))
    if cache is not None:
        _check_cache(model, cache, start_token=start_token, capacity=capacity, cache_dtype=cache_dtype)
    cache_dtype = read_cache_dtype("cache_dtype", cache_dtype, model.config)
    source = source_lengths = counts = None
    if isinstance(model, EncoderDecoder):
        if start_token is None:
            raise ValueError(
                "start_token: expected the token that targets begin with, as an encoder-decoder writes beside"
                " its prompts, not after them; got None"
            )
        source, source_lengths = _check_source(model, prompts, lengths, padding)
        arrays: Any = jnp if is_symbolic_dim(source.shape[0]) else np
        start = arrays.full((source.shape[0], 1), start_token, np.int32)
    else:
        first = start_token if cache is None else cache.pending
        limits = [] if capacity is None else [read_size("capacity", capacity)]
        limits += [model.config.max_length] if model.config.positions == "learned" else []
        most = min(limits) - (first is not None) if limits else None  # to pad prompts to
        start, counts = _check_tokens(prompts, lengths, vocab_size, most, padding)
        start, counts = _prepend_start(start, counts, first)
    longest: Any = np.asarray(counts) if counts is not None and is_concrete(counts) else start.shape[1]
    if cache is not None and is_concrete(cache.model.lengths):
        longest = longest + np.asarray(cache.model.lengths)
    longest = longest if is_symbolic_dim(longest) else int(np.max(longest))
    needed = longest + max_tokens - 1  # the last token is written and not read
    if model.config.positions == "learned" and needed > model.config.max_length:
        raise ValueError(
            f"max_tokens: expected prompt and output within the {model.config.max_length} learned positions"
            f" (max_length), at most {max(model.config.max_length - longest + 1, 0)} tokens after {longest};"
            f" got {max_tokens}"
        )
    if cache is not None:
        if needed > _room(cache):
            raise ValueError(
                f"cache: expected room for {needed} tokens, those it has, the prompt and max_tokens; it has"
                f" {_room(cache)} places. Give capacity= to the first call of a conversation"
            )
        longest_chunk = min((layer.longest_chunk for layer in _stores(cache)), default=longest)
        most = longest_chunk - 1
        if rewind:
            most = min([most, *(layer.spare for layer in _stores(cache) if layer.window is not None)])
        if min(burst, max_tokens) > most + 1:
            raise ValueError(
                f"draft_tokens: expected at most {most}, as many as windows of the cache have room for; got"
                f" {burst - 1}"
            )
        chunk = longest_chunk if chunk is None else min(chunk, longest_chunk)
    start, counts, chunk = _pad_to_chunks(start, counts, chunk)
    least = max(needed, chunk)
    if cache is not None:
        capacity = _room(cache)
    elif capacity is None:
        capacity = start.shape[1] + max_tokens - 1
    elif capacity < least:
        raise ValueError(
            f"capacity: expected at least {least}, a place for each token of the longest prompt and for each"
            f" of max_tokens but the last; got {capacity}. None chooses it"
        )
    if isinstance(capacity, int) and capacity > LARGEST:
        raise ValueError(
            f"capacity: expected at most {LARGEST} places, which int32 counts, for the longest prompt and"
            f" max_tokens; got {capacity}"
        )
    if not return_cache:  # a later call may write more
        burst, rewind = min(burst, max_tokens), min(rewind, max_tokens - 1)
    sizes = (max_tokens, capacity, chunk, burst, rewind)
    return Request(start, counts, source, source_lengths, cache, *sizes, cache_dtype)


def _check_cache(model: Any, cache: Any, **of_first: Any) -> None:
    """Raise for a cache that no text of this model can go on with."""
    if not isinstance(cache, TextCache):
        raise TypeError(
            "cache: expected the `cache` of an earlier `generate(..., return_cache=True)`, got"
            f" {type(cache).__name__}"
        )
    if not isinstance(model, Decoder):
        raise TypeError(f"cache: expected a Decoder to go on with it, got {type(model).__name__}")
    for name, option in of_first.items():
        if option is not None:
            raise ValueError(f"{name}: expected None with a cache, whose first call had it; leave it out")


def _room(cache: TextCache) -> int:
    """Return the tokens per row that a cache has places for; layers that forget have no end."""
    ends = [layer.capacity for layer in _stores(cache) if layer.window is None]
    return min(ends, default=LARGEST)


def _stores(cache: TextCache) -> list[KVCache]:
    """Return the caches of keys and values; states of the delta rule take any number of tokens."""
    return [layer for layer in cache.model.layers if isinstance(layer, KVCache)]


def vocabulary_size(model: Any, name: str = "model") -> int:
    """Return the number of tokens that a model chooses from."""
    if isinstance(model, Decoder) and model.config.vocab_size is not None:
        return model.config.vocab_size
    if isinstance(model, EncoderDecoder):
        return model.target_vocab_size
    raise TypeError(
        f"{name}: expected a Decoder or an EncoderDecoder, which write; got {type(model).__name__}"
    )


def check_token(name: str, token: Any, vocab_size: int) -> None:
    if isinstance(token, bool) or not isinstance(token, int | np.integer):
        raise TypeError(f"{name}: expected a token, an integer in 0..{vocab_size - 1}; got {token!r}")
    if not 0 <= token < vocab_size:
        raise ValueError(f"{name}: expected a token in 0..{vocab_size - 1}, got {token}")


def sort_stops(stop_tokens: Any, vocab_size: int) -> ArrayLike:
    """Check stop tokens; return them `(n, L)`, sequences of fewer than L behind `ANY_TOKEN`."""
    if isinstance(stop_tokens, str) or not np.iterable(stop_tokens):
        raise TypeError(f"stop_tokens: expected a sequence of tokens, such as (2,); got {stop_tokens!r}")
    if not is_concrete(stop_tokens):
        if getattr(stop_tokens, "ndim", None) not in (1, 2):
            raise TypeError(
                "stop_tokens: expected one array of tokens (n,), or of sequences (n, L), where they are"
                " traced; got a sequence that holds some; join them, jnp.stack(stop_tokens)"
            )
        tokens = jnp.asarray(integers("stop_tokens", stop_tokens, clamp=True), jnp.int32)
        tokens = jnp.where(tokens < 0, jnp.int32(LARGEST), tokens)  # which no token is
        tokens = tokens[:, None] if tokens.ndim == 1 else tokens
        if tokens.shape[1]:
            return tokens
        stop_tokens = [()]
    ends = [*(np.asarray(stop_tokens) if hasattr(stop_tokens, "dtype") else stop_tokens)]
    ends = [[*end] if np.iterable(end) and not isinstance(end, str) else [end] for end in ends]
    for token in itertools.chain(*ends):
        check_token("stop_tokens", token, vocab_size)
    if not all(ends):
        raise ValueError("stop_tokens: expected at least one token in a sequence that ends a text, got none")
    longest = max(map(len, ends), default=1)
    rows = [[ANY_TOKEN] * (longest - len(end)) + end for end in ends]
    return np.unique(np.asarray(rows, np.int32).reshape(-1, longest), axis=0)


def end_with(texts: Int[Array, "*B L"], stops: Array) -> Bool[Array, "*B"]:
    """Return where the last tokens of texts are one of the stop tokens or sequences `(n, L)`."""
    stops = jnp.asarray(stops).reshape((1,) * (texts.ndim - 1) + stops.shape)
    is_same = (stops == ANY_TOKEN) | (texts[..., None, :] == stops)
    return jnp.any(jnp.all(is_same, axis=-1), axis=-1)


def _check_source(model: EncoderDecoder, prompts: Any, lengths: Any, padding: str) -> tuple[Any, Any]:
    """Check what the encoder reads: tokens, or vectors."""
    config = model.config
    if config.vocab_size is not None:
        most = config.max_length if config.positions == "learned" else None
        return _check_tokens(prompts, lengths, config.vocab_size, most, padding)
    if getattr(prompts, "ndim", None) != 3:
        got = f"shape {prompts.shape}" if hasattr(prompts, "shape") else type(prompts).__name__
        raise ValueError(f"prompts: expected real vectors (batch, S, {config.input_width}); got {got}")
    lengths = check_lengths("lengths", lengths, prompts.shape[:1], prompts.shape[1])
    if padding == "left" and lengths is not None:
        prompts = _move_to_start(prompts, lengths)
    return prompts, lengths


def _check_tokens(
    prompts: Any, lengths: Any, vocab_size: int, most: Size | None, padding: str
) -> tuple[Any, Any]:
    """Check prompts; return tokens `(batch, P)`, and how many of each row are real."""
    is_list = isinstance(prompts, list | tuple)
    if isinstance(prompts, str) or (is_list and any(isinstance(prompt, str) for prompt in prompts)):
        raise TypeError("prompts: expected lists of tokens, got text; encode it with the model's tokenizer")
    if is_list:
        if lengths is not None:
            raise ValueError(
                "lengths: expected None with a list of prompts, whose lengths are known; got lengths, which"
                " belong to an array of prompts"
            )
        tokens, lengths = pad(prompts, most)
    else:
        tokens = prompts if hasattr(prompts, "dtype") else np.asarray(prompts)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"prompts: expected integer tokens, got {tokens.dtype}")
    if tokens.ndim != 2 or 0 in tokens.shape[:1]:
        hint = "; for one prompt write prompts[None]" if tokens.ndim == 1 else ""
        raise ValueError(
            f"prompts: expected an array (batch, P) of at least one row, got shape"
            f" {tuple(tokens.shape)}{hint}"
        )
    lengths = check_lengths("lengths", lengths, tokens.shape[:1], tokens.shape[1])
    if padding == "left" and lengths is not None and not is_list:
        tokens = _move_to_start(tokens, lengths)
    if not is_concrete((tokens, lengths)):
        return integers("prompts", tokens), lengths
    tokens = np.asarray(tokens)
    if lengths is not None:
        tokens = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, tokens.dtype.type(0))
    check_range("prompts", "tokens", tokens, vocab_size - 1, f"vocab_size={vocab_size}")
    return tokens.astype(np.int32), lengths


def _move_to_start(tokens: Any, lengths: Any) -> Any:
    """Move tokens, or vectors, that end every row to its start."""
    arrays: Any = np if is_concrete((tokens, lengths)) else jnp
    tokens, size = arrays.asarray(tokens), tokens.shape[1]
    places = (arrays.arange(size)[None] + size - arrays.asarray(lengths)[:, None]) % size
    return arrays.take_along_axis(tokens, places.reshape((*places.shape, *(1,) * (tokens.ndim - 2))), axis=1)


def pad(prompts: list[Any] | tuple[Any, ...], most: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Pad lists to one length, a multiple of STRIDE unless that is more than `most`; return theirs, too."""
    rows = [np.asarray(prompt) for prompt in prompts]
    for number, row in enumerate(rows):
        if row.ndim != 1:
            hint = "; for one prompt write [prompt]" if row.ndim == 0 else ""
            raise ValueError(
                f"prompts: expected a sequence of tokens for each, got {prompts[number]!r} as prompt"
                f" {number}{hint}"
            )
        if row.size and not np.issubdtype(row.dtype, np.integer):
            raise TypeError(f"prompts: expected integer tokens, got {row.dtype} in prompt {number}")
    lengths = np.array([row.size for row in rows], np.int32)
    longest = int(lengths.max(initial=1))
    width = -(-longest // STRIDE) * STRIDE
    tokens = np.zeros((len(rows), max(longest, width if most is None else min(width, most))), np.int64)
    for number, row in enumerate(rows):
        tokens[number, : row.size] = row
    return tokens, lengths


def _prepend_start(tokens: Any, lengths: Any, start_token: Any) -> tuple[Any, Any]:
    """Put the start token, or one for each row, before every prompt; without, refuse empty prompts."""
    if start_token is None:
        row_lengths = tokens.shape[1] if lengths is None else lengths if is_concrete(lengths) else 1
        if not is_symbolic_dim(row_lengths) and np.min(row_lengths) < 1:
            row = int(np.argmin(row_lengths))
            raise ValueError(
                f"prompts: expected at least one token each, got none in prompt {row}; give start_token=,"
                " which is put before every prompt"
            )
        return tokens, lengths
    arrays: Any = np if is_concrete((tokens, start_token)) else jnp
    first = arrays.asarray(start_token)
    if first.shape not in ((), tokens.shape[:1]):
        raise ValueError(
            f"prompts: expected one for each of the cache's {first.shape[0]} rows, got {tokens.shape[0]}; an"
            " empty one goes on with the text"
        )
    column = arrays.broadcast_to(first[..., None], (tokens.shape[0], 1)).astype(tokens.dtype)
    return arrays.concatenate([column, tokens], axis=1), None if lengths is None else lengths + 1


def _pad_to_chunks(start: Any, counts: Any, chunk: int | None) -> tuple[Any, Any, Size]:
    """Pad prompts to whole chunks; return the tokens per chunk as well."""
    size = start.shape[1]
    if chunk is not None and is_symbolic_dim(size):
        raise NotImplementedError(f"chunk: expected None for prompts of symbolic length, got {chunk}")
    taken = size if chunk is None else min(whole_number("chunk", chunk, 1), size)
    if size % taken:
        arrays: Any = np if is_concrete(start) else jnp
        counts = arrays.full(start.shape[0], size, np.int32) if counts is None else counts
        start = arrays.pad(start, ((0, 0), (0, -size % taken)))
    return start, counts, taken
