"""Text of tokens while they are made: whole characters only, and an end before given words."""

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Any

MISSING = "\ufffd"  # what stands for bytes that are no character, or not yet


class ByteSpelling:
    """Text of tokens that stand for bytes; part of a character waits for the rest.

    Example:
        >>> spelling = ByteSpelling(lambda token: bytes([token]))
        >>> spelling.push([104, 0xC3]), spelling.push([0xA9]), spelling.push([0xE2]), spelling.finish()
        ('h', 'é', '', '\\ufffd')
    """

    def __init__(self, spell: Callable[[int], bytes]):
        self._spell = spell
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Iterable[int]) -> str:
        """Return the characters that these tokens complete."""
        return self._decoder.decode(b"".join(map(self._spell, tokens)))

    def finish(self) -> str:
        """Return what waits for a rest that will not come."""
        return self._decoder.decode(b"", final=True)


class TokenizerSpelling:
    """Text of a `tokenizers.Tokenizer`'s tokens, which may read differently beside others and the prompt."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()):
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)
        self._waiting: list[int] = []  # tokens whose character is not complete
        self.push(prompt)
        self._waiting.clear()

    def push(self, tokens: Iterable[int]) -> str:
        """Return the characters that these tokens complete."""
        text = ""
        for token in tokens:
            piece = self._stream.step(self._tokenizer, token)
            self._waiting = [*self._waiting, token] if piece is None else []
            text += piece or ""
        return text

    def finish(self) -> str:
        """Return what waits for a rest that will not come."""
        return self._tokenizer.decode(self._waiting)


class Ending:
    """The end of a text, before the first of some words; what may begin one waits until it is clear.

    Example:
        >>> ending = Ending(["END"])
        >>> ending.push("now E"), ending.push("N"), ending.push("Dless"), ending.is_reached
        ('now ', '', '', True)
    """

    def __init__(self, words: Sequence[str]):
        self._words = [*words]
        self._waiting = ""
        self.is_reached = False

    def push(self, text: str) -> str:
        """Return the text that is certain to come before the end."""
        if self.is_reached:
            return ""
        text, self._waiting = self._waiting + text, ""
        starts = [text.find(word) for word in self._words if word in text]
        if starts:
            self.is_reached = True
            return text[: min(starts)]
        held = max(map(len, self._words), default=1) - 1
        for size in range(min(held, len(text)), 0, -1):
            if any(word.startswith(text[-size:]) for word in self._words):
                self._waiting = text[-size:]
                return text[:-size]
        return text

    def finish(self) -> str:
        """Return what was held back, as no more text comes."""
        text, self._waiting = self._waiting, ""
        return "" if self.is_reached else text
