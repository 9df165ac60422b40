"""Products of matrices: dtypes, and kernels that XLA's CPU divides among all cores."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard import attend, masks
from regard.engine.call import stores
from regard.engine.softmax import products
from regard.engine.softmax.products import product

CONTRACTS = ((-1, -1), (-1, -2))
divided = not products.BATCH_ON_ONE_CORE or jax.default_backend() != "cpu"
helped = pytest.mark.skipif(divided, reason="this XLA divides a batch of products by itself")


def draw(contract, dtype=np.float32, sizes=(13, 17, 19), batch=(2, 3)):
    rng = np.random.default_rng(1)
    rows, columns, width = sizes
    b = (columns, width) if contract[1] == -1 else (width, columns)
    return tuple(jnp.asarray(rng.normal(size=(*batch, *shape)), dtype) for shape in ((rows, width), b))


def expect(a, b, contract):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return a @ (b.swapaxes(-1, -2) if contract[1] == -1 else b)


@pytest.mark.parametrize("lacks", [False, True])
@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_product_is_that_of_numpy(dtype, contract, lacks, monkeypatch):
    monkeypatch.setattr(products, "lacks_bfloat16", lambda: lacks)
    with jax.enable_x64(dtype == "float64"):
        a, b = draw(contract, dtype)
        if dtype == "bfloat16":  # what multiplies it is rounded, too
            narrow = jax.jit(lambda a, b: product(a, b, None, contract))(draw(contract)[0], b)
            np.testing.assert_allclose(narrow, expect(a, b, contract), rtol=1e-5, atol=1e-5)
        found = product(a, b, jax.lax.Precision.HIGHEST, contract)
        assert found.dtype == (np.float64 if dtype == "float64" else np.float32)
        np.testing.assert_allclose(found, expect(a, b, contract), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_tiles", [False, True])
def test_products_of_few_rows_with_what_is_stored_are_those_of_numpy(in_tiles, monkeypatch):
    monkeypatch.setattr(stores, "multiplies_tiles", lambda: in_tiles)
    for rows in (1, 3, 5, 9):
        for contract, subscripts in zip(CONTRACTS, ("...td,...sd->...ts", "...ts,...se->...te"), strict=True):
            a, b = draw(contract, "bfloat16", (rows, 17, 19))
            found = stores.product(subscripts, a, b, None)
            np.testing.assert_allclose(found, expect(a, b, contract), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "batch"), [((13, 17, 19), (2, 3)), ((67, 191, 61), (1, 31)), ((128, 256, 64), (1, 16))]
)
@pytest.mark.parametrize("contract", CONTRACTS)
def test_product_has_the_bits_and_the_derivatives_of_a_plain_one(contract, sizes, batch):
    a, b = draw(contract, sizes=sizes, batch=batch)

    def plain(a, b):
        return jax.lax.dot_general(a, b, (((3,), (4 + contract[1],)), ((0, 1), (0, 1))))

    def both(function):
        return jax.jit(lambda a, b: jax.vjp(function, a, b)[1](function(a, b)))(a, b)

    def ours(a, b):
        return product(a, b, None, contract)

    np.testing.assert_array_equal(jax.jit(ours)(a, b), jax.jit(plain)(a, b))
    for found, expected in zip(both(ours), both(plain), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_number_that_is_not_finite_reaches_what_it_reaches_in_a_plain_product(contract):
    run = jax.jit(lambda a, b: product(a, b, None, contract))
    for place in (0, 1):
        for number in (np.nan, np.inf, -np.inf):
            factors = list(map(np.array, draw(contract)))
            factors[place][1, 2, 4, 5] = number
            with np.errstate(invalid="ignore"):
                expected = expect(*factors, contract)
            np.testing.assert_allclose(run(*factors), expected, rtol=1e-4, atol=1e-4)


def test_factors_without_numbers_make_a_product_of_zeros():
    assert not product(jnp.ones((2, 3, 0)), jnp.ones((2, 0, 5)), None).any()
    assert product(jnp.ones((2, 0, 3)), jnp.ones((2, 3, 5)), None).shape == (2, 0, 5)


def kernels(compiled):
    """Return the shapes of products, and whether a maximum is part of their kernel."""
    found = []
    for text in compiled.as_text().split("\n}\n"):
        found += [(shape, " reduce(" in text) for shape in re.findall(r"= \w+(\[[\d,]*\])\S* dot\(", text)]
    return found


@helped
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_of_a_narrow_window_use_all_cores(dtype):
    """Small products lie in kernels that XLA divides along their batch, forward and backward."""
    query = jnp.ones((1, 2, 4096, 64), dtype)

    def attended(query):
        return attend(query, query, query, mask=masks.sliding_window(128), backend="tiled")

    for function, count in ((attended, 2), (jax.grad(lambda query: attended(query).sum()), 7)):
        found = kernels(jax.jit(function).lower(query).compile())
        assert len(found) == count
        assert all(divided for _, divided in found), found


@helped
def test_large_products_are_left_as_they_are():
    a, b = jnp.ones((2, 512, 64)), jnp.ones((2, 512, 64))
    compiled = jax.jit(lambda a, b: product(a, b, None, (-1, -1))).lower(a, b).compile()
    assert kernels(compiled) == [("[2,512,512]", False)]
