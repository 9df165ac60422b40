"""Arguments of a call in tiles: operands, which it is differentiated by, context, and its results."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.flash.blocking import TileConfig
from regard.engine.flash.sparsity import TileLists
from regard.engine.flash.tiles import Offsets, TileView
from regard.engine.softmax.scoring import Scoring, scale_early
from regard.masks import Mask

PARAMETER = "parameter "


class Operands(NamedTuple):
    """The arrays that attention is differentiated by."""

    query: Array  # (*batch, H, T, D)
    key: Array  # (*batch, K, S, D)
    value: Array  # (*batch, K, S, E)
    scale: Array  # (*1, 1, 1)
    bias: Array | None = None  # (*batch, H, T, S)
    parameters: tuple[Array, ...] = ()  # of the score, (*added, ...)

    def named(self) -> dict[str, Array]:
        """Return the arrays that there are by name, parameters by number."""
        plain = {name: array for name, array in self._asdict().items() if name != "parameters"}
        parameters = {f"{PARAMETER}{number}": array for number, array in enumerate(self.parameters)}
        return {name: array for name, array in plain.items() if array is not None} | parameters

    @classmethod
    def from_named(cls, arrays: Mapping[str, Array]) -> Operands:
        """Invert `named`."""
        plain = {name: array for name, array in arrays.items() if not name.startswith(PARAMETER)}
        return cls(**plain, parameters=tuple(array for name, array in arrays.items() if name not in plain))

    def read_query(self, view: TileView) -> Array:
        """Read a tile of queries, to be multiplied; scaled unless `scale_late` does it."""
        query = view.rows(self.query).astype(view.config.matmul_dtype)
        return scale_early(query, view.cells(self.scale), view.config.low_precision)

    def read_keys(self, view: TileView) -> tuple[Array, Array]:
        """Read a tile of keys and one of values, to be multiplied."""
        dtype = view.config.matmul_dtype
        return view.columns(self.key).astype(dtype), view.columns(self.value).astype(dtype)

    def has_nonfinite(self, config: TileConfig, *arrays: Array | None) -> Array | None:
        """Tell whether any of these arrays holds NaN or inf; None where no pair can be removed."""
        if not config.masked and self.bias is None:
            return None
        # 0 times it is NaN, and a sum of that needs no array of the inputs' size. XLA's CPU loses NaN in the
        # extremes of large arrays.
        there = [jax.lax.stop_gradient(array) for array in arrays if array is not None]
        finite = [jnp.isfinite(jnp.sum(array * jnp.zeros((), array.dtype))) for array in there]
        return ~functools.reduce(jnp.logical_and, finite)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """All else that the tiles of a call need."""

    forward_mask: Mask | None
    backward_mask: Mask | None
    offsets: Offsets
    query_words: tuple[Array, Array] | None  # dropout's words, (*batch, H, T, 1)
    key_words: tuple[Array, Array] | None  # (*batch, H, 1, S)
    by_query: TileLists
    by_key: TileLists
    scoring: Scoring | None = None
    numbers: tuple[Array, Array] | None = None  # (B, *1, 1, 1) and (*1, H, 1, 1), which scores may read
    kernel: Context | None = None  # that of a kernel's own tiles


class Results(NamedTuple):
    """Results of the forward pass; the first three have tangents, for which the peak counts as constant."""

    output: Array  # (*batch, H, T, E)
    log_total: Array  # (*batch, H, T)
    entropy: Any = None  # None where nobody asks
    peak: Any = None
    argmax: Any = None
