"""Capture: what was watched equals the dense definition, nothing that runs changes, and names are right."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from economy import mostly_slow
from regard import attend, inspection, masks, positions, readouts, scores
from regard.engine.call import hooks
from regard.inspection import tokens
from regard.inspection.explorer.payload import collect
from regard.inspection.traces import captures, owners, padded, slices
from regard.interop.flax import attention_fn
from regard.layers import LatentAttention, MultiHeadAttention
from regard.models import (
    Classifier,
    Decoder,
    Encoder,
    EncoderDecoder,
    TransformerConfig,
)

B, H, T, S, D, E = 2, 6, 11, 11, 5, 3
SLOPES = np.array([0.5, 0.0, 0.25, 1.0, 0.125, 2.0], np.float32)
CAPS = np.array([1.5, 2.0, 3.0, 0.5, 1.0, 4.0], np.float32)
IDS = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [5, 5, 7, 7, 7, 5, 5, 9, 9, 9, 9]])
OF_HEADS = np.random.default_rng(2).random((H, T, S)) < 0.7
LENGTHS = np.array([[1, 2, 3, 4, 5, 6], [11, 9, 0, 3, 7, 5]])


def causal(q, k, b):
    return k <= q


def by_batch(score, batch, head, query, key):
    return score + 0.5 * batch.astype(score.dtype) - 0.25 * (head * abs(query - key)).astype(score.dtype)


@dataclass(frozen=True)
class Case:
    """One call, and what its mask and score do, said again in NumPy of positions, batch and head."""

    mask: Any = None
    keep: Any = None  # (query positions, key positions, batch) -> may attend
    score: Any = None
    change: Any = None  # (scores, distance, batch, head) -> scores
    query: tuple = (B, H, T, D)
    key: tuple = (B, H, S, D)
    value: tuple = (B, H, S, E)
    bias: tuple | None = None
    sinks: tuple | None = None
    query_offset: Any = None
    key_offset: Any = None
    scale: float | None = None
    dtype: Any = "float32"
    example: int = 1
    loose: float = 1.0


WINDOW = masks.causal() & masks.sliding_window(3)
CASES = {
    "plain": Case(),
    "causal": Case(masks.causal(), causal),
    "window": Case(WINDOW, lambda q, k, b: (k <= q) & (k >= q - 3)),
    "segments": Case(
        masks.segments(IDS) & masks.causal(),
        lambda q, k, b: (IDS[b][q] == IDS[b][k]) & (k <= q),
    ),
    "segments of keys": Case(masks.segments(IDS, IDS[:, ::-1]), lambda q, k, b: IDS[b][q] == IDS[b][::-1][k]),
    "shared segments": Case(masks.segments(IDS[0]), lambda q, k, b: IDS[0][q] == IDS[0][k]),
    "lengths": Case(masks.lengths([11, 4]), lambda q, k, b: (k < [11, 4][b]) & (q >= 0)),
    "an empty batch row": Case(masks.lengths([11, 0]), lambda q, k, b: (k < [11, 0][b]) & (q >= 0)),
    "empty rows": Case(masks.causal() & ~masks.prefix(4), lambda q, k, b: (k <= q) & (k >= 4)),
    "an array": Case(masks.from_array(IDS[:, None, None, :] > 1), lambda q, k, b: (IDS[b][k] > 1) & (q >= 0)),
    "an array of heads": Case(masks.from_array(OF_HEADS), lambda q, k, b: OF_HEADS),
    "lengths of heads": Case(
        masks.lengths(LENGTHS), lambda q, k, b: (k < LENGTHS[b][:, None, None]) & (q >= 0)
    ),
    "valid keys": Case(masks.valid_keys(IDS > 1), lambda q, k, b: (IDS[b][k] > 1) & (q >= 0)),
    "predicate": Case(masks.predicate(lambda q, k: (q + k) % 3 > 0), lambda q, k, b: (q + k) % 3 > 0),
    "alibi": Case(
        masks.causal(), causal, scores.alibi(slopes=SLOPES), lambda s, d, b, h: s - SLOPES[h] * abs(d)
    ),
    "softcap": Case(
        score=[scores.softcap(CAPS), scores.temperature([0.5, 1, 2, 0.25, 1, 3])],
        change=lambda s, d, b, h: np.tanh(s / CAPS[h]) * CAPS[h] / [0.5, 1, 2, 0.25, 1, 3][h],
    ),
    "relative": Case(
        score=scores.relative_bias(np.arange(48, dtype=np.float32).reshape(8, 6) / 20, max_distance=4),
        change=lambda s, d, b, h: (
            s
            + (np.arange(48).reshape(8, 6) / 20)[
                np.select([abs(d) < 2, abs(d) < 3, abs(d) >= 3], [abs(d), 2, 3]) + 4 * (d > 0), h
            ]
        ),
    ),
    "a function": Case(
        score=scores.modifier(by_batch), change=lambda s, d, b, h: s + 0.5 * b - 0.25 * h * abs(d)
    ),
    "sinks": Case(masks.causal(), causal, sinks=(H,)),
    "sinks per example": Case(sinks=(B, H)),
    "bias": Case(bias=(B, H, T, S)),
    "bias of heads": Case(masks.causal(), causal, bias=(H, T, S)),
    "bias of all": Case(bias=(T, S)),
    "grouped": Case(masks.causal(), causal, key=(B, 2, S, D), value=(B, 2, S, E), sinks=(H,)),
    "one key head": Case(
        WINDOW, lambda q, k, b: (k <= q) & (k >= q - 3), key=(B, 1, S, D), value=(B, 1, S, E)
    ),
    "one key head, many of values": Case(masks.causal(), causal, key=(B, 1, S, D)),
    "keys without a batch": Case(masks.causal(), causal, key=(H, S, D), value=(H, S, E)),
    "more keys": Case(masks.causal(), causal, key=(B, H, 17, D), value=(B, H, 17, E), query_offset=6),
    "an offset for each": Case(
        masks.causal(),
        causal,
        key=(B, H, 17, D),
        value=(B, H, 17, E),
        query_offset=np.array([6, 2]),
        key_offset=np.array([0, 1]),
    ),
    "cross": Case(key=(B, H, 17, D), value=(B, H, 17, E)),
    "one query": Case(query=(B, H, 1, D)),
    "no queries": Case(query=(B, H, 0, D)),
    "bfloat16": Case(masks.causal(), causal, dtype=jnp.bfloat16, loose=4),
    "float16": Case(dtype="float16", sinks=(H,)),
    "large scores": Case(masks.causal(), causal, scale=40.0, loose=200),
    "two batch axes, keys with one": Case(
        masks.causal(), causal, query=(2, 3, H, T, D), key=(3, 2, S, D), value=(3, 2, S, E), example=5
    ),
    "heads alone": Case(masks.causal(), causal, query=(H, T, D), key=(2, S, D), value=(2, S, E), example=0),
    "one head": Case(masks.causal(), causal, query=(T, D), key=(S, D), value=(S, E), example=0),
    "the first example": Case(masks.lengths([7, 4]), lambda q, k, b: (k < [7, 4][b]) & (q >= 0), example=0),
}


def inputs(case):
    rng = np.random.default_rng(5)
    query, key, value = (
        jnp.asarray(rng.normal(size=shape), jnp.float32).astype(case.dtype)
        for shape in (case.query, case.key, case.value)
    )
    options = {
        name: getattr(case, name)
        for name in ("mask", "score", "scale", "query_offset", "key_offset")
        if getattr(case, name) is not None
    }
    for name in ("bias", "sinks"):
        if getattr(case, name) is not None:
            options[name] = jnp.asarray(rng.normal(size=getattr(case, name)), jnp.float32).astype(case.dtype)
    return (query, key, value), options


def truth(case, arrays, options):
    """Weights (H, T, S), lse and largest scores (H, T) of the example: float64, one number at a time."""
    query, key, _ = (np.asarray(x.astype(jnp.float32), np.float64) for x in arrays)
    leading = np.broadcast_shapes(query.shape[:-3], key.shape[:-3]) if query.ndim > 3 else ()
    place = np.unravel_index(case.example, leading) if leading else ()

    def cut(array, own):
        array = np.asarray(array)
        extra = array.ndim - own - 1
        return array[place[len(place) - extra :]] if extra > 0 else array

    q, k = cut(query, 2), cut(key, 2)
    q, k = (x[None] if x.ndim == 2 else x for x in (q, k))
    heads, group = q.shape[0], q.shape[0] // k.shape[0]
    batch = place[0] if place else 0
    first, start = (
        0 if x is None else int(np.broadcast_to(x, (B,))[batch]) for x in (case.query_offset, case.key_offset)
    )
    rows, columns = first + np.arange(q.shape[1])[:, None], start + np.arange(k.shape[1])[None]
    kept = True if case.keep is None else case.keep(rows, columns, batch)
    kept = np.broadcast_to(kept, (heads, rows.size, columns.size))
    scale = 1 / np.sqrt(q.shape[-1]) if case.scale is None else case.scale
    found = []
    for h in range(heads):
        s = q[h] @ k[h // group].T * scale
        if case.change is not None:
            s = case.change(s, columns - rows, batch, h)
        if "bias" in options:
            bias = np.asarray(options["bias"].astype(jnp.float32), np.float64)
            s = s + (cut(bias, 2)[h] if bias.ndim > 2 else bias)
        s = np.where(kept[h], s, -np.inf)
        total = np.exp(s - s.max(initial=0)).sum(-1)
        if "sinks" in options:
            sink = cut(np.asarray(options["sinks"].astype(jnp.float32), np.float64), 0)[h]
            total = total + np.exp(sink - s.max(initial=0))
        with np.errstate(divide="ignore", invalid="ignore"):
            lse = np.log(total) + s.max(initial=0)
            weights = np.where(s == -np.inf, 0, np.exp(s - lse[:, None]))
        found.append((weights, lse, s.max(-1, initial=-np.inf)))
    return [np.stack(one) for one in zip(*found, strict=True)]


def captured(case):
    arrays, options = inputs(case)
    with inspection.capture(example=case.example) as trace:
        out = attend(*arrays, **options)
    assert np.array_equal(out, attend(*arrays, **options), equal_nan=True)
    return trace.calls[0], truth(case, arrays, options)


USUAL = ("causal", "segments", "bias", "softcap", "grouped", "an offset for each", "one head")


@pytest.mark.parametrize("name", mostly_slow(CASES, *USUAL))
def test_a_call_equals_the_dense_definition(name):
    case = CASES[name]
    call, (weights, lse, largest) = captured(case)
    near = {"rtol": 2e-5 * case.loose, "atol": 3e-6 * case.loose}
    assert (call.heads, call.rows, call.keys) == weights.shape
    np.testing.assert_allclose(call.lse, lse, **near)
    np.testing.assert_allclose(call.max_score, largest, **near)
    np.testing.assert_allclose(call.window(), weights, **near)
    assert call.output_error is not None
    assert call.output_error <= 2e-6 * case.loose
    if name in COUNTED:
        check_readout(call, weights, largest, case, near)


# Each compiles a sweep.
COUNTED = (
    "segments",
    "sinks",
    "one key head, many of values",
    "an offset for each",
    "no queries",
    "bfloat16",
)


def check_readout(call, weights, largest, case, near):
    readout = call.readout(grid=4, top_k=2)
    logs = np.log(np.where(weights > 0, weights, 1))
    entropy = -(weights * logs).sum(-1)
    if case.sinks is not None:
        rest = 1 - weights.sum(-1)
        entropy = np.where(largest == -np.inf, 0, entropy - rest * np.log(np.where(rest > 0, rest, 1)))
    np.testing.assert_allclose(readout.entropy, entropy, rtol=1e-4, atol=2e-5 * case.loose)
    np.testing.assert_allclose(readout.key_mass, weights.sum(-2), **near)
    np.testing.assert_allclose(readout.max_weight, weights.max(-1, initial=0), **near)
    positions_apart = (
        call.query_offset + np.arange(call.rows)[:, None] - call.key_offset - np.arange(call.keys)
    )
    first = (weights * (call.key_offset + np.arange(call.keys) < readout.first)).sum(-1)
    np.testing.assert_allclose(readout.first_mass, first, **near)
    own = (weights * (positions_apart == 0)).sum(-1)
    np.testing.assert_allclose(readout.self_mass, own, **near)
    assert np.all(np.asarray(readout.trust) <= 1e-5 * case.loose)


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        [
            "an array of heads",
            "lengths of heads",
            "alibi",
            "softcap",
            "relative",
            "a function",
            "sinks per example",
            "bias of heads",
            "grouped",
            "one key head, many of values",
            "heads alone",
        ],
        "an array of heads",
        "alibi",
        "sinks per example",
        "one key head, many of values",
    ),
)
def test_some_heads_alone_are_those_of_the_whole(name):
    call, (weights, _, _) = captured(CASES[name])
    near = {"rtol": 2e-5 * CASES[name].loose, "atol": 3e-6 * CASES[name].loose}
    rows = slice(0, call.rows, 2)
    part = call.window(rows=rows, columns=[2, 7], heads=[4])
    assert part.dtype == np.float32
    np.testing.assert_allclose(part, weights[[4]][:, rows][..., [2, 7]], **near)
    np.testing.assert_allclose(call.window(heads=[5, 1]), weights[[5, 1]], **near)
    if name in ("relative", "grouped"):
        some = call.readout(grid=4, heads=[5, 1])
        np.testing.assert_allclose(some.key_mass, weights[[5, 1]].sum(-2), **near)
        assert np.all(np.asarray(some.trust) < 1e-5)
        whole = call.readout(grid=4)
        again = call.readout(grid=4, heads=[5, 1])  # now taken out of all
        np.testing.assert_array_equal(again.key_mass, whole.key_mass[np.array([5, 1])])
        np.testing.assert_allclose(again.entropy, some.entropy, rtol=1e-5, atol=1e-6)


def test_readouts_are_counted_once_and_heads_are_checked():
    call, _ = captured(CASES["causal"])
    assert call.readout(grid=4) is call.readout(grid=4)
    assert call.readout(grid=4, heads=[1]) is not call.readout(grid=4)
    assert call.readout(grid=4, heads=slice(0, 0)).lse.shape == (0, T)
    assert call.window(heads=[], rows=slice(0, 3)).shape == (0, 3, S)
    with pytest.raises(ValueError, match=r"heads: expected heads in 0..5, got \[6\]"):
        call.window(heads=[6])
    with pytest.raises(ValueError, match=r"rows: expected indices in 0\.\.10"):
        call.window(rows=[11])


def test_places_are_integers():
    arrays, _ = inputs(CASES["heads alone"])
    with inspection.capture() as trace:
        attend(*arrays)
    call = trace[np.int64(0)]
    short = padded.PaddedCall.cut(call, 3, inspection.Tokens(3))
    for wrong in ([1.5], np.array([True, False, True]), ["a"]):
        for of, name in ((call, "heads"), (call, "rows"), (short, "columns")):
            with pytest.raises(TypeError, match=rf"^{name}: expected a slice or a list of integers, got"):
                of.window(**{name: wrong})
    with pytest.raises(TypeError, match=r"heads: expected a slice or a list of integers"):
        call.readout(heads=[1.5])


def test_trust_and_output_error_tell_of_another_computation(monkeypatch):
    arrays, options = inputs(CASES["causal"])
    run = captures.BACKENDS["dense"].run

    def wrong(problem):
        out, rows = run(problem)
        return out * 1.5, {**rows, "lse": rows["lse"] + 0.125} if "lse" in rows else rows

    monkeypatch.setattr(captures.BACKENDS["dense"], "run", wrong)
    with inspection.capture() as trace:
        out = attend(*arrays, backend="dense", **options)
    monkeypatch.undo()
    # The lse is that of the backend, and the readout is not made with it.
    np.testing.assert_allclose(trace.calls[0].readout().trust, 1 - np.exp(-0.125), rtol=1e-5)
    monkeypatch.setattr(captures.BACKENDS["dense"], "run", lambda p: (out * 2, {}) if not p.aux else run(p))
    with inspection.capture() as trace:
        attend(*arrays, backend="dense", **options)
    assert trace.calls[0].output_error > 0.1


def test_nan_that_nobody_may_attend_to_stays_out():
    (query, key, value), options = inputs(CASES["lengths"])
    with inspection.capture(example=1) as trace:
        attend(query, key.at[1, :, 4:].set(jnp.nan), value.at[1, :, 4:].set(jnp.nan), **options)
    call = trace.calls[0]
    assert call.output_error == 0
    assert np.isfinite(call.window()).all()
    assert np.isfinite(call.lse).all()
    with inspection.capture(example=1) as trace:
        attend(query, key.at[1, :, 2].set(jnp.nan), value, **options)
    assert np.isnan(trace.calls[0].lse).all()
    assert trace.calls[0].output_error == 0


def test_dropout_is_left_out():
    (query, key, value), _ = inputs(CASES["plain"])
    with inspection.capture() as trace:
        attend(query, key, value, dropout_rate=0.5, rng=jax.random.key(3))
    with inspection.capture() as plain:
        attend(query, key, value)
    call = trace.calls[0]
    assert call.output_error is None
    assert call.describe()["dropout_rate"] == 0.5
    np.testing.assert_array_equal(call.window(), plain.calls[0].window())


# What runs.


CONFIG = TransformerConfig(d_model=12, num_heads=3, d_ff=11, num_layers=2, vocab_size=13)
X = jnp.array([[1, 2, 3, 4, 5], [3, 4, 5, 6, 7]])


@functools.cache
def build(kind, **changes):
    """One model for all tests that ask alike."""
    model = kind(replace(CONFIG, **changes), rngs=nnx.Rngs(0))
    model.eval()
    return model


def test_watching_changes_neither_bits_nor_the_program():
    model = build(Decoder)
    out, trace = inspection.record(model, X)
    assert np.array_equal(out, model(X))
    assert [call.backend if hasattr(call, "backend") else call.describe()["backend"] for call in trace]
    graph, state = nnx.split(model)

    def program():
        # A new function each time: JAX would not call the same one again.
        return str(jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x))(state, X))

    plain, seen = program(), []
    with hooks.watch(seen.append):
        assert program() == plain
    assert len(seen) == 2


def test_only_the_block_is_watched_and_only_by_this_thread():
    seen = []
    with hooks.watch(seen.append), hooks.watch(seen.append):
        attend(X[:1].astype(jnp.float32), *[jnp.ones((5, 5))] * 2)
    attend(jnp.ones((5, 5)), *[jnp.ones((5, 5))] * 2)
    assert len(seen) == 2
    assert seen[0].owner is None
    with pytest.raises(ZeroDivisionError), hooks.watch(seen.append):
        raise ZeroDivisionError
    attend(jnp.ones((5, 5)), *[jnp.ones((5, 5))] * 2)
    assert len(seen) == 2
    with hooks.called_by("nobody watches"):
        assert hooks._OWNER.get() == (None, None, None)
    with hooks.watch(seen.append), hooks.called_by("outer"), hooks.called_by("inner", "cross"):
        attend(jnp.ones((5, 5)), *[jnp.ones((5, 5))] * 2)
    assert seen[-1].owner == "inner"
    assert seen[-1].kind == "cross"
    with hooks.watch(seen.append):
        with pytest.raises(ZeroDivisionError), hooks.called_by("broken"):
            raise ZeroDivisionError
        attend(jnp.ones((5, 5)), *[jnp.ones((5, 5))] * 2)
    assert seen[-1].owner is None


def test_inside_jit_there_is_nothing_to_keep_and_nothing_leaks():
    model = build(Decoder)
    jitted = nnx.jit(lambda model, x: model(x))
    message = "got 2 inside a trace, where arrays have none; call the model"
    with jax.check_tracer_leaks(), pytest.raises(ValueError, match=message):
        inspection.record(jitted, model, X)
    with pytest.raises(
        ValueError, match=r"expected at least one call of regard\.attend in the block, got none"
    ):
        inspection.record(jitted, model, X)  # compiled before
    gradient = jax.grad(lambda x: attend(x, x, x).sum())
    with pytest.raises(ValueError, match="got 1 inside a trace"):
        inspection.record(lambda x: (model(X), gradient(x)), jnp.ones((3, 2)))
    with pytest.raises(ValueError, match="got 1 inside a trace"), inspection.capture():
        jax.jit(lambda: attend(*[jnp.ones((3, 2))] * 3))()  # no argument is traced, but the output is


def test_an_error_in_the_block_is_the_one_that_is_raised():
    with pytest.raises(ZeroDivisionError), inspection.capture():
        raise ZeroDivisionError
    with pytest.raises(ValueError, match=r"example: expected one of the 2 of the call, 0..1; got 2"):
        inspection.record(build(Decoder), X, example=2)
    with pytest.raises(ValueError, match="example: expected an integer of at least 0, got -1"):
        inspection.record(build(Decoder), X, example=-1)


# Names.


@pytest.mark.slow
def test_calls_of_an_encoder_decoder_have_names_kinds_and_numbers():
    model = build(EncoderDecoder)
    words = {"encoder": list("abcde"), "decoder": ["x", "y", "z"]}
    _, trace = inspection.record(model, X, X[:, :3], tokens=words)
    assert [(call.name, call.kind, call.layer) for call in trace] == [
        ("encoder.stack.blocks.0.attention", "self", 0),
        ("encoder.stack.blocks.1.attention", "self", 1),
        ("decoder.blocks.0.self_attention", "self", 0),
        ("decoder.blocks.0.cross_attention", "cross", 0),
        ("decoder.blocks.1.self_attention", "self", 1),
        ("decoder.blocks.1.cross_attention", "cross", 1),
    ]
    texts = [("".join(call.query_tokens.texts), "".join(call.key_tokens.texts)) for call in trace]
    assert texts == [("abcde", "abcde")] * 2 + [("xyz", "xyz"), ("xyz", "abcde")] * 2
    assert [call.positions is None for call in trace] == [False, False, False, True, False, True]
    assert trace["decoder.blocks.0.cross_attention"] is trace[3]
    with pytest.raises(KeyError, match=r"expected one of encoder\.stack\.blocks\.0\.attention"):
        trace["nothing"]
    _, by_length = inspection.record(model, X, X[:, :3], tokens={5: list("abcde"), 3: ["x", "y", "z"]})
    assert ["".join(call.key_tokens.texts) for call in by_length] == [key for _, key in texts]


def test_every_other_model_is_recorded():
    model = build(Encoder, num_layers=1)
    _, trace = inspection.record(model, X, lengths=jnp.array([5, 3]), example=1)
    assert [call.name for call in trace] == ["stack.blocks.0.attention"]
    assert np.all(trace.calls[0].window()[..., 3:] == 0)
    assert trace.model == "Encoder"
    classifier = Classifier(model.config, num_classes=7, rngs=nnx.Rngs(0))
    _, trace = inspection.record(classifier, X)
    assert [call.name for call in trace] == ["encoder.stack.blocks.0.attention"]
    layer = MultiHeadAttention(12, 3, rotary=positions.Rotary(), rngs=nnx.Rngs(0))
    x = jnp.ones((5, 12))
    _, trace = inspection.record(layer, x)
    assert trace.calls[0].name == "MultiHeadAttention"
    assert trace.calls[0].positions.rotary == positions.Rotary()
    plain = MultiHeadAttention(12, 3, rngs=nnx.Rngs(0))
    _, trace = inspection.record(plain, x, jnp.ones((5, 12)))
    assert trace.calls[0].kind == "cross"
    assert trace.calls[0].positions is None
    _, trace = inspection.record(plain, x, x)
    assert trace.calls[0].kind == "self"


def test_of_a_latent_layer_the_features_that_are_turned_are_known():
    layer = LatentAttention(12, 3, latent_dim=7, head_dim=5, rotary_dim=4, rngs=nnx.Rngs(0))
    _, trace = inspection.record(layer, jnp.ones((1, 3, 12)))
    assert trace[0].positions.rotary == positions.Rotary(width=4, interleaved=True)
    (curve,) = collect([trace]).document["positions"]
    assert curve["frequencies"] == pytest.approx([1.0, 0.01])


def test_layers_outside_of_the_model_are_numbered():
    layer = MultiHeadAttention(12, 3, rngs=nnx.Rngs(0))
    with inspection.capture(build(Decoder), title="mine") as trace:
        layer(jnp.ones((1, 5, 12)))
        attend(jnp.ones((3, 2)), jnp.ones((7, 2)), jnp.ones((7, 2)))
    assert [(call.name, call.kind) for call in trace] == [("attention 0", "self"), ("attention 1", "cross")]
    assert repr(trace) == "Trace('mine': 2 calls, 4 heads, 3 to 7 positions)"


def test_layers_take_the_number_in_their_name_or_else_their_place():
    names = ["encoder.0.block.3.a_0", "encoder.0.block.11.a_0", "x", "y.7", "x"]
    assert owners.number_layers(names) == [3, 11, 2, 7, 2]
    assert owners.number_layers([]) == []


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.MultiHeadDotProductAttention(3, attention_fn=attention_fn, name="attention")(x)
        return attend(x, x, x)


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        for number in range(2):
            x = LinenBlock(name=f"block_{number}")(x)
        return x


def test_linen_modules_have_their_paths():
    model, x = LinenModel(), jnp.ones((2, 5, 6))
    variables = model.init(jax.random.key(0), x)
    out, trace = inspection.record(model, variables, x)
    assert np.array_equal(out, model.apply(variables, x))
    assert [(call.name, call.layer, call.heads) for call in trace] == [
        ("block_0.attention", 0, 3),
        ("block_0", 0, 2),
        ("block_1.attention", 1, 3),
        ("block_1", 1, 2),
    ]


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("sow", [False, True])
def test_nnx_modules_of_flax_are_recorded(sow):
    class Model(nnx.Module):
        def __init__(self):
            settings = {"num_heads": 3, "in_features": 6, "decode": False, "attention_fn": attention_fn}
            self.inner = nnx.MultiHeadAttention(**settings, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.inner(x, mask=nnx.make_causal_mask(x[..., 0]), sow_weights=sow)

    model, x = Model(), jax.random.normal(jax.random.key(1), (2, 5, 6))
    _, trace = inspection.record(model, x)
    call = trace.calls[0]
    # Flax hands its module over where weights are sown alone.
    assert (call.name, call.heads) == ("inner" if sow else "attention 0", 3)
    assert np.all(np.triu(call.window()[0], 1) == 0)
    if sow:
        sown = model.inner.attention_weights.get_value()[0]
        np.testing.assert_allclose(call.window(), np.asarray(sown[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_decoding_keeps_each_call_at_its_place():
    model = build(Decoder, positions="rotary", num_key_heads=1, num_layers=1)
    words = list("abcde")
    _, whole = inspection.record(model, X, example=1)
    with inspection.capture(model, tokens=words, example=1) as trace:
        cache = model.start_cache(batch=2, capacity=7)
        _, cache = model.read(X[:, :3], cache)
        _, cache = model.read(X[:, 3:4], cache)
        _, cache = model.read(X[:, 4:], cache)
    assert [call.query_offset for call in trace] == [0, 3, 4]
    assert [call.layer for call in trace] == [0] * 3
    assert [call.kind for call in trace] == ["self"] * 3
    assert trace[1].query_tokens.texts == ("d",)
    assert trace[1].key_tokens.texts == (*words, "", "")
    rows = np.concatenate([call.window()[..., :5] for call in trace], 1)
    np.testing.assert_allclose(rows, whole[0].window(), rtol=1e-4, atol=1e-5)


def test_a_ring_buffer_places_its_keys():
    model = build(Decoder, windows=(2,), positions="rotary", num_layers=1)
    x = jnp.concatenate([X, X], 1)[:, :9]
    _, whole = inspection.record(model, x)
    with inspection.capture(model) as trace:
        cache = model.start_cache(batch=2, capacity=9, chunk=1)
        for t in range(9):
            _, cache = model.read(x[:, t : t + 1], cache)
    last = trace.calls[-1]
    assert last.keys < 9
    assert last.query_offset == 8
    held = np.asarray(last.window())[:, 0]
    expected = whole.calls[0].window()[:, 8]
    for slot in range(last.keys):
        place = last.key_offset + slot
        if place < 9:
            np.testing.assert_allclose(held[:, slot], expected[:, place], rtol=1e-4, atol=1e-5)
    assert abs(held.sum(-1) - 1).max() < 1e-5


# Tokens.


def test_tokens_serve_statistics_and_are_checked():
    words = ["a", "b", "a", "c", "b"]
    (query, key, value), _ = inputs(Case(query=(1, 1, 5, D), key=(1, 1, 5, D), value=(1, 1, 5, E)))
    with inspection.capture(tokens=words) as trace:
        attend(query, key, value, mask=masks.causal())
    call = trace.calls[0]
    weights, readout = call.window()[0], call.readout()
    same = [sum(weights[t, s] for s in range(5) if s != t and words[s] == words[t]) for t in range(5)]
    follows = [sum(weights[t, s] for s in range(1, 5) if words[s - 1] == words[t]) for t in range(5)]
    np.testing.assert_allclose(readout.duplicate_mass[0], same, atol=1e-6)
    np.testing.assert_allclose(readout.induction_mass[0], follows, atol=1e-6)
    with inspection.capture(tokens=["a", ".", "Ġb", "▁,", "[SEP]"]) as trace:
        attend(query, key, value, mask=masks.causal())
    weights, readout = trace.calls[0].window()[0], trace.calls[0].readout()
    np.testing.assert_allclose(readout.delimiter_mass[0], weights[:, [1, 3, 4]].sum(-1), atol=1e-6)
    with inspection.capture(tokens=inspection.Tokens(words, ids=[0, 1, 2, 3, 4])) as trace:
        attend(query, key, value, mask=masks.causal())
    np.testing.assert_allclose(trace.calls[0].readout().duplicate_mass, 0)
    with inspection.capture(tokens=inspection.Tokens(5)) as trace:
        attend(query, key, value, mask=masks.causal())
    assert trace.calls[0].readout().duplicate_mass is None
    with (
        pytest.raises(
            ValueError, match="tokens: expected one per position of some call, whose lengths are 5"
        ),
        inspection.capture(tokens=words[:4]),
    ):
        attend(query, key, value)
    with pytest.raises(
        TypeError, match="tokens: expected a list of strings, one per position, got the string"
    ):
        inspection.capture(tokens="abcde").__enter__()
    with pytest.raises(TypeError, match="title: expected a string, got int"):
        inspection.capture(title=3).__enter__()
    with pytest.raises(TypeError, match=r"lengths or the beginnings of layers' names, got 1\.5"):
        inspection.capture(tokens={1.5: words}).__enter__()
    with pytest.raises(ValueError, match=r"tokens\[4\]: expected 4 tokens, got 5"):
        inspection.capture(tokens={4: words}).__enter__()


def test_queries_and_keys_count_the_same_tokens():
    """The last query of a cache reads keys whose texts are numbered as its own is."""
    words = ["a", "b", "c", "b", "c"]
    (query, key, value), _ = inputs(Case(query=(1, 1, 1, D), key=(1, 1, 5, D), value=(1, 1, 5, E)))
    with inspection.capture(tokens=words) as trace:
        attend(query, key, value, mask=masks.causal(), query_offset=4)
    (call,) = trace
    weights, readout = call.window()[0, 0], call.readout()
    np.testing.assert_allclose(readout.duplicate_mass[0], weights[2], atol=1e-6)
    np.testing.assert_allclose(readout.induction_mass[0], weights[3], atol=1e-6)
    # Ids of one side alone say nothing of the other side's; texts of both do.
    for asked in (inspection.Tokens(["c"]), inspection.Tokens(["c"], ids=[0])):
        readout = replace(call, query_tokens=asked, _found={}).readout()
        np.testing.assert_allclose(readout.duplicate_mass[0], weights[2], atol=1e-6)


def test_tokens_refuse_what_does_not_fit():
    make = inspection.Tokens
    for arguments, error, message in [
        ((["a", 3],), TypeError, "texts: expected a list of strings"),
        ((["a"], {"ids": [1.5]}), TypeError, "ids: expected integers"),
        ((["a"], {"ids": [1, 2]}), ValueError, r"ids: expected one per token, shape \(1,\)"),
        ((["a"], {"ids": [2**40]}), ValueError, "ids: expected numbers that fit int32"),
        ((["a"], {"spans": [1]}), ValueError, r"spans: expected shape \(1, 2\)"),
        ((["a"], {"kind": "word"}), ValueError, "kind: expected one of text, patches, index"),
        ((["a"], {"patch_grid": (2, 2)}), ValueError, "patch_grid: expected 2 x 2 patches"),
        ((["a"], {"patch_grid": (0, 2)}), ValueError, "patch_grid: expected rows and columns"),
        ((["a"], {"first_patch": -1}), ValueError, "first_patch"),
        ((-3, {}), ValueError, "texts: expected an integer of at least 0, got -3"),
        ((["a"], {"ids": [[1], [1, 2]]}), TypeError, "ids: expected integers, got list .*of one length"),
        ((["a"], {"picture": np.zeros((2, 2, 4))}), ValueError, "picture: expected shape"),
        ((["a"], {"picture": np.zeros((2, 2), int)}), TypeError, "picture: expected uint8"),
    ]:
        texts, *more = arguments
        with pytest.raises(error, match=message):
            make(texts, **(more[0] if more else {}))
    patches = make(5, patch_grid=(2, 2), first_patch=1, picture=np.zeros((4, 4)))
    assert patches.kind == "patches"
    assert len(patches) == 5
    assert patches.texts[4] == "4"
    assert tokens.number_tokens(patches.part(3, 2), patches.part(0, 4)) is None
    part = make(list("abc"), ids=[4, 5, 6], spans=[[0, 1], [1, 2], [2, 3]]).part(2, 3)
    assert part.texts == ("c", "", "")
    assert part.ids.tolist() == [6, -1, -1]
    assert part.spans.tolist() == [[2, 3], [0, 0], [0, 0]]
    assert make([], ids=[]).part(0, 2).ids.tolist() == [-1, -1]
    assert repr(make([])) == "Tokens(0 text)"
    kept = [make(["a"])]
    assert [tokens.number_sequence(kept, one) for one in (make(["a"]), make(["a"], ids=[1]), None)] == [
        0,
        1,
        None,
    ]


def test_heads_with_places_of_their_own_have_no_example():
    arrays, _ = inputs(CASES["heads alone"])
    with inspection.capture() as trace:
        attend(*arrays, mask=masks.causal(), query_offset=np.full(H, 3))
    assert trace.calls[0].query_offset == 3
    with pytest.raises(ValueError, match="expected one position for all heads"), inspection.capture():
        attend(*arrays, mask=masks.causal(), query_offset=np.arange(H))


def test_functions_of_some_heads_compile_once():
    arrays, _ = inputs(CASES["heads alone"])
    with inspection.capture() as trace:
        attend(*arrays, score=scores.modifier(by_batch))
    found = [slices.take_heads(trace.calls[0].problem, heads).score for heads in ([1, 4], [0, 2])]
    assert jax.tree.structure(found[0]) == jax.tree.structure(found[1])
    assert repr(found[0]) == "[modifier(by_batch)]"


@pytest.mark.slow
def test_heads_are_measured_on_tokens_that_repeat():
    def model(ids):
        """One head that reads the key after the last time that its token was there."""
        place = np.arange(ids.shape[1])
        follows = place - place[:, None] == 10
        query = jnp.asarray(np.eye(22), jnp.float32)[None, None]
        key = 30 * jnp.asarray(follows, jnp.float32)[None, None]
        return attend(query, key, query, mask=masks.causal())

    trace = inspection.record_repeats(model, 1000, length=11, rng=3)
    call = trace.calls[0]
    ids = call.key_tokens.ids
    assert trace.title == "11 random tokens, 2 times"
    assert call.rows == 22
    np.testing.assert_array_equal(ids[:11], ids[11:])
    assert len(set(ids.tolist())) == 11
    assert ids.max() < 1000
    (one,) = readouts.label(call.readout())[(0,)]
    assert one.name == "induction"
    assert one.rows == 11
    with pytest.raises(ValueError, match="length: expected an integer of at least 1, got 0"):
        inspection.record_repeats(model, 5, length=0)
