"""Killed at random moments, by every signal that ends or stops, a training goes on to the same bits."""

import random
import signal
import subprocess
import sys
import time

import pytest

from small_runs import COPY, assert_same_run

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WORDS = [*COPY, "--steps", "1600", "--log-every", "7", "--evaluate-every", "50", "--checkpoint-every", "25"]
WORDS += ["--heads-every", "30", "--out"]


def start(out):
    command = [sys.executable, "-m", "regard", *WORDS, str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill(out, number, moments):
    """Sends a signal at a random moment, one in four before training has begun; looks at what it said."""
    trained = out / "metrics.jsonl"
    size = trained.stat().st_size if trained.exists() else 0
    process = start(out)
    try:
        early = moments.random() < 0.25
        deadline = time.monotonic() + (moments.uniform(0, 8) if early else 300)
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
            if not early and trained.exists() and trained.stat().st_size > size:
                time.sleep(moments.uniform(0, 2))
                break
        process.send_signal(number)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    asked = 130 if "stopping after this step" in said else -number  # before it listens, a signal ends it
    assert process.returncode in (0, -signal.SIGKILL if number == signal.SIGKILL else asked, 130), said
    assert "Traceback" not in said or number == signal.SIGINT, said
    if process.returncode == 130 and "stopping" in said:
        assert "with a checkpoint; the same command goes on from there" in said


@pytest.mark.slow
def test_killed_at_random_moments_is_undisturbed(tmp_path):
    moments, out, whole = random.Random(3), tmp_path / "run", tmp_path / "whole"
    for number in SIGNALS:
        kill(out, number, moments)
    for directory in (out, whole):
        last = start(directory)
        said, _ = last.communicate(timeout=600)
        assert last.returncode == 0, said
    assert_same_run(out, whole)
    assert not list(out.rglob(".*")), "nothing of a lock or a draft is left"
