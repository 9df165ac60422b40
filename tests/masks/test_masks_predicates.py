"""Predicates of batch row and head, and how their tiles are classified."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from mesh_cases import draw as numbers
from mesh_cases import evaluate
from regard import attend, explain, masks, scores
from regard.engine.backends import dense, tiled
from regard.engine.call.canonicalization import canonicalize
from regard.engine.flash.blocking import Blocking
from regard.masks import TileKind
from test_masks import assert_tiles_are_safe

B, G, H, T, S, D = 2, 5, 6, 7, 11, 4
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
    """Query heads share a key head in pairs, where they can."""
    *rows, heads = leading
    shared = (*rows, heads // 2 if heads % 2 == 0 else heads)
    return numbers((*leading, T, D), (*shared, S, D), (*shared, S, D))


def test_a_function_takes_the_numbers_that_it_names_or_four_in_order():
    some = by_all, shuffled, as_in_flex_attention, positional, with_a_default, functools.partial(by_all)
    made = [masks.predicate(fn).number_leading((B, H)) for fn in some]
    tables = jax.jit(lambda: [m.dense(T, S, query_offset=OFFSET) for m in made])()
    for fn, kept in zip(some, tables, strict=True):
        np.testing.assert_array_equal(kept, truth(by_all, (B, H)), str(fn))


@pytest.mark.parametrize(("blocking", "leading"), [((3, 2), (B, H)), ((4, 5, 3), (B, G, H))])
def test_calls_of_any_rank_give_each_pair_its_row_and_head(leading, blocking):
    arrays, (cotangent,) = draw(*leading), numbers((*leading, T, D), seed=7)
    expected = oracle.batched(*arrays, keep=truth(by_all, leading), cotangent=cotangent).parts
    sides, options = Blocking(*blocking), {"mask": masks.predicate(by_all), "query_offset": OFFSET}
    for run in (functools.partial(tiled.run, forward=sides, backward=sides), dense.run):
        call = lambda *arrays, run=run: run(canonicalize(*arrays, **options))[0]
        oracle.assert_close(evaluate(call, arrays, cotangent), expected, rtol=1e-7, atol=1e-5)


def test_positions_may_differ_by_row():
    offsets = np.array([3, -1])
    keep = np.stack([truth(by_all, (B, H), offset)[row] for row, offset in enumerate(offsets)])
    mask = masks.predicate(by_all)
    np.testing.assert_array_equal(mask.number_leading((B, H)).dense(T, S, query_offset=offsets), keep)
    expected = oracle.batched(*draw(B, H), keep=keep).output
    calls = [functools.partial(attend, mask=mask, backend=backend) for backend in ("dense", "tiled")]
    for got in jax.jit(lambda *arrays: [call(*arrays, query_offset=offsets) for call in calls])(*draw(B, H)):
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_tiles_are_those_of_each_row_and_head():
    mask = masks.predicate(by_all) & masks.prefix([9, 4])
    keep = truth(by_all, (B, H)) & (np.arange(S) < np.array([9, 4])[:, None, None, None])
    numbered = mask.number_leading((B, H))
    codes = np.asarray(numbered.tiles(T, S, query_block=3, key_block=2, query_offset=OFFSET))
    assert codes.shape == (B, H, 3, 6)
    assert_tiles_are_safe(keep, codes, (3, 2))
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
    arrays = draw(B, H)
    keep = np.broadcast_to(np.arange(S) % 3 == np.arange(B)[:, None, None, None], (B, 1, T, S))
    of_four = masks.predicate(lambda b, h, q_idx, kv_idx: of_batch(b, kv_idx) & jnp.ones_like(q_idx, bool))
    remove = lambda score, b, h, q_idx, kv_idx: jnp.where(of_batch(b, kv_idx), score, -jnp.inf)
    calls = {"mask": masks.predicate(of_batch)}, {"mask": of_four}, {"score": scores.modifier(remove)}
    for got in jax.jit(lambda *arrays: [attend(*arrays, **call, backend="tiled") for call in calls])(*arrays):
        np.testing.assert_allclose(got, oracle.batched(*arrays, keep=keep).output, atol=1e-6)


def band(query, key):
    return abs(query - key) <= 2


def promise(query_first, query_last, key_first, key_last):
    nearest = jnp.maximum(key_first - query_last, query_first - key_last)
    return nearest > 2, jnp.maximum(key_last - query_first, query_last - key_first) <= 2


def test_promises_of_tiles_are_the_users():
    given, looked_at = masks.predicate(band, classify=promise), masks.predicate(band)
    sides = list(itertools.product((1, 3), repeat=2))
    look = lambda mask: [mask.tiles(T, S, query_block=q, key_block=k, query_offset=OFFSET) for q, k in sides]
    jax.tree.map(np.testing.assert_array_equal, *jax.jit(lambda: (look(given), look(looked_at)))())
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
    assert max(calls) <= 15, "examples, to see what it reads beside positions"
    assert not mask.reads_cells
    joined = (mask & masks.sliding_window(2, 2)).tiles(8, query_block=2, key_block=2)
    window = masks.sliding_window(2, 2).tiles(8, query_block=2, key_block=2)
    np.testing.assert_array_equal(joined == TileKind.EMPTY, window == TileKind.EMPTY)
    assert (joined != TileKind.FULL).all()


def test_a_function_that_can_be_read_in_no_way_is_told_the_ways():
    ways = r"expected fn\(query, key\), fn\(batch, head, query, key\), or a function"
    for fn in (lambda x: x, lambda a, b, c: a, lambda q, *, window: q, lambda query, a, b: a, lambda: True):
        with pytest.raises(TypeError, match=ways):
            masks.predicate(fn)


class WithoutSignature:
    """A function that does not tell its parameters, as some of C do."""

    __signature__ = object()

    def __call__(self, one, other):
        return one < other


def test_other_functions_of_two_take_query_and_key():
    for less in (lambda query, k: query < k, WithoutSignature()):
        assert masks.predicate(less).dense(2).tolist() == [[False, True], [False, False]]
    same = masks.predicate(lambda *pair: pair[0] == pair[1])
    np.testing.assert_array_equal(same.dense(2), np.eye(2, dtype=bool))


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
