"""Checkpoints: complete or absent, bit for bit, and loud about damage."""

import contextlib
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from oracle import assert_same_bits
from regard.cli import main
from regard.training import checkpoint_files, checkpoints
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


def test_a_state_comes_back_bit_for_bit(saved):
    checkpoint = checkpoints.load(checkpoints.list_checkpoints(saved)[-1])
    assert checkpoint.step == 7
    assert checkpoint.record == {"held_out": {"accuracy": 0.5}, "seconds": 1.25}
    template = jax.tree.map(jnp.zeros_like, make_state(seed=3))
    assert_same_bits(checkpoints.fit(checkpoint, template), make_state())
    shapes = jax.eval_shape(lambda: make_state()["params"])
    assert_same_bits(checkpoints.fit(checkpoint, shapes, prefix="params/"), make_state()["params"])


def test_only_the_newest_are_kept(tmp_path):
    for step in (2, 99999900, 100000000):
        checkpoints.save(tmp_path, step, make_state(step), {}, keep=2)
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoints.save(tmp_path, 100000000, make_state(), {})
    (tmp_path / "²").mkdir()
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == ["99999900", "100000000"]
    for step in (99999900, 100000000):
        restored = checkpoints.fit(checkpoints.load(tmp_path / str(step)), make_state())
        assert_same_bits(restored, make_state(step))


def divide_among_two_processes(copy):
    (copy / "checkpoint.json").unlink()
    shutil.copytree(copy / "state" / "d", copy / "state" / "ocdbt.process_1")
    checkpoint_files.write_index(copy, 7, {}, {}, divided=True)
    for process in range(2):
        checkpoint_files.start_digests(copy, process)
    checkpoint_files.finish_digests()


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 2), (2, 3), (1, 99)])
@pytest.mark.parametrize("damage", ["missing", "cut short", "changed"])
def test_every_damaged_file_is_named(saved, tmp_path, damage, writers, readers):
    def check(path, files):
        for reader in range(readers):
            share = checkpoint_files.find_share(files, reader, readers)
            assert readers != 2 or {"process_1" in name for name in share} == {reader == 1}, "its own"
            checkpoints.verify_files(path, files, share)

    copy = shutil.copytree(saved / "00000007", tmp_path / "00000007")
    if writers == 2:
        divide_among_two_processes(copy)
    files = [path for path in copy.rglob("*") if path.is_file()]
    for file in files:
        contents = file.read_bytes()
        middle = len(contents) // 2
        changed = contents[:middle] + bytes([contents[middle] ^ 1]) + contents[middle + 1 :]
        file.write_bytes(contents[:middle] if damage == "cut short" else changed)
        if damage == "missing":
            file.unlink()
        try:
            assert "were checked by size alone" in checkpoints.load(copy, check=check).note
        except CheckpointError as error:
            assert str(file.relative_to(copy)) in str(error)
        file.write_bytes(contents)
    assert checkpoints.load(copy).note is None


@pytest.mark.parametrize("words", ["train copy --out", "train copy --resume", "train text --files", "plot"])
def test_object_stores_are_refused(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(SystemExit):
        assert main([*words.split(), "gs://bucket/run"]) == 2
    assert "got gs://bucket/run, the address of an object store" in capsys.readouterr().err
    with pytest.raises(ValueError, match="directory: expected a local file or folder, got gs://bucket, "):
        checkpoints.save("gs://bucket", 1, {}, {})
    assert not list(tmp_path.iterdir())


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint\.json"):
        checkpoints.load(tmp_path)
    (tmp_path / "checkpoint.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged: .*recursion"):
        checkpoints.load(tmp_path)


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
