"""One trainer in a run directory at a time: the others are told who holds it, and a kill releases it."""

import os
import re
import signal
import socket
import subprocess
import sys
from unittest import mock

import pytest

from regard.training import locks, loop, processes, runs
from small_runs import snapshot, tiny_copy

HOLD = """
import sys, time
from pathlib import Path
from regard.training import locks
with locks.hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_trainer_is_told_who_is_first_until_that_is_killed(begun):
    before = snapshot(begun)
    opened = runs.open_run(begun, tiny_copy())
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(begun)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        host = re.escape(socket.gethostname())
        told = rf"in use by process {holder.pid} on {host} since 20\d\d-.*another directory="
        begin = lambda **options: runs.open_run(begun, tiny_copy(), **options)
        for attempt in (begin, lambda: begin(force=True), lambda: loop.train(opened)):
            with pytest.raises(locks.LockError, match=told) as caught:
                attempt()
            assert "\n" not in str(caught.value)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert (begun / locks.LOCK).exists(), "what a kill leaves"
    assert runs.open_run(begun, tiny_copy()).start.step == 1
    assert snapshot(begun) == before


def test_a_lock_is_held_twice_by_its_holder_and_leaves_nothing(tmp_path):
    directory = tmp_path / "deep" / "run"
    with locks.hold(directory):
        with locks.hold(directory):
            assert (directory / locks.HOLDER).exists()
        assert (directory / locks.HOLDER).exists(), "the inner block does not release it"
        assert runs.open_run(directory, tiny_copy()).start is None
    assert not (tmp_path / "deep").exists()


def test_processes_that_train_together_do_not_shut_each_other_out(begun, monkeypatch):
    refuse = mock.Mock(side_effect=locks.LockError("held by the first process, for all"))
    monkeypatch.setattr(locks, "_hold", refuse)
    (begun / locks.LOCK).touch()
    with pytest.raises(locks.LockError):
        runs.open_run(begun, tiny_copy())
    monkeypatch.setattr(processes, "is_first", lambda: False)
    assert runs.open_run(begun, tiny_copy()).start.step == 1
    (begun / locks.LOCK).unlink()


def test_a_run_that_another_process_trained_meanwhile_is_refused(begun):
    opened = runs.open_run(begun, tiny_copy())
    later = (begun / "checkpoints" / "00000001").rename(begun / "checkpoints" / "00000002")
    with pytest.raises(runs.RunError, match=r"has changed since it was opened; open it again: open_run\("):
        loop.train(opened)
    later.rename(begun / "checkpoints" / "00000001")


def test_what_kills_left_is_cleared_away(begun):
    before = snapshot(begun)
    for left in ("checkpoints/.00000007.draft/state", "checkpoints/.00000001.draft"):
        (begun / left).mkdir(parents=True)
    (begun / ".config.json.draft").write_text("{")
    (begun / ".mine.draft").write_text("mine")
    runs.open_run(begun, tiny_copy()).tidy()
    (begun / ".mine.draft").unlink()
    assert snapshot(begun) == before
    assert sorted(os.listdir(begun / "checkpoints")) == ["00000001"]
