"""Runs that commands read, and what lies in their place."""

from pathlib import Path
from typing import Any

from regard.cli.console import UsageError
from regard.cli.continuation import spell_command
from regard.training import runs, tasks


def demand_run(path: Path, remedy: str = "") -> None:
    """Demand a run; where there is none, name the runs inside, and what else would do."""
    if not path.exists():
        raise UsageError(f"there is no {path}; give a run of `regard train`{remedy}")
    if not path.is_dir():
        raise UsageError(f"{path} is a file; give the folder of a run of `regard train`")
    if runs.is_run(path):
        return
    inside = ", ".join(str(folder) for folder in sorted(path.iterdir()) if runs.is_run(folder))
    if inside:
        raise UsageError(f"{path} is not a run, but holds some; give one of them: {inside}")
    if (path / "checkpoints").is_dir():
        raise UsageError(f"{path / 'config.json'} is damaged or gone; bring the file back from a copy")
    raise UsageError(f"{path} is not a run; give one of `regard train`{remedy}")


def load_run(directory: Path) -> tuple[tasks.Task, Any]:
    """Load the task of a run and its model; without a checkpoint, spell the command that trains it."""
    try:
        return runs.load_run(directory)
    except runs.NoCheckpointError as error:
        training = spell_command("train", error.task, "--out", directory)
        raise UsageError(f"{directory} has no checkpoint yet; go on training it: {training}") from error
