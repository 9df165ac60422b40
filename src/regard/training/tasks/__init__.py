"""The tasks that Regard trains, by name, and their settings to and from JSON.

`TASKS` is the table. A task of your own is a subclass of `Task` with a name of its own: see `Task` and
`load_tasks`. Importing this package loads no JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.machinery
import importlib.util
import inspect
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regard.training.task import Example as Example
from regard.training.task import SyntheticTask as SyntheticTask
from regard.training.task import Task as Task
from regard.training.tasks.copy import Copy as Copy
from regard.training.tasks.digits import Digits as Digits
from regard.training.tasks.reverse import Reverse as Reverse
from regard.training.tasks.text import Text as Text
from regard.training.tasks.threshold import Threshold as Threshold
from regard.training.typed_json import read_record

TASKS: dict[str, type[Task]] = {task.name: task for task in (Threshold, Copy, Reverse, Digits, Text)}

SMOKE: dict[str, dict[str, int]] = {
    "model": {"d_model": 16, "num_heads": 2, "d_ff": 32, "num_layers": 1},
    "optimization": {"steps": 20, "batch_size": 16, "warmup_steps": 0},
    "cadence": {"log_every": 5, "evaluate_every": 10, "checkpoint_every": 10, "heads_every": 5},
}
_EXPECTED = "REGARD_TASKS: expected files or modules with tasks"


class UnknownTaskError(ValueError):
    """A name that no class of tasks has which is imported, or which the variable REGARD_TASKS names."""


def find_task(name: str) -> type[Task]:
    """Return the class of tasks of a name: one of `TASKS`, or the one of that name that was defined last.

    Where there is none, what the variable REGARD_TASKS names is imported.

    Raises:
        UnknownTaskError: for a name that no class has, also where REGARD_TASKS cannot be imported.
    """
    if name in TASKS:
        return TASKS[name]
    defined = [task for task in _list_subclasses(Task) if vars(task).get("name", "") == name]
    if defined:
        return defined[-1]
    failed, cause = "", None
    try:
        load_named_tasks()
    except Exception as error:
        failed, cause = f", which failed to be read ({type(error).__name__}: {error})", error
    if name not in TASKS:
        remedy = "import the module that defines it, or name its file in the variable REGARD_TASKS"
        expected = f"one of {', '.join(TASKS)}, or one of your own"
        raise UnknownTaskError(f"task: expected {expected}, got {name!r}; {remedy}{failed}") from cause
    return TASKS[name]


def demand_known(task: Task) -> None:
    """Raise where a run of this task could not be opened again.

    Raises:
        ValueError: naming both classes where two share a name, or the setting that JSON does not bring back.
    """
    if not isinstance(task, Task):
        raise TypeError(f"task: expected a Task, such as tasks.Copy(), got {task!r}")
    kind = type(task)
    if (other := find_task(task.name)) is not kind:
        problem = f"{kind.__qualname__} has the name of {other.__qualname__}, {task.name!r}"
        raise ValueError(f"task: {problem}; give the class a name of its own: name: ClassVar[str] = ...")
    try:
        from_settings(task.name, to_settings(task))
    except (TypeError, ValueError) as error:
        types = "numbers, bool, str, tuples, lists and dicts of those, dataclasses, or a union"
        remedy = f"give its settings the types of their values: {types}"
        raise ValueError(
            f"task: {kind.__qualname__} could not be opened again ({error}); {remedy}"
        ) from error


def load_named_tasks() -> None:
    """Import the tasks that the variable REGARD_TASKS names: `load_tasks` of it."""
    load_tasks(os.environ.get("REGARD_TASKS", ""))


def load_tasks(names: str) -> None:
    """Import tasks of your own and put them into `TASKS`, as commands do with the variable REGARD_TASKS.

    Args:
        names: files, such as parity.py, or modules, with commas between; their classes of tasks that have a
            name of their own are taken.

    Raises:
        ValueError: for what cannot be found or holds no task, and for a name that is taken.
    """
    if not isinstance(names, str):
        raise TypeError(f"names: expected files or modules with commas between, got {names!r}")
    for name in filter(None, map(str.strip, names.split(","))):
        module = _import_file(Path(name)) if name.endswith(".py") else _import_module(name)
        defined = [
            value
            for value in vars(module).values()
            if inspect.isclass(value) and issubclass(value, Task) and value.__module__ == module.__name__
            if "name" in vars(value) and not inspect.isabstract(value)
        ]
        if not defined:
            raise ValueError(f"REGARD_TASKS: expected a subclass of Task with a name in {name}, got none")
        for task in defined:
            registered = TASKS.setdefault(task.name, task)
            if (registered.__module__, registered.__qualname__) != (task.__module__, task.__qualname__):
                raise ValueError(f"REGARD_TASKS: the name {task.name!r} of {name} is taken; choose another")


def _import_file(path: Path) -> Any:
    """Import a file under its own name; what stands below `if __name__ == "__main__"` does not run."""
    loaded = sys.modules.get(path.stem)
    if getattr(loaded, "__file__", None) == str(path.absolute()):
        return loaded
    # Nor may an installed package be shadowed, which somebody imports later.
    origin = getattr(importlib.machinery.PathFinder.find_spec(path.stem), "origin", None)
    is_other = origin is not None and not (path.is_file() and path.samefile(origin))
    if loaded is not None or is_other or path.stem in sys.stdlib_module_names:
        raise ValueError(f"REGARD_TASKS: the name of {path} is that of another module; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path.absolute())
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"{_EXPECTED}, got {path}, which does not exist")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(path.stem, None)
        raise
    return module


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] and error.name != name:
            raise
        raise ValueError(f"{_EXPECTED}, got {name}, which Python does not find") from error


def _list_subclasses(kind: type[Task]) -> Iterator[type[Task]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _list_subclasses(subclass)


def shrink(task: Task) -> Task:
    """Return the task at smoke-test size; settings that differ from the defaults stay, and what they need.

    Example:
        >>> shrink(Copy(length=5)).optimization.steps, shrink(Copy(length=5)).length
        (20, 5)
    """
    default, groups = type(task)(), {}
    for name, small in SMOKE.items():
        groups[name] = _shrink_record(getattr(task, name), getattr(default, name), small)
    return dataclasses.replace(_shrink_record(task, default, {"held_out_size": 64}), **groups)


def _shrink_record(record: Any, default: Any, small: dict[str, int]) -> Any:
    """Give the fields of a dataclass that are at their defaults small values, as many of them as fit."""
    names = [name for name in small if hasattr(record, name)]
    changes = {name: small[name] for name in names if getattr(record, name) == getattr(default, name)}
    for count in range(len(changes), 0, -1):
        for chosen in itertools.combinations(changes.items(), count):
            with contextlib.suppress(ValueError):
                return dataclasses.replace(record, **dict(chosen))
    return record


def to_settings(task: Task) -> dict[str, Any]:
    """Return a task's settings as nested dictionaries of plain values, as JSON gives them back."""
    settings = dataclasses.asdict(task)
    del settings["kept"]
    return json.loads(json.dumps(settings))


def from_settings(name: str, settings: dict[str, Any]) -> Task:
    """Rebuild the task that `to_settings` wrote; settings that came later are at their defaults.

    Raises:
        ValueError: for an unknown task, an unknown setting, or a value out of range.
    """
    return read_record(find_task(name), settings, name)
