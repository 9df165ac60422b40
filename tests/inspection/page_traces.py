"""For tests of the explorer's page: calls with their weights in float64, and a reader of pages."""

import base64
import json
import re
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from regard import attend, inspection, masks
from regard.inspection.explorer import codes


@dataclass
class Case:
    query: np.ndarray  # (H, T, D)
    key: np.ndarray  # (K, S, D)
    weights: np.ndarray  # (H, T, S) float64; 0 in rows that may attend to nothing
    sunk: np.ndarray  # (H, T) what the sink holds
    keep: np.ndarray  # (H, T, S)
    options: dict[str, Any] = field(default_factory=dict)  # of `attend`

    @property
    def alive(self) -> np.ndarray:
        return self.keep.any(-1)

    @property
    def distance(self) -> np.ndarray:
        T, S = self.weights.shape[1:]
        return self.options.get("query_offset", 0) + np.arange(T)[:, None] - np.arange(S)

    def level(self, head: int, rows: int, keys: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Blocks of so many rows and keys: mean over living rows of sums, largest weight, living rows."""
        sides = zip(self.weights.shape[1:], (rows, keys), strict=True)
        starts, across = (np.arange(0, size, step) for size, step in sides)
        living = np.add.reduceat(self.alive[head].astype(int), starts)
        by_block = lambda join: join.reduceat(join.reduceat(self.weights[head], starts, 0), across, 1)
        mass, largest = by_block(np.add), by_block(np.maximum)
        return mass / np.maximum(living, 1)[:, None], largest, living

    def row_stats(self, head: int) -> dict[str, np.ndarray]:
        """Numbers per row, NaN where a row may attend to nothing."""
        weights, sunk, S = self.weights[head], self.sunk[head], self.weights.shape[-1]
        all_of_it = np.concatenate([weights, sunk[:, None]], -1)
        logs = np.log(np.where(all_of_it > 0, all_of_it, 1))
        held = np.where(weights.sum(-1) > 0, weights.sum(-1), 1)
        found = {
            "entropy": -(all_of_it * logs).sum(-1),
            "max_weight": weights.max(-1, initial=0),
            "first_mass": weights[:, : min(max(S // 32, 1), 4)].sum(-1),
            "local_mass": (weights * (np.abs(self.distance) < min(max(S // 8, 2), 16))).sum(-1),
            "distance": (weights * self.distance).sum(-1) / held,
            "sink_mass": sunk,
        }
        return {name: np.where(self.alive[head], values, np.nan) for name, values in found.items()}


def weigh(query, key, keep, scale=None, change=None, sinks=None, distance=None):
    """Weights and the sink's share, in float64: scale, then change, then the mask."""
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    key = np.repeat(np.where(np.isfinite(key), key, 0), len(query) // len(key), 0)
    scores = query @ key.swapaxes(-1, -2) * (1 / np.sqrt(query.shape[-1]) if scale is None else scale)
    scores = np.where(keep, scores if change is None else change(scores, distance), -np.inf)
    extra = np.full(len(query), -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    extra = np.broadcast_to(extra[:, None], scores.shape[:-1])
    peak = np.maximum(scores.max(-1, initial=-np.inf), extra)
    peak = np.where(np.isfinite(peak), peak, 0)
    shares, of_sink = np.exp(scores - peak[..., None]), np.exp(extra - peak)
    total = np.where(shares.sum(-1) + of_sink > 0, shares.sum(-1) + of_sink, 1)
    return shares / total[..., None], np.where(keep.any(-1), of_sink / total, 0)


def make_case(T, S=None, heads=3, groups=None, *, seed=0, spread=1.0, change=None, bad_keys=(), **options):
    """A call on random queries and keys; `change(scores, distance)` says what a score does."""
    S, random = T if S is None else S, np.random.default_rng(seed)
    query = spread * random.normal(size=(heads, T, 5)).astype(np.float32)
    key = random.normal(size=(groups or heads, S, 5)).astype(np.float32)
    if S != T:
        options.setdefault("query_offset", 0)
    mask, offset = options.get("mask"), options.get("query_offset", 0)
    keep = np.ones((T, S), bool) if mask is None else np.asarray(mask.dense(T, S, query_offset=offset))
    keep = np.broadcast_to(keep, (heads, T, S))
    for number, bad in enumerate(bad_keys):
        assert not keep[..., bad].any()
        key[:, bad] = (np.nan, np.inf, -np.inf)[number % 3]
    case = Case(query, key, np.zeros(keep.shape), keep[..., 0], keep, options)
    known = {"scale": options.get("scale"), "sinks": options.get("sinks"), "distance": case.distance}
    case.weights, case.sunk = weigh(query, key, keep, change=change, **known)
    return case


def trace_of(cases, tokens=None, title="a test"):
    with inspection.capture(tokens=tokens, title=title) as trace:
        for case in cases:
            attend(case.query[None], case.key[None], case.key[None], **case.options)
    return trace


def watch(T, S=None, tokens=None, title="a trace", scale=1.5, **options):
    case = make_case(T, S, scale=scale, **options)
    return trace_of([case], tokens, title), case


def small(**settings):
    """Eleven tokens: where any trace will do, one shape is compiled once."""
    return watch(11, **{"mask": masks.causal(), **settings})[0]


def many_heads(layers: int, heads: int, n: int):
    """So many layers of causal heads, all of one reading, each a little smaller than the last."""
    x = np.random.default_rng(9).standard_normal((1, heads, n, 5)).astype(np.float32)
    with inspection.capture(title="many heads") as trace:
        attend(x, x, x, mask=masks.causal())
    (call,), read = trace.calls, trace.calls[0].readout()

    def scale(layer):  # chunks that are the same would be kept once
        found = jax.tree.map(lambda a: a * np.float32(1 - layer / 97) if a.dtype == np.float32 else a, read)
        listed, made = np.asarray(read.top_keys), replace(call, name=f"layer {layer}", layer=layer)
        made._found[64, 8, None] = replace(found, top_keys=np.where(listed < 0, listed, (listed + layer) % n))
        return made

    return replace(trace, calls=tuple(map(scale, range(layers))))


def decode_log8(values):
    steps = 2.0 ** (codes.OCTAVES * (np.asarray(values, np.float64) - 255) / codes.STEPS)
    return np.where(np.asarray(values) == 0, 0.0, steps)


def decode_linear8(values, low, high):
    low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
    steps = (np.asarray(values, np.float64) - 1) / codes.STEPS
    return np.where(np.asarray(values) == 0, np.nan, low + np.maximum(high - low, 0) * steps)


def unpack(entry, data):
    """What a chunk of `codes.pack` holds, as codes.js reads it."""
    data = zlib.decompress(data) if entry.get("deflate") else data
    if entry["dtype"] == "json":
        return json.loads(data)
    dtypes = {"u8": "u1", "u16": "<u2", "i32": "<i4", "f16": "<f2", "f32": "<f4"}
    array = np.frombuffer(data, dtypes[entry["dtype"]]).reshape(entry["shape"])
    if entry.get("delta"):
        array = np.add.accumulate(array, axis=-1, dtype=np.uint8)
    if entry["code"] == "log8":
        return decode_log8(array)
    if entry["code"] == "linear8":
        return decode_linear8(array, *(np.asarray(entry[name])[..., None] for name in ("low", "high")))
    return array


def opened(page):
    """Document and decoded chunks of a page, as a browser reads them."""
    document = json.loads(re.search(r'id="regard-document">(.*?)</script>', page, re.S)[1])
    chunks = {}
    for block in re.findall(r'<script type="text/plain" class="regard-chunks">(.*?)</script>', page, re.S):
        for line in block.split("\n"):
            name, text = line.split(":")
            chunks[name] = unpack(document["chunks"][name], base64.b64decode(text, validate=True))
    assert set(chunks) == set(document["chunks"])
    return document, chunks
