"""The reading of a call: its statistics, from one or two sweeps over the weights, and windows of these."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from regard.arguments import LARGEST, indices, integers, whole_number
from regard.axes import Array, ArrayLike
from regard.engine.call.canonicalization import canonicalize, float_array
from regard.engine.call.options import ScoreOptions, check_names
from regard.engine.call.problem import Problem
from regard.engine.dispatch.explicit_axes import divided_rows, run_with_specs
from regard.engine.dispatch.placement import demand_whole
from regard.engine.softmax.score_rows import score_cells
from regard.explicit_meshes import explicit_mesh
from regard.manual_meshes import vary, varying_axes
from regard.masks.offsets import positions_of
from regard.readouts.accumulators import NUM_BINS, PATTERNS, Norm, PerQuery, SweepConfig, SweepResults, Tokens
from regard.readouts.counting import sink_logits, sweep
from regard.readouts.readout import Readout

_MOST_LISTED = 64  # where there are fewer keys


def read(
    query: ArrayLike,
    key: ArrayLike,
    *,
    lse: ArrayLike | None = None,
    tokens: ArrayLike | None = None,
    query_tokens: ArrayLike | None = None,
    delimiters: ArrayLike | Sequence[int] = (),
    grid: int = 64,
    top_k: int = 8,
    first: int | None = None,
    local: int | None = None,
    **options: Unpack[ScoreOptions],
) -> Readout:
    """Count the weights of a call of `attend`, all of them and exactly, without ever storing them.

    p_ts = exp(score_ts - lse_t),  score_ts as in `attend`

    One sweep finds lse, a second one forms each tile of weights that the mask does not skip, counts it and
    drops it: memory is linear in T and S, and there is no random choice and no sampling.

    Args:
        query, key: as in `attend`.
        lse: floating-point array `(*B, T)`, what `attend(..., aux=("lse",))` gave for the same call, of
            whichever backend: saves the first sweep, and `trust` says whether it fits. As one number it is
            rounded, which costs weights of scores in the hundreds three digits. None computes it, as two.
        tokens: integer array `(S,)` or `(batch, S)`, the ids of the tokens at the keys, for `duplicate_mass`,
            `induction_mass` and `delimiter_mass`. None leaves those out.
        query_tokens: the same for queries, `(T,)` or `(batch, T)`. None means `tokens`, if T == S.
        delimiters: the ids that `delimiter_mass` counts: of full stops, commas, separators.
        grid: how many blocks of rows, and of keys, the finest level may have, at least 1.
        top_k: how many keys are listed for each query, at least 1, at most S, or 64 where S is less.
        first: `first_mass` counts keys at positions below this. None means S / 32, from 1 to 4.
        local: `local_mass` counts keys less than so many positions away, at least 0. None means S / 8, from
            2 to 16: of few keys, few are near.
        **options: those of `attend` that scores depend on: mask, bias, score, scale, sinks (their share of
            the weights is `sink_mass`), query_offset (needed with T != S or a key_offset, as distances are
            always read), key_offset and precision.

    Returns:
        A `Readout`, in the accumulation dtype: float32, float64 for float64. It is constant under
        differentiation. A query that may attend to nothing has `keys` 0, all its numbers are 0, its lse
        -inf and its top keys -1; with sinks, its lse is the sink's logit and its `sink_mass` 1. T = 0 and S
        = 0 are allowed. A query whose scores hold NaN has NaN for its own numbers and no top keys, and no
        part in sums and means over queries; `trust` is NaN then. NaN in a key that no query may attend to
        reaches nothing.

    Raises:
        TypeError: as `attend`; tokens that are not integers.
        ValueError: as `attend`; a missing query_offset or query_tokens, a shape that does not fit, a top_k
            beyond the keys.
        NotImplementedError: symbolic sizes, of a program to be exported.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import masks, readouts
        >>> x = jnp.eye(4)
        >>> readout = readouts.read(x, x, mask=masks.causal(), scale=0.0)
        >>> [f"{entropy:.3f}" for entropy in readout.entropy]
        ['0.000', '0.693', '1.099', '1.386']
        >>> [f"{mass:.3f}" for mass in readout.key_mass]
        ['2.083', '1.083', '0.583', '0.250']

    Reference: Dao et al., "FlashAttention", 2022, algorithm 4, which forms weights from a saved lse; counting
        them instead of differentiating them is ours.
    """
    problem = canonicalize_readable(query, key, **options)
    if problem.is_symbolic:
        raise NotImplementedError(
            "query, key: expected sizes known before tracing, as weights are counted in tiles of them; got"
            f" {tuple(problem.query.shape)} and {tuple(problem.key.shape)}; export one program per size"
        )
    top_k, most = whole_number("top_k", top_k, 1), max(problem.S, _MOST_LISTED)
    if top_k > most:
        raise ValueError(f"top_k: expected at most {most} with {problem.S} keys, got {top_k}")
    _check_offsets(problem, options.get("query_offset"), options.get("key_offset"))
    grid = whole_number("grid", grid, 1)
    first = None if first is None else whole_number("first", first, 0, clamp=True)
    local = None if local is None else whole_number("local", local, 0, clamp=True)
    sweep_config = SweepConfig.choose(problem, grid, first, local, top_k)
    ids = None if tokens is None else _check_tokens(problem, tokens, query_tokens, delimiters)
    for name, more in (("query_tokens", query_tokens), ("delimiters", delimiters)):
        if tokens is None and more is not None and np.size(more):
            raise ValueError(f"tokens: expected the ids at the keys because {name} was given, got None")
    checked_lse = None if lse is None else check_lse(problem, lse)
    # Gradients stop at the inputs: stopped at the outputs, the sweep would still be differentiated.
    inputs = jax.lax.stop_gradient((problem, checked_lse, ids))
    specs = PartitionSpec(*divided_rows(problem)[:-1]) if explicit_mesh(inputs) is not None else None
    return run_with_specs(partial(_read, sweep_config=sweep_config), inputs, specs)


def window(
    query: ArrayLike,
    key: ArrayLike,
    lse: ArrayLike,
    *,
    rows: slice | ArrayLike | Sequence[int] | None = None,
    columns: slice | ArrayLike | Sequence[int] | None = None,
    heads: slice | ArrayLike | Sequence[int] | None = None,
    **options: Unpack[ScoreOptions],
) -> Array:
    """Form the weights of chosen rows, columns and heads: work and memory are those of the window alone.

    p_ts = exp(score_ts - lse_t) for t in rows, s in columns

    Windows of one size share one compiled program, wherever they lie.

    Args:
        query, key: as in `attend`.
        lse: floating-point array `(*B, T)`: `Readout.lse`, or what `attend(..., aux=("lse",))` gave.
        rows: which queries: a slice, or a list of indices, also traced. None means all.
        columns: which keys, likewise.
        heads: which query heads, the axis before T, likewise.
        **options: those of `attend` that scores depend on, as in `read`; the share of sinks is already in
            `lse`, so they only have to fit.

    Returns:
        The weights `(*B, rows, columns)` in the accumulation dtype, with as many heads as asked for; 0
        where a query may not attend. They are constant under differentiation.

    Raises:
        TypeError: as `attend`; indices that are not integers.
        ValueError: as `attend`; an index out of range, an lse that does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import masks, readouts
        >>> x = jnp.eye(5)
        >>> readout = readouts.read(x, x, mask=masks.causal(), scale=0.0)
        >>> part = readouts.window(
        ...     x, x, readout.lse, mask=masks.causal(), scale=0.0, rows=slice(2, 4), columns=slice(1, 4)
        ... )
        >>> [[f"{weight:.2f}" for weight in row] for row in part]
        [['0.33', '0.33', '0.00'], ['0.25', '0.25', '0.25']]
    """
    problem = canonicalize_readable(query, key, **options)
    if heads is not None and not problem.leading:
        raise ValueError("heads: expected query with a heads axis, the one before T; got rank 2")
    inputs = jax.lax.stop_gradient((problem, check_lse(problem, lse)))
    chosen = choose_indices("rows", rows, problem.T), choose_indices("columns", columns, problem.S)
    chosen += (choose_indices("heads", heads, problem.leading[-1] if problem.leading else 1),)
    specs = None
    if explicit_mesh(inputs) is not None:
        leading = divided_rows(problem)[:-1]
        specs = PartitionSpec(*leading[:-1], *(leading[-1:] if heads is None else (None,)), None, None)
    return run_with_specs(weigh, (*inputs, *chosen), specs)


@jax.jit
def weigh(problem: Problem, lse: Array, rows: Array, columns: Array, heads: Array) -> Array:
    """Form the weights of a checked call from its lse, in one program for windows of one size."""
    scores = score_cells(problem, rows, columns, heads)
    lse = jnp.take(lse, rows, -1)
    lse = jnp.take(lse, heads, -2) if problem.leading else lse
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    return jnp.exp(scores - lse[..., None])


def choose_indices(name: str, index: Any, size: int) -> Any:
    """Return what an index of rows, columns or heads chooses, as an int32 array; None means all."""
    if index is None or isinstance(index, slice):
        return np.arange(size, dtype=np.int32)[slice(None) if index is None else index]
    return indices(name, index, size, "a slice or a list of integers")


def canonicalize_readable(query: ArrayLike, key: ArrayLike, **options: Unpack[ScoreOptions]) -> Problem:
    """Check the arguments of a call whose values are not read."""
    check_names(options, ScoreOptions)
    demand_whole("readouts")
    keys: Any = float_array("key", key, 2)
    problem = canonicalize(query, keys, jnp.zeros((*keys.shape[:-1], 1), keys.dtype), **options)
    moved = any(positions_of(offset).leading_axes for offset in (problem.query_offset, problem.key_offset))
    if problem.group > 1 and len(problem.leading) == 1 and moved:
        # Heads that each have a position of their own share no tile.
        key = jnp.repeat(problem.key, problem.group, -3)
        value = jnp.repeat(problem.value, problem.group, -3)
        problem = dataclasses.replace(problem, key=key, value=value)
    return problem


def check_lse(problem: Problem, lse: ArrayLike) -> Array:
    row_lse: Any = float_array("lse", lse, 0)
    expected = (*problem.leading, problem.T)
    if row_lse.shape != expected:
        raise ValueError(
            f'lse: expected one number per query, {expected}, as attend(..., aux=("lse",)) gives; got shape'
            f" {tuple(row_lse.shape)}"
        )
    return row_lse.astype(problem.accumulation)


def _check_offsets(problem: Problem, query_offset: Any, key_offset: Any) -> None:
    if not all(positions_of(offset).is_consecutive for offset in (problem.query_offset, problem.key_offset)):
        raise NotImplementedError(
            "query_positions, key_positions: expected none, because weights are counted by distance along the"
            " diagonals of the score matrix, which takes rows that follow one another; got positions per"
            " token. `window` and attend(..., aux=) take them; packed documents can be read with offsets and"
            " mask=segments(ids) & ..."
        )
    if query_offset is None and (problem.T != problem.S or key_offset is not None):
        raise ValueError(
            "query_offset: expected where the queries sit, because distances are counted and"
            f" T = {problem.T}, S = {problem.S}, key_offset = {key_offset} leave it open; got None. Query t"
            f" sits at position query_offset + t; pass query_offset={problem.S - problem.T} when the queries"
            " are the last rows of the sequence"
        )
    offsets = [0 if offset is None else offset for offset in (query_offset, key_offset)]
    if all(isinstance(offset, int | np.integer | np.ndarray) for offset in offsets):  # known without a wait
        query, key = [np.asarray(offset, np.int64) for offset in offsets]
        if np.any(query - key < problem.S - LARGEST) or np.any(query - key > LARGEST - problem.T):
            raise ValueError(
                "query_offset, key_offset: expected distances that int32 holds, as weights are counted by"
                f" them; got query_offset = {query_offset}, key_offset = {key_offset}"
            )


def _check_tokens(problem: Problem, tokens: Any, query_tokens: Any, delimiters: Any) -> Tokens:
    if query_tokens is None and problem.T != problem.S:
        raise ValueError(
            f"query_tokens: expected the ids of the {problem.T} queries, because there are {problem.S} keys;"
            " got None"
        )
    axes = max(len(problem.leading), 1)

    def lay(name: str, ids: Any, length: int) -> Array:
        ids = jnp.asarray(integers(name, ids))
        batch = problem.leading[:1] if axes > 1 else ()
        if ids.shape not in ((length,), (*batch, length)):
            expected = " or ".join(map(str, dict.fromkeys(((length,), (*batch, length)))))
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(ids.shape)}")
        first = ids.shape[0] if ids.ndim == 2 else 1
        return ids.reshape((first, *(1,) * (axes - 1), length))

    keys = lay("tokens", tokens, problem.S)
    listed = delimiters if np.size(delimiters) else np.zeros(0, np.int32)
    delimits = jnp.isin(keys, jnp.asarray(integers("delimiters", listed))).astype(jnp.int32)
    queries = lay("query_tokens", tokens if query_tokens is None else query_tokens, problem.T)
    return Tokens(queries, keys, jnp.roll(keys, 1, -1), delimits)


@partial(jax.jit, static_argnames=("sweep_config",))
def _read(problem: Problem, lse: Array | None, tokens: Tokens | None, sweep_config: SweepConfig) -> Readout:
    problem, lse, tokens = vary((problem, lse, tokens), varying_axes(problem, lse, tokens))
    nothing = 0 in (*problem.leading, problem.T, problem.S)
    look = partial(_find_nothing, problem) if nothing else partial(sweep, problem, lse)
    swept = look(tokens, sweep_config)
    norm, rows, dtype = swept.norm, swept.rows, problem.accumulation
    is_nan = norm.is_nan()
    alive = (swept.keys > 0) & ~is_nan
    sunk, sunk_entropy = jnp.zeros_like(rows.total), jnp.zeros_like(rows.total)
    if problem.sinks is not None:
        logs = norm.logs(sink_logits(problem))
        sunk = jnp.exp(logs)
        sunk_entropy = -sunk * jnp.where(sunk > 0, logs, 0)
    # A given lse is rounded, which moves the logs of all weights of a row by one number.
    total = jnp.where(alive, rows.total + sunk, 1)
    entropy = jnp.where(alive, (rows.entropy_sum + sunk_entropy) / total + jnp.log(total), 0)
    key_total = jnp.where(rows.total > 0, rows.total, 1)
    top = Norm(*(part[..., None] for part in norm)).logs(swept.top_scores)
    count = jnp.maximum(alive.sum(-1, dtype=jnp.int32), 1).astype(dtype)[..., None]

    *_, blocks = swept.block_mass.shape[:-1]
    widths = [*[(0, 0)] * (alive.ndim - 1), (0, blocks * sweep_config.query_block - problem.T)]
    padded = jnp.pad(alive.astype(jnp.int32), widths)
    block_rows = padded.reshape((*problem.leading, blocks, sweep_config.query_block)).sum(-1, dtype=jnp.int32)
    seen = jnp.maximum(block_rows, 1).astype(dtype)[..., None]
    off = jnp.where(alive, jnp.abs(rows.total + sunk - 1), 0)
    counted = [counts.astype(jnp.int32) for counts in rows.keys]
    counted += [jnp.zeros_like(swept.keys)] * (len(PATTERNS) - len(counted))
    rows = jax.tree.map(lambda row: jnp.where(is_nan, jnp.nan, row), rows)
    mass: dict[str, Any] = {f"{name}_mass": row for name, row in zip_longest(PATTERNS, rows.mass)}
    return Readout(
        lse=norm.peak + norm.rest,
        keys=swept.keys,
        entropy=jnp.where(is_nan, jnp.nan, entropy),
        distance=rows.distance / key_total,
        sink_mass=sunk,
        **mass,
        pattern_keys=jnp.stack(counted, -1),
        top_keys=swept.top_keys,
        top_weights=jnp.exp(top),
        key_mass=swept.key_mass,
        key_max=swept.key_max,
        distance_mass=swept.distance_mass / count,
        block_mass=swept.block_mass / seen,
        block_max=swept.block_max,
        block_rows=block_rows,
        # Selected last: XLA's CPU loses NaN in a maximum.
        trust=jnp.where(is_nan.any(-1), jnp.nan, off.max(-1, initial=0)),
        query_block=sweep_config.query_block,
        key_block=sweep_config.key_block,
        first=sweep_config.first,
        local=sweep_config.local,
    )


def _find_nothing(problem: Problem, tokens: Tokens | None, sweep_config: SweepConfig) -> SweepResults:
    """Return what a sweep over no queries, no keys or no batch finds."""
    batch, dtype = problem.leading, problem.accumulation
    rows = jnp.zeros((*batch, problem.T), dtype)
    listed = (*batch, problem.T, sweep_config.top_k)
    keys = jnp.zeros((*batch, problem.S), dtype)
    blocks = [-(-problem.T // sweep_config.query_block), -(-problem.S // sweep_config.key_block)]
    grid = jnp.zeros((*batch, *blocks), dtype)
    sinks = jnp.full_like(rows, -jnp.inf) if problem.sinks is None else sink_logits(problem)
    return SweepResults(
        norm=Norm(sinks, rows),
        rows=PerQuery.like(rows, tokens),
        keys=rows.astype(jnp.int32),
        top_scores=jnp.full(listed, -jnp.inf, dtype),
        top_keys=jnp.full(listed, -1, jnp.int32),
        key_mass=keys,
        key_max=keys,
        block_mass=grid,
        block_max=grid,
        distance_mass=jnp.zeros((*batch, NUM_BINS), dtype),
    )
