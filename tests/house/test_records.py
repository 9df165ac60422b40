"""Structures of different classes differ, so that no compiled program serves the wrong one."""

import itertools

import jax
import numpy as np
import pytest

from regard import KVCache, masks, scores
from regard.records import record, static

IDS = np.arange(3)
MASKS = [kind(4) for kind in (masks.chunked, masks.dilated, masks.global_tokens, masks.prefix, masks.lengths)]
MASKS += [masks.sliding_window(4, 4), masks.valid_keys(IDS), masks.from_array(IDS[None]), masks.segments(IDS)]
MASKS += [masks.segments(IDS, IDS), masks.causal(), ~masks.causal(), masks.causal() & masks.causal()]
MASKS += [masks.causal() | masks.causal()]
SCORES = [scores.softcap(1.0), scores.temperature(1.0), scores.alibi(slopes=1.0)]
SCORES += [scores.bilinear(np.ones((2, 2))), scores.relative_bias(np.ones((8, 1)))]


def test_no_two_classes_share_a_structure():
    for kind in (MASKS, SCORES):
        for one, other in itertools.combinations(kind, 2):
            assert jax.tree.structure(one) != jax.tree.structure(other), (one, other)
            assert one != other
        for one in kind:
            assert jax.tree.structure(one) == jax.tree.structure(jax.tree.map(lambda leaf: leaf, one))


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
    for tree, names in ((point, ".x .y"), (KVCache.create(1, 1, 2, 1), ".key .value .lengths .start")):
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        assert paths == names.split()
