"""The tiled backend: tile sizes, dropout, every transform, memory, work, and what may not leak."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import plain
from economy import mostly_slow
from mask_expressions import expressions
from regard import attend, masks, scores
from regard.engine.backends import dense, tiled
from regard.engine.call.canonicalization import AUX, canonicalize
from regard.engine.flash.blocking import Blocking
from regard.engine.flash.sparsity import classify_tiles, list_tiles
from regard.masks import Mask, TileKind
from regard.records import record
from test_contract import CASES, holes

LEFT_OUT = {"mask": None, "bias": None, "scale": None, "dropout_rate": 0.0, "rng": None, "query_offset": None}
in_small_tiles = functools.partial(tiled.run, forward=Blocking(3, 2), backward=Blocking(2, 3))
HUGE = (Blocking(64, 64, 64), Blocking(64, 64, 64))
# Several blocks at once, each against several tiles of its own list.
IN_PIECES = (Blocking(2, 3, blocks=2, pieces=2), Blocking(3, 2, blocks=3, pieces=2))
# One tile of every batch row and head at once.
AT_ONCE = (Blocking(2, 3, at_once=64), Blocking(3, 2, at_once=64))


# Programs this small take longer to optimise than to run.
compiled = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)


def posed(query, key, value, aux=(), **options):
    return canonicalize(query, key, value, **LEFT_OUT | options, aux=aux, precision=None)


def draw(*shapes, dtype=None):
    rng = np.random.default_rng(17)
    return [jnp.asarray(rng.normal(size=shape), dtype or jnp.float32) for shape in shapes]


def assert_close(actual, expected, rtol=2e-5, atol=2e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def assert_same_bits(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


# Tile sizes.

TILINGS = {
    "one by one": (Blocking(1, 1), Blocking(1, 1)),
    "neither divides": (Blocking(2, 3), Blocking(3, 2)),
    "several heads": (Blocking(3, 4, 2), Blocking(4, 5, 3)),
    "larger than the call": HUGE,
    "in pieces": IN_PIECES,
    "at once": AT_ONCE,
}
TILED_CASES = (
    "grouped",
    "three leading axes",
    "causal with offsets by row",
    "documents",
    "stored by head",
    "bias that drops",
    "predicate",
)


@functools.cache
def expected(name):
    """A case's arrays, cotangent, truth and plain evaluation, with the scale as one more input."""
    case = CASES[name]
    query, key, value, bias = case.arrays()
    cotangent = np.random.default_rng(5).normal(size=(*case.leading(), case.query[-2], case.value[-1]))
    cotangent = cotangent.astype(np.float32)
    inputs = [np.asarray(x, np.float64) for x in (query, key, value)]
    bias64 = None if bias is None else np.asarray(bias, np.float64)
    spelled = {"keep": case.keep(), "bias": bias64, "scale": 0.3, "cotangent": cotangent}
    truth = vars(oracle.batched(*inputs, **spelled))
    return case, (query, key, value, bias), cotangent, truth, plain.evaluate(*inputs, **spelled)


@pytest.mark.parametrize(
    ("name", "tiling"),
    mostly_slow(
        itertools.product(TILED_CASES, TILINGS),
        ("grouped", "several heads"),
        ("bias that drops", "larger than the call"),
        ("grouped", "in pieces"),
        ("bias that drops", "neither divides"),
    ),
)
def test_values_statistics_and_gradients_do_not_depend_on_tiles(name, tiling):
    case, (query, key, value, bias), cotangent, truth, same = expected(name)
    forward, backward = TILINGS[tiling]

    @compiled
    @functools.partial(jax.grad, argnums=(0, 1, 2, 3, 4), has_aux=True)
    def evaluate(query, key, value, bias, scale):
        options = {"mask": case.mask, "bias": bias, "scale": scale, "query_offset": case.offset}
        output, aux = tiled.run(posed(query, key, value, AUX, **options), forward=forward, backward=backward)
        return jnp.sum(output * cotangent), aux | {"output": output}

    (*grads, d_scale), found = evaluate(query, key, value, bias, jnp.float32(0.3))
    np.testing.assert_array_equal(found.pop("argmax"), truth["argmax"])
    for stat, array in found.items():
        plain.assert_as_exact(array, truth[stat], same[stat], stat, magnitude=1.0)
    for grad, part in zip(grads, ("d_query", "d_key", "d_value", "d_bias"), strict=True):
        if grad is not None:
            magnitude = 0.0 if part == "d_value" else np.max(same[f"{part}_terms"])
            plain.assert_as_exact(grad, truth[part], same[part], part, magnitude)
    by_scale = [np.sum(parts["d_query"] * np.asarray(query)) / 0.3 for parts in (truth, same)]
    terms = np.sum(np.abs(truth["d_query"] * np.asarray(query))) / 0.3
    plain.assert_as_exact(d_scale, *by_scale, "d_scale", magnitude=terms)


def test_each_head_of_a_group_attends_to_keys_of_its_own():
    lengths = np.array([[11, 2, 0, 5, 7, 1], [3, 1, 10, 4, 0, 11]])
    arrays, (cotangent,) = draw((2, 6, 5, 7), (2, 3, 11, 7), (2, 3, 11, 13)), draw((2, 6, 5, 13))
    keep = np.arange(11) < lengths[..., None, None]
    truth = oracle.batched(*arrays, keep=np.broadcast_to(keep, (2, 6, 5, 11)), cotangent=cotangent)
    several_heads = functools.partial(tiled.run, forward=Blocking(3, 4, 3), backward=Blocking(4, 5, 3))
    for run in (several_heads, dense.run):

        def loss(*arrays, run=run):
            output, _ = run(posed(*arrays, mask=masks.lengths(lengths)))
            return jnp.sum(output * cotangent), output

        grads, output = compiled(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
        assert_close((output, *grads), (truth.output, truth.d_query, truth.d_key, truth.d_value))


@pytest.mark.parametrize(
    ("heads", "tiling"),
    mostly_slow(
        itertools.product(["alone", "grouped"], TILINGS),
        ("grouped", "neither divides"),
        ("alone", "in pieces"),
    ),
)
def test_dropout_is_that_of_the_definition_whatever_the_tiles(heads, tiling):
    heads = {"alone": (3, 3), "grouped": (6, 3)}[heads]
    query, key, value, cotangent = draw(
        (2, heads[0], 5, 7), (2, heads[1], 11, 7), (2, heads[1], 11, 13), (2, heads[0], 5, 13)
    )
    forward, backward = TILINGS[tiling]
    options = {
        "mask": masks.causal(), "query_offset": 4, "dropout_rate": 0.4, "rng": jax.random.key(2)
    }  # fmt: skip

    def outcome(run):
        def loss(*arrays):
            output, _ = run(posed(*arrays, **options))
            return jnp.sum(output * cotangent), output

        return compiled(jax.grad(loss, (0, 1, 2), has_aux=True))(query, key, value)

    in_tiles = functools.partial(tiled.run, forward=forward, backward=backward)
    assert_close(outcome(in_tiles), outcome(dense.run))


@pytest.mark.parametrize("length", [521, 1103])
@pytest.mark.parametrize(
    "mask", [None, masks.causal(), masks.sliding_window(20), masks.sliding_window(None, 30)], ids=repr
)
@pytest.mark.slow
def test_lengths_that_the_usual_tiles_do_not_divide_are_right(mask, length):
    arrays = draw((2, length, 7), (2, length, 7), (2, length, 5))

    def outcome(backend):
        loss = lambda *arrays: jnp.sum(attend(*arrays, mask=mask, backend=backend) ** 2)
        return attend(*arrays, mask=mask, backend=backend), jax.grad(loss, (0, 1, 2))(*arrays)

    assert_close(outcome("tiled"), outcome("dense"), rtol=1e-4, atol=2e-5)


# Transforms, in float64, on a call with everything.

EVERYTHING = (0, 1, 2, 3, 4)  # query, key, value, bias, scale
BIASED = {"lse": 0.9, "entropy": 1.1, "max_score": 0.7}


def rich_call():
    """Grouped heads and an empty row; query, key, value, bias, scale."""
    shapes = ((2, 6, 7, 11), (2, 3, 5, 11), (2, 3, 5, 13), (6, 1, 5))
    return (*draw(*shapes, dtype=jnp.float64), jnp.asarray(0.4))


def rich(run):
    """A number that depends on the output and on every statistic that has gradients."""
    (weight,) = draw((2, 6, 7, 13), dtype=jnp.float64)

    def loss(query, key, value, bias, scale):
        options = {
            "mask": masks.causal() & masks.lengths([5, 3]), "query_offset": -1, "bias": bias, "scale": scale,
            "dropout_rate": 0.3, "rng": jax.random.key(3),
        }  # fmt: skip
        output, aux = run(posed(query, key, value, tuple(BIASED), **options))
        alive = aux["lse"] > -jnp.inf
        looks = [jnp.sin(rate * jnp.where(alive, aux[name], 0)).sum() for name, rate in BIASED.items()]
        return jnp.sum(weight * jnp.sin(output)) + sum(looks)

    return loss


def dot(grads, tangents):
    return sum(jnp.vdot(grad, tangent) for grad, tangent in zip(grads, tangents, strict=True))


def forward_over_reverse(f, call, tangents):
    return jax.jvp(jax.grad(f, EVERYTHING), call, tangents)[1]


def reverse_over_reverse(f, call, tangents):
    return jax.grad(lambda *call: dot(jax.grad(f, EVERYTHING)(*call), tangents), EVERYTHING)(*call)


def reverse_over_forward(f, call, tangents):
    return jax.grad(lambda *call: jax.jvp(f, call, tangents)[1], EVERYTHING)(*call)


def third_forward(f, call, tangents):
    return jax.jvp(lambda *call: forward_over_reverse(f, call, tangents), call, tangents)[1]


def third_reverse(f, call, tangents):
    return jax.grad(lambda *call: dot(forward_over_reverse(f, call, tangents), tangents), EVERYTHING)(*call)


def scan(f, call, tangents):
    step = lambda total, query: (total + f(query, *call[1:]), jax.grad(f, EVERYTHING)(query, *call[1:]))
    return jax.lax.scan(step, jnp.zeros(()), stack(call[0]))


def stack(array, axis=0):
    return jnp.stack([array, 1.1 * array, -0.7 * array], axis)


def grads_along_query(f, call, tangents):
    return jax.vmap(lambda query: jax.grad(f, EVERYTHING)(query, *call[1:]))(stack(call[0]))


def grads_along_key_and_value(f, call, tangents):
    grads = jax.vmap(jax.grad(f, EVERYTHING), in_axes=(None, 2, -1, None, None), out_axes=(1, 1, 1, 1, 0))
    return grads(call[0], stack(call[1], 2), stack(call[2], -1), *call[3:])


def grads_along_bias(f, call, tangents):
    grads = jax.vmap(jax.grad(f, EVERYTHING), in_axes=(None, None, None, 1, None))
    return grads(*call[:3], stack(call[3], 1), call[4])


def grads_along_scale(f, call, tangents):
    return jax.vmap(lambda scale: jax.grad(f, EVERYTHING)(*call[:4], scale))(jnp.array([0.1, 0.7, -0.2]))


def grad_of_vmap(f, call, tangents):
    whole = lambda queries, *rest: jnp.sum(jax.vmap(lambda query: f(query, *rest))(queries))
    return jax.grad(whole, EVERYTHING)(stack(call[0]), *call[1:])


def vmap_of_vmap(f, call, tangents):
    inner = jax.vmap(jax.grad(f, EVERYTHING), in_axes=(None, 0, None, None, None))
    outer = jax.vmap(inner, in_axes=(1, None, None, None, None))
    return outer(stack(call[0], 1), stack(call[1]), *call[2:])


def products_along_tangents(f, call, tangents):
    product = lambda query, tangent: jax.jvp(lambda q: jax.grad(f)(q, *call[1:]), (query,), (tangent,))[1]
    return jax.vmap(product, in_axes=(None, 0))(call[0], stack(tangents[0]))


def products_along_query(f, call, tangents):
    product = lambda query: forward_over_reverse(f, (query, *call[1:]), tangents)
    return jax.vmap(product)(stack(call[0]))


def reverse_products_along_query(f, call, tangents):
    return jax.vmap(lambda query: reverse_over_reverse(f, (query, *call[1:]), tangents))(stack(call[0]))


TRANSFORMS = {
    "value": lambda f, call, tangents: f(*call),
    "jvp": lambda f, call, tangents: jax.jvp(f, call, tangents),
    "jvp along the scale": lambda f, call, tangents: jax.jvp(
        lambda s: f(*call[:4], s), call[4:], tangents[4:]
    ),
    "linearize": lambda f, call, tangents: jax.linearize(f, *call)[1](*tangents),
    "grad": lambda f, call, tangents: jax.grad(f, EVERYTHING)(*call),
    "checkpoint": lambda f, call, tangents: jax.grad(jax.checkpoint(f), EVERYTHING)(*call),
    "forward over reverse": forward_over_reverse,
    "reverse over reverse": reverse_over_reverse,
    "reverse over forward": reverse_over_forward,
    "forward over forward over reverse": third_forward,
    "reverse over forward over reverse": third_reverse,
    "scan": scan,
    "vmap of grad along the query": grads_along_query,
    "vmap of grad along key and value, on odd axes": grads_along_key_and_value,
    "vmap of grad along the bias": grads_along_bias,
    "vmap of grad along the scale": grads_along_scale,
    "vmap of vmap": vmap_of_vmap,
    "grad of vmap": grad_of_vmap,
    "vmap of Hessian products along their tangents": products_along_tangents,
    "vmap of Hessian products along the query": products_along_query,
    "vmap of reverse over reverse": reverse_products_along_query,
    "jacfwd of a gradient": lambda f, call, tangents: jax.jacfwd(jax.grad(f, 4), 3)(*call),
    "hessian by the scale": lambda f, call, tangents: jax.hessian(f, 4)(*call),
}


TRANSFORMED = {"whole": (Blocking(3, 2, 3), Blocking(2, 4)), "in pieces": IN_PIECES, "at once": AT_ONCE}


@pytest.mark.parametrize(
    ("transform", "tiling"),
    mostly_slow(
        itertools.product(TRANSFORMS, TRANSFORMED),
        ("vmap of Hessian products along their tangents", "whole"),
        ("reverse over reverse", "in pieces"),
    ),
)
def test_a_transform_of_the_tiles_is_that_of_the_definition(transform, tiling, x64):
    forward, backward = TRANSFORMED[tiling]
    found = evaluate_transform(transform, functools.partial(tiled.run, forward=forward, backward=backward))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert_close(found, define_transform(transform), rtol=1e-9, atol=1e-10)


def evaluate_transform(name, run):
    call = rich_call()
    tangents = tuple(jnp.cos(3 * array) for array in call)
    return compiled(functools.partial(TRANSFORMS[name], rich(run)))(call, tangents)


@functools.cache
def define_transform(name):
    """By the definition, once for every tiling."""
    return evaluate_transform(name, dense.run)


@pytest.mark.slow
def test_a_third_derivative_in_reverse_is_the_third_cumulant():
    """lse is the scores' cumulant-generating function of the scale."""
    query, key, value = draw((3, 7), (5, 7), (5, 2))

    def total(scale):
        return jnp.sum(in_small_tiles(posed(query, key, value, ("lse",), scale=scale))[1]["lse"])

    second = lambda scale: jax.jvp(jax.grad(total), (scale,), (jnp.float32(1),))[1]
    found = compiled(jax.grad(second))(jnp.float32(0.3))
    weights = oracle.attention(query, key, value, scale=0.3).weights
    products = np.asarray(query, np.float64) @ np.asarray(key, np.float64).T
    mean = np.sum(weights * products, -1, keepdims=True)
    np.testing.assert_allclose(found, np.sum(weights * (products - mean) ** 3), rtol=1e-4)


# Where what is not differentiated varies along a batch.

AXES = {
    "lengths": (0, None, None, None),
    "offset": (None, 0, None, None),
    "dropout": (None, None, 0, None),
    "lengths and query": (0, None, None, 0),
    "all": (0, 0, 0, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("varying", mostly_slow(AXES, "all"))
def test_a_batch_of_masks_offsets_and_patterns_is_a_loop_over_calls(varying, x64):
    queries, key, value = draw((3, 2, 6, 5, 7), (2, 3, 11, 7), (2, 3, 11, 13), dtype=jnp.float64)
    alternatives = (
        jnp.array([[3, 11], [0, 7], [5, 2]]), jnp.array([6, 0, -2]), jax.random.split(jax.random.key(1), 3),
        queries,
    )  # fmt: skip
    arguments = [x if axis == 0 else x[0] for x, axis in zip(alternatives, AXES[varying], strict=True)]

    def one(lengths, offset, rng, query, key):
        options = {
            "mask": masks.causal() & masks.lengths(lengths), "query_offset": offset, "dropout_rate": 0.3,
            "rng": rng,
        }  # fmt: skip
        problem = posed(query, key, value, ("entropy",), **options)
        output, aux = in_small_tiles(problem)
        return jnp.sum(jnp.sin(output)) + jnp.sum(aux["entropy"] ** 2)

    pull = jax.value_and_grad(one, (3, 4))
    every = compiled(jax.vmap(pull, in_axes=(*AXES[varying], None)))(*arguments, key)
    single = compiled(pull)
    for row in range(3):
        picked = [x[row] if axis == 0 else x for x, axis in zip(arguments, AXES[varying], strict=True)]
        assert_close(jax.tree.map(lambda x, row=row: x[row], every), single(*picked, key), 1e-10, 1e-11)
    total = lambda key: jnp.sum(jax.vmap(one, in_axes=(*AXES[varying], None))(*arguments, key))
    assert_close(compiled(jax.grad(total))(key), every[1][1].sum(0), 1e-10, 1e-11)


def test_masks_may_vary_along_any_axis_of_theirs():
    query, key, value = draw((2, 3, 5, 7), (2, 3, 11, 7), (2, 3, 11, 13))
    lengths = np.array([[3, 11, 0, 7, 10], [8, 5, 2, 6, 1]])  # of two batch rows, five times
    call = lambda lengths: in_small_tiles(posed(query, key, value, mask=masks.lengths(lengths)))[0]
    found = compiled(jax.vmap(call, in_axes=1))(jnp.asarray(lengths))
    keep = np.arange(11) < lengths.T[:, :, None, None, None]
    for output, cells in zip(found, np.broadcast_to(keep, (5, 2, 3, 5, 11)), strict=True):
        assert_close(output, oracle.batched(query, key, value, keep=cells).output)


# Predicates that close over arrays.


def same_document(ids):
    return masks.predicate(lambda query, key: ids[query] == ids[key])


def by_backend(function):
    return [jax.jit(functools.partial(function, run)) for run in (in_small_tiles, dense.run)]


DOCUMENTS = np.array([[0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3], [0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 4]])


@pytest.mark.slow
def test_a_predicate_may_close_over_a_concrete_array():
    arrays, ids = draw((3, 11, 7), (3, 11, 7), (3, 11, 13)), jnp.asarray(DOCUMENTS[0])

    def step(run, *arrays):
        loss = lambda *arrays: jnp.sum(run(posed(*arrays, mask=same_document(ids)))[0] ** 2)
        return jax.value_and_grad(loss, (0, 1, 2))(*arrays)

    in_tiles, whole = by_backend(step)
    assert_close(in_tiles(*arrays), whole(*arrays))
    assert_close(step(in_small_tiles, *arrays), whole(*arrays))


@pytest.mark.parametrize("run", [in_small_tiles, dense.run], ids=["tiled", "dense"])
def test_a_predicate_that_closes_over_an_array_is_held_to_booleans_too(run):
    arrays = draw((3, 11, 7), (3, 11, 7), (3, 11, 13))
    ids, everything = jnp.asarray(DOCUMENTS[0]), jnp.asarray(True)
    apart = masks.predicate(lambda query, key: ids[query] - ids[key])
    for mask in (apart, ~apart, apart & masks.causal()):
        with pytest.raises(TypeError, match=r"predicate: expected fn to return booleans .*, got int32"):
            run(posed(*arrays, mask=mask))
    # One answer for all pairs is as good as one for each.
    one = run(posed(*arrays, mask=masks.predicate(lambda query, key: everything)))[0]
    assert_close(one, run(posed(*arrays))[0])


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one", "batch"])
def test_a_predicate_may_close_over_a_traced_array(many):
    arrays, ids = draw((3, 11, 7), (3, 11, 7), (3, 11, 13)), jnp.asarray(DOCUMENTS)

    def loss(run, ids, *arrays):
        return jnp.sum(run(posed(*arrays, mask=same_document(ids) & masks.causal()))[0] ** 2)

    def step(run, ids, *arrays):
        return jax.value_and_grad(functools.partial(loss, run), (1, 2, 3))(ids, *arrays)

    def batch(run, ids, *arrays):
        over = functools.partial(jax.vmap, in_axes=(0, None, None, None))
        total = lambda *arrays: jnp.sum(over(functools.partial(loss, run))(ids, *arrays))
        return over(functools.partial(step, run))(ids, *arrays), jax.grad(total)(*arrays)

    function, given_ids = (batch, ids) if many else (step, ids[1])
    in_tiles, whole = by_backend(function)
    assert_close(in_tiles(given_ids, *arrays), whole(given_ids, *arrays))


def test_a_predicate_may_close_over_what_is_differentiated():
    arrays = draw((3, 11, 7), (3, 11, 7), (3, 11, 13))

    def loss(run, query, key, value):
        louder = jnp.sum(key[0] ** 2, -1)
        mask = masks.predicate(lambda i, j: (louder[j] > 5) | (i == j))
        return jnp.sum(run(posed(query, key, value, mask=mask))[0] ** 2)

    def step(run, *arrays):
        grad = jax.grad(functools.partial(loss, run), (0, 1, 2))
        return grad(*arrays), jax.jvp(grad, arrays, tuple(jnp.cos(x) for x in arrays))[1]

    in_tiles, whole = by_backend(step)
    assert_close(in_tiles(*arrays), whole(*arrays), rtol=1e-4, atol=2e-5)


# Memory.


def measured(kind):
    run = lambda *arrays: attend(*arrays, mask=masks.causal(), backend="tiled")
    loss = lambda *arrays: jnp.sum(run(*arrays) ** 2)
    grad = jax.grad(loss, (0, 1, 2))
    return {
        "forward": run,
        "grad": grad,
        "jvp": lambda *arrays: jax.jvp(run, arrays, arrays),
        "forward over reverse": lambda *arrays: jax.jvp(grad, arrays, arrays),
    }[kind]


def temporary_bytes(function, *shapes, dtype=jnp.float32):
    """What the compiled program needs besides its arguments and results."""
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(function).lower(*given).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "kind", mostly_slow(["forward", "grad", "jvp", "forward over reverse"], "forward", "grad")
)
def test_memory_is_linear_in_length(kind):
    lengths = (2048, 4096, 8192)
    sizes = [temporary_bytes(measured(kind), *[(2, length, 16)] * 3) for length in lengths]
    for shorter, longer in itertools.pairwise(sizes):
        assert longer <= 2.2 * shorter
    assert sizes[-1] < 8192 * 8192 * 4 / 8, "an eighth of one matrix of scores"


def test_listing_tiles_takes_no_quadratic_memory_and_no_wide_indices():
    length = 131_072  # squared, beyond 32 bits

    def lists(ids):
        mask = masks.causal() & masks.sliding_window(1000) & masks.segments(ids)
        arrays = [jax.ShapeDtypeStruct((1, length, 2), jnp.float32)] * 3
        problem = posed(*arrays, mask=mask)
        codes = classify_tiles(mask, problem.sizes, (0, None), 512, 512)
        return list_tiles(codes, 512, length), list_tiles(jnp.swapaxes(codes, -1, -2), 512, length)

    assert temporary_bytes(lists, (1, length), dtype=jnp.int32) < 16 * 2**20
    ids = jnp.asarray(np.arange(length, dtype=np.int32)[None] // 700)
    by_query, by_key = jax.jit(lists)(ids)
    # 1000 keys back from a tile of 512 reach two tiles, unless a document begins in between.
    assert by_query.kept.max() == 3
    assert by_key.kept.sum() == by_query.kept.sum()
    assert by_query.starts.max() == length  # beyond the end, where a list is over


def test_lists_of_a_table_of_small_blocks_stay_small():
    """Of 1024 x 1024 blocks; what they take is under 64 MiB, the lists themselves included."""
    length, pieces = 131_072, Blocking(128, 128, blocks=5, pieces=8)

    def lists(table):
        sizes = posed(*[jax.ShapeDtypeStruct((1, length, 2), jnp.float32)] * 3).sizes
        codes = classify_tiles(masks.blocks(table, 128), sizes, (0, None), 128, 128)
        return [list_tiles(one, 128, length, pieces) for one in (codes, jnp.swapaxes(codes, -1, -2))]

    assert temporary_bytes(lists, (1024, 1024), dtype=jnp.bool_) < 48 * 2**20


def test_lengths_whose_product_is_beyond_32_bits_have_a_program():
    arrays = [jax.ShapeDtypeStruct((1, 100_000, 3), jnp.float32)] * 3
    run = functools.partial(attend, mask=masks.causal(), backend="tiled", aux=("lse", "argmax"))
    output, aux = jax.eval_shape(run, *arrays)
    assert output.shape == (1, 100_000, 3)
    assert aux["lse"].shape == (1, 100_000)
    grads = jax.eval_shape(jax.grad(lambda *arrays: run(*arrays)[0].sum(), (0, 1, 2)), *arrays)
    assert [grad.shape for grad in grads] == [array.shape for array in arrays]


# Work: only listed tiles are visited.


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


@pytest.mark.parametrize("dirty", [False, True], ids=["finite", "with a NaN that nobody sees"])
def test_empty_tiles_are_skipped_and_full_tiles_ask_no_mask(dirty):
    codes = jnp.asarray([[2, 0, 1, 0], [0, 0, 2, 0], [1, 1, 0, 0]], jnp.int8)
    query, key, value = draw((3, 6, 7), (3, 12, 7), (3, 12, 13))
    if dirty:
        key = key.at[:, 10].set(jnp.nan)
    spelled = np.kron(np.asarray(codes) > 0, np.ones((2, 3), bool))
    tiles = functools.partial(tiled.run, forward=Blocking(2, 3), backward=Blocking(2, 3))

    def outcome(run, mask):
        def loss(*arrays):
            output, aux = run(posed(*arrays, ("lse",), mask=mask))
            return jnp.sum(output**2) + jnp.sum(aux["lse"])

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(query, key, value)

    assert_close(outcome(tiles, Contradictory(codes)), outcome(dense.run, spelled))


@settings(max_examples=12)
@given(
    mask=expressions(batch=2, length=7, queries=5),
    query_block=st.integers(1, 6),
    key_block=st.integers(1, 8),
    offset=st.sampled_from([-3, 0, 2]),
)
@pytest.mark.slow
def test_every_cell_that_counts_lies_in_exactly_one_listed_tile(mask, query_block, key_block, offset):
    shapes = ((2, 3, 5, 2), (2, 3, 7, 2), (2, 3, 7, 2))
    problem = posed(*(jnp.zeros(shape) for shape in shapes), mask=mask, query_offset=offset)
    codes = classify_tiles(problem.mask, problem.sizes, (offset, None), query_block, key_block)
    keep = np.asarray(mask.dense(5, 7, query_offset=offset, leading_axes=2))
    keep = np.broadcast_to(keep, (2, 3, 5, 7))
    check_lists(list_tiles(codes, key_block, 7), keep, query_block, key_block)
    by_key = list_tiles(jnp.swapaxes(codes, -1, -2), query_block, 5)
    check_lists(by_key, np.swapaxes(keep, -1, -2), key_block, query_block)


def check_lists(lists, keep, line_size, tile_size):
    lines = -(-keep.shape[-2] // line_size)
    starts = np.broadcast_to(lists.starts, (2, 3, lines, lists.starts.shape[-1]))
    full, kept = (np.broadcast_to(counts, (2, 3, lines)) for counts in (lists.full, lists.kept))
    for index in np.ndindex(2, 3):
        visits = np.zeros(keep.shape[-2:], int)
        for line in range(lines):
            rows = slice(line * line_size, (line + 1) * line_size)
            first, last = full[*index, line], kept[*index, line]
            listed = starts[*index, line]
            assert set(listed[:last]) <= set(range(0, keep.shape[-1], tile_size))
            assert len(set(listed[:last])) == last
            assert (listed[last:] >= keep.shape[-1]).all()  # where the list is over
            for place, start in enumerate(listed[:last]):
                columns = slice(start, start + tile_size)
                visits[rows, columns] += 1
                if place < first:
                    assert keep[*index, rows, columns].all()
                    assert start + tile_size <= keep.shape[-1]
            assert (np.diff(listed[:first]) > 0).all()
            assert (np.diff(listed[first:last]) > 0).all()
        assert visits.max() <= 1
        assert visits[keep[index]].all()


# Nothing at all.


@pytest.mark.parametrize(
    ("queries", "keys", "batch", "width"),
    [(0, 11, 2, 13), (5, 0, 2, 13), (5, 11, 0, 13), (0, 0, 2, 13), (5, 11, 2, 0)],
    ids=str,
)
def test_nothing_comes_of_nothing(queries, keys, batch, width):
    arrays = draw((batch, 3, queries, 7), (batch, 3, keys, 7), (batch, 3, keys, width))

    def outcome(backend):
        def loss(*arrays):
            output, aux = attend(*arrays, mask=masks.causal(), query_offset=2, aux=AUX, backend=backend)
            return jnp.sum(output) + jnp.sum(aux["entropy"]), (output, aux)

        return jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)

    found, by_definition = outcome("tiled"), outcome("dense")
    assert_same_bits(found, by_definition)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(found) == shapes(by_definition)
    assert width == 0 or not any(np.asarray(grad).any() for grad in found[0])


def test_nothing_comes_of_masks_of_nothing_and_of_blocks_of_keys_for_nobody():
    tree, by_head = (
        masks.tree(np.zeros((0, 2), np.int32) - 1),
        masks.predicate(lambda head, query, key: key > head),
    )
    assert tree.dense(3).shape == (0, 3, 3)
    assert by_head.number_leading((2,)).dense(0, 3, query_offset=0).shape[-2:] == (0, 3)
    assert attend(*draw((0, 3, 5, 7), (0, 3, 128, 7), (0, 3, 128, 13)), backend="dense").shape == (
        0,
        3,
        5,
        13,
    )


# Bits.


def test_the_same_call_gives_the_same_bits():
    query, key, value = draw((2, 6, 5, 7), (2, 3, 11, 7), (2, 3, 11, 13))

    def step(query, key, value):
        def loss(*arrays):
            options = {"query_offset": 6, "dropout_rate": 0.2, "rng": jax.random.key(5)}
            problem = posed(*arrays, mask=masks.causal(), **options)
            output, _ = in_small_tiles(problem)
            return jnp.sum(output**2), output

        return jax.grad(loss, (0, 1, 2), has_aux=True)(query, key, value)

    assert_same_bits(step(query, key, value), step(query, key, value))
    in_jit = jax.jit(step)
    first = in_jit(query, key, value)
    assert_same_bits(in_jit(query, key, value), first)
    jax.clear_caches()
    assert_same_bits(jax.jit(step)(query, key, value), first)


UNSEEN = {
    # Keys 7 and 8 share tiles with keys that count; 9 and 10 do not.
    "causal": ((2, 3, 5, 7), masks.causal(), 2),
    "grouped, a batch row without keys": ((2, 6, 5, 7), masks.causal() & masks.lengths([7, 0]), 2),
    "a query in no document": ((2, 3, 5, 7), masks.segments([0, 9, 0, 1, 1], [0] * 4 + [1] * 3 + [2] * 4), 0),
    "queries before the first key": ((2, 3, 5, 7), masks.causal(), -2),
}


UNSEEN_TILES = {"one by one": (1, 1), "2 by 3": (2, 3), "one": (64, 64), "in pieces": (2, 3, 1, 2, 2)}


@pytest.mark.parametrize(
    ("name", "poison", "tiles"),
    mostly_slow(
        itertools.product(UNSEEN, ["nan", "inf"], UNSEEN_TILES),
        *((name, "nan", "2 by 3") for name in UNSEEN),
        ("queries before the first key", "inf", "one"),
        ("queries before the first key", "nan", "in pieces"),
    ),
)
def test_what_nobody_sees_changes_no_bit_wherever_tiles_end(name, poison, tiles):
    shape, mask, offset = UNSEEN[name]
    query, key, value, cotangent = draw(shape, (2, 3, 11, 7), (2, 3, 11, 13), (*shape[:3], 13))
    keep = np.asarray(mask.dense(5, 11, query_offset=offset, leading_axes=2))
    asks, answers = np.broadcast_to(keep.any(-1), shape[:3]), np.broadcast_to(keep.any(-2), (2, 3, 11))
    spoil = lambda array, used: jnp.where(jnp.asarray(used)[..., None], array, jnp.float32(poison))
    blocking = Blocking(*UNSEEN_TILES[tiles])

    @jax.jit
    def outcome(query, key, value, scale):
        def loss(*arrays):
            problem = posed(*arrays[:3], AUX, mask=mask, query_offset=offset, scale=arrays[3])
            output, aux = tiled.run(problem, forward=blocking, backward=blocking)
            alive = aux["lse"] > -jnp.inf
            looks = jnp.sum(jnp.where(alive, aux["lse"], 0)) + jnp.sum(aux["entropy"])
            return jnp.sum(output * cotangent) + looks, (output, aux)

        return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(query, key, value, scale)

    clean = outcome(query, key, value, jnp.float32(0.3))
    spoiled = outcome(spoil(query, asks), spoil(key, answers), spoil(value, answers), jnp.float32(0.3))
    assert not answers.all()
    assert_same_bits(spoiled, clean)
    assert_same_bits(outcome(query, key, spoil(value, answers), jnp.float32(0.3)), clean)
    assert_same_bits(outcome(query, spoil(key, answers), value, jnp.float32(0.3)), clean)


# Keys 3 to 7 are nobody's and fill whole tiles; so does what the last queries may not read. Query 2 has none.
BAND = holes(7, 11) & (np.arange(11) // 4 != 1) & ((np.arange(7)[:, None] < 5) | (np.arange(11) < 8))
BAND[:, 3], BAND[2], BAND[0, 0] = False, False, True


@pytest.mark.parametrize(
    ("backend", "removed_by", "transform"),
    mostly_slow(
        itertools.product(
            ["tiled", "dense"],
            ["mask", "bias"],
            ["jvp", "reverse over forward", "reverse over reverse"],
        ),
        ("tiled", "mask", "jvp"),
        ("tiled", "mask", "reverse over reverse"),
        ("tiled", "bias", "jvp"),
        ("dense", "mask", "jvp"),
        ("dense", "mask", "reverse over reverse"),
        ("dense", "bias", "reverse over forward"),
    ),
)
def test_no_derivative_sees_what_nobody_may_attend_to(backend, removed_by, transform):
    run = {"tiled": in_small_tiles, "dense": dense.run}[backend]
    call = (*draw((2, 7, 5), (2, 11, 5), (2, 11, 3), (7, 11)), jnp.float32(0.4))
    tangents = tuple(jnp.cos(array) for array in call)
    asks, answers = BAND.any(-1)[:, None], BAND.any(-2)[:, None]
    used = (asks, answers, answers, None, None)

    def loss(query, key, value, bias, scale):
        removed = {"mask": BAND, "score": scores.softcap(2.0)}
        if removed_by == "bias":
            removed, bias = {}, jnp.where(BAND, bias, -jnp.inf)
        problem = posed(query, key, value, ("lse", "entropy"), bias=bias, scale=scale, **removed)
        output, aux = run(problem)
        lse = jnp.where(aux["lse"] > -jnp.inf, aux["lse"], 0)
        return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.sin(lse)) + jnp.sum(aux["entropy"])

    outcome = compiled(functools.partial(TRANSFORMS[transform], loss))

    def fill(arrays, number):
        filled = zip(arrays, used, strict=True)
        return tuple(array if rows is None else jnp.where(rows, array, number) for array, rows in filled)

    clean = outcome(fill(call, 0.0), fill(tangents, 0.0))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(clean))
    if transform != "jvp":
        for grad, rows in zip(clean, used, strict=True):
            assert rows is None or not np.asarray(grad)[:, ~rows[:, 0]].any()
    for poison in (np.nan, np.inf, -np.inf):
        # In reverse over reverse, tangents are factors of the loss's own.
        beside = fill(tangents, 0.0 if transform == "reverse over reverse" else np.float32(poison))
        spoiled, alone, still = fill(call, np.float32(poison)), fill(call, 0.0), fill(tangents, 0.0)
        assert_same_bits(outcome(spoiled, beside), clean)
        for place in (1, 2):  # a key or a value, where all else is finite
            one = lambda arrays, others, place=place: (*arrays[:place], others[place], *arrays[place + 1 :])
            assert_same_bits(outcome(one(alone, spoiled), still), clean)
            assert_same_bits(outcome(alone, one(still, beside)), clean)


def test_gradients_of_chosen_rows_do_not_see_what_nobody_may_attend_to():
    query, key, value = draw((2, 7, 5), (2, 11, 5), (2, 11, 3))
    asks, answers = BAND.any(-1)[:, None], BAND.any(-2)[:, None]

    @compiled
    @functools.partial(jax.grad, argnums=(0, 1))
    def outcome(query, key):
        problem = posed(query, key, value, ("weights",), mask=BAND, rows=[2, 5, 0])
        return jnp.sum(jnp.sin(in_small_tiles(problem)[1]["weights"]))

    fill = lambda number: (jnp.where(asks, query, number), jnp.where(answers, key, number))
    assert_same_bits(outcome(*fill(jnp.float32(np.nan))), outcome(*fill(0.0)))


@pytest.mark.slow
def test_transforms_in_bfloat16_are_those_of_float32_but_for_rounding():
    arrays = draw((3, 11, 7), (3, 11, 7), (3, 11, 13), dtype=jnp.bfloat16)
    tangents = [jnp.cos(x) for x in arrays]

    def energy(*arrays):
        return jnp.sum(in_small_tiles(posed(*arrays, mask=masks.causal()))[0].astype(jnp.float32) ** 2)

    def outcome(arrays, tangents):
        grads = lambda *arrays: jax.grad(energy, (0, 1, 2))(*arrays)
        forward = jax.jvp(grads, tuple(arrays), tuple(tangents))
        pull = lambda *arrays: sum(
            jnp.vdot(x.astype(jnp.float32), y.astype(jnp.float32))
            for x, y in zip(grads(*arrays), tangents, strict=True)
        )
        return *forward, jax.grad(pull, (0, 1, 2))(*arrays)

    wide = [[x.astype(jnp.float32) for x in group] for group in (arrays, tangents)]
    outcome = compiled(outcome)
    for narrow, exact in zip(outcome(arrays, tangents), outcome(*wide), strict=True):
        for found, expected in zip(narrow, exact, strict=True):
            assert found.dtype == jnp.bfloat16
            scale = float(jnp.abs(expected).max())
            np.testing.assert_allclose(found.astype(np.float32), expected, rtol=0, atol=0.05 * scale)


@pytest.mark.slow
def test_the_largest_score_costs_its_key_only_where_it_is_differentiated():
    query, key, value = draw((2, 7, 5), (2, 11, 5), (2, 11, 3))

    @jax.vmap
    def largest(limit, query):
        last = 2 * limit  # known in the program alone, and differentiated around
        mask = masks.predicate(lambda t, s: s <= last)
        return run_small(posed(query, key, value, ("lse", "max_score"), mask=mask, query_offset=0))[1][
            "max_score"
        ].sum()

    def run_small(problem):
        return tiled.run(problem, Blocking(5, 3), Blocking(5, 3))

    limits, queries = jnp.array([1, 4]), jnp.stack([query, query[::-1]])
    assert "'argmax'" not in str(jax.make_jaxpr(largest)(limits, queries))
    found = jax.jit(jax.grad(lambda queries: largest(limits, queries).sum()))(queries)
    for limit, query, grad in zip(limits, queries, found, strict=True):
        best = jnp.argmax((query @ key.swapaxes(-1, -2))[..., : 2 * limit + 1], -1)
        wanted = jnp.take_along_axis(key, best[..., None], 1) / np.sqrt(5)
        np.testing.assert_allclose(grad, wanted, rtol=1e-6)
