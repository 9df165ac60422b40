"""The source of docs/tutorials/queries_keys_values.md: Regard has its numbers and not its mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard import attend, masks
from tutorial_documents import assert_golden

B, H, T, S, D, E = 2, 5, 3, 7, 11, 13


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


GOLDEN = {
    42: {
        "mask": [[[0, 0, 1]], [[1, 1, 1]]],
        "first": [-0.2397909, -0.4098152, 0.3671178, 1.1878965],
        "second": [-0.3136771, -1.1991918, 0.7579023, -0.9075642],
        "weights": [0.3144324, 0.3125241, 0.3730436],
    },
    0: {
        "mask": [[[1, 0, 0]], [[1, 1, 1]]],
        "first": [1.3161184, 0.7542728, 0.1617093, -0.0348331],
        "weights": [0.3259247, 0.6165139, 0.0575615],
    },
}


@pytest.mark.parametrize("seed", GOLDEN)
def test_attention_gives_the_numbers_of_the_fragment_however_its_mask_is_read(seed):
    golden, rng = GOLDEN[seed], jax.random.PRNGKey(seed)
    # Inputs and mask from one key, as in the fragment; Regard itself never draws two things from one.
    query, key, value = jax.random.normal(rng, (3, 2, 3, 4))
    mask = jax.random.randint(rng, (2, 1, 3), 0, 2)
    np.testing.assert_array_equal(mask, golden["mask"])
    readings = (mask[:, 0], mask, np.broadcast_to(mask, (2, 3, 3)))
    for reading in (masks.valid_keys(readings[0]), *readings[1:]):
        out, aux = attend(query, key, value, mask=reading, aux=("weights",))
        assert out.shape == (2, 3, 4)
        assert aux["weights"].shape == (2, 3, 3)
        assert_golden(out[0, 0], golden["first"], 1e-6)
        assert_golden(aux["weights"][1, 0], golden["weights"], 3e-7)
        if "second" in golden:
            assert_golden(out[1, 0], golden["second"], 1e-6)


def test_dropout_shares_no_numbers_with_inputs_drawn_from_the_same_key():
    rng, size = jax.random.key(3), 97
    x = jax.random.normal(rng, (size, size))
    # Equal scores and the identity as value show the pattern itself: 0 where dropped.
    equal = jnp.zeros((size, 1))
    kept = attend(equal, equal, jnp.eye(size), dropout_rate=0.5, rng=rng) > 0
    uniform = jax.random.uniform(rng, (size, size))
    for numbers in (x, uniform, jax.random.bits(rng, (size, size)) >> 31):
        correlation = np.corrcoef(np.ravel(numbers).astype(float), np.ravel(kept).astype(float))[0, 1]
        assert abs(correlation) < 0.05  # five deviations of 9,409 independent pairs
    assert 0.45 < float(kept.mean()) < 0.55


def test_a_row_with_nothing_to_attend_to_is_zero_not_uniform():
    query, key, value = draw(0, B, T, D), draw(1, B, S, D), draw(2, B, S, E)
    valid = np.zeros((B, S), bool)
    valid[1, 2] = True
    out, aux = attend(query, key, value, mask=masks.valid_keys(valid), aux=("weights", "entropy"))
    assert not np.any(out[0])
    assert not np.any(aux["weights"][0])
    assert not np.any(aux["entropy"])
    np.testing.assert_allclose(out[1], np.broadcast_to(value[1, 2], (T, E)), rtol=1e-6)


@pytest.mark.parametrize("heads", [H, B])
def test_padding_of_one_row_per_example_is_refused_or_right_with_heads(heads):
    query = draw(3, B, heads, T, D)
    mask = np.array([[[1, 1, 0]], [[0, 1, 1]]])
    with pytest.raises(ValueError, match=r"mask: expected an array that broadcasts.*mask\[:, None\]"):
        attend(query, query, query, mask=mask)
    for reading in (mask[:, None], masks.valid_keys(mask[:, 0])):
        _, aux = attend(query, query, query, mask=reading, aux=("weights",))
        np.testing.assert_array_equal(
            np.asarray(aux["weights"]) > 0, np.broadcast_to(mask[:, None] > 0, (B, heads, T, T))
        )


def test_an_additive_mask_is_refused_as_a_mask_and_right_as_a_bias():
    query, key, value = draw(4, 1, D), draw(5, 3, D), draw(6, 3, E)
    additive = np.array([[0, -np.inf, 0]], np.float32)
    with pytest.raises(TypeError, match="pass additive masks as `bias=`"):
        attend(query, key, value, mask=additive)
    expected = attend(query, key, value, mask=[[True, False, True]])
    np.testing.assert_array_equal(attend(query, key, value, bias=additive), expected)
