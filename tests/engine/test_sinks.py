"""Sinks are one more key, with a value of 0, that every query may attend to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import plain
from economy import mostly_slow
from regard import attend, masks
from regard.engine.dispatch.registry import COMPLETE
from regard.masks import from_array

T, S = 5, 11
SHAPES = {
    "heads": ((2, 3, T, 7), (2, 3, S, 7), (3,)),
    "grouped": ((2, 6, T, 7), (2, 3, S, 7), (6,)),
    "batch and heads": ((2, 3, T, 7), (2, 3, S, 7), (2, 3)),
    "one for all": ((2, 3, T, 7), (2, 3, S, 7), ()),
    "no batch": ((T, 7), (S, 7), ()),
    "no keys": ((2, 3, T, 7), (2, 3, 0, 7), (3,)),
}


def draw(name):
    rng = np.random.default_rng(11)
    query, key, sinks = SHAPES[name]
    value = (*key[:-1], 13)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (query, key, value)]
    return *arrays, jnp.asarray(2 * rng.normal(size=sinks), jnp.float32)


def causal(num_keys):
    """The second query may attend to nothing."""
    keep = np.tril(np.ones((T, num_keys), bool), num_keys - T)
    keep[1] = False
    return keep


def truth(query, key, value, sinks, keep, cotangent):
    """Attention over one key more."""
    key, value = (np.concatenate([x, np.zeros((*x.shape[:-2], 1, x.shape[-1]))], -2) for x in (key, value))
    leading = query.shape[:-2]
    bias = np.zeros((*leading, T, key.shape[-2]))
    bias[..., -1] = np.broadcast_to(sinks, leading)[..., None]
    keep = np.concatenate([np.broadcast_to(keep, (T, key.shape[-2] - 1)), np.ones((T, 1), bool)], -1)
    return oracle.batched(query, key, value, keep=keep, bias=bias, cotangent=cotangent)


@pytest.mark.parametrize("backend", COMPLETE)
@pytest.mark.parametrize("name", mostly_slow(SHAPES, "heads", "grouped"))
def test_a_sink_is_one_more_key(name, backend):
    arrays = draw(name)
    keep = causal(arrays[1].shape[-2])
    names = ("weights", "lse", "entropy", "max_score", "argmax")

    def run(query, key, value, sinks, aux=()):
        return attend(query, key, value, mask=from_array(keep), sinks=sinks, aux=aux, backend=backend)

    output, aux = run(*arrays, names)
    cotangent = np.random.default_rng(2).normal(size=output.shape).astype(np.float32)
    grads = jax.grad(lambda *arrays: jnp.sum(run(*arrays) * cotangent), (0, 1, 2, 3))(*arrays)
    found = truth(*(np.asarray(x, np.float64) for x in arrays), keep, cotangent)

    def close(actual, expected, name, magnitude=1.0):
        plain.assert_as_exact(actual, expected, np.asarray(expected, np.float32), name, magnitude)

    close(output, found.output, "output")
    close(aux["weights"], found.weights[..., :-1], "weights")
    close(aux["lse"], found.lse, "lse")
    close(aux["entropy"], found.entropy, "entropy")
    for grad, part in zip(grads, ("d_query", "d_key", "d_value"), strict=False):
        expected = getattr(found, part)
        close(grad, expected if part == "d_query" else expected[..., :-1, :], part, 10.0)
    close(grads[3], oracle.reduce_to(found.d_bias[..., -1].sum(-1), arrays[3].shape), "d_sinks", 10.0)
    assert not np.asarray(output)[..., 1, :].any()
    bare = attend(*arrays[:3], mask=from_array(keep), aux=names, backend=backend)[1]
    for name in ("max_score", "argmax"):
        np.testing.assert_array_equal(aux[name], bare[name])


@pytest.mark.slow
@pytest.mark.parametrize("backend", COMPLETE)
def test_statistics_with_sinks_have_gradients(backend, x64):
    query, key, value, sinks = (x.astype(jnp.float64) for x in draw("grouped"))
    keep = causal(S)
    for name in ("lse", "entropy", "weights"):

        def stat(query, sinks, name=name):
            aux = attend(query, key, value, mask=keep, sinks=sinks, aux=(name,), backend=backend)[1]
            return jnp.sum(jnp.sin(aux[name]))

        rng = np.random.default_rng(4)
        tangents = [jnp.asarray(rng.normal(size=x.shape)) for x in (query, sinks)]
        step = 1e-6
        ends = [
            stat(query + sign * step * tangents[0], sinks + sign * step * tangents[1]) for sign in (1, -1)
        ]
        grads = jax.grad(stat, (0, 1))(query, sinks)
        exact = sum(jnp.vdot(grad, tangent) for grad, tangent in zip(grads, tangents, strict=True))
        np.testing.assert_allclose(exact, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("backend", COMPLETE)
def test_a_sink_of_minus_infinity_is_none_and_a_huge_one_takes_all(backend):
    query, key, value, _ = draw("heads")
    sinks = jnp.asarray([-jnp.inf, 0.0, 1e30])

    def run(sinks, aux=("lse", "entropy", "weights")):
        return attend(query, key, value, mask=causal(S), sinks=sinks, aux=aux, backend=backend)

    output, aux = run(sinks)
    bare, bare_aux = attend(
        query, key, value, mask=causal(S), aux=("lse", "entropy", "weights"), backend=backend
    )
    np.testing.assert_array_equal(output[:, 0], bare[:, 0])
    for name, expected in bare_aux.items():
        np.testing.assert_array_equal(aux[name][:, 0], expected[:, 0])
    assert not np.asarray(output)[:, 2].any()
    assert not np.asarray(aux["entropy"])[:, 2].any()
    grad = jax.grad(lambda sinks: jnp.sum(run(sinks)[0] ** 2))(sinks)
    assert np.isfinite(grad).all()
    np.testing.assert_array_equal(grad[np.array([0, 2])], 0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", COMPLETE)
def test_transforms_of_sinks_agree_with_the_plain_call(backend):
    query, key, value, sinks = draw("heads")
    run = lambda query, sinks: attend(
        query, key, value, mask=masks.causal(), query_offset=6, sinks=sinks, backend=backend
    )
    many = jnp.stack([sinks, sinks + 1])
    for row, found in enumerate(jax.vmap(run, (None, 0))(query, many)):
        np.testing.assert_allclose(found, run(query, many[row]), rtol=1e-5, atol=1e-6)
    energy = lambda sinks: jnp.sum(run(query, sinks) ** 2)
    _, tangent = jax.jvp(energy, (sinks,), (jnp.cos(sinks),))
    np.testing.assert_allclose(
        tangent, jnp.vdot(jax.grad(energy)(sinks), jnp.cos(sinks)), rtol=1e-5, atol=1e-5
    )
    both = jax.jvp(jax.grad(energy), (sinks,), (jnp.cos(sinks),))[1]
    np.testing.assert_allclose(both, jax.hessian(energy)(sinks) @ jnp.cos(sinks), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", COMPLETE)
def test_dropout_leaves_the_sink_alone(backend):
    query, key, _, sinks = draw("heads")
    ones = jnp.ones((2, 3, S, 4))
    run = lambda rate: attend(
        query, key, ones, sinks=sinks, dropout_rate=rate, rng=jax.random.key(0), aux=("lse",), backend=backend
    )
    (dropped, aux), (kept, bare) = run(0.5), run(0.0)
    # Programs of their own, which may sum in another order.
    np.testing.assert_allclose(aux["lse"], bare["lse"], rtol=5e-7)
    assert (np.asarray(kept) < 1).all()
    assert not np.allclose(dropped, kept)


def test_bad_sinks_are_explained():
    x = jnp.ones((2, 3, T, 7))
    with pytest.raises(ValueError, match=r"sinks: expected one logit per head.*\(2, 3\); got shape \(2,\)"):
        attend(x, x, x, sinks=jnp.zeros(2))
    with pytest.raises(ValueError, match=r"sinks: .*got shape \(1, 2, 3\)"):
        attend(x, x, x, sinks=jnp.zeros((1, 2, 3)))
    with pytest.raises(TypeError, match="sinks: expected a floating-point array, got int32"):
        attend(x, x, x, sinks=jnp.zeros(3, jnp.int32))
