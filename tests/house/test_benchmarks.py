"""The benchmark on tiny calls: who is timed, who is reported, what is written. No time is ever compared."""

import functools
import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from benchmarks import __main__ as command
from benchmarks import cases, comparisons, measuring, peers, report
from command_runs import run_command
from regard import attend

# Other libraries warn, and promote dtypes and ranks, as they like.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("loose")]

TINY = cases.Case("tiny", (2, 3, 17, 5), (2, 3, 17, 5))
BACKWARD = replace(TINY, name="tiny-backward", mask="window", passes="forward and backward")
OWN = peers.JAX_PEERS[:3]
PRODUCT_SIDE = 16


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The command on tiny cases."""
    monkeypatch.setattr(cases, "CASES", (TINY, BACKWARD))
    monkeypatch.setattr(measuring, "PRODUCT_SIDE", PRODUCT_SIDE)
    return tmp_path


def measure(case, chosen=OWN):
    return measuring.measure_case(case, chosen, 1, PRODUCT_SIDE)


def unmasked(case, inputs):
    return peers.compile_call(lambda query, key, value, mask: attend(query, key, value), case, inputs, None)


def wrong_gradient(case, inputs):
    attention = lambda query, key, value, mask: attend(query, key, jax.lax.stop_gradient(value), mask=mask)
    return peers.compile_call(attention, case, inputs, case.make_mask())


def broken(case, inputs):
    raise RuntimeError("no kernel\nlong story")


def test_a_wrong_peer_is_reported_and_not_timed():
    wrong = {
        "other": (unmasked, "disagrees", ""),
        "third": (wrong_gradient, "disagrees", "value's gradient is off by 1 of"),
        "fourth": (broken, "failed", "RuntimeError: no kernel"),
    }
    outcome = measure(BACKWARD, [OWN[0], *(peers.Peer(name, given[0]) for name, given in wrong.items())])
    own, *others = outcome.measurements
    assert own.status == "measured"
    lines = report.list_absent([outcome])
    for other, line, (_, status, reason) in zip(others, lines, wrong.values(), strict=True):
        assert (other.status, other.median_seconds) == (status, None)
        assert other.reason.startswith(reason)
        assert "story" not in other.reason
        assert line.startswith(f"{other.peer} {status}: {reason}")


def test_a_comparison_waits_for_every_result_after_a_warm_up():
    calls = []
    result = SimpleNamespace(block_until_ready=lambda: calls.append("waited"))
    call = lambda: calls.append("called") or result
    found = comparisons.Comparison("two", {"one": call, "other": call}, work=6.0, unit="tokens").measure(3)
    assert calls == ["called", "waited"] * (len(calls) // 2)
    assert len(calls) // 2 == 2 * (1 + 3 * 4), "a warm-up; each timed call after three untimed ones"
    assert list(found["ratio"]) == ["other"]
    assert all(0 <= seconds < 1 for seconds in found["median_seconds"].values())
    found["median_seconds"], found["ratio"] = {"one": 2e-3, "other": 3e-3}, {"other": 1.5}
    found["rate"] = {"one": 3000, "other": 2000}
    expected = "two: one 2 ms, 3,000 tokens per second; other 3 ms (1.5 times), 2,000 tokens per second"
    assert comparisons.describe(found) == expected


run = functools.partial(run_command, main=command.main)


@pytest.mark.slow
def test_results_are_complete_and_drawn(small, capsys):
    out = small / "out"
    told = run(capsys, "--rounds", 1, "--dtypes", "float32", "--cases", "tiny", "--out", out).out
    assert "1/2 tiny float32" in told
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


def test_nothing_is_overwritten_unasked_and_regard_itself_may_not_disagree(small, monkeypatch, capsys):
    out, foreign = small / "out", small / "foreign"
    words = ("--rounds", 1, "--dtypes", "float32", "--cases", "tiny-b", "--peers", "regard", "--out", out)
    run(capsys, *words)
    before = (out / "results.json").read_bytes()
    assert "--force" in run(capsys, *words, code=2).err
    assert (out / "results.json").read_bytes() == before
    monkeypatch.setattr(command, "PEERS", {"regard": peers.Peer("regard", unmasked)})
    assert "regard disagrees on tiny-backward float32" in run(capsys, *words, "--force", code=1).err
    foreign.mkdir()
    (foreign / "results.json").write_text("[]")
    assert "holds other files" in run(capsys, "--out", foreign, "--force", code=2).err
    assert (foreign / "results.json").read_text() == "[]"
