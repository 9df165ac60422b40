"""Heads found by what they read, against float64 means over the pairs."""

import jax.numpy as jnp
import numpy as np

from page_traces import watch
from refusals import check_refusals
from regard import inspection, masks, readouts, scores

WORDS = ["The", " cat", "\u2581saw", "the", " dog", ".", " THE", "cat", "s", "\u0120the", "."]
THE = [0, 3, 6, 9]
ASKED = [
    ({"query": "cat", "key": "the"}, [1, 7], THE, None),
    ({"query": ["the", "dog"]}, [0, 3, 4, 6, 9], range(11), None),
    ({"offset": 1}, range(11), range(11), 1),
    ({"key": "the", "offset": 3}, range(11), THE, 3),
    ({"query": "bird"}, [], range(11), None),
]


def test_weights_are_averaged_over_the_pairs(monkeypatch):
    trace, case = watch(11, tokens=WORDS, mask=masks.causal())
    for cells in (None, 3 * 11 * 2):  # all rows at once, and in strips
        if cells:
            monkeypatch.setattr("regard.inspection.head_search._CELLS", cells)
        for asked, rows, keys, offset in ASKED:
            wanted = np.zeros((11, 11), bool)
            wanted[np.ix_(list(rows), list(keys))] = True
            wanted = wanted & case.keep & (offset is None or case.distance == offset)
            found = inspection.find_heads(trace, **asked)
            assert len(found) == (3 if wanted.any() else 0)
            assert [one.weight for one in found] == sorted((one.weight for one in found), reverse=True)
            for one in found:
                pairs = wanted[one.head]
                assert one.pairs == pairs.sum()
                assert abs(one.weight - case.weights[one.head][pairs].mean()) < 3e-6


def test_keys_that_a_score_removes_make_no_pairs_and_weights_that_are_no_numbers_count_for_nothing():
    def remove(score, batch, head, query, key):
        return jnp.where(key <= query, score, -jnp.inf)

    trace, _ = watch(11, score=scores.modifier(remove))
    assert [one.pairs for one in inspection.find_heads(trace, offset=1)] == [10] * 3
    assert inspection.find_heads(trace, offset=-1) == []
    query, key = np.random.default_rng(0).normal(size=(2, 1, 1, 11, 5)).astype(np.float32)
    query[..., 10, :] = np.nan
    trace = inspection.Trace.from_arrays(query=[query], key=[key])
    (found,) = inspection.find_heads(trace, offset=1)
    weights = np.exp(query[0, 0].astype(np.float64) @ key[0, 0].T.astype(np.float64) / np.sqrt(5))[:10]
    weights /= weights.sum(-1, keepdims=True)
    assert found.pairs == 9
    assert abs(found.weight - weights[np.arange(1, 10), np.arange(9)].mean()) < 1e-6


def test_heads_are_found_by_label():
    far = np.zeros((1, 3, 11, 11), np.float32)
    far[0, 1] = 30 * np.eye(11, k=-1)
    keys = np.broadcast_to(np.eye(11, dtype=np.float32), (1, 3, 11, 11))
    trace = inspection.Trace.from_arrays(query=[far], key=[keys], mask=masks.causal(), scale=1.0)
    (found,) = inspection.find_heads(trace, label="previous-token")
    labels = readouts.label(trace[0].readout())[(1,)]
    label = next(one for one in labels if one.name == "previous-token")
    assert (found.head, found.weight, found.pairs) == (1, label.value, label.rows)
    (found,) = inspection.find_heads(trace, label="previous-token", offset=1)
    assert (found.head, found.pairs) == (1, 10)
    assert abs(found.weight - 1) < 1e-5
    check_refusals(
        (lambda: inspection.find_heads(trace), "query: expected a query, a key, an offset or a label"),
        (lambda: inspection.find_heads(trace, offset=1.5), r"offset: expected .*, got 1\.5", TypeError),
        (lambda: inspection.find_heads(trace, label="inductive"), "label: expected one of self, previous"),
    )
