"""Derivations in HTML, with formulas in MathML: no script, and colours that any ground bears."""

from collections.abc import Sequence
from html import escape

from regard.derivation.number_tables import Cell, Table, View, cut_tables
from regard.derivation.step import Step

# Ink is that of the page around it; shades are see-through, so that light and dark ground both show them.
_STYLE = """
.regard-derivation{font:15px/1.5 system-ui,sans-serif;max-width:62rem;color:inherit}
.regard-derivation h2{font-size:1.15em;margin:0 0 .2em;font-weight:600}
.regard-derivation .legend{opacity:.75;margin:0 0 1em;display:flex;flex-wrap:wrap;gap:.1em 1.4em}
.regard-derivation .legend i,.regard-derivation .roles i{font-family:math,serif;font-size:1.1em;
padding:0 .1em}
.regard-derivation section{border-top:1px solid rgba(128,128,128,.35);padding:.7em 0 .8em;
display:grid;grid-template-columns:2em minmax(0,1fr)}
.regard-derivation .number{opacity:.55;font-variant-numeric:tabular-nums}
.regard-derivation header{display:flex;flex-wrap:wrap;gap:0 1em;align-items:baseline;margin:0;padding:0}
.regard-derivation h3{font-size:1em;margin:0;font-weight:600}
.regard-derivation .facts{margin-left:auto;opacity:.65;font-size:.87em}
.regard-derivation .formula{font-size:1.2em;margin:.3em 0;overflow-x:auto;overflow-y:hidden}
.regard-derivation p{margin:.1em 0}
.regard-derivation .roles{font-size:.87em}
.regard-derivation .roles span{margin-right:1.2em}
.regard-derivation .summed{color:#a65200;color:light-dark(#a65200,#f0913a);font-weight:600}
.regard-derivation .batch{color:#6f52b8;color:light-dark(#6f52b8,#ac96e6)}
.regard-derivation .free{color:#1f6fa8;color:light-dark(#1f6fa8,#5fb2ea)}
.regard-derivation .tables{display:flex;flex-wrap:wrap;gap:.6em 2em;overflow-x:auto;margin-top:.4em}
.regard-derivation table{border-collapse:collapse;width:auto;margin:0;font-size:.87em;border:0;
font-variant-numeric:tabular-nums;background:none;display:table}
.regard-derivation th,.regard-derivation td{padding:.14em .5em;text-align:right;border:0;background:none;
color:inherit;white-space:nowrap;font-weight:400}
.regard-derivation th{opacity:.6}
.regard-derivation caption{text-align:left;opacity:.6;caption-side:top;padding:0 .5em;color:inherit}
.regard-derivation td{border:1px solid rgba(128,128,128,.22)}
"""


def write_page(title: str, steps: Sequence[Step], view: View) -> str:
    """Write a whole document."""
    fragment = write_fragment(title, steps, view)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n"
        "<style>body{margin:2em auto;max-width:62rem;padding:0 1em}</style>\n"
        f"</head>\n<body>\n{fragment}\n</body>\n</html>\n"
    )


def write_fragment(title: str, steps: Sequence[Step], view: View) -> str:
    """Write an element with a style of its own, to stand in any page."""
    meanings = view.legend(steps)
    legend = "".join(f"<span><i>{letter}</i> {escape(meaning)}</span>" for letter, meaning in meanings)
    sections = "\n".join(_write_step(number, step, view) for number, step in enumerate(steps, 1))
    return (
        f'<div class="regard-derivation">\n<style>{_STYLE}</style>\n<h2>{escape(title)}</h2>\n'
        f'<div class="legend">{legend}</div>\n{sections}\n</div>'
    )


def _write_step(number: int, step: Step, view: View) -> str:
    formula = step.formula.mathml(step.roles if step.contraction else {})
    spans = [
        f'<span>{kind} {" ".join(f"""<i class="{kind}">{escape(index)}</i>""" for index in indices)}</span>'
        for kind, indices in step.indices_by_role
    ]
    roles = f'<p class="roles">{"".join(spans)}</p>' if spans else ""
    tables = "".join(_write_table(table) for table in cut_tables(step, view))
    shape = " × ".join(map(str, step.shape)) or "a number"
    facts = " · ".join(part for part in (shape, str(step.dtype), step.unit) if part)
    name = escape(step.name.replace("_", " "))
    return (
        f'<section><div class="number">{number}</div><div>\n'
        f'<header><h3>{name}</h3><span class="facts">{escape(facts)}</span></header>\n'
        f'<div class="formula"><math displaystyle="true">{formula}</math></div>\n'
        f"<p>{escape(step.words)}</p>\n{roles}"
        f'<div class="tables">{tables}</div></div></section>'
    )


def _write_table(table: Table) -> str:
    outer_indices = ", ".join(f"{letter} = {index}" for letter, index in table.outer_index)
    caption = f"<caption>{escape(outer_indices)}</caption>" if outer_indices else ""
    head = ""
    if any(table.columns):
        corner = "<th></th>" if any(table.rows) else ""
        head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
        head = f"<thead><tr>{corner}{head}</tr></thead>"
    labels = [f'<th scope="row">{escape(row)}</th>' if any(table.rows) else "" for row in table.rows]
    rows = zip(labels, table.cells, strict=True)
    body = "".join(f"<tr>{label}{''.join(map(_write_cell, cells))}</tr>" for label, cells in rows)
    return f"<table>{caption}{head}<tbody>{body}</tbody></table>"


def _write_cell(cell: Cell) -> str:
    text = escape(cell.text.replace("-", "−"))
    if cell.text == "■":
        return f'<td style="background:rgba(47,143,208,.45)">{text}</td>'
    if cell.level is None or abs(cell.level) < 0.005:
        return f"<td>{text}</td>"
    colour = "47,143,208" if cell.level > 0 else "217,115,13"
    return f'<td style="background:rgba({colour},{0.5 * abs(cell.level):.2f})">{text}</td>'
