"""Trace: the attention of a model in one run, to ask, draw, save and explore."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import jax

import regard
from regard.arguments import LARGEST, check_kind, read_number, whole_number
from regard.engine.call.options import ScoreOptions
from regard.inspection.tokens import Tokens as Tokens
from regard.inspection.traces.arrays import read_calls
from regard.inspection.traces.calls import Call as Call
from regard.inspection.traces.codec import Reader, Writer
from regard.inspection.traces.files import MOST_BYTES, read_archive, write_archive
from regard.inspection.traces.predictions import Predictions, check_predictions
from regard.inspection.traces.sequences import Sequences
from regard.inspection.traces.stored import Store, StoredTrace, restore_call
from regard.paths import read_path

if TYPE_CHECKING:
    from regard.inspection.explorer.page_document import PageOptions


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """The calls of `attend` that a model made, for one example, in the order of calling.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import attend, inspection, masks
        >>> x = jnp.eye(4)[None]
        >>> with inspection.capture(title="a sentence", tokens=["The", "cat", "sat", "."]) as trace:
        ...     _ = attend(x, x, x, mask=masks.causal())
        >>> trace
        Trace('a sentence': 1 call, 1 head, 4 positions)
    """

    calls: tuple[Call, ...] = ()
    """The calls, in order."""
    title: str = "attention"
    """For people to read."""
    model: str | None = None
    """Name of the model's type."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of regard and jax that made it."""
    notes: tuple[str, ...] = ()
    """Notes on what was left out, and why."""
    predictions: Predictions | None = None
    """Predictions behind each layer, of `predict_layers`."""

    @classmethod
    def from_arrays(
        cls,
        weights: Any = None,
        *,
        query: Any = None,
        key: Any = None,
        tokens: Any = None,
        key_tokens: Any = None,
        example: int = 0,
        title: str = "attention",
        **options: Unpack[ScoreOptions],
    ) -> Trace:
        """Make a trace of what a model of any library gives: weights, or queries and keys, of each layer.

        score_ts = log weights_ts, or as `attend` forms it of query and key

        Args:
            weights: one array `(B, H, T, S)` for each layer, of any library whose arrays NumPy reads
                (PyTorch's too, as `output_attentions=True` returns them): after softmax, before dropout.
                Without a mask, a key of weight 0 counts as one that the query may not attend to.
            query: instead, one array `(B, H, T, D)` for each layer, as it meets the keys, rotated and normed.
            key: with query, one array `(B, K, S, D)` for each layer; K divides H.
            tokens, example, title: as in `capture`; the mapping's names are "attention 0", "attention 1", ...
            key_tokens: of cross-attention: what sits at the keys, a second text; tokens are then those at the
                queries. None: queries and keys are of one text where T == S.
            **options: of `attend` that scores depend on; beside weights, mask, query_offset and key_offset
                alone. A list of masks has one for each layer. With T != S, a query_offset says that the
                queries are of the sequence of the keys; without, it is cross-attention.

        Returns:
            The trace. Windows hold the weights that were given; `readout().trust` tells how far sums miss 1.

        Raises:
            TypeError: arrays that are not floating-point; as `attend`.
            ValueError: another rank; weights below 0 or whose sum misses 1 by more than 1/64 (sums of 0 are
                those of queries that may attend to nothing), or that the mask forbids; both weights and
                query; tokens that fit no layer; an example that is not there; as `attend`.

        Example:
            >>> import numpy as np
            >>> from regard import inspection
            >>> weights = np.tril(np.ones((1, 2, 4, 4))) / np.arange(1.0, 5.0)[:, None]
            >>> trace = inspection.Trace.from_arrays([weights, weights], tokens=list("abcd"))
            >>> trace
            Trace('attention': 2 calls, 4 heads, 4 positions)
            >>> [f"{entropy:.3f}" for entropy in trace[1].readout().entropy[0]]
            ['0.000', '0.693', '1.099', '1.386']
            >>> across = np.array([[[[0.1, 0.9], [0.8, 0.2], [0.5, 0.5]]]])  # of three words over two
            >>> inspection.Trace.from_arrays([across], tokens=["das", "Haus", "."], key_tokens=["a", "house"])
            Trace('attention': 1 call, 1 head, 2 to 3 positions)
        """
        calls = read_calls(weights, query, key, whole_number("example", example, 0), options)
        if key_tokens is None:
            return cls(Sequences.read(tokens).lay(calls), title, versions=own_versions())
        calls = [replace(call, kind="cross") for call in calls]
        sequences = Sequences.across(tokens, key_tokens, calls)
        return cls(sequences.lay(calls), title, versions=own_versions())

    def __post_init__(self) -> None:
        check_kind("title", self.title, str)
        check_kind("calls", self.calls, tuple, hint="capture or Trace.from_arrays makes traces")

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, index: int | str) -> Call:
        """Return a call by number, or the first one of this name."""
        if not isinstance(index, str):
            number = whole_number("index", index, -LARGEST)
            if not -len(self.calls) <= number < len(self.calls):
                raise IndexError(f"index: expected one of the trace's {len(self.calls)} calls, got {index}")
            return self.calls[number]
        for call in self.calls:
            if call.name == index:
                return call
        names = dict.fromkeys(call.name for call in self.calls)
        raise KeyError(f"expected one of {', '.join(names)}; got {index!r}")

    def save(
        self, path: str | os.PathLike[str], *, keep: str = "statistics", grid: int = 64, top_k: int = 8
    ) -> Path:
        """Write the trace to a file, whole or not at all; it holds numbers and text, and no code.

        Args:
            path: of the file, usually `*.regard`; an older trace there is replaced, anything else refused.
            keep: "statistics" keeps what `Call.readout` counts; "qk" keeps the queries and keys instead, from
                which any window can be formed. They tell a lot about the text that they were made from.
            grid, top_k: of the statistics, as in `Call.readout`.

        Raises:
            FileExistsError: something else lies at the path.
            FileNotFoundError: its folder does not exist.
            ValueError: another word than those two for keep; "qk" of a trace that does not have them.

        Example:
            >>> import tempfile
            >>> import jax.numpy as jnp
            >>> from regard import attend, inspection
            >>> with inspection.capture() as trace:
            ...     _ = attend(jnp.eye(4), jnp.eye(4), jnp.eye(4))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = trace.save(f"{folder}/one.regard", keep="qk")
            ...     inspection.load(path).calls[0].window(rows=[0]).shape
            (1, 1, 4)
        """
        if keep not in ("statistics", "qk"):
            raise ValueError(f"keep: expected 'statistics' or 'qk', got {keep!r}")
        if keep == "qk" and self.calls and all(call.problem is None for call in self.calls):
            reason = "as the trace was loaded without queries and keys"
            raise ValueError(f"keep: expected 'statistics', {reason}; got 'qk'")
        store, writer = Store(keep == "qk", grid, top_k), Writer()
        calls = tuple(map(store.take, self.calls))
        about = self.title, self.model, dict(self.versions), tuple(dict.fromkeys((*self.notes, *store.notes)))
        stored = StoredTrace(*about, tuple(store.sequences), calls, self.predictions)
        return write_archive(path, writer.write("trace", stored), writer.arrays)

    def explore(
        self, path: str | os.PathLike[str], *, max_mb: float = 20, **options: Unpack[PageOptions]
    ) -> Path:
        """Write a page that shows the trace: one HTML file that needs no network and no other file.

        Args:
            path: of the file; an older page there is replaced, anything else refused.
            max_mb: how large the file may be, in millions of bytes.
            **options: as in `explorer.pages.write`, which also says what is refused.

        Example:
            >>> import tempfile
            >>> import jax.numpy as jnp
            >>> from regard import attend, inspection
            >>> with inspection.capture(tokens=["a", "b", "c", "d"]) as trace:
            ...     _ = attend(jnp.eye(4), jnp.eye(4), jnp.eye(4))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     trace.explore(f"{folder}/attention.html").name
            'attention.html'
        """
        from regard.inspection.explorer import pages

        check_kind("compare", options.get("compare"), Trace, type(None))
        check_kind("title", options.get("title"), str, type(None))
        path, max_mb = read_path("path", path), read_number("max_mb", max_mb)
        return pages.write(self, path, max_mb=max_mb, **options)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from regard.inspection.explorer import pages

        return pages.bundle(self)

    def __repr__(self) -> str:
        calls, heads = len(self.calls), sum(call.heads for call in self.calls)
        sizes = sorted({size for call in self.calls for size in (call.rows, call.keys)})
        span = f", {sizes[0]}{f' to {sizes[-1]}' if len(sizes) > 1 else ''} positions" if sizes else ""
        counted = f"{calls} call{'s' if calls != 1 else ''}, {heads} head{'s' if heads != 1 else ''}"
        return f"Trace({self.title!r}: {counted}{span})"


def own_versions() -> dict[str, str]:
    """Return the versions of regard and jax."""
    return {"regard": regard.__version__, "jax": jax.__version__}


def load(path: str | os.PathLike[str], *, max_bytes: int = MOST_BYTES) -> Trace:
    """Read a trace that `Trace.save` wrote. Nothing in the file is run, and nothing in it is taken on trust.

    Args:
        path: of the file.
        max_bytes: how large its arrays may be, all together.

    Returns:
        The trace. Calls that were saved with `keep="statistics"` have their `readout`, and no `window`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is cut short, damaged, of another kind or version, too large, or does not make sense.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from regard import attend, inspection
        >>> with inspection.capture(title="identity") as trace:
        ...     _ = attend(jnp.eye(4), jnp.eye(4), jnp.eye(4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     inspection.load(trace.save(f"{folder}/one.regard"))
        Trace('identity': 1 call, 1 head, 4 positions)
    """
    data, arrays = read_archive(path, max_bytes)
    try:
        stored = Reader(arrays).read("", data, StoredTrace)
        calls = [restore_call(f"calls[{n}]", call, stored.sequences) for n, call in enumerate(stored.calls)]
        check_predictions("predictions", stored.predictions, calls)
        about = stored.title, stored.model, stored.versions, stored.notes
        return Trace(tuple(calls), *about, stored.predictions)
    except ValueError as error:
        raise ValueError(f"path: expected a trace that Trace.save wrote at {path}: {error}") from None
