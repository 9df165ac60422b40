"""The command line: help before heavy imports, exit codes, words where they belong, files as promised."""

import contextlib
import dataclasses
import errno
import importlib.metadata
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import pytest
from rich.console import Console as RichConsole

import regard
from command_runs import run_command
from regard.cli import commands, main, pictures, text_models
from regard.cli.command_words import parse_arguments
from regard.cli.console import Console, UsageError, expected_errors
from regard.cli.declaration import Command, Output
from regard.cli.displays import Bar, describe_step
from regard.cli.training import advance_run, draw_sparkline
from regard.loading import remedy
from regard.training import loop, runs, tasks
from small_runs import COPY, snapshot, tiny_copy


def test_errors_that_are_expected_are_mistakes_but_not_a_reader_that_leaves():
    for error in (BrokenPipeError, OSError, OverflowError):
        told = BrokenPipeError if error is BrokenPipeError else UsageError
        with pytest.raises(told, match="no such disk"), expected_errors():
            raise error("no such disk")
    with pytest.raises(UsageError, match=r"^ro/x\.regard: no such disk; name one"), expected_errors():
        raise PermissionError(13, "no such disk", "ro/.x.regard.93891afb.draft")


LIGHT = """
import sys
from regard.cli import main
try: main()
except SystemExit as end: print("code", end.code)
heavy = {"jax", "flax", "optax", "orbax", "matplotlib", "sklearn", "numpy", "scipy"}
print("loaded", sorted(heavy & {name.split(".")[0] for name in sys.modules}))
"""


@pytest.mark.parametrize(("arguments", "code"), [("train copy --help", 0), ("train copy --sed 3", 2)])
def test_help_and_mistakes_answer_before_heavy_imports(arguments, code):
    command = [sys.executable, "-c", LIGHT, *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.endswith(f"code {code}\nloaded []\n")


@pytest.mark.parametrize(("package", "line"), [("rich", "tune"), ("flax", "train copy --smoke")])
def test_a_missing_package_is_named_with_its_remedy(tmp_path, package, line):
    code = f"import sys; sys.modules[{package!r}] = None\nfrom regard.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: this needs {package}, which is not installed: {remedy('train')}\n"


def read_help(capsys, *words):
    with pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    assert end.value.code == 0
    return " ".join(re.sub(r"[│╭╮╰╯─•]", " ", capsys.readouterr().out).split())


def test_every_verb_has_a_summary_a_runnable_example_and_a_place_in_the_guide(capsys):
    examples = re.findall(r"Example: (regard .*?)(?= [a-z]+ [A-Z]|$)", read_help(capsys))
    assert len(examples) == 11
    for example in examples:
        words = shlex.split(example)
        assert type(parse_arguments(words[1:])).__name__.lower() == words[1]
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "command_line.md").read_text()
    named = set(re.findall(r"`regard ([a-z]+)", guide))
    assert named == {command.__name__.lower() for command in commands.COMMANDS}
    for command in commands.COMMANDS:
        assert "run" in vars(command) or callable(command.load(command))


def test_a_command_is_one_declaration_and_one_line_in_the_table(capsys, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Greet(Command):
        """Greet somebody.

        Example: regard greet --name you
        """

        name: str = "all"
        """Whom to greet."""
        output: Output = Output()

        def run(self, console):
            """Greet."""
            if self.name == "nobody":
                raise KeyboardInterrupt
            console.say(f"hello {self.name}")
            console.emit("greeting", name=self.name, heat=(float("nan"), 0.5))
            return 3

    monkeypatch.setattr(commands, "COMMANDS", [*commands.COMMANDS, Greet])
    assert "greet Greet somebody. Example: regard greet --name you" in read_help(capsys)
    assert "--name STR Whom to greet. (default: all)" in read_help(capsys, "greet")
    captured = run_command(capsys, "greet", "--name", "you", "--json", code=3)
    assert json.loads(captured.out) == {"event": "greeting", "name": "you", "heat": [None, 0.5]}
    assert captured.err == "hello you\n"
    assert run_command(capsys, "greet", "--name", "nobody", code=130) == ("", "error: interrupted\n")


def test_every_setting_is_explained_with_its_default_and_flags_reach_it(capsys):
    text, preset = read_help(capsys, "train", "text"), tasks.Text()
    assert f"--learning-rate FLOAT Peak learning rate. (default: {preset.optimization.learning_rate})" in text
    assert f"--d-model INT Width of the residual stream. (default: {preset.model.d_model})" in text
    assert "(default: out/TASK, or out/TASK-smoke)" in text
    words = ["--steps", "7", "--norm", "post", "--max-length", "11"]
    task = parse_arguments(["train", "--seed", "3", "reverse", *words]).task
    assert (task.optimization.steps, task.model.norm, task.max_length) == (7, "post", 11)
    assert str(parse_arguments(["train", "copy", "--smoke"]).directory) == "out/copy-smoke"


def test_an_update_is_compiled_for_devices_that_are_elsewhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", "copy", "--smoke", "--compile-for", "v5e:1x1"]
    monkeypatch.setattr("regard.parallel.find_topology", lambda name, slices: jax.devices() * slices)
    (told,) = map(json.loads, run_command(capsys, *words, "--json").out.splitlines())
    known = {"topology": "v5e:1x1", "mesh": "data=1", "devices": 1, "planned_bytes": None}
    assert told.items() >= (known | {"event": "compiled"}).items()
    task = tasks.shrink(tasks.Copy())
    sizes = jax.tree.map(lambda leaf: leaf.size, loop.make_program(task, 0).shapes)
    assert 4 * sum(jax.tree.leaves(sizes)) <= told["state_bytes"] < told["peak_bytes"]
    told = run_command(capsys, *words, "--mesh", "fsdp=2", code=2).err
    assert "multiply to 1, as there are 1 device" in told
    assert "--slices is of --compile-for" in run_command(capsys, *words[:3], "--slices", 2, code=2).err
    assert not list(tmp_path.iterdir())


def test_training_says_what_runs_where_and_what_to_do_next(trained):
    directory, text = trained
    for told in (
        r"devices +1 x cpu with \d+ cores, jax",
        r"encoder\.stack\.blocks\.0\.feed_forward +4 +97\n",
        r"attention +self-attention \(5, 2, 4, 3\) on 4 keys: dense",
        rf"{directory} \(new run\)",
        r"compiling train step \.\.\.\n.*compiled train step in \d+\.\d s\n",
        r"step +17 held out: +loss",
        r"finished: step 17, held-out accuracy \d\.\d{4}, goal at least 1\n",
        r"\nsample\n(input +SOS( \d+){3}\ntarget +(\d+ ){3}EOS\nprediction( +\S+){4}\n\n){3}next",
        rf"next: regard plot {directory}\s+$",
    ):
        assert re.search(told, text), told
    assert "\x1b" not in text, "no colours and no bar where nobody can see them"
    total = int(re.search(r"Classifier, ([\d,]+) parameters, float32", text)[1].replace(",", ""))
    rows = re.findall(r"^ {8,}\S+ +\d+ +([\d,]+)\s*$", text, re.MULTILINE)
    assert sum(int(row.replace(",", "")) for row in rows) == total


TEXT = ["train", "text", "--d-model", "12", "--num-heads", "2", "--d-ff", "7", "--length", "23", "--smoke"]


@pytest.mark.slow
def test_text_says_what_it_learns_from_and_what_a_byte_costs(tmp_path, capsys):
    run, files = tmp_path / "run", tmp_path / "texts"
    files.mkdir()
    for index in range(7):
        (files / f"{index}.txt").write_text(f"{index} naïve tides and low tides\n" * (3 + index))
    options = ["--held-out-fraction", "0.2", "--vocab-size", "263", "--heads-every", "0"]
    text = run_command(capsys, *TEXT, *options, "--files", files, "--out", run).out
    for told in (
        r"attention +self-attention \(16, 2, 23, 6\) on 23 keys, causal",
        r"training +20 steps of 16 rows of 23 tokens, \d+\.\d epochs in all, Adam at",
        r"corpus +5 documents of 986 bytes; \d+ tokens, which are 263 strings of bytes",
        r"held out +2 documents of 232 bytes in \d+ rows; 0\.0% of its lines",
        r"step +20 held out: +loss \S+ +bits per byte \S+ +token accuracy",
        r"finished: step 20, held-out bits per byte \d\.\d{4}; a smoke run: the goal, at most 2\.2, is",
        rf"\nsample\n.*\n\nnext: regard plot .*\n +regard generate {run} --prompt",
    ):
        assert re.search(told, text, re.DOTALL)
    text_model = text_models.open_text_model(run)
    mark, *tokens = text_model.encode("naïve tides")
    assert text_model.stop_tokens == (mark,) == (263,)
    assert "".join(text_model.spell([mark], tokens)) == "naïve tides"


def test_refusals_exit_with_2_and_change_nothing(copied, capsys):
    for arguments, message in (
        ([*COPY, "--seed", "1"], "  --seed: it has 0, asked for 1\n"),
        ([*COPY, "--ema-decay", "0.5"], "  --ema-decay: it has 0.0, asked for 0.5\ngive another --out"),
        ([*COPY, "--ema-decay", "0.5", "--d-model", "24"], "--d-model: it has 6, asked for 24\n"),
        ([*COPY, "--seed", f"{2**63}"], f"--seed: expected a number from -2**63 to 2**63 - 1, got {2**63}\n"),
        (["train", "threshold", "--smoke"], "task: it has 'copy', asked for 'threshold'"),
        ([*COPY, "--resume", "never", "--quiet"], "holds a run already"),
        ([*COPY, "--force", "--profile", "-1"], "--profile must be at least 0, got -1"),
        ([*COPY, "--outer", "data=2"], "--outer: expected None, as all devices are of one slice or host"),
    ):
        before = snapshot(copied)
        error = run_command(capsys, *arguments, "--out", copied, code=2).err
        assert error.startswith("error: ")
        assert message in error
        assert snapshot(copied) == before


def test_a_finished_run_does_nothing_until_it_is_forced_and_json_is_json(
    copied, tmp_path, monkeypatch, capsys
):
    directory = shutil.copytree(copied, tmp_path / "a run")
    before, command = snapshot(directory), [*COPY, "--out", str(directory)]
    told = run_command(capsys, *command).out
    assert re.search(r"is finished already(.|\n)*--force", told)
    assert told.endswith(f"\nnext: regard plot '{directory}'\n"), "as a shell reads it"
    assert run_command(capsys, *command, "--quiet") == ("", "")
    with monkeypatch.context() as patch:  # as on a file system that is read only
        patch.setattr(os, "access", lambda *_: False)
        patch.setattr(Path, "unlink", mock.Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
        assert main([*command, "--quiet"]) == 0
    assert snapshot(directory) == before
    captured = run_command(capsys, *command, "--force", "--json")
    assert snapshot(directory) != before, "by the seconds that it took"
    events = [json.loads(line) for line in captured.out.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[:3] == ["compiled"] * 3
    assert kinds.count("step") == 9
    assert [event["step"] for event in events if event["event"] == "evaluation"] == [5, 10, 15, 17]
    assert (*kinds[-2:], events[-2]["status"]) == ("end", "sample", "finished")
    assert "compiling train step" in captured.err


def test_a_divergence_exits_with_1(tmp_path, monkeypatch, capsys):
    def diverge(run, **options):
        raise loop.DivergenceError("loss", float("inf"), 3, None)

    monkeypatch.setattr(loop, "train", diverge)
    captured = run_command(capsys, *COPY, "--json", "--out", tmp_path / "run", code=1)
    told = "error: copy: loss is inf at step 3; no checkpoint had been saved yet. A smaller --learning-rate"
    assert told in captured.err
    assert json.loads(captured.out) == {"event": "diverged", "task": "copy", "metric": "loss", "step": 3}


def test_a_reader_that_leaves_is_no_trouble_of_the_run(copied, monkeypatch):
    monkeypatch.setattr(loop, "train", mock.Mock(side_effect=BrokenPipeError(32, "Broken pipe")))
    with pytest.raises(BrokenPipeError):
        advance_run(commands.Demo(), Console(quiet=True), runs.open_run(copied, tiny_copy()))


def test_on_a_terminal_there_is_a_bar(monkeypatch):
    console = Console()
    monkeypatch.setattr(console, "human", RichConsole(file=io.StringIO(), force_terminal=True, width=100))
    bar = Bar(console, "copy", 20, 0)
    with contextlib.ExitStack() as ended:
        ended.callback(bar.stop)
        with bar.compiling("train step"):
            pass
        bar.stepped(5, 20, {"loss": 2.5, "accuracy": 0.25}, 50.0)
        bar.evaluated(10, {"loss": 2.0, "accuracy": 0.5})
        bar.stepped(20, 20, {"loss": 1.5, "accuracy": 0.75}, 50.0)
    text = console.human.file.getvalue()
    for words in ("compiled train step in", "20/20", "loss 1.5"):
        assert words in text
    assert "\x1b[?25h" in text, "the cursor comes back"
    assert "[bold]" not in text, "as what is printed above a bar is printed without markup"
    bar.stepped(21, 90, {}, 1.0)  # as after a pause
    assert bar.describe(30, 90, {}).endswith("20 ms/step  1 s left"), "one slow step moves nothing"


def test_a_step_is_described_by_its_metrics_rate_and_time_left():
    text = {"bits_per_byte": 2.5, "loss": 1.75, "token_accuracy": 0.5}
    assert describe_step(30, 90, text, float("nan")) == "loss 1.75  bits per byte 2.5"
    metrics = {"loss": 0.123456, "accuracy": 0.5, "grad_norm": 3.0}
    assert describe_step(30, 90, metrics, 20.0) == "loss 0.1235  accuracy 0.5  50 ms/step  3 s left"


def test_a_sparkline_shows_the_range():
    assert [draw_sparkline(row) for row in ([0.0, 7.0], [3.0, float("nan"), 3.0])] == ["▁█", "▁▁"]
    assert len(draw_sparkline([float(step) for step in range(1000)], width=60)) == 60


def test_words_with_brackets_are_printed_as_they_are(capsys):
    """Rich would take [bold] or [/x] in a path or a message for markup."""
    console, words = Console(), "a [bold]path[/bold] [/x]"
    console.say(words)
    console.note("mask", words)
    console.fail(words)
    captured = capsys.readouterr()
    assert (captured.out.count(words), captured.err.count(words)) == (2, 1)


def test_plot_writes_curves_and_attention_and_speaks_json(copied, tmp_path, capsys):
    run = shutil.copytree(copied, tmp_path / "run")
    captured = run_command(capsys, "plot", run, "--format", "svg", "--json")
    told = [json.loads(line) for line in captured.out.splitlines()]
    assert {line["event"] for line in told} == {"written"}
    names = "attention-heads attention curves sinusoidal-positions heads-entropy heads-max-score"
    written = sorted(str(path) for path in (run / "figures").iterdir())
    assert written == sorted(str(run / "figures" / f"{name}.svg") for name in names.split())
    assert sorted(line["path"] for line in told) == written == sorted(captured.err.split())


def test_two_runs_are_compared_where_that_can_be_written(copied, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pictures, "draw_run", lambda *_: iter(()))  # their own pictures take long
    monkeypatch.setattr(pictures, "draw_sinusoids", lambda *_: iter(()))
    one, two = (shutil.copytree(copied, tmp_path / name) for name in ("one", "two"))
    written = run_command(capsys, "plot", one, two, "--format", "svg").out.split()
    assert written == [str(one / "figures" / "comparison.svg")]
    assert (one / "figures" / "comparison.svg").read_text().startswith("<?xml")
    (two / "figures").touch()
    assert f"{two / 'figures'}" in run_command(capsys, "plot", two, one, code=2).err.replace("\n", "")


def test_what_is_no_run_is_named_with_the_runs_inside(copied, tmp_path, capsys):
    refuse = lambda *words: run_command(capsys, *words, code=2).err.replace("\n", " ")
    (tmp_path / "notes").mkdir()
    (tmp_path / "my notes").mkdir()
    (tmp_path / "torn" / "checkpoints").mkdir(parents=True)
    (tmp_path / "notes.md").write_text("notes")
    inside = f"{copied.parent} is not a run, but holds some; give one of them: {copied}"
    assert "at least one run" in refuse("plot")
    assert "nowhere; give a run of `regard train`" in refuse("plot", tmp_path / "nowhere")
    assert "notes.md is a file; give the folder of a run" in refuse("plot", tmp_path / "notes.md")
    for verb in ("plot", "view"):
        assert inside in refuse(verb, copied.parent)
        assert "notes is not a run; give one of `regard train`" in refuse(verb, tmp_path / "notes")
        assert "config.json is damaged or gone; bring the file" in refuse(verb, tmp_path / "torn")
    told = refuse("view", tmp_path / "my notes").strip()
    assert told.endswith(f"regard inspect '{tmp_path / 'my notes'}' --save 'my notes.regard'")


def test_explain_says_which_backend_and_how_much_work(capsys):
    mask = "causal() & sliding_window(256)"
    shape = "--shape", "1,8,4096,64"
    text = run_command(capsys, "explain", *shape, "--mask", mask, "--dtype", "bfloat16").out
    for words in (mask, "931 empty, 62 partial, 31 full", "query bfloat16", "tiled"):
        assert words in text
    captured = run_command(capsys, "explain", "--shape", "1,3,5", "--mask", "causal()", "--json")
    (said,) = map(json.loads, captured.out.splitlines())
    assert (said["event"], said["backend"], said["mask"]) == ("explanation", "dense", "causal()")
    assert (said["tiles"]["partial"], said["shapes"]["query"]) == (1, [1, 3, 5])
    assert "all pairs" in captured.err
    words = "--shape 2,3,4,7 --key-shape 2,3,6,7 --value-shape 2,3,6,11 --query-offset 2 --picture"
    text = run_command(capsys, "explain", *words.split(), "--mask", "causal()").out
    assert "■ ■ ■ · · ·" in text
    assert "output (2, 3, 4, 11)" in text


def test_explain_refuses_what_attend_would(capsys):
    for arguments, code, message in (
        ("--shape 1,8,9999999999,64", 2, "--shape must be whole numbers up to 2147483647"),
        ("--shape 3,4,7 --key-shape 3,4,5", 2, "error: --key-shape: expected the head width of query"),
        ("--shape 3,5 --mask causl()", 2, "did you mean causal()?"),
        ("--shape 2,4,7 --key-shape 2,6,7 --mask causal()", 2, "Pass --query-offset=2 when the queries are"),
        ("--shape 2,4,7 --backend foo", 2, "error: --backend: expected one of cudnn"),
        ("--shape 4,7 --backend cudnn", 1, "cudnn"),
    ):
        captured = run_command(capsys, "explain", *arguments.split(), code=code)
        assert captured.err.startswith("error: ")
        assert message in captured.err
        assert captured.out == ""


def test_the_doctor_knows_versions_devices_backends_and_what_is_missing(capsys, monkeypatch):
    def pretend(package):
        if package == "matplotlib":
            raise importlib.metadata.PackageNotFoundError(package)
        return f"3.{len(package)}"

    monkeypatch.setattr(importlib.metadata, "version", pretend)
    text = run_command(capsys, "doctor").out
    assert "jax 3.3" in text
    assert re.search(r"devices +0: cpu", text)
    assert re.search(r"backend +dense: serves", text)
    assert f"matplotlib not installed; for figures: {remedy('look')}" in text
    facts = json.loads(run_command(capsys, "doctor", "--json").out)
    assert facts["packages"]["jax"] == "3.3"
    assert facts["optional"]["matplotlib"]["version"] is None

    def fail(*_, **options):
        raise RuntimeError("Unable to initialize backend 'tpu': no libtpu.so")

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setattr(regard, "explain", fail)
    assert "none: Unable to initialize backend 'tpu'" in run_command(capsys, "doctor").out
