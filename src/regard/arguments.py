"""Arguments, read and checked: numbers, flags and arrays, each told by its name where it is none."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

LARGEST = np.iinfo(np.int32).max  # positions lie below: as a bound, it is none


def whole_number(name: str, value: Any, least: int, *, clamp: bool = False) -> int:
    """Return a size that is known before tracing; `clamp` where beyond `LARGEST` all sizes mean the same."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer known before tracing, got {value!r}") from None
    if number < least or isinstance(value, bool):
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return min(number, LARGEST) if clamp else number


def read_number(name: str, value: Any) -> float:
    """Return a number that is known before tracing."""
    try:
        return float(+value)  # text of a number has no sign
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name}: expected a number known before tracing, got {value!r}") from None


def check_flag(name: str, flag: Any) -> bool:
    """Return True or False."""
    if not isinstance(flag, bool | np.bool_):
        raise TypeError(f"{name}: expected True or False, known before tracing; got {flag!r}")
    return bool(flag)


def check_reach(name: str, end: int) -> None:
    """Raise where positions that end before this one are too many for int32."""
    if isinstance(end, int) and end > LARGEST:  # a symbolic one is not known
        raise ValueError(
            f"{name}: expected positions below {LARGEST}, which int32 holds; got up to {end - 1}"
        )


def read_array(name: str, value: Any, dtype: Any = None) -> Any:
    """Return arrays of NumPy and JAX, and shapes, as they are, other libraries' and lists through NumPy.

    Numbers and lists, which have no dtype of their own, take this one, or int32 if empty.
    """
    if isinstance(value, jax.Array) or isinstance(getattr(value, "dtype", None), np.dtype):
        return value
    if hasattr(value, "dtype"):
        return as_array(name, "an array", np.asarray, value)
    is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))  # of a list
    array = as_array(name, "an array", jnp.asarray if is_traced else np.asarray, value, dtype)
    return array if array.size or dtype is not None else array.astype(np.int32)


def as_array(name: str, expected: str, make: Callable[..., Any], value: Any, *options: Any) -> Any:
    """Return an array made of an argument, or say why none can be."""
    try:
        return make(value, *options)
    except (TypeError, ValueError, OverflowError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        hint = "; lists within a list must be of one length" if isinstance(value, list | tuple) else ""
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__} ({reason}){hint}") from None


def integers(
    name: str,
    value: Any,
    *,
    least: int | None = None,
    most: int = LARGEST,
    clamp: bool = False,
    wide: bool = False,
) -> Any:
    """Return an int32 array; NumPy stays NumPy, so that what is known while tracing stays known.

    Numbers beyond int32 are refused where they are known; else, and with `clamp` everywhere, the nearest up
    to `most` takes their place. With `wide`, those that are not known keep their 64 bits. Numbers below
    `least` are refused where the host has them.
    """
    array: Any = read_array(name, value)
    if array.dtype == object and all(isinstance(number, int) for number in array.flat):
        array = np.asarray(np.clip(array, np.iinfo(np.int64).min, np.iinfo(np.int64).max), np.int64)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: expected integers, got {array.dtype}")
    if isinstance(array, jax.ShapeDtypeStruct):
        width = jax.dtypes.canonicalize_dtype(array.dtype).itemsize
        return jax.ShapeDtypeStruct(array.shape, np.int64 if wide and width > 4 else np.int32)
    on_host = not isinstance(array, jax.Array)
    if least is not None and on_host and np.any(array < least):
        raise ValueError(f"{name}: expected integers of at least {least}, got {array.min()}")
    if jnp.iinfo(array.dtype).max > LARGEST:
        lowest = max(-LARGEST - 1, int(jnp.iinfo(array.dtype).min))
        if clamp:
            array = array.clip(lowest, LARGEST)
        elif on_host or (not isinstance(array, Tracer) and array.is_fully_addressable):
            with jax.transfer_guard_device_to_host("allow"):
                numbers: Any = np.asarray(array)
            beyond = numbers[(numbers < lowest) | (numbers > LARGEST)]
            if beyond.size:
                raise ValueError(f"{name}: expected integers that int32 holds, got {beyond[0]}")
        elif wide:  # of 32 bits, each unsigned number has one of its own
            return array.astype(np.int64 if array.dtype.itemsize > 4 else np.int32)
        else:
            array = array.clip(lowest, most)
    return array if array.dtype == np.int32 else array.astype(np.int32)


def evaluate(function: Callable[..., Any], *arrays: Any) -> Any:
    """Call a function of arrays; of shapes, return the shape of what it would return."""
    if not any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
        return function(*arrays)
    # With the widths that arrays would have, of which jax 0.12 warns.
    dtypes = (jax.dtypes.canonicalize_dtype(array.dtype) for array in arrays)
    shapes = (jax.ShapeDtypeStruct(array.shape, dtype) for array, dtype in zip(arrays, dtypes, strict=True))
    return jax.eval_shape(function, *shapes)
