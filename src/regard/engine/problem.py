"""Problem: one attention call as a frozen record, checked once by `pose`. Backends take nothing else."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.masks import Mask, from_array
from regard.masks.data import booleans, check_broadcast
from regard.masks.grid import Grid, is_concrete, place_queries

AUX = ("weights", "scores", "lse", "max_score", "argmax", "entropy")


def _static() -> Any:
    return dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Problem:
    """The call, checked and filled in: a pytree whose arrays are the call's arrays."""

    query: Array  # (*B, T, D)
    key: Array  # broadcasts to (*B, S, D) once heads are grouped
    value: Array  # broadcasts to (*B, S, E) once heads are grouped
    mask: Mask | None
    bias: Array | None
    scale: Any  # one number in the accumulation dtype, maybe traced
    query_offset: Array | int
    key_offset: Array | int | None  # None: 0
    rng: Array | None
    sinks: Array | None  # broadcasts to *B
    dropout_rate: float = _static()
    aux: tuple[str, ...] = _static()
    precision: Any = _static()

    @property
    def T(self) -> int:  # noqa: N802 - the axis letter
        return self.query.shape[-2]

    @property
    def S(self) -> int:  # noqa: N802
        return self.key.shape[-2]

    @property
    def D(self) -> int:  # noqa: N802
        return self.query.shape[-1]

    @property
    def E(self) -> int:  # noqa: N802
        return self.value.shape[-1]

    @property
    def leading(self) -> tuple[int, ...]:
        """*B: the leading axes of the output, heads last."""
        return _broadcast_leading(self.query.shape[:-2], self.key.shape[:-2], self.value.shape[:-2])

    @property
    def key_heads(self) -> int:
        """K: how many groups the query heads form; 1 where there is no head axis."""
        return max([array.shape[-3] for array in (self.key, self.value) if array.ndim > 2], default=1)

    @property
    def accumulation(self) -> np.dtype:
        """Scores, softmax and sums: float32, or float64 when any input is."""
        wide = any(array.dtype == jnp.float64 for array in (self.query, self.key, self.value))
        return np.dtype(np.float64 if wide else np.float32)

    @property
    def factor(self) -> np.dtype:
        """What matrix products multiply: bfloat16 if every input is, unless more is asked for."""
        narrow = all(array.dtype == jnp.bfloat16 for array in (self.query, self.key, self.value))
        precision = self.precision or jax.config.jax_default_matmul_precision  # pyright: ignore
        if narrow and precision in (None, "default", "fastest", "bfloat16", jax.lax.Precision.DEFAULT):
            return np.dtype(jnp.bfloat16)
        return self.accumulation

    @property
    def narrow(self) -> bool:
        """Whether products multiply numbers of fewer digits than they sum."""
        return self.factor != self.accumulation

    # Grouped heads, without repeating a key: the query heads of a group become rows of one matrix. An axis of
    # size 1 for the group would do, too, but XLA copies whole arrays for it.

    @property
    def group(self) -> int:
        """G: query heads per key head."""
        return self.leading[-1] // self.key_heads if self.leading else 1

    def with_heads(self, array: Array) -> Array:
        """An array over queries, keys or pairs with all leading axes, heads included, if of size 1."""
        missing = max(len(self.leading), 1) + 2 - array.ndim
        return array.reshape((*(1,) * missing, *array.shape))

    def fold(self, array: Array) -> Array:
        """(..., H, T, x) as (..., K, G * T, x); an array with one head for all stays."""
        if self.group == 1 or array.shape[-3] == 1:
            return array
        *batch, heads, length, width = array.shape
        return array.reshape((*batch, heads // self.group, self.group * length, width))

    def unfold(self, array: Array) -> Array:
        """(..., K, G * T, x) as (..., H, T, x)."""
        if self.group == 1:
            return array
        *batch, heads, rows, width = array.shape
        return array.reshape((*batch, heads * self.group, rows // self.group, width))

    def sink_column(self) -> Array:
        """The sinks, one per head, to be combined with one number per query (..., H, T, 1)."""
        assert self.sinks is not None
        return self.with_heads(self.sinks[..., None, None])

    def spread(self, array: Array, *rest: int) -> Array:
        """Broadcast (..., H, *rest) to the call's (*B, *rest)."""
        shape = (*(self.leading or (1,)), *rest)
        return jnp.broadcast_to(array, shape).reshape((*self.leading, *rest))

    def grid(self) -> Grid:
        """All cells of the score matrix."""
        return Grid.cover(self.T, self.S, self.query_offset, len(self.leading), self.key_offset)

    def keep(self) -> Array | None:
        """Which query may attend to which key: mask and -inf biases together. None means all."""
        keep = None
        if self.mask is not None:
            keep = self.with_heads(self.mask.keep(self.grid()))
        if self.bias is not None:
            present = self.with_heads(self.bias != -jnp.inf)
            keep = present if keep is None else keep & present
        return keep


def pose(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any,
    bias: Any,
    scale: Any,
    dropout_rate: Any,
    rng: Any,
    query_offset: Any,
    aux: Any,
    precision: Any,
    sinks: Any = None,
    key_offset: Any = None,
) -> Problem:
    """Check the arguments of a call and fill in what was left out."""
    query, key, value = (
        _float_array(name, array, 2) for name, array in (("query", query), ("key", key), ("value", value))
    )
    leading = _check_shapes(query, key, value)
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    mask = _check_mask(mask, leading, num_queries, num_keys)
    if bias is not None:
        bias = _float_array("bias", bias, 0)
        check_broadcast("bias", bias.shape, leading, num_queries, num_keys)
    query_offset = _check_offset("query_offset", query_offset, leading)
    key_offset = _check_offset("key_offset", key_offset, leading)
    key_offset = None if isinstance(key_offset, int) and key_offset == 0 else key_offset
    reads_positions = mask is not None and mask.reads_positions
    offset = place_queries(num_queries, num_keys, query_offset, reads_positions, key_offset)
    rate = _check_rate(dropout_rate, rng)
    problem = Problem(
        query,
        key,
        value,
        mask,
        bias,
        np.float32(1),
        offset,
        key_offset,
        rng if rate else None,
        None if sinks is None else _check_sinks(sinks, leading),
        rate,
        _check_aux(aux),
        precision,
    )
    return dataclasses.replace(problem, scale=_check_scale(scale, problem))


def _float_array(name: str, array: Any, least_rank: int) -> Any:
    if not isinstance(array, jax.Array | jax.ShapeDtypeStruct):
        try:
            array = jnp.asarray(array)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{name}: expected a floating-point array, got {type(array).__name__} ({error})"
            ) from None
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


def _check_shapes(query: Any, key: Any, value: Any) -> tuple[int, ...]:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"key: expected the head width of query, D = {query.shape[-1]}, on its last axis; got {shapes}"
        )
    if query.shape[-1] == 0:
        raise ValueError(f"query: expected a head width D of at least 1, got {shapes}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"value: expected one row per key, S = {key.shape[-2]}, on axis -2; got {shapes}")
    try:
        return _broadcast_leading(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    except ValueError as error:
        raise ValueError(
            f"query, key, value: {error}; got {shapes}. Arrays are (batch, heads, length, width): heads are"
            " the axis before the length. From (batch, length, heads, width), swap axes -3 and -2 first"
        ) from None


def _broadcast_leading(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> tuple[int, ...]:
    """The leading axes of the output; the last one, heads, may be a multiple of that of key and value."""
    try:
        pair = np.broadcast_shapes(tuple(key), tuple(value))
    except ValueError:
        raise ValueError("expected leading axes of key and value that broadcast") from None
    if query and pair and query[-1] != pair[-1] and pair[-1] > 1 and query[-1] > 1:
        if query[-1] % pair[-1]:
            raise ValueError(f"expected query heads ({query[-1]}) to be a multiple of key heads ({pair[-1]})")
        pair = (*pair[:-1], query[-1])
    try:
        return np.broadcast_shapes(tuple(query), tuple(pair))
    except ValueError:
        raise ValueError("expected leading axes that broadcast") from None


def _check_mask(mask: Any, leading: tuple[int, ...], num_queries: int, num_keys: int) -> Mask | None:
    if mask is None:
        return None
    if not isinstance(mask, Mask):
        try:
            array = booleans("mask", mask)
        except TypeError as error:
            raise TypeError(str(error)) from None
        check_broadcast("mask", array.shape, leading, num_queries, num_keys)
        mask = from_array(array.reshape((*(1,) * (2 - array.ndim), *array.shape)))
    mask.check(leading, num_queries, num_keys)
    return mask


def _check_scale(scale: Any, problem: Problem) -> Any:
    if scale is None:
        return np.asarray(1 / np.sqrt(problem.D), problem.accumulation)
    if np.ndim(scale) != 0 or isinstance(scale, bool | str):
        raise ValueError(f"scale: expected one number or None for 1/sqrt(D), got {_describe(scale)}")
    if isinstance(scale, jax.Array):
        return scale.astype(problem.accumulation)
    return np.asarray(scale, problem.accumulation)


def _check_sinks(sinks: Any, leading: tuple[int, ...]) -> Any:
    sinks = _float_array("sinks", sinks, 0)
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
    if not hasattr(offset, "dtype"):
        try:
            return operator.index(offset)
        except TypeError:
            offset = np.asarray(offset)
    if not jnp.issubdtype(offset.dtype, jnp.integer):
        raise TypeError(f"{name}: expected integers, got {offset.dtype}")
    if offset.shape not in ((), leading[:1]):
        raise ValueError(
            f"{name}: expected one integer, or one per first leading axis of query {leading[:1]};"
            f" got shape {tuple(offset.shape)}"
        )
    return offset if offset.dtype == np.int32 else offset.astype(np.int32)


def _check_rate(rate: Any, rng: Any) -> float:
    if not is_concrete(rate):
        raise TypeError("dropout_rate: expected a number known before tracing, got a traced value")
    try:
        rate = float(rate)
    except (TypeError, ValueError):
        raise TypeError(f"dropout_rate: expected a number in [0, 1), got {_describe(rate)}") from None
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate: expected a number in [0, 1), got {rate}")
    if rate and rng is None:
        raise ValueError(f"rng: expected a random key because dropout_rate = {rate}, got None")
    if rate:
        typed = isinstance(rng, jax.Array) and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
        if not (typed and rng.ndim == 0) and not (np.ndim(rng) == 1 and rng.dtype == np.uint32):
            raise TypeError(f"rng: expected one random key, such as jax.random.key(0); got {_describe(rng)}")
    return rate


def _check_aux(aux: Any) -> tuple[str, ...]:
    if isinstance(aux, str):
        raise TypeError(f"aux: expected a sequence of names, got the string {aux!r}; write aux=({aux!r},)")
    aux = tuple(aux)
    unknown = [name for name in aux if name not in AUX]
    if unknown:
        raise ValueError(f"aux: expected names among {', '.join(AUX)}; got {', '.join(map(repr, unknown))}")
    return aux


def _describe(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
    return repr(value)
