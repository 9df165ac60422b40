"""LinearProblem: one call of linear attention as a frozen record, checked once by `canonicalize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.sharding import PartitionSpec

from regard.arguments import check_flag, integers, read_array, whole_number
from regard.axes import Array
from regard.engine.call import canonicalization
from regard.engine.call.problem import Problem
from regard.engine.dispatch.explicit_axes import run_with_specs
from regard.engine.dispatch.placement import divided_here
from regard.explicit_meshes import explicit_sharding
from regard.masks.data import check_rows, check_width
from regard.masks.grid import is_concrete, spread
from regard.records import exportable

# Measured on CPU at T = 16,384 and D = E = 64, where longer chunks lose, most of all in gradients.
CHUNK, CHUNK_OF_DELTA = 64, 32


def elu1(x: Array) -> Array:
    """Compute elu(x) + 1; `jax.nn.elu(x) + 1` loses the digits of a small e^x."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))


FEATURE_MAPS = {"identity": lambda x: x, "elu1": elu1, "relu": jax.nn.relu, "exp": jnp.exp}


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The memory that a sequence leaves behind, of a size that does not depend on the length.

    memory = sum_s key_s value_s^T, where nothing decays and nothing is erased

    `attend(..., return_state=True)` and `step` make one; pass it as `initial`, or to `step`, to go on. It is
    a pytree of float32 arrays, float64 for float64 inputs.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import linear
        >>> x = jnp.eye(2)
        >>> _, state = linear.attend(x, x, x, return_state=True)
        >>> state.memory.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """

    memory: Array
    """`(*B, K, D, E)`, one matrix per key head; no head axis where key has none."""

    key_sum: Array | None = None
    """`(*B, K, D)`, the decayed sum of keys that `normalise` divides by; None without it."""


@dataclass(frozen=True)
class LinearConfig:
    """The static part of a call."""

    leading: tuple[int, ...]  # of the output
    batch: tuple[int, ...]  # of the state, K last
    group: int
    num_queries: int
    dtype: np.dtype
    chunk: int
    causal: bool
    normalise: bool
    feature_map: str
    precision: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LinearProblem:
    """The arrays of a call, each with the axes of the output, of size 1 where it lacks one."""

    query: Array  # (..., H, T, D)
    key: Array  # (..., K, S, D)
    value: Array  # (..., K, S, E)
    decay: Array | None  # (..., K, S, 1 or D)
    rate: Array | None  # (..., K, S, 1)
    valid: Array | None  # (..., K, S, 1)
    memory: Array  # (*B, K, D, E)
    key_sum: Array | None  # (*B, K, D)
    scale: Any
    config: LinearConfig = field(metadata={"static": True})

    @property
    def leading(self) -> tuple[int, ...]:
        """The leading axes of the output."""
        return self.config.leading

    @property
    def T(self) -> int:  # noqa: N802
        """The number of queries."""
        return self.config.num_queries


def canonicalize(
    query: Any,
    key: Any,
    value: Any,
    *,
    decay: Any,
    rate: Any,
    feature_map: Any,
    normalise: bool,
    scale: Any,
    causal: bool,
    valid: Any,
    segments: Any,
    initial: Any,
    chunk: Any,
    precision: Any,
) -> LinearProblem:
    """Check the arguments of a call and fill in what was left out."""
    problem = canonicalization.canonicalize(query, key, value, scale=scale, precision=precision)
    canonicalization.check_values(problem)
    causal, normalise = check_flag("causal", causal), check_flag("normalise", normalise)
    _check_options(problem, rate, scale, causal, normalise)
    leading, heads = problem.leading, problem.key_heads
    batch = (*leading[:-1], heads) if leading else ()
    if valid is not None:
        valid = _check_valid(valid, problem, batch)
    query, key = problem.query, problem.key
    if not (isinstance(feature_map, str) and feature_map in FEATURE_MAPS):
        if not callable(feature_map):
            error = ValueError if isinstance(feature_map, str) else TypeError
            names = ", ".join(FEATURE_MAPS)
            raise error(f"feature_map: expected a function or one of {names}; got {feature_map!r}")
        if valid is not None:  # NaN in a slot that does not count would pass through a function's derivative
            query, key = _blank(problem, valid, causal)
        query, key = _map_features(feature_map, "query", query), _map_features(feature_map, "key", key)
        feature_map = "identity"
    width, per_token = key.shape[-1], (*batch, problem.S)
    decay = _check_decay(decay, per_token, width, valid)
    if segments is not None:
        starts = _find_starts(_check_segments(segments, problem, batch, causal), valid)[..., None]
        decay = jnp.where(starts, -jnp.inf, jnp.zeros((), problem.accumulation) if decay is None else decay)
    rate = _check_rate(rate, per_token)
    memory, key_sum = _check_initial(initial, problem, batch, width, normalise)
    chunk = _check_chunk(chunk, problem.S, CHUNK if rate is None else CHUNK_OF_DELTA)
    sizes = leading, batch or (1,), problem.group, problem.T, problem.accumulation
    config = LinearConfig(*sizes, chunk, causal, normalise, feature_map, precision)
    valid = None if valid is None else valid[..., None]
    query, key, value = map(problem.with_heads, (query, key, problem.value))
    decay, rate, valid = jax.tree.map(problem.with_heads, (decay, rate, valid))
    return LinearProblem(query, key, value, decay, rate, valid, memory, key_sum, problem.scale, config)


def _check_options(problem: Problem, rate: Any, scale: Any, causal: bool, normalise: bool) -> None:
    if causal and problem.T != problem.S:
        raise ValueError(
            f"query: expected one row per key with causal=True, T = S; got T = {problem.T}, S = {problem.S}."
            " With causal=False every query reads the state after all keys"
        )
    if normalise and rate is not None:
        raise ValueError(
            "normalise: expected False with rate, because a state that is corrected is no sum over keys to"
            " divide by; got True"
        )
    if normalise and scale is not None:
        raise ValueError(
            f"scale: expected None with normalise=True, which divides any factor out again; got {scale}"
        )


def _check_valid(valid: Any, problem: Problem, batch: tuple[int, ...]) -> Any:
    valid = read_array("valid", valid)
    if jnp.issubdtype(valid.dtype, jnp.integer):
        valid = valid != 0
    if valid.dtype != bool or valid.ndim == 0:
        raise TypeError(
            "valid: expected a boolean or integer array (..., S), nonzero = a real token;"
            f" got {valid.dtype} of shape {valid.shape}"
        )
    check_rows("valid", valid.shape[:-1], batch)
    check_width("valid", "key", valid.shape[-1], problem.S)
    return spread(valid, len(batch) + 1, trailing=1)


def _check_segments(segments: Any, problem: Problem, batch: tuple[int, ...], causal: bool) -> Any:
    segments = integers("segments", segments, wide=True)
    if segments.ndim == 0:
        raise TypeError(
            "segments: expected an integer array (..., S) with one number per token, got a scalar"
        )
    if not causal:
        raise ValueError(
            "segments: expected None with causal=False, where every query reads the state after the last"
            " document; got an array"
        )
    check_rows("segments", segments.shape[:-1], batch)
    check_width("segments", "key", segments.shape[-1], problem.S)
    return spread(segments, len(batch) + 1, trailing=1)


def _find_starts(segments: Any, valid: Any) -> Array:
    """Find the real tokens whose document is another than that of the real token before them."""
    if names := divided_here():
        gather = lambda array: jax.lax.all_gather(array, names, axis=jnp.ndim(array) - 1, tiled=True)  # noqa: E731
        starts, length = _find_starts_of_all(*jax.tree.map(gather, (segments, valid))), segments.shape[-1]
        return jax.lax.dynamic_slice_in_dim(starts, jax.lax.axis_index(names) * length, length, axis=-1)
    shardings = [sharding for array in (segments, valid) if (sharding := explicit_sharding(array))]
    spec = shardings[0].spec if shardings else PartitionSpec()
    return run_with_specs(_find_starts_of_all, (segments, valid), spec)


def _find_starts_of_all(segments: Any, valid: Any) -> Array:
    before = jnp.roll(segments, 1, -1)
    places = jnp.expand_dims(jnp.arange(segments.shape[-1], dtype=jnp.int32), range(segments.ndim - 1))
    first = places == 0
    if valid is None:
        return (segments != before) & ~first
    # The number of the last real token before each, or of the token itself where there is none.
    segments, valid = jnp.broadcast_arrays(segments, valid)
    real = jnp.where(valid, places, -1)
    last = jnp.where(first, -1, jnp.roll(jax.lax.cummax(real, axis=real.ndim - 1), 1, -1))
    before = jnp.take_along_axis(segments, jnp.maximum(last, 0), -1)
    return (segments != before) & (last >= 0) & valid


def _check_decay(decay: Any, per_token: tuple[int, ...], width: int, valid: Any) -> Any:
    if decay is None:
        return None
    decay = canonicalization.float_array("decay", decay, 0)
    if not (_fits(decay.shape, per_token) or _fits(decay.shape, (*per_token, width))):
        raise ValueError(
            f"decay: expected {len(per_token)} axes that broadcast to (*B, K, S) = {per_token}, the log of"
            f" one factor per token, or {len(per_token) + 1} that broadcast to (*B, K, S, D) ="
            f" {(*per_token, width)}, of one per channel; got shape {decay.shape}. An axis of size 1 serves"
            " all"
        )
    decay = decay[..., None] if decay.ndim == len(per_token) else decay
    _demand_logs(decay, valid)
    return decay


def _demand_logs(decay: Any, valid: Any) -> None:
    """Raise for a token that would keep more than all, where the numbers are known."""
    if not is_concrete((decay, valid)) or not getattr(decay, "is_fully_addressable", True):
        return
    with jax.transfer_guard_device_to_host("allow"):
        logs = np.asarray(decay)
        # What a token that is not valid holds does not matter.
        logs = logs if valid is None else np.where(np.asarray(valid)[..., None], logs, 0)
    if (logs > 0).any():
        raise ValueError(
            "decay: expected logs of what tokens keep of the state, factors in (0, 1], so numbers of at most"
            f" 0; got up to {float(np.nanmax(logs)):.6g}. Pass jnp.log(factor), or of a gate"
            " jax.nn.log_sigmoid(gate)"
        )


def _check_rate(rate: Any, per_token: tuple[int, ...]) -> Any:
    if rate is None:
        return None
    rate = canonicalization.float_array("rate", rate, 0)
    if not _fits(rate.shape, per_token):
        raise ValueError(
            f"rate: expected {len(per_token)} axes that broadcast to (*B, K, S) = {per_token}, one number per"
            f" token; got shape {rate.shape}. An axis of size 1 serves all"
        )
    return rate[..., None]


def _check_initial(
    initial: Any, problem: Problem, batch: tuple[int, ...], width: int, normalise: bool
) -> tuple[Any, Any]:
    dtype, lines = problem.accumulation, batch or (1,)
    shapes = {"memory": (*batch, width, problem.E), "key_sum": (*batch, width)}
    if initial is None:
        key_sum = jnp.zeros((*lines, width), dtype) if normalise else None
        return jnp.zeros((*lines, width, problem.E), dtype), key_sum
    if not isinstance(initial, State):
        raise TypeError(
            f"initial: expected a regard.linear.State or None, got {type(initial).__name__}; `step` takes it"
            " first"
        )
    if normalise and initial.key_sum is None:
        raise ValueError(
            "initial: expected a state with key_sum because normalise=True; got None. States from calls with"
            " normalise=True have one"
        )
    arrays = []
    for name, expected in shapes.items():
        array = getattr(initial, name)
        if name == "key_sum" and not normalise:
            arrays.append(None)
            continue
        array = canonicalization.float_array(f"initial.{name}", array, 0)
        if array.shape != expected:
            raise ValueError(f"initial.{name}: expected shape {expected}, got {array.shape}")
        arrays.append(array.astype(dtype).reshape((*lines, *expected[len(batch) :])))
    return arrays[0], arrays[1]


def _check_chunk(chunk: Any, length: int, default: int) -> int:
    """Check the chunk asked for, and cut it to what the sequence needs."""
    size = default if chunk is None else whole_number("chunk", chunk, 1)
    if size & (size - 1):
        raise ValueError(f"chunk: expected a power of two, or None for {default}; got {chunk}")
    return size if is_symbolic_dim(length) else min(size, 1 << max(length - 1, 0).bit_length())


def _blank(problem: Problem, valid: Any, causal: bool) -> tuple[Array, Array]:
    """Set query and key to 0 in the rows of tokens that are not valid."""
    query, key = problem.with_heads(problem.query), problem.with_heads(problem.key)
    real = problem.with_heads(valid[..., None])
    if causal:
        shared = problem.group if real.shape[-3] > 1 else 1
        query = jnp.where(jnp.repeat(real, shared, -3), query, 0)
    return query, jnp.where(real, key, 0)


def _map_features(feature_map: Callable[[Array], Any], name: str, array: Array) -> Array:
    mapped = feature_map(array)
    if not hasattr(mapped, "dtype") or not jnp.issubdtype(mapped.dtype, jnp.floating):
        raise TypeError(f"feature_map: expected a floating-point array from {name}, got {mapped!r}")
    if mapped.shape[:-1] != array.shape[:-1] or mapped.ndim != array.ndim:
        raise ValueError(
            f"feature_map: expected another last axis only, from {name} of shape {array.shape};"
            f" got shape {mapped.shape}"
        )
    return mapped


def _fits(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    return len(shape) == len(full) and all(n in (1, m) for n, m in zip(shape, full, strict=True))
