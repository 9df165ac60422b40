"""Calls of `attend` in divided programs, with eight devices, compared with one; not a test by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cudnn_model
from collectives import count_kinds, count_sent
from mesh_cases import draw
from regard import attend, masks, scores
from regard.engine.backends import cudnn, splash_tpu
from regard.layers import EncoderBlock

BATCH, HEADS, KEY_HEADS, D, E = 4, 8, 4, 5, 7
LENGTHS = {"first": (521, 523), "second": (131, 137)}  # by the order of derivatives: T and S
AXES = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Auto}
DIVISIONS = {"batch": ("b", None), "heads": (None, "h"), "both": ("b", "h")}


def _numbers(*shape):
    return draw(shape, seed=5)[0]


# Options of a call, of arrays by name; what the arrays are, and how each is divided with (batch, heads).
CASES = {
    "plain": (dict, {}),
    "causal": (lambda: {"mask": masks.causal()}, {}),
    "lengths": (
        lambda lengths: {"mask": masks.causal() & masks.lengths(lengths)},
        {"lengths": (lambda T, S: jnp.asarray([500, 0, 3, S], jnp.int32), lambda b, h: P(b))},
    ),
    "segments": (
        lambda query, key: {"mask": masks.segments(query, key)},
        {
            "query": (
                lambda T, S: jnp.arange(BATCH * T, dtype=jnp.int32).reshape((BATCH, T)) // 97,
                lambda b, h: P(b),
            ),
            "key": (
                lambda T, S: jnp.arange(BATCH * S, dtype=jnp.int32).reshape((BATCH, S)) // 97,
                lambda b, h: P(b),
            ),
        },
    ),
    "array per head": (
        lambda array: {"mask": masks.from_array(array)},
        {"array": (lambda T, S: _numbers(BATCH, HEADS, T, S) > 0, lambda b, h: P(b, h))},
    ),
    "predicate": (
        lambda: {"mask": masks.predicate(lambda b, h, q, k: (k < 50 * b) & ((q - k) % (h + 2) != 1))},
        {},
    ),
    "alibi": (
        lambda slopes: {"mask": masks.causal(), "score": [scores.alibi(slopes=slopes), scores.softcap(7.0)]},
        {"slopes": (lambda T, S: abs(_numbers(HEADS)) / 8, lambda b, h: P(h))},
    ),
    "relative": (
        lambda table: {"score": scores.relative_bias(table, max_distance=64), "mask": masks.causal()},
        {"table": (lambda T, S: _numbers(32, HEADS), lambda b, h: P(None, h))},
    ),
    "positions": (
        lambda query, key: {
            "mask": masks.causal() & masks.chunked(97),
            "query_offset": None,
            "query_positions": query,
            "key_positions": key,
        },
        {
            "query": (
                lambda T, S: jnp.arange(BATCH * T, dtype=jnp.int32).reshape((BATCH, T)) * 31 % 401,
                lambda b, h: P(b),
            ),
            "key": (
                lambda T, S: jnp.arange(BATCH * HEADS * S, dtype=jnp.int32).reshape((BATCH, HEADS, S)) % 401,
                lambda b, h: P(b, h),
            ),
        },
    ),
    "bias and sinks": (
        lambda bias, sinks: {"bias": bias, "sinks": sinks},
        {
            "bias": (lambda T, S: _numbers(1, HEADS, 1, S), lambda b, h: P(None, h)),
            "sinks": (lambda T, S: _numbers(HEADS), lambda b, h: P(h)),
        },
    ),
    "dropout": (
        lambda rng: {"mask": masks.causal(), "dropout_rate": 0.3, "rng": jax.random.wrap_key_data(rng)},
        {"rng": (lambda T, S: jax.random.key_data(jax.random.key(3)), lambda b, h: P())},
    ),
}
AUX = ("lse", "entropy", "max_score")


def _arrays(case, order, key_heads):
    T, S = LENGTHS[order]
    operands = draw((BATCH, HEADS, T, D), (BATCH, key_heads, S, D), (BATCH, key_heads, S, E), seed=7)
    return [*operands, *(make(T, S) for make, _ in CASES[case][1].values())]


def _specs(case, division, key_heads=KEY_HEADS):
    b, h = DIVISIONS[division]
    keys = P(b, h) if key_heads == KEY_HEADS else P(b)
    return (P(b, h), keys, keys, *(place(b, h) for _, place in CASES[case][1].values()))


def _call(case, backend, aux):
    make, data = CASES[case]

    def call(query, key, value, *rest):
        options = make(**dict(zip(data, rest, strict=True)))
        options = {"query_offset": 2} | options
        output, found = attend(query, key, value, backend=backend, aux=aux, **options)
        return output, *found.values()

    return call


def _differentiable(arrays):
    return tuple(place for place, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating))


def _measure(results):
    """A number that every result moves; empty rows count nothing."""
    weights = [jnp.cos(jnp.arange(one.size, dtype=one.dtype)).reshape(one.shape) for one in results]
    parts = (
        jnp.sum(weight * jnp.where(jnp.isfinite(one), one, 0))
        for weight, one in zip(weights, results, strict=True)
    )
    return functools.reduce(jnp.add, parts)


def _with_gradient(call, wrt):
    def run(*arrays):
        def loss(*arrays):
            results = call(*arrays)
            return _measure(results), results

        (_, results), grads = jax.value_and_grad(loss, wrt, has_aux=True)(*arrays)
        return results, grads

    return run


def _second(call, wrt):
    """Forward over reverse and reverse over reverse."""

    def run(*arrays):
        first = jax.grad(lambda *arrays: _measure(call(*arrays)), wrt)

        def turn(*arrays):
            moved = (arrays[place] for place in wrt)
            parts = (jnp.sum(jnp.cos(one) * grad) for one, grad in zip(moved, first(*arrays), strict=True))
            return functools.reduce(jnp.add, parts)

        moved = [arrays[place] for place in wrt]

        def of_moved(*moved):
            whole = list(arrays)
            for place, array in zip(wrt, moved, strict=True):
                whole[place] = array
            return first(*whole)

        return jax.jvp(of_moved, moved, [jnp.sin(array) for array in moved])[1], jax.grad(turn, wrt)(*arrays)

    return run


ORDERS = {"first": _with_gradient, "second": _second}


@functools.cache
def _alone(case, backend, order, aux, key_heads):
    arrays = _arrays(case, order, key_heads)
    found = jax.jit(ORDERS[order](_call(case, backend, aux), _differentiable(arrays)))(*arrays)
    return jax.tree.map(np.asarray, found)


def check(axes, case, backend, *, division="both", order="first", aux=AUX, key_heads=KEY_HEADS):
    """Run a call divided and alone; fail where they differ, or where results are not divided as they came."""
    sizes = {"both": (2, 4), "batch": (2, 4), "heads": (2, 4)}[division]
    mesh = jax.make_mesh(sizes, ("b", "h"), axis_types=(AXES[axes],) * 2)
    arrays, specs = _arrays(case, order, key_heads), _specs(case, division, key_heads)
    placed = [
        jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)
    ]
    call, wrt = _call(case, backend, aux), _differentiable(arrays)
    if axes == "manual":
        rows = P(*DIVISIONS[division])
        call = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(rows,) * (1 + len(aux)))
    program = jax.jit(ORDERS[order](call, wrt)).lower(*placed).compile()
    found, expected = program(*placed), _alone(case, backend, order, aux, key_heads)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = np.abs(np.where(np.isfinite(other), other, 0)).max()
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * scale)
    lies = [*[specs[0]] * (1 + len(aux)), *(specs[place] for place in wrt)][-len(jax.tree.leaves(found)) :]
    if order == "first":
        for one, spec in zip(jax.tree.leaves(found), lies, strict=True):
            wanted = NamedSharding(mesh, spec)
            assert one.sharding.is_equivalent_to(wanted, one.ndim), (case, one.shape, one.sharding.spec, spec)
    return count_kinds(program.as_text())


# Other programs around a call: functions of the call, its arrays and their sharding.


def _in_scan(call, arrays, place):
    return jax.jit(lambda *arrays: jax.lax.scan(lambda _, row: (None, call(*row)), None, arrays)[1])(*arrays)


def _in_cond(call, arrays, place):
    return jax.jit(lambda is_on, *arrays: jax.lax.cond(is_on, call, lambda q, k, v: v, *arrays))(
        True, *arrays
    )


def _compiled_ahead(call, arrays, place):
    like = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place) for array in arrays]
    return jax.jit(call).lower(*like).compile()(*arrays)


def _donated(call, arrays, place):
    query = jax.device_put(np.asarray(arrays[0]), place)
    found = jax.jit(call, donate_argnums=0)(query, *arrays[1:])
    assert query.is_deleted()
    return found


def _exported(call, arrays, place):
    program = jax.export.export(jax.jit(call, in_shardings=place, out_shardings=place))(*arrays)
    return jax.jit(program.call)(*arrays)


def _mapped_by_name(call, arrays, place):
    return jax.jit(jax.vmap(call, spmd_axis_name="b"))(*arrays)


def _one_a_device(call, arrays, place):
    parts = [np.asarray(array).reshape((8, -1, *array.shape[2:])) for array in arrays]
    return jax.pmap(call)(*parts).reshape(arrays[0].shape)


def _manual_in_part(call, arrays, place):
    part = jax.shard_map(call, mesh=place.mesh, in_specs=P("b"), out_specs=P("b"), axis_names={"b"})
    return jax.jit(part)(*arrays)


def _in_the_mesh_of_the_context(call, arrays, place):
    def run(*arrays):
        return call(*(jax.lax.with_sharding_constraint(array, P("b", "h")) for array in arrays))

    with jax.set_mesh(place.mesh):
        found = jax.jit(run)(*map(np.asarray, arrays))
        assert found.sharding.is_equivalent_to(place, found.ndim)
    return found


PROGRAMS = {
    "scan": _in_scan,
    "cond": _in_cond,
    "compiled ahead of time": _compiled_ahead,
    "donated": _donated,
    "exported": _exported,
    "vmap with spmd_axis_name": _mapped_by_name,
    "pmap": _one_a_device,
    "shard_map over one of two axes": _manual_in_part,
    "set_mesh": _in_the_mesh_of_the_context,
}


def check_program(name):
    """Run a program around a call on divided arrays; fail where it differs from the call on one device."""
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    place = NamedSharding(mesh, P("b", "h"))
    arrays = draw(*[(BATCH, HEADS, 59, D)] * 3)

    def call(query, key, value):
        return attend(query, key, value, mask=masks.causal(), backend="tiled")

    expected = jax.jit(call)(*arrays)
    found = PROGRAMS[name](call, [jax.device_put(array, place) for array in arrays], place)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def check_training_step():
    """Return what a step sends whose batch is divided, and what sums of the parameters' gradients send."""
    mesh = jax.make_mesh((8,), ("b",), axis_types=(AxisType.Auto,))
    graph, state = nnx.split(EncoderBlock(24, num_heads=4, d_ff=40, rngs=nnx.Rngs(0)))
    state = jax.device_put(state, NamedSharding(mesh, P()))
    (x,) = draw((8, 523, 24))

    def step(state, x):
        def loss(state):
            return jnp.mean(nnx.merge(graph, state)(x, mask=masks.causal()) ** 2)

        return jax.tree.map(lambda leaf, grad: leaf - grad * 0.1, state, jax.grad(loss)(state))

    text = jax.jit(step).lower(state, jax.device_put(x, NamedSharding(mesh, P("b")))).compile().as_text()
    return count_sent(text, 8), sum(2 * 7 / 8 * leaf.nbytes for leaf in jax.tree.leaves(state))


def check_kernel(backend, axes, case, key_heads=KEY_HEADS):
    """Run a call by a library's kernel, or what stands in for it, divided and alone; return what is sent."""
    arrays = draw((BATCH, HEADS, 7, 8), (BATCH, key_heads, 7, 8), (BATCH, key_heads, 7, 8), seed=7)
    arrays = [array.astype(jnp.bfloat16) for array in arrays]
    places = _specs("plain", "both", key_heads)
    if case == "lengths":
        arrays, places = [*arrays, jnp.asarray([5, 0, 3, 7], jnp.int32)], (*places, P("b"))
    if case == "sinks":
        arrays, places = [*arrays, draw((HEADS,), seed=3)[0]], (*places, P("h"))
    if case == "documents":  # another number of them in each row
        ids = np.arange(7) // np.asarray([[4], [3], [9], [2]])

    def call(query, key, value, *rest):
        options = {
            "lengths": lambda lengths: {"mask": masks.lengths(lengths)},
            "documents": lambda: {"mask": masks.segments(ids)},
            "sinks": lambda sinks: {"sinks": sinks},
        }[case](*rest)
        output, aux = attend(query, key, value, backend=backend, aux=("lse",), **options)
        return output.astype(jnp.float32), aux["lse"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn, "find_capability", lambda: (9, 0))
        patch.setattr(splash_tpu, "_INTERPRET", True)
        cudnn_model.install(patch)
        run = _with_gradient(call, _differentiable(arrays))
        expected = jax.jit(run)(*arrays)
        mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AXES[axes],) * 2)
        placed = [
            jax.device_put(array, NamedSharding(mesh, place))
            for array, place in zip(arrays, places, strict=True)
        ]
        program = jax.jit(run).lower(*placed).compile()
        found = program(*placed)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = (np.asarray(array, np.float32) for array in (one, other))
        np.testing.assert_allclose(one, other, rtol=0.02, atol=0.02)
    return count_kinds(program.as_text())
