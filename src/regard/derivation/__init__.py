"""Derivations: one attention call step by step, in index notation, with its numbers.

Start from `derive`; the `Derivation` prints in a terminal, shows itself in a notebook and writes LaTeX.
"""

from regard.derivation.deriving import derive
from regard.derivation.record import Derivation
from regard.derivation.step import Step

__all__ = ["Derivation", "Step", "derive"]
