"""A cache whose last token sits at the last position that int32 holds."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from regard import KVCache, masks
from test_cache import B, D, E, K, draw


@pytest.mark.parametrize("first", [0, 2])
def test_slots_beyond_the_last_position_are_empty(first):
    """The last token sits at the last position that int32 holds; what lies in slots after it is garbage."""
    cache = KVCache.create(B, K, 14, D, E, window=4, first=first)
    cache = dataclasses.replace(cache, key=jnp.full_like(cache.key, 3), value=jnp.full_like(cache.value, 77))
    query, key, value = (array[:, :, :6] for array in draw())
    far = jnp.int32(2**31 - 1 - 6)
    moved = dataclasses.replace(cache, lengths=cache.lengths + far, start=cache.start + far)
    mask = masks.causal() | masks.prefix(first)
    here, there = (start.append(key, value).attend(query, mask=mask) for start in (cache, moved))
    np.testing.assert_array_equal(here, there)
