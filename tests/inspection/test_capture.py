"""Capture: what was watched equals the dense definition, nothing that runs changes, and names are right."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from refusals import assert_refused
from regard import attend, inspection, masks, positions, readouts, scores
from regard.engine.call import hooks
from regard.inspection import tokens
from regard.inspection.traces import captures, owners, padded
from regard.interop.flax import attention_fn
from regard.layers import LatentAttention, MultiHeadAttention
from regard.models import Encoder, EncoderDecoder
from small_models import X, build

B, H, T, S, D, E = 2, 6, 11, 11, 5, 3
SLOPES = np.array([0.5, 0.0, 0.25, 1.0, 0.125, 2.0], np.float32)
CAPS = np.array([1.5, 2.0, 3.0, 0.5, 1.0, 4.0], np.float32)
HEAT = np.array([0.5, 1, 2, 0.25, 1, 3], np.float32)
IDS = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [5, 5, 7, 7, 7, 5, 5, 9, 9, 9, 9]])
OF_HEADS = np.random.default_rng(2).random((H, T, S)) < 0.7
LENGTHS = np.array([[1, 2, 3, 4, 5, 6], [11, 9, 0, 3, 7, 5]])


def by_batch(score, batch, head, query, key):
    return score + 0.5 * batch.astype(score.dtype) - 0.25 * (head * abs(query - key)).astype(score.dtype)


@dataclass(frozen=True)
class Case:
    """One call, and what its mask and score do in NumPy, of positions, batch and head."""

    keep: Any = lambda q, k, b, h: True  # may attend
    change: Any = lambda s, d, b, h: s  # scores, of distances
    shapes: tuple = ((B, H, T, D), (B, H, S, D), (B, H, S, E))
    drawn: dict = field(default_factory=dict)  # shapes of bias and sinks
    options: dict = field(default_factory=dict)  # of `attend`
    example: int = 1


# Masks, scores, and each number that may differ by example or head.
CASES = {
    "packed, grouped, capped": Case(
        lambda q, k, b, h: (IDS[b, q] == IDS[b, k]) & (k <= q),
        lambda s, d, b, h: np.tanh(s / CAPS[h]) * CAPS[h] / HEAT[h],
        ((B, H, T, D), (B, 2, S, D), (B, 2, S, E)),
        {"bias": (H, T, S), "sinks": (B, H)},
        {"mask": masks.segments(IDS) & masks.causal()}
        | {"score": [scores.softcap(CAPS), scores.temperature(HEAT)]},
    ),
    "an offset for each": Case(
        lambda q, k, b, h: k <= q,
        lambda s, d, b, h: s - SLOPES[h] * abs(d),
        ((B, H, T, D), (B, H, 17, D), (B, H, 17, E)),
        options={"mask": masks.causal(), "score": scores.alibi(slopes=SLOPES)}
        | {"query_offset": np.array([6, 2]), "key_offset": np.array([0, 1])},
    ),
    "masks of heads with empty rows": Case(
        lambda q, k, b, h: OF_HEADS & (k < LENGTHS[b, h]),
        lambda s, d, b, h: s + 0.5 * b - 0.25 * h * abs(d),
        ((B, H, T, D), (H, S, D), (H, S, E)),
        {"bias": (B, H, T, S)},
        {"mask": masks.from_array(OF_HEADS) & masks.lengths(LENGTHS)}
        | {"score": scores.modifier(by_batch), "scale": 0.75},
    ),
    "two batch axes, keys with one": Case(
        lambda q, k, b, h: k <= q,
        shapes=((2, 3, H, T, D), (3, 1, S, D), (3, 2, S, E)),
        options={"mask": masks.causal()},
        example=5,
    ),
}


def inputs(case=Case()):
    rng = np.random.default_rng(5)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape).astype(np.float32))
    arrays = [draw(shape) for shape in case.shapes]
    return arrays, case.options | {name: draw(shape) for name, shape in case.drawn.items()}


def truth(case, arrays, options):
    """Weights (H, T, S), lse and largest scores (H, T) of the example, in float64."""
    query, key = (np.asarray(x, np.float64) for x in arrays[:2])
    key = np.repeat(key, query.shape[-3] // key.shape[-3], -3)
    s = query @ key.swapaxes(-1, -2) * options.get("scale", query.shape[-1] ** -0.5)
    first = [-1] + [1] * (s.ndim - 1)
    b, h = np.arange(s.shape[0] if s.ndim > 3 else 1).reshape(first), np.arange(s.shape[-3])[:, None, None]
    q = np.reshape(options.get("query_offset", 0), first) + np.arange(s.shape[-2])[:, None]
    k = np.reshape(options.get("key_offset", 0), first) + np.arange(s.shape[-1])
    s = case.change(s, k - q, b, h) + np.asarray(options.get("bias", 0), np.float64)
    s = np.where(case.keep(q, k, b, h), s, -np.inf)
    total = np.exp(s).sum(-1)
    if "sinks" in options:
        total = total + np.exp(np.asarray(options["sinks"], np.float64))[..., None]
    with np.errstate(divide="ignore"):
        found = np.exp(s) / np.where(total > 0, total, 1)[..., None], np.log(total), s.max(-1)
    return [x.reshape(-1, *x.shape[s.ndim - 3 :])[case.example] for x in found]


def watch(*arrays, example=0, **options):
    with inspection.capture(example=example) as trace:
        out = attend(*arrays, **options)
    return trace[0], out


@pytest.mark.parametrize("name", CASES)
def test_a_call_equals_the_dense_definition(name):
    case = CASES[name]
    arrays, options = inputs(case)
    call, out = watch(*arrays, example=case.example, **options)
    assert np.array_equal(out, attend(*arrays, **options), equal_nan=True)
    weights, lse, largest = truth(case, arrays, options)
    near = {"rtol": 2e-5, "atol": 3e-6}
    assert (call.heads, call.rows, call.keys) == weights.shape
    np.testing.assert_allclose(call.lse, lse, **near)
    np.testing.assert_allclose(call.max_score, largest, **near)
    np.testing.assert_allclose(call.window(), weights, **near)
    assert 0 <= call.output_error <= 2e-6
    part = call.window(rows=slice(0, call.rows, 2), columns=[2, 7], heads=[5, 1])
    assert part.dtype == np.float32
    np.testing.assert_allclose(part, weights[[5, 1], ::2][..., [2, 7]], **near)
    if {"sinks", "query_offset"} & {*options}:
        readout = call.readout(grid=4, top_k=2)  # compiles a sweep
        np.testing.assert_allclose(readout.key_mass, weights.sum(-2), **near)
        at = call.key_offset + np.arange(call.keys)
        own = weights * (call.query_offset + np.arange(call.rows)[:, None] == at)
        np.testing.assert_allclose(readout.self_mass, own.sum(-1), **near)
        assert np.all(np.asarray(readout.trust) <= 1e-5)


def test_readouts_are_counted_once_and_heads_are_checked():
    arrays, options = inputs(CASES["packed, grouped, capped"])
    call, _ = watch(*arrays, example=1, **options)
    some, whole = call.readout(grid=4, top_k=2, heads=[5, 1]), call.readout(grid=4, top_k=2)
    assert call.readout(grid=4, top_k=2) is whole
    again = call.readout(grid=4, top_k=2, heads=[5, 1])  # now taken out of all
    np.testing.assert_array_equal(again.key_mass, whole.key_mass[np.array([5, 1])])
    np.testing.assert_allclose(again.entropy, some.entropy, rtol=1e-5, atol=1e-6)
    assert call.readout(grid=4, top_k=2, heads=slice(0, 0)).lse.shape == (0, T)  # the same
    assert call.window(heads=[], rows=slice(0, 3)).shape == (0, 3, S)
    assert watch(*[np.ones((1, 3, 2), np.float32)] * 3)[0].window(heads=[0, 0]).shape == (2, 3, 3)
    short = padded.PaddedCall.cut(call, 3, inspection.Tokens(3))
    no_index = "expected a slice or a list of integers, got"
    assert_refused(
        (lambda: call.window(heads=[6]), r"heads: expected indices in 0\.\.5"),
        (lambda: call.window(rows=[11]), r"rows: .* in 0\.\.10"),
        (lambda: short.permit([3], [0]), r"rows: .* in 0\.\.2, got \[3\]"),
        (lambda: call.permit([11], [0]), r"rows: .* in 0\.\.10"),
        (lambda: call.window(heads=["a"]), f"^heads: {no_index}", TypeError),
        (lambda: call.window(rows=np.ones(11, bool)), f"^rows: {no_index}", TypeError),
        (lambda: short.window(columns=[1.5]), f"^columns: {no_index}", TypeError),
        (lambda: call.readout(heads=[1.5]), f"^heads: {no_index}", TypeError),
    )


def test_trust_and_output_error_tell_of_another_computation(monkeypatch):
    arrays, _ = inputs()
    run = captures.BACKENDS["dense"].run

    def wrong(problem):
        out, rows = run(problem)
        return out * 1.5, {**rows, "lse": rows["lse"] + 0.125} if "lse" in rows else rows

    monkeypatch.setattr(captures.BACKENDS["dense"], "run", wrong)
    call, out = watch(*arrays, backend="dense")
    monkeypatch.undo()
    # The lse is that of the backend, and the readout is not made with it.
    np.testing.assert_allclose(call.readout(grid=4).trust, 1 - np.exp(-0.125), rtol=1e-5)
    monkeypatch.setattr(captures.BACKENDS["dense"], "run", lambda p: (out * 2, {}) if not p.aux else run(p))
    assert watch(*arrays, backend="dense")[0].output_error > 0.1
    monkeypatch.undo()
    # Dropout is left out.
    dropped, _ = watch(*arrays, dropout_rate=0.5, rng=jax.random.key(3))
    assert (dropped.output_error, dropped.describe()["dropout_rate"]) == (None, 0.5)
    np.testing.assert_array_equal(dropped.window(), watch(*arrays)[0].window())


def test_nan_that_nobody_may_attend_to_stays_out():
    query, key, value = (np.array(x) for x in inputs()[0])
    nan_at = lambda array, keys: np.where(np.isin(np.arange(S), keys)[:, None], np.float32(np.nan), array)
    later, mask = range(4, S), masks.lengths([11, 4])
    call, _ = watch(query, nan_at(key, later), nan_at(value, later), mask=mask, example=1)
    assert call.output_error == 0
    assert np.isfinite([call.window().sum(), np.sum(call.lse)]).all()
    call, _ = watch(query, nan_at(key, [2]), value, mask=mask, example=1)
    assert np.isnan(call.lse).all()
    assert call.output_error == 0


def test_watching_does_not_change_the_program():
    graph, state = nnx.split(build(num_layers=1))
    # A new function each time: JAX would not call the same one again.
    program = lambda: str(jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x))(state, X))
    plain = program()
    with hooks.watch(lambda call: None):
        assert program() == plain


def test_only_the_block_is_watched_and_only_by_this_thread():
    seen, x = [], jnp.ones((5, 5))
    with hooks.watch(seen.append), hooks.watch(seen.append):
        attend(x, x, x)
    attend(x, x, x)
    assert len(seen) == 2
    assert seen[0].owner is None
    with hooks.watch(seen.append), hooks.called_by("outer"), hooks.called_by("inner", "cross"):
        attend(x, x, x)
    assert (seen[-1].owner, seen[-1].kind) == ("inner", "cross")
    with hooks.watch(seen.append):
        with pytest.raises(ZeroDivisionError), hooks.called_by("broken"):
            raise ZeroDivisionError
        attend(x, x, x)
    assert seen[-1].owner is None


def test_inside_jit_there_is_nothing_to_keep_and_nothing_leaks():
    model = build()
    jitted = nnx.jit(lambda model, x: model(x))
    record, x = inspection.record, jnp.ones((3, 2))
    message = "got 2 inside a trace, where arrays have none; call the model"
    with jax.check_tracer_leaks(), pytest.raises(ValueError, match=message):
        record(jitted, model, X)
    gradient = jax.grad(lambda x: attend(x, x, x).sum())
    untraced = jax.jit(lambda: attend(x, x, x))  # no argument is traced, but the output is
    assert_refused(
        (lambda: record(jitted, model, X), "at least one call .* got none"),  # compiled before
        (lambda: record(lambda: (model(X), gradient(x))), "got 1 inside a trace"),
        (lambda: record(untraced), "got 1 inside a trace"),
        (lambda: record(lambda: 1 / 0), "division by zero", ZeroDivisionError),
        (lambda: record(model, X, example=2), r"example: expected one of the 2 of the call, 0..1; got 2"),
        (lambda: record(model, X, example=-1), "example: expected .* at least 0, got -1"),
    )


def test_calls_of_an_encoder_decoder_have_names_kinds_and_numbers():
    model = build(EncoderDecoder)
    words = {"encoder": list("abcde"), "decoder": ["x", "y", "z"]}
    _, trace = inspection.record(model, X, X[:, :3], tokens=words)
    assert [(call.name, call.kind, call.layer) for call in trace] == [
        ("encoder.stack.blocks.0.attention", "self", 0), ("encoder.stack.blocks.1.attention", "self", 1),
        ("decoder.blocks.0.self_attention", "self", 0), ("decoder.blocks.0.cross_attention", "cross", 0),
        ("decoder.blocks.1.self_attention", "self", 1), ("decoder.blocks.1.cross_attention", "cross", 1),
    ]  # fmt: skip
    texts = [("".join(call.query_tokens.texts), "".join(call.key_tokens.texts)) for call in trace]
    assert texts == [("abcde", "abcde")] * 2 + [("xyz", "xyz"), ("xyz", "abcde")] * 2
    assert [call.positions is None for call in trace] == [False, False, False, True, False, True]
    assert trace["decoder.blocks.0.cross_attention"] is trace[3]
    with pytest.raises(KeyError, match=r"expected one of encoder\.stack\.blocks\.0\.attention"):
        trace["nothing"]


def test_every_other_model_is_recorded():
    model = build(Encoder, num_layers=1)
    _, trace = inspection.record(model, X, lengths=jnp.array([5, 3]), example=1)
    assert [call.name for call in trace] == ["stack.blocks.0.attention"]
    assert np.all(trace[0].window()[..., 3:] == 0)
    _, alone = inspection.record(model, X[1:, :3])
    averages = [readouts.average(call.readout())["entropy"] for call in (trace[0], alone[0])]
    np.testing.assert_allclose(*averages, rtol=1e-5, err_msg="queries of padding count for nothing")
    assert trace.model == "Encoder"
    x = np.ones((2, 5, 12), np.float32)
    layer = MultiHeadAttention(12, 3, rotary=positions.Rotary(), rngs=nnx.Rngs(0))
    _, (call,) = inspection.record(layer, x)
    assert (call.name, call.positions.rotary) == ("MultiHeadAttention", positions.Rotary())
    plain = MultiHeadAttention(12, 3, rngs=nnx.Rngs(0))
    (other,), (own,) = (inspection.record(plain, x, key)[1] for key in (x.copy(), x))
    assert (other.kind, other.positions, own.kind) == ("cross", None, "self")
    # Layers outside of the model are numbered.
    with inspection.capture(model, title="mine") as trace:
        plain(x)
        attend(jnp.ones((3, 2)), jnp.ones((7, 2)), jnp.ones((7, 2)))
    assert [(call.name, call.kind) for call in trace] == [("attention 0", "self"), ("attention 1", "cross")]
    assert repr(trace) == "Trace('mine': 2 calls, 4 heads, 3 to 7 positions)"
    names = ["encoder.0.block.3.a_0", "encoder.0.block.11.a_0", "x", "y.7", "x", "z20250101120000"]
    assert owners.number_layers(names) == [3, 11, 2, 7, 2, 4], "by name, or else by place"
    # Of a latent layer, the features that are turned are known.
    layer = LatentAttention(12, 3, latent_dim=7, head_dim=5, rotary_dim=4, rngs=nnx.Rngs(0))
    _, (call,) = inspection.record(layer, x)
    assert call.positions.rotary == positions.Rotary(width=4, interleaved=True)


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.MultiHeadDotProductAttention(3, attention_fn=attention_fn, name="attention")(x)
        return attend(x, x, x)


def test_linen_modules_have_their_paths():
    model, x = linen.Sequential([LinenBlock(), LinenBlock()]), jnp.ones((2, 5, 6))
    variables = model.init(jax.random.key(0), x)
    out, trace = inspection.record(model, variables, x)
    assert np.array_equal(out, model.apply(variables, x))
    found = [(call.name, call.layer, call.heads) for call in trace]
    assert found[:2] == [("layers_0.attention", 0, 3), ("layers_0", 0, 2)]
    assert found[2:] == [("layers_1.attention", 1, 3), ("layers_1", 1, 2)]


def test_a_ring_buffer_places_its_keys():
    model = build(windows=(2,), positions="rotary", num_layers=1, num_key_heads=1)
    _, whole = inspection.record(model, X, example=1)
    with inspection.capture(model, tokens=list("abcde"), example=1) as trace:
        cache = model.start_cache(batch=2, capacity=5, chunk=1)
        for t in range(5):
            _, cache = model.read(X[:, t : t + 1], cache)
    expected = np.pad(whole[0].window(), ((0, 0), (0, 0), (0, 5)))
    for t, call in enumerate(trace):
        assert (call.query_offset, call.layer, call.kind) == (t, 0, "self")
        assert call.query_tokens.texts == ("abcde"[t],)
        assert call.keys < 5
        held = np.zeros((3, 10))
        held[:, call.key_offset : call.key_offset + call.keys] = call.window()[:, 0]
        np.testing.assert_allclose(held, expected[:, t], rtol=1e-4, atol=1e-5)


def test_tokens_serve_statistics_and_are_checked():
    words = ["a", "b", "a", "c", "b"]
    (query, key, value), _ = inputs(Case(shapes=((1, 1, 5, D), (1, 1, 5, D), (1, 1, 5, E))))

    def watch_tokens(tokens):
        with inspection.capture(tokens=tokens) as trace:
            attend(query, key, value, mask=masks.causal())
        return trace[0].window()[0], trace[0].readout()

    weights, readout = watch_tokens(words)
    same = [sum(weights[t, s] for s in range(5) if s != t and words[s] == words[t]) for t in range(5)]
    follows = [sum(weights[t, s] for s in range(1, 5) if words[s - 1] == words[t]) for t in range(5)]
    np.testing.assert_allclose(readout.duplicate_mass[0], same, atol=1e-6)
    np.testing.assert_allclose(readout.induction_mass[0], follows, atol=1e-6)
    weights, readout = watch_tokens(["a", ".", "Ġb", "▁,", "[SEP]"])
    np.testing.assert_allclose(readout.delimiter_mass[0], weights[:, [1, 3, 4]].sum(-1), atol=1e-6)
    readout = watch_tokens(inspection.Tokens(words, ids=[0, 1, 2, 3, 4]))[1]
    np.testing.assert_allclose(readout.duplicate_mass, 0)
    assert watch_tokens(inspection.Tokens(5))[1].duplicate_mass is None
    assert_refused(
        (lambda: watch_tokens(words[:4]), "tokens: expected one per position of some call, .* are 5"),
        (lambda: watch_tokens([*words, "f"]), "tokens: expected one per position, of which there are 5"),
        (lambda: watch_tokens("abcde"), "tokens: expected a list of strings, .* got the string", TypeError),
        (lambda: watch_tokens({1.5: words}), r"lengths or the beginnings .* names, got 1\.5", TypeError),
        (lambda: watch_tokens({4: words}), r"tokens\[4\]: expected 4 tokens, got 5"),
    )


def test_tokens_refuse_what_does_not_fit():
    make, a = inspection.Tokens, ["a"]
    assert_refused(
        (lambda: make(["a", 3]), "texts: expected a list of strings", TypeError),
        (lambda: make(a, ids=[1.5]), "ids: expected integers", TypeError),
        (lambda: make(a, ids=[1, 2]), r"ids: expected one per token, shape \(1,\)"),
        (lambda: make(a, ids=[2**40]), "ids: expected integers that int32 holds"),
        (lambda: make(a, kind="word"), "kind: expected one of text, patches, index"),
        (lambda: make(a, patch_grid=(2, 2)), "patch_grid: expected 2 x 2 patches"),
        (lambda: make(a, picture=np.zeros((2, 2, 4))), "picture: expected shape"),
    )
    patches = make(5, patch_grid=(2, 2), first_patch=1, picture=np.zeros((4, 4)))
    assert (patches.kind, len(patches), patches.texts[4]) == ("patches", 5, "4")
    assert tokens.number_tokens(patches.part(3, 2), patches.part(0, 4)) is None
    # Ids of one side alone say nothing of the other side's; texts of both do.
    found = tokens.number_tokens(make(["c"], ids=[0]), make(list("abcbc")))
    assert [side.tolist() for side in found] == [[0], [1, 2, 0, 2, 0]]
    part = make(list("abc"), ids=[4, 5, 6], spans=[[0, 1], [1, 2], [2, 3]]).part(2, 3)
    assert part.texts == ("c", "", "")
    assert (part.ids.tolist(), part.spans.tolist()) == ([6, -1, -1], [[2, 3], [0, 0], [0, 0]])
    kept = [make(a)]
    assert [tokens.number_sequence(kept, one) for one in (make(a), make(a, ids=[1]), None)] == [0, 1, None]


def test_heads_with_places_of_their_own_have_no_example():
    arrays, _ = inputs(Case(shapes=((H, T, D), (2, S, D), (2, S, E))))
    call, _ = watch(*arrays, mask=masks.causal(), query_offset=np.full(H, 3))
    assert call.query_offset == 3
    with pytest.raises(ValueError, match="expected one position for all heads"):
        watch(*arrays, mask=masks.causal(), query_offset=np.arange(H))


def test_heads_are_measured_on_tokens_that_repeat():
    def model(ids):  # one head that reads the key after the last time that its token was there
        place = np.arange(ids.shape[1])
        follows = place - place[:, None] == 10
        query, key = np.eye(22, dtype=np.float32)[None, None], 30 * np.float32(follows)[None, None]
        return attend(query, key, query, mask=masks.causal())

    trace = inspection.record_repeats(model, 1000, length=11, rng=3)
    (call,) = trace
    ids = call.key_tokens.ids
    assert (trace.title, call.rows) == ("11 random tokens, 2 times", 22)
    np.testing.assert_array_equal(ids[:11], ids[11:])
    assert len({*ids.tolist()} & {*range(1000)}) == 11
    np.testing.assert_array_equal(call.window()[0, 11:].argmax(-1), np.arange(1, 12))
