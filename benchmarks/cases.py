"""Cases to measure: shapes, masks, passes and dtypes, with the same random numbers every time."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from regard import masks
from regard.masks import Mask

Passes = Literal["forward", "forward and backward", "decode"]
DTYPES = ("float32", "bfloat16")
DOCUMENTS = 16
KEPT_BLOCKS = 0.25
NARROW = 128  # keys that a query of the narrow window case sees
SHRINK = 4  # quick cases have lengths divided by this


def window_width(length: int) -> int:
    """Return how many keys before its own a query of the window case sees."""
    return max(min(512 if length < 32_768 else 1024, length // 4), 1)


def prefix_length(length: int) -> int:
    """Return how many keys everybody sees in the prefix case."""
    return max(min(1024, length // 4), 1)


def block_side(length: int) -> int:
    """Return the side of the blocks that the blocks case keeps or drops."""
    return max(min(128, length // 4), 1)


def document_ids(length: int) -> np.ndarray:
    """Return the ids of documents of unequal lengths, packed into one sequence."""
    chosen = np.random.default_rng(0).choice(np.arange(1, length), min(DOCUMENTS, length) - 1, replace=False)
    return np.searchsorted(np.sort(chosen), np.arange(length), side="right").astype(np.int32)


def kept_blocks(num_queries: int, num_keys: int) -> np.ndarray:
    """Draw blocks to keep, besides those that hold the diagonal: no query is left without keys."""
    shape = (-(-num_queries // block_side(num_queries)), -(-num_keys // block_side(num_keys)))
    kept = np.random.default_rng(0).random(shape) < KEPT_BLOCKS
    return kept | np.eye(*shape, dtype=bool)


def _blocks(num_queries: int, num_keys: int) -> Mask:
    sides = np.ones((block_side(num_queries), block_side(num_keys)), bool)
    return masks.from_array(np.kron(kept_blocks(num_queries, num_keys), sides)[:num_queries, :num_keys])


MASKS: dict[str, Callable[[int, int], Mask | None]] = {
    "full": lambda T, S: None,
    "causal": lambda T, S: masks.causal(),
    "window": lambda T, S: masks.causal() & masks.sliding_window(window_width(S)),
    "documents": lambda T, S: masks.causal() & masks.segments(document_ids(S)[None]),
    "narrow window": lambda T, S: masks.causal() & masks.sliding_window(NARROW - 1),
    "prefix": lambda T, S: masks.causal() | masks.prefix(prefix_length(S)),
    "blocks": _blocks,
}


@dataclass(frozen=True)
class Inputs:
    """Arrays of one case in float32, each (batch, heads, length, width)."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    cotangent: np.ndarray | None  # of the output, where there is a backward pass

    @property
    def arrays(self) -> list[np.ndarray]:
        """Those that there are, in order."""
        return [array for array in (self.query, self.key, self.value, self.cotangent) if array is not None]


@dataclass(frozen=True)
class Case:
    """One call to measure; value has the shape of key."""

    name: str
    query: tuple[int, int, int, int]
    key: tuple[int, int, int, int]
    mask: str = "full"
    passes: Passes = "forward"
    dtype: str = "float32"
    cap: float | None = None  # of a softcap
    sinks: bool = False
    aux: tuple[
        str, ...
    ] = ()  # statistics, which are added to the output, so that gradients flow through both

    @property
    def is_backward(self) -> bool:
        return self.passes == "forward and backward"

    @property
    def lengths(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.query[-2], self.key[-2]

    def shrink(self) -> Case:
        """Return the same with shorter sequences, to try things out."""

        def shorten(shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
            batch, heads, length, width = shape
            return batch, heads, max(length // SHRINK, 1), width

        return dataclasses.replace(self, query=shorten(self.query), key=shorten(self.key))

    def make_mask(self) -> Mask | None:
        """Return the mask as Regard takes it."""
        return MASKS[self.mask](*self.lengths)

    def make_sinks(self) -> np.ndarray | None:
        """Return a logit per query head."""
        return np.linspace(-1, 1, self.query[1], dtype=np.float32) if self.sinks else None

    def make_dense_mask(self) -> np.ndarray | None:
        """Return the mask as a boolean matrix, True = may attend."""
        mask = self.make_mask()
        return None if mask is None else np.asarray(mask.dense(*self.lengths)).reshape(self.lengths)

    def find_ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """Return each query's first key and the end of its keys, which lie side by side."""
        keep = self.make_dense_mask()
        assert keep is not None
        first, end = keep.argmax(1), keep.shape[1] - keep[:, ::-1].argmax(1)
        if (keep.sum(1) != end - first).any():
            raise ValueError(f"a query's keys of {self.mask!r} do not lie side by side")
        return first, end

    def count_pairs(self) -> int:
        """Count the query-key pairs that the mask keeps, over all heads and batch rows."""
        keep = self.make_dense_mask()
        pairs = math.prod(self.lengths) if keep is None else int(keep.sum())
        return pairs * self.query[0] * self.query[1]

    def count_flops(self) -> int:
        """Count operations of products over kept pairs: two products forward, five more backward."""
        return 2 * self.count_pairs() * self.query[-1] * (7 if self.is_backward else 2)

    def make_inputs(self) -> Inputs:
        """Draw random numbers that depend on the case's name and shapes alone."""
        rng = np.random.default_rng(zlib.crc32(f"{self.name} {self.query} {self.key}".encode()))
        query, key, value, cotangent = (
            rng.standard_normal(shape, np.float32) for shape in (self.query, self.key, self.key, self.query)
        )
        return Inputs(query, key, value, cotangent if self.is_backward else None)


def _square(name: str, *shape: int, mask: str = "full", passes: Passes = "forward") -> Case:
    """Return a case of self-attention, with as many key heads as query heads."""
    batch, heads, length, width = shape
    return Case(name, (batch, heads, length, width), (batch, heads, length, width), mask, passes)


BOTH: Passes = "forward and backward"

CASES = (
    _square("full", 1, 8, 4096, 64),
    _square("full-backward", 1, 8, 2048, 64, passes=BOTH),
    _square("causal", 1, 8, 2048, 64, mask="causal"),
    _square("causal-backward", 1, 8, 2048, 64, mask="causal", passes=BOTH),
    _square("window", 1, 2, 8192, 64, mask="window"),
    _square("window-backward", 1, 2, 8192, 64, mask="window", passes=BOTH),
    _square("narrow", 1, 8, 8192, 64, mask="narrow window"),
    _square("narrow-backward", 1, 8, 8192, 64, mask="narrow window", passes=BOTH),
    _square("documents-backward", 1, 2, 8192, 64, mask="documents", passes=BOTH),
    _square("prefix", 1, 2, 8192, 64, mask="prefix"),
    _square("blocks", 1, 2, 4096, 64, mask="blocks"),
    Case("decode", (1, 32, 1, 128), (1, 32, 4096, 128), passes="decode"),
    Case("decode-grouped", (1, 32, 1, 128), (1, 8, 4096, 128), passes="decode"),
    _square("short", 32, 8, 128, 64),
    _square("medium", 8, 12, 512, 64),
)


def select(kind: str, names: Sequence[str], words: Sequence[str], *, exact: bool = False) -> list[str]:
    """Return names that hold any of the words (all for no words); a word that finds none is an error."""
    for word in words:
        if not any(word == name if exact else word in name for name in names):
            raise ValueError(f"no {kind} {'is' if exact else 'has'} {word!r}; expected {', '.join(names)}")
    return [
        name for name in names if not words or any(word == name if exact else word in name for word in words)
    ]
