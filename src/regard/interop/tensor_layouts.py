"""How a tensor there differs from the parameter here: transposed, joined with others, one less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A rule in both directions; `settings` is the architecture's config.json."""

    @property
    def order(self) -> int:
        """Which part of the tensor there this parameter is."""
        return 0

    def shape_there(self, shape: Shape, settings: Mapping[str, Any]) -> Shape:
        """The shape that a parameter's tensor has there."""
        return shape

    def here(self, array: np.ndarray) -> np.ndarray:
        """The parameter, from the tensor there."""
        return array

    def there(self, parts: Sequence[np.ndarray], settings: Mapping[str, Any]) -> np.ndarray:
        """The tensor there, from its parameters in order."""
        return parts[0]


@dataclass(frozen=True)
class Same(Layout):
    """Nothing differs."""


@dataclass(frozen=True)
class Transposed(Layout):
    """The axes the other way round."""

    def shape_there(self, shape: Shape, settings: Mapping[str, Any]) -> Shape:
        return shape[::-1]

    def here(self, array: np.ndarray) -> np.ndarray:
        return array.T

    def there(self, parts: Sequence[np.ndarray], settings: Mapping[str, Any]) -> np.ndarray:
        return parts[0].T


@dataclass(frozen=True)
class Split(Layout):
    """One of `count` equal parts of the last axis."""

    index: int
    count: int

    @property
    def order(self) -> int:
        return self.index

    def shape_there(self, shape: Shape, settings: Mapping[str, Any]) -> Shape:
        return (*shape[:-1], self.count * shape[-1])

    def here(self, array: np.ndarray) -> np.ndarray:
        width = array.shape[-1] // self.count
        return array[..., self.index * width : (self.index + 1) * width]

    def there(self, parts: Sequence[np.ndarray], settings: Mapping[str, Any]) -> np.ndarray:
        return np.concatenate(parts, axis=-1)


@dataclass(frozen=True)
class OneMore(Layout):
    """The scale of a norm is stored less one."""

    def here(self, array: np.ndarray) -> np.ndarray:
        # 1 + w has more digits than w: rounded once, when it is cast to the dtype of the model.
        return array.astype(np.float64) + 1.0

    def there(self, parts: Sequence[np.ndarray], settings: Mapping[str, Any]) -> np.ndarray:
        return parts[0].astype(np.float64) - 1.0


@dataclass(frozen=True)
class Squeezed(Layout):
    """Leading axes of length 1 there."""

    count: int

    def shape_there(self, shape: Shape, settings: Mapping[str, Any]) -> Shape:
        return (1,) * self.count + shape

    def here(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(array.shape[self.count :])

    def there(self, parts: Sequence[np.ndarray], settings: Mapping[str, Any]) -> np.ndarray:
        return parts[0].reshape((1,) * self.count + parts[0].shape)


@dataclass(frozen=True)
class Patches(Layout):
    """A convolution whose stride is its size: (M, C, height, width) there, (height * width * C, M) here."""

    def shape_there(self, shape: Shape, settings: Mapping[str, Any]) -> Shape:
        return (shape[-1], settings["num_channels"], *sides(settings["patch_size"]))

    def here(self, array: np.ndarray) -> np.ndarray:
        return array.transpose(2, 3, 1, 0).reshape(-1, array.shape[0])

    def there(self, parts: Sequence[np.ndarray], settings: Mapping[str, Any]) -> np.ndarray:
        width, channels, *patch = self.shape_there(parts[0].shape, settings)
        return parts[0].reshape(*patch, channels, width).transpose(3, 2, 0, 1)


def sides(size: Any) -> tuple[int, int]:
    """Height and width, which config files give as one number where they agree."""
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return int(height), int(width)
