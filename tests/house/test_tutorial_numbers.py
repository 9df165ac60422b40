"""The documents that docs/tutorials retells: their numbers come out of Regard.

Those of layers in float32 are in test_multi_head.py, test_feed_forward.py and test_blocks.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import tutorial_documents as documents
from regard import attend, masks, positions
from regard.layers import MultiHeadAttention
from regard.layers.heads import merge_heads, split_heads
from regard.layers.residual import build_norm
from tutorial_documents import PROJECTIONS, assert_golden, default_float

# 000, the tired cat.


def test_attention_gives_the_numbers_of_the_tired_cat():
    rngs = jax.random.split(jax.random.key(42), 4)[1:]
    out, aux = attend(*(jax.random.normal(rng, (4, 8)) for rng in rngs), aux=("weights",))
    golden = [
        [0.6928185, 0.0508164, 0.0924486, 0.1639164],
        [0.2213887, 0.3612903, 0.2154238, 0.2018971],
        [0.2991428, 0.1330853, 0.2007512, 0.3670208],
        [0.2975411, 0.5813310, 0.0617600, 0.0593680],
    ]
    assert_golden(aux["weights"], golden, 3e-7)
    first = [-0.3014034, -0.9572111, -0.9110382, 0.0312845, -0.2483003, 0.2923333, 0.3162348, -0.3313690]
    assert_golden(out[0], first, 1e-6)
    # Every row of weights sums to 1.
    assert_golden(np.asarray(aux["weights"]).sum(-1), np.ones(4), 3e-7)
    table = positions.sinusoidal(50, 64)
    assert_golden(table[0, :4], [0, 1, 0, 1], 0)
    assert_golden(table[1, :4], [0.8414710, 0.5403023, 0.6815614, 0.7317610], 1e-7)


def make_update(loss):
    """A step as both documents take it: SGD at 0.001."""

    @jax.jit
    def update(params, *batch):
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.001 * g, params, gradient), value

    return update


@pytest.mark.slow
def test_training_as_written_prints_its_numbers_and_answers_no_to_everything():
    rng, init = jax.random.split(jax.random.key(42))
    embedding, block, head = jax.random.split(init, 3)
    graph, state = nnx.split(documents.build_tired_cat_block(block, 32, 4, 128))
    params = {"block": state, "bias": jnp.zeros(2), "head": jax.random.normal(head, (32, 2)) * 0.02}
    params["embedding"] = jax.random.normal(embedding, (100, 32)) * 0.02
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 15_842

    def logits(params, tokens):
        hidden = params["embedding"][tokens] + positions.sinusoidal(8, 32)[None]
        return nnx.merge(graph, params["block"])(hidden).mean(1) @ params["head"] + params["bias"][None]

    def draw_batch(rng, size):
        tokens = jax.random.randint(rng, (size, 8), 0, 100)
        return tokens, (tokens.sum(1) > 400).astype(jnp.int32)

    def loss(params, tokens, labels):
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, tokens), labels).mean()

    update, printed = make_update(loss), []
    predict = jax.jit(lambda params, tokens: logits(params, tokens).argmax(-1))
    for step in range(100):
        rng, batch_rng = jax.random.split(rng)
        tokens, labels = draw_batch(batch_rng, 32)
        params, value = update(params, tokens, labels)
        if step % 20 == 19:
            printed.append((float(value), float(np.mean(predict(params, tokens) == labels))))
    golden = [(0.6726, 0.6875), (0.7084, 0.4062), (0.6796, 0.6250), (0.7014, 0.4375), (0.6664, 0.7500)]
    np.testing.assert_allclose(printed, golden, rtol=0, atol=5.1e-5)  # four printed digits
    # The printed accuracies judge 32 examples just trained on; on new ones the model says 0 to everything.
    tokens, labels = draw_batch(jax.random.key(777), 20_000)
    assert not predict(params, tokens).any()
    assert float((labels == 0).mean()) == pytest.approx(0.5205, abs=5e-5)


# 001, a module and jit.

ENCODINGS = np.array([[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]], np.float32)


class Attention(linen.Module):
    """The document's module around `attend`."""

    @linen.compact
    def __call__(self, x, mask=None):
        query, key, value = (linen.Dense(2, use_bias=False, name=name)(x) for name in ("W_q", "W_k", "W_v"))
        return attend(query, key, value, mask=mask)


class TwoHeads(linen.Module):
    def setup(self):
        self.heads = [Attention() for _ in range(2)]

    def __call__(self, x, mask=None):
        return jnp.concatenate([head(x, mask) for head in self.heads], axis=-1)


def load_heads(params):
    """The same parameters in Regard's own layer: every head at full width, concatenated, no projection."""
    settings = {"head_dim": 2, "use_bias": False, "project_output": False}
    layer = MultiHeadAttention(2, len(params), rngs=nnx.Rngs(0), **settings)
    for name, ours in zip(("W_q", "W_k", "W_v"), PROJECTIONS, strict=False):
        kernels = [params[f"heads_{index}"][name]["kernel"] for index in range(len(params))]
        getattr(layer, ours).kernel[...] = jnp.concatenate(kernels, axis=1)
    return layer


def test_a_flax_module_and_the_layer_agree_on_the_random_bits_of_today():
    rng = jax.random.PRNGKey(42)
    with jax.threefry_partitionable(True):
        single, one = jax.jit(Attention().init_with_output)(rng, ENCODINGS)
        two, variables = jax.jit(TwoHeads().init_with_output)(rng, ENCODINGS)
    with jax.threefry_partitionable(False):
        old = jax.jit(Attention().init)(rng, ENCODINGS)["params"]["W_q"]["kernel"]
    assert_golden(single, [[2.745961, 1.4091437], [4.1035733, 2.573457], [0.9419719, -0.24929526]], 1e-6)
    golden = [
        [-2.1585233, -0.9291224, -1.0160966, 2.2032692],
        [-1.8306779, -0.7111306, -0.8444760, 1.9673356],
        [-2.6130450, -1.2279204, -1.4894067, 2.8670964],
    ]
    assert_golden(two, golden, 1e-6)
    # The printed numbers, which test_multi_head.py has, need the random bits of their time.
    new = one["params"]["W_q"]["kernel"]
    assert_golden(new, [[-0.20432013, -0.40271446], [-0.88146311, -0.01891009]], 1e-7)
    assert_golden(old, [[0.16799836, -0.14157924], [0.06251401, 0.34933484]], 1e-7)

    # A mask reaches every head: the first query sees itself alone.
    layer, causal = load_heads(variables["params"]), masks.causal()
    masked = jax.jit(TwoHeads().apply)(variables, ENCODINGS, causal)
    assert_golden(layer(ENCODINGS), golden, 1e-6)
    assert_golden(layer(ENCODINGS, mask=causal), masked, 1e-6)
    kernels = [head["W_v"]["kernel"] for head in variables["params"].values()]
    assert_golden(masked[0], np.concatenate([ENCODINGS[0] @ np.asarray(kernel) for kernel in kernels]), 1e-6)


# 002, the fragment.

FRAGMENT = {
    42: {
        "mask": [[[0, 0, 1]], [[1, 1, 1]]],
        "out": [
            [-0.2397909, -0.4098152, 0.3671178, 1.1878965],
            [-0.3136771, -1.1991918, 0.7579023, -0.9075642],
        ],
        "weights": [0.3144324, 0.3125241, 0.3730436],
    },
    0: {
        "mask": [[[1, 0, 0]], [[1, 1, 1]]],
        "out": [[1.3161184, 0.7542728, 0.1617093, -0.0348331]],
        "weights": [0.3259247, 0.6165139, 0.0575615],
    },
}


@jax.jit
def read_fragment(rng):
    """Inputs and mask from one key, as in the fragment; Regard itself never draws two things from one."""
    arrays, mask = jax.random.normal(rng, (3, 2, 3, 4)), jax.random.randint(rng, (2, 1, 3), 0, 2)
    readings = (masks.valid_keys(mask[:, 0]), mask, jnp.broadcast_to(mask, (2, 3, 3)))
    return mask, [attend(*arrays, mask=reading, aux=("weights",)) for reading in readings]


def test_attention_gives_the_numbers_of_the_fragment_however_its_mask_is_read():
    for seed, golden in FRAGMENT.items():
        mask, readings = read_fragment(jax.random.PRNGKey(seed))
        np.testing.assert_array_equal(mask, golden["mask"])
        for out, aux in readings:
            assert (out.shape, aux["weights"].shape) == ((2, 3, 4), (2, 3, 3))
            assert_golden(np.asarray(out)[: len(golden["out"]), 0], golden["out"], 1e-6)
            assert_golden(np.asarray(aux["weights"])[1, 0], golden["weights"], 3e-7)


# 003, from scratch, which runs in float64; the same draws in float32 are other numbers.


def draw_input(seed, *shape):
    """The key of a layer's kernels, and its input."""
    rng = jax.random.PRNGKey(seed)
    return rng, jax.random.normal(jax.random.split(rng)[1], shape)


def attend_to_random_numbers():
    rng = jax.random.PRNGKey(42)
    rngs = (rng, jax.random.split(rng)[1], jax.random.split(rng, 3)[2])
    return attend(*(jax.random.normal(rng, (2, 8, 64)) for rng in rngs))


def attend_causally():
    x = jax.random.normal(jax.random.PRNGKey(123), (1, 6, 32))
    return attend(x, x, x, mask=masks.causal(), aux=("weights",))[1]["weights"][0, 3:]


def learn_table():
    return positions.learned(jax.random.PRNGKey(789), 50, 128, stddev=0.1, dtype=default_float())


def apply_several_heads():
    rng, x = draw_input(456, 2, 10, 128)
    return documents.build_from_scratch_attention(rng, 128, 8)(x)


def apply_branch():
    rng, x = draw_input(111, 2, 10, 128)
    return documents.build_from_scratch_feed_forward(rng, 128, 512)(x)


def apply_norm():
    x = jax.random.normal(jax.random.PRNGKey(222), (2, 10, 64))
    return build_norm(64, param_dtype=default_float(), rngs=nnx.Rngs(0))(x)


def apply_block():
    rng, x = draw_input(333, 2, 12, 256)
    return documents.build_from_scratch_block(rng, 256, 8, 1024)(
        x + positions.sinusoidal(12, 256, dtype=x.dtype)[None]
    )


# The first numbers of each; of a norm and a block, one more below.
FROM_SCRATCH = {
    "float64": {
        attend_to_random_numbers: [0.34534781, 0.17622493, 0.08584974, 0.29303037],
        attend_causally: [0.00123943, 0.00471846, 0.00327731, 0.9907648, 0, 0],
        learn_table: [0.13774883, 0.02764255, 0.07781822, 0.10977726],
        apply_norm: [0.61793126, -0.91801831, -0.42058383, 1.35427422],
        apply_several_heads: [-0.03356099, -0.26458602, -0.38352605, -0.60006296],
        apply_branch: [-0.3239096, 0.54247938, -0.24014014, 0.06655619],
        apply_block: [-1.78975419, 0.87749823, -0.09678928, 0.22181542],
    },
    "float32": {
        attend_to_random_numbers: [0.4377626, 0.2660207, 0.742528, -1.2390208],
        attend_causally: [0.01195712, 0.01344454, 0.01553801, 0.9590603, 0, 0],
        learn_table: [0.0751191, -0.0952760, 0.0250922, 0.0735027],
        apply_norm: [-1.0485414, -0.9819734, 0.3259418, 0.9923665],
    },
}


@pytest.mark.parametrize("width", FROM_SCRATCH)
def test_every_part_gives_the_numbers_of_from_scratch(width):
    """1e-8 is what the printed digits of float64 allow."""
    golden, tolerance = FROM_SCRATCH[width], {"float64": 1e-8, "float32": 2e-6}[width]
    # Standard promotion: flax's LayerNorm meets float64 with a float32 of its own.
    with jax.enable_x64(width == "float64"), jax.numpy_dtype_promotion("standard"):
        values = jax.jit(lambda: [compute() for compute in golden])()
        row = positions.sinusoidal(50, 128, dtype=default_float())[1, :4]
    parts = dict(zip(golden, map(np.asarray, values), strict=True))
    for name, numbers in golden.items():
        assert parts[name].dtype == width
        assert_golden(parts[name].ravel()[: len(numbers)], numbers, tolerance)
    assert_golden(row, [0.84147098, 0.54030231, 0.76172041, 0.64790587], tolerance)
    # The notebook prints these: the norm brings each position to mean 0 and deviation 1.
    assert_golden(parts[apply_norm].mean(-1), np.zeros((2, 10)))
    assert_golden(parts[apply_norm].std(-1), np.ones((2, 10)))
    if width == "float64":
        assert float(np.abs(parts[apply_block]).sum()) == pytest.approx(4915.853957, abs=1e-6)


@pytest.mark.slow
def test_training_as_written_prints_its_losses_and_learns_nothing():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        rng = jax.random.PRNGKey(42)
        _, embedding_rng, output_rng, data_rng = jax.random.split(rng, 4)
        embedding = documents.draw_normal(embedding_rng, (18, 64), 200)  # deviation 0.1
        output = documents.draw_normal(output_rng, (64, 18), 200)
        graph, state = nnx.split(documents.build_from_scratch_block(rng, 64, 4, 256))
        tokens = jax.random.randint(data_rng, (500, 8), 0, 16)
        inputs = jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=16)
        targets = jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=17)
        train, held_out = (inputs[:400], targets[:400]), (inputs[400:], targets[400:])

        def logits(state, inputs):
            table = positions.sinusoidal(9, 64, dtype=jnp.float64)
            return nnx.merge(graph, state)(embedding[inputs] + table[None]) @ output

        def loss(state, inputs, targets):
            return optax.softmax_cross_entropy_with_integer_labels(logits(state, inputs), targets).mean()

        update, measure, printed = make_update(loss), jax.jit(loss), []
        for step in range(20):
            state, _ = update(state, *train)
            if step in (0, 5, 10, 15, 19):
                printed.append((measure(state, *train), measure(state, *held_out)))
        right = logits(state, held_out[0]).argmax(-1) == held_out[1]
    golden = [(3.1552, 3.1504), (3.1455, 3.1403), (3.1363, 3.1306), (3.1275, 3.1214), (3.1207, 3.1143)]
    np.testing.assert_allclose(printed, golden, rtol=0, atol=5.1e-5)  # four printed digits
    # Worse than answering every token with the same probability, ln 18 nats, and hardly ever right.
    assert np.min(printed) > np.log(18)
    assert float(np.mean(right)) == pytest.approx(0.0489, abs=5e-5)


# 004, the page on index notation.


def test_attention_gives_the_numbers_of_the_page_on_index_notation():
    """They are those of its three steps, and of jax.nn; its heads, without projections, cut the width."""
    rngs = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(rng, (rows, 64)) for rng, rows in zip(rngs, (10, 20, 20), strict=True)]

    @jax.jit
    def compute(*arrays):
        heads = attend(*(split_heads(x, 8) for x in arrays))
        others = [x[None, :, None] for x in arrays]  # (batch, length, heads, width) there
        return (
            *attend(*arrays, aux=("scores", "weights")),
            merge_heads(heads),
            jnp.concatenate(
                [attend(*parts) for parts in zip(*(jnp.split(x, 8, -1) for x in arrays), strict=True)], -1
            ),
            jax.nn.dot_product_attention(*others)[0, :, 0],
        )

    out, aux, joined, cut, theirs = compute(*arrays)
    assert_golden(out[0, :4], [0.1944103, 0.1830600, 1.1014320, -0.0557363], 1e-6)
    assert_golden(aux["weights"][0, :4], [0.0217443, 0.0234516, 0.1168045, 0.0529126], 2e-7)
    assert_golden(np.sum(out), 11.98246, 2e-6)
    Q, K, V = (np.asarray(x, np.float64) for x in arrays)
    S = np.einsum("ia,ja->ij", Q, K) / np.sqrt(64)
    A = np.exp(S) / np.exp(S).sum(1, keepdims=True)
    assert_golden(aux["scores"], S)
    assert_golden(aux["weights"], A)
    assert_golden(out, np.einsum("ij,jb->ib", A, V))
    assert_golden(out, theirs)
    assert_golden(joined, cut, 1e-6)
