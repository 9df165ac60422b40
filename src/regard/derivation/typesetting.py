"""Derivations in LaTeX."""

from collections.abc import Sequence

from regard.derivation.number_tables import GAP, Table, View, cut_tables
from regard.derivation.step import Step
from regard.formulas import Number

_SIGNS = {GAP: r"\cdots", "-∞": r"-\infty", "∞": r"\infty", "■": "1", "·": "0", "nan": r"\mathrm{nan}"}


def write_latex(steps: Sequence[Step], view: View, numbers: bool) -> str:
    """Write a line per formula that defines something; given ones have a line where numbers are shown."""
    lines = []
    for step in steps:
        left_side, right = step.formula.left, step.formula.right
        name = rf"\text{{{step.name.replace('_', ' ')}}}"
        if right is not None:
            lines.append(rf"{left_side.latex} &= {right.latex} && {name}")
        if numbers:
            tables = cut_tables(step, view)
            lines += [_write_table(left_side.latex, table, name, right is None) for table in tables]
    return "\\begin{aligned}\n" + " \\\\\n".join(lines) + "\n\\end{aligned}"


def _write_table(symbol: str, table: Table, name: str, is_given: bool) -> str:
    outer_indices = ", ".join(f"{letter} = {index}" for letter, index in table.outer_index)
    rows = [
        " & ".join(_SIGNS.get(cell.text) or Number(cell.text).latex for cell in row) for row in table.cells
    ]
    body, columns = r" \\ ".join(rows), len(table.columns)
    if len(rows) * columns != 1:  # bmatrix ends at ten columns, and centres numbers
        body = rf"\left[\begin{{array}}{{{'r' * columns}}} {body} \end{{array}}\right]"
    left_side = rf"\left[{symbol}\right]_{{{outer_indices}}}" if outer_indices else symbol
    return f"{left_side} &= {body}" + (f" && {name}" if is_given else "")
