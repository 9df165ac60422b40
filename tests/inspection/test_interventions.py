"""Interventions: models with heads switched off, or given another run's numbers, against models by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layer_oracle import widen
from page_traces import weigh
from refusals import assert_refused
from regard import attend, inspection, masks
from regard.inspection import Change, intervene
from regard.models import EncoderDecoder
from small_models import X, build

Y = jnp.array([[2, 9, 4], [1, 1, 8]])


def without_head(model, name, head, output=0.0):
    """The model with a head's rows of Wo set to 0, and what they make of `output` in the bias."""
    layer = model = nnx.clone(model)
    for part in name.split("."):
        layer = layer[int(part)] if part.isdigit() else getattr(layer, part)
    rows = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
    kernel, bias = (np.array(getattr(layer.output_projection, part)[...]) for part in ("kernel", "bias"))
    layer.output_projection.bias[...] = jnp.asarray(bias + output * kernel[rows].sum(0))
    kernel[rows] = 0
    layer.output_projection.kernel[...] = jnp.asarray(kernel)
    return model


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def test_a_head_switched_off_is_a_model_without_its_projection(wide):
    model = widen(nnx.clone(build(EncoderDecoder)))
    plain, trace = inspection.record(model, X, Y)
    for number, output in ((2, 0.0), (5, 0.25)):  # causal, of cross-attention
        with intervene({number: Change(output=output, heads=[1])}):
            found = model(X, Y)
        close(found, without_head(model, trace[number].name, 1, output)(X, Y))
        assert np.abs(found - plain).max() > 1e-6
    np.testing.assert_array_equal(model(X, Y), plain)
    # Several heads of several layers, and shares between.
    shares = {0: Change(output=0.0, share=np.array([0.0, 1.0, 0.0])), 5: Change(output=0.0, heads=(0,))}
    with intervene(shares):
        found = model(X, Y)
    close(found, without_head(without_head(model, trace[0].name, 1), trace[5].name, 0)(X, Y))


@pytest.mark.parametrize("backend", ["dense", "tiled"])
def test_each_part_of_a_call_is_replaced_on_each_backend(backend, x64):
    rng = np.random.default_rng(0)
    shapes = ((6, 11, 5), (3, 11, 5), (3, 11, 7))
    ran, other = ([rng.normal(size=shape) for shape in shapes] for _ in range(2))
    read = lambda query, key: weigh(query, key, np.tri(11, dtype=bool))[0]
    mix = lambda own, new, heads: np.where(np.isin(np.arange(len(own)), heads)[:, None, None], new, own)

    def run(change):
        with intervene({0: change}):
            return attend(*map(jnp.asarray, ran), mask=masks.causal(), backend=backend)

    check = lambda change, weights, value: close(run(change), weights @ np.repeat(value, 2, 0))
    (query, key, value), (new_query, new_key, new_value) = ran, other
    own = read(query, key)
    check(Change(query=new_query, heads=[0, 4]), read(mix(query, new_query, [0, 4]), key), value)
    # Of grouped heads, keys and values are shared: head 1 of them is that of query heads 2 and 3.
    check(Change(key=new_key, heads=[1]), read(query, mix(key, new_key, [1])), value)
    check(Change(value=new_value, heads=[2]), own, mix(value, new_value, [2]))
    pattern = read(new_query, new_key)
    check(Change(query=new_query, key=new_key), pattern, value)
    check(Change(weights=pattern, heads=[5]), mix(own, pattern, [5]), value)
    check(Change(weights=pattern, value=new_value), pattern, new_value)
    check(Change(output=pattern @ np.repeat(value, 2, 0), heads=[3]), mix(own, pattern, [3]), value)
    edges = np.array([[4, 7, 3], [0, 9, 9], [4, 7, 5], [5, 2, 8]])  # the last one is masked
    own[tuple(edges.T)] *= (0, 0.75, 0.5, 0)
    check(Change(edges=edges, share=np.array([1, 0.25, 0.5, 1])), own, value)
    cut = lambda share: run(Change(edges=edges[:1], share=share)).sum()  # linear, also from 0 on
    close(jax.grad(cut)(0.0), cut(1.0) - cut(0.0))


def test_heads_get_their_output_on_another_text_as_in_a_model_by_hand(x64):
    texts, keep = np.random.default_rng(1).normal(size=(3, 2, 13, 5)), np.tri(13, dtype=bool)

    def run(mix, patch=np.array):  # two layers of two heads, which read each other
        middle = texts + patch(mix(texts, texts[:, ::-1], np.tanh(texts)))
        return middle + np.array(mix(middle, middle[:, ::-1], np.tanh(middle)))

    by_hand = lambda *qkv: np.stack([weigh(q, k, keep)[0] @ v for q, k, v in zip(*qkv, strict=True)])
    ran = lambda *operands: attend(*map(jnp.asarray, operands), mask=masks.causal())
    for source, heads, rows in ((2, [1], None), (1, None, [4, 11]), ([2, 0, 2], [0], [7])):
        where = np.ix_(range(3), heads or range(2), rows or range(13))

        def patch(outputs, where=where, source=source):
            outputs[where] = outputs[np.broadcast_to(source, 3)][where]
            return outputs

        with intervene({0: Change(source=source, heads=heads, rows=rows)}):
            close(run(ran), run(by_hand, patch))


def test_what_is_replaced_or_has_no_weight_adds_nothing_even_where_it_is_no_number():
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    spoiled, pattern = x.copy(), np.full((5, 5), 0.2, np.float32)
    spoiled[0, 3], spoiled[1, 4], pattern[:, 3:] = np.nan, np.inf, 0
    half_nan = np.where(np.arange(2)[:, None, None] == 0, np.float32(np.nan), x)
    out = attend(x, x, x)
    for value, change, wanted in (
        (spoiled, Change(weights=pattern), pattern @ x),
        (x, Change(output=half_nan, heads=[1]), np.stack([out[0], x[1]])),
        (spoiled, Change(value=x), out),
        (spoiled, Change(output=x), x),
    ):
        with intervene({0: change}):
            found = attend(x, x, value)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)

    def show(x):
        with intervene({0: Change(weights=pattern, heads=[1])}):
            return attend(x, x, x, aux=("weights", "lse"))[1]["weights"]

    shown, (seen,) = inspection.observe(show, ("entropy", "argmax"))(x)
    np.testing.assert_allclose(shown[1], pattern)
    assert seen["argmax"][1].tolist() == [0] * 5
    entropy = [-(row[row > 0] * np.log(row[row > 0])).sum() for row in pattern]
    np.testing.assert_allclose(seen["entropy"][1], entropy, rtol=1e-5)
    with pytest.warns(UserWarning, match="captured meanwhile are the weights of queries and keys"):
        inspection.record(show, x)

    # A weight of 0 on a number is differentiable like any other.
    def total(pattern):
        with intervene({0: Change(weights=pattern)}):
            return attend(x, x, x).sum()

    wanted = np.broadcast_to(x.sum((0, 2)), (5, 5))
    np.testing.assert_allclose(jax.jit(jax.grad(total))(pattern), wanted, rtol=1e-5)


def test_changes_serve_in_jit_and_stay_there(wide):
    model = widen(nnx.clone(build(positions="rotary", num_key_heads=1, scan_layers=True, remat="full")))
    graph, state = nnx.split(model)
    plain = jax.jit(lambda state: nnx.merge(graph, state)(X))
    before = plain(state)
    name = "trunk.stack.blocks.1.attention"
    wanted = [plain(nnx.state(without_head(model, name, head))) for head in range(3)]

    @jax.jit
    def run(state, share):
        with intervene({1: Change(output=0.0, share=share)}):
            return nnx.merge(graph, state)(X)

    for head in range(3):
        close(run(state, np.eye(3)[head]), wanted[head])
    assert run._cache_size() == 1
    # Around what is jitted: it is traced anew, each time with its own changes, also of arrays that it holds.
    held = jax.jit(lambda share: share * attend(*[np.ones((1, 3, 4), np.float32)] * 3)[0, 0, 0])
    for output in (2.0, 7.0):
        with intervene({0: Change(output=output)}):
            assert held(1.0) == output
    # What is traced once for several calls otherwise is traced for each of them.
    for wrap in (jax.jit, jax.checkpoint):
        layers = [wrap(lambda x: attend(x, x, x))] * 3
        with intervene({1: Change(output=2.0)}):
            outputs = jax.jit(lambda x, layers=layers: [layer(x) for layer in layers])(np.ones((1, 3, 4)))
        assert [float(output.max()) for output in outputs] == [1, 2, 1]
    for head in (2, 0):
        # What an inner block changes, outer ones count.
        with intervene({model.config.num_layers + 1: Change(output=0.0, heads=[head])}):
            with intervene({1: Change(output=0.0)}):
                plain(state)
            close(plain(state), wanted[head])
    np.testing.assert_array_equal(plain(state), before)


def test_mistakes_are_explained():
    x = jnp.ones((3, 5, 2))

    def change(place=0, rate=0.0, **how):
        with intervene({place: Change(**how) if how else 0.0}):
            attend(x, x, x, dropout_rate=rate, rng=jax.random.key(0))

    with pytest.raises(ValueError, match=r"one call of regard\.attend"), intervene({0: Change(key=0)}):
        pass
    assert_refused(
        (Change, "expected one of query, key, value, weights, output, source, edges at least"),
        (lambda: Change(weights=0.5, edges=[[0, 0, 0]]), "expected weights or edges, got both; put 0 into"),
        (lambda: Change(output=0.0, source=1), "expected output or source, .* the same thing; got both"),
        (lambda: change(source=1), r"source: expected an example in the first .*, got 1 for .*\(3, 5, 2\)"),
        (lambda: change(output=0.0, rows=[5]), r"rows: expected rows in 0\.\.4 of output, got \[5\]"),
        (lambda: Change(output=0.0, heads=[0.5]), "heads: expected integers, got float64", TypeError),
        (lambda: change(1, output=0.0), r"changes: expected numbers of calls in 0\.\.0, got 1"),
        (change, "changes: expected a Change for each number of a call, got 0: float", TypeError),
        (lambda: change(output=0.0, heads=[3]), r"heads: expected heads in 0\.\.2 of output, got \[3\]"),
        (lambda: change(key=0.0, share=np.ones(2)), "share: expected a number or one for each of 3 heads"),
        (lambda: change(edges=[[0, 5, 1]]), r"edges: expected a head, a query and a key below \[3, 5, 5\]"),
        (lambda: change(edges=[[0, 1, 1], [2, 0, 1], [0, 1, 1]]), r"each cell once, got \(0, 1, 1\) 2 times"),
        (lambda: change(edges=[[0, 1, 1]], share=np.ones(2)), r"share: .* each of 1 edges, got \(2,\)"),
        (lambda: change(rate=0.5, edges=[[0, 1, 1]]), "edges: expected a call without dropout, .* got .*0.5"),
        (lambda: change(edges=[0, 1]), r"edges: expected rows of head, query and key, .*, got .*\(2,\)"),
        (lambda: change(weights=np.ones((5, 7))), r"weights: expected .* broadcasts to \(3, 5, 5\)"),
        (lambda: change(np.int64(0), output=[[1], [1, 2]]), "output: expected .* list .*of one", TypeError),
    )
    np.testing.assert_array_equal(attend(x, x, x), x)
