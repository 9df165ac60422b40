"""The page's numbers against dense float64 weights, and their bytes as Python and its script read them."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from javascript import WEB, run_node
from page_traces import decode_linear8, decode_log8, opened, unpack, watch
from regard import masks, readouts, scores
from regard.inspection.explorer import budgets, codes, pages

HALF = 2 ** (12 / 254)  # a factor of half a step of log8


FADING = masks.predicate(lambda query, key: (query < 40) & (key <= query))  # later rows have no key left
CAPPED = {"score": scores.softcap(2.0), "change": lambda s, _: 2 * np.tanh(s / 2)}
SINKS = np.array([3.0, 0.0, 5.0, -2.0, 1.0, -np.inf], np.float32)
CASES = {
    "everything": {"T": 73, "heads": 6, "groups": 2, "mask": FADING, "sinks": SINKS, **CAPPED},
    "cross": {"T": 67, "S": 149, "mask": masks.causal(), "query_offset": 31},
    "none": {"T": 0, "S": 3},
}


@functools.cache
def watch_case(name):
    return watch(**CASES[name])


def near_code(found, truth):
    """Equal within half a step of log8; what is smaller than its least number is that one."""
    np.testing.assert_allclose(found, truth, rtol=HALF - 1 + 1e-5, atol=2.0**-23)


def check_head(call, number, chunks, case):
    head, p, alive = call["head"][number], case.weights[number], case.alive[number]
    for level in head["levels"]:
        mass, most, living = case.level(number, level["query_block"], level["key_block"])
        near_code(chunks[level["mass"]], mass)
        if level["max"] is not None:
            near_code(chunks[level["max"]], most)
        assert np.array_equal(chunks[level["rows"]], living)
    stats = case.row_stats(number)
    assert call["row_stats"] == [*stats]
    assert {head[f"{name}_bin"] for name in ("row", "key", "last_row")} == {1}
    for found, truth in zip(chunks[head["row_stats"]].astype(np.float64), stats.values(), strict=True):
        known = truth[alive]
        error = np.ptp(known) / 508 + 1e-3 * np.abs(known).max() + 1e-5 if alive.any() else 0
        np.testing.assert_allclose(found, truth, rtol=0, atol=error)
    near_code(chunks[head["key_mass"]], p[alive].sum(0) / max(alive.sum(), 1))
    if len(p):
        near_code(chunks[head["last_row"]], p[-1])
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


@pytest.mark.slow
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
        assert call["trust"][number] < 1e-4
        assert call["means"]["largest_weight"][number] == pytest.approx(p.max(initial=0), rel=2e-5)
        assert (call["means"]["max_score"][number] is None) == (not case.alive[number].any())
        for label in call["labels"][number]:
            assert label["value"] >= label["threshold"] >= label["chance"]
            assert label["rows"] > 0
    for name, means in readouts.average(trace[0].readout()).items():
        np.testing.assert_allclose(call["means"][name], means, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_products_of_queries_and_keys_add_up_to_the_scores(bare, monkeypatch):
    trace, case = watch_case("everything")
    wanted = 1.5 * case.query.astype(np.float64) @ np.repeat(case.key, 3, 0).swapaxes(-1, -2)
    one = 2 * 73 * 5
    for largest, pinned, carried in ((6 * one, 8, range(6)), (one, [(0, 4)], [4]), (one - 1, [(0, 4)], [])):
        monkeypatch.setattr(budgets, "LARGEST_FEATURES", largest)
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
    monkeypatch.setattr(budgets, "LARGEST_EXACT", -1)
    call = opened(pages.html(trace))[0]["traces"][0]["calls"][0]
    assert "largest_addition" not in call["means"]
    assert not any("value_norms" in head for head in call["head"])


def test_log8_comes_back_within_half_a_step():
    values = 2.0 ** np.random.default_rng(0).uniform(-24, 0, 4999)
    ratio = decode_log8(codes.encode_log8(values)) / values
    assert ratio.max() <= HALF * (1 + 1e-12)
    assert ratio.min() >= (1 - 1e-12) / HALF
    # The bound is reached: a coarser code would not pass, and this one is no finer than it says.
    assert ratio.max() > 1.03
    table = decode_log8(np.arange(256, dtype=np.uint8))
    assert np.array_equal(codes.encode_log8(table), np.arange(256))
    assert table[[0, 1, 255]].tolist() == [0, 2.0**-24, 1]
    edges = [0.0, -0.0, -1.0, np.nan, 5e-324, 2.0**-24, 2.0**-25, 1.0, 1.0 + 1e-6, np.inf]
    assert codes.encode_log8(edges).tolist() == [0, 0, 0, 0, 1, 1, 1, 255, 255, 255]


def test_linear8_comes_back_within_half_a_step():
    values = np.random.default_rng(1).normal(size=(7, 331)) * 10.0 ** np.arange(-3, 4)[:, None]
    low, high = values.min(-1, keepdims=True), values.max(-1, keepdims=True)
    back = decode_linear8(codes.encode_linear8(values, low, high), low, high)
    assert np.all(np.abs(back - values) <= (high - low) / 508 * (1 + 1e-9))
    assert np.all(np.abs(back - values).max(-1) > (high - low)[:, 0] / 600)
    assert np.array_equal(codes.encode_linear8([np.nan, -np.inf, np.inf, 9.0], 0.0, 1.0), [0, 1, 255, 255])
    constant = codes.encode_linear8([4.25, np.nan], 4.25, 4.25)
    assert np.array_equal(decode_linear8(constant, 4.25, 4.25), [4.25, np.nan], equal_nan=True)


def arrays():
    rng = np.random.default_rng(2)
    smooth = np.tril(0.5 ** np.abs(np.subtract.outer(np.arange(61), np.arange(61))))
    holes = np.where(rng.random((3, 47)) < 0.3, np.nan, rng.normal(size=(3, 47)) * [[1], [100], [0]])
    return {
        "log8": [smooth, rng.random((5, 7)), np.zeros((0, 3)), np.zeros((3, 0)), np.zeros(0), np.ones(1)],
        "linear8": [holes, np.full((2, 5), np.nan), np.zeros((6, 0)), np.arange(11.0), np.zeros((0, 0))],
        "u8": [np.arange(256).reshape(16, 16), np.zeros((0, 2), int), np.array([255, 0, 255])],
        "u16": [np.array([[0, 65535, 1]])],
        "i32": [np.array([[-1, 2**31 - 1, -(2**31)]]), np.zeros((0, 8), int), np.arange(999)],
        "f16": [np.array([0.1, 2.0**-24, 65504, np.nan, np.inf, -0.5]), np.zeros(0)],
        "f32": [rng.normal(size=(3, 5)), np.array([np.nan, -np.inf, 1e-45, 3e38])],
    }


PACKED = [(code, array) for code, made in arrays().items() for array in made]


def coded(code, array):
    """What a code, whose steps are tested above, makes of an array."""
    if code == "log8":
        return decode_log8(codes.encode_log8(array))
    if code == "linear8":
        ends = (end(array, -1, keepdims=True).astype(np.float32) for end in (np.nanmin, np.nanmax))
        low, high = map(np.nan_to_num, ends)
        return decode_linear8(codes.encode_linear8(array, low, high), low, high)
    return array.astype({"f16": np.float16, "f32": np.float32}.get(code, np.int64))


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_what_is_packed_is_unpacked():
    for code, array in PACKED:
        entry, data = codes.pack(array, code)
        if code != "linear8" or array.size:
            np.testing.assert_allclose(unpack(entry, data), coded(code, array), rtol=1e-5, atol=1e-5)
        assert codes.pack(array, code) == (entry, data)
        json.dumps(entry, allow_nan=False)
    with pytest.raises(ValueError, match=r"code: expected one of log8, linear8, json, u8.*got 'f64'"):
        codes.pack([1.0], "f64")


TEXTS = ["</script>", "\u2028", "\0", "\ud800", "x" * 10_000, "naïve 👩‍👩‍👧", ""]


def test_the_page_reads_what_is_packed(tmp_path):
    made = [codes.pack(array, code) for code, array in PACKED]
    made.append(codes.pack(TEXTS, "json"))
    given = tmp_path / "chunks.json"
    given.write_text(json.dumps([{"entry": entry, "hex": data.hex()} for entry, data in made]))
    program = f"""
      import {{ decodeChunk }} from "{WEB.as_uri()}/codes.js";
      import {{ readFileSync }} from "node:fs";
      const out = [];
      for (const one of JSON.parse(readFileSync({json.dumps(str(given))}))) {{
        const found = await decodeChunk(one.entry, Uint8Array.from(Buffer.from(one.hex, "hex")));
        out.push(found.shape ? {{ shape: found.shape, values: Array.from(found.values, String) }} : found);
      }}
      console.log(JSON.stringify(out));
    """
    *found, texts = json.loads(run_node("--input-type=module", "-e", program))
    assert texts == TEXTS == unpack(*made[-1])
    for (entry, data), one in zip(made, found, strict=False):
        expected = unpack(entry, data)
        got = np.array([float(value.replace("Infinity", "inf")) for value in one["values"]])
        assert list(expected.shape) == one["shape"]
        assert np.allclose(got, expected.ravel().astype(np.float64), rtol=1e-6, atol=0, equal_nan=True)
