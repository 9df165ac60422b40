"""Positions per token: what masks and scores say of rows that sit anywhere, on every path of a call."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from divided_cases import AXES
from economy import mostly_slow
from mask_expressions import leaves
from mesh_cases import on_eight_devices
from regard import attend, explain, masks, readouts, scores
from regard.cache import KVCache
from regard.engine.backends import tiled
from regard.engine.backends.kernel_masks import read_kernel_mask
from regard.engine.call.canonicalization import canonicalize
from regard.engine.dispatch.registry import COMPLETE
from regard.engine.flash.blocking import Blocking
from regard.inspection import capture
from regard.layers import EncoderBlock, MultiHeadAttention, derive
from regard.masks import TileKind
from regard.models import Decoder, Encoder, TransformerConfig
from regard.positions import Rotary

B, H, K, T, S, D, E = 2, 6, 3, 13, 29, 7, 11
SLOPES = np.linspace(0.05, 0.4, H).astype(np.float32)
COUNT, REACH = 8, 11  # buckets of relative_bias on one side, and from where they are one
TABLE = np.random.default_rng(1).normal(size=(2 * COUNT, H)).astype(np.float32)
QUERY_IDS, KEY_IDS = np.arange(T) % 3, np.arange(S) * 7 % 3


def arrays(*shapes, seed=3):
    rng = np.random.default_rng(seed)
    shapes = shapes or ((B, H, T, D), (B, K, S, D), (B, K, S, E))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def scatter(*shape, seed=7):
    """Positions in no order, some negative, some shared."""
    return np.random.default_rng(seed).integers(-6, 34, shape).astype(np.int32)


# Of both sides, (rows) or (batch, rows) or (batch, heads, rows).
PLACES = {
    "one row": (scatter(T), scatter(S, seed=8)),
    "by row": (scatter(B, T), scatter(B, S, seed=8)),
    "by head": (scatter(B, H, T), scatter(B, H, S, seed=8)),
    "queries alone": (scatter(B, T), None),
    "packed": (np.arange(T) % 5, np.arange(S) % 5),
}


def over_pairs(places):
    """Positions (B | 1, H | 1, T, 1) of queries, (B | 1, H | 1, 1, S) of keys."""
    query, key = places
    key = np.arange(S) if key is None else key
    padded = (
        array.reshape((*array.shape[:-1], *(1,) * (3 - array.ndim), array.shape[-1]))
        for array in (query, key)
    )
    query, key = padded
    return query[..., :, None], key[..., None, :]


# Each mask with its definition on the positions q and k.
MASKS = {
    "causal": (masks.causal(), lambda q, k: k <= q),
    "window": (masks.sliding_window(6, 2), lambda q, k: (q - 6 <= k) & (k <= q + 2)),
    "chunked": (masks.chunked(8), lambda q, k: q // 8 == k // 8),
    "dilated": (masks.dilated(3), lambda q, k: (k - q) % 3 == 0),
    "global": (masks.global_tokens(9), lambda q, k: ((q >= 0) & (q < 9)) | (k < 9)),
    "prefix": (masks.prefix(5), lambda q, k: (k < 5) & (q == q)),
    "lengths": (
        masks.lengths([12, 29]),
        lambda q, k: (k < np.array([12, 29])[:, None, None, None]) & (q == q),
    ),
    "segments": (
        masks.segments(QUERY_IDS, KEY_IDS),
        lambda q, k: (QUERY_IDS[:, None] == KEY_IDS[None]) & (q == q) & (k == k),
    ),
    "joined": (
        (masks.causal() & ~masks.dilated(2)) | masks.chunked(4),
        lambda q, k: ((k <= q) & ((k - q) % 2 != 0)) | (q // 4 == k // 4),
    ),
    "predicate": (masks.predicate(lambda q, k: (q * k) % 3 != 1), lambda q, k: (q * k) % 3 != 1),
}


def bucket_of(distance):
    """T5's bucket, by whole numbers: exact ones first, then growing up to REACH."""
    exact, coarse = COUNT // 2, COUNT - COUNT // 2
    n = abs(int(distance))
    grown = sum(n**coarse >= REACH**step * exact ** (coarse - step) for step in range(coarse))
    return (COUNT if distance > 0 else 0) + (n if n < exact else exact + grown - 1)


# Each score, and what it adds to the scaled product at positions q and k, (B | 1, H, T, S).
SCORES = {
    "alibi": (scores.alibi(slopes=SLOPES), lambda q, k: -SLOPES[:, None, None] * np.abs(q - k)),
    "relative": (
        scores.relative_bias(TABLE, max_distance=REACH),
        lambda q, k: np.take_along_axis(
            np.broadcast_to(
                TABLE.T[None, :, None], (*np.broadcast_shapes((1, H), (k - q).shape[:2]), T, 2 * COUNT)
            ),
            np.vectorize(bucket_of)(
                np.broadcast_to(k - q, (*np.broadcast_shapes((1, H), (k - q).shape[:2]), T, S))
            ),
            -1,
        ),
    ),
}
BLOCKINGS = Blocking(3, 2), Blocking(2, 5)


def in_small_tiles(query, key, value, *, backend=None, **options):
    output, aux = tiled.run(canonicalize(query, key, value, **options), *BLOCKINGS)
    return (output, aux) if aux else output


BACKENDS = {"dense": functools.partial(attend, backend="dense"), "small tiles": in_small_tiles}


def check(call, places, mask, score, keep, added, given=None):
    """Output, lse, and gradients of query, key and value, against the definition in float64."""
    inputs = arrays() if given is None else given
    cotangent = arrays((B, H, T, E), seed=4)[0]
    options = {"mask": mask, "score": score, "query_positions": places[0], "key_positions": places[1]}

    @jax.jit
    def run(*inputs):
        def loss(*inputs):
            output, aux = call(*inputs, aux=("lse", "max_score", "argmax", "entropy"), **options)
            return jnp.sum(output * cotangent), {"output": output, **aux}

        return jax.grad(loss, (0, 1, 2), has_aux=True)(*inputs)

    grads, found = run(*inputs)
    truth = vars(oracle.batched(*inputs, keep=keep, bias=added, cotangent=cotangent))
    for name, array in found.items():
        np.testing.assert_allclose(
            array, truth[name].reshape(array.shape), rtol=2e-5, atol=2e-5, err_msg=name
        )
    for name, array in zip(("d_query", "d_key", "d_value"), grads, strict=True):
        np.testing.assert_allclose(array, truth[name], rtol=3e-5, atol=3e-5, err_msg=name)


PLACED = {
    **dict.fromkeys(((name, "by row") for name in MASKS), ()),
    **dict.fromkeys((("causal", where) for where in PLACES), ()),
    ("joined", "by head"): (*BACKENDS,),
    ("chunked", "packed"): (*BACKENDS,),
    ("window", "one row"): ("dense",),
    ("segments", "by row"): ("small tiles",),
    ("predicate", "by row"): ("small tiles",),
    ("causal", "queries alone"): ("small tiles",),
}  # with the backends of the quick run


@pytest.mark.parametrize(
    ("name", "where", "backend"),
    mostly_slow(
        ((*case, backend) for case in PLACED for backend in BACKENDS),
        *((*case, backend) for case, quick in PLACED.items() for backend in quick),
    ),
)
def test_a_mask_reads_the_position_of_each_token(name, where, backend):
    mask, definition = MASKS[name]
    keep = definition(*over_pairs(PLACES[where]))
    check(BACKENDS[backend], PLACES[where], mask, None, keep, None)


@pytest.mark.parametrize(
    ("name", "where", "backend"),
    mostly_slow(
        itertools.product(SCORES, PLACES, BACKENDS),
        *itertools.product(SCORES, ["by row"], BACKENDS),
        ("relative", "by head", "small tiles"),
    ),
)
def test_a_score_reads_the_position_of_each_token(name, where, backend):
    score, definition = SCORES[name]
    pairs = over_pairs(PLACES[where])
    keep = MASKS["window"][1](*pairs) if where == "by row" else None
    mask = MASKS["window"][0] if where == "by row" else None
    check(BACKENDS[backend], PLACES[where], mask, score, keep, definition(*pairs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_of_distances_has_the_gradient_of_its_definition(backend):
    places, (query, key, value) = PLACES["by row"], arrays()

    def of_table(table):
        options = {"query_positions": places[0], "key_positions": places[1]}
        score = scores.relative_bias(table, max_distance=REACH)
        return BACKENDS[backend](query, key, value, score=score, mask=masks.causal(), **options).sum()

    pairs = over_pairs(places)
    truth = oracle.batched(query, key, value, pairs[1] <= pairs[0], SCORES["relative"][1](*pairs))
    bucket = np.broadcast_to(np.vectorize(bucket_of)(pairs[1] - pairs[0]), (B, H, T, S))
    expected = np.zeros((2 * COUNT, H))
    np.add.at(expected, (bucket, np.arange(H)[:, None, None]), truth.d_bias.reshape((B, H, T, S)))
    found = jax.jit(jax.grad(of_table))(jnp.asarray(TABLE))
    np.testing.assert_allclose(found, expected, rtol=3e-5, atol=3e-5)


def test_shuffled_tokens_with_their_positions_give_shuffled_outputs():
    inputs, places = arrays(), PLACES["by row"]
    rng = np.random.default_rng(2)
    rows, columns = rng.permutation(T), rng.permutation(S)
    shuffled = inputs[0][..., rows, :], inputs[1][..., columns, :], inputs[2][..., columns, :]
    moved = places[0][..., rows], places[1][..., columns]
    for backend in BACKENDS.values():
        call = functools.partial(backend, mask=MASKS["joined"][0], score=scores.alibi(H))
        whole = call(*inputs, query_positions=places[0], key_positions=places[1])
        found = call(*shuffled, query_positions=moved[0], key_positions=moved[1])
        np.testing.assert_allclose(found, whole[..., rows, :], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", COMPLETE)
def test_consecutive_positions_are_an_offset(backend):
    query, key, value = arrays()
    rng = jax.random.key(0)
    score = [scores.alibi(H), scores.relative_bias(TABLE, max_distance=REACH)]
    call = functools.partial(attend, query, key, value, mask=MASKS["joined"][0], score=score, backend=backend)
    offsets = np.array([13, 3], np.int32), np.array([2, -7], np.int32)
    places = offsets[0][:, None] + np.arange(T), offsets[1][:, None] + np.arange(S)
    expected = call(query_offset=offsets[0], key_offset=offsets[1])
    np.testing.assert_allclose(call(query_positions=places[0], key_positions=places[1]), expected, atol=1e-5)
    # Rows number what dropout draws: at offset 0 they are the positions.
    dropped = functools.partial(call, dropout_rate=0.3, rng=rng)
    found = dropped(query_positions=np.arange(T), key_positions=np.arange(S))
    np.testing.assert_allclose(found, dropped(query_offset=0), atol=1e-5)


DOCUMENTS = (3, 7, 1, 2)  # lengths, T together


def pack(array):
    """Packed rows as documents of their own."""
    return jnp.split(array, np.cumsum(DOCUMENTS)[:-1].tolist(), -2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_rows_that_restart_are_separate_calls(backend):
    query, key, value = arrays((B, H, T, D), (B, K, T, D), (B, K, T, E))
    ids = np.repeat(np.arange(len(DOCUMENTS)), DOCUMENTS)
    restarting = np.concatenate([np.arange(length) for length in DOCUMENTS])
    mask, score = masks.causal() & (masks.chunked(2) | masks.prefix(2)), scores.alibi(H)
    found = BACKENDS[backend](
        query, key, value, mask=masks.segments(ids, ids) & mask, score=score,
        query_positions=restarting, key_positions=restarting,
    )  # fmt: skip
    apart = [
        attend(*parts, mask=mask, score=score) for parts in zip(*map(pack, (query, key, value)), strict=True)
    ]
    np.testing.assert_allclose(found, jnp.concatenate(apart, -2), rtol=1e-5, atol=1e-5)


def test_tokens_at_one_position_drop_different_weights():
    query, key, value = jnp.zeros((1, 1, T, D)), jnp.zeros((1, 1, S, D)), jnp.eye(S)[None, None]
    options = {"dropout_rate": 0.5, "rng": jax.random.key(1)}
    options |= {"query_positions": np.zeros(T, np.int32), "key_positions": np.zeros(S, np.int32)}
    kept = [np.asarray(call(query, key, value, **options) > 0)[0, 0] for call in BACKENDS.values()]
    np.testing.assert_array_equal(*kept)
    assert len(np.unique(kept[0], axis=0)) == T
    assert len(np.unique(kept[0].T, axis=0)) == S


# Transforms.


def causal_at(query, key, value, places, call=attend):
    return call(
        query, key, value, mask=masks.causal(), score=scores.alibi(H),
        query_positions=places[0], key_positions=places[1],
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_may_be_traced_mapped_over_and_scanned(backend):
    inputs = arrays()
    places = [(scatter(T, seed=n), scatter(S, seed=n + 50)) for n in range(3)]
    call = functools.partial(causal_at, call=BACKENDS[backend])
    expected = jnp.stack([call(*inputs, place) for place in places])
    stacked = tuple(jnp.stack(side) for side in zip(*places, strict=True))
    mapped = jax.jit(jax.vmap(call, (None, None, None, 0)))(*inputs, stacked)
    scanned = jax.lax.scan(lambda _, place: (None, call(*inputs, place)), None, stacked)[1]
    for found in (mapped, scanned):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_new_positions_do_not_compile_again():
    inputs, traces = arrays(), []

    @jax.jit
    def call(places):
        traces.append(1)
        return causal_at(*inputs, places)

    for name in ("one row", "packed"):
        call(tuple(jnp.asarray(side, jnp.int32) for side in PLACES[name]))
    assert len(traces) == 1


@pytest.mark.slow
def test_a_second_derivative_and_rows_of_the_weights():
    inputs, places = arrays(), PLACES["by row"]

    def turn(call):
        loss = lambda query: jnp.sum(jnp.sin(causal_at(query, *inputs[1:], places, call)))
        return jax.jvp(jax.grad(loss), (inputs[0],), (jnp.cos(inputs[0]),))[1]

    found, expected = (turn(call) for call in BACKENDS.values())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    for backend, name in itertools.product(COMPLETE, PLACES):
        options = {"mask": masks.causal(), "score": [score for score, _ in SCORES.values()]}
        options |= dict(zip(("query_positions", "key_positions"), PLACES[name], strict=True))
        whole = attend(*inputs, aux=("weights", "lse"), backend=backend, **options)[1]
        chosen = {"rows": [5, 2], "heads": [4, 1]}
        part = attend(*inputs, aux=("weights",), backend=backend, **chosen, **options)[1]
        wanted = np.asarray(whole["weights"])[:, [4, 1]][:, :, [5, 2]]
        np.testing.assert_allclose(part["weights"], wanted, rtol=1e-5, atol=1e-6)
        seen = readouts.window(*inputs[:2], whole["lse"], rows=[5, 2], columns=[28, 0, 3], **options)
        wanted = np.asarray(whole["weights"])[:, :, [5, 2]][..., [28, 0, 3]]
        np.testing.assert_allclose(seen, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "axes"),
    mostly_slow(itertools.product(COMPLETE, AXES), ("tiled", "manual")),
)
def test_positions_are_divided_with_batch_and_heads(backend, axes):
    code = f"from divided_cases import check\nprint(check({axes!r}, 'positions', {backend!r}, aux=('lse',)))"
    assert eval(on_eight_devices(code)) == {}


DROPPED = """
asked, held = np.random.default_rng(2).integers(-3, 9, (2, 2, 37)).astype(np.int32)
options = {"mask": masks.causal() | masks.chunked(3), "query_positions": asked, "key_positions": held}
options |= {"dropout_rate": 0.3, "rng": jax.random.key(1)}
check_against_one_device(WAY, draw((2, 4, 37, 7), (2, 2, 37, 7), (2, 2, 37, 5)), lambda: options)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ring", "zigzag", "both balanced", "ring of shards"])
def test_a_ring_drops_what_one_device_drops(way):
    on_eight_devices(DROPPED.replace("WAY", repr(way)))


# Masks by themselves.


@pytest.mark.slow
@given(
    mask=leaves(1, 7, 7, True)
    | st.sampled_from([mask for name, (mask, _) in MASKS.items() if name != "segments"]),
    places=st.tuples(*[st.lists(st.integers(-4, 12), min_size=7, max_size=7)] * 2),
    block=st.tuples(*[st.sampled_from([1, 2, 3, 5])] * 2),
)
@settings(max_examples=60)
def test_kinds_of_tiles_hold_wherever_tokens_sit(mask, places, block):
    check_tiles(mask, places, block)


def test_the_kind_of_a_tile_is_that_of_tokens_in_no_order():
    check_tiles(masks.causal(), ([3, 9, -2, 0, 4, 8, 1], [5, -1, 6, 2, 7, 0, 3]), (3, 2))


def check_tiles(mask, places, block):
    where = {"query_positions": np.array(places[0]), "key_positions": np.array(places[1])}
    try:
        keep = np.asarray(mask.dense(7, **where))
    except ValueError as error:
        assert "segments(query_ids, key_ids)" in str(error)
        where["key_positions"] = None
        keep = np.asarray(mask.dense(7, **where))
    codes = np.asarray(mask.tiles(7, query_block=block[0], key_block=block[1], **where))
    keep, codes = (array.reshape((-1, *array.shape[-2:])) for array in (keep, codes))
    for i, j in np.ndindex(*codes.shape[1:]):
        tile = keep[:, i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        for kept, code in zip(tile, np.broadcast_to(codes[:, i, j], len(tile)), strict=True):
            assert code != TileKind.EMPTY or not kept.any()
            assert code != TileKind.FULL or kept.all()


def test_segments_are_read_where_the_query_sits():
    ids = np.array([7, 7, 4, 4, 4])
    kept = masks.segments(ids).dense(3, 5, query_positions=[4, 0, 9]).astype(int).tolist()
    assert kept == [[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]


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
        " 0 ■ · ■ ·",
        " 1 ■ ■ ■ ■",
        " 0 ■ · ■ ·",
        "10 ■ ■ ■ ■",
    ]


# What is refused.

ROW = np.arange(5)
MISTAKES = {
    "both": (
        {"query_offset": 1, "query_positions": ROW},
        ValueError,
        r"query_offset, query_positions: expected one of the two",
    ),
    "both of keys": (
        {"key_offset": 1, "key_positions": ROW, "query_offset": 0},
        ValueError,
        r"key_offset, key_positions: expected one of the two",
    ),
    "keys alone": (
        {"key_positions": ROW, "mask": masks.causal()},
        ValueError,
        r"query_offset: .* key_positions moves .* as query_positions, too",
    ),
    "width": ({"query_positions": np.arange(4)}, ValueError, r"query_positions: expected 5 entries .* got 4"),
    "rows": ({"query_positions": np.zeros((3, 5), int)}, ValueError, r"query_positions: .* leading axes"),
    "scalar": ({"query_positions": 3}, ValueError, r"query_positions: .* query_offset="),
    "floats": (
        {"query_positions": np.ones(5)},
        TypeError,
        r"query_positions: expected integers, got float64",
    ),
    "documents": (
        {"query_positions": ROW, "key_positions": ROW, "mask": masks.causal() & masks.segments(ROW)},
        ValueError,
        r"key_positions: .* segments\(ids, ids\)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_explained(name):
    options, kind, text = MISTAKES[name]
    x = jnp.ones((2, 2, 5, 3))
    with pytest.raises(kind, match=text):
        attend(x, x, x, **options)


def test_key_positions_need_no_query_positions_where_nothing_reads_them():
    x = arrays((2, 2, 5, 3))[0]
    np.testing.assert_array_equal(attend(x, x, x, key_positions=ROW), attend(x, x, x))


def test_what_follows_diagonals_says_so():
    x = jnp.ones((1, 2, 5, 3))
    places = {"query_positions": ROW, "key_positions": ROW}
    with pytest.raises(NotImplementedError, match="diagonals"):
        readouts.read(x, x, **places)
    with pytest.raises(NotImplementedError, match="a trace keeps"), capture(None):
        attend(x, x, x, **places)
    problem = canonicalize(x, x, x, mask=masks.causal(), **places)
    assert "position of every token" in read_kernel_mask(problem)
    assert read_kernel_mask(canonicalize(x, x, x, **places)).empty


# Layers and models.

RESTARTING = np.concatenate([np.arange(length) for length in DOCUMENTS]).astype(np.int32)
PACKED = np.repeat(np.arange(len(DOCUMENTS)), DOCUMENTS).astype(np.int32)


def build_layer():
    return MultiHeadAttention(12, H, num_key_heads=K, rotary=Rotary(), memory_width=12, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_a_layer_turns_packed_rows_by_their_own_positions():
    layer, (x,) = build_layer(), arrays((B, T, 12))
    mask = masks.segments(PACKED, PACKED) & masks.causal()
    found = layer(x, mask=mask, query_positions=RESTARTING)
    apart = jnp.concatenate([layer(part, mask=masks.causal()) for part in pack(x)], -2)
    np.testing.assert_allclose(found, apart, rtol=1e-5, atol=1e-5)
    block = EncoderBlock(12, 2, 5, attention={"rotary": Rotary()}, rngs=nnx.Rngs(1))
    apart = jnp.concatenate([block(part, mask=masks.causal()) for part in pack(x)], -2)
    np.testing.assert_allclose(block(x, mask=mask, positions=RESTARTING), apart, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_layer_shuffled_with_its_positions_is_the_layer_shuffled():
    layer, (x, memory) = build_layer(), arrays((B, T, 12), (B, S, 12))
    rng = np.random.default_rng(5)
    rows, columns = rng.permutation(T), rng.permutation(S)
    places = {"query_positions": np.stack([rows, rows + 3]), "key_positions": np.stack([columns, columns])}
    found = layer(x[:, rows], memory[:, columns], mask=masks.sliding_window(5, 2), **places)
    expected = layer(x, memory, mask=masks.sliding_window(5, 2), query_offset=np.array([0, 3]))
    np.testing.assert_allclose(found, expected[:, rows], rtol=1e-5, atol=1e-5)
    alone = layer(x[0, rows], mask=masks.causal(), query_positions=rows)
    np.testing.assert_allclose(alone, layer(x[0], mask=masks.causal())[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_derivation_of_a_layer_has_the_position_of_each_token():
    layer, (x,) = build_layer(), arrays((B, T, 12))
    options = {"mask": masks.segments(PACKED, PACKED) & masks.causal(), "query_positions": RESTARTING}
    derivation = derive(layer, x, **options)
    np.testing.assert_array_equal(derivation["key_position"].value, RESTARTING)
    np.testing.assert_allclose(derivation["output"].value, layer(x, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_slow(["rotary", "learned", "sinusoidal", "relative"], "rotary"))
def test_a_model_reads_packed_documents_as_if_each_were_alone(kind):
    config = TransformerConfig(
        d_model=12, num_heads=2, d_ff=5, num_layers=2, vocab_size=17, max_length=T, positions=kind
    )
    model = Decoder(config, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 17, (B, T)), jnp.int32)
    mask = masks.segments(PACKED, PACKED)
    found = model(tokens, mask=mask, positions=RESTARTING, lengths=jnp.array([T, T - 2]))
    apart = jnp.concatenate([model(part[..., 0]) for part in pack(tokens[..., None])], -2)
    np.testing.assert_allclose(found[0], apart[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[1, : T - 2], apart[1, : T - 2], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_padding_of_packed_rows_is_told_by_row():
    config = TransformerConfig(
        d_model=12, num_heads=2, d_ff=5, num_layers=2, vocab_size=17, positions="rotary"
    )
    model, tokens = Encoder(config, rngs=nnx.Rngs(0)), jnp.arange(T, dtype=jnp.int32)[None]
    found = model(tokens, mask=masks.segments(PACKED, PACKED), positions=RESTARTING, lengths=jnp.array([5]))
    apart = jnp.concatenate([model(tokens[:, :3]), model(tokens[:, 3:5]), jnp.zeros((1, T - 5, 12))], 1)
    np.testing.assert_allclose(found, apart, rtol=1e-4, atol=1e-4)


def test_mistakes_in_layers_and_models_are_explained():
    layer, (x,) = build_layer(), arrays((B, T, 12))
    for options, text in (
        ({"query_positions": np.arange(5)}, "query_positions: expected 13 entries"),
        ({"query_positions": RESTARTING, "query_offset": 2}, "expected one of the two"),
        ({"key_positions": RESTARTING}, "query_offset: expected where the queries sit"),
    ):
        with pytest.raises(ValueError, match=text):
            layer(x, **options)
    cache = KVCache.create(B, K, T, layer.head_dim)
    with pytest.raises(ValueError, match="query_offset or positions"):
        layer(x, cache=cache, query_positions=RESTARTING)
    config = TransformerConfig(
        d_model=12, num_heads=2, d_ff=5, num_layers=2, vocab_size=17, max_length=5, positions="learned"
    )
    model, tokens = Decoder(config, rngs=nnx.Rngs(0)), jnp.zeros((B, T), jnp.int32)
    for places, text in (
        (np.full(T, 5), "positions: expected values in 0..4"),
        (np.zeros(4, int), r"positions: expected integers \(13,\) or \(2, 13\)"),
    ):
        with pytest.raises(ValueError, match=text):
            model(tokens, positions=places)
    wrong = jax.jit(lambda places: model(tokens, positions=places))(np.where(RESTARTING == 1, -1, 0))
    assert np.isnan(wrong[0, 1]).all()
