"""Troubles while training: one line says what is wrong and what to do, and nothing that was saved is lost."""

import contextlib
import errno
import re
import shutil
import socket
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from command_runs import run_command
from refusals import assert_refused
from regard.cli.continuation import describe_trouble
from regard.training import checkpoints, processes, runs, tasks
from regard.training.compilation import run_once
from regard.training.membership import Membership
from small_runs import COPY, share_programs, snapshot, tiny_copy


@pytest.fixture(scope="module", autouse=True)
def _shared():
    with share_programs():
        yield


@pytest.fixture
def run(begun, tmp_path):
    return shutil.copytree(begun, tmp_path / "run")


def refuse(capsys, words, code):
    """What the one error says; nothing is written."""
    error = run_command(capsys, *COPY, *words, code=code).err
    assert error.startswith("error: ")
    assert "Traceback" not in error
    return error


def test_a_place_below_a_file_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    error = refuse(capsys, ["--out", tmp_path / "file" / "run"], 2)
    assert error.count("\n") == 1
    assert f"{tmp_path}/file is a file, not a directory; give another --out" in error


def test_too_little_memory_is_told_in_one_sentence(tmp_path, capsys, monkeypatch):
    told = "RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes.\n  @ 0x7f"
    monkeypatch.setattr(tasks.Copy, "make_held_out", mock.Mock(side_effect=jax.errors.JaxRuntimeError(told)))
    error = refuse(capsys, ["--out", tmp_path / "run"], 1)
    assert error.count("\n") == 1
    assert "does not fit into the memory of the devices" in error
    assert "Out of memory allocating 64 bytes.); give a smaller --batch-size" in error


def test_what_finds_no_memory_raises_before_it_is_read():
    """Read by NumPy, such arrays end the process."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="memory"):
        run_once(lambda rng: jax.random.bits(rng, (2**31 - 1, 2**24), jnp.uint8), jax.random.key(0))


def test_force_deletes_nothing_where_the_data_are_missing(run, tmp_path, capsys):
    before = snapshot(run)
    words = ["train", "text", "--files", tmp_path / "nowhere.txt", "--force", "--out", run]
    assert "nowhere.txt, which does not exist" in run_command(capsys, *words, code=2).err
    assert snapshot(run) == before


def test_a_damaged_line_of_the_metrics_is_named_and_nothing_is_changed(run, capsys):
    (run / "metrics.jsonl").write_text('{"step": 1, "lo\n{"step": 2}\n')
    before = snapshot(run)
    error = refuse(capsys, ["--out", run], 2)
    told = r"metrics\.jsonl, line 1 is not JSON: .*; mend or delete that line, then give the same comm"
    assert re.search(told, error)
    assert error.count("\n") == 1
    assert snapshot(run) == before


def test_a_full_disk_leaves_the_older_checkpoint(run, capsys, monkeypatch):
    """As tensorstore tells it, in the text of a ValueError."""

    def fail(self, path, args):
        (path / "state").mkdir(parents=True)
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write [os_error_code='28']")

    monkeypatch.setattr(ocp.AsyncCheckpointer, "save", fail)
    before = snapshot(run / "checkpoints")
    error = refuse(capsys, ["--out", run, "--resume", "newest-whole"], 1)
    assert re.search(r"00000007: .*; free some space: .* this goes on from step 1, the last check", error)
    assert error.endswith(f"  regard {' '.join([*COPY, '--out', str(run), '--resume newest-whole'])}\n")
    assert snapshot(run / "checkpoints") == before
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["00000001"]
    draft = OSError(errno.ENOSPC, "No space", str(run / ".config.json.draft"))
    assert describe_trouble(draft, run, []).startswith(f"{run / 'config.json'}: No space; free"), "no draft"


def test_a_limit_of_file_sizes_is_told_in_one_line(run):
    """For real: the writers' own threads print hundreds of lines otherwise."""
    # Without -B, bytecode of what is imported here would end where the limit is, for whoever comes after.
    limited = f"ulimit -f 3; exec '{sys.executable}' -B -m regard \"$@\""
    command = ["bash", "-c", limited, "-", *COPY, "--quiet", "--out", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith("error: ")
    assert "File too large; raise the limit of file sizes (ulimit -f)" in done.stderr
    assert len(done.stderr.splitlines()) == 2, "and the command that goes on"
    assert runs.open_run(run, tiny_copy()).start.step == 1


def test_the_newest_whole_checkpoint_is_gone_on_from_where_asked(run):
    for step in (2, 3):
        checkpoints.save(run / "checkpoints", step, {"a": np.arange(3.0)}, {}, keep=9)
        next((run / "checkpoints" / f"{step:08d}").rglob("manifest.ocdbt")).write_bytes(b"")
    before = snapshot(run)
    told = r"00000003 is damaged.* has 0 bytes.*\nnothing.* to go on from step 2.*resume='newest-whole'"
    assert_refused((lambda: runs.open_run(run, tiny_copy()), told, checkpoints.CheckpointError))
    opened = runs.open_run(run, tiny_copy(), resume="newest-whole")
    assert opened.start.step == 1
    assert [path.name for path in opened.damaged] == ["00000003", "00000002"]
    assert re.search("00000003 is damaged: .*; .*00000002 is damaged: ", opened.note)
    assert snapshot(run) == before
    opened.tidy()
    opened.begin({})
    left = " ".join(sorted(path.name for path in (run / "checkpoints").iterdir()))
    assert left == "00000001 00000002.damaged 00000003.damaged"
    assert runs.open_run(run, tiny_copy()).start.step == 1


def test_where_no_checkpoint_is_whole_nothing_starts_again_by_itself(run):
    next((run / "checkpoints" / "00000001").rglob("manifest.ocdbt")).write_bytes(b"")
    with pytest.raises(checkpoints.CheckpointError, match=r"remove .*00000001 to start again$"):
        runs.open_run(run, tiny_copy(), resume="newest-whole")
    shutil.rmtree(run / "checkpoints")
    assert runs.open_run(run, tiny_copy(), resume="newest-whole").start is None


def test_processes_that_differ_are_told_so(monkeypatch):
    monkeypatch.setattr(processes, "gather", lambda text: [text, "copy from step 7"])
    told = r"got 'copy from step 0' in process 0 .* in process 1; start all"
    assert_refused((lambda: processes.demand_same("run", "copy from step 0"), told, processes.PeerError))


def test_a_coordinator_port_that_is_taken_is_named():
    with contextlib.closing(socket.create_server(("", 0))) as taken:
        port = taken.getsockname()[1]
        told = rf"port {port} of this machine is taken \(Address already in use\); give another port"
        assert_refused((lambda: processes.join(Membership(f"127.0.0.1:{port}", 2, 0)), told))
