"""The page's numbers, as Python and the page's script read them, against dense float64 weights."""

import dataclasses
import functools
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from javascript import NODE
from page_traces import opened, watch
from regard import inspection, masks, scores
from regard.inspection.explorer import pages, payload, thumbnails

WEB = Path(__file__).parents[2] / "src" / "regard" / "inspection" / "explorer" / "web"
HALF = 2 ** (12 / 254) * (1 + 1e-5)  # half a step of log8, and float32
ROW_STATS = ["entropy", "max_weight", "first_mass", "local_mass", "distance", "sink_mass"]


def _fading(query, key):
    return (query < 40) & (key <= query)  # rows 40 and up have no key left


CAPPED = {"score": scores.softcap(2.0), "change": lambda s, _: 2 * np.tanh(s / 2)}
SINKS = np.array([3.0, 0.0, 5.0, -2.0, 1.0, -np.inf], np.float32)
CASES = {
    "everything": {"T": 73, "heads": 6, "groups": 2, "mask": masks.predicate(_fading), "sinks": SINKS}
    | CAPPED,
    "cross": {"T": 67, "S": 149, "mask": masks.causal(), "query_offset": 31},
    "none": {"T": 0, "S": 3},
}


@functools.cache
def watch_case(name):
    """A trace and the truth of it."""
    return watch(**CASES[name])


def near_code(found, truth, slack=2e-6):
    """Equal within half a step of log8; what is smaller than its least number is that one."""
    assert found.shape == truth.shape
    large = truth >= 2.0**-24 + slack
    ratio = found[large] / truth[large]
    error = HALF * (1 + slack / truth[large])
    assert np.all((ratio <= error) & (ratio >= 1 / error))
    assert np.all(found[~large] <= 2.0**-24 + 2 * slack)


def check_head(call, number, chunks, case):
    """Compare levels and profiles of a head with its weights."""
    head, p, alive = call["head"][number], case.weights[number], case.alive[number]
    for level in head["levels"]:
        mass, most, living = case.level(number, level["query_block"], level["key_block"])
        near_code(chunks[level["mass"]], mass)
        if level["max"] is not None:
            near_code(chunks[level["max"]], most)
        assert np.array_equal(chunks[level["rows"]], living)
    (T, S), size = p.shape, head["row_bin"]
    assert call["row_stats"] == ROW_STATS
    kept, stats = chunks[head["row_stats"]], case.row_stats(number)
    assert kept.shape == (6, -(-T // size))
    for found, name in zip(kept.astype(np.float64), ROW_STATS, strict=True):
        parts = [stats[name][s : s + size][alive[s : s + size]] for s in range(0, T, size)]
        truth = np.array([part.mean() if part.size else np.nan for part in parts])
        assert np.array_equal(np.isnan(found), np.isnan(truth))
        if np.isfinite(truth).any():
            span = np.nanmax(truth) - np.nanmin(truth)
            error = span / 508 + 1e-3 * np.nanmax(np.abs(truth)) + 1e-5
            assert np.nanmax(np.abs(found - truth)) <= error, name
    per_key = p[alive].sum(0) / max(alive.sum(), 1)
    near_code(chunks[head["key_mass"]], np.add.reduceat(per_key, np.arange(0, S, head["key_bin"])))
    if T:
        near_code(chunks[head["last_row"]], np.maximum.reduceat(p[-1], np.arange(0, S, head["last_row_bin"])))
    else:
        assert head["last_row"] is None
    far = chunks[head["distance_mass"]].astype(np.float64)
    sign = np.sign(case.distance) * (np.floor(np.log2(np.maximum(np.abs(case.distance), 0.5))) + 1)
    truth = [np.where(sign == place - 31, p, 0)[alive].sum() / max(alive.sum(), 1) for place in range(63)]
    np.testing.assert_allclose(far, truth, rtol=2e-3, atol=1e-6)


def test_short_calls_are_carried_weight_by_weight(bare):
    trace, case = watch_case("everything")
    document, chunks = opened(pages.html(trace))
    call = document["traces"][0]["calls"][0]
    assert document["exact"] == "embedded"
    assert (call["heads"], call["rows"], call["keys"]) == case.weights.shape
    for number, (head, p) in enumerate(zip(call["head"], case.weights, strict=True)):
        assert document["chunks"][head["weights"]]["dtype"] == "f16"
        assert np.all(np.abs(chunks[head["weights"]] - p) <= p * 2.0**-11 + 2e-6)
        assert head["top_keys"] is None
        check_head(call, number, chunks, case)


@pytest.mark.parametrize("name", CASES)
def test_of_long_calls_blocks_and_profiles_are_carried(name, long):
    trace, case = watch_case(name)
    document, chunks = opened(pages.html(trace, pinned=[(0, 0)]))
    call = document["traces"][0]["calls"][0]
    assert document["exact"] == "none"
    for number, (head, p) in enumerate(zip(call["head"], case.weights, strict=True)):
        assert head["weights"] is None
        assert len(head["levels"]) == (2 if number == 0 and max(p.shape) > 64 else 1)
        assert max(chunks[head["levels"][-1]["mass"]].shape) <= 64
        check_head(call, number, chunks, case)
        keys, values = chunks[head["top_keys"]], chunks[head["top_weights"]]
        held = np.take_along_axis(p, np.maximum(keys, 0), -1) if p.size else np.zeros(keys.shape)
        near_code(values, np.where(keys >= 0, held, 0))
        best = -np.sort(-p, -1)[:, : keys.shape[1]]
        near_code(values[:, : best.shape[1]], best)
        check_said(call, number, case)


def check_said(call, number, case):
    """Compare means and labels of a head with its weights."""
    assert call["trust"][number] < 1e-4
    p, kept, alive, stats = (
        case.weights[number],
        case.keep[number],
        case.alive[number],
        case.row_stats(number),
    )
    mean = lambda rows, chosen=alive: rows[chosen].mean() if chosen.any() else 0.0

    def mean_over_choices(cells):
        matching = (cells & kept).sum(-1)
        chosen = (matching > 0) & (matching < kept.sum(-1) + (p.sum(-1) < 1 - 1e-12))
        return mean(np.where(cells, p, 0).sum(-1), chosen)

    truth = {name: mean(stats[name]) for name in ("first_mass", "distance", "max_weight")}
    truth |= {"self": mean_over_choices(case.distance == 0), "largest_weight": p.max(initial=0)}
    truth["previous-token"] = mean_over_choices(case.distance == 1)
    for name, value in truth.items():
        assert call["means"][name][number] == pytest.approx(value, rel=2e-5, abs=2e-5), name
    for label in call["labels"][number]:
        assert label["value"] >= label["threshold"] >= label["chance"]
        assert label["rows"] > 0
    if not alive.any():
        assert call["means"]["max_score"][number] is None


def test_a_trace_of_few_blocks_and_few_top_keys_is_explored(bare, tmp_path):
    """A file may hold less than a page would carry: the page has what there is."""
    trace, case = watch_case("cross")
    trace = inspection.load(trace.save(tmp_path / "one.regard", grid=5, top_k=3))
    document, chunks = opened(pages.html(trace))
    for head, p in zip(document["traces"][0]["calls"][0]["head"], case.weights, strict=True):
        (level,) = head["levels"]
        assert (level["query_block"], level["key_block"]) == (16, 32)
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


def test_coverage_is_said_where_the_list_tells_it(long):
    for scale in (9.0, 0.0):
        trace, case = watch(11, mask=masks.causal(), scale=scale)
        means = opened(pages.html(trace))[0]["traces"][0]["calls"][0]["means"]
        if scale == 0:  # of eleven equal weights, eight are listed
            assert "coverage90" not in means
            continue
        truth = (np.cumsum(-np.sort(-case.weights, -1), -1) < 0.9 - 1e-6).sum(-1) + 1
        assert means["coverage90"] == pytest.approx(truth.mean(-1), abs=1e-5)


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize(("name", "exact"), [("cross", False), ("everything", True)])
def test_the_page_draws_what_is_true(name, exact, bare, tmp_path, monkeypatch):
    if not exact:
        monkeypatch.setattr(payload, "LARGEST_EXACT", -1)
    trace, case = watch_case(name)
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
    run = [NODE, "--input-type=module", "-e", program]
    ran = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    drawn = json.loads(ran.stdout)
    sizes = {(one["h"], one["queryBlock"], one["keyBlock"]) for one in drawn}
    assert ((0, 1, 1) in sizes) == exact
    assert (1, 1, 1) in sizes
    for one in drawn:
        mass, most, living = case.level(one["h"], one["queryBlock"], one["keyBlock"])
        truth = mass if one["channel"] == "mass" else most
        tile = np.array(one["tile"], np.float64).reshape(256, 256)
        height, width = truth.shape
        assert np.isnan(tile[height:]).all()
        assert np.isnan(tile[:, width:]).all()
        near_code(tile[:height, :width], truth)
        if one["channel"] == "mass" and name == "cross":
            assert np.allclose(tile[:height, :width].sum(-1), living > 0, atol=0.035)


def test_products_of_queries_and_keys_add_up_to_the_scores(bare, monkeypatch):
    """All heads where they are few, else those pinned, else none; and grouped keys are kept once."""
    trace, case = watch_case("everything")
    wanted = 1.5 * case.query.astype(np.float64) @ np.repeat(case.key, 3, 0).swapaxes(-1, -2)
    one = 2 * 73 * 5
    for largest, pinned, carried in ((6 * one, 8, range(6)), (one, [(0, 4)], [4]), (one - 1, [(0, 4)], [])):
        monkeypatch.setattr(payload, "LARGEST_FEATURES", largest)
        document, chunks = opened(pages.html(trace, pinned=pinned))
        heads = document["traces"][0]["calls"][0]["head"]
        assert [number for number, head in enumerate(heads) if {"query", "key"} & {*head}] == [*carried]
        for number in carried:
            products = chunks[heads[number]["query"]] @ chunks[heads[number]["key"]].astype(np.float64).T
            assert np.abs(products - wanted[number]).max() < 2e-2
        assert len({heads[number]["key"] for number in carried}) == min(len(carried), 2)


def test_lengths_of_values_stand_beside_exact_weights_alone(bare, monkeypatch):
    trace, case = watch(11, mask=masks.causal())
    norms = np.random.default_rng(3).uniform(0.1, 9, (3, 11)).astype(np.float32)
    norms[1, 4], norms[2, 0] = np.nan, np.inf
    trace = dataclasses.replace(trace, calls=(dataclasses.replace(trace[0], value_norms=norms),))
    document, read = opened(pages.html(trace))
    call = document["traces"][0]["calls"][0]
    for head, wanted in enumerate(np.where(np.isfinite(norms), norms, np.nan)):
        np.testing.assert_array_equal(read[call["head"][head]["value_norms"]], wanted)
        largest = np.nanmax(case.weights[head] * wanted)
        assert call["means"]["largest_addition"][head] == pytest.approx(largest, rel=1e-5)
    monkeypatch.setattr(payload, "LARGEST_EXACT", -1)
    call = opened(pages.html(trace))[0]["traces"][0]["calls"][0]
    assert "largest_addition" not in call["means"]
    assert not any("value_norms" in head for head in call["head"])
