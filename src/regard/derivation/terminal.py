"""Derivations as text: plain, or with a style for each part."""

import textwrap
from collections.abc import Sequence

from regard.derivation.number_tables import Table, View, cut_tables
from regard.derivation.step import Step
from regard.masks.picture import printable

WIDTH = 100
_INDENT = "    "
Span = tuple[str, str]  # text and rich style

_NAME, _FORMULA, _QUIET = "bold", "bold cyan", "dim"


def write_text(title: str, steps: Sequence[Step], view: View) -> str:
    """Write the whole of it, without colours."""
    lines = write_lines(title, steps, view)
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def write_lines(title: str, steps: Sequence[Step], view: View) -> list[list[Span]]:
    """Write lines of styled spans."""
    legend = "   ".join(f"{letter}: {meaning}" for letter, meaning in view.legend(steps))
    lines: list[list[Span]] = [[(title, _NAME)]]
    lines += [[(line, _QUIET)] for line in textwrap.wrap(legend, WIDTH)]
    for number, step in enumerate(steps, 1):
        lines.append([("", "")])
        lines += _write_step(number, step, view)
    return lines


def _write_step(number: int, step: Step, view: View) -> list[list[Span]]:
    title, formula = f"{number:>2}  {step.name:<15} ", step.expression
    facts = f"{step.shape} {step.dtype}{f', {step.unit}' if step.unit else ''}"
    room = WIDTH - len(title)
    if len(formula) + len(facts) + 2 <= room:
        lines = [[(title, _NAME), (formula, _FORMULA), (f"{facts:>{room - len(formula)}}", _QUIET)]]
    else:
        lines = [[(title, _NAME), (f"{facts:>{room}}", _QUIET)], [(_INDENT + formula, _FORMULA)]]
    lines += [[(_INDENT + line, "")] for line in textwrap.wrap(step.words, WIDTH - len(_INDENT))]
    roles = [f"{kind} {' '.join(indices)}" for kind, indices in step.indices_by_role]
    if roles:
        lines.append([(_INDENT + " · ".join(roles), _QUIET)])
    return lines + [[(_INDENT + line, "")] for line in _write_tables(cut_tables(step, view))]


def _write_tables(tables: list[Table]) -> list[str]:
    """Write tables side by side as far as they fit; those without rows and columns are left out."""
    lines: list[str] = []
    row: list[list[str]] = []
    for block in filter(None, map(_write_table, tables)):
        if row and sum(len(part[0]) + 4 for part in row) + len(block[0]) > WIDTH - len(_INDENT):
            lines += [*_join(row), ""]
            row = []
        row.append(block)
    return lines + _join(row)


def _join(blocks: list[list[str]]) -> list[str]:
    return ["    ".join(parts).rstrip() for parts in zip(*blocks, strict=True)] if blocks else []


def _write_table(table: Table) -> list[str]:
    """Write one matrix, with the numbers of rows and columns."""
    texts = [[printable(cell.text) for cell in row] for row in table.cells]
    widths = [max(map(len, column)) for column in zip(table.columns, *texts, strict=True)]
    margin = max(map(len, table.rows), default=0)
    title = " ".join(f"{letter}={index}" for letter, index in table.outer_index)
    lines = []
    if any(table.columns):
        margin = max(margin, len(title))
        lines.append(_align(title, margin, table.columns, widths))
    rows = zip(table.rows, texts, strict=True)
    lines += [_align(label.rjust(margin), margin, row, widths) for label, row in rows]
    return [line.ljust(max(map(len, lines))) for line in lines]


def _align(head: str, margin: int, cells: list[str], widths: list[int]) -> str:
    row = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return f"{head:<{margin}}  {row}" if margin else row
