"""Keys and values of each row side by side, in order, so that attention needs no special path."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from regard.arguments import LARGEST, check_reach, guided, read_array, read_size, whole_number
from regard.axes import Array, ArrayLike, Bool, Float, Int, Size
from regard.cache.rows import Chunk, Rows, check_room, divide_rows
from regard.engine.call.canonicalization import float_dtype
from regard.engine.call.quantized import Quantized
from regard.explicit_meshes import explicit_sharding
from regard.masks import Mask
from regard.masks import lengths as rows_of_lengths
from regard.masks.grid import is_concrete
from regard.records import record


@guided
@record
class KVCache(Rows):
    """Keys and values of the tokens so far, with room for more: what decoding attends to.

    position = start_b + s of what slot s of row b holds, below lengths_b;  position = s where s < first

    A frozen pytree: `append` returns a new cache. Under jit with the old cache donated, tokens are written in
    place. Every leaf has the batch first, so `jax.tree.map(lambda leaf: leaf[rows], cache)` reorders rows, as
    beam search does. Make one with `KVCache.create`.

    `cache.attend` attends to what is stored. Or pass `query_offset` and `key_offset=cache.start` to
    `regard.attend`; with `first`, `key_positions=cache.positions`. Slots that hold no token are zero until
    written, and keep what they held after `rewind` or `reset`. A causal mask hides them from queries of real
    tokens; `mask & cache.valid` hides them from all, padded queries included, and what is hidden from all
    reaches no output, even if it is NaN.

    With `window`, memory stays bounded for ever: when a chunk would not fit, the newest `window` tokens move
    to the front and `start` grows. With a capacity of twice the window, one token moves per token appended.

    With `first`, the first tokens of each row stay for ever, too, in its first slots: many models lean on
    them (attention sinks). A mask that says so is `causal() & (sliding_window(window) | prefix(first))`.

    Under jit nothing can be raised. Tokens without room are dropped there, never written over others, while
    `lengths` counts on, and `overflowed` says which rows are no longer right.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from regard import KVCache, attend, masks
        >>> cache = KVCache.create(batch=2, key_heads=1, capacity=8, key_width=4)
        >>> x = jax.random.normal(jax.random.key(0), (2, 1, 5, 4))
        >>> whole = attend(x, x, x, mask=masks.causal())
        >>> cache = cache.append(x[:, :, :3], x[:, :, :3])
        >>> for t in (3, 4):
        ...     token = x[:, :, t : t + 1]
        ...     cache = cache.append(token, token)
        ...     out = cache.attend(token, mask=masks.causal())
        >>> cache.lengths.tolist(), bool(jnp.allclose(out, whole[:, :, 4:], atol=1e-6))
        ([5, 5], True)

    Reference: Shazeer, "Fast Transformer Decoding", 2019, on incremental multi-head attention; first tokens
    beside a window from Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024,
    section 3.2, where positions are numbered within the cache; here they stay those of the text.
    """

    key: Float[Array, "batch K capacity D"] | Quantized
    """Stored keys."""
    value: Float[Array, "batch K capacity E"] | Quantized
    """Stored values."""
    lengths: Int[Array, " batch"]
    """Tokens appended so far, int32, which is the position of the next one."""
    start: Int[Array, " batch"]
    """Position less slot, int32, of the slots from `first` on; 0 without a window."""
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    """The number of tokens before its own that a query needs; None means all."""
    first: int = dataclasses.field(default=0, metadata={"static": True})
    """The number of tokens at the beginning that stay beside the window."""
    spare: int = dataclasses.field(default=0, metadata={"static": True})
    """The number of tokens before the window that stay as well, for `rewind` to go back to."""

    @classmethod
    @guided
    def create(
        cls,
        batch: Size,
        key_heads: int,
        capacity: Size | None,
        key_width: int,
        value_width: int | None = None,
        *,
        dtype: DTypeLike = jnp.float32,
        window: int | None = None,
        first: int = 0,
        spare: int = 0,
    ) -> KVCache:
        """Make an empty cache.

        Args:
            batch: number of rows.
            key_heads: K, heads of key and value; those of query may be a multiple.
            capacity: slots per row. With a window at least `window` and the longest chunk that is appended,
                `first` and `spare`; None means twice the window, and these.
            key_width: D.
            value_width: E; None means D.
            dtype: floating-point dtype of what is stored; or int8, a quarter of float32's memory, with a
                float32 scale per token and key head, `max_d |token_d| / 127`. No number is then off by more
                than half a scale; the cache has no derivative, and is read by its own `attend`.
            window: how many tokens before its own a query needs, as in `masks.sliding_window(window)`; older
                ones may be forgotten. None keeps all.
            first: how many tokens at the beginning of each row stay beside the window.
            spare: with a window, how many tokens `rewind` can take back that were appended one by one.

        Returns:
            A cache of zeros, with lengths 0.

        Raises:
            TypeError: sizes that are not integers, a dtype that is neither floating-point nor int8.
            ValueError: sizes below 1, a window without room for one more token, no capacity and no window,
                first or spare tokens without a window.
        """
        window = None if window is None else whole_number("window", window, 0)
        first, spare = whole_number("first", first, 0), whole_number("spare", spare, 0)
        for name, count in (("first", first), ("spare", spare)):
            if count and window is None:
                raise ValueError(
                    f"{name}: expected 0 without a window, as all tokens stay then; got {count}. Pass window="
                )
        if capacity is None:
            if window is None:
                raise ValueError("capacity: expected the slots per row, because window is None; got None")
            capacity = first + spare + max(2 * window, 1)
        sizes = {"batch": batch, "key_heads": key_heads, "capacity": capacity, "key_width": key_width}
        sizes["value_width"] = key_width if value_width is None else value_width
        sizes = {name: read_size(name, size) for name, size in sizes.items()}
        rows, heads, slots, width, value_width = sizes.values()
        check_reach("capacity", slots)
        if window is not None and slots <= window + first + spare:
            beside = f" and {first} first ones" * bool(first) + f" and {spare} spare ones" * bool(spare)
            raise ValueError(
                f"capacity: expected more than the window of {window} tokens{beside}, best twice the window,"
                f" for there to be room to append; got {slots}"
            )
        key = _zeros((rows, heads, slots, width), dtype)
        value = _zeros((rows, heads, slots, value_width), dtype)
        lengths, start = jnp.zeros((2, rows), jnp.int32)
        return cls(key, value, lengths, start, window, first, spare)

    _axes = ("batch", "key_heads", "capacity", "key_width")

    @property
    def _stored(self) -> tuple[Any, Any]:
        return self.key, self.value

    @property
    def capacity(self) -> int:
        """Slots per row."""
        return self.key.shape[2]

    @property
    def longest_chunk(self) -> int:
        """Most tokens that one `append` takes."""
        return self.capacity - (self.window or 0) - self.first - self.spare

    @property
    def positions(self) -> Int[Array, "batch capacity"]:
        """Positions of all slots, `key_positions=` of `attend`; those at `lengths` and beyond are empty."""
        slots = jnp.arange(self.capacity, dtype=jnp.int32)[None]
        start = jnp.minimum(self.start[:, None], LARGEST - slots)  # empty ones end where int32 does
        return jnp.where(slots < self.first, slots, slots + start)

    @property
    def _places(self) -> dict[str, Any]:
        return {"key_positions": self.positions} if self.first else {"key_offset": self.start}

    @property
    def valid(self) -> Mask:
        """A mask that hides slots without a token; join it with masks that are not causal."""
        return rows_of_lengths(self.lengths)

    @property
    def overflowed(self) -> Bool[Array, " batch"]:
        """True where a row has lost tokens that its next queries need, so that its outputs are not right.

        Without a window: more than `capacity` tokens were appended under jit. With a window: a `rewind` under
        jit went behind what was kept; after as many new tokens as the window holds, the row is right again.
        """
        if self.window is None:
            return self.lengths > self.capacity
        return self.start > jnp.maximum(self.lengths - self.window - self.first, 0)

    def _extend(self, chunk: Chunk) -> KVCache:
        if chunk.size > self.longest_chunk:
            raise ValueError(self._too_long(chunk.size))
        if self.window is None:
            fix = "Create the cache with a larger capacity, or with window= if queries look back so far only"
            check_room(self.lengths, chunk.real, self.capacity, fix)
        return _append(divide_rows(self, jax.tree.leaves(chunk.key)[0], axes=2), chunk)

    def _shorten(self, lengths: Array) -> KVCache:
        fewer = jnp.clip(lengths, 0, self.lengths)
        start = jnp.minimum(self.start, jnp.maximum(fewer - self.first, 0))
        shorter = dataclasses.replace(self, lengths=fewer, start=start)
        if is_concrete((self.lengths, self.start, lengths)):
            stored = np.minimum(self.lengths, self.start + self.capacity)
            for row in np.flatnonzero((np.asarray(lengths) < 0) | (np.asarray(lengths) > stored)):
                raise ValueError(
                    f"lengths: expected 0..{stored[row]}, the tokens stored for row {row}; got {lengths[row]}"
                )
            for row in np.flatnonzero(np.asarray(shorter.overflowed)):
                dropped = self.first + int(self.start[row])
                few = f"0..{self.first}" if self.first else "0"
                raise ValueError(
                    f"lengths: expected {few} or at least {dropped + (self.window or 0)} for row"
                    f" {row}, which has dropped its tokens before {dropped}; got {lengths[row]}. Create"
                    " the cache with spare= to rewind farther, or rewind before appending more"
                )
        return shorter

    def reset(self, rows: ArrayLike | None = None) -> KVCache:
        """Empty the rows, for the next requests.

        Args:
            rows: booleans `(batch,)`, True = empty this row; None means all rows.

        Returns:
            The cache with lengths 0 in those rows.

        Raises:
            TypeError, ValueError: rows that are not booleans, or of another shape.
        """
        keep = jnp.zeros(self.batch, jnp.int32)
        if rows is not None:
            chosen = read_array("rows", rows)
            if chosen.dtype != bool:
                raise TypeError(
                    f"rows: expected booleans, True = empty this row, got {chosen.dtype}; for row numbers"
                    f" write jnp.isin(jnp.arange({self.batch}), rows)"
                )
            if chosen.shape != (self.batch,):
                raise ValueError(f"rows: expected one per row, shape ({self.batch},); got {chosen.shape}")
            keep = (~jnp.asarray(chosen)).astype(jnp.int32)
        return dataclasses.replace(self, lengths=self.lengths * keep, start=self.start * keep)

    def _too_long(self, size: int) -> str:
        if self.window is None:
            return (
                f"key: expected at most {self.capacity} tokens, the capacity; got {size}. Create the cache"
                " with a larger capacity"
            )
        beside = f" and {self.first} first tokens" * bool(self.first)
        beside += f" and {self.spare} spare ones" * bool(self.spare)
        return (
            f"key: expected at most {self.longest_chunk} tokens at once, the capacity of {self.capacity} less"
            f" the window of {self.window}{beside}; got {size}. Append shorter chunks, or create the cache"
            f" with capacity={self.capacity - self.longest_chunk + size}"
        )

    def _loss(self, rows: np.ndarray) -> str:
        if self.window is None:
            return (
                f"{self.lengths[rows].tolist()} tokens for rows {rows.tolist()} of capacity {self.capacity}."
                " Create the cache with a larger capacity"
            )
        return (
            f"rows {rows.tolist()} rewound behind the window of {self.window}. Create the cache with spare="
            " to rewind farther, or rewind before appending more"
        )


def _zeros(shape: tuple[Size | None, ...], dtype: Any) -> Any:
    """Return zeros to store in: an array, or int8 numbers and their scales."""
    stored = float_dtype("dtype", dtype, "int8")
    if stored == np.int8:
        return Quantized(jnp.zeros(shape, np.int8), jnp.zeros((*shape[:-1], 1), np.float32))
    return jnp.zeros(shape, stored)


@jax.jit
def _append(cache: KVCache, chunk: Chunk) -> KVCache:
    if cache.window is not None:
        crowded = jnp.any(cache.lengths - cache.start + chunk.real > cache.capacity)
        cache = jax.lax.cond(crowded, _move_to_front, lambda cache: cache, cache)
    write = partial(_write, slots=chunk.slots(cache.lengths - cache.start, cache.capacity))
    key, value = jax.tree.map(write, (cache.key, cache.value), (chunk.key, chunk.value))
    return dataclasses.replace(cache, key=key, value=value, lengths=cache.lengths + chunk.real)


def _move_to_front(cache: KVCache) -> KVCache:
    """Move the newest tokens that stay to the front: of all rows, so that moves stay rare."""
    tail, front = (cache.window or 0) + cache.spare, cache.first
    shift = jnp.maximum(cache.lengths - cache.start - front - tail, 0)

    def move(buffer: Array) -> Array:
        newest = partial(jax.lax.dynamic_slice_in_dim, slice_size=tail, axis=1)
        moved = jax.vmap(newest)(buffer, front + shift)
        return jax.lax.dynamic_update_slice_in_dim(buffer, moved, front, axis=2)

    key, value = jax.tree.map(move, (cache.key, cache.value))
    return dataclasses.replace(cache, key=key, value=value, start=cache.start + shift)


def _write(buffer: Array, tokens: Array, slots: Array) -> Array:
    """Write tokens (batch, K, n, width) into slots (batch, n) below S of a buffer (batch, K, S, width)."""
    batch, heads, size, width = buffer.shape
    if slots.shape[1] == 1 and explicit_sharding(buffer) is None:
        # Head by head: one slot for a whole row becomes a slice update if there is but one row, for which
        # XLA's CPU copies the cache wherever attention reads it next.
        buffer = buffer.reshape((batch * heads, 1, size, width))
        tokens = tokens.reshape((batch * heads, 1, 1, width))
        slots = jnp.repeat(slots, heads, axis=0)

    # A slice update would move slots of S and more inside, over earlier tokens.
    def write(row: Array, tokens: Array, slots: Array) -> Array:
        return row.at[:, slots].set(tokens, mode="drop")

    return jax.vmap(write)(buffer, tokens, slots).reshape((batch, heads, size, width))
