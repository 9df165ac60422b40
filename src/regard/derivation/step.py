"""Step: one line of a derivation, with its formula, words and numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regard.axes import Array
from regard.formulas import Equation
from regard.theory.notation import Contraction, explain_einsum


@dataclass(frozen=True, repr=False)
class Step:
    """One line of a derivation. `derive` makes it.

    Example:
        >>> import jax.numpy as jnp
        >>> import regard
        >>> x = jnp.eye(2)
        >>> step = regard.derive(x, x, x)["products"]
        >>> step.expression, step.summed, step.unit
        ('P^{ij} = sum_a Q^{ia} K^{ja}', ('a',), 'features²')
    """

    name: str
    """The name, by which `derivation[name]` finds it."""
    formula: Equation
    """The equation that is computed."""
    words: str
    """The same for people."""
    unit: str
    """The unit of the numbers."""
    value: Array
    """The numbers, all of them."""
    indices: tuple[str, ...]
    """The letter of each axis; "" where one entry serves all."""
    subscripts: str | None = None
    """As `jnp.einsum` takes them, where something is summed over."""

    @property
    def expression(self) -> str:
        """Return the formula as text, as `regard.theory` writes it."""
        return self.formula.text

    @property
    def formula_latex(self) -> str:
        """Return the formula in LaTeX, for math mode."""
        return self.formula.latex

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the value."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of the value."""
        return np.dtype(self.value.dtype)

    @property
    def contraction(self) -> Contraction | None:
        """Return the answer of `explain_einsum`; None where nothing is summed over."""
        return None if self.subscripts is None else explain_einsum(self.subscripts)

    @property
    def free(self) -> tuple[str, ...]:
        """Return the indices that the result has and not every operand."""
        contraction = self.contraction
        return tuple(filter(None, self.indices)) if contraction is None else contraction.free

    @property
    def batch(self) -> tuple[str, ...]:
        """Return the indices that every operand and the result have: a sum of its own for each value."""
        return self.contraction.batch if self.contraction else ()

    @property
    def summed(self) -> tuple[str, ...]:
        """Return the indices that the result lacks."""
        return self.contraction.summed if self.contraction else ()

    @property
    def roles(self) -> dict[str, str]:
        """Return the role of each index: "free", "batch" or "summed"."""
        return {index: kind for kind in ("free", "batch", "summed") for index in getattr(self, kind)}

    @property
    def indices_by_role(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the roles that occur where something is summed over, each with its indices."""
        kinds = ("free", "batch", "summed") if self.contraction else ()
        return [(kind, getattr(self, kind)) for kind in kinds if getattr(self, kind)]

    def __repr__(self) -> str:
        return f"Step({self.name}: {self.expression}, {self.shape} {self.dtype}, {self.unit})"
