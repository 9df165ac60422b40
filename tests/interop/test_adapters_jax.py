"""regard.interop.jax_nn against the definition, and against jax.nn where that is right."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np

import oracle
from regard import masks
from regard.interop.jax_nn import dot_product_attention

B, T, S, N, K, H = 2, 5, 11, 6, 3, 7


def draw(T=T, S=S, batch=(B,), dtype=np.float32, width=H):
    rng = np.random.default_rng(5)
    shapes = (*batch, T, N, H), (*batch, S, K, H), (*batch, S, K, width)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def swap(array):
    return np.swapaxes(np.asarray(array, np.float64), -3, -2)


def keep_of(T, S, mask=True, is_causal=False, queries=(T, T), keys=(S, S), window=(S, S)):
    """Which query may attend to which key."""
    t, s = np.arange(T)[:, None], np.arange(S)
    queries, keys = (np.reshape(lengths, (B, 1, 1, 1)) for lengths in (queries, keys))
    keep = mask & (t < queries) & (s < keys) & (s >= t - window[0]) & (s <= t + window[1])
    return np.broadcast_to(keep & ((s <= t) | (not is_causal)), (B, N, T, S))


def evaluate(arrays, **asked):
    return oracle.batched(*map(swap, arrays), **asked)


MASK = np.random.default_rng(1).random((B, N, T, S)) < 0.7
MASK[..., 0] = True
BIAS = np.random.default_rng(2).normal(size=(1, N, T, S)).astype(np.float32)
# kwargs of the call, and the same for keep_of; jax.nn agrees where no query is without keys.
CASES = [
    ({"scale": 0.3, "local_window_size": 2, "is_causal": True}, {"window": (2, 2), "is_causal": True}),
    ({"key_value_seq_lengths": np.array([3, 11], np.int32)}, {"keys": (3, 11)}),
    ({"mask": MASK, "bias": BIAS, "implementation": "xla"}, {"mask": MASK}),
    (
        {"mask": MASK, "query_seq_lengths": np.array([5, 4], np.int32), "local_window_size": (3, 0)},
        {"mask": MASK, "queries": (5, 4), "window": (3, 0)},
    ),
]


def test_the_signature_is_that_of_jax_nn():
    read = lambda f: [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
    assert read(dot_product_attention)[:-1] == read(jax.nn.dot_product_attention)  # and options of attend


def test_jax_nn_agrees(loose):
    call = lambda function, *arrays: [function(*arrays, **more, return_residual=True) for more, _ in CASES]
    found = jax.jit(call, static_argnums=0)(dot_product_attention, *draw())
    expected = jax.jit(call, static_argnums=0)(jax.nn.dot_product_attention, *draw())
    for (kwargs, meant), (ours, residual), (theirs, other) in zip(CASES, found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-6)
        some = np.swapaxes(keep_of(T, S, **meant).any(-1), 1, 2)
        np.testing.assert_allclose(*(np.asarray(x)[some] for x in (residual, other)), atol=3e-6)
        assert np.all(np.asarray(residual)[~some] == -np.inf)
        assert some.all() == ("query_seq_lengths" not in kwargs)


def test_masks_and_biases_of_fewer_axes_are_aligned_from_the_last_on():
    arrays, rng = draw(width=13), np.random.default_rng(3)
    keeps = [rng.random(shape) < 0.8 for shape in ((S,), (N, T, S), (B, 1, 1, S))]
    biases = [rng.normal(size=keep.shape).astype(np.float32) for keep in keeps]
    call = lambda arrays, given: [dot_product_attention(*arrays, bias=b, mask=keep) for keep, b in given]
    given, whole = [*zip(keeps, biases, strict=True)], lambda array: np.broadcast_to(array, (B, N, T, S))
    for (keep, bias), out in zip(given, jax.jit(call)(arrays, given), strict=True):
        expected = evaluate(arrays, keep=whole(keep), bias=whole(bias)).output
        np.testing.assert_allclose(swap(out), expected, atol=2e-6)


def test_the_residual_has_a_gradient_and_its_own_dtype():
    query, key, value = arrays = draw()
    residual = lambda *x: dot_product_attention(*x, is_causal=True, return_residual=True)[1]
    narrow = jax.eval_shape(residual, *(jnp.asarray(x, jnp.bfloat16) for x in arrays))
    assert (narrow.dtype, narrow.shape) == (jnp.float32, (B, T, N))
    # d lse / d query_t is the mean key.
    grad = jax.jit(jax.grad(lambda q: residual(q, key, value).sum()))(query)
    expected = evaluate((query, key, key), keep=np.tri(T, S, dtype=bool)).output / np.sqrt(H)
    np.testing.assert_allclose(swap(grad), expected, atol=1e-6)


def test_a_step_on_a_cache_of_ones_own_takes_no_more_memory_than_theirs():
    """Keys and values that are swapped for a branch would be copied."""
    arrays = [jax.ShapeDtypeStruct((2, length, 4, 64), "float32") for length in (1, 512, 512)]

    def measure(attention, query, key, value, at):
        key, value = (jax.lax.dynamic_update_slice(x, query, (0, at, 0, 0)) for x in (key, value))
        return attention(query, key, value, at), key, value

    ours = lambda *x: dot_product_attention(*x[:3], mask=masks.causal(), query_offset=x[3])
    theirs = lambda *x: jax.nn.dot_product_attention(*x[:3], mask=jnp.arange(512) <= x[3])
    step = jax.jit(measure, static_argnums=0)
    sizes = [step.lower(call, *arrays, 0).compile().memory_analysis() for call in (ours, theirs)]
    assert sizes[0].temp_size_in_bytes < 1.1 * sizes[1].temp_size_in_bytes
