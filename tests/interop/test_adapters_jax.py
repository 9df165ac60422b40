"""regard.interop.jax_nn against the definition, and against jax.nn where that is right."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import plain
from economy import mostly_slow
from regard import masks
from regard.interop.jax_nn import dot_product_attention

B, T, S, N, K, H = 2, 5, 11, 6, 3, 7


@pytest.fixture
def loose():
    """jax.nn itself promotes ranks and dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def draw(T=T, S=S, batch=(B,), dtype=jnp.float32, width=H):
    rng = np.random.default_rng(5)
    shapes = (*batch, T, N, H), (*batch, S, K, H), (*batch, S, K, width)
    return [jnp.asarray(rng.normal(size=shape)).astype(dtype) for shape in shapes]


def swap(array):
    return np.swapaxes(np.asarray(array, np.float64), -3, -2)


def keep_of(T, S, mask=None, is_causal=False, queries=None, keys=None, window=None):
    """Which query may attend to which key, one pair at a time."""
    keep = np.array(np.broadcast_to(True if mask is None else mask, (B, N, T, S)))
    for b, n, t, s in np.ndindex(keep.shape):
        dropped = is_causal and s > t
        dropped |= queries is not None and t >= queries[b]
        dropped |= keys is not None and s >= keys[b]
        dropped |= window is not None and not t - window[0] <= s <= t + window[1]
        keep[b, n, t, s] &= not dropped
    return keep


MASK = np.random.default_rng(1).random((B, N, T, S)) < 0.7
MASK[..., 0] = True
BIAS = jnp.asarray(np.random.default_rng(2).normal(size=(1, N, T, S)), jnp.float32)
# kwargs of the call, and the same for keep_of; jax.nn agrees where no query is without keys.
CASES = {
    "plain": ({}, {}),
    "scale": ({"scale": 0.3}, {}),
    "causal, more keys": ({"is_causal": True}, {"is_causal": True}),
    "causal, more queries": ({"is_causal": True}, {"is_causal": True}),
    "window": ({"local_window_size": (2, 1)}, {"window": (2, 1)}),
    "symmetric window": ({"local_window_size": 2, "is_causal": True}, {"window": (2, 2), "is_causal": True}),
    "key lengths": ({"key_value_seq_lengths": jnp.array([3, 11], jnp.int32)}, {"keys": (3, 11)}),
    "query lengths": ({"query_seq_lengths": jnp.array([5, 2], jnp.int32)}, {"queries": (5, 2)}),
    "mask": ({"mask": jnp.asarray(MASK)}, {"mask": MASK}),
    "mask per batch": ({"mask": jnp.asarray(MASK[:, :1])}, {"mask": MASK[:, :1]}),
    "bias": ({"bias": BIAS}, {}),
    "everything": (
        {
            "mask": jnp.asarray(MASK),
            "bias": BIAS,
            "is_causal": True,
            "local_window_size": (3, 0),
            "query_seq_lengths": jnp.array([5, 4], jnp.int32),
            "key_value_seq_lengths": jnp.array([4, 9], jnp.int32),
        },
        {"mask": MASK, "is_causal": True, "window": (3, 0), "queries": (5, 4), "keys": (4, 9)},
    ),
}


def sizes(name):
    return (13, 11) if name == "causal, more queries" else (T, S)


def test_the_signature_is_that_of_jax_nn():
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert ours == theirs


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_those_of_the_definition(name):
    kwargs, meant = CASES[name]
    arrays = draw(*sizes(name))
    keep = keep_of(*sizes(name), **meant)
    cotangent = jnp.asarray(np.random.default_rng(9).normal(size=arrays[0].shape), jnp.float32)
    call = lambda q, k, v: dot_product_attention(q, k, v, **kwargs)
    output, pull = jax.vjp(jax.jit(call), *arrays)
    asked = {"keep": keep, "bias": kwargs.get("bias"), "scale": kwargs.get("scale")}
    asked["cotangent"] = swap(cotangent)
    truth = oracle.batched(*map(swap, arrays), **asked)
    near = plain.evaluate(*map(swap, arrays), **asked)
    plain.assert_as_exact(swap(output).astype(np.float32), truth.output, near["output"], "output")
    for part, grad in zip(("d_query", "d_key", "d_value"), pull(cotangent), strict=True):
        plain.assert_as_exact(swap(grad).astype(np.float32), getattr(truth, part), near[part], part)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", mostly_slow([jnp.float32, jnp.bfloat16], jnp.float32))
def test_jax_nn_agrees(loose, name, dtype):
    kwargs, meant = CASES[name]
    arrays = draw(*sizes(name), dtype=dtype)
    ours, residual = dot_product_attention(*arrays, **kwargs, return_residual=True)
    theirs, their_residual = jax.nn.dot_product_attention(*arrays, **kwargs, return_residual=True)
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert residual.shape == their_residual.shape
    atol = 3e-6 if dtype == jnp.float32 else 3e-2
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (ours, theirs)), atol=atol)
    some = np.swapaxes(keep_of(*sizes(name), **meant).any(-1), 1, 2)
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32)[some] for x in (residual, their_residual)), atol=atol
    )
    assert np.all(np.asarray(residual)[~some] == -np.inf)
    emptied = name in ("query lengths", "everything")
    assert some.all() == (not emptied)


def test_a_call_without_batch_agrees_with_jax_nn(loose):
    arrays = draw(batch=())
    lengths = {"key_value_seq_lengths": jnp.array([4], jnp.int32), "is_causal": True}
    ours, residual = dot_product_attention(*arrays, **lengths, return_residual=True)
    theirs, their_residual = jax.nn.dot_product_attention(*arrays, **lengths, return_residual=True)
    assert ours.shape == (T, N, H)
    np.testing.assert_allclose(ours, theirs, atol=2e-6)
    np.testing.assert_allclose(residual, their_residual, atol=2e-6)
    # One row of data for one example, not one per head.
    per_row = dot_product_attention(*arrays, mask=masks.lengths(jnp.array([4])) & masks.causal())
    np.testing.assert_array_equal(per_row, ours)
    per_head = jnp.asarray(MASK[0])
    np.testing.assert_allclose(
        dot_product_attention(*arrays, mask=per_head),
        jax.nn.dot_product_attention(*arrays, mask=per_head),
        atol=2e-6,
    )


@pytest.mark.parametrize("shape", [(T, S), (S,), (N, T, S), (1, 1, T, S), (B, 1, 1, S)])
def test_masks_and_biases_of_fewer_axes_are_aligned_as_in_jax_nn(loose, shape):
    arrays, rng = draw(), np.random.default_rng(3)
    mask = rng.random(shape) < 0.8
    mask[..., 0] = True
    bias = jnp.asarray(rng.normal(size=shape), jnp.float32)
    for kwargs in ({"mask": jnp.asarray(mask)}, {"bias": bias}):
        np.testing.assert_allclose(
            dot_product_attention(*arrays, **kwargs),
            jax.nn.dot_product_attention(*arrays, **kwargs),
            atol=3e-6,
        )


def test_a_square_mask_is_a_square_mask_however_large_the_batch(loose):
    query, key, value = (jnp.concatenate([x] * 3)[:T] for x in draw(T, T))
    mask = jnp.tril(jnp.ones((T, T), bool))
    assert query.shape[0] == T
    np.testing.assert_allclose(
        dot_product_attention(query, key, value, mask=mask),
        dot_product_attention(query, key, value, is_causal=True),
        atol=1e-6,
    )


def test_a_mask_of_regard_says_what_the_arguments_say():
    arrays = draw()
    mask = masks.causal() & masks.sliding_window(2) & masks.lengths(jnp.array([3, 5]))
    kwargs = {"is_causal": True, "local_window_size": (2, 0), "key_value_seq_lengths": [3, 5]}
    np.testing.assert_array_equal(
        dot_product_attention(*arrays, mask=mask), dot_product_attention(*arrays, **kwargs)
    )
    both = dot_product_attention(*arrays, mask=masks.sliding_window(2), is_causal=True)
    np.testing.assert_array_equal(
        both, dot_product_attention(*arrays, is_causal=True, local_window_size=[2, 9])
    )


def test_empty_rows_are_zero_where_jax_nn_answers_otherwise(loose):
    query, key, value = draw()
    nothing = jnp.ones((1, 1, T, S), bool).at[..., 1, :].set(False)
    run = lambda f, **kwargs: np.asarray(f(query, key, value, **kwargs))
    ours, theirs = (run(f, mask=nothing) for f in (dot_product_attention, jax.nn.dot_product_attention))
    assert not ours[:, 1].any()
    np.testing.assert_allclose(theirs[:, 1, 0], np.asarray(value[:, :, 0]).mean(1), atol=1e-6)
    minus = jnp.where(nothing, 0.0, -jnp.inf)
    assert np.isnan(run(jax.nn.dot_product_attention, bias=minus)).any()
    np.testing.assert_array_equal(run(dot_product_attention, bias=minus), ours)
    grads = jax.grad(lambda *x: dot_product_attention(*x, mask=nothing)[:, 1].sum(), (0, 1, 2))(
        query, key, value
    )
    assert not any(np.asarray(grad).any() for grad in grads)


def test_the_residual_has_a_gradient_and_its_own_dtype():
    arrays = draw(dtype=jnp.bfloat16)
    residual = lambda *x: dot_product_attention(*x, is_causal=True, return_residual=True)[1]
    assert residual(*arrays).dtype == jnp.float32
    assert residual(*arrays).shape == (B, T, N)
    # d lse / d query_t is the mean key.
    query, key, value = draw()
    grad = jax.grad(lambda q: residual(q, key, value).sum())(query)
    weights = dot_product_attention(query, key, key, is_causal=True) / np.sqrt(H, dtype=np.float32)
    np.testing.assert_allclose(grad, weights, atol=1e-6)


def test_float64_is_float64(x64):
    arrays = draw(dtype=jnp.float64)
    truth = oracle.batched(*map(swap, arrays)).output
    np.testing.assert_allclose(swap(dot_product_attention(*arrays)), truth, rtol=1e-13)


def test_values_may_have_another_width():
    arrays = draw(width=13)
    truth = oracle.batched(*map(swap, arrays)).output
    np.testing.assert_allclose(swap(dot_product_attention(*arrays)), truth, atol=1e-6)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("use_vmap", [False, True])
def test_the_calls_of_jaxs_own_tests_agree(loose, group, use_vmap):
    """Batches by vmap, bfloat16, gradients, the sizes and combinations that JAX tests."""
    B, T, N, H = 2, 16, 4, 8
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    query = jax.random.normal(keys[0], (B, T, N, H), jnp.bfloat16)
    key, value = (jax.random.normal(rng, (B, T, N // group, H), jnp.bfloat16) for rng in keys[1:3])
    cotangent = jax.random.normal(keys[3], (B, T, N, H), jnp.bfloat16)
    mask = jnp.tril(jnp.ones((T, T), bool))[None, None]
    results = []
    for sdpa in (
        functools.partial(jax.nn.dot_product_attention, implementation="xla"),
        functools.partial(dot_product_attention, implementation="xla"),
    ):
        call = jax.vmap(sdpa, in_axes=(0, 0, 0, None, None)) if use_vmap else sdpa
        run = jax.jit(lambda q, k, v, call=call: call(q, k, v, None, mask))
        output, pull = jax.vjp(run, query, key, value)
        results.append((output, *pull(cotangent)))
    for theirs, ours in zip(*results, strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (ours, theirs)), atol=0.06, rtol=0.02)


def test_lengths_may_be_traced_and_batched_by_vmap(loose):
    arrays = draw(batch=(3, 2))
    lengths = jnp.array([[1, 11], [4, 0], [5, 6]], jnp.int32)
    call = lambda q, k, v, n: dot_product_attention(q, k, v, key_value_seq_lengths=n)
    together = jax.jit(jax.vmap(call))(*arrays, lengths)
    for i in range(3):
        np.testing.assert_allclose(together[i], call(*(x[i] for x in arrays), lengths[i]), atol=1e-6)


x, y = jnp.ones((2, 5, 6, 7)), jnp.ones((2, 11, 3, 7))
z = jnp.ones((2, 5, 2, 7))
ONE = jnp.ones((2, 1), jnp.int32)
WRONG = [
    (lambda run: run(x[0, 0], y, y), ValueError, r"query: expected \(batch, length, heads, width\) or"),
    (lambda run: run(x, y[None], y), ValueError, r"key: expected .*got shape \(1, 2, 11, 3, 7\)"),
    (lambda run: run(x, y[:1], y), ValueError, r"key: expected the batch axes of query, \(2,\)"),
    (lambda run: run(x, y[..., :5], y), ValueError, r"key: expected the head width of query, 7"),
    (
        lambda run: run(x, y, y[:, :4]),
        ValueError,
        r"value: expected the length and the heads of key, \(11, 3\)",
    ),
    (lambda run: run(x, jnp.swapaxes(y, 1, 2), jnp.swapaxes(y, 1, 2)), ValueError, "swap axes -3 and -2"),
    (lambda run: run(x.astype(int), y, y), TypeError, "query: expected a floating-point array"),
    (lambda run: run(x, y, y, mask=jnp.zeros((5, 11))), TypeError, "mask: .*pass additive masks as `bias=`"),
    (lambda run: run(x, y, y, mask=jnp.ones((5, 7), bool)), ValueError, r"mask: expected .*\(2, 6, 5, 11\)"),
    (lambda run: run(x, y, y, bias=jnp.ones((5, 11), bool)), TypeError, "bias: .*as `mask=`"),
    (lambda run: run(z, z, z, mask=jnp.ones((2, 5, 5), bool)), ValueError, r"mask: .*Write mask\[None\] if"),
    (lambda run: run(z, z, z, bias=jnp.ones((2, 5, 5))), ValueError, r"bias: .*Write bias\[None\] if"),
    (lambda run: run(x, y, y, query_seq_lengths=[1.0, 2]), TypeError, "query_seq_lengths: expected integers"),
    (lambda run: run(x, y, y, query_seq_lengths=ONE), ValueError, r"query_seq_lengths: .*\(2,\); got"),
    (lambda run: run(x, y, y, query_seq_lengths=[1, 6]), ValueError, r"query_seq_lengths: .*0\.\.5, got"),
    (lambda run: run(x, y, y, key_value_seq_lengths=[-1, 6]), ValueError, r"key_value.*0\.\.11, got \[-1, 6"),
    (lambda run: run(x, y, y, local_window_size=(1, 2, 3)), ValueError, "local_window_size: expected"),
    (lambda run: run(x, y, y, local_window_size=-2), ValueError, "at least 0"),
    (lambda run: run(x, y, y, implementation="flash"), ValueError, "implementation: expected None, 'xla' or"),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_wrong_call_is_told_what_to_do(case):
    call, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        call(dot_product_attention)


@pytest.mark.parametrize("implementation", [None, "xla", "cudnn"])
def test_the_implementation_is_a_hint(implementation):
    arrays = draw()
    np.testing.assert_array_equal(
        dot_product_attention(*arrays, implementation=implementation), dot_product_attention(*arrays)
    )
