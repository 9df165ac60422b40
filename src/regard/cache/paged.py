"""Keys and values in pages that rows take as they grow, so that memory follows what is stored."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from regard.arguments import guided, integers, read_size, whole_number
from regard.axes import Array, ArrayLike, Bool, Float, Int, Size
from regard.cache.rows import Chunk, Rows, check_room
from regard.engine.call.canonicalization import float_dtype
from regard.engine.call.page_tables import Pages
from regard.explicit_meshes import explicit_sharding
from regard.masks import Mask
from regard.masks import lengths as rows_of_lengths
from regard.masks.grid import is_concrete
from regard.records import record


@guided
@record
class PagedKVCache(Rows):
    """Keys and values in pages of fixed size, which a table hands to rows: serving requests of any length.

    page = page_table[b, p // page_size],  slot = p mod page_size,  of the token of row b at position p

    A frozen pytree. `append` writes through the table and works under jit. `assign`, `share` and `release`
    change who holds which page, between steps, outside jit. Make one with `PagedKVCache.create`.

    `cache.attend` reads the pages of each row that hold tokens, one after another. `key` and `value` gather
    them in order, for `regard.attend`, as with `KVCache`; slots without a token are hidden as there.

    A row has room for its pages. Tokens beyond it raise outside jit; under jit they are dropped while
    `lengths` counts on, and `overflowed` says so. No token is ever written to a page of another row.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import PagedKVCache, masks
        >>> cache = PagedKVCache.create(2, 1, 4, num_pages=5, page_size=2, pages_per_row=3)
        >>> cache = cache.assign(0, [4, 1]).assign(1, [2])
        >>> x = jnp.ones((2, 1, 1, 4))
        >>> cache = cache.append(x, x)
        >>> cache.page_table.tolist(), cache.free_pages.tolist()
        ([[4, 1, -1], [2, -1, -1]], [0, 3])
        >>> cache.attend(x, mask=masks.causal()).shape
        (2, 1, 1, 4)

    Reference: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023, section 4.
    """

    key_pages: Float[Array, "num_pages K page_size D"]
    """Stored keys."""
    value_pages: Float[Array, "num_pages K page_size E"]
    """Stored values."""
    page_table: Int[Array, "batch pages_per_row"]
    """Pages of each row in order, int32; -1 after the last."""
    lengths: Int[Array, " batch"]
    """Tokens appended so far, int32, which is the position of the next one."""
    shared: Int[Array, " batch"]
    """Tokens at the beginning that lie in pages of several rows, int32; they are not written any more."""

    @classmethod
    @guided
    def create(
        cls,
        batch: Size,
        key_heads: int,
        key_width: int,
        value_width: int | None = None,
        *,
        num_pages: int,
        page_size: int,
        pages_per_row: int,
        dtype: DTypeLike = jnp.float32,
    ) -> PagedKVCache:
        """Make a cache of free pages.

        Args:
            batch, key_heads, key_width, value_width: as in `KVCache.create`.
            num_pages: pages in memory, for all rows together.
            page_size: tokens per page.
            pages_per_row: pages that one row may hold at most; attention works over as many.
            dtype: floating-point dtype of what is stored.

        Returns:
            A cache of zeros; no row holds a page.

        Raises:
            TypeError, ValueError: sizes that are no integers, or below 1; a dtype that is not floating-point.
        """
        sizes = {"batch": batch, "key_heads": key_heads, "key_width": key_width}
        sizes["value_width"] = key_width if value_width is None else value_width
        sizes |= {"num_pages": num_pages, "page_size": page_size, "pages_per_row": pages_per_row}
        sizes = {name: read_size(name, number) for name, number in sizes.items()}
        rows, heads, width, value_width, pages, size, most = sizes.values()
        dtype = float_dtype("dtype", dtype)
        key = jnp.zeros((pages, heads, size, width), dtype)
        value = jnp.zeros((pages, heads, size, value_width), dtype)
        table = jnp.full((rows, most), -1, jnp.int32)
        return cls(key, value, table, jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.int32))

    _axes = ("num_pages", "key_heads", "page_size", "key_width")

    @property
    def _stored(self) -> tuple[Any, Any]:
        return self.key_pages, self.value_pages

    @property
    def _stores(self) -> tuple[Pages, Pages]:
        filled = -(-jnp.minimum(self.lengths, self.capacity) // self.page_size)
        key, value = self._stored
        return Pages(key, self.page_table, filled), Pages(value, self.page_table, filled)

    @property
    def num_pages(self) -> int:
        """Pages in memory."""
        return self.key_pages.shape[0]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.key_pages.shape[2]

    @property
    def key(self) -> Float[Array, "batch K S D"]:
        """The rows' keys in order, S = pages_per_row * page_size; zero where a row holds no page."""
        return _gather(self._stores[0])

    @property
    def value(self) -> Float[Array, "batch K S E"]:
        """The rows' values, as `key`."""
        return _gather(self._stores[1])

    @property
    def start(self) -> Int[Array, " batch"]:
        """Position of the first slot of `key`, 0: `key_offset=` of `attend`."""
        return jnp.zeros_like(self.lengths)

    @property
    def capacity(self) -> Int[Array, " batch"]:
        """Tokens that the pages of each row hold."""
        return jnp.sum(self.page_table >= 0, axis=1, dtype=jnp.int32) * self.page_size

    @property
    def valid(self) -> Mask:
        """A mask that hides slots without a token; join it with masks that are not causal."""
        return rows_of_lengths(jnp.minimum(self.lengths, self.capacity))

    @property
    def overflowed(self) -> Bool[Array, " batch"]:
        """True where tokens were appended under jit beyond the pages of a row."""
        return self.lengths > self.capacity

    @property
    def free_pages(self) -> np.ndarray:
        """Pages that no row holds, ascending; outside jit."""
        return np.setdiff1d(np.arange(self.num_pages), self._known_table("free_pages"))

    def _extend(self, chunk: Chunk) -> PagedKVCache:
        for name, tokens in (("key", chunk.key), ("value", chunk.value)):
            if sharding := explicit_sharding(tokens):
                raise ValueError(
                    f"{name}: expected tokens whole on every device, as pages are of all rows together; got"
                    f" {sharding.spec}. Write jax.sharding.reshard({name}, jax.P())"
                )
        check_room(self.lengths, chunk.real, self.capacity, "Assign the row more pages from cache.free_pages")
        return _append(self, chunk)

    def _shorten(self, lengths: Array) -> PagedKVCache:
        if is_concrete((self, lengths)):
            stored = np.minimum(self.lengths, self.capacity)
            for row in np.flatnonzero((np.asarray(lengths) < self.shared) | (np.asarray(lengths) > stored)):
                raise ValueError(
                    f"lengths: expected {self.shared[row]}..{stored[row]} for row {row}, from the tokens in"
                    f" shared pages to those stored; got {lengths[row]}. To start the row anew, release it"
                )
        return dataclasses.replace(self, lengths=jnp.clip(lengths, self.shared, self.lengths))

    def assign(self, row: int, pages: int | ArrayLike) -> PagedKVCache:
        """Hand free pages to a row, after those it holds; outside jit.

        Args:
            row: 0..batch - 1.
            pages: page numbers among `free_pages`, in order.

        Returns:
            The cache in which the row has more room.

        Raises:
            TypeError: called within jit, numbers that are not integers.
            ValueError: a row or page that is not there, a page in use or named twice, more pages than
                `pages_per_row`, a row that has overflowed.
        """
        table = self._known_table("assign")
        row = self._row("row", row)
        numbers = _page_numbers(pages, self.num_pages)
        for page in numbers:
            if page in table:
                holders = np.flatnonzero((table == page).any(1)).tolist()
                raise ValueError(
                    f"pages: expected free pages, got {page}, in use by rows {holders}; take pages from"
                    " cache.free_pages, or use cache.share"
                )
        held = int((table[row] >= 0).sum())
        if held + numbers.size > table.shape[1]:
            raise ValueError(
                f"pages: expected at most {table.shape[1] - held} more pages for row {row}, which holds"
                f" {held} of pages_per_row={table.shape[1]}; got {numbers.size}"
            )
        if bool(self.overflowed[row]):
            raise ValueError(
                f"row: expected a row that has not overflowed, got row {row} with {self.lengths[row]} tokens"
                f" and room for {self.capacity[row]}: more room would hide the gap. Rewind it first"
            )
        table[row, held : held + numbers.size] = numbers
        return dataclasses.replace(self, page_table=jnp.asarray(table))

    def share(self, row: int, source: int, num_pages: int) -> PagedKVCache:
        """Let an empty row begin with the first pages of another, a prompt in common; outside jit.

        Args:
            row: a row that holds no page.
            source: the row whose tokens are shared. Neither row can be rewound into them any more.
            num_pages: how many of its pages, all of them full.

        Returns:
            The cache in which both rows begin with the same `num_pages * page_size` tokens.

        Raises:
            TypeError: called within jit, numbers that are not integers.
            ValueError: a row that is not there or holds pages, pages that are not full.
        """
        table = self._known_table("share")
        row, source = self._row("row", row), self._row("source", source)
        full = min(int(self.lengths[source]), int(self.capacity[source])) // self.page_size
        number = whole_number("num_pages", num_pages, 0)
        if number > full:
            raise ValueError(
                f"num_pages: expected at most {full}, the full pages of row {source}; got {number}"
            )
        if (table[row] >= 0).any():
            raise ValueError(f"row: expected a row without pages, got row {row}; release it first")
        table[row, :number] = table[source, :number]
        lengths = self.lengths.at[row].set(number * self.page_size)
        shared = self.shared.at[np.array([row, source])].max(number * self.page_size)
        return dataclasses.replace(self, page_table=jnp.asarray(table), lengths=lengths, shared=shared)

    def release(self, row: int) -> PagedKVCache:
        """Empty a row and give its pages back, save those that other rows share; outside jit.

        Args:
            row: 0..batch - 1.

        Returns:
            The cache in which the row has no token and no page.

        Raises:
            TypeError, ValueError: called within jit; a row that is not an integer, or not there.
        """
        table = self._known_table("release")
        row = self._row("row", row)
        table[row] = -1
        lengths, shared = self.lengths.at[row].set(0), self.shared.at[row].set(0)
        return dataclasses.replace(self, page_table=jnp.asarray(table), lengths=lengths, shared=shared)

    def _known_table(self, caller: str) -> np.ndarray:
        if not is_concrete(self):
            raise TypeError(
                f"{caller}: expected a cache outside jit, got one inside a trace; call it between steps"
            )
        return np.array(self.page_table)

    def _row(self, name: str, row: Any) -> int:
        number = whole_number(name, row, 0)
        if number >= self.batch:
            raise ValueError(f"{name}: expected 0..{self.batch - 1}, the rows of the cache; got {number}")
        return number

    def _loss(self, rows: np.ndarray) -> str:
        return (
            f"{self.lengths[rows].tolist()} tokens for rows {rows.tolist()}, whose pages hold"
            f" {self.capacity[rows].tolist()}. Assign pages before the step that needs them"
        )


@jax.jit
def _append(cache: PagedKVCache, chunk: Chunk) -> PagedKVCache:
    columns = cache.page_table.shape[1]
    room = columns * cache.page_size
    slots = chunk.slots(cache.lengths, room)
    # Truncating division compiles to a fraction of what flooring does, and slots are not negative.
    column = jnp.minimum(jax.lax.div(slots, jnp.int32(cache.page_size)), columns - 1)
    page = jnp.take_along_axis(cache.page_table, column, axis=1)
    page = jnp.where((slots < room) & (page >= 0), page, cache.num_pages)
    slot = jax.lax.rem(slots, jnp.int32(cache.page_size))

    def write(pages: Array, tokens: Array) -> Array:
        return pages.at[page, :, slot].set(tokens.swapaxes(1, 2), mode="drop")

    key, value = write(cache.key_pages, chunk.key), write(cache.value_pages, chunk.value)
    lengths = cache.lengths + chunk.real
    return dataclasses.replace(cache, key_pages=key, value_pages=value, lengths=lengths)


@jax.jit
def _gather(pages: Pages) -> Array:
    return pages.array()


def _page_numbers(pages: Any, num_pages: int) -> np.ndarray:
    """Check for different page numbers that exist, and return them."""
    numbers = np.atleast_1d(integers("pages", pages))
    if numbers.ndim != 1:
        raise TypeError(f"pages: expected integers, got an array of shape {numbers.shape}")
    for page in numbers:
        if not 0 <= page < num_pages:
            raise ValueError(f"pages: expected 0..{num_pages - 1}, the pages there are; got {page}")
    if len(set(numbers.tolist())) != numbers.size:
        raise ValueError(f"pages: expected each page once, got {numbers.tolist()}")
    return numbers
