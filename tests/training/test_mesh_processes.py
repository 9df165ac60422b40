"""Real processes on loopback, as people start them: the numbers of one, a loss survived, a common stop."""

import functools
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from mesh_cases import pretend
from regard.cli import main, supervision
from regard.cli.command_words import parse_arguments
from regard.cli.console import Console
from regard.training import processes
from regard.training.membership import Membership, Patience
from small_runs import read_lines, split_lines

TINY = ["--d-model", "8", "--num-heads", "2", "--d-ff", "12", "--held-out-size", "16", "--batch-size", "8"]
COPY = ["train", "copy", *TINY, "--length", "3", "--vocab-size", "5", "--heads-every", "0"]
SHORT = ["--steps", "12", "--log-every", "1", "--evaluate-every", "6", "--checkpoint-every", "6"]
LONG = ["--steps", "120", "--log-every", "4", "--evaluate-every", "60", "--checkpoint-every", "12"]


@functools.cache
def can_unshare():
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


def as_host(index, command):
    """The command on a machine of its own, as far as JAX can tell: by the number of its start."""
    if not can_unshare():  # only root may pretend; elsewhere they are processes of one machine
        return command
    number = Path(tempfile.mkdtemp()) / "boot_id"
    number.write_text(f"{index:08}-aaaa-bbbb-cccc-dddddddddddd\n")
    bind = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", bind, str(number), *command]


def start(words, count):
    """The same command on several hosts, found in the environment or, the last one, by its flags."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    started, pipes = [], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    for index in range(count):
        command, environment = [sys.executable, "-m", "regard", *map(str, words)], pretend(2)
        if index == count - 1:
            command += ["--coordinator", address, "--processes", str(count), "--process", str(index)]
        else:
            environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
            environment |= {"JAX_PROCESS_ID": str(index)}
        started.append(subprocess.Popen(as_host(index, command), env=environment, **pipes))
    return started


def finish(started):
    try:
        said = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], said


def assert_same_course(one, other, rtol):
    assert [line["step"] for line in one] == [line["step"] for line in other]
    for line, wanted in zip(one, other, strict=True):
        assert line.keys() == wanted.keys()
        for name in line.keys() & {"loss", "grad_norm", "held_out_loss"}:
            np.testing.assert_allclose(line[name], wanted[name], rtol=rtol, err_msg=f"{name} {line['step']}")


def wait_for(path, process):
    deadline = time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_end_by_a_signal_is_put_into_words(tmp_path):
    words, out = ["train", "copy", "--seed", "3", "--processes", "2", "--process=1"], tmp_path / "my run"
    words += ["--coordinator", "a:1", "--out", str(out)]
    parts = lambda words: (parse_arguments(words), words, Membership("a:1", 2, 1))
    explain = lambda number, joined=True, words=words: supervision._explain_end(number, joined, *parts(words))
    assert "process 1 of 2 did not find the others at a:1" in explain(signal.SIGABRT, False)
    assert "process 1 of 2 stops, as another process was lost" in explain(signal.SIGABRT)
    assert "this starts again" in explain(signal.SIGABRT)
    (out / "checkpoints" / "00000040").mkdir(parents=True)
    assert "process 1 of 2 was ended by SIGKILL, as by a system out of memory" in explain(signal.SIGKILL)
    assert "goes on from step 40, the last checkpoint" in explain(signal.SIGKILL)
    assert "ended by SIGSEGV\n" in explain(signal.SIGSEGV)
    lost = explain(signal.SIGABRT, True, [*words, "--mesh", "data=2"])
    assert f"\n  regard train copy --seed 3 --out '{out}' --mesh 'data=*'\n" in lost


def test_who_joins_is_connected_before_gloo_gives_up_and_as_patient_as_told(monkeypatch):
    heard = []
    monkeypatch.setattr(processes.jax.distributed, "initialize", lambda *who, **kept: heard.append(kept))
    monkeypatch.setattr(processes, "gather", heard.append)
    monkeypatch.setattr(processes, "patience", None)
    processes.join(Membership(None, None, None), Patience(40, 3, 50))
    assert [*heard[0].values(), heard[1]] == [100, 3, 50, ""]


def test_who_waits_for_others_says_so_and_gives_up_in_words(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(supervision, "ANNOUNCED_AFTER", 0.05)
    monkeypatch.setattr(supervision, "_end", ended.append)
    own, other = socket.socketpair()
    with own, other:
        with supervision._announce_waiting(Console(), other, Membership("a:1", 2, 0), seconds=0.1):
            while not ended:
                time.sleep(0.01)
        assert own.recv(9) == supervision.TOLD
    waiting, given_up = capsys.readouterr().err.splitlines()
    assert waiting == "process 0 of 2 has waited 0.05 s for the others at a:1; it gives up after 0.1 s"
    assert given_up.startswith("error: process 0 of 2 did not find the others at a:1: not all of them came")
    assert ended == [1]


@pytest.mark.processes
def test_two_processes_learn_a_language_as_one(tmp_path):
    """And what was done is left alone by the same command on one device, with another mesh."""
    files = [tmp_path / f"{index}.txt" for index in range(7)]
    for index, path in enumerate(files):
        path.write_text(" ".join(["low", "lower", "tide"][: index % 3 + 1] * (index + 5)))
    sizes = ["--d-model", "16", "--num-heads", "2", "--d-ff", "12", "--num-layers", "1", "--length", "14"]
    words = ["train", "text", *sizes, *SHORT, "--batch-size", "8", "--warmup-steps", "3"]
    words = [*words, "--heads-every", "6", "--files", *map(str, files), "--out"]
    between = ["--outer", "sequence=2"] if can_unshare() else []
    codes, said = finish(start([*words, tmp_path / "two", "--mesh", "data=2,sequence=*", *between], 2))
    assert codes == [0, 0], said
    assert f"=2 of 2 processes{', sequence=2 between slices' if between else ''}; all" in said[0][0]
    assert "finished" in said[0][0]
    assert said[1][0] == ""
    assert "error" not in said[1][1]
    assert main([*words, str(tmp_path / "one")]) == 0
    (looks, lines), (own_looks, own_lines) = (split_lines(tmp_path / name) for name in ("two", "one"))
    assert_same_course(lines, own_lines, 2e-5)
    assert len(looks) == 3
    marks = [json.loads(path.read_text())["body"] for path in sorted(tmp_path.rglob("00000012/digests-*"))]
    assert [{"process_1" in name for name in own} for own in marks] == [{False}, {True}], "hashed by each"
    for one, other in zip(looks, own_looks, strict=True):
        np.testing.assert_allclose(one["entropy"]["blocks.0"], other["entropy"]["blocks.0"], rtol=1e-4)
    assert main([*words, str(tmp_path / "two")]) == 0
    assert json.loads((tmp_path / "two" / "config.json").read_text())["mesh"] == "data=2,sequence=2"


@pytest.mark.processes
def test_a_killed_process_ends_the_others_and_the_rest_goes_on(tmp_path):
    out = tmp_path / "run"
    words = [*COPY, *LONG, "--out", str(out)]
    started = start([*words, "--mesh", "fsdp=*"], 2)
    wait_for(out / "checkpoints" / "00000024", started[0])
    started[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    codes, said = finish(started)
    assert time.monotonic() - killed < 60
    assert codes == [1, -signal.SIGKILL]
    last = sorted(path.name for path in (out / "checkpoints").iterdir() if path.name.isdigit())[-1]
    assert "error: process 0 of 2 stops, as another process was lost" in said[0][1]
    assert f"goes on from step {int(last)}, the last checkpoint" in said[0][1]
    assert f"  regard {' '.join(words)} --mesh 'fsdp=*'\n" in said[0][1]
    assert int(last) < 120
    before = [line for line in read_lines(out) if line["step"] <= int(last)]
    assert main([*words, "--mesh", "fsdp=*"]) == 0
    found = read_lines(out)
    assert found[: len(before)] == before
    assert main([*COPY, *LONG, "--out", str(tmp_path / "whole")]) == 0
    assert_same_course(found, read_lines(tmp_path / "whole"), 1e-3)


@pytest.mark.processes
def test_one_asked_to_stop_stops_all_after_the_same_step(tmp_path):
    out = tmp_path / "run"
    words = [*COPY, *LONG, "--steps", "20000", "--mesh", "fsdp=*", "--out", str(out)]
    started = start(words, 2)
    wait_for(out / "checkpoints" / "00000012", started[0])
    started[1].send_signal(signal.SIGTERM)
    codes, said = finish(started)
    assert codes == [130, 130], said
    assert "with a checkpoint; the same command goes on from there" in said[0][0]
    part = max(out.rglob("*/ocdbt.process_1/d/*"), key=lambda path: (path.parts[-5], path.stat().st_size))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    wrong = f"{part} does not match the SHA-256"  # which one alone reads
    assert all(wrong in errors for _, errors in finish(start(words, 2))[1])


@pytest.mark.processes
def test_a_mistake_is_told_by_all_and_nobody_waits(tmp_path):
    began = time.monotonic()
    codes, said = finish(start([*COPY, *SHORT, "--mesh", "data=3", "--out", tmp_path / "run"], 2))
    assert codes == [2, 2]
    for _, errors in said:
        assert "as there are 4 devices; got data=3" in errors
        assert "lost" not in errors
    assert not any("Check failure" in errors for _, errors in said)
    assert time.monotonic() - began < 250  # JAX itself would wait 300
