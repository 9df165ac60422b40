"""Short calls that XLA's CPU computes in one kernel: what they compute, and what keeps them one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from regard import attend, masks
from regard.engine.softmax import products

older = pytest.mark.skipif(not products.BATCH_ON_ONE_CORE, reason="this XLA makes three kernels of it")


@pytest.mark.parametrize("shape", [(2, 6, 2, 67, 71), (9, 24, 24, 113, 83)])  # few scores, and more than 2^20
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", ["mask", "bias and large scores"])
def test_short_calls_are_the_definition_whatever_lies_in_masked_slots(dtype, shape, options):
    rng = np.random.default_rng(3)
    batch, heads, key_heads, length, keys = shape
    sizes = (heads, length, 13), (key_heads, keys, 13), (key_heads, keys, 11)
    query, key, value = (jnp.asarray(rng.normal(size=(batch, *size)), dtype) for size in sizes)
    keep = rng.random((batch, 1, length, keys)) < 0.5
    keep[..., 3, :] = keep[1, ..., 5] = False
    bias = jnp.asarray(rng.normal(size=(heads, length, keys)), dtype) if "bias" in options else None
    scale = -30.0 if bias is not None and dtype == "float32" else -0.3
    call = functools.partial(oracle.batched, query, key, value, keep, bias, scale)
    truth, plain = call().output, call(dtype=np.float32).output
    bad = key.at[1, ..., 5, :].set(jnp.nan), value.at[1, ..., 5, :].set(jnp.inf)

    def run(query, key, value, keep, aux=()):
        return attend(query, key, value, mask=keep, bias=bias, scale=scale, aux=aux)

    clean, aux = run(query, key, value, keep, ("lse",))
    oracle.assert_as_exact(clean, truth, plain)
    assert not np.asarray(clean)[..., 3, :].any()
    assert (np.asarray(aux["lse"])[..., 3] == -np.inf).all()
    for output in (run(query, *bad, keep), jax.vmap(run)(query, *bad, keep)):
        oracle.assert_as_exact(output, truth, plain)
    output = np.array(run(query.at[0, 2, 7].set(jnp.nan), key, value, keep))
    assert np.isnan(output[0, 2, 7]).all()
    np.testing.assert_array_equal(output[1:], clean[1:])


@older
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", [{}, {"mask": masks.causal()}, {"mask": masks.lengths(jnp.array([3]))}])
@pytest.mark.parametrize("heads", [(8, 8), (4, 2), (96, 96)])
def test_a_short_call_is_one_kernel(dtype, options, heads):
    query, key = (jax.ShapeDtypeStruct((1, n, 127, 64), dtype) for n in heads)
    run = jax.jit(lambda *arrays: attend(*arrays, **options))
    text = str(run.lower(query, key, key).compile().as_text())
    assert text[text.index("\nENTRY") :].count("kind=kCustom") == 1


def test_a_batch_by_vmap_takes_one_branch():
    run = jax.jit(jax.vmap(lambda x: attend(x, x, x, mask=masks.causal())))
    assert " conditional(" in str(run.lower(jnp.ones((3, 2, 61, 16))).compile().as_text())


@pytest.mark.parametrize("mapped", range(3))
def test_a_batch_by_vmap_keeps_its_axis_beside_derivatives(mapped):
    """JAX takes it to be where the function without derivatives has it, among axes of one size here."""
    rng = np.random.default_rng(4)
    shapes = [(3,) * (2 + (n == mapped)) + (61, 8) for n in range(3)]
    arrays = [jnp.asarray(rng.normal(size=shape), "bfloat16") for shape in shapes]
    run = jax.vmap(attend, [0 if n == mapped else None for n in range(3)])
    output, _ = jax.jit(functools.partial(jax.vjp, run))(*arrays)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (output, run(*arrays))), atol=0.03)
