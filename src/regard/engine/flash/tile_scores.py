"""A tile of scores, finished and differentiable; dropout of its weights, and NaN kept out of them."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.flash.operands import PARAMETER, Context, Operands
from regard.engine.flash.tiles import PieceKind, TileView
from regard.engine.softmax import dropout
from regard.engine.softmax.products import product
from regard.engine.softmax.scoring import finish_scores, scale_late
from regard.scores import Score


class TileScores(NamedTuple):
    """A tile of finished scores, which can be differentiated by raw scores and parameters."""

    scores: Array
    masked: Array  # -inf where mask or bias remove a pair; elsewhere not to be read
    apply: Any = None  # the score function, of raw scores and named parameters; None without one
    raw: Any = None
    parameters: Any = None
    view: Any = None
    derivative: Any = None  # by raw scores, where the finished ones tell it

    def jvp(self, change: Array, tangents: Mapping[str, Array]) -> Array:
        """Compute the tangent of the scores from those of the raw scores and of the parameters."""
        if self.apply is None:
            return change
        if self.derivative is not None and not self.parameters.keys() & tangents.keys():
            return change * self.derivative
        zeros = {name: jnp.zeros_like(array) for name, array in self.parameters.items()}
        tangents = zeros | {
            name: self.view.parameter(tangents[name]).astype(zeros[name].dtype)
            for name in zeros.keys() & tangents.keys()
        }
        return jax.jvp(self.apply, (self.raw, self.parameters), (change, tangents))[1]

    def vjp(self, change: Array, names: Container[str]) -> tuple[Array, dict[str, Array]]:
        """Compute the cotangents of raw scores and of parameters among `names` from that of the scores."""
        if self.apply is None:
            return change, {}
        if self.derivative is not None and not any(name in names for name in self.parameters):
            return change * self.derivative, {}
        change, grads = jax.vjp(self.apply, self.raw, self.parameters)[1](change)
        return change, {name: grad for name, grad in grads.items() if name in names}


def score_tile(
    query: Array,
    key: Array,
    inputs: Operands,
    context: Context,
    view: TileView,
    partial: Any,
    *,
    across: bool = False,
) -> TileScores:
    """Score a tile of keys by one of queries that are scaled early; `across`, keys by queries.

    Only where it is `partial` is the mask evaluated; of a step over pieces, that is its `PieceKind`.
    """
    config = view.config
    sides = (key, query) if across else (query, key)
    scores = product(*sides, config.precision, (-1, -1))
    scores = scale_late(scores, view.cells(inputs.scale), config.low_precision)

    def turn(tile: Array) -> Array:
        return jnp.swapaxes(tile, -1, -2) if across else tile

    def remove(scores: Array) -> Array:
        return jnp.where(turn(_keep(inputs, context, view, across=across)), scores, -jnp.inf)

    def choose(chosen: Any, way: Any, scores: Array) -> Array:
        # Of two branches, of which the first returns what it is given: else XLA's CPU copies the scores.
        return jax.lax.cond(chosen, way, lambda scores: scores, scores)

    def remove_where_partial(scores: Array) -> Array:
        paired = view.own_pieces(across=across)
        if paired is not None:  # of several pieces, some may hold what is another piece's, or nobody's
            scores = choose(
                partial == PieceKind.SHORT, lambda scores: jnp.where(paired, scores, -jnp.inf), scores
            )
            return choose(partial == PieceKind.PARTIAL, remove, scores)
        if not config.masked or partial is False:
            return scores
        return remove(scores) if partial is True else choose(partial, remove, scores)

    bias = None if inputs.bias is None else turn(view.cells(inputs.bias))
    remove_some = remove_where_partial if bias is None else remove
    scoring, numbers = context.scoring, context.numbers
    if scoring is None or numbers is None:
        finished = finish_scores(scores, remove_some, bias=bias)
        return TileScores(finished.scores, finished.masked)
    cells, named = view.pairs(context.offsets, numbers, across=across), inputs.named()
    parameters = {name: view.parameter(named[name]) for name in named if name.startswith(PARAMETER)}
    order = tuple(parameters)  # JAX hands dicts over sorted, "10" before "2"

    def join(parameters: dict[str, Array]) -> Score:
        return scoring.join(tuple(parameters[name] for name in order))

    def apply(raw: Array, parameters: dict[str, Array]) -> Array:
        return join(parameters).apply(raw, cells)

    score = join(parameters)
    finished = finish_scores(scores, remove_some, score=score, cells=cells, bias=bias)
    derivative = score.derivative(finished.scores, cells) if bias is None and score.bounded else None
    return TileScores(finished.scores, finished.masked, apply, finished.raw, parameters, view, derivative)


def _keep(inputs: Operands, context: Context, view: TileView, *, across: bool) -> Array:
    """Return which query of a tile may attend to which of its keys, by mask and bias."""
    keep = view.keep(context.backward_mask if across else context.forward_mask, context.offsets)
    return keep if inputs.bias is None else keep & (view.cells(inputs.bias) != -jnp.inf)


def zero_unattended(
    has_nonfinite: Array | None,
    finished: TileScores,
    view: TileView,
    query_axis: int,
    *tiles: Array | None,
    key_axis: int = -2,
) -> tuple[Any, ...]:
    """Zero keys or values of a tile that none of its queries, which lie on `query_axis`, may attend to.

    What sits there may be NaN or inf; multiplied by a zero weight or a zero gradient it would still reach
    outputs and gradients.
    """

    def find_asked() -> Array:
        return jnp.expand_dims((finished.masked != -jnp.inf).any(query_axis), -3 - key_axis)

    return _zero_unless(find_asked, has_nonfinite, view, tiles)


def zero_before_scoring(
    has_nonfinite: Array | None,
    inputs: Operands,
    context: Context,
    view: TileView,
    *tiles: Array | None,
    across: bool = False,
) -> tuple[Any, ...]:
    """Zero the same by the mask alone, where the product that makes the scores is itself reversed."""

    def find_asked() -> Array:
        return _keep(inputs, context, view, across=across).any(-2)[..., None]

    return _zero_unless(find_asked, has_nonfinite, view, tiles)


def _zero_unless(
    find_asked: Callable[[], Array], has_nonfinite: Array | None, view: TileView, tiles: Sequence[Any]
) -> tuple[Any, ...]:
    if has_nonfinite is None:
        return tuple(tiles)

    def zero(*tiles: Array | None) -> tuple[Any, ...]:
        asked = find_asked()
        return jax.tree.map(lambda tile: jnp.where(asked, tile, 0), tiles)

    if view.blocking.at_once:  # to choose would stop the device, and what is zeroed is multiplied by 0
        return zero(*tiles)
    return jax.lax.cond(has_nonfinite, zero, lambda *tiles: tiles, *tiles)


def surviving(context: Context, view: TileView, *, across: bool = False) -> Array | None:
    """Return which weights dropout spares; None where it is off."""
    if context.query_words is None or context.key_words is None:
        return None
    rate = view.config.dropout_rate
    query = view.slice_cells(context.query_words[0]), view.slice_cells(context.query_words[1])
    key = view.slice_cells(context.key_words[0]), view.slice_cells(context.key_words[1])
    survivors = view.over_scores(dropout.survivors(query, key, rate))
    return jnp.swapaxes(survivors, -1, -2) if across else survivors


def drop(tile: Array, survivors: Array | None) -> Array:
    """Zero what dropout takes."""
    return tile if survivors is None else jnp.where(survivors, tile, 0)
