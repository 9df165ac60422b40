"""A score's function sees each parameter in its own dtype, wherever the call runs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from regard import scores
from regard.engine.backends import mosaic_gpu
from regard.engine.call.canonicalization import canonicalize
from regard.records import record
from regard.scores.score import Score
from test_far_distances import RUNS

H, D, E = 2, 3, 5
TABLE = np.array([2.0**-9, -(2.0**-11)])  # times up to 12 steps: exact in every dtype


def bend(table, score, query, key):
    """Add a product in the parameter's dtype: of another, `mul` takes neither."""
    return score + jax.lax.mul(table, (query - key).astype(table.dtype)).astype(score.dtype)


def close_over(table):
    return scores.modifier(lambda score, b, head, q, k: bend(table[head], score, q, k))


@record
class Slanted(Score):
    """The same by a score of one's own, whose parameter is a leaf."""

    table: Any

    def apply(self, scores, cells):
        parts = cells.per_head(self.table), cells.query_position, cells.key_position
        table, *places = (jnp.broadcast_to(part, scores.shape) for part in parts)
        return bend(table, scores, *places)


def draw(length):
    rng = np.random.default_rng(7)
    return [rng.normal(size=(H, length, width)).astype(np.float32) for width in (D, D, E)]


def weigh(output):
    """Return a number that depends on all of an output, none of it small."""
    return jnp.sum(jnp.sin(jnp.arange(output.size, dtype=output.dtype)).reshape(output.shape) * output)


@pytest.mark.parametrize(
    ("run", "make", "dtype"),
    [
        ("dense", Slanted, "bfloat16"), ("dense", close_over, "float64"), ("tiled", Slanted, "float64"),
        ("tiled", close_over, "bfloat16"), ("in pieces", Slanted, "float32"),
        ("in pieces", Slanted, "bfloat16"), ("in pieces", close_over, "float16"),
    ],
)  # fmt: skip
def test_a_function_computes_in_the_dtype_of_its_parameter(run, make, dtype, x64):
    """Value, gradient and tangent are held to the definition, in float64."""
    arrays, table = draw(13), jnp.asarray(TABLE, dtype)

    @jax.jit
    def differentiate(table):
        number = lambda table: weigh(RUNS[run](canonicalize(*arrays, score=make(table)))[0])
        return *jax.value_and_grad(number)(table), jax.jvp(number, (table,), (jnp.ones_like(table),))[1]

    value, grad, tangent = differentiate(table)
    assert grad.dtype == table.dtype
    distance = np.arange(13)[:, None] - np.arange(13)
    cotangent = np.asarray(jax.grad(weigh)(jnp.zeros_like(arrays[2])), float)
    truth = oracle.batched(*arrays, bias=TABLE[:, None, None] * distance, cotangent=cotangent)
    terms = truth.d_bias * distance
    sums, sizes = terms.sum((1, 2)), abs(terms).sum((1, 2))
    np.testing.assert_allclose(value, np.sum(cotangent * truth.output), atol=1e-5 * abs(truth.output).sum())
    allowed = 2 * sizes * float(jnp.finfo(dtype).eps) + 1e-5 * sizes
    np.testing.assert_array_less(abs(np.asarray(grad, float) - sums), allowed)
    np.testing.assert_array_less(abs(float(tangent) - sums.sum()), 1e-5 * sizes.sum())


def add_number(shift):
    return scores.modifier(lambda score, b, h, q, k: score + shift.astype(score.dtype))


add_by_side = functools.partial(scores.relative_bias, bidirectional=False, max_distance=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "make", "expected"), [("tiled", add_number, 384), ("in pieces", add_by_side, [[51], [333]])]
)
def test_gradients_are_summed_over_tiles_in_the_dtype_of_sums(run, make, expected):
    """Of 384 rows each adds 1 to the gradient, in tiles of at most 1/2: bfloat16 would stop at 128."""
    query, key = jnp.zeros((6, 64, 1)), jnp.zeros((6, 16, 1))

    def lse(parameter):
        options = {"score": make(parameter), "aux": ("lse",), "query_offset": 0}
        return jnp.sum(RUNS[run](canonicalize(query, key, key, **options))[1]["lse"])

    expected = jnp.asarray(expected, jnp.bfloat16)
    np.testing.assert_array_equal(jax.jit(jax.grad(lse))(jnp.zeros_like(expected)), expected)


@pytest.mark.parametrize(("dtype", "refusal"), [("float32", None), ("bfloat16", "numbers of 16 bits")])
def test_the_kernel_for_hopper_leaves_narrow_numbers_of_pairs_to_the_tiles(dtype, refusal):
    arrays = [jnp.asarray(array, jnp.bfloat16) for array in draw(13)]
    found = mosaic_gpu._refuses_pairs(canonicalize(*arrays, score=close_over(jnp.asarray(TABLE, dtype))))
    assert found is None if refusal is None else refusal in found
