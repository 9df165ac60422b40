"""A run directory: config.json (settings and versions), metrics.jsonl, checkpoints/, and later figures/.

A task may keep files of its own beside them: see `Task.keep`.

Opening a run only reads and decides: go on, start, or refuse. `begin` is the first to write.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flax import nnx

from regard.training import checkpoints, metrics, presets, tasks
from regard.training.compilation import run_once

FORMAT = 1
KEPT = ("tokenizer.json", "corpus.json")  # what tasks may keep
OWN_ENTRIES = ("config.json", *KEPT, "metrics.jsonl", "checkpoints", "figures")
RECORDED_PACKAGES = ("regard", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class RunError(ValueError):
    """A run directory that cannot serve as asked; nothing in it was changed."""


@dataclass(frozen=True)
class Run:
    """A run directory and where its training starts.

    Attributes:
        directory: the run directory.
        preset: what is trained.
        seed: seeds parameters, batches and dropout.
        start: the checkpoint to go on from, or None for fresh parameters.
        source: the run directory that `start` comes from, when it is another one.
        note: what a reader should know about the start, such as other versions, or None.
        mesh: the devices' mesh of this session, such as data=2,tensor=4; None means one device. A run may go
            on on another one.
    """

    directory: Path
    preset: presets.Preset
    seed: int
    start: checkpoints.Checkpoint | None = None
    source: Path | None = None
    note: str | None = None
    mesh: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every step is done already."""
        return (
            self.start is not None
            and self.source is None
            and self.start.step >= self.preset.optimization.steps
        )

    @property
    def metrics_path(self) -> Path:
        return self.directory / "metrics.jsonl"

    @property
    def checkpoints_path(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def kept(self) -> dict[str, str]:
        """What the task kept when the run, or the one that it starts from, began."""
        return read_kept(self.directory) or read_kept(self.source or self.directory)

    def begin(self, kept: Mapping[str, str] | None = None) -> None:
        """Prepares the directory for training: settings written, metrics after the starting step dropped.

        Args:
            kept: what the task keeps, text by file name.

        Raises:
            RunError: when the directory keeps something else under one of these names; nothing is written.
        """
        present = read_kept(self.directory)
        for name, text in (kept or {}).items():
            if present.get(name, text) != text:
                raise RunError(f"{self.directory / name} is not what this run began with; give another --out")
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "config.json"
        written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if written is None or written.get("mesh") != self.mesh:
            config = self._describe() if written is None else written | {"mesh": self.mesh}
            metrics.replace_text(path, json.dumps(config, indent=2) + "\n")
        for name in (kept or {}).keys() - present.keys():
            metrics.replace_text(self.directory / name, (kept or {})[name])
        if self.source is not None:
            history = metrics.read(self.source / "metrics.jsonl")
            metrics.replace_text(self.metrics_path, "")
            metrics.append(self.metrics_path, history)
        # A new run may have left a line about step 0 before it was killed.
        metrics.cut(self.metrics_path, self.start.step if self.start else -1)

    def describe(self, kept: Mapping[str, str]) -> str:
        """Says in a line what would differ if another process trained something else."""
        config = self._describe()
        parts = {"settings": config["settings"], "data": dict(kept), "versions": config["versions"]}
        digests = {
            name: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:8]
            for name, part in parts.items()
        }
        step = self.start.step if self.start else 0
        listed = ", ".join(f"{name} {digest}" for name, digest in digests.items())
        return f"{self.preset.name} on {self.mesh} from step {step} with seed {self.seed}, {listed}"

    def demand_begun(self) -> None:
        """Raises where the directory is not one that `begin` has prepared.

        Raises:
            RunError: in a process that sees another file system.
        """
        if not (self.directory / "config.json").exists():
            raise RunError(
                f"{self.directory}: expected what the first process wrote there; give an --out on a file "
                "system that all processes share"
            )

    def _describe(self) -> dict[str, Any]:
        """The contents of config.json."""
        return {
            "format": FORMAT,
            "task": self.preset.name,
            "seed": self.seed,
            "settings": presets.to_settings(self.preset),
            "mesh": self.mesh,
            "continued_from": None if self.source is None else str(self.source),
            "versions": read_versions(),
        }


def read_versions() -> dict[str, str]:
    """Returns the versions that decide the bits of a run."""
    versions = {"python": platform.python_version()}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def open_run(
    directory: Path,
    preset: presets.Preset,
    *,
    seed: int = 0,
    resume: str | Path = "auto",
    force: bool = False,
    mesh: str | None = None,
    verify: bool = True,
) -> Run:
    """Decides how a training in this directory starts, without changing anything (but see `force`).

    Args:
        directory: the run directory; may be missing or empty.
        preset: what to train.
        seed: seeds parameters, batches and dropout.
        resume: "auto" goes on from the directory's latest checkpoint; "never" refuses a directory that holds
            a run; a path (a run directory, or one of its checkpoints) is where to start when this directory
            has no checkpoint of its own: same task and model, other steps, rates and seeds allowed.
        force: delete the run that is there and start again. Never deletes what Regard did not write.
        mesh: the devices' mesh of this session; None means one device.
        verify: False does not read the files of the checkpoint, as another process has checked them.

    Returns:
        The run, ready to `begin`.

    Raises:
        RunError: when the directory holds something else, another task or other settings.
        checkpoints.CheckpointError: when a checkpoint is damaged or foreign.
    """
    existing = _read_config(directory)
    if existing is not None and force:
        _delete_run(directory)
        existing = None
    if existing is not None and resume == "never":
        raise RunError(
            f"{directory} holds a run already; give another --out, or --force to delete it and start again"
        )
    note = None
    if existing is not None:
        _demand_same(directory, existing, preset, seed)
        note = _compare_versions(existing["versions"])
        own = load_checkpoint(directory, verify=verify)
        if own is not None:
            return Run(directory, preset, seed, own, note=note, mesh=mesh)
    if resume in ("auto", "never"):
        return Run(directory, preset, seed, note=note, mesh=mesh)
    branch = _open_branch(directory, preset, seed, Path(resume), verify=verify)
    return dataclasses.replace(branch, mesh=mesh)


def load_run(directory: Path) -> tuple[tasks.Task, Any]:
    """Loads the task and the model of a run from its latest checkpoint.

    Args:
        directory: a run directory.

    Returns:
        The task, and its model in evaluation mode.

    Raises:
        RunError: when this is not a run, or has no checkpoint yet.
        checkpoints.CheckpointError: when the checkpoint is damaged or holds another model.
    """
    config = _read_config(directory)
    if config is None:
        raise RunError(f"{directory} is not a Regard run: it has no config.json")
    preset = presets.from_settings(config["task"], config["settings"])
    task = tasks.make_task(preset, read_kept(directory))
    return task, load_model(task, directory)


def is_run(directory: Path) -> bool:
    """Whether a directory holds a run, sound or damaged, by what its config.json says."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and {"task", "settings", "seed"} <= config.keys()


def load_model(task: tasks.Task, directory: Path) -> Any:
    """Builds a task's model, in evaluation mode, with the parameters of a run's latest checkpoint.

    Raises:
        RunError: when the run has no checkpoint yet.
        checkpoints.CheckpointError: when the checkpoint is damaged or holds another model.
    """
    checkpoint = load_checkpoint(directory)
    if checkpoint is None:
        raise RunError(f"{directory} has no checkpoint yet; go on training it: regard train {task.name}")

    def build() -> nnx.Module:
        return task.make_model(nnx.Rngs(params=0, dropout=0))

    shapes = nnx.eval_shape(build)
    shapes.eval()
    structure, params, _ = nnx.split(shapes, nnx.Param, ...)
    params = checkpoints.fit(checkpoint, params, prefix="params/")
    rest = run_once(lambda: nnx.split(build(), nnx.Param, ...)[2])
    return nnx.merge(structure, params, rest)


def read_kept(directory: Path) -> dict[str, str]:
    """Returns the files that a run's task keeps in its directory, text by name; none for a missing one."""
    paths = [directory / name for name in KEPT]
    return {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}


def _read_config(directory: Path) -> dict[str, Any] | None:
    """The parsed config.json, None for a missing or empty directory, an error for anything else."""
    if not directory.exists():
        return None
    if not directory.is_dir():
        raise RunError(f"{directory} is a file, not a run directory; give another --out")
    entries = sorted(path.name for path in directory.iterdir() if not path.name.endswith(".draft"))
    if not entries:
        return None
    path = directory / "config.json"
    if not path.exists():
        shown = ", ".join(entries[:5]) + (", ..." if len(entries) > 5 else "")
        raise RunError(
            f"{directory} is not empty and not a Regard run (it holds {shown}); give another --out"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        complete = isinstance(config["seed"], int) and isinstance(config["versions"], dict)
        if not (complete and config["format"] == FORMAT):
            raise ValueError(f"format {config['format']!r}, seed {config['seed']!r}")
        config["settings"] = presets.complete_settings(config["settings"])
        presets.from_settings(config["task"], config["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} is damaged or not Regard's ({type(error).__name__}: {error}); "
            "give another --out, or remove the directory yourself"
        ) from error
    return config


def _demand_same(directory: Path, config: dict[str, Any], preset: presets.Preset, seed: int) -> None:
    """Raises with every setting in which the run in the directory differs from the one asked for."""
    there = _flatten({"task": config["task"], "seed": config["seed"], **config["settings"]})
    asked = _flatten({"task": preset.name, "seed": seed, **presets.to_settings(preset)})
    _demand_equal(
        directory, there, asked, "give another --out, or --force to delete that run and start again"
    )


def _demand_equal(directory: Path, there: dict[str, Any], asked: dict[str, Any], remedy: str) -> None:
    if there.get("task") != asked.get("task"):
        there, asked = ({"task": settings["task"]} for settings in (there, asked))
    differences = [
        f"  {name}: it has {there.get(name)!r}, asked for {asked.get(name)!r}"
        for name in asked
        if there.get(name) != asked.get(name)
    ]
    if differences:
        raise RunError("\n".join([f"{directory} holds another run:", *differences, remedy]))


def _open_branch(directory: Path, preset: presets.Preset, seed: int, path: Path, *, verify: bool) -> Run:
    """A new run that starts from another run's checkpoint."""
    source = path.parent.parent if path.parent.name == "checkpoints" else path
    config = _read_config(source)
    if config is None:
        raise RunError(
            f"--resume {path} is not a Regard run; give auto, never, a run directory or a checkpoint"
        )
    if source.resolve() == directory.resolve():
        raise RunError(f"--resume {path} is inside --out; to go on in place, leave --resume out")
    free = ("optimization.", "cadence.", "seed")
    there = {k: v for k, v in _flatten(config["settings"]).items() if not k.startswith(free)}
    asked = {k: v for k, v in _flatten(presets.to_settings(preset)).items() if not k.startswith(free)}
    _demand_equal(
        source,
        {"task": config["task"], **there},
        {"task": preset.name, **asked},
        "ask for the same data and model",
    )
    found = checkpoints.load(path, verify=verify) if path != source else None
    start = found or load_checkpoint(source, verify=verify)
    if start is None:
        raise RunError(f"--resume {path} has no checkpoint yet")
    steps = preset.optimization.steps
    if start.step >= steps:
        raise RunError(f"--resume {path} is at step {start.step} already; ask for more than --steps {steps}")
    return Run(directory, preset, seed, start, source=source, note=_compare_versions(config["versions"]))


def load_checkpoint(directory: Path, *, verify: bool = True) -> checkpoints.Checkpoint | None:
    """The newest checkpoint, or an error that says how to do without it."""
    saved = checkpoints.list_checkpoints(directory / "checkpoints")
    if not saved:
        return None
    try:
        return checkpoints.load(saved[-1], verify=verify)
    except checkpoints.CheckpointError as error:
        before = f"go on from step {int(saved[-2].name)}" if len(saved) > 1 else "start again"
        raise checkpoints.CheckpointError(
            f"{error}\nnothing was changed; remove {saved[-1]} to {before}"
        ) from error


def _compare_versions(recorded: dict[str, str]) -> str | None:
    """A sentence about packages that changed since the run began, or None."""
    now = read_versions()
    changed = [
        f"{name} {recorded.get(name)} -> {now[name]}" for name in now if recorded.get(name) != now[name]
    ]
    return f"begun under other versions, so bits may differ: {', '.join(changed)}" if changed else None


def _delete_run(directory: Path) -> None:
    """Deletes what Regard wrote in a run directory, config.json last: a kill leaves a run to delete again."""
    for name in reversed(OWN_ENTRIES):
        path = directory / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
