"""This process's place among several, from flags or a launcher's environment variables. No JAX here."""

from collections.abc import Mapping
from dataclasses import dataclass

AUTO = "auto"
# Launchers whose coordinator JAX finds by itself: where they keep the number of processes, and which it is.
LAUNCHERS = (
    # Without a step there is a batch script, whose SLURM_NTASKS speaks of processes that it has yet to start.
    ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID"),
    ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
)


@dataclass(frozen=True)
class Patience:
    """Seconds that a process waits for others, before it counts them as absent or lost."""

    join_seconds: int = 300
    """For all of them to come."""
    heartbeat_seconds: int = 20
    """For a sign of life of each."""
    wait_seconds: int = 1200
    """For their parts of a checkpoint, and for their end."""

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if seconds < 1:
                raise ValueError(f"{name}: expected at least 1, got {seconds}")


@dataclass(frozen=True)
class Membership:
    """One of several processes: where the first is found, how many there are, which this is; or JAX knows."""

    coordinator: str | None
    count: int | None
    index: int | None

    def __str__(self) -> str:
        return "this process" if self.count is None else f"process {self.index} of {self.count}"


def find_membership(
    coordinator: str | None, count: int | None, index: int | None, environment: Mapping[str, str]
) -> Membership | None:
    """Find out which of several processes this is; None where there is one.

    What is None is read from JAX's variables, or what Slurm or Open MPI say. "auto" lets JAX find everything,
    as it can on Cloud TPUs and Kubernetes.
    """
    if coordinator == AUTO:
        return Membership(None, None, None)
    coordinator = environment.get("JAX_COORDINATOR_ADDRESS") if coordinator is None else coordinator
    launcher = next((names for mark, *names in LAUNCHERS if mark in environment), None)
    for size, rank in (("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"), *([] if launcher is None else [launcher])):
        count = _read(environment, size) if count is None else count
        index = _read(environment, rank) if index is None else index
    if count == 1 or (coordinator, count, index) == (None, None, None):
        return None
    needed = {
        "coordinator= (or JAX_COORDINATOR_ADDRESS)": launcher if coordinator is None else coordinator,
        "processes= (or JAX_NUM_PROCESSES)": count,
        "process= (or JAX_PROCESS_ID)": index,
    }
    if wanted := ", ".join(name for name, value in needed.items() if value is None):
        raise ValueError(
            f"processes: expected coordinator=, processes= and process= together; still needed: {wanted}"
        )
    assert count is not None
    assert index is not None
    port = None if coordinator is None else coordinator.rpartition(":")[2]
    if port is not None and not (port.isdecimal() and 0 < int(port) < 2**16):
        expected = "HOST:PORT of process 0, with a port from 1 to 65535, or auto"
        raise ValueError(f"coordinator: expected {expected}; got {coordinator!r}")
    if count < 1:
        raise ValueError(f"processes: expected at least 1, got {count}")
    if not 0 <= index < count:
        raise ValueError(f"process: expected 0 to {count - 1}, as there are {count} processes; got {index}")
    return Membership(coordinator, count, index)


def _read(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is not None and not text.isdecimal():
        raise ValueError(f"{name}: expected a number, got {text!r}")
    return None if text is None else int(text)
