"""The data of a mask: read, printed, checked against a call."""

import dataclasses
import difflib
import inspect
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import evaluate, read_array
from regard.axes import Array
from regard.masks.grid import is_concrete


def check_boolean(name: str, value: Any, nonzero: str = "may attend") -> Any:
    """Return a boolean array: True where the one given is nonzero, which errors say the meaning of."""
    if isinstance(value, str) or (callable(value) and not hasattr(value, "dtype")):
        hint = suggest_call("masks", value)
        hint = hint or "; read text by masks.parse, and wrap a function of positions by masks.predicate"
        shown = getattr(value, "__name__", repr(value))
        raise TypeError(f"{name}: expected a masks.Mask or a boolean array, got {shown}{hint}")
    array: Any = read_array(name, value)
    if jnp.issubdtype(array.dtype, jnp.integer):
        return evaluate(lambda array: array.astype(bool), array)
    if array.dtype != bool:
        hint = "; pass additive masks as `bias=`" if jnp.issubdtype(array.dtype, jnp.floating) else ""
        shown = repr(value) if array.dtype == object else array.dtype
        raise TypeError(
            f"{name}: expected a boolean or integer array, nonzero = {nonzero}, got {shown}{hint}"
        )
    return array


def suggest_call(package: str, value: Any) -> str:
    """Return a hint where a function of a package, or its name, stands in place of what it makes; else ""."""
    module = sys.modules[f"regard.{package}"]
    made = {name: getattr(module, name) for name in module.__all__ if name.islower()}
    if isinstance(value, str):
        matches = difflib.get_close_matches(value.partition("(")[0], made, n=1)
    else:
        matches = [name for name, function in made.items() if function is value]
    if not matches:
        return ""
    parameters = inspect.signature(made[matches[0]]).parameters.values()
    needed = ", ".join(param.name for param in parameters if param.default is param.empty)
    return f"; did you mean {package}.{matches[0]}({needed})?"


def literal(array: Any) -> str:
    """Return the array as code when it is small and known, else its type."""
    if is_concrete(array) and np.size(array) <= 16:
        return str(np.asarray(array).tolist())
    return f"<{array.dtype}{list(np.shape(array))}>"


def spell_record(record: Any) -> str:
    """Return the code that makes a record, if a function of its class's name does, from its fields."""
    fields = (getattr(record, field.name) for field in dataclasses.fields(record))
    return f"{snake_case(type(record).__name__)}({', '.join(map(literal, fields))})"


def snake_case(name: str) -> str:
    """Return the name of a class as that of a function."""
    return re.sub(r"(?<=.)(?=[A-Z])", "_", name).lower()


def check_rows(name: str, shape: tuple[int, ...], leading: tuple[int, ...] | None) -> None:
    """Raise where per-row data does not align with the first leading axes of query, if they are known."""
    if leading is None:
        return
    fits = len(shape) <= len(leading) and all(n in (1, m) for n, m in zip(shape, leading, strict=False))
    if not fits:
        raise ValueError(
            f"{name}: expected leading axes that match the first leading axes of query, {leading};"
            f" got {shape}"
        )


def check_width(name: str, what: str, got: int, expected: int) -> None:
    """Raise where the last axis of data does not have one entry per query or key."""
    if got != expected:
        raise ValueError(f"{name}: expected {expected} entries on the last axis, one per {what}; got {got}")


def check_broadcast(
    name: str, shape: tuple[int, ...], full: tuple[int, ...], *, wrapped: bool = False
) -> None:
    """Raise where an array does not broadcast to (*B, T, S), or a shape could be read in two ways that fit.

    Guessing there is how the mask of one example lands on a head, or on the queries, of another. The last
    two axes of an array that the caller `wrapped` are stated.
    """
    leading, missing = full[:-2], len(full) - len(shape)
    spelled = f"{name}: expected an array that broadcasts to (*B, T, S) = {full}, got shape {shape}"
    is_row = name == "mask" and len(shape) < 3
    per_key = f"; for one entry per key use masks.valid_keys({name})" if is_row else ""
    if missing < 0 or any(n not in (1, m) for n, m in zip(shape, full[missing:], strict=True)):
        per_row = f" For one {name} per batch row, add head axes: {name}[:, None]"
        if missing < 0:  # as of heads that are grouped in two axes
            per_row = f" Its {len(shape)} axes are more than {len(full)}"
        raise ValueError(f"{spelled}{per_key}.{per_row if len(leading) > 1 else ''}")
    first, rank = next(iter(shape), 1), len(shape)
    elsewhere = leading[:missing] if rank > 2 else leading[: rank == 2 and not wrapped]
    if first not in (0, 1) and first in elsewhere:
        meant = "heads" if rank > 2 else "queries"
        raise ValueError(
            f"{spelled}: its first axis could be the batch or the {meant}, both {first}. Write {name}[None]"
            f" if it is the {meant}; {name}[:{', None' * missing}] if it is the batch{per_key}"
        )


def split(array: Array, block: int, axis: int = -1) -> Array:
    """Reshape `axis`, a negative number, to (N, block); a short last block repeats its last entry."""
    length = array.shape[axis]
    count = -(-length // block)
    if count * block != length:
        # Other axes may be divided over devices, where `jnp.pad` would slice them.
        last = jax.lax.slice_in_dim(array, length - 1, length, axis=axis)
        array = jnp.concatenate([array, jnp.repeat(last, count * block - length, axis)], axis)
    index = array.ndim + axis
    return array.reshape((*array.shape[:index], count, block, *array.shape[index + 1 :]))
