"""Numbers that calls go by wherever people read or type them."""

from collections.abc import Sequence
from typing import Any


def number_calls(calls: Sequence[Any]) -> list[int]:
    """Return the numbers that calls are known by: of their layers, if each is of another, else their own.

    Of a hybrid, layers of linear attention make no call.
    """
    layers = [call.layer for call in calls]
    return layers if len(set(layers)) == len(layers) else list(range(len(layers)))
