"""Blocks as one loop and with rematerialization: the numbers, names and readouts of the unrolled model."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from economy import mostly_slow
from layer_oracle import draw, randomize
from regard import inspection
from regard.models import Classifier, Decoder, Encoder, EncoderDecoder, TransformerConfig, generate

V, C = 13, 3
SIZES = {"d_model": 6, "num_heads": 3, "d_ff": 7, "num_layers": 5, "vocab_size": V}
TOKENS = jnp.array([[3, 12, 0, 7], [5, 5, 2, 9]])
SOURCE = jnp.array([[1, 2, 3, 4, 5], [10, 9, 8, 7, 6]])
LENGTHS = jnp.array([4, 2])
# Five blocks of windows that take turns: two steps of two blocks, and one block more.
TURNS = {"windows": (1, None), "head_dim": 4, "norm": "both", "norm_kind": "rms"}
TURNS |= {"positions": "rotary", "rotary_window_base": 50.0}
SHAPES = {
    "encoder": {"norm": "post", "sinks": True, "num_key_heads": 1},
    "decoder": TURNS,
    "encoder-decoder": {"positions": "relative"},
    "classifier": {"num_experts": 5, "experts_per_token": 2, "expert_width": 11, "first_norm": False},
}
SCAN = {"scan_layers": True}
MODES = {
    "remat": {"remat": "full"},
    "scan": SCAN,
    "scan and remat": {**SCAN, "remat": "full"},
    "scan and a policy": {**SCAN, "remat": jax.checkpoint_policies.dots_saveable},
}


@pytest.fixture
def wide(x64):
    """Float64 models: Flax's norms ask for at least float32, which strict promotion takes for a mixture."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def build(kind, **options):
    """A model in float64, so that another order of sums is no excuse."""
    config = TransformerConfig(**{**SIZES, **options})
    rngs = nnx.Rngs(0)
    if kind == "classifier":
        model = Classifier(config, C, rngs=rngs)
    else:
        model = {"encoder": Encoder, "decoder": Decoder, "encoder-decoder": EncoderDecoder}[kind](
            config, rngs=rngs
        )
    state = nnx.state(randomize(model), nnx.Param)
    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(jnp.float64), state))
    return model


def call(model, **options):
    if isinstance(model, EncoderDecoder):
        return model(SOURCE, TOKENS, source_lengths=LENGTHS, **options)
    return model(TOKENS, lengths=LENGTHS, **options)


def measure_loss(model):
    return jnp.sum(jnp.sin(call(model)))


def differentiate(model):
    graph, state = nnx.split(model)
    return jax.jit(jax.value_and_grad(lambda state: measure_loss(nnx.merge(graph, state))))(state)


@functools.cache
def differentiate_unrolled(kind):
    return differentiate(build(kind, **SHAPES[kind]))


def assert_same(found, expected):
    def compare(one, other):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)

    jax.tree.map(compare, found, expected)


# Numbers.


@pytest.mark.parametrize(
    ("kind", "mode"),
    mostly_slow(
        [(kind, "scan and remat") for kind in SHAPES]
        + [("decoder", mode) for mode in MODES if mode != "scan and remat"],
        ("decoder", "scan and remat"),
    ),
)
def test_values_and_gradients_are_those_of_the_unrolled_model(wide, kind, mode):
    assert_same(differentiate(build(kind, **SHAPES[kind], **MODES[mode])), differentiate_unrolled(kind))


@pytest.mark.slow
def test_a_first_block_unlike_the_others_runs_before_the_loop(wide):
    """As in ModernBERT, whose windows the loop then takes from the second block on."""
    options = {"first_norm": False, "windows": (None, 1, 1), "norm_kind": "layer_no_bias", "num_layers": 7}
    found = [jax.jit(lambda model: call(model))(build("encoder", **options, **mode)) for mode in ({}, SCAN)]
    np.testing.assert_allclose(*found, rtol=1e-10, atol=1e-10)


def batch(loss, state):
    return jax.vmap(jax.grad(loss))(jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), state))


def push_forward(run, state):
    return jax.jvp(run, (state,), (jax.tree.map(jnp.cos, state),))


TRANSFORMS = {
    "vmap": batch,
    "jvp": push_forward,
    "hessian-vector": lambda loss, state: push_forward(jax.grad(loss), state),
    "checkpoint": lambda loss, state: jax.grad(jax.checkpoint(loss))(state),
}


@pytest.mark.slow
@pytest.mark.parametrize("transform", mostly_slow(TRANSFORMS, "vmap"))
def test_transforms_of_the_loop_are_those_of_the_unrolled_model(wide, transform):
    found = []
    for options in ({}, MODES["scan and remat"]):
        graph, state = nnx.split(build("encoder", num_layers=3, **options))
        loss = functools.partial(lambda graph, state: measure_loss(nnx.merge(graph, state)), graph)
        found.append(jax.jit(functools.partial(TRANSFORMS[transform], loss))(state))
    assert_same(*found)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["remat", "scan", "scan and remat"])
def test_dropout_is_that_of_the_unrolled_model_call_by_call(wide, mode):
    rates = {"dropout_rate": 0.3, "attention_dropout_rate": 0.2}
    found = []
    for options in ({}, MODES[mode]):
        model = build("encoder", num_layers=2, **rates, **options)
        run = nnx.jit(lambda model: (call(model), nnx.grad(measure_loss)(model)))
        found.append((run(model), nnx.state(model, nnx.RngCount)))
    assert_same(*found)
    assert all(count == 2 for count in jax.tree.leaves(found[1][1]))


@pytest.mark.slow
def test_a_loop_over_models_that_a_trace_closes_over_moves_nothing():
    model = Encoder(TransformerConfig(**SIZES, dropout_rate=0.3, **SCAN), rngs=nnx.Rngs(0))
    model.eval()
    found = jax.jit(jax.vmap(lambda tokens: model(tokens)))(TOKENS)
    np.testing.assert_allclose(found, model(TOKENS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_layers", [0, 1])
def test_few_blocks_need_no_loop(num_layers):
    config = TransformerConfig(**{**SIZES, **MODES["scan and remat"], "num_layers": num_layers})
    model = Encoder(config, rngs=nnx.Rngs(0))
    found = nnx.jit(lambda model: model(TOKENS))(model)
    np.testing.assert_allclose(found, model(TOKENS), rtol=0, atol=1e-5)


def test_the_stream_takes_the_dtype_of_the_blocks():
    x = jnp.asarray(draw(0, 2, 4, 6), jnp.bfloat16)
    stack = Encoder(TransformerConfig(**SIZES, **SCAN), rngs=nnx.Rngs(0)).stack
    with jax.numpy_dtype_promotion("standard"):
        found = nnx.jit(lambda stack, x: stack(x)[0])(stack, x)
        np.testing.assert_allclose(found, stack(x)[0], rtol=0, atol=1e-5)
    assert found.dtype == jnp.float32


# Names and readouts.


def test_parameters_and_names_are_those_of_the_unrolled_model():
    plain, scanned = (
        nnx.to_flat_state(nnx.state(Decoder(TransformerConfig(**SIZES, **options), rngs=nnx.Rngs(0))))
        for options in ({}, MODES["scan and remat"])
    )
    assert [path for path, _ in plain] == [path for path, _ in scanned]
    assert ("trunk", "stack", "blocks", 4, "feed_forward", "widen", "kernel") in [path for path, _ in plain]


@pytest.mark.slow
def test_readouts_are_those_of_each_layer():
    model = randomize(
        Decoder(TransformerConfig(**SIZES, **TURNS, **MODES["scan and remat"]), rngs=nnx.Rngs(0))
    )
    read = functools.partial(call, aux=("weights", "hidden"))
    found, expected = nnx.jit(read)(model), read(model)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5), found, expected)
    assert len(found[1]["blocks"]) == 5


def test_a_capture_of_the_loop_names_every_layer():
    model = Decoder(TransformerConfig(**SIZES, **MODES["scan and remat"]), rngs=nnx.Rngs(0))
    _, trace = inspection.record(model, TOKENS)
    assert [one.name for one in trace.calls] == [
        f"trunk.stack.blocks.{number}.attention" for number in range(5)
    ]


@pytest.mark.slow
def test_decoding_with_a_cache_is_that_of_the_unrolled_model():
    plain, scanned = (
        randomize(
            Decoder(TransformerConfig(**{**SIZES, **TURNS, **options, "num_layers": 2}), rngs=nnx.Rngs(0))
        )
        for options in ({}, MODES["scan and remat"])
    )
    expected = generate(plain, TOKENS, max_tokens=3).tokens
    np.testing.assert_array_equal(generate(scanned, TOKENS, max_tokens=3).tokens, expected)


# Costs.


def lower(num_layers, **options):
    sizes = {**SIZES, "d_model": 30, "d_ff": 61, "num_layers": num_layers}
    model = Decoder(TransformerConfig(**sizes, **options), rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    loss = jax.value_and_grad(lambda state: measure_loss(nnx.merge(graph, state)))
    return jax.jit(loss).lower(state), sum(leaf.nbytes for leaf in jax.tree.leaves(state))


@pytest.mark.slow
def test_a_deeper_model_multiplies_no_more_matrices_in_its_program():
    products = [
        len(re.findall(r"stablehlo\.dot_general", lower(depth, **MODES["scan and remat"])[0].as_text()))
        for depth in (2, 7)
    ]
    assert products[0] == products[1] > 0


@pytest.mark.slow
def test_neither_weights_nor_gradients_are_held_twice():
    lowered, num_bytes = lower(17, **MODES["scan and remat"])
    assert lowered.compile().memory_analysis().temp_size_in_bytes < num_bytes / 2


# Blocks that differ.


@pytest.mark.slow
def test_blocks_that_do_not_take_turns_are_refused():
    windows = Encoder(TransformerConfig(**SIZES, **SCAN, windows=(1, 2, 3)), rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match="of 5 blocks, block 1 has another window than block 0; set scan_layers"
    ):
        jax.eval_shape(lambda: windows(TOKENS))
    assert windows(TOKENS).shape == (2, 4, 6)
    model = Encoder(TransformerConfig(**SIZES, **SCAN), rngs=nnx.Rngs(0))
    model.stack.blocks[2] = Encoder(
        TransformerConfig(**{**SIZES, "d_ff": 11}), rngs=nnx.Rngs(0)
    ).stack.blocks[2]
    with pytest.raises(ValueError, match="block 2 has another structure than block 0"):
        nnx.jit(lambda model: model(TOKENS))(model)
