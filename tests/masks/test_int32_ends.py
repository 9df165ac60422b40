"""Masks at both ends of int32, where differences of positions are more than it holds."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard import masks
from test_masks import BUILT_IN, PARENTS, assert_tiles_are_safe, tree

SIZE, LOW, HIGH = 5, -(2**31), 2**31 - 6  # the last position is the last that int32 holds as a bound
PLACES = list(itertools.product([LOW, -2, HIGH], repeat=2))
IDS = [4, 4, 1, 4, 2]


def documents(query, key, first_key):
    return 0 <= query - first_key < SIZE and IDS[query - first_key] == IDS[key - first_key]


LARGEST = 2**31 - 1
FAR = {
    **{text: (masks.parse(text), rule) for text, rule in BUILT_IN.items()},
    "global_tokens(0)": (masks.global_tokens(0), lambda q, k: k < 0),
    "lengths(0)": (masks.lengths(0), lambda q, k: k < 0),
    **{f"tree at {at}": (masks.tree(PARENTS, at), tree(at)) for at in (LOW, LOW + 2, -1, 5, HIGH - 2, HIGH)},
    "tree per row": (masks.tree(PARENTS, jnp.asarray([HIGH])), tree(HIGH)),
    "neighbourhood": (masks.neighbourhood((2, 2), 0, HIGH + 1), lambda q, k: q == k and 1 <= q - HIGH < 5),
    "wide neighbourhood": (
        masks.neighbourhood((1, LARGEST), LARGEST),
        lambda q, k: 0 <= q < LARGEST and 0 <= k < LARGEST,
    ),
    "window": (masks.sliding_window(LARGEST, 3), lambda q, k: q - LARGEST <= k <= q + 3),
    "window after": (masks.sliding_window(1, LARGEST), lambda q, k: q - 1 <= k <= q + LARGEST),
    "streaming": (masks.streaming(2, LARGEST - 1), lambda q, k: k <= q and (k >= q - 1 or k < LARGEST - 1)),
    "chunked": (masks.chunked(LARGEST), lambda q, k: q // LARGEST == k // LARGEST),
    "dilated": (masks.dilated(LARGEST), lambda q, k: (q - k) % LARGEST == 0),
    "prefix": (masks.prefix(HIGH + 2), lambda q, k: k < HIGH + 2),
    "lengths": (masks.lengths([LARGEST]), lambda q, k: k < LARGEST),
    "global tokens": (masks.global_tokens(HIGH + 1), lambda q, k: 0 <= q <= HIGH or k <= HIGH),
    "block diffusion": (masks.block_diffusion(LARGEST // 2, LARGEST), lambda q, k: noisy(q, k)),
    "segments": (masks.segments(IDS), documents),
}


def noisy(query, key):
    """One block, as long as the text, whose noisy tokens see no clean one."""
    half = LARGEST // 2
    return 0 <= query < 2 * half and 0 <= key < 2 * half and query // half == key // half


def test_a_tree_that_reaches_beyond_int32_is_refused():
    with pytest.raises(ValueError, match=r"parents, start: expected positions below 2147483647, .*got up to"):
        masks.tree(PARENTS, HIGH + 2)


@pytest.mark.parametrize("traced", [False, True], ids=["known", "traced"])
def test_masks_are_those_of_whole_numbers_without_end(traced):
    made = {name: mask for name, (mask, _) in FAR.items()}
    places = PLACES if traced else [(LOW, HIGH), (HIGH, LOW)]

    def look(mask, query, key):
        where = {"query_offset": query, "key_offset": key}
        return mask.dense(SIZE, **where), mask.tiles(SIZE, query_block=2, key_block=3, **where)

    @jax.jit
    def look_everywhere(made, offsets):
        if traced:
            return {name: jax.vmap(look, (None, 0, 0))(mask, *offsets) for name, mask in made.items()}
        each = {name: [look(mask, *place) for place in places] for name, mask in made.items()}
        return {name: [jnp.stack(parts) for parts in zip(*seen, strict=True)] for name, seen in each.items()}

    found = look_everywhere(made, np.asarray(places, np.int32).T)
    for name, (_, rule) in FAR.items():
        for (query, key), keep, codes in zip(places, *found[name], strict=True):
            more = (key,) if name == "segments" else ()
            expected = [[rule(query + t, key + s, *more) for s in range(SIZE)] for t in range(SIZE)]
            title = f"{name}: queries from {query}, keys from {key}"
            np.testing.assert_array_equal(keep.reshape((SIZE, SIZE)), expected, title)
            assert_tiles_are_safe(keep, codes, (2, 3), name=title)
