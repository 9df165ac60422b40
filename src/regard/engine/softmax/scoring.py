"""Scores as the softmax sees them: products of queries and keys, scaled, scored, biased, masked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.scores.cells import Cells
from regard.scores.score import Chain, Score

Remove = Callable[[Array], Array]  # sets scores to -inf


class Finished(NamedTuple):
    """Scores as the softmax sees them, and what led to them."""

    scores: Array
    masked: Array  # -inf where mask or bias remove a pair; elsewhere not to be read
    raw: Array  # what the score function was applied to


def finish_scores(
    scores: Array,
    keep: Array | Remove | None,
    *,
    score: Score | None = None,
    cells: Cells | None = None,
    bias: Array | None = None,
) -> Finished:
    """Finish scaled products: apply the score function, add the bias, remove pairs; every path calls this.

    `keep` is False where the mask, or a bias of -inf, removes a pair, or a function that removes pairs.
    """
    if score is None or cells is None:
        scores = _remove(scores if bias is None else scores + bias.astype(scores.dtype), keep)
        return Finished(scores, scores, scores)
    if bias is None and score.adds and callable(keep):
        masked = keep(scores)  # in place; what is added then is one more operation of what reads the scores
        scores = score.apply(masked, cells)
        return Finished(scores, scores, masked)
    if bias is None and score.bounded and callable(keep):
        # Removed last, so that the compiler writes a function as costly as tanh once, and reads it alone.
        finished = keep(score.apply(scores, cells))
        return Finished(finished, finished, jnp.where(finished == -jnp.inf, 0, scores))
    masked = _remove(scores, keep)
    # The function and its derivative see no score of a pair that is masked, which may be NaN.
    # Read from `masked`, as scores that are read no more are masked in place.
    may_attend = masked != -jnp.inf if callable(keep) else keep
    raw = scores if may_attend is None else jnp.where(may_attend, masked if callable(keep) else scores, 0)
    scores = score.apply(raw, cells)
    scores = scores if bias is None else scores + bias.astype(scores.dtype)
    return Finished(_remove(scores, may_attend), masked, raw)


def _remove(scores: Array, keep: Array | Remove | None) -> Array:
    if keep is None:
        return scores
    return keep(scores) if callable(keep) else jnp.where(keep, scores, -jnp.inf)


def scale_early(rows: Array, scale: Any, low_precision: bool) -> Array:
    """Scale a factor, T x D numbers instead of T x S; not one that would lose digits by it."""
    return rows if low_precision else rows * scale


def scale_late(scores: Array, scale: Any, low_precision: bool) -> Array:
    """Scale a product whose factors could not be."""
    return scores * scale if low_precision else scores


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scoring:
    """A score whose floating-point leaves are taken out: a call is differentiated by them.

    They come at least as wide as sums are, as their gradients are summed over tiles, and go into the score in
    the dtype that it was made with.
    """

    structure: Any = dataclasses.field(metadata={"static": True})
    places: tuple[int, ...] = dataclasses.field(metadata={"static": True})  # of parameters among the leaves
    head_axes: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})  # of the parameters
    dtypes: tuple[Any, ...] = dataclasses.field(metadata={"static": True})  # of the parameters in the score
    rest: tuple[Any, ...]

    @classmethod
    def split(cls, score: Score, dtype: Any) -> tuple[Scoring, tuple[Array, ...]]:
        """Split a score, to be applied to scores of this dtype, into its parameters and the rest."""
        score = score.closure_convert(dtype)
        paths, structure = jax.tree_util.tree_flatten_with_path(score)
        leaves = [leaf for _, leaf in paths]
        places = tuple(index for index, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, np.floating))
        rest = tuple(leaf for index, leaf in enumerate(leaves) if index not in places)
        head_axes = tuple(_head_axis(score, paths[index][0]) for index in places)
        arrays = [jnp.asarray(leaves[index]) for index in places]
        # A number of Python's has no dtype of its own: it meets scores in theirs.
        dtypes = tuple(np.dtype(dtype) if jax.typeof(x).weak_type else x.dtype for x in arrays)
        wide = (own if own.itemsize > np.dtype(dtype).itemsize else dtype for own in dtypes)
        parameters = tuple(x.astype(sums) for x, sums in zip(arrays, wide, strict=True))
        return cls(structure, places, head_axes, dtypes, rest), parameters

    def join(self, parameters: tuple[Array, ...]) -> Score:
        """Return the score with these parameters."""
        leaves = list(self.rest)
        for index, parameter, dtype in zip(self.places, parameters, self.dtypes, strict=True):
            leaves.insert(index, parameter.astype(dtype))
        return jax.tree.unflatten(self.structure, leaves)


def _head_axis(score: Score, path: Any) -> int | None:
    """Return the axis of a leaf that may have an entry per head."""
    if not isinstance(score, Chain):
        return None
    _, member, field, *_ = path
    return score.members[member.idx].head_axes.get(getattr(field, "name", ""))
