"""Rules that place a run's arrays on a mesh of devices; the compiler adds the communication.

Along "data", "fsdp" and "expert" the rows of a batch are divided, along "sequence" their positions. Along
"tensor" the matrices of a layer are, so that a device has whole heads and a part of the feed-forward width;
along "expert" the experts of a mixture; along "fsdp" every matrix once more, with its optimizer state, on its
longest axis that is free and divides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from regard import parallel
from regard.models.depth import lend_to_blocks
from regard.models.sharding import divide_array
from regard.parallel.meshes import measure_spans
from regard.training.mesh_specs import MeshSpec
from regard.training.task import Batch

ROWS = ("data", "fsdp", "expert")
BLOCK = re.compile(r"(^|/)blocks/\d+/")


@dataclass(frozen=True)
class Deployment:
    """A mesh of all devices of all processes, and the places of a run's arrays on it."""

    mesh: Mesh

    @classmethod
    def over(
        cls, spec: MeshSpec, outer: Mapping[str, int] | None = None, devices: Sequence[Any] | None = None
    ) -> Deployment:
        """Make a deployment over all devices that there are; `outer` is that of `parallel.build_mesh`."""
        count = jax.device_count() if devices is None else len(devices)
        return cls(parallel.build_mesh(spec.fit(count).sizes, outer=outer, devices=devices))

    @property
    def name(self) -> str:
        """The specification, such as data=2,tensor=4."""
        return str(MeshSpec(**self.mesh.shape))

    @property
    def outer(self) -> str | None:
        """The numbers of slices that axes span, such as data=2; None where there is one slice."""
        spans = measure_spans(self.mesh)
        return str(MeshSpec(**spans)) if math.prod(spans.values()) > 1 else None

    @property
    def divides_model(self) -> bool:
        """True if devices have parts of the parameters."""
        return self._count("fsdp", "expert", "tensor") > 1

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of an array that is whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def divide_state(self, shapes: Any) -> Any:
        """Return shardings in the structure of a state, or of its parameters."""
        return jax.tree_util.tree_map_with_path(self._place, shapes)

    def divide_batch(self, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of a batch's array, rows and then positions; what does not divide is whole."""
        rows = ROWS if shape and shape[0] % self._count(*ROWS) == 0 else None
        places = "sequence" if len(shape) > 1 and shape[1] % self._count("sequence") == 0 else None
        return NamedSharding(self.mesh, PartitionSpec(*(rows, places)[: len(shape)]))

    def constrain(self, batch: Any) -> Any:
        """Divide a batch inside a compiled program, so that every device makes no more than its own rows."""
        shardings = jax.tree.map(lambda array: self.divide_batch(array.shape), batch)
        return jax.lax.with_sharding_constraint(batch, shardings)

    def gather(self, params: Any) -> Any:
        """Gather what a device computes with, lest the compiler divide it; gradients are divided again."""
        return jax.tree_util.tree_map_with_path(self._gather_array, params)

    def lend(self, params: Any, cast: Callable[[Any], Any]) -> tuple[Any, AbstractContextManager[None]]:
        """Return parameters, cast and gathered outside of blocks, and the context in which blocks do so."""

        def place(path: Any, leaf: jax.Array) -> jax.Array:
            return leaf if BLOCK.search(_name(path)) else self._gather_array(path, cast(leaf))

        return jax.tree_util.tree_map_with_path(place, params), lend_to_blocks(cast, self.gather)

    def spread(self, batch: Any) -> Any:
        """Put a batch that every process has on the mesh; each process gives its part."""

        def put(array: np.ndarray) -> jax.Array:
            sharding = self.divide_batch(array.shape)
            return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

        return jax.tree.map(put, jax.tree.map(np.asarray, batch))

    def feed(self, fetch: Callable[[np.ndarray], dict[str, np.ndarray]], chosen: np.ndarray) -> Batch:
        """Put the batch of the rows chosen on the mesh; each process fetches no rows but those it has."""
        fetch_once = cache(lambda start, stop, step: fetch(chosen[start:stop:step]))

        def put(name: str, row: np.ndarray) -> jax.Array:
            def take(index: Any) -> np.ndarray:
                rows = index[0].indices(len(chosen))
                return fetch_once(*rows)[name][(slice(None), *index[1:])]

            shape = (len(chosen), *row.shape[1:])
            return jax.make_array_from_callback(shape, self.divide_batch(shape), take)

        return {name: put(name, row) for name, row in fetch(chosen[:1]).items()}

    def within(self) -> AbstractContextManager[Any]:
        """Return the context in which attention runs over the mesh."""
        axes = {"batch_axis": ROWS, "head_axis": "tensor", "expert_axis": "expert"}
        return parallel.use(self.mesh, "sequence", **axes)

    def count_bytes(self, state: Any) -> tuple[int, int]:
        """Return the bytes of a state's arrays on one device, and in all."""
        shapes, places = jax.tree.leaves(state), jax.tree.leaves(self.divide_state(state))
        pairs = zip(shapes, places, strict=True)
        parts = [math.prod(at.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, at in pairs]
        return sum(parts), sum(leaf.size * leaf.dtype.itemsize for leaf in shapes)

    def _place(self, path: Any, leaf: Any, *, in_use: bool = False) -> NamedSharding:
        return NamedSharding(self.mesh, divide_array(_name(path), leaf.shape, self.mesh.shape, in_use=in_use))

    def _gather_array(self, path: Any, leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return _gather(leaf, self._place(path, leaf, in_use=True), self._place(path, leaf))

    def _count(self, *axes: str) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(array: jax.Array, used: NamedSharding, stored: NamedSharding) -> jax.Array:
    """Place an array as used and its gradient as stored: the plain rule would gather that, too."""
    return _gather_forward(array, used, stored)[0]


def _gather_forward(array: jax.Array, used: NamedSharding, stored: NamedSharding) -> tuple[jax.Array, None]:
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(array, stored), used), None


def _gather_backward(
    used: NamedSharding, stored: NamedSharding, _: None, cotangent: jax.Array
) -> tuple[jax.Array]:
    # In two steps, lest the compiler divide the layer's inputs as the gradient is stored.
    whole = jax.lax.with_sharding_constraint(cotangent, used)
    return (jax.lax.with_sharding_constraint(whole, stored),)


_gather.defvjp(_gather_forward, _gather_backward)
