"""Depth: blocks one after another, unrolled or as one compiled loop, and the policy of rematerialization."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from regard.axes import Array
from regard.engine.call.hooks import hold

Call = Callable[[int, Any, Array], tuple[Array, Any]]  # of a block by its number: the stream, and what it saw
Weights = list[Array]
_MOVES = (
    "sharding_constraint", "convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim",
    "gather", "pvary",
)  # fmt: skip


class Loan(NamedTuple):
    """Two maps of a block's parameters while it computes: to another dtype, then to whole arrays."""

    cast: Callable[[Any], Any]
    gather: Callable[[Any], Any]


_LOAN: ContextVar[Loan | None] = ContextVar("loan", default=None)


def lend_to_blocks(cast: Callable[[Any], Any], gather: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Return a context in which blocks cast and gather their parameters, by functions of trees of arrays.

    A loop over blocks gathers those of one at a time, and in the backward pass once more; their gradients are
    summed in the dtype and in the places of what was not gathered. Unrolled blocks are kept gathered.
    """
    return hold(_LOAN, Loan(cast, gather))


def run_blocks(
    blocks: Sequence[nnx.Module], call: Call, x: Array, remat: Any = None, *, first: int = 0
) -> tuple[Array, list[Any]]:
    """Run blocks one after another; those of `remat` are computed again in the backward pass."""
    seen, loan = [], _LOAN.get()
    for number, block in enumerate(blocks, first):
        if remat is None and loan is None:
            x, aux = call(number, block, x)
        else:
            graph, state = nnx.split(block)
            state = state if loan is None else loan.gather(loan.cast(state))
            run = functools.partial(_run_block, graph, call, number)
            x, aux, moved = (run if remat is None else recompute(run, remat, prevent_cse=True))(state, x)
            _move(block, moved)
        seen.append(aux)
    return x, seen


def scan_blocks(
    blocks: Sequence[nnx.Module], windows: Sequence[int | None], call: Call, x: Array, remat: Any = None
) -> tuple[Array, list[Any]]:
    """Run blocks that follow one another in a period, as `run_blocks` does, in a loop compiled once."""
    # The loop picks each layer's weights where they lie, and adds each layer's gradient where it shall lie.
    # Stacked for `lax.scan`, both would be there twice: more than all that rematerialization leaves.
    parts = [nnx.split(block) for block in blocks]
    period = _find_period(parts, windows)
    steps = len(blocks) // period
    slots = [_Slot(parts[first : steps * period : period]) for first in range(period)]
    # What the blocks would make of it, so that the stream has one dtype throughout the loop.
    x = x.astype(jnp.result_type(x.dtype, *(leaf.dtype for slot in slots for leaf in slot.weights[0])))

    def body(carry: tuple[Array, list[Any]], step: Array) -> tuple[Any, list[Any]]:
        x, weights = carry
        seen = []
        for number, slot in enumerate(slots):
            run = functools.partial(slot.run, call, number)
            if remat is not None or _LOAN.get() is not None:
                run = recompute(run, remat, prevent_cse=False)
            x, weights[number], aux = run(step, x, weights[number])
            seen.append(aux)
        return (x, weights), seen

    (x, _), stacked = jax.lax.scan(body, (x, [slot.weights for slot in slots]), jnp.arange(steps))
    seen = []
    for number, block in enumerate(blocks[: steps * period]):
        step, index = divmod(number, period)
        aux, moved = jax.tree.map(lambda leaf, step=step: leaf[step], stacked[index])
        _move(block, moved)
        seen.append(aux)
    x, rest = run_blocks(blocks[len(seen) :], call, x, remat, first=len(seen))
    return x, seen + rest


class _Slot:
    """One slot of the period: the blocks that stand there, of which the loop runs one at each step."""

    def __init__(self, parts: Sequence[tuple[Any, Any]]):
        self.graph = parts[0][0]
        self.tree = jax.tree.structure(parts[0][1])
        self.loan = _LOAN.get() or Loan(lambda tree: tree, lambda tree: tree)
        self.layers = [jax.tree.leaves(state) for _, state in parts]
        self.is_weight = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in self.layers[0]]
        # What the loop carries of weights is where their gradients go, in the dtype of these.
        self.weights = tuple(self.loan.cast([*compress(layer, self.is_weight)]) for layer in self.layers)

    def run(
        self, call: Call, number: int, step: Array, x: Array, weights: tuple[Weights, ...]
    ) -> tuple[Array, tuple[Weights, ...], tuple[Any, Any]]:
        """Run the block of one step; the weights of all take its gradient."""
        picks = [lambda layers, layer=layer: layers[layer] for layer in range(len(weights))]
        leaves = self.loan.cast(jax.lax.switch(step, picks, self.layers))
        layer, weights = _link(step, [*compress(leaves, self.is_weight)], weights)
        linked = iter(layer)
        pairs = zip(leaves, self.is_weight, strict=True)
        leaves = [next(linked) if is_weight else leaf for leaf, is_weight in pairs]
        state = self.loan.gather(jax.tree.unflatten(self.tree, leaves))
        x, seen, moved = _run_block(self.graph, call, number, state, x)
        return x, weights, (seen, moved)


@jax.custom_jvp
def _link(step: Array, layer: Weights, weights: tuple[Weights, ...]) -> tuple[Weights, tuple[Weights, ...]]:
    """Return the weights of one layer and of all; the tangents of the one are its among those of all."""
    return layer, weights


@_link.defjvp
def _differentiate_link(primals: Any, tangents: Any) -> Any:
    step, layer, weights = primals
    # The layer's own tangents say the same, but their transpose is a gradient for all layers at every step.
    *_, layer_tangents = tangents
    tangent, passed = [jnp.zeros_like(leaf) for leaf in layer], []
    for number, other in enumerate(layer_tangents):
        tangent, other = jax.lax.cond(step == number, _add_and_pass, _pass, tangent, other)
        passed.append(other)
    return (layer, weights), (tangent, tuple(passed))


def _add_and_pass(tangent: Weights, layer: Weights) -> tuple[Weights, Weights]:
    # The layer comes out, too: the transpose then adds to its gradient in place and touches no other layer's.
    return [a + b for a, b in zip(tangent, layer, strict=True)], layer


def _pass(tangent: Weights, layer: Weights) -> tuple[Weights, Weights]:
    return tangent, layer


def _run_block(graph: Any, call: Call, number: int, state: Any, x: Array) -> tuple[Array, Any, Any]:
    """Run a block as a pure function: the stream, what it saw, and what moved in it, or None."""
    before = {id(leaf) for leaf in jax.tree.leaves(state)}
    block = nnx.merge(graph, state)
    x, seen = call(number, block, x)
    moving = nnx.state(block, nnx.Not(nnx.Param))
    has_moved = any(id(leaf) not in before for leaf in jax.tree.leaves(moving))
    return x, seen, moving if has_moved else None


def _move(block: nnx.Module, moved: Any) -> None:
    """Bring the counts of random streams in a block to where its call left them."""
    if moved is not None:  # else a model that another trace closes over may not be touched
        nnx.update(block, moved)


def recompute(run: Callable[..., Any], remat: Any, *, prevent_cse: bool) -> Callable[..., Any]:
    """Return the function with what `TransformerConfig.remat` says of its backward pass."""
    policy: Any = None if remat == "full" else _keep_all_but_gathered if remat is None else remat
    if isinstance(policy, str):
        policy = getattr(jax.checkpoint_policies, policy)
    return jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)


def _keep_all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    """Save what a block of a loop computes, but nothing that was only moved, as what it borrowed is."""
    return str(primitive) not in _MOVES


def _find_period(parts: Sequence[tuple[Any, Any]], windows: Sequence[int | None]) -> int:
    """Find after how many blocks the same kinds come again."""
    kinds = []
    for (graph, state), window in zip(parts, windows, strict=True):
        leaves, tree = jax.tree.flatten(state)
        kinds.append((graph, tree, [(leaf.shape, leaf.dtype) for leaf in leaves], window))
    for period in range(1, len(kinds) // 2 + 1):
        if kinds[period:] == kinds[:-period]:
            return period
    other = next(number for number, kind in enumerate(kinds) if kind != kinds[0])
    what = "window" if kinds[other][:-1] == kinds[0][:-1] else "structure"
    raise ValueError(
        f"scan_layers: expected blocks that are alike or take turns, at least twice; of {len(kinds)} blocks,"
        f" block {other} has another {what} than block 0; set scan_layers=False, which unrolls them"
    )
