import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from economy import mostly_slow
from layer_oracle import (
    assert_close,
    compiled,
    count_parameters,
    draw,
    feed_forward,
    float64,
    layer_norm,
    multi_head,
    randomize,
)
from regard import masks, positions
from regard.layers import DecoderBlock, EncoderBlock

B, T, S, M, W, F, H, D = 2, 5, 7, 11, 13, 17, 3, 19


def encoder(norm="pre", **options):
    options = {**options, "attention": {"head_dim": D, **options.get("attention", {})}}
    return randomize(EncoderBlock(M, H, F, norm=norm, **options, rngs=nnx.Rngs(0)))


def decoder(norm="pre", **options):
    options = {**options, "attention": {"head_dim": D, **options.get("attention", {})}, "memory_width": W}
    return randomize(DecoderBlock(M, H, F, norm=norm, **options, rngs=nnx.Rngs(0)))


# The definitions, in float64.


def test_pre_norm_encoder_block_is_the_definition():
    block, x = encoder("pre", attention={"use_bias": False}), draw(0, B, T, M)
    keep = np.tri(T, dtype=bool)
    y = float64(x)
    y = y + multi_head(block.attention, layer_norm(block.attention_residual.norm, y), keep=keep)[0]
    y = y + feed_forward(block.feed_forward, layer_norm(block.feed_forward_residual.norm, y))
    assert_close(block(x, mask=masks.causal()), y)


def test_post_norm_encoder_block_is_the_definition():
    block, x = encoder("post", feed_forward={"activation": "relu"}), draw(1, B, T, M)
    y = float64(x)
    y = layer_norm(block.attention_residual.norm, y + multi_head(block.attention, y)[0])
    y = layer_norm(block.feed_forward_residual.norm, y + feed_forward(block.feed_forward, y))
    assert_close(block(x), y)
    assert not np.allclose(block(x), encoder("pre", feed_forward={"activation": "relu"})(x))


def test_pre_norm_decoder_block_is_the_definition():
    block, x, memory = decoder("pre"), draw(2, B, T, M), draw(3, B, S, W)
    valid = (np.arange(S) < np.array([[3], [7]]))[:, None, None]
    y = float64(x)
    normed = layer_norm(block.self_residual.norm, y)
    y = y + multi_head(block.self_attention, normed, keep=np.tri(T, dtype=bool))[0]
    normed = layer_norm(block.cross_residual.norm, y)
    y = y + multi_head(block.cross_attention, normed, memory, keep=valid)[0]
    y = y + feed_forward(block.feed_forward, layer_norm(block.feed_forward_residual.norm, y))
    assert_close(block(x, memory, mask=masks.causal(), memory_mask=masks.lengths(np.array([3, 7]))), y)


def test_post_norm_decoder_block_is_the_definition():
    block, x, memory = decoder("post"), draw(4, B, T, M), draw(5, B, S, W)
    y = float64(x)
    y = layer_norm(block.self_residual.norm, y + multi_head(block.self_attention, y)[0])
    y = layer_norm(block.cross_residual.norm, y + multi_head(block.cross_attention, y, memory)[0])
    y = layer_norm(block.feed_forward_residual.norm, y + feed_forward(block.feed_forward, y))
    assert_close(block(x, memory), y)


def test_layer_norm_keeps_its_digits_far_from_zero():
    residual = encoder("post").attention_residual
    x = draw(6, B, T, M) + 10_000
    expected = layer_norm(residual.norm, float64(x))
    # The mean itself is rounded to 2**-11; E[x^2] - E[x]^2 would be off by whole units, one rounding being 8.
    assert_close(residual.leave(jnp.asarray(x), jnp.zeros(x.shape)), expected, ulps=2**15)


def test_the_epsilon_asked_for_is_that_of_every_norm():
    block = encoder(norm_epsilon=0.3, attention={"query_key_norm": True})
    x = draw(17, B, T, M)
    y = float64(x)
    normed = layer_norm(block.attention_residual.norm, y, 0.3)
    y = y + multi_head(block.attention, normed, epsilon=0.3)[0]
    y = y + feed_forward(block.feed_forward, layer_norm(block.feed_forward_residual.norm, y, 0.3))
    assert_close(compiled(block, x), y)


def test_positions_turn_nothing_in_a_memory():
    block = decoder(attention={"rotary": positions.Rotary(base=50.0, width=6)})
    x, memory = jnp.asarray(draw(18, B, T, M)), jnp.asarray(draw(19, B, S, W))
    run = jax.jit(lambda x, memory: block(x, memory))
    out = run(x, memory)
    # Without masks and positions the order of rows says nothing: so it is for the memory, and not for x.
    assert_close(run(x, memory[:, ::-1]), out)
    assert not np.allclose(run(x[:, ::-1], memory)[:, ::-1], out, atol=1e-2)


def test_unknown_norms_are_refused():
    with pytest.raises(ValueError, match=r"norm: expected one of pre, post, both; got 'sandwich'"):
        EncoderBlock(M, H, F, norm="sandwich", attention={"head_dim": D}, rngs=nnx.Rngs(0))


# The golden numbers of the documents.


def load(block, attention, widen, narrow):
    names = ("query_projection", "key_projection", "value_projection", "output_projection")
    for name, kernel in zip(names, attention, strict=True):
        getattr(block.attention, name).kernel[...] = kernel
    block.feed_forward.widen.kernel[...] = widen
    block.feed_forward.narrow.kernel[...] = narrow
    return block


def test_a_post_norm_block_gives_the_numbers_of_the_tired_cat():
    _, init, data = jax.random.split(jax.random.key(42), 3)
    keys = jax.random.split(init, 3)
    attention_scale, scale = np.float32(np.sqrt(2 / (64 + 8))), np.float32(np.sqrt(2 / (64 + 256)))
    block = load(
        EncoderBlock(
            64,
            8,
            256,
            norm="post",
            attention={"use_bias": False},
            feed_forward={"activation": "relu"},
            rngs=nnx.Rngs(0),
        ),
        [jax.random.normal(k, (64, 64)) * attention_scale for k in jax.random.split(keys[0], 4)],
        jax.random.normal(keys[1], (64, 256)) * scale,
        jax.random.normal(keys[2], (256, 64)) * scale,
    )
    # 49,728 are: query, key, value, output kernels, the branch with its biases, two norms.
    assert count_parameters(block) == 49_728
    x = jax.random.normal(data, (2, 10, 64)) + positions.sinusoidal(10, 64)[None]
    out = compiled(block, x)
    golden = [-0.8290756, -0.8102037, -1.2327372, -0.6967073]
    np.testing.assert_allclose(out[0, 0, :4], golden, atol=5e-6)
    assert float(jnp.abs(out).sum()) == pytest.approx(1042.0353, rel=1e-6)


def test_the_layer_of_from_scratch_is_post_norm_whatever_it_says():
    key = jax.random.PRNGKey(333)
    attention_key, branch_key = jax.random.split(key)
    limit, wide = np.float32(np.sqrt(6 / 512)), np.float32(np.sqrt(6 / (256 + 1024)))
    first, second = jax.random.split(branch_key)
    block = load(
        EncoderBlock(256, 8, 1024, norm="post", attention={"use_bias": False}, rngs=nnx.Rngs(0)),
        [
            jax.random.uniform(k, (256, 256), minval=-limit, maxval=limit)
            for k in jax.random.split(attention_key, 4)
        ],
        jax.random.uniform(first, (256, 1024), minval=-wide, maxval=wide),
        jax.random.uniform(second, (1024, 256), minval=-wide, maxval=wide),
    )
    x = jax.random.normal(branch_key, (2, 12, 256)) + positions.sinusoidal(12, 256)[None]
    out = compiled(block, x)
    golden = [-0.3060983, 1.2597383, -1.2039535, 1.4429665]
    np.testing.assert_allclose(out[0, 0, :4], golden, atol=1e-5)
    assert float(jnp.abs(out).sum()) == pytest.approx(4886.694, rel=1e-6)


# Parameters.


def test_an_encoder_block_has_the_parameters_of_its_components():
    block = EncoderBlock(256, 8, 1024, attention={"use_bias": False}, rngs=nnx.Rngs(0))
    assert count_parameters(block.attention) == 262_144
    assert count_parameters(block.feed_forward) == 525_568
    assert count_parameters(block.attention_residual.norm) == 512
    assert count_parameters(block.feed_forward_residual.norm) == 512
    assert count_parameters(block) == 788_736


def test_a_decoder_block_has_the_parameters_of_its_components():
    block = DecoderBlock(256, 8, 1024, attention={"use_bias": False}, rngs=nnx.Rngs(0))
    assert count_parameters(block) == 2 * 262_144 + 525_568 + 3 * 512


# Masks and aux.


def test_grouped_heads_and_masks_reach_the_attention():
    block, x = encoder(attention={"num_key_heads": 1}), draw(7, B, T, M)
    _, aux = block(x, mask=masks.lengths(np.array([2, 5])), aux=("weights", "entropy"))
    assert aux["weights"].shape == (B, H, T, T)
    assert aux["entropy"].shape == (B, H, T)
    assert not np.any(aux["weights"][0, :, :, 2:])
    assert np.all(np.asarray(aux["weights"][1]) > 0)
    _, offset = block(x, mask=masks.causal(), query_offset=1, aux=("weights",))
    assert np.any(offset["weights"][0, :, 0, 1])
    assert not np.any(offset["weights"][0, :, 0, 2])


def test_aux_of_a_decoder_block_and_the_output_it_leaves_alone():
    block, x, memory = decoder(), draw(8, B, T, M), draw(9, B, S, W)
    out, aux = block(x, memory, mask=masks.causal(), aux=("weights",))
    assert set(aux) == {"self", "cross"}
    assert aux["self"]["weights"].shape == (B, H, T, T)
    assert aux["cross"]["weights"].shape == (B, H, T, S)
    assert not np.any(np.triu(aux["self"]["weights"], 1))
    np.testing.assert_array_equal(block(x, memory, mask=masks.causal()), out)


def test_a_decoder_block_without_masks_sees_everything():
    block, x, memory = decoder(), draw(10, B, T, M), draw(11, B, S, W)
    _, aux = block(x, memory, aux=("weights",))
    assert np.all(np.asarray(aux["self"]["weights"]) > 0)
    assert np.all(np.asarray(aux["cross"]["weights"]) > 0)


@pytest.mark.parametrize("bad", ["x", "memory"])
def test_wrong_widths_name_the_argument(bad):
    x, memory = jnp.zeros((B, T, M)), jnp.zeros((B, S, W))
    with pytest.raises(ValueError, match=rf"{bad}: expected shape \(\*B, length"):
        decoder()(x[..., :-1] if bad == "x" else x, memory[..., :-1] if bad == "memory" else memory)


# Dropout.


@pytest.mark.parametrize("silent", ["attention", "feed_forward"])
def test_residual_dropout_really_drops_whole_entries_of_both_branches(silent):
    block, x = encoder("pre", dropout_rate=0.5), jnp.asarray(draw(12, B, T, M))
    # With one branch silenced, block(x) - x is the other one: each entry of it dropped or doubled.
    last = block.feed_forward.narrow if silent == "feed_forward" else block.attention.output_projection
    last.kernel[...], last.bias[...] = jnp.zeros_like(last.kernel[...]), jnp.zeros_like(last.bias[...])
    block.feed_forward.dropout.deterministic = True
    added = np.asarray(block(x) - x)
    block.eval()
    branch = np.asarray(block(x) - x)
    dropped = added == 0
    assert 0.3 < dropped.mean() < 0.7
    np.testing.assert_allclose(added[~dropped], 2 * branch[~dropped], rtol=1e-3, atol=1e-4)


def test_every_dropout_of_a_decoder_block_is_on_and_its_own():
    block = decoder(dropout_rate=0.3, attention={"dropout_rate": 0.2})
    x, memory = jnp.asarray(draw(13, B, T, M)), jnp.asarray(draw(14, B, S, W))
    drops = [module for _, module in nnx.iter_modules(block) if isinstance(module, nnx.Dropout)]
    assert sorted(drop.rate for drop in drops) == [0.2, 0.2, 0.3, 0.3, 0.3, 0.3]
    block.eval()
    quiet = np.asarray(block(x, memory))
    for drop in drops:
        drop.deterministic = False
        assert not np.allclose(block(x, memory), quiet)
        drop.deterministic = True
    np.testing.assert_array_equal(block(x, memory), quiet)
    keys = [np.asarray(jax.random.key_data(drop.rngs.key[...])).tobytes() for drop in drops]
    assert len(set(keys)) == len(keys)


def test_dropout_needs_a_stream():
    block = EncoderBlock(M, H, F, attention={"head_dim": D}, dropout_rate=0.1, rngs=nnx.Rngs(params=0))
    with pytest.raises(ValueError, match="rngs"):
        block(jnp.zeros((B, T, M)))


# Transforms.


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_jit_and_vmap_agree_with_the_plain_call(norm):
    block = decoder(norm)
    x, memory = jnp.asarray(draw(15, B, T, M)), jnp.asarray(draw(16, B, S, W))
    plain = block(x, memory, mask=masks.causal())
    jitted = nnx.jit(lambda block, x, memory: block(x, memory, mask=masks.causal()))
    assert_close(jitted(block, x, memory), plain)
    assert_close(jax.vmap(lambda x, memory: block(x, memory, mask=masks.causal()))(x, memory), plain)
    assert_close(block(x[0], memory[0], mask=masks.causal()), plain[0])


@pytest.mark.parametrize("norm", mostly_slow(["pre", "post"], "pre"))
def test_gradients_are_finite_with_empty_rows_and_an_empty_memory(norm):
    block = decoder(norm, dropout_rate=0.1, attention={"dropout_rate": 0.1})
    x, memory = jnp.zeros((B, T, M)), jnp.full((B, S, W), jnp.nan)

    def loss(block, x):
        out = block(
            x, memory, mask=masks.lengths(jnp.array([0, 3])), memory_mask=masks.lengths(jnp.array([0, 0]))
        )
        return jnp.sum(out**2)

    grads = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(block, x)
    leaves = jax.tree.leaves(grads)
    assert leaves
    assert all(np.all(np.isfinite(leaf)) for leaf in leaves)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_norms_read_a_stream_that_is_there(norm):
    """Else XLA on a CPU adds up all branches before a norm anew, in programs that grow with depth squared."""
    block, x = encoder(norm), jnp.ones((B, T, M))
    program = jax.jit(lambda x: block(x)).lower(x).as_text()
    assert program.count("optimization_barrier") == 2
