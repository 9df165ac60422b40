"""Tokenizers from the files beside a model's weights."""

from pathlib import Path
from typing import Any

from regard.interop.huggingface_configs import read_settings


def read_tokenizer(directory: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a model's folder, or None where it has none that is read.

    tokenizer.json is taken where there is one; otherwise vocab.txt is read as BERT's word pieces, lower-cased
    unless tokenizer_config.json says otherwise, and a gpt2's vocab.json with merges.txt as its bytes; other
    kinds cut these up in ways of their own. Truncation and padding are left to whoever calls.
    """
    try:
        tokenizer = _read(directory)
    except ImportError:
        raise
    except Exception as error:  # the library raises nothing more special
        raise ValueError(
            f"{directory}: expected tokenizer files that `tokenizers` reads, got {type(error).__name__}:"
            f" {error}; fetch them again, or take them out to load the model without a tokenizer"
        ) from error
    if tokenizer is not None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def _read(directory: Path) -> Any:
    """Return the tokenizer of the first files that are there, as they ask for it; None without any."""
    from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer, Tokenizer

    if (directory / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(directory / "tokenizer.json"))
    if (directory / "vocab.txt").is_file():
        options_file = directory / "tokenizer_config.json"
        options = read_settings(options_file) if options_file.is_file() else {}
        pieces = BertWordPieceTokenizer.from_file(
            str(directory / "vocab.txt"),
            lowercase=options.get("do_lower_case", True),
            strip_accents=options.get("strip_accents"),
            handle_chinese_chars=options.get("tokenize_chinese_chars", True),
        )
        return Tokenizer.from_str(pieces.to_str())
    files = directory / "vocab.json", directory / "merges.txt"
    if read_settings(directory).get("model_type") != "gpt2" or not all(file.is_file() for file in files):
        return None
    pairs = ByteLevelBPETokenizer.from_file(*map(str, files))
    if pairs.token_to_id("<|endoftext|>") is not None:
        pairs.add_special_tokens(["<|endoftext|>"])
    return Tokenizer.from_str(pairs.to_str())
