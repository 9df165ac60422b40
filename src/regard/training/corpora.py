"""Documents to learn a language from: Python's own manual, or files of the user's; read, never written.

Files may be larger than memory: documents are places in them, which are read when their text is wanted.
"""

import codecs
import hashlib
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import Int

ProgressHook = Callable[[str, int, int], None]  # is told what is done, how much of it is, and of how much
PART_BYTES = 2**18
# Before the white space after a line, or after a word: no line is cut in two, and no word of BPE.
LINE_END, WORD_END = re.compile(r"(?s).*\S(?=\r?\n)"), re.compile(r"(?s).*\S(?=[ \t\n])")
HIDDEN = re.compile(r"(^|/)\.")


@dataclass(frozen=True)
class Documents:
    """Documents, in the order in which they are read, in files or in texts that are in memory."""

    sources: tuple[Path | bytes, ...]
    places: Int[np.ndarray, "D 3"]  # the source of each document, its first byte there and its end
    skipped: tuple[str, ...] = ()  # files in directories that were left out, as they are not text

    @classmethod
    def of_texts(cls, texts: Collection[str]) -> Self:
        sources = tuple(map(str.encode, texts))
        return cls(sources, _list_whole(map(len, sources)))

    def __len__(self) -> int:
        return len(self.places)

    @property
    def sizes(self) -> Int[np.ndarray, " D"]:
        return self.places[:, 2] - self.places[:, 1]

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())

    def read(self) -> Iterator[tuple[str, bool]]:
        """Yield the texts, long ones in parts that go together, with True where a document ends.

        Parts have at most about 256 KiB, and end with a line, or else a word, where there is one in so much.
        """
        for index, places in itertools.groupby(map(np.ndarray.tolist, self.places), operator.itemgetter(0)):
            source = self.sources[index]
            if isinstance(source, bytes):
                yield from ((source[start:stop].decode(), True) for _, start, stop in places)
                continue
            with source.open("rb") as file:
                for _, start, stop in places:
                    file.seek(start)
                    rest = b""
                    while True:
                        data = rest + file.read(min(PART_BYTES, stop - file.tell()))
                        if file.tell() == stop:
                            yield data.decode(), True
                            break
                        if len(data) - len(rest) < PART_BYTES:
                            raise ValueError(f"files: {source} changed while it was read; leave it as it is")
                        text = data.decode(errors="ignore")  # without a character cut in two
                        end = LINE_END.match(text) or WORD_END.match(text)
                        text = text if end is None else end[0]
                        rest = data[len(text.encode()) :]
                        yield text, False

    def texts(self) -> Iterator[str]:
        """Yield the parts of `read` without their ends."""
        return (text for text, _ in self.read())

    def _take(self, chosen: np.ndarray) -> Self:
        return replace(self, places=self.places[chosen])


def read_manual() -> dict[str, str]:
    """Read the topics of Python's language manual that come with Python for `help()`, sorted by name.

    A topic is left out when half of it stands line by line in larger ones, as `while` does in `compound`:
    held out, it would measure what has been learned by heart.

    Reference: "The Python Language Reference", https://docs.python.org/3/reference, Python's licence.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        remedy = "give your own text as files="
        raise ImportError(f"this Python came without pydoc_data, the default corpus; {remedy}") from error
    return leave_out_excerpts(topics)


def list_files(files: Sequence[str | Path]) -> list[tuple[Path, bool]]:
    """List files, and the visible ones below directories that hold anything, sorted; True for the latter."""
    from regard.arguments import check_kind  # with JAX, which settings do without
    from regard.paths import read_path

    check_kind("files", files, list, tuple)
    if not all(map(str, files)):
        raise ValueError("files: expected files and directories, got an empty name; . is this directory")
    roots = [read_path("files", root) for root in files]
    paths = sorted((path, path != root) for root in roots for path in _list_below(root))
    seen: set[Path] = set()
    for path, _ in paths:
        if path.resolve() in seen:
            raise ValueError(f"files: {path} comes twice; give every file once")
        seen.add(path.resolve())
    return paths


def read_documents(
    files: Sequence[str | Path],
    *,
    piece_bytes: int = 4096,
    report: ProgressHook = lambda what, done, total: None,
) -> Documents:
    """Find the documents in files, and below directories: one per file, by path.

    Files below directories that are not UTF-8 text are skipped. A single file is cut into documents of at
    most `piece_bytes`, so that some can be held out. A document with the text of an earlier one is left out,
    as it could be trained on and held out at once.
    """
    paths = list_files(files)
    total = sum(path.stat().st_size for path, _ in paths)
    add = count_up(report, f"looking for documents in {describe_size(total)} of files", total)
    sources: list[Path] = []
    digests = bytearray()
    skipped: list[str] = []
    for path, is_found in paths:
        try:
            digests += _digest_text(path, add)
            sources.append(path)
        except _NotTextError:
            if not is_found:
                raise
            skipped.append(str(path))
    places = _list_whole(path.stat().st_size for path in sources)
    if len(sources) == 1:
        digests.clear()
        places = _list_places(_cut(sources[0], piece_bytes, digests))
    first = np.unique(np.frombuffer(digests, "V16"), return_index=True)[1]
    if len(first) < 2:
        raise ValueError(
            "files: expected at least two different documents, one to train on and one to hold out, got "
            f"{', '.join(map(str, files))}{describe_skipped(skipped)}; give more files, or a smaller "
            "document_bytes to cut one file"
        )
    return Documents(tuple(sources), places[np.sort(first)], tuple(skipped))


def count_up(report: ProgressHook, what: str, total: int) -> Callable[[int], None]:
    """Return a function that is told how much more is done, and reports how much that is in all."""
    done = 0

    def add(more: int) -> None:
        nonlocal done
        done += more
        report(what, done, total)

    add(0)
    return add


def describe_size(size: int) -> str:
    """Describe a number of bytes.

    Example:
        >>> describe_size(1_234_567), describe_size(2_000_000_000)
        ('1.2 MB', '2.0 GB')
    """
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"


def describe_skipped(paths: Sequence[str]) -> str:
    """Say, to end a sentence about a corpus, how many files were skipped, and name some.

    Example:
        >>> describe_skipped(["a.png", "b.png", "c.png", "d.png"])
        '; 4 files that are not text were skipped (a.png, b.png, c.png, ...)'
    """
    if not paths:
        return ""
    shown = ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")
    counted = f"{len(paths)} files that are not text were" if paths[1:] else "1 file that is not text was"
    return f"; {counted} skipped ({shown})"


def split_documents(
    documents: Documents, fraction: float, seed: int, most: int
) -> tuple[Documents, Documents]:
    """Shuffle documents into training and held-out ones, which fit into a fraction of the bytes, and `most`.

    Where no document fits, the smallest is held out, and of one with more than `most` bytes, its end;
    neither side is empty.
    """
    order = np.random.default_rng(seed).permutation(len(documents))
    sizes = documents.sizes[order]
    room, spare = min(fraction * documents.num_bytes, most), len(order) - 1
    is_held = np.zeros(len(order), bool)
    for index, size in enumerate(sizes.tolist()):
        if size <= room and spare:
            is_held[index] = True
            room, spare = room - size, spare - 1
    if is_held.any():
        return documents._take(order[~is_held]), documents._take(order[is_held])
    smallest = int(sizes.argmin())
    held_out = documents._take(order[[smallest]])
    source, start, stop = held_out.places[0].tolist()
    cut = start if stop - start <= most else _find_start(documents.sources[source], stop - most, stop)
    if cut == start:
        return documents._take(np.delete(order, smallest)), held_out
    training = documents._take(order)
    training.places[smallest, 2] = held_out.places[0, 1] = cut
    return training, held_out


def leave_out_excerpts(documents: Mapping[str, str]) -> dict[str, str]:
    """Drop the documents that stand in larger ones by more than half of their characters; sort by name.

    Example:
        >>> leave_out_excerpts({"part": "one line\\n", "whole": "a line\\none line\\n", "other": "this\\n"})
        {'other': 'this\\n', 'whole': 'a line\\none line\\n'}
    """
    originals: dict[str, str] = {}
    seen: set[str] = set()
    for name, text in sorted(documents.items(), key=lambda item: (-len(item[1]), item[0])):
        lines = _list_lines(text)
        if _measure_part(lines, seen) <= 0.5:
            originals[name] = text
            seen.update(lines)
    return dict(sorted(originals.items()))


def measure_overlap(training: Documents, held_out: Documents) -> float:
    """Return the part of the held-out text, in characters of its lines, that stands in training text too."""
    wanted = [line for text in held_out.texts() for line in _list_lines(text)]
    unseen = set(wanted)
    for text in training.texts():
        unseen.difference_update(_list_lines(text))
    return _measure_part(wanted, set(wanted) - unseen)


def _list_lines(text: str) -> list[str]:
    """Return the lines that are not blank, without the spaces around them."""
    return [line for line in map(str.strip, text.splitlines()) if line]


def _measure_part(lines: Sequence[str], seen: Collection[str]) -> float:
    """Return the part of the lines that were seen, by characters."""
    total = sum(map(len, lines))
    return sum(len(line) for line in lines if line in seen) / total if total else 0.0


def _list_below(path: Path) -> list[Path]:
    """List the file itself, or the visible files below a directory that are not empty."""
    if not path.exists():
        raise ValueError(f"files: expected a file or a directory, got {path}, which does not exist")
    if not path.is_dir():
        return [path]
    visible = (entry for entry in path.rglob("*") if not HIDDEN.search(entry.relative_to(path).as_posix()))
    files = [entry for entry in visible if entry.is_file() and entry.stat().st_size]
    if not files:
        raise ValueError(f"files: expected text in {path}, got a directory without a file that holds any")
    return files


def _list_places(places: Iterable[tuple[int, int, int]]) -> Int[np.ndarray, "D 3"]:
    return np.fromiter(itertools.chain.from_iterable(places), np.int64).reshape(-1, 3)


def _list_whole(sizes: Iterable[int]) -> Int[np.ndarray, "D 3"]:
    """Return the places of documents that are a source each."""
    return _list_places((index, 0, size) for index, size in enumerate(sizes))


class _NotTextError(ValueError):
    """A file that is binary, or text in another encoding than UTF-8."""


def _digest_text(path: Path, report: Callable[[int], None]) -> bytes:
    """Return the digest of a file, and report how far it was read; raise with what is wrong with it."""
    digest, decoder = hashlib.blake2b(digest_size=16), codecs.getincrementaldecoder("utf-8")()
    start, data = 0, b"."
    try:
        with path.open("rb") as file:
            while data:
                waiting, data = len(decoder.getstate()[0]), file.read(PART_BYTES)
                digest.update(data)
                if (offset := data.find(b"\0")) >= 0:
                    what = f"a zero byte at offset {start + offset}"
                    raise _NotTextError(f"files: {path} is binary, not text: {what}; leave it out")
                try:
                    decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    offset = start - waiting + error.start
                    what = f"byte 0x{error.object[error.start]:02x} at offset {offset} ({error.reason})"
                    remedy = "convert it to UTF-8, or leave it out"
                    raise _NotTextError(f"files: {path} is not UTF-8: {what}; {remedy}") from error
                start += len(data)
                report(len(data))
    except OSError as error:
        raise ValueError(f"files: {path} cannot be read: {error.strerror}") from error
    if not start:
        raise ValueError(f"files: {path} is empty; leave it out")
    return digest.digest()


def _cut(path: Path, most: int, digests: bytearray) -> Iterator[tuple[int, int, int]]:
    """Cut a file, at ends of lines if it can, into pieces of `most` bytes at most; add their digests."""
    start = 0
    with path.open("rb", buffering=PART_BYTES) as file:
        while data := file.read(max(most, 4) + 1):
            size = min(most, len(data))
            while size < len(data) and _is_inside(data[size]):  # back to the beginning of a character
                size -= 1
            if not size:  # one character
                size = next((end for end in range(1, len(data)) if not _is_inside(data[end])), len(data))
            if size < len(data):
                size = data.rfind(b"\n", 0, size) + 1 or size
            digests += hashlib.blake2b(data[:size], digest_size=16).digest()
            yield 0, start, start + size
            start += size
            file.seek(start)


def _find_start(source: Path | bytes, start: int, stop: int) -> int:
    """Return the first beginning of a line from `start` on, else of a character, else of that around it."""
    if isinstance(source, bytes):
        data = source[start:stop]
    else:
        with source.open("rb") as file:
            file.seek(start)
            data = file.read(min(PART_BYTES, stop - start))
    line = data.find(b"\n") + 1
    if 0 < line < stop - start:
        return start + line
    first = next((end for end, byte in enumerate(data) if not _is_inside(byte)), None)
    return _find_start(source, start - 1, stop) if first is None else start + first


def _is_inside(byte: int) -> bool:
    """Return True for a byte within a character of UTF-8 that is not its first."""
    return byte & 0xC0 == 0x80
