"""Effects of heads: sweeps against interventions one by one, attributions against sweeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusals import check_refusals
from regard import attend, masks
from regard.inspection import Change, attribute_heads, intervene, sweep_heads

VALUE = np.random.default_rng(0).normal(size=(3, 7, 5))
ROWS = np.linspace(0, 1, 35).reshape(1, 7, 5)


def two_layers(value):
    """Two calls of other numbers of heads, and a number that is not linear in the second one's output."""
    first = attend(value, value, value, mask=masks.causal())
    second = attend(first[:2] + ROWS, first[:2], first[:2] - 1)
    return jnp.tanh(second.sum(0)).mean() + first[2, 1, 2]


@jax.jit
def change(shares, outputs=(0.0, 0.0)):
    """The number when so much of each head's output is replaced."""
    changes = {n: Change(output=outputs[n], share=share) for n, share in enumerate(shares)}
    with intervene(changes):
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
    check_refusals(
        (lambda: sweep_heads(lambda x: attend(x, x, x), x), "fn: expected a function to one floating-point"),
        (lambda: sweep_heads(lambda x: x.sum(), x), r"fn: expected a function that calls regard\.attend"),
        (lambda: attribute_heads(one, x, output=[0.0, 1.0]), r"one entry for each of 1 calls, got 2"),
        (lambda: attribute_heads(one, x, steps=0), "steps: expected an integer of at least 1"),
    )
