"""Documents to learn a language from: Python's own manual, or files of the user's; read, never written."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

Documents = dict[str, str]


class Corpus(NamedTuple):
    """Documents, and the paths of files in directories that were skipped, as they are not text."""

    documents: Documents
    skipped: tuple[str, ...] = ()


def read_manual() -> Documents:
    """Read the topics of Python's language manual that come with Python for `help()`, sorted by name.

    A topic is left out when half of it stands line by line in larger ones, as `while` does in `compound`:
    held out, it would measure what has been learned by heart.

    Raises:
        ImportError: where Python was installed without `pydoc_data`, with the way out.

    Reference: "The Python Language Reference", https://docs.python.org/3/reference, Python's licence.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ImportError(
            "this Python came without pydoc_data, the default corpus; give your own text: --files FILE ..."
        ) from error
    return leave_out_excerpts(topics)


def read_documents(files: Sequence[str | Path], *, piece_bytes: int = 4096) -> Corpus:
    """Read files, and the visible files below directories that hold anything, one document per file, by path.

    Files below directories that are not UTF-8 text are skipped. A single file is cut into documents
    `PATH:1`, `PATH:2`, ... of at most `piece_bytes`, so that some can be held out. A document with the text
    of an earlier one is left out, as it could be trained on and held out at once.

    Raises:
        ValueError: for a path that is missing or comes twice, for a file given by name that is empty, binary
            or not UTF-8 (with the offset of the first byte that is not), and where nothing could be held out.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("one two"), (folder / "b.txt").write_text("three")
        >>> [pathlib.Path(name).name for name in read_documents([folder]).documents]
        ['a.txt', 'b.txt']
    """
    paths = [(path, path != Path(given)) for given in files for path in _list_files(Path(given))]
    seen: set[Path] = set()
    for path, _ in paths:
        if path.resolve() in seen:
            raise ValueError(f"files: {path} comes twice; give every file once")
        seen.add(path.resolve())
    documents: Documents = {}
    skipped: list[str] = []
    for path, is_found in sorted(paths):
        try:
            documents[str(path)] = _read_text(path)
        except _NotTextError:
            if not is_found:
                raise
            skipped.append(str(path))
    if len(documents) == 1:
        ((name, text),) = documents.items()
        pieces = _cut(text, piece_bytes)
        documents = {f"{name}:{number}": piece for number, piece in enumerate(pieces, start=1)}
    first = {text: name for name, text in reversed(documents.items())}
    documents = {name: text for name, text in documents.items() if first[text] == name}
    if len(documents) < 2:
        raise ValueError(
            "files: expected at least two different documents, one to train on and one to hold out, got "
            f"{', '.join(map(str, files))}{describe_skipped(skipped)}; give more files, or a smaller "
            "--document-bytes to cut one file"
        )
    return Corpus(documents, tuple(skipped))


def describe_skipped(paths: Sequence[str]) -> str:
    """Say, to end a sentence about a corpus, how many files were skipped, and name some.

    Example:
        >>> describe_skipped(["a.png", "b.png", "c.png", "d.png"])
        '; 4 files that are not text were skipped (a.png, b.png, c.png, ...)'
    """
    if not paths:
        return ""
    shown = ", ".join([*paths[:3], *(["..."] if len(paths) > 3 else [])])
    counted = (
        "1 file that is not text was" if len(paths) == 1 else f"{len(paths)} files that are not text were"
    )
    return f"; {counted} skipped ({shown})"


def split_documents(documents: Mapping[str, str], fraction: float, seed: int) -> tuple[Documents, Documents]:
    """Shuffle documents into training and held-out ones, which fit into a fraction of the bytes.

    Where no document fits, the smallest is held out; neither side is empty.

    Example:
        >>> split_documents({"a": "four", "b": "two", "c": "twelve bytes"}, 0.4, seed=0)
        ({'c': 'twelve bytes'}, {'a': 'four', 'b': 'two'})
    """
    names = np.random.default_rng(seed).permutation(np.array(list(documents), dtype=object)).tolist()
    sizes = {name: len(documents[name].encode()) for name in names}
    room = fraction * sum(sizes.values())
    held_out: Documents = {}
    for name in names:
        if sizes[name] <= room and len(held_out) < len(names) - 1:
            held_out[name] = documents[name]
            room -= sizes[name]
    if not held_out:
        smallest = min(names, key=lambda name: sizes[name])
        held_out[smallest] = documents[smallest]
    return {name: documents[name] for name in names if name not in held_out}, held_out


def leave_out_excerpts(documents: Mapping[str, str], most: float = 0.5) -> Documents:
    """Drop the documents that stand in larger ones by more than `most` of their characters; sort by name.

    Example:
        >>> leave_out_excerpts({"part": "one line\\n", "whole": "a line\\none line\\n", "other": "this\\n"})
        {'other': 'this\\n', 'whole': 'a line\\none line\\n'}
    """
    kept: Documents = {}
    seen: set[str] = set()
    for name, text in sorted(documents.items(), key=lambda item: (-len(item[1]), item[0])):
        lines = _list_lines(text)
        if _measure_part(lines, seen) <= most:
            kept[name] = text
            seen.update(lines)
    return dict(sorted(kept.items()))


def measure_overlap(training: Mapping[str, str], held_out: Mapping[str, str]) -> float:
    """Return the part of the held-out text, in characters of its lines, that stands in training text too."""
    known = {line for text in training.values() for line in _list_lines(text)}
    return _measure_part([line for text in held_out.values() for line in _list_lines(text)], known)


def _list_lines(text: str) -> list[str]:
    """Return the lines that are not blank, without the spaces around them."""
    return [line for line in map(str.strip, text.splitlines()) if line]


def _measure_part(lines: Sequence[str], known: Collection[str]) -> float:
    """Return the part of the lines that are known, by characters."""
    total = sum(map(len, lines))
    return sum(len(line) for line in lines if line in known) / total if total else 0.0


def _list_files(path: Path) -> list[Path]:
    """List the file itself, or the visible files below a directory that are not empty."""
    if path.is_dir():
        found = [
            entry
            for entry in path.rglob("*")
            if not any(part.startswith(".") for part in entry.relative_to(path).parts)
            and entry.is_file()
            and entry.stat().st_size
        ]
        if not found:
            raise ValueError(f"files: expected text in {path}, got a directory without a file that holds any")
        return found
    if not path.exists():
        raise ValueError(f"files: expected a file or a directory, got {path}, which does not exist")
    return [path]


class _NotTextError(ValueError):
    """A file that is binary, or text in another encoding than UTF-8."""


def _read_text(path: Path) -> str:
    """Read a file's text; raise with what is wrong with it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"files: {path} cannot be read: {error.strerror}") from error
    if not data:
        raise ValueError(f"files: {path} is empty; leave it out")
    if (offset := data.find(b"\0")) >= 0:
        raise _NotTextError(
            f"files: {path} is binary, not text: a zero byte at offset {offset}; leave it out"
        )
    try:
        return data.decode("utf-8", errors="strict")
    except UnicodeDecodeError as error:
        raise _NotTextError(
            f"files: {path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start} "
            f"({error.reason}); convert it to UTF-8, or leave it out"
        ) from error


def _cut(text: str, most: int) -> list[str]:
    """Cut a text into pieces of at most `most` bytes (or one character), at ends of lines where it can."""
    data, pieces, start = text.encode(), [], 0
    while start < len(data):
        piece = data[start : start + most].decode(errors="ignore")  # without a character cut in two
        piece = piece or data[start : start + 4].decode(errors="ignore")[0]
        size = len(piece.encode())
        if start + size < len(data):
            piece = piece[: piece.rfind("\n") + 1] or piece
        pieces.append(piece)
        start += len(piece.encode())
    return pieces
