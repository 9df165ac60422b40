"""Structures of different classes differ, so that no compiled program serves the wrong one."""

import itertools
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from regard import KVCache, masks, scores
from regard.records import record, static

IDS = np.arange(3)
ALIKE = {
    "masks": [
        masks.chunked(4),
        masks.dilated(4),
        masks.global_tokens(4),
        masks.sliding_window(4, 4),
        masks.causal(),
        ~masks.causal(),
        masks.causal() & masks.causal(),
        masks.causal() | masks.causal(),
        masks.prefix(4),
        masks.lengths(4),
        masks.segments(IDS),
        masks.segments(IDS, IDS),
        masks.valid_keys(IDS),
        masks.from_array(IDS[None]),
    ],
    "scores": [
        scores.softcap(1.0),
        scores.temperature(1.0),
        scores.alibi(slopes=1.0),
        scores.bilinear(np.ones((2, 2))),
        scores.relative_bias(np.ones((8, 1))),
    ],
}


@pytest.mark.parametrize("kind", ALIKE)
def test_no_two_classes_share_a_structure(kind):
    for one, other in itertools.combinations(ALIKE[kind], 2):
        assert jax.tree.structure(one) != jax.tree.structure(other), (one, other)
        assert one != other
    for one in ALIKE[kind]:
        assert jax.tree.structure(one) == jax.tree.structure(jax.tree.map(lambda leaf: leaf, one))


def test_what_jax_registers_itself_would_share_one():
    """If this fails, JAX has mended it, and `record` may go."""

    @jax.tree_util.register_dataclass
    @dataclass
    class One:
        x: int

    @jax.tree_util.register_dataclass
    @dataclass
    class Other:
        x: int

    assert jax.tree.structure(One(1)) == jax.tree.structure(Other(1))


def test_a_record_is_a_frozen_pytree_with_names():
    @record
    class Point:
        x: int
        y: int
        unit: str = static()

    point = Point(1, 2, "m")
    with pytest.raises(AttributeError):
        point.x = 3
    assert jax.tree.leaves(point) == [1, 2]
    assert jax.tree.map(lambda leaf: 10 * leaf, point).unit == "m"
    assert jax.tree.structure(point) != jax.tree.structure(Point(1, 2, "s"))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(point)]
    assert paths == [".x", ".y"]
    names = jax.tree_util.tree_leaves_with_path(KVCache.create(1, 1, 2, 1))
    assert [jax.tree_util.keystr(path) for path, _ in names] == [".key", ".value", ".lengths", ".start"]
