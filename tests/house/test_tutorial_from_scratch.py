"""The source of docs/tutorials/from_scratch.md: its numbers come out of Regard, its mistakes do not.

The numbers are those of its own float64, and of float32.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import regard
from regard import attend, masks, positions
from regard.layers import MultiHeadAttention
from regard.layers.residual import build_norm
from regard.training import tasks
from regard.training.tasks import shrink
from tutorial_documents import (
    assert_golden,
    build_from_scratch_attention,
    build_from_scratch_block,
    build_from_scratch_feed_forward,
    default_float,
    draw_normal,
    draw_uniform,
)

B, H, T, S, D, E = 2, 3, 5, 7, 11, 13


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# Golden numbers. The document runs in float64; the same draws in float32 are other numbers. Layers in float32
# are in test_multi_head.py, test_feed_forward.py and test_blocks.py.


@pytest.fixture(params=["float64", "float32"])
def width(request):
    """The document's width or JAX's own; 1e-8 is what the printed digits of float64 allow."""
    if request.param == "float32":
        yield request.param
        return
    # Standard promotion: flax's LayerNorm meets float64 with a float32 of its own.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield request.param


double = pytest.mark.parametrize("width", ["float64"], indirect=True)


def assert_printed(actual, width, **golden):
    assert actual.dtype == width
    assert_golden(actual, golden[width], {"float64": 1e-8, "float32": 2e-6}[width])


def test_attention_gives_the_numbers_of_from_scratch(width):
    rng = jax.random.PRNGKey(42)
    rngs = (rng, jax.random.split(rng)[1], jax.random.split(rng, 3)[2])
    out = attend(*(jax.random.normal(rng, (2, 8, 64)) for rng in rngs))
    assert_printed(
        out[0, 0, :4],
        width,
        float64=[0.34534781, 0.17622493, 0.08584974, 0.29303037],
        float32=[0.4377626, 0.2660207, 0.742528, -1.2390208],
    )


def test_causal_attention_gives_the_numbers_of_from_scratch(width):
    x = jax.random.normal(jax.random.PRNGKey(123), (1, 6, 32))
    _, aux = attend(x, x, x, mask=masks.causal(), aux=("weights",))
    assert_printed(
        aux["weights"][0, 3],
        width,
        float64=[0.00123943, 0.00471846, 0.00327731, 0.9907648, 0, 0],
        float32=[0.01195712, 0.01344454, 0.01553801, 0.9590603, 0, 0],
    )
    assert not np.any(np.triu(aux["weights"][0], 1))  # all of the future, not some of it


@double
def test_several_heads_give_the_numbers_of_from_scratch_in_float64(width):
    rng = jax.random.PRNGKey(456)
    x = jax.random.normal(jax.random.split(rng)[1], (2, 10, 128))
    out = build_from_scratch_attention(rng, 128, 8)(x)
    assert_printed(
        out[0, 0, :4],
        width,
        float64=[-0.03356099, -0.26458602, -0.38352605, -0.60006296],
    )


def test_position_tables_give_the_numbers_of_from_scratch(width):
    table = positions.learned(jax.random.PRNGKey(789), 50, 128, stddev=0.1, dtype=default_float())
    assert_printed(
        table[0, :4],
        width,
        float64=[0.13774883, 0.02764255, 0.07781822, 0.10977726],
        float32=[0.0751191, -0.0952760, 0.0250922, 0.0735027],
    )
    row = positions.sinusoidal(50, 128, dtype=default_float())[1, :4]
    golden = [0.84147098, 0.54030231, 0.76172041, 0.64790587]
    assert_printed(row, width, float64=golden, float32=golden)


@double
def test_the_branch_gives_the_numbers_of_from_scratch_in_float64(width):
    rng = jax.random.PRNGKey(111)
    x = jax.random.normal(jax.random.split(rng)[1], (2, 10, 128))
    assert_printed(
        build_from_scratch_feed_forward(rng, 128, 512)(x)[0, 0, :4],
        width,
        float64=[-0.3239096, 0.54247938, -0.24014014, 0.06655619],
    )


def test_the_norm_gives_the_numbers_of_from_scratch(width):
    x = jax.random.normal(jax.random.PRNGKey(222), (2, 10, 64))
    out = build_norm(64, param_dtype=default_float(), rngs=nnx.Rngs(0))(x)
    assert_printed(
        out[0, 0, :4],
        width,
        float64=[0.61793126, -0.91801831, -0.42058383, 1.35427422],
        float32=[-1.0485414, -0.9819734, 0.3259418, 0.9923665],
    )
    # The notebook prints these: the norm brings each position to mean 0 and deviation 1.
    np.testing.assert_allclose(out.mean(-1), np.zeros((2, 10)), rtol=0, atol=1e-6)
    np.testing.assert_allclose(out.std(-1), np.ones((2, 10)), rtol=0, atol=2e-6)
    if width == "float64":
        np.testing.assert_allclose((x.mean(), x.std()), (0.0321, 0.9914), rtol=0, atol=5e-5)


@double
def test_a_block_gives_the_numbers_of_from_scratch_in_float64(width):
    rng = jax.random.PRNGKey(333)
    x = jax.random.normal(jax.random.split(rng)[1], (2, 12, 256))
    block = build_from_scratch_block(rng, 256, 8, 1024)
    out = block(x + positions.sinusoidal(12, 256, dtype=x.dtype)[None])
    assert_printed(
        out[0, 0, :4],
        width,
        float64=[-1.78975419, 0.87749823, -0.09678928, 0.22181542],
    )
    assert float(jnp.abs(out).sum()) == pytest.approx(4915.853957, abs=1e-6)


@pytest.mark.slow
@double
def test_training_as_written_prints_its_losses_and_learns_nothing(width):
    rng = jax.random.PRNGKey(42)
    _, embedding_rng, output_rng, data_rng = jax.random.split(rng, 4)
    embedding = draw_normal(embedding_rng, (18, 64), 200)  # deviation 0.1
    output = draw_normal(output_rng, (64, 18), 200)
    graph, state = nnx.split(build_from_scratch_block(rng, 64, 4, 256))
    tokens = jax.random.randint(data_rng, (500, 8), 0, 16)
    inputs = jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=16)
    targets = jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=17)

    def logits(state, inputs):
        table = positions.sinusoidal(9, 64, dtype=jnp.float64)
        return nnx.merge(graph, state)(embedding[inputs] + table[None]) @ output

    def loss(state, inputs, targets):
        return optax.softmax_cross_entropy_with_integer_labels(logits(state, inputs), targets).mean()

    @jax.jit
    def update(state):
        return jax.tree.map(lambda p, g: p - 0.001 * g, state, jax.grad(loss)(state, *train))

    train, held_out = (inputs[:400], targets[:400]), (inputs[400:], targets[400:])
    measure, printed = jax.jit(loss), []
    for step in range(20):
        state = update(state)
        if step in (0, 5, 10, 15, 19):
            printed.append((measure(state, *train), measure(state, *held_out)))
    golden = [
        (3.1552, 3.1504),
        (3.1455, 3.1403),
        (3.1363, 3.1306),
        (3.1275, 3.1214),
        (3.1207, 3.1143),
    ]
    np.testing.assert_allclose(printed, golden, rtol=0, atol=5.1e-5)  # four printed digits
    # Worse than answering every token with the same probability, ln 18 nats, and hardly ever right.
    assert np.min(printed) > np.log(18)
    right = logits(state, held_out[0]).argmax(-1) == held_out[1]
    assert float(right.mean()) == pytest.approx(0.0489, abs=5e-5)


# The copy task of Regard.


def test_copy_data_are_moved_by_one_between_a_start_and_an_end():
    task = tasks.Copy(vocab_size=19, length=7, held_out_size=11)
    for batch in (task.held_out, task.make_batch(jax.random.key(0), 11)):
        inputs, targets = np.asarray(batch["inputs"]), np.asarray(batch["targets"])
        assert inputs.shape == targets.shape == (11, 8)
        assert set(inputs[:, 0]) == {19}  # start
        assert set(targets[:, -1]) == {20}  # end
        np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
        assert 0 <= targets[:, :-1].min() <= targets[:, :-1].max() < 19


@pytest.mark.slow
def test_the_model_that_copies_sees_to_its_right():
    task = shrink(tasks.Copy())
    model = task.make_model(nnx.Rngs(0))
    model.eval()
    tokens = task.held_out["inputs"][:1]
    changed = tokens.at[0, 5].set((tokens[0, 5] + 1) % 16)
    moved = np.abs(np.asarray(model(changed) - model(tokens))).max(-1)[0]
    assert np.all(moved[:5] > 1e-6)  # a causal model would not move here, and could not know its targets


# Padding.


def test_an_empty_row_sends_no_nan_into_anybodys_gradient():
    x, projection = draw(0, T, D), draw(1, D, E)
    keep = np.ones((T, T), bool)
    keep[2] = False

    def loss_of_other_rows(x, projection):
        out = attend(x @ projection, x @ projection, x @ projection, mask=keep)
        return jnp.sum(out[jnp.array([0, 1, 3, 4])] ** 2)

    assert np.isfinite(loss_of_other_rows(x, projection))
    for gradient in jax.grad(loss_of_other_rows, argnums=(0, 1))(x, projection):
        assert np.all(np.isfinite(gradient))
        assert np.any(gradient)


def test_padding_of_length_zero_gives_zeros_and_no_gradient():
    query, key, value = draw(2, B, H, T, D), draw(3, B, H, S, D), draw(4, B, H, S, E)
    mask = masks.lengths([0, 4])
    out = attend(query, key, value, mask=mask)
    assert not np.any(out[0])
    gradients = jax.grad(lambda *arrays: attend(*arrays, mask=mask).sum(), argnums=(0, 1, 2))(
        query, key, value
    )
    for gradient in gradients:
        assert np.all(np.isfinite(gradient))
        assert not np.any(gradient[0])


@pytest.mark.parametrize("batch", [1, 2, 8, 9])
def test_lengths_fit_heads_whatever_the_batch(batch):
    # 8 heads; 9 keys: in the document a batch of 9 was read as one mask for everybody.
    query, lengths = draw(5, batch, 8, 9, D), np.arange(batch) + 1
    _, aux = attend(query, query, query, mask=masks.lengths(lengths), aux=("weights",))
    expected = np.broadcast_to((np.arange(9) < lengths[:, None])[:, None, None], (batch, 8, 9, 9))
    np.testing.assert_array_equal(np.asarray(aux["weights"]) > 0, expected)


# Keys, lists, settings.


def test_a_layer_built_from_a_key_shares_no_numbers_with_data_split_from_it():
    rng = jax.random.PRNGKey(456)
    layer = MultiHeadAttention(128, 8, rngs=nnx.Rngs(rng))
    draws = {
        "parent": jax.random.normal(rng, (128, 128)),
        "children": jax.random.normal(jax.random.split(rng)[1], (128, 128)),
    }
    kernels = [leaf for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param)) if leaf.ndim == 2]
    assert len(kernels) == 4
    for x in draws.values():
        for kernel in kernels:
            assert abs(np.corrcoef(np.ravel(x), np.ravel(kernel))[0, 1]) < 0.04  # five deviations
    # The trap itself: the document's key for its inputs is also that of its second kernel.
    second = draw_uniform(jax.random.split(rng, 4)[1], (128, 128))
    assert np.corrcoef(np.ravel(draws["children"]), np.ravel(second))[0, 1] > 0.97


def test_lengths_may_be_a_list():
    np.testing.assert_array_equal(
        masks.lengths([1, 2]).dense(1, 4)[:, 0], [[True, False, False, False], [True, True, False, False]]
    )
    with pytest.raises(TypeError, match="key_lengths: expected integers"):
        masks.lengths([1.5, 2.0])


def test_the_package_leaves_the_settings_of_jax_alone():
    sets = re.compile(
        r"config\.update\(|config\.jax_\w+ = |(?<!with jax\.)enable_x64\(|environ\[.JAX_\w+.\] = "
    )
    assert sets.search('jax.config.update("jax_enable_x64", True)')
    sources = sorted(pathlib.Path(regard.__file__).parent.rglob("*.py"))
    assert len(sources) > 20
    assert [source.name for source in sources if sets.search(source.read_text())] == []
