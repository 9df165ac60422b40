"""Predicates of batch row and head, and how their tiles are classified."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from economy import mostly_slow
from regard import attend, explain, masks
from regard.engine.backends import tiled
from regard.engine.call.canonicalization import canonicalize
from regard.engine.flash.blocking import Blocking
from regard.masks import TileKind

B, G, H, K, T, S, D = 2, 5, 6, 3, 7, 11, 4
OFFSET = 3


def by_all(batch, head, query, key):
    return (query - key >= batch) & (key % (head + 1) == 0)


def shuffled(key, head, *, query, batch):
    return by_all(batch, head, query, key)


def as_in_flex_attention(b, h, q_idx, kv_idx):
    return by_all(b, h, q_idx, kv_idx)


def positional(batch, head, query, key, /):
    return by_all(batch, head, query, key)


def with_a_default(head, key, query, batch, least=0):
    return by_all(batch, head, query, key)


def of_head(query, key, head=None):
    return abs(query - key) <= head


def of_batch(batch, key):
    return key % 3 == batch


def truth(fn, leading, offset=OFFSET):
    """(*leading, T, S), cell by cell."""
    keep = np.zeros((*leading, T, S), bool)
    for place in np.ndindex(*keep.shape):
        *rows, head, t, s = place if leading else (0, *place)
        numbers = {"batch": rows[0] if rows else 0, "head": head, "query": t + offset, "key": s}
        keep[place] = fn(**numbers)
    return keep


def draw(*leading):
    rng = np.random.default_rng(5)
    *rows, heads = leading or (1,)
    shared = (*rows, heads // 2) if heads % 2 == 0 else (*rows, heads)
    shapes = ((*leading, T, D), (*shared, S, D), (*shared, S, D)) if leading else ((T, D), (S, D), (S, D))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize(
    "fn", [by_all, shuffled, as_in_flex_attention, positional, with_a_default, functools.partial(by_all)]
)
def test_a_function_takes_the_numbers_that_it_names_or_four_in_order(fn):
    mask = masks.predicate(fn).number_leading((B, H))
    kept = mask.dense(T, S, query_offset=OFFSET)
    np.testing.assert_array_equal(kept, truth(by_all, (B, H)))


BLOCKINGS = {"one head": Blocking(3, 2), "heads": Blocking(4, 5, 3)}


@pytest.mark.parametrize(
    ("blocking", "leading"),
    mostly_slow(
        itertools.product(BLOCKINGS, [(), (H,), (B, H), (B, G, H)]),
        ("one head", ()),
        ("heads", (H,)),
        ("one head", (B, H)),
        ("heads", (B, G, H)),
    ),
)
def test_calls_of_any_rank_give_each_pair_its_row_and_head(leading, blocking):
    blocking = BLOCKINGS[blocking]
    query, key, value = draw(*leading)
    stored = masks.from_array(truth(by_all, leading))
    (own, slopes), (expected, wanted) = (
        jax.jit(
            jax.value_and_grad(
                lambda q, k, v, mask=mask, run=run: jnp.sin(run(q, k, v, mask)).sum(), (0, 1, 2)
            )
        )(query, key, value)
        for mask, run in (
            (masks.predicate(by_all), lambda q, k, v, mask: tiled.run(
                canonicalize(q, k, v, mask=mask, query_offset=OFFSET), blocking, blocking)[0]),
            (stored, lambda q, k, v, mask: attend(q, k, v, mask=mask, backend="dense")),
        )
    )  # fmt: skip
    np.testing.assert_allclose(own, expected, rtol=1e-5)
    for got, one in zip(slopes, wanted, strict=True):
        np.testing.assert_allclose(got, one, atol=1e-5)
    dense = attend(query, key, value, mask=masks.predicate(by_all), query_offset=OFFSET, backend="dense")
    np.testing.assert_allclose(dense, attend(query, key, value, mask=stored, backend="dense"), atol=1e-6)


def test_positions_may_differ_by_row():
    offsets = np.array([3, -1])
    keep = np.stack([truth(by_all, (B, H), offset)[row] for row, offset in enumerate(offsets)])
    mask = masks.predicate(by_all)
    found = mask.number_leading((B, H)).dense(T, S, query_offset=offsets)
    np.testing.assert_array_equal(found, keep)
    expected = attend(*draw(B, H), mask=masks.from_array(keep))
    for backend in ("dense", "tiled"):
        got = attend(*draw(B, H), mask=mask, query_offset=offsets, backend=backend)
        np.testing.assert_allclose(got, expected, atol=1e-6)


PLACED = [
    ((3, 3), (3, 3)),
    ((3, 3), (1, 3)),
    ((B, H), (B, H)),
    ((B, G, H), (1, G, H)),
    ((B, G, H), (B, G)),
]


@pytest.mark.parametrize(("leading", "shape"), mostly_slow(PLACED, PLACED[1], PLACED[3]))
def test_positions_may_differ_by_head(leading, shape):
    rng = np.random.default_rng(3)
    places = rng.integers(-4, 9, (*shape, T)), rng.integers(-4, 9, (*shape, S))
    wide = (*shape, *(1,) * (len(leading) - len(shape)))
    query, key = (
        np.broadcast_to(one.reshape((*wide, *end)), (*leading, *end))
        for one, end in zip(places, ((T, 1), (1, S)), strict=True)
    )
    batch, *_, head = np.indices((*leading, 1, 1))[: len(leading)]
    keep = np.asarray(by_all(batch, head, query, key))
    where = {"query_positions": places[0], "key_positions": places[1]}
    expected = attend(*draw(*leading), mask=masks.from_array(keep), backend="dense")
    for backend in ("dense", "tiled"):
        got = attend(*draw(*leading), mask=masks.predicate(by_all), **where, backend=backend)
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_tiles_are_those_of_each_row_and_head():
    mask = masks.predicate(by_all) & masks.prefix([9, 4])
    keep = truth(by_all, (B, H)) & (np.arange(S) < np.array([9, 4])[:, None, None, None])
    numbered = mask.number_leading((B, H))
    codes = np.asarray(numbered.tiles(T, S, query_block=3, key_block=2, query_offset=OFFSET))
    assert codes.shape == (B, H, 3, 6)
    for b, h, i, j in np.ndindex(*codes.shape):
        tile = keep[b, h, 3 * i : 3 * i + 3, 2 * j : 2 * j + 2]
        assert codes[b, h, i, j] != TileKind.EMPTY or not tile.any()
        assert codes[b, h, i, j] != TileKind.FULL or tile.all()
    assert (codes == TileKind.EMPTY).any()
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in draw(B, H)]
    tiles = explain(*shapes, mask=mask, query_offset=OFFSET).tiles
    assert tiles.empty + tiles.partial + tiles.full == B * H


def test_by_itself_it_is_that_of_row_0_and_head_0():
    mask = masks.predicate(of_head)
    np.testing.assert_array_equal(mask.dense(4), np.eye(4, dtype=bool))
    assert mask.dense(4, leading_axes=2).shape == (1, 1, 4, 4)
    assert mask.picture(2).splitlines()[1:] == ["0 ■ ·", "1 · ■"]
    assert mask.tiles(4, query_block=2, key_block=2).tolist() == [[1, 0], [0, 1]]
    assert "of_head" in repr(mask)


def test_a_mask_that_reads_no_query_needs_no_offset():
    query, key, value = draw(B, H)
    keep = np.broadcast_to(np.arange(S) % 3 == np.arange(B)[:, None, None, None], (B, 1, T, S))
    got = attend(query, key, value, mask=masks.predicate(of_batch), backend="tiled")
    np.testing.assert_allclose(got, attend(query, key, value, mask=masks.from_array(keep)), atol=1e-6)


@pytest.mark.parametrize("backend", ["dense", "tiled"])
def test_it_closes_over_arrays_traced_or_not(backend):
    lengths, widths = jnp.array([4, 9], jnp.int32), jnp.arange(H, dtype=jnp.int32) * 2
    keep = (np.arange(S) < np.array([4, 9])[:, None, None, None]) & (
        abs(np.arange(T)[:, None] + OFFSET - np.arange(S)) <= 2 * np.arange(H)[:, None, None]
    )

    @jax.jit
    def run(query, key, value, lengths):
        mask = masks.predicate(lambda b, h, q, k: (k < lengths[b]) & (abs(q - k) <= widths[h]))
        return jnp.sum(jnp.sin(attend(query, key, value, mask=mask, query_offset=OFFSET, backend=backend)))

    def expected(query, key, value):
        return jnp.sum(jnp.sin(attend(query, key, value, mask=masks.from_array(keep))))

    got = jax.value_and_grad(run, (0, 1, 2))(*draw(B, H), lengths)
    for one, wanted in zip(
        jax.tree.leaves(got),
        jax.tree.leaves(jax.value_and_grad(expected, (0, 1, 2))(*draw(B, H))),
        strict=True,
    ):
        np.testing.assert_allclose(one, wanted, atol=1e-5)


def test_a_call_that_is_mapped_over_numbers_its_own_rows():
    stacked = [jnp.stack([x, 2 * x]) for x in draw(B, H)]
    mapped = jax.vmap(
        lambda *x: attend(*x, mask=masks.predicate(by_all), query_offset=OFFSET, backend="tiled")
    )(*stacked)
    expected = attend(*stacked, mask=masks.from_array(truth(by_all, (B, H))[None]))
    np.testing.assert_allclose(mapped, expected, atol=1e-6)


# Classification


def band(query, key):
    return abs(query - key) <= 2


def promise(query_first, query_last, key_first, key_last):
    nearest = jnp.maximum(key_first - query_last, query_first - key_last)
    return nearest > 2, jnp.maximum(key_last - query_first, query_last - key_first) <= 2


def test_promises_of_tiles_are_the_users():
    given, looked_at = masks.predicate(band, classify=promise), masks.predicate(band)
    for blocks in itertools.product((1, 2, 3), repeat=2):
        sizes = {"query_block": blocks[0], "key_block": blocks[1], "query_offset": OFFSET}
        np.testing.assert_array_equal(given.tiles(T, S, **sizes), looked_at.tiles(T, S, **sizes))
    assert looked_at.reads_cells
    assert not given.reads_cells
    assert "classify=promise" in repr(given)


def test_without_promises_every_tile_is_partial_and_nothing_is_looked_at():
    calls = []

    def counted(query, key):
        calls.append(query.size * key.size)
        return band(query, key)

    mask = masks.predicate(counted, classify="partial")
    assert (mask.tiles(T, S, query_block=2, key_block=2, query_offset=OFFSET) == TileKind.PARTIAL).all()
    assert not calls
    assert not mask.reads_cells
    joined = (mask & masks.sliding_window(2, 2)).tiles(8, query_block=2, key_block=2)
    window = masks.sliding_window(2, 2).tiles(8, query_block=2, key_block=2)
    np.testing.assert_array_equal(joined == TileKind.EMPTY, window == TileKind.EMPTY)
    assert (joined != TileKind.FULL).all()


@pytest.mark.parametrize("classify", ["exact", "partial", promise])
def test_every_classification_gives_the_same_output(classify):
    query, key, value = draw(B, H)
    problem = canonicalize(
        query, key, value, mask=masks.predicate(band, classify=classify), query_offset=OFFSET
    )
    keep = truth(lambda batch, head, query, key: band(query, key), ())
    expected = attend(query, key, value, mask=masks.from_array(keep), backend="dense")
    np.testing.assert_allclose(tiled.run(problem, Blocking(2, 3), Blocking(3, 2))[0], expected, atol=1e-6)


# Words for mistakes


@pytest.mark.parametrize(
    "fn", [lambda x: x, lambda a, b, c: a, lambda q, *, window: q, lambda query, a, b: a, lambda: True]
)
def test_a_function_that_can_be_read_in_no_way_is_told_the_ways(fn):
    with pytest.raises(
        TypeError, match=r"expected fn\(query, key\), fn\(batch, head, query, key\), or a function"
    ):
        masks.predicate(fn)


class WithoutSignature:
    """A function that does not tell its parameters, as some of C do."""

    __signature__ = object()

    def __call__(self, one, other):
        return one < other


def test_other_functions_of_two_take_query_and_key():
    for less in (lambda query, k: query < k, WithoutSignature()):
        assert masks.predicate(less).dense(2).tolist() == [[False, True], [False, False]]
    assert masks.predicate(lambda *pair: pair[0] == pair[1]).dense(2).tolist() == [
        [True, False],
        [False, True],
    ]


def test_mistakes_are_explained():
    with pytest.raises(ValueError, match='classify: expected "exact", "partial" or a function'):
        masks.predicate(band, classify="none")
    with pytest.raises(TypeError, match=r"classify: expected booleans \(empty, full\), got int32 as empty"):
        masks.predicate(band, classify=lambda a, b, c, d: (a - c, a == c)).tiles(3)
    with pytest.raises(TypeError, match="expected fn to return booleans"):
        masks.predicate(lambda head, key: head + key).dense(3)
    with pytest.raises(ValueError, match="predicate, numbered by the heads of a call: expected leading axes"):
        attend(*draw(B, H), mask=masks.predicate(by_all).number_leading((B, H + 2)), query_offset=OFFSET)
    prepared = masks.predicate(by_all).prepare(T, S, query_offset=OFFSET, leading=(B,))
    with pytest.raises(ValueError, match="predicate: expected numbers for a call of 2 leading axes"):
        attend(*draw(B, B), mask=prepared, query_offset=OFFSET)
