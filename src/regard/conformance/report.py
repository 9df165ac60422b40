"""Results of a check: a table of promises, for terminals, for programs and for pages."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal

from regard.theory.definition import LINES

Verdict = Literal["holds", "differs", "wrong", "refused"]


@dataclass(frozen=True)
class Row:
    """One promise, and what the function does about it."""

    promise: str
    """Its subject, such as `a softcap and a bias`."""
    aspect: str
    """value, lse, gradient, dtype and so on."""
    verdict: Verdict
    """`holds`; `differs` by a convention that has a name; `wrong`; or `refused`, with an error of its own."""
    finding: str = ""
    """The convention, the mistake, where a number is wrong, or the error."""
    line: str = ""
    """The line of the definition that a wrong number contradicts: a key of `theory.definition.LINES`."""
    program: str = ""
    """A program of a few lines that shows a wrong answer."""


@dataclass(frozen=True)
class Report:
    """All rows of a check, in the order of the promises."""

    name: str
    """The function."""
    layout: str
    """The axes of its query, in letters of BHTD."""
    rows: tuple[Row, ...]
    """The promises."""
    not_offered: tuple[str, ...]
    """Features that the function does not take."""
    seconds: float
    """The duration of the check."""

    @property
    def wrong(self) -> tuple[Row, ...]:
        """The rows that are wrong."""
        return tuple(row for row in self.rows if row.verdict == "wrong")

    @property
    def passed(self) -> bool:
        """True where something holds and nothing is wrong."""
        return not self.wrong and self.count("holds") > 0

    @property
    def conventions(self) -> tuple[str, ...]:
        """The names of the conventions that the function follows instead of the definition's, once each."""
        return tuple(dict.fromkeys(row.finding for row in self.rows if row.verdict == "differs"))

    def count(self, verdict: Verdict) -> int:
        """Return how many rows have a verdict."""
        return sum(row.verdict == verdict for row in self.rows)

    def __str__(self) -> str:
        width = max((len(row.promise) for row in self.rows), default=0)
        lines = [f"{self.name}, {self.layout}"]
        for row in self.rows:
            line = f"  {row.verdict:8} {row.promise:{width}}  {row.aspect:10}"
            lines.append(f"{line} {row.finding}".rstrip())
            if row.verdict == "wrong" and row.line:
                lines.append(f"{'':11}contradicts {LINES[row.line]}")
        lines.append(self.summary)
        shown: set[str] = set()
        for row in self.wrong:
            # One program for each kind of mistake; every row has its own.
            kind = row.line + re.split(r"[\[:]", row.finding)[0]
            if row.program and kind not in shown:
                shown.add(kind)
                lines += ["", f"# {row.promise}, {row.aspect}: {row.finding}", row.program]
        return "\n".join(lines)

    @property
    def summary(self) -> str:
        """One sentence of counts, and of what is not offered."""
        holds, differs, refused = self.count("holds"), self.count("differs"), self.count("refused")
        text = f"{holds} hold, {differs} differ by convention, {len(self.wrong)} are wrong"
        text += f", {refused} are refused; {self.seconds:.0f} s"
        return text + (f". Not offered: {', '.join(self.not_offered)}" if self.not_offered else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dictionaries and lists, as JSON has them."""
        return dataclasses.asdict(self) | {"wrong": len(self.wrong)}

    def to_markdown(self, *, only: tuple[Verdict, ...] = ("holds", "differs", "wrong", "refused")) -> str:
        """Write the rows of some verdicts as a Markdown table."""
        lines = ["| promise | of | verdict | what was found |", "|---|---|---|---|"]
        for row in self.rows:
            if row.verdict in only:
                finding = row.finding.replace("|", "\\|")
                lines.append(f"| {row.promise} | {row.aspect} | {row.verdict} | {finding} |")
        return "\n".join(lines)
