"""Attention of arrays by its definition: in float64 the truth, in a narrower dtype what rounding costs."""

from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np

from definition import Attention, Mask, Recurrence

PARTS = ("output", "d_query", "d_key", "d_value")


def batched(query, key, value, keep=None, bias=None, scale=None, cotangent=None, dtype: Any = np.float64):
    """Return results, gradients of sum(output * cotangent), and the size of the terms of each of these."""
    arrays = (np.asarray(array).astype(dtype) for array in (query, key, value))
    mask = None if keep is None else Mask(lambda at: np.asarray(keep))
    bias = None if bias is None else np.asarray(bias).astype(dtype)
    call = Attention(*arrays, mask=mask, bias=bias, scale=scale)
    found = {name: result.value for name, result in call.results().items()}
    cotangent = np.ones(()) if cotangent is None else np.asarray(cotangent)
    cotangent = np.broadcast_to(cotangent.astype(dtype), found["output"].shape)
    for name, grad in call.vjp({"output": cotangent}, {}, None).items():
        found |= {f"d_{name}": grad.value, f"d_{name}_terms": grad.size}
    return SimpleNamespace(**found, parts=tuple(found[part] for part in PARTS))


def recurrent(arrays, cotangent=None, dtype=np.float64, **options):
    """Return output, last memory and gradients of linear attention, of arrays by name."""
    arrays = {name: np.asarray(array).astype(dtype) for name, array in arrays.items() if array is not None}
    call = Recurrence(initial=(arrays.pop("memory", None),), **arrays, **options)
    found = call.run(call.arrays)
    cotangents = {} if cotangent is None else {"output": np.asarray(cotangent).astype(dtype)}
    grads = {name: grad.value for name, grad in call.vjp(cotangents, {}, None).items()} if cotangents else {}
    return found["output"], found["memory"], grads


def close(actual, expected, tolerance=1e-10, name=""):
    """Agree to ten digits, or to the tolerance given; a number serves for all of an array."""
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tolerance, atol=tolerance, err_msg=name)


def assert_close(found, expected, rtol=2e-5, atol=2e-5):
    """Every array of one tree to so many digits, in float64, those of another of the same structure."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for arrays in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(*(np.asarray(array, np.float64) for array in arrays), rtol, atol)


def assert_same_bits(found, expected):
    """Every array of one tree in dtype, shape and bytes those of another of the same structure."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for arrays in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = ((array.dtype, array.shape, array.tobytes()) for array in map(np.asarray, arrays))
        assert one == other


def assert_as_exact(actual, truth, plain, name="", magnitude=0.0):
    """Error at most twice that of the plain evaluation, which counts as four roundings at least.

    In a small array the plain evaluation may be lucky: the largest of a few errors is a matter of chance.
    The roundings are those of the largest value, or of `magnitude` where a result is a difference of such.
    """
    actual, truth, plain = (np.asarray(array) for array in (actual, truth, plain))
    dtype = actual.dtype
    truth = truth.astype(np.float64).reshape(actual.shape)
    actual, plain = actual.astype(np.float64), plain.astype(dtype).astype(np.float64).reshape(actual.shape)
    finite = np.isfinite(truth)
    np.testing.assert_array_equal(actual[~finite], truth[~finite], err_msg=name)
    if not finite.any():
        return
    assert np.isfinite(actual[finite]).all(), f"{name}: not finite where the truth is"
    epsilon = float(ml_dtypes.finfo(dtype).eps)
    rounding = epsilon * max(np.abs(truth[finite]).max(), magnitude, epsilon)
    allowed = 2 * max(np.abs(plain[finite] - truth[finite]).max(), 4 * rounding)
    error = np.abs(actual[finite] - truth[finite]).max()
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
