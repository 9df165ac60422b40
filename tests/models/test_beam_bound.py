"""When a beam search is over: beside every text there is."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from regard.models import beam_search
from test_beams import find_all, gains_of_all
from test_generation import build


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_a_search_is_over_when_no_longer_text_can_win(penalty):
    model, length = nnx.clone(build(vocab_size=2)), 7
    model.head.kernel[...] = 3 * model.head.kernel[...]
    gains, won = gains_of_all(model, 2, 2 + length), set()
    prompts = [list(prompt) for size in (1, 2, 3) for prompt in itertools.product(range(2), repeat=size)]
    settings = {"num_beams": 2, "max_tokens": length, "length_penalty": penalty, "stop_tokens": (1,)}
    found = beam_search(model, prompts, **settings)
    for row, prompt in enumerate(prompts):
        every = find_all(gains, tuple(prompt), 2, length, (1,), penalty)
        assert found.rows()[row] == [text for _, text in every[:2]], prompt
        np.testing.assert_allclose(found.scores[row], [score for score, _ in every[:2]], atol=1e-5)
        won.add(len(every[0][1]))
    assert len(won) > (penalty > 0)
    # Not a number is no text.
    model.head.kernel[...] = model.head.kernel[...].at[0, 0].set(jnp.nan)
    found = beam_search(model, prompts, **settings)
    assert not any(found.rows())
    assert np.all(np.asarray(found.scores) == -np.inf)
