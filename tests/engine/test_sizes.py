"""The contract at every size where what runs changes: values, gradients, empty rows, NaN, infinities.

One program of a size serves all of its arrays, as compiling costs more than computing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard import attend, derive, masks, merge, readouts, scores
from regard.engine.backends import tiled
from regard.engine.call.canonicalization import canonicalize
from regard.engine.call.quantized import quantize
from regard.engine.flash.blocking import Blocking

B, H, K, D, E = 2, 2, 1, 8, 5
STATS = ("lse", "max_score", "argmax", "entropy")
# A cotangent that is finite whatever the output is: NaN must come from the weights.
SHARES = np.linspace(0.2, 0.6, E, dtype=np.float32)[None, None, None]


def in_small_tiles(*arrays, blocking, **options):
    return tiled.run(canonicalize(*arrays, **options), forward=blocking, backward=blocking)


RUNS = {
    "dense": functools.partial(attend, backend="dense"),
    "tiled": functools.partial(attend, backend="tiled"),
    "small": functools.partial(in_small_tiles, blocking=Blocking(32, 24)),
    "pieces": functools.partial(in_small_tiles, blocking=Blocking(16, 16, blocks=3, pieces=2)),
    "at once": functools.partial(in_small_tiles, blocking=Blocking(32, 24, at_once=64)),
}
# Few rows, several vectors, and both sides of where XLA's CPU, the dispatcher and the tiles do otherwise.
SIZES = [(7, 11), (53, 59), (131, 137), (1024, 1031)]
CALLS = [(run, size) for run in ("dense", "tiled") for size in SIZES]
CALLS += [(run, (131, 137)) for run in ("small", "pieces", "at once")]


@functools.cache
def draw(T, S):
    """Arrays of a call whose bias removes a fifth of all pairs, and query 5 of every head whole."""
    rng = np.random.default_rng(T)
    shapes = {"query": (B, H, T, D), "key": (B, K, S, D), "value": (B, K, S, E), "bias": (1, H, T, S)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["bias"][rng.random((1, H, T, S)) < 0.2] = -np.inf
    arrays["bias"][:, :, 5] = -np.inf
    return arrays | {"cap": np.array([3.0, 2.0], np.float32)}


@functools.cache
def program(run, T, S, masked=True):
    """Output, statistics and gradients of both, by all arrays."""

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def everything(arrays):
        mask = masks.causal() & masks.lengths([S - 3, 0]) if masked else None
        options = {"mask": mask, "score": scores.softcap(arrays["cap"]), "bias": arrays["bias"]}
        if not masked:
            options = {}
        inputs = (arrays[name] for name in ("query", "key", "value"))
        output, aux = RUNS[run](*inputs, aux=STATS, query_offset=S - T, **options)
        lse = jnp.where(aux["lse"] == -jnp.inf, 0, aux["lse"])
        weighed = jnp.sum(output.astype(lse.dtype) * SHARES.astype(lse.dtype))
        return weighed + 0.3 * jnp.sum(lse + aux["entropy"]), (output, aux)

    def run_it(arrays):
        grads, (output, aux) = jax.tree.map(np.asarray, everything(arrays))
        return aux | {"output": output}, grads

    return run_it


def define(arrays, T, S, masked=True):
    """Scores (-inf where a pair does not count), the statistics, and the number that is differentiated."""
    names = "query", "key", "value", "bias", "cap"
    query, key, value, bias, cap = (arrays[name].astype(np.float64) for name in names)
    found = np.einsum("bhtd,bhsd->bhts", query, np.repeat(key, H // K, 1)) / np.sqrt(D)
    if masked:
        lengths = np.array([S - 3, 0])[:, None, None, None]
        keep = (np.arange(S) <= np.arange(T)[:, None] + S - T) & (np.arange(S) < lengths) & (bias != -np.inf)
        cap = cap[:, None, None]
        found = np.where(keep, cap * np.tanh(found / cap) + np.where(keep, bias, 0), -np.inf)
    peak = found.max(-1)
    alive = peak != -np.inf
    base = np.where(alive, peak, 0)[..., None]
    weights = np.exp(found - base)
    total = np.where(alive, weights.sum(-1), 1)
    weights = weights / total[..., None]
    output = weights @ np.where(weights.any(-2)[..., None], np.repeat(value, H // K, 1), 0)
    lse = np.where(alive, peak + np.log(total), -np.inf)
    entropy = np.where(alive, np.log(total) - (weights * np.maximum(found - base, -1e30)).sum(-1), 0)
    stats = {"output": output, "lse": lse, "max_score": peak, "entropy": entropy}
    stats["argmax"] = np.where(alive, np.where(np.isnan(peak), 0, found.argmax(-1)), -1)
    return found, stats, (output * SHARES).sum() + 0.3 * (np.where(alive, lse, 0) + entropy).sum()


@pytest.mark.parametrize(("run", "size"), CALLS, ids=str)
def test_values_statistics_and_gradients_are_those_of_the_definition(run, size):
    arrays = draw(*size)
    found, grads = program(run, *size)(arrays)
    _, truth, _ = define(arrays, *size)
    for name, array in found.items():
        np.testing.assert_allclose(array, truth[name], rtol=0, atol=5e-6, err_msg=name)
    rng = np.random.default_rng(1)
    for name, array in arrays.items():
        direction = rng.normal(size=array.shape)
        move = lambda step, name=name, direction=direction: arrays | {name: arrays[name] + step * direction}
        numeric = (define(move(1e-6), *size)[2] - define(move(-1e-6), *size)[2]) / 2e-6
        terms = np.abs(grads[name] * direction).sum()
        np.testing.assert_allclose(
            (grads[name] * direction).sum(), numeric, rtol=0, atol=3e-6 * terms + 1e-6, err_msg=name
        )
    assert not grads["query"][1].any()
    assert not grads["query"][:, :, 5].any()


ONE, SOME, ALL = (0, 0, 2), (slice(None), slice(None), slice(None, None, 5)), (...,)
SPOILED = {
    "a query": ("query", ONE), "queries": ("query", SOME), "every query": ("query", ALL),
    "a key": ("key", ONE), "a number of a key": ("key", (*ONE, 3)), "keys": ("key", SOME),
    "every key": ("key", ALL), "the bias of a row": ("bias", (0, 1, 4)),
    "the bias of a key": ("bias", (0, 1, slice(None), 2)), "a parameter of the score": ("cap", (1,)),
}  # fmt: skip
BARE = [("dense", (53, 59)), ("dense", (1024, 1031)), ("tiled", (53, 59)), ("tiled", (1024, 1031))]


@pytest.mark.parametrize(
    ("run", "size", "masked"), [(*call, True) for call in CALLS] + [(*call, False) for call in BARE], ids=str
)
def test_a_row_is_nan_where_it_meets_nan_and_no_other_row_is(run, size, masked):
    arrays, compute = draw(*size), program(run, *size, masked)
    clean, clean_grads = compute(arrays)
    for words, (name, place) in SPOILED.items():
        if not masked and name in ("bias", "cap"):
            continue
        spoiled = arrays | {name: arrays[name].copy()}
        spoiled[name][place] = np.nan
        with np.errstate(invalid="ignore"):
            scored = define(spoiled, *size, masked)[0]
        met = np.isnan(scored).any(-1)
        found, grads = compute(spoiled)
        for stat, array in found.items():
            rows = array[met]
            assert (rows == 0).all() if stat == "argmax" else np.isnan(rows).all(), (words, stat)
            np.testing.assert_array_equal(array[~met], clean[stat][~met], err_msg=f"{words}: {stat}")
        assert met.any()
        assert np.isnan(grads["query"][met]).any(-1).all(), words
        # What no such row may attend to, in no head of its group.
        seen = (np.isnan(scored) | (met[..., None] & (scored != -np.inf))).any(-2)
        seen = seen.reshape(B, K, -1, size[1]).any(2)
        for part in ("key", "value"):
            assert np.isnan(grads[part][seen]).any(-1).all(), (words, part)
            apart = ~seen.any(-1)
            np.testing.assert_array_equal(grads[part][apart], clean_grads[part][apart], f"{words}: {part}")


@pytest.mark.parametrize(("run", "size"), CALLS, ids=str)
def test_values_that_are_nan_reach_those_who_may_attend_to_them_and_infinities_nobody_else(run, size):
    arrays, compute = draw(*size), program(run, *size)
    clean, clean_grads = compute(arrays)
    T, S = size
    value = arrays["value"].copy()
    value[0, 0, 2, 3] = np.nan
    found, _ = compute(arrays | {"value": value})
    assert np.isnan(found["output"][0, :, :, 3][define(arrays, T, S)[0][0, :, :, 2] != -np.inf]).all()
    for stat in STATS:
        np.testing.assert_array_equal(found[stat], clean[stat])
    for part in (found["output"][1], found["output"][..., :3], found["output"][..., 4]):
        assert np.isfinite(part).all()
    # Of batch row 0 the last three keys are nobody's, of row 1 all.
    for poison in (np.nan, np.inf, -np.inf):
        spoiled = {name: array.copy() for name, array in arrays.items()}
        for part in ("key", "value"):
            spoiled[part][0, :, S - 3 :] = spoiled[part][1] = poison
        spoiled["query"][1] = spoiled["query"][:, :, 5] = poison
        dirty, dirty_grads = compute(spoiled)
        for name, array in (dirty | dirty_grads).items():
            np.testing.assert_array_equal(array, (clean | clean_grads)[name], err_msg=f"{poison}: {name}")


def test_what_reads_or_merges_rows_meets_their_nan():
    T, S = 53, 59
    arrays = draw(T, S)
    query, key, value = (arrays[name].copy() for name in ("query", "key", "value"))
    query[SOME] = np.nan
    met = np.isnan(query).any(-1)
    mask = masks.causal() & masks.lengths([S - 3, S])
    options = {"mask": mask, "query_offset": S - T}

    @jax.jit
    def read(query):
        found = readouts.read(query, key, top_k=3, grid=16, **options)
        given = readouts.read(query, key, lse=found.lse, top_k=3, grid=16, **options)
        part = {"mask": masks.causal(), "query_offset": S - T, "aux": ("lse",)}
        ends = (0, 40), (40, S)
        halves = [(key[:, :, first:last], value[:, :, first:last], first) for first, last in ends]
        parts = [attend(query, *half, key_offset=first, **part) for *half, first in halves]
        merged = merge([(output, aux["lse"]) for output, aux in parts])
        sunk = attend(query, key, value, sinks=jnp.ones(H), aux=("lse",), **options)
        return found, given, merged, (sunk[0], sunk[1]["lse"])

    found, given, merged, sunk = jax.tree.map(np.asarray, read(query))
    for readout in (found, given):
        for name in ("lse", "entropy", "max_weight", "distance", "first_mass", "self_mass"):
            np.testing.assert_array_equal(np.isnan(getattr(readout, name)), met, err_msg=name)
        assert np.isnan(readout.trust).all()
        assert np.isfinite(readout.key_mass).all()
    for output, lse in (merged, sunk):
        np.testing.assert_array_equal(np.isnan(lse), met)
        np.testing.assert_array_equal(np.isnan(output), np.broadcast_to(met[..., None], output.shape))
    tokens = np.random.default_rng(2).normal(size=(*met.shape, 64)).astype(np.float32)
    tokens[..., 31] = np.where(met, np.nan, tokens[..., 31])
    np.testing.assert_array_equal(np.isnan(jax.jit(quantize)(tokens).scale[..., 0]), met)
    derived = derive(query[0], key[0], value[0], mask=masks.causal(), query_offset=S - T)
    np.testing.assert_array_equal(np.isnan(derived.output).any(-1), met[0])


@pytest.mark.parametrize("run", ["dense", "tiled", "pieces"])
@pytest.mark.parametrize("keys", [7, 137])
def test_one_of_the_scores_is_the_largest_though_kernels_round_them_otherwise(run, keys):
    """Of a product, a quotient and a sum, which XLA computes once for the maximum, once to find it."""
    rng = np.random.default_rng(32)
    query, key, value = (rng.normal(size=(6, 2, n, 8)).astype(np.float32) for n in (131, keys, keys))
    bias, degrees = rng.normal(size=(2, 131, keys)).astype(np.float32), np.float32([1.3, 1.9])

    @jax.jit
    def call(query, key, value, bias, degrees):
        options = {"bias": bias, "score": scores.temperature(degrees), "query_offset": 0}
        return RUNS[run](query, key, value, aux=("weights", "max_score", "argmax"), **options)[1]

    found = jax.tree.map(np.asarray, call(query, key, value, bias, degrees))
    exact = query.astype(float) @ key.swapaxes(-1, -2) / 8**0.5 / degrees[:, None, None] + bias
    np.testing.assert_allclose(found["max_score"], exact.max(-1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found["argmax"], exact.argmax(-1))


@pytest.mark.parametrize("run", ["dense", "tiled"])
@pytest.mark.parametrize("length", [131, 300, 1031])
def test_gradients_of_a_call_that_asks_for_nothing_else_meet_nan(run, length):
    """Without statistics, XLA's CPU makes exponentials part of the kernels of products."""
    arrays = [draw(length, length)[name].copy() for name in ("query", "key", "value")]
    arrays[0][SOME] = np.nan
    call = lambda *arrays: jnp.sum(RUNS[run](*arrays) * SHARES)
    output, grads = jax.jit(lambda *arrays: (RUNS[run](*arrays), jax.grad(call, (0, 1, 2))(*arrays)))(*arrays)
    met = np.isnan(arrays[0]).any(-1)
    np.testing.assert_array_equal(np.isnan(output).all(-1), met)
    np.testing.assert_array_equal(np.isnan(grads[0]).any(-1), met)
    for grad in grads[1:]:
        assert np.isnan(grad).all()
