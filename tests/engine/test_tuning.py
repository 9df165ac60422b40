"""The tuning of a machine on tiny calls: what is chosen, what is written. No time is ever compared."""

import json

import jax
import jax.numpy as jnp
import pytest

from regard import explain, masks, tuning
from regard.cli import main
from regard.engine.call.canonicalization import canonicalize
from regard.engine.flash import measurements

SHAPE, LONG = (1, 2, 64, 4), (1, 2, 65, 4)
CALL, PLAIN = tuning.Workload(LONG, LONG, masks.causal(), backward=True), tuning.Workload(SHAPE, SHAPE)
QUESTIONS = (
    tuning.Question("dense_rows", (CALL,), 1, 1 << 10),  # tiles whatever their number: asked in vain
    tuning.Question("dense_side", (PLAIN,), 16, 1 << 10),
)


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "regard" / "tuning.json"


@pytest.fixture
def tiny(monkeypatch, kept):
    default = measurements.Tuning(dense_scores=0, dense_side=0x40, dense_rows=2)
    monkeypatch.setattr(tuning, "QUESTIONS", QUESTIONS)
    for module in (tuning, measurements):
        monkeypatch.setattr(module, "default_tuning", lambda: default)
    return default


def run(*words):
    return main(["tune", *map(str, words)])


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_what_is_faster_is_kept_and_what_is_as_fast_is_not(ratio, tiny, kept, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "_ratio", lambda *_: ratio)
    assert run("--dry-run", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["dense_side"] == (32 if ratio < 1 else 64)
    assert "3/3 all that changed" in captured.err
    assert ("the one call that it changes take 0.50" if ratio < 1 else "gained: nothing") in captured.err
    assert not kept.exists()


def test_where_the_last_measurement_does_not_bear_it_out_the_defaults_stay(tiny, monkeypatch):
    ratios = iter([0.5, 1.1])
    monkeypatch.setattr(tuning, "_ratio", lambda *_: next(ratios, 0.0))
    findings = tuning.measure_tuning(QUESTIONS[1:], 100, lambda *_: None)
    assert (findings.tuning, findings.ratios, findings.trials[0].kept) == (tiny, (), True)


def test_what_is_not_asked_in_time_is_told(tiny, capsys):
    assert run("--dry-run", "--seconds", 1e-9) == 0
    assert "not asked in 1e-09 s: dense_rows, dense_side" in capsys.readouterr().out
    assert run("--seconds", 0) == 2


def test_a_tuning_is_written_and_read_back(kept, monkeypatch, capsys):
    chosen = measurements.Tuning(tile_side=128, dense_scores=7)
    monkeypatch.setattr(tuning, "measure_tuning", lambda *_: tuning.Findings(chosen, (), (0.9, 0.8), ()))
    assert run() == 0
    printed = capsys.readouterr().out.replace("\n", "")
    assert str(kept) in printed
    assert "the 2 calls that it changes take 0.85 of their time" in printed
    assert json.loads(kept.read_text())[measurements.device_key()] == {"dense_scores": 7, "tile_side": 128}
    assert measurements.load_tuning() == chosen
    array = jax.ShapeDtypeStruct(SHAPE, "float32")
    assert "measured here by regard tune" in explain(array, array, array).costs
    measurements.load_kept.cache_clear()


def test_a_tuning_is_added_to_those_of_other_devices(tmp_path):
    path, found = tmp_path / "tuning.json", measurements.Tuning(dense_side=31)
    path.write_text('{"another": {"tile_side": 64}}')
    measurements.write_tuning(path, found)
    assert json.loads(path.read_text())["another"] == {"tile_side": 64}
    assert measurements.read_tuning(path) == found


def test_a_damaged_tuning_is_ignored_with_a_warning(tmp_path):
    path, here = tmp_path / "tuning.json", measurements.device_key()
    for damage in ("[1, 2]", "{", json.dumps({here: [3]}), json.dumps({here: {"dense_rows": -1}})):
        path.write_text(damage)
        with pytest.warns(UserWarning, match=r"tuning\.json is ignored: .*`regard tune` writes it anew"):
            assert measurements.read_tuning(path) == measurements.Tuning()


def test_an_interrupted_tuning_leaves_the_old_file(tiny, kept, monkeypatch):
    old = measurements.Tuning(tile_side=128)
    measurements.write_tuning(measurements.cache_file(), old)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "_ratio", stop)
    assert run() == 130
    assert measurements.read_tuning(kept) == old


def test_tiles_are_of_nearly_one_size():
    for length in (1, 31, 32, 33, 511, 512, 513, 1025, 1103, 131_072):
        arrays = [jax.ShapeDtypeStruct((2, length, 8), jnp.float32)] * 3
        for mask, side in ((None, 1024), (masks.causal(), 512)):
            for block in measurements.Tuning().blocking(canonicalize(*arrays, mask=mask)):
                count = -(-length // side)
                assert block.queries == block.keys <= min(length, side)
                assert -(-length // block.keys) == count
                assert count * block.keys - length < 32 * count
        narrow = canonicalize(*[jax.ShapeDtypeStruct((2, length, 8), jnp.bfloat16)] * 3)
        assert measurements.Tuning().blocking(narrow)[0].queries <= 512


def test_local_masks_get_lower_tiles_in_the_backward_walk():
    arrays = [jax.ShapeDtypeStruct((2, 4096, 8), jnp.float32)] * 3
    ids, window = jnp.arange(4096) // 100, masks.sliding_window
    local = masks.causal() & window(300, 300), masks.chunked(512) | masks.segments(ids)
    wide = window(4000), masks.causal() | masks.segments(ids), ~masks.chunked(512)
    for mask, lower in (*((mask, 256) for mask in local), *((mask, 512) for mask in wide)):
        blocks = measurements.Tuning().blocking(canonicalize(*arrays, mask=mask))
        assert [(block.queries, block.keys) for block in blocks] == [(512, 512), (lower, 512)], mask
