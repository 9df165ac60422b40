"""The benchmark on tiny calls: who is timed, who is reported, what is written. No time is ever compared."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import agreement, cases, comparisons, gpu_rates, measuring, models, peers, report
from regard import attend
from regard.engine.backends import cudnn
from regard.tuning import interleave

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
    """The command on tiny cases."""
    monkeypatch.setattr(cases, "CASES", (TINY, BACKWARD))
    monkeypatch.setattr(measuring, "PRODUCT_SIDE", PRODUCT_SIDE)
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


@pytest.mark.slow
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
    seconds = interleave(calls, 3)
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


# Comparisons


def test_a_comparison_waits_for_every_result_after_a_warm_up():
    calls = []

    class Result:
        def block_until_ready(self):
            calls.append("waited")
            return self

    def call():
        calls.append("called")
        return Result()

    found = comparisons.Comparison("two", {"one": call, "other": call}, work=6.0, unit="tokens").measure(3)
    assert calls == ["called", "waited"] * (len(calls) // 2)
    assert len(calls) // 2 == 2 * (1 + 3 * 4), "a warm-up; each timed call after three untimed ones"
    assert list(found["ratio"]) == ["other"]
    assert all(0 <= seconds < 1 for seconds in found["median_seconds"].values())
    found |= {
        "median_seconds": {"one": 2e-3, "other": 3e-3},
        "ratio": {"other": 1.5},
        "rate": {"one": 3000, "other": 2000},
    }
    expected = "two: one 2 ms, 3,000 tokens per second; other 3 ms (1.5 times), 2,000 tokens per second"
    assert comparisons.describe(found) == expected


@pytest.mark.parametrize(
    ("made", "names"),
    [
        pytest.param(
            lambda: comparisons.compare_jit([(1, 2, 3, 2)]), ["jit", "no jit"], marks=pytest.mark.slow
        ),
        (lambda: comparisons.compare_options((1, 2, 64, 8)), [*comparisons.make_options(2)]),
        pytest.param(
            lambda: comparisons.compare_readouts((1, 2, 64, 8)),
            ["forward", "readout", "readout that finds lse"],
            marks=pytest.mark.slow,
        ),
        (lambda: comparisons.compare_linear((32, 64)), ["linear", "softmax"]),
        (lambda: comparisons.compare_cache({"small": (2, 4, 2, 32, 8)}), ["copy", "decode", "int8"]),
        (lambda: comparisons.compare_dropout((2, 3, 5, 7)), ["pattern", "bernoulli"]),
        pytest.param(
            lambda: models.compare_training(length=13, batch=3, num_layers=2, d_model=20, num_heads=2),
            ["regard", "flax"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["jit", "options", "readouts", "linear", "cache", "dropout", "train"],
)
def test_comparisons_time_every_call(made, names):
    for comparison in made():
        found = comparison.measure(1)
        assert list(found["median_seconds"]) == names
        assert list(found["ratio"]) == names[1:]
        assert comparisons.describe(found).startswith(f"{comparison.title}: {names[0]} ")


def test_tile_lists_are_built_and_counted():
    (comparison,) = comparisons.compare_tile_lists(length=2048, window=300)
    # The diagonal of 4 x 4 tiles, and the tiles beside it.
    assert comparison.note.startswith("7 of 16 tiles kept, ")


@pytest.mark.slow
def test_every_option_changes_the_result():
    arrays = [jax.random.normal(rng, (1, 2, 9, 8)) for rng in jax.random.split(jax.random.key(0), 3)]
    outputs = {name: call(*arrays) for name, call in comparisons.make_options(2).items()}
    for name, output in outputs.items():
        assert name == "plain" or (output != outputs["plain"]).any(), name


def test_what_disagrees_is_not_timed(monkeypatch):
    monkeypatch.setattr(comparisons, "attend_causally", lambda query, key, value: value)
    with pytest.raises(AssertionError, match="attend"):
        list(comparisons.compare_jit([(1, 2, 3, 2)]))


@pytest.mark.slow
def test_writing_is_timed_and_says_what_is_not_there(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    config = dataclasses.replace(models.CONFIG, d_model=16, d_ff=20, num_layers=1, vocab_size=23)
    (comparison,) = models.compare_generation(max_tokens=3, config=config)
    found = comparison.measure(1)
    assert found["rate"] == {"regard": pytest.approx(3 / found["median_seconds"]["regard"])}
    assert found["note"] == "transformers: torch is not installed"


def test_bursts_are_timed_call_by_call():
    calls, _ = measuring.prepare_calls(TINY, OWN[:1], check=False)
    seconds, _ = gpu_rates._time_bursts(calls, 2)
    assert all(0 < taken < 1 for taken in seconds["regard"])
    assert gpu_rates.measure_gpu_rates(1)["missing"] == "no NVIDIA GPU"


@pytest.mark.parametrize(
    "options",
    [{"cap": 1.5, "sinks": True, "mask": "window"}, {"aux": ("lse", "entropy"), "mask": "causal"}],
    ids=["softcap and sinks", "statistics"],
)
def test_every_option_of_a_case_is_measured_as_it_is_defined(options):
    """Four query heads of two groups; without the option the results differ."""
    case = dataclasses.replace(BACKWARD, query=(2, 4, 17, 5), key=(2, 2, 17, 5), **options)
    calls, absent = measuring.prepare_calls(case, [*OWN[:1], peers.JAX_PEERS[3]])
    assert set(calls) == {"regard"}, absent
    assert "has no argument for a softcap" in absent["jax.nn"].reason
    inputs = case.make_inputs()
    plain = dataclasses.replace(case, cap=None, sinks=False, aux=())
    others = agreement.compute_reference(plain, inputs)
    assert agreement.largest_error(calls["regard"].read(calls["regard"].run()), others)[0] > 0.05


def test_rates_go_on_where_a_process_ended_and_every_refusal_has_its_row(small, monkeypatch, capsys):
    """As on a GPU whose kernels refuse this device; one peer fails always, and ends the first process."""

    def fail(case, inputs):
        raise RuntimeError("no|such thing")

    asked = [peer for peer in gpu_rates.PEERS if peer.name in ("cudnn", "mosaic_gpu", peers.OWN)]
    causal = dataclasses.replace(TINY, mask="causal", dtype="bfloat16")
    monkeypatch.setattr(gpu_rates, "CASES", (causal, dataclasses.replace(TINY, name="other")))
    monkeypatch.setattr(gpu_rates, "PEERS", (*asked, peers.Peer("broken", fail)))
    monkeypatch.setattr(gpu_rates, "BURST_SECONDS", 0)
    monkeypatch.setattr(gpu_rates.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cudnn, "find_capability", lambda: "it needs an NVIDIA GPU")  # that one remembers
    out, runs = small / "rates.json", []

    def run_here(command, check):
        runs.append(command)
        options = gpu_rates.read_options(command[3:])
        if len(runs) > 1:
            return SimpleNamespace(returncode=gpu_rates.work(options))
        gpu_rates._write(out, gpu_rates.measure_gpu_rates(1, ()), ("tiny", "forward", ["broken"]))
        return SimpleNamespace(returncode=-6)

    monkeypatch.setattr(gpu_rates.subprocess, "run", run_here)
    words = ["--cases=tiny", "--rounds=1", f"--out={out}"]
    assert gpu_rates.main(words) == 0
    assert gpu_rates.main(words) == 0  # nothing is left
    assert [len(entry["median_seconds"]) for entry in json.loads(out.read_text())["cases"]] == [1, 1]
    printed = capsys.readouterr().out
    table = printed[printed.rindex("| case |") :]
    assert "| tiny, forward and backward | regard (" in table
    for name in ("cudnn", "mosaic_gpu"):
        refusal = f"backend '{name}' cannot serve this call: it needs an NVIDIA GPU"
        assert f"| tiny, forward | {name} | | | | {refusal}" in table
    assert "| tiny, forward | broken | | | | failed: it did not come to an end" in table
    assert "| tiny, forward and backward | broken | | | | failed: RuntimeError: no/such thing |" in table


# The command


def run(*words):
    return command.main([*map(str, words)])


@pytest.mark.slow
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
        assert [peer["peer"] for peer in entry["peers"]] == list(command.PEERS)
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--cases", "huge"],
            "no case has 'huge'; expected tiny, tiny-backward, tile-lists, jit, dropout, options, cache,",
        ),
        (["--peers", "jax"], "no peer is 'jax'; expected regard, regard-dense, regard-tiled, jax.nn"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(small, capsys, words, message):
    assert run(*words, "--out", small / "out") == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (small / "out").exists()


def test_regard_itself_may_not_disagree(small, monkeypatch, capsys):
    monkeypatch.setattr(command, "PEERS", {"regard": peers.Peer("regard", unmasked)})
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
