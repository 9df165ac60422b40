"""Tokens: the texts or patches at the positions of a sequence, for people to read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.arguments import as_array, integers, whole_number

KINDS = ("text", "patches", "index")
SPACES = " \u2581\u0120"  # as byte-pair and SentencePiece vocabularies write them, too
_PUNCTUATION = re.compile(r"[.,;:!?|\n\u010a]+")
_STRINGS = "a list of strings, one per position"
_SEPARATORS = ("[SEP]", "<sep>", "</s>", "<|endoftext|>", "<eos>")


@dataclass(frozen=True, eq=False, repr=False)
class Tokens:
    """One text per position of a sequence, and what else is known of it.

    Args:
        texts: one string per position; None or an integer n stands for the numbers 0..n-1.
        kind: "text", pieces of a text; "patches", pieces of a picture; "index", mere numbers. None means
            "patches" with a patch_grid, "index" where texts is a number, else "text".
        patch_grid: rows and columns of patches, in reading order, from position `first_patch` on.
        first_patch: how many positions lie before the first patch, such as a class token.
        picture: the picture `(height, width)` or `(height, width, 3)`: 0..255 as uint8, 0..1 as floats.
        ids: integer array, one per position, equal where tokens are equal: for statistics of induction and
            of attention to the same token. None numbers the texts of kind "text", and no others.
        spans: integer array `(n, 2)`, where each token begins and ends in a text.

    Raises:
        TypeError: texts that are not strings, ids or spans that are not integers.
        ValueError: sizes that do not fit.

    Example:
        >>> from regard.inspection.tokens import Tokens
        >>> Tokens(["the", " cat"], ids=[5, 7])
        Tokens(2 text: 'the', ' cat')
    """

    texts: tuple[str, ...]
    kind: str
    patch_grid: tuple[int, int] | None
    first_patch: int
    picture: np.ndarray | None
    ids: np.ndarray | None
    spans: np.ndarray | None

    def __init__(
        self,
        texts: Sequence[str] | int,
        *,
        kind: str | None = None,
        patch_grid: tuple[int, int] | None = None,
        first_patch: int = 0,
        picture: Any = None,
        ids: Any = None,
        spans: Any = None,
    ):
        counted = isinstance(texts, int) and not isinstance(texts, bool)
        if kind is None:
            kind = "patches" if patch_grid is not None else "index" if counted else "text"
        if spans is not None:
            spans = np.asarray(integers("spans", spans))
            spans = spans if spans.size else spans.reshape((0, 2))
        values = {
            "texts": tuple(map(str, range(whole_number("texts", texts, 0)))) if counted else _texts(texts),
            "kind": kind,
            "patch_grid": None if patch_grid is None else _pair(patch_grid),
            "first_patch": whole_number("first_patch", first_patch, 0),
            "picture": None if picture is None else _picture(picture),
            "ids": None if ids is None else np.asarray(integers("ids", ids)),
            "spans": spans,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        count = len(self.texts)
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.patch_grid is not None:
            rows, columns = self.patch_grid
            end = self.first_patch + rows * columns
            if end > count:
                raise ValueError(
                    f"patch_grid: expected {rows} x {columns} patches from position {self.first_patch} on"
                    f" to lie within the {count} tokens; they end at {end}"
                )
        if self.ids is not None and self.ids.shape != (count,):
            raise ValueError(f"ids: expected one per token, shape {(count,)}, got {self.ids.shape}")
        if self.spans is not None and self.spans.shape != (count, 2):
            raise ValueError(f"spans: expected shape {(count, 2)}, got {self.spans.shape}")

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.texts[:8]))
        more = ", ..." if len(self) > 8 else ""
        return f"Tokens({len(self)} {self.kind}{': ' if self.texts else ''}{shown}{more})"

    def part(self, start: int, count: int) -> Tokens:
        """Return the tokens at `count` positions from `start`, empty ones with id -1 where there are none."""
        if start == 0 and count == len(self):
            return self
        indices = np.arange(start, start + count)
        is_inside = (indices >= 0) & (indices < len(self))
        rows = np.where(is_inside, indices, len(self))  # the last one of these stands for none
        padded = (*self.texts, "")
        texts = [padded[row] for row in rows]

        def take(array: np.ndarray | None, missing: int) -> np.ndarray | None:
            if array is None:
                return None
            return np.concatenate([array, np.full_like(array, missing, shape=(1, *array.shape[1:]))])[rows]

        # Of a part, a grid of patches says nothing.
        kind = "index" if self.kind == "patches" else self.kind
        return Tokens(texts, kind=kind, ids=take(self.ids, -1), spans=take(self.spans, 0))


def read_tokens(name: str, tokens: Any) -> Tokens:
    """Read what a caller gave as the tokens of one sequence."""
    if isinstance(tokens, Tokens):
        return tokens
    if isinstance(tokens, str):
        hint = "write list(...) of it if every character is a token"
        raise TypeError(f"{name}: expected {_STRINGS}, got the string {tokens[:40]!r}; {hint}")
    try:
        return Tokens(list(tokens))
    except TypeError as error:
        raise TypeError(f"{name}: expected a list of strings or Tokens ({error})") from None


def number_tokens(*sides: Tokens | None) -> list[np.ndarray] | None:
    """Enumerate the tokens of all sides together, by their ids or else their texts, or None."""
    present = [side for side in sides if side is not None]
    if len(present) < len(sides):
        return None
    ids = [side.ids for side in present if side.ids is not None]
    if len(ids) == len(sides):
        return ids
    if any(side.kind != "text" for side in present):
        return None
    numbers: dict[str, int] = {}
    numbered = [[numbers.setdefault(text, len(numbers)) for text in side.texts] for side in present]
    return [np.asarray(side, np.int32) for side in numbered]


def find_delimiters(tokens: Tokens, ids: np.ndarray) -> list[int]:
    """Return which ids are of tokens that end or part sentences: punctuation, line breaks, separators."""
    bare = [text.strip(SPACES) for text in tokens.texts]
    places = [n for n, text in enumerate(bare) if text in _SEPARATORS or _PUNCTUATION.fullmatch(text)]
    return sorted(set(ids[places].tolist()))


def _texts(texts: Any) -> tuple[str, ...]:
    listed: Any = as_array("texts", "a list of strings", tuple, texts)
    wrong = [text for text in listed if not isinstance(text, str)]
    if wrong or isinstance(texts, str):
        got = type(wrong[0]).__name__ if wrong else "a string"
        raise TypeError(f"texts: expected {_STRINGS}, got {got}; pass token ids as ids=")
    return listed


def _pair(grid: Any) -> tuple[int, int]:
    sizes: Any = as_array("patch_grid", "rows and columns", tuple, grid)
    if len(sizes) != 2 or not all(isinstance(n, int | np.integer) and n > 0 for n in sizes):
        raise ValueError(f"patch_grid: expected rows and columns, two numbers above 0; got {grid!r}")
    return int(sizes[0]), int(sizes[1])


def _picture(picture: Any) -> np.ndarray:
    array = np.asarray(picture)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] != 3):
        raise ValueError(f"picture: expected shape (height, width) or (height, width, 3), got {array.shape}")
    if array.dtype != np.uint8:
        if array.dtype.kind != "f":
            raise TypeError(f"picture: expected uint8 or floating-point numbers, got {array.dtype}")
        array = array.astype(np.float32)
    return array


def number_sequence(sequences: list[Tokens], tokens: Tokens | None) -> int | None:
    """Return the number of a sequence among those given, to which it is added if it is new."""
    if tokens is None:
        return None
    for number, sequence in enumerate(sequences):
        if sequence is tokens or _same(sequence, tokens):
            return number
    sequences.append(tokens)
    return len(sequences) - 1


def _same(a: Tokens, b: Tokens) -> bool:
    plain, arrays = ("texts", "kind", "patch_grid", "first_patch"), ("picture", "ids", "spans")
    alike = all(getattr(a, name) == getattr(b, name) for name in plain)
    return alike and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)
