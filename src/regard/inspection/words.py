"""Attention between words: weights between tokens, with the pieces of a word put together."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from regard.axes import ArrayLike, Float

UNITS = re.compile(r"\w+|\s+|[^\w\s]")


@dataclass(frozen=True)
class WordReading:
    """Attention weights between the words of a text; see `join_pieces`."""

    words: tuple[str, ...]  # in order; tokens that stand for no text are named by the tokenizer
    is_special: tuple[bool, ...]  # True for tokens that stand for no text, such as [CLS]
    weights: Float[np.ndarray, "*B W W"]  # share of its attention that a word (row) spends on a word (column)

    @property
    def ordinary(self) -> list[int]:
        """The indices of words that stand for text."""
        return [index for index, special in enumerate(self.is_special) if not special]

    def find(self, word: str) -> int:
        """Return the index of a word: its first occurrence, in the case given if there is one."""
        return self.find_all(word)[0]

    def find_all(self, word: str) -> list[int]:
        """Return the indices of a word: in the case given, or, where there is none, in any."""
        for spelled in (str, str.lower):
            alike = [index for index in self.ordinary if spelled(self.words[index]) == spelled(word)]
            if alike:
                return alike
        expected = ", ".join(dict.fromkeys(self.words[index] for index in self.ordinary))
        raise ValueError(f"word: expected one of {expected}; got {word!r}")

    def most_read(self, reader: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the word that a word reads most in each head, besides itself and special ones, and its share.

        Indices and shares have the leading shape of `weights`; -1 and 0 where it reads no other word.
        """
        row = np.array(self.weights[..., reader, :])
        row[..., np.asarray(self.is_special)] = -1.0
        row[..., reader] = -1.0
        best = row.argmax(-1)
        share = np.take_along_axis(row, best[..., None], -1)[..., 0]
        return np.where(share <= 0, -1, best), np.maximum(share, 0.0)


def join_pieces(
    weights: ArrayLike, tokens: Sequence[str], offsets: Sequence[tuple[int, int]], text: str
) -> WordReading:
    """Put the pieces of words together: a word is read as much as its pieces together, and reads as they do.

    W_uv = mean_{t in u} sum_{s in v} weights_ts

    Rows still sum to 1. Words are runs of letters and digits; other characters stand alone.

    Args:
        weights: attention weights `(*B, T, T)`, T tokens.
        tokens: their names.
        offsets: where each begins and ends in the text, as tokenizers say; (n, n) stands for no text.
        text: what was cut into tokens.

    Returns:
        Words and the weights between them.

    Raises:
        ValueError: tokens or offsets that are not as many as the weights have rows; offsets beyond the text.

    Example:
        >>> import numpy as np
        >>> from regard.inspection.words import join_pieces
        >>> pieces, offsets = ["[CLS]", "un", "seen", "sea"], [(0, 0), (0, 2), (2, 6), (7, 10)]
        >>> reading = join_pieces(np.full((4, 4), 0.25), pieces, offsets, "unseen sea")
        >>> reading.words, reading.weights[2].tolist()
        (('[CLS]', 'unseen', 'sea'), [0.25, 0.5, 0.25])

    Reference: Clark et al., "What Does BERT Look At?", 2019, section 4.1.
    """
    weights = np.asarray(weights, np.float64)
    if not len(tokens) == len(offsets) == weights.shape[-1] == weights.shape[-2]:
        expected = f"one per row and column of weights {weights.shape}"
        raise ValueError(f"tokens, offsets: expected {expected}, got {len(tokens)} and {len(offsets)}")
    for start, end in offsets:
        if not 0 <= start <= end <= len(text):
            raise ValueError(f"offsets: expected places in a text of {len(text)}, got {(start, end)}")
    units = UNITS.findall(text)  # all characters are in one
    unit_of = [number for number, unit in enumerate(units) for _ in unit]
    words: list[str] = []
    special: list[bool] = []
    firsts, before = [], None  # numbers of the tokens that words begin with
    for number, (token, (start, end)) in enumerate(zip(tokens, offsets, strict=True)):
        # A piece may begin with the space before its word, so its last character says where it belongs.
        unit = None if start == end else unit_of[end - 1]
        if unit is None or unit != before:
            words.append(token if unit is None else units[unit])
            special.append(unit is None)
            firsts.append(number)
        before = unit
    for axis in (-1, -2):
        weights = np.add.reduceat(weights, np.asarray(firsts, int), axis)
    pieces = np.diff([*firsts, len(tokens)])[:, None]
    return WordReading(tuple(words), tuple(special), weights / pieces)
