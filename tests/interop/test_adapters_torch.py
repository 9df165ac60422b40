"""regard.interop.torch_sdpa against numbers of PyTorch 2.13 and the definition; test_torch.py calls it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import plain
from regard import masks
from regard.interop.torch_sdpa import scaled_dot_product_attention


def wave(*shape):
    return np.sin(1.7 * np.arange(np.prod(shape), dtype=np.float64)).reshape(shape)


DROP = np.arange(21).reshape(3, 7) % 3 == 1
DROP[1] = True
# output[1, 3, :, :2] of torch.nn.functional.scaled_dot_product_attention, float64, PyTorch 2.13 on a CPU.
GOLDEN = {
    "causal": (
        {"is_causal": True},
        [[0.05394037, 0.98327118], [-0.71765612, -0.2650688], [0.61209105, -0.17980593]],
    ),
    "boolean": (
        {"attn_mask": ~DROP},
        [[0.02344671, 0.67593122], [0, 0], [-0.38137657, 0.37825202]],
    ),
    "added": (
        {"attn_mask": jnp.asarray(wave(4, 3, 7), jnp.float32), "scale": 0.5},
        [[0.05495086, 0.39865843], [-0.61326963, -0.38504173], [0.80647219, -0.20431967]],
    ),
    "both": (
        {"attn_mask": ~DROP, "is_causal": True},
        [[0.05394037, 0.98327118], [0, 0], [-0.24303554, 0.50280385]],
    ),
}


def golden_inputs(dtype=jnp.float32):
    arrays = wave(2, 4, 3, 5), wave(2, 2, 7, 5), wave(2, 2, 7, 5)[..., ::-1]
    return [jnp.asarray(np.ascontiguousarray(array), dtype) for array in arrays]


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize(("dtype", "atol"), [(jnp.float32, 3e-7), (jnp.bfloat16, 1e-2)])
def test_the_numbers_are_those_of_torch(name, dtype, atol):
    kwargs, expected = GOLDEN[name]
    out = scaled_dot_product_attention(*golden_inputs(dtype), **kwargs, enable_gqa=True)
    assert out.dtype == dtype
    assert out.shape == (2, 4, 3, 5)
    np.testing.assert_allclose(out[1, 3, :, :2].astype(jnp.float32), expected, atol=atol)


def test_value_and_gradients_are_those_of_the_definition():
    rng = np.random.default_rng(2)
    shapes = (2, 6, 5, 7), (2, 3, 11, 7), (2, 3, 11, 13), (2, 6, 5, 13), (1, 6, 5, 11)
    query, key, value, cotangent, bias = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes
    )

    @jax.jit
    def call(query, key, value, bias):
        return scaled_dot_product_attention(query, key, value, bias, 0.0, True, enable_gqa=True)

    output, pull = jax.vjp(call, query, key, value, bias)
    asked = {"keep": np.tril(np.ones((5, 11), bool)), "bias": bias, "cotangent": cotangent}
    truth = oracle.batched(query, key, value, **asked)
    near = plain.evaluate(query, key, value, **asked)
    plain.assert_as_exact(output, truth.output, near["output"], "output")
    for part, grad in zip(("d_query", "d_key", "d_value", "d_bias"), pull(cotangent), strict=True):
        plain.assert_as_exact(grad, getattr(truth, part), near[part], part)


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_any_number_of_leading_axes_serves(rank):
    leading = (3, 2, 4)[5 - rank :] if rank > 2 else ()
    rng = np.random.default_rng(rank)
    arrays = [jnp.asarray(rng.normal(size=(*leading, n, 7)), jnp.float32) for n in (5, 11, 11)]
    keep = rng.random((5, 11)) < 0.6
    keep[:, 0] = True
    truth = oracle.batched(*arrays, keep=keep).output
    np.testing.assert_allclose(scaled_dot_product_attention(*arrays, keep), truth, atol=1e-6)


def test_one_head_of_keys_broadcasts_without_enable_gqa():
    """As in torch, where the size 1 broadcasts."""
    query, key, value = golden_inputs()
    np.testing.assert_array_equal(
        scaled_dot_product_attention(query, key[:, :1], value[:, :1]),
        scaled_dot_product_attention(query, key[:, :1], value[:, :1], enable_gqa=True),
    )


def test_a_square_mask_is_a_square_mask_however_large_the_batch():
    x = jnp.asarray(wave(5, 2, 5, 3), jnp.float32)
    tril = np.tril(np.ones((5, 5), bool))
    causal = scaled_dot_product_attention(x, x, x, is_causal=True)
    np.testing.assert_array_equal(scaled_dot_product_attention(x, x, x, tril), causal)
    added = scaled_dot_product_attention(x, x, x, np.where(tril, 0, -np.inf).astype(np.float32))
    np.testing.assert_allclose(added, causal, atol=1e-6)


def test_a_mask_of_regard_means_its_formula():
    query, key, value = golden_inputs()
    mask = masks.lengths(jnp.array([3, 7])) & masks.sliding_window(2)
    ours = scaled_dot_product_attention(query, key, value, mask, 0.0, True, enable_gqa=True)
    keep = np.zeros((2, 1, 3, 7), bool)
    for b, _, t, s in np.ndindex(keep.shape):
        keep[b, 0, t, s] = s < (3, 7)[b] and t - 2 <= s <= t
    np.testing.assert_allclose(ours, oracle.batched(query, key, value, keep=keep).output, atol=1e-6)


def test_nothing_to_attend_to_gives_zeros_and_no_gradient():
    query, key, value = golden_inputs()
    none = np.zeros((3, 7), bool)
    for mask in (none, np.where(none, 0, -np.inf).astype(np.float32)):
        run = lambda *x, mask=mask: scaled_dot_product_attention(*x, mask, enable_gqa=True).sum()
        value_and_grad = jax.value_and_grad(run, (0, 1, 2))(query, key, value)
        assert not any(np.asarray(x).any() for x in jax.tree.leaves(value_and_grad))
    assert not scaled_dot_product_attention(query, key[:, :, :0], value[:, :, :0], enable_gqa=True).any()


def test_dropout_needs_a_key_and_is_right_on_average():
    query, key, value = golden_inputs()
    call = jax.jit(
        lambda rng: scaled_dot_product_attention(
            query, key, value, None, 0.25, True, enable_gqa=True, rng=rng
        )
    )
    np.testing.assert_array_equal(call(jax.random.key(1)), call(jax.random.key(1)))
    draws = np.asarray(jax.vmap(call)(jax.random.split(jax.random.key(0), 4096)))
    exact = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    allowed = 5 * draws.std(0) / np.sqrt(len(draws)) + 1e-6
    assert (np.abs(draws.mean(0) - np.asarray(exact)) < allowed).all()
    assert draws.std(0).max() > 0.1


def test_vmap_equals_a_batch():
    query, key, value = golden_inputs()
    together = scaled_dot_product_attention(query, key, value, ~DROP, enable_gqa=True)
    one = lambda q, k, v: scaled_dot_product_attention(q, k, v, ~DROP, enable_gqa=True)
    np.testing.assert_allclose(jax.vmap(one)(query, key, value), together, atol=1e-6)


sdpa = scaled_dot_product_attention
x, y = jnp.ones((2, 6, 5, 7)), jnp.ones((2, 3, 11, 7))
WRONG = [
    (lambda: sdpa(x[0, 0, 0], y, y), ValueError, "query: expected at least 2 axes"),
    (lambda: sdpa(x, y, y), ValueError, "enable_gqa: expected True where .*got False with query"),
    (lambda: sdpa(x, y[:, [0, 0, 1, 2]], y, enable_gqa=True), ValueError, "query, key, value: expected"),
    (lambda: sdpa(x.swapaxes(1, 2), y.swapaxes(1, 2), y.swapaxes(1, 2)), ValueError, r"\(\.\.\., heads, len"),
    (
        lambda: sdpa(x, x, x, jnp.ones((5, 5), int)),
        TypeError,
        "attn_mask: expected booleans .*attn_mask != 0",
    ),
    (lambda: sdpa(x, x, x, jnp.ones((5, 7), bool)), ValueError, r"attn_mask: expected .*\(2, 6, 5, 5\)"),
    (lambda: sdpa(x, x, x, jnp.ones((2, 5, 5))), ValueError, r"attn_mask: .*attn_mask\[:, None\]"),
    (lambda: sdpa(x, x, x, dropout_p=1.0), ValueError, r"dropout_p: expected a rate in \[0, 1\), got 1"),
    (lambda: sdpa(x, x, x, dropout_p=0.1), ValueError, "rng: expected a random key because dropout_p = 0.1"),
    (lambda: sdpa(x.astype(int), x, x), TypeError, "query: expected a floating-point array"),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_wrong_call_is_told_what_to_do(case):
    call, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        call()
