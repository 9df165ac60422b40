"""Coordination of processes that train together, on JAX's runtime: joining, waiting, failing and stopping."""

import itertools
import os
import signal
import socket
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from regard.training.membership import Membership, Patience

T = TypeVar("T")
TOLD = "all processes were told"
patience = Patience()  # as `join` was told


class PeerError(RuntimeError):
    """The error of another process, with its message, or a difference between processes."""


def join(membership: Membership, chosen_patience: Patience = patience) -> None:
    """Join the other processes, before any other use of JAX; return when all are there, and connected."""
    global patience
    patience = chosen_patience
    if membership.index == 0 and membership.coordinator is not None:
        _demand_free_port(membership.coordinator)
    try:
        jax.distributed.initialize(
            membership.coordinator,
            membership.count,
            membership.index,
            initialization_timeout=patience.join_seconds + 60,  # `supervision` gives up before, in words
            heartbeat_timeout_seconds=patience.heartbeat_seconds,
            shutdown_timeout_seconds=patience.wait_seconds,
        )
    except (ValueError, RuntimeError) as error:
        remedy = "give coordinator='HOST:PORT', processes= and process="
        raise ValueError(f"processes: JAX cannot tell which process this is ({error}); {remedy}") from error
    try:
        gather("")  # connects all: later, whoever comes 30 s after the first would be too late
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"{membership} found the coordinator but cannot reach the other processes: {str(error)[:200]}"
        ) from error


def is_first() -> bool:
    return jax.process_index() == 0


def gather(text: str) -> list[str]:
    """Return the text that each process has, in their order; all must call it."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size))
    padded = np.zeros(max(int(sizes.max()), 1), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes.tolist(), strict=True)]


def everyone(function: Callable[[], T]) -> T:
    """Run a function that waits for no other process in every process; where one fails, raise in all."""
    try:
        result = function()
    except Exception as error:
        gather(f"{type(error).__name__}: {error}")
        if jax.process_count() > 1:
            error.add_note(TOLD)
        raise
    for process, message in enumerate(gather("")):
        if message:
            raise PeerError(f"process {process} of {jax.process_count()}: {message}")
    return result


def is_known(error: BaseException | None) -> bool:
    """Return True for an error that `everyone` has told to the other processes."""
    return TOLD in getattr(error, "__notes__", ())


def alone(function: Callable[[], T]) -> T | None:
    """Run a function in the first process while the others wait, with None in those; fail as `everyone`."""
    return everyone(lambda: function() if is_first() else None)


def demand_same(what: str, text: str) -> None:
    """Raise a PeerError where processes do not have the same text, naming one that differs."""
    first, *others = gather(text)
    for process, other in enumerate(others, 1):
        if other != first:
            pair = f"{first!r} in process 0 and {other!r} in process {process}"
            remedy = "start all alike, with the same versions"
            raise PeerError(f"{what}: expected the same in every process, got {pair}; {remedy}")


def watch_for_stop(first: int) -> Callable[[], bool]:
    """Return a function to ask after every step; it says stop in all processes after the same step.

    One process that is sent SIGTERM is enough, as by a cluster that takes a machine away, or `ask_to_stop`.
    `first`, the steps done before, must be the same everywhere.
    """
    steps = itertools.count(first + 1)
    return lambda: multihost_utils.reached_preemption_sync_point(next(steps))


def ask_to_stop() -> None:
    """Make all processes stop after the same step."""
    signal.raise_signal(signal.SIGTERM)  # JAX's own notice, which reaches the others, too


def _demand_free_port(coordinator: str) -> None:
    """Raise where another program listens at the address that the others are told: JAX would crash."""
    port = int(coordinator.rpartition(":")[2])
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        taken = f"port {port} of this machine is taken ({os.strerror(error.errno or 0)})"
        raise ValueError(f"coordinator: {taken}; give another port to all processes") from error
