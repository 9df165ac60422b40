"""`regard train`: its options."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from regard.cli.declaration import Command, Output, choice, conf, option
from regard.training.membership import Patience
from regard.training.tasks import TASKS, Task

if TYPE_CHECKING:
    TaskChoice = Task
else:
    TaskChoice = choice(TASKS)


@dataclass(frozen=True)
class Train(Command):
    """Train a model on one task; the same command again goes on where it stopped.

    Example: regard train copy --seed 1
    """

    RUNS = "regard.cli.supervision:supervise_training"
    CHOICES = {"task": TASKS}  # noqa: RUF012
    EXTRA = "train"
    ALIASES: ClassVar = {"directory": "out"}

    task: Annotated[TaskChoice, conf.arg(name="")]
    """Task to learn."""
    out: Annotated[Path | None, option("DIR", "out/TASK, or out/TASK-smoke")] = None
    """Run directory."""
    seed: int = 0
    """Seed of parameters, batches and dropout."""
    smoke: bool = False
    """Tiny model, 20 steps: checks the plumbing. Settings you give yourself stay."""
    resume: Annotated[str, option("auto|newest-whole|never|DIR")] = "auto"
    """The start: auto goes on from this run's checkpoint; newest-whole from the newest that is not damaged,
    for restarts that nobody watches; never refuses a directory that holds a run; DIR is another run or
    checkpoint of the same model and data, from which other steps, rates, dropout or seeds go on."""
    new_data: bool = False
    """Let a run that starts from --resume DIR have other data: other files, a longer --length."""
    profile: Annotated[int, option("STEPS")] = 0
    """Steps, after the first, that are traced into the run's folder profile, for TensorBoard or Perfetto."""
    force: bool = False
    """Delete the run in the output directory and start again."""
    mesh: Annotated[str | None, option("AXIS=N,...", "one device; data=* for several processes")] = None
    """Devices that share the work: data (rows of a batch), fsdp (rows, and parameters), expert (rows, and
    experts), tensor (heads and widths) and sequence (positions), such as data=2,fsdp=4. One N may be *: what
    is left. A run may go on on another mesh."""
    outer: Annotated[str | None, option("AXIS=N,...", "the first axes of the mesh")] = None
    """Slices or hosts that axes span, over the network between them, such as data=2: a divisor of the axis's
    size, and together all slices; the other axes stay within a slice, on its fast links."""
    compile_for: Annotated[str | None, option("TOPOLOGY", "train here")] = None
    """Compile one update for devices that are elsewhere, say what each of them holds, and stop: TPUs, such as
    v5e:4x4 (by libtpu), or GPUs, such as h100:8 (by JAX's plugin for CUDA). Nothing is written."""
    slices: int = 1
    """Slices of so many such TPUs each."""
    coordinator: Annotated[str | None, option("HOST:PORT|auto", "as the launcher says")] = None
    """Address that the first of several processes listens at; auto lets JAX find all, as on Cloud TPUs."""
    processes: Annotated[int | None, option("N", "as the launcher says, or 1")] = None
    """Number of processes that run this command; Slurm, Open MPI and JAX_NUM_PROCESSES are understood."""
    process: Annotated[int | None, option("I", "as the launcher says")] = None
    """Number of this process, from 0; the first one writes."""
    join_seconds: Annotated[int, option("S")] = Patience.join_seconds
    """Seconds that a process waits for all to come."""
    heartbeat_seconds: Annotated[int, option("S")] = Patience.heartbeat_seconds
    """Seconds without a sign of life after which a process counts as lost, which ends the others."""
    wait_seconds: Annotated[int, option("S")] = Patience.wait_seconds
    """Seconds that a process waits for the others to write their parts of a checkpoint, and to end."""
    output: Output = Output()

    @property
    def patience(self) -> Patience:
        """Return how long this process waits for others."""
        return Patience(self.join_seconds, self.heartbeat_seconds, self.wait_seconds)

    @property
    def directory(self) -> Path:
        """Return the run directory."""
        name = self.task.name
        return self.out or Path("out") / (f"{name}-smoke" if self.smoke else name)
