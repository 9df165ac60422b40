"""Sinks are one more key, with a value of 0, that every query may attend to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from definition import collapse
from regard import attend
from regard.engine.dispatch.registry import COMPLETE

T, S = 5, 11
STATS = ("weights", "lse", "entropy", "max_score", "argmax")
SHAPES = {"grouped": ((2, 6, T, 7), (2, 3, S, 7), (6,))}
SHAPES["no keys, of rows and heads"] = ((2, 3, T, 7), (2, 3, 0, 7), (2, 3))


def draw(name, dtype="float32"):
    rng = np.random.default_rng(11)
    query, key, sinks = SHAPES[name]
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in (query, key, (*key[:-1], 13))]
    return *arrays, jnp.asarray(2 * rng.normal(size=sinks), dtype)


def causal(num_keys):
    """The second query may attend to nothing."""
    keep = np.tril(np.ones((T, num_keys), bool), num_keys - T)
    keep[1] = False
    return keep


def define(query, key, value, sinks, keep, cotangent):
    """Attention over one key more."""
    key, value = (np.concatenate([x, np.zeros((*x.shape[:-2], 1, x.shape[-1]))], -2) for x in (key, value))
    leading = query.shape[:-2]
    bias = np.zeros((*leading, T, key.shape[-2]))
    bias[..., -1] = np.broadcast_to(sinks, leading)[..., None]
    keep = np.concatenate([np.broadcast_to(keep, (T, key.shape[-2] - 1)), np.ones((T, 1), bool)], -1)
    return oracle.batched(query, key, value, keep=keep, bias=bias, cotangent=cotangent)


@pytest.mark.parametrize("backend", COMPLETE)
@pytest.mark.parametrize("name", SHAPES)
def test_a_sink_is_one_more_key(name, backend, x64):
    arrays = draw(name, "float64")
    keep = causal(arrays[1].shape[-2])
    cotangent = np.random.default_rng(2).normal(size=(*arrays[0].shape[:-1], 13))

    @jax.jit
    def run(arrays):
        def loss(query, key, value, sinks):
            output, aux = attend(query, key, value, mask=keep, sinks=sinks, aux=STATS, backend=backend)
            return jnp.sum(output * cotangent), (output, aux)

        bare = attend(*arrays[:3], mask=keep, aux=("max_score", "argmax"), backend=backend)[1]
        return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(*arrays), bare

    (grads, (output, aux)), bare = run(arrays)
    truth = define(*map(np.asarray, arrays), keep, cotangent)
    d_sinks = collapse(truth.d_bias[..., -1].sum(-1), arrays[3].shape)
    expected = (truth.output, truth.weights[..., :-1], truth.lse, truth.entropy, truth.d_query)
    expected = (*expected, truth.d_key[..., :-1, :], truth.d_value[..., :-1, :], d_sinks)
    found = (output, aux["weights"], aux["lse"], aux["entropy"], *grads)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)
    assert not np.asarray(output)[..., 1, :].any()
    for stat, array in bare.items():
        np.testing.assert_array_equal(aux[stat], array)


@pytest.mark.parametrize("backend", COMPLETE)
def test_a_sink_of_minus_infinity_is_none_and_a_huge_one_takes_all(backend):
    query, key, value = draw("grouped")[:3]
    sinks = jnp.asarray([-jnp.inf, 0.0, 1e30] * 2)

    @jax.jit
    def run(sinks):
        options = {"mask": causal(S), "aux": STATS[:3], "backend": backend}
        call = lambda sinks: attend(query, key, value, sinks=sinks, **options)
        grad = jax.grad(lambda sinks: jnp.sum(call(sinks)[0] ** 2))(sinks)
        return call(sinks), attend(query, key, value, **options), grad

    (output, aux), (bare, bare_aux), grad = run(sinks)
    # Programs of their own sum in an order of their own.
    for one, other in ((output, bare), *((aux[name], bare_aux[name]) for name in aux)):
        np.testing.assert_allclose(one[:, ::3], other[:, ::3], rtol=1e-6, atol=1e-6)
    assert not np.asarray(output)[:, 2::3].any()
    assert not np.asarray(aux["entropy"])[:, 2::3].any()
    assert np.isfinite(grad).all()
    np.testing.assert_array_equal(grad.reshape(2, 3)[:, ::2], 0)
