"""Killed at random moments, by every signal that ends or stops, each task goes on to the same bits.

    KILLS=40 python -m pytest tests/training/test_kills.py -m slow -s

does so many in all, and prints how they went.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from regard.training import checkpoints
from small_runs import read_lines

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SMALL = [
    *("--d-model", "8", "--num-heads", "2", "--d-ff", "12", "--batch-size", "4", "--dropout-rate", "0.25"),
    *("--log-every", "7", "--evaluate-every", "50", "--checkpoint-every", "25", "--heads-every", "30"),
]
TASKS = {
    "threshold": ["--steps", "1600", "--held-out-size", "16"],
    "copy": ["--steps", "1600", "--held-out-size", "16"],
    "reverse": ["--steps", "1200", "--held-out-size", "16"],
    "digits": ["--steps", "1200"],
    "text": ["--steps", "1200", "--length", "16", "--num-layers", "1"],
}
KILLS = int(os.environ.get("KILLS", "0"))  # 0: one by each signal, over all tasks


def start(words):
    code = "import sys; from regard.cli import main; sys.exit(main())"
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *words], **options)


def kill(words, out, number, moments):
    """Sends a signal at a random moment, one in four before training has begun; says what came of it."""
    trained = out / "metrics.jsonl"
    size = trained.stat().st_size if trained.exists() else 0
    process = start(words)
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
    return process.returncode


@pytest.mark.slow
@pytest.mark.parametrize("task", [*TASKS] if KILLS else ["copy"])
def test_killed_at_random_moments_is_undisturbed(tmp_path, task, capsys):
    moments = random.Random(f"{task}{KILLS}")
    words = ["train", task, *SMALL, *TASKS[task], "--out"]
    out, whole = tmp_path / "run", tmp_path / "whole"
    ends: Counter[str] = Counter()
    count = KILLS // len(TASKS) if KILLS else len(SIGNALS)
    for index in range(count):
        number = SIGNALS[index % len(SIGNALS)]
        code = kill([*words, str(out)], out, number, moments)
        ends[f"{number.name} -> {code}"] += 1
    for directory in (out, whole):
        last = start([*words, str(directory)])
        said, _ = last.communicate(timeout=600)
        assert last.returncode == 0, said
    one, other = (checkpoints.list_checkpoints(directory / "checkpoints")[-1] for directory in (out, whole))
    assert one.name == other.name
    arrays, wanted = checkpoints.load(one).arrays, checkpoints.load(other).arrays
    assert arrays.keys() == wanted.keys()
    assert all(arrays[name].tobytes() == array.tobytes() for name, array in wanted.items())
    assert read_lines(out) == read_lines(whole)
    assert not list(out.rglob(".*")), "nothing of a lock or a draft is left"
    with capsys.disabled():
        sys.stdout.write(f"\n{task}: {sum(ends.values())} signals {dict(ends)}, then the same bits\n")
