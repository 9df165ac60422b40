"""A piece of a longer sequence, at its own positions, is that piece of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from mesh_cases import draw
from refusals import assert_refused
from regard import attend, explain, masks, scores
from regard.engine.backends import tiled
from regard.engine.call.canonicalization import canonicalize
from regard.engine.dispatch.registry import COMPLETE
from regard.engine.flash.blocking import Blocking
from test_masks import assert_tiles_are_safe

T, S = 5, 29
FIRST, LAST = 7, 20  # the piece of the keys
INSIDE = np.isin(np.arange(S), np.arange(FIRST, LAST))[None]
ARRAYS = draw((2, 6, T, 7), (2, 3, S, 7), (2, 3, S, 11), seed=5)
MASKS = {
    "causal": masks.causal(), "window": masks.sliding_window(6, 2),
    "prefix": masks.causal() | masks.prefix(10), "lengths": masks.lengths([12, 29]),
    "chunked": masks.chunked(8) & masks.causal(), "dilated": masks.dilated(3) | masks.chunked(4),
    "global": masks.global_tokens(9) & ~masks.dilated(2),
    "predicate": masks.predicate(lambda q, k: (q * k) % 3 != 1),
}  # fmt: skip


def piece(array):
    return array[..., FIRST:LAST, :]


def test_a_piece_of_the_keys_is_the_whole_with_the_rest_masked():
    """In one tile, in many and by the definition, with gradients, an offset per row, and lengths."""
    mask = MASKS["causal"] & MASKS["lengths"] | MASKS["chunked"]
    options = {"query_offset": jnp.array([13, 3]), "aux": ("lse",)}
    moved = {"mask": mask, "key_offset": jnp.array([FIRST, FIRST]), **options}
    part = lambda query, key, value: attend(query, piece(key), piece(value), backend="tiled", **moved)

    def whole(query, key, value):
        return attend(query, key, value, mask=mask & masks.from_array(INSIDE), backend="dense", **options)

    def small(query, key, value):
        problem = canonicalize(query, piece(key), piece(value), **moved)
        return tiled.run(problem, forward=Blocking(3, 2), backward=Blocking(2, 3))

    @jax.jit
    def evaluate(*arrays):
        loss = lambda f: lambda *arrays: (f(*arrays)[0].sum(), f(*arrays))
        return [jax.grad(loss(f), (0, 1, 2), has_aux=True)(*arrays) for f in (whole, part, small)]

    expected, *found = evaluate(*ARRAYS)
    for one in found:
        oracle.assert_close(one, expected, atol=2e-6)


def test_dropout_follows_the_positions_of_keys():
    """In tiles as by the definition."""
    options = {"dropout_rate": 0.4, "rng": jax.random.key(3), "query_offset": 13}

    @jax.jit
    def both(query, key, value):
        part = attend(query, piece(key), piece(value), key_offset=FIRST, backend="tiled", **options)
        return part, attend(query, key, value, mask=masks.from_array(INSIDE), backend="dense", **options)

    np.testing.assert_allclose(*both(*ARRAYS), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", COMPLETE)
def test_the_gradient_of_the_largest_score_follows_the_positions_of_keys(backend):
    query, key, value = ARRAYS
    grow = scores.modifier(lambda score, batch, head, q, k: score * k.astype(score.dtype))

    @jax.jit
    @jax.grad
    def slope(query):
        options = {"score": grow, "query_offset": 13, "key_offset": FIRST, "aux": ("max_score",)}
        _, aux = attend(query, piece(key), piece(value), **options, backend=backend)
        return jnp.sum(aux["max_score"])

    rows = np.repeat(np.asarray(piece(key)), 2, 1) * np.arange(FIRST, LAST)[:, None] / 7**0.5
    best = np.argmax(np.asarray(query) @ np.swapaxes(rows, -1, -2), -1)
    expected = np.take_along_axis(rows, best[..., None], -2)
    np.testing.assert_allclose(slope(query), expected, rtol=1e-6, atol=1e-6)


def test_verdicts_of_a_piece_are_promises():
    offsets = {"query_offset": 13, "key_offset": FIRST, "leading_axes": 1}
    sides = (1, 1), (2, 3)

    def look(mask):
        tiles = [mask.tiles(T, LAST - FIRST, query_block=q, key_block=k, **offsets) for q, k in sides]
        whole = mask.dense(T, S, query_offset=13, leading_axes=1)
        return mask.dense(T, LAST - FIRST, **offsets), whole, tiles

    found = jax.jit(lambda made: {name: look(mask) for name, mask in made.items()})(MASKS)
    for name, (keep, whole, codes) in found.items():
        np.testing.assert_array_equal(keep, whole[..., FIRST:LAST], name)
        for blocks, kinds in zip(sides, codes, strict=True):
            assert_tiles_are_safe(keep, kinds, blocks, name=name)


def test_moved_keys_ask_where_the_queries_sit():
    call = lambda offset, mask=None: attend(*(x[:, :, :T] for x in ARRAYS), mask=mask, key_offset=offset)
    needed, causal = "query_offset: expected where the queries sit, because key_offset", masks.causal()
    assert_refused(
        (lambda: call(3, causal), needed),
        (lambda: call(jnp.array([3, 4]), causal), needed),
        (lambda: call(jnp.array([1, 2, 3])), "key_offset: expected one integer, or one per first"),
        (lambda: call(1.5), "key_offset: expected integers", TypeError),
    )
    call(3)
    assert (call(0, causal) != 0).any()


def test_explain_counts_tiles_where_the_keys_sit():
    query, key = (jax.ShapeDtypeStruct((1, n, 8), "float32") for n in (256, 256))
    report = explain(query, key, key, mask=masks.causal(), query_offset=256, key_offset=0)
    assert report.tiles.full == 4
    report = explain(query, key, key, mask=masks.causal(), query_offset=256, key_offset=256)
    assert (report.tiles.empty, report.tiles.partial, report.tiles.full) == (1, 2, 1)
