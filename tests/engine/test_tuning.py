"""The tuning of a machine on tiny calls: what is chosen, what is written. No time is ever compared."""

import json

import jax
import jax.numpy as jnp
import pytest

from regard import masks, tuning
from regard.cli import main
from regard.engine.call.canonicalization import canonicalize
from regard.engine.flash import tuning as engine_tuning

SHAPE = (1, 2, 64, 4)
GRID = tuning.Grid(
    (16, 32),
    (1 << 10,),
    (tuning.Workload(SHAPE, SHAPE, masks.causal(), backward=True),),
    (tuning.Workload(SHAPE, SHAPE),),
    {
        "dense_scores": (tuning.Workload(SHAPE, SHAPE, masks.causal()),),
        "dense_side": (tuning.Workload(SHAPE, SHAPE),),
        "dense_rows": (tuning.Workload((1, 2, 3, 4), SHAPE),),
    },
)


def run(*words):
    return main(["tune", *map(str, words)])


@pytest.fixture
def tiny_grid(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "FULL_GRID", GRID)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "regard" / "tuning.json"


def test_a_dry_run_writes_nothing(tiny_grid, capsys):
    assert run("--dry-run", "--rounds", 1, "--json") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["tile_side"] in GRID.sides
    assert found["full_side"] in GRID.sides
    assert found["forward_cells"] in GRID.cells
    assert found["dense_scores"] in (0, 2 * 64 * 64)
    assert found["dense_rows"] in (1, 4)
    printed = captured.err
    assert "5/5 no mask, forward, 1x2x3x4 on 64 keys" in printed
    assert "left as it is" in printed
    assert "tile_side" in printed
    assert not tiny_grid.exists()


def test_a_tuning_is_written_and_read_back(tiny_grid, monkeypatch, capsys):
    chosen = engine_tuning.Tuning(tile_side=128, dense_scores=7)
    findings = tuning.Findings(chosen, {}, {}, {"dense_scores": (tuning.Point(7, 1.0, 2.0),)})
    monkeypatch.setattr(tuning, "measure_tuning", lambda *_: findings)
    assert run("--rounds", 1) == 0
    assert str(tiny_grid) in capsys.readouterr().out.replace("\n", "")
    assert engine_tuning.read_tuning(engine_tuning.cache_file()) == chosen


def test_a_tuning_is_added_to_those_of_other_devices(tmp_path):
    path, found = tmp_path / "tuning.json", engine_tuning.Tuning(dense_side=31)
    path.write_text('{"another": {"tile_side": 64}}')
    engine_tuning.write_tuning(path, found)
    assert json.loads(path.read_text())["another"] == {"tile_side": 64}
    assert engine_tuning.read_tuning(path) == found


def test_a_damaged_tuning_is_ignored_with_a_warning(tmp_path):
    path, here = tmp_path / "tuning.json", engine_tuning.device_key()
    for damage in ("[1, 2]", "{", json.dumps({here: [3]}), json.dumps({here: {"dense_rows": -1}})):
        path.write_text(damage)
        with pytest.warns(UserWarning, match=r"tuning\.json is ignored: .*`regard tune` writes it anew"):
            assert engine_tuning.read_tuning(path) == engine_tuning.Tuning()


def test_an_interrupted_tuning_leaves_the_old_file(tiny_grid, monkeypatch):
    old = engine_tuning.Tuning(tile_side=128)
    engine_tuning.write_tuning(engine_tuning.cache_file(), old)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "_time_tiles", stop)
    assert run("--rounds", 1) == 130
    assert engine_tuning.read_tuning(tiny_grid) == old


def test_the_limit_has_the_least_geometric_mean():
    def limit(*ratios):
        return tuning.choose_limit([tuning.Point(size + 1, ratio, 1.0) for size, ratio in enumerate(ratios)])

    assert limit(0.5, 0.9, 1.5, 3.0) == 2
    assert limit(2.0, 3.0) == 0
    assert limit(0.5, 0.6) == 2
    assert limit(0.5, 1.1, 0.5, 2.0) == 3  # one unlucky point in between


def test_the_side_is_best_for_both_passes_and_defaults_win_ties():
    forward = {(256, 1 << 18): 1.5, (256, 1 << 20): 1.0, (512, 1 << 18): 1.2, (512, 1 << 20): 1.1}
    backward = {(256, 1 << 18): 1.5, (256, 1 << 20): 1.4, (512, 1 << 18): 1.0, (512, 1 << 20): 1.3}
    chosen = tuning.choose_tiles(forward, backward)
    assert (chosen.tile_side, chosen.forward_cells, chosen.backward_cells) == (512, 1 << 20, 1 << 18)
    level = dict.fromkeys([(side, 1 << bits) for side in (256, 512) for bits in (18, 19, 20)], 1.0)
    default = engine_tuning.Tuning()
    assert tuning.choose_tiles(level, level) == default
    assert tuning.choose_full_side(forward, backward, chosen) == 512
    level[1024, 1 << 20] = level[1024, 1 << 19] = 1.0
    assert tuning.choose_full_side(level, level, default) == 1024


def test_tiles_are_of_nearly_one_size():
    for length in (1, 31, 32, 33, 511, 512, 513, 1025, 1103, 131_072):
        arrays = [jax.ShapeDtypeStruct((2, length, 8), jnp.float32)] * 3
        for mask, side in ((None, 1024), (masks.causal(), 512)):
            for block in engine_tuning.Tuning().blocking(canonicalize(*arrays, mask=mask)):
                count = -(-length // side)
                assert block.queries == block.keys <= min(length, side)
                assert -(-length // block.keys) == count
                assert count * block.keys - length < 32 * count
        narrow = canonicalize(*[jax.ShapeDtypeStruct((2, length, 8), jnp.bfloat16)] * 3)
        assert engine_tuning.Tuning().blocking(narrow)[0].queries <= 512


def test_local_masks_get_lower_tiles_in_the_backward_walk():
    arrays = [jax.ShapeDtypeStruct((2, 4096, 8), jnp.float32)] * 3
    ids = jnp.arange(4096) // 100
    local = [
        masks.causal() & masks.sliding_window(300, 300),
        masks.chunked(512) | masks.segments(ids),
        masks.segments(ids, ids),
    ]
    wide = [
        masks.sliding_window(4000),
        masks.sliding_window(None, 5),
        masks.causal() | masks.segments(ids),
        ~masks.chunked(512),
    ]
    for mask, lower in (*((mask, 256) for mask in local), *((mask, 512) for mask in wide)):
        assert mask.local == (lower == 256), mask
        forward, backward = engine_tuning.Tuning().blocking(canonicalize(*arrays, mask=mask))
        assert (forward.queries, forward.keys) == (512, 512), mask
        assert (backward.queries, backward.keys) == (lower, 512), mask
