"""Attention for Hopper GPUs in Pallas Mosaic: forward, gradient of queries, gradient of keys and values.

A block is 128 rows of one head, or keys of a group, against the tiles of its list, which hold work; those
that the mask keeps as a whole come first, and are computed without it. Nothing is added up in an order that
depends on time.

Reference: Shah et al., "FlashAttention-3", 2024, algorithms 1 and 2.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from regard.axes import Array
from regard.engine.hopper.kernel_blocks import KernelBlock, Ref, fill, gpu, multiply, spread, visit
from regard.engine.hopper.pair_programs import ROWS


def attend(block: KernelBlock) -> None:
    query, key, value = block.arrays
    head, heads = block.head, block.heads
    full, count, start_of = block.list_tiles(heads)

    def compute() -> None:
        (rows,) = block.load_rows(query.at[*block.at(query, head, heads)])

        def step(turn: Any, carry: Any, masked: bool) -> Any:
            weighted, total, peak = carry
            (keys, values), ready, free = block.ring_at(turn)
            gpu.barrier_wait(ready[0])
            products = multiply(rows, keys.T, meanwhile=block.pass_turn)
            gpu.barrier_arrive(free[0])
            start = pl.multiple_of(start_of(turn), block.tile)
            scores = block.finish(products, start, head, masked).scores
            new_peak = jnp.maximum(peak, scores.max(axis=1))
            base = jnp.where(new_peak > -jnp.inf, new_peak, 0.0)
            # The difference first: it is exactly 0 at the peak.
            shrink = jnp.exp2((peak - base) * block.unit)
            weights = jnp.exp2((scores - spread(base, scores)) * block.unit)
            total = total * shrink + weights.sum(axis=1)
            weighted, total, peak, factor = block.settle(
                weighted * spread(shrink, weighted), total, new_peak, block.factor(weights)
            )
            block.pass_turn(meanwhile=ready[1])
            weighted = block.add_product(weighted, factor, values)
            gpu.barrier_arrive(free[1])
            return weighted, total, peak

        empty = fill((ROWS, value.shape[3]), 0), fill((ROWS,), 0), fill((ROWS,), -np.inf)
        # One warpgroup multiplies while the other exponentiates.
        pl.when(block.warpgroup == 1)(block.pass_turn)
        weighted, total, peak = visit(full, count, step, empty)
        pl.when(block.warpgroup == 0)(block.pass_turn)
        total = jnp.where(total == 0.0, 1.0, total)
        block.put(weighted * spread(1.0 / total, weighted), jnp.log(total), block.in_logits(peak))

    block.divide_work(compute, lambda: block.stream_keys(count, start_of, key, value))


def differentiate_queries(block: KernelBlock) -> None:
    query, key, value, cotangent, *vectors = block.arrays
    head, heads = block.head, block.heads
    full, count, start_of = block.list_tiles(heads)

    def compute() -> None:
        rows, output_cotangent = block.load_rows(
            *(ref.at[*block.at(ref, head, heads)] for ref in (query, cotangent))
        )
        row_vectors = [block.vector(ref, block.first, ROWS, 0, head) for ref in vectors]
        base, log2_total, delta = row_vectors

        def gather(sums: Ref) -> Array:
            def step(turn: Any, none: Any, masked: bool) -> Any:
                (keys, values), ready, free = block.ring_at(turn)
                gpu.barrier_wait(ready[0])
                products = multiply(rows, keys.T)
                start = pl.multiple_of(start_of(turn), block.tile)
                scores, score_vjp = block.finish(products, start, head, masked)
                weights = block.weigh(scores, base, log2_total)
                gpu.barrier_wait(ready[1])
                weight_cotangent = multiply(output_cotangent, values.T)
                gpu.barrier_arrive(free[1])
                row_cotangent = spread(delta, weight_cotangent)
                product_cotangent = score_vjp(weights * (weight_cotangent - row_cotangent))
                gpu.wgmma(sums, block.factor(product_cotangent), keys)
                gpu.wgmma_wait(0)
                gpu.barrier_arrive(free[0])
                return none

            visit(full, count, step, 0)
            return sums[...]

        block.put(pl.run_scoped(gather, gpu.ACC((ROWS, query.shape[3]), jnp.float32)) * block.scale)

    block.divide_work(compute, lambda: block.stream_keys(count, start_of, key, value))


def differentiate_keys(block: KernelBlock) -> None:
    query, key, value, cotangent, *vectors = block.arrays
    heads, key_heads = block.heads, block.key_heads
    group = np.int32(heads // key_heads)
    full, count, start_of = block.list_tiles(key_heads)

    def compute() -> None:
        keys, values = block.load_rows(
            *(ref.at[*block.at(ref, block.head, key_heads)] for ref in (key, value))
        )

        def gather(key_sums: Ref, value_sums: Ref) -> tuple[Array, Array]:
            def add_head(member: Any, none: Any) -> Any:
                head = block.head * group + member

                def step(number: Any, none: Any, masked: bool) -> Any:
                    (rows, output_cotangent), ready, free = block.ring_at(member * count + number)
                    start = pl.multiple_of(start_of(number), block.tile)
                    row_vectors = [block.vector(ref, start, ROWS, 1, head) for ref in vectors]
                    base, log2_total, delta = row_vectors
                    gpu.barrier_wait(ready[0])
                    products = multiply(keys, rows.T)
                    scores, score_vjp = block.finish(products, start, head, masked, across=True)
                    weights = block.weigh(scores, base, log2_total, axis=1)
                    gpu.barrier_wait(ready[1])
                    gpu.wgmma(value_sums, block.factor(weights), output_cotangent)
                    weight_cotangent = multiply(values, output_cotangent.T)  # waits for both
                    gpu.barrier_arrive(free[1])
                    row_cotangent = spread(delta, weight_cotangent, 1)
                    product_cotangent = score_vjp(weights * (weight_cotangent - row_cotangent))
                    gpu.wgmma(key_sums, block.factor(product_cotangent), rows)
                    gpu.wgmma_wait(0)
                    gpu.barrier_arrive(free[0])
                    return none

                return visit(full, count, step, none)

            lax.fori_loop(0, group, add_head, 0)
            return key_sums[...], value_sums[...]

        sums = [gpu.ACC((ROWS, array.shape[3]), jnp.float32) for array in (key, value)]
        key_sum, value_sum = pl.run_scoped(gather, *sums)
        block.put(key_sum * block.scale, value_sum)

    def load() -> None:
        def sources(turn: Any) -> list[Ref]:
            head = block.head * group + lax.div(turn, count)
            return [ref.at[*block.at(ref, head, heads)] for ref in (query, cotangent)]

        block.stream(count * group, lambda turn: start_of(lax.rem(turn, count)), sources)

    block.divide_work(compute, load)
