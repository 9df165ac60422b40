"""What becomes of a tile of raw scores: score function, bias and mask; and what dropout and NaN take away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.flash.operands import PARAMETER, Context, Inputs
from regard.engine.flash.tiles import TileView
from regard.engine.softmax import dropout
from regard.masks import Mask
from regard.scores import Score


class Finished(NamedTuple):
    """Scores as the softmax sees them, and how the score function brought them about."""

    scores: Array
    masked: Array  # -inf where mask or bias remove a pair; else of no meaning
    apply: Any = None  # of raw scores and the named parameters; None without a score function
    raw: Any = None
    parameters: Any = None
    view: Any = None

    def jvp(self, change: Array, tangents: Mapping[str, Array]) -> Array:
        """Compute the tangent of the scores from those of the raw scores and of the parameters."""
        if self.apply is None:
            return change
        zeros = {name: jnp.zeros_like(array) for name, array in self.parameters.items()}
        tangents = zeros | {
            name: self.view.parameter(tangents[name]) for name in zeros.keys() & tangents.keys()
        }
        return jax.jvp(self.apply, (self.raw, self.parameters), (change, tangents))[1]

    def vjp(self, change: Array) -> tuple[Array, dict[str, Array]]:
        """Compute the cotangents of raw scores and parameters from that of the scores."""
        if self.apply is None:
            return change, {}
        return jax.vjp(self.apply, self.raw, self.parameters)[1](change)


def finish(
    scores: Array, inputs: Inputs, context: Context, view: TileView, partial: Any, *, across: bool = False
) -> Finished:
    """Score function, bias and mask."""
    if context.scoring is None:
        scores = _add_bias(scores, inputs, view, across=across)
        scores = _mask(scores, inputs, context, view, partial, across=across)
        return Finished(scores, scores)
    masked = _mask(scores, inputs, context, view, partial, across=across)
    scoring, cells = context.scoring, view.pairs(context.offsets, across=across)
    named = inputs.named()
    parameters = {name: view.parameter(named[name]) for name in named if name.startswith(PARAMETER)}
    order = tuple(parameters)  # JAX hands dicts over sorted, "10" before "2"

    def join(parameters: dict[str, Array]) -> Score:
        return scoring.join(tuple(parameters[name] for name in order))

    def apply(raw: Array, parameters: dict[str, Array]) -> Array:
        return join(parameters).apply(raw, cells)

    if inputs.bias is None and join(parameters).adds:
        return Finished(apply(masked, parameters), masked, apply, masked, parameters, view)
    # The function and its derivative see no score of a pair that is masked, which may be NaN.
    gone = masked == -jnp.inf
    raw = jnp.where(gone, 0, masked)
    scores = _add_bias(apply(raw, parameters), inputs, view, across=across)
    return Finished(jnp.where(gone, -jnp.inf, scores), masked, apply, raw, parameters, view)


def _add_bias(scores: Array, inputs: Inputs, view: TileView, *, across: bool = False) -> Array:
    if inputs.bias is None:
        return scores
    bias = view.cells(inputs.bias).astype(scores.dtype)
    return scores + (jnp.swapaxes(bias, -1, -2) if across else bias)


def _mask(
    scores: Array, inputs: Inputs, context: Context, view: TileView, partial: Any, *, across: bool = False
) -> Array:
    """-inf where the mask, or a bias of -inf, removes a pair; FULL tiles evaluate no mask."""
    mask = context.backward_mask if across else context.forward_mask

    def remove(scores: Array) -> Array:
        keep = _keep(inputs, mask, context, view)
        return jnp.where(jnp.swapaxes(keep, -1, -2) if across else keep, scores, -jnp.inf)

    if inputs.bias is not None:
        return remove(scores)
    return jax.lax.cond(partial, remove, lambda scores: scores, scores) if view.layout.masked else scores


def _keep(inputs: Inputs, mask: Mask | None, context: Context, view: TileView) -> Array:
    """Which pairs of a tile count."""
    keep = view.keep(mask, context.offsets)
    return keep if inputs.bias is None else keep & (view.cells(inputs.bias) != -jnp.inf)


def zero_unattended(
    has_nonfinite: Array | None, finished: Finished, queries: int, *tiles: Array
) -> tuple[Array, ...]:
    """Keys or values of a tile, 0 where none of its queries, on that axis of the scores, may attend to them.

    What sits there may be NaN or inf; multiplied by a zero weight or a zero gradient it would still reach
    outputs and gradients.
    """
    if has_nonfinite is None:
        return tiles

    def zero(*tiles: Array) -> tuple[Array, ...]:
        asked = (finished.masked.max(queries) != -jnp.inf)[..., None]
        return tuple(jnp.where(asked, tile, 0) for tile in tiles)

    return jax.lax.cond(has_nonfinite, zero, lambda *tiles: tiles, *tiles)


def surviving(context: Context, view: TileView, *, across: bool = False) -> Array | None:
    """Which weights dropout spares; None where it is off."""
    if context.query_words is None or context.key_words is None:
        return None
    rate = view.layout.dropout_rate
    query, key = (
        (view.slice_cells(words[0]), view.slice_cells(words[1]))
        for words in (context.query_words, context.key_words)
    )
    survivors = view.over_scores(dropout.survivors(query, key, rate))
    return jnp.swapaxes(survivors, -1, -2) if across else survivors


def drop(tile: Array, survivors: Array | None) -> Array:
    """0 where dropout takes a weight."""
    return tile if survivors is None else jnp.where(survivors, tile, 0)
