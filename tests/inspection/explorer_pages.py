"""What the explorer's page is tested on: calls of `attend`, with their weights in float64 NumPy."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard import attend, inspection, masks, scores

TEXT = """
When Mary and John went to the shop , John gave a drink to Mary . The cat that sat near the old door of the
house saw the dog , and the dog saw the cat , but neither moved . When Mary and John went to the shop , John
gave
"""
WORDS = TEXT.split()


@dataclass
class Case:
    """One call, and what its weights are."""

    name: str
    query: np.ndarray
    """(H, T, D)"""
    key: np.ndarray
    """(K, S, D)"""
    weights: np.ndarray
    """(H, T, S) float64; 0 in rows that may attend to nothing."""
    sunk: np.ndarray
    """(H, T) what the sink holds."""
    keep: np.ndarray
    """(H, T, S)"""
    query_offset: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    """Of `attend`."""

    @property
    def alive(self) -> np.ndarray:
        """(H, T)"""
        return self.keep.any(-1)

    def level(self, head: int, rows: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks of so many rows and keys: mean over living rows of sums, and the largest weight."""
        weights, alive = self.weights[head], self.alive[head]
        shape = tuple(-(-size // block) for size, block in zip(weights.shape, (rows, keys), strict=True))
        mass, largest = np.zeros(shape), np.zeros(shape)
        for i in range(shape[0]):
            living = max(int(alive[i * rows : (i + 1) * rows].sum()), 1)
            for j in range(shape[1]):
                block = weights[i * rows : (i + 1) * rows, j * keys : (j + 1) * keys]
                mass[i, j], largest[i, j] = block.sum() / living, block.max(initial=0)
        return mass, largest

    def row_stats(self, head: int) -> dict[str, np.ndarray]:
        """Numbers per row, NaN where a row may attend to nothing."""
        weights, sunk, alive = self.weights[head], self.sunk[head], self.alive[head]
        T, S = weights.shape
        away = self.query_offset + np.arange(T)[:, None] - np.arange(S)
        all_of_it = np.concatenate([weights, sunk[:, None]], -1)
        logs = np.log(np.where(all_of_it > 0, all_of_it, 1))
        held = np.where(weights.sum(-1) > 0, weights.sum(-1), 1)
        found = {
            "entropy": -(all_of_it * logs).sum(-1),
            "max_weight": weights.max(-1, initial=0),
            "first_mass": weights[:, : min(max(S // 32, 1), 4)].sum(-1),
            "local_mass": (weights * (np.abs(away) < min(max(S // 8, 2), 16))).sum(-1),
            "distance": (weights * away).sum(-1) / held,
            "sink_mass": sunk,
        }
        return {name: np.where(alive, values, np.nan) for name, values in found.items()}


def weigh(query, key, keep, offset=0, scale=None, slopes=None, cap=None, sinks=None):
    """Weights and the sink's share, in float64: scale, then cap, then slopes by distance, then the mask."""
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    H, T, D = query.shape
    S, scale = key.shape[1], 1 / np.sqrt(D) if scale is None else scale
    logits = np.full((H, T, S), -np.inf)
    away = np.abs(offset + np.arange(T)[:, None] - np.arange(S))
    for head in range(H):
        for t in range(T):
            kept = np.flatnonzero(keep[head, t])
            row = scale * (key[head * len(key) // H][kept] @ query[head, t])
            if cap is not None:
                row = cap * np.tanh(row / cap)
            if slopes is not None:
                row = row - slopes[head] * away[t, kept]
            logits[head, t, kept] = row
    extra = np.full(H, -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    extra = np.broadcast_to(extra[:, None], (H, T))
    peak = np.maximum(logits.max(-1, initial=-np.inf), extra)
    peak = np.where(np.isfinite(peak), peak, 0)[..., None]
    unnormalised, of_sink = np.exp(logits - peak), np.exp(extra - peak[..., 0])
    total = unnormalised.sum(-1) + of_sink
    total = np.where(total > 0, total, 1)
    alive = keep.any(-1)
    return unnormalised / total[..., None], np.where(alive, of_sink / total, 0)


def make_case(
    name, T, S, heads, keys, seed, keep, offset=0, spread=2.0, bad_keys=(), numbers=None, **options
):
    """A call on random queries and keys; `numbers` are what the definition needs of the options."""
    random = np.random.default_rng(seed)
    D = 5
    query = spread * random.standard_normal((heads, T, D)).astype(np.float32)
    key = random.standard_normal((keys, S, D)).astype(np.float32)
    keep = np.broadcast_to(keep, (heads, T, S))
    for number, bad in enumerate(bad_keys):
        assert not keep[..., bad].any()
        key[:, bad] = (np.nan, np.inf, -np.inf)[number % 3]
    weights, sunk = weigh(query, np.where(np.isfinite(key), key, 0), keep, offset, **(numbers or {}))
    if offset or T != S:
        options["query_offset"] = offset
    return Case(name, query, key, weights, sunk, keep, offset, options)


def run(case: Case) -> None:
    """Call `attend`."""
    value = jnp.ones((*case.key.shape[:2], 3), jnp.float32)
    attend(jnp.asarray(case.query)[None], jnp.asarray(case.key)[None], value[None], **case.options)


def many_cases() -> list[Case]:
    """Every kind of mask and score at N = 53; one call each."""
    n = 53
    i, j = np.arange(n)[:, None], np.arange(n)
    documents = np.repeat([0, 1, 2], [19, 11, 23])
    packed = (documents[:, None] == documents) & (j <= i)
    slopes = 2.0 ** -np.array([2, 4, 6, 8])  # of 4 heads, 2^(-8 h / 4)
    decoding = np.arange(36, 53)[:, None] >= j
    kept = np.arange(n) % 7 != 3  # keys that anybody may attend to
    empty = (j < i - 11) & kept
    logits = np.array([0.7, -1.3, 2.1])
    capped = {"cap": 1.7, "sinks": logits}
    return [
        make_case("causal", n, n, 2, 2, 0, j <= i, mask=masks.causal()),
        make_case(
            "packed, grouped",
            n,
            n,
            6,
            2,
            1,
            packed,
            mask=masks.causal() & masks.segments(jnp.asarray(documents, jnp.int32)),
        ),
        make_case(
            "window, softcap, sinks",
            n,
            n,
            3,
            1,
            2,
            (j >= i - 13) & (j <= i + 2),
            numbers=capped,
            mask=masks.sliding_window(13, 2),
            score=scores.softcap(1.7),
            sinks=jnp.asarray(logits, jnp.float32),
        ),
        make_case(
            "alibi",
            n,
            n,
            4,
            4,
            3,
            j <= i,
            numbers={"slopes": slopes},
            mask=masks.causal(),
            score=scores.alibi(4),
        ),
        make_case("decoding", 17, n, 2, 1, 4, decoding, offset=36, mask=masks.causal()),
        make_case(
            "empty rows, NaN in masked keys",
            n,
            n,
            1,
            1,
            5,
            empty,
            bad_keys=np.flatnonzero(~kept),
            mask=masks.from_array(jnp.asarray(empty)),
        ),
        make_case("no mask, sharp", n, n, 1, 1, 6, np.ones((n, n), bool), spread=9.0),
    ]


def trace_of(cases: list[Case], tokens: Any = None, title: str = "a test"):
    """The trace of these calls, one layer each."""
    with inspection.capture(tokens=tokens, title=title) as trace:
        for case in cases:
            run(case)
    return trace


def long_case(n: int = 1223) -> Case:
    """Two causal heads, too long for a page to carry each weight of both."""
    i, j = np.arange(n)[:, None], np.arange(n)
    return make_case("long", n, n, 2, 1, 7, j <= i, mask=masks.causal())


def huge_trace(n: int = 131_072):
    """One head with a window, at a length of which no matrix could be stored."""
    x = jnp.asarray(np.random.default_rng(8).standard_normal((1, 1, n, 3)), jnp.float32)
    with inspection.capture(title="very long") as trace:
        attend(x, x, x, mask=masks.causal() & masks.sliding_window(63))
    return trace


def many_heads(layers: int, heads: int, n: int):
    """So many layers of causal heads, all of one reading, each a little smaller than the last."""
    x = jnp.asarray(np.random.default_rng(9).standard_normal((1, heads, n, 5)), jnp.float32)
    with inspection.capture(title="many heads") as trace:
        attend(x, x, x, mask=masks.causal())
    call = trace.calls[0]
    read = call.readout()

    def scaled(layer):
        # Chunks that are the same would be kept once.
        found = jax.tree.map(lambda a: a * np.float32(1 - layer / 97) if a.dtype == jnp.float32 else a, read)
        listed = np.asarray(read.top_keys)
        found = dataclasses.replace(found, top_keys=np.where(listed < 0, listed, (listed + layer) % n))
        return dataclasses.replace(call, name=f"layer {layer}", layer=layer, _found={(64, 8, None): found})

    calls = (call, *(scaled(layer) for layer in range(1, layers)))
    return dataclasses.replace(trace, calls=calls)


STEPS = ("]", "n", "n", "ArrowDown", "ArrowRight", "+", "+", "+", "m", "l", "r", "r", "-", "0", "m")


def walk(browser, path):
    """Opens a page and uses everything; the visit, and the largest number of nodes that the page had."""
    visit = browser.visit(path.as_uri())
    most = 0
    for tab in (1, 2, 3, 0):
        visit.evaluate("(tab) => document.querySelectorAll('[role=tab]')[tab].click()", tab)
        visit.settle()
        most = max(most, visit.probe("nodes"))
    for key in (*STEPS, "e", "Escape", "?", "Escape", "/", "Escape"):
        visit.press(key)
        most = max(most, visit.probe("nodes"))
    visit.evaluate("__regard.drawn()")
    visit.check()
    assert visit.requests == [path.as_uri()]
    return visit, most
