"""What the loop says while it runs, as an interface: terminals, logs and tests listen in their own ways."""

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol


class Progress(Protocol):
    """A listener to a training loop; the loop never waits for the device only to have something to say."""

    def compiling(self, what: str) -> AbstractContextManager[None]:
        """Surrounds a compilation, which may take a while."""
        ...

    def stepped(self, step: int, steps: int, metrics: Mapping[str, float], steps_per_second: float) -> None:
        """Hears of a logged step whose metrics have arrived; the rate leaves compiling and evaluating out."""
        ...

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hears of an evaluation on held-out data."""
        ...

    def saved(self, step: int) -> None:
        """Hears of a checkpoint."""
        ...


class Silent:
    """A listener that says nothing."""

    def compiling(self, what: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stepped(self, step: int, steps: int, metrics: Mapping[str, float], steps_per_second: float) -> None:
        pass

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def saved(self, step: int) -> None:
        pass
