"""Observations: what `observe` returns from inside transformations is what `capture` sees outside."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from economy import mostly_slow
from regard import attend, inspection, masks, readouts
from regard.cache import KVCache, PagedKVCache
from regard.inspection import Change, intervene, observe
from regard.models import Decoder, TransformerConfig

SIZES = {"d_model": 12, "num_heads": 3, "d_ff": 11, "num_layers": 4, "vocab_size": 13, "windows": (3, None)}
X = jnp.array([[1, 2, 3, 4, 5, 2, 1], [3, 4, 5, 6, 7, 8, 1]])


@functools.cache
def build(**more):
    model = Decoder(TransformerConfig(**SIZES, **more), rngs=nnx.Rngs(0))
    model.eval()
    return model


def same(found, call, example):
    """A readout of a batch has the example that the call of a trace kept."""
    mine = jax.tree.map(lambda leaf: np.asarray(leaf)[example], found)
    theirs = call.readout()
    for name in ("entropy", "lse", "key_mass", "distance_mass", "top_weights", "block_mass"):
        np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name), rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(mine.keys, theirs.keys)
    np.testing.assert_array_equal(mine.top_keys[..., 0], theirs.top_keys[..., 0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scanned", "remat"), mostly_slow(itertools.product([False, True], [None, "full"]), (True, "full"))
)
def test_jit_loops_and_rematerialization_give_what_capture_sees(scanned, remat):
    model = build(scan_layers=scanned, remat=remat)
    graph, state = nnx.split(model)
    out, trace = inspection.record(model, X, example=1)
    run = jax.jit(observe(jax.jit(lambda state, x: nnx.merge(graph, state)(x)), ("readout", "entropy")))
    found, numbers = run(state, X)
    np.testing.assert_allclose(found, out, rtol=2e-5, atol=2e-5)
    if scanned:  # two kinds of layers take turns, twice
        assert [each["entropy"].shape for each in numbers] == [(2, 2, 3, 7)] * 2
        numbers = [
            jax.tree.map(lambda leaf, n=step: leaf[n], numbers[place]) for step in (0, 1) for place in (0, 1)
        ]
    assert len(numbers) == len(trace) == 4
    for each, call in zip(numbers, trace, strict=True):
        same(each["readout"], call, 1)
        assert np.asarray(each["readout"].trust).max() < 1e-5  # of weights by the backend's lse
        np.testing.assert_allclose(each["entropy"], each["readout"].entropy, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_gradients_and_batches_pass_through():
    rng = np.random.default_rng(0)
    x, target = jnp.asarray(rng.normal(size=(2, 5, 3, 7, 4)), jnp.float32)

    def loss(x, target):
        block = jax.checkpoint(lambda x: attend(x, x, x, mask=masks.causal()))
        out, _ = jax.lax.scan(lambda x, _: (jnp.tanh(block(x)), None), x, None, length=2)
        return ((out - target) ** 2).sum()

    def kept(problem, output):
        return {"lse": readouts.read(problem.query, problem.key, mask=problem.mask).lse, "output": output}

    wanted = jax.vmap(jax.value_and_grad(loss))(x, target)

    def check(found, lse):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        wide = np.asarray(x, np.float64)
        scores = np.where(np.tri(7, dtype=bool), wide @ wide.swapaxes(-1, -2) / 2, -np.inf)
        np.testing.assert_allclose(lse, np.log(np.exp(scores).sum(-1)), rtol=1e-5)

    # Inside: vmap of grad of what is observed; the numbers are an auxiliary output.
    (value, (numbers,)), gradient = jax.jit(jax.vmap(jax.value_and_grad(observe(loss, kept), has_aux=True)))(
        x, target
    )
    assert numbers["output"].shape == (5, 2, 3, 7, 4)
    check((value, gradient), numbers["lse"][:, 0])
    # Outside: what is observed takes gradients and maps itself.
    found, (numbers, *again) = jax.jit(observe(jax.vmap(jax.value_and_grad(loss)), kept))(x, target)
    assert not again
    assert numbers["lse"].shape == (2, 5, 3, 7)
    check(found, numbers["lse"][0])


def test_branches_and_changes_are_seen():
    x = jnp.eye(5)

    def run(x, flag):
        scaled = [lambda x, s=s: attend(x, x, x, scale=s) for s in (0.0, 9.0)]
        return jax.lax.cond(flag, *scaled, x)

    for flag, entropy in ((True, np.log(5)), (False, 0.005)):
        _, (found,) = observe(jax.jit(run))(x, jnp.array(flag))
        assert found.keys() == {"lse", "entropy", "max_score"}
        np.testing.assert_allclose(found["entropy"], entropy, atol=2e-3)
    with intervene({0: Change(query=0.0)}):
        out, (readout, number) = observe(
            lambda x: attend(x, 9 * x, x) + attend(x, 9 * x, x), lambda problem, output: output.sum()
        )(x)
    np.testing.assert_allclose(readout, 5.0, rtol=1e-6)
    np.testing.assert_allclose(out.sum(), readout + number, rtol=1e-6)
    # One observation in another, each with its own numbers.
    inner = observe(lambda x: attend(x, x, x), lambda problem, output: problem.query.sum())
    (out, (inside,)), (outside,) = observe(inner, lambda problem, output: output.sum())(x)
    assert (float(inside), float(outside)) == pytest.approx((5.0, 5.0))
    assert out.shape == (5, 5)


@pytest.mark.slow
def test_many_prompts_have_a_mean_and_a_spread():
    model = build()
    graph, state = nnx.split(model)
    run = jax.jit(observe(lambda state, x: nnx.merge(graph, state)(x), ["readout"]))
    readout = run(state, X)[1][0]["readout"]
    found = readouts.spread(readout)
    each = np.asarray(readouts.average(readout)["entropy"])
    assert each.shape == (2, 3)
    mean, deviation = found["entropy"]
    np.testing.assert_allclose(mean, each.mean(0), rtol=1e-6)
    np.testing.assert_allclose(deviation, each.std(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["int8", "paged"])
def test_stored_keys_and_values_are_observed_as_arrays(kind):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 5, 4)), jnp.float32)
    if kind == "int8":
        cache = KVCache.create(1, 3, 7, 4, dtype="int8")
    else:
        cache = PagedKVCache.create(1, 3, 4, num_pages=2, page_size=7, pages_per_row=1).assign(0, 1)
    cache = cache.append(x, x)

    def run(cache, x):
        return cache.attend(x[..., -1:, :], mask=masks.causal())

    _, ((key, value),) = observe(run, lambda problem, output: (problem.key, problem.value))(cache, x)
    for found in (key, value):
        np.testing.assert_allclose(found[..., :5, :], x, atol=0.02)
    _, (found,) = jax.jit(observe(run, ("readout", "entropy")))(cache, x)
    np.testing.assert_allclose(found["readout"].entropy, found["entropy"], rtol=1e-5)


def test_what_cannot_be_observed_is_refused():
    def loop(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 0, lambda x: attend(x, x, x), x)

    with pytest.raises(ValueError, match=r"expected calls of attend in jit, .* got one inside while"):
        observe(loop)(jnp.eye(3))
    with pytest.raises(ValueError, match=r"expected leading axes of examples and heads, got \(\)"):
        readouts.spread(readouts.read(jnp.eye(3), jnp.eye(3)))
    with pytest.raises(ValueError, match=r"inspection\.observe\(fn\)"), inspection.capture():
        jax.jit(lambda x: attend(x, x, x))(jnp.eye(3))


def test_names_ask_the_kernel_itself_in_loops_too():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7, 4)), jnp.float32)
    traced = []

    def run(x):
        def step(x, _):
            out, aux = attend(x, x, x, mask=masks.causal(), aux=("lse",))
            traced.append(aux.keys())
            return out, aux["lse"]

        return jax.lax.scan(step, x, None, length=2)

    (out, kept), (found,) = jax.jit(observe(run, ("entropy", "lse")))(x)
    assert traced[-1] == {"lse"}  # the caller sees what it asked for alone
    for step in range(2):
        x, aux = attend(x, x, x, mask=masks.causal(), aux=("lse", "entropy"))
        for name in ("lse", "entropy"):
            np.testing.assert_allclose(found[name][step], aux[name], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out, x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(kept, found["lse"], rtol=0, atol=0)
    for wrong in ("lse", ("lse", "mean"), ()):
        with pytest.raises(ValueError, match="measure: expected a function, or names among weights"):
            observe(run, wrong)
