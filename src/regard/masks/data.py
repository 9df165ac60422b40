"""The arrays a mask carries: how they are read, printed and checked against a call."""

from __future__ import annotations

import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.masks.grid import is_concrete


def whole_number(name: str, value: Any, least: int) -> int:
    """A size that is known before tracing."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer known before tracing, got {value!r}") from None
    if number < least or isinstance(value, bool):
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return number


def integers(name: str, value: Any) -> Any:
    """An int32 array; NumPy stays NumPy, so that what is known while tracing stays known."""
    array: Any = value if hasattr(value, "dtype") else np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: expected integers, got {array.dtype}")
    return array if array.dtype == np.int32 else array.astype(np.int32)


def booleans(name: str, value: Any) -> Any:
    array: Any = value if hasattr(value, "dtype") else np.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.integer):
        return array != 0
    if array.dtype != bool:
        raise TypeError(
            f"{name}: expected a boolean or integer array, nonzero = may attend, got {array.dtype};"
            " pass additive masks as `bias=`"
        )
    return array


def literal(array: Any) -> str:
    """The array as code when it is small and known, else its type."""
    if is_concrete(array) and np.size(array) <= 16:
        return str(np.asarray(array).tolist())
    return f"<{array.dtype}{list(np.shape(array))}>"


def check_rows(name: str, shape: tuple[int, ...], leading: tuple[int, ...]) -> None:
    """Per-row data aligns with the first leading axes of query."""
    fits = len(shape) <= len(leading) and all(n in (1, m) for n, m in zip(shape, leading, strict=False))
    if not fits:
        raise ValueError(
            f"{name}: expected leading axes that match the first leading axes of query, {leading};"
            f" got {shape}"
        )


def check_width(name: str, what: str, got: int, expected: int) -> None:
    if got != expected:
        raise ValueError(f"{name}: expected {expected} entries on the last axis, one per {what}; got {got}")


def check_broadcast(
    name: str,
    shape: tuple[int, ...],
    leading: tuple[int, ...],
    num_queries: int,
    num_keys: int,
    *,
    wrapped: bool = False,
) -> None:
    """NumPy's rule, except where a shape could be read in two ways that both fit.

    Guessing there is how the mask of one example lands on a head, or on the queries, of another. The last
    two axes of an array that the caller `wrapped` are stated.
    """
    full = (*leading, num_queries, num_keys)
    missing = len(full) - len(shape)
    spelled = f"{name}: expected an array that broadcasts to (*B, T, S) = {full}, got shape {shape}"
    per_key = f"; for one entry per key use masks.valid_keys({name})" if name == "mask" else ""
    if missing < 0 or any(n not in (1, m) for n, m in zip(shape, full[missing:], strict=True)):
        per_row = f" For one {name} per batch row, add head axes: {name}[:, None]"
        raise ValueError(f"{spelled}{per_key}.{per_row if len(leading) > 1 else ''}")
    first, rank = next(iter(shape), 1), len(shape)
    elsewhere = leading[:missing] if rank > 2 else leading[: rank == 2 and not wrapped]
    if first > 1 and first in elsewhere:
        meant = "heads" if rank > 2 else "queries"
        raise ValueError(
            f"{spelled}: its first axis could be the batch or the {meant}, both {first}. Write {name}[None]"
            f" if it is the {meant}; {name}[:{', None' * missing}] if it is the batch{per_key}"
        )


def split(array: Array, block: int, axis: int = -1) -> Array:
    """`array` with `axis`, a negative number, as (N, block); a short last block repeats its last entry."""
    length = array.shape[axis]
    count = -(-length // block)
    if count * block != length:
        widths = [(0, 0)] * array.ndim
        widths[axis] = (0, count * block - length)
        array = jnp.pad(array, widths, mode="edge")
    place = array.ndim + axis
    return array.reshape((*array.shape[:place], count, block, *array.shape[place + 1 :]))
