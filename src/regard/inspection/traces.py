"""Trace: what a model attended to in one run, as a record to ask, draw, save and explore."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.inspection.calls import Call as Call
from regard.inspection.tokens import Tokens as Tokens


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
    """What was watched."""
    title: str = "attention"
    """For people to read."""
    model: str | None = None
    """Name of the model's type."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of regard and jax that made it."""
    notes: tuple[str, ...] = ()
    """What was left out, and why."""

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, index: int | str) -> Call:
        """A call by number, or the first one of this name."""
        if isinstance(index, int):
            return self.calls[index]
        for call in self.calls:
            if call.name == index:
                return call
        raise KeyError(
            f"expected one of {', '.join(dict.fromkeys(c.name for c in self.calls))}; got {index!r}"
        )

    def explore(self, path: Any, **settings: Any) -> Path:
        """Write a page that shows the trace, one HTML file that needs nothing else: see `pages.write`."""
        return _pages().write(self, path, **settings)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return _pages().bundle(self)

    def __repr__(self) -> str:
        calls, heads = len(self.calls), sum(call.heads for call in self.calls)
        sizes = sorted({size for call in self.calls for size in (call.rows, call.keys)})
        span = f", {sizes[0]}{f' to {sizes[-1]}' if len(sizes) > 1 else ''} positions" if sizes else ""
        counted = f"{calls} call{'s' if calls != 1 else ''}, {heads} head{'s' if heads != 1 else ''}"
        return f"Trace({self.title!r}: {counted}{span})"


def _pages() -> Any:
    # Pages are made of traces; these methods are shorthands for functions there.
    return importlib.import_module("regard.inspection.pages")
