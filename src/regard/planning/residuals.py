"""Residuals: the bytes that a block keeps for its backward pass, as JAX finds them; nothing is computed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
from flax import nnx

from regard import masks, parallel
from regard.models.decoder import Decoder
from regard.models.depth import recompute

_LONGEST = 4096  # beyond this what is kept grows with the tokens alone


@functools.lru_cache(256)
def count_residuals(
    config: Any,
    length: int,
    head_shards: int,
    precision: str,
    *,
    remat: Any,
    is_dense: bool,
    has_rows: bool,
    expert_shards: int = 1,
) -> float:
    """Return the bytes per token that one of a decoder's blocks keeps, beside its parameters.

    Args:
        config: the decoder's `TransformerConfig`.
        length: tokens of a sequence.
        head_shards: devices that divide the heads and the feed-forward width.
        precision: the dtype in which is computed.
        remat: what the backward pass computes again, as in the config.
        is_dense: True for a block with one feed-forward branch, False for one with experts.
        has_rows: True where a device has whole rows of scores, which short calls keep.
        expert_shards: devices that divide the experts, each with tokens of its own.
    """
    length = min(length, _LONGEST)
    own = _divide(config, head_shards, is_dense=is_dense)
    block = nnx.eval_shape(lambda: Decoder(own, rngs=nnx.Rngs(0))).trunk.stack.blocks[0]
    graph, params, rest = nnx.split(block, nnx.Param, ...)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, precision), params)
    x = jax.ShapeDtypeStruct((expert_shards, length, config.d_model), precision)
    mesh = jax.sharding.AbstractMesh((expert_shards, 1), ("expert", "sequence"))
    along = parallel.use(mesh, "sequence", batch_axis="expert", plan="whole", expert_axis="expert")

    def run(params: Any, x: Any, rest: Any) -> Any:
        return nnx.merge(graph, params, rest)(x, mask=masks.causal())

    def pull(params: Any, x: Any, rest: Any) -> Any:
        call = recompute(run, remat, prevent_cse=False)
        return jax.vjp(lambda params, x: call(params, x, rest), params, x)[1]

    divided = along if expert_shards > 1 else contextlib.nullcontext()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), divided:
        residuals = _count(jax.eval_shape(pull, params, x, rest)) - _count(params)
    sizes = (
        count * math.prod(shape) * dtype.itemsize
        for (shape, dtype), count in residuals.items()
        if has_rows or shape[-2:] != (length, length)
    )
    return sum(sizes) / (length * expert_shards)


def _count(tree: Any) -> collections.Counter[tuple[tuple[int, ...], Any]]:
    return collections.Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))


def _divide(config: Any, head_shards: int, *, is_dense: bool) -> Any:
    """Return the config of one block of a device that has its part of the heads and widths."""
    return dataclasses.replace(
        config,
        num_layers=1,
        num_heads=config.num_heads // head_shards,
        num_key_heads=max((config.num_key_heads or config.num_heads) // head_shards, 1),
        head_dim=config.head_width,
        d_ff=max(config.d_ff // head_shards, 1),
        expert_width=config.expert_width and max(config.expert_width // head_shards, 1),
        num_experts=None if is_dense else config.num_experts,
        experts_per_token=1 if is_dense else config.experts_per_token,
        dense_layers=(),
        windows=(None,),
    )
