"""Bytes of the explorer's page: every number comes back within half a step of its code."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from javascript import NODE
from page_traces import decode_linear8, decode_log8, unpack
from regard.inspection.explorer import codes

WEB = Path(__file__).parents[2] / "src" / "regard" / "inspection" / "explorer" / "web"
HALF = 2 ** (12 / 254)  # a factor of half a step of log8


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


CASES = [(code, array) for code, made in arrays().items() for array in made]


def check(code, array, back):
    assert back.shape == array.shape
    if code == "log8":
        small = array < 2.0**-24
        assert np.all(back[small] == np.where(array[small] > 0, 2.0**-24, 0))
        assert np.all(np.abs(np.log2(back[~small] / array[~small])) <= 12 / 254 + 1e-6)
    elif code == "linear8":
        span = np.nan_to_num(np.nanmax(array, -1, keepdims=True) - np.nanmin(array, -1, keepdims=True))
        assert np.array_equal(np.isnan(back), np.isnan(array))
        assert np.all(np.nan_to_num(np.abs(back - array)) <= span / 508 + 1e-6 * np.nan_to_num(np.abs(array)))
    else:
        kept = {"f16": np.float16, "f32": np.float32}.get(code, np.int64)
        assert np.array_equal(back.astype(kept), array.astype(kept), equal_nan=kept is not np.int64)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_what_is_packed_is_unpacked():
    for code, array in CASES:
        entry, data = codes.pack(array, code)
        if code != "linear8" or array.size:
            check(code, np.asarray(array, np.float64), unpack(entry, data).astype(np.float64))
        assert codes.pack(array, code) == (entry, data)
        json.dumps(entry, allow_nan=False)
    with pytest.raises(ValueError, match=r"code: expected one of log8, linear8, json, u8.*got 'f64'"):
        codes.pack([1.0], "f64")


TEXTS = ["</script>", "\u2028", "\0", "\ud800", "x" * 10_000, "naïve 👩‍👩‍👧", ""]


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_page_reads_what_is_packed(tmp_path):
    made = [codes.pack(array, code) for code, array in CASES]
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
    assert NODE is not None
    ran = subprocess.run(
        [NODE, "--input-type=module", "-e", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    *found, texts = json.loads(ran.stdout)
    assert texts == TEXTS == unpack(*made[-1])
    for (entry, data), one in zip(made, found, strict=False):
        expected = unpack(entry, data)
        got = np.array([float(value.replace("Infinity", "inf")) for value in one["values"]])
        assert list(expected.shape) == one["shape"]
        assert np.allclose(got, expected.ravel().astype(np.float64), rtol=1e-6, atol=0, equal_nan=True)
