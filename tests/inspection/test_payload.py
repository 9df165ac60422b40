"""The page's numbers, as Python and the page's script read them, against dense float64 weights."""

import dataclasses
import functools
import json
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from economy import mostly_slow
from javascript import NODE
from page_traces import BARE, opened, small, watch
from regard import inspection, masks, scores
from regard.inspection.explorer import pages, payload, thumbnails

WEB = Path(__file__).parents[2] / "src" / "regard" / "inspection" / "explorer" / "web"
HALF = 2 ** (12 / 254) * (1 + 1e-5)  # half a step of log8, and float32


@pytest.fixture
def bare(monkeypatch):
    """Pages of data alone."""
    monkeypatch.setattr(pages, "load_shell", lambda: BARE)


@pytest.fixture
def long(monkeypatch, bare):
    """Short calls are treated as if they were long."""
    monkeypatch.setattr(payload, "LARGEST_EXACT", -1)


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
        "softcap, sinks, groups": {
            "T": 73,
            "heads": 6,
            "groups": 2,
            "mask": masks.causal(),
            "score": scores.softcap(2.0),
            "change": lambda s, _: 2 * np.tanh(s / 2),
            "sinks": jnp.asarray([3.0, 0.0, 5.0, -2.0, 1.0, -np.inf], jnp.float32),
        },
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


@functools.cache
def watch_case(name):
    """A trace and the truth of it."""
    return watch(**cases()[name])


@pytest.fixture(
    params=mostly_slow(cases(), "empty rows", "none"),
    scope="module",
)
def case(request):
    return watch_case(request.param)


def in_blocks(p, alive, up, across):
    """Mass and maximum of blocks of one head, and their living rows."""
    rows, columns = (np.arange(0, size, step) for size, step in zip(p.shape, (up, across), strict=True))
    living = np.add.reduceat(alive.astype(int), rows)
    sums, most = (join.reduceat(join.reduceat(p, rows, 0), columns, 1) for join in (np.add, np.maximum))
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
    first = p[:, : min(max(p.shape[-1] // 32, 1), 4)].sum(-1)
    near = np.where(np.abs(distance) < min(max(p.shape[-1] // 8, 2), 16), p, 0).sum(-1)
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


@pytest.mark.slow
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


def test_a_trace_of_few_blocks_and_few_top_keys_is_explored(bare, tmp_path):
    """A file may hold less than a page would carry: the page has what there is."""
    trace, weights, _, keep = watch_case("cross")
    trace = inspection.load(trace.save(tmp_path / "one.regard", grid=5, top_k=3))
    document, chunks = opened(pages.html(trace))
    for head, p, k in zip(document["traces"][0]["calls"][0]["head"], weights, keep, strict=True):
        (level,) = head["levels"]
        assert (level["query_block"], level["key_block"]) == (16, 32)
        check_levels(head, chunks, p, k.any(-1))
        assert chunks[head["top_keys"]].shape == (67, 3)
        near_code(chunks[head["top_weights"]], -np.sort(-p, -1)[:, :3])
    assert thumbnails.draw_png(trace).startswith(b"\x89PNG")
    assert "not drawn" not in thumbnails.draw_text(trace)
    assert inspection.find_heads(trace, label="self") == []
    # It is saved again as it is.
    again = inspection.load(trace.save(tmp_path / "two.regard"))
    assert again[0].readout(5, 3).top_keys.shape == (3, 67, 3)
    with pytest.raises(ValueError, match="top_k: expected at most 3"):
        again[0].readout(5)


def test_what_is_said_of_heads_is_computed_from_their_weights(case, bare):
    trace, weights, distance, keep = case
    document, _ = opened(pages.html(trace))
    call = document["traces"][0]["calls"][0]
    assert all(trust < 1e-4 for trust in call["trust"])
    for index, p in enumerate(weights):
        alive = np.broadcast_to(keep, weights.shape)[index].any(-1)

        def mean(row, alive=alive):
            return row[alive].mean() if alive.any() else 0.0

        def mean_over_choices(cells, p=p, index=index):
            keep = np.broadcast_to(case[3], weights.shape)[index]
            matching = (cells & keep).sum(-1)
            return mean(
                np.where(cells, p, 0).sum(-1),
                (matching > 0) & (matching < keep.sum(-1) + (p.sum(-1) < 1 - 1e-12)),
            )

        truth = {
            "self": mean_over_choices(distance == 0),
            "previous-token": mean_over_choices(distance == 1),
            "first_mass": mean(p[:, : min(max(p.shape[-1] // 32, 1), 4)].sum(-1)),
            "distance": mean((p * distance).sum(-1) / np.maximum(p.sum(-1), 1e-30)),
            "max_weight": mean(p.max(-1, initial=0)),
            "largest_weight": p.max(initial=0),
        }
        for name, value in truth.items():
            assert call["means"][name][index] == pytest.approx(value, rel=2e-5, abs=2e-5), name
        for label in call["labels"][index]:
            assert label["value"] >= label["threshold"] >= label["chance"]
            assert label["rows"] > 0
        held = -np.sort(-p[alive], -1)
        cover = (np.cumsum(held, -1) < 0.9 * held.sum(-1, keepdims=True) - 1e-6).sum(-1) + 1
        if alive.any():
            assert call["means"]["coverage90"][index] == pytest.approx(cover.mean(), abs=0.05)
        else:
            assert call["means"]["max_score"][index] is None


@pytest.mark.slow
def test_coverage_is_said_where_the_list_tells_it(long):
    trace, weights, *_ = watch(11, mask=masks.causal(), scale=9.0)
    document, _ = opened(pages.html(trace))
    held = -np.sort(-weights, -1)
    truth = (np.cumsum(held, -1) < 0.9 - 1e-6).sum(-1) + 1
    assert document["traces"][0]["calls"][0]["means"]["coverage90"] == pytest.approx(truth.mean(-1), abs=1e-5)
    # Of eleven equal weights, eight are listed.
    means = opened(pages.html(small(scale=0.0)))[0]["traces"][0]["calls"][0]["means"]
    assert "coverage90" not in means


@pytest.mark.slow
@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize("name", ["cross", "empty rows", "softcap, sinks, groups"])
@pytest.mark.parametrize("exact", [True, False])
def test_the_page_draws_what_is_true(name, exact, bare, tmp_path, monkeypatch):
    if not exact:
        monkeypatch.setattr(payload, "LARGEST_EXACT", -1)
    trace, weights, _, keep = watch_case(name)
    data, _ = pages.fill_page(trace, pinned=[(0, 1)])
    given = {"document": data.document, "chunks": {k: v.hex() for k, v in data.chunks.items()}}
    (tmp_path / "page.json").write_text(json.dumps(given))
    program = f"""
      import {{ Source }} from "{WEB.as_uri()}/source.js";
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
        if one["channel"] == "mass" and "sinks" not in name:
            assert np.allclose(tile.sum(-1), living > 0, atol=0.035)


@pytest.mark.slow
@pytest.mark.parametrize("pinned", [8, 1])
def test_products_of_queries_and_keys_add_up_to_the_scores(bare, monkeypatch, pinned):
    """All heads where they are few, else those pinned, else none; and grouped keys are kept once."""
    trace, *_ = watch(11, heads=6, groups=2, mask=masks.causal())
    problem = trace.calls[0].problem
    assert problem is not None
    scores_ = np.einsum(
        "htd,hsd->hts",
        np.asarray(problem.query, np.float64) * problem.scale,
        np.repeat(np.asarray(problem.key, np.float64), 3, 0),
    )
    one = 2 * 11 * 5
    monkeypatch.setattr(payload, "LARGEST_FEATURES", 6 * one if pinned == 8 else one)
    document, chunks = opened(pages.html(trace, pinned=pinned if pinned == 8 else [(0, 4)]))
    heads = document["traces"][0]["calls"][0]["head"]
    assert [("query" in head, "key" in head) for head in heads] == [
        (pinned == 8 or number == 4,) * 2 for number in range(6)
    ]
    for number, head in enumerate(heads):
        if "query" in head:
            products = chunks[head["query"]][:, None] * chunks[head["key"]].astype(np.float64)
            assert np.abs(products.sum(-1) - scores_[number]).max() < 2e-2
    if pinned == 8:
        assert len({head["key"] for head in heads}) == 2
    monkeypatch.setattr(payload, "LARGEST_FEATURES", one - 1)
    document, _ = opened(pages.html(trace, pinned=[(0, 4)]))
    assert not any("query" in head for head in document["traces"][0]["calls"][0]["head"])


@pytest.mark.slow
def test_lengths_of_values_stand_beside_exact_weights(bare):
    trace, weights, *_ = watch(11, mask=masks.causal())
    norms = np.random.default_rng(3).uniform(0.1, 9, (3, 11)).astype(np.float32)
    norms[1, 4], norms[2, 0] = np.nan, np.inf
    trace = dataclasses.replace(trace, calls=(dataclasses.replace(trace[0], value_norms=norms),))
    document, read = opened(pages.html(trace))
    call = document["traces"][0]["calls"][0]
    for head, wanted in enumerate(np.where(np.isfinite(norms), norms, np.nan)):
        np.testing.assert_array_equal(read[call["head"][head]["value_norms"]], wanted)
        largest = np.nanmax(weights[head] * wanted)
        assert call["means"]["largest_addition"][head] == pytest.approx(largest, rel=1e-5)


def test_without_exact_weights_there_are_no_lengths_of_values(long):
    trace = small()
    norms = np.ones((3, 11), np.float32)
    trace = dataclasses.replace(trace, calls=(dataclasses.replace(trace[0], value_norms=norms),))
    call = opened(pages.html(trace))[0]["traces"][0]["calls"][0]
    assert "largest_addition" not in call["means"]
    assert not any("value_norms" in head for head in call["head"])
