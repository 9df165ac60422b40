"""Scoring: a score apart from its parameters, which a call is differentiated by."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.scores.score import Score


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scoring:
    """What is left of a score when its floating-point leaves are taken out."""

    structure: Any = dataclasses.field(metadata={"static": True})
    places: tuple[int, ...] = dataclasses.field(metadata={"static": True})  # of parameters among the leaves
    rest: tuple[Any, ...]

    @classmethod
    def split(cls, score: Score, dtype: Any) -> tuple[Scoring, tuple[Array, ...]]:
        """The score, to be applied to scores of this dtype, and its parameters."""
        leaves, structure = jax.tree.flatten(score.closure_convert(dtype))
        places = tuple(place for place, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, np.floating))
        rest = tuple(leaf for place, leaf in enumerate(leaves) if place not in places)
        return cls(structure, places, rest), tuple(jnp.asarray(leaves[place]) for place in places)

    def join(self, parameters: tuple[Array, ...]) -> Score:
        """The score with these parameters."""
        leaves = list(self.rest)
        for place, parameter in zip(self.places, parameters, strict=True):
            leaves.insert(place, parameter)
        return jax.tree.unflatten(self.structure, leaves)
