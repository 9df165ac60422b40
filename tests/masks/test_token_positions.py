"""Positions per token: what masks and scores say of rows that sit anywhere, on every path of a call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import oracle
from mesh_cases import draw, on_eight_devices
from refusals import assert_refused
from regard import attend, explain, masks, readouts, scores
from regard.engine.backends import tiled
from regard.engine.backends.kernel_masks import read_kernel_mask
from regard.engine.call.canonicalization import canonicalize
from regard.engine.flash.blocking import Blocking
from regard.inspection import capture
from regard.layers import MultiHeadAttention, derive
from regard.models import Encoder, TransformerConfig
from regard.positions import Rotary
from test_masks import assert_tiles_are_safe

B, H, K, T, S, D, E = 2, 6, 3, 13, 29, 7, 11
SLOPES = np.linspace(0.05, 0.4, H).astype(np.float32)
COUNT, REACH = 8, 11  # buckets of relative_bias on one side, and from where they are one
TABLE = np.random.default_rng(1).normal(size=(2 * COUNT, H)).astype(np.float32)
ARRAYS = draw((B, H, T, D), (B, K, S, D), (B, K, S, E))


def scatter(*shape, seed=7):
    """Positions in no order, some negative, some shared."""
    return np.random.default_rng(seed).integers(-6, 34, shape).astype(np.int32)


# Of both sides, (batch, rows) or (batch, heads, rows).
PLACES = {
    "by row": (scatter(B, T), scatter(B, S, seed=8)),
    "by head": (scatter(B, H, T), scatter(B, H, S, seed=8)),
    "queries alone": (scatter(B, T), None),
}


def over_pairs(places):
    """Positions (B | 1, H | 1, T, 1) of queries, (B | 1, H | 1, 1, S) of keys."""
    query, key = places
    key = np.arange(S) if key is None else key
    query, key = (x.reshape((*x.shape[:-1], *(1,) * (3 - x.ndim), x.shape[-1])) for x in (query, key))
    return query[..., :, None], key[..., None, :]


# A mask, and its definition on the positions q and k.
JOINED = (masks.causal() & ~masks.dilated(2)) | masks.chunked(4)


def joined(q, k):
    return ((k <= q) & ((k - q) % 2 != 0)) | (q // 4 == k // 4)


def bucket_of(distance):
    """T5's bucket, by whole numbers: exact ones first, then growing up to REACH."""
    exact, coarse = COUNT // 2, COUNT - COUNT // 2
    n = abs(int(distance))
    grown = sum(n**coarse >= REACH**step * exact ** (coarse - step) for step in range(coarse))
    return (COUNT if distance > 0 else 0) + (n if n < exact else exact + grown - 1)


def of_table(query, key):
    return TABLE[np.vectorize(bucket_of)(key - query), np.arange(H)[:, None, None]]


# Each score, and what it adds to the scaled product at positions q and k, (B | 1, H, T, S).
SCORES = {
    "alibi": (scores.alibi(slopes=SLOPES), lambda q, k: -SLOPES[:, None, None] * np.abs(q - k)),
    "relative": (scores.relative_bias(TABLE, max_distance=REACH), of_table),
}
BLOCKINGS = Blocking(3, 2), Blocking(2, 5)


def in_small_tiles(query, key, value, *, backend=None, **options):
    output, aux = tiled.run(canonicalize(query, key, value, **options), *BLOCKINGS)
    return (output, aux) if aux else output


BACKENDS = {"dense": functools.partial(attend, backend="dense"), "small tiles": in_small_tiles}


def placed(places):
    return {"query_positions": places[0], "key_positions": places[1]}


def test_the_kind_of_a_tile_is_that_of_tokens_in_no_order():
    places = np.array([3, 9, -2, 0, 4, 8, 1]), np.array([5, -1, 6, 2, 7, 0, 3])
    codes = masks.causal().tiles(7, query_block=3, key_block=2, **placed(places))
    assert_tiles_are_safe(masks.causal().dense(7, **placed(places)), codes, (3, 2))


@pytest.mark.parametrize(
    ("name", "where", "backend"),
    [
        ("relative", "by row", "dense"),
        ("alibi", "by head", "small tiles"),
        ("relative", "queries alone", "small tiles"),
    ],
)
def test_a_score_reads_the_position_of_each_token(name, where, backend):
    """Output, statistics and gradients of query, key and value are those of the definition, under a mask."""
    (cotangent,), pairs = draw((B, H, T, E), seed=4), over_pairs(PLACES[where])
    options = {"mask": JOINED, "score": SCORES[name][0], **placed(PLACES[where])}

    @jax.jit
    def run(*inputs):
        def loss(*inputs):
            aux = "lse", "max_score", "argmax", "entropy"
            output, aux = BACKENDS[backend](*inputs, aux=aux, **options)
            return jnp.sum(output * cotangent), {"output": output, **aux}

        return jax.grad(loss, (0, 1, 2), has_aux=True)(*inputs)

    grads, found = run(*ARRAYS)
    keep, bias = joined(*pairs), SCORES[name][1](*pairs)
    truth = vars(oracle.batched(*ARRAYS, keep=keep, bias=bias, cotangent=cotangent))
    found |= dict(zip(oracle.PARTS[1:], grads, strict=True))
    for part, array in found.items():
        np.testing.assert_allclose(array, truth[part].reshape(array.shape), 3e-5, 3e-5, err_msg=part)


def test_tokens_at_one_position_drop_different_weights():
    inputs = jnp.zeros((1, 1, T, D)), jnp.zeros((1, 1, S, D)), jnp.eye(S)[None, None]
    options = {"dropout_rate": 0.5, "rng": jax.random.key(1)}
    options |= placed((np.zeros(T, np.int32), np.zeros(S, np.int32)))
    found = jax.jit(lambda *inputs: [call(*inputs, **options) for call in BACKENDS.values()])(*inputs)
    kept = [np.asarray(output > 0)[0, 0] for output in found]
    np.testing.assert_array_equal(*kept)
    assert len(np.unique(kept[0], axis=0)) == T
    assert len(np.unique(kept[0].T, axis=0)) == S


def causal_at(query, key, value, places, call=attend):
    return call(
        query, key, value, mask=masks.causal(), score=scores.alibi(H),
        query_positions=places[0], key_positions=places[1],
    )  # fmt: skip


def test_a_second_derivative_and_rows_of_the_weights():
    inputs, places = ARRAYS, PLACES["by head"]
    score, chosen = [score for score, _ in SCORES.values()], {"rows": [5, 2], "heads": [4, 1]}
    options = {"mask": masks.causal(), "score": score, **placed(places)}
    at = over_pairs(places)
    truth = oracle.batched(*inputs, keep=at[1] <= at[0], bias=sum(add(*at) for _, add in SCORES.values()))

    @jax.jit
    def run(query, lse):
        curvatures = []
        for call in BACKENDS.values():
            loss = lambda query, call=call: jnp.sum(jnp.sin(causal_at(query, *inputs[1:], places, call)))
            curvatures.append(jax.jvp(jax.grad(loss), (query,), (jnp.cos(query),))[1])
        few = attend(query, *inputs[1:], aux=("weights",), backend="tiled", **chosen, **options)[1]["weights"]
        seen = readouts.window(query, inputs[1], lse, rows=[5, 2], columns=[28, 0, 3], **options)
        return curvatures, few, seen

    curvatures, few, seen = run(inputs[0], jnp.asarray(truth.lse, jnp.float32))
    np.testing.assert_allclose(*curvatures, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(few, truth.weights[:, [4, 1]][:, :, [5, 2]], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(seen, truth.weights[:, :, [5, 2]][..., [28, 0, 3]], rtol=1e-5, atol=1e-6)


DROPPED = """
asked, held = np.random.default_rng(2).integers(-3, 9, (2, 2, 37)).astype(np.int32)
options = {"mask": masks.causal() | masks.chunked(3), "query_positions": asked, "key_positions": held}
options |= {"dropout_rate": 0.3, "rng": jax.random.key(1)}
arrays = draw((2, 4, 37, 7), (2, 2, 37, 7), (2, 2, 37, 5))
found = jax.jit(lambda *arrays: run("ring", *arrays, **options))(*arrays)
np.testing.assert_allclose(found, attend(*arrays, backend="dense", **options), rtol=2e-5, atol=5e-6)
"""


@pytest.mark.slow
def test_a_ring_drops_what_one_device_drops():
    on_eight_devices(DROPPED)


def test_tiles_without_work_are_not_visited():
    # Documents of 128 tokens that restart: chunks by position alone would see one another.
    ids, restarting = np.repeat(np.arange(4), 128), np.tile(np.arange(128), 4)
    x = jax.ShapeDtypeStruct((512, 8), jnp.float32)
    mask = masks.segments(ids, ids) & masks.causal()
    tiles = explain(x, x, x, mask=mask, query_positions=restarting, key_positions=restarting).tiles
    assert (tiles.empty, tiles.partial, tiles.full) == (12, 4, 0)


def test_pictures_are_numbered_by_position():
    places = {"query_positions": [0, 1, 0, 10], "key_positions": [0, 1, 0, 1]}
    assert masks.causal().picture(4, **places).splitlines()[1:] == [
        " 0 ■ · ■ ·", " 1 ■ ■ ■ ■", " 0 ■ · ■ ·", "10 ■ ■ ■ ■",
    ]  # fmt: skip


ROW = np.arange(5)
MISTAKES = [
    (ValueError, "query_offset, query_positions: expected one of the two",
     {"query_offset": 1, "query_positions": ROW}),
    (ValueError, "key_offset, key_positions: expected one of the two",
     {"key_offset": 1, "key_positions": ROW, "query_offset": 0}),
    (ValueError, "query_offset: .* key_positions moves .* as query_positions, too",
     {"key_positions": ROW, "mask": masks.causal()}),
    (ValueError, "query_positions: expected 5 entries .* got 4", {"query_positions": np.arange(4)}),
    (ValueError, "query_positions: .* leading axes", {"query_positions": np.zeros((3, 5), int)}),
    (ValueError, "query_positions: .* query_offset=", {"query_positions": 3}),
    (TypeError, "query_positions: expected integers, got float64", {"query_positions": np.ones(5)}),
    (ValueError, r"key_positions: .* segments\(ids, ids\)",
     {"query_positions": ROW, "key_positions": ROW, "mask": masks.causal() & masks.segments(ROW)}),
]  # fmt: skip


def test_mistakes_are_explained():
    x = jnp.ones((2, 2, 5, 3))
    cases = [(options, text, kind) for kind, text, options in MISTAKES]
    assert_refused(*cases, run=lambda options: attend(x, x, x, **options))


def test_key_positions_need_no_query_positions_where_nothing_reads_them():
    (x,) = draw((2, 2, 5, 3))
    np.testing.assert_array_equal(attend(x, x, x, key_positions=ROW), attend(x, x, x))


def test_what_follows_diagonals_says_so():
    x = jnp.ones((1, 2, 5, 3))
    places = {"query_positions": ROW, "key_positions": ROW}
    assert_refused((lambda: readouts.read(x, x, **places), "diagonals", NotImplementedError))
    with pytest.raises(NotImplementedError, match="a trace keeps"), capture(None):
        attend(x, x, x, **places)
    assert "position of every token" in read_kernel_mask(canonicalize(x, x, x, mask=masks.causal(), **places))
    assert read_kernel_mask(canonicalize(x, x, x, **places)).empty


DOCUMENTS = (5, 8)  # lengths, T together
RESTARTING = np.concatenate([np.arange(length) for length in DOCUMENTS]).astype(np.int32)
PACKED = np.repeat(np.arange(len(DOCUMENTS)), DOCUMENTS).astype(np.int32)
SMALL = {"d_model": 12, "num_heads": 2, "d_ff": 5, "num_layers": 1, "vocab_size": 17}


def pack(array, axis=-2):
    """Packed rows as documents of their own."""
    return jnp.split(array, np.cumsum(DOCUMENTS)[:-1].tolist(), axis)


def build_layer():
    return MultiHeadAttention(12, H, num_key_heads=K, rotary=Rotary(), memory_width=12, rngs=nnx.Rngs(0))


def test_a_layer_turns_packed_rows_by_their_own_positions():
    layer, (x,) = build_layer(), draw((B, T, 12))
    options = {"mask": masks.segments(PACKED, PACKED) & masks.causal(), "query_positions": RESTARTING}

    @nnx.jit
    def both(layer, x):
        return layer(x, **options), jnp.concatenate([layer(row, mask=masks.causal()) for row in pack(x)], -2)

    found, apart = both(layer, x)
    np.testing.assert_allclose(found, apart, rtol=1e-5, atol=1e-5)
    derivation = derive(layer, x, **options)
    np.testing.assert_array_equal(derivation["key_position"].value, RESTARTING)
    np.testing.assert_allclose(derivation["output"].value, found, rtol=1e-5, atol=1e-5)


def test_the_padding_of_packed_rows_is_told_by_row():
    model = Encoder(TransformerConfig(**SMALL, positions="rotary"), rngs=nnx.Rngs(0))
    options = {"mask": masks.segments(PACKED, PACKED), "positions": RESTARTING, "lengths": jnp.array([7])}

    @nnx.jit
    def both(model, tokens):
        apart = model(tokens[0, :5])[None], model(tokens[:, 5:7]), jnp.zeros((1, T - 7, 12))
        return model(tokens, **options), jnp.concatenate(apart, 1)

    np.testing.assert_allclose(*both(model, jnp.arange(T, dtype=jnp.int32)[None]), rtol=1e-4, atol=1e-4)
