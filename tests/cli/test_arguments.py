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

from regard.cli import interruption, main
from regard.cli.command_words import parse_arguments


def refuse(capsys, *words):
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
        assert ("regard --version" in printed) == (not words)


def test_a_mistake_names_what_is_near_and_the_help_of_its_own_command(capsys):
    for words, message, program in (
        ("", "demo, train, generate, plot, inspect, view, explain, plan, tune, conformance", "regard"),
        ("trian", "there is no command 'trian'; did you mean train?", "regard"),
        ("train --smoke --out copy revers", "did you mean reverse?", "regard train"),
        ("explain --shape 1,2,3,4 --dtype fp16", "Expected one of ('float16', 'bfloat16',", "regard explain"),
        ("train copy --d-model 7", "--num-heads must divide --d-model, got --num-heads", "regard train copy"),
        ("train text --files --smoke", "--files needs at least one value", "regard train text"),
        ("train copy --mesh=", "--mesh needs a value, got an empty one", "regard train"),
        ("generate run --prompt=", "--prompt needs a text, such as --prompt 'Once", "regard generate"),
        ("generate run --prompt a\udcff", r"--prompt: expected text in UTF-8, got 'a", "regard generate"),
        ("train copy --smoke --num-heads 3", "got --num-heads=3 and --d-model=16", "regard train copy"),
        ("train copy --smoke --warmup-steps 90", "--warmup-steps must be at most --st", "regard train copy"),
        ("train copy --learning-rate inf", "--learning-rate must be above 0 and finite", "regard train copy"),
    ):
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
    environment |= {"TERM": "xterm", **colour}
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "regard", "doctor", "--help"]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        printed = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while True:
                printed += os.read(ours, 4096)
    os.close(ours)
    assert process.returncode == 0
    assert b"usage:" in printed
    assert (b"\x1b[" in printed) is colours


WAIT = """
import ctypes
from regard.cli.interruption import *
with BLOCK:
    print("waiting", flush=True)
    lock = ctypes.create_string_buffer(128)
    while True: ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


@pytest.mark.parametrize("block", ["leave_at_once('left')", "leave_soon('left')", "catch_interrupts()"])
def test_interrupts_are_heard_while_python_waits_for_a_compiler(block):
    """A lock that C waits for stands for it: Python's handlers do not run."""
    code, is_caught = WAIT.replace("BLOCK", block), "catch" in block
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        try:
            assert process.stdout.readline() == "waiting\n"
            for _ in range(1 + is_caught):
                time.sleep(0.2)
                assert process.poll() is None
                process.send_signal(2)
            assert process.communicate(timeout=30)[1] == ("" if is_caught else "left")
        finally:
            process.kill()
    assert process.returncode == 130


def test_after_a_block_interrupts_are_as_they_were():
    with pytest.raises(KeyboardInterrupt), interruption.leave_soon("left"):
        signal.raise_signal(signal.SIGINT)
    with interruption.leave_at_once():
        pass
    with interruption.catch_interrupts() as is_interrupted:
        os.kill(os.getpid(), 2)
        assert is_interrupted()
