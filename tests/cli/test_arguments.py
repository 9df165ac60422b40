"""The words of a command line: versions, what is near a wrong word, colours, ASCII, interrupts."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time

import jax
import pytest

from regard.cli import displays, interruption, main
from regard.cli.arguments import parse_arguments
from regard.cli.console import Console

RUN = "import sys; from regard.cli import main; sys.exit(main())"


def refuse(capsys, *words):
    """What is printed about words that are not understood."""
    with pytest.raises(SystemExit) as end:
        main(list(words))
    captured = capsys.readouterr()
    assert (end.value.code, captured.out) == (2, "")
    return captured.err


def test_the_version_and_help_are_words_and_flags(capsys):
    def read(line):
        with pytest.raises(SystemExit) as end:
            main(line.split())
        assert end.value.code == 0
        return capsys.readouterr().out

    version = rf"regard \d\S+, jax {re.escape(jax.__version__)}, Python 3\S+\n"
    assert re.fullmatch(version, read("--version"))
    assert re.fullmatch(version, read("version"))
    for words in ("", "plot"):
        printed = read(f"{words} --help")
        assert printed == read(f"help {words}")
        assert "(default: )" not in printed, "a default that is nothing"
        assert ("regard --version" in printed) == (not words)


@pytest.mark.parametrize(
    ("words", "message", "program"),
    [
        ("", "demo, train, generate, plot, inspect, view, explain, plan, tune, doctor", "regard"),
        ("trian", "there is no command 'trian'; did you mean train?", "regard"),
        ("train mnist", "there is no task 'mnist'; there are threshold, copy, reverse", "regard train"),
        ("train --smoke --out copy revers", "did you mean reverse?", "regard train"),
        ("explain --shape 1,2,3,4 --dtype fp16", "Expected one of ('float16', 'bfloat16',", "regard explain"),
        ("train copy --steps 0", "--steps must be at least 1, got 0", "regard train copy"),
        ("train copy --d-model 7", "--num-heads must divide --d-model, got --num-heads", "regard train copy"),
        ("train text --files --smoke", "--files needs at least one value", "regard train text"),
        ("train copy --stepss 3", "--steps INT", "regard train copy"),
    ],
)
def test_a_mistake_names_what_is_near_and_the_help_of_its_own_command(capsys, words, message, program):
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", refuse(capsys, *words.split())).split())
    assert message in text
    assert re.findall(r"regard[a-z ]* --help", text) == [f"{program} --help"]


def test_flags_before_the_task_are_no_tasks():
    for words in ("--out copy --seed=3 reverse", "--out copy --smoke reverse --seed 3"):
        command = parse_arguments(["train", *words.split()])
        assert (command.task.name, str(command.out), command.seed) == ("reverse", "copy", 3)


def test_what_ascii_lacks_is_written_plainly(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["explain", "--shape", "3,5", "--mask", "causal()", "--picture"]) == 0
    stream.flush()
    assert b"1 # # .\n" in stream.buffer.getvalue()


@pytest.mark.parametrize(("colour", "colours"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_help_has_no_colours_where_none_are_wanted(colour, colours):
    pty = pytest.importorskip("pty")
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", RUN, "doctor", "--help"]
    environment |= {"TERM": "xterm", **colour}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        printed = b""
        while True:
            try:
                printed += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    assert process.returncode == 0
    assert b"usage:" in printed
    assert (b"\x1b[" in printed) is colours


def interrupt_in_compiled_code(block, times):
    """What a process ends by that is interrupted, so often, where Python waits for C in a block."""
    code = (
        "import ctypes\n"
        f"from regard.cli.interruption import *\nwith {block}:\n"
        "    print('waiting', flush=True)\n"
        "    lock = ctypes.create_string_buffer(128)\n"
        "    while True: ctypes.CDLL(None).pthread_mutex_lock(lock)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "waiting\n"
    try:
        for _ in range(times):
            time.sleep(0.2)
            assert process.poll() is None
            process.send_signal(2)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, errors


@pytest.mark.parametrize(
    ("block", "times", "last_words"),
    [
        ("leave_at_once('nothing is lost')", 1, "nothing is lost"),
        ("leave_soon('left')", 1, "left"),
        ("catch_interrupts()", 2, ""),
    ],
)
def test_interrupts_are_heard_while_python_waits_for_a_compiler(block, times, last_words):
    """A lock that C waits for stands for it: Python's handlers do not run."""
    assert interrupt_in_compiled_code(block, times) == (130, last_words)


def test_after_a_block_interrupts_are_as_they_were():
    with pytest.raises(KeyboardInterrupt), interruption.leave_soon("left"):
        signal.raise_signal(signal.SIGINT)
    with interruption.leave_at_once():
        pass
    with interruption.catch_interrupts() as is_interrupted:
        os.kill(os.getpid(), 2)
        assert is_interrupted()


def test_a_display_leaves_at_once_before_the_first_step(monkeypatch):
    asked = []

    def leave_at_once(last_words):
        asked.append(last_words)
        return contextlib.nullcontext()

    monkeypatch.setattr(displays, "leave_at_once", leave_at_once)
    with displays.Lines(Console(quiet=True), "copy").preparing():
        assert asked == [displays.NOTHING_LOST]
