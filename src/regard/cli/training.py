"""`regard train`: open the run, say what runs where, train, say what to do next."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from regard import parallel
from regard.cli import FAILED, INTERRUPTED, compiling, displays, interruption, overview
from regard.cli.command_words import translate_message
from regard.cli.commands import Demo, Train
from regard.cli.console import Console, RunFailedError, UsageError, enough_memory, expected_errors
from regard.cli.continuation import describe_next, describe_trouble, spell_command
from regard.training import checkpoints, locks, loop, mesh_specs, metrics, processes, runs, tasks
from regard.training.checkpoint_files import Files, find_share
from regard.training.compiled_updates import compile_update
from regard.training.sharding import Deployment

BLOCKS = "▁▂▃▄▅▆▇█"
SMALLER = "give a smaller --batch-size or model, less held-out data, more --accumulate-steps, --remat full"
SMALLER += ", or a larger --mesh"


def run_training(command: Train, console: Console) -> int:
    """Train one task; return the exit code. Where there are several processes, all of them run this."""
    if command.profile < 0:
        raise UsageError(f"--profile must be at least 0, got {command.profile}")
    if command.compile_for is not None:
        return compile_elsewhere(command, console)
    if command.slices != 1:
        raise UsageError(f"--slices is of --compile-for, which is not given; got {command.slices}")
    directory = command.directory
    with expected_errors(), enough_memory(command.task.name, SMALLER):
        task = tasks.shrink(command.task) if command.smoke else command.task
        deployment = choose_deployment(command, task)
        options = {name: getattr(command, name) for name in ("seed", "resume", "new_data", "force")}
        if deployment is not None:
            options |= {"mesh": deployment.name, "outer": deployment.outer}
        run = open_together(directory, task, **options)
        if not run.is_finished:
            with console.show_bytes() as report:
                processes.alone(lambda: run.task.prepare(report))  # the others find what the first one kept
            processes.everyone(run.task.keep)  # the data are read, and found as they were
            if processes.is_first():
                overview.print_overview(console, run, deployment)
    outcome = advance_run(command, console, run, deployment)
    if outcome is None:
        return FAILED
    if not processes.is_first():
        return INTERRUPTED if outcome.status == "interrupted" else 0
    console.emit("end", run=str(directory), **dataclasses.asdict(outcome))
    if outcome.status == "interrupted":
        console.say(f"stopped at step {outcome.step} with a checkpoint; {describe_next(console.words)}")
        return INTERRUPTED
    goal = task.goal
    aim = f"; a smoke run: the goal, {goal}, is for a full one" if command.smoke else f", goal {goal}"
    result = f"step {outcome.step}, held-out {goal.title} {outcome.held_out[goal.metric]:.4f}{aim}"
    if outcome.status == "already finished":
        console.say(f"{directory} is finished already ({result}); nothing to do.")
        console.say("To train it again: the same command with --force, or another --out.")
    else:
        console.say(f"finished: {result}")
        times = f"{outcome.seconds:.1f} s of training, {outcome.compile_seconds:.1f} s of compiling"
        console.say(f"{times}, {outcome.elapsed_seconds:.1f} s in all")
        losses = metrics.columns(metrics.read(run.metrics_path), "loss")[1]
        console.say(f"loss  {draw_sparkline(losses)}")
        # A model that is divided may be larger than the memory of one device.
        if task.shows_sample and not (deployment and deployment.divides_model):
            sample = run.task.write_sample(runs.load_model(run.task, directory))
            console.emit("sample", task=task.name, text=sample)
            # A terminal would obey control characters.
            shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in sample)
            console.say(f"\nsample\n{shown}\n")
    console.say(f"next: {spell_command('plot', directory)}")
    if task.writes_text:
        console.say(f"      {spell_command('generate', directory, '--prompt', 'In the beginning')}")
    return 0


def open_together(directory: Path, task: tasks.Task, **options: Any) -> runs.Run:
    """Open a run in all processes: each checks its share of a checkpoint's files, and all agree on it."""
    damaged: dict[Path, str] = {}

    def check(path: Path, files: Files) -> None:
        if path in damaged:
            raise checkpoints.CheckpointError(damaged[path])

    def look() -> runs.Run:
        return runs.open_run(directory, task, check=check, **options)

    def look_in_turn() -> runs.Run:
        first = processes.alone(look)
        return processes.everyone(lambda: first or look())

    while True:
        run = look_in_turn()
        processes.demand_same("checkpoint", str(run.start and run.start.step))
        faults = processes.gather("" if run.start is None else find_damage(run.start))
        if run.start is None or not any(faults):
            return run
        damaged[run.start.path] = next(filter(None, faults))


def find_damage(checkpoint: checkpoints.Checkpoint) -> str:
    """Return what is wrong with this process's share of a checkpoint; an empty text when nothing is."""
    names = find_share(checkpoint.files, jax.process_index(), jax.process_count())
    try:
        checkpoints.verify_files(checkpoint.path, checkpoint.files, names)
    except checkpoints.CheckpointError as error:
        return str(error)
    return ""


def compile_elsewhere(command: Train, console: Console) -> int:
    """Compile an update for devices that are elsewhere, and print what each holds; return the exit code."""
    topology = command.compile_for or ""
    with expected_errors(), enough_memory(f"{command.task.name} on {topology}", SMALLER):
        task = tasks.shrink(command.task) if command.smoke else command.task
        devices = parallel.find_topology(topology, slices=command.slices)
        deployment = choose_deployment(command, task, devices)
        assert deployment is not None  # as there are devices
        with console.show_bytes() as report:
            task.prepare(report)
        update = compile_update(task, deployment, seed=command.seed)
        compiling.print_update(console, task, deployment, update, topology)
    return 0


def choose_deployment(
    command: Train, task: tasks.Task, devices: Sequence[Any] | None = None
) -> Deployment | None:
    """Choose the mesh that a command asks for; by default several processes divide the rows of a batch."""
    if devices is None and not command.mesh and not command.outer and jax.process_count() == 1:
        return None
    spec = mesh_specs.read_mesh(command.mesh or "data=*")
    spans = mesh_specs.read_mesh(command.outer, "outer").sizes if command.outer else {}
    outer = {axis: span for axis, span in spans.items() if span != 1}
    deployment = Deployment.over(spec, outer or None, devices)
    spec.fit(deployment.mesh.size).demand_divides(task)
    return deployment


def advance_run(
    command: Train | Demo, console: Console, run: runs.Run, deployment: Deployment | None = None
) -> loop.Outcome | None:
    """Train, shown and ready to stop; return None after a divergence, which is reported."""
    profile = command.profile if isinstance(command, Train) else 0
    steps, done = run.task.optimization.steps, run.start.step if run.start else 0
    together = jax.process_count() > 1
    agreed = processes.watch_for_stop(done) if together else None
    try:
        with (
            enough_memory(run.task.name, SMALLER),
            interruption.catch_interrupts(processes.ask_to_stop if together else None) as is_interrupted,
            displays.open_display(console, run.task.name, steps, done) as progress,
        ):
            stop = agreed or is_interrupted
            return loop.train(run, progress=progress, stop=stop, deployment=deployment, profile=profile)
    except loop.DivergenceError as error:
        if processes.is_first():
            console.emit("diverged", task=run.task.name, metric=error.metric, step=error.step)
            console.fail(f"{run.task.name}: {translate_message(str(error), command)}")
        return None
    except (checkpoints.CheckpointError, runs.RunError, locks.LockError) as error:
        raise UsageError(str(error)) from error
    except BrokenPipeError:
        raise  # of what is printed, not of what is saved; `main` knows
    except OSError as error:
        raise RunFailedError(describe_trouble(error, run.directory, console.words)) from error


def draw_sparkline(values: list[float], width: int = 60) -> str:
    """Draw a curve in one line of blocks, from its lowest to its highest value."""
    valid = [value for value in values if value == value]
    if not valid:
        return ""
    low, span = min(valid), (max(valid) - min(valid)) or 1.0
    chosen = [valid[index * len(valid) // width] for index in range(width)] if len(valid) > width else valid
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] for value in chosen)
