"""Layers of the delta rule are their recurrence, token by token, whatever is packed, padded or cached."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layer_oracle import build_drawn
from refusals import assert_refused
from regard.layers import DeltaBlock, GatedDeltaNet, KimiDelta, MultiHeadAttention

M, T = 11, 37
SIZES = {"num_key_heads": 3, "head_dim": 5, "value_dim": 7, "conv_width": 3}
LAYERS = {
    "gated": functools.partial(GatedDeltaNet, M, 6, **SIZES, norm_epsilon=1e-3),
    "kimi": functools.partial(KimiDelta, M, 3, head_dim=5, norm_epsilon=1e-3),
}
IDS = np.array([4] * 13 + [7] + [4] * 23)
CUT = np.repeat(np.arange(4), (4, 8, 5, 20))  # so that pieces of texts end behind few tokens of a document


def build(kind, dtype=jnp.float64):
    return build_drawn(LAYERS[kind], param_dtype=dtype, seed=5)


def define(layer, x):
    """One row (T, M) in NumPy, a token at a time."""
    numbers = {".".join(at): np.asarray(leaf[...], float) for at, leaf in nnx.to_flat_state(nnx.state(layer))}
    sigmoid = lambda array: 1 / (1 + np.exp(-array))
    project = lambda array, name: array @ numbers[f"{name}.kernel"]
    heads, width, value_width = layer.num_heads, layer.head_dim, layer.value_dim
    mixed = []
    for name in ("query", "key", "value"):
        rows, taps = project(x, f"{name}_projection"), numbers[f"{name}_taps"]
        rows = np.concatenate([np.zeros((len(taps) - 1, rows.shape[1])), rows])
        read = np.stack([(rows[t : t + len(taps)] * taps).sum(0) for t in range(len(x))])
        mixed.append((read * sigmoid(read)).reshape(len(x), -1, value_width if name == "value" else width))
    unit = lambda rows: rows / np.sqrt((rows**2).sum(-1, keepdims=True) + 1e-6)
    query, key = (np.repeat(unit(rows), heads // rows.shape[1], axis=1) for rows in mixed[:2])
    if isinstance(layer, KimiDelta):
        amount = project(project(x, "forget_entry"), "forget_projection") + numbers["forget_bias"]
        amount = amount.reshape(len(x), heads, width)
        gate = sigmoid(project(project(x, "gate_entry"), "gate_projection"))
    else:
        amount = (project(x, "forget_projection") + numbers["forget_bias"])[..., None]
        gate = project(x, "gate_projection")
        gate = gate * sigmoid(gate)
    kept = np.exp(-np.exp(numbers["log_speed"])[:, None] * np.log1p(np.exp(amount)))
    rate = sigmoid(project(x, "rate_projection"))
    state, output = np.zeros((heads, width, value_width)), []
    for t in range(len(x)):
        state = state * kept[t][..., None]
        known = np.einsum("hde,hd->he", state, key[t])
        state = state + key[t][..., None] * (rate[t][:, None] * (mixed[2][t] - known))[:, None]
        output.append(np.einsum("hde,hd->he", state, query[t]) / np.sqrt(width))
    output = np.stack(output)
    output = output / np.sqrt((output**2).mean(-1, keepdims=True) + 1e-3) * numbers["norm_scale"]
    return project(output.reshape(len(x), -1) * gate, "output_projection")


def draw(*shape):
    return np.random.default_rng(1).normal(size=shape)


def define_apart(layer, row, ids=IDS):
    parts = np.split(row, np.flatnonzero(np.diff(ids)) + 1)
    return np.concatenate([define(layer, part) for part in parts])


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_is_its_definition_packed_padded_and_cached(kind, wide):
    layer, x = build(kind), draw(2, T, M)
    whole = np.stack([define(layer, row) for row in x])
    run = nnx.jit(lambda layer, x, **options: layer(x, **options))
    close(run(layer, x[0]), whole[0])
    apart = [define_apart(layer, x[0]), define_apart(layer, x[1]) if kind == "kimi" else whole[1]]
    ids = IDS if kind == "kimi" else np.stack([IDS, np.zeros_like(IDS)])
    close(run(layer, x, segments=ids), np.stack(apart))
    # Rows of other lengths, read piece by piece; what is not real is NaN and leaves no trace. A document goes
    # on in the next piece, and knows nothing of the one before it.
    whole = [define_apart(layer, row, CUT) for row in x] if kind == "kimi" else whole
    cache, lengths, found = layer.start_cache(2), np.zeros(2, int), ([], [])
    for counts in ((5, 2), (1, 0), (7, 16), (3, 1)):
        piece, ids = np.full((2, 16, M), np.nan), np.zeros((2, 16), int)
        for row, count in enumerate(counts):
            piece[row, :count] = x[row, lengths[row] : lengths[row] + count]
            ids[row, :count] = CUT[lengths[row] : lengths[row] + count]
        packed = {"segments": ids} if kind == "kimi" else {}
        out, seen = run(layer, piece, cache=cache, counts=np.array(counts), **packed)
        cache = seen["cache"]
        for row, count in enumerate(counts):
            found[row].append(out[row, :count])
        lengths += counts
        assert cache.lengths.tolist() == lengths.tolist()
    for row, parts in enumerate(found):
        close(np.concatenate(parts), whole[row][: lengths[row]])


def test_gradients_and_their_transforms_are_those_of_the_recurrence(wide):
    layer, x, step = build("kimi"), draw(T, M), 1e-5
    graph, state = nnx.split(layer)
    way = jax.tree.map(lambda leaf: draw(*leaf.shape), (state, x))
    # Where it is, and a step to either side.
    move = lambda leaf, on: np.asarray(leaf) + step * np.multiply.outer([0, 1, -1], on)
    places = jax.tree.map(move, (state, x), way)
    cotangent = draw(T, M)

    def loss(place):
        output = jax.checkpoint(lambda state, x: nnx.merge(graph, state)(x, segments=IDS))(*place)
        return jnp.sum(output * cotangent), output

    (losses, outputs), grads = jax.jit(jax.vmap(jax.value_and_grad(loss, has_aux=True)))(places)
    close(outputs[0], define_apart(layer, x))
    found = sum(jnp.vdot(one[0], on) for one, on in zip(*map(jax.tree.leaves, (grads, way)), strict=True))
    np.testing.assert_allclose(found, (losses[1] - losses[2]) / (2 * step), rtol=1e-6)


def test_bfloat16_keeps_states_in_float32():
    layer, x = build("gated", jnp.float32), draw(5, M).astype(np.float32)
    narrow = build_drawn(LAYERS["gated"], dtype=jnp.bfloat16, seed=5)
    out, seen = nnx.jit(lambda m, x: m(x, cache=m.start_cache(1)))(narrow, x[None].astype(jnp.bfloat16))
    found = out.dtype, seen["cache"].memory.dtype, seen["cache"].recent.dtype
    assert found == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    with pytest.raises(TypeError, match=r"x: expected what bfloat16, the cache's dtype, .* float32. Cast"):
        layer(x[None], cache=narrow.start_cache(1))
    truth = define(layer, x)
    np.testing.assert_allclose(out[0].astype(np.float32), truth, atol=0.05 * np.abs(truth).max())


def test_an_output_gate_weighs_what_heads_have_read():
    layer = MultiHeadAttention(6, 2, output_gate=True, rngs=nnx.Rngs(0))
    x = draw(2, 5, 6).astype(np.float32)
    plain = MultiHeadAttention(6, 2, project_output=False, rngs=nnx.Rngs(0))
    for name in ("query", "key", "value"):
        nnx.update(getattr(plain, f"{name}_projection"), nnx.state(getattr(layer, f"{name}_projection")))
    gate = 1 / (1 + np.exp(-np.asarray(layer.gate_projection(x))))
    np.testing.assert_allclose(layer(x), layer.output_projection(plain(x) * gate), atol=1e-6)


X = np.ones((2, 5, M), np.float32)
build_kimi = functools.partial(build, "kimi", jnp.float32)
RNGS = nnx.Rngs(0)
WRONG = [
    (lambda: GatedDeltaNet(M, 6, rngs=RNGS), "num_heads: expected a divisor of d_model = 11, got 6"),
    (lambda: GatedDeltaNet(M, 6, num_key_heads=4, head_dim=2, rngs=RNGS), "num_key_heads: expected a div"),
    (lambda: KimiDelta(M, 3, head_dim=0, rngs=RNGS), "head_dim: expected an integer of at least 1, got 0"),
    (lambda: DeltaBlock(M, 1, 3, kind="delta", rngs=RNGS), "kind: expected one of gated_delta, kimi_delta"),
    (lambda: DeltaBlock(M, 1, 3, delta={"heads": 1}, rngs=RNGS), r"delta\['heads'\]"),
    (lambda: build_kimi()(X, segments=np.ones((3, 5), int)), "segments: expected leading axes"),
    (lambda: build_kimi()(X, counts=[1, 2]), "counts: expected None without a cache"),
    (lambda: build_kimi()(X, cache=build_kimi().start_cache(3)), "cache: expected the layer's own"),
    (lambda: build_kimi().start_cache(2).rewind([1, 1]), "rewind: expected caches of keys and values"),
]  # fmt: skip


def test_bad_input_is_explained():
    assert_refused(*WRONG, error=(ValueError, TypeError))
