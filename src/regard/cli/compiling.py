"""`regard train --compile-for`: what an update takes of devices that are elsewhere."""

from dataclasses import asdict

from regard.cli.commands import Train
from regard.cli.console import Console, enough_memory, expected_errors
from regard.engine.dispatch.explanation import scaled
from regard.parallel import find_topology
from regard.planning import CHIPS, plan_step
from regard.training import mesh_specs, tasks
from regard.training.compiled_updates import CompiledUpdate, compile_update
from regard.training.sharding import Deployment


def compile_elsewhere(command: Train, console: Console, remedy: str) -> int:
    """Compile an update for a topology, and print what each device holds; return the exit code."""
    topology = command.compile_for or ""
    with expected_errors(), enough_memory(f"{command.task.name} on {topology}", remedy):
        task = tasks.shrink(command.task) if command.smoke else command.task
        devices = find_topology(topology, slices=command.slices)
        spec = mesh_specs.read_mesh(command.mesh or "data=*").fit(len(devices))
        spec.demand_divides(task)
        outer = mesh_specs.read_mesh(command.outer, "outer").sizes if command.outer else {}
        spans = {axis: span for axis, span in outer.items() if span != 1}
        deployment = Deployment.over(spec, spans or None, devices)
        with console.show_bytes() as report:
            task.prepare(report)
        update = compile_update(task, deployment, seed=command.seed)
        chip = CHIPS.get(topology.partition(":")[0])
        planned = _plan(task, update, deployment, chip.name) if chip and task.writes_text else None
    room = f" of {scaled(chip.memory_bytes, 'B')}" if chip else ""
    parts = f"state {scaled(update.state_bytes, 'B')}, in between {scaled(update.working_bytes, 'B')}"
    console.note("compiled", f"in {update.seconds:.1f} s for {update.devices} x {update.device_kind}")
    console.note("mesh", update.mesh)
    console.note("memory", f"{scaled(update.peak_bytes, 'B')}{room} at most on each device: {parts}")
    if planned is not None:
        console.note("planned", f"{scaled(planned, 'B')}, as regard plan counts")
    console.emit(
        "compiled", topology=topology, slices=command.slices, **asdict(update), planned_bytes=planned
    )
    return 0


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
