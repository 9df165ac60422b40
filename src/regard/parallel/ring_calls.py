"""One device's part of a call as primitives, inside `jax.shard_map`: computed by `ring`, with derivatives."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from regard.axes import Array
from regard.engine.call.problem import accumulation_dtype
from regard.engine.flash import primitives
from regard.engine.flash.device_types import lower_among_devices
from regard.engine.flash.operands import Operands, Results
from regard.engine.flash.primitives import Leaves, Spec, batch_size, evaluate, lead
from regard.parallel import ring
from regard.parallel.division import Division
from regard.parallel.shard import Replicated, Shard

_TRIPS = {"forward": ring.forward, "tangent": ring.tangent, "backward": ring.backward}


@dataclass(frozen=True, kw_only=True)
class RingSpec(Spec):
    """The static parameters of one device's part; all devices bind it together."""

    division: Division
    statistics: frozenset[str]
    added: tuple[tuple[int | None, ...], ...] = ()  # of each vmap, the inner first: the axes of the context

    @property
    def stats(self) -> frozenset[str]:
        return self.statistics

    def row_shape(self, operands: Leaves) -> tuple[tuple[int, ...], int, Any]:
        named = dict(zip(self.present, operands, strict=False))
        query, key, value = named["query"], named["key"], named["value"]
        added = len(self.added)
        axes = ring.row_axes(*(array.shape[added:] for array in (query, key, value)))
        return (*query.shape[:added], *axes), value.shape[-1], accumulation_dtype(query, key, value)

    def compute(self, name: str, inputs: Operands, context: Replicated, *extra: Any, reversible: bool) -> Any:
        return _TRIPS[name](Shard.here(self.division, context), inputs, *extra, reversible=reversible)

    def lower(self, name: str, context: Any, *operands: Any) -> Any:
        return lower_among_devices(context, partial(evaluate, name, self), *operands)

    def batch(self, name: str, operands: Leaves, axes: Leaves) -> tuple[list[Array], Spec]:
        size = batch_size(operands, axes)
        indices = self._context(name, operands)
        moved = [
            operand if axis is None and index in indices else lead(operand, axis, size)
            for index, (operand, axis) in enumerate(zip(operands, axes, strict=True))
        ]
        context = tuple(None if axes[index] is None else 0 for index in indices)
        shapes = tuple((wanted, (size, *shape)) for wanted, shape in self.shapes)
        return moved, dataclasses.replace(self, shapes=shapes, added=(*self.added, context))

    def batched(
        self, name: str, function: Callable[[Spec, Leaves], list[Array]]
    ) -> Callable[..., list[Array]]:
        shapes = tuple((wanted, shape[len(self.added) :]) for wanted, shape in self.shapes)
        unbatched = dataclasses.replace(self, shapes=shapes, added=())

        def call(*operands: Array) -> list[Array]:
            indices, mapped = self._context(name, operands), lambda *operands: function(unbatched, operands)
            for context in self.added:
                axes: list[int | None] = [0] * len(operands)
                axes[indices.start : indices.stop] = context
                mapped = jax.vmap(mapped, tuple(axes))
            return mapped(*operands)

        return call

    def _context(self, name: str, operands: Leaves) -> range:
        """Return the places of the context among the operands."""
        return range(len(self.laid_out(name)), len(operands) - len(self.tail(name)))


def run(division: Division, arrays: Operands, call: Replicated) -> Results:
    """Attend from this device's queries, differentiably in the arrays, to any order."""
    return primitives.run(arrays, call, partial(RingSpec, division=division, statistics=call.stats))
