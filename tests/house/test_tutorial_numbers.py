"""The documents that docs/tutorials retells: their numbers come out of Regard.

The cells of the pages check theirs, and train as the documents do.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from regard import attend, masks, positions
from regard.layers import MultiHeadAttention
from regard.layers.heads import merge_heads, split_heads
from regard.layers.residual import build_norm
from tutorial_documents import PROJECTIONS, assert_golden, build_from_scratch_block, default_float

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


# Of one head, and of two: as printed, and the first row with the random bits of today.
GOLDEN = {
    False: (
        [[1.668201, 2.6169908], [2.433429, 3.3817132], [0.51508707, 1.4933776]],
        [
            [-0.7741511, -0.24243875, 2.0704143, -2.0301726],
            [-1.3947037, 0.28557885, 0.04033631, -0.86105233],
            [-0.08808593, -0.9197984, 3.9204044, -3.142049],
        ],
    ),
    True: ([[2.745961, 1.4091437]], [[-2.1585233, -0.9291224, -1.0160966, 2.2032692]]),
}


@pytest.mark.parametrize("bits_of_today", GOLDEN)
def test_a_flax_module_and_the_layer_give_the_printed_numbers(bits_of_today):
    """Heads of the layer are at full width, concatenated, without a projection of the output."""
    settings = {"head_dim": 2, "use_bias": False, "project_output": False, "rngs": nnx.Rngs(0)}
    with jax.threefry_partitionable(bits_of_today):
        start = lambda rng: [kind().init_with_output(rng, ENCODINGS) for kind in (Attention, TwoHeads)]
        single, two = jax.jit(start)(jax.random.PRNGKey(42))
    for (out, variables), golden in zip((single, two), GOLDEN[bits_of_today], strict=True):
        assert_golden(out[: len(golden)], golden, 1e-6)
        params = variables["params"]
        heads = [params[f"heads_{index}"] for index in range(2)] if "heads_0" in params else [params]
        layer = MultiHeadAttention(2, len(heads), **settings)
        for name, ours in zip(("W_q", "W_k", "W_v"), PROJECTIONS, strict=False):
            kernels = [head[name]["kernel"] for head in heads]
            getattr(layer, ours).kernel[...] = jnp.concatenate(kernels, axis=1)
        assert_golden(layer(ENCODINGS), out, 1e-6)

    # A mask reaches every head: the first query sees itself alone.
    masked = layer(ENCODINGS, mask=masks.causal())
    assert_golden(masked, TwoHeads().apply(variables, ENCODINGS, masks.causal()), 1e-6)
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


# 003, from scratch, which runs in float64.


def attend_to_random_numbers():
    rng = jax.random.PRNGKey(42)
    rngs = (rng, jax.random.split(rng)[1], jax.random.split(rng, 3)[2])
    return attend(*(jax.random.normal(rng, (2, 8, 64)) for rng in rngs))


def attend_causally():
    x = jax.random.normal(jax.random.PRNGKey(123), (1, 6, 32))
    return attend(x, x, x, mask=masks.causal(), aux=("weights",))[1]["weights"][0, 3:]


def learn_table():
    return positions.learned(jax.random.PRNGKey(789), 50, 128, stddev=0.1, dtype=default_float())


def apply_norm():
    x = jax.random.normal(jax.random.PRNGKey(222), (2, 10, 64))
    return build_norm(64, param_dtype=default_float(), rngs=nnx.Rngs(0))(x)


def apply_block():
    rng = jax.random.PRNGKey(333)
    x = jax.random.normal(jax.random.split(rng)[1], (2, 12, 256))
    block = build_from_scratch_block(rng, 256, 8, 1024)
    return block(x + positions.sinusoidal(12, 256, dtype=x.dtype)[None])


# The first numbers of each.
FROM_SCRATCH = {
    attend_to_random_numbers: [0.34534781, 0.17622493, 0.08584974, 0.29303037],
    attend_causally: [0.00123943, 0.00471846, 0.00327731, 0.9907648, 0, 0],
    learn_table: [0.13774883, 0.02764255, 0.07781822, 0.10977726],
    apply_norm: [0.61793126, -0.91801831, -0.42058383, 1.35427422],
    apply_block: [-1.78975419, 0.87749823, -0.09678928, 0.22181542],
}


@pytest.mark.slow
def test_every_part_gives_the_numbers_of_from_scratch():
    # Standard promotion: flax's LayerNorm meets float64 with a float32 of its own.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        values = jax.jit(lambda: [compute() for compute in FROM_SCRATCH])()
        row = positions.sinusoidal(50, 128, dtype=default_float())[1, :4]
    parts = dict(zip(FROM_SCRATCH, map(np.asarray, values), strict=True))
    for name, numbers in FROM_SCRATCH.items():
        assert parts[name].dtype == np.float64
        assert_golden(parts[name].ravel()[: len(numbers)], numbers, 1e-8)
    assert_golden(row, [0.84147098, 0.54030231, 0.76172041, 0.64790587], 1e-8)
    # The notebook prints these: the norm brings each position to mean 0 and deviation 1.
    assert_golden(parts[apply_norm].mean(-1), np.zeros((2, 10)))
    assert_golden(parts[apply_norm].std(-1), np.ones((2, 10)))
    assert float(np.abs(parts[apply_block]).sum()) == pytest.approx(4915.853957, abs=1e-6)


# 004, the page on index notation.


def test_attention_gives_the_numbers_of_the_page_on_index_notation():
    """They are those of its three steps; its heads, without projections, cut the width."""
    rngs = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(rng, (rows, 64)) for rng, rows in zip(rngs, (10, 20, 20), strict=True)]

    @jax.jit
    def compute(*arrays):
        joined = merge_heads(attend(*(split_heads(x, 8) for x in arrays)))
        cut = jax.vmap(attend, -2, -2)(*(x.reshape(len(x), 8, 8) for x in arrays))
        return *attend(*arrays, aux=("scores", "weights")), joined, cut.reshape(joined.shape)

    out, aux, joined, cut = compute(*arrays)
    assert_golden(out[0, :4], [0.1944103, 0.1830600, 1.1014320, -0.0557363], 1e-6)
    assert_golden(aux["weights"][0, :4], [0.0217443, 0.0234516, 0.1168045, 0.0529126], 2e-7)
    assert_golden(np.sum(out), 11.98246, 2e-6)
    Q, K, V = (np.asarray(x, np.float64) for x in arrays)
    S = np.einsum("ia,ja->ij", Q, K) / np.sqrt(64)
    A = np.exp(S) / np.exp(S).sum(1, keepdims=True)
    assert_golden(aux["scores"], S)
    assert_golden(aux["weights"], A)
    assert_golden(out, np.einsum("ij,jb->ib", A, V))
    assert_golden(joined, cut, 1e-6)
