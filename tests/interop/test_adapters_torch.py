"""regard.interop.torch_sdpa against numbers of PyTorch 2.13 and the definition."""

import jax
import jax.numpy as jnp
import numpy as np

import oracle
from regard import masks
from regard.interop.torch_sdpa import scaled_dot_product_attention as sdpa


def wave(*shape):
    return np.sin(1.7 * np.arange(np.prod(shape), dtype=np.float64)).reshape(shape)


def run(*arrays, **options):
    """One call as one program."""
    return jax.jit(lambda arrays: sdpa(*arrays, enable_gqa=True, **options))(arrays)


DROP = np.arange(21).reshape(3, 7) % 3 == 1
DROP[1] = True
# output[1, 3, :, :2] of torch.nn.functional.scaled_dot_product_attention, float64, PyTorch 2.13 on a CPU.
GOLDEN = (
    ({"is_causal": True}, [[0.05394037, 0.98327118], [-0.71765612, -0.2650688], [0.61209105, -0.17980593]]),
    ({"attn_mask": ~DROP}, [[0.02344671, 0.67593122], [0, 0], [-0.38137657, 0.37825202]]),
    ({"attn_mask": wave(4, 3, 7).astype(np.float32), "scale": 0.5},
     [[0.05495086, 0.39865843], [-0.61326963, -0.38504173], [0.80647219, -0.20431967]]),
    ({"attn_mask": ~DROP, "is_causal": True}, [[0.05394037, 0.98327118], [0, 0], [-0.24303554, 0.50280385]]),
)  # fmt: skip


def golden_inputs():
    key = wave(2, 2, 7, 5)
    return [jnp.asarray(x, "float32") for x in (wave(2, 4, 3, 5), key, key[..., ::-1])]


def test_the_numbers_are_those_of_torch():
    call = lambda *arrays: [sdpa(*arrays, enable_gqa=True, **options) for options, _ in GOLDEN]
    for out, (_, expected) in zip(jax.jit(call)(*golden_inputs()), GOLDEN, strict=True):
        assert (out.dtype, out.shape) == (jnp.float32, (2, 4, 3, 5))
        np.testing.assert_allclose(out[1, 3, :, :2], expected, atol=3e-7)


def test_any_number_of_leading_axes_serves():
    rng = np.random.default_rng(0)
    for leading in ((), (3, 2, 4)):
        arrays = [rng.normal(size=(*leading, n, 7)).astype(np.float32) for n in (5, 11, 11)]
        keep = rng.random((5, 11)) < 0.6
        np.testing.assert_allclose(run(*arrays, keep), oracle.batched(*arrays, keep=keep).output, atol=1e-6)


def test_masks_mean_what_they_say():
    """A mask of regard is its formula, one head of keys broadcasts, and no batch makes a mask ambiguous."""
    query, key, value = golden_inputs()
    mask = masks.lengths(np.array([3, 7])) & masks.sliding_window(2)
    t, s = np.arange(3)[:, None], np.arange(7)
    keep = (s < np.reshape([3, 7], (2, 1, 1, 1))) & (t - 2 <= s) & (s <= t)
    truth = oracle.batched(query, key, value, keep=keep).output
    np.testing.assert_allclose(run(query, key, value, mask, is_causal=True, query_offset=0), truth, atol=1e-6)
    alone = jax.jit(sdpa)(query, key[:, :1], value[:, :1])
    expected = oracle.batched(query, key[:, :1], value[:, :1]).output
    np.testing.assert_allclose(alone, expected, atol=1e-6)
    x, tril = wave(5, 2, 5, 3).astype(np.float32), np.tri(5, dtype=bool)
    expected = oracle.batched(x, x, x, keep=tril).output
    for given in (tril, np.where(tril, 0, -np.inf).astype(np.float32)):
        np.testing.assert_allclose(run(x, x, x, given), expected, atol=1e-6)


def test_nothing_to_attend_to_gives_zeros_and_no_gradient():
    arrays, none = golden_inputs(), np.zeros((3, 7), bool)
    for mask in (none, np.where(none, 0, -np.inf).astype(np.float32)):
        measure = jax.value_and_grad(lambda *x, mask=mask: sdpa(*x, mask, enable_gqa=True).sum(), (0, 1, 2))
        assert not any(np.asarray(x).any() for x in jax.tree.leaves(jax.jit(measure)(*arrays)))
