"""Whose calls they are: names, numbers and positions of the layers of a model."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from regard import positions
from regard.engine.call.hooks import called_by

_MOST_ROWS = 2048  # of a table of sinusoids: more are for nobody to see


def is_linen(model: Any) -> bool:
    """Whether it is a module of `flax.linen`, without loading that."""
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(model, linen.Module)


def is_nnx(model: Any) -> bool:
    """Whether it is a module of `flax.nnx`, without loading that."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


@contextmanager
def own_linen_calls() -> Iterator[None]:
    """Say of every call in the block which linen module makes it."""
    from flax import linen

    def intercept(call: Any, args: Any, options: Any, context: Any) -> Any:
        with called_by(context.module):
            return call(*args, **options)

    with linen.intercept_methods(intercept):
        yield


def name_owners(model: Any) -> dict[int, str]:
    """Where each module of an nnx model sits, by its id."""
    if not is_nnx(model):
        return {}
    from flax import nnx

    return {
        id(module): ".".join(map(str, path)) or type(module).__name__
        for path, module in nnx.iter_modules(model)
    }


def name_itself(owner: Any) -> str | None:
    """Where a linen module says that it sits, while it runs."""
    if not is_linen(owner):
        return None
    return ".".join(owner.path) or type(owner).__name__


def number_layers(names: Sequence[str]) -> list[int]:
    """Which layer each name means: the last number in it that tells it from others, else the order."""
    found = {name: [int(number) for number in re.findall(r"\d+", name)] for name in names}
    alike: dict[str, list[str]] = {}
    for name in found:
        alike.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    numbers = {}
    for order, (name, own) in enumerate(found.items()):
        columns = zip(*(found[other] for other in alike[re.sub(r"\d+", "#", name)]), strict=True)
        varying = [place for place, column in enumerate(columns) if len(set(column)) > 1]
        numbers[name] = own[varying[-1]] if varying else own[0] if own else order
    return [numbers[name] for name in names]


class Positions:
    """What is known of the positions of a model's layers."""

    def __init__(self, model: Any):
        self._tables: list[tuple[str, dict[str, Any]]] = []
        if is_nnx(model):
            from flax import nnx

            from regard.models.embedding import TokenEmbedding

            for path, module in nnx.iter_modules(model):
                if isinstance(module, TokenEmbedding):
                    self._tables.append((".".join(map(str, path[:-1])), _read_table(module)))

    def find(self, owner: Any, name: str, kind: str) -> Mapping[str, Any] | None:
        """Of the layer that owns a call of this name; None where there is nothing to say."""
        found: dict[str, Any] = {}
        rotary = getattr(owner, "rotary", None)
        if isinstance(rotary, positions.Rotary):
            found["rotary"] = rotary
        if kind == "self" and self._tables:
            inside = [place for place in self._tables if name.startswith(f"{place[0]}." if place[0] else "")]
            found |= max(inside, key=lambda place: len(place[0]), default=self._tables[0])[1]
        return found or None


def _read_table(embedding: Any) -> dict[str, Any]:
    config = embedding.config
    if config.positions == "sinusoidal":
        rows = min(max(config.max_length, 1), _MOST_ROWS)
        table = np.asarray(positions.sinusoidal(rows, config.d_model), np.float32)
        return {"table": table, "table_kind": "sinusoidal", "trained_length": None}
    if embedding.position_table is None:
        return {}
    table = np.asarray(embedding.position_table.embedding[...], np.float32) * np.float32(embedding.scale)
    return {"table": table, "table_kind": "learned", "trained_length": len(table)}
