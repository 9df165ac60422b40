"""Derivation: all steps of one call, to be read in a terminal, a notebook or a paper."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from regard.axes import Array
from regard.derivation import markup, terminal, typesetting
from regard.derivation.number_tables import View
from regard.derivation.step import Step


@dataclass(frozen=True, repr=False, eq=False)
class Derivation:
    """One attention call, step by step. Made by `derive`; printing it shows all of it.

    Iterating gives the steps in order, `derivation["weights"]` one of them.

    Example:
        >>> import jax.numpy as jnp
        >>> import regard
        >>> x = jnp.eye(2)
        >>> derivation = regard.derive(x, x, x)
        >>> [step.name for step in derivation]
        ['query', 'key', 'value', 'products', 'scale', 'scores', 'lse', 'weights', 'entropy', 'output']
        >>> [f"{share:.2f}" for share in derivation["weights"].value[0]]
        ['0.67', '0.33']
    """

    title: str
    """The title of the derivation."""
    steps: tuple[Step, ...]
    """Every step, in order."""
    view: View
    """The lengths of the letters' axes, and the entries that are printed of long ones."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names of steps: what became of the scores last, a softcap say, is found under both names."""

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __contains__(self, name: object) -> bool:
        return name in self.aliases or any(step.name == name for step in self.steps)

    def __getitem__(self, name: str | int) -> Step:
        if isinstance(name, int):
            return self.steps[name]
        wanted = self.aliases.get(name, name)
        for step in self.steps:
            if step.name == wanted:
                return step
        names = ", ".join([step.name for step in self.steps] + list(self.aliases))
        raise KeyError(f"expected the name of a step, one of {names}; got {name!r}")

    @property
    def output(self) -> Array:
        """Return the value of the last step."""
        return self.steps[-1].value

    def __str__(self) -> str:
        return terminal.write_text(self.title, self.steps, self.view)

    def __repr__(self) -> str:
        return f"Derivation({self.title}: {' -> '.join(step.name for step in self.steps)})"

    def show(self) -> None:
        """Print it, in colour where rich is installed and the terminal has it."""
        try:
            from rich.console import Console
        except ModuleNotFoundError:
            sys.stdout.write(f"{self}\n")
        else:
            Console(soft_wrap=True, highlight=False).print(self)

    def to_latex(self, *, numbers: bool = False) -> str:
        """Write all formulas as one `aligned` block for math mode, which amsmath, MathJax and KaTeX know.

        With `numbers`, matrices of the numbers follow, as far as printing shows them. No delimiters.
        """
        return typesetting.write_latex(self.steps, self.view, numbers)

    def to_html(self) -> str:
        """Write HTML with MathML: no script, nothing loaded, readable on light and dark ground."""
        return markup.write_page(self.title, self.steps, self.view)

    def _repr_html_(self) -> str:
        return markup.write_fragment(self.title, self.steps, self.view)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self) if cycle else str(self))

    def __rich__(self) -> Any:
        from rich.text import Text

        lines = terminal.write_lines(self.title, self.steps, self.view)
        return Text("\n").join(Text.assemble(*line) for line in lines)
