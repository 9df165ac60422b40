"""Tokens of text: bytes, or byte-level BPE; both spell any text, and have a mark between documents."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from regard.loading import name_extra

NUM_BYTES = 256


class ByteVocabulary:
    """The 256 bytes, and then the mark between documents."""

    size = NUM_BYTES + 1
    mark = NUM_BYTES
    _bytes = tuple(bytes([byte]) for byte in range(NUM_BYTES))
    _text: str | None = None

    def encode(self, text: str) -> Int[np.ndarray, " T"]:
        """Return the text's tokens, without a mark."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_all(self, texts: Sequence[str]) -> list[Int[np.ndarray, " T"]]:
        return [self.encode(text) for text in texts]

    def spell(self, token: int) -> bytes:
        """Return the bytes that a token stands for; none for the mark."""
        if not 0 <= token < self.size:
            raise ValueError(f"token must be in 0..{self.size - 1}, got {token}")
        return b"" if token == self.mark else self._bytes[token]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; bytes that are no UTF-8, such as half a character, become U+FFFD."""
        return b"".join(self.spell(int(token)) for token in tokens).decode("utf-8", errors="replace")

    def to_json(self) -> str | None:
        """Return the contents of tokenizer.json; None where there is nothing to keep."""
        return self._text


class PairVocabulary(ByteVocabulary):
    """Byte-level BPE: the 256 bytes and merges of frequent pairs, and then the mark between documents.

    The mark is no token of the tokenizer.json that `train_pairs` made: no text, whatever it holds, is encoded
    to it.

    Reference: R. Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", 2016,
    section 3.2; over bytes as in A. Radford et al., "Language Models are Unsupervised Multitask Learners",
    2019, section 2.2.
    """

    def __init__(self, text: str):
        with name_extra("BPE", "train"):
            import tokenizers
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises the bare class
            raise ValueError(f"tokenizer.json is damaged: {error}") from error
        letters = _read_letters()
        spelled = sorted((token, name) for name, token in self._tokenizer.get_vocab().items())
        is_dense = [token for token, _ in spelled] == list(range(len(spelled)))
        if not (is_dense and all(set(name) <= letters.keys() for _, name in spelled)):
            expected = "byte-level BPE without special tokens"
            raise ValueError(f"tokenizer.json must hold {expected}, got one that spells none")
        self._text = text
        self._bytes = tuple(bytes(letters[letter] for letter in name) for _, name in spelled)
        self.mark, self.size = len(spelled), len(spelled) + 1

    def encode(self, text: str) -> Int[np.ndarray, " T"]:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[Int[np.ndarray, " T"]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]


def train_pairs(documents: Iterable[str], vocab_size: int) -> PairVocabulary:
    """Merge the most frequent pairs of tokens, within words, until there are `vocab_size`, or no pair twice.

    `vocab_size`, at least 256, leaves out the mark. The same documents give the same vocabulary, whole or in
    parts that end with words.
    """
    with name_extra("BPE", "train"):
        import tokenizers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=sorted(_read_letters()), min_frequency=2, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PairVocabulary(tokenizer.to_str())


def count_bytes(vocabulary: ByteVocabulary) -> Int[np.ndarray, " V"]:
    """Return the number of bytes that each token stands for; 0 for the mark."""
    return np.array([len(vocabulary.spell(token)) for token in range(vocabulary.size)], np.int32)


@functools.cache
def _read_letters() -> dict[str, int]:
    """Return the byte for each letter of a tokenizer.json: itself if printable, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(NUM_BYTES + index): byte for index, byte in enumerate(others)}
