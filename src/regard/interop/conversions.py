"""Conversions between a stored tensor and the parameter that it fills: transposed, joined, one less."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Shape = tuple[int, ...]
Settings = Mapping[str, Any]
"""The content of a config.json."""


@dataclass(frozen=True)
class Conversion:
    """A rule in both directions; the default changes nothing.

    Attributes:
        load: the parameter, from the tensor that stores it.
        store: the tensor, from the parameters that it joins, in order, and config.json.
        stored_shape: the tensor's shape, from the parameter's, and config.json.
        order: place of the parameter among those that are joined.
    """

    load: Callable[[np.ndarray], np.ndarray] = lambda tensor: tensor
    store: Callable[[Sequence[np.ndarray], Settings], np.ndarray] = lambda parameters, _: parameters[0]
    stored_shape: Callable[[Shape, Settings], Shape] = lambda shape, _: shape
    order: int = 0


UNCHANGED = Conversion()
TRANSPOSED = Conversion(
    lambda tensor: tensor.T, lambda parameters, _: parameters[0].T, lambda shape, _: shape[::-1]
)
# 1 + w has more digits than w: rounded once, when it is cast to the dtype of the model.
ONE_MORE = Conversion(
    lambda tensor: tensor.astype(np.float64) + 1.0,
    lambda parameters, _: parameters[0].astype(np.float64) - 1.0,
)


def take_part(index: int, count: int) -> Conversion:
    """Make the conversion of one of `count` equal parts of the tensor's last axis."""
    return Conversion(
        lambda tensor: np.split(tensor, count, axis=-1)[index],
        lambda parameters, _: np.concatenate(parameters, axis=-1),
        lambda shape, _: (*shape[:-1], count * shape[-1]),
        index,
    )


def squeeze(count: int) -> Conversion:
    """Make the conversion of a parameter without the tensor's `count` leading axes of length 1."""
    ones = (1,) * count
    return Conversion(
        lambda tensor: tensor.reshape(tensor.shape[count:]),
        lambda parameters, _: parameters[0].reshape(ones + parameters[0].shape),
        lambda shape, _: ones + shape,
    )
