"""Listeners to the training loop: terminals, logs and tests override what they want to hear of."""

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager


class Progress:
    """A listener that hears everything and says nothing; the loop never waits for the device to feed one."""

    def compiling(self, what: str) -> AbstractContextManager[None]:
        """Surround a compilation, which may take a while."""
        return contextlib.nullcontext()

    def stepped(self, step: int, steps: int, metrics: Mapping[str, float], steps_per_second: float) -> None:
        """Hear of a logged step whose metrics have arrived; the rate leaves compiling and evaluating out."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hear of an evaluation on held-out data."""

    def saved(self, step: int) -> None:
        """Hear of a checkpoint."""
