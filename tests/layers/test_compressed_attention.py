"""Compressed attention is its definition, transformers' layer, and itself through a cache and packed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import drawn_weights
from layer_oracle import build_drawn
from refusals import assert_refused
from regard.layers import CompressedAttention
from regard.layers.compressor import Blocks
from regard.positions import Rotary, YaRN

SIZES = {
    "head_dim": 10, "rotary_dim": 4, "window": 3, "query_latent_dim": 7, "output_latent_dim": 5,
    "output_groups": 3, "rotary": Rotary(160_000.0, interleaved=True, scaling=YaRN(4.0, 16, sharpness=1.0)),
}  # fmt: skip
KINDS = {
    "heavily_compressed_attention": {"compress_rate": 5},
    "compressed_sparse_attention": {"compress_rate": 3, "index_count": 2, "index_heads": 19, "index_dim": 8},
}
LENGTH = 17


def build(kind, num_heads=6, **options):
    return build_drawn(CompressedAttention, 24, num_heads, **SIZES, **KINDS[kind], **options)


def load(layer, drawn):
    """Put the weights of transformers' layer into the parameters."""
    paths = {
        "q_a_proj": layer.query_latent, "q_a_norm": layer.query_latent_norm, "kv_norm": layer.key_norm,
        "q_b_proj": layer.query_projection, "kv_proj": layer.key_projection,
        "o_b_proj": layer.output_projection,
    }  # fmt: skip
    parts = {"compressor.": layer.compressor}
    if layer.indexer is not None:
        paths["compressor.indexer.q_b_proj"] = layer.indexer.query_projection
        paths["compressor.indexer.scorer.weights_proj"] = layer.indexer.weight_projection
        parts["compressor.indexer."] = layer.indexer.compressor
    for prefix, part in parts.items():
        paths |= {f"{prefix}kv_proj": part.feature_projection, f"{prefix}gate_proj": part.gate_projection}
        paths[f"{prefix}kv_norm"] = part.norm
        part.gate_bias[...] = jnp.asarray(drawn.pop(f"{prefix}position_bias"), jnp.float64)
    layer.sinks[...] = jnp.asarray(drawn.pop("sinks"), jnp.float64)
    groups = drawn.pop("o_a_proj.weight").reshape(3, 5, 20)
    layer.group_kernels[...] = jnp.asarray(groups.swapaxes(1, 2), jnp.float64)
    for name, weights in drawn.items():
        module = paths[name.removesuffix(".weight")]
        parameter = module.scale if name.endswith("norm.weight") else module.kernel
        parameter[...] = jnp.asarray(weights.T, jnp.float64)


def define(layer, x):
    """The definition for one row (T, M), with all scores at once."""
    length, size = len(x), layer.compress_rate
    token = jnp.arange(length)

    def rms(rows, scale=1.0):
        return rows / jnp.sqrt(jnp.mean(rows**2, -1, keepdims=True) + 1e-6) * scale

    def turn(rows, places):
        rule = layer.rotary
        angles = places[:, None] * jnp.asarray(rule.scaling.frequencies(4, rule.base))
        a, b = rows[..., -4::2], rows[..., -3::2]
        turned = a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)
        return jnp.concatenate([rows[..., :-4], jnp.stack(turned, -1).reshape(*rows.shape[:-1], 4)], -1)

    def pool(part):
        maps = part.feature_projection, part.gate_projection
        features, gates = (x @ linear.kernel[...] for linear in maps)
        entries = []
        for end in range(size, length + 1, size):
            mine, width = slice(end - size, end), part.width
            terms = [(features[mine, -width:], (gates[mine] + part.gate_bias[...])[:, -width:])]
            if layer.indexer is not None and end > size:
                before = slice(end - 2 * size, end - size)
                terms.append((features[before, :width], (gates[before] + part.gate_bias[...])[:, :width]))
            read, logits = map(jnp.concatenate, zip(*terms, strict=True))
            entries.append((jax.nn.softmax(logits, 0) * read).sum(0))
        return turn(rms(jnp.stack(entries), part.norm.scale[...]), size * jnp.arange(len(entries)))

    def heads(linear, width):
        return (latent @ linear.kernel[...]).reshape(length, -1, width).swapaxes(0, 1)

    latent = rms(x @ layer.query_latent.kernel[...], layer.query_latent_norm.scale[...])
    query = turn(rms(heads(layer.query_projection, 10)), token)
    key = turn(rms(x @ layer.key_projection.kernel[...], layer.key_norm.scale[...]), token)
    entries = pool(layer.compressor)
    keep = size * (jnp.arange(len(entries)) + 1) <= token[:, None] + 1
    if layer.indexer is not None:
        index_query = turn(heads(layer.indexer.query_projection, 8), token)
        products = jax.nn.relu(index_query @ pool(layer.indexer.compressor).T / np.sqrt(8))
        scores = jnp.einsum("th,hti->ti", x @ layer.indexer.weight_projection.kernel[...], products)
        order = jnp.argsort(jnp.argsort(-jnp.where(keep, scores, -jnp.inf)))
        keep &= order < layer.indexer.count
    distance = token[:, None] - token
    keep = jnp.concatenate([(distance >= 0) & (distance <= layer.window), keep, distance[:, :1] >= 0], 1)
    keys = jnp.concatenate([key, entries])
    sinks = jnp.broadcast_to(layer.sinks[...][:, None, None], (6, length, 1))
    scores = jnp.concatenate([query @ keys.T / np.sqrt(10), sinks], -1)
    weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf), -1)[..., :-1]
    read = turn(weights @ keys, -token).swapaxes(0, 1).reshape(length, 3, 20)
    made = jnp.einsum("tgi,gir->tgr", read, layer.group_kernels[...]).reshape(length, 15)
    return made @ layer.output_projection.kernel[...]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_its_definition_and_that_of_transformers(kind, wide):
    """Whole, packed, and through a cache whose first piece ends in padding; with all gradients."""
    facts, arrays = drawn_weights.read_reference("deepseek_v4_attention")
    layer = build(kind, param_dtype=jnp.float64)
    load(layer, drawn_weights.draw_all(facts["shapes"][kind], "deepseek_v4"))
    graph, state = nnx.split(layer)
    x = jnp.asarray(drawn_weights.uniform("x", (2, LENGTH, 24)), jnp.float64)
    packed = jnp.concatenate([x[1:, :7], x[:1, :10]], 1)
    cotangents = jnp.asarray(np.random.default_rng(0).normal(size=x.shape))

    @jax.jit
    def run(state, x):
        def weigh(state, x, compute):
            out = compute(nnx.merge(graph, state), x)
            return jnp.vdot(out, cotangents), out

        weigh = jax.grad(weigh, (0, 1), has_aux=True)
        first, seen = layer(x[:, :7], cache=layer.start_cache(2, LENGTH), counts=jnp.array([7, 5]))
        rest = jnp.stack([x[0, 7:], x[1, 5:15]], 1)[:, :, None]

        def step(cache, token):
            out, seen = nnx.merge(graph, state)(token, cache=cache)
            return seen["cache"], out[:, 0]

        cache, steps = jax.lax.scan(step, seen["cache"], rest)
        parts = layer(packed, segments=jnp.where(jnp.arange(LENGTH) < 7, 4, 2)), first, steps
        with jax.numpy_rank_promotion("allow"):
            truth = weigh(state, x, lambda layer, x: jax.vmap(lambda row: define(layer, row))(x))
        return weigh(state, x, lambda layer, x: layer(x)), truth, parts, cache.overflowed

    (actual, whole), truth, (pieces, first, steps), overflowed = run(state, x)
    exact = lambda actual, truth: np.testing.assert_allclose(actual, truth, rtol=0, atol=1e-12)
    exact(whole, arrays[kind])
    jax.tree.map(exact, (actual, whole), truth)
    exact(pieces[0], np.concatenate([whole[1, :7], whole[0, :10]]))
    exact(first[0], whole[0, :7])
    exact(first[1, :5], whole[1, :5])
    exact(steps.swapaxes(0, 1), np.stack([whole[0, 7:], whole[1, 5:15]]))
    assert not overflowed.any()


def test_a_narrow_layer_keeps_its_dtype(wide):
    """And a sequence without a whole block is read."""
    narrow = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    for kind in KINDS:
        layer = build(kind, **narrow)
        x = jnp.ones((2, 2, 24), jnp.bfloat16)
        out, seen = jax.eval_shape(lambda x, layer=layer: layer(x, cache=layer.start_cache(2, 9)), x)
        assert (out.dtype, seen["cache"].recent.dtype) == (jnp.bfloat16, jnp.bfloat16)
        assert jax.eval_shape(layer, x[0]).shape == (2, 24)
        with pytest.raises(TypeError, match=r"x: .* float32\. Cast it, x\.astype\('bfloat16'\), or"):
            build(kind)(x, cache=layer.start_cache(2, 9))
        sizes = export.symbolic_shape("batch, length", constraints=["length >= 5"])
        symbols = jax.ShapeDtypeStruct((*sizes, 24), np.float32)
        symbolic_ids = jax.ShapeDtypeStruct(sizes, np.int32)
        read = lambda x, ids, layer=layer: layer(x, segments=ids)
        assert jax.eval_shape(read, symbols, symbolic_ids).shape == symbols.shape
        assert jax.eval_shape(layer, symbols).shape == symbols.shape
        ids = jnp.zeros((0, 0), jnp.int32)
        assert jax.eval_shape(layer, x[:0, :0], segments=ids).shape == (0, 0, 24)


def test_nan_of_padding_and_of_another_document_is_not_read():
    layer, x = build("compressed_sparse_attention"), np.ones((1, 7, 24), np.float32)
    x[:, 4:] = np.nan
    read = lambda layer, x: layer(x, cache=layer.start_cache(1, 9), counts=jnp.array([4]))[0]
    assert np.isfinite(nnx.jit(read)(layer, x)[:, :4]).all()
    compressor, (blocks, _) = layer.compressor, Blocks.divide(jnp.array([[0, 0, 0, 0, 1, 1, 1]]), 3)
    entries = compressor.pool(compressor.project(jnp.asarray(x[:, ::-1])), blocks)
    assert np.isfinite(entries).all(-1).tolist() == [[False, True]]


def test_what_does_not_fit_is_refused():
    heavy, sparse = KINDS
    layer, x = build(heavy), jnp.ones((2, 1, 24))
    cache, other = layer.start_cache(2, 5), build(sparse).start_cache(2, 5)
    assert_refused(
        (lambda: layer(x, cache=other), "cache: expected the layer's own and x"),
        (lambda: layer(x[:1], cache=cache), "cache: expected the layer's own and x"),
        (lambda: layer(x, counts=[1, 1]), "counts: .* padding at the end of rows needs nothing"),
        (lambda: layer(x, cache=cache, segments=[0]), "segments: expected None with a cache"),
        (lambda: layer(jnp.ones((2, 10, 24)), cache=cache), r"at most 9 tokens .* got \[10, 10\] with"),
        (lambda: build(heavy, num_heads=5), "output_groups: expected a"),
        (lambda: build(heavy, index_dim=8), "index_count: expected all of index_count"),
    )
