"""Safetensors files: read lazily, written whole or not at all, and refused with the file's name."""

import json
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from regard.interop.weight_files import LazyTensor, WeightFileError, open_weights, write_weights

RNG = np.random.default_rng(5)
TENSORS = {
    "float32": RNG.normal(size=(3, 5)).astype(np.float32), "float64": RNG.normal(size=(7,)),
    "float16": RNG.normal(size=(2, 3, 5)).astype(np.float16),
    "bfloat16": RNG.normal(size=(3, 11)).astype(ml_dtypes.bfloat16), "scalar": np.float32(13.5),
    "empty": np.zeros((0, 3), np.float32), "ids": np.arange(7)[None],
    "flags": np.array([True, False, True]), "transposed": RNG.normal(size=(3, 5)).astype(np.float32).T,
}  # fmt: skip


def refuse(message, call, *arguments, **options):
    with pytest.raises(WeightFileError, match=message):
        call(*arguments, **options)


def assert_equal(weights, tensors):
    assert {*weights} == {*tensors}
    assert len(weights) == len(tensors)
    for name, expected in tensors.items():
        found = weights.read(name)
        assert found.dtype == expected.dtype
        assert found.shape == weights[name].shape == np.shape(expected)
        np.testing.assert_array_equal(found, expected)


def test_what_is_written_is_read_by_us_and_by_safetensors(tmp_path):
    path = write_weights(tmp_path / "made" / "model.safetensors", TENSORS)
    assert_equal(open_weights(path), TENSORS)
    assert_equal(open_weights(tmp_path / "made"), TENSORS)
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
        for name, expected in TENSORS.items():
            np.testing.assert_array_equal(file.get_tensor(name), expected)
    assert [one.name for one in (tmp_path / "made").iterdir()] == ["model.safetensors"]
    # Files of the library's own are read, too.
    tensors = {name: np.ascontiguousarray(x) for name, x in TENSORS.items() if name != "scalar"}
    save_file(tensors, tmp_path / "model.safetensors")
    assert_equal(open_weights(tmp_path), tensors)


@pytest.mark.parametrize("most", [1, 100, 10**6])
def test_tensors_come_back_from_shards_of_any_size(tmp_path, most):
    path = write_weights(tmp_path / "model.safetensors", TENSORS, shard_bytes=most)
    assert path.name == ("model.safetensors" if most == 10**6 else "model.safetensors.index.json")
    for place in (path, tmp_path):
        assert_equal(open_weights(place), TENSORS)
    if most == 1:
        index = json.loads(path.read_text())
        assert len({*index["weight_map"].values()}) == len(TENSORS)
        assert index["metadata"]["total_size"] == sum(np.asarray(x).nbytes for x in TENSORS.values())


def test_planned_tensors_are_computed_one_by_one_while_writing(tmp_path):
    order = []
    compute = lambda name: order.append(name) or np.full((2, 3), len(order), np.float64)
    plans = {n: LazyTensor((2, 3), np.dtype(np.float32), lambda n=n: compute(n)) for n in "abc"}
    weights = open_weights(write_weights(tmp_path / "model.safetensors", plans))
    assert order == ["a", "b", "c"]
    assert [weights.read(n).flat[0] for n in "abc"] == [1, 2, 3]
    assert weights["a"].dtype == "F32"


def test_nothing_is_overwritten_unless_asked(tmp_path):
    """And never does a file stand beside the index that replaces it."""
    path, old, new = tmp_path / "model.safetensors", {"a": np.ones(3), "b": np.ones(2)}, {"a": np.zeros(3)}
    write_weights(path, old)
    for shards in (None, 1):
        refuse("model.safetensors exists already; .*force=True", write_weights, path, new, shard_bytes=shards)
    assert_equal(open_weights(path), old)
    write_weights(path, {**old, **new}, force=True, shard_bytes=1)
    assert_equal(open_weights(tmp_path), {**old, **new})
    refuse("exists already", write_weights, path, new)
    write_weights(path, new, force=True)
    assert_equal(open_weights(tmp_path), new)


def test_a_failure_while_writing_leaves_the_old_file_and_no_other(tmp_path):
    path = write_weights(tmp_path / "model.safetensors", {"a": np.ones(3)})
    wrong = {"a": np.zeros(3), "b": LazyTensor((2, 3), np.dtype(np.float32), lambda: np.zeros(5))}
    refuse(r"b: expected shape \(2, 3\), computed \(5,\)", write_weights, path, wrong, force=True)
    assert_equal(open_weights(path), {"a": np.ones(3)})
    assert [one.name for one in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_header_may_be_as_long_as_a_pickle_begins(tmp_path):
    path, tensors = tmp_path / "model.safetensors", {"w": np.arange(3, dtype=np.float32)}
    write = lambda size: write_weights(path, tensors, metadata={"note": "a" * size}, force=True).read_bytes()
    for size in (640, 1408):
        assert write(size - int.from_bytes(write(0)[:8], "little"))[:2] in (b"\x80\x02", b"\x80\x05")
        assert_equal(open_weights(path), tensors)


def test_pickles_are_refused_unopened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    for name in ("pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"):
        (tmp_path / name).write_bytes(pickle.dumps(Trap()))
        refuse(f"{name}: a pickle file: opening one runs whatever code", open_weights, tmp_path / name)
    refuse(r"expected model.safetensors .*pytorch_model.bin, which is pickle", open_weights, tmp_path)
    disguised = tmp_path / "model.safetensors"
    message = r"model.safetensors: named like a safetensors file but a pickle"
    disguised.write_bytes(pickle.dumps(Trap()))
    refuse(message, open_weights, tmp_path)
    with zipfile.ZipFile(disguised, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Trap()))
    refuse(message, open_weights, disguised)
    assert not (tmp_path / "sprung").exists()


def test_damaged_files_are_named(tmp_path):
    path = write_weights(tmp_path / "model.safetensors", TENSORS)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    shorter = whole[:-3], whole[: 8 + length], whole[: 8 + length // 2], b""
    wrong_length = (length + 1).to_bytes(8, "little") + whole[8:]
    for content in (*shorter, b"not a safetensors file at all", whole + b"more", wrong_length):
        path.write_bytes(content)
        message = rf"model.safetensors: expected a whole safetensors file, got {len(content)} bytes"
        refuse(message, open_weights, tmp_path)


def test_indexes_that_do_not_agree_with_their_files_are_refused(tmp_path):
    index = write_weights(tmp_path / "model.safetensors", {"a": np.ones(3), "b": np.ones(2)}, shard_bytes=1)
    good = json.loads(index.read_text())
    places = good["weight_map"]
    index.write_text(json.dumps({"weight_map": {**places, "c": places["a"]}}))
    refuse(r"expected tensor c in .*00001-of-00002.safetensors, which does", open_weights, tmp_path)
    too_long = json.dumps({"weight_map": {"a": "a" * 5_000}})
    for text in ("{", "[" * 100_000, "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', too_long):
        index.write_text(text)
        refuse(r"index.json: expected JSON with a weight_map", open_weights, tmp_path)
    index.write_text(json.dumps(good))
    (tmp_path / places["b"]).unlink()
    refuse(rf"names files that are not beside it: {places['b']}", open_weights, tmp_path)
    # Nor can one point out of its folder.
    write_weights(tmp_path.parent / "outside.safetensors", {"a": np.ones(3)}, force=True)
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    refuse(r"not beside it: outside.safetensors", open_weights, index)


def test_absent_files_names_and_element_types_are_explained(tmp_path):
    refuse(r"expected model.safetensors or .*; found nothing", open_weights, tmp_path)
    refuse("nowhere: expected a safetensors file or a folder with one", open_weights, tmp_path / "nowhere")
    save_file({"a": np.ones(3, ml_dtypes.float8_e4m3fn)}, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    assert weights["a"].dtype == "F8_E4M3"
    refuse(r"tensor a has element type F8_E4M3; expected one of F64, F32", weights.read, "a")
    with pytest.raises(KeyError, match=r"b: no such tensor among 1 \(nearest: a\)"):
        weights.read("b")
    write = lambda name, dtype: write_weights(tmp_path / name, {"b": np.ones(3, dtype)})
    refuse(r"tensors: expected dtypes .*; b has complex64", write, "b.safetensors", np.complex64)
    refuse(r"model.bin: expected a name that ends in .safetensors", write, "model.bin", np.float32)
