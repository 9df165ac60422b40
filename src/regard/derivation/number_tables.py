"""Tables of numbers: the entries of an array that are printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from regard.derivation.letters import describe
from regard.derivation.step import Step

# Entries printed of an axis that is longer; the rest is passed over. Of examples, it is one.
_MOST = {"h": 2, "g": 2, "i": 6, "j": 8, **dict.fromkeys("abcdef", 6)}
GAP = "…"


class Cell(NamedTuple):
    """An entry as printed."""

    text: str
    level: float | None  # -1..1 of the largest magnitude; None, nothing to shade


class Table(NamedTuple):
    """A matrix of a step."""

    outer_index: tuple[tuple[str, int], ...]  # on the axes before the last two: head 0, say
    rows: list[str]  # "i=0" and so on; "" where there is one row without a number
    columns: list[str]
    cells: list[list[Cell]]


@dataclass(frozen=True)
class View:
    """The meaning of the letters of a derivation, and the entries that are printed."""

    sizes: Mapping[str, int]  # the length of each letter's axis in the call
    members: Mapping[str, tuple[int, ...]]  # the rows or heads that were chosen, by letter
    shown: Mapping[str, tuple[int, ...]]  # the entries of each axis that are printed, in every step

    @classmethod
    def choose(cls, steps: Sequence[Step], sizes: Mapping[str, int], members: Mapping[str, Any]) -> View:
        """Print short axes whole, of long ones the ends, and of keys those with most weight."""
        members = {letter: tuple(map(int, chosen)) for letter, chosen in members.items()}
        lengths = {letter: len(members.get(letter, range(size))) for letter, size in sizes.items()}
        shown = {letter: _ends(size, _MOST.get(letter, 1)) for letter, size in lengths.items()}
        weights = next((step for step in steps if step.name == "weights"), None)
        if weights is not None and lengths.get("j", 0) > _MOST["j"]:
            array = _cut(weights, cls(sizes, members, {**shown, "j": tuple(range(lengths["j"]))}))
            most = array.reshape((-1, array.shape[-1])).max(0, initial=0)
            # Where few have any, their neighbours follow: the border of a mask is seen.
            away = np.abs(np.arange(most.size) - most.argmax())
            best = np.lexsort((away, -most))[: _MOST["j"]]
            shown["j"] = tuple(sorted(map(int, best)))
        return cls(sizes, members, shown)

    def number(self, letter: str, index: int) -> int:
        """Return the number of the query, key or head that an entry is of."""
        return self.members[letter][index] if letter in self.members else index

    def legend(self, steps: Sequence[Step]) -> list[tuple[str, str]]:
        """Return each letter in use, and what it counts."""
        used = {letter for step in steps for letter in (*step.indices, *step.summed) if letter}
        order = sorted(used, key=lambda letter: "nmhgijabcdef".find(letter) % 99)
        return [(letter, self._count(letter)) for letter in order if letter in self.sizes]

    def _count(self, letter: str) -> str:
        words = f"{self.sizes[letter]:,} {describe(letter)}"
        shown = [self.number(letter, index) for index in self.shown[letter]]
        if letter in "ijabcdef" or len(shown) == self.sizes[letter]:
            return words
        return f"{words}, printed: {', '.join(map(str, shown))}"


def cut_tables(step: Step, view: View) -> list[Table]:
    """Cut the printed numbers of a step into tables, one for each index of the axes before the last two."""
    array = _cut(step, view)
    letters = [letter for letter in step.indices if letter]
    array = array.reshape((*(1,) * (2 - array.ndim), *array.shape))
    *outer, row_letter, column_letter = ["", ""][: max(2 - len(letters), 0)] + letters
    write = _writer(array)
    tables = []
    for outer_index in np.ndindex(*array.shape[:-2]):
        numbers = zip(outer, outer_index, strict=True)
        where = tuple((letter, view.number(letter, view.shown[letter][at])) for letter, at in numbers)
        block = array[outer_index]
        rows = _with_gaps(row_letter, block.shape[0], view)
        across = _with_gaps(column_letter, block.shape[1], view)
        blank = Cell(GAP, None)
        cells = [[blank if None in (r, c) else write(block[r, c]) for _, c in across] for _, r in rows]
        tables.append(Table(where, [label for label, _ in rows], [label for label, _ in across], cells))
    return tables


def _ends(size: int, most: int) -> tuple[int, ...]:
    """Return all indices of a short axis, the first and the last ones of a long one."""
    if size <= most:
        return tuple(range(size))
    last = most // 3
    return (*range(most - last), *range(size - last, size))


def _cut(step: Step, view: View) -> np.ndarray:
    """Take the printed entries, one axis for each letter."""
    array = np.asarray(step.value)
    for axis in reversed(range(array.ndim)):
        letter = step.indices[axis]
        array = np.take(array, list(view.shown[letter]), axis) if letter else np.take(array, 0, axis)
    return array.astype(np.float64) if array.dtype.kind not in "biu" else array


def _with_gaps(letter: str, count: int, view: View) -> list[tuple[str, int | None]]:
    """Label and place of each entry along an axis, with a gap where entries are passed over."""
    if not letter:
        return [("", position) for position in range(count)]
    labels: list[tuple[str, int | None]] = []
    before = -1
    for position, index in enumerate(view.shown[letter]):
        if index != before + 1:
            labels.append((GAP, None))
        labels.append((f"{letter}={view.number(letter, index)}", position))
        before = index
    total = len(view.members.get(letter, range(view.sizes[letter])))
    return labels + ([(GAP, None)] if before != total - 1 else [])


def _writer(array: np.ndarray) -> Any:
    """Return a function from an entry to its cell: so many digits that the largest entries show three."""
    if array.dtype == bool:
        return lambda entry: Cell("■" if entry else "·", None)
    finite = np.abs(array[np.isfinite(array)]) if array.dtype.kind == "f" else np.abs(array)
    largest = float(finite.max(initial=0))
    whole = array.dtype.kind != "f" or bool(np.all(finite == np.round(finite)))
    if whole and largest < 1e6:
        digits, kind = 0, "f"
    elif largest >= 1e5 or largest < 1e-3:
        digits, kind = 1, "e"
    else:
        digits, kind = int(np.clip(2 - np.floor(np.log10(largest)), 0, 3)), "f"

    def write(entry: Any) -> Cell:
        if not np.isfinite(entry):
            return Cell("nan" if np.isnan(entry) else "∞" if entry > 0 else "-∞", None)
        text = "0" if entry == 0 else f"{entry:.{digits}{kind}}"
        text = text.replace("-", "") if float(text) == 0 else text
        return Cell(text, float(entry) / largest if largest else None)

    return write
