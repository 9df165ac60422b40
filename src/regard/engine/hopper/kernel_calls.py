"""Calls in tiles whose forward and backward passes are the kernel's; all other derivatives are of tiles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.call.problem import Problem
from regard.engine.flash import passes, preparation
from regard.engine.flash.blocking import Blocking, TileConfig
from regard.engine.flash.operands import PARAMETER, Context, Operands, Results
from regard.engine.flash.primitives import Leaves, Spec, result_shapes
from regard.engine.flash.sparsity import TileLists
from regard.engine.flash.tile_calls import TileSpec
from regard.engine.flash.tiles import TileView
from regard.engine.hopper.pair_programs import BLOCK, ROWS, Lists, PairFunction, PairProgram, Pairs, Side
from regard.engine.softmax.exponential import nan_where_total_is
from regard.masks.offsets import signed_distance
from regard.scores import Score
from regard.scores.cells import Block, Bucket, Cells
from regard.scores.pointwise import Softcap

FORWARD, BACKWARD = Blocking(BLOCK, BLOCK), Blocking(ROWS, BLOCK)
LANES = 64  # widths are padded to a multiple
_ROUNDED = ("output", "query", "key", "value")


def prepare(problem: Problem) -> tuple[Operands, Context, TileConfig]:
    """Return what the kernel is made for."""
    return preparation.prepare(problem, FORWARD, BACKWARD)


@dataclass(frozen=True, kw_only=True)
class KernelSpec(TileSpec):
    """The static parameters of a call of the kernel."""

    interpret: ClassVar[bool] = False

    @staticmethod
    def prepare(
        problem: Problem, forward: Blocking, backward: Blocking, lists: Any = None
    ) -> tuple[Operands, Context, TileConfig]:
        inputs, context, config = preparation.prepare(problem, forward, backward, lists)
        own = dataclasses.replace(prepare(problem)[1], backward_mask=None)
        return inputs, dataclasses.replace(context, kernel=own), config

    def dtype_of(self, result: str, dtype: Any) -> Any:
        """Return bfloat16 for what is as long as the inputs: the kernel rounds it before it writes it."""
        return jnp.bfloat16 if result in _ROUNDED else super().dtype_of(result, dtype)

    def batched(
        self, name: str, function: Callable[[Spec, Leaves], list[Array]]
    ) -> Callable[..., list[Array]]:
        in_tiles = TileSpec(**vars(self))
        run = in_tiles.batched(name, function)
        if name in ("forward", "backward"):
            run = partial(self._run, name, function, in_tiles)

        def call(*operands: Array) -> list[Array]:
            head, tail = self.laid_out(name), self.tail(name)
            names = [*head, *[""] * (len(operands) - len(head) - len(tail)), *tail]
            of_results = [place_name == "output" for place_name in names]
            if name == "adjoint":
                of_results[len(names) - len(tail) :] = [True] * len(tail)
            # Tiles sum in float32, and take results so.
            widened = [
                operand.astype(self.config.dtype) if is_result else operand
                for operand, is_result in zip(operands, of_results, strict=True)
            ]
            results = zip(run(*widened), result_shapes(name, operands, self), strict=True)
            return [array.astype(result.dtype) for array, result in results]

        return call

    def _run(
        self, name: str, function: Callable[[Spec, Leaves], list[Array]], in_tiles: TileSpec, *operands: Array
    ) -> list[Array]:
        """Compute by the kernel what it gives, and in tiles the other gradients."""
        own = tuple(entry for entry in self.shapes if entry[0] in ("query", "key", "value"))
        rest = tuple(entry for entry in self.shapes if entry not in own)
        grads: dict[str, Array] = {}
        if own or not rest:
            kernel = dataclasses.replace(self, shapes=own)
            tiles = dataclasses.replace(in_tiles, shapes=own)
            results = function(kernel, operands)
            inputs = Operands.from_named(dict(zip(self.present, operands, strict=False)))
            context = jax.tree.unflatten(self.context, operands[len(self.laid_out(name)) :])
            results = _unless_poisoned(
                inputs, context, results, lambda: tiles.batched(name, function)(*operands)
            )
            grads = dict(zip(kernel.result_names(name), results, strict=True))
        if rest:
            tiles = dataclasses.replace(in_tiles, shapes=rest)
            results = tiles.batched(name, function)(*operands)
            grads |= dict(zip(tiles.result_names(name), results, strict=True))
        return [grads[result] for result in self.result_names(name)]

    def compute(self, name: str, inputs: Operands, context: Context, *args: Any, reversible: bool) -> Any:
        del reversible  # what is itself differentiated is computed in tiles
        forward = FORWARD.fit(self.config.num_queries, self.config.num_keys, 1)
        backward = BACKWARD.fit(self.config.num_queries, self.config.num_keys, 1)
        config = dataclasses.replace(self.config, forward=forward, backward=backward)
        assert context.kernel is not None
        call = _Call(inputs, context.kernel, config, self.interpret)
        return call.forward() if name == "forward" else call.backward(*args)


class InterpretedSpec(KernelSpec):
    """The same, interpreted on a CPU."""

    interpret: ClassVar[bool] = True


def _is_clean(inputs: Operands, context: Context) -> Array | None:
    """Tell whether keys and values are finite; None where no mask leaves out any."""
    if context.forward_mask is None:
        return None
    return jnp.isfinite(inputs.key).all() & jnp.isfinite(inputs.value).all()


def _unless_poisoned(
    inputs: Operands, context: Context, results: list[Array], in_tiles: Callable[[], list[Array]]
) -> list[Array]:
    """Take from tiles what they find not finite, if a key or value is NaN or inf, which the kernel omits."""
    clean = _is_clean(inputs, context)
    if clean is None:
        return results

    def repair(state: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
        pairs = zip(state[1], in_tiles(), strict=True)
        return state[0] | True, [
            jnp.where(jnp.isfinite(by_tiles), by_kernel, by_tiles.astype(by_kernel.dtype))
            for by_kernel, by_tiles in pairs
        ]

    # A loop of at most one step, as a `cond` would copy what it lets pass.
    return jax.lax.while_loop(lambda state: ~state[0], repair, (clean, results))[1]


class _Call:
    """One call, in arrays as the kernel takes them."""

    def __init__(self, inputs: Operands, context: Context, config: TileConfig, interpret: bool) -> None:
        from regard.engine.hopper.launches import Launch

        self.inputs, self.context, self.config = inputs, context, config
        self.clean = _is_clean(inputs, context)
        self.batch, self.rows = config.rows[:-2], _round_up(config.num_queries, BLOCK)
        self.columns = _round_up(config.num_keys, BLOCK)
        pairs = trace_pairs(inputs, context, config)
        heads, key_heads = config.rows[-2], config.leading[-1]
        self.launch = Launch(math.prod(self.batch), heads, key_heads, pairs, interpret)
        # The kernel takes the largest of what is not scaled yet: its scale is positive, the sign in queries.
        scale = _lay(inputs.scale, config, 2)
        self.sign, size = jnp.sign(scale), jnp.abs(scale)
        self.scale = jnp.where(size == 0, 1, size)[:, 0, 0, 0]

    def forward(self) -> Results:
        # Where a key is not finite, a score is masked; a value that is not would be multiplied by 0.
        key, value = self._lay_keys(self.inputs.key), self._lay_keys(self._finite(self.inputs.value))
        arrays = self._signed(self._rows(self.inputs.query)), key, value
        output, log_total, peak = map(
            self._cut, self.launch.forward(self._lists(self.context.by_query), self.scale, *arrays)
        )
        output = output[..., : self.config.value_width]
        return Results(output, log_total, peak=nan_where_total_is(log_total, peak))

    def _cut(self, padded: Array) -> Array:
        return padded[:, :, : self.config.num_queries].reshape((*self.config.rows, *padded.shape[3:]))

    def backward(
        self, results: Results, cotangents: Results, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Array]:
        alive = results.peak != -jnp.inf
        delta = jnp.sum(cotangents.output * results.output, -1) - cotangents.log_total
        query = self._rows(jnp.where(alive[..., None], self.inputs.query, 0))
        cotangent = self._rows(jnp.where(alive[..., None], cotangents.output, 0))
        vectors = [
            _lay(array, self.config, 1, (self.rows,), fill)
            for array, fill in (
                (jnp.where(alive, results.peak, jnp.inf), jnp.inf),
                (results.log_total / np.float32(np.log(2)), 0),
                (jnp.where(alive, delta, 0), 0),
            )
        ]
        keys = [self._lay_keys(self._finite(array)) for array in (self.inputs.key, self.inputs.value)]
        operands = (self.scale, self._signed(query), *keys, cotangent, *vectors)
        grads: dict[str, Array] = {}
        if "query" in shapes:
            gradient = self.launch.query_gradient(self._lists(self.context.by_query), *operands)
            grads["query"] = self._signed(gradient)
        if "key" in shapes or "value" in shapes:
            lists = self._lists(self.context.by_key)
            grads["key"], grads["value"] = self.launch.key_gradients(lists, *operands)
        return {name: self._gradient(grads[name], shape) for name, shape in shapes.items()}

    def _gradient(self, grad: Array, shape: tuple[int, ...]) -> Array:
        grad = grad[:, :, : shape[-2], : shape[-1]]
        return passes.sum_to(grad.reshape((*self.batch, *grad.shape[1:])), shape)

    def _rows(self, array: Array) -> Array:
        padded_sizes = self.rows, _round_up(array.shape[-1], LANES)
        return _lay(array.astype(jnp.bfloat16), self.config, 2, padded_sizes)

    def _signed(self, rows: Array) -> Array:
        return rows * self.sign.astype(rows.dtype)

    def _finite(self, array: Array) -> Array:
        return array if self.clean is None else jnp.where(jnp.isfinite(array), array, 0)

    def _lay_keys(self, array: Array) -> Array:
        return _lay(array, self.config, 2, (self.columns, _round_up(array.shape[-1], LANES)))

    def _lists(self, lists: TileLists) -> Lists:
        full = lists.full
        # A tile that is longer than the keys holds some that are nobody's.
        if lists is self.context.by_query and self.config.num_keys < BLOCK:
            full = full * 0
        if self.clean is not None:
            full = jnp.where(self.clean, full, 0)
        counts = jnp.stack([full, lists.kept], -1)
        return Lists(_lay(lists.starts, self.config, 2), _lay(counts, self.config, 2))


def _lay(
    array: Array, config: TileConfig, trailing: int, padded_sizes: tuple[int, ...] = (), fill: float = 0
) -> Array:
    """Reshape (*batch, heads, ...) to (batch | 1, heads, ...), and fill its last axes up."""
    full = config.leading[:-1]
    missing = len(full) + 1 + trailing - array.ndim
    array = array.reshape((*(1,) * missing, *array.shape))
    batch, rest = array.shape[: len(full)], array.shape[len(full) :]
    if math.prod(batch) > 1:
        array = jnp.broadcast_to(array, (*full, *rest))
    array = array.reshape((-1, *rest))
    padding = [(0, padded - size) for size, padded in zip(rest[1:], padded_sizes, strict=False)]
    return jnp.pad(array, [(0, 0), (0, 0), *padding], constant_values=fill) if padding else array


def _round_up(length: int, unit: int) -> int:
    return -(-length // unit) * unit


@dataclass(frozen=True)
class _Picked:
    """Rows or columns by their indices, of which those beyond the end stand for the last."""

    members: Array
    size: int

    def take(self, data: Array, axis: int) -> Array:
        return jnp.take(data, self.members, axis, mode="clip")


@dataclass(frozen=True)
class _PickedView(TileView):
    """A tile of given rows and columns."""

    picked: tuple[Any, Any] = (None, None)

    @property
    def row_span(self) -> Any:
        return self.picked[0]

    @property
    def column_span(self) -> Any:
        return self.picked[1]


@dataclass(frozen=True)
class _Cells(Block):
    """Cells whose distances are looked up by comparisons alone."""

    def add_looked_up(self, scores: Array, table: Array, bucket: Bucket, reach: int) -> Array:
        table = self._take_heads(table, 1) if table.shape[1] > 1 else table
        with jax.ensure_compile_time_eval():
            distances = np.arange(-reach - 1, reach + 2, dtype=np.int32)
            buckets = np.asarray(bucket(jnp.asarray(distances)))
        distance = signed_distance(self.key_position, self.query_position)
        entry = table[buckets[0], 0]
        for number in np.flatnonzero(np.diff(buckets)) + 1:
            entry = jnp.where(distance >= distances[number], table[buckets[number], 0], entry)
        return scores + entry


class _Softcap(Softcap):
    """A softcap by what the processor has instructions for: tanh x = 1 - 2 / (1 + exp 2x).

    Its `tanh` is right to 11 bits, which a cap multiplies; a reciprocal is the square of a reciprocal root.
    """

    def apply(self, scores: Array, cells: Cells) -> Array:
        return _bend(scores, self._cap_of(scores, cells))


@jax.custom_jvp
def _bend(scores: Array, cap: Array) -> Array:
    power = jnp.exp2(scores * (np.float32(2 / np.log(2)) / cap))
    return cap - 2 * cap * jnp.square(jax.lax.rsqrt(1 + power))


@_bend.defjvp
def _bend_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    bent = _bend(*primals)
    return bent, tangents[0] * (1 - jnp.square(bent * (1 / primals[1])))


def _for_kernel(score: Score) -> Score:
    """Put the kernel's own softcaps in the places of others."""
    return jax.tree.map(
        lambda part: _Softcap(part.cap) if isinstance(part, Softcap) else part,
        score,
        is_leaf=lambda part: isinstance(part, Softcap),
    )


def trace_pairs(inputs: Operands, context: Context, config: TileConfig) -> Pairs:
    """Trace the mask and the score of a call; raise `UnpairedError` where one is no arithmetic on pairs."""
    heads, batch = config.rows[-2], config.rows[:-2]
    blocking = Blocking(config.forward.queries, config.forward.keys)
    # Every query head has tiles of its own here.
    of_head = dataclasses.replace(config, leading=(*batch, heads), group=1, forward=blocking)
    sides = (
        Side(blocking.queries, _round_up(config.num_queries, BLOCK)),
        Side(blocking.keys, _round_up(config.num_keys, BLOCK)),
    )
    mask, offsets, named = context.forward_mask, context.offsets, inputs.named()
    finite = _lay(jnp.isfinite(inputs.key).all(-1), config, 1)

    def view_of(number: Array, head: Array, rows: Array, columns: Array) -> TileView:
        leading: list[Any] = []
        for size in reversed(batch):
            leading.insert(0, number % np.int32(size))
            number = number // np.int32(size)
        picked = _Picked(rows, blocking.queries), _Picked(columns, blocking.keys)
        return _PickedView(of_head, blocking, (*leading, head), 0, 0, picked)

    def keep(number: Array, head: Array, rows: Array, columns: Array) -> Array:
        own = (columns < config.num_keys)[None]
        if mask is None:
            return own
        index = (number if len(finite) > 1 else 0), head // np.int32(heads // finite.shape[1])
        own &= finite[*index][jnp.minimum(columns, config.num_keys - 1)]
        return view_of(number, head, rows, columns).keep(mask, offsets) & own

    def apply(number: Array, head: Array, rows: Array, columns: Array, raw: Array) -> Array:
        assert context.scoring is not None
        assert context.numbers is not None
        view = view_of(number, head, rows, columns)
        cells = _Cells(**vars(view.pairs(offsets, context.numbers)))
        parameters = [view.parameter(array) for name, array in named.items() if name.startswith(PARAMETER)]
        return _for_kernel(context.scoring.join(tuple(parameters))).apply(raw, cells)

    def vjp(number: Array, head: Array, rows: Array, columns: Array, raw: Array, change: Array) -> Array:
        return jax.vjp(lambda raw: apply(number, head, rows, columns, raw), raw)[1](change)[0]

    def trace(function: PairFunction, tiles: int) -> PairProgram:
        return PairProgram(function, *sides, (math.prod(batch), heads), tiles)

    masked, scored = mask is not None or config.num_keys % BLOCK, context.scoring is not None
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return Pairs(
            trace(keep, 0) if masked else None,
            trace(apply, 1) if scored else None,
            trace(vjp, 2) if scored else None,
        )
