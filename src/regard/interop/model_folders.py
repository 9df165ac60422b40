"""Folders of pretrained models: the tokenizer in them, and the modules of sentence-transformers."""

import json
from pathlib import Path
from typing import Any

from regard.interop.huggingface_configs import read_settings

# What may lie in a folder for its tokenizer, for this library or another.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt",
    "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


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


def find_transformer(directory: Path) -> Path:
    """Return the folder with config.json: in older folders of sentence-transformers, the first module's."""
    if (directory / "config.json").is_file():
        return directory
    return read_modules(directory).get("Transformer", directory)


def read_modules(directory: Path) -> dict[str, Path]:
    """Read from modules.json which modules a folder of sentence-transformers has, and where; else none."""
    path = directory / "modules.json"
    if not path.is_file():
        return {}
    try:
        folders = {
            module["type"].rpartition(".")[2]: directory / module["path"]
            for module in json.loads(path.read_text(encoding="utf-8"))
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected a list of modules, each with type and path; got {error!r}"
        ) from error
    for folder in folders.values():
        if not folder.resolve().is_relative_to(directory.resolve()):
            raise ValueError(f"{path}: expected folders in {directory}, got {folder}")
    return folders


def find_modules(directory: Path) -> dict[str, Path]:
    """Find the modules that a Transformer's folder belongs to: listed there or, in older ones, above."""
    for root in (directory, directory.parent):
        modules = read_modules(root)
        if "Transformer" in modules and modules["Transformer"].resolve() == directory.resolve():
            return modules
    return {}
