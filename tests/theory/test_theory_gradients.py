"""Hand-derived gradients are those of autodiff, of the NumPy oracle, and of every backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from economy import mostly_slow
from regard import attend, scores
from regard.engine.dispatch.registry import COMPLETE
from regard.theory import gradients, steps

T, S, D, E = 5, 7, 3, 2
SHAPES = {
    "one head": ((T, D), (S, D), (S, E)),
    "heads": ((2, 6, T, D), (2, 6, S, D), (2, 6, S, E)),
    "grouped": ((2, 6, T, D), (2, 3, S, D), (2, 3, S, E)),
    "one key head": ((2, 6, T, D), (2, 1, S, D), (1, S, E)),
    "shared": ((6, T, D), (2, 6, S, D), (S, E)),
}


def draw(name, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape)) for shape in SHAPES[name]]


def options(name, seed=1):
    """Every option at once; the second query may attend to nothing, the fourth key answers nobody."""
    rng = np.random.default_rng(seed)
    leading = {"one head": (), "shared": (2, 6)}.get(name, (2, 6))
    heads = leading[-1:]
    keep = np.tril(np.ones((T, S), bool), S - T)
    keep[1], keep[:, 3] = False, False
    bias = rng.normal(size=(*heads, 1, S))
    bias[..., 5] = -np.inf
    return {
        "scale": jnp.float64(0.7),
        "softcap": jnp.float64(1.3),
        "slopes": jnp.asarray(rng.uniform(0.1, 0.5, heads)),
        "bias": jnp.asarray(bias),
        "sinks": jnp.asarray(rng.normal(size=heads)),
    }, {"keep": keep, "query_offset": 2}


def definition(query, key, value, keep, query_offset, scale, softcap, slopes, bias, sinks, dropout=1.0):
    """Output and log Z as they are defined, differentiable; no mask is empty but for rows that sinks save."""
    heads = max(x.shape[-3] if x.ndim > 2 else 1 for x in (query, key, value))
    full = lambda x: jnp.repeat(x, heads // x.shape[-3], -3) if x.ndim > 2 else x
    query, key, value = map(full, (query, key, value))
    with jax.numpy_rank_promotion("allow"):
        position = np.arange(query.shape[-2]) + query_offset
        distance = np.abs(position[:, None] - np.arange(key.shape[-2])).astype(float)
        s = softcap * jnp.tanh(scale * (query @ key.swapaxes(-1, -2)) / softcap)
        s = s - slopes[..., None, None] * distance + jnp.where(bias == -np.inf, 0, bias)
        e = jnp.where(keep & (bias != -np.inf), jnp.exp(s), 0)
        total = e.sum(-1, keepdims=True) + jnp.exp(sinks)[..., None, None]
        return (e / total * dropout) @ value, jnp.log(total)[..., 0]


def close(actual, expected, name="", tolerance=1e-10):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name", mostly_slow(SHAPES, "one head"))
def test_all_gradients_with_every_option_are_autodiffs(name, x64):
    arrays = dict(zip(("query", "key", "value"), draw(name), strict=True))
    numbers, fixed = options(name)
    rng = np.random.default_rng(3)
    found = steps.attention_steps(**arrays, **numbers, **fixed)
    output, log_partition = definition(**arrays, **numbers, **fixed)
    close(found.output, output)
    close(found.log_partition, log_partition)
    close(found.weights.sum(-1) + found.sink_weight, np.ones(log_partition.shape))
    d_output, d_log = rng.normal(size=output.shape), rng.normal(size=log_partition.shape)
    dropout = (rng.random((*log_partition.shape, S)) < 0.6) / 0.6

    def loss(inputs, dropout):
        output, log_partition = definition(**inputs, **fixed, dropout=dropout)
        return jnp.sum(output * d_output) + jnp.sum(log_partition * d_log)

    for factors in (None, jnp.asarray(dropout)):
        expected = jax.jit(jax.grad(loss))(arrays | numbers, 1.0 if factors is None else factors)
        dropped = steps.attention_steps(**arrays, **numbers, **fixed, dropout=factors)
        back = gradients.attention_gradients(dropped, d_output, d_log)
        for argument, grad in expected.items():
            assert getattr(back, argument).shape == grad.shape
            close(getattr(back, argument), grad, argument)
        assert back.metric is None


@pytest.mark.parametrize("name", ["one head", "grouped"])
def test_the_metrics_gradient_is_autodiffs(name, x64):
    arrays = draw(name)
    metric = jnp.asarray(np.random.default_rng(2).normal(size=(D, D)))
    cotangent = jnp.cos(jnp.arange(T * E, dtype=float)).reshape(T, E)
    cotangent = jnp.broadcast_to(cotangent, (*arrays[0].shape[:-2], T, E))
    loss = lambda query, key, value, g: jnp.sum(
        cotangent * attend(query @ g, key, value, scale=1.0, backend="dense")
    )
    with jax.numpy_rank_promotion("allow"):
        expected = jax.grad(loss, (0, 1, 2, 3))(*arrays, metric)
    back = gradients.attention_gradients(steps.attention_steps(*arrays, metric=metric), cotangent)
    for grad, name in zip(expected, ("query", "key", "value", "metric"), strict=True):
        close(getattr(back, name), grad, name)


@pytest.mark.parametrize("name", ["one head", "grouped", "shared"])
def test_the_numpy_oracle_agrees_also_where_rows_are_empty(name, x64):
    arrays = draw(name)
    numbers, fixed = options(name)
    bias = jnp.broadcast_to(numbers["bias"], (*numbers["bias"].shape[:-2], T, S))
    found = steps.attention_steps(*arrays, bias=bias, keep=fixed["keep"])
    cotangent = np.random.default_rng(4).normal(size=found.output.shape)
    truth = oracle.batched(*arrays, keep=fixed["keep"], bias=bias, cotangent=cotangent)
    back = gradients.attention_gradients(found, cotangent)
    close(found.output, truth.output)
    close(found.scores, truth.scores)
    close(found.weights, truth.weights)
    close(found.log_partition, truth.lse)
    for name in ("query", "key", "value", "bias"):
        close(getattr(back, name), getattr(truth, f"d_{name}"), name)
    assert not np.asarray(found.output)[..., 1, :].any()
    assert (np.asarray(found.log_partition)[..., 1] == -np.inf).all()
    for array in (back.query[..., 1, :], back.key[..., 3, :], back.value[..., 3, :], back.scores[..., 1, :]):
        assert not np.asarray(array).any()


@pytest.mark.parametrize("backend", COMPLETE)
def test_every_backend_agrees_with_the_steps(backend, x64):
    query, key, value = draw("grouped")
    numbers, fixed = options("grouped")
    bias = jnp.broadcast_to(numbers["bias"], (6, T, S))

    def run(query, key, value, bias, sinks, slopes, cap):
        output, aux = attend(
            query,
            key,
            value,
            mask=fixed["keep"],
            bias=bias,
            score=(scores.softcap(cap), scores.alibi(slopes=slopes)),
            scale=0.7,
            sinks=sinks,
            query_offset=2,
            aux=("lse",),
            backend=backend,
        )
        return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.cos(aux["lse"])), (output, aux["lse"])

    given = (query, key, value, bias, numbers["sinks"], numbers["slopes"], numbers["softcap"])
    expected, (output, lse) = jax.grad(run, tuple(range(7)), has_aux=True)(*given)
    found = steps.attention_steps(query, key, value, **(numbers | {"bias": bias}), **fixed)
    close(found.output, output)
    close(found.log_partition, lse)
    back = gradients.attention_gradients(found, jnp.cos(output), -jnp.sin(lse))
    names = ("query", "key", "value", "bias", "sinks", "slopes", "softcap")
    for name, grad in zip(names, expected, strict=True):
        close(getattr(back, name), grad, name)


def test_every_step_is_autodiffs(x64):
    rng = np.random.default_rng(6)
    query, key, value = draw("heads")
    weights = jnp.asarray(rng.random((2, 6, T, S)))
    d_output, d_products = rng.normal(size=(2, 6, T, E)), rng.normal(size=(2, 6, T, S))
    metric = jnp.asarray(rng.normal(size=(2, 6, D, D)))
    _, pull = jax.vjp(lambda a, v: a @ v, weights, value)
    for found, expected in zip(
        gradients.output_gradients(d_output, weights, value), pull(jnp.asarray(d_output)), strict=True
    ):
        close(found, expected)
    _, pull = jax.vjp(lambda q, k, g: q @ g @ k.swapaxes(-1, -2), query, key, metric)
    for found, expected in zip(
        gradients.score_gradients(d_products, query, key, metric), pull(jnp.asarray(d_products)), strict=True
    ):
        close(found, expected)
    x = jnp.asarray(rng.normal(size=7)) * 5
    slope = jax.vmap(jax.grad(lambda x: 2.5 * jnp.tanh(x / 2.5)))(x)
    close(gradients.softcap_derivative(2.5 * jnp.tanh(x / 2.5), 2.5), slope)


@settings(max_examples=4)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_any_shape_and_mask_agree_with_the_oracle(num_queries, num_keys, group, seed):
    rng = np.random.default_rng(seed)
    keep = rng.random((2 * group, num_queries, num_keys)) < 0.6
    with jax.enable_x64(True):
        arrays = [
            rng.normal(size=s) for s in ((2 * group, num_queries, 3), (2, num_keys, 3), (2, num_keys, 2))
        ]
        cotangent = rng.normal(size=(2 * group, num_queries, 2))
        truth = oracle.batched(*arrays, keep=keep, cotangent=cotangent)
        back = jax.jit(
            lambda keep, cotangent, *arrays: gradients.attention_gradients(
                steps.attention_steps(*arrays, keep=keep), cotangent
            )
        )(keep, cotangent, *arrays)
        for name in ("query", "key", "value"):
            close(getattr(back, name), getattr(truth, f"d_{name}"), name)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_extreme_logits_do_not_overflow(dtype, x64):
    query, key, value = (x.astype(dtype) for x in draw("heads"))
    found = steps.attention_steps(query, key, value, scale=1e4)
    back = gradients.attention_gradients(
        found, jnp.ones_like(found.output), jnp.ones_like(found.log_partition)
    )
    for name in ("output", "weights", "log_partition"):
        assert np.isfinite(getattr(found, name)).all(), name
    for name in ("query", "key", "value", "scale"):
        assert np.isfinite(getattr(back, name)).all(), name
        assert getattr(back, name).dtype == dtype
    huge = steps.attention_steps(query, key, value, scale=1e4, sinks=jnp.asarray(-1e30, dtype))
    np.testing.assert_array_equal(huge.weights, found.weights)
    # One score of 100 in float32: the published formula gives inf / inf.
    one = steps.attention_steps(jnp.full((1, 1), 100.0), jnp.ones((1, 1)), jnp.ones((1, 1)))
    assert one.weights.item() == 1


def test_nan_in_masked_slots_reaches_nothing(x64):
    query, key, value = draw("heads")
    keep = options("heads")[1]["keep"]
    clean = steps.attention_steps(query, key, value, keep=keep)
    query, cotangent = query.at[:, :, 1].set(jnp.nan), jnp.ones(clean.output.shape).at[:, :, 1].set(jnp.nan)
    key, value = key.at[:, :, 3].set(jnp.nan), value.at[:, :, 3].set(jnp.inf)
    found = steps.attention_steps(query, key, value, keep=keep)
    np.testing.assert_array_equal(found.output, clean.output)
    back = gradients.attention_gradients(found, cotangent, jnp.ones_like(found.log_partition))
    for name in ("query", "key", "value", "scale", "scores"):
        assert np.isfinite(getattr(back, name)).all(), name


def test_jit_and_vmap_agree_with_the_plain_call(x64):
    query, key, value = draw("grouped")

    def both(query, cotangent, offset):
        found = steps.attention_steps(query, key[0], value[0], slopes=jnp.ones(6), query_offset=offset)
        return gradients.attention_gradients(found, cotangent).query

    cotangent = jnp.ones((2, 6, T, E))
    many = jax.jit(jax.vmap(both))(query, cotangent, jnp.asarray([0, 3]))
    for row in range(2):
        close(many[row], both(query[row], cotangent[row], 3 * row))


def test_the_steps_give_the_numbers_of_the_page_on_index_notation(x64):
    with jax.enable_x64(False):
        drawn = [
            jax.random.normal(rng, shape)
            for rng, shape in zip(
                jax.random.split(jax.random.key(0), 3), ((10, 64), (20, 64), (20, 64)), strict=True
            )
        ]
    found = steps.attention_steps(*(jnp.asarray(np.asarray(x, np.float64)) for x in drawn))
    close(found.output[0, :4], [0.1944103, 0.1830600, 1.1014320, -0.0557363], tolerance=1e-6)
    close(found.weights[0, :4], [0.0217443, 0.0234516, 0.1168045, 0.0529126], tolerance=2e-6)
    close(found.output.sum(), 11.98246, tolerance=1e-6)
    assert found.output.shape == (10, 64)


@pytest.mark.parametrize("cross", [False, True])
def test_heads_in_index_form_are_heads_one_by_one(cross, x64):
    rng = np.random.default_rng(8)
    hidden, other = rng.normal(size=(2, T, 11)), rng.normal(size=(2, S, 11))
    shapes = ((3, 11, D), (3, 11, D), (3, 11, E), (3, E, 11))
    weights = [rng.normal(size=shape) for shape in shapes]
    source = other if cross else hidden
    found = steps.multi_head(hidden, *weights, source=other if cross else None)
    outputs = []
    for head in range(3):
        query, key, value = (x @ w[head] for x, w in zip((hidden, source, source), weights[:3], strict=True))
        outputs.append(oracle.batched(query[:, None], key[:, None], value[:, None]).output[:, 0])
    joined = np.concatenate(outputs, -1) @ weights[3].reshape(3 * E, 11)
    close(found.output, joined)
    close(found.contributions.sum(-3), joined)
    assert found.weights.shape == (2, 3, T, S if cross else T)


def test_errors_are_explained():
    x = jnp.ones((T, D))
    with pytest.raises(ValueError, match=r"key: expected the query's width 3, got shape \(5, 4\)"):
        steps.attention_steps(x, jnp.ones((5, 4)), x)
    with pytest.raises(ValueError, match=r"value: expected one row per key, 5, got shape \(7, 2\)"):
        steps.attention_steps(x, x, jnp.ones((7, 2)))
    with pytest.raises(ValueError, match=r"key: expected heads that divide 6, got shape \(4, 5, 3\)"):
        steps.attention_steps(jnp.ones((6, T, D)), jnp.ones((4, T, D)), jnp.ones((4, T, D)))
    with pytest.raises(ValueError, match=r"leading axes that broadcast, got \(2, 6\), \(3, 6\), \(3, 6\)"):
        steps.attention_steps(jnp.ones((2, 6, T, D)), *[jnp.ones((3, 6, T, D))] * 2)
    with pytest.raises(ValueError, match=r"softcap: expected one number, got shape \(2,\)"):
        steps.attention_steps(x, x, x, softcap=jnp.ones(2))
    with pytest.raises(TypeError, match="query: expected a floating-point array, got int32"):
        steps.attention_steps(x.astype(int), x, x)
    with pytest.raises(ValueError, match=r"d_output: expected an array that broadcasts to \(5, 3\)"):
        gradients.attention_gradients(steps.attention_steps(x, x, x), jnp.ones((2, 3)))
