"""What a call in tiles takes and gives: what it is differentiated by, what it is not, and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.flash.sparsity import TileLists
from regard.engine.flash.tiles import Layout, Offsets, TileView
from regard.engine.softmax.scoring import Scoring
from regard.masks import Mask

PARAMETER = "parameter "


class Inputs(NamedTuple):
    """What attention is differentiated by."""

    query: Array  # (*batch, H, T, D)
    key: Array  # (*batch, K, S, D)
    value: Array  # (*batch, K, S, E)
    scale: Array  # (*1, 1, 1)
    bias: Array | None = None  # (*batch, H, T, S)
    parameters: tuple[Array, ...] = ()  # of the score, (*added, ...)

    def named(self) -> dict[str, Array]:
        """The arrays there are, by name; parameters by number."""
        plain = {name: array for name, array in self._asdict().items() if name != "parameters"}
        parameters = {f"{PARAMETER}{number}": array for number, array in enumerate(self.parameters)}
        return {name: array for name, array in plain.items() if array is not None} | parameters

    @classmethod
    def from_named(cls, arrays: Mapping[str, Array]) -> Inputs:
        """The inverse of `named`."""
        plain = {name: array for name, array in arrays.items() if not name.startswith(PARAMETER)}
        return cls(**plain, parameters=tuple(array for name, array in arrays.items() if name not in plain))

    def read_query(self, view: TileView) -> Array:
        """A tile of queries, to be multiplied; scaled unless `scale_late` does it."""
        query = view.rows(self.query).astype(view.layout.matmul_dtype)
        return scale_early(query, view.cells(self.scale), view.layout)

    def read_keys(self, view: TileView) -> tuple[Array, Array]:
        """A tile of keys and one of values, to be multiplied."""
        key, value = (
            view.columns(array).astype(view.layout.matmul_dtype) for array in (self.key, self.value)
        )
        return key, value

    def has_nonfinite(self, layout: Layout) -> Array | None:
        """Whether some key or value is NaN or inf; None where every query attends to all of them anyway."""
        if not layout.masked and self.bias is None:
            return None
        # Extremes show it, and finding them needs no array of the inputs' size.
        arrays = [jax.lax.stop_gradient(array) for array in (self.key, self.value)]
        spans = [array.max() - array.min() for array in arrays]
        return ~(jnp.isfinite(spans[0]) & jnp.isfinite(spans[1]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What it is not differentiated by."""

    forward_mask: Mask | None
    backward_mask: Mask | None
    offsets: Offsets
    query_words: tuple[Array, Array] | None  # dropout's words, (*batch, H, T, 1)
    key_words: tuple[Array, Array] | None  # (*batch, H, 1, S)
    by_query: TileLists
    by_key: TileLists
    scoring: Scoring | None = None


class Results(NamedTuple):
    """What the forward pass found; the first three have tangents, for which the peak counts as constant."""

    output: Array  # (*batch, H, T, E)
    log_total: Array  # (*batch, H, T)
    entropy: Any = None  # None where nobody asks
    peak: Any = None
    argmax: Any = None


def scale_early(rows: Array, scale: Array, layout: Layout) -> Array:
    """Scale a factor, T x D numbers instead of T x S; not one that would lose digits by it."""
    return rows if layout.low_precision else rows * scale


def scale_late(scores: Array, scale: Array, layout: Layout) -> Array:
    """Scale a product whose factors could not be."""
    return scores * scale if layout.low_precision else scores
