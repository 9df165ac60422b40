"""The tasks that Regard trains, by name, and their settings to and from JSON.

`TASKS` is the table: a task of your own is a subclass of `Task` and one entry more. Importing this package
loads no JAX.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

from regard.training.task import Example as Example
from regard.training.task import SyntheticTask as SyntheticTask
from regard.training.task import Task as Task
from regard.training.tasks.copy import Copy as Copy
from regard.training.tasks.digits import Digits as Digits
from regard.training.tasks.reverse import Reverse as Reverse
from regard.training.tasks.text import Text as Text
from regard.training.tasks.threshold import Threshold as Threshold

TASKS: dict[str, type[Task]] = {task.name: task for task in (Threshold, Copy, Reverse, Digits, Text)}

SMOKE: dict[str, dict[str, int]] = {
    "model": {"d_model": 16, "num_heads": 2, "d_ff": 32, "num_layers": 1},
    "optimization": {"steps": 20, "batch_size": 16, "warmup_steps": 0},
    "cadence": {"log_every": 5, "evaluate_every": 10, "checkpoint_every": 10, "heads_every": 5},
}


def shrink(task: Task) -> Task:
    """Return the task at smoke-test size; settings that differ from the defaults stay.

    Example:
        >>> shrink(Copy(length=5)).optimization.steps, shrink(Copy(length=5)).length
        (20, 5)
    """
    default = type(task)()
    groups = {
        name: _shrink_record(getattr(task, name), getattr(default, name), small)
        for name, small in SMOKE.items()
    }
    return dataclasses.replace(_shrink_record(task, default, {"held_out_size": 64}), **groups)


def _shrink_record(record: Any, default: Any, small: dict[str, int]) -> Any:
    """Return a dataclass with the small value of each field that it has and that was left at its default."""
    changes = {
        name: value
        for name, value in small.items()
        if hasattr(record, name) and getattr(record, name) == getattr(default, name)
    }
    return dataclasses.replace(record, **changes)


def to_settings(task: Task) -> dict[str, Any]:
    """Return a task's settings as nested dictionaries of plain values, ready for JSON."""
    settings = dataclasses.asdict(task)
    del settings["kept"]
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def from_settings(name: str, settings: dict[str, Any]) -> Task:
    """Rebuild the task that `to_settings` wrote; settings that came later are at their defaults.

    Raises:
        ValueError: for an unknown task, an unknown setting, or a value out of range.
    """
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r}")
    return _rebuild(TASKS[name], settings, name)


def _rebuild(record: Any, settings: Any, where: str) -> Any:
    """Build a dataclass from its dictionary, nested dataclasses included; name what does not fit."""
    kinds = get_type_hints(record)
    expected = [field.name for field in dataclasses.fields(record) if field.init]
    if not isinstance(settings, dict) or not set(settings) <= set(expected):
        got = sorted(settings) if isinstance(settings, dict) else settings
        raise ValueError(f"{where} must have the settings {sorted(expected)}, got {got}")
    values = {}
    for name, value in settings.items():
        kind, path = kinds[name], f"{where}.{name}"
        if dataclasses.is_dataclass(kind):
            values[name] = _rebuild(kind, value, path)
        elif _is_of(kind, value):
            values[name] = tuple(value) if isinstance(value, list) else value
        else:
            raise ValueError(f"{path} must be {getattr(kind, '__name__', kind)}, got {value!r}")
    return record(**values)


def _is_of(kind: Any, value: Any) -> bool:
    """Return True for a value read from JSON that has a field's type (a whole number will do for a float)."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, list) and all(_is_of(get_args(kind)[0], entry) for entry in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
