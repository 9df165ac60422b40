"""Results of a call by the definition, and how far from them an answer may be."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from regard.conformance.written_calls import FLOATING, Array, Call
from regard.theory import definition

HALF = ("bfloat16", "float16")


@dataclass
class Expected:
    """An array by the definition, by a plain evaluation in the call's dtype, and the size of its terms."""

    truth: Array
    plain: Array
    size: float = 0.0


def as_expected(array: Array) -> Expected:
    """Return what a function itself gave elsewhere, as what is expected of it."""
    return Expected(array, array)


@dataclass
class Difference:
    """The place where an answer is farthest from what is expected of it."""

    index: tuple[int, ...]
    actual: float
    expected: float
    allowed: float

    def __str__(self) -> str:
        where = ", ".join(map(str, self.index))
        if not np.isfinite(self.actual) or not np.isfinite(self.expected):
            return f"[{where}] is {self.actual:.6g}, not {self.expected:.6g}"
        return f"[{where}] is {self.actual:.7g}, not {self.expected:.7g} (allowed {self.allowed:.1g})"


def find_positions(call: Call) -> tuple[Array, Array]:
    """Return the positions of queries (T, 1) and of keys (1, S)."""
    T, S = call["query"].shape[-2], call["key"].shape[-2]
    first = call.get("offset", S - T if call.get("alignment") == "bottom-right" else 0)
    return first + np.arange(T)[:, None], np.arange(S)[None]


def find_pairs(call: Call) -> Array:
    """Return which query may attend to which key: (B, H, T, S)."""
    row, column = find_positions(call)
    allowed = np.ones((*call["query"].shape[:-1], column.size), bool)
    if call.get("causal"):
        allowed &= column <= row
    if call.get("window") is not None:
        before, after = call["window"]
        allowed &= (column >= row - before) & (column <= row + after)
    if "lengths" in call:
        allowed &= column < call["lengths"].reshape(-1, 1, 1, 1)
    if "segments" in call:
        ids = call["segments"]
        allowed &= ids[:, None, :, None] == ids[:, None, None, :]
    if "indices" in call:
        allowed &= count_listed(call)[:, None] > 0
    if "mask" in call:
        allowed &= call["mask"] != 0
    return allowed


def count_listed(call: Call) -> Array:
    """Return how often each key is listed for each query: (B, T, S)."""
    return (call["indices"][..., None] == np.arange(call["key"].shape[-2])).sum(-2)


def find_empty(call: Call) -> Array:
    """Return which rows may attend to nothing: (B, H, T)."""
    allowed = find_pairs(call)
    if "bias" in call:
        allowed = allowed & (np.asarray(call["bias"], np.float64) != -np.inf)
    return np.logical_not(allowed.any(-1, keepdims=True))[..., 0]


def run_definition(
    call: Call, kind: Any, cotangents: tuple[Array, Array], *, differentiate: bool
) -> tuple[dict[str, Array], dict[str, float]]:
    """Evaluate the definition in one dtype: results by name, and the size of the terms of gradients."""
    arrays = {name: np.asarray(call[name]).astype(kind) for name in ("query", "key", "value")}
    H, K = arrays["query"].shape[1], arrays["key"].shape[1]
    interleaved = call.get("group_order") == "interleaved" and 1 < K < H
    if interleaved:
        arrays |= {name: np.tile(arrays[name], (1, H // K, 1, 1)) for name in ("key", "value")}
    steps = call.get("steps", {})
    lines: dict[str, Array] = {}

    def step(line: str, array: Array) -> Array:
        array = steps[line](array, lines) if line in steps else array
        lines[line] = np.asarray(array).astype(kind)
        return lines[line]

    bias = None if "bias" not in call else np.asarray(call["bias"]).astype(kind)
    added, first = bias, bool(call.get("bias_first"))
    if first and bias is not None:
        added, early = np.where(bias == -np.inf, bias, 0), np.where(bias == -np.inf, 0, bias)
        steps = {**steps, "scaled": lambda array, _: array + early}
    forward = definition.attention(
        **arrays, keep=find_pairs(call), scale=call.get("scale"), softcap=call.get("softcap"),
        bias=added,
        sinks=None if "sinks" not in call else np.asarray(call["sinks"]),
        survivors=call.get("survivors"), step=step,
    )  # fmt: skip
    results = {"output": forward.output, "lse": forward.lse}
    sizes = {"output": _measure_output(forward, lines["masked"])}
    if differentiate:
        names = [name for name in ("softcap", "scale", "survivors") if f"back_{name}" in call]
        back = dataclasses.replace(forward, **{name: call[f"back_{name}"] for name in names})
        d_output, d_lse = cotangents[0].astype(kind), cotangents[1].astype(kind)
        gradients = definition.gradients(back, d_output, d_lse, step)
        if first:
            gradients["bias"] = lines["d_scaled"]
        sizes |= _measure_terms(back, d_output, d_lse)
        for name in FLOATING:
            if name in call:
                results[f"d_{name}"] = _sum_shared(gradients[name], name, np.shape(call[name]), interleaved)
    for name, function in call.get("results", {}).items():
        if name in results:
            results[name] = np.asarray(function(results[name], lines))
    return results, sizes


def _measure_output(forward: definition.Forward, scores: Array) -> float:
    """Return the size of what an output adds up, or of what rounded scores move in it, if that is more."""
    scores = np.where(np.isneginf(scores), 0, scores)
    moments = [(forward.weights @ power) for power in (forward.value, forward.value**2)]
    spread = np.maximum(moments[1] - moments[0] ** 2, 0)
    moved = np.sqrt((forward.weights * scores**2).sum(-1, keepdims=True) * spread)
    return float(max((forward.dropped @ np.abs(forward.value)).max(initial=0), moved.max(initial=0)))


def _measure_terms(forward: definition.Forward, d_output: Array, d_lse: Array) -> dict[str, float]:
    """Return the size of the terms that gradients are sums of: the same lines with absolute values."""
    d_weights = forward.survivors * (abs(d_output) @ abs(np.swapaxes(forward.value, -1, -2)))
    mean = (forward.weights * d_weights).sum(-1, keepdims=True)
    back = np.where(np.isneginf(forward.lse), 0, abs(d_lse))[..., None]
    d_scores = forward.weights * (d_weights + mean + back)
    largest = 1 + np.abs(np.where(np.isneginf(forward.lse), 0, forward.lse)).max(initial=0)
    terms = {
        "d_query": abs(forward.scale) * (d_scores @ abs(forward.key)),
        "d_key": abs(forward.scale) * (np.swapaxes(d_scores, -1, -2) @ abs(forward.query)),
        "d_value": np.swapaxes(forward.dropped, -1, -2) @ abs(d_output),
        "d_bias": d_scores,
        "d_sinks": (forward.sink_weight * (back + mean)).sum((0, 2)),
    }
    # A weight that is formed again from its score and lse carries their rounding.
    return {name: float(np.max(array, initial=0)) * float(largest) for name, array in terms.items()}


def _sum_shared(gradient: Array, name: str, shape: tuple[int, ...], interleaved: bool) -> Array:
    """Sum a gradient of all heads over what an argument shares."""
    if name == "sinks":
        return gradient.sum((0, 2))
    if name in ("key", "value"):
        B, H, *rest = gradient.shape
        K = shape[1]
        split = (B, H // K, K, *rest) if interleaved else (B, K, H // max(K, 1), *rest)
        return gradient.reshape(split).sum(1 if interleaved else 2) if K else gradient
    lacking = tuple(range(gradient.ndim - len(shape)))
    gradient = gradient.sum(lacking)
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 < gradient.shape[axis])
    return gradient.sum(axes, keepdims=True)


def expect(call: Call, cotangents: tuple[Array, Array], *, differentiate: bool = True) -> dict[str, Expected]:
    """Return what a call should give, by name: output, lse and, of gradients, d_query, d_key and so on."""
    kind = np.asarray(call["query"]).dtype
    wide = np.longdouble if kind == np.float64 else np.float64
    precision = call.get("precision", wide)
    truth, sizes = run_definition(call, precision, cotangents, differentiate=differentiate)
    # What any evaluation in half a precision rounds: weights, and their gradients, before they multiply.
    hooks = dict(call.get("steps", {}))
    for line in ("dropped", "d_scaled") if kind.name in HALF else ():
        inner = hooks.get(line, lambda array, _: array)
        hooks[line] = lambda array, lines, inner=inner: round_to(inner(array, lines), kind)
    working = np.float32 if kind.name in HALF else kind
    plain, _ = run_definition({**call, "steps": hooks}, working, cotangents, differentiate=differentiate)
    return {name: Expected(truth[name], plain[name], sizes.get(name, 0.0)) for name in truth}


def round_to(array: Array, dtype: Any) -> Array:
    """Round numbers to a dtype, and keep the one they have."""
    with np.errstate(over="ignore"):
        return np.asarray(array).astype(dtype).astype(np.asarray(array).dtype)


def find_difference(
    actual: Array, expected: Expected, dtype: str, tolerance: float, where: Array | None = None
) -> Difference | None:
    """Return where an answer differs by more than rounding explains, or None.

    Allowed is `tolerance` times the error of the plain evaluation, which counts as four roundings at least
    of the largest number, or of the terms that cancel in it.
    """
    truth = np.broadcast_to(expected.truth, actual.shape)
    plain = np.broadcast_to(expected.plain, actual.shape)
    chosen = np.ones(actual.shape, bool) if where is None else np.broadcast_to(where, actual.shape)
    if not chosen.any():
        return None
    finite = np.isfinite(truth) & chosen
    epsilon = float(ml_dtypes.finfo(dtype).eps)
    plain = plain if dtype == "float64" else round_to(plain, dtype)
    # In half a precision the plain evaluation rounds more than what it adds up.
    terms = 0.0 if dtype in HALF else expected.size
    size = max(float(np.abs(truth[finite]).max(initial=0)), terms)
    wide = np.longdouble if dtype == "float64" else np.float64
    with np.errstate(invalid="ignore"):
        plain_errors = np.abs(plain[finite].astype(wide) - truth[finite])
        errors = np.abs(actual.astype(wide) - truth)
    plain_error = plain_errors[np.isfinite(plain_errors)].max(initial=0)
    allowed = float(tolerance * max(plain_error, 4 * epsilon * max(size, epsilon)))
    same = (actual == truth) | (np.isnan(actual) & np.isnan(truth))
    errors = np.where(same, 0, np.where(np.isfinite(actual) & np.isfinite(truth), errors, np.inf))
    errors = np.where(chosen, errors, 0)
    worst = np.unravel_index(np.argmax(errors), errors.shape)
    if errors[worst] <= allowed:
        return None
    index = tuple(map(int, worst))
    return Difference(index, float(actual[worst]), float(truth[worst]), allowed)
