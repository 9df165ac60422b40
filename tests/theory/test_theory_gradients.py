"""Hand-derived gradients are those of autodiff, of the NumPy oracle, and of `attend`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from oracle import close
from regard import attend, scores
from regard.theory import gradients, steps

T, S, D, E = 5, 7, 3, 2
ARGUMENTS = ("query", "key", "value")
SHAPES = {
    "grouped": ((2, 6, T, D), (2, 3, S, D), (2, 3, S, E)),
    "one key head": ((2, 6, T, D), (2, 1, S, D), (1, S, E)),
    "shared": ((6, T, D), (2, 6, S, D), (S, E)),
}
# The second query may attend to nothing, the fourth key answers nobody.
KEEP = np.tril(np.ones((T, S), bool), S - T)
KEEP[1], KEEP[:, 3] = False, False


def draw(name):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape) for name, shape in zip(ARGUMENTS, SHAPES[name], strict=True)}


def draw_options(heads=6):
    """Every number that a call of several heads may be given."""
    rng = np.random.default_rng(1)
    bias = rng.normal(size=(heads, 1, S))
    bias[..., 5] = -np.inf
    numbers = {"slopes": rng.uniform(0.1, 0.5, heads), "bias": bias, "sinks": rng.normal(size=heads)}
    return numbers | {"scale": np.float64(0.7), "softcap": np.float64(1.3)}


@jax.jit
def run(arrays, numbers, cotangents, options):
    """Every step, and every gradient."""
    found = steps.attention_steps(**arrays, **numbers, **options)
    return found, gradients.attention_gradients(found, *cotangents)


def definition(query, key, value, scale, softcap, slopes, bias, sinks, dropout):
    """Output and log Z as they are defined, differentiable; no mask is empty but for rows that sinks save."""
    heads = max(x.shape[-3] for x in (query, key, value))
    query, key, value = (jnp.repeat(x, heads // x.shape[-3], -3) for x in (query, key, value))
    with jax.numpy_rank_promotion("allow"):
        distance = np.abs(np.arange(T)[:, None] + 2 - np.arange(S)).astype(float)
        s = softcap * jnp.tanh(scale * (query @ key.swapaxes(-1, -2)) / softcap)
        s = s - slopes[..., None, None] * distance + jnp.where(bias == -np.inf, 0, bias)
        e = jnp.where(KEEP & (bias != -np.inf), jnp.exp(s), 0)
        total = e.sum(-1, keepdims=True) + jnp.exp(sinks)[..., None, None]
        return (e / total * dropout) @ value, jnp.log(total)[..., 0]


def test_all_gradients_with_every_option_are_autodiffs(x64):
    arrays, numbers, rng = draw("one key head"), draw_options(), np.random.default_rng(3)
    cotangents = rng.normal(size=(2, 6, T, E)), rng.normal(size=(2, 6, T))

    @jax.jit
    def differentiate(inputs, dropout):
        results, pull = jax.vjp(lambda inputs: definition(**inputs, dropout=dropout), inputs)
        return results, pull(cotangents)[0]

    for dropout in (np.ones((2, 6, T, S)), (rng.random((2, 6, T, S)) < 0.6) / 0.6):
        (output, log_partition), expected = differentiate(arrays | numbers, dropout)
        options = {"keep": KEEP, "query_offset": 2, "dropout": dropout}
        found, back = run(arrays, numbers, cotangents, options)
        close(found.output, output)
        close(found.log_partition, log_partition)
        close(np.asarray(found.weights).sum(-1) + found.sink_weight, np.ones((2, 6, T)))
        for argument, grad in expected.items():
            assert getattr(back, argument).shape == grad.shape
            close(getattr(back, argument), grad, name=argument)
        assert back.metric is None


def test_attend_agrees_with_the_steps_of_grouped_heads(x64):
    arrays, numbers = draw("grouped"), draw_options()
    numbers["bias"] = np.broadcast_to(numbers["bias"], (6, T, S))

    @jax.jit
    def differentiate(arrays, numbers):
        def call(arrays, slopes, softcap, **options):
            function = (scores.softcap(softcap), scores.alibi(slopes=slopes))
            more = {"mask": KEEP, "score": function, "query_offset": 2, "aux": ("lse",), "backend": "dense"}
            output, aux = attend(**arrays, **options, **more)
            return output, aux["lse"]

        results, pull = jax.vjp(lambda arrays, numbers: call(arrays, **numbers), arrays, numbers)
        cotangents = jnp.cos(results[0]), -jnp.sin(results[1])
        return results, cotangents, pull(cotangents)

    scale = {"scale": numbers.pop("scale")}
    (output, lse), cotangents, expected = differentiate(arrays, numbers | {"scale": scale["scale"]})
    found, back = run(arrays, numbers | scale, cotangents, {"keep": KEEP, "query_offset": 2})
    close(found.output, output)
    close(found.log_partition, lse)
    for name, grad in (expected[0] | expected[1]).items():
        close(getattr(back, name), grad, name=name)


def test_the_metrics_gradient_is_autodiffs(x64):
    arrays, rng = draw("grouped"), np.random.default_rng(2)
    metric, cotangent = rng.normal(size=(D, D)), rng.normal(size=(2, 6, T, E))

    @jax.jit
    @jax.grad
    def differentiate(inputs):
        key, value = (jnp.repeat(inputs[name], 2, -3) for name in ("key", "value"))
        products = jnp.einsum("nhia,ab,nhjb->nhij", inputs["query"], inputs["metric"], key)
        return jnp.sum(cotangent * (jax.nn.softmax(products) @ value))

    expected = differentiate(arrays | {"metric": metric})
    _, back = run(arrays, {"metric": metric}, (cotangent,), {})
    for name, grad in expected.items():
        close(getattr(back, name), grad, name=name)


@pytest.mark.parametrize("name", ["grouped", "shared"])
def test_the_numpy_oracle_agrees_also_where_rows_are_empty(name, x64):
    arrays, rng = draw(name), np.random.default_rng(4)
    bias, cotangent = rng.normal(size=(6, T, S)), rng.normal(size=(2, 6, T, E))
    bias[..., 5] = -np.inf
    found, back = run(arrays, {"bias": bias}, (cotangent,), {"keep": KEEP})
    truth = oracle.batched(*arrays.values(), keep=KEEP, bias=bias, cotangent=cotangent)
    for step in ("output", "scores", "weights"):
        close(getattr(found, step), getattr(truth, step), name=step)
    close(found.log_partition, truth.lse)
    for argument in ("query", "key", "value", "bias"):
        close(getattr(back, argument), getattr(truth, f"d_{argument}"), name=argument)
    assert not np.asarray(found.output)[..., 1, :].any()
    assert (np.asarray(found.log_partition)[..., 1] == -np.inf).all()
    for array, row in ((back.query, 1), (back.key, 3), (back.value, 3), (back.scores, 1)):
        assert not np.asarray(array)[..., row, :].any()


def test_extreme_logits_do_not_overflow():
    arrays = {name: array.astype(np.float32) for name, array in draw("grouped").items()}
    cotangents = np.ones((2, 6, T, E), np.float32), np.ones((2, 6, T), np.float32)
    for sink in (-np.inf, -1e30):
        found, back = run(arrays, {"scale": np.float32(1e4), "sinks": np.float32(sink)}, cotangents, {})
        for name in ("output", "weights", "log_partition"):
            assert np.isfinite(getattr(found, name)).all(), name
        close(np.asarray(found.weights).sum(-1), np.ones((2, 6, T)), tolerance=1e-6)
        for name in ("query", "key", "value", "scale"):
            assert np.isfinite(getattr(back, name)).all(), name
            assert getattr(back, name).dtype == np.float32


def test_nan_in_masked_slots_reaches_nothing(x64):
    arrays, cotangent = draw("grouped"), np.ones((2, 6, T, E))
    cotangents = cotangent, np.ones((2, 6, T))
    clean, _ = run(arrays, {}, cotangents, {"keep": KEEP})
    arrays["query"][:, :, 1], cotangent[:, :, 1] = np.nan, np.nan
    arrays["key"][:, :, 3], arrays["value"][:, :, 3] = np.nan, np.inf
    found, back = run(arrays, {}, cotangents, {"keep": KEEP})
    np.testing.assert_array_equal(found.output, clean.output)
    for name in ("query", "key", "value", "scale", "scores"):
        assert np.isfinite(getattr(back, name)).all(), name


def test_heads_in_index_form_are_heads_one_by_one(x64):
    rng = np.random.default_rng(8)
    hidden, other = rng.normal(size=(2, T, 11)), rng.normal(size=(2, S, 11))
    weights = [rng.normal(size=shape) for shape in ((3, 11, D), (3, 11, D), (3, 11, E), (3, E, 11))]
    call = jax.jit(steps.multi_head)
    for given, source in ((None, hidden), (other, other)):
        found, outputs = call(hidden, *weights, source=given), []
        for head in range(3):
            pairs = zip((hidden, source, source), weights[:3], strict=True)
            outputs.append(oracle.batched(*((x @ w[head])[:, None] for x, w in pairs)).output[:, 0])
        joined = np.concatenate(outputs, -1) @ weights[3].reshape(3 * E, 11)
        close(found.output, joined)
        close(np.asarray(found.contributions).sum(-3), joined)
        assert found.weights.shape == (2, 3, T, source.shape[1])
