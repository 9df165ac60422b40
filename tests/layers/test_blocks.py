import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layer_oracle import (
    assert_close,
    build_drawn,
    compiled,
    count_parameters,
    draw,
    feed_forward,
    float64,
    layer_norm,
    multi_head,
    rms_norm,
)
from regard import masks, positions
from regard.layers import DecoderBlock, EncoderBlock
from regard.layers.residual import Residual

B, T, S, M, W, F, H, D = 2, 5, 7, 11, 13, 17, 3, 19


def encoder(norm="pre", **options):
    options = {**options, "attention": {"head_dim": D, **options.get("attention", {})}}
    return build_drawn(EncoderBlock, M, H, F, norm=norm, **options)


def decoder(norm="pre", **options):
    options = {**options, "attention": {"head_dim": D, **options.get("attention", {})}, "memory_width": W}
    return build_drawn(DecoderBlock, M, H, F, norm=norm, **options)


# The definitions, in float64.


def test_pre_norm_encoder_block_is_the_definition():
    """With one epsilon for every norm, those of queries and keys too, and an offset of the queries."""
    attention = {"use_bias": False, "num_key_heads": 1, "query_key_norm": True}
    block, x = encoder("pre", norm_epsilon=0.3, attention=attention), draw(0, B, T, M)
    out, aux = compiled(block, x, mask=masks.causal(), query_offset=1, aux=("weights", "entropy"))
    y, keep = float64(x), np.tri(T, k=1, dtype=bool)
    normed = layer_norm(block.attention_residual.norm, y, 0.3)
    heads, weights = multi_head(block.attention, normed, keep=keep, epsilon=0.3)
    y = y + heads
    y = y + feed_forward(block.feed_forward, layer_norm(block.feed_forward_residual.norm, y, 0.3))
    assert_close(out, y)
    assert_close(aux["weights"], weights)
    assert aux["entropy"].shape == (B, H, T)


def test_post_norm_encoder_block_is_the_definition():
    block, x = encoder("post", feed_forward={"activation": "relu"}), draw(1, B, T, M)
    y = float64(x)
    y = layer_norm(block.attention_residual.norm, y + multi_head(block.attention, y)[0])
    y = layer_norm(block.feed_forward_residual.norm, y + feed_forward(block.feed_forward, y))
    assert_close(compiled(block, x), y)


def test_pre_norm_decoder_block_is_the_definition():
    block, x, memory = decoder("pre"), draw(2, B, T, M), draw(3, B, S, W)
    options = {"mask": masks.causal(), "memory_mask": masks.lengths(np.array([3, 7])), "aux": ("weights",)}
    out, aux = compiled(block, x, memory, **options)
    valid = (np.arange(S) < np.array([[3], [7]]))[:, None, None]
    y = float64(x)
    normed = layer_norm(block.self_residual.norm, y)
    heads, own = multi_head(block.self_attention, normed, keep=np.tri(T, dtype=bool))
    y = y + heads
    heads, cross = multi_head(
        block.cross_attention, layer_norm(block.cross_residual.norm, y), memory, keep=valid
    )
    y = y + heads
    y = y + feed_forward(block.feed_forward, layer_norm(block.feed_forward_residual.norm, y))
    assert_close(out, y)
    assert_close(aux["self"]["weights"], own)
    assert_close(aux["cross"]["weights"], cross)


def test_post_norm_decoder_block_is_the_definition():
    block, x, memory = decoder("post"), draw(4, B, T, M), draw(5, B, S, W)
    y = float64(x)
    y = layer_norm(block.self_residual.norm, y + multi_head(block.self_attention, y)[0])
    y = layer_norm(block.cross_residual.norm, y + multi_head(block.cross_attention, y, memory)[0])
    y = layer_norm(block.feed_forward_residual.norm, y + feed_forward(block.feed_forward, y))
    assert_close(compiled(block, x, memory), y)


def test_norms_before_and_at_the_end_of_a_branch_are_the_definition():
    """Dropout falls on the branch after its norm."""
    options = {"place": "both", "kind": "rms", "epsilon": 1e-3, "dropout_rate": 0.5}
    residual, x, branch = build_drawn(Residual, M, **options), draw(5, B, 97, M), draw(6, B, 97, M)
    entered, left = nnx.jit(lambda residual, x, y: (residual.enter(x), residual.leave(0 * x, y)))(
        residual, x, branch
    )
    assert_close(entered, rms_norm(residual.norm, float64(x), 1e-3))
    expected = 2 * rms_norm(residual.branch_norm, float64(branch), 1e-3)
    assert_close(left, np.where(left == 0, 0, expected))
    assert 0.4 < (np.asarray(left) == 0).mean() < 0.6


def test_layer_norm_keeps_its_digits_far_from_zero():
    residual = encoder("post").attention_residual
    x = draw(6, B, T, M) + 10_000
    expected = layer_norm(residual.norm, float64(x))
    # The mean itself is rounded to 2**-11; E[x^2] - E[x]^2 would be off by whole units, one rounding being 8.
    assert_close(residual.leave(jnp.asarray(x), jnp.zeros(x.shape)), expected, ulps=2**15)


def test_positions_turn_nothing_in_a_memory():
    block = decoder(attention={"rotary": positions.Rotary(base=50.0, width=6)})
    x, memory = draw(18, B, T, M), draw(19, B, S, W)
    run = nnx.jit(lambda block, x, memory: block(x, memory))
    out = run(block, x, memory)
    # Without masks and positions the order of rows says nothing: so it is for the memory, and not for x.
    assert_close(run(block, x, memory[:, ::-1]), out)
    assert not np.allclose(run(block, x[:, ::-1], memory)[:, ::-1], out, atol=1e-2)


def test_wrong_blocks_and_calls_are_told():
    block, x, memory = decoder(), jnp.zeros((B, T, M)), jnp.zeros((B, S, W))
    dropping = encoder(dropout_rate=0.1)
    dropping.attention_residual.dropout.rngs = None
    for call, message in (
        (lambda: encoder("sandwich"), "norm: expected one of pre, post, both; got 'sandwich'"),
        (lambda: block(x[..., :-1], memory), r"x: expected shape \(\*B, length"),
        (lambda: block(x, memory[..., :-1]), r"memory: expected shape \(\*B, length"),
        (lambda: dropping(x), "rngs"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# The golden numbers of the documents.


def load(block, attention, widen, narrow):
    """Fill a block: these kernels, norms that scale by 1, and no bias."""
    named = {"widen": widen, "narrow": narrow}
    names = ("query_projection", "key_projection", "value_projection", "output_projection")
    named |= dict(zip(names, attention, strict=True))
    for path, leaf in nnx.to_flat_state(nnx.state(block, nnx.Param)):
        fill = {"scale": np.ones, "bias": np.zeros}.get(path[-1])
        leaf[...] = named[path[-2]] if fill is None else fill(leaf.shape, np.float32)
    return block


def test_a_post_norm_block_gives_the_numbers_of_the_tired_cat():
    attention_scale, scale = np.float32(np.sqrt(2 / (64 + 8))), np.float32(np.sqrt(2 / (64 + 256)))

    @jax.jit
    def draw_numbers():
        _, init, data = jax.random.split(jax.random.key(42), 3)
        keys = jax.random.split(init, 3)
        attention = [jax.random.normal(k, (64, 64)) * attention_scale for k in jax.random.split(keys[0], 4)]
        widen, narrow = (
            jax.random.normal(k, shape) * scale
            for k, shape in zip(keys[1:], ((64, 256), (256, 64)), strict=True)
        )
        return (attention, widen, narrow), jax.random.normal(data, (2, 10, 64))

    options = {"attention": {"use_bias": False}, "feed_forward": {"activation": "relu"}}
    kernels, x = draw_numbers()
    block = load(build_drawn(EncoderBlock, 64, 8, 256, norm="post", **options), *kernels)
    # 49,728 are: query, key, value, output kernels, the branch with its biases, two norms.
    assert count_parameters(block) == 49_728
    out = compiled(block, x + positions.sinusoidal(10, 64)[None])
    golden = [-0.8290756, -0.8102037, -1.2327372, -0.6967073]
    np.testing.assert_allclose(out[0, 0, :4], golden, atol=5e-6)
    assert np.abs(float64(out)).sum() == pytest.approx(1042.0353, rel=1e-6)


def test_the_layer_of_from_scratch_is_post_norm_whatever_it_says():
    limit, wide = np.float32(np.sqrt(6 / 512)), np.float32(np.sqrt(6 / (256 + 1024)))

    @jax.jit
    def draw_numbers():
        attention_key, branch_key = jax.random.split(jax.random.PRNGKey(333))
        first, second = jax.random.split(branch_key)
        uniform = lambda key, shape, limit: jax.random.uniform(key, shape, minval=-limit, maxval=limit)
        attention = [uniform(k, (256, 256), limit) for k in jax.random.split(attention_key, 4)]
        branch = uniform(first, (256, 1024), wide), uniform(second, (1024, 256), wide)
        return (attention, *branch), jax.random.normal(branch_key, (2, 12, 256))

    kernels, x = draw_numbers()
    block = build_drawn(EncoderBlock, 256, 8, 1024, norm="post", attention={"use_bias": False})
    out = compiled(load(block, *kernels), x + positions.sinusoidal(12, 256)[None])
    golden = [-0.3060983, 1.2597383, -1.2039535, 1.4429665]
    np.testing.assert_allclose(out[0, 0, :4], golden, atol=1e-5)
    assert np.abs(float64(out)).sum() == pytest.approx(4886.694, rel=1e-6)


def test_an_encoder_block_has_the_parameters_of_its_components():
    def build(kind):
        return nnx.eval_shape(lambda: kind(256, 8, 1024, attention={"use_bias": False}, rngs=nnx.Rngs(0)))

    block = build(EncoderBlock)
    assert count_parameters(block.attention) == 262_144
    assert count_parameters(block.feed_forward) == 525_568
    assert count_parameters(block.attention_residual.norm) == 512
    assert count_parameters(block) == 788_736
    assert count_parameters(build(DecoderBlock)) == 2 * 262_144 + 525_568 + 3 * 512


# Dropout.


@pytest.mark.parametrize("silent", ["attention", "feed_forward"])
def test_residual_dropout_really_drops_whole_entries_of_both_branches(silent):
    block, x = encoder("pre", dropout_rate=0.5), draw(12, B, T, M)
    # With one branch silenced, block(x) - x is the other one: each entry of it dropped or doubled.
    last = block.feed_forward.narrow if silent == "feed_forward" else block.attention.output_projection
    last.kernel[...], last.bias[...] = np.zeros(last.kernel.shape, np.float32), np.zeros(M, np.float32)
    block.feed_forward.dropout.deterministic = True
    added = np.asarray(add(block, x))
    block.eval()
    dropped = added == 0
    assert 0.3 < dropped.mean() < 0.7
    np.testing.assert_allclose(added[~dropped], 2 * np.asarray(add(block, x))[~dropped], rtol=1e-3, atol=1e-4)


@nnx.jit
def add(block, x):
    return block(x) - x


def test_every_dropout_of_a_decoder_block_is_on_and_its_own():
    block = decoder(dropout_rate=0.3, attention={"dropout_rate": 0.2})
    drops = [module for _, module in nnx.iter_modules(block) if isinstance(module, nnx.Dropout)]
    assert sorted(drop.rate for drop in drops) == [0.2, 0.2, 0.3, 0.3, 0.3, 0.3]
    keys = [np.asarray(jax.random.key_data(drop.rngs.key[...])).tobytes() for drop in drops]
    assert len(set(keys)) == len(keys)

    def trace():
        graph, state = nnx.split(block)
        run = lambda state, x, memory: nnx.merge(graph, state)(x, memory)
        return str(jax.make_jaxpr(run)(state, jnp.zeros((B, T, M)), jnp.zeros((B, S, W))))

    block.eval()
    quiet = trace()
    for drop in drops:
        drop.deterministic = False
        assert len(trace()) > len(quiet), "its program draws numbers"
        drop.deterministic = True
    assert len(trace()) == len(quiet)


# Transforms.


def test_gradients_are_finite_with_empty_rows_and_an_empty_memory():
    block, x, memory = decoder("pre"), jnp.zeros((B, T, M)), jnp.full((B, S, W), jnp.nan)
    lengths = {"mask": masks.lengths(np.array([0, 3])), "memory_mask": masks.lengths(np.array([0, 0]))}
    loss = lambda block, x: jnp.sum(block(x, memory, **lengths) ** 2)
    leaves = jax.tree.leaves(nnx.jit(nnx.grad(loss, argnums=(0, 1)))(block, x))
    assert leaves
    assert all(np.all(np.isfinite(leaf)) for leaf in leaves)


def test_norms_read_a_stream_that_is_there():
    """Else XLA on a CPU adds up all branches before a norm anew, in programs that grow with depth squared."""
    for norm in ("pre", "post"):
        block, x = encoder(norm), jnp.ones((B, T, M))
        program = jax.jit(lambda x, block=block: block(x)).lower(x).as_text()
        assert program.count("optimization_barrier") == 2
