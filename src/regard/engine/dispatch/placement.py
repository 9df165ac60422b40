"""Placements: calls run on one device, or as an enclosing context says, which programs depend on."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from regard.axes import Array
from regard.engine.call.problem import Problem


class ExpertAxes(NamedTuple):
    """The axes of a mesh that divide a layer of experts."""

    mesh: Any
    tokens: tuple[str, ...]
    """Those that divide the first axis of tokens, a part for each device."""
    experts: tuple[str, ...]
    widths: tuple[str, ...]


class Placement(Protocol):
    """A way to run calls, hashable, as it is part of what `jax.jit` remembers programs by."""

    def run(self, problem: Problem) -> tuple[Array, dict[str, Array]]:
        """Compute the output and what `problem.aux` names."""
        ...

    def attend_here(self, query: Any, key: Any, value: Any, options: Any) -> Any:
        """Attend where `jax.shard_map` divides the sequence: arrays are a device's part, options whole."""
        ...

    def divide_tokens(self, shape: tuple[int, int, int]) -> tuple[int, int, Callable[[Array], Array]]:
        """Return the parts that rows and positions of `(B, T, M)` are divided into, and what places arrays
        whose first axis has a part for each."""
        ...

    def divide_lines(
        self, batch: tuple[int, ...], length: int = 1
    ) -> tuple[Any, tuple[tuple[str, ...], ...]]:
        """Return the mesh on which each device runs rows, heads and positions `(*B, K, T)` of its own, and
        the axes of it that divide each of these; None and no axes where it does not."""
        ...

    def divided_here(self) -> tuple[str, ...]:
        """Return the axes over which `jax.shard_map` around the call divides the sequence; none outside."""
        ...

    def divide_experts(self, shape: tuple[int, int, int], count: int, width: int) -> ExpertAxes | None:
        """Return the axes for so many experts of a width, applied to tokens `(B, T, M)`; None for none."""
        ...


_context: Any = None


def active() -> Placement | None:
    """Return the placement of the innermost context, or None."""
    return None if _context is None else _context.value


def within(placement: Placement | None) -> AbstractContextManager[Any]:
    """Return a context in which calls run as the placement says."""
    # Made when first needed: with a new context, JAX compiles anew what it had compiled before.
    global _context
    if _context is None:
        _context = jax.make_user_context(None)
    return _context(placement)


def divided_here() -> tuple[str, ...]:
    """Return the axes over which `jax.shard_map` around the call divides the sequence; none outside."""
    placement = active()
    return () if placement is None else placement.divided_here()


def place_here(positions: Any, length: int) -> Any:
    """Return positions of a device's part as those of the sequence that `jax.shard_map` divides."""
    names = divided_here()
    return positions + jax.lax.axis_index(names) * length if names else positions


def take_here(array: Any, length: int) -> Any:
    """Return a device's part of an array whose last axis is the sequence that `jax.shard_map` divides."""
    if not divided_here():
        return array
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(array), place_here(0, length), length, -1)


def demand_whole(name: str) -> None:
    """Raise inside `jax.shard_map` that divides the sequence, of which a part alone is there."""
    if divided_here():
        raise NotImplementedError(
            f"{name}: expected whole sequences, as all tokens are asked at once; inside jax.shard_map each"
            " device has a part. Leave the division to the compiler, jax.jit with divided arrays"
        )


def run_on_rows(run: Callable[[Array], Any], array: Array) -> Any:
    """Run a function of rows `(*B, ...)`, of rank 2 behind them, on each device's own, as the placement says.

    For what the compiler does not divide: it does a sort along the batch, and gathers for a top-k.
    """
    placement = active()
    mesh, along = (None, ()) if placement is None else placement.divide_lines((*array.shape[:-2], 1))
    if mesh is None:
        return run(array)
    rows = PartitionSpec(*along[:-2])
    return jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows)(array)
