"""The lines of metrics.jsonl, an object per logged step: appended while training, cut back on resuming."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Line = dict[str, Any]
HEADS = "heads"  # the split of lines of `head_statistics`: lists, a number per head, by statistic and layer
# What people look at first, in this order.
LEADING = ("loss", "bits_per_byte", "accuracy")


def append(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Append one line per mapping; NaN and infinities, which JSON lacks, are written as null."""
    text = "".join(json.dumps(replace_nonfinite(line), allow_nan=False) + "\n" for line in lines)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def read(path: Path) -> list[Line]:
    """Read every complete line; a last line without its newline was cut off by a kill and is left out.

    A missing file reads as no lines; values that were not finite when written are None.
    """
    if not path.exists():
        return []
    complete = path.read_bytes().split(b"\n")[:-1]
    return [_parse(path, number, line) for number, line in enumerate(complete, start=1)]


def cut(path: Path, last_step: int) -> int:
    """Drop the lines after `last_step` by replacing the file in one move; return how many were dropped."""
    lines = read(path)
    earlier = [line for line in lines if line["step"] <= last_step]
    if path.exists():
        replace_text(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in earlier))
    return len(lines) - len(earlier)


def columns(lines: Iterable[Line], name: str) -> tuple[list[int], list[float]]:
    """Return the steps at which `name` was logged and its values there (NaN where they were not finite)."""
    points = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in points], [math.nan if value is None else value for _, value in points]


def arrange(names: Iterable[str]) -> list[str]:
    """Return the names of metrics, the leading ones first, as in loss, accuracy, grad_norm."""
    names = sorted(names)
    return [name for name in LEADING if name in names] + [name for name in names if name not in LEADING]


def first_nonfinite(values: Mapping[str, float]) -> str | None:
    return next((name for name, value in values.items() if not math.isfinite(value)), None)


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader, or a kill, sees either the old text or the new one."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def replace_nonfinite(value: Any) -> Any:
    """Return a value with None for what JSON lacks, NaN and infinities, in lists and mappings too."""
    if isinstance(value, Mapping):
        return {name: replace_nonfinite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(path: Path, number: int, line: bytes) -> Line:
    """Parse one line as a mapping with a whole-number step and values as they are logged."""
    try:
        parsed = replace_nonfinite(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    if not isinstance(parsed, dict) or not isinstance(parsed.get("step"), int):
        start = line[:80]
        raise ValueError(f"{path}, line {number} must be an object with a whole-number step, got {start!r}")
    for name, value in parsed.items():
        if not _is_logged(value, parsed.get("split")) and name not in ("step", "split"):
            raise ValueError(f"{path}, line {number} has a {name} that training never logs: {value!r:.80}")
    return parsed


def _is_logged(value: Any, split: Any) -> bool:
    """Return True for what a line of this split holds: numbers, or those of each head by layer."""
    if split is None:
        return isinstance(value, int | float | None)
    layers = value.values() if isinstance(value, dict) else [None]
    return split != HEADS or all(
        isinstance(heads, list) and all(_is_logged(head, None) for head in heads) for heads in layers
    )
