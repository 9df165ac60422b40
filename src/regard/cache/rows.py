"""Rows of unequal length, which every cache holds, and the checks of tokens to append."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Self, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from regard.arguments import as_array, integers
from regard.attention import run_problem
from regard.axes import Array, ArrayLike, Int, Size
from regard.engine.call.canonicalization import canonicalize, float_array
from regard.engine.call.options import Options
from regard.engine.call.quantized import Quantized, quantize
from regard.explicit_meshes import explicit_sharding
from regard.masks.grid import is_concrete


class Rows:
    """Rows of tokens, each with a length of its own."""

    lengths: Any
    start: Any  # position of the first slot
    valid: Any  # a mask that hides slots without a token
    overflowed: Any  # True where a row has lost tokens that its next queries need
    window: int | None = None
    first: int = 0
    spare: int = 0
    _axes: tuple[str, ...]  # sizes of what is stored, in order
    _stored: tuple[Any, Any]  # keys and values, as they are written

    @property
    def batch(self) -> Size:
        """Number of rows."""
        return self.lengths.shape[0]

    @property
    def _stores(self) -> tuple[Any, Any]:
        """Keys and values (batch, K, slots, width), as attention reads them."""
        return self._stored

    @property
    def _places(self) -> dict[str, Any]:
        """Options of `attend` that say where the slots sit."""
        return {"key_offset": self.start}

    @property
    def slots(self) -> int:
        """Keys of every row that attention works over, S: those stored, and room."""
        return self._stores[0].shape[2]

    def attend(
        self,
        query: ArrayLike,
        *,
        counts: ArrayLike | None = None,
        backend: str | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Attend from the tokens appended last to all tokens that the cache holds.

        output_te = sum_s softmax_s(score_ts) value_se over the tokens s in the cache that t may attend to

        As `regard.attend` with the cache's keys and values, their positions filled in, and slots without a
        token hidden. A decoding step on a CPU reads int8 numbers and pages as they lie, block by block, and
        of pages only those that hold tokens; many queries, and other devices, read a copy as arrays.

        Args:
            query: `(batch, H, n, D)`, of the n tokens of the last `append`; H may be a multiple of K.
            counts: those of the last `append`, how many of the n tokens are real per row. None means all.
            backend: as in `regard.attend`.
            **options: as in `regard.attend`, but for offsets and positions, which the cache knows. With
                several queries the mask must hide the future, as `masks.causal()` does.

        Returns:
            The output `(batch, H, n, E)`, and with `aux` a dict, as `regard.attend`; what is over pairs has
            S = `slots` columns.

        Raises:
            TypeError: offsets or positions, or what `regard.attend` raises.
            ValueError: query of another batch or rank, counts outside 0..n, or what `regard.attend` raises.

        Example:
            >>> import jax.numpy as jnp
            >>> from regard import KVCache, masks
            >>> cache = KVCache.create(batch=2, key_heads=1, capacity=8, key_width=4, dtype=jnp.int8)
            >>> x = jnp.ones((2, 1, 3, 4))
            >>> cache.append(x, x).attend(x, mask=masks.causal())[0, 0, 0].tolist()
            [1.0, 1.0, 1.0, 1.0]

        Reference: Shazeer, "Fast Transformer Decoding", 2019; pages as in Kwon et al., "Efficient Memory
        Management for Large Language Model Serving with PagedAttention", 2023, section 4.1.
        """
        for name in ("query_offset", "key_offset", "query_positions", "key_positions"):
            if options.get(name) is not None:
                raise TypeError(f"{name}: expected none, as the cache knows it; call regard.attend to set it")
        queries: Any = float_array("query", query, 2)
        if queries.ndim != 4 or queries.shape[0] != self.batch:
            raise ValueError(
                f"query: expected shape ({self.batch}, H, n, D), the cache's rows, heads, tokens, width; got"
                f" {tuple(queries.shape)}"
            )
        size = queries.shape[2]
        added = size if counts is None else _read_counts(counts, self.batch, "query", size)
        options |= {"query_offset": self.query_offset(added), **self._places}  # pyright: ignore[reportAssignmentType]
        key, value = self._stores
        shapes = (jax.ShapeDtypeStruct(stored.shape, stored.dtype) for stored in (key, value))
        problem = canonicalize(queries, *shapes, **options)
        mask = self.valid if problem.mask is None else problem.mask & self.valid
        return run_problem(dataclasses.replace(problem, key=key, value=value, mask=mask), backend)

    def append(self, key: ArrayLike, value: ArrayLike, counts: ArrayLike | None = None) -> Self:
        """Add tokens at the end of each row: one in decoding, a chunk in prefill.

        Args:
            key: `(batch, K, n, D)` for any n, in a dtype that the cache's holds without loss; rotary keys are
                turned before, at positions `lengths + 0..n-1`.
            value: `(batch, K, n, E)`.
            counts: how many of the n tokens are real, per row, int `(batch,)`; padding comes after them and
                is not stored. None means all.

        Returns:
            The longer cache. Outside jit, and under jit without donation, all slots are copied.

        Raises:
            TypeError: a dtype that would lose digits, counts that are not integers.
            ValueError: shapes that do not fit the cache, chunks too long for it; outside jit also counts
                outside 0..n and rows without room. Under jit, counts are clipped, and tokens without room
                dropped, see `overflowed`.

        Example:
            >>> import jax.numpy as jnp
            >>> from regard import KVCache
            >>> cache = KVCache.create(batch=2, key_heads=1, capacity=8, key_width=4)
            >>> x = jnp.ones((2, 1, 3, 4))
            >>> cache.append(x, x, counts=jnp.array([3, 1])).append(x, x)
            KVCache(batch=2, key_heads=1, capacity=8, key_width=4, value_width=4, float32, lengths=[6, 4])
        """
        return self._extend(canonicalize_chunk(self.batch, self._stored, key, value, counts))

    def rewind(self, lengths: int | ArrayLike) -> Self:
        """Forget the newest tokens, as speculative decoding does with drafts that were not accepted.

        With a window, all tokens of the last `append` can be taken back, `spare` more, and maybe others. Rows
        keep their pages, and what lies in shared ones.

        Args:
            lengths: tokens to keep, 0..`self.lengths`, an integer or one per row.

        Returns:
            The shorter cache. Under jit, lengths are clipped to what the row has and may forget.

        Raises:
            TypeError: lengths that are not integers.
            ValueError: another shape; outside jit also more tokens than stored, fewer than the row shares, or
                so few that the window has dropped some that the next query needs (under jit see
                `overflowed`).
        """
        return self._shorten(row_integers("lengths", lengths, self.batch))

    def query_offset(self, num_queries: int | ArrayLike) -> Int[Array, " batch"]:
        """Return the position of the first token appended last: `query_offset=` of `regard.attend`.

        query_offset_b = lengths_b - num_queries_b

        Args:
            num_queries: how many tokens were appended, an integer; after a ragged append its counts,
                `(batch,)`, so that the queries are padded at the end as the keys were.

        Returns:
            The position of query row 0, int32, one per row.

        Raises:
            TypeError, ValueError: numbers that are not integers, or of another shape.
        """
        return self.lengths - row_integers("num_queries", num_queries, self.batch)

    def check(self) -> Any:
        """Raise where a row has overflowed, after a loop under jit, where nothing could be raised.

        Within jit, `jax.experimental.checkify.check(~cache.overflowed.any(), "overflow")` serves.

        Returns:
            The cache itself.

        Raises:
            TypeError, ValueError: called within jit; a row has overflowed.
        """
        if not is_concrete(self.overflowed):
            raise TypeError(
                "check: expected a cache with concrete lengths, got one inside a trace; return"
                " cache.overflowed from the traced function, or use jax.experimental.checkify"
            )
        lost = np.flatnonzero(np.asarray(self.overflowed))
        if lost.size:
            raise ValueError(f"cache: expected that no row overflows, got {self._loss(lost)}")
        return self

    def _loss(self, rows: np.ndarray) -> str:
        """Say which rows lost what, and how to avoid it."""
        raise NotImplementedError

    def _extend(self, chunk: Chunk) -> Self:
        """Add checked tokens that there is room for."""
        raise NotImplementedError

    def _shorten(self, lengths: Array) -> Self:
        """Keep so many tokens per row."""
        raise NotImplementedError

    def __repr__(self) -> str:
        (key, value), lengths, name = self._stored, self.lengths, type(self).__name__
        if np.ndim(key) != 4:  # inside tree functions anything may stand for the arrays
            return f"{name}({key!r}, lengths={lengths!r})"
        sizes = {"batch": self.batch, **dict(zip(self._axes, key.shape, strict=True))}
        dtype = jax.tree.leaves(key)[0].dtype
        listed = "".join(f"{axis}={size}, " for axis, size in sizes.items())
        window = "" if self.window is None else f", window={self.window}"
        window += f", first={self.first}" * bool(self.first) + f", spare={self.spare}" * bool(self.spare)
        counts = np.asarray(lengths).tolist() if is_concrete(lengths) else "traced"
        return f"{name}({listed}value_width={value.shape[3]}, {dtype}{window}, lengths={counts})"


class Chunk(NamedTuple):
    """Tokens to append, checked: `counts` of each row are real, None means all."""

    key: Any  # (batch, K, n, D), as the cache stores tokens
    value: Any  # (batch, K, n, E)
    counts: Array | None  # (batch,)

    @property
    def size(self) -> int:
        """n, with padding."""
        return self.key.shape[2]

    @property
    def real(self) -> Any:
        """Real tokens per row."""
        return integers("tokens", self.size) if self.counts is None else self.counts

    def slots(self, first: Array, beyond: int) -> Array:
        """Return the slots of tokens, (batch, n), where row b begins at `first[b]`; padding goes `beyond`."""
        index = jnp.arange(self.size, dtype=jnp.int32)[None]
        slots = first[:, None] + index
        return slots if self.counts is None else jnp.where(index < self.counts[:, None], slots, beyond)


def canonicalize_chunk(batch: Size, stored: tuple[Any, Any], key: Any, value: Any, counts: Any) -> Chunk:
    """Check keys, values and counts against what a cache of `batch` rows stores."""
    key = _tokens("key", key, batch, stored[0])
    value = _tokens("value", value, batch, stored[1])
    size = key.shape[2]
    if value.shape[2] != size:
        raise ValueError(f"value: expected as many tokens as key, {size}, on axis 2; got {value.shape[2]}")
    if counts is None:
        return Chunk(key, value, None)
    return Chunk(key, value, _read_counts(counts, batch, "key", size))


def _read_counts(counts: Any, batch: Size, name: str, size: Size) -> Array:
    """Return how many tokens of each row are real; known ones are checked to be among `size`."""
    counts = row_integers("counts", counts, batch, scalar=False)
    if is_concrete(counts):
        for row in np.flatnonzero((np.asarray(counts) < 0) | (np.asarray(counts) > size)):
            raise ValueError(
                f"counts: expected 0..{size}, as many as {name} has tokens; got {counts[row]} for row {row}"
            )
    return jnp.clip(counts, 0, size)


def _tokens(name: str, tokens: Any, batch: Size, stored: Any) -> Any:
    """Check tokens (batch, K, n, width) and return them as `stored` is."""
    array = as_array(name, "a floating-point array", jnp.asarray, tokens)
    heads, width = stored.shape[1], stored.shape[3]
    if array.ndim != 4 or (array.shape[0], array.shape[1], array.shape[3]) != (batch, heads, width):
        hint = f"; one token needs its axis, {name}[:, :, None]" if array.ndim == 3 else ""
        raise ValueError(
            f"{name}: expected shape ({batch}, {heads}, n, {width}), the cache's rows, key heads, any number"
            f" of tokens, width; got {array.shape}{hint}"
        )
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    if not (is_float and np.can_cast(array.dtype, stored.dtype)):
        wider = f", or create the cache with dtype={str(array.dtype)!r}" if is_float else ""
        raise TypeError(
            f"{name}: expected {stored.dtype}, the cache's dtype, or one that it holds without loss; got"
            f" {array.dtype}. Cast it, {name}.astype({str(stored.dtype)!r}){wider}"
        )
    array = array.astype(stored.dtype)
    return quantize(array) if isinstance(stored, Quantized) else array


def divide_rows(cache: Any, array: Array, axes: int = 1) -> Any:
    """Divide a cache that is whole on every device as explicit axes divide the first axes of an array."""
    sharding = explicit_sharding(array)
    if sharding is None or not any(names := sharding.spec[:axes]):
        return cache

    def divide(leaf: Array) -> Array:
        stored = explicit_sharding(leaf)
        if stored is None:
            divided = NamedSharding(sharding.mesh, PartitionSpec(*names[: leaf.ndim]))
            return jax.sharding.reshard(leaf, divided)
        if stored.spec[0] != names[0]:
            raise ValueError(
                f"cache: expected rows divided over {names[0]!r}, as those of what comes after them; got"
                f" {stored.spec[0]!r}. Write jax.tree.map(lambda leaf: jax.sharding.reshard(leaf,"
                f" jax.P({names[0]!r})), cache)"
            )
        return leaf

    return jax.tree.map(divide, cache)


def row_integers(name: str, numbers: Any, batch: Size, *, scalar: bool = True) -> Array:
    """Check for one integer per row; a scalar serves all rows unless it is refused."""
    array: Any = integers(name, numbers)
    if array.shape != (batch,) and not (scalar and array.shape == ()):
        either = "one integer or " if scalar else ""
        raise ValueError(f"{name}: expected {either}one per row, shape ({batch},); got {tuple(array.shape)}")
    return jnp.broadcast_to(jnp.asarray(array), (batch,))


def check_room(lengths: Array, counts: Any, room: Any, fix: str) -> None:
    """Raise, outside jit, where rows get more tokens than they have room for."""
    if not is_concrete((lengths, counts, room)):
        return
    counts, room = np.broadcast_to(counts, lengths.shape), np.broadcast_to(room, lengths.shape)
    for row in np.flatnonzero(np.asarray(lengths) + counts > np.asarray(room)):
        raise ValueError(
            f"key: expected at most {max(int(room[row]) - int(lengths[row]), 0)} more tokens for row {row},"
            f" which has {int(lengths[row])} of at most {int(room[row])}; got {int(counts[row])}. {fix}"
        )
