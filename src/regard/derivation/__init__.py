"""Floor 5. One attention call derived step by step, in index notation, with its numbers."""

from regard.derivation.calls import derive as derive
from regard.derivation.record import Derivation as Derivation
from regard.derivation.steps import Step as Step
