"""Division of the primitives over devices: along leading axes, where only sums of what is shared are sent.

A primitive's operands and results have the call's leading axes, or 1 in their place. Where an automatic mesh
axis divides a leading axis of query, every device runs the same loops on its part of the operands: its batch
rows and heads. Gradients of what is whole on every device, as one bias for all batch rows, are summed over
the devices. The lengths T and S, and widths, are never divided here; `regard.parallel` does that.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh, use_abstract_mesh

from regard.axes import Array
from regard.engine.flash.blocking import TileConfig
from regard.engine.flash.device_types import NO_MESH
from regard.engine.flash.operands import PARAMETER, Context
from regard.masks import Mask
from regard.masks.offsets import positions_of

HEADS, KEY_HEADS = "heads", "key_heads"  # leading axes that differ between the sides of queries and of keys
Axis = str | int | None  # one of these, the number of another leading axis, or an axis that nobody divides
Axes = tuple[Axis, ...]
MeshAxes = tuple[str, ...]


@dataclass(frozen=True)
class Leading:
    """The leading axes of a primitive, as sizes."""

    batch: tuple[int, ...]  # those before heads
    key_heads: int
    group: int

    @classmethod
    def of(cls, config: TileConfig) -> Leading:
        """Return those of a config."""
        *batch, key_heads = config.leading
        return cls(tuple(batch), key_heads, config.group)

    def shape(self, shape: Sequence[int], axes: Axes) -> tuple[int, ...]:
        """Return the shape of an array with these axes."""
        return tuple(
            size if axis is None else self.sizes[axis] for size, axis in zip(shape, axes, strict=True)
        )

    def one_of(self, axis: Axis) -> Leading:
        """Return the leading axes of one position on an axis; of heads, one key head and its query heads."""
        if axis == KEY_HEADS:
            return dataclasses.replace(self, key_heads=1)
        return dataclasses.replace(
            self, batch=tuple(1 if at == axis else size for at, size in enumerate(self.batch))
        )

    @property
    def sizes(self) -> dict[Axis, int]:
        """The size of each axis by its name."""
        heads = {KEY_HEADS: self.key_heads, HEADS: self.key_heads * self.group}
        return {**dict(enumerate(self.batch)), **heads}


@dataclass(frozen=True)
class Share:
    """A division of leading axes: the mesh axes along which each is divided."""

    leading: Leading
    mesh_axes: Mapping[Axis, MeshAxes]
    mesh_sizes: Mapping[str, int]

    @classmethod
    def choose(cls, leading: Leading, mesh: Any, axes: Sequence[Axes], specs: Sequence[Any]) -> Share:
        """Choose as the operands lie, the first of them before the others, as far as sizes are divisible."""
        chosen: dict[Axis, MeshAxes] = {}
        for operand, spec in zip(axes, specs, strict=True):
            for axis, names in zip(operand, spec, strict=False):
                names = () if names is None else names if isinstance(names, tuple) else (names,)
                used = set(itertools.chain(*chosen.values()))
                count = math.prod(mesh.shape[name] for name in names)
                fits = axis is not None and axis not in chosen and not used & set(names)
                if fits and count > 1 and leading.sizes[axis] % count == 0:
                    chosen[axis] = names
        share = cls(leading, chosen, dict(mesh.shape))
        key_heads, group, heads = leading.key_heads, leading.group, share.count(HEADS)
        chosen.pop(KEY_HEADS, None)
        if key_heads % heads == 0:
            chosen[KEY_HEADS] = chosen.get(HEADS, ())
        elif group % (key_heads * group // heads):
            chosen.pop(HEADS)
        return share

    def count(self, axis: Axis) -> int:
        """Count the parts of an axis."""
        return math.prod(self.mesh_sizes[name] for name in self.mesh_axes.get(axis, ()))

    @property
    def picks_key_head(self) -> bool:
        """Tell whether a device's queries share one key head, while all of them are there."""
        return self.count(KEY_HEADS) < self.count(HEADS)

    @property
    def part(self) -> Leading:
        """The leading axes of one device."""
        batch = tuple(size // self.count(axis) for axis, size in enumerate(self.leading.batch))
        key_heads = self.leading.key_heads // self.count(KEY_HEADS)
        heads = self.leading.key_heads * self.leading.group // self.count(HEADS)
        return (
            Leading(batch, 1, heads) if self.picks_key_head else Leading(batch, key_heads, heads // key_heads)
        )

    def spec(self, axes: Axes) -> PartitionSpec:
        """Return how an array with these axes lies."""
        return PartitionSpec(*(self.mesh_axes.get(axis, ()) or None for axis in axes))

    def sum_axes(self, axes: Axes) -> MeshAxes:
        """Return the mesh axes over which what has these axes, and is added up, is summed."""
        divided = set(itertools.chain(*(self.mesh_axes.get(axis, ()) for axis in axes)))
        every = itertools.chain(*(names for axis, names in self.mesh_axes.items() if axis != KEY_HEADS))
        return tuple(name for name in every if name not in divided)

    def take(self, array: Array, axes: Axes) -> Array:
        """Take the key head of this device's queries out of an array that has all of them."""
        if not self.picks_key_head or KEY_HEADS not in axes:
            return array
        return jax.lax.dynamic_slice_in_dim(array, self._key_head(), 1, axes.index(KEY_HEADS))

    def give(self, array: Array, axes: Axes, *, is_sum: bool) -> Array:
        """Invert `take`, and sum over devices what all of them add to."""
        if self.picks_key_head and KEY_HEADS in axes:
            axis = axes.index(KEY_HEADS)
            shape = (*array.shape[:axis], self.leading.key_heads, *array.shape[axis + 1 :])
            start = [self._key_head() if at == axis else 0 for at in range(len(shape))]
            array = jax.lax.dynamic_update_slice(jnp.zeros(shape, array.dtype), array, start)
        names = self.sum_axes(axes) if is_sum else ()
        return jax.lax.psum(array, names) if names else array

    def _key_head(self) -> Array:
        return jax.lax.axis_index(self.mesh_axes[HEADS]) * self.part.group // self.leading.group


def axes_of(name: str, shape: Sequence[int], config: TileConfig, skipped: int = 0) -> Axes:
    """Return the leading axes of an array that Operands or Results name thus.

    `skipped` of the config's axes are not there.
    """
    batch = range(skipped, len(config.leading) - 1)
    own: Axes = (*batch, KEY_HEADS if name in ("key", "value") else HEADS)
    if name.startswith(PARAMETER):
        own = tuple(range(config.added))
        head_axis = config.head_axes[int(name.removeprefix(PARAMETER))]
        if head_axis is not None and len(shape) > config.added + head_axis:
            own = (*own, *(None,) * head_axis, HEADS)
    return _divisible((*own, *(None,) * (len(shape) - len(own))), shape, config)


def _divisible(axes: Axes, shape: Sequence[int], config: TileConfig) -> Axes:
    """Leave out axes of size 1, along which all are alike."""
    sizes = Leading.of(config).sizes
    return tuple(
        axis if axis is not None and size == sizes[axis] > 1 else None
        for axis, size in zip(axes, shape, strict=True)
    )


class _Leaf(NamedTuple("_Leaf", [("axes", Axes)])):
    """The axes of a context's array, as a leaf of the context."""


def context_axes(context: Context, config: TileConfig) -> list[Axes]:
    """Return the leading axes of a context's arrays, in the order of its leaves."""

    def of_call(data: Any, trailing: int) -> _Leaf:
        own = [*range(config.added, config.added + config.call_axes)][: data.ndim - trailing]
        named = tuple(HEADS if axis == config.added + config.call_axes - 1 else axis for axis in own)
        return _Leaf(_divisible((*named, *(None,) * (data.ndim - len(named))), data.shape, config))

    def of_list(data: Any) -> _Leaf:
        own = (*range(config.added, len(config.leading) - 1), KEY_HEADS)
        return _Leaf(_divisible((*own, *(None,) * (data.ndim - len(own))), data.shape, config))

    def of_rows(data: Any) -> _Leaf:
        return _Leaf(axes_of("query", data.shape, config, config.added))

    def of_mask(mask: Mask | None) -> Mask | None:
        return None if mask is None else mask.slice_batch(of_call, config.call_axes)

    def mark(context: Context) -> Context:
        words = (context.query_words, context.key_words, context.numbers)
        query_words, key_words, numbers = jax.tree.map(of_rows, words)
        return dataclasses.replace(
            context,
            forward_mask=of_mask(context.forward_mask),
            backward_mask=of_mask(context.backward_mask),
            offsets=tuple(positions_of(offset).slice_batch(of_call) for offset in context.offsets),
            query_words=query_words,
            key_words=key_words,
            numbers=numbers,
            by_query=jax.tree.map(of_list, context.by_query),
            by_key=jax.tree.map(of_list, context.by_key),
            kernel=None if context.kernel is None else mark(context.kernel),
        )

    leaves = jax.tree.leaves(mark(context), is_leaf=lambda leaf: isinstance(leaf, _Leaf))
    return [leaf.axes if isinstance(leaf, _Leaf) else (None,) * leaf.ndim for leaf in leaves]


def divide_config(config: TileConfig, part: Leading) -> TileConfig:
    """Return the config of a part of the leading axes."""
    forward = config.forward.fit(config.num_queries, config.num_keys, part.key_heads)
    backward = config.backward.fit(config.num_queries, config.num_keys, part.key_heads)
    leading = (*part.batch, part.key_heads)
    return dataclasses.replace(config, leading=leading, group=part.group, forward=forward, backward=backward)


def is_divided(context: Any) -> bool:
    """Return whether the compiler may divide the arrays of a lowering over devices."""
    axes = context.module_context.axis_context
    return len(getattr(axes, "device_assignment", None) or ()) > 1  # none inside shard_map


def find_mesh(context: Any) -> Any:
    """Return the context of a lowering with the mesh over which `divide` divides arrays; or None."""
    module = context.module_context
    axes = module.axis_context
    # What is exported can hold no function of this process, which custom partitioning is; and the compiler
    # for TPUs asks for none (jax#38196), but divides the steps of loops, which hold all rows and heads there.
    if not is_divided(context) or module.lowering_parameters.for_export or "tpu" in module.platforms:
        return None
    # Where no argument has a mesh, that of `jax.set_mesh` is meant.
    mesh = axes.abstract_mesh or get_abstract_mesh()
    if mesh.empty:
        return None
    return context.replace(
        module_context=module.replace(axis_context=dataclasses.replace(axes, abstract_mesh=mesh))
    )


def divide(
    evaluate: Callable[[Leading], Callable[..., list[Array]]],
    leading: Leading,
    operands: Sequence[Array],
    axes: Sequence[Axes],
    results: Sequence[Any],
    result_axes: Sequence[Axes],
    *,
    sums: bool,
) -> list[Array]:
    """Run `evaluate(leading axes)(*operands)` divided as the compiler finds the operands.

    `axes` and `result_axes` say what each axis of an operand is, and of a result; with `sums`, results that
    lack a divided axis are sums over it.
    """

    def choose(mesh: Any, arguments: Any) -> Share:
        # GSPMD does not know of every operand yet how it is divided.
        specs = [getattr(argument.sharding, "spec", ()) for argument in arguments]
        return Share.choose(leading, mesh, axes, specs)

    def place(mesh: Any, share: Share, of: Sequence[Axes]) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, share.spec(axes)) for axes in of)

    def infer(mesh: Any, arguments: Any, results: Any) -> Any:
        return place(mesh, choose(mesh, arguments), result_axes)

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        share = choose(mesh, arguments)
        run = evaluate(share.part)

        def local(*operands: Array) -> tuple[Array, ...]:
            with use_abstract_mesh(NO_MESH):
                taken = (share.take(operand, own) for operand, own in zip(operands, axes, strict=True))
                parts = run(*taken)
                return tuple(
                    share.give(array, own, is_sum=sums) for array, own in zip(parts, result_axes, strict=True)
                )

        return mesh, local, place(mesh, share, result_axes), place(mesh, share, axes)

    # Only its types count: programs are made in `partition`.
    function = custom_partitioning(lambda *_: tuple(jnp.zeros(out.shape, out.dtype) for out in results))
    rule = _rule(leading, axes, result_axes)
    function.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return list(function(*operands))


def _rule(leading: Leading, axes: Sequence[Axes], result_axes: Sequence[Axes]) -> SdyShardingRule:
    """Say which axes are divided alike; all others are whole on every device."""
    whole: list[str] = []

    def name(axis: Axis) -> str:
        if axis is None:
            whole.append(f"whole{len(whole)}")
            return whole[-1]
        if axis == KEY_HEADS and leading.group == 1:
            return HEADS
        return f"batch{axis}" if isinstance(axis, int) else axis.replace("_", "")

    operands = tuple(ArrayMapping(*map(name, array)) for array in axes)
    results = tuple(ArrayMapping(*map(name, array)) for array in result_axes)
    return SdyShardingRule(operands, results, need_replication_factors=tuple(whole))
