"""The demo, small and whole."""

import json
import subprocess
import sys

import pytest

from command_runs import run_command
from regard.cli import demonstration
from regard.cli.commands import Demo
from regard.training import loop, tasks
from small_runs import begin, snapshot, tiny_copy

FIGURES = """
copy-attention copy-attention-heads copy-curves copy-heads-entropy copy-heads-max-score digits-attention-heads
digits-curves digits-heads-entropy digits-heads-max-score digits-learned-position-similarity
digits-learned-positions digits-scans mask-causal mask-causal-window mask-documents mask-global-and-dilated
mask-prefix reverse-cross-attention reverse-cross-attention-heads reverse-curves reverse-heads-entropy
reverse-heads-max-score sinusoidal-positions threshold-attention threshold-attention-heads threshold-curves
threshold-heads-entropy threshold-heads-max-score
"""


def check_summary(out):
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["tasks"]) == list(demonstration.TASKS) == ["threshold", "copy", "reverse", "digits"]
    for name, entry in summary["tasks"].items():
        goal = tasks.TASKS[name].goal
        assert (entry["metric"], entry["goal"]) == (goal.metric, goal.bound)
        assert 0 < entry["seconds"] < entry["elapsed_seconds"] < summary["seconds"]
        assert entry["held_out"][goal.metric] == entry["value"]
    drawn = [figure.removeprefix("figures/").removesuffix(".png") for figure in summary["figures"]]
    assert sorted(drawn) == FIGURES.split()
    assert all((out / figure).read_bytes().startswith(b"\x89PNG") for figure in summary["figures"])
    assert summary["pages"] == ["explorer.html", "explorer-copy.html"]
    assert "<title>digits: a scan of" in (out / "explorer.html").read_text()
    assert "<title>copy: what each position" in (out / "explorer-copy.html").read_text()
    return summary


@pytest.fixture
def outcomes(monkeypatch):
    """What the training of each task comes to, by what it held out; nothing is trained or drawn."""
    chosen = {"threshold": 0.99, "copy": 1.0, "reverse": 1.0, "digits": 0.97}

    def advance(command, console, run):
        accuracy = chosen[run.task.name]
        if not isinstance(accuracy, float):
            return accuracy
        return loop.Outcome("already finished", 7, {"accuracy": accuracy}, 2.5, 0.5, 3.5)

    monkeypatch.setattr(demonstration, "advance_run", advance)
    for name in ("draw_figures", "write_pages", "show_pretrained"):
        monkeypatch.setattr(demonstration, name, lambda *_: [])
    return chosen


def test_a_demo_says_what_was_reached_and_what_was_reused(outcomes, tmp_path, capsys):
    out = tmp_path / "a demo"
    out.mkdir()
    text = run_command(capsys, "demo", "--out", out).out
    following = f"regard plot '{out / 'copy'}' out/copy-1", f"regard view '{out / 'reverse'}'"
    for words in ("--force trains them again", "regard train copy", *following):
        assert words in text
    assert text.count("(reused)") == 4
    summary = json.loads((out / "summary.json").read_text())
    for name, entry in summary["tasks"].items():
        told = entry["value"], entry["goal"], entry["seconds"], entry["reached"], entry["reused"]
        assert told == (outcomes[name], tasks.TASKS[name].goal.bound, 2.5, True, True)
    outcomes["copy"] = 0.5
    captured = run_command(capsys, "demo", "--out", out, code=1)
    assert "MISSED" in captured.out
    assert "missed the goal: copy (0.5000 < 1)" in captured.err
    assert "goals are not checked" in run_command(capsys, "demo", "--out", out, "--smoke").out


def test_a_demo_ends_where_a_task_diverges_or_is_interrupted(outcomes, tmp_path, capsys):
    outcomes["copy"] = None
    run_command(capsys, "demo", "--out", tmp_path, code=1)
    outcomes["copy"] = loop.Outcome("interrupted", 3, {}, 1.0, 1.0, 2.0)
    told = run_command(capsys, "demo", "--force", "--out", tmp_path, code=130).out
    assert f"this goes on from there\n  regard demo --out {tmp_path}\n" in told
    assert not (tmp_path / "summary.json").exists()


def test_force_deletes_every_run_or_none(tmp_path, capsys):
    begin(tmp_path / "threshold", tiny_copy())
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "thesis.tex").write_text("years")
    before = snapshot(tmp_path)
    refuse = lambda *words: run_command(capsys, "demo", *words, code=2).err
    assert "it holds thesis.tex" in refuse("--force", "--out", tmp_path)
    assert f"{tmp_path / 'threshold'} is a run" in refuse("--out", tmp_path / "threshold" / "new")
    assert snapshot(tmp_path) == before
    (tmp_path / "digits" / "thesis.tex").unlink()
    opened = demonstration.open_all(Demo(force=True), tmp_path)
    assert snapshot(tmp_path) == {}, "a second command without --force reuses none of them"
    opened[0].tidy()


@pytest.mark.slow
def test_the_whole_demo_reaches_its_goals(tmp_path):
    command = [sys.executable, "-m", "regard", "demo", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    summary = check_summary(tmp_path)
    accuracies = {name: entry["value"] for name, entry in summary["tasks"].items()}
    assert accuracies["threshold"] >= 0.985
    assert accuracies["copy"] == accuracies["reverse"] == 1.0
    assert accuracies["digits"] >= 0.96
    assert not summary["smoke"]
