"""A decay is the log of what is kept: a number above 0 is refused where it is known, at every entrance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard import linear
from regard.interop import onnx_ops

X = np.random.default_rng(4).normal(size=(2, 3, 5, 7)).astype(np.float32)
DECAY = np.full((2, 3, 5), -0.5, np.float32)
DECAY[1, 2, 3] = 0.25
PACKED = X.swapaxes(1, 2).reshape(2, 5, 21)
ONNX = {"q_num_heads": 3, "kv_num_heads": 3, "update_rule": "gated"}
ENTRANCES = {
    "attend": lambda: linear.attend(X, X, X, decay=DECAY),
    "bfloat16": lambda: linear.attend(X, X, X, decay=jnp.asarray(DECAY, jnp.bfloat16)),
    "per channel": lambda: linear.attend(X, X, X, decay=np.repeat(DECAY[..., None], 7, -1)),
    "delta rule": lambda: linear.attend(X, X, X, decay=DECAY, rate=abs(DECAY)),
    "one for all": lambda: linear.attend(X, X, X, decay=DECAY[1:, 2:, 3:4]),
    "a valid token": lambda: linear.attend(X, X, X, decay=DECAY, valid=np.arange(5) < 4),
    "step": lambda: linear.step(None, *[X[:, :, 3]] * 3, decay=DECAY[:, :, 3]),
    "ONNX": lambda: onnx_ops.linear_attention(*[PACKED] * 3, decay=DECAY.swapaxes(1, 2), **ONNX),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_decay_above_0_is_refused(entrance):
    with pytest.raises(ValueError, match=r"decay: expected logs of .* at most 0; got up to 0\.25\."):
        ENTRANCES[entrance]()


def test_what_a_token_that_does_not_count_holds_is_not_looked_at():
    valid = np.arange(5) != 3
    hidden = linear.attend(X, X, X, decay=DECAY, valid=valid)
    np.testing.assert_array_equal(hidden, linear.attend(X, X, X, decay=np.minimum(DECAY, -0.5), valid=valid))
    kept = np.where(DECAY > 0, 0, np.where(np.arange(5) == 1, -np.inf, DECAY)).astype(np.float32)
    assert np.isfinite(linear.attend(X, X, X, decay=kept)).all()


def test_under_jit_a_state_grows_by_a_factor_above_1():
    output = jax.jit(lambda decay: linear.attend(X, X, X, decay=decay, scale=1.0, chunk=2))(DECAY)
    state = np.zeros((2, 3, 7, 7))
    for token in range(5):
        row, kept = X[:, :, token].astype(float), np.exp(DECAY[:, :, token].astype(float))
        state = state * kept[..., None, None] + row[..., :, None] * row[..., None, :]
        np.testing.assert_allclose(
            output[:, :, token], np.einsum("bhd,bhde->bhe", row, state), rtol=1e-4, atol=1e-4
        )
