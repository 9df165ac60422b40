"""`regard train --compile-for`: what an update takes of devices that are elsewhere."""

from dataclasses import asdict

from regard.cli.console import Console
from regard.engine.dispatch.explanation import scaled
from regard.planning import CHIPS, plan_step
from regard.training import tasks
from regard.training.compiled_updates import CompiledUpdate
from regard.training.sharding import Deployment


def print_update(
    console: Console, task: tasks.Task, deployment: Deployment, update: CompiledUpdate, topology: str
) -> None:
    """Print what each device holds, as its compiler and as the planner count it."""
    chip = CHIPS.get(topology.partition(":")[0])
    planned = _plan(task, update, deployment, chip.name) if chip and task.writes_text else None
    room = f" of {scaled(chip.memory_bytes, 'B')}" if chip else ""
    parts = f"state {scaled(update.state_bytes, 'B')}, in between {scaled(update.working_bytes, 'B')}"
    console.note("compiled", f"in {update.seconds:.1f} s for {update.devices} x {update.device_kind}")
    console.note("mesh", update.mesh)
    console.note("memory", f"{scaled(update.peak_bytes, 'B')}{room} at most on each device: {parts}")
    if planned is not None:
        console.note("planned", f"{scaled(planned, 'B')}, as regard plan counts")
    console.emit("compiled", topology=topology, **asdict(update), planned_bytes=planned)


def _plan(task: tasks.Task, update: CompiledUpdate, deployment: Deployment, chip: str) -> float | None:
    """Return what `plan_step` says that a device holds; None for models that it does not plan."""
    asked, config = task.optimization, task.config
    try:
        step = plan_step(
            config,
            length=config.max_length,
            batch=asked.batch_size,
            devices=update.devices,
            chip=chip,
            precision=asked.precision,
            accumulate_steps=asked.accumulate_steps,
            fixed=dict(deployment.mesh.shape),
        )
    except ValueError:
        return None
    return sum(step.held.values())
