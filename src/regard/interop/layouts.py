"""Checks and conversions of arguments in other libraries' order of axes."""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard import masks
from regard.arguments import as_array, check_option, integers
from regard.attention import run_problem
from regard.axes import Array
from regard.engine.call.canonicalization import canonicalize, check_rng, float_array
from regard.engine.call.options import Options
from regard.engine.call.stores import LengthFirst
from regard.masks import Mask
from regard.masks.data import check_boolean, check_broadcast
from regard.masks.grid import is_concrete


class HeadsLast:
    """Arrays (*B, length, heads, width) of another library's call, checked, or one example without *B.

    `shape` is that of their scores, (*B, H, T, S), where one example is a batch of 1.
    """

    def __init__(self, query: Any, key: Any, value: Any, ranks: range, score: Any = None):
        self._is_single = np.ndim(query) == 3
        query = _batched("query", query, ranks)
        key = _batched("key", key, ranks)
        value = _batched("value", value, ranks)
        shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
        order = (
            ". Arrays are (batch, length, heads, width): from (batch, heads, length, width), swap axes -3 and"
            " -2 first, or call regard.attend"
        )
        for name, array in (("key", key), ("value", value)):
            if array.shape[:-3] != query.shape[:-3]:
                raise ValueError(
                    f"{name}: expected the batch axes of query, {query.shape[:-3]}; got {shapes}"
                )
        if key.shape[-1] != query.shape[-1] and score is None:  # which may take keys of another width
            raise ValueError(
                f"key: expected the head width of query, {query.shape[-1]}, on its last axis; got"
                f" {shapes}{order}"
            )
        if value.shape[-3:-1] != key.shape[-3:-1]:
            raise ValueError(
                f"value: expected the length and the heads of key, {key.shape[-3:-1]}; got {shapes}{order}"
            )
        if not key.shape[-2] or query.shape[-2] % key.shape[-2]:
            raise ValueError(
                f"key: expected heads on axis -2 that divide those of query, {query.shape[-2]}; got"
                f" {shapes}{order}"
            )
        self.query, self._key, self._value = _swap_heads(query), LengthFirst(key), LengthFirst(value)
        self.shape = (*self.query.shape[:-1], key.shape[-3])

    def attend(self, *, backend: str | None = None, **options: Any) -> tuple[Array, dict[str, Array]]:
        """Call `regard.attend`; return its output with heads last, and what `aux` names, heads first."""
        shapes = [jax.ShapeDtypeStruct(stored.shape, stored.dtype) for stored in (self._key, self._value)]
        problem = canonicalize(self.query, *shapes, **options)
        result = run_problem(dataclasses.replace(problem, key=self._key, value=self._value), backend)
        output, aux = result if options.get("aux") else (result, {})
        results = _swap_heads(output), aux
        return jax.tree.map(lambda array: array[0], results) if self._is_single else results


def read_arrays(**arrays: Any) -> dict[str, Array]:
    """Return what a call has in place of arrays as arrays, of any dtype and rank."""
    return {name: as_array(name, "an array", jnp.asarray, array) for name, array in arrays.items()}


def apply_to_three(name: str, function: Any, *arguments: Any, **options: Any) -> Any:
    """Return what a user's function makes of query, key and value: three arrays."""
    if not callable(function):
        raise TypeError(f"{name}: expected a function, got {type(function).__name__}")
    arrays = function(*arguments, **options)
    if not isinstance(arrays, list | tuple) or len(arrays) != 3:
        returned = f"{len(arrays)} arrays" if isinstance(arrays, list | tuple) else type(arrays).__name__
        raise TypeError(f"{name}: expected a function that returns query, key and value, got {returned}")
    return arrays


def _swap_heads(array: Any) -> Any:
    return jnp.swapaxes(array, -3, -2)


def _batched(name: str, array: Any, ranks: range) -> Array:
    array = float_array(name, array, 0)
    if array.ndim not in ranks:
        batch = "..." if ranks.stop > 5 else "batch"
        wanted = f"({batch}, length, heads, width) or (length, heads, width)"
        hints = {2: "a single head is array[:, None]", 5: "heads in groups share one axis, K x G long"}
        hint = f"; {hints[array.ndim]}" if array.ndim in hints else ""
        raise ValueError(f"{name}: expected {wanted}, got shape {tuple(array.shape)}{hint}")
    return array[None] if array.ndim == 3 else array


def read_mask(name: str, mask: Any, full: tuple[int, ...]) -> Mask | None:
    """Return a mask from an array that NumPy would broadcast to `full`, which is (*B, H, T, S)."""
    if mask is None or isinstance(mask, Mask):
        return mask
    return masks.from_array(_with_axes(name, check_boolean(name, mask), full))


def read_bias(name: str, bias: Any, full: tuple[int, ...]) -> Array | None:
    """Return a bias at the rank of `full`, (*B, H, T, S), to which NumPy would broadcast it."""
    return None if bias is None else _with_axes(name, float_array(name, bias, 0), full)


def _with_axes(name: str, array: Any, full: tuple[int, ...]) -> Any:
    # The last two axes are (T, S) here; with a third, a batch of as many examples as heads has two readings.
    check_broadcast(name, np.shape(array), full, wrapped=True)
    return array.reshape((*(1,) * (len(full) - array.ndim), *array.shape))


def all_of(parts: Sequence[Mask | None]) -> Mask | None:
    """Combine the masks that are not None; None for no mask."""
    present = [part for part in parts if part is not None]
    return functools.reduce(operator.and_, present) if present else None


def demand_key(name: str, rng: Any, rate: Any, reason: str, remedy: str) -> None:
    """Raise where a rate asks for random draws and there is no key."""
    if rate and rng is None:
        hint = f"pass one, such as jax.random.key(0), or {remedy}"
        raise ValueError(f"{name}: expected a random key because {reason}, got None; {hint}")
    if rate:
        check_rng(rate, rng, name)


def further_options(options: dict[str, Any], call: Callable[..., Any], **elsewhere: str) -> dict[str, Any]:
    """Return options of `attend` beside those of another library's call, which has some `elsewhere`."""
    for name in options.keys() & elsewhere.keys():
        raise TypeError(f"{name}: expected none here; {elsewhere[name]}")
    names = [name for name in inspect.signature(call).parameters if name not in ("self", "options")]
    names += [name for name in (*Options.__annotations__, "backend") if name not in (*names, *elsewhere)]
    for name in options:
        check_option(name, names)
    return options


def from_the_first(options: dict[str, Any], mask: Any, full: tuple[int, ...]) -> dict[str, Any]:
    """Place queries from position 0 on, which is what the arguments of other libraries mean.

    A mask or score of Regard's that reads positions is left to `attend`, which asks where lengths differ.
    """
    score = options.get("score")
    readers = [mask, *(score if isinstance(score, list | tuple) else [score])]
    asks = full[-2] != full[-1] and any(getattr(part, "reads_positions", False) for part in readers)
    is_placed = options.keys() & {"query_offset", "query_positions"}
    return options if is_placed or asks else {**options, "query_offset": 0}


def row_lengths(name: str, lengths: Any, batch: int, most: int | None = None) -> Any:
    """Check for one integer per batch row, between 0 and `most`, and return them."""
    array = integers(name, lengths)
    if array.shape != (batch,):
        raise ValueError(
            f"{name}: expected one integer per batch row, ({batch},); got shape {tuple(array.shape)}"
        )
    if most is not None and is_concrete(array):
        numbers = np.asarray(array)
        if not np.all((numbers >= 0) & (numbers <= most)):
            raise ValueError(f"{name}: expected lengths in 0..{most}, got {numbers.tolist()}")
    return array
