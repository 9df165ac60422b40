import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import layer_oracle
from layer_oracle import assert_close, compiled, draw, feed_forward, float64, layer_norm, multi_head
from regard import masks, positions
from regard.layers import DecoderBlock, EncoderBlock
from regard.layers.residual import Residual

B, T, S, M, W, F, H, D = 2, 5, 7, 11, 13, 17, 3, 19


def encoder(norm="pre", kind=EncoderBlock, attention=None, **options):
    attention = {"head_dim": D, **(attention or {})}
    return layer_oracle.build_drawn(kind, M, H, F, norm=norm, attention=attention, **options)


def decoder(norm="pre", **options):
    return encoder(norm, DecoderBlock, memory_width=W, **options)


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
    y, causal = float64(x), np.tri(T, dtype=bool)
    heads, own = multi_head(block.self_attention, layer_norm(block.self_residual.norm, y), keep=causal)
    y = y + heads
    normed = layer_norm(block.cross_residual.norm, y)
    heads, cross = multi_head(block.cross_attention, normed, memory, keep=valid)
    y = y + heads
    y = y + feed_forward(block.feed_forward, layer_norm(block.feed_forward_residual.norm, y))
    assert_close(out, y)
    assert_close(aux["self"]["weights"], own)
    assert_close(aux["cross"]["weights"], cross)


def test_norms_before_and_at_the_end_of_a_branch_are_the_definition():
    """Dropout falls on the branch after its norm."""
    options = {"place": "both", "kind": "rms", "epsilon": 1e-3, "dropout_rate": 0.5}
    residual = layer_oracle.build_drawn(Residual, M, **options)
    x, branch = draw(5, B, 97, M), draw(6, B, 97, M)
    run = nnx.jit(lambda residual, x, y: (residual.enter(x), residual.leave(0 * x, y)))
    entered, left = run(residual, x, branch)
    assert_close(entered, layer_oracle.rms_norm(residual.norm, float64(x), 1e-3))
    expected = 2 * layer_oracle.rms_norm(residual.branch_norm, float64(branch), 1e-3)
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


def test_an_encoder_block_has_the_parameters_of_its_components():
    def build(kind, *sizes):
        return nnx.eval_shape(lambda: kind(*sizes, attention={"use_bias": False}, rngs=nnx.Rngs(0)))

    block = build(EncoderBlock, 256, 8, 1024)
    assert layer_oracle.count_parameters(block.attention) == 262_144
    assert layer_oracle.count_parameters(block.feed_forward) == 525_568
    assert layer_oracle.count_parameters(block.attention_residual.norm) == 512
    assert layer_oracle.count_parameters(block) == 788_736
    assert layer_oracle.count_parameters(build(DecoderBlock, 256, 8, 1024)) == 2 * 262_144 + 525_568 + 3 * 512
    assert layer_oracle.count_parameters(build(EncoderBlock, 64, 8, 256)) == 49_728


# Dropout.


def test_every_dropout_of_a_decoder_block_is_on_and_its_own():
    block = decoder(dropout_rate=0.3, attention={"dropout_rate": 0.2})
    drops = [module for _, module in nnx.iter_modules(block) if isinstance(module, nnx.Dropout)]
    assert sorted(drop.rate for drop in drops) == [0.2, 0.2, 0.3, 0.3, 0.3, 0.3]
    keys = [np.asarray(jax.random.key_data(drop.rngs.key[...])).tobytes() for drop in drops]
    assert len(set(keys)) == len(keys)
    trace = lambda: layer_oracle.program_of(block, jnp.zeros((B, T, M)), jnp.zeros((B, S, W)))
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
        program = jax.jit(encoder(norm)).lower(jnp.ones((B, T, M))).as_text()
        assert program.count("optimization_barrier") == 2
