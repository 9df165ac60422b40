"""Observations: what `observe` returns from inside transformations is what `capture` sees outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oracle import assert_close
from refusals import assert_refused
from regard import attend, inspection, masks, readouts
from regard.inspection import Change, intervene, observe
from small_models import build

X = jnp.array([[1, 2, 3, 4, 5, 2, 1], [3, 4, 5, 6, 7, 8, 1]])


def test_jit_loops_and_rematerialization_give_what_capture_sees():
    model = build(num_layers=4, windows=(3, None), scan_layers=True, remat="full")
    graph, state = nnx.split(model)
    out, trace = inspection.record(model, X, example=1)
    run = jax.jit(observe(jax.jit(lambda state, x: nnx.merge(graph, state)(x)), ("readout", "entropy")))
    found, numbers = run(state, X)
    np.testing.assert_allclose(found, out, rtol=2e-5, atol=2e-5)
    # Two kinds of layers take turns, twice.
    assert [each["entropy"].shape for each in numbers] == [(2, 2, 3, 7)] * 2
    assert len(trace) == 4
    for number, call in enumerate(trace):
        each = jax.tree.map(lambda leaf, n=number: np.asarray(leaf)[n // 2, 1], numbers[number % 2])
        readout, weights = each["readout"], call.window()
        entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
        shown = readout.entropy, each["entropy"], readout.lse, readout.key_mass, readout.max_weight
        expected = entropy, entropy, call.lse, weights.sum(-2), weights.max(-1)
        assert_close(shown, expected, 2e-5, 3e-6)
        np.testing.assert_array_equal(readout.top_keys[..., 0], weights.argmax(-1))
        assert readout.trust.max() < 1e-5  # of weights by the backend's lse
    # Many prompts have a mean and a spread.
    readout = jax.tree.map(lambda leaf: np.asarray(leaf)[0], numbers[0]["readout"])
    each = np.asarray(readouts.average(readout)["entropy"])
    assert each.shape == (2, 3)
    mean, deviation = readouts.spread(readout)["entropy"]
    np.testing.assert_allclose(mean, each.mean(0), rtol=1e-6)
    np.testing.assert_allclose(deviation, each.std(0), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"expected leading axes of examples and heads, got \(\)"):
        readouts.spread(jax.tree.map(lambda leaf: leaf[0, 0], readout))


def test_gradients_and_batches_pass_through():
    x, target = np.random.default_rng(0).normal(size=(2, 5, 3, 7, 4)).astype(np.float32)

    def loss(x, target):
        block = jax.checkpoint(lambda x: jnp.tanh(attend(x, x, x, mask=masks.causal())))
        out, _ = jax.lax.scan(lambda x, _: (block(x), None), x, None, length=2)
        return ((out - target) ** 2).sum()

    kept = lambda problem, output: {"sizes": (problem.query * problem.key).sum(-1), "output": output}
    wanted = jax.jit(jax.vmap(jax.value_and_grad(loss)))(x, target)

    def check(found, sizes):
        assert_close(found, wanted, 1e-5, 1e-6)
        np.testing.assert_allclose(sizes, (x**2).sum(-1), rtol=1e-5)

    # Inside: vmap of grad of what is observed; the numbers are an auxiliary output.
    run = jax.jit(jax.vmap(jax.value_and_grad(observe(loss, kept), has_aux=True)))
    (value, (numbers,)), gradient = run(x, target)
    assert numbers["output"].shape == (5, 2, 3, 7, 4)
    check((value, gradient), numbers["sizes"][:, 0])
    # Outside: what is observed takes gradients and maps itself.
    found, (numbers,) = jax.jit(observe(jax.vmap(jax.value_and_grad(loss)), kept))(x, target)
    assert numbers["sizes"].shape == (2, 5, 3, 7)
    check(found, numbers["sizes"][0])


def test_branches_and_changes_are_seen():
    x = np.eye(5, dtype=np.float32)

    def run(x, flag):
        return jax.lax.cond(flag, *[lambda x, s=s: attend(x, x, x, scale=s) for s in (0.0, 9.0)], x)

    watched = jax.jit(observe(jax.jit(run)))
    for flag, entropy in ((True, np.log(5)), (False, 0.005)):
        _, (found,) = watched(x, np.array(flag))
        assert found.keys() == {"lse", "entropy", "max_score"}
        np.testing.assert_allclose(found["entropy"], entropy, atol=2e-3)
    twice = lambda x: attend(x, 9 * x, x) + attend(x, 9 * x, x)
    with intervene({0: Change(query=0.0)}):
        out, (readout, number) = observe(twice, lambda problem, output: output.sum())(x)
    np.testing.assert_allclose(readout, 5.0, rtol=1e-6)
    np.testing.assert_allclose(out.sum(), readout + number, rtol=1e-6)
    # One observation in another, each with its own numbers.
    inner = observe(lambda x: attend(x, x, x), lambda problem, output: problem.query.sum())
    (out, (inside,)), (outside,) = observe(inner, lambda problem, output: output.sum())(x)
    assert (float(inside), float(outside)) == pytest.approx((5.0, 5.0))
    assert out.shape == (5, 5)


def test_what_cannot_be_observed_is_refused():
    loop = lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 0, lambda x: attend(x, x, x), x)
    with pytest.raises(ValueError, match=r"inspection\.observe\(fn\)"), inspection.capture():
        jax.jit(lambda x: attend(x, x, x))(jnp.eye(3))
    assert_refused(
        (lambda: observe(loop)(jnp.eye(3)), r"expected calls of attend in jit, .* got one inside while"),
        (lambda: observe(loop, "lse"), "measure: expected a function, or names among weights"),
        (lambda: observe(loop, ()), "measure: expected a function, or names among weights"),
    )
