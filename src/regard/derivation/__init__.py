"""Attention calls derived step by step, in index notation, with their numbers. Start from `derive`."""

from regard.derivation.calls import derive as derive
from regard.derivation.record import Derivation as Derivation
from regard.derivation.steps import Step as Step
