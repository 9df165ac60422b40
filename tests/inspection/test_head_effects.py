"""Effects of heads: sweeps against interventions one by one, attributions against sweeps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from regard import attend, inspection, masks, readouts
from regard.inspection import Change, attribute_heads, intervene, sweep_heads
from regard.models import Decoder, TransformerConfig

LENGTH, VOCABULARY = 12, 29


def two_layers(value):
    """Two calls of other numbers of heads, and a number that is not linear in the second one's output."""
    rows = jnp.linspace(0, 1, 35, dtype=value.dtype).reshape(1, 7, 5)
    first = attend(value, value, value, mask=masks.causal())
    second = attend(first[:2] + rows, first[:2], first[:2] - 1)
    return jnp.tanh(second.sum(0)).mean() + first[2, 1, 2]


@pytest.mark.parametrize("output", [0.0, [0.5, np.array([[[1.0]], [[-1.0]]])]])
def test_a_sweep_is_the_interventions_one_by_one(output, x64, capsys):
    value = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7, 5)))
    traced = []

    def fn(value, name):
        traced.append(name)
        return two_layers(value)

    effects = sweep_heads(fn, value, output=output, name="not an array", progress=output == 0.0)
    assert traced == ["not an array"] * 2  # once for the shapes, once for the program
    assert [effect.shape for effect in effects] == [(3,), (2,)]
    before = two_layers(value)
    for number, effect in enumerate(effects):
        new = output if output == 0.0 else output[number]
        for head in range(len(effect)):
            with intervene({number: Change(output=new, heads=[head])}):
                np.testing.assert_allclose(effect[head], two_layers(value) - before, rtol=0, atol=1e-12)


def test_an_attribution_is_the_change_to_first_order(x64):
    value = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7, 5)))
    found, small = attribute_heads(two_layers, value), 1e-6
    for number, effect in enumerate(found):
        for head in range(len(effect)):
            share = small * np.eye(len(effect))[head]
            with intervene({number: Change(output=0.0, share=share)}):
                moved = two_layers(value)
            with intervene({number: Change(output=0.0, share=-share)}):
                moved = (moved - two_layers(value)) / (2 * small)
            np.testing.assert_allclose(effect[head], moved, rtol=1e-6, atol=1e-8)


def test_gradients_on_the_way_to_a_change_are_averaged(x64):
    value = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7, 5)))
    found = attribute_heads(two_layers, value, steps=3)
    small = 1e-6
    for number, heads in enumerate((3, 2)):
        for head in range(heads):
            slopes = []
            for way in (0.0, 0.5, 1.0):
                ends = []
                for moved in (way + small, way - small):
                    shares = [np.full(3, way), np.full(2, way)]
                    shares[number][head] = moved
                    with intervene({n: Change(output=0.0, share=share) for n, share in enumerate(shares)}):
                        ends.append(two_layers(value))
                slopes.append((ends[0] - ends[1]) / (2 * small))
            np.testing.assert_allclose(found[number][head], np.mean(slopes), rtol=1e-6, atol=1e-8)
    with pytest.raises(ValueError, match="steps: expected an integer of at least 1"):
        attribute_heads(two_layers, value, steps=0)


def test_mistakes_are_explained():
    x = jnp.eye(3)
    for fn, message in (
        (lambda x: attend(x, x, x), "fn: expected a function to one floating-point number"),
        (lambda x: x.sum(), r"fn: expected a function that calls regard\.attend"),
    ):
        with pytest.raises(ValueError, match=message):
            sweep_heads(fn, x)
    with pytest.raises(ValueError, match=r"output: expected one entry for each of 1 calls, got 2"):
        attribute_heads(lambda x: attend(x, x, x).sum(), x, output=[0.0, 1.0])


def draw(rng):
    return jnp.tile(jax.random.randint(rng, (64, LENGTH), 0, VOCABULARY), (1, 2))


@pytest.mark.slow
def test_induction_heads_carry_what_a_trained_model_has_learned():
    sizes = {"d_model": 32, "num_heads": 4, "d_ff": 64, "num_layers": 2, "vocab_size": VOCABULARY}
    model = Decoder(TransformerConfig(**sizes, positions="rotary"), rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)

    def predict(state, ids):
        return nnx.merge(graph, state)(ids)[:, LENGTH - 1 : -1], ids[:, LENGTH:]

    def loss(state, ids):
        return optax.softmax_cross_entropy_with_integer_labels(*predict(state, ids)).mean()

    def logit(state, ids):
        logits, targets = predict(state, ids)
        return (jnp.take_along_axis(logits, targets[..., None], -1)[..., 0] - logits.mean(-1)).mean()

    optimizer = optax.adam(3e-3)

    @jax.jit
    def train(state, rngs):
        def step(carry, rng):
            state, moments = carry
            gradient = jax.grad(loss)(state, draw(rng))
            updates, moments = optimizer.update(gradient, moments)
            return (optax.apply_updates(state, updates), moments), None

        return jax.lax.scan(step, (state, optimizer.init(state)), rngs)[0][0]

    with jax.numpy_dtype_promotion("standard"):  # optax's own
        state = train(state, jax.random.split(jax.random.key(0), 120))
    ids = draw(jax.random.key(9))
    assert loss(state, ids) < 0.1
    trace = inspection.record_repeats(nnx.merge(graph, state), VOCABULARY, length=LENGTH)
    labels = [[one.name for one in found] for found in readouts.label(trace[1].readout()).values()]
    assert labels == [["induction"]] * 4
    _, means = inspection.observe(loss, lambda problem, output: output.mean((0, 2))[:, None])(state, ids)
    swept, estimated = (
        np.ravel(f(logit, state, ids, output=list(means))) for f in (sweep_heads, attribute_heads)
    )
    # The induction heads of the second layer carry it, and the estimate orders heads much as the sweep does.
    assert swept[4:].sum() < 5 * swept[:4].sum() < 0
    ranks = [np.argsort(np.argsort(effects)) for effects in (swept, estimated)]
    assert np.corrcoef(*ranks)[0, 1] > 0.6
