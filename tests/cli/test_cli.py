"""The command line: help before heavy imports, exit codes, words where they belong, files as promised."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import regard
from regard.cli import commands, main, pictures
from regard.cli.arguments import parse_arguments
from regard.cli.console import Console, UsageError, expected_errors
from regard.cli.declaration import Command, Output
from regard.cli.displays import Bar, describe_step
from regard.cli.training import draw_sparkline
from regard.loading import remedy
from regard.training import checkpoints, runs, tasks
from small_runs import (
    Compiled,
    begin,
    read_lines,
    snapshot,
)

TINY = ["--d-model", "6", "--num-heads", "2", "--d-ff", "7", "--held-out-size", "13", "--smoke"]


def run(arguments, **options):
    """`regard` in a process of its own."""
    code = "import sys; from regard.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, **options)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Trainings with equal settings share what they compile."""
    with Compiled().serve():
        yield


def call(arguments):
    """What `regard` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([str(word) for word in arguments]) == 0
    return printed.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A smoke run of copy and what it printed."""
    directory = tmp_path_factory.mktemp("cli") / "copy"
    return directory, call(["train", "copy", *TINY, "--out", directory])


def test_a_reader_that_leaves_is_no_mistake():
    with pytest.raises(BrokenPipeError), expected_errors():
        raise BrokenPipeError("head has seen enough")
    with pytest.raises(UsageError, match="no such disk"), expected_errors():
        raise OSError("no such disk")


def test_a_number_beyond_64_bits_is_a_mistake():
    with pytest.raises(UsageError, match="too large"), expected_errors():
        np.int32(2**70)


# Help, arguments


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"], ["train", "copy", "--help"], ["train", "copy", "--sed", "3"]],
    ids=" ".join,
)
def test_help_and_mistakes_answer_before_heavy_imports(arguments):
    code = (
        "import sys\nfrom regard.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: print('code', end.code)\n"
        "heavy = {'jax', 'flax', 'optax', 'orbax', 'matplotlib', 'sklearn', 'numpy', 'scipy'}\n"
        "print('loaded', sorted(heavy & {name.split('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert "loaded []" in done.stdout
    assert f"code {2 if '--sed' in arguments else 0}" in done.stdout


@pytest.mark.slow
def test_the_import_guard_can_fail():
    code = "import sys, regard.cli.overview; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


def read_help(capsys, *words):
    with pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    assert end.value.code == 0
    return " ".join(re.sub(r"[│╭╮╰╯─•]", " ", capsys.readouterr().out).split())


def test_every_verb_has_a_summary_and_a_runnable_example(capsys):
    text = read_help(capsys)
    examples = re.findall(r"Example: (regard .*?)(?= [a-z]+ [A-Z]|$)", text)
    assert len(examples) == 10
    for example in examples:
        words = shlex.split(example)
        parsed = parse_arguments(words[1:])
        assert type(parsed).__name__.lower() == words[1]


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
            console.say(f"hello {self.name}")
            console.emit("greeting", name=self.name, heat=(float("nan"), 0.5))
            return 3

    monkeypatch.setattr(commands, "COMMANDS", [*commands.COMMANDS, Greet])
    assert "greet Greet somebody. Example: regard greet --name you" in read_help(capsys)
    assert "--name STR Whom to greet. (default: all)" in read_help(capsys, "greet")
    assert main(["greet", "--name", "you", "--json"]) == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"event": "greeting", "name": "you", "heat": [None, 0.5]}
    assert captured.err == "hello you\n"


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_what_runs_a_command_is_there(command):
    assert "run" in vars(command) or callable(command.load(command))


def test_the_guide_lists_every_command():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "command_line.md").read_text()
    named = set(re.findall(r"`regard ([a-z]+)", guide))
    assert named == {command.__name__.lower() for command in commands.COMMANDS}


@pytest.mark.parametrize("task", list(tasks.TASKS))
def test_every_setting_is_explained_with_its_default(capsys, task):
    text = read_help(capsys, "train", task)
    preset = tasks.TASKS[task]()
    assert f"--learning-rate FLOAT Peak learning rate. (default: {preset.optimization.learning_rate})" in text
    assert f"--d-model INT Width of the residual stream. (default: {preset.model.d_model})" in text
    assert "(default: out/TASK, or out/TASK-smoke)" in text
    assert f"Example: regard train {task}" in text


def test_flags_reach_the_settings():
    command = parse_arguments(
        [
            "train",
            "--seed",
            "3",
            "reverse",
            "--steps",
            "7",
            "--norm",
            "post",
            "--max-length",
            "11",
            "--out",
            "x",
        ]
    )
    assert command.task.optimization.steps == 7
    assert command.task.model.norm == "post"
    assert command.task.max_length == 11
    assert (command.seed, str(command.out)) == (3, "x")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "copy", "--sed", "3"], ["--sed", "--seed"]),
        (["train", "copy", "--learning-rat", "3"], ["--learning-rate"]),
        (["train"], ["threshold, copy, reverse, digits"]),
        (["train", "copy", "--steps", "many"], ["--steps", "many"]),
        (["train", "copy", "--norm", "both"], ["norm", "pre", "post"]),
        (["train", "copy", "--d-model", "7"], ["--num-heads must divide --d-model, got", "--d-model=7"]),
        (["train", "digits", "--held-out-fraction", "1"], ["--held-out-fraction must be in (0, 1)"]),
        (["explain"], ["--shape"]),
        ([], ["demo, train, generate, plot, inspect, view, explain, plan, tune, doctor"]),
    ],
    ids=" ".join,
)
def test_mistakes_exit_with_2_and_name_what_is_near(capsys, arguments, words):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", captured.err).split())
    assert all(word in text for word in words), text


# Training


@pytest.mark.slow
def test_training_says_what_runs_where_and_what_to_do_next(finished):
    directory, text = finished
    assert re.search(r"devices +1 x cpu with \d+ cores, jax", text)
    assert re.search(r"model +Classifier, [\d,]+ parameters, float32", text)
    assert re.search(r"encoder\.stack\.blocks\.0\.feed_forward +4 +97\n", text)
    assert re.search(r"attention +self-attention \(16, 2, 9, 3\) on 9 keys: dense", text)
    assert f"{directory} (new run)" in text
    assert re.search(r"compiling train step \.\.\.\n.*compiled train step in \d+\.\d s\n", text)
    assert re.search(r"step +20 held out: +loss", text)
    assert re.search(r"finished: step 20, held-out accuracy \d\.\d{4}, goal at least 1\n", text)
    assert text.rstrip().endswith(f"next: regard plot {directory}")
    assert "\x1b" not in text, "no colours and no bar where nobody can see them"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Seven small files, and a command that trains on them."""
    folder = tmp_path_factory.mktemp("cli-texts")
    for index in range(7):
        (folder / f"{index}.txt").write_text(f"{index} naïve tides and low tides\n" * (3 + index))
    sizes = ["--d-model", "12", "--num-heads", "2", "--d-ff", "7", "--length", "23"]
    return folder, ["train", "text", "--files", str(folder), *sizes, "--smoke"]


@pytest.mark.slow
def test_text_says_what_it_learns_from_and_what_a_byte_costs(texts, tmp_path, capsys):
    _, arguments = texts
    command = [
        *arguments,
        "--held-out-fraction",
        "0.2",
        "--vocab-size",
        "263",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert re.search(r"model +Decoder, [\d,]+ parameters, float32", text)
    assert re.search(r"attention +self-attention \(16, 2, 23, 6\) on 23 keys, causal", text)
    assert re.search(r"training +20 steps of 16 rows of 23 tokens, \d+\.\d epochs in all, Adam at", text)
    assert re.search(r"corpus +5 documents of 986 bytes; \d+ tokens, which are 263 strings of bytes", text)
    assert re.search(r"held out +2 documents of 232 bytes in \d+ rows; 0\.0% of its lines", text)
    assert re.search(r"step +20 held out: +loss \S+ +bits per byte \S+ +token accuracy", text)
    assert re.search(r"finished: step 20, held-out bits per byte \d\.\d{4}, goal at most 2\.2\n", text)
    task, model = runs.load_run(tmp_path / "run")
    sample = task.write_sample(model)
    shown = re.search(r"\nsample\n(.*)\n\nnext: regard plot", text, re.DOTALL)[1]
    assert "".join(filter(str.isalnum, shown)) == "".join(filter(str.isalnum, sample))
    assert f"      regard generate {tmp_path / 'run'} --prompt" in text
    assert main(["generate", str(tmp_path / "run"), "--prompt", "naïve tides", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("naïve tides")
    assert main(["plot", str(tmp_path / "run")]) == 0
    written = list((tmp_path / "run" / "figures").iterdir())
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert all(path.suffix == ".png" for path in written)
    names = {path.stem for path in written}
    assert names == {"curves", "attention", "attention-heads", "heads-entropy", "heads-max-score"}


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), (b"", "is empty"), (b"\0", "is binary"), (b"ab\xff", "byte 0xff at offset 2")],
)
def test_text_that_cannot_be_read_exits_with_2_and_writes_nothing(texts, tmp_path, capsys, content, message):
    _, arguments = texts
    if content is not None:
        (tmp_path / "bad.txt").write_bytes(content)
    arguments = [*arguments, "--files", str(tmp_path / "bad.txt"), "--out", str(tmp_path / "run")]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: files: ")
    assert f"{tmp_path / 'bad.txt'}" in error
    assert message in error
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_changed_corpus_is_refused(texts, tmp_path, capsys):
    folder, arguments = texts
    folder = shutil.copytree(folder, tmp_path / "texts")
    arguments = [*arguments, "--files", str(folder), "--out", str(tmp_path / "run")]
    begin(tmp_path / "run", tasks.shrink(parse_arguments(arguments).task))
    (folder / "3.txt").write_text("other words\n")
    before = snapshot(tmp_path / "run")
    assert main(["plot", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "not that with which this run began" in error
    assert "Traceback" not in error
    assert snapshot(tmp_path / "run") == before


@pytest.mark.slow
def test_the_parameter_table_adds_up(finished):
    _, text = finished
    total = int(re.search(r"Classifier, ([\d,]+) parameters", text)[1].replace(",", ""))
    rows = re.findall(r"^ {8,}\S+ +\d+ +([\d,]+)\s*$", text, re.MULTILINE)
    assert sum(int(row.replace(",", "")) for row in rows) == total


def test_a_finished_run_says_so_and_does_nothing(finished, capsys):
    directory, _ = finished
    before = snapshot(directory)
    assert main(["train", "copy", *TINY, "--out", str(directory)]) == 0
    text = capsys.readouterr().out
    assert "is finished already" in text
    assert "--force" in text
    assert snapshot(directory) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "copy", *TINY, "--seed", "1"], "seed: it has 0, asked for 1"),
        (["train", "threshold", "--smoke"], "task: it has 'copy', asked for 'threshold'"),
        (["train", "copy", *TINY, "--resume", "never"], "holds a run already"),
        (["train", "copy", *TINY, "--force", "--profile", "-1"], "--profile must be at least 0, got -1"),
        (["train", "copy", *TINY, "--steps", "30"], "optimization.steps: it has 20, asked for 30"),
    ],
)
def test_refusals_exit_with_2_and_change_nothing(finished, capsys, arguments, message):
    directory, _ = finished
    before = snapshot(directory)
    assert main([*arguments, "--out", str(directory)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert snapshot(directory) == before


def test_a_foreign_directory_is_refused(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years")
    for extra in ([], ["--force"]):
        assert main(["train", "copy", *TINY, "--out", str(tmp_path), *extra]) == 2
        assert "it holds thesis.tex" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "years"


@pytest.mark.slow
def test_quiet_is_quiet_and_json_is_json(tmp_path, capsys):
    assert main(["train", "copy", *TINY, "--quiet", "--out", str(tmp_path / "quiet")]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["train", "copy", *TINY, "--json", "--out", str(tmp_path / "json")]) == 0
    captured = capsys.readouterr()
    events = [json.loads(line) for line in captured.out.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[:2] == ["compiled", "compiled"]
    assert kinds.count("step") == 5
    assert [event["step"] for event in events if event["event"] == "evaluation"] == [10, 20]
    assert kinds[-1] == "end"
    assert events[-1]["status"] == "finished"
    assert "compiling train step" in captured.err


@pytest.mark.slow
def test_a_divergence_exits_with_1(tmp_path, capsys):
    arguments = [
        "train",
        "copy",
        *TINY,
        "--learning-rate",
        "1e38",
        "--clip-norm",
        "0",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert re.search(r"error: copy: \S+ is (inf|nan) at step 1;", error)
    assert "Traceback" not in error


@pytest.mark.slow
def test_force_starts_again(finished, tmp_path, capsys):
    directory = shutil.copytree(finished[0], tmp_path / "run")
    assert main(["train", "copy", *TINY, "--seed", "1", "--force", "--out", str(directory)]) == 0
    assert "(new run)" in capsys.readouterr().out
    assert json.loads((directory / "config.json").read_text())["seed"] == 1


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path):
    directory = tmp_path / "run"
    arguments = ["train", "copy", *TINY, "--steps", "1000000", "--out", str(directory)]
    ended = interrupt(arguments, "held out:", times=1)
    assert ended.returncode == 130
    assert "stopping after this step" in ended.stderr
    stopped = int(re.search(r"stopped at step (\d+) with a checkpoint", ended.stdout)[1])
    assert (directory / "checkpoints" / f"{stopped:08d}" / "checkpoint.json").exists()
    ended = interrupt(arguments, "held out:", times=2)
    assert ended.returncode == 130
    assert f"goes on from step {stopped}" in ended.stdout
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("task", ["copy", "text"])
def test_a_killed_process_goes_on_to_the_same_bits(texts, tmp_path, task):
    """Three processes: one killed, one that resumes, one that was never disturbed."""
    cadence = ["--steps", "600", "--evaluate-every", "50", "--checkpoint-every", "25"]
    chosen = ["train", "copy", *TINY] if task == "copy" else [*texts[1], "--vocab-size", "263"]
    arguments = [*chosen, *cadence, "--dropout-rate", "0.25", "--out"]
    killed = interrupt([*arguments, str(tmp_path / "run")], "step   100 held out", times=1, by=signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    assert re.search(r"goes on from step \d+", run([*arguments, tmp_path / "run"]).stdout)
    assert run([*arguments, tmp_path / "whole"]).returncode == 0
    one, other = (checkpoints.load(tmp_path / name / "checkpoints" / "00000600") for name in ("run", "whole"))
    assert all(one.arrays[name].tobytes() == array.tobytes() for name, array in other.arrays.items())
    assert read_lines(tmp_path / "run") == read_lines(tmp_path / "whole")


def interrupt(arguments, when, times, by=signal.SIGINT):
    """Starts a training, waits for a word in its output and sends a signal."""
    code = "import sys; from regard.cli import main; sys.exit(main())"
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, **options)
    read = ""
    try:
        for line in process.stdout:
            read += line
            if when in line:
                break
        for _ in range(times):
            process.send_signal(by)
            time.sleep(0.02)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, read + out, err)


# Displays


def test_on_a_terminal_there_is_a_bar(monkeypatch):
    console = Console()
    monkeypatch.setattr(console, "human", make_terminal())
    bar = Bar(console, "copy", 20, 0)
    with contextlib.ExitStack() as ended:
        ended.callback(bar.stop)
        with bar.compiling("train step"):
            pass
        bar.stepped(5, 20, {"loss": 2.5, "accuracy": 0.25}, 50.0)
        bar.evaluated(10, {"loss": 2.0, "accuracy": 0.5})
        bar.stepped(20, 20, {"loss": 1.5, "accuracy": 0.75}, 50.0)
    text = console.human.file.getvalue()
    assert "compiled train step in" in text
    assert "20/20" in text
    assert "loss 1.5" in text
    assert "\x1b[?25h" in text, "the cursor comes back"


def make_terminal():
    import io

    from rich.console import Console as RichConsole

    return RichConsole(file=io.StringIO(), force_terminal=True, width=100)


def test_a_step_is_described_by_its_metrics_rate_and_time_left():
    text = {"bits_per_byte": 2.5, "loss": 1.75, "token_accuracy": 0.5}
    assert describe_step(30, 90, text, float("nan")) == "loss 1.75  bits per byte 2.5"
    metrics = {"loss": 0.123456, "accuracy": 0.5, "grad_norm": 3.0}
    assert describe_step(30, 90, metrics, 20.0) == "loss 0.1235  accuracy 0.5  50 ms/step  3 s left"
    assert describe_step(30, 90, metrics, float("nan")) == "loss 0.1235  accuracy 0.5"


def test_a_sparkline_shows_the_range():
    assert draw_sparkline([0.0, 7.0]) == "▁█"
    assert draw_sparkline([3.0, float("nan"), 3.0]) == "▁▁"
    assert draw_sparkline([]) == ""
    assert len(draw_sparkline([float(step) for step in range(1000)], width=60)) == 60


# Plot, explain, doctor


@pytest.fixture(scope="module")
def plotted(finished, tmp_path_factory):
    """Two runs that were plotted together, and what was printed."""
    folder = tmp_path_factory.mktemp("plotted")
    one, two = (shutil.copytree(finished[0], folder / name) for name in ("one", "two"))
    return one, two, call(["plot", one, two, "--format", "svg"])


@pytest.mark.slow
def test_plot_writes_curves_and_attention(plotted):
    one, two, text = plotted
    names = ["attention-heads", "attention", "curves", "sinusoidal-positions"]
    names += ["heads-entropy", "heads-max-score"]
    assert sorted(path.name for path in (two / "figures").iterdir()) == sorted(
        f"{name}.svg" for name in names
    )
    written = [path for run in (one, two) for path in (run / "figures").iterdir()]
    assert sorted(text.split()) == sorted(map(str, written))
    assert (two / "figures" / "curves.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_two_runs_are_compared(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "draw_run", lambda *_: iter(()))  # their own pictures take long
    monkeypatch.setattr(pictures, "draw_sinusoids", lambda *_: iter(()))
    one, two = (shutil.copytree(finished[0], tmp_path / name) for name in ("one", "two"))
    assert call(["plot", one, two, "--format", "svg"]).split() == [str(one / "figures" / "comparison.svg")]
    assert (one / "figures" / "comparison.svg").read_text().startswith("<?xml")


def test_a_place_where_no_figure_can_be_written_is_named(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pictures, "draw_run", lambda *_: iter(()))  # sinusoids are drawn too
    directory = shutil.copytree(finished[0], tmp_path / "run")
    (directory / "figures").touch()
    assert main(["plot", str(directory)]) == 2
    assert f"{directory / 'figures'}" in capsys.readouterr().err.replace("\n", "")


def test_plot_needs_runs(tmp_path, capsys):
    assert main(["plot"]) == 2
    assert "at least one run" in capsys.readouterr().err
    assert main(["plot", str(tmp_path / "nowhere")]) == 2
    assert "nowhere; give a run of `regard train`" in capsys.readouterr().err


def test_what_is_no_run_is_named_with_the_runs_inside(finished, tmp_path, capsys):
    directory, _ = finished
    for verb in ("plot", "view"):
        assert main([verb, str(directory.parent)]) == 2
        assert f"{directory.parent} is not a run, but holds some; give one of them: {directory}" in (
            capsys.readouterr().err.replace("\n", " ")
        )
        (tmp_path / "notes").mkdir(exist_ok=True)
        assert main([verb, str(tmp_path / "notes")]) == 2
        assert "notes is not a run; give one of `regard train`" in capsys.readouterr().err
    (tmp_path / "notes.md").write_text("notes")
    assert main(["plot", str(tmp_path / "notes.md")]) == 2
    assert "notes.md is a file; give the folder of a run" in capsys.readouterr().err


def test_explain_says_which_backend_and_how_much_work(capsys):
    mask = "causal() & sliding_window(256)"
    assert main(["explain", "--shape", "1,8,4096,64", "--mask", mask, "--dtype", "bfloat16"]) == 0
    text = capsys.readouterr().out
    assert mask in text
    assert "931 empty, 62 partial, 31 full" in text
    assert "query bfloat16" in text
    assert "tiled" in text


@pytest.mark.slow
def test_explain_and_plot_speak_json(plotted, capsys):
    assert main(["explain", "--shape", "1,3,5", "--mask", "causal()", "--json"]) == 0
    captured = capsys.readouterr()
    (said,) = map(json.loads, captured.out.splitlines())
    assert (said["event"], said["backend"], said["mask"]) == ("explanation", "dense", "causal()")
    assert (said["tiles"]["partial"], said["shapes"]["query"]) == (1, [1, 3, 5])
    assert "all pairs" in captured.err
    assert main(["plot", str(plotted[1]), "--format", "svg", "--json"]) == 0
    written = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["event"] for line in written} == {"written"}
    assert str(plotted[1] / "figures" / "curves.svg") in [line["path"] for line in written]


def test_explain_draws_the_mask(capsys):
    shapes = ["--shape", "2,3,4,7", "--key-shape", "2,3,6,7", "--value-shape", "2,3,6,11"]
    assert main(["explain", *shapes, "--mask", "causal()", "--query-offset", "2", "--picture"]) == 0
    text = capsys.readouterr().out
    assert "■ ■ ■ · · ·" in text
    assert "output (2, 3, 4, 11)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "1,8,x"], "--shape must be whole numbers"),
        (["--shape", "5"], "at least two"),
        (["--shape", "3,5", "--mask", "causl()"], "did you mean causal()?"),
        (["--shape", "2,4,7", "--key-shape", "2,6,7", "--mask", "causal()"], "query_offset"),
        (["--shape", "2,4,7", "--key-shape", "2,6,5"], "key"),
        (["--shape", "4,7", "--backend", "fast"], "backend"),
    ],
)
def test_explain_refuses_what_attend_would(capsys, arguments, message):
    assert main(["explain", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.out == ""


def test_the_doctor_knows_versions_devices_backends_and_what_is_missing(capsys, monkeypatch):
    import importlib.metadata

    real = importlib.metadata.version

    def pretend(package):
        if package == "matplotlib":
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", pretend)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"jax {real('jax')}" in text
    assert re.search(r"devices +0: cpu", text)
    assert re.search(r"backend +dense: serves", text)
    assert f"matplotlib not installed; for figures: {remedy('look')}" in text
    assert "pip install 'regard[look]' (in a checkout: pip install '.[look]')" in text
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["packages"]["jax"] == real("jax")
    assert facts["optional"]["matplotlib"]["version"] is None


def test_the_doctor_says_why_a_platform_cannot_be_used(capsys, monkeypatch):
    import jax

    def fail(*_, **options):
        raise RuntimeError("Unable to initialize backend 'tpu': no libtpu.so")

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setattr(regard, "explain", fail)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "none: Unable to initialize backend 'tpu'" in text
    assert re.search(r"backend +dense: Unable to initialize backend 'tpu'", text)


def test_words_with_brackets_are_printed_as_they_are(capsys):
    """Rich would take [bold] or [/x] in a path or a message for markup."""
    console = Console()
    console.say("a [bold]path[/bold] [/x]")
    console.note("mask", "x[0, 1] [red]")
    console.fail("no [/such] thing")
    captured = capsys.readouterr()
    assert "a [bold]path[/bold] [/x]" in captured.out
    assert "x[0, 1] [red]" in captured.out
    assert "no [/such] thing" in captured.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "line"),
    [("tyro", "--help"), ("rich", "doctor"), ("flax", "train copy --smoke"), ("matplotlib", "plot out/copy")],
)
def test_a_missing_package_is_named_with_its_remedy(tmp_path, package, line):
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from regard.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: this needs {package}, which is not installed: {remedy('all')}\n"
    assert list(tmp_path.iterdir()) == []
