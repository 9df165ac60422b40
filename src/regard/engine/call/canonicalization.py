"""Check the arguments of a call, once, and fill in what was left out."""

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import as_array, check_flag, evaluate, indices, keep_array, read_array, read_number
from regard.engine.call.options import Options, fill_in
from regard.engine.call.problem import Problem, accumulation_dtype, broadcast_leading
from regard.masks import Mask, from_array
from regard.masks.alignment import place_queries, settle_positions
from regard.masks.data import check_boolean, check_broadcast
from regard.scores.score import compose, split_product

AUX = ("weights", "scores", "lse", "max_score", "argmax", "entropy")


def canonicalize(query: Any, key: Any, value: Any, **options: Unpack[Options]) -> Problem:
    """Check the arguments of a call and fill in what was left out."""
    query = float_array("query", query, 2)
    key = float_array("key", key, 2)
    value = float_array("value", value, 2)
    chosen = fill_in(options)
    metric, score = split_product(compose(chosen["score"]))
    if metric is not None:
        query = evaluate(metric.transform, query)
    leading = _check_shapes(query, key, value)
    if score is not None:
        score.check(leading)
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    mask = _check_mask(chosen["mask"], leading, num_queries, num_keys)
    bias = chosen["bias"]
    if bias is not None:
        bias = float_array("bias", bias, 0)
        check_broadcast("bias", bias.shape, (*leading, num_queries, num_keys))
    query_offset = _check_offset("query_offset", chosen["query_offset"], leading)
    key_offset = _check_offset("key_offset", chosen["key_offset"], leading)
    key_offset = None if isinstance(key_offset, int) and key_offset == 0 else key_offset
    query_offset = settle_positions("query", query_offset, chosen["query_positions"], num_queries, leading)
    key_offset = settle_positions("key", key_offset, chosen["key_positions"], num_keys, leading)
    query_offset, key_offset = jax.tree.map(keep_array, (query_offset, key_offset))
    is_unlike = num_queries != num_keys or key_offset is not None
    reads_positions = is_unlike and any(part is not None and part.reads_positions for part in (mask, score))
    try:
        query_offset = place_queries(num_queries, num_keys, query_offset, reads_positions, key_offset)
    except ValueError as error:
        # With heads last, heads are taken for lengths, and lengths, here alike, for heads.
        if query.ndim < 4 or query.shape[-3:-2] != key.shape[-3:-2] or num_queries % max(num_keys, 1):
            raise
        raise ValueError(
            f"{error} If arrays are (batch, length, heads, width), of {query.shape[-3]} tokens and"
            f" {num_queries} heads on {num_keys}, call regard.interop.jax_nn.dot_product_attention, or swap"
            " axes -3 and -2."
        ) from None
    if mask is not None:
        mask.check_positions(query_offset, key_offset)
    rate, aux = check_rate("dropout_rate", chosen["dropout_rate"]), _check_aux(chosen["aux"])
    return Problem(
        query,
        key,
        value,
        mask=None if mask is None else mask.pin(),
        bias=bias,
        score=None if score is None else score.pin(accumulation_dtype(query, key, value)),
        scale=_check_scale(chosen["scale"], query, key, value),
        sinks=None if chosen["sinks"] is None else _check_sinks(chosen["sinks"], leading),
        dropout_rate=rate,
        rng=check_rng(rate, chosen["rng"]) if rate else None,
        query_offset=query_offset,
        key_offset=key_offset,
        aux=aux,
        rows=check_chosen_rows("rows", chosen["rows"], num_queries, aux),
        heads=check_chosen_rows("heads", chosen["heads"], leading[-1] if leading else None, aux),
        precision=check_precision(chosen["precision"]),
        batch_invariant=check_flag("batch_invariant", chosen["batch_invariant"]),
    )


def check_values(problem: Problem) -> None:
    """Raise where a shape stands for an array, as `explain` takes it."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(problem)):
        leaves, _ = jax.tree.flatten_with_path(problem)
        names = (str(path[0]) for path, leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct))
        raise TypeError(
            f"{next(names).lstrip('.')}: expected an array, got a shape; explain takes shapes, and"
            " jax.eval_shape(attend, ...) runs on them"
        )


def check_precision(precision: Any) -> Any:
    """Return a precision, if JAX's matrix products take it."""
    try:
        _multiply_in(precision)
    except (TypeError, ValueError):
        raise ValueError(
            "precision: expected None, a name such as 'highest', or another precision of"
            f" jax.lax.dot_general; got {precision!r}"
        ) from None
    return precision


@functools.cache
def _multiply_in(precision: Any) -> None:
    row = jax.ShapeDtypeStruct((1,), np.float32)
    jax.eval_shape(functools.partial(jnp.dot, precision=precision), row, row)


def float_array(name: str, array: Any, least_rank: int) -> Any:
    """Return an array, or its shape and dtype, checked to be of floating point and of some rank."""
    if not isinstance(array, jax.Array | jax.ShapeDtypeStruct):
        array = as_array(name, "a floating-point array", jnp.asarray, array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        hint = ""
        if name == "bias" and (array.dtype == bool or jnp.issubdtype(array.dtype, jnp.integer)):
            hint = "; pass boolean and 0/1 masks as `mask=`"
        raise TypeError(f"{name}: expected a floating-point array, got {array.dtype}{hint}")
    if array.ndim < least_rank:
        raise ValueError(
            f"{name}: expected at least {least_rank} axes (..., length, width), got shape {array.shape}"
        )
    return array


def float_dtype(name: str, dtype: Any, *others: str) -> np.dtype:
    """Check for a floating-point dtype, or one of the others by name, and return it."""
    try:
        canonical = (
            None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
        )  # of None it makes float32
    except (TypeError, ValueError):
        canonical = None
    if canonical is None or not (jnp.issubdtype(canonical, jnp.floating) or canonical.name in others):
        expected = " or ".join(("a floating-point dtype", *others))
        raise TypeError(f"{name}: expected {expected}, got {dtype if canonical is None else canonical!s}")
    return canonical


def _check_shapes(query: Any, key: Any, value: Any) -> tuple[int, ...]:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"key: expected the head width of query, D = {query.shape[-1]}, on its last axis; got {shapes}"
        )
    if not isinstance(query.shape[-1], int) or query.shape[-1] == 0:
        raise ValueError(f"query: expected a head width D of at least 1, no symbol, got {shapes}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"value: expected one row per key, S = {key.shape[-2]}, on axis -2; got {shapes}")
    if 0 in (array.shape[-3] for array in (query, key, value) if array.ndim > 2):
        raise ValueError(f"query, key, value: expected at least one head, on axis -3; got {shapes}")
    try:
        return broadcast_leading(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    except ValueError as error:
        raise ValueError(
            f"query, key, value: {error}; got {shapes}. Arrays are (batch, heads, length, width): heads are"
            " the axis before the length. From (batch, length, heads, width), swap axes -3 and -2 first"
        ) from None


def _check_mask(mask: Any, leading: tuple[int, ...], num_queries: int, num_keys: int) -> Mask | None:
    if mask is None:
        return None
    if not isinstance(mask, Mask):
        array = check_boolean("mask", mask)
        check_broadcast("mask", array.shape, (*leading, num_queries, num_keys))
        mask = from_array(
            evaluate(lambda array: array.reshape((*(1,) * (2 - array.ndim), *array.shape)), array)
        )
    mask.check(leading, num_queries, num_keys)
    return mask.number_leading(leading)


def _check_scale(scale: Any, *arrays: Any) -> Any:
    dtype = accumulation_dtype(*arrays)
    if scale is None:
        return np.asarray(1 / np.sqrt(arrays[0].shape[-1]), dtype)
    return evaluate(lambda number: number.astype(dtype), read_scale(scale))


def read_scale(scale: Any) -> Any:
    """Return a factor as an array or its shape, checked to be one number, finite if the host has it."""
    expected = "one number or None for 1/sqrt(D)"
    number: Any = scale
    if not isinstance(scale, jax.Array | jax.ShapeDtypeStruct):
        own = isinstance(scale, str) or hasattr(scale, "dtype")
        number = as_array("scale", expected, np.asarray, scale, None if own else float)
    real = any(jnp.issubdtype(number.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if number.ndim or isinstance(scale, bool) or not real:
        raise ValueError(f"scale: expected {expected}, got {_describe(scale)}")
    if isinstance(number, np.ndarray | np.generic) and not np.isfinite(number):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    return number


def _check_sinks(sinks: Any, leading: tuple[int, ...]) -> Any:
    sinks = float_array("sinks", sinks, 0)
    missing = len(leading) - sinks.ndim
    if missing < 0 or any(n not in (1, m) for n, m in zip(sinks.shape, leading[missing:], strict=True)):
        raise ValueError(
            "sinks: expected one logit per head, an array that broadcasts to the leading axes of the output"
            f" {leading}; got shape {tuple(sinks.shape)}"
        )
    return sinks


def _check_offset(name: str, offset: Any, leading: tuple[int, ...]) -> Any:
    if offset is None:
        return None
    if isinstance(offset, int) and not isinstance(offset, bool):
        return offset
    offset = read_array(name, offset)
    if offset.shape not in ((), leading[:1]):
        raise ValueError(
            f"{name}: expected one integer, or one per first leading axis of query {leading[:1]};"
            f" got shape {tuple(offset.shape)}"
        )
    return offset


def check_rate(name: str, rate: Any) -> float:
    """Return the share of numbers to drop."""
    number = read_number(name, rate)
    if not 0 <= number < 1:
        raise ValueError(f"{name}: expected a rate in [0, 1), got {number}; 0 switches dropout off")
    return number


def check_rng(rate: float, rng: Any, name: str = "rng") -> Any:
    """Return what dropout draws from, one random key."""
    if rng is None:
        raise ValueError(f"{name}: expected a random key because dropout_rate = {rate}, got None")
    if (kind := type(rng).__name__) in ("Rngs", "RngStream"):  # of Flax, which have any attribute
        draw = "rngs.dropout()" if kind == "Rngs" else "stream()"
        raise TypeError(f"{name}: expected one random key, got {kind}; {draw} draws one")
    typed = hasattr(rng, "dtype") and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    if typed and rng.ndim == 0:
        return rng
    hint = ""
    if getattr(rng, "dtype", None) == np.uint32 and np.ndim(rng) == 1:
        words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).size
        if rng.size == words:
            return rng
        hint = f", whose raw form has {words} words"
    raise TypeError(f"{name}: expected one random key, such as jax.random.key(0){hint}; got {_describe(rng)}")


def _check_aux(aux: Any) -> tuple[str, ...]:
    if isinstance(aux, str):
        raise TypeError(f"aux: expected a sequence of names, got the string {aux!r}; write aux=({aux!r},)")
    try:
        aux = tuple(aux)
    except TypeError:
        raise TypeError(f"aux: expected a sequence of names, got {_describe(aux)}") from None
    unknown = [name for name in aux if not isinstance(name, str) or name not in AUX]
    if unknown:
        raise ValueError(f"aux: expected names among {', '.join(AUX)}; got {', '.join(map(repr, unknown))}")
    return aux


def check_chosen_rows(name: str, index: Any, size: int | None, aux: tuple[str, ...]) -> Any:
    if index is None:
        return None
    if not {"weights", "scores"} & set(aux):
        raise ValueError(f'{name}: expected "weights" or "scores" in aux, to choose from; got aux={aux}')
    if size is None:
        raise ValueError("heads: expected query with a heads axis, the one before T; got rank 2")
    return indices(name, index, size)


def _describe(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
    return repr(value)
