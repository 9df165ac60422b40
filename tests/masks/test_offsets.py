"""A piece of a longer sequence, at its own positions, is that piece of the whole."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from economy import mostly_slow
from regard import attend, explain, masks, scores
from regard.engine.dispatch.registry import COMPLETE

T, S = 5, 29
FIRST, LAST = 7, 20  # the piece of the keys
IDS = np.repeat([0, 1, 2, 0], [9, 4, 11, 5]).astype(np.int32)
MASKS = {
    "causal": masks.causal(),
    "window": masks.sliding_window(6, 2),
    "prefix": masks.causal() | masks.prefix(10),
    "lengths": masks.lengths([12, 29]),
    "chunked": masks.chunked(8) & masks.causal(),
    "dilated": masks.dilated(3) | masks.chunked(4),
    "global": masks.global_tokens(9) & ~masks.dilated(2),
    "predicate": masks.predicate(lambda q, k: (q * k) % 3 != 1),
}


def draw():
    rng = np.random.default_rng(5)
    shapes = ((2, 6, T, 7), (2, 3, S, 7), (2, 3, S, 11))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def piece(array):
    return array[..., FIRST:LAST, :]


@pytest.mark.parametrize(
    ("name", "offset", "backend"),
    mostly_slow(
        itertools.product(MASKS, ["number", "per row"], COMPLETE),
        *zip(MASKS, itertools.cycle(["per row", "number", "number", "per row"]), itertools.cycle(COMPLETE)),
    ),
)
def test_a_piece_of_the_keys_is_the_whole_with_the_rest_masked(name, offset, backend):
    query, key, value = draw()
    inside = np.zeros((1, S), bool)
    inside[:, FIRST:LAST] = True
    where, start = (13, FIRST) if offset == "number" else (jnp.array([13, 3]), jnp.array([FIRST, FIRST]))

    def whole(query, key, value):
        mask = MASKS[name] & masks.from_array(inside)
        return attend(query, key, value, mask=mask, query_offset=where, aux=("lse",), backend=backend)

    def part(query, key, value):
        arrays = query, piece(key), piece(value)
        return attend(
            *arrays, mask=MASKS[name], query_offset=where, key_offset=start, aux=("lse",), backend=backend
        )

    @jax.jit
    def evaluate(*arrays):
        loss = lambda f: lambda *arrays: (f(*arrays)[0].sum(), f(*arrays))
        return [jax.grad(loss(f), (0, 1, 2), has_aux=True)(*arrays) for f in (part, whole)]

    (found_grads, found), (expected_grads, expected) = evaluate(query, key, value)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    for one, other in zip(found_grads, expected_grads, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("backend", COMPLETE)
def test_documents_read_the_id_of_the_key_where_the_query_sits(backend):
    query, key, value = draw()
    square = jnp.concatenate([query] * 6, -2)[..., :S, :]
    expected = attend(square, key, value, mask=masks.segments(IDS) & masks.causal(), backend=backend)
    far = attend(
        square,
        key,
        value,
        mask=masks.segments(IDS) & masks.causal(),
        query_offset=1000,
        key_offset=1000,
        backend=backend,
    )
    np.testing.assert_array_equal(far, expected)


@pytest.mark.parametrize("backend", COMPLETE)
def test_dropout_follows_the_positions_of_keys(backend):
    query, key, value = draw()
    options = {"dropout_rate": 0.4, "rng": jax.random.key(3), "query_offset": 13, "backend": backend}
    inside = np.zeros((1, S), bool)
    inside[:, FIRST:LAST] = True
    whole = attend(query, key, value, mask=masks.from_array(inside), **options)
    part = attend(query, piece(key), piece(value), key_offset=FIRST, **options)
    np.testing.assert_allclose(part, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", COMPLETE)
def test_the_gradient_of_the_largest_score_follows_the_positions_of_keys(backend):
    query, key, value = draw()
    grow = scores.modifier(lambda score, batch, head, q, k: score * k.astype(score.dtype))

    @jax.grad
    def slope(query):
        options = {"score": grow, "query_offset": 13, "key_offset": FIRST, "aux": ("max_score",)}
        _, aux = attend(query, piece(key), piece(value), **options, backend=backend)
        return jnp.sum(aux["max_score"])

    rows = np.repeat(np.asarray(piece(key)), 2, 1) * np.arange(FIRST, LAST)[:, None] / 7**0.5
    best = np.argmax(np.asarray(query) @ np.swapaxes(rows, -1, -2), -1)
    expected = np.take_along_axis(rows, best[..., None], -2)
    np.testing.assert_allclose(slope(query), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("block", [(1, 1), (2, 3), (4, 8)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_verdicts_of_a_piece_are_promises(name, block):
    mask = MASKS[name]
    offsets = {"query_offset": 13, "key_offset": FIRST, "leading_axes": 1}
    cells = np.asarray(mask.dense(T, LAST - FIRST, **offsets))
    codes = np.asarray(mask.tiles(T, LAST - FIRST, query_block=block[0], key_block=block[1], **offsets))
    for *lead, i, j in np.ndindex(*codes.shape):
        tile = cells[
            (*lead, slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
        ]
        assert codes[(*lead, i, j)] != masks.TileKind.EMPTY or not tile.any()
        assert codes[(*lead, i, j)] != masks.TileKind.FULL or tile.all()
    assert (mask.dense(T, S, query_offset=13, leading_axes=1)[..., FIRST:LAST] == cells).all()


def test_moved_keys_ask_where_the_queries_sit():
    query, key, value = draw()
    square = key[:, :, :T], value[:, :, :T]
    for bad in (3, jnp.array([3, 4])):
        with pytest.raises(
            ValueError, match="query_offset: expected where the queries sit, because key_offset"
        ):
            attend(query, *square, mask=masks.causal(), key_offset=bad)
    attend(query, *square, key_offset=3)
    assert (attend(query, *square, mask=masks.causal(), key_offset=0) != 0).any()
    with pytest.raises(ValueError, match="key_offset: expected one integer, or one per first"):
        attend(query, *square, key_offset=jnp.array([1, 2, 3]))
    with pytest.raises(TypeError, match="key_offset: expected integers"):
        attend(query, *square, key_offset=1.5)


def test_explain_counts_tiles_where_the_keys_sit():
    query, key = (jax.ShapeDtypeStruct((1, n, 8), "float32") for n in (256, 256))
    report = explain(query, key, key, mask=masks.causal(), query_offset=256, key_offset=0)
    assert report.tiles.full == 4
    report = explain(query, key, key, mask=masks.causal(), query_offset=256, key_offset=256)
    assert (report.tiles.empty, report.tiles.partial, report.tiles.full) == (1, 2, 1)
