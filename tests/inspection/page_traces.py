"""For tests of the explorer's page: traces, their weights in float64 by the definition, a reader of pages."""

import base64
import json
import re
import zlib

import numpy as np

from regard import attend, inspection, masks
from regard.inspection.explorer import codes
from regard.inspection.explorer.shell import Shell

BARE = Shell(
    '<title><!--TITLE--></title><script id="regard-document"><!--DOCUMENT--></script>\n<!--CHUNKS-->',
    "",
    "",
    "",
)


def small(**settings):
    """Eleven tokens: where any trace will do, one shape is compiled once."""
    return watch(11, **{"mask": masks.causal(), **settings})[0]


def watch(T, S=None, heads=3, groups=None, width=5, seed=0, tokens=None, title="a trace", **options):
    """A trace of one call, and its weights (H, T, S) in float64 by the definition."""
    S = T if S is None else S
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(heads, T, width)).astype(np.float32)
    key = rng.normal(size=(groups or heads, S, width)).astype(np.float32)
    change = options.pop("change", lambda scores, distance: scores)
    scale = options.pop("scale", 1.5)
    with inspection.capture(title=title, tokens=tokens) as trace:
        attend(query[None], key[None], key[None], scale=scale, **options)
    offset = options.get("query_offset") or 0
    distance = np.arange(T)[:, None] + offset - np.arange(S)
    keys = np.repeat(key, heads // len(key), 0).astype(np.float64)
    s = change(scale * np.einsum("htd,hsd->hts", query.astype(np.float64), keys), distance)
    if options.get("bias") is not None:
        s = s + np.asarray(options["bias"], np.float64)
    if options.get("mask") is not None:
        keep = np.asarray(options["mask"].dense(T, S, query_offset=offset))
        s = np.where(keep, s, -np.inf)
    sinks = np.full((heads, 1, 1), -np.inf)
    if options.get("sinks") is not None:
        sinks = np.asarray(options["sinks"], np.float64)[:, None, None]
    peak = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sinks)
    peak = np.where(peak == -np.inf, 0, peak)
    p = np.exp(s - peak)
    total = p.sum(-1, keepdims=True) + np.exp(sinks - peak)
    return trace, p / np.where(total == 0, 1, total), distance, s != -np.inf


def decode_log8(values):
    """What codes of `encode_log8` stand for."""
    steps = 2.0 ** (codes.OCTAVES * (np.asarray(values, np.float64) - 255) / codes.STEPS)
    return np.where(np.asarray(values) == 0, 0.0, steps)


def decode_linear8(values, low, high):
    """What codes of `encode_linear8` stand for."""
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
