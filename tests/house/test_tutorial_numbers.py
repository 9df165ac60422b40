"""The documents that docs/tutorials retells: numbers that no cell of the pages checks come out of Regard."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from regard import attend, masks
from regard.layers import MultiHeadAttention
from tutorial_documents import PROJECTIONS, assert_golden

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
