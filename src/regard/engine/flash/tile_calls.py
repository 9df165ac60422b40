"""Calls in tiles as primitives: computed by `passes`, divided over devices and batched along leading axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.flash import partitioning, passes, preparation
from regard.engine.flash.blocking import TileConfig
from regard.engine.flash.device_types import lower_for_one_device
from regard.engine.flash.operands import Context, Operands
from regard.engine.flash.partitioning import HEADS, KEY_HEADS, Axes, Axis, Leading
from regard.engine.flash.primitives import Leaves, Spec, batch_size, evaluate, lead, result_shapes

_PASSES = {"forward": passes.forward, "tangent": passes.tangent, "backward": passes.backward}


@dataclass(frozen=True, kw_only=True)
class TileSpec(Spec):
    """The static parameters of a call in tiles.

    Inputs, results and what is linear have the config's leading axes; a score's parameters have those that
    vmap added, the context its own.
    """

    config: TileConfig

    prepare = staticmethod(preparation.prepare)

    @property
    def stats(self) -> frozenset[str]:
        return self.config.stats

    def row_shape(self, operands: Leaves) -> tuple[tuple[int, ...], int, Any]:
        return self.config.rows, self.config.value_width, self.config.dtype

    def compute(self, name: str, inputs: Operands, context: Context, *args: Any, reversible: bool) -> Any:
        return _PASSES[name](inputs, context, *args, self.config, reversible=reversible)

    def lower(self, name: str, context: Any, *operands: Any) -> Any:
        divided = partitioning.find_mesh(context)
        if divided is not None:
            return lower_for_one_device(divided, partial(self._evaluate_divided, name), *operands)
        return lower_for_one_device(context, partial(evaluate, name, self), *operands)

    def batch(self, name: str, operands: Leaves, axes: Leaves) -> tuple[list[Array], Spec] | None:
        size = batch_size(operands, axes)
        end = len(self.laid_out(name))
        tail = len(operands) - len(self.tail(name))
        if any(axis is not None for axis in axes[end:tail]):
            return None  # masks and offsets do not know the axis
        # Each with its tangent, or its own gradient per index.
        alike = {*self.wrt, *range(tail, len(operands))}
        operands = [
            operand if end <= index < tail else lead(operand, axis, size if index in alike else 1)
            for index, (operand, axis) in enumerate(zip(operands, axes, strict=True))
        ]
        config = dataclasses.replace(
            self.config, leading=(size, *self.config.leading), added=self.config.added + 1
        )
        shapes = tuple((wanted, (size, *shape)) for wanted, shape in self.shapes)
        return operands, dataclasses.replace(self, config=config, shapes=shapes)

    def batched(
        self, name: str, function: Callable[[Spec, Leaves], list[Array]]
    ) -> Callable[..., list[Array]]:
        """Return the function of the operands, over as many leading positions at once as a step may hold."""
        return partial(self._run_at_once, name, function)

    def _run_at_once(
        self, name: str, function: Callable[[Spec, Leaves], list[Array]], *operands: Array
    ) -> list[Array]:
        leading = Leading.of(self.config)
        blocks = (self.config.forward, self.config.backward)
        limit = blocks[(self.of or name) == "backward"].at_once
        axis: Axis = next(
            (axis for axis in (KEY_HEADS, *reversed(range(len(leading.batch)))) if leading.sizes[axis] > 1),
            None,
        )

        def place(axes: Axes) -> int | None:
            """Return where an array has the axis."""
            alike = (HEADS, KEY_HEADS) if axis == KEY_HEADS else (axis,)
            return next((at for at, own in enumerate(axes) if own in alike), None)

        results = result_shapes(name, operands, self)
        ends = [place(axes) for axes in self._axes_of(self.result_names(name), results)]
        # A gradient that positions share exists once for each until it is summed.
        pairs = self.config.num_queries * self.config.num_keys
        large = any(at is None and result.size >= pairs for result, at in zip(results, ends, strict=True))
        if axis is None or leading.sizes[axis] > limit or large:
            return function(self, operands)
        count = leading.sizes[axis]
        of_one = self._divide(leading.one_of(axis))
        blocks = [dataclasses.replace(block, at_once=max(block.at_once // count, 1)) for block in blocks]
        config = dataclasses.replace(of_one.config, forward=blocks[0], backward=blocks[1])
        of_one = dataclasses.replace(of_one, config=config)
        places = [place(axes) for axes in self._axes(name, operands)]
        split = [
            array if at is None else array.reshape((*array.shape[:at], count, -1, *array.shape[at + 1 :]))
            for array, at in zip(operands, places, strict=True)
        ]
        parts = jax.vmap(of_one.batched(name, function), places)(*split)
        return [
            array.sum(0) if at is None else jnp.moveaxis(array, 0, at).reshape(result.shape)
            for array, at, result in zip(parts, ends, results, strict=True)
        ]

    def _evaluate_divided(self, name: str, *operands: Any) -> list[Array]:
        results = result_shapes(name, operands, self)
        return partitioning.divide(
            lambda part: partial(evaluate, name, self._divide(part)),
            Leading.of(self.config),
            operands,
            self._axes(name, operands),
            results,
            self._axes_of(self.result_names(name), results),
            sums=name == "adjoint" or (self.of or name) == "backward",
        )

    def _axes(self, name: str, operands: Leaves) -> list[Axes]:
        """Return the leading axes of operands."""
        names, tail = self.laid_out(name), self.tail(name)
        end = len(operands) - len(tail)
        context = jax.tree.unflatten(self.context, operands[len(names) : end])
        return [
            *self._axes_of(names, operands[: len(names)]),
            *partitioning.context_axes(context, self.config),
            *self._axes_of(tail, operands[end:]),
        ]

    def _axes_of(self, names: Sequence[str], arrays: Sequence[Any]) -> list[Axes]:
        return [
            partitioning.axes_of(name, array.shape, self.config)
            for name, array in zip(names, arrays, strict=True)
        ]

    def _divide(self, part: Leading) -> TileSpec:
        """Return the parameters of the same on a part of the leading axes."""
        shapes = tuple(
            (name, part.shape(shape, partitioning.axes_of(name, shape, self.config)))
            for name, shape in self.shapes
        )
        return dataclasses.replace(self, config=partitioning.divide_config(self.config, part), shapes=shapes)
