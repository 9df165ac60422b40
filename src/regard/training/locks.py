"""The lock of a run directory: one trainer at a time. A kill releases it."""

import datetime
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from regard.paths import read_object
from regard.training import processes

LOCK, HOLDER = ".lock", ".lock.json"
FILES = (LOCK, HOLDER)


class LockError(ValueError):
    """A run directory that another process is writing to."""


@contextmanager
def hold(directory: Path) -> Iterator[None]:
    """Hold the lock of a run directory, made where it is missing; nothing of the lock stays there.

    Where there are several processes, all of them call this, and the first one holds. A process that holds it
    may hold it once more.
    """
    with ExitStack() as held:
        processes.alone(lambda: held.enter_context(_hold(directory)))
        yield


def demand_free(directory: Path) -> None:
    """Raise a LockError where another process holds the lock; write nothing where there is none."""
    # The first one alone looks: it may hold the lock for all before the others come here.
    if processes.is_first() and (directory / LOCK).exists():
        with _hold(directory):
            pass


@contextmanager
def _hold(directory: Path) -> Iterator[None]:
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory.absolute() / LOCK, is_singleton=True)
    if lock.is_locked or not os.access(directory, os.W_OK):  # where nobody can write nothing is to be guarded
        yield
        return
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        use = f"in use by {_read_holder(directory)}"
        raise LockError(f"{directory} is {use}; wait for its end, or give another directory=") from error
    try:
        since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        holder = {"host": socket.gethostname(), "process": os.getpid(), "since": since}
        (directory / HOLDER).write_text(json.dumps(holder), encoding="utf-8")
        yield
    finally:
        for name in (HOLDER, LOCK):  # held until it is gone: who waits for the old file finds that it is gone
            with suppress(OSError):
                (directory / name).unlink()
        lock.release()
        with suppress(OSError):
            for folder in missing:
                folder.rmdir()  # if nothing was written


def _read_holder(directory: Path) -> str:
    """Describe the holder, as far as it has said who it is."""
    holder = read_object(directory / HOLDER)
    if not {"process", "host", "since"} <= holder.keys():
        return "another process"
    return f"process {holder['process']} on {holder['host']} since {holder['since']}"
