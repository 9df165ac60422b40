"""Text of tokens while they are made: whole characters only, and an end before given words."""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

MISSING = "\ufffd"  # what stands for bytes that are no character, or not yet


def spell_bytes(spell: Callable[[int], bytes], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens that stand for bytes; part of a character waits for the rest.

    Example:
        >>> [*spell_bytes(lambda token: bytes([token]), [104, 0xC3, 0xA9, 0xE2])]
        ['h', 'é', '\\ufffd']
    """
    return codecs.iterdecode(map(spell, tokens), "utf-8", errors="replace")


def spell_pieces(tokenizer: Any, prompt: Iterable[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of a `tokenizers.Tokenizer`'s tokens as it reads behind that of the prompt."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)
    for token in prompt:
        stream.step(tokenizer, token)
    waiting: list[int] = []  # tokens whose character is not complete
    for token in tokens:
        piece = stream.step(tokenizer, token)
        waiting = [*waiting, token] if piece is None else []
        yield piece or ""
    yield tokenizer.decode(waiting)


class Ending:
    """The end of a text, before the first of some words; what may begin one waits until it is clear.

    Example:
        >>> ending = Ending(["END"])
        >>> [*ending.cut(["now E", "N", "Dless", "ly"])], ending.is_reached
        (['now ', '', ''], True)
    """

    def __init__(self, words: Sequence[str]):
        self._words = [*words]
        self.is_reached = False

    def cut(self, pieces: Iterable[str]) -> Iterator[str]:
        """Yield, after each piece, the text that is certain to come before the end; stop there."""
        longest = max(map(len, self._words), default=1) - 1
        waiting = ""
        for piece in pieces:
            text = waiting + piece
            starts = [text.find(word) for word in self._words if word in text]
            if starts:
                self.is_reached = True
                yield text[: min(starts)]
                return
            sure = max(len(text) - longest, 0)
            while not any(word.startswith(text[sure:]) for word in self._words) and sure < len(text):
                sure += 1
            text, waiting = text[:sure], text[sure:]
            yield text
        yield waiting
