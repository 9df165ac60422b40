"""Comparisons of a few calls that take turns: the cost of an option, the gain of a way to compute."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.cases import document_ids
from benchmarks.peers import canonicalize_plain
from benchmarks.report import show_digits
from regard import linear, masks, readouts, scores
from regard.attention import attend
from regard.cache import KVCache
from regard.engine.flash.measurements import load_tuning
from regard.engine.flash.sparsity import classify_tiles, list_tiles
from regard.engine.softmax import dropout
from regard.layers import MultiHeadAttention
from regard.masks.grid import Grid
from regard.positions import rotary
from regard.tuning import interleave, lower_passes

Calls = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Comparison:
    """Calls to time; the first one is what the others are compared with."""

    title: str
    calls: Calls
    work: float | None = None  # what each call does, in units
    unit: str = ""
    note: str = ""
    repeat: int = 1  # rounds per round asked for: calls of microseconds need more

    def measure(self, rounds: int) -> dict[str, Any]:
        """Return median seconds of each call, and the median ratio to the first call of the same round."""
        waiting = {name: lambda call=call: jax.block_until_ready(call()) for name, call in self.calls.items()}
        for call in waiting.values():
            call()
        seconds = interleave(waiting, rounds * self.repeat, settle=True)
        base = next(iter(self.calls))
        found: dict[str, Any] = {
            "title": self.title,
            "median_seconds": {name: statistics.median(times) for name, times in seconds.items()},
            # Of each round apart: a busy moment then hits both sides of a ratio.
            "ratio": {
                name: statistics.median(a / b for a, b in zip(times, seconds[base], strict=True))
                for name, times in seconds.items()
                if name != base
            },
        }
        if self.work is not None:
            rates = {name: self.work / taken for name, taken in found["median_seconds"].items()}
            found |= {"rate": rates, "unit": self.unit}
        return found | ({"note": self.note} if self.note else {})


def describe(found: dict[str, Any]) -> str:
    """Return one line about a measured comparison."""
    parts = []
    for name, taken in found["median_seconds"].items():
        part = f"{name} {show_digits(taken, 1e3)} ms"
        if name in found["ratio"]:
            part += f" ({show_digits(found['ratio'][name])} times)"
        if "rate" in found:
            part += f", {found['rate'][name]:,.4g} {found['unit']} per second"
        parts.append(part)
    return f"{found['title']}: {'; '.join(parts)}" + (f"; {found['note']}" if "note" in found else "")


def _draw(count: int, shape: tuple[int, ...]) -> list[jax.Array]:
    return [jax.random.normal(rng, shape) for rng in jax.random.split(jax.random.key(0), count)]


def compare_jit(shapes: Iterable[tuple[int, ...]] = ((1, 2, 3, 2), (2, 4, 256, 32))) -> Iterator[Comparison]:
    """Compare calls with and without jit: the formula in `jax.numpy`, `attend`, and a module.

    The first shape is that of the tutorial module_and_jit. Results must be the same, or nothing is timed.
    """
    for shape in shapes:
        arrays = _draw(3, shape)
        batch, heads, length, width = shape
        module = MultiHeadAttention(heads * width, heads, rngs=nnx.Rngs(0))
        inputs = jax.random.normal(jax.random.key(1), (batch, length, heads * width))
        ways: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
            "formula": (evaluate_formula, jax.jit(evaluate_formula), (*arrays,)),
            "attend": (attend_causally, jax.jit(attend_causally), (*arrays,)),
            "module": (apply_causally, nnx.jit(apply_causally), (module, inputs)),
        }
        expected = {"attend": evaluate_formula(*arrays)}
        for name, (plain, compiled, given) in ways.items():
            result = plain(*given)
            for other in (compiled(*given), expected.get(name, result)):
                np.testing.assert_allclose(result, other, atol=1e-5, err_msg=name)
            calls = {"jit": lambda f=compiled, a=given: f(*a), "no jit": lambda f=plain, a=given: f(*a)}
            yield Comparison(f"{name} of {length} tokens", calls, repeat=30)


def evaluate_formula(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Compute causal attention as one would first write it."""
    scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5
    keep = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(keep, scores, -jnp.inf), axis=-1) @ value


def attend_causally(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Compute the same through Regard."""
    return attend(query, key, value, mask=masks.causal())


def apply_causally(module: Any, inputs: jax.Array) -> jax.Array:
    """Apply a layer with its projections."""
    return module(inputs, mask=masks.causal())


def make_options(num_heads: int) -> dict[str, Callable[..., Any]]:
    """Return causal attention with each option, as functions of query, key and value."""
    table = jax.random.normal(jax.random.key(1), (32, num_heads))

    def call(**options: Any) -> Callable[..., Any]:
        return lambda *arrays: attend(*arrays[:3], mask=masks.causal(), **options)

    return {
        "plain": call(),
        "softcap": call(score=scores.softcap(50.0)),
        "alibi": call(score=scores.alibi(num_heads)),
        "relative bias": call(score=scores.relative_bias(table, bidirectional=False)),
        "sinks": call(sinks=jnp.zeros(num_heads)),
        "rotary": lambda query, key, value, _=None: call()(rotary(query), rotary(key), value),
    }


def compare_options(shape: tuple[int, ...] = (1, 8, 4096, 64)) -> Iterator[Comparison]:
    """Compare score functions, sinks and rotary positions with the same call without them."""
    arrays = _draw(4, shape)
    for passes, given in (("forward", arrays[:3]), ("forward and backward", arrays)):
        calls = {}
        for name, function in make_options(shape[1]).items():
            compiled = lower_passes(function, given, None).compile()
            calls[name] = lambda run=compiled, given=given: run(given, None)
        yield Comparison(f"options of a causal call at {shape}, {passes}", calls)


def compare_readouts(shape: tuple[int, ...] = (1, 1, 16_384, 64)) -> Iterator[Comparison]:
    """Compare statistics of every row, key and block with the plain forward pass."""
    query, key, value = _draw(3, shape)
    mask = masks.causal()
    forward = jax.jit(lambda *arrays: attend(*arrays, mask=mask, aux=("lse",)))
    lse = forward(query, key, value)[1]["lse"]
    calls: Calls = {
        "forward": lambda: forward(query, key, value),
        "readout": lambda: readouts.read(query, key, mask=mask, lse=lse),
        "readout that finds lse": lambda: readouts.read(query, key, mask=mask),
    }
    yield Comparison(f"readouts of a causal call at {shape}", calls)


def compare_linear(lengths: tuple[int, ...] = (8192, 16_384)) -> Iterator[Comparison]:
    """Compare linear attention with exact causal attention as the sequence grows: 8 heads of width 64."""
    ways = {
        "linear": jax.jit(lambda *arrays: linear.attend(*arrays, feature_map="elu1", normalise=True)),
        "softmax": jax.jit(attend_causally),
    }
    for length in lengths:
        arrays = _draw(3, (1, 8, length, 64))
        calls = {name: lambda run=run, arrays=arrays: run(*arrays) for name, run in ways.items()}
        yield Comparison(f"linear attention to {length:,} tokens", calls, work=length, unit="tokens")


CACHES = {  # (batch, query heads, key heads, tokens, width)
    "32 heads": (1, 32, 32, 4096, 128),
    "32 heads on 8": (1, 32, 8, 4096, 128),
    "batch of 4, 32 heads on 8": (4, 32, 8, 4096, 128),
}


def compare_cache(shapes: dict[str, tuple[int, ...]] = CACHES) -> Iterator[Comparison]:
    """Compare a step of decoding through a cache with a plain copy of the same bytes, and with int8.

    The rate of int8, too, counts the bytes of float32.
    """
    for name, (batch, heads, key_heads, tokens, width) in shapes.items():
        rngs = jax.random.split(jax.random.key(0), 3)
        stored = jax.random.normal(rngs[0], (batch, key_heads, tokens - 1, width))
        token = jax.random.normal(rngs[1], (batch, key_heads, 1, width))
        query = jax.random.normal(rngs[2], (batch, heads, 1, width))
        step = jax.jit(_decode, donate_argnums=0)

        def decode(caches: Any, step: Any = step, token: Any = token, query: Any = query) -> Any:
            cache, output = step(caches.pop(), token, query)
            caches.append(cache)
            return output

        calls: Calls = {}
        for call, dtype in {"decode": "float32", "int8": "int8"}.items():
            cache = KVCache.create(batch, key_heads, tokens, width, dtype=dtype).append(stored, stored)
            calls[call] = partial(decode, [cache])
        source = np.asarray(stored)
        pairs = [(source, np.empty_like(source)), (source.copy(), np.empty_like(source))]

        def copy(pairs: Any = pairs) -> None:
            for one, other in pairs:
                np.copyto(other, one)

        gibibytes = 2 * stored.nbytes / 2**30
        title = f"decoding through a cache, {name}"
        yield Comparison(title, {"copy": copy, **calls}, work=gibibytes, unit="GiB")


def _decode(cache: KVCache, token: jax.Array, query: jax.Array) -> tuple[KVCache, jax.Array]:
    """Append a token and attend to all; then take it back, so that every step sees as many."""
    before = cache.lengths
    cache = cache.append(token, token)
    return cache.rewind(before), cache.attend(query, mask=masks.causal())


def compare_tile_lists(length: int = 131_072, window: int = 4096) -> Iterator[Comparison]:
    """Time the tile lists of a long call, by query and by key: what a new mask costs before any attention."""
    shape = jax.ShapeDtypeStruct((1, 1, length, 64), "float32")
    ids = document_ids(length)
    mask = masks.causal() & masks.sliding_window(window) & masks.segments(ids[None])

    def build(mask: Any) -> Any:
        problem = canonicalize_plain(shape, shape, shape, mask)
        forward, backward = load_tuning().blocking(problem)
        call = problem.mask, problem.sizes, (problem.query_offset, problem.key_offset)
        by_query = classify_tiles(*call, forward.queries, forward.keys)
        by_key = classify_tiles(*call, backward.queries, backward.keys).swapaxes(-1, -2)
        return list_tiles(by_query, forward.keys, length), list_tiles(by_key, backward.queries, length)

    compiled = jax.jit(build).lower(mask).compile()
    lists = compiled(mask)[0]
    kept, total = int(np.asarray(lists.kept).sum()), int(np.prod(lists.starts.shape[-2:]))
    temporary = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None) or 0
    title = f"tile lists of causal() & sliding_window({window}) & segments of {ids.max() + 1} documents"
    note = f"{kept:,} of {total:,} tiles kept, {temporary / 2**20:.2g} MiB temporary"
    yield Comparison(f"{title}, {length:,} tokens", {"lists": lambda: compiled(mask)}, note=note)


def compare_dropout(shape: tuple[int, ...] = (2, 3, 512, 512), rate: float = 0.5) -> Iterator[Comparison]:
    """Compare the dropout pattern, a function of places, with independent Threefry bits per weight."""
    rng = jax.random.key(0)

    def draw_pattern(rng: jax.Array) -> jax.Array:
        grid = Grid.cover(shape[2], shape[3], 0, 2)
        seeds = dropout.head_seeds(rng, shape[:2])
        return dropout.survivors(*dropout.pair_words(seeds, grid), rate)

    calls: Calls = {}
    for name, draw in (
        ("pattern", jax.jit(draw_pattern)),
        ("bernoulli", jax.jit(lambda rng: jax.random.bernoulli(rng, 1 - rate, shape))),
    ):
        calls[name] = lambda draw=draw: draw(rng)
    yield Comparison(f"dropout of weights {shape}", calls)
