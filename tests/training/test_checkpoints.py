"""Checkpoints: complete or absent, bit for bit, and loud about damage."""

import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard.training import checkpoints
from regard.training.checkpoints import CheckpointError


class Pair(NamedTuple):
    left: jax.Array
    right: list


def make_state(seed=0):
    a, b = jax.random.split(jax.random.key(seed))
    return {
        "params": {"head": {"kernel": jax.random.normal(a, (3, 5)), "bias": jnp.float32(0.1)}},
        "optimizer": Pair(jnp.int32(7), [jax.random.normal(b, (11,), jnp.bfloat16), (jnp.zeros((2, 0)),)]),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    checkpoints.save(directory, 7, make_state(), {"held_out": {"accuracy": 0.5}, "seconds": 1.25})
    return directory


def assert_same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_state_comes_back_bit_for_bit(saved):
    checkpoint = checkpoints.load(checkpoints.list_checkpoints(saved)[-1])
    assert checkpoint.step == 7
    assert checkpoint.record == {"held_out": {"accuracy": 0.5}, "seconds": 1.25}
    template = jax.tree.map(jnp.zeros_like, make_state(seed=3))
    assert_same_bits(checkpoints.fit(checkpoint, template), make_state())
    shapes = jax.eval_shape(lambda: make_state()["params"])
    assert_same_bits(checkpoints.fit(checkpoint, shapes, prefix="params/"), make_state()["params"])


def test_only_the_newest_are_kept(tmp_path):
    for step in (2, 11, 101):
        checkpoints.save(tmp_path, step, make_state(step), {}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000011", "00000101"]
    restored = checkpoints.fit(checkpoints.load(tmp_path / "00000011"), make_state())
    assert_same_bits(restored, make_state(11))
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoints.save(tmp_path, 101, make_state(), {})
    restored = checkpoints.fit(checkpoints.load(tmp_path / "00000101"), make_state())
    assert_same_bits(restored, make_state(101))


def test_steps_of_nine_digits_come_after_those_of_eight(tmp_path):
    assert checkpoints.list_checkpoints(tmp_path / "nowhere") == []
    (tmp_path / "notes.txt").write_text("x")
    for name in ("100000000", "99999900", "²", ".00000003.draft"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == ["99999900", "100000000"]


@pytest.mark.parametrize("damage", ["missing", "cut short", "changed"])
def test_every_damaged_file_is_named(saved, tmp_path, damage):
    copy = shutil.copytree(saved / "00000007", tmp_path / "00000007")
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert len(files) > 5
    for file in files:
        contents = file.read_bytes()
        middle = len(contents) // 2
        if damage == "missing":
            file.unlink()
        elif damage == "cut short":
            file.write_bytes(contents[:middle])
        else:
            file.write_bytes(contents[:middle] + bytes([contents[middle] ^ 1]) + contents[middle + 1 :])
        with pytest.raises(CheckpointError, match=str(copy)) as caught:
            checkpoints.load(copy)
        assert str(file.relative_to(copy)) in str(caught.value)
        file.write_bytes(contents)
    checkpoints.load(copy)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "00000003").mkdir()
    (tmp_path / "00000003" / "weights.bin").write_bytes(b"not ours")
    with pytest.raises(CheckpointError, match=r"no checkpoint\.json"):
        checkpoints.load(tmp_path / "00000003")
    (tmp_path / "00000003" / "checkpoint.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged: .*recursion"):
        checkpoints.load(tmp_path / "00000003")


def test_a_state_of_another_model_is_refused(saved):
    for name, value, message in (
        ("kernel", jnp.zeros((5, 3)), r"expected float32\[5, 3\], found float32\[3, 5\]"),
        ("bias", jnp.int32(0), r"expected int32\[\], found float32\[\]"),
        ("extra", jnp.zeros(2), r"expected float32\[2\], found nothing"),
        ("bias", None, r"expected nothing, found float32\[\]"),
    ):
        template = make_state()
        template["params"]["head"][name] = value
        with pytest.raises(CheckpointError, match=f"params/head/{name}: {message}"):
            checkpoints.fit(checkpoints.load(saved / "00000007"), template)
