"""Floor 1. Attention understood: index notation, metrics, statistical physics, gradients by hand, memories.

Everything is written as it is defined, and an oracle for tests and docs. No computation in the package uses
it; `derive` reads its notation.
"""

from regard.theory import bilinear as bilinear
from regard.theory import gibbs as gibbs
from regard.theory import gradients as gradients
from regard.theory import heads as heads
from regard.theory import hebbian as hebbian
from regard.theory import hopfield as hopfield
from regard.theory import notation as notation
from regard.theory import steps as steps
from regard.theory.notation import contract as contract
from regard.theory.notation import explain_einsum as explain_einsum
