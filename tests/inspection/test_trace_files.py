"""Files of traces: what comes back is what went in, and every kind of wrong file is refused."""

import dataclasses
import functools
import io
import json
import operator
import struct
import zipfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from mask_expressions import expressions
from oracle import assert_same_bits
from refusals import assert_refused
from regard import attend, inspection, masks, positions, scores
from regard.inspection.traces import files as trace_files
from regard.inspection.traces.codec import Reader, Writer
from regard.inspection.traces.files import read_archive, write_archive
from small_models import build

H, T, D = 6, 11, 5
IDS = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])


def capture_call(mask=None, score=None, dtype="float32", tokens=None, keys=T, **given):
    rng = np.random.default_rng(5)
    shapes = ((2, H, T, D), (2, 2, keys, D), (2, 2, keys, D))
    arrays = [jnp.asarray(rng.normal(size=shape).astype(dtype)) for shape in shapes]
    with inspection.capture(tokens=tokens, example=1) as trace:
        attend(*arrays, mask=mask, score=score, **given)
    return trace


def there_and_back(trace, folder, **settings):
    return inspection.load(trace.save(folder / "one.regard", **settings))


SCORES = [
    scores.alibi(slopes=np.arange(6, dtype=np.float32)),
    scores.softcap(np.arange(1, 7, dtype=np.float32)),
    scores.temperature(0.5),
    scores.relative_bias(np.ones((4, 1), jnp.bfloat16), bidirectional=False, max_distance=9),
]
RULES = [None, positions.Linear(2.0), positions.DynamicNTK(2.0, 16, 64), positions.YaRN(4.0, 128)]


def rewritten(value, kind):
    """The value as it is read from plain data that it was written as."""
    writer = Writer()
    return Reader(writer.arrays).read("it", json.loads(json.dumps(writer.write("it", value))), kind)


def test_every_score_and_rotation_comes_back():
    for score in SCORES:
        assert_same_bits(score, rewritten(score, scores.Score))
    for rule in RULES:
        rotary = positions.Rotary(100.0, 4, True, rule)
        assert rewritten(rotary, positions.Rotary) == rotary


@settings(max_examples=25)
@given(expressions(2, 5, opaque=False))
def test_any_expression_of_masks_comes_back(mask):
    assert_same_bits(jax.tree.map(np.asarray, mask), rewritten(mask, masks.Mask))


def test_a_call_comes_back_with_all_its_arrays(tmp_path):
    dtype, bias = jnp.bfloat16, np.random.default_rng(1).normal(size=(2, H, T, 13))
    bias[..., 3] = -np.inf
    mask, score = masks.causal() & ~masks.global_tokens(2), [scores.softcap(2.0), scores.alibi(H)]
    options = {"bias": jnp.asarray(bias, dtype), "sinks": jnp.arange(6, dtype=dtype), "scale": 0.1}
    options |= {"precision": jax.lax.Precision.HIGHEST, "query_offset": 2}
    trace = capture_call(mask, score, dtype=dtype, keys=13, **options)
    call, back = trace[0], there_and_back(trace, tmp_path, keep="qk")[0]
    assert_same_bits((call.problem, call.mask, call.score), (back.problem, back.mask, back.score))
    assert back.problem.precision is jax.lax.Precision.HIGHEST
    assert (back.describe(), back.output_error) == (call.describe(), call.output_error)
    assert repr(back) == repr(call)
    assert_same_bits((call.lse, call.max_score, call.window()), (back.lse, back.max_score, back.window()))


@pytest.fixture(scope="module")
def sound():
    score = [scores.softcap(3.0), scores.alibi(H)]
    return capture_call(masks.segments(IDS) & masks.causal(), score, tokens=["a"] * T)


@pytest.mark.slow
def test_statistics_are_what_is_kept_unless_more_is_asked_for(sound, tmp_path):
    path = sound.save(tmp_path / "one.regard", grid=8, top_k=3)
    loaded = inspection.load(path)
    call, back = sound[0], loaded[0]
    assert back.problem is None
    assert_same_bits(call.readout(8, 3), back.readout(8, 3))
    assert_refused(
        (back.window, r'window: the queries and keys of this call are not kept.*keep="qk"'),
        (lambda: back.readout(8, 4), "top_k: expected at most 3"),
        (lambda: back.readout(64, 3), "grid: expected at most 6 blocks"),
        (lambda: back.readout(0, 3), "expected an integer of at least 1, got 0"),
        (lambda: loaded.save(path, keep="qk"), "keep: expected 'statistics', as .* was loaded without"),
        (lambda: sound.save(path, keep="all"), "keep: expected 'statistics' or 'qk', got 'all'"),
    )
    coarse, direct = back.readout(2, 2), call.readout(2, 2)
    assert coarse.block_mass.shape == direct.block_mass.shape == (H, 2, 2)
    np.testing.assert_allclose(coarse.block_mass, direct.block_mass, atol=1e-6)
    np.testing.assert_array_equal(coarse.top_keys, direct.top_keys)
    assert_same_bits(back.readout(8, 3, heads=[4, 1]).entropy, call.readout(8, 3).entropy[np.array([4, 1])])
    # What could tell of the text is not there, not even in other words.
    kept = [array.tobytes() for array in read_archive(path)[1].values()]
    assert not any(np.asarray(call.problem.key).tobytes()[:64] in data for data in kept)


@pytest.mark.slow
def test_functions_are_no_data_and_the_trace_says_so(tmp_path):
    mask = masks.segments(IDS) & masks.predicate(lambda q, k: q >= k)
    trace = capture_call(mask, scores.modifier(lambda s, b, h, q, k: s + 1))
    back = there_and_back(trace, tmp_path, keep="qk", grid=8)
    assert (back[0].problem, back[0].mask) == (None, None)
    assert "predicate" in back[0].describe()["mask"]
    assert back.notes[0].startswith("attention 0: statistics alone are kept, as mask: predicate(")
    assert_same_bits(back[0].readout(8), trace[0].readout(8))
    assert there_and_back(back, tmp_path, grid=8).notes == back.notes


def test_models_tokens_and_positions_come_back(tmp_path):
    model = build(num_layers=1, positions="learned", max_length=17)
    hostile = ["</script><img onerror=x>", "\ud800", "👩‍👩‍👧\u202e", "\n\0", "x" * 10_000]
    tokens = inspection.Tokens(hostile, ids=[4, 5, 6, 7, 7], spans=np.arange(10).reshape(5, 2))
    _, trace = inspection.record(model, jnp.array([[1, 2, 3, 4, 5]]), tokens=tokens, title="</title>")
    back = there_and_back(trace, tmp_path, keep="qk")
    assert (back.title, back.model, dict(back.versions)) == (trace.title, "Decoder", trace.versions)
    (mine,), (theirs,) = trace, back
    assert theirs.query_tokens.texts == tuple(hostile)
    assert theirs.key_tokens.ids.tolist() == [4, 5, 6, 7, 7]
    assert theirs.key_tokens.spans.tolist() == tokens.spans.tolist()
    assert theirs.positions.trained_length == 17
    assert_same_bits((mine.positions.table, mine.value_norms), (theirs.positions.table, theirs.value_norms))
    assert mine.value_norms.shape == (3, 5)
    assert len(read_meta((tmp_path / "one.regard").read_bytes())["trace"]["sequences"]) == 1
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    patches = inspection.Tokens(T, patch_grid=(2, 5), first_patch=1, picture=picture)
    found = there_and_back(capture_call(tokens=patches), tmp_path, keep="qk")[0].query_tokens
    assert (found.kind, found.patch_grid, found.first_patch) == ("patches", (2, 5), 1)
    assert_same_bits(found.picture, picture)


def test_a_file_is_written_whole_or_not_at_all(sound, tmp_path, monkeypatch):
    assert there_and_back(inspection.Trace(), tmp_path).calls == ()
    path = tmp_path / "one.regard"
    first = sound.save(path, grid=8, top_k=3).read_bytes()
    whole = sound.save(path, keep="qk").read_bytes()  # a trace may be replaced
    assert first != whole == sound.save(path, keep="qk").read_bytes()

    monkeypatch.setattr(trace_files, "_entry", mock.Mock(side_effect=OSError("no space left")))
    assert_refused((lambda: sound.save(path, keep="qk"), "no space left", OSError))
    assert path.read_bytes() == whole
    assert [file.name for file in tmp_path.iterdir()] == ["one.regard"]


def test_other_files_are_never_replaced(tmp_path):
    trace = inspection.Trace()
    text, foreign, folder = tmp_path / "a.regard", tmp_path / "b.regard", tmp_path / "c"
    text.write_text("dear diary")
    with zipfile.ZipFile(foreign, "w") as archive:
        archive.writestr("meta.json", '{"format": "something else"}')
    folder.mkdir()
    assert_refused(
        (lambda: trace.save(text), "something else is there", FileExistsError),
        (lambda: trace.save(foreign), "something else is there", FileExistsError),
        (lambda: trace.save(folder), "something else is there", FileExistsError),
        (lambda: trace.save(tmp_path / "no" / "one.regard"), "expected a folder", FileNotFoundError),
        (lambda: inspection.load(tmp_path / "nothing.regard"), "nothing.regard", FileNotFoundError),
    )
    assert text.read_text() == "dear diary"


@pytest.fixture(scope="module")
def good(sound, tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "one.regard"
    qk = sound.save(path, keep="qk").read_bytes()
    assert read_archive(path)[0]["calls"][0]["lse"] == LSE
    return {"qk": qk, "statistics": sound.save(path, grid=8, top_k=3).read_bytes()}


def refused(path, message):
    with pytest.raises(ValueError, match=message) as caught:
        inspection.load(path)
    assert str(path) in str(caught.value)


def test_files_that_are_no_zip_are_refused(tmp_path, good):
    path, whole = tmp_path / "bad.regard", good["qk"]
    cut = (whole[:length] for length in range(0, len(whole), len(whole) // 23))
    for data in (b"PK", b"dear diary", bytes(100), *cut):
        path.write_bytes(data)
        refused(path, "it is no zip, cut short or damaged")


LSE = "a4"  # its name in the sound trace


def read_meta(data):
    return json.loads(zipfile.ZipFile(io.BytesIO(data)).read("meta.json"))


def rewrite(path, data, change=None, members=None, drop=()):
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(path, "w") as new:
        meta = read_meta(data)
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
    for version in (3, "4", True):
        rewrite(path, data, lambda meta, v=version: meta.update(version=v))
        refused(path, f"its version is {version!r}, and this library reads 4")
    for text in ("[]", "{", "[" * 100_000):
        rewrite(path, data, lambda meta, text=text: text)
        refused(path, r"meta\.json does not read as JSON|a zip of another kind")
    rewrite(path, data, lambda meta: json.dumps(meta).replace('"layer": 0', '"layer": NaN'))
    refused(path, "NaN is no number of JSON")
    for name in ("../evil", "/etc/evil", "arrays/../meta.npy", "arrays/zz"):
        rewrite(path, data, members={name: b""})
        refused(path, "it has members that are no arrays")
        assert [file.name for file in tmp_path.iterdir()] == ["bad.regard"]
    with pytest.warns(UserWarning, match="Duplicate name"):
        rewrite(path, data, members={"arrays/a1.npy": b""})
    refused(path, "two members have one name")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("meta.json", "{}")
    refused(path, r"meta\.json is compressed in another way than Trace\.save compresses")


def npy(array, **header):
    file, own = io.BytesIO(), {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_1_0(file, own | header)
    return file.getvalue() + array.tobytes()


def test_arrays_that_do_not_fit_their_headers_are_refused(tmp_path, good):
    path, data, member = tmp_path / "bad.regard", good["qk"], f"arrays/{LSE}.npy"
    lse = np.zeros((H, T), np.float32)
    rewrite(path, data, drop=(member,), members={member: npy(lse)})
    assert not inspection.load(path).calls[0].lse.any()
    np.testing.assert_array_equal(np.load(path)[f"arrays/{LSE}"], lse)
    for content, message in [
        (npy(lse, shape=(2**47,)), "has 264 bytes; float32"),
        (npy(lse, shape=(-6, -11)), "has the shape"),
        (npy(lse, shape=(1,) * 9), "has the shape"),
        (npy(lse, fortran_order=True), "or another order"),
        (npy(lse, descr="|O"), "has the unknown dtype object"),
        (npy(lse, descr=">f4"), "has the unknown dtype >f4"),
        (npy(lse, descr="__import__('os')"), "has no header of NumPy's"),
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


def test_bombs_are_refused_before_they_are_read(tmp_path, good, monkeypatch):
    path = tmp_path / "bad.regard"
    zeros = np.zeros(1 << 22, np.float32)
    write_archive(path, {}, {"a": zeros})
    assert path.stat().st_size < zeros.nbytes / 100
    with pytest.raises(ValueError, match=r"its arrays have 167\d+ bytes, more than max_bytes = 1000000"):
        inspection.load(path, max_bytes=1_000_000)
    np.testing.assert_array_equal(read_archive(path)[1]["a"], zeros)
    path.write_bytes(good["qk"])
    monkeypatch.setattr(trace_files, "_MOST_META", 100)
    refused(path, "more than the 100 that are read")
    monkeypatch.undo()
    # A directory that promises more than the member holds.
    write_archive(path, {}, {"a": np.zeros(8, np.float32)})
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, data.rindex(b"PK\x01\x02") + 24, 1 << 30)
    path.write_bytes(data)
    assert_refused((lambda: read_archive(path), "expected a trace"))


def edit(*keys, to):
    def change(meta):
        functools.reduce(operator.getitem, keys[:-1], meta["trace"])[keys[-1]] = to

    return change


def borrow(*keys, source):
    return lambda meta: edit(*keys, to=functools.reduce(operator.getitem, source, meta["trace"]))(meta)


def known_positions(**known):
    names = ("rotary", "table", "table_kind", "trained_length")
    return edit(*C, "positions", to=dict.fromkeys(names) | {"class": "KnownPositions"} | known)


C = ("calls", 0)
ROTARY = {"class": "Rotary", "base": 1e4, "width": None, "interleaved": False, "scaling": None}
WRONG = [
    (edit("title", to=3), "title: expected str"),
    (edit("calls", to={}), "calls: expected list"),
    (edit(*C, "heads", to=7), r"calls\[0\].lse: expected f numbers of shape \(7, 11\)"),
    (edit(*C, "value_norms", to=LSE + "x"), "value_norms: expected the name of an array"),
    (edit(*C, "keys", to=12), "key_tokens: expected a sequence of 12"),
    (edit(*C, "layer", to=True), "layer: expected int, got 'True'"),
    (edit(*C, "kind", to="both"), "kind: expected self or cross"),
    (edit(*C, "query_offset", to=2**40), "query_offset: expected a number that fits int32"),
    (edit(*C, "problem", "query", to=LSE), "problem.query: expected f numbers of shape"),
    (edit(*C, "problem", "bias", to="a5"), "its parts do not fit one another"),
    (edit(*C, "problem", to=None), "a problem or a readout, one of the two"),
    (edit(*C, "query_tokens", to=4), "query_tokens: expected the number of one of 1 sequences"),
    (edit("sequences", 0, "ids", to="a3"), "Tokens cannot be made: ids: expected integers"),
    (edit(*C, "mask", to={"class": "eval"}), "mask: expected one of .*Causal.*or a class defined before"),
    (edit(*C, "mask", to={"class": "Chunked", "size": 0}), "mask: Chunked cannot be made"),
    (edit(*C, "mask", to={"class": "Causal", "x": 0}), "expected Causal with nothing"),
    (edit(*C, "mask", "left", "ids", to="a3"), "mask.left: Documents cannot be made"),
    (known_positions(rotary=ROTARY | {"width": 2**30}), "positions.rotary.width: expected 0 to 65536"),
    (known_positions(rotary=ROTARY | {"scaling": {"class": "os.system"}}), "rotary.scaling: expected one of"),
    (known_positions(table=LSE), "table_kind, trained_length: expected str"),
]
R = (*C, "readout")
WRONG_STATISTICS = [
    (edit(*R, "query_block", to=3), "query_block: expected a power of two"),
    (edit(*R, "query_block", to=1), "block_mass: expected f numbers"),
    (borrow(*R, "keys", source=(*C, "lse")), "keys: expected i numbers"),
    (borrow(*C, "score", "members", 0, "cap", source=(*R, "key_mass")), "Softcap cannot be made"),
]


def test_plain_data_that_make_no_sense_are_refused(tmp_path, good):
    for kept, wrong in (("qk", WRONG), ("statistics", WRONG_STATISTICS)):
        for change, message in wrong:
            rewrite(tmp_path / "bad.regard", good[kept], change)
            refused(tmp_path / "bad.regard", message)

    def deepen(meta):  # masks within masks have an end
        mask = {"class": "Causal"}
        for _ in range(300):
            mask = {"class": "Not", "operand": mask}
        meta["trace"]["calls"][0]["mask"] = mask

    rewrite(tmp_path / "bad.regard", good["qk"], deepen)
    refused(tmp_path / "bad.regard", "expected at most 200 records within one another")


def test_sizes_that_no_bytes_stand_for_are_refused(tmp_path, good):
    path, many = tmp_path / "bad.regard", 10**7
    call = read_meta(good["qk"])["trace"]["calls"][0]
    query, key = (f"arrays/{call['problem'][name]}.npy" for name in ("query", "key"))
    rows = {f"arrays/{call[name]}.npy": (many, 0) for name in ("lse", "max_score")}
    for changes, shapes, message in [
        ({"keys": many}, {query: (H, T, 0), key: (1, many, 0)}, r"problem\.query: expected at least one"),
        ({"heads": many, "rows": 0}, {query: (many, 0, 5)} | rows, r"heads: expected at most 4096 without"),
    ]:
        changes |= {"key_tokens": None, "query_tokens": None, "value_norms": None}
        hollow = {name: npy(np.zeros(shape, np.float32)) for name, shape in shapes.items()}
        change = lambda meta, new=changes: meta["trace"]["calls"][0].update(new)
        rewrite(path, good["qk"], change, members=hollow, drop=hollow)
        refused(path, message)


def test_top_keys_lie_within_the_keys(sound, tmp_path):
    found = sound[0].readout(8, 3)
    for name, value in (("top_keys", T), ("top_keys", -2), ("keys", T + 1)):
        array = np.array(getattr(found, name))
        array.flat[0] = value
        bad = dataclasses.replace(sound[0])
        bad._found[8, 3, None] = dataclasses.replace(found, **{name: array})
        inspection.Trace((bad,)).save(tmp_path / "bad.regard", grid=8, top_k=3)
        refused(tmp_path / "bad.regard", f"readout.{name}: expected numbers in")


ODD = [None, 0, -1, 2**70, 1.5, "", "a1", "a4", [], {}, True, [[1]], {"class": "Not"}]


def walk(node, place=()):
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*place, key)
        yield from walk(value, (*place, key))


def test_no_change_of_the_plain_data_raises_anything_else(good, tmp_path):
    path = tmp_path / "odd.regard"
    for number, place in enumerate(walk(read_meta(good["qk"])["trace"])):
        rewrite(path, good["qk"], edit(*place, to=ODD[number % len(ODD)]))
        try:
            assert isinstance(repr(inspection.load(path).calls), str)
        except ValueError as error:
            assert str(path) in str(error)
