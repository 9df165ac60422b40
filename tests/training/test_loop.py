"""The loop: reproducible bit for bit, across interruptions too; honest clocks; loud about divergence."""

import dataclasses
import errno
import time
from unittest import mock

import numpy as np
import pytest

import small_runs
from regard.training import checkpoint_files, checkpoints, loop
from regard.training.loop import DivergenceError
from small_runs import assert_same_run, last_arrays, list_saved, read_lines, stop_after, tiny_copy, train


def test_a_run_learns_and_reports_what_it_did(whole):
    directory, outcome, _, told = whole
    assert (outcome.status, outcome.step) == ("finished", 17)
    assert set(outcome.held_out) == {"loss", "accuracy", "token_accuracy"}
    assert outcome.compile_seconds > 0
    assert outcome.seconds + outcome.compile_seconds <= outcome.elapsed_seconds
    seen, lines = small_runs.split_lines(directory)
    assert [line["step"] for line in lines] == [1, 3, 5, 6, 9, 10, 12, 15, 17]
    assert [line["step"] for line in seen] == [0, 4, 8, 12, 16, 17]
    steps = [line["step"] for line in read_lines(directory)]
    assert steps == sorted(steps)
    measured = {"step", "loss", "accuracy", "token_accuracy", "learning_rate", "grad_norm", "parameter_norm"}
    held_out = {"held_out_loss", "held_out_accuracy", "held_out_token_accuracy"}
    for line in lines:
        assert set(line) == measured | (held_out if line["step"] in (5, 10, 15, 17) else set())
        assert line["grad_norm"] > tiny_copy().optimization.clip_norm, "before it is clipped"
    assert lines[0]["learning_rate"] == pytest.approx(0.01), "as of updates done before"
    assert lines[-1]["held_out_loss"] == outcome.held_out["loss"] < lines[0]["loss"] - 0.1
    assert [line["step"] for line in told] == steps
    assert list_saved(directory) == [14, 17]


def test_a_listener_hears_everything_in_order(whole):
    events = whole[2].events
    compiled = [("compiling", what) for what in ("train step", "evaluation", "heads")]
    assert events[:5] == [("preparing", "began"), *compiled, ("preparing", "ended")]
    assert ("compiled", None) not in events, "an interrupt would wait for it"
    assert [step for name, step in events if name == "evaluated"] == [5, 10, 15, 17]
    assert [step for name, step in events if name == "saved"] == [7, 14, 17]
    assert [step for name, step in events if name == "stepped"] == [1, 3, 5, 6, 9, 10, 12, 15, 17]
    assert events[-1] == ("saved", 17), "the last is waited for"


def write_slowly(monkeypatch, wait):
    """Wait before the index of a checkpoint is written, which makes it whole."""
    write = checkpoint_files.write_index

    def write_later(draft, step, *arguments, **options):
        wait(step)
        write(draft, step, *arguments, **options)

    monkeypatch.setattr(checkpoint_files, "write_index", write_later)


def test_training_goes_on_while_a_checkpoint_is_written(whole, tmp_path, monkeypatch):
    """And what is written is the state of its step, whose memory updates have taken by then."""
    recorder = small_runs.Killer()

    def wait(step):
        deadline = time.monotonic() + 60
        while step == 14 and ("evaluated", 15) not in recorder.events and time.monotonic() < deadline:
            time.sleep(0.01)

    write_slowly(monkeypatch, wait)
    train(tmp_path / "run", tiny_copy(), progress=recorder)
    assert recorder.events.index(("evaluated", 15)) < recorder.events.index(("saved", 14))
    newest = [run / "checkpoints" / "00000014" for run in (whole[0], tmp_path / "run")]
    small_runs.assert_same_arrays(*(checkpoints.load(path).arrays for path in newest))
    assert_same_run(whole[0], tmp_path / "run")


def test_what_fails_while_training_goes_on_ends_it(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    write_slowly(monkeypatch, mock.Mock(side_effect=[None, full]))  # at steps 7 and 14
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path / "run", tiny_copy())
    assert list_saved(tmp_path / "run") == [7]


def test_an_error_waits_for_the_checkpoint_that_is_being_written(tmp_path, monkeypatch):
    write_slowly(monkeypatch, lambda step: time.sleep(0.3))
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "run", tiny_copy(), progress=small_runs.Killer("evaluated", 10))
    assert list_saved(tmp_path / "run") == [7]


def test_neither_compiling_anew_nor_held_out_data_nor_a_look_changes_a_bit(whole, tmp_path):
    """All is compiled anew; held-out data are others, as many as before, and evaluated at other steps."""
    cadence = dataclasses.replace(small_runs.CADENCE, evaluate_every=4, heads_every=0)
    train(tmp_path / "run", tiny_copy(data_seed=3, cadence=cadence), fresh=True)
    small_runs.assert_same_arrays(last_arrays(whole[0]), last_arrays(tmp_path / "run"))
    (_, expected), (looks, lines) = small_runs.split_lines(whole[0]), small_runs.split_lines(tmp_path / "run")
    assert looks == []
    losses, others = ({line["step"]: line["loss"] for line in some} for some in (expected, lines))
    assert all(losses[step] == others[step] for step in (1, 3, 6, 9, 12, 15, 17))
    assert lines[-1]["held_out_loss"] != whole[1].held_out["loss"]


def test_interrupted_and_resumed_is_uninterrupted(whole, tmp_path):
    """Before the first checkpoint, at one, between two, and before the last step; one session is traced."""
    seconds = 0.0
    for count, step in ((1, 1), (6, 7), (4, 11), (5, 16)):
        options = {"profile": 2} if step == 11 else {}
        outcome = train(tmp_path / "run", tiny_copy(), stop=stop_after(count), **options)
        assert (outcome.status, outcome.step) == ("interrupted", step)
        assert seconds < outcome.seconds
        seconds = outcome.seconds
    assert train(tmp_path / "run", tiny_copy(), stop=stop_after(1)).status == "finished"
    (trace,) = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 100
    assert_same_run(whole[0], tmp_path / "run")


@pytest.mark.parametrize("moment", [("stepped", 1), ("stepped", 9)], ids=str)
def test_killed_and_resumed_is_uninterrupted(whole, tmp_path, moment):
    """A killed run has no more than its last checkpoint, if any, and some lines too many."""
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "run", tiny_copy(), progress=small_runs.Killer(*moment))
    assert read_lines(tmp_path / "run")[0]["step"] == 0
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "split": "heads", "entr')
    assert train(tmp_path / "run", tiny_copy()).status == "finished"
    assert_same_run(whole[0], tmp_path / "run")


def test_a_finished_run_is_left_alone(whole):
    directory, outcome, *_ = whole
    before, recorder = small_runs.snapshot(directory), small_runs.Killer()
    again = train(directory, tiny_copy(), progress=recorder)
    assert again == dataclasses.replace(outcome, status="already finished")
    assert recorder.events == []
    assert small_runs.snapshot(directory) == before


@pytest.fixture
def exploding(monkeypatch):
    """Updates by their indices whose loss is made infinite, and what else they then measure."""
    prepare, chosen = loop._Session._compile, {}

    def compile_to_explode(self, what, *arguments, **options):
        compiled = prepare(self, what, *arguments, **options)

        def update(state, index, fed):
            state, measured = compiled(state, index, fed)
            return state, measured | chosen.get(int(index), {})

        measure = lambda *given: compiled(*given) | chosen.get("evaluation", {})
        return {"train step": update, "evaluation": measure}.get(what, compiled)

    monkeypatch.setattr(loop._Session, "_compile", compile_to_explode)
    return chosen


@pytest.mark.parametrize("stop", [None, 9])
def test_a_divergence_names_metric_and_step_and_keeps_the_good_checkpoint(tmp_path, exploding, stop):
    """The loss is infinite at step 9: found at the next look at the metrics, and before anything is saved."""
    exploding[8] = {"loss": np.float32(np.inf)}
    options = {"stop": stop_after(stop)} if stop else {}
    with pytest.raises(DivergenceError, match=r"loss is inf at step 9; .*00000007") as caught:
        train(tmp_path / "run", tiny_copy(), **options)
    assert (caught.value.metric, caught.value.step) == ("loss", 9)
    assert list_saved(tmp_path / "run") == [7]
    last = read_lines(tmp_path / "run")[-1]
    assert (last["step"], last["loss"]) == (9, None)


def test_what_was_skipped_is_a_line_of_the_metrics_and_ten_in_a_row_are_the_end(tmp_path, exploding):
    exploding |= {step: {"loss": np.float32(np.inf), "skipped": 1.0} for step in (2, *range(5, 14), 15)}
    cadence = dataclasses.replace(small_runs.CADENCE, heads_every=0)
    model = dataclasses.replace(small_runs.SIZES, dropout_rate=0.0)
    task = tiny_copy(nan="skip", cadence=cadence, model=model)
    assert train(tmp_path / "other", task).status == "finished"
    exploding[14] = exploding[15]
    with pytest.raises(DivergenceError, match=r"loss is inf at step 15; .* 10 updates in a row were skipped"):
        train(tmp_path / "other", task, force=True)
    exploding["evaluation"] = {"loss": np.float32(np.nan)}
    for finite in ("parameters and the training loss", "parameters"):
        with pytest.raises(DivergenceError, match=f"held_out_loss is nan at .*The {finite} are finite"):
            train(tmp_path / "other", task, force=True)
        exploding[4] = exploding[5]
