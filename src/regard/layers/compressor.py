"""Blocks of tokens, each pooled into one entry by learned weights, for compressed attention."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from regard.arguments import LARGEST
from regard.axes import Array, ArrayLike, Float, Int, Size
from regard.layers.residual import build_norm
from regard.positions import Rotary


class Blocks(NamedTuple):
    """Blocks of `size` tokens: where they end in the sequence, and among the rows of what is pooled."""

    size: int
    ends: Array  # (*b, N), positions of last tokens; beyond all tokens where there is no block
    continues: Array  # (*b, N), True where another block of the document lies before
    rows: Array | None = None  # (*b, N) of last tokens; None: one block after the other from row 0

    @property
    def starts(self) -> Array:
        """Positions of first tokens."""
        return self.ends - (self.size - 1)

    @classmethod
    def lay(cls, length: Size, size: int) -> Blocks:
        """Lay blocks over a whole sequence, one after the other."""
        number = jnp.arange(length // size, dtype=jnp.int32)
        return cls(size, number * size + (size - 1), number > 0)

    @classmethod
    def divide(cls, documents: Int[Array, "*b T"], size: int) -> tuple[Blocks, Int[Array, "*b N"]]:
        """Lay blocks over documents, numbered from 0, from the first token of each; return whose they are."""
        length = documents.shape[-1]
        index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), documents.shape)
        before = [(0, 0)] * (documents.ndim - 1) + [(1, 0)]
        is_first = jnp.diff(jnp.pad(documents, before, constant_values=-1), axis=-1) != 0
        offset = index - jax.lax.cummax(jnp.where(is_first, index, 0), axis=documents.ndim - 1)
        ends = jnp.sort(jnp.where(offset % size == size - 1, index, length), axis=-1)
        ends = ends[..., : length // size]
        rows = jnp.minimum(ends, length - 1)
        continues = jnp.take_along_axis(offset, rows, -1) >= 2 * size - 1
        return cls(size, ends, continues, rows), jnp.take_along_axis(documents, rows, -1)

    @classmethod
    def finish(cls, before: Array, after: Array, most: int, reach: int, size: int) -> Blocks:
        """Lay blocks that end behind `before` tokens, within `after`; row 0 lies `reach` tokens before."""
        number = jnp.arange(-(-most // size), dtype=jnp.int32)
        ends = ((before // size)[:, None] + number[None]) * size + (size - 1)
        rows = ends - before[:, None] + reach
        return cls(size, jnp.where(ends < after[:, None], ends, LARGEST), ends >= 2 * size - 1, rows)

    def cut(self, features: Float[Array, "*B R C"], back: int = 0) -> Float[Array, "*B N size C"]:
        """Return the tokens of each block, or of that which lies `back` blocks before."""
        *leading, length, width = features.shape
        if self.rows is None:
            count = length // self.size
            blocks = features[..., : count * self.size, :].reshape((*leading, count, self.size, width))
            before = [(0, 0)] * len(leading) + [(back, 0), (0, 0), (0, 0)]
            return jnp.pad(blocks, before)[..., :count, :, :]
        offsets = jnp.arange(self.size, dtype=jnp.int32) - (self.size * (back + 1) - 1)
        rows = self.rows[..., None] + offsets.reshape((*(1,) * self.rows.ndim, self.size))
        count = rows.shape[-2]
        rows = jnp.clip(rows, 0, length - 1).reshape((*rows.shape[:-2], count * self.size))
        return jnp.take_along_axis(features, rows[..., None], axis=-2).reshape(
            (*leading, count, self.size, width)
        )


class Compressor(nnx.Module):
    """Pool the tokens of a block into one entry, each number with weights of its own.

    entry = turn(norm(sum_j softmax_j(gate_j + bias_j) feature_j)),  feature = x Wf,  gate = x Wg

    Where blocks overlap, j runs over the tokens of the block before, too, which have other columns of Wf, Wg
    and biases for it. Sums are float32 at least. An entry sits where its block's first token does.

    Reference: DeepSeek-AI, "DeepSeek-V4", 2026, section 2.3.
    """

    def __init__(
        self,
        d_model: int,
        width: int,
        *,
        size: int,
        overlaps: bool,
        rotary: Rotary | None,
        rotary_dim: int,
        norm_epsilon: float,
        kernel_init: Any,
        precision: Any,
        **shared: Any,
    ):
        self.width, self.overlaps, self.rotary, self.rotary_dim = width, overlaps, rotary, rotary_dim
        self.columns = 2 * width if overlaps else width
        linear = functools.partial(nnx.Linear, use_bias=False, kernel_init=kernel_init, precision=precision)
        self.feature_projection = linear(d_model, self.columns, **shared)
        self.gate_projection = linear(d_model, self.columns, **shared)
        self.gate_bias = nnx.Param(jnp.zeros((size, self.columns), shared["param_dtype"]))
        self.norm = build_norm(width, kind="rms", epsilon=norm_epsilon, **shared)

    def project(self, x: Array) -> Array:
        """Return features and gates of tokens side by side, all that is needed of them."""
        return jnp.concatenate([self.feature_projection(x), self.gate_projection(x)], axis=-1)

    def pool(self, projected: Array, blocks: Blocks) -> Float[Array, "*B N D"]:
        """Return an entry for each block."""
        wide = np.promote_types(projected.dtype, jnp.float32)
        own, own_gates = self._split(blocks.cut(projected), slice(-self.width, None), wide)
        if self.overlaps:
            before, gates = self._split(blocks.cut(projected, back=1), slice(self.width), wide)
            continues = blocks.continues[..., None, None]
            before = jnp.where(continues, before, 0)  # NaN of another document has weight 0 as well
            gates = jnp.where(continues, gates, -jnp.inf)
            own = jnp.concatenate([before, own], axis=-2)
            own_gates = jnp.concatenate([gates, own_gates], axis=-2)
        entry = jnp.sum(jax.nn.softmax(own_gates, axis=-2) * own, axis=-2)
        return turn_tail(
            self.norm(entry.astype(projected.dtype)), blocks.starts, self.rotary, self.rotary_dim
        )

    def _split(self, projected: Array, columns: slice, wide: Any) -> tuple[Array, Array]:
        """Return these columns of the features, and of the gates with their biases."""
        features, gates = jnp.split(projected.astype(wide), 2, axis=-1)
        bias = self.gate_bias[...].astype(wide)
        bias = jax.lax.slice_in_dim(bias, *columns.indices(bias.shape[1])[:2], axis=1)
        return features[..., columns], gates[..., columns] + jnp.expand_dims(bias, range(gates.ndim - 2))


def turn_tail(features: Array, index: ArrayLike, rotary: Rotary | None, width: int) -> Array:
    """Turn the last features of queries or keys by their positions, where there is a rule."""
    if rotary is None:
        return features
    plain, turned = jnp.split(features, [features.shape[-1] - width], axis=-1)
    return jnp.concatenate([plain, rotary(turned, index)], axis=-1)
