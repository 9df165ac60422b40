"""Conversions between a stored tensor and the parameter that it fills: transposed, joined, one less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Conversion:
    """A rule in both directions; this one changes nothing. `settings` is the model's config.json."""

    @property
    def order(self) -> int:
        """Place of the parameter among those that are joined in one tensor."""
        return 0

    def stored_shape(self, shape: Shape, settings: Mapping[str, Any]) -> Shape:
        """Return the shape of the tensor that stores a parameter of this shape."""
        return shape

    def load(self, tensor: np.ndarray) -> np.ndarray:
        """Return the parameter that a tensor stores."""
        return tensor

    def store(self, parameters: Sequence[np.ndarray], settings: Mapping[str, Any]) -> np.ndarray:
        """Return the tensor that stores these parameters, given in their order."""
        return parameters[0]


@dataclass(frozen=True)
class Transposed(Conversion):
    """Axes in reverse order."""

    def stored_shape(self, shape: Shape, settings: Mapping[str, Any]) -> Shape:
        return shape[::-1]

    def load(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.T

    def store(self, parameters: Sequence[np.ndarray], settings: Mapping[str, Any]) -> np.ndarray:
        return parameters[0].T


@dataclass(frozen=True)
class Split(Conversion):
    """One of `count` equal parts of the tensor's last axis."""

    index: int
    count: int

    @property
    def order(self) -> int:
        return self.index

    def stored_shape(self, shape: Shape, settings: Mapping[str, Any]) -> Shape:
        return (*shape[:-1], self.count * shape[-1])

    def load(self, tensor: np.ndarray) -> np.ndarray:
        return np.split(tensor, self.count, axis=-1)[self.index]

    def store(self, parameters: Sequence[np.ndarray], settings: Mapping[str, Any]) -> np.ndarray:
        return np.concatenate(parameters, axis=-1)


@dataclass(frozen=True)
class OneMore(Conversion):
    """The scale of a norm, which is stored less one."""

    def load(self, tensor: np.ndarray) -> np.ndarray:
        # 1 + w has more digits than w: rounded once, when it is cast to the dtype of the model.
        return tensor.astype(np.float64) + 1.0

    def store(self, parameters: Sequence[np.ndarray], settings: Mapping[str, Any]) -> np.ndarray:
        return parameters[0].astype(np.float64) - 1.0


@dataclass(frozen=True)
class Squeezed(Conversion):
    """A parameter without the tensor's `count` leading axes of length 1."""

    count: int

    def stored_shape(self, shape: Shape, settings: Mapping[str, Any]) -> Shape:
        return (1,) * self.count + shape

    def load(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(tensor.shape[self.count :])

    def store(self, parameters: Sequence[np.ndarray], settings: Mapping[str, Any]) -> np.ndarray:
        return parameters[0].reshape((1,) * self.count + parameters[0].shape)
