"""The plain evaluation in a given dtype: how exact anyone could expect attention to be."""

import numpy as np

from oracle import reduce_to


def evaluate(query, key, value, keep=None, bias=None, scale=None, cotangent=None, dtype=np.float32):
    """Textbook attention on whole arrays and its textbook gradients, everything in `dtype`."""
    query, key, value = (np.asarray(x).astype(dtype) for x in (query, key, value))
    shapes = [x.shape for x in (query, key, value)]
    rank = max(3, *(len(shape) for shape in shapes))
    query, key, value = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (query, key, value))
    own = [x.shape for x in (query, key, value)]
    heads = max(x.shape[-3] for x in (query, key, value))
    key, value = (np.repeat(x, heads // x.shape[-3], axis=-3) if x.shape[-3] > 1 else x for x in (key, value))
    scale = dtype(1 / np.sqrt(query.shape[-1]) if scale is None else scale)
    scores = np.einsum("...td,...sd->...ts", query, key) * scale
    if bias is not None:
        scores = scores + np.asarray(bias).astype(dtype)
    scores = np.where(True if keep is None else keep, scores, -np.inf).astype(dtype)
    peak = scores.max(-1, keepdims=True, initial=-np.inf)
    alive = peak != -np.inf
    p = np.where(alive, np.exp(scores - np.where(alive, peak, 0)), 0).astype(dtype)
    total = np.where(alive, p.sum(-1, keepdims=True), 1).astype(dtype)
    weights = p / total
    output = np.einsum("...ts,...se->...te", weights, value)
    cotangent = (
        np.ones_like(output)
        if cotangent is None
        else np.asarray(cotangent).astype(dtype).reshape(output.shape)
    )
    d_p = np.einsum("...te,...se->...ts", cotangent, value)
    d_s = weights * (d_p - (weights * d_p).sum(-1, keepdims=True))
    grads = (
        np.einsum("...ts,...sd->...td", d_s, key) * scale,
        np.einsum("...ts,...td->...sd", d_s, query) * scale,
        np.einsum("...ts,...te->...se", weights, cotangent),
    )
    logs = np.log(np.where(weights > 0, weights, 1))
    return {
        "output": output,
        "weights": weights,
        "scores": scores,
        "lse": (np.where(alive, peak + np.log(total), -np.inf))[..., 0],
        "max_score": peak[..., 0],
        "entropy": -(weights * logs).sum(-1),
        "d_query": _ungroup(grads[0], own[0], shapes[0]),
        "d_key": _ungroup(grads[1], own[1], shapes[1]),
        "d_value": _ungroup(grads[2], own[2], shapes[2]),
        "d_bias": reduce_to(d_s, np.shape(bias)),
        "d_query_terms": np.abs(weights * d_p) @ np.abs(key) * scale,
        "d_key_terms": np.swapaxes(np.abs(weights * d_p), -1, -2) @ np.abs(query) * scale,
        "d_bias_terms": reduce_to(np.abs(d_s), np.shape(bias)),
    }


def _ungroup(grad, own, shape):
    """Sum query heads back to their key head, and broadcast axes away."""
    if 1 < own[-3] < grad.shape[-3]:
        grad = grad.reshape(*grad.shape[:-3], own[-3], -1, *grad.shape[-2:]).sum(-3)
    return reduce_to(grad, own).reshape(shape)


def assert_as_exact(actual, truth, plain, name="", magnitude=0.0):
    """Error at most twice that of the plain evaluation, which counts as four roundings at least.

    In a small array the plain evaluation may be lucky: the largest of a few errors is a matter of chance.

    The roundings are those of the largest value, or of `magnitude` where a result is a difference of such.
    """
    actual, truth, plain = (np.asarray(x) for x in (actual, truth, plain))
    dtype = actual.dtype
    truth = truth.astype(np.float64).reshape(actual.shape)
    actual, plain = actual.astype(np.float64), plain.astype(dtype).astype(np.float64).reshape(actual.shape)
    finite = np.isfinite(truth)
    np.testing.assert_array_equal(actual[~finite], truth[~finite], err_msg=name)
    if not finite.any():
        return
    assert np.isfinite(actual[finite]).all(), f"{name}: not finite where the truth is"
    epsilon = float(_epsilon(dtype))
    rounding = epsilon * max(np.abs(truth[finite]).max(), magnitude, epsilon)
    allowed = 2 * max(np.abs(plain[finite] - truth[finite]).max(), 4 * rounding)
    error = np.abs(actual[finite] - truth[finite]).max()
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def _epsilon(dtype):
    import ml_dtypes

    return ml_dtypes.finfo(dtype).eps
