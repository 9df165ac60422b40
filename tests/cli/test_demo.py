"""The demo, small and whole."""

import json
import os
import subprocess
import sys

import pytest

from regard.cli import demonstration, main
from regard.cli.commands import Demo
from regard.cli.console import Console
from regard.training import loop, runs, tasks
from small_runs import begin, snapshot, tiny_copy

FIGURES = {
    "copy-attention",
    "copy-attention-heads",
    "copy-curves",
    "copy-heads-entropy",
    "copy-heads-max-score",
    "digits-attention-heads",
    "digits-curves",
    "digits-heads-entropy",
    "digits-heads-max-score",
    "digits-learned-position-similarity",
    "digits-learned-positions",
    "digits-scans",
    "mask-causal",
    "mask-causal-window",
    "mask-documents",
    "mask-global-and-dilated",
    "mask-prefix",
    "reverse-cross-attention",
    "reverse-cross-attention-heads",
    "reverse-curves",
    "reverse-heads-entropy",
    "reverse-heads-max-score",
    "sinusoidal-positions",
    "threshold-attention",
    "threshold-attention-heads",
    "threshold-curves",
    "threshold-heads-entropy",
    "threshold-heads-max-score",
}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "smoke"
    assert main(["demo", "--smoke", "--out", str(out)]) == 0
    return out


def check_summary(out):
    """The summary has the promised form and names figures that exist."""
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["tasks"]) == list(demonstration.TASKS) == ["threshold", "copy", "reverse", "digits"]
    for name, entry in summary["tasks"].items():
        goal = tasks.TASKS[name].goal
        assert (entry["metric"], entry["goal"]) == (goal.metric, goal.bound)
        assert entry["reached"] == (entry["value"] >= entry["goal"])
        assert 0 < entry["seconds"] < entry["elapsed_seconds"]
        assert entry["held_out"][goal.metric] == entry["value"]
    assert summary["seconds"] > 0
    assert {figure.removeprefix("figures/").removesuffix(".png") for figure in summary["figures"]} == FIGURES
    assert summary["pages"] == ["explorer.html", "explorer-copy.html"]
    for page, title in zip(summary["pages"], ("digits: a scan of", "copy: what each position"), strict=True):
        text = (out / page).read_text()
        assert 'id="regard-document"' in text
        assert f"<title>{title}" in text
    for figure in summary["figures"]:
        assert (out / figure).read_bytes().startswith(b"\x89PNG")
    return summary


@pytest.mark.slow
def test_a_smoke_demo_does_everything_but_reach_the_goals(smoke):
    summary = check_summary(smoke)
    assert summary["smoke"]
    assert {entry["steps"] for entry in summary["tasks"].values()} == {20}
    assert not any(entry["reused"] for entry in summary["tasks"].values())


@pytest.mark.slow
def test_a_second_demo_reuses_the_runs_and_their_seconds(smoke, capsys):
    first = check_summary(smoke)
    before = {name: snapshot(smoke / name) for name in demonstration.TASKS}
    assert main(["demo", "--smoke", "--out", str(smoke)]) == 0
    second = check_summary(smoke)
    assert before == {name: snapshot(smoke / name) for name in demonstration.TASKS}
    for name, entry in second["tasks"].items():
        assert entry == first["tasks"][name] | {"reused": True}
    text = capsys.readouterr().out
    assert text.count("(reused)") == 4
    assert "--force trains them again" in text
    assert "goals are not checked" in text
    assert "regard train copy" in text, "what to try next"
    assert f"regard plot {smoke / 'copy'}" in text
    assert text.rstrip().splitlines()[-2:] == [f"  {smoke / page}" for page in second["pages"]]


@pytest.mark.slow
def test_other_settings_in_the_output_directory_are_refused(smoke, capsys):
    before = snapshot(smoke)
    assert main(["demo", "--smoke", "--seed", "1", "--out", str(smoke)]) == 2
    assert "seed: it has 0, asked for 1" in capsys.readouterr().err
    assert snapshot(smoke) == before


def test_force_deletes_every_run_or_none(tmp_path, capsys):
    begin(tmp_path / "threshold", tiny_copy())
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "thesis.tex").write_text("years")
    before = snapshot(tmp_path)
    assert main(["demo", "--force", "--out", str(tmp_path)]) == 2
    assert "it holds thesis.tex" in capsys.readouterr().err
    assert snapshot(tmp_path) == before
    (tmp_path / "digits" / "thesis.tex").unlink()
    opened = demonstration.open_all(Demo(force=True), tmp_path)
    assert snapshot(tmp_path) == {}, "a second command without --force reuses none of them"
    opened[0].tidy()


def test_a_place_where_no_figure_can_be_written_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demonstration, "open_all", lambda *_: [])
    (tmp_path / "figures").touch()
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert f"{tmp_path / 'figures'}" in capsys.readouterr().err.replace("\n", "")


@pytest.mark.slow
def test_a_missed_goal_is_a_failure(smoke, capsys):
    """The same small runs, taken for full-size ones."""
    task = tasks.shrink(tasks.Copy())
    run = runs.open_run(smoke / "copy", task)
    entry = demonstration.Entry(task, run, loop.train(run))
    assert demonstration.report(Console(), smoke, [entry], [], 1.0, smoke=False) == 1
    captured = capsys.readouterr()
    assert "MISSED" in captured.out
    assert "missed the goal: copy (0.0000 < 1)" in captured.err


@pytest.mark.slow
def test_the_whole_demo_reaches_its_goals(tmp_path):
    code = "import sys; from regard.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "demo", "--out", str(tmp_path / "demo")]
    environment = {
        name: value for name, value in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    summary = check_summary(tmp_path / "demo")
    accuracies = {name: entry["value"] for name, entry in summary["tasks"].items()}
    assert accuracies["threshold"] >= 0.985
    assert accuracies["copy"] == accuracies["reverse"] == 1.0
    assert accuracies["digits"] >= 0.96
    assert not summary["smoke"]
    assert all(f"{name} " in done.stdout for name in demonstration.TASKS)
