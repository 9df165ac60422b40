"""Launches of the kernels, on a GPU or interpreted.

Arrays are (batch | 1, heads | any divisor, length, width), lengths and widths whole tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.hopper import kernels
from regard.engine.hopper.kernel_blocks import STAGES, KernelBlock, Ref, gpu
from regard.engine.hopper.pair_programs import BLOCK, COMPUTING, ROWS, Lists, Pairs


@dataclass(frozen=True)
class Launch:
    """A call of the kernels."""

    batch: int
    heads: int
    key_heads: int
    pairs: Pairs
    interpret: bool

    def forward(
        self, lists: Lists, scale: Array, query: Array, key: Array, value: Array
    ) -> tuple[Array, Array, Array]:
        """Compute the output, and of each row the log of its sum and its peak, which that is relative to.

        The scale, one per batch row, is positive.
        """
        rows = (self.batch, self.heads, query.shape[2])
        row = jax.ShapeDtypeStruct(rows, np.float32)
        results = [jax.ShapeDtypeStruct((*rows, value.shape[3]), jnp.bfloat16), row, row]
        operands = (lists, scale, query, key, value)
        return self._run(kernels.attend, results, (query,), (key, value), BLOCK, *operands, last_first=True)

    def query_gradient(
        self, lists: Lists, scale: Array, query: Array, key: Array, value: Array, *rest: Array
    ) -> Array:
        """Compute the gradient of queries; the rest: that of the output, then base, log2 of totals, delta."""
        result = jax.ShapeDtypeStruct((self.batch, self.heads, *query.shape[2:]), jnp.bfloat16)
        operands = (lists, scale, query, key, value, *rest)
        resident = (query, rest[0])
        return self._run(
            kernels.differentiate_queries, [result], resident, (key, value), BLOCK, *operands, last_first=True
        )[0]

    def key_gradients(
        self, lists: Lists, scale: Array, query: Array, key: Array, value: Array, *rest: Array
    ) -> tuple[Array, Array]:
        """Compute the gradients of keys and values, likewise, one for each group of heads."""
        shapes = [(self.batch, self.key_heads, *array.shape[2:]) for array in (key, value)]
        results = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        operands = (lists, scale, query, key, value, *rest)
        return self._run(kernels.differentiate_keys, results, (key, value), (query, rest[0]), ROWS, *operands)

    def _buffers(
        self, resident: Sequence[Array], streamed: Sequence[Array], tile: int, results: Sequence[Any]
    ) -> dict[str, Any]:
        """Return buffers for rows of a block, for the tiles that it reads, and for what it writes.

        A result is written from the place of what the block kept, where that is as wide.
        """
        written = [result.shape[3] for result in results if len(result.shape) == 4]

        def buffer(*shape: int) -> Any:
            layout = (gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128))
            return gpu.SMEM(shape, jnp.bfloat16, transforms=layout)

        return {
            "resident": [buffer(COMPUTING, ROWS, array.shape[3]) for array in resident],
            "resident_ready": gpu.Barrier(num_barriers=COMPUTING, num_arrivals=len(resident)),
            "ring": [buffer(STAGES, tile, array.shape[3]) for array in streamed],
            "ready": [gpu.Barrier(num_barriers=STAGES) for _ in streamed],
            "free": [gpu.Barrier(num_barriers=STAGES, num_arrivals=COMPUTING) for _ in streamed],
            # The interpreter has fewer threads than may wait, and multiplies no registers.
            "pingpong": None if self.interpret else gpu.Barrier(num_arrivals=COMPUTING),
            "weights": buffer(COMPUTING, ROWS, tile) if self.interpret else None,
            "staged": [
                None if array.shape[3] == width else buffer(COMPUTING, ROWS, width)
                for array, width in zip(resident, written, strict=False)
            ],
        }

    def _run(
        self,
        body: Callable[[KernelBlock], None],
        results: Sequence[jax.ShapeDtypeStruct],
        resident: Sequence[Array],
        streamed: Sequence[Array],
        tile: int,
        *operands: Any,
        last_first: bool = False,
    ) -> Any:
        """Run a kernel's blocks, each of which keeps its rows of some arrays and reads tiles of others.

        Begun with the last, those that meet most under a causal mask do not come when all others are done.
        """
        _, heads, length, *_ = results[0].shape
        leaves, structure = jax.tree.flatten((operands, self.pairs.operands()))

        def kernel(*refs: Ref, **buffers: Any) -> None:
            sizes = (self.heads, self.key_heads)
            inputs, read = jax.tree.unflatten(structure, refs[: len(leaves)])
            body(
                KernelBlock(
                    self.pairs, sizes, inputs, read, refs[len(leaves) :], last_first=last_first, **buffers
                )
            )

        def launch(*leaves: Array) -> list[Array]:
            return gpu.kernel(
                kernel,
                out_type=results,
                scratch_types=self._buffers(resident, streamed, tile, results),
                grid=(heads, length // BLOCK, self.batch),
                grid_names=("head", "block", "batch"),
                num_threads=COMPUTING + 1,
                thread_name="warpgroup",
                compiler_params=gpu.CompilerParams(approx_math=True),
                interpret=gpu.InterpretGPUParams(detect_races=True) if self.interpret else False,
            )(*leaves)

        if not self.interpret:
            return launch(*leaves)
        # The interpreter has effects in order, which derivatives and loops around the call do not allow.
        compiled = jax.jit(launch)

        def call(*leaves: Any) -> list[np.ndarray]:
            with jax.enable_x64(False):  # whichever thread calls back
                return jax.tree.map(np.asarray, compiled(*map(np.asarray, leaves)))

        return jax.pure_callback(call, results, *leaves)
