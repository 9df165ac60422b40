"""Files of traces: what comes back is what went in, and every kind of wrong file is refused."""

import dataclasses
import functools
import io
import json
import re
import struct
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from mask_expressions import expressions
from regard import attend, inspection, masks, positions, scores
from regard.inspection.traces import files as trace_files
from regard.inspection.traces.codec import Reader, Writer
from regard.inspection.traces.files import read_archive, write_archive
from regard.models import Decoder, TransformerConfig
from regard.readouts import Readout

H, T, D = 6, 11, 5
IDS = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])


def capture_call(mask=None, score=None, dtype="float32", tokens=None, keys=T, title=None, **given):
    rng = np.random.default_rng(5)
    shapes = ((2, H, T, D), (2, 2, keys, D), (2, 2, keys, D))
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype) for shape in shapes]
    with inspection.capture(tokens=tokens, example=1, title=title) as trace:
        attend(*arrays, mask=mask, score=score, **given)
    return trace


def there_and_back(trace, folder, **settings):
    return inspection.load(trace.save(folder / "one.regard", **settings))


def same_leaves(mine, theirs):
    """Same structures, and leaves that are equal bit by bit."""
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def fill(name):
    return f"a{name}"


MASKS = [
    masks.causal(),
    masks.sliding_window(3),
    masks.sliding_window(None, 2),
    masks.sliding_window(3, None),
    masks.chunked(3),
    masks.dilated(2),
    masks.global_tokens(2),
    masks.prefix(4),
    masks.prefix([4, 2]),
    masks.lengths([11, 7]),
    masks.valid_keys(IDS > 0),
    masks.valid_keys(np.stack([IDS > 0, IDS > 1])),
    masks.segments(IDS),
    masks.segments(np.stack([IDS, IDS[::-1]])),
    masks.segments(IDS, IDS[::-1]),
    masks.from_array(np.tri(T, dtype=bool)),
    masks.from_array(np.random.default_rng(0).random((H, T, T)) < 0.8),
    ~masks.causal() | (masks.chunked(4) & ~masks.segments(IDS)),
]
SCORES = [
    scores.alibi(H),
    scores.alibi(slopes=jnp.arange(6.0)),
    scores.softcap(3.0),
    scores.softcap(np.arange(1, 7, dtype=np.float32)),
    scores.temperature(0.5),
    scores.relative_bias(np.arange(48, dtype=np.float32).reshape(8, 6)),
    scores.relative_bias(jnp.ones((4, 1), jnp.bfloat16), bidirectional=False, max_distance=9),
    [scores.softcap(2.0), scores.alibi(H), scores.temperature(2.0)],
]


def mostly_slow(values, *quick):
    """All but those at these places are slow; ids show the values."""
    return [
        value if place in quick else pytest.param(value, marks=pytest.mark.slow)
        for place, value in enumerate(values)
    ]


@pytest.mark.parametrize("mask", mostly_slow(MASKS, 1, 5, 9, 13, 17), ids=repr)
def test_every_mask_comes_back(mask, tmp_path):
    trace = capture_call(mask)
    call, back = trace.calls[0], there_and_back(trace, tmp_path, keep="qk").calls[0]
    same_leaves(call.mask, back.mask)
    assert repr(back) == repr(call)
    np.testing.assert_array_equal(back.window(), call.window())


@pytest.mark.parametrize("score", mostly_slow(SCORES, 3, 5, 7), ids=repr)
def test_every_score_comes_back(score, tmp_path):
    trace = capture_call(masks.causal(), score)
    call, back = trace.calls[0], there_and_back(trace, tmp_path, keep="qk").calls[0]
    same_leaves(call.score, back.score)
    np.testing.assert_array_equal(back.window(), call.window())


@settings(max_examples=60)
@given(expressions(2, 5, opaque=False))
def test_any_expression_of_masks_comes_back(mask):
    writer = Writer()
    data = json.loads(json.dumps(writer.write("mask", mask)))
    same_leaves(jax.tree.map(np.asarray, mask), Reader(writer.arrays).read("mask", data, masks.Mask))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", mostly_slow(["float16", "bfloat16", "float32"], 1))
def test_a_call_comes_back_with_all_its_arrays(dtype, tmp_path):
    rng = np.random.default_rng(1)
    bias = jnp.asarray(rng.normal(size=(2, H, T, 13)), jnp.float32).astype(dtype).at[..., 3].set(-jnp.inf)
    trace = capture_call(
        masks.causal(),
        dtype=dtype,
        keys=13,
        query_offset=2,
        bias=bias,
        sinks=jnp.arange(6.0).astype(dtype),
        scale=0.1,
        precision=jax.lax.Precision.HIGHEST,
    )
    call, back = trace.calls[0], there_and_back(trace, tmp_path, keep="qk").calls[0]
    same_leaves(call.problem, back.problem)
    assert back.problem.precision is jax.lax.Precision.HIGHEST
    for name in ("name", "layer", "kind", "heads", "rows", "keys", "query_offset", "key_offset"):
        assert getattr(back, name) == getattr(call, name)
    assert back.describe() == call.describe()
    assert back.output_error == call.output_error
    same_leaves((call.lse, call.max_score), (back.lse, back.max_score))
    same_leaves(call.readout(4), back.readout(4))


def test_float64_comes_back(x64, tmp_path):
    trace = capture_call(masks.causal(), dtype="float64")
    back = there_and_back(trace, tmp_path, keep="qk").calls[0]
    same_leaves(trace.calls[0].problem, back.problem)


@pytest.mark.slow
def test_statistics_are_what_is_kept_unless_more_is_asked_for(tmp_path):
    trace = capture_call(masks.causal(), tokens=[str(n % 4) for n in range(T)], sinks=jnp.arange(6.0))
    path = trace.save(tmp_path / "one.regard", grid=8, top_k=3)
    loaded = inspection.load(path)
    call, back = trace.calls[0], loaded.calls[0]
    assert back.problem is None
    same_leaves(call.readout(8, 3), back.readout(8, 3))
    same_leaves(call.readout(8, 3).duplicate_mass, back.readout(8, 2).duplicate_mass)
    with pytest.raises(
        ValueError, match=r'window: the queries and keys of this call are not kept.*keep="qk"'
    ):
        back.window()
    with pytest.raises(ValueError, match="top_k: expected at most 3"):
        back.readout(8, 4)
    with pytest.raises(ValueError, match="grid: expected at most 6 blocks"):
        back.readout(64, 3)
    for sizes in ((0, 3), (8, 0)):
        with pytest.raises(ValueError, match="expected an integer of at least 1, got 0"):
            back.readout(*sizes)
    coarse, direct = back.readout(2, 2), call.readout(2, 2)
    assert coarse.block_mass.shape == direct.block_mass.shape == (H, 2, 2)
    np.testing.assert_allclose(coarse.block_mass, direct.block_mass, atol=1e-6)
    np.testing.assert_array_equal(coarse.top_keys, direct.top_keys)
    same_leaves(back.readout(8, 3, heads=[4, 1]).entropy, call.readout(8, 3).entropy[np.array([4, 1])])
    # What could tell of the text is not there, not even in other words.
    data = b"".join(zipfile.ZipFile(path).read(name) for name in zipfile.ZipFile(path).namelist())
    assert np.asarray(call.problem.query).tobytes()[:64] not in data
    assert np.asarray(call.problem.key).tobytes()[:64] not in data
    again = there_and_back(loaded, tmp_path, grid=8, top_k=3).calls[0]
    same_leaves(again.readout(8, 3), back.readout(8, 3))
    with pytest.raises(ValueError, match="keep: expected 'statistics', as the trace was loaded without"):
        loaded.save(tmp_path / "two.regard", keep="qk")
    with pytest.raises(ValueError, match="keep: expected 'statistics' or 'qk', got 'all'"):
        trace.save(tmp_path / "two.regard", keep="all")


@pytest.mark.slow
def test_functions_are_no_data_and_the_trace_says_so(tmp_path):
    trace = capture_call(masks.segments(IDS) & masks.predicate(lambda q, k: q >= k))
    back = there_and_back(trace, tmp_path, keep="qk", grid=8)
    assert back.calls[0].problem is None
    assert back.calls[0].mask is None
    assert "predicate" in back.calls[0].describe()["mask"]
    assert back.notes[0].startswith("attention 0: statistics alone are kept, as mask: predicate(")
    same_leaves(back.calls[0].readout(8), trace.calls[0].readout(8))
    with zipfile.ZipFile(tmp_path / "one.regard") as archive:
        meta = json.loads(archive.read("meta.json"))
        assert len(archive.namelist()) == 1 + len(set(re.findall(r'"(a[0-9]+)"', json.dumps(meta))))
    assert there_and_back(back, tmp_path, grid=8).notes == back.notes
    trace = capture_call(score=scores.modifier(lambda s, b, h, q, k: s + 1))
    assert "modifier" in there_and_back(trace, tmp_path).notes[0]


@pytest.mark.parametrize("keep", ["qk", "statistics"])
def test_a_scale_that_is_no_number_does_not_keep_a_trace_from_its_file(keep, tmp_path):
    back = there_and_back(capture_call(scale=np.nan), tmp_path, keep=keep).calls[0]
    assert back.describe()["scale"] is None
    assert np.isnan(back.readout().entropy).all()


def test_models_tokens_and_positions_come_back(tmp_path):
    config = TransformerConfig(
        d_model=12, num_heads=3, d_ff=11, num_layers=2, vocab_size=13, positions="learned", max_length=17
    )
    hostile = ["</script><img onerror=x>", "\ud800", "👩‍👩‍👧\u202e", "\n\0", "x" * 10_000]
    tokens = inspection.Tokens(hostile, ids=[4, 5, 6, 7, 7], spans=np.arange(10).reshape(5, 2))
    model = Decoder(config, rngs=nnx.Rngs(0))
    _, trace = inspection.record(model, jnp.array([[1, 2, 3, 4, 5]]), tokens=tokens, title="</title>")
    back = there_and_back(trace, tmp_path)
    assert (back.title, back.model, dict(back.versions)) == (trace.title, "Decoder", trace.versions)
    assert [call.name for call in back] == [call.name for call in trace]
    for mine, theirs in zip(trace, back, strict=True):
        assert theirs.query_tokens.texts == tuple(hostile)
        assert theirs.key_tokens.ids.tolist() == [4, 5, 6, 7, 7]
        assert theirs.key_tokens.spans.tolist() == tokens.spans.tolist()
        assert theirs.positions.trained_length == 17
        same_leaves(mine.positions.table, theirs.positions.table)
        same_leaves(mine.value_norms, theirs.value_norms)
        assert mine.value_norms.shape == (3, 5)
    assert (
        len(json.loads(zipfile.ZipFile(tmp_path / "one.regard").read("meta.json"))["trace"]["sequences"]) == 1
    )
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    patches = inspection.Tokens(T, patch_grid=(2, 5), first_patch=1, picture=picture)
    found = there_and_back(capture_call(tokens=patches), tmp_path).calls[0].query_tokens
    assert (found.kind, found.patch_grid, found.first_patch) == ("patches", (2, 5), 1)
    same_leaves(found.picture, picture)


@pytest.mark.parametrize(
    "rule",
    [
        None,
        positions.Linear(2.0),
        positions.DynamicNTK(2.0, 16, 64),
        positions.Llama3(8.0),
        positions.YaRN(4.0, 128),
    ],
)
def test_rotary_settings_come_back(rule):
    rotary = positions.Rotary(100.0, 4, True, rule)
    data = json.loads(json.dumps(Writer().write("rotary", rotary)))
    assert Reader({}).read("rotary", data, positions.Rotary) == rotary


ROTARY = {"class": "Rotary", "base": 1e4, "width": None, "interleaved": False, "scaling": None}
WRONG_ROTARY = [
    (3, "rotary: expected a record with a class"),
    (None, "rotary: expected a record with a class"),
    (ROTARY | {"class": "os.system"}, "rotary: expected one of Rotary"),
    (ROTARY | {"base": "1e4"}, "rotary.base: expected float"),
    (ROTARY | {"bas": 1.0}, "rotary: expected Rotary with base, width, interleaved, scaling"),
    (ROTARY | {"scaling": {"class": "os.system", "command": 1}}, "rotary.scaling: expected one of"),
    (ROTARY | {"scaling": {"class": "Linear", "factor": 0.5}}, "rotary.scaling: Linear cannot be made"),
    (ROTARY | {"scaling": {"class": "Linear"}}, "rotary.scaling: expected Linear with factor"),
    (ROTARY | {"scaling": 3}, "rotary.scaling: expected a record with a class"),
]


@pytest.mark.parametrize(("data", "message"), WRONG_ROTARY)
def test_wrong_rotary_settings_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        Reader({}).read("rotary", data, positions.Rotary)


@pytest.mark.parametrize("size", mostly_slow([0, 1, 2], 0))
def test_small_traces_come_back(size, tmp_path):
    x = jnp.ones((1, 3, size, 2))
    with inspection.capture() as trace:
        attend(x, jnp.ones((1, 3, 2, 2)), jnp.ones((1, 3, 2, 2)), mask=masks.prefix(1))
    for keep in ("qk", "statistics"):
        back = there_and_back(trace, tmp_path, keep=keep).calls[0]
        assert back.readout().lse.shape == (3, size)
    assert there_and_back(inspection.Trace(), tmp_path).calls == ()


def test_the_same_trace_makes_the_same_bytes(tmp_path):
    trace = capture_call(masks.causal())
    files = [trace.save(tmp_path / f"{n}.regard", keep="qk").read_bytes() for n in "ab"]
    assert files[0] == files[1]


# Writing.


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    trace, path = capture_call(), tmp_path / "one.regard"
    trace.save(path)
    before = path.read_bytes()
    capture_call(masks.causal()).save(path, keep="qk")  # a trace may be replaced
    assert path.read_bytes() != before
    before = path.read_bytes()

    def fail(array):
        raise OSError("no space left")

    monkeypatch.setattr(trace_files, "_method", fail)
    with pytest.raises(OSError, match="no space left"):
        trace.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["one.regard"]


def test_other_files_are_never_replaced(tmp_path):
    trace = capture_call()
    text, foreign, folder = tmp_path / "a.regard", tmp_path / "b.regard", tmp_path / "c"
    text.write_text("dear diary")
    with zipfile.ZipFile(foreign, "w") as archive:
        archive.writestr("meta.json", '{"format": "something else"}')
    folder.mkdir()
    for path in (text, foreign, folder):
        with pytest.raises(FileExistsError, match="something else is there"):
            trace.save(path)
    assert text.read_text() == "dear diary"
    with pytest.raises(FileNotFoundError, match="expected a folder"):
        trace.save(tmp_path / "no" / "one.regard")
    with pytest.raises(FileNotFoundError):
        inspection.load(tmp_path / "nothing.regard")


# Reading what is wrong.


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Bytes of a sound trace with q and k, and of one with statistics."""
    folder = tmp_path_factory.mktemp("good")
    trace = capture_call(
        masks.segments(IDS) & masks.causal(), [scores.softcap(3.0), scores.alibi(H)], tokens=["a"] * T
    )
    qk = trace.save(folder / "qk.regard", keep="qk").read_bytes()
    assert read_archive(folder / "qk.regard")[0]["calls"][0]["lse"] == LSE
    return {"qk": qk, "statistics": trace.save(folder / "s.regard", grid=8).read_bytes()}


def refused(path, message):
    with pytest.raises(ValueError, match=message) as caught:
        inspection.load(path)
    assert str(path) in str(caught.value)


def test_files_that_are_no_zip_are_refused(tmp_path, good):
    path = tmp_path / "bad.regard"
    for data in (b"", b"PK", b"dear diary", bytes(100)):
        path.write_bytes(data)
        refused(path, "it is no zip, cut short or damaged")
    whole = good["qk"]
    for length in range(1, len(whole), max(len(whole) // 23, 1)):
        path.write_bytes(whole[:length])
        refused(path, "it is no zip, cut short or damaged")


def test_flipped_bytes_never_pass_unseen(tmp_path, good):
    path, rng = tmp_path / "bad.regard", np.random.default_rng(0)
    path.write_bytes(good["qk"])
    sound = inspection.load(path).calls[0]
    for place in rng.choice(len(good["qk"]), 150, replace=False):
        data = bytearray(good["qk"])
        data[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        try:
            call = inspection.load(path).calls[0]
        except ValueError:
            continue  # what is left are bytes that say nothing, such as dates
        same_leaves(call.problem, sound.problem)
        assert call.key_tokens.texts == sound.key_tokens.texts


LSE = "a4"  # its name in the sound trace


def rewrite(path, data, change=None, members=None, drop=()):
    """A zip like the given one, with changed meta and other members."""
    path.with_suffix(".old").write_bytes(data)
    with zipfile.ZipFile(path.with_suffix(".old")) as old, zipfile.ZipFile(path, "w") as new:
        meta = json.loads(old.read("meta.json"))
        meta = change(meta) or meta if change else meta
        for name in old.namelist():
            if name not in drop and name != "meta.json":
                new.writestr(name, old.read(name))
        if "meta.json" not in drop:
            new.writestr("meta.json", meta if isinstance(meta, str) else json.dumps(meta))
        for name, content in (members or {}).items():
            new.writestr(name, content)


def test_zips_of_another_kind_are_refused(tmp_path, good):
    path, data = tmp_path / "bad.regard", good["qk"]
    rewrite(path, data, drop=("meta.json",))
    refused(path, "a zip of another kind, without meta.json")
    rewrite(path, data, lambda meta: meta.update(format="x"))
    refused(path, "a zip of another kind")
    for version in (3, "4", True, None):
        rewrite(path, data, lambda meta, v=version: meta.update(version=v))
        refused(path, f"its version is {version!r}, and this library reads 4")
    for text in ("[]", "{", "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass").decode("latin1"), "3"):
        rewrite(path, data, lambda meta, text=text: text)
        refused(path, r"meta\.json does not read as JSON|a zip of another kind")
    rewrite(path, data, lambda meta: json.dumps(meta).replace('"layer": 0', '"layer": NaN'))
    refused(path, "NaN is no number of JSON")
    for name in ("../evil", "/etc/evil", "arrays/../meta.npy", "arrays/zz", "x.py"):
        rewrite(path, data, members={name: b""})
        refused(path, "it has members that are no arrays")
        assert sorted(file.name for file in tmp_path.iterdir()) == ["bad.old", "bad.regard"]
    with pytest.warns(UserWarning, match="Duplicate name"):
        rewrite(path, data, members={"arrays/a1.npy": b""})
    refused(path, "two members have one name")


def npy(array, **header):
    """A member, with another header."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape} | header
    )
    return file.getvalue() + array.tobytes()


def test_arrays_that_do_not_fit_their_headers_are_refused(tmp_path, good):
    path, data, member = tmp_path / "bad.regard", good["qk"], f"arrays/{LSE}.npy"
    lse = np.zeros((H, T), np.float32)
    rewrite(path, data, drop=(member,), members={member: npy(lse)})
    assert not inspection.load(path).calls[0].lse.any()
    for content, message in [
        (npy(lse, shape=(7, T)), "has 264 bytes; float32"),
        (npy(lse, shape=(2**47,)), "has 264 bytes"),
        (npy(lse, shape=(-6, -11)), "has the shape"),
        (npy(lse, shape=(1,) * 9), "has the shape"),
        (npy(lse, shape=(6.0, 11)), "has no header of NumPy's"),
        (npy(lse, shape="6"), "has no header of NumPy's"),
        (npy(lse, fortran_order=True), "or another order"),
        (npy(lse, descr="|O"), "has the unknown dtype object"),
        (npy(lse, descr="<c8"), "has the unknown dtype complex64"),
        (npy(lse, descr=">f4"), "has the unknown dtype >f4"),
        (npy(lse, descr="__import__('os')"), "has no header of NumPy's"),
        (npy(lse).replace(b"False", b"print"), "has no header of NumPy's"),
        (npy(lse).replace(b"}", b"("), "has no header of NumPy's"),
        (npy(lse)[6:], "has no header of NumPy's"),
        (b"", "has no header of NumPy's"),
        (b"\x93NUMPY\x02\x00" + npy(lse)[8:], "has no header of NumPy's .it has another version"),
        (npy(np.full(2, 2, np.uint8), descr="|b1"), "holds other bytes than 0 and 1"),
    ]:
        rewrite(path, data, drop=(member,), members={member: content})
        refused(path, message)
    rewrite(path, data, drop=(member,))
    refused(path, "lse: expected the name of an array of the file")
    rewrite(path, data, drop=(member,), members={member.replace(".npy", ".bfloat16.npy"): npy(lse)})
    refused(path, "has the unknown dtype float32")


def test_numpy_reads_the_arrays(tmp_path):
    call = (trace := capture_call(masks.causal())).calls[0]
    found = np.load(trace.save(tmp_path / "one.regard", keep="qk"))
    assert any(np.array_equal(found[name], call.lse) for name in found.files if name.startswith("arrays/"))


def test_bombs_are_refused_before_they_are_read(tmp_path, good, monkeypatch):
    path = tmp_path / "bad.regard"
    zeros = np.zeros(1 << 22, np.float32)
    write_archive(path, {}, {"a": zeros})
    assert path.stat().st_size < zeros.nbytes / 100
    with pytest.raises(ValueError, match=r"its arrays have 167\d+ bytes, more than max_bytes = 1000000"):
        read_archive(path, 1_000_000)
    np.testing.assert_array_equal(read_archive(path)[1]["a"], zeros)
    path.write_bytes(good["qk"])
    with pytest.raises(ValueError, match="more than max_bytes = 10"):
        inspection.load(path, max_bytes=10)
    monkeypatch.setattr(trace_files, "_MOST_META", 100)
    refused(path, "more than the 100 that are read")
    monkeypatch.undo()
    # A directory that promises more than the member holds.
    write_archive(path, {}, {"a": np.zeros(8, np.float32)})
    data = bytearray(path.read_bytes())
    central = data.rindex(b"PK\x01\x02")
    assert struct.unpack_from("<I", data, central + 24)[0] == 32 + 128
    struct.pack_into("<I", data, central + 24, 1 << 30)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="expected a trace"):
        read_archive(path)


def test_other_ways_to_compress_are_refused(tmp_path, good):
    path = tmp_path / "bad.regard"
    path.write_bytes(good["qk"])
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(path, "w", method) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        refused(path, r"meta\.json is compressed in another way than Trace\.save compresses")


def test_a_directory_that_points_anywhere_is_refused(tmp_path, good):
    """Offsets before the file begins, methods of compression that the data are not in, names in no code."""
    path, data = tmp_path / "bad.regard", good["qk"]
    central, end = data.index(b"PK\x01\x02"), data.rindex(b"PK\x05\x06")
    for place, value in [(central + 10, 12), (central + 10, 14), (central + 42, 2**31), (end + 12, 2**31)]:
        damaged = bytearray(data)
        struct.pack_into("<H" if value < 2**16 else "<I", damaged, place, value)
        path.write_bytes(damaged)
        refused(path, "expected a trace that Trace.save wrote")
    damaged = bytearray(data)
    damaged[central + 9], damaged[central + 46] = 8, 0xFF  # a name said to be UTF-8
    path.write_bytes(damaged)
    refused(path, "expected a trace that Trace.save wrote")


def edit(*keys, to):
    def change(meta):
        node = meta["trace"]
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = to

    return change


C = ("calls", 0)
POSITIONS = dict.fromkeys(("rotary", "table", "table_kind", "trained_length"))
POSITIONS["class"] = "KnownPositions"
WRONG = {
    "title": (edit("title", to=3), "title: expected str"),
    "versions": (edit("versions", to={"a": 1}), r"versions\['a'\]: expected str"),
    "notes": (edit("notes", to=[1]), r"notes\[0\]: expected str"),
    "calls": (edit("calls", to={}), "calls: expected list"),
    "call": (edit(*C, to=[]), r"calls\[0\]: expected a record"),
    "trace": (lambda meta: meta.update(trace=None), "trace: expected a record"),
    "heads": (edit(*C, "heads", to=7), r"calls\[0\].lse: expected f numbers of shape \(7, 11\)"),
    "no heads": (edit(*C, "heads", to=0), "heads: expected at least 1"),
    "value_norms": (edit(*C, "value_norms", to=LSE + "x"), "value_norms: expected the name of an array"),
    "lengths": (edit(*C, "value_norms", to="a2"), r"value_norms: expected f numbers of shape \(6, 11\)"),
    "rows": (edit(*C, "rows", to=-1), "rows: expected at least 0"),
    "keys": (edit(*C, "keys", to=12), "key_tokens: expected a sequence of 12"),
    "layer": (edit(*C, "layer", to=True), "layer: expected int, got 'True'"),
    "kind": (edit(*C, "kind", to="both"), "kind: expected self or cross"),
    "offset": (edit(*C, "query_offset", to=2**40), "query_offset: expected a number that fits int32"),
    "offset type": (edit(*C, "query_offset", to=1.5), "query_offset: expected int"),
    "lse": (edit(*C, "lse", to="zz"), "lse: expected the name of an array"),
    "lse kind": (edit(*C, "lse", to=["a1"]), "lse: expected the name of an array"),
    "query": (edit(*C, "problem", "query", to=LSE), "problem.query: expected f numbers of shape"),
    "scale": (edit(*C, "problem", "scale", to=None), "scale: expected the name of an array"),
    "bias": (edit(*C, "problem", "bias", to="a5"), "its parts do not fit one another"),
    "precision": (edit(*C, "problem", "precision", to="exec"), "precision: expected one of"),
    "no problem": (edit(*C, "problem", to=None), "a problem or a readout, one of the two"),
    "tokens": (edit(*C, "query_tokens", to=4), "query_tokens: expected the number of one of 1 sequences"),
    "few tokens": (edit("sequences", 0, "texts", to=["a"]), "query_tokens: expected a sequence of 11"),
    "texts": (
        edit("sequences", 0, "texts", to=["a"] * 10 + [None]),
        r"sequences\[0\]\.texts\[10\]: expected str",
    ),
    "ids": (edit("sequences", 0, "ids", to="a3"), "Tokens cannot be made: ids: expected integers"),
    "patches": (edit("sequences", 0, "patch_grid", to=["x", 1]), r"patch_grid\[0\]: expected int"),
    "description": (edit(*C, "description", "scale", to="1"), "description.scale: expected float"),
    "width": (edit(*C, "description", "width", to=2**30), "description.width: expected 0 to 65536"),
    "rotary width": (
        edit(*C, "positions", to=POSITIONS | {"rotary": ROTARY | {"width": 2**30}}),
        "positions.rotary.width: expected 0 to 65536",
    ),
    "mask": (
        edit(*C, "mask", to={"class": "eval"}),
        "mask: expected one of .*Causal.*or a class defined before the file is read",
    ),
    "mask fields": (edit(*C, "mask", to={"class": "Chunked", "size": 0}), "mask: Chunked cannot be made"),
    "mask types": (
        edit(*C, "mask", to={"class": "Chunked", "size": True}),
        "mask.size: expected int, got 'True'",
    ),
    "mask extras": (edit(*C, "mask", to={"class": "Causal", "x": 0}), "expected Causal with nothing"),
    "mask parts": (edit(*C, "mask", to={"class": "Not"}), "expected Not with operand"),
    "mask array": (edit(*C, "mask", "left", "ids", to="a3"), "mask.left: Documents cannot be made"),
    "mask missing": (edit(*C, "mask", "left", "ids", to="zz"), "expected the name of an array"),
    "mask text": (edit(*C, "mask", to="causal()"), "mask: expected a record with a class"),
    "score": (edit(*C, "score", to={"class": "Modifier", "fn": "os.system"}), "score: expected one of"),
    "scores": (edit(*C, "score", to=[]), "score: expected a record with a class"),
    "rotary": (edit(*C, "positions", to=POSITIONS | {"rotary": 3}), "rotary: expected a record"),
    "table": (
        edit(*C, "positions", to=POSITIONS | {"table": LSE}),
        "table_kind, trained_length: expected str",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_plain_data_that_make_no_sense_are_refused(name, tmp_path, good):
    change, message = WRONG[name]
    rewrite(tmp_path / "bad.regard", good["qk"], change)
    refused(tmp_path / "bad.regard", message)


def test_sizes_that_no_bytes_stand_for_are_refused(tmp_path, good):
    """Keys without features, and heads without queries, may be as many as they like."""
    path, many = tmp_path / "bad.regard", 10**7
    call = json.loads(zipfile.ZipFile(io.BytesIO(good["qk"])).read("meta.json"))["trace"]["calls"][0]
    query, key = (f"arrays/{call['problem'][name]}.npy" for name in ("query", "key"))
    rows = {f"arrays/{call[name]}.npy": (many, 0) for name in ("lse", "max_score")}
    for changes, shapes, message in [
        ({"keys": many}, {query: (H, T, 0), key: (1, many, 0)}, r"problem\.query: expected at least one"),
        ({"heads": many, "rows": 0}, {query: (many, 0, 5)} | rows, r"heads: expected at most 4096 without"),
    ]:
        changes |= {"key_tokens": None, "query_tokens": None, "value_norms": None}
        hollow = {name: npy(np.zeros(shape, np.float32)) for name, shape in shapes.items()}
        change = functools.partial(lambda meta, new: meta["trace"]["calls"][0].update(new), new=changes)
        rewrite(path, good["qk"], change, members=hollow, drop=hollow)
        refused(path, message)


def test_masks_within_masks_have_an_end(tmp_path, good):
    def deepen(meta):
        mask = {"class": "Causal"}
        for _ in range(300):
            mask = {"class": "Not", "operand": mask}
        meta["trace"]["calls"][0]["mask"] = mask

    rewrite(tmp_path / "bad.regard", good["qk"], deepen)
    refused(tmp_path / "bad.regard", "expected at most 200 records within one another")


def borrow(*keys, source):
    """An entry that names the array of another."""

    def change(meta):
        node = meta["trace"]
        for key in source:
            node = node[key]
        edit(*keys, to=node)(meta)

    return change


R = (*C, "readout")
WRONG_STATISTICS = {
    "block": (edit(*R, "query_block", to=3), "query_block: expected a power of two"),
    "no block": (edit(*R, "key_block", to=0), "key_block: expected a power of two"),
    "grid": (edit(*R, "query_block", to=1), "block_mass: expected f numbers"),
    "missing": (edit(*R, "entropy", to=None), "entropy: expected the name"),
    "first": (edit(*R, "first", to="x"), "first: expected int"),
    "kind": (borrow(*R, "keys", source=(*C, "lse")), "keys: expected i numbers"),
    "mask": (borrow(*C, "mask", "left", "ids", source=(*R, "top_keys")), "its parts do not fit one another"),
    "score": (borrow(*C, "score", "members", 0, "cap", source=(*R, "key_mass")), "Softcap cannot be made"),
}


@pytest.mark.parametrize("name", WRONG_STATISTICS)
def test_statistics_that_make_no_sense_are_refused(name, tmp_path, good):
    change, message = WRONG_STATISTICS[name]
    rewrite(tmp_path / "bad.regard", good["statistics"], change)
    refused(tmp_path / "bad.regard", message)


def test_top_keys_lie_within_the_keys(tmp_path):
    trace = capture_call()
    call = trace.calls[0]
    found = call.readout()
    for name, value in (("top_keys", T), ("top_keys", -2), ("keys", T + 1), ("keys", -1)):
        changed = dataclasses.replace(found, **{name: np.asarray(getattr(found, name)).copy()})
        np.asarray(getattr(changed, name)).flat[0] = value
        call._found[(64, 8, None)] = changed
        trace.save(tmp_path / "bad.regard")
        refused(tmp_path / "bad.regard", f"readout.{name}: expected numbers in")
    assert {field.name for field in dataclasses.fields(Readout)} >= {"top_keys", "keys"}


@pytest.mark.slow
@settings(max_examples=80)
@given(st.data())
def test_no_change_of_the_plain_data_raises_anything_else(good, data):
    """Any one entry of meta.json replaced by something odd: a ValueError, or a trace."""
    import tempfile
    from pathlib import Path

    with zipfile.ZipFile(io.BytesIO(good["qk"])) as archive:
        meta = json.loads(archive.read("meta.json"))
    places = []

    def walk(node, place):
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            places.append((*place, key))
            walk(value, (*place, key))

    walk(meta, ())
    place = data.draw(st.sampled_from(places))
    odd = data.draw(
        st.sampled_from([None, 0, -1, 2**70, 1.5, "", "a1", "a4", [], {}, True, [[1]], {"class": "Not"}])
    )

    def change(meta):
        node = meta
        for key in place[:-1]:
            node = node[key]
        node[place[-1]] = odd

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "odd.regard"
        rewrite(path, good["qk"], change)
        try:
            trace = inspection.load(path)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            assert isinstance(repr(trace.calls), str)
