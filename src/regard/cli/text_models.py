"""Models that write text: a text run of Regard, or a folder as Hugging Face lays them out."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.cli.sources import load_run
from regard.cli.spelling import spell_bytes, spell_pieces
from regard.models import Decoder, EncoderDecoder
from regard.paths import read_object

RIGHT_SOURCES = "give a run of `regard train text`, or a folder with a Hugging Face model"
CONFIG, MODULES = "config.json", "modules.json"


@dataclass(frozen=True)
class TextModel:
    """A model that writes, with its functions from text to tokens and back."""

    model: Decoder | EncoderDecoder
    title: str
    encode: Callable[[str], list[int]]
    spell: Callable[[list[int], Iterable[int]], Iterator[str]]  # of a prompt's tokens and those behind it
    stop_tokens: tuple[int, ...]
    start_token: int | None = None  # of targets; None for a `Decoder`

    @property
    def continues(self) -> bool:
        """True for a model that continues its prompts; False for one that answers them."""
        return self.start_token is None


def open_text_model(directory: Path) -> TextModel:
    """Load a model that writes text."""
    if is_pretrained(directory):
        return _open_pretrained(directory)
    if not (directory / CONFIG).is_file():
        raise ValueError(f"{directory} has no {CONFIG}; {RIGHT_SOURCES}")
    task, model = load_run(directory)
    if not task.writes_text:
        raise ValueError(f"{directory} is a run of {task.name}, which writes no text; {RIGHT_SOURCES}")
    vocabulary: Any = getattr(task, "vocabulary")  # noqa: B009 - of text tasks alone
    return TextModel(
        model=model,
        title=f"{task.name} run, {vocabulary.size} tokens",
        # The mark before a document is where the model learned to begin.
        encode=lambda text: [vocabulary.mark, *vocabulary.encode(text).tolist()],
        spell=lambda prompt, tokens: spell_bytes(vocabulary.spell, tokens),
        stop_tokens=(vocabulary.mark,),
    )


def is_pretrained(directory: Path) -> bool:
    """Return whether a folder is laid out as Hugging Face's."""
    return (directory / MODULES).is_file() or "model_type" in read_object(directory / CONFIG)


def _open_pretrained(directory: Path) -> TextModel:
    from regard.interop import huggingface

    loaded = huggingface.load(directory)
    model, tokenizer = loaded.model, loaded.tokenizer
    if not isinstance(model, Decoder | EncoderDecoder):
        kind = f"{loaded.kind}, which reads and does not write"
        raise ValueError(f"{directory} holds {kind}; give another model")
    if tokenizer is None:
        files = "its tokenizer.json (or vocab.json and merges.txt)"
        raise ValueError(f"{directory} has no tokenizer; put {files} there")
    begin_token = next(iter(loaded.name_tokens("bos_token_id")), None)
    start_token = None
    if isinstance(model, EncoderDecoder):
        names = ("decoder_start_token_id", "pad_token_id")
        start_token = next((token for name in names for token in loaded.name_tokens(name)), 0)

    def encode(text: str) -> list[int]:
        tokens = tokenizer.encode(text).ids
        if tokens or start_token is not None:
            return tokens
        if begin_token is None:
            needs = "and the model none to begin with; give a text"
            raise ValueError(f"--prompt {text!r} has no tokens, {needs}")
        return [begin_token]

    def spell(prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
        return spell_pieces(tokenizer, prompt if start_token is None else (), tokens)

    title = f"{loaded.kind}, {tokenizer.get_vocab_size()} tokens"
    ends = {"stop_tokens": loaded.stop_tokens, "start_token": start_token}
    return TextModel(model, title, encode, spell, **ends)
