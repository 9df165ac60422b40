"""Heads found by what they read, against float64 means over the pairs."""

import jax.numpy as jnp
import numpy as np
import pytest

from page_traces import watch
from regard import inspection, masks, readouts, scores

WORDS = ["The", " cat", "\u2581saw", "the", " dog", ".", " THE", "cat", "s", "\u0120the", "."]


@pytest.mark.parametrize(
    ("asked", "rows", "keys", "offset"),
    [
        ({"query": "cat", "key": "the"}, [1, 7], [0, 3, 6, 9], None),
        ({"query": ["the", "dog"]}, [0, 3, 4, 6, 9], range(11), None),
        ({"key": "."}, range(11), [5, 10], None),
        ({"offset": 1}, range(11), range(11), 1),
        ({"key": "the", "offset": 3}, range(11), [0, 3, 6, 9], 3),
        ({"query": "bird"}, [], range(11), None),
    ],
)
def test_weights_are_averaged_over_the_pairs(asked, rows, keys, offset):
    trace, weights, distance, keep = watch(11, tokens=WORDS, mask=masks.causal())
    wanted = np.zeros((11, 11), bool)
    wanted[np.ix_(list(rows), list(keys))] = True
    if offset is not None:
        wanted &= distance == offset
    wanted = wanted & keep
    found = inspection.find_heads(trace, **asked)
    assert len(found) == (3 if wanted.any() else 0)
    assert [one.weight for one in found] == sorted((one.weight for one in found), reverse=True)
    for one in found:
        pairs = wanted[one.head]
        assert one.pairs == pairs.sum()
        assert abs(one.weight - weights[one.head][pairs].mean()) < 3e-6


def test_keys_that_a_score_removes_make_no_pairs():
    def remove(score, batch, head, query, key):
        return jnp.where(key <= query, score, -jnp.inf)

    trace, *_ = watch(11, score=scores.modifier(remove))
    assert [one.pairs for one in inspection.find_heads(trace, offset=1)] == [10] * 3
    assert inspection.find_heads(trace, offset=-1) == []


def test_weights_that_are_no_numbers_count_for_nothing():
    query, key = np.random.default_rng(0).normal(size=(2, 1, 1, 11, 5)).astype(np.float32)
    sound, broken = (
        inspection.find_heads(inspection.Trace.from_arrays(query=[one], key=[key]), offset=1)[0]
        for one in (query, np.where(np.arange(11)[:, None] == 10, np.nan, query))
    )
    weights = inspection.Trace.from_arrays(query=[query], key=[key])[0].window()[0]
    assert (sound.pairs, broken.pairs) == (10, 9)
    assert abs(broken.weight - np.diagonal(weights, -1)[:9].mean()) < 1e-6


def test_rows_taken_in_strips_give_the_same(monkeypatch):
    trace, weights, _, keep = watch(11, tokens=WORDS, mask=masks.causal())
    monkeypatch.setattr("regard.inspection.head_search._CELLS", 3 * 11 * 2)
    for one in inspection.find_heads(trace, key=["the", "."]):
        pairs = keep[one.head] & np.isin(np.arange(11), [0, 3, 5, 6, 9, 10])
        assert abs(one.weight - weights[one.head][pairs].mean()) < 3e-6


def test_heads_are_found_by_label():
    far = np.zeros((1, 3, 11, 11), np.float32)
    far[0, 1] = 30 * np.eye(11, k=-1)
    keys = np.broadcast_to(np.eye(11, dtype=np.float32), (1, 3, 11, 11))
    trace = inspection.Trace.from_arrays(query=[far], key=[keys], mask=masks.causal(), scale=1.0)
    (found,) = inspection.find_heads(trace, label="previous-token")
    label = next(
        one for one in readouts.label(trace.calls[0].readout())[(1,)] if one.name == "previous-token"
    )
    assert (found.head, found.weight, found.pairs) == (1, label.value, label.rows)
    (found,) = inspection.find_heads(trace, label="previous-token", offset=1)
    assert (found.head, found.pairs) == (1, 10)
    assert abs(found.weight - 1) < 1e-5


def test_what_cannot_be_looked_for_is_refused():
    trace, *_ = watch(11, mask=masks.causal())
    with pytest.raises(ValueError, match="query: expected a query, a key, an offset or a label"):
        inspection.find_heads(trace)
    with pytest.raises(TypeError, match=r"offset: expected an integer .*, got 1\.5"):
        inspection.find_heads(trace, offset=1.5)
    with pytest.raises(ValueError, match="label: expected one of self, previous-token"):
        inspection.find_heads(trace, label="inductive")
