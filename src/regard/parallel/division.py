"""Division of a call over devices; static, a part of the compiled program."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from regard.axes import Array
from regard.parallel.order import from_zigzag, to_zigzag

LAYOUTS = ("contiguous", "zigzag", "balanced")
Axes = tuple[str, ...]


@dataclass(frozen=True)
class Round:
    """One step of the ring: the distance of the keys from home, in devices, and the parts that meet there."""

    number: int
    pairs: tuple[tuple[int, int], ...]  # part of the queries, part of the keys


@dataclass(frozen=True)
class Chunking:
    """The cut of one sequence axis into `parts * ring` chunks, the last of them padded."""

    length: int
    parts: int
    ring: int
    exchange: int

    @property
    def chunk(self) -> int:
        """Positions per chunk; a device's chunks must divide among those it exchanges heads with."""
        unit = self.exchange // math.gcd(self.exchange, self.parts)
        return max(-(-self.length // (self.parts * self.ring * unit)), 1) * unit

    @property
    def padded(self) -> int:
        return self.chunk * self.parts * self.ring


@dataclass(frozen=True)
class Division:
    """Names of mesh axes, sizes and rounds."""

    mesh: Mesh
    ring: str | None  # keys travel along it
    exchange: str | None  # heads are exchanged for sequence along it
    batch: Axes  # the first leading axis is split along these
    heads: Axes  # and the heads along these, before any exchange
    layout: str
    num_queries: int
    num_keys: int
    rounds: tuple[Round, ...] = ()

    def size(self, *axes: str | None) -> int:
        """Count the devices along mesh axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes if axis is not None)

    @property
    def parts(self) -> int:
        """Chunks of the sequence on each device."""
        return 1 if self.layout == "contiguous" else 2

    @property
    def queries(self) -> Chunking:
        return Chunking(self.num_queries, self.parts, self.size(self.ring), self.size(self.exchange))

    @property
    def keys(self) -> Chunking:
        return Chunking(self.num_keys, self.parts, self.size(self.ring), self.size(self.exchange))

    @property
    def is_even(self) -> bool:
        return all(sequence.padded == sequence.length for sequence in (self.queries, self.keys))

    def chunk_of(self, part: Any, member: Any) -> Any:
        """Find the chunk of the sequence that is a part of a ring member's."""
        if self.parts == 1:
            return member
        last = 2 * self.size(self.ring) - 1 - member
        if isinstance(part, int):
            return last if part else member
        return jnp.where(part == 0, member, last)

    def pad(self, array: Array, sequence: Chunking) -> Array:
        """Pad rows (..., n, x) until they divide; zeros come after the last position."""
        if sequence.length == sequence.padded:
            return array
        ring, array = sequence.ring, self._keep_whole(array)
        array = from_zigzag(array, ring) if self.layout == "zigzag" else array
        array = jnp.pad(array, [(0, 0)] * (array.ndim - 2) + [(0, sequence.padded - sequence.length), (0, 0)])
        return to_zigzag(array, ring) if self.layout == "zigzag" else array

    def unpad(self, array: Array, sequence: Chunking) -> Array:
        if sequence.length == sequence.padded:
            return array
        ring = sequence.ring
        array = from_zigzag(array, ring) if self.layout == "zigzag" else array
        array = jax.lax.slice_in_dim(array, 0, sequence.length, axis=-2)
        return self._keep_whole(to_zigzag(array, ring) if self.layout == "zigzag" else array)

    def pad_pairs(self, array: Array) -> Array:
        """Pad pairs (..., T | 1, S | 1), whose rows come in the order of the sequence, and lay rows out."""
        *_, rows, columns = array.shape
        wanted = (self.queries.padded if rows > 1 else 1, self.keys.padded if columns > 1 else 1)
        if wanted != (rows, columns):
            widths = [(0, 0)] * (array.ndim - 2) + [(0, wanted[0] - rows), (0, wanted[1] - columns)]
            array = jnp.pad(self._keep_whole(array), widths)
        return to_zigzag(array, self.queries.ring) if self.layout == "zigzag" and rows > 1 else array

    def _keep_whole(self, array: Array) -> Array:
        """Keep rows that do not divide whole on every device, wherever they are not padded."""
        # By itself the compiler (jax 0.10 and 0.12) divides them unevenly all the way up to an embedding,
        # whose gradient then comes out wrong where its table is divided, too.
        spec = self._spec(array, ())
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))

    # Where arrays (batch..., heads, length, width) lie.

    def outside(self, array: Any) -> PartitionSpec:
        """Return the spec of what the caller has: a part of the sequence, all heads of this device."""
        sequence = tuple(axis for axis in (self.ring, self.exchange) if axis is not None)
        return self._spec(array, sequence)

    def pairs(self, array: Any) -> PartitionSpec:
        """Return the spec of pairs (..., T | 1, S | 1): rows lie as those of the query, columns are whole."""
        *leading, rows, _ = self.outside(array)
        return PartitionSpec(*leading, rows if array.shape[-2] > 1 else None, None)

    def _spec(self, array: Any, sequence: Axes) -> PartitionSpec:
        *batch, head_count, _, _ = array.shape
        first = self.batch if batch and batch[0] > 1 else ()
        leading = (first or None, *(None,) * (len(batch) - 1)) if batch else ()
        heads = self.heads if head_count > 1 else ()
        return PartitionSpec(*leading, heads or None, sequence or None, None)

    def result(self, leading: tuple[int, ...]) -> PartitionSpec:
        """Return the spec of the output, on axes that divide it: `leading`, sequence, width."""
        rank = len(leading)
        whole = jax.ShapeDtypeStruct((*(leading or (1,)), 1, 1), jnp.float32)
        *_, sequence, width = spec = self.outside(whole)
        sequence = sequence if self.num_queries % self.size(self.ring, self.exchange) == 0 else None
        return PartitionSpec(*spec[:rank], sequence, width)
