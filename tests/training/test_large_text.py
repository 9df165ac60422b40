"""Text that is larger than memory: how much of it a training takes, in a process of its own."""

import os
import subprocess
import sys

import numpy as np
import pytest

uncounted = not os.path.exists("/proc/self/status")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(uncounted, reason="needs Linux's count of memory")]
MEBIBYTE = 2**20
PROGRAM = """
import re, sys
from pathlib import Path
from regard.cli import main
assert main(["train", "text", "--smoke", "--quiet", *sys.argv[1:]]) == 0
print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def write_text(path, size):
    random = np.random.default_rng(3)
    words = np.array(["".join(random.choice(list("etaoinshr"), 1 + i % 7)) for i in range(5003)])
    shares = 1 / np.arange(1, len(words) + 1)
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            chosen = words[np.searchsorted(np.cumsum(shares / shares.sum()), random.random(60_000))]
            file.write("\n".join(" ".join(line) for line in chosen.reshape(-1, 12)) + "\n")


def measure_peak(folder, *arguments):
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-c", PROGRAM, "--out", str(folder / "run"), "--force", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stdout.splitlines()[-1])


def test_the_memory_of_a_training_does_not_grow_with_its_text(tmp_path):
    """40 MiB of text, 80 MiB of tokens, took 240 MiB in memory; equal trainings differ by up to 100."""
    for name, size in (("small", MEBIBYTE), ("large", 40 * MEBIBYTE)):
        write_text(tmp_path / name, size)
    words = ["--vocab-size", "300", "--held-out-bytes", "10000", "--files"]
    small, large = (measure_peak(tmp_path, *words, str(tmp_path / name)) for name in ("small", "large"))
    assert large - small < 160 * MEBIBYTE, (small, large)
    sizes = [path.stat().st_size for path in (tmp_path / "cache").rglob("training")]
    assert sum(size > 20 * MEBIBYTE for size in sizes) == 1
