"""Effects of heads: sweeps and attributions against interventions; and heads found by what they read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from page_traces import watch, weigh
from refusals import assert_refused
from regard import attend, inspection, masks, scores
from regard.inspection import Change, attribute_heads, intervene, sweep_heads

VALUE = np.random.default_rng(0).normal(size=(3, 7, 5))
ROWS = np.linspace(0, 1, 35).reshape(1, 7, 5)


def two_layers(value):
    """Two calls of other numbers of heads, and a number that is not linear in the second one's output."""
    first = attend(value, value, value, mask=masks.causal())
    return jnp.tanh(attend(first[:2] + ROWS, first[:2], first[:2] - 1).sum(0)).mean() + first[2, 1, 2]


@jax.jit
def change(shares, outputs=(0.0, 0.0)):
    with intervene({n: Change(output=outputs[n], share=share) for n, share in enumerate(shares)}):
        return two_layers(VALUE)


@pytest.mark.parametrize("output", [0.0, [0.5, np.array([[[1.0]], [[-1.0]]])]])
def test_a_sweep_is_the_interventions_one_by_one(output, x64, capsys):
    traced = []

    def fn(value, name):
        traced.append(name)
        return two_layers(value)

    effects = sweep_heads(fn, VALUE, output=output, name="not an array", progress=output == 0.0)
    assert traced == ["not an array"] * 2  # once for the shapes, once for the program
    assert [effect.shape for effect in effects] == [(3,), (2,)]
    layer = jax.jit(lambda x: attend(x, x, x))
    assert len(sweep_heads(lambda x: layer(layer(x)).sum(), VALUE)) == 2, "traced once otherwise"
    outputs = (0.0, 0.0) if output == 0.0 else tuple(output)
    before = change((np.zeros(3), np.zeros(2)), outputs)
    for number, effect in enumerate(effects):
        for head in range(len(effect)):
            shares = [np.zeros(3), np.zeros(2)]
            shares[number][head] = 1
            np.testing.assert_allclose(effect[head], change(tuple(shares), outputs) - before, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 3])
def test_an_attribution_is_the_change_to_first_order_or_its_mean_on_the_way(steps, x64):
    found, small = attribute_heads(two_layers, VALUE, steps=steps), 1e-6
    for number, effect in enumerate(found):
        for head in range(len(effect)):
            slopes = []
            for way in (0.0,) if steps == 1 else (0.0, 0.5, 1.0):
                ends = []
                for moved in (way + small, way - small):
                    shares = [np.full(3, way), np.full(2, way)]
                    shares[number][head] = moved
                    ends.append(change(tuple(shares)))
                slopes.append((ends[0] - ends[1]) / (2 * small))
            np.testing.assert_allclose(effect[head], np.mean(slopes), rtol=1e-6, atol=1e-8)


def test_mistakes_are_explained():
    x = np.eye(3, dtype=np.float32)
    one = lambda x: attend(x, x, x).sum()
    assert_refused(
        (lambda: sweep_heads(lambda x: attend(x, x, x), x), "fn: expected a function to one floating-point"),
        (lambda: sweep_heads(lambda x: x.sum(), x), r"fn: expected a function that calls regard\.attend"),
        (lambda: attribute_heads(one, x, output=[0.0, 1.0]), r"one entry for each of 1 calls, got 2"),
        (lambda: attribute_heads(one, x, steps=0), "steps: expected an integer of at least 1"),
    )


WORDS = ["The", " cat", "\u2581saw", "the", " dog", ".", " THE", "cat", "s", "\u0120the", "."]
ASKED = [
    ({"query": "cat", "key": "the"}, [1, 7], [0, 3, 6, 9], None),
    ({"query": ["the", "dog"], "offset": 3}, [0, 3, 4, 6, 9], range(11), 3),
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
    remove = lambda score, batch, head, query, key: jnp.where(key <= query, score, -jnp.inf)
    trace, _ = watch(11, score=scores.modifier(remove))
    assert [one.pairs for one in inspection.find_heads(trace, offset=1)] == [10] * 3
    assert inspection.find_heads(trace, offset=-1) == []
    query, key = np.random.default_rng(0).normal(size=(2, 1, 1, 11, 5)).astype(np.float32)
    query[..., 10, :] = np.nan
    trace = inspection.Trace.from_arrays(query=[query], key=[key])
    (found,) = inspection.find_heads(trace, offset=1)
    weights = weigh(query[0], key[0], np.ones((11, 11), bool))[0][0]
    assert found.pairs == 9
    assert abs(found.weight - weights[np.arange(1, 10), np.arange(9)].mean()) < 1e-6
