"""Masks that a function of positions decides, and of batch row and head."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import as_array
from regard.axes import Array, broadcast_shapes
from regard.explicit_meshes import explicit_mesh
from regard.manual_meshes import run_anywhere
from regard.masks.closures import Pinned, demand_unchanged, pin, reads_argument, run_pinned, trace_pinned
from regard.masks.data import check_rows
from regard.masks.grid import Blocks, Grid
from regard.masks.mask import Mask, Take
from regard.masks.tile_kinds import TileKind, classify_cells, tile_kind
from regard.records import record, static

_PAIR, _ALL = ("query", "key"), ("batch", "head", "query", "key")
# Positions of some queries and keys, to see what a function reads beside them.
_EXAMPLES = [
    (np.zeros((rows, 1), np.int32), np.zeros((1, columns), np.int32)) for rows, columns in ((3, 5), (5, 3))
]
# What arrays say where one number is needed.
_SINGLE = "truth value of an array|Only (integer )?scalar arrays|o[fn] traced array"
TilePromises = Callable[[Array, Array, Array, Array], tuple[Array, Array]]


def predicate(
    fn: Callable[..., Array], *, classify: Literal["exact", "partial"] | TilePromises = "exact"
) -> Mask:
    """Let `fn` decide from the two positions, and from batch row and head if it asks for them.

    keep(b, h, q, k) = `fn(query=q, key=k, batch=b, head=h)`, with those of the four that fn takes

    Args:
        fn: called with those arguments that its parameters name, in any order, of `batch`, `head`, `query`
            and `key`. Parameters with other names are told by their number: two are (query, key), four are
            (batch, head, query, key), as in the `mask_mod` of FlexAttention, and any of these names beside
            them stands in its place. `query` and `key` are int32 arrays of positions that broadcast against
            each other, `batch` and `head` int32 scalars: the index on the first leading axis of query, 0
            where heads are the only one, and that of the query head. Returns a boolean array that broadcasts
            to the pairs. It may close over arrays, traced ones too. Every call looks at what it reads
            from around it; programs are kept for what it computes.
        classify: how tiles without work are found. "exact" evaluates fn at every pair once more before the
            call, one row of tiles at a time, and for each batch row and head if fn takes them: T x S work,
            after which empty tiles are skipped and full ones not masked. "partial" finds none: every tile is
            computed and masked; for masks without structure, and where the other masks that this one is
            joined to by `&` skip what there is to skip. A function of (query_first, query_last, key_first,
            key_last), the positions at the ends of each tile as int32 arrays that broadcast, returns two
            boolean arrays (empty, full): promises for every pair between the ends, batch row and head, in
            O(tiles).

    Returns:
        A mask on positions; if fn does not compute with `query`, calls of T != S need no offset. Batch rows
        and heads are those of a call; by itself, as in `dense` and `picture`, the mask is that of row 0 and
        head 0, and `mask.number_leading((batch, heads))` that of all.

    Raises:
        TypeError: something that cannot be called, parameters that can be read in no such way, or (when
            evaluated) an answer that is not boolean.
        ValueError: an unknown word for classify.

    Example:
        >>> from regard import masks
        >>> def same_parity(query, key):
        ...     return query % 2 == key % 2
        >>> masks.predicate(same_parity).dense(3).astype(int).tolist()
        [[1, 0, 1], [0, 1, 0], [1, 0, 1]]
        >>> def wider_by_head(head, query, key):
        ...     return abs(query - key) <= head
        >>> masks.predicate(wider_by_head).number_leading((2,)).dense(3).astype(int).tolist()
        [[[1, 0, 0], [0, 1, 0], [0, 0, 1]], [[1, 1, 0], [1, 1, 1], [0, 1, 1]]]

    Reference: Dong et al., "Flex Attention", 2024, for functions of four numbers.
    """
    if not callable(fn):
        raise TypeError(f"fn: expected a function of (query_position, key_position), got {fn!r}")
    if not callable(classify) and classify not in ("exact", "partial"):
        raise ValueError(f'classify: expected "exact", "partial" or a function, got {classify!r}')
    return Predicate(fn, _read_parameters(fn), classify, None, None, (), None)


def _read_parameters(fn: Callable[..., Array]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which numbers a function takes by position, in its order, and which by keyword."""
    try:
        parameters = [*inspect.signature(fn).parameters.values()]
    except (TypeError, ValueError):  # of functions that are not Python's
        return _PAIR, ()
    every = [param for param in parameters if param.kind not in (param.VAR_POSITIONAL, param.VAR_KEYWORD)]
    needed = [param for param in every if param.default is param.empty]
    named = [param for param in every if param.name in _ALL]
    if named and all(param in named for param in needed):
        placed = tuple(param.name for param in named if param.kind is param.POSITIONAL_ONLY)
        return placed, tuple(param.name for param in named if param.name not in placed)
    takes_any = any(param.kind is param.VAR_POSITIONAL for param in parameters)
    by_number = {0: _PAIR if takes_any else None, 2: _PAIR, 4: _ALL}
    taken = by_number.get(len(needed))
    # A name of the four that stands elsewhere would be given another's number.
    is_misplaced = any(
        param in named and param.name != name for param, name in zip(needed, taken or (), strict=False)
    )
    if taken is None or is_misplaced or any(param.kind is param.KEYWORD_ONLY for param in needed):
        raise TypeError(
            "fn: expected fn(query, key), fn(batch, head, query, key), or a function with some of these names"
            f" in any order, got {_name(fn)}{inspect.signature(fn)}; bind others with functools.partial"
        )
    return taken, ()


@record
class Predicate(Mask):
    """Pairs that a function keeps."""

    fn: Callable[..., Array] = static()
    takes: tuple[tuple[str, ...], tuple[str, ...]] = static()  # by position, by keyword
    classifier: str | TilePromises = static()
    batch: Any  # (B,), numbers of rows; None, not of a call yet, or not asked for
    head: Any  # (*1, H)
    constants: tuple[Any, ...]  # what fn closes over, which may be traced
    program: Any = static()  # fn as a program that takes them; None, fn itself is called

    @property
    def _reads(self) -> set[str]:
        return {name for names in self.takes for name in names}

    @property
    def _reads_numbers(self) -> bool:
        return not self._reads.isdisjoint(("batch", "head"))

    @property
    def reads_positions(self) -> bool:
        example = (np.int32(0), np.int32(0), *_EXAMPLES[0])
        return "query" in self._reads and reads_argument(self._call, _ALL.index("query"), example)

    @property
    def leading_axes(self) -> int:
        return max(np.ndim(self.batch), np.ndim(self.head))

    @property
    def reads_cells(self) -> bool:
        return self.classifier == "exact"

    def number_leading(self, leading: tuple[int, ...] | None) -> Mask:
        if leading is None:
            return dataclasses.replace(self, batch=None, head=None)
        if not leading or not self._reads_numbers or self.leading_axes:
            return self
        *rows, heads = leading
        batch = np.arange(rows[0] if rows else 1, dtype=np.int32)
        head = np.arange(heads, dtype=np.int32).reshape((*(1 for _ in rows), heads))
        return dataclasses.replace(self, batch=batch, head=head)

    def slice_batch(self, take: Take, leading_axes: int) -> Mask:
        if not self.leading_axes:
            return self
        return dataclasses.replace(self, batch=take(self.batch, 0), head=take(self.head, 0))

    def slice_grid(self, grid: Grid) -> Mask:
        return self

    def check(self, leading: tuple[int, ...] | None, num_queries: int, num_keys: int) -> None:
        for name, numbers in (("batch rows", self.batch), ("heads", self.head)):
            check_rows(f"predicate, numbered by the {name} of a call", np.shape(numbers), leading)
        if self.head is not None and leading is not None and np.ndim(self.head) != len(leading):
            raise ValueError(
                f"predicate: expected numbers for a call of {len(leading)} leading axes, {leading}; got those"
                f" of {np.ndim(self.head)}"
            )

    def pin(self) -> Mask:
        examples = [(np.int32(0), np.int32(0), *pair) for pair in _EXAMPLES]
        if isinstance(self.fn, Pinned):
            demand_unchanged(self.fn, self._call, *examples)
            return self
        fn, constants = pin(self.fn, self._call, *examples)
        classifier = self.classifier
        if callable(classifier):
            ends = (*_EXAMPLES[0], *_EXAMPLES[0])
            classifier, read = pin(classifier, classifier, (ends[0], ends[0], ends[1], ends[1]))
            classifier = Pinned(classifier.fn, object()) if read else classifier
        return dataclasses.replace(self, fn=fn, classifier=classifier, constants=constants)

    def closure_convert(self, grid: Grid) -> Mask:
        number, positions = np.int32(0), (grid.query_position, grid.key_position)
        if self._reads_numbers:
            positions = tuple(jnp.zeros(position.shape[-2:], jnp.int32) for position in positions)
        program = trace_pinned(self._call, self.constants, number, number, *positions)
        return dataclasses.replace(self, constants=tuple(program.consts), program=program.jaxpr)

    def keep(self, grid: Grid) -> Array:
        query, key = grid.query_position, grid.key_position
        if not self._reads_numbers:
            shape = broadcast_shapes(query.shape, key.shape)
            return self._evaluate(np.int32(0), np.int32(0), query, key, shape)
        shape = (query.shape[-2], key.shape[-1])
        batch = jnp.zeros(1, jnp.int32) if self.batch is None else jnp.asarray(self.batch).reshape(-1)
        head = jnp.zeros(1, jnp.int32) if self.head is None else jnp.asarray(self.head).reshape(-1)

        def keep_one(row: Array, head: Array, query: Array, key: Array) -> Array:
            return self._evaluate(row, head, query, key, shape)

        if grid.leading_axes < 2:  # of heads at most, which positions then go by, too
            query = query.reshape((math.prod(query.shape[:-2]), *query.shape[-2:]))
            key = key.reshape((math.prod(key.shape[:-2]), *key.shape[-2:]))
            may_attend = _map(keep_one, batch, head, query, key)
            return may_attend.reshape((*may_attend.shape[: grid.leading_axes], *shape))
        between = broadcast_shapes(query.shape[1:-3], key.shape[1:-3])

        def keep_heads(row: Array, query: Array, key: Array) -> Array:
            return _map(lambda *numbers: keep_one(row, *numbers), head, query, key)

        def fold(numbers: Array) -> Array:
            if math.prod(numbers.shape[1:-3]) > 1:
                numbers = jnp.broadcast_to(numbers, (numbers.shape[0], *between, *numbers.shape[-3:]))
            return numbers.reshape((numbers.shape[0], math.prod(numbers.shape[1:-3]), *numbers.shape[-3:]))

        may_attend = _map(
            lambda row, *places: _map(functools.partial(keep_heads, row), *places),
            *(batch, fold(query), fold(key)),
        )
        return may_attend.reshape((len(may_attend), *between, *may_attend.shape[2:]))

    def classify(self, blocks: Blocks) -> Array:
        if self.classifier == "exact":
            return classify_cells(self.keep, blocks)
        if not callable(self.classifier):
            return jnp.full((1,) * (blocks.leading_axes + 2), TileKind.PARTIAL, jnp.int8)
        ends, key_ends = blocks.query_ends, blocks.key_ends
        empty, full = map(jnp.asarray, call_closure("classify", self.classifier, *ends, *key_ends))
        for name, promise in (("empty", empty), ("full", full)):
            if promise.dtype != bool:
                raise TypeError(f"classify: expected booleans (empty, full), got {promise.dtype} as {name}")
        return jnp.broadcast_to(tile_kind(empty, full), broadcast_shapes(ends[0].shape, key_ends[0].shape))

    def expression(self) -> str:
        chosen = self.classifier if isinstance(self.classifier, str) else _name(self.classifier)
        return f"predicate({_name(self.fn)}{'' if chosen == 'exact' else f', classify={chosen}'})"

    def _call(self, *numbers: Any) -> Any:
        by_name = dict(zip(_ALL, numbers, strict=True))
        placed, named = self.takes
        by_keyword = {name: by_name[name] for name in named}
        may_attend = call_closure("predicate", self.fn, *(by_name[name] for name in placed), **by_keyword)
        return as_array("predicate", "fn to return booleans (True = may attend)", jnp.asarray, may_attend)

    def _evaluate(self, batch: Any, head: Any, query: Array, key: Array, shape: tuple[int, ...]) -> Array:
        """Return the function's answer for one batch row and head, checked: booleans, one per pair."""
        if self.program is None:
            keep = run_pinned(self._call, self.constants, batch, head, query, key)
        else:
            (keep,) = run_anywhere(self.program, self.constants, batch, head, query, key)
        if keep.dtype != bool:
            raise TypeError(
                f"predicate: expected fn to return booleans (True = may attend), got {keep.dtype}"
            )
        try:
            return jnp.broadcast_to(keep, shape)
        except ValueError:
            raise ValueError(
                f"predicate: expected fn to return one boolean per pair, an array that broadcasts to {shape};"
                f" got shape {keep.shape}"
            ) from None


def call_closure(name: str, fn: Any, *arguments: Any, **named: Any) -> Any:
    """Call a function of the caller's; name what it closes over that a call cannot compute with."""
    try:
        return fn(*arguments, **named)
    except (TypeError, ValueError) as error:
        if re.search(_SINGLE, str(error)):
            raise TypeError(
                f"{name}: expected fn to compute with arrays of jax.numpy, got a part that needs one number"
                " or NumPy; write &, | and ~ for `and`, `or`, `not` and chained comparisons, jnp.where for"
                " `if`, jnp.asarray(table)[query, key] for lists"
            ) from error
        if isinstance(error, TypeError):
            raise
        # Calls run with automatic axes, where JAX computes with no array that has explicit ones.
        for variable, value in _closed_over(fn).items():
            if explicit_mesh(value) is not None:
                raise ValueError(
                    f"{name}: expected fn to close over arrays without explicit mesh axes, got {variable};"
                    f" let it read numpy.asarray({variable}), or, where that is traced, write a mask or score"
                    " of your own, with it as a field"
                ) from error
        raise


def _closed_over(fn: Any) -> dict[str, Any]:
    """Return the variables that a function reads from around it, by name."""
    variables: dict[str, Any] = {}
    fn = fn.fn if isinstance(fn, Pinned) else fn
    while isinstance(fn, functools.partial):
        variables |= {f"argument {index}": argument for index, argument in enumerate(fn.args)} | fn.keywords
        fn = fn.func
    if not inspect.isroutine(fn):
        fn, variables["self"] = type(fn).__call__, fn
    if inspect.ismethod(fn):
        variables["self"] = fn.__self__
    if inspect.isfunction(fn) or inspect.ismethod(fn):
        closure = inspect.getclosurevars(fn)
        variables |= {**closure.globals, **closure.nonlocals}
    return variables


def _map(fn: Callable[..., Array], *arrays: Array) -> Array:
    """Map a function over the first axis of arrays; one of length 1 serves all."""
    axes = [None if len(array) == 1 else 0 for array in arrays]
    operands = [array[0] if axis is None else array for array, axis in zip(arrays, axes, strict=True)]
    return jax.vmap(fn, axes)(*operands) if 0 in axes else fn(*operands)[None]


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", repr(fn))
