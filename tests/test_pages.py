"""The explorer's page: its numbers against dense float64 weights, its size, and that it is safe to open."""

import base64
import html
import itertools
import json
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from regard import attend, inspection, masks, scores
from regard.inspection import pages, payload, thumbnails
from regard.inspection.budgets import Plan, degrade
from regard.inspection.codes import unpack
from regard.inspection.shell import Shell
from regard.inspection.tokens import Tokens
from regard.positions import Rotary, YaRN

EXPLORER = Path(__file__).parents[1] / "src" / "regard" / "inspection" / "explorer"
NODE = shutil.which("node")
HALF = 2 ** (12 / 254) * (1 + 1e-5)  # half a step of log8, and float32
BARE = Shell(
    '<title><!--TITLE--></title><script id="regard-document"><!--DOCUMENT--></script>\n<!--CHUNKS-->',
    "",
    "",
    "",
)


@pytest.fixture
def bare(monkeypatch):
    """Pages of data alone."""
    monkeypatch.setattr(pages, "load_shell", lambda: BARE)


@pytest.fixture
def long(monkeypatch, bare):
    """Short calls are treated as if they were long."""
    monkeypatch.setattr(payload, "LARGEST_EXACT", -1)


def watch(T, S=None, heads=3, groups=None, width=5, seed=0, tokens=None, title="a trace", **options):
    """A trace of one call, and its weights (H, T, S) in float64 by the definition."""
    S = T if S is None else S
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(heads, T, width)).astype(np.float32)
    key = rng.normal(size=(groups or heads, S, width)).astype(np.float32)
    change = options.pop("change", lambda scores, distance: scores)
    with inspection.capture(title=title, tokens=tokens) as trace:
        attend(query[None], key[None], key[None], **{"scale": 1.5, **options})
    offset = options.get("query_offset") or 0
    distance = np.arange(T)[:, None] + offset - np.arange(S)
    keys = np.repeat(key, heads // len(key), 0).astype(np.float64)
    s = change(1.5 * np.einsum("htd,hsd->hts", query.astype(np.float64), keys), distance)
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


def slopes(heads):
    return (2.0 ** -np.arange(1, heads + 1))[:, None, None]


def cases():
    window = masks.causal() & masks.sliding_window(17)
    documents = jnp.asarray(np.repeat(np.arange(7), 19)[:131])
    # Rows 40 and up have no key left.
    fading = masks.predicate(_fading)
    return {
        "causal": {"T": 131, "mask": masks.causal()},
        "window": {"T": 137, "mask": window},
        "segments": {"T": 131, "mask": masks.causal() & masks.segments(documents)},
        "alibi": {
            "T": 127,
            "score": scores.alibi(slopes=2.0 ** -jnp.arange(1, 4, dtype=jnp.float32)),
            "change": lambda s, distance: s - slopes(3) * np.abs(distance),
        },
        "softcap": {"T": 67, "score": scores.softcap(2.0), "change": lambda s, _: 2 * np.tanh(s / 2)},
        "sinks": {"T": 73, "mask": masks.causal(), "sinks": jnp.asarray([3.0, 0.0, 5.0], jnp.float32)},
        "grouped": {"T": 71, "heads": 6, "groups": 2, "mask": masks.causal()},
        "cross": {"T": 67, "S": 149, "mask": masks.causal(), "query_offset": 31},
        "bias": {"T": 61, "S": 59, "bias": np.linspace(-2, 2, 61 * 59, dtype=np.float32).reshape(61, 59)}
        | {"query_offset": 0},
        "empty rows": {"T": 83, "mask": fading},
        "none": {"T": 0, "S": 3, "query_offset": 0},
        "no keys": {"T": 3, "S": 0, "query_offset": 0},
        "one": {"T": 1},
        "two": {"T": 2, "mask": masks.causal(), "heads": 1},
    }


def _fading(query, key):
    return (query < 40) & (key <= query)


@pytest.fixture(params=list(cases()), scope="module")
def case(request):
    """A trace and the truth of it."""
    return watch(**cases()[request.param])


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


def in_blocks(p, alive, up, across):
    """Mass and maximum of blocks of one head, and their living rows."""
    rows = np.arange(0, len(p), up)
    living = np.array([alive[r : r + up].sum() for r in rows], int)
    columns = range(0, p.shape[1], across)
    sums = [[p[r : r + up, c : c + across].sum() for c in columns] for r in rows]
    most = [[p[r : r + up, c : c + across].max() for c in columns] for r in rows]
    shape = (len(rows), len(columns))
    sums, most = (np.asarray(x, np.float64).reshape(shape) for x in (sums, most))
    return sums / np.maximum(living, 1)[:, None], most, living


def near_code(found, truth, slack=2e-6):
    """Equal within half a step of log8; what is smaller than its least number is that one."""
    assert found.shape == truth.shape
    large = truth >= 2.0**-24 + slack
    ratio = found[large] / truth[large]
    error = HALF * (1 + slack / truth[large])
    assert np.all(ratio <= error)
    assert np.all(ratio >= 1 / error)
    assert np.all(found[~large] <= 2.0**-24 + 2 * slack)


def check_levels(head, chunks, p, alive):
    for level in head["levels"]:
        mass, most, living = in_blocks(p, alive, level["query_block"], level["key_block"])
        near_code(chunks[level["mass"]], mass)
        if level["max"] is not None:
            near_code(chunks[level["max"]], most)
        assert np.array_equal(chunks[level["rows"]], living)


def check_profiles(call, head, chunks, p, distance, alive):
    T, S = p.shape
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(p > 0, p * np.log(p), 0).sum(-1)
    sunk = np.where(alive, 1 - p.sum(-1), 0)
    if call["sinks"]:
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy -= np.where(sunk > 1e-12, sunk * np.log(sunk), 0)
    first = p[:, :4].sum(-1)
    near = np.where(np.abs(distance) < 16, p, 0).sum(-1)
    away = (p * distance).sum(-1) / np.maximum(p.sum(-1), 1e-30)
    rows = [entropy, p.max(-1, initial=0), first, near, away, sunk]
    assert call["row_stats"] == ["entropy", "max_weight", "first_mass", "local_mass", "distance", "sink_mass"]
    bin = head["row_bin"]
    starts = range(0, T, bin)
    kept = chunks[head["row_stats"]]
    assert kept.shape == (6, len(starts))
    for found, row in zip(kept.astype(np.float64), rows, strict=True):
        truth = [row[s : s + bin][alive[s : s + bin]] for s in starts]
        truth = np.array([part.mean() if part.size else np.nan for part in truth])
        assert np.array_equal(np.isnan(found), np.isnan(truth))
        if np.isfinite(truth).any():
            span = np.nanmax(truth) - np.nanmin(truth)
            size = np.nanmax(np.abs(truth))
            assert np.nanmax(np.abs(found - truth)) <= span / 508 + 1e-3 * size + 1e-5
    per_key = p[alive].sum(0) / max(alive.sum(), 1)
    binned = [per_key[s : s + head["key_bin"]].sum() for s in range(0, S, head["key_bin"])]
    near_code(chunks[head["key_mass"]], np.asarray(binned, np.float64).reshape(-1))
    if T:
        last = [p[-1, s : s + head["last_row_bin"]].max() for s in range(0, S, head["last_row_bin"])]
        near_code(chunks[head["last_row"]], np.asarray(last, np.float64).reshape(-1))
    else:
        assert head["last_row"] is None
    far = chunks[head["distance_mass"]].astype(np.float64)
    sign = np.sign(distance) * (np.floor(np.log2(np.maximum(np.abs(distance), 0.5))) + 1)
    for place in range(63):
        truth = np.where(sign == place - 31, p, 0)[alive].sum() / max(alive.sum(), 1)
        assert far[place] == pytest.approx(truth, rel=2e-3, abs=1e-6)


def test_short_calls_are_carried_weight_by_weight(case, bare):
    trace, weights, distance, keep = case
    document, chunks = opened(pages.html(trace))
    call = document["traces"][0]["calls"][0]
    assert document["exact"] == "embedded"
    assert (call["heads"], call["rows"], call["keys"]) == weights.shape
    for head, p, k in zip(call["head"], weights, np.broadcast_to(keep, weights.shape), strict=True):
        found = chunks[head["weights"]]
        assert document["chunks"][head["weights"]]["dtype"] == "f16"
        assert np.all(np.abs(found - p) <= p * 2.0**-11 + 2e-6)
        assert head["top_keys"] is None
        check_levels(head, chunks, p, k.any(-1))
        check_profiles(call, head, chunks, p, distance, k.any(-1))


def test_of_long_calls_blocks_and_profiles_are_carried(case, long):
    trace, weights, distance, keep = case
    document, chunks = opened(pages.html(trace, pinned=[(0, 0)]))
    call = document["traces"][0]["calls"][0]
    assert document["exact"] == "none"
    for index, head in enumerate(call["head"]):
        p, alive = weights[index], np.broadcast_to(keep, weights.shape)[index].any(-1)
        assert head["weights"] is None
        assert len(head["levels"]) == (2 if index == 0 and max(p.shape) > 64 else 1)
        assert max(chunks[head["levels"][-1]["mass"]].shape) <= 64
        check_levels(head, chunks, p, alive)
        check_profiles(call, head, chunks, p, distance, alive)
        keys, values = chunks[head["top_keys"]], chunks[head["top_weights"]]
        held = np.take_along_axis(p, np.maximum(keys, 0), -1) if p.size else np.zeros(keys.shape)
        near_code(values, np.where(keys >= 0, held, 0))
        best = -np.sort(-p, -1)[:, : keys.shape[1]]
        near_code(values[:, : best.shape[1]], best)


def test_what_is_said_of_heads(case, bare):
    trace, weights, distance, keep = case
    document, _ = opened(pages.html(trace))
    call = document["traces"][0]["calls"][0]
    assert all(trust < 1e-4 for trust in call["trust"])
    for index, p in enumerate(weights):
        alive = np.broadcast_to(keep, weights.shape)[index].any(-1)

        def mean(row, alive=alive):
            return row[alive].mean() if alive.any() else 0.0

        truth = {
            "self": mean(np.where(distance == 0, p, 0).sum(-1)),
            "previous-token": mean(np.where(distance == 1, p, 0).sum(-1)),
            "first_mass": mean(p[:, :4].sum(-1)),
            "distance": mean((p * distance).sum(-1) / np.maximum(p.sum(-1), 1e-30)),
            "max_weight": mean(p.max(-1, initial=0)),
        }
        for name, value in truth.items():
            assert call["means"][name][index] == pytest.approx(value, rel=2e-5, abs=2e-5), name
        for label in call["labels"][index]:
            assert label["value"] >= label["threshold"]
        held = -np.sort(-p[alive], -1)
        cover = (np.cumsum(held, -1) < 0.9 * held.sum(-1, keepdims=True) - 1e-6).sum(-1) + 1
        if alive.any():
            assert call["means"]["coverage90"][index] == pytest.approx(cover.mean(), abs=0.05)
        else:
            assert call["means"]["max_score"][index] is None


def test_coverage_is_said_where_the_list_tells_it(long):
    trace, weights, *_ = watch(5, mask=masks.causal())
    document, _ = opened(pages.html(trace))
    held = -np.sort(-weights, -1)
    truth = (np.cumsum(held, -1) < 0.9 - 1e-6).sum(-1) + 1
    assert document["traces"][0]["calls"][0]["means"]["coverage90"] == pytest.approx(truth.mean(-1), abs=1e-5)
    wide, *_ = watch(67, scale=0.0)
    assert "coverage90" not in opened(pages.html(wide))[0]["traces"][0]["calls"][0]["means"]


def test_the_mask_is_drawn(bare):
    ids = jnp.asarray(np.repeat(np.arange(3), [5, 7, 11]))
    mask = masks.causal() & masks.sliding_window(9) & masks.segments(ids)
    document, chunks = opened(pages.html(watch(23, mask=mask)[0]))
    call = document["traces"][0]["calls"][0]
    dense = np.asarray(mask.dense(23))
    assert np.array_equal(chunks[call["mask_picture"]], np.where(dense, 2, 0))
    assert (call["tile_rows"], call["borders"], call["window"]) == (1, [5, 12], [9, 0])
    assert "sliding_window(9" in call["mask"]
    long = opened(pages.html(watch(521, heads=1, mask=masks.causal())[0]))
    call = long[0]["traces"][0]["calls"][0]
    tiles = long[1][call["mask_picture"]]
    assert (call["tile_rows"], tiles.shape, call["window"], call["borders"]) == (4, (131, 131), None, None)
    assert np.array_equal(
        tiles, np.tril(np.full((131, 131), 2)) - np.eye(131, dtype=int) * np.r_[[1] * 130, 0]
    )
    none = opened(pages.html(watch(7)[0]))[0]["traces"][0]["calls"][0]
    assert (none["mask"], none["mask_picture"], none["window"]) == (None, None, None)


def test_positions_are_drawn(bare):
    trace, *_ = watch(11, score=scores.alibi(3), mask=masks.causal())
    turn = Rotary(base=100.0, width=4, scaling=YaRN(4.0, 2048))
    object.__setattr__(trace.calls[0], "positions", {"rotary": turn})
    table = np.random.default_rng(0).normal(size=(13, 7))
    table[5] = 0
    document, chunks = opened(pages.html(trace, positions={"mine": table}))
    rotary, bias, drawn, split = document["positions"]
    assert [place["kind"] for place in document["positions"]] == ["rotary", "bias", "table", "split"]

    vector = jnp.ones((4097, 5), jnp.float32)
    turned = np.asarray(turn(vector), np.float64)
    kernel = chunks[rotary["kernel"]]
    assert rotary["trained_length"] == 2048
    # Every pair of features has the same share of a vector of ones: q . k / |q|^2.
    truth = (turned[rotary["distances"]] @ turned[0]) / 5
    assert np.allclose(kernel, truth, atol=1e-4)
    assert bias["distances"] == list(range(11))
    slope = 2.0 ** -np.array([4.0, 8.0, 2.0])  # of three heads
    assert np.allclose(chunks[bias["values"]], -np.arange(11) * slope[:, None])
    unit = table / np.where(np.arange(13) == 5, np.nan, np.linalg.norm(table, axis=-1))[:, None]
    assert np.allclose(chunks[drawn["similarity"]], unit @ unit.T, atol=2 / 500, equal_nan=True)
    assert np.allclose(chunks[drawn["norms"]], np.linalg.norm(table, axis=-1))
    parts = {name: chunks[split[name]].astype(np.float64) for name in ("content", "bias", "both")}
    distance = np.subtract.outer(np.arange(11), np.arange(11))
    assert np.array_equal(np.isnan(parts["bias"]), distance < 0)
    added = np.where(distance < 0, np.nan, -slope[split["head"]] * distance)
    assert np.allclose(parts["bias"], added, atol=3e-3, equal_nan=True)
    assert np.allclose(parts["content"] + parts["bias"], parts["both"], atol=2e-2, equal_nan=True)


def test_training_is_drawn(bare):
    trace, *_ = watch(3)
    training = {
        "title": "run",
        "curves": [
            {"name": "loss", "unit": "nats", "points": [[1, 2, 5], [3.0, 2.0, 0.5]], "split": "train"}
        ],
        "maps": [{"name": "entropy", "rows": ["a", "b"], "steps": [1, 2, 3], "values": np.ones((2, 3))}],
    }
    document, chunks = opened(pages.html(trace, training=training))
    curve, chart = document["training"]["curves"][0], document["training"]["maps"][0]
    assert np.array_equal(chunks[curve["points"]], np.float32([[1, 2, 5], [3.0, 2.0, 0.5]]))
    assert np.array_equal(chunks[chart["values"]], np.ones((2, 3)))
    assert (curve["split"], chart["unit"], chart["steps"]) == ("train", None, [1, 2, 3])
    wrong = {"maps": [{**training["maps"][0], "values": np.ones((3, 2))}]}
    with pytest.raises(ValueError, match=r"expected the values of 'entropy' as .*\(2, 3\), got \(3, 2\)"):
        pages.html(trace, training=wrong)


def test_two_traces_are_laid_side_by_side(bare):
    letters = list("abcdefg")
    a, b = (watch(7, seed=seed, title=title, tokens=letters)[0] for seed, title in ((0, "A"), (1, "B")))
    document, chunks = opened(pages.html(a, compare=b))
    assert [trace["title"] for trace in document["traces"]] == ["A", "B"]
    assert document["title"] == "A"
    names = {trace["sequences"][0]["tokens"] for trace in document["traces"]}
    assert [chunks[name] for name in names] == [letters]  # kept once


def test_the_same_trace_makes_the_same_bytes(bare):
    first, second = (pages.html(watch(37, mask=masks.causal())[0]) for _ in range(2))
    assert first == second


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "\u2028\u2029",
    "\0",
    "\ud800",
    "x" * 10_000,
    "&lt;",
    '"',
    "]]>",
]


def test_hostile_texts_stay_texts(bare):
    tokens = Tokens(HOSTILE)
    trace, *_ = watch(
        len(HOSTILE), tokens=tokens, title="</script><img src=x onerror=alert(1)>\u2028\ud800\0"
    )
    page = pages.html(trace)
    data = page.split("</title>")[1]
    assert data.count("</script") == data.count("<script")
    assert "<img" not in page
    assert "\0" not in page
    assert page.isascii() or not re.search("[\u2028\u2029]", data)
    document, chunks = opened(page)
    assert chunks[document["traces"][0]["sequences"][0]["tokens"]] == HOSTILE
    assert document["title"] == trace.title
    assert "&lt;/script&gt;" in page.split("</title>")[0]


def test_pictures_of_patches_are_kept_small(bare):
    picture = np.zeros((1030, 7, 3), np.uint8)
    picture[:3, :3] = 90
    tokens = Tokens(
        [str(i) for i in range(7)], kind="patches", patch_grid=(2, 3), first_patch=1, picture=picture
    )
    document, chunks = opened(pages.html(watch(7, tokens=tokens)[0]))
    sequence = document["traces"][0]["sequences"][0]
    shown = chunks[sequence["picture"]]
    assert (sequence["kind"], sequence["patch_grid"], sequence["first_patch"]) == ("patches", [2, 3], 1)
    assert shown.shape == (344, 3, 3)
    assert shown[0, 0, 0] == 90
    assert not shown[1:].any()
    assert "A picture of 7 x 1030 pixels is shown in 3 x 344." in document["notes"]
    halves = np.full((5, 3), 0.5, np.float32)
    tokens = Tokens(["a"], kind="patches", patch_grid=(1, 1), picture=halves)
    document, chunks = opened(pages.html(watch(1, tokens=tokens)[0]))
    assert np.all(chunks[document["traces"][0]["sequences"][0]["picture"]] == 128)


def test_what_is_not_a_number_is_said(bare):
    query = np.full((1, 1, 3, 5), np.nan, np.float32)
    with inspection.capture() as trace:
        attend(query, query, query)
    document, chunks = opened(pages.html(trace))
    call = document["traces"][0]["calls"][0]
    assert call["trust"] == [None]
    assert "attention 0: some weights are not numbers; they are drawn as 0." in document["notes"]
    assert not chunks[call["head"][0]["levels"][0]["mass"]].any()


def test_plans_degrade_in_a_fixed_order():
    steps = list(degrade(Plan(pinned=8)))
    changed = [
        next(name for name in vars(after) if getattr(after, name) != getattr(before, name))
        for before, (after, _) in zip([Plan(pinned=8), *(plan for plan, _ in steps)], steps, strict=False)
    ]
    assert changed == ["top_k", "bins", "atlas", "largest", "exact", *["pinned"] * 4]
    assert steps[-1][0] == Plan(pinned=0, exact=False, top_k=False, bins=128, atlas=32, largest=False)


def test_a_page_that_would_be_too_large_leaves_things_out_and_says_so(long):
    trace, *_ = watch(701, heads=5, mask=masks.causal())
    whole = pages.html(trace)
    assert opened(whole)[0]["notes"] == []
    seen, size = [], len(whole)
    while True:
        try:
            page = pages.html(trace, max_mb=(size - 1) / 1e6)
        except ValueError as error:
            least = float(re.search(r"max_mb: expected at least ([\d.]+) for", str(error))[1])
            break
        assert len(page) < size
        size = len(page)
        document, chunks = opened(page)
        seen.append(document["notes"])
        heads = document["traces"][0]["calls"][0]["head"]
        assert sum(len(head["levels"]) == 2 for head in heads) == len(document["pinned"])
        atlas = chunks[heads[0]["levels"][-1]["mass"]]
        assert max(atlas.shape) <= (64 if len(document["notes"]) < 3 else 32)
    assert all(a == b[: len(a)] and len(a) < len(b) for a, b in itertools.pairwise(seen))
    words = [note.removeprefix("To keep the file small, ").split(" ")[1] for note in seen[-1]]
    assert words == ["8", "along", "atlas", "largest", "heads", "heads", "heads"]
    pages.html(trace, max_mb=least)
    with pytest.raises(ValueError, match="max_mb: expected more than 0"):
        pages.html(trace, max_mb=0)


def test_exact_weights_are_left_out_late(bare):
    trace, *_ = watch(131, heads=3)
    whole = pages.html(trace, pinned=1)
    document, _ = opened(pages.html(trace, pinned=1, max_mb=(len(whole) - 60_000) / 1e6))
    heads = document["traces"][0]["calls"][0]["head"]
    assert "weights one by one are there for pinned heads alone" in document["notes"][-1]
    assert [head["weights"] is not None for head in heads].count(True) == 1


def test_pinned_heads_are_the_clearest_or_those_asked_for(long):
    rng = np.random.default_rng(3)
    far = np.zeros((3, 67, 67), np.float32)
    far[1] = 30 * np.eye(67, k=-1)  # to the token before
    x = rng.normal(size=(1, 3, 67, 5)).astype(np.float32)
    with inspection.capture() as trace:
        attend(x, x, x, bias=jnp.asarray(far), mask=masks.causal())
    assert opened(pages.html(trace, pinned=1))[0]["pinned"] == [[0, 1]]
    assert opened(pages.html(trace, pinned=[(0, 2), (0, 2), (0, 0)]))[0]["pinned"] == [[0, 2], [0, 0]]
    assert opened(pages.html(trace, pinned=0))[0]["pinned"] == []
    with pytest.raises(ValueError, match=r"pinned: expected pairs .*got \(0, 3\)"):
        pages.html(trace, pinned=[(0, 3)])
    with pytest.raises(ValueError, match="pinned: expected a number of heads of at least 0"):
        pages.html(trace, pinned=-1)


def test_a_served_page_asks_its_server(bare):
    trace, *_ = watch(5)
    page = pages.html(trace, served=True)
    assert '"exact":"served"' in page
    assert "regard-chunks" not in page


def test_a_page_is_written_whole_or_not_at_all(bare, tmp_path, monkeypatch):
    trace, *_ = watch(5)
    target = tmp_path / "page.html"
    assert pages.write(trace, target) == target
    first = target.read_bytes()
    pages.write(watch(7)[0], str(target))
    assert target.read_bytes() != first
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    kept = target.read_bytes()
    monkeypatch.setattr(pages.os, "replace", _fail)
    with pytest.raises(OSError, match="the disk is full"):
        pages.write(trace, target)
    assert target.read_bytes() == kept
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def _fail(*_):
    raise OSError("the disk is full")


def test_other_files_are_not_replaced(bare, tmp_path):
    trace, *_ = watch(5)
    thesis = tmp_path / "thesis.html"
    thesis.write_text("<html>years of work</html>")
    with pytest.raises(FileExistsError, match="something else: name another file, or remove it first"):
        pages.write(trace, thesis)
    assert thesis.read_text() == "<html>years of work</html>"
    with pytest.raises(FileExistsError, match="the folder"):
        pages.write(trace, tmp_path)
    empty = tmp_path / "empty.html"
    empty.touch()
    pages.write(trace, empty)


def test_what_was_left_out_is_logged(long, tmp_path, caplog):
    trace, *_ = watch(131)
    pages.write(trace, tmp_path / "a.html", max_mb=len(pages.html(trace)) / 1e6 - 0.001)
    assert "a.html: To keep the file small, the 8 largest weights" in caplog.text


def test_notebooks_get_a_frame_a_picture_and_characters(bare):
    trace, *_ = watch(13, mask=masks.causal(), tokens=[*"abcdefghijkl", '"><script>'], title='a "title"')
    shown = pages.bundle(trace)
    frame = shown["text/html"]
    assert re.match(
        r'<iframe srcdoc="[^"]*" sandbox="allow-scripts allow-downloads" title="a &quot;title&quot;"', frame
    )
    page = html.unescape(re.search(r'srcdoc="([^"]*)"', frame)[1])
    assert opened(page)[0]["title"] == 'a "title"'
    assert base64.b64decode(shown["image/png"])[:8] == b"\x89PNG\r\n\x1a\n"
    lines = shown["text/plain"].split("\n")
    assert lines[2].startswith("|")
    assert "3 heads" in lines[0]
    # Causal: the first row attends to the first key alone, the darkest there is.
    assert all(one.startswith("█") and one.endswith(" ") for one in lines[2].strip("|").split("|  |"))
    small = pages.bundle(trace, max_mb=0.001)
    assert "too large to be shown here" in small["text/html"]
    assert set(small) == {"text/html", "image/png", "text/plain"}


def test_thumbnails_of_anything(bare):
    for T, S in ((0, 3), (3, 0), (1, 1), (131, 7)):
        trace, *_ = watch(T, S, query_offset=0)
        png = thumbnails.draw_png(trace)
        assert png.endswith(b"IEND\xaeB`\x82")
        assert thumbnails.draw_text(trace).count("\n") == 5
    width, height = np.frombuffer(png[16:24], ">u4")
    data = zlib.decompress(png[png.index(b"IDAT") + 4 : -16])
    pixels = np.frombuffer(data, np.uint8).reshape(height, 1 + 3 * width)
    assert not pixels[:, 0].any()
    shades = pixels[:, 1:].reshape(height, width, 3)
    assert len(np.unique(shades[6:30, 6:30].reshape(-1, 3), axis=0)) > 10


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize("name", ["cross", "empty rows", "sinks"])
@pytest.mark.parametrize("exact", [True, False])
def test_the_page_draws_what_is_true(name, exact, bare, tmp_path, monkeypatch):
    if not exact:
        monkeypatch.setattr(payload, "LARGEST_EXACT", -1)
    trace, weights, _, keep = watch(**cases()[name])
    data, _ = pages._make(trace, pinned=[(0, 1)])
    given = {"document": data.document, "chunks": {k: v.hex() for k, v in data.chunks.items()}}
    (tmp_path / "page.json").write_text(json.dumps(given))
    program = f"""
      import {{ Source }} from "{EXPLORER.as_uri()}/source.js";
      import {{ readFileSync }} from "node:fs";
      const {{ document, chunks }} = JSON.parse(readFileSync({json.dumps(str(tmp_path / "page.json"))}));
      const source = new Source(document, async (name) => Uint8Array.from(Buffer.from(chunks[name], "hex")));
      const out = [];
      for (const h of [0, 1]) for (const channel of ["mass", "max"]) {{
        for (const {{ queryBlock, keyBlock }} of source.levels(0, 0, h, channel)) {{
          const tile = await source.tile(0, 0, h, queryBlock, keyBlock, 0, 0, channel);
          const numbers = Array.from(tile, (x) => (x === x ? x : null));
          out.push({{ h, channel, queryBlock, keyBlock, tile: numbers }});
        }}
      }}
      console.log(JSON.stringify(out));
    """
    assert NODE is not None
    ran = subprocess.run(
        [NODE, "--input-type=module", "-e", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    drawn = json.loads(ran.stdout)
    sizes = {(one["h"], one["queryBlock"], one["keyBlock"]) for one in drawn}
    assert ((0, 1, 1) in sizes) == (exact or max(weights.shape[1:]) <= 64)
    assert (1, 1, 1) in sizes
    for one in drawn:
        p, alive = weights[one["h"]], np.broadcast_to(keep, weights.shape)[one["h"]].any(-1)
        mass, most, living = in_blocks(p, alive, one["queryBlock"], one["keyBlock"])
        truth = mass if one["channel"] == "mass" else most
        tile = np.array(one["tile"], np.float64).reshape(256, 256)
        height, width = truth.shape
        assert np.isnan(tile[height:]).all()
        assert np.isnan(tile[:, width:]).all()
        tile = tile[:height, :width]
        near_code(tile, truth)
        if one["channel"] == "mass" and name != "sinks":
            assert np.allclose(tile.sum(-1), living > 0, atol=0.035)


@pytest.mark.slow
def test_an_atlas_of_144_heads_is_2_megabytes_at_most():
    calls = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        place = np.arange(4096)[:, None] * 2.0 ** -np.arange(8)
        turns = np.concatenate([np.cos(place), np.sin(place)], -1)
        shift = rng.normal(size=(12, 1, 16)) * rng.choice([0.5, 2, 6], (12, 1, 16))
        query = (turns * shift + 0.5 * rng.normal(size=(12, 4096, 16))).astype(np.float32)
        key = (turns + 0.5 * rng.normal(size=(12, 4096, 16))).astype(np.float32)
        with inspection.capture(tokens=[f" token{i % 997}" for i in range(4096)]) as trace:
            attend(query[None], key[None], key[None][..., :1], mask=masks.causal())
        calls += trace.calls
    whole = inspection.Trace(tuple(calls))
    assert len(pages.html(whole, pinned=0)) <= 2_000_000
    assert len(pages.html(whole)) <= 5_000_000
