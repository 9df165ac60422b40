"""Requests to stop: every signal that asks for one saves, and what is said next goes on from there."""

import os
import re
import signal
import subprocess
import sys

import pytest

from command_runs import run_command
from regard.cli.continuation import spell_continuation
from regard.cli.displays import Lines
from regard.cli.interruption import STOPPING, catch_interrupts
from small_runs import COPY


@pytest.mark.parametrize("number", STOPPING, ids=lambda number: number.name)
def test_every_signal_that_asks_to_stop_is_heard_and_forgotten(number, capfd):
    before = [signal.getsignal(one) for one in STOPPING]
    with catch_interrupts() as is_asked:
        assert not is_asked()
        signal.raise_signal(number)
        assert is_asked()
        signal.raise_signal(signal.SIGTERM)  # closing a terminal may send several
    assert [signal.getsignal(one) for one in STOPPING] == before
    said = capfd.readouterr().err
    assert said.count("stopping after this step") == 1
    assert (number.name in said) == (number != signal.SIGINT)


def test_a_hang_up_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with catch_interrupts() as is_asked:
            signal.raise_signal(signal.SIGHUP)
            assert not is_asked()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_request_saves_and_the_command_that_goes_on_is_told(tmp_path, monkeypatch, capsys):
    """A command with --force would start again: that which is told does not, and the next goes on."""
    saved, out = Lines.saved, str(tmp_path / "my run")

    def ask(self, step):
        saved(self, step)
        while requests:
            signal.raise_signal(requests.pop())

    monkeypatch.setattr(Lines, "saved", ask)
    stopped = 0
    for force, number in ((["--force"], signal.SIGTERM), ([], signal.SIGINT)):
        requests = [number]
        words = [*COPY, "--log-every", 1, "--checkpoint-every", 2, "--out", out, *force]
        said = run_command(capsys, *words, code=130).out
        assert f"goes on from step {stopped}" in said if stopped else "(new run)" in said
        stopped = int(re.search(r"stopped at step (\d+) with a checkpoint; ", said)[1])
        assert (tmp_path / "my run" / "checkpoints" / f"{stopped:08d}" / "checkpoint.json").exists()
        again = f"this goes on from there\n  regard {' '.join(COPY)} --log-every 1 --checkpoint-every 2"
        assert (f"{again} --out '{out}'\n" if force else "the same command goes on from there") in said


@pytest.mark.slow
def test_a_terminal_that_is_closed_loses_nothing(tmp_path):
    import pty

    own, other = pty.openpty()
    code = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    code += "from regard.cli import main; sys.exit(main())"
    words = ["--steps", "100000", "--log-every", "1", "--checkpoint-every", "100000"]
    command = [sys.executable, "-c", code, *COPY, *words, "--out", str(tmp_path / "run")]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), other)
    child = subprocess.Popen(command, **streams, start_new_session=True)
    os.close(other)
    shown = b""
    while b"held out:" not in shown:
        shown += os.read(own, 4096)
    os.close(own)
    assert child.wait(timeout=60) == 130
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert re.fullmatch(r"\d{8}", saved.name)


def test_the_command_that_goes_on_starts_nothing_anew_and_fits_any_devices():
    for words, told in (
        ("--force --out a", "--out a"),
        ("--resume never --resume newest-whole", "--resume newest-whole"),
        ("--resume=never --seed 3", "--seed 3"),
        ("--coordinator h:1 --processes=2 --process 0 --mesh data=2 --outer=data=2", "--mesh 'data=*'"),
        ("--mesh tensor=2,fsdp=4", "--mesh 'fsdp=*'"),
    ):
        said = spell_continuation(["train", "copy", *words.split()], lost_devices=True)
        assert said == f"regard train copy {told}"
