"""Random calls against float64 NumPy: shapes, leading axes, groups, masks, dtypes, poison, gradients."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import plain
from mask_expressions import expressions
from regard import attend

KEYS = 5
# Leading axes of query, of key, of value; the last one is heads.
LEADING = {
    "one head": ((), (), ()),
    "batch": ((2,), (2,), (2,)),
    "heads": ((2, 3), (2, 3), (2, 3)),
    "grouped": ((2, 6), (2, 3), (2, 3)),
    "multi-query": ((2, 3), (2, 1), (1, 1)),
    "shared keys": ((2, 3), (), ()),
}


@dataclass
class Call:
    leading: str
    queries: int
    offset: int
    mask: object
    dtype: str
    seed: int
    poison: float | None
    bias: str | None


def calls_with(queries):
    return st.builds(
        Call,
        leading=st.sampled_from(sorted(LEADING)),
        queries=st.just(queries),
        offset=st.sampled_from([0, 0, 2, -1]),
        mask=st.one_of(st.none(), expressions(batch=2, length=KEYS, queries=queries)),
        dtype=st.sampled_from(["float32", "float32", "bfloat16", "float16", "float64"]),
        seed=st.integers(0, 2**16),
        poison=st.sampled_from([None, np.nan, np.inf]),
        bias=st.sampled_from([None, "whole", "drops"]),
    )


calls = st.sampled_from([1, 3, 5]).flatmap(calls_with)


@pytest.mark.slow
@settings(max_examples=40)
@given(call=calls)
def test_a_random_call_equals_the_truth(call):
    check(call)


@settings(max_examples=10)
@given(call=calls)
def test_a_few_random_calls_equal_the_truth(call):
    check(call)


def check(call):
    with jax.enable_x64(call.dtype == "float64"):
        compare(call)


def compare(call):
    rng = np.random.default_rng(call.seed)
    T, leading = call.queries, LEADING[call.leading]
    shapes = [(*leading[0], T, 3), (*leading[1], KEYS, 3), (*leading[2], KEYS, 2)]
    query, key, value = (jnp.asarray(rng.normal(size=shape)).astype(call.dtype) for shape in shapes)
    leading = leading[0]
    mask = call.mask
    if mask is not None and mask.leading_axes > len(leading):
        mask = None
    keep = np.ones((*leading, T, KEYS), bool)
    if mask is not None:
        keep = keep & np.asarray(mask.dense(T, KEYS, query_offset=call.offset, leading_axes=len(leading)))
    bias = None
    if call.bias:
        bias = rng.normal(size=(T, KEYS)).astype(np.float32)
        if call.bias == "drops":
            bias[rng.random(bias.shape) < 0.3] = -np.inf
        keep = keep & (bias != -np.inf)
        # An array whose first axis fits the batch as well is refused; written out it is clear.
        bias = jnp.asarray(bias.reshape((1,) * len(leading) + bias.shape))
    answers = keep.any(-2)
    cotangent = jnp.asarray(rng.normal(size=(*leading, T, value.shape[-1]))).astype(call.dtype)

    def run(query, key, value, bias, aux=()):
        return attend(query, key, value, mask=mask, bias=bias, query_offset=call.offset, aux=aux)

    poison = 0.0 if call.poison is None else call.poison
    spoiled = [
        jnp.where(jnp.asarray(owned(answers, x.shape))[..., None], x, jnp.asarray(poison, x.dtype))
        for x in (key, value)
    ]
    output, aux = run(query, *spoiled, bias, ("weights", "lse", "entropy", "argmax"))
    arguments = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    grads = jax.grad(lambda *arrays: jnp.sum(run(*arrays) * cotangent), arguments)(query, *spoiled, bias)

    # Truth never sees the poison: it is written where no pair looks.
    inputs = [np.asarray(x, np.float64) for x in (query, key, value)]
    spelled = {"keep": keep, "bias": bias, "cotangent": np.asarray(cotangent, np.float64)}
    working = np.float64 if call.dtype == "float64" else np.float32
    truth, same = oracle.batched(*inputs, **spelled), plain.evaluate(*inputs, **spelled, dtype=working)
    plain.assert_as_exact(output, truth.output, same["output"], "output")
    for stat in ("weights", "lse", "entropy"):
        plain.assert_as_exact(aux[stat], getattr(truth, stat), same[stat], stat, magnitude=1.0)
    np.testing.assert_array_equal(np.asarray(aux["argmax"]) < 0, ~keep.any(-1))
    for grad, part in zip(grads, ("d_query", "d_key", "d_value", "d_bias"), strict=False):
        # Weights meet values in bfloat16, whatever dtype a bias has.
        grad = grad.astype(query.dtype) if query.dtype == jnp.bfloat16 else grad
        plain.assert_as_exact(grad, getattr(truth, part), same[part], part, magnitude=1.0)


def owned(answers, shape):
    """Which rows of a key-side array some query may attend to."""
    own = (1,) * (answers.ndim + 1 - len(shape)) + shape[:-1]
    for axis, size in enumerate(own[:-1]):
        if axis == len(own) - 2 and 1 < size < answers.shape[axis]:  # grouped heads share a key head
            answers = answers.reshape(*answers.shape[:axis], size, -1, answers.shape[-1]).any(axis + 1)
        elif size == 1:
            answers = answers.any(axis, keepdims=True)
    return answers.reshape(shape[:-1])
