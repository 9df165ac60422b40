"""Owners of calls: names, numbers and positions of the layers of a model."""

import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from regard import positions
from regard.engine.call.hooks import called_by, one_run
from regard.inspection.traces.calls import KnownPositions

_MOST_ROWS = 2048  # of a table of sinusoids: more are for nobody to see


def is_module(model: Any, library: str) -> bool:
    """Return whether it is a module of "flax.linen" or "flax.nnx", without loading that."""
    loaded = sys.modules.get(library)
    return loaded is not None and isinstance(model, loaded.Module)


@contextmanager
def own_linen_calls() -> Iterator[None]:
    """Name the Linen module that makes each call in the block."""
    from flax import linen

    def intercept(call: Any, args: Any, options: Any, context: Any) -> Any:
        with one_run(), called_by(context.module):
            return call(*args, **options)

    with linen.intercept_methods(intercept):
        yield


def name_owners(model: Any) -> dict[int, str]:
    """Return the path of each module of an nnx model, by its id."""
    if not is_module(model, "flax.nnx"):
        return {}
    from flax import nnx

    modules = nnx.iter_modules(model)
    return {id(module): ".".join(map(str, path)) or type(module).__name__ for path, module in modules}


def name_itself(owner: Any) -> str | None:
    """Return the path that a linen module has while it runs."""
    linen = is_module(owner, "flax.linen")
    return (".".join(owner.path) or type(owner).__name__) if linen else None


_NUMBER = r"(?<!\d)\d{1,9}(?!\d)"  # more digits are a date, or a key


def number_layers(names: Sequence[str]) -> list[int]:
    """Enumerate the layers by name: the last number that tells it from others, else the order."""
    digits = {name: [int(number) for number in re.findall(_NUMBER, name)] for name in names}
    alike: dict[str, list[str]] = {}
    for name in digits:
        alike.setdefault(re.sub(_NUMBER, "#", name), []).append(name)
    numbers = {}
    for order, (name, own) in enumerate(digits.items()):
        columns = zip(*(digits[other] for other in alike[re.sub(_NUMBER, "#", name)]), strict=True)
        varying = [index for index, column in enumerate(columns) if len(set(column)) > 1]
        numbers[name] = own[varying[-1]] if varying else own[0] if own else order
    return [numbers[name] for name in names]


class Positions:
    """The positions of a model's layers, as far as they are known."""

    def __init__(self, model: Any):
        self._tables: list[tuple[str, KnownPositions]] = []
        if is_module(model, "flax.nnx"):
            from flax import nnx

            from regard.models.embedding import TokenEmbedding

            for path, module in nnx.iter_modules(model):
                if isinstance(module, TokenEmbedding):
                    self._tables.append((".".join(map(str, path[:-1])), _read_table(module)))

    def find(self, owner: Any, name: str, kind: str) -> KnownPositions | None:
        """Find those of the layer that owns a call of this name; None where nothing is known."""
        own = KnownPositions()
        if kind == "self" and self._tables:
            inside = [table for table in self._tables if name.startswith(f"{table[0]}." if table[0] else "")]
            own = max(inside, key=lambda table: len(table[0]), default=self._tables[0])[1]
        rotary = getattr(owner, "rotary", None)
        if isinstance(rotary, positions.Rotary):
            # A latent layer turns these features of a head alone.
            rotary = dataclasses.replace(rotary, width=rotary.width or getattr(owner, "rotary_dim", None))
            own = dataclasses.replace(own, rotary=rotary)
        return None if own.rotary is None and own.table is None else own


def _read_table(embedding: Any) -> KnownPositions:
    config = embedding.config
    if config.positions == "sinusoidal":
        rows = min(max(config.max_length, 1), _MOST_ROWS)
        table = np.asarray(positions.sinusoidal(rows, config.d_model), np.float32)
        return KnownPositions(table=table, table_kind="sinusoidal")
    if embedding.position_table is None:
        return KnownPositions()
    table = np.asarray(embedding.position_table.embedding[...], np.float32) * np.float32(embedding.scale)
    return KnownPositions(table=table, table_kind="learned", trained_length=len(table))
