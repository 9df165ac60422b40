"""Residuals: the bytes that a block keeps for its backward pass, as JAX finds them; nothing is computed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from flax import nnx

from regard import masks, parallel
from regard.engine.flash.measurements import Tuning, using
from regard.models.decoder import Decoder
from regard.models.depth import recompute
from regard.planning.parameters import LayerKind

_LONGEST = 4096  # beyond this what is kept grows with the tokens alone
_TILES = Tuning(dense_scores=0, dense_side=0, dense_rows=0)  # whatever the size
_FEW = 4  # devices that divide experts; what more of them keep follows


@functools.lru_cache(256)
def count_residuals(
    config: Any,
    length: int,
    head_shards: int,
    precision: str,
    *,
    remat: Any,
    kind: LayerKind,
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
        kind: what the block consists of.
        has_rows: True where a device has whole rows of scores, which short calls keep.
        expert_shards: devices that divide the experts, each with tokens of its own.
    """
    if remat in ("full", "nothing_saveable"):
        return float(np.dtype(precision).itemsize * config.d_model)
    if expert_shards > _FEW and config.num_experts % _FEW == 0:
        # With each device, all get as many tokens more.
        count = functools.partial(
            count_residuals, config, length, head_shards, precision, remat=remat, kind=kind
        )
        half, few = [count(has_rows=has_rows, expert_shards=shards) for shards in (_FEW // 2, _FEW)]
        return few + (few - half) / (_FEW // 2) * (expert_shards - _FEW)
    length = length if has_rows else min(length, _LONGEST)
    tuning = Tuning(dense_scores=length**2 * config.num_heads) if has_rows else _TILES
    own = _divide(config, head_shards, kind)
    block = nnx.eval_shape(lambda: Decoder(own, rngs=nnx.Rngs(0))).trunk.stack.blocks[0]
    graph, params, rest = nnx.split(block, nnx.Param, ...)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, precision), params)
    x = jax.ShapeDtypeStruct((expert_shards, length, config.d_model), precision)
    mesh = jax.sharding.AbstractMesh((expert_shards, 1), ("expert", "sequence"))
    mask = {"mask": masks.causal()} if kind.mixer == "attention" else {}
    along = parallel.use(mesh, "sequence", batch_axis="expert", plan="whole", expert_axis="expert")

    def run(params: Any, x: Any, rest: Any) -> Any:
        return nnx.merge(graph, params, rest)(x, **mask)

    def pull(params: Any, x: Any, rest: Any) -> Any:
        call = recompute(run, remat, prevent_cse=False)
        return jax.vjp(lambda params, x: call(params, x, rest), params, x)[1]

    divided = along if expert_shards > 1 else contextlib.nullcontext()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), divided, using(tuning):
        residuals = _count(jax.eval_shape(pull, params, x, rest)) - _count(params)
    sizes = (count * math.prod(shape) * dtype.itemsize for (shape, dtype), count in residuals.items())
    return sum(sizes) / (length * expert_shards)


def _count(tree: Any) -> collections.Counter[tuple[tuple[int, ...], Any]]:
    return collections.Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))


def _divide(config: Any, head_shards: int, kind: LayerKind) -> Any:
    """Return the config of one block of a device that has its part of the heads and widths."""
    names = ("num_heads", "d_ff", "expert_width", "shared_width", "delta_heads", "delta_key_heads")
    whole = {name: getattr(config, name) for name in names}
    whole["delta_heads"] = config.delta_heads or config.num_heads
    if config.latent_dim is None:
        whole["num_key_heads"] = config.num_key_heads or config.num_heads
    experts = {"num_experts": None, "experts_per_token": 1} if kind.is_dense else {}
    return dataclasses.replace(
        config,
        num_layers=1,
        **{name: width and max(width // head_shards, 1) for name, width in whole.items()},
        head_dim=config.head_width,
        mixers=(kind.mixer,),
        **experts,
        dense_layers=(),
        windows=(None,),
    )
