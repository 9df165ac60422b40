"""The tiled backend: tile sizes, derivative rules, memory, work, and what may not leak."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mesh_cases
from oracle import assert_close, batched
from regard import attend, explain, masks, scores
from regard.engine.backends import dense, tiled
from regard.engine.call.canonicalization import canonicalize
from regard.engine.flash.blocking import Blocking
from regard.engine.flash.sparsity import classify_tiles, list_tiles
from regard.masks import Mask, TileKind
from regard.records import record

in_small_tiles = functools.partial(tiled.run, forward=Blocking(3, 2), backward=Blocking(2, 3))
draw = functools.partial(mesh_cases.draw, seed=17)
assert_same_bits = functools.partial(jax.tree.map, np.testing.assert_array_equal)


@pytest.mark.parametrize("heads", [(1, 3), (3, 1)])
def test_one_head_of_keys_or_of_values_serves_all(heads):
    query, key, value, bias = draw((3, 601, 16), (heads[0], 601, 16), (heads[1], 601, 7), (601,))
    call = lambda name, *arrays: jnp.sin(attend(*arrays, bias=bias, backend=name)).sum()
    differentiate = jax.jit(jax.value_and_grad(call, (1, 2, 3)), static_argnums=0)
    assert_close(*(differentiate(name, query, key, value) for name in ("tiled", "dense")), atol=1e-4)


# Derivatives of any order, in float64, of a call with everything. Neither side divides the call.

EVERYTHING = (0, 1, 2, 3, 4)  # query, key, value, bias, scale
TILINGS = {
    "several heads": (Blocking(3, 2, 3), Blocking(2, 4, 2)),
    # Several blocks at once, some of them beyond the end, each against several tiles of its own list.
    "in pieces": (Blocking(2, 3, blocks=3, pieces=2), Blocking(3, 2, blocks=2, pieces=2)),
}


def rich_call(dtype="float64"):
    """Grouped heads and an empty row; query, key, value, bias, scale."""
    shapes = ((2, 6, 7, 11), (2, 3, 5, 11), (2, 3, 5, 13), (6, 1, 5))
    return (*draw(*shapes, dtype=dtype), jnp.asarray(0.4, dtype))


def rich(run):
    """A number that depends on the output and on every statistic that has gradients, and all of these."""

    def loss(query, key, value, bias, scale):
        options = {
            "mask": masks.causal() & masks.lengths([5, 3]), "query_offset": -1, "bias": bias, "scale": scale,
            "aux": ("lse", "entropy", "max_score", "argmax"),
        }  # fmt: skip
        output, aux = run(canonicalize(query, key, value, **options))
        alive = aux["lse"] > -jnp.inf
        stats = [jnp.sin(jnp.where(alive, aux[name], 0)).sum() for name in ("lse", "entropy", "max_score")]
        return jnp.sum(jnp.sin(output)).astype(scale.dtype) + sum(stats).astype(scale.dtype), (output, aux)

    return loss


def loss_alone(f):
    return lambda *call: f(*call)[0]


def dot(grads, tangents):
    return sum(jnp.vdot(grad, tangent) for grad, tangent in zip(grads, tangents, strict=True))


def with_tangents(f, call, tangents):
    """Values and gradients, and the tangents of both."""

    def first(*call):
        (loss, found), grads = jax.value_and_grad(f, EVERYTHING, has_aux=True)(*call)
        return (loss, grads), found

    return jax.jvp(first, call, tangents, has_aux=True)


def reverse_over_reverse(f, call, tangents):
    grad = jax.grad(loss_alone(f), EVERYTHING)
    return jax.grad(lambda *call: dot(grad(*call), tangents), EVERYTHING)(*call)


def products_along_tangents(f, call, tangents):
    grad = jax.grad(loss_alone(f))
    product = lambda query, tangent: jax.jvp(lambda q: grad(q, *call[1:]), (query,), (tangent,))[1]
    return jax.vmap(product, in_axes=(None, 0))(call[0], jnp.stack([tangents[0], -0.7 * tangents[0]]))


def evaluate_transform(transform, run):
    call = rich_call()
    tangents = tuple(jnp.cos(3 * array) for array in call)
    return jax.jit(functools.partial(transform, rich(run)))(call, tangents)


@functools.cache
def define_transform(transform):
    """By the definition, once for every tiling."""
    return evaluate_transform(transform, dense.run)


@pytest.mark.parametrize(
    ("transform", "tiling"),
    [
        (with_tangents, "in pieces"),
        (reverse_over_reverse, "in pieces"),
        (products_along_tangents, "several heads"),
    ],
)
def test_a_transform_of_the_tiles_is_that_of_the_definition(transform, tiling, x64):
    forward, backward = TILINGS[tiling]
    found = evaluate_transform(transform, functools.partial(tiled.run, forward=forward, backward=backward))
    assert_close(found, define_transform(transform), rtol=1e-9, atol=1e-10)


def test_a_third_derivative_in_reverse_is_the_third_cumulant():
    """lse is the scores' cumulant-generating function of the scale."""
    query, key, value = draw((3, 7), (5, 7), (5, 2))

    def total(scale):
        _, aux = in_small_tiles(canonicalize(query, key, value, scale=scale, aux=("lse",)))
        return jnp.sum(aux["lse"])

    second = lambda scale: jax.jvp(jax.grad(total), (scale,), (jnp.float32(1),))[1]
    found = jax.jit(jax.grad(second))(jnp.float32(0.3))
    weights = batched(query, key, value, scale=0.3).weights
    products = np.asarray(query, np.float64) @ np.asarray(key, np.float64).T
    mean = np.sum(weights * products, -1, keepdims=True)
    np.testing.assert_allclose(found, np.sum(weights * (products - mean) ** 3), rtol=1e-4)


def test_derivatives_have_the_dtypes_of_what_they_are_derivatives_of():
    call = rich_call("bfloat16")
    for transform in (with_tangents, reverse_over_reverse):
        found = jax.eval_shape(functools.partial(transform, rich(in_small_tiles)), call, call)
        grads = found[1][1] if transform is with_tangents else found
        assert [grad.dtype for grad in grads] == [array.dtype for array in call]


def test_each_head_of_a_group_attends_to_keys_of_its_own():
    lengths = np.array([[11, 2, 0, 5, 7, 1], [3, 1, 10, 4, 0, 11]])
    arrays, (cotangent,) = draw((2, 6, 5, 7), (2, 3, 11, 7), (2, 3, 11, 13)), draw((2, 6, 5, 13))
    keep = np.arange(11) < lengths[..., None, None]
    truth = batched(*arrays, keep=np.broadcast_to(keep, (2, 6, 5, 11)), cotangent=cotangent)
    heads = functools.partial(tiled.run, forward=Blocking(3, 4, 3), backward=Blocking(4, 5, 3))
    for run in (heads, dense.run):
        call = lambda *arrays, run=run: run(canonicalize(*arrays, mask=masks.lengths(lengths)))[0]
        assert_close(mesh_cases.evaluate(call, arrays, cotangent), truth.parts)


def test_masks_offsets_and_patterns_may_vary_along_any_axis_of_theirs():
    query, key, value = draw((2, 6, 5, 7), (2, 3, 11, 7), (2, 3, 11, 13))
    varying = (
        jnp.array([[3, 11, 0], [8, 5, 2]]),  # lengths of two batch rows, three times
        jnp.array([6, 0, -2]),
        jax.random.split(jax.random.key(1), 3),
    )

    def call(run, lengths, offset, rng):
        rest = {"query_offset": offset, "dropout_rate": 0.3, "rng": rng}
        return run(canonicalize(query, key, value, mask=masks.causal() & masks.lengths(lengths), **rest))[0]

    found = jax.jit(jax.vmap(functools.partial(call, in_small_tiles), (1, 0, 0)))(*varying)
    whole = jax.jit(functools.partial(call, dense.run))
    for row, output in enumerate(found):
        assert_close(output, whole(varying[0][:, row], varying[1][row], varying[2][row]))


@pytest.mark.parametrize("run", [in_small_tiles, dense.run], ids=["tiled", "dense"])
def test_a_predicate_that_closes_over_an_array_is_held_to_booleans_too(run):
    arrays = draw((3, 11, 7), (3, 11, 7), (3, 11, 13))
    ids, everything = jnp.arange(11) // 3, jnp.asarray(True)
    apart = masks.predicate(lambda query, key: ids[query] - ids[key])
    for mask in (apart, ~apart, apart & masks.causal()):
        with pytest.raises(TypeError, match=r"predicate: expected fn to return booleans .*, got int32"):
            run(canonicalize(*arrays, mask=mask))
    # One answer for all pairs is as good as one for each.
    call = lambda mask: jax.jit(lambda *arrays: run(canonicalize(*arrays, mask=mask))[0])(*arrays)
    assert_close(call(masks.predicate(lambda query, key: everything)), call(None))


def test_a_predicate_may_close_over_what_is_traced_or_differentiated():
    arrays, known = draw((3, 11, 7), (3, 11, 7), (3, 11, 13)), jnp.arange(11) % 4 > 0
    ids = jnp.asarray([[0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3], [0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 4]])

    def loss(run, ids, query, key, value):
        louder = jnp.sum(key[0] ** 2, -1)
        mask = masks.predicate(lambda i, j: (louder[j] > 5) & known[j] | (ids[i] == ids[j]))
        return jnp.sum(run(canonicalize(query, key, value, mask=mask & masks.causal()))[0] ** 2)

    def step(run):
        grad = jax.grad(functools.partial(loss, run), (1, 2, 3))
        tangents = tuple(jnp.cos(array) for array in arrays)
        one = lambda ids: jax.jvp(functools.partial(grad, ids), tuple(arrays), tangents)
        return jax.jit(jax.vmap(one))(ids)

    assert_close(step(in_small_tiles), step(dense.run), rtol=1e-4, atol=1e-4)


def temporary_bytes(function, *shapes, dtype=jnp.float32):
    """What the compiled program needs besides its arguments and results."""
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(function).lower(*given).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("mask", [masks.causal(), None], ids=["gradient", "tangent of a gradient"])
def test_memory_is_linear_in_length(mask):
    def loss(*arrays, table):
        chain = [scores.alibi(2), scores.softcap(5.0), scores.relative_bias(table)]
        score = None if mask is None else chain
        return jnp.sum(attend(*arrays, mask=mask, score=score, backend="tiled") ** 2)

    grad = jax.grad(lambda *arrays: loss(*arrays[:3], table=arrays[3]), (0, 1, 2, 3))
    function = grad if mask is not None else lambda *arrays: jax.jvp(grad, arrays, arrays)
    shorter, longer = (temporary_bytes(function, *[(2, length, 16)] * 3, (32, 2)) for length in (4096, 8192))
    assert longer <= 2.2 * shorter
    assert longer < 8192 * 8192 * 4 / 8, "an eighth of one matrix of scores"


def test_derivatives_of_many_short_calls_go_in_tiles_and_by_what_is_asked_alone():
    arrays = draw((59, 137, 7), (59, 131, 7), (59, 131, 11))  # just above a million scores
    assert explain(*arrays).reason.endswith("faster at once; derivatives go in tiles")

    def energy(backend, *arrays):
        output, aux = attend(*arrays, backend=backend, aux=("lse",))
        return jnp.sum(output**2) + jnp.sum(jnp.sin(aux["lse"]))

    @functools.partial(jax.jit, static_argnums=0)
    def derive(backend, *arrays):
        gradient = functools.partial(jax.grad(energy, (1, 2, 3)), backend)
        return energy(backend, *arrays), jax.jvp(gradient, arrays, arrays)

    (own, derived), (defined, expected) = (derive(backend, *arrays) for backend in (None, "dense"))
    assert own == defined
    assert_close(derived, expected, rtol=1e-4, atol=1e-4)
    assert "('key'" not in str(jax.make_jaxpr(jax.grad(energy, 1), static_argnums=0)(None, *arrays))
    gradient = functools.partial(jax.grad(energy, (1, 2, 3)), None)
    assert temporary_bytes(gradient, (512, 137, 7), (512, 131, 7), (512, 131, 11)) < 512 * 137 * 131 * 4


def test_listing_tiles_takes_no_quadratic_memory_and_no_wide_indices():
    length = 131_072  # squared, beyond 32 bits

    def lists(ids):
        mask = masks.causal() & masks.sliding_window(1000) & masks.segments(ids)
        problem = canonicalize(*[jax.ShapeDtypeStruct((1, length, 2), jnp.float32)] * 3, mask=mask)
        codes = classify_tiles(mask, problem.sizes, (0, None), 512, 512)
        return list_tiles(codes, 512, length), list_tiles(jnp.swapaxes(codes, -1, -2), 512, length)

    assert temporary_bytes(lists, (1, length), dtype=jnp.int32) < 16 * 2**20
    by_query, by_key = jax.jit(lists)(jnp.arange(length, dtype=jnp.int32)[None] // 700)
    # 1000 keys back from a tile of 512 reach two tiles, unless a document begins in between.
    assert by_query.kept.max() == 3
    assert by_key.kept.sum() == by_query.kept.sum()
    assert by_query.starts.max() == length  # beyond the end, where a list is over


def test_lists_of_a_table_of_small_blocks_stay_small():
    """Of 1024 x 1024 blocks; what they take is under 64 MiB, the lists themselves included."""
    length, pieces = 131_072, Blocking(128, 128, blocks=5, pieces=8)

    def lists(table):
        sizes = canonicalize(*[jax.ShapeDtypeStruct((1, length, 2), jnp.float32)] * 3).sizes
        codes = classify_tiles(masks.blocks(table, 128), sizes, (0, None), 128, 128)
        return [list_tiles(one, 128, length, pieces) for one in (codes, jnp.swapaxes(codes, -1, -2))]

    assert temporary_bytes(lists, (1024, 1024), dtype=jnp.bool_) < 48 * 2**20


@record
class Contradictory(Mask):
    """Says of the cells in FULL tiles that they are out, and of those in EMPTY tiles that they are in."""

    codes: jax.Array

    @property
    def reads_positions(self):
        return False

    def keep(self, grid):
        return self.codes[grid.query_index // 2, grid.key_index // 3] != TileKind.FULL

    def classify(self, blocks):
        return self.codes.reshape((*(1,) * blocks.leading_axes, *self.codes.shape))


def test_empty_tiles_are_skipped_and_full_tiles_ask_no_mask():
    codes = jnp.asarray([[2, 0, 1, 0], [0, 0, 2, 0], [1, 1, 0, 0]], jnp.int8)
    query, key, value = draw((3, 6, 7), (3, 12, 7), (3, 12, 13))
    spelled = np.kron(np.asarray(codes) > 0, np.ones((2, 3), bool))
    tiles = functools.partial(tiled.run, forward=Blocking(2, 3), backward=Blocking(2, 3))

    def outcome(run, mask):
        def loss(*arrays):
            output, aux = run(canonicalize(*arrays, mask=mask, aux=("lse",)))
            return jnp.sum(output**2) + jnp.sum(aux["lse"])

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

    visited, defined = outcome(tiles, Contradictory(codes)), outcome(dense.run, spelled)
    for keys in (key, key.at[:, 10].set(jnp.nan)):  # which nobody sees
        assert_close(visited(query, keys, value), defined(query, keys, value))


def test_the_largest_score_costs_its_key_only_where_it_is_differentiated():
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 7, 5), (2, 11, 5), (2, 11, 3))]

    def largest(*arrays):
        problem = canonicalize(*arrays, mask=masks.causal(), query_offset=4, aux=("max_score",))
        return in_small_tiles(problem)[1]["max_score"].sum()

    assert "'argmax'" not in str(jax.make_jaxpr(largest)(*arrays))
    assert "'argmax'" in str(jax.make_jaxpr(jax.grad(largest))(*arrays))


def test_nothing_comes_of_masks_of_nothing():
    tree = masks.tree(np.zeros((0, 2), np.int32) - 1)
    by_head = masks.predicate(lambda head, query, key: key > head).number_leading((2,))
    assert tree.dense(3).shape == (0, 3, 3)
    assert by_head.dense(0, 3, query_offset=0).shape[-2:] == (0, 3)


# Keys 3 to 7 are nobody's and fill whole tiles; so does what the last queries may not read. Query 2 has none,
# nor has any query of the second head but the first.
BAND = np.random.default_rng(3).random((2, 7, 11)) < 0.5
BAND &= (np.arange(11) // 4 != 1) & ((np.arange(7)[:, None] < 5) | (np.arange(11) < 8))
BAND[:, :, 3], BAND[:, 2], BAND[1, 1:], BAND[:, 0, 0] = False, False, False, True
ASKS, ANSWERS = BAND.any(-1)[..., None], BAND.any(-2)[..., None]
in_pieces = functools.partial(tiled.run, forward=TILINGS["in pieces"][0], backward=TILINGS["in pieces"][1])


@pytest.mark.parametrize(
    ("run", "removed_by"),
    [(in_small_tiles, "mask"), (in_pieces, "bias"), (dense.run, "mask")],
    ids=["tiled", "in pieces", "dense"],
)
def test_what_nobody_may_attend_to_changes_no_bit_of_any_derivative(run, removed_by):
    call = (*draw((2, 7, 5), (2, 11, 5), (2, 11, 3), (7, 11)), jnp.float32(0.4))
    tangents, used = tuple(jnp.cos(array) for array in call), (ASKS, ANSWERS, ANSWERS, None, None)

    def loss(query, key, value, bias, scale):
        removed = {"mask": BAND, "score": scores.softcap(2.0)}
        if removed_by == "bias":
            removed, bias = {}, jnp.where(BAND, bias, -jnp.inf)
        options = {"bias": bias, "scale": scale, "aux": ("lse", "entropy"), **removed}
        output, aux = run(canonicalize(query, key, value, **options))
        lse = jnp.where(aux["lse"] > -jnp.inf, aux["lse"], 0)
        return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.sin(lse)) + jnp.sum(aux["entropy"]), (output, aux)

    @jax.jit
    def outcome(call, tangents, factors):
        """Reverse over forward, reverse over reverse, a tangent, results; `factors` are the loss's own."""
        tangent = lambda *call: jax.jvp(loss, call, tangents, has_aux=True)[1:]
        grads = jax.grad(tangent, EVERYTHING, has_aux=True)(*call)[0]
        return (grads, reverse_over_reverse(loss, call, factors)), tangent(*call)

    def fill(arrays, number):
        filled = zip(arrays, used, strict=True)
        return tuple(array if rows is None else jnp.where(rows, array, number) for array, rows in filled)

    alone, still = fill(call, 0.0), fill(tangents, 0.0)
    clean = outcome(alone, still, still)
    for grads in clean[0]:
        for grad, rows in zip(grads, used, strict=True):
            assert np.isfinite(grad).all()
            assert rows is None or not np.where(rows, 0, grad).any()
    for poison in map(np.float32, (np.nan, np.inf, -np.inf)):
        spoiled, beside = fill(call, poison), fill(tangents, poison)
        assert_same_bits(outcome(spoiled, beside, still), clean)
        for place in (1, 2):  # a key or a value, where all else is finite
            one = lambda arrays, others, place=place: (*arrays[:place], others[place], *arrays[place + 1 :])
            assert_same_bits(outcome(one(alone, spoiled), still, still), clean)
            assert_same_bits(outcome(alone, one(still, beside), still), clean)


def test_the_backward_pass_knows_the_softcap_the_scale_and_the_sink_beyond_one_tile():
    """A flash backward without the softcap's derivative; a short path without the scale."""
    query, key, value, tangent = draw((1, 1031, 5), (1, 1031, 5), (1, 1031, 3), (1, 1031, 5))

    def by_hand(query):
        logits = 2 * jnp.tanh(query @ jnp.swapaxes(key, 1, 2) * 0.7 / 2)
        weights = jax.nn.softmax(jnp.concatenate([logits, jnp.full((1, 1031, 1), 6.0)], -1))
        return jnp.vdot(weights[..., :-1] @ value, value)

    def ours(query):
        options = {"score": scores.softcap(2.0), "scale": 0.7, "sinks": jnp.asarray([6.0])}
        return jnp.vdot(attend(query, key, value, backend="tiled", **options), value)

    (found, found_grad), (expected, grad) = (jax.jit(jax.value_and_grad(f))(query) for f in (ours, by_hand))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(*(jnp.vdot(one, tangent) for one in (found_grad, grad)), rtol=2e-4, atol=1e-4)


def test_an_entropy_that_nobody_differentiates_changes_no_bit_of_one_gradient():
    """As a cotangent of zeros it would be another program."""
    query, key, value, cotangent = draw((2, 4, 517, 16), (2, 2, 517, 16), (2, 2, 517, 16), (2, 4, 517, 16))
    for wrt in (0, 1):

        def gradient(aux, wrt=wrt):
            def loss(*call):
                return jnp.vdot(
                    attend(*call, mask=masks.causal(), aux=(*aux, "lse"), backend="tiled")[0], cotangent
                )

            return jax.jit(jax.grad(loss, wrt))(query, key, value)

        np.testing.assert_array_equal(gradient(("entropy",)), gradient(()))
