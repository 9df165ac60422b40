"""Backend `splash_tpu`: JAX's Pallas attention for TPUs, checked in interpret mode and on no TPU yet."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import regard.masks as masks
from regard.axes import Array
from regard.engine.backends import tiled
from regard.engine.backends.kernel_masks import four_axes, read_kernel_mask, row_bounds
from regard.engine.backends.kernel_primitives import call_kernel
from regard.engine.call.canonicalization import canonicalize
from regard.engine.call.problem import Problem
from regard.masks.grid import is_concrete

_LANES = 128
_BLOCK = 512  # queries and keys of a tile, the size that JAX's own examples take
_NOBODY = np.int32(np.iinfo(np.int32).min)  # the segment of keys that nobody may attend to
_INTERPRET = False  # True in tests: the kernel then runs anywhere, slowly


def refuses(problem: Problem) -> str | None:
    """Return why the kernel, or what it was checked for, does not cover the call, or None."""
    if jax.default_backend() != "tpu" and not _INTERPRET:
        return f"it needs a TPU, and JAX computes on {jax.default_backend()} here"
    return _refuses_options(problem) or _refuses_mask(problem)


def _refuses_options(problem: Problem) -> str | None:
    if problem.aux:
        return "it returns no statistics: aux asks for some"
    if any(part is not None for part in (problem.score, problem.bias, problem.sinks)):
        return "of scores, biases and sinks it takes none here"
    if problem.dropout_rate:
        return "it has no dropout"
    if not is_concrete(problem.scale):
        return "its scale is part of the program, and this one is traced"
    if any(array.dtype != jnp.bfloat16 for array in (problem.query, problem.key, problem.value)):
        return "it takes bfloat16: how it multiplies float32 was not measured"
    if not problem.low_precision:
        return "it rounds weights to bfloat16, and precision asks for more"
    if 0 in (*problem.leading, problem.T, problem.S):
        return "there is nothing to compute"
    if problem.leading and problem.leading[-1] != problem.query.shape[-3]:
        return "it takes no query that several heads share"
    return None


def _refuses_mask(problem: Problem) -> str | None:
    kernel_mask = read_kernel_mask(problem)
    if isinstance(kernel_mask, str):
        return kernel_mask
    if (kernel_mask.before or 0) < 0 or (kernel_mask.after or 0) < 0:
        return "rows without a key are not 0 there"
    if kernel_mask.empty:
        return None
    if problem.T > problem.S:
        return "with a mask it takes no more queries than keys"
    if kernel_mask.keys_below is not None and (
        kernel_mask.before is not None or kernel_mask.key_ids is not None
    ):
        return "it takes lengths, or a window or segments, not both"
    if kernel_mask.key_ids is not None:
        if kernel_mask.query_ids is not None or problem.T != problem.S:
            return "it takes segments of as many queries as keys: rows without a key are not 0 there"
        if np.ndim(kernel_mask.key_ids) > len(problem.leading):
            return "segments differ between heads"
    bounds = row_bounds(kernel_mask, problem)
    return bounds if isinstance(bounds, str) else None


def run(problem: Problem) -> tuple[Array, dict[str, Array]]:
    """Compute the output by splash attention; derivatives beyond the first gradient are those of `tiled`."""
    kernel_mask = read_kernel_mask(problem)
    assert not isinstance(kernel_mask, str)  # else it was refused
    batch = problem.leading[:-1]
    query, key, value = (four_axes(array, batch) for array in (problem.query, problem.key, problem.value))
    data: list[Any] = []
    bounds = row_bounds(kernel_mask, problem)
    if bounds is not None:
        data = [bounds]
    elif kernel_mask.key_ids is not None:
        ids = jnp.asarray(kernel_mask.key_ids, jnp.int32)
        ids = ids.reshape((*ids.shape[:-1], *(1,) * (len(batch) + 1 - ids.ndim), problem.S))
        data = [jnp.broadcast_to(ids, (*batch, problem.S)).reshape(-1, problem.S)]
    kernel = Splash(
        float(problem.scale),
        kernel_mask.before,
        kernel_mask.after,
        kernel_mask.key_ids is not None,
        _INTERPRET,
    )
    output = call_kernel(kernel, query, key, value, *data)
    return output.reshape((*problem.leading, problem.T, problem.E)), {}


@dataclass(frozen=True)
class Splash:
    """One kind of call: arrays (batch, heads, length, width), and lengths or segment ids per batch row."""

    scale: float
    before: int | None
    after: int | None
    segmented: bool  # data: ids (batch, length); else, if any, lengths (batch,)
    interpret: bool

    def call(self, query: Array, key: Array, value: Array, *data: Array) -> Array:
        """Compute the output by the kernel; 0 where there is no key; keys beyond a length are not read."""
        batch, _, num_queries, _ = query.shape
        num_keys, value_width = value.shape[2:]
        query_ids = jnp.zeros((batch, num_queries), jnp.int32)
        key_ids = jnp.zeros((batch, num_keys), jnp.int32)
        if self.segmented:
            # Any number may be an id, but one.
            query_ids = key_ids = jnp.maximum(data[0], _NOBODY + 1)
        elif data:
            there = jnp.arange(num_keys) < data[0][:, None]
            key_ids = jnp.where(there, key_ids, _NOBODY)
            key, value = (jnp.where(there[:, None, :, None], array, 0) for array in (key, value))
        query = (query * jnp.asarray(self.scale, jnp.float32)).astype(query.dtype)
        # Lengths are padded to whole tiles, widths to whole lanes.
        rows, columns = (_tile(length) for length in (num_queries, num_keys))
        query = _pad(query, rows, _LANES)
        key, value = (_pad(array, columns, _LANES) for array in (key, value))
        segmented = bool(data) or key.shape[2] != num_keys
        ids = (
            jnp.pad(query_ids, ((0, 0), (0, query.shape[2] - num_queries))),
            jnp.pad(key_ids, ((0, 0), (0, key.shape[2] - num_keys)), constant_values=_NOBODY),
        )
        output = self._attention(query, key, value, ids if segmented else None, rows, columns)
        output = output[:, :, :num_queries, :value_width]
        if data and not self.segmented:
            output = jnp.where(data[0][:, None, None, None] > 0, output, 0)
        return output

    def _attention(
        self,
        query: Array,
        key: Array,
        value: Array,
        ids: tuple[Array, Array] | None,
        rows: int,
        columns: int,
    ) -> Array:
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask

        shape = (query.shape[2], key.shape[2])
        banded = self.before is not None or self.after is not None
        keep = mask.LocalMask(shape, (self.before, self.after), 0) if banded else mask.FullMask(shape)
        sizes = kernel.BlockSizes(
            block_q=rows,
            block_q_dkv=rows,
            block_q_dq=rows,
            block_kv=columns,
            block_kv_compute=columns,
            block_kv_dkv=columns,
            block_kv_dkv_compute=columns,
            block_kv_dq=columns,
        )
        attention: Any = kernel.make_splash_mha(
            mask.MultiHeadMask([keep] * query.shape[1]),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            interpret=self.interpret,
        )
        if ids is None:
            return jax.vmap(attention)(query, key, value)
        return jax.vmap(attention)(query, key, value, kernel.SegmentIds(*ids))

    def reference(self, query: Array, key: Array, value: Array, *data: Array) -> Array:
        """Compute the same by Regard's tiles."""
        keep: list[masks.Mask] = []
        if self.before is not None or self.after is not None:
            keep += [masks.sliding_window(self.before, self.after)]
        if data:
            keep += [masks.segments(data[0]) if self.segmented else masks.lengths(data[0])]
        mask = functools.reduce(operator.and_, keep) if keep else None
        return tiled.run(canonicalize(query, key, value, mask=mask, scale=self.scale, query_offset=0))[0]


def _tile(length: int) -> int:
    return min(_BLOCK, -(-length // _LANES) * _LANES)


def _pad(array: Array, rows: int, lanes: int) -> Array:
    """Pad the rows and columns of (batch, heads, length, width) with zeros to whole tiles."""
    after = ((0, -size % whole) for size, whole in zip(array.shape[2:], (rows, lanes), strict=True))
    return jnp.pad(array, ((0, 0), (0, 0), *after))
