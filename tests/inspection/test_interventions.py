"""Interventions: models with heads switched off, or given another run's numbers, against models by hand."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from economy import mostly_slow
from regard import attend, inspection, masks
from regard.inspection import Change, intervene
from regard.models import Decoder, Encoder, EncoderDecoder, TransformerConfig

SIZES = {"d_model": 12, "num_heads": 3, "d_ff": 11, "num_layers": 2, "vocab_size": 13}
X, Y = jnp.array([[1, 2, 3, 4, 5], [3, 4, 5, 6, 7]]), jnp.array([[2, 9, 4], [1, 1, 8]])
KINDS = {
    "encoder": (Encoder, {"norm": "post"}, (X,)),
    "decoder": (Decoder, {"positions": "rotary", "num_key_heads": 1}, (X,)),
    "encoder and decoder": (EncoderDecoder, {}, (X, Y)),
}


@functools.cache
def build(kind, **more):
    model_class, changes, inputs = KINDS[kind]
    model = model_class(TransformerConfig(**SIZES, **changes, **more), rngs=nnx.Rngs(0))
    model.eval()
    return model, inputs


def in_float64(model):
    graph, state = nnx.split(model)
    widen = lambda leaf: leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
    return nnx.merge(graph, jax.tree.map(widen, state))


@pytest.fixture
def wide(x64):
    """Models in float64 whose embeddings are of float32."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def without_head(model, name, head, output=0.0):
    """The model with a head's rows of Wo set to 0, and what they make of `output` in the bias."""
    model = nnx.clone(model)
    layer = operator.attrgetter(name)(_Path(model))
    rows = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
    projection = layer.output_projection
    kernel = projection.kernel[...]
    projection.bias[...] = projection.bias[...] + jnp.full(layer.head_dim, output) @ kernel[rows]
    projection.kernel[...] = kernel.at[rows].set(0)
    return model


class _Path:
    """Attributes of a module by a dotted path whose lists are numbered."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        found = self._module[int(name)] if name.isdigit() else getattr(self._module, name)
        return found if hasattr(found, "output_projection") else _Path(found)


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_slow(KINDS, "encoder"))
def test_a_head_switched_off_is_a_model_without_its_projection(kind, wide):
    model, inputs = build(kind)
    model = in_float64(model)
    plain, trace = inspection.record(model, *inputs)
    calls = range(len(trace))
    # A causal or grouped head, one of cross-attention, the last one: every call.
    assert len(calls) == (6 if kind == "encoder and decoder" else 2)
    for number in calls:
        for output in (0.0, 0.25):
            with intervene({number: Change(output=output, heads=[1])}):
                found = model(*inputs)
            close(found, without_head(model, trace[number].name, 1, output)(*inputs))
            assert np.abs(found - plain).max() > 1e-6
    np.testing.assert_array_equal(model(*inputs), plain)


@pytest.mark.slow
def test_several_heads_of_several_layers_and_shares_between(wide):
    model, inputs = build("decoder")
    model = in_float64(model)
    changes = {0: Change(output=0.0, share=jnp.array([0.0, 1.0, 0.0])), 1: Change(output=0.0, heads=(0,))}
    with intervene(changes):
        found = model(*inputs)
    names = [call.name for call in inspection.record(model, *inputs)[1]]
    close(found, without_head(without_head(model, names[0], 1), names[1], 0)(*inputs))
    with intervene({0: Change(output=0.0, share=0.0)}):
        np.testing.assert_array_equal(model(*inputs), model(*inputs))


@pytest.mark.parametrize("backend", ["dense", "tiled"])
def test_each_part_of_a_call_is_replaced_on_each_backend(backend, x64):
    rng = np.random.default_rng(0)
    shapes = ((2, 6, 11, 5), (2, 3, 11, 5), (2, 3, 11, 7))
    ran, other = ([rng.normal(size=shape) for shape in shapes] for _ in range(2))
    keep = np.tri(11, dtype=bool)

    def weigh(query, key):
        scores = np.where(keep, query @ np.repeat(key, 2, 1).swapaxes(-1, -2) / np.sqrt(5), -np.inf)
        return np.exp(scores - scores.max(-1, keepdims=True)) / np.exp(
            scores - scores.max(-1, keepdims=True)
        ).sum(-1, keepdims=True)

    def mix(own, new, heads):
        mixed = own.copy()
        mixed[:, heads] = new[:, heads]
        return mixed

    def check(change, weights, value):
        with intervene({0: change}):
            found = attend(*map(jnp.asarray, ran), mask=masks.causal(), backend=backend)
        close(found, weights @ np.repeat(value, 2, 1))

    query, key, value = ran
    new_query, new_key, new_value = other
    own = weigh(query, key)
    check(Change(query=new_query, heads=[0, 4]), weigh(mix(query, new_query, [0, 4]), key), value)
    # Of grouped heads, keys and values are shared: head 1 of them is that of query heads 2 and 3.
    check(Change(key=new_key, heads=[1]), weigh(query, mix(key, new_key, [1])), value)
    check(Change(value=new_value, heads=[2]), own, mix(value, new_value, [2]))
    check(Change(query=new_query, key=new_key), weigh(new_query, new_key), value)
    pattern = weigh(new_query, new_key)
    check(Change(weights=pattern, heads=[5]), mix(own, pattern, [5]), value)
    check(Change(weights=pattern, value=new_value), pattern, new_value)
    written = pattern @ np.repeat(new_value, 2, 1)
    with intervene({0: Change(output=written, heads=[3])}):
        found = attend(*map(jnp.asarray, ran), mask=masks.causal(), backend=backend)
    close(found, mix(own @ np.repeat(value, 2, 1), written, [3]))


def test_what_is_replaced_or_has_no_weight_adds_nothing_even_where_it_is_no_number():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3)), jnp.float32)
    spoiled, pattern = x.at[0, 3].set(jnp.nan).at[1, 4].set(jnp.inf), jnp.full((5, 5), 0.2).at[:, 3:].set(0)
    for value, change, wanted in (
        (spoiled, Change(weights=pattern), pattern @ x),
        (x, Change(output=x.at[0].set(jnp.nan), heads=[1]), attend(x, x, x).at[1].set(x[1])),
        (spoiled, Change(value=x), attend(x, x, x)),
        (spoiled, Change(output=x), x),
    ):
        with intervene({0: change}):
            found = attend(x, x, value)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)

    # A weight of 0 on a number is differentiable like any other.
    def total(pattern):
        with intervene({0: Change(weights=pattern)}):
            return attend(x, x, x).sum()

    np.testing.assert_allclose(jax.grad(total)(pattern), jnp.broadcast_to(x.sum((0, 2)), (5, 5)), rtol=1e-5)


def test_changes_serve_in_jit_and_stay_there(wide):
    model, inputs = build("decoder", scan_layers=True, remat="full")
    model = in_float64(model)
    graph, state = nnx.split(model)
    name = inspection.record(model, *inputs)[1][1].name
    wanted = [without_head(model, name, head)(*inputs) for head in range(3)]

    @jax.jit
    def run(state, share):
        with intervene({1: Change(output=0.0, share=share)}):
            return nnx.merge(graph, state)(*inputs)

    for head in range(3):
        close(run(state, jnp.eye(3)[head]), wanted[head])
    assert run._cache_size() == 1
    # Around what is jitted: it is traced anew, each time with its own changes.
    plain = jax.jit(lambda state: nnx.merge(graph, state)(*inputs))
    before = plain(state)
    for head in (2, 0):
        with intervene({1: Change(output=0.0, heads=[head])}):
            close(plain(state), wanted[head])
    np.testing.assert_array_equal(plain(state), before)


def test_the_gradient_by_the_share_is_the_change_to_first_order(x64):
    rng = np.random.default_rng(1)
    query, key, value = jnp.asarray(rng.normal(size=(3, 2, 7, 3)))

    def total(share):
        with intervene({0: Change(output=0.0, share=share)}):
            return attend(query, key, value)[..., 0].sum()

    out = attend(query, key, value)[..., 0].sum(-1)
    close(jax.grad(total)(jnp.zeros(2)), -out)
    close(jax.vmap(total)(jnp.eye(2)), out[::-1])


def test_mistakes_are_explained():
    x = jnp.ones((3, 5, 2))
    with pytest.raises(ValueError, match="expected one of query, key, value, weights, output at least"):
        Change()
    for changes, error, message in (
        ({1: Change(output=0.0)}, ValueError, r"changes: expected numbers of calls in 0\.\.0, got 1"),
        ({0: 0.0}, TypeError, "changes: expected a Change for each number of a call, got 0: float"),
    ):
        with pytest.raises(error, match=message), intervene(changes):
            attend(x, x, x)
    message = r"intervene: expected at least one call of regard\.attend"
    with pytest.raises(ValueError, match=message), intervene({0: Change(output=0.0)}):
        pass
    for change, message in (
        (Change(output=0.0, heads=[3]), r"heads: expected heads in 0\.\.2 of output, got \[3\]"),
        (Change(key=0.0, share=jnp.ones(2)), r"share: expected a number or one for each of 3 heads"),
        (Change(weights=jnp.ones((5, 7))), r"weights: expected an array that broadcasts to \(3, 5, 5\)"),
        (Change(value=jnp.ones(7)), r"value: expected an array that broadcasts to \(3, 5, 2\), got \(7,\)"),
    ):
        with pytest.raises(ValueError, match=message), intervene({0: change}):
            attend(x, x, x)
    with pytest.raises(TypeError, match="heads: expected integers, got float64"):
        Change(output=0.0, heads=[0.5])
    message, ragged = r"output: expected an array, got list .*of one length", [[1], [1, 2]]
    with pytest.raises(TypeError, match=message), intervene({np.int64(0): Change(output=ragged, heads=2)}):
        attend(x, x, x)
    np.testing.assert_array_equal(attend(x, x, x), x)
