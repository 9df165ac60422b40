"""A run directory: config.json (settings and versions), metrics.jsonl, checkpoints/, and later figures/.

A task may keep files of its own beside them: see `Task.keep`.

Opening a run only reads, and decides to go on, to start or to refuse; `begin` is the first to write.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from flax import nnx

from regard.arguments import check_kind, whole_number
from regard.paths import find_file, read_object, read_path
from regard.training import checkpoints, compilation, locks, metrics, run_configs, tasks
from regard.training.run_configs import RunConfig

SEEDS = range(-(2**63), 2**63)
# Settings that may differ where a run starts from another one; those that may not with new data, either.
FREE = ("optimization.", "cadence.", "seed", "model.scan_layers", "model.remat", "model.dropout_rate")
STARTS = "auto, newest-whole, never"
OF_MODEL = ("task", "model.", "vocab_size")
ANOTHER, REOPEN = "give another directory=", "open it again: open_run(...)"
OWN_ENTRIES = ("config.json", "metrics.jsonl", "checkpoints", "figures", "profile")


class RunError(ValueError):
    """A run directory that cannot serve as asked; nothing in it was changed."""


class NoCheckpointError(RunError):
    """A run that has no checkpoint yet, and the name of its task."""

    def __init__(self, directory: Path, task: str):
        super().__init__(f"{directory} has no checkpoint yet; go on training it: train(open_run(...))")
        self.directory, self.task = directory, task


@dataclass(frozen=True)
class Run:
    """A run directory and where its training starts.

    Attributes:
        directory: the run directory.
        task: what is trained, with what it kept when the run, or the one that it starts from, began.
        seed: seeds parameters, batches and dropout.
        start: the checkpoint to go on from, or None for fresh parameters.
        source: the run directory that `start` comes from, when it is another one.
        note: what a reader should know about the start, such as other versions, or None.
        mesh: the devices' mesh of this session, such as data=2,tensor=4; None means one device. A run may go
            on on another one.
        outer: the slices that the mesh's axes span, such as data=2; None means that there is one slice.
        damaged: newer checkpoints than `start`, which are set aside as STEP.damaged.
        saved: the checkpoints that were there, and when each was written: see `tidy`.
        replaces: what Regard may have written in the directory for the run that this one replaces.
    """

    directory: Path
    task: tasks.Task
    seed: int
    start: checkpoints.Checkpoint | None = None
    source: Path | None = None
    note: str | None = None
    mesh: str | None = None
    outer: str | None = None
    damaged: tuple[Path, ...] = ()
    saved: Mapping[Path, int] = field(default_factory=dict)
    replaces: tuple[str, ...] = ()

    @property
    def is_finished(self) -> bool:
        """True when every step is done already."""
        steps = self.task.optimization.steps
        return self.start is not None and self.source is None and self.start.step >= steps

    @property
    def metrics_path(self) -> Path:
        return self.directory / "metrics.jsonl"

    @property
    def checkpoints_path(self) -> Path:
        return self.directory / "checkpoints"

    def tidy(self) -> None:
        """Remove what kills left in the directory, while its lock is held.

        Raises:
            RunError: when another process trained in the directory since the run was opened.
        """
        checkpoints.tidy(self.checkpoints_path)
        for name in (*OWN_ENTRIES, *self.task.keeps):
            draft = self.directory / f".{name}.draft"
            if draft.exists():  # unlink raises where nothing may be written, even for what is not there
                draft.unlink(missing_ok=True)
        if _date_checkpoints(self.directory) != self.saved:
            raise RunError(f"{self.directory} has changed since it was opened; {REOPEN}")

    def clear(self) -> Self:
        """Delete the run that this one replaces, config.json last: a kill leaves a run to delete again.

        Returns:
            The same run, which replaces nothing any more.
        """
        for name in reversed(self.replaces):
            path = self.directory / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return replace(self, saved={}, replaces=()) if self.replaces else self

    def begin(self, kept: Mapping[str, str]) -> None:
        """Write the settings and what the task keeps, and drop the metrics after the starting step.

        The run that this one replaces is deleted first, as everything else has been checked by then.

        Raises:
            RunError: when the task keeps something else than the run that it goes on with, or a line of
                metrics.jsonl is damaged; nothing is written.
        """
        read = [self.source, None if self.replaces else self.directory]
        try:
            for directory in filter(None, read):
                metrics.read(directory / "metrics.jsonl")
        except ValueError as error:
            raise RunError(f"{error}; mend or delete that line, then {REOPEN}") from error
        for name, text in (self.task.kept or {}).items():
            if text is not None and kept.get(name, text) != text:
                raise RunError(f"{self.directory / name} is not what the run began with; {ANOTHER}")
        self.clear()
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "config.json"
        goes_on = self.start is not None and self.source is None
        written = json.loads(path.read_text(encoding="utf-8")) if goes_on else None
        current = {"mesh": self.mesh, "outer": self.outer, "settings": tasks.to_settings(self.task)}
        if written is None or {name: written.get(name) for name in current} != current:
            config = self._describe(kept) if written is None else written | current
            metrics.replace_text(path, json.dumps(config, indent=2) + "\n")
        for name, text in kept.items():
            metrics.replace_text(self.directory / name, text)
        for path in self.damaged:
            aside = path.with_suffix(".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        if self.source is not None:
            history = metrics.read(self.source / "metrics.jsonl")
            metrics.replace_text(self.metrics_path, "")
            metrics.append(self.metrics_path, history)
        # A new run may have left a line about step 0 before it was killed.
        metrics.cut(self.metrics_path, self.start.step if self.start else -1)

    def describe(self, kept: Mapping[str, str]) -> str:
        """Return a line that would differ if another process trained something else."""
        config = self._describe(kept)
        texts = {name: json.dumps(config[name], sort_keys=True) for name in ("settings", "kept", "versions")}
        listed = ", ".join(f"{name} {digest[:8]}" for name, digest in _digest(texts).items())
        step = self.start.step if self.start else 0
        mesh = f"{self.mesh}, {self.outer or 'nothing'} between slices,"
        return f"{self.task.name} on {mesh} from step {step} with seed {self.seed}, {listed}"

    def demand_begun(self) -> None:
        """Raise a RunError in a process that does not see the directory that `begin` has prepared."""
        if not (self.directory / "config.json").exists():
            remedy = "give a directory= on a file system that all processes share"
            raise RunError(f"{self.directory}: expected what the first process wrote there; {remedy}")

    def _describe(self, kept_files: Mapping[str, str]) -> dict[str, Any]:
        return {
            "format": run_configs.FORMAT,
            "task": self.task.name,
            "seed": self.seed,
            "settings": tasks.to_settings(self.task),
            "kept": _digest(kept_files),
            "mesh": self.mesh,
            "outer": self.outer,
            "continued_from": None if self.source is None else str(self.source),
            "versions": run_configs.read_versions(),
        }


def open_run(
    directory: str | Path,
    task: tasks.Task,
    *,
    seed: int = 0,
    resume: str | Path = "auto",
    new_data: bool = False,
    force: bool = False,
    mesh: str | None = None,
    outer: str | None = None,
    check: checkpoints.Check = checkpoints.verify_files,
) -> Run:
    """Decide how training in this directory starts, without changing anything.

    Args:
        directory: the run directory; may be missing or empty.
        task: what to train.
        seed: seeds parameters, batches and dropout.
        resume: "auto" goes on from the directory's latest checkpoint; "newest-whole" from the latest that is
            not damaged, for restarts that nobody watches; "never" refuses a directory that holds a run; a
            path (a run directory, or one of its checkpoints) is where to start when this directory has no
            checkpoint of its own: same task, data and model, other steps, rates, dropout and seeds allowed.
        new_data: True if a run that starts from another one may have other data, too; the tokenizer stays.
        force: start again in place of the run that is there; `begin` deletes what Regard wrote of it.
        mesh: the devices' mesh of this session; None means one device.
        outer: the slices that its axes span; None means that there is one slice.
        check: raises a CheckpointError for a checkpoint, given by path and files, that must not be used.

    Returns:
        The run, ready to `begin`.

    Raises:
        RunError: when the directory holds something else, another task or settings other than of the cadence.
        checkpoints.CheckpointError: when a checkpoint is damaged or foreign.
        locks.LockError: when another process trains in the directory.
    """
    checkpoints.demand_plain(directory := read_path("directory", directory))
    tasks.demand_known(task)
    if (seed := whole_number("seed", seed, SEEDS.start)) not in SEEDS:
        raise RunError(f"seed: expected a number from -2**63 to 2**63 - 1, got {seed}")
    if new_data and resume in ("auto", "newest-whole", "never"):
        raise RunError(f"new_data=True needs resume=, the run to start from, got {str(resume)!r}")
    locks.demand_free(directory)
    present = _read_config(directory)
    replaces = (*OWN_ENTRIES, *present[0].keeps) if present is not None and force else ()
    options = {"mesh": mesh, "outer": outer, "saved": _date_checkpoints(directory), "replaces": replaces}
    existing = None if force or present is None else present[1]
    if existing is not None and resume == "never":
        remedy = f"{ANOTHER}, or force=True to delete it and start again"
        raise RunError(f"{directory} holds a run already; {remedy}")
    note, newest, damaged = None, None, {}
    if existing is not None:
        differences = _compare(present, task, seed, free="cadence.")
        is_free = all(name.startswith(FREE) for name in differences)
        start = f", with resume={str(directory)!r} to go on from this run there" if is_free else ""
        _refuse(directory, differences, f"{ANOTHER}{start}, or force=True to delete it")
        folder, skips = directory / "checkpoints", resume == "newest-whole"
        newest, damaged = checkpoints.load_newest(folder, check=check, skip_damaged=skips)
        changed = run_configs.compare_versions(existing.versions)
        note = _join_notes(changed, *map(str, damaged.values()), newest and newest.note)
    if newest is not None or resume in ("auto", "newest-whole", "never"):
        source = None if newest is not None or existing is None else existing.continued_from
        if source is not None:
            remedy = f"give resume={str(source)!r}, or force=True to start from nothing"
            was_to = f"was to start from {source} and has no checkpoint of its own yet"
            raise RunError(f"{directory} {was_to}; {remedy}")
        files = None if existing is None or newest is None else _read_kept(directory, task, existing)
        return Run(directory, task.restore(files), seed, newest, note=note, damaged=tuple(damaged), **options)
    branch = _open_branch(directory, task, seed, read_path("resume", resume), new_data, check)
    return replace(branch, **options)


def load_run(directory: str | Path) -> tuple[tasks.Task, Any]:
    """Load the task of a run, and its model, in evaluation mode, from its latest checkpoint.

    Raises:
        RunError: when this is not a run, or has no checkpoint yet.
        checkpoints.CheckpointError: when the checkpoint is damaged or holds another model.
    """
    present = _read_config(directory := read_path("directory", directory), "give the directory of a run")
    if present is None:
        raise RunError(f"{directory} is not a Regard run: it has no config.json")
    task = present[0].restore(_read_kept(directory, *present))
    return task, load_model(task, directory)


def is_run(directory: Path) -> bool:
    """Return True for a directory that holds a run, sound or damaged, going by its config.json."""
    return {"task", "settings", "seed"} <= read_object(directory / "config.json").keys()


def load_model(task: tasks.Task, directory: Path) -> Any:
    """Build a task's model, in evaluation mode, with the parameters of a run's latest checkpoint.

    Raises:
        RunError: when the run has no checkpoint yet.
        checkpoints.CheckpointError: when the checkpoint is damaged or holds another model.
    """
    check_kind("task", task, tasks.Task)
    checkpoint, _ = checkpoints.load_newest(read_path("directory", directory) / "checkpoints")
    if checkpoint is None:
        raise NoCheckpointError(directory, task.name)

    def build() -> nnx.Module:
        return task.make_model(nnx.Rngs(params=0, dropout=0))

    shapes = nnx.eval_shape(build)
    shapes.eval()
    structure, params, _ = nnx.split(shapes, nnx.Param, ...)
    is_averaged = any(name.startswith("average/") for name in checkpoint.kinds)
    params = checkpoints.fit(checkpoint, params, prefix="average/" if is_averaged else "params/")
    rest = compilation.run_once(lambda: nnx.split(build(), nnx.Param, ...)[2])
    return nnx.merge(structure, params, rest)


def _read_kept(directory: Path, task: tasks.Task, config: RunConfig) -> dict[str, str | None]:
    """Return the files that the task of a run keeps, text by name; none for a missing one."""
    kept_files = {}
    for path in (directory / name for name in task.keeps):
        if path.is_file():
            try:
                kept_files[path.name] = path.read_bytes().decode()
            except (OSError, UnicodeError) as error:
                raise RunError(f"{path} cannot be read ({error}); bring it back as it was") from error
    for name, digest in _digest(kept_files).items():
        if config.kept.get(name, digest) != digest:
            raise RunError(f"{directory / name} is not what this run began with; bring it back as it was")
    return kept_files


def _digest(texts: Mapping[str, str]) -> dict[str, str]:
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def _date_checkpoints(directory: Path) -> dict[Path, int]:
    saved = checkpoints.list_checkpoints(directory / "checkpoints")
    return {path: path.stat().st_mtime_ns for path in saved}


def _read_config(directory: Path, remedy: str = ANOTHER) -> tuple[tasks.Task, RunConfig] | None:
    """Read task and config.json; None for a missing or empty directory, an error for anything but a run."""
    path = str(directory.absolute())
    if any("\ud800" <= letter <= "\udfff" for letter in path):
        raise RunError(f"{path!r}: expected a path in UTF-8, as checkpoints need it; {remedy}")
    if file := find_file(directory):
        raise RunError(f"{file} is a file, not a directory; {remedy}")
    if not directory.exists():
        return None
    names = sorted(path.name for path in directory.iterdir())
    entries = [name for name in names if not name.endswith(".draft") and name not in locks.FILES]
    if not entries:
        return None
    path = directory / "config.json"
    if not path.exists():
        holds = f"it holds {', '.join(entries[:5])}{', ...' if len(entries) > 5 else ''}"
        raise RunError(f"{directory} is not empty and not a Regard run ({holds}); {remedy}")
    try:
        config = run_configs.read_config(json.loads(path.read_text(encoding="utf-8")))
        return tasks.from_settings(config.task, config.settings), config
    except tasks.UnknownTaskError as error:
        raise RunError(f"{path}: {error}") from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        problem = f"is damaged or not Regard's ({type(error).__name__}: {error})"
        raise RunError(f"{path} {problem}; bring the file back from a copy, or {remedy}") from error


def _compare(present: Any, task: tasks.Task, seed: int, free: str | tuple[str, ...]) -> dict[str, str]:
    """Describe each setting, but free ones, in which a run differs from the one asked for."""
    saved = {"task": present[1].task, "seed": present[1].seed, **tasks.to_settings(present[0])}
    asked = {"task": task.name, "seed": seed, **tasks.to_settings(task)}
    differences = run_configs.compare_settings(saved, asked)
    return {name: difference for name, difference in differences.items() if not name.startswith(free)}


def _refuse(directory: Path, differences: Mapping[str, str], remedy: str) -> None:
    """Raise with every setting in which a run differs from the one asked for, if there is any."""
    if differences:
        lines = [f"  {name}: {difference}" for name, difference in differences.items()]
        raise RunError("\n".join([f"{directory} holds another run:", *lines, remedy]))


def _open_branch(
    directory: Path, task: tasks.Task, seed: int, path: Path, new_data: bool, check: checkpoints.Check
) -> Run:
    """Open a new run that starts from another run's checkpoint."""
    source = path.parent.parent if path.parent.name == "checkpoints" else path
    present = _read_config(source, "give another resume=")
    if present is None:
        raise RunError(f"resume: {path} is not a Regard run; give {STARTS}, a run directory or a checkpoint")
    if source.resolve() == directory.resolve():
        raise RunError(f"resume: {path} is inside the directory itself; to go on in place, leave it out")
    differences = _compare(present, task, seed, free=FREE)
    of_model = {name: text for name, text in differences.items() if name.startswith(OF_MODEL)}
    remedy = "" if of_model else ", or give new_data=True to go on with these"
    _refuse(source, of_model if new_data else differences, f"ask for the same data and model{remedy}")
    checkpoint = checkpoints.load(path, check=check) if path != source else None
    start = checkpoint or checkpoints.load_newest(source / "checkpoints", check=check)[0]
    if start is None:
        raise RunError(f"resume: {path} has no checkpoint yet; give one that has, or train it first")
    if start.step >= (steps := task.optimization.steps):
        raise RunError(f"resume: {path} is at step {start.step} already; ask for more steps than {steps}")
    notes = [run_configs.compare_versions(present[1].versions), start.note]
    files = _read_kept(source, task, present[1])
    if new_data:
        notes.append(f"other data than in {source}: {', '.join(differences) or 'what the files hold'}")
        files |= dict.fromkeys({*task.keeps} - {*task.carries})
    return Run(directory, task.restore(files), seed, start, source=source, note=_join_notes(*notes))


def _join_notes(*notes: str | None) -> str | None:
    return "; ".join(filter(None, notes)) or None
