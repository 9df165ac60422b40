"""Backend `splash_tpu`: JAX's Pallas attention for TPUs, checked in interpret mode and on no TPU yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import regard.masks as masks
from regard.axes import Array
from regard.engine.backends.kernel_masks import (
    compute_by_tiles,
    four_axes,
    read_cap,
    read_kernel_mask,
    refuses_call,
    row_bounds,
    row_ids,
)
from regard.engine.backends.kernel_primitives import run_kernel
from regard.engine.call.problem import Problem
from regard.engine.platforms import find_platform, is_divided_by_compiler

_LANES = 128
_BLOCK = 512  # queries and keys of a tile, the size that JAX's own examples take
_NOBODY = np.int32(np.iinfo(np.int32).min)  # the segment of keys that nobody may attend to
_INTERPRET = False  # True in tests: the kernel then runs anywhere, slowly


def refuses(problem: Problem) -> str | None:
    """Return why the kernel, or what it was checked for, does not cover the call, or None."""
    if (platform := find_platform().name) != "tpu" and not _INTERPRET:
        return f"it needs a TPU, and this call is for a {platform}"
    if is_divided_by_compiler(problem.query, problem.key, problem.value) and not _INTERPRET:
        return "the compiler divides no kernel: use regard.parallel.use(mesh, ...), or jax.shard_map"
    return refuses_call(problem) or _refuses_options(problem) or _refuses_mask(problem)


def _refuses_options(problem: Problem) -> str | None:
    if problem.bias is not None:
        return "it takes no bias"
    if isinstance(cap := read_cap(problem), str):
        return cap
    if problem.dropout_rate:
        return "it has no dropout"
    if any(array.dtype != jnp.bfloat16 for array in (problem.query, problem.key, problem.value)):
        return "it takes bfloat16: how it multiplies float32 was not measured"
    if not problem.low_precision:
        return "it rounds weights to bfloat16, and precision asks for more"
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
    ids = (kernel_mask.query_ids, kernel_mask.key_ids)
    if any(array is not None and array.dtype != np.int32 for array in ids):
        return "it compares segments of 32 bits"
    bounds = row_bounds(kernel_mask, problem)
    return bounds if isinstance(bounds, str) else None


def run(problem: Problem) -> tuple[Array, dict[str, Array]]:
    """Compute the output by splash attention; derivatives beyond the first gradient are those of `tiled`."""
    kernel_mask, cap = read_kernel_mask(problem), read_cap(problem)
    assert not isinstance(kernel_mask, str)  # else it was refused
    assert not isinstance(cap, str)
    batch = problem.leading[:-1]
    arrays = [four_axes(array, batch) for array in (problem.query, problem.key, problem.value)]
    bounds = row_bounds(kernel_mask, problem)
    data: list[Any] = [] if bounds is None else [bounds]
    if kernel_mask.key_ids is not None:
        ids = (kernel_mask.query_ids, kernel_mask.key_ids)
        data += [row_ids(jnp.asarray(array, jnp.int32), batch) for array in ids]
    kernel = Splash(float(problem.scale), kernel_mask.before, kernel_mask.after, cap, _INTERPRET)
    return run_kernel(problem, kernel, arrays, data)


@dataclass(frozen=True)
class Splash:
    """One kind of call, with data: lengths (batch,), or ids of queries and of keys, or all three, or none."""

    scale: float
    before: int | None
    after: int | None
    cap: float | None
    interpret: bool
    widest: int = np.iinfo(np.int32).max

    def forward(self, lse: bool, query: Array, key: Array, value: Array, *data: Array) -> list[Array]:
        """Compute the output by the kernel; keys beyond a length are not read."""
        attention, arrays, ids = self._prepare(query, key, value, data)
        output, (log_sum,) = jax.vmap(attention)(*arrays, ids)
        rows = query.shape[2]
        output, log_sum = output[:, :, :rows, : value.shape[3]], log_sum[:, :, :rows]
        if ids is not None:
            # What it calls masked is a number, so that rows of nothing else have weights.
            some = log_sum > attention.kwargs["mask_value"] / 2
            output, log_sum = jnp.where(some[..., None], output, 0), jnp.where(some, log_sum, -jnp.inf)
        return [output, log_sum] if lse else [output]

    def backward(
        self, arrays: Sequence[Array], data: Sequence[Array], output: Array, lse: Array, cotangent: Array
    ) -> list[Array]:
        """Compute the gradients by the kernel."""
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

        query, key, value = arrays
        attention, tiles, ids = self._prepare(query, key, value, data)
        rows = tiles[0].shape[2]
        output = _pad(output, rows, _LANES)
        cotangent = _pad(cotangent, rows, _LANES)
        lse = jnp.pad(lse, ((0, 0), (0, 0), (0, rows - lse.shape[2])))

        def pull(
            query: Array, key: Array, value: Array, ids: Any, output: Array, lse: Array, cotangent: Array
        ) -> Any:
            infos = (attention.dq_mask_info, attention.dkv_mask_info)
            residuals: Any = (query, key, value, ids, None, output, lse, *infos)
            return kernel._splash_attention_bwd(**attention.kwargs, res=residuals, do=cotangent)[3:6]

        pairs = zip(jax.vmap(pull)(*tiles, ids, output, lse, cotangent), arrays, strict=True)
        grads = [grad[:, :, : array.shape[2], : array.shape[3]] for grad, array in pairs]
        # `_prepare` scaled the queries.
        return [(grads[0] * jnp.asarray(self.scale, jnp.float32)).astype(query.dtype), *grads[1:]]

    def _prepare(
        self, query: Array, key: Array, value: Array, data: Sequence[Array]
    ) -> tuple[Any, tuple[Array, Array, Array], Any]:
        """Return the kernel, and arrays and ids of whole tiles; no ids where no key is left out by them."""
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask

        batch, _, num_queries, _ = query.shape
        num_keys = key.shape[2]
        query_ids = jnp.zeros((batch, num_queries), jnp.int32)
        key_ids = jnp.zeros((batch, num_keys), jnp.int32)
        if len(data) > 1:
            # Any number may be an id, but one.
            query_ids = jnp.maximum(data[-2], _NOBODY + 1)
            key_ids = jnp.maximum(data[-1], _NOBODY + 1)
        if len(data) % 2:
            there = jnp.arange(num_keys) < data[0][:, None]
            key_ids = jnp.where(there, key_ids, _NOBODY)
            key = jnp.where(there[:, None, :, None], key, 0)
            value = jnp.where(there[:, None, :, None], value, 0)
        query = (query * jnp.asarray(self.scale, jnp.float32)).astype(query.dtype)
        # Lengths are padded to whole tiles, widths to whole lanes.
        rows, columns = _tile(num_queries), _tile(num_keys)
        query = _pad(query, rows, _LANES)
        key, value = _pad(key, columns, _LANES), _pad(value, columns, _LANES)
        ids = None
        if data or key.shape[2] != num_keys:
            query_ids = jnp.pad(query_ids, ((0, 0), (0, query.shape[2] - num_queries)))
            beyond = ((0, 0), (0, key.shape[2] - num_keys))
            ids = kernel.SegmentIds(query_ids, jnp.pad(key_ids, beyond, constant_values=_NOBODY))
        shape = (query.shape[2], key.shape[2])
        banded = self.before is not None or self.after is not None
        keep = mask.LocalMask(shape, (self.before, self.after), 0) if banded else mask.FullMask(shape)
        key_sizes = ("block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute", "block_kv_dq")
        sizes = dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq"), rows)
        sizes |= dict.fromkeys(key_sizes, columns)
        attention: Any = kernel.make_splash_mha(
            mask.MultiHeadMask([keep] * query.shape[1]),
            block_sizes=kernel.BlockSizes(**sizes),
            attn_logits_soft_cap=self.cap,
            save_residuals=True,
            head_shards=1,
            q_seq_shards=1,
            interpret=self.interpret,
        )
        return attention, (query, key, value), ids

    def reference(self, query: Array, key: Array, value: Array, *data: Array) -> list[Array]:
        """Compute the same by Regard's tiles."""
        keep: list[masks.Mask] = []
        if self.before is not None or self.after is not None:
            keep += [masks.sliding_window(self.before, self.after)]
        if len(data) > 1:
            keep += [masks.segments(*data[-2:])]
        if len(data) % 2:
            keep += [masks.lengths(*data[:1])]
        return compute_by_tiles((query, key, value), keep, self.scale, self.cap)


def _tile(length: int) -> int:
    return min(_BLOCK, -(-length // _LANES) * _LANES)


def _pad(array: Array, rows: int, lanes: int) -> Array:
    """Pad the rows and columns of (batch, heads, length, width) with zeros to whole tiles."""
    after = ((0, -size % whole) for size, whole in zip(array.shape[2:], (rows, lanes), strict=True))
    return jnp.pad(array, ((0, 0), (0, 0), *after))
