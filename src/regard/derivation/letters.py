"""The letters of a derivation: one per axis, the same in every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# What an index counts.
MEANINGS = {
    "h": "query heads",
    "g": "key heads",
    "i": "queries",
    "j": "keys",
    "a": "features of query and key",
    "b": "features of value",
    "c": "features of the layer",
    "d": "features of the memory",
    "e": "features before the metric",
    "f": "features of all heads",
}
# For leading axes before the heads, from the last to the first.
_BATCH = "nmlopqrstuvwxyz"


@dataclass(frozen=True)
class Notation:
    """The letters of the axes of one call, and the lengths of these axes."""

    sizes: Mapping[str, int]
    leading: tuple[str, ...]  # heads last; "" for an axis that is not spoken of
    is_grouped: bool  # several query heads share a key head, of which there are several

    @classmethod
    def cover(cls, leading: tuple[int, ...], key_heads: int, **sizes: int) -> Notation:
        """Choose letters for these leading axes, heads last, and for the axes named with their sizes."""
        count = max(len(leading) - 1, 0)
        if count > len(_BATCH):
            raise ValueError(
                f"query: expected at most {len(_BATCH) + 3} axes, as many as there are letters; got"
                f" {len(leading) + 2}; derive an example at a time"
            )
        letters = _BATCH[:count][::-1] + ("h" if leading else "")
        grouped = bool(leading) and 1 < key_heads < leading[-1]
        named = dict(zip(letters, leading, strict=True)) | ({"g": key_heads} if grouped else {})
        return cls(named | sizes, tuple(letters), grouped)

    def name(self, shape: tuple[int, ...], tail: str, *, of_keys: bool = False) -> tuple[str, ...]:
        """Name the axes of an array over leading axes and `tail`; "" where one entry serves all."""
        letters = (*self.leading, *tail)[-len(shape) :] if shape else ()
        axes = zip(shape, letters, strict=True)
        names = ["" if size == 1 < self.sizes.get(letter, 1) else letter for size, letter in axes]
        if of_keys and self.is_grouped:
            names = ["g" if name == "h" else name for name in names]
        return tuple(names)


def spell(indices: tuple[str, ...]) -> str:
    """Return indices as they stand above a symbol; a key head is that of the query head."""
    return "".join("g(h)" if index == "g" else index for index in indices)


def describe(letter: str) -> str:
    """Say in words what an index counts."""
    return MEANINGS.get(letter, "examples" if letter == "n" else "leading axis")
