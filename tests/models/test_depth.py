"""Blocks as one loop and with rematerialization: the numbers, names and readouts of the unrolled model."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layer_oracle import build_drawn, widen
from regard.models import Decoder, Encoder, TransformerConfig
from regard.models.depth import lend_to_blocks

SIZES = {"d_model": 6, "num_heads": 3, "d_ff": 7, "num_layers": 5, "vocab_size": 13}
TOKENS = jnp.array([[3, 12, 0, 7], [5, 5, 2, 9]])
LENGTHS = np.array([4, 2])
# Five blocks of windows that take turns: two steps of two blocks, and one block more.
TURNS = {"windows": (1, None), "head_dim": 4, "norm": "both", "norm_kind": "rms"}
TURNS |= {"positions": "rotary", "rotary_window_base": 50.0}
SCAN = {"scan_layers": True}
BOTH = {**SCAN, "remat": "full"}


def build(kind, **options):
    """A model in float64 where that is on, so that another order of sums is no excuse."""
    return widen(build_drawn(kind, TransformerConfig(**{**SIZES, **options})))


def call(model, **options):
    return model(TOKENS, lengths=LENGTHS, **options)


def measure_loss(model):
    logits, seen = call(model, aux=("hidden",))
    return jnp.sum(jnp.sin(logits)), seen


def split_loss(model):
    graph, state = nnx.split(model)
    return lambda state: measure_loss(nnx.merge(graph, state))[0], state


def assert_same(found, expected):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10), found, expected)


def test_values_and_gradients_are_those_of_the_unrolled_model(wide):
    measure = nnx.jit(nnx.value_and_grad(measure_loss, has_aux=True))
    found, expected = (measure(build(Decoder, **TURNS, **options)) for options in (BOTH, {}))
    assert_same(found, expected)
    assert len(found[0][1]["blocks"]) == 5


def test_a_first_block_unlike_the_others_runs_before_the_loop(wide):
    """As in ModernBERT, whose windows the loop then takes from the second block on."""
    options = {"first_norm": False, "windows": (None, 1), "norm_kind": "layer_no_bias"}
    assert_same(*(nnx.jit(call)(build(Encoder, **options, **mode)) for mode in ({}, SCAN)))


@pytest.mark.slow
def test_transforms_of_the_loop_are_those_of_the_unrolled_model(wide):
    found = []
    for options in ({}, BOTH):
        loss, state = split_loss(build(Encoder, num_layers=3, **options))
        batched = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), state)
        multiply = lambda *pair, loss=loss: jax.jvp(jax.grad(loss), *pair)
        found.append(jax.jit(jax.vmap(multiply))((batched,), (jax.tree.map(jnp.cos, batched),)))
    assert_same(*found)


@pytest.mark.slow
def test_dropout_is_that_of_the_unrolled_model_call_by_call(wide):
    rates, found = {"dropout_rate": 0.3, "attention_dropout_rate": 0.2, "num_layers": 2}, []
    for options in ({}, BOTH):
        model = build(Encoder, **rates, **options)
        run = nnx.jit(lambda model: (call(model), nnx.grad(lambda model: measure_loss(model)[0])(model)))
        found.append((run(model), nnx.state(model, nnx.RngCount)))
    assert_same(*found)
    assert all(count == 2 for count in jax.tree.leaves(found[1][1]))


def test_few_blocks_and_models_that_a_trace_closes_over_serve():
    for num_layers in (0, 1, 5):
        model = build(Encoder, dropout_rate=0.3, **{**BOTH, "num_layers": num_layers})
        model.eval()
        assert jax.eval_shape(jax.vmap(lambda tokens, model=model: model(tokens)), TOKENS).shape == (2, 4, 6)


def test_the_stream_takes_the_dtype_of_the_blocks():
    stack = build(Encoder, **SCAN).stack
    with jax.numpy_dtype_promotion("standard"):
        found = jax.eval_shape(lambda x: stack(x)[0], jnp.zeros((2, 4, 6), jnp.bfloat16))
    assert found.dtype == jnp.float32


def test_blocks_that_do_not_take_turns_are_refused():
    windows, model = build(Encoder, **SCAN, windows=(1, 2, 3)), build(Encoder, **SCAN)
    model.stack.blocks[2] = build(Encoder, d_ff=11).stack.blocks[2]
    for one, message in (
        (windows, "of 5 blocks, block 1 has another window than block 0; set scan_layers"),
        (model, "block 2 has another structure than block 0"),
    ):
        with pytest.raises(ValueError, match=message):
            nnx.eval_shape(call, one)


def lower(num_layers):
    loss, state = split_loss(build(Decoder, d_model=30, d_ff=61, num_layers=num_layers, **BOTH))
    return jax.jit(jax.value_and_grad(loss)).lower(state), sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def test_a_deeper_model_multiplies_no_more_matrices_in_its_program():
    products = [len(re.findall(r"stablehlo\.dot_general", lower(depth)[0].as_text())) for depth in (2, 5)]
    assert products[0] == products[1] > 0


@pytest.mark.slow
def test_neither_weights_nor_gradients_are_held_twice():
    lowered, num_bytes = lower(17)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < num_bytes / 2


def test_a_loop_keeps_no_kernels_of_experts_for_the_backward_pass():
    """What was gathered for a block is gathered again, and then taken apart tile by tile."""
    sizes = {"d_ff": 11, "num_experts": 4, "experts_per_token": 2, "num_layers": 3, "gated": True}
    config = TransformerConfig(**{**SIZES, **sizes, **SCAN})
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    with lend_to_blocks(lambda tree: tree, lambda tree: tree):
        call = lambda state: nnx.merge(graph, state)(TOKENS)
        kept = jax.eval_shape(lambda state: jax.vjp(call, state)[1], state)
    kernels = [leaf.shape for leaf in jax.tree.leaves(kept) if leaf.shape[-2:] == (6, 11)]
    assert kernels == [(4, 6, 11)] * 3 * 2
