"""Files of tokens in the user's cache: text is tokenised once, and read from there in any order.

They are read by position, not mapped into memory, where the pages of a long training would pile up.
"""

import functools
import hashlib
import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock
from jaxtyping import Int

from regard.paths import cache_folder
from regard.training import corpora, metrics
from regard.training.corpora import Documents
from regard.training.vocabularies import ByteVocabulary

FORMAT = 1
RECORD, SIDES = "record.json", ("training", "held_out")
ENCODED_AT_ONCE = 2**21  # characters, which BPE encodes on all cores


@dataclass(frozen=True)
class TokenFile:
    """Tokens on disk, in the smallest dtype that holds the vocabulary."""

    path: Path
    dtype: np.dtype
    count: int

    def __len__(self) -> int:
        return self.count

    def read(self, start: int = 0, stop: int | None = None) -> Int[np.ndarray, " N"]:
        """Read the tokens of a range, by default all; the file stays open, so that it may be deleted."""
        stop = self.count if stop is None else min(stop, self.count)
        self._file.seek(start * self.dtype.itemsize)
        data = self._file.read((stop - start) * self.dtype.itemsize)
        return np.frombuffer(data, self.dtype).astype(np.int32)

    @functools.cached_property
    def _file(self) -> BinaryIO:
        file = self.path.open("rb")  # buffered: a system reads 2 GiB at once at most, and a buffer goes on
        weakref.finalize(self, file.close)
        return file


@dataclass(frozen=True)
class Tokens:
    """The tokens of a corpus, and what is known of them."""

    training: TokenFile
    held_out: TokenFile
    facts: dict[str, Any]  # numbers of both sides, by which a changed corpus is known
    overlap: float  # the part of the held-out text that stands in training documents too
    skipped: list[str]  # files that are no text


def open_tokens(
    files: Sequence[str],
    split: Sequence[float],
    vocabulary: ByteVocabulary,
    find: Callable[[], tuple[Documents, Documents]],
    report: corpora.ProgressHook,
) -> Tokens:
    """Return the tokens of a corpus, from the cache where nothing has changed.

    `split` holds the settings by which documents are cut and divided, `find` returns both sides, and `report`
    is told how far writing the tokens is.
    """
    text, inputs = vocabulary.to_json(), _digest_inputs(files)
    tokenizer = None if text is None else _digest(text)
    paths = [str(Path(file).absolute()) for file in files]
    dtype = np.min_scalar_type(vocabulary.size - 1)

    def make(folder: Path) -> dict[str, Any]:
        sides = find()
        total = sum(documents.num_bytes for documents in sides)
        size = corpora.describe_size((total + sum(map(len, sides)) + 2) * dtype.itemsize)
        most = "" if text is None else "at most "
        what = f"{corpora.describe_size(total)} of text to {most}{size} of tokens in {folder.with_suffix('')}"
        add = corpora.count_up(report, what, total)
        pairs = zip(SIDES, sides, strict=True)
        written = [write_tokens(folder / name, vocabulary, documents, add) for name, documents in pairs]
        if _digest_inputs(files) != inputs:
            raise ValueError("files: they changed while they were read; leave them as they are")
        sizes = {"documents": list(map(len, sides)), "bytes": [documents.num_bytes for documents in sides]}
        counts, digests = map(list, zip(*written, strict=True))
        facts = {**sizes, "tokens": counts, "sha256": digests, "tokenizer": tokenizer}
        return {"facts": facts, "overlap": corpora.measure_overlap(*sides), "skipped": list(sides[0].skipped)}

    key = {"files": paths, "split": list(split), "tokenizer": tokenizer}
    folder, record = keep(key, inputs, make)
    counts = record["facts"]["tokens"]
    sides = [TokenFile(folder / name, dtype, count) for name, count in zip(SIDES, counts, strict=True)]
    return Tokens(sides[0], sides[1], **record)


def keep(
    key: Mapping[str, Any], inputs: str, make: Callable[[Path], dict[str, Any]]
) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the cache for a key, and its record, made anew where its inputs have changed.

    A folder is made under another name, by one process at a time, and appears whole or not at all. Key and
    record are JSON values; `make` writes files into an empty folder.
    """
    name = _digest(json.dumps([FORMAT, dict(key)]))[:20]
    folder = cache_folder() / "tokens" / name
    draft = folder.with_suffix(".draft")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            record = _read_record(folder, inputs)
            if record is None:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir()
                try:
                    record = make(draft)
                    sizes = {path.name: path.stat().st_size for path in draft.iterdir()}
                    body = json.dumps({"inputs": inputs, "sizes": sizes, "record": record})
                    metrics.replace_text(draft / RECORD, body)
                    shutil.rmtree(folder, ignore_errors=True)
                    draft.rename(folder)
                finally:
                    shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        problem = f"the tokens of the text cannot be kept in {folder.parent} ({error.strerror or error})"
        remedy = "make room there, or name another folder in XDG_CACHE_HOME"
        raise ValueError(f"{problem}; {remedy}") from error
    return folder, record


def write_tokens(
    path: Path, vocabulary: ByteVocabulary, documents: Documents, report: Callable[[int], None]
) -> tuple[int, str]:
    """Write documents as tokens, with marks around each; return the number and, of int32, the SHA-256.

    `report` is told, now and then, how many more bytes were encoded.
    """
    mark, dtype = np.array([vocabulary.mark], np.int32), np.min_scalar_type(vocabulary.size - 1)
    digest, count = hashlib.sha256(), 0

    with path.open("wb", buffering=2**20) as file:

        def put(tokens: np.ndarray) -> None:
            nonlocal count
            digest.update(tokens.tobytes())
            file.write(tokens.astype(dtype).tobytes())
            count += len(tokens)

        put(mark)
        for parts in _group(documents.read()):
            texts = [text for text, _ in parts]
            for (_, is_end), tokens in zip(parts, vocabulary.encode_all(texts), strict=True):
                put(tokens)
                if is_end:
                    put(mark)
            report(sum(len(text.encode()) for text in texts))
        file.flush()
        os.fsync(file.fileno())
    return count, digest.hexdigest()


def _group(parts: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Gather parts of documents that are encoded at once."""
    group, size = [], 0
    for part in parts:
        group.append(part)
        size += len(part[0])
        if size >= ENCODED_AT_ONCE:
            yield group
            group, size = [], 0
    yield group


def _digest_inputs(files: Sequence[str]) -> str:
    """Return a digest that changes with the files, by their names, sizes and times, or with the manual."""
    if not files:
        return _digest(json.dumps(corpora.read_manual()))
    listed = [(str(path), path.stat()) for path, _ in corpora.list_files(files)]
    return _digest(json.dumps([(name, stat.st_size, stat.st_mtime_ns) for name, stat in listed]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_record(folder: Path, inputs: str) -> dict[str, Any] | None:
    """Read the record of a folder; None where there is none, one of other inputs, or a file cut short."""
    try:
        stored = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != RECORD}
        whole = (stored["inputs"], stored["sizes"]) == (inputs, sizes)
        return stored["record"] if whole and _is_sound(**stored["record"]) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _is_sound(facts: Any, overlap: Any, skipped: Any) -> bool:
    """Tell whether a record holds what `open_tokens` writes there."""
    pairs = {"documents": int, "bytes": int, "tokens": int, "sha256": str}
    return (
        isinstance(facts, dict)
        and facts.keys() == {*pairs, "tokenizer"}
        and isinstance(facts["tokenizer"], str | None)
        and all(_is_list_of(facts[name], kind) and len(facts[name]) == 2 for name, kind in pairs.items())
        and type(overlap) in (int, float)
        and _is_list_of(skipped, str)
    )


def _is_list_of(entries: Any, kind: type) -> bool:
    return isinstance(entries, list) and all(type(entry) is kind for entry in entries)
