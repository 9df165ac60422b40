"""The benchmark on tiny calls: who is timed, who is reported, what is written. No time is ever compared."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard import attend, masks
from regard.benchmarking import (
    agreement,
    cache_rate,
    cases,
    generation_rate,
    jit_gain,
    linear_gain,
    measuring,
    option_costs,
    peers,
    readout_costs,
    report,
    tile_lists,
    training_gain,
    tuning,
)
from regard.cli import benchmarking, main
from regard.cli.console import Console
from regard.engine.flash import tuning as engine_tuning

pytestmark = pytest.mark.filterwarnings("ignore")  # other libraries warn as they like

TINY = cases.Case("tiny", (2, 3, 17, 5), (2, 3, 17, 5))
BACKWARD = dataclasses.replace(TINY, name="tiny-backward", mask="window", passes="forward and backward")
OWN = peers.JAX_PEERS[:3]
PRODUCT_SIDE = 16


@pytest.fixture(autouse=True)
def _loose_arrays():
    """Other libraries promote dtypes and ranks."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The command on tiny cases and its own cache."""
    monkeypatch.setattr(cases, "CASES", (TINY, BACKWARD))
    monkeypatch.setattr(measuring, "PRODUCT_SIDE", PRODUCT_SIDE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def measure(case, chosen=OWN, rounds=1):
    return measuring.measure_case(case, chosen, rounds, PRODUCT_SIDE)


# Cases


def test_kept_pairs_are_counted_over_heads_and_batch():
    assert TINY.count_pairs() == 2 * 3 * 17 * 17
    causal = dataclasses.replace(TINY, mask="causal")
    assert causal.count_pairs() == 2 * 3 * 17 * 18 // 2
    assert causal.count_flops() == causal.count_pairs() * 2 * 2 * 5
    assert (
        dataclasses.replace(causal, passes="forward and backward").count_flops() == causal.count_flops() * 3.5
    )


def test_inputs_are_the_same_every_time_and_differ_between_cases():
    one, again, other = TINY.make_inputs(), TINY.make_inputs(), BACKWARD.make_inputs()
    np.testing.assert_array_equal(one.query, again.query)
    assert not np.array_equal(one.query, other.query)
    assert not np.array_equal(one.query, one.key)
    assert one.cotangent is None
    assert other.cotangent is not None


@pytest.mark.parametrize("kind", cases.MASKS)
@pytest.mark.parametrize("length", [17, 64])
def test_no_query_is_left_without_keys(kind, length):
    shape = (1, 1, length, 3)
    keep = cases.Case("x", shape, shape, kind).make_dense_mask()
    assert keep is None or keep.any(-1).all()


def test_documents_are_contiguous_and_as_many_as_said():
    ids = cases.document_ids(1000)
    assert (np.diff(ids) >= 0).all()
    assert len(set(ids.tolist())) == cases.DOCUMENTS


def test_names_are_selected_by_words_and_unknown_ones_refused():
    names = ["causal", "causal-backward", "decode"]
    assert cases.select("case", names, ["backward", "dec"]) == ["causal-backward", "decode"]
    assert cases.select("case", names, []) == names
    assert cases.select("peer", names, ["causal"], exact=True) == ["causal"]
    with pytest.raises(ValueError, match=r"no case has 'x'; expected causal, causal-backward, decode"):
        cases.select("case", names, ["x"])
    assert len({case.name for case in cases.CASES}) == len(cases.CASES)


# Agreement


@pytest.mark.parametrize("kind", cases.MASKS)
def test_all_are_asked_the_same_question(kind, monkeypatch):
    monkeypatch.setattr(agreement, "CELLS", 6 * 17 * 4)  # the reference takes four queries at a time
    case = dataclasses.replace(BACKWARD if kind == "window" else TINY, mask=kind)
    chosen = [peer for peer in peers.JAX_PEERS if peer.name in ("regard-dense", "jax.nn", "flax.nnx")]
    measured = measure(case, chosen).measurements
    assert [one.status for one in measured] == ["measured"] * 3, measured


def test_bfloat16_agrees_within_its_rounding():
    measured = measure(dataclasses.replace(BACKWARD, dtype="bfloat16")).measurements
    assert [one.status for one in measured] == ["measured"] * 3, measured


def test_a_grouped_decode_agrees():
    case = cases.Case("decode", (2, 6, 1, 5), (2, 3, 17, 5), passes="decode")
    outcome = measure(case, peers.JAX_PEERS)
    status = {one.peer: one.status for one in outcome.measurements}
    assert status["regard-tiled"] == status["jax.nn"] == "measured"
    assert status["flax.nnx"] == "refused"


def unmasked(case, inputs):
    return peers.compile_call(lambda query, key, value, mask: attend(query, key, value), case, inputs, None)


def wrong_gradient(case, inputs):
    attention = lambda query, key, value, mask: attend(query, key, jax.lax.stop_gradient(value), mask=mask)
    return peers.compile_call(attention, case, inputs, case.make_mask())


def broken(case, inputs):
    raise RuntimeError("no kernel\nlong story")


@pytest.mark.parametrize(
    ("prepare", "status", "reason"),
    [
        (unmasked, "disagrees", ""),
        (wrong_gradient, "disagrees", "value's gradient is off by 1 of"),
        (broken, "failed", "RuntimeError: no kernel"),
    ],
)
def test_a_wrong_peer_is_reported_and_not_timed(prepare, status, reason):
    outcome = measure(BACKWARD, [OWN[0], peers.Peer("other", prepare)])
    own, other = outcome.measurements
    assert own.status == "measured"
    assert other.status == status
    assert other.reason.startswith(reason)
    assert "story" not in other.reason
    assert other.median_seconds is None
    (line,) = report.list_absent([outcome])
    assert line.startswith(f"other {status}: {reason}")


def test_errors_are_seen_row_by_row():
    expected = np.ones((1, 1, 100, 4), np.float32)
    result = expected.copy()
    result[0, 0, 50] = 0
    assert agreement.largest_error([result], [expected]) == (1.0, "output")
    result[0, 0, 50] = np.nan
    assert agreement.largest_error([result], [expected])[0] == float("inf")
    assert agreement.largest_error([result[..., 1:]], [expected])[0] == float("inf")
    assert agreement.largest_error([], [expected])[0] == float("inf")


# Measuring


def test_calls_take_turns_in_rotating_order():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = measuring.interleave(calls, 3)
    assert "".join(order) == "abcacbcab"
    assert all(len(times) == 3 for times in seconds.values())


def test_ratios_are_to_regard_and_to_the_best_other_library():
    times = {"regard": 2.0, "regard-dense": 0.5, "jax.nn": 8.0, "flax.nnx": 4.0}
    measured = tuple(measuring.Measurement(name, "measured", median_seconds=t) for name, t in times.items())
    refused = measuring.Measurement("tokamax", "refused", "not installed")
    outcome = measuring.Outcome(TINY, 1, 10**9, 5.0, (*measured, refused), 0)
    assert outcome.ratio_to_own(measured[2]) == 4
    assert outcome.ratio_to_best(measured[0]) == 0.5
    assert outcome.gflops(measured[0]) == 0.5
    assert outcome.ratio_to_own(refused) is None


def test_a_program_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(peers, "available_bytes", lambda: 0)
    assert {one.status for one in measure(TINY).measurements} == {"refused"}


def test_tile_lists_are_built_and_counted():
    found = tile_lists.measure_tile_lists(1, length=2048, window=300)
    assert found["kept_tiles"] == 4 + 3  # the diagonal of 4 x 4 tiles, and the tiles beside it
    assert found["tiles"] == 16
    assert found["temporary_bytes"] > 0


def test_options_are_timed_against_the_plain_call():
    found = option_costs.measure_option_costs(1, (1, 2, 64, 8))
    for passes in ("forward", "forward and backward"):
        assert found[passes]["over_plain"]["plain"] == 1
        assert found[passes]["median_seconds"].keys() == option_costs.make_options(2).keys()
    lines = list(option_costs.describe_option_costs(found))
    assert lines[0].startswith("over a plain causal call at (1, 2, 64, 8), forward: softcap ")
    assert len(lines) == 2


def test_every_option_changes_the_result():
    arrays = [jax.random.normal(rng, (1, 2, 9, 8)) for rng in jax.random.split(jax.random.key(0), 3)]
    with jax.numpy_dtype_promotion("standard"):
        outputs = {name: call(*arrays) for name, call in option_costs.make_options(2).items()}
    for name, output in outputs.items():
        assert name == "plain" or (output != outputs["plain"]).any(), name


def test_looking_is_timed_beside_the_forward_pass():
    found = readout_costs.measure_readout_costs(1, (1, 2, 64, 8))
    assert found["over_forward"]["forward"] == 1
    assert all(seconds > 0 for seconds in found["median_seconds"].values())
    (line,) = readout_costs.describe_readout_costs(found)
    assert line.startswith("over the forward pass of a causal call at (1, 2, 64, 8): readout ")


def test_a_cache_is_read_at_a_share_of_the_rate_of_a_copy():
    found = cache_rate.measure_cache_rate(2, {"small": (2, 4, 2, 32, 8)})
    assert found["small"]["cached_bytes"] == 2 * 2 * 2 * 32 * 8 * 4
    assert found["small"]["share_of_copy"] > 0
    assert "decoding through a cache, small: 0 MiB" in next(cache_rate.describe_cache_rate(found))


def test_linear_attention_is_timed_at_every_length():
    found = linear_gain.measure_linear_gain(1, (32, 64))
    assert found["growth"] == found["median_seconds"]["linear 64"] / found["median_seconds"]["linear 32"]
    assert found["gain"] == found["median_seconds"]["softmax 64"] / found["median_seconds"]["linear 64"]
    assert "linear attention at 64 tokens" in next(linear_gain.describe_linear_gain(found))


def test_jit_changes_no_result():
    ways = jit_gain.make_ways((1, 2, 3, 2))
    assert jit_gain.ways_agree(ways)
    assert not jit_gain.ways_agree(ways | {"formula, jit": lambda: ways["formula, jit"]() + 1})
    medians = {"formula": 6.0, "formula, jit": 2.0}
    assert jit_gain.compute_gains(medians) == {"formula": 3.0}


# The command


def run(*words):
    return main(["bench", *map(str, words)])


def test_results_are_complete_and_drawn(small, capsys):
    out = small / "out"
    assert run("--rounds", 1, "--dtypes", "float32", "--cases", "tiny", "--out", out) == 0
    printed = capsys.readouterr().out
    assert "tiny-backward" in printed
    assert "1/2 tiny float32" in printed
    results = json.loads((out / "results.json").read_text())
    assert results["complete"]
    assert results["settings"]["rounds"] == 1
    assert set(results["machine"]) == {"system", "cpu", "cores", "devices", "python", "versions"}
    assert [entry["case"] for entry in results["cases"]] == ["tiny", "tiny-backward"]
    for entry in results["cases"]:
        assert [peer["peer"] for peer in entry["peers"]] == list(benchmarking.PEERS)
        own = entry["peers"][0]
        assert own["ratio_to_regard"] == 1
        assert own["median_ms"] >= own["least_ms"] > 0
        assert own["temporary_mib"] >= 0
        assert own["first_call_seconds"] > 0
        assert own["gflops"] / entry["product_gflops"] == pytest.approx(own["share_of_product"])
        assert all(peer["status"] == "measured" or peer["reason"] for peer in entry["peers"])
    assert (out / "ratios-float32.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "ratios-float32.svg").read_text().startswith("<?xml")


def test_nothing_is_overwritten_unasked(small, capsys):
    out = small / "out"
    words = ("--rounds", 1, "--dtypes", "float32", "--cases", "tiny-b", "--peers", "regard", "--out", out)
    assert run(*words) == 0
    before = (out / "results.json").read_bytes()
    assert run(*words) == 2
    assert "--force" in capsys.readouterr().err
    assert (out / "results.json").read_bytes() == before
    assert run(*words, "--force") == 0
    foreign = small / "foreign"
    foreign.mkdir()
    (foreign / "results.json").write_text("[]")
    assert run("--out", foreign, "--force") == 2
    assert "holds other files" in capsys.readouterr().err
    assert (foreign / "results.json").read_text() == "[]"


def test_writing_is_timed_and_says_what_is_not_there(monkeypatch):
    monkeypatch.setattr("regard.benchmarking.peers.find_spec", lambda name: None)
    config = dataclasses.replace(generation_rate.CONFIG, d_model=16, d_ff=20, num_layers=1, vocab_size=23)
    found = generation_rate.measure_generation_rate(1, max_tokens=3, config=config)
    assert found["tokens_per_second"] == {"regard": pytest.approx(3 / found["median_seconds"]["regard"])}
    assert found["gain"] is None
    line = next(generation_rate.describe_generation_rate(found))
    assert line.startswith("writing with 0.0 million parameters: ")
    assert line.endswith("; transformers: torch is not installed")


def test_a_training_step_is_timed_with_either_attention():
    found = training_gain.measure_training_gain(1, length=13, batch=3, num_layers=2, d_model=20, num_heads=2)
    # The same model, or the comparison says nothing.
    assert found["loss_difference"] < 1e-5
    seconds, rates = found["median_seconds"], found["tokens_per_second"]
    assert rates["regard"] == pytest.approx(39 / seconds["regard"])
    assert found["gain"] == seconds["flax"] / seconds["regard"]
    assert "training a language model, 13 tokens, 2 heads: " in next(
        training_gain.describe_training_gain(found)
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--cases", "huge"],
            "no case has 'huge'; expected tiny, tiny-backward, tile-lists, jit, options, cache, readouts,",
        ),
        (["--peers", "jax"], "no peer is 'jax'; expected regard, regard-dense, regard-tiled, jax.nn"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["tune", "--cases", "tiny"], "only --rounds, --quick and --dry-run apply"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(small, capsys, words, message):
    assert run(*words, *([] if "tune" in words else ["--out", small / "out"])) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (small / "out").exists()


def test_regard_itself_may_not_disagree(small, monkeypatch, capsys):
    monkeypatch.setattr(benchmarking, "PEERS", {"regard": peers.Peer("regard", unmasked)})
    assert run("--rounds", 1, "--dtypes", "float32", "--cases", "tiny-b", "--out", small / "out") == 1
    assert "regard disagrees on tiny-backward float32" in capsys.readouterr().err


def test_an_interruption_keeps_what_was_measured(small, monkeypatch):
    first = measure(TINY)

    def stop(case, *_):
        if case.name != "tiny":
            raise KeyboardInterrupt
        return first

    monkeypatch.setattr(measuring, "measure_case", stop)
    assert run("--dtypes", "float32", "--out", small / "out") == 130
    results = json.loads((small / "out" / "results.json").read_text())
    assert not results["complete"]
    assert [entry["case"] for entry in results["cases"]] == ["tiny"]


# Tuning

SHAPE = (1, 2, 64, 4)
GRID = tuning.Grid(
    (16, 32),
    (1 << 8, 1 << 10),
    (cases.Case("causal", SHAPE, SHAPE, "causal", "forward and backward"),),
    (cases.Case("full", SHAPE, SHAPE),),
    (cases.Case("causal", SHAPE, SHAPE, "causal"),),
    (cases.Case("batched", SHAPE, SHAPE),),
    (cases.Case("few", (1, 2, 3, 4), SHAPE),),
)


@pytest.fixture
def tiny_grid(monkeypatch, small):
    monkeypatch.setattr(tuning, "FULL_GRID", GRID)
    return small / "cache" / "regard" / "tuning.json"


def test_a_dry_run_writes_nothing(tiny_grid, capsys):
    assert run("tune", "--dry-run", "--rounds", 1, "--json") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["tile_side"] in GRID.sides
    assert found["full_side"] in GRID.sides
    assert found["forward_cells"] in GRID.cells
    assert found["dense_scores"] in (0, 2 * 64 * 64)
    assert found["dense_rows"] in (1, 4)
    printed = captured.err
    assert "5/5 few, forward, 1x2x3x4 on 64 keys" in printed
    assert "left as it is" in printed
    assert "tile_side" in printed
    assert not tiny_grid.exists()


def test_a_tuning_is_written_and_read_back(tiny_grid, monkeypatch, capsys):
    chosen = engine_tuning.Tuning(tile_side=128, dense_scores=7)
    findings = tuning.Findings(chosen, {}, {}, {"dense_scores": (tuning.Point(7, 1.0, 2.0),)})
    monkeypatch.setattr(tuning, "measure_tuning", lambda *_: findings)
    assert run("tune", "--rounds", 1) == 0
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
        with pytest.warns(
            UserWarning, match=r"tuning\.json is ignored: .*`regard bench tune` writes it anew"
        ):
            assert engine_tuning.read_tuning(path) == engine_tuning.Tuning()


def test_an_interrupted_tuning_leaves_the_old_file(tiny_grid, monkeypatch):
    old = engine_tuning.Tuning(tile_side=128)
    engine_tuning.write_tuning(engine_tuning.cache_file(), old)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "_time_tiles", stop)
    assert run("tune", "--rounds", 1) == 130
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


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 511, 512, 513, 1025, 1103, 5000, 131_072])
def test_tiles_are_of_nearly_one_size(length):
    arrays = [jax.ShapeDtypeStruct((2, length, 8), jnp.float32)] * 3
    for mask, side in ((None, 1024), (masks.causal(), 512)):
        problem = peers.canonicalize_plain(*arrays, mask)
        for block in engine_tuning.Tuning().blocking(problem):
            count = -(-length // side)
            assert block.queries == block.keys <= min(length, side)
            assert -(-length // block.keys) == count
            assert count * block.keys - length < 32 * count
    narrow = peers.canonicalize_plain(
        *(jax.ShapeDtypeStruct((2, length, 8), jnp.bfloat16) for _ in range(3)), None
    )
    assert engine_tuning.Tuning().blocking(narrow)[0].queries <= 512


def test_local_masks_get_lower_tiles_in_the_backward_walk():
    arrays = [jax.ShapeDtypeStruct((2, 4096, 8), jnp.float32)] * 3
    ids = jnp.arange(4096) // 100
    local = [
        masks.sliding_window(255),
        masks.causal() & masks.sliding_window(300, 300),
        masks.chunked(512) | masks.segments(ids),
        masks.segments(ids, ids),
    ]
    wide = [
        masks.causal(),
        masks.sliding_window(4000),
        masks.sliding_window(None, 5),
        masks.causal() | masks.segments(ids),
        ~masks.chunked(512),
    ]
    for mask, lower in (*((mask, 256) for mask in local), *((mask, 512) for mask in wide)):
        assert mask.local == (lower == 256), mask
        forward, backward = engine_tuning.Tuning().blocking(peers.canonicalize_plain(*arrays, mask))
        assert (forward.queries, forward.keys) == (512, 512), mask
        assert (backward.queries, backward.keys) == (lower, 512), mask


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(capsys):
    with benchmarking._show_progress(Console()) as begin:
        begin(0, 2, "one")
    assert capsys.readouterr().out == "1/2 one\n"
