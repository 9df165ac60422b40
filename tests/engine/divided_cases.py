"""Calls of `attend` in divided programs, with eight devices, compared with one; not a test by itself."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cudnn_model
from collectives import count_kinds, count_sent
from layer_oracle import build_drawn
from mesh_cases import draw
from oracle import assert_close
from regard import KVCache, attend, linear, masks, readouts, scores
from regard.engine.backends import cudnn, splash_tpu
from regard.layers import CompressedAttention, EncoderBlock, Experts, GatedDeltaNet
from regard.models import TransformerConfig
from regard.models.embedding import TokenEmbedding

BATCH, HEADS, KEY_HEADS, D, E = 4, 8, 4, 5, 7
LENGTHS = {"first": (521, 523), "second": (131, 137)}  # by the order of derivatives: T and S
AXES = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Auto}
DIVISIONS = {"batch": ("b", None), "heads": (None, "h"), "both": ("b", "h")}


def _numbers(*shape):
    return draw(shape, seed=5)[0]


def _count(*shape):
    return jnp.arange(np.prod(shape), dtype=jnp.int32).reshape(shape)


# Options of a call, of arrays by name; what the arrays are, and how each is divided with (batch, heads).
CASES = {
    "data": (
        lambda lengths, query, key, slopes, table, bias, sinks: {
            "mask": masks.causal() & (masks.lengths(lengths) | masks.segments(query, key)),
            "score": [
                scores.alibi(slopes=slopes), scores.softcap(7.0), scores.relative_bias(table, max_distance=64)
            ],
            "bias": bias,
            "sinks": sinks,
        },
        {
            "lengths": (lambda T, S: jnp.asarray([500, 0, 3, S], jnp.int32), lambda b, h: P(b)),
            "query": (lambda T, S: _count(BATCH, T) // 97, lambda b, h: P(b)),
            "key": (lambda T, S: _count(BATCH, S) // 97, lambda b, h: P(b)),
            "slopes": (lambda T, S: abs(_numbers(HEADS)) / 8, lambda b, h: P(h)),
            "table": (lambda T, S: _numbers(32, HEADS), lambda b, h: P(None, h)),
            "bias": (lambda T, S: _numbers(1, HEADS, 1, S), lambda b, h: P(None, h)),
            "sinks": (lambda T, S: _numbers(HEADS), lambda b, h: P(h)),
        },
    ),
    "slopes": (
        lambda slopes: {"mask": masks.causal(), "score": scores.alibi(slopes=slopes)},
        {"slopes": (lambda T, S: abs(_numbers(HEADS)) / 8, lambda b, h: P(h))},
    ),
    "numbers": (
        lambda array, rng: {
            "mask": masks.from_array(array)
            & masks.predicate(lambda b, h, q, k: (k < 150 * (b + 1)) & ((q - k) % (h + 2) != 1)),
            "dropout_rate": 0.3,
            "rng": jax.random.wrap_key_data(rng),
        },
        {
            "array": (lambda T, S: _numbers(BATCH, HEADS, T, S) > -1, lambda b, h: P(b, h)),
            "rng": (lambda T, S: jax.random.key_data(jax.random.key(3)), lambda b, h: P()),
        },
    ),
    "functions": (
        lambda table, ends: {
            "mask": masks.predicate(lambda b, h, q, k: jnp.searchsorted(ends[b], k) != 1),
            "score": scores.modifier(lambda score, b, h, q, k: score + table[h, k]),
        },
        {
            "table": (lambda T, S: _numbers(HEADS, S), lambda b, h: P(h)),
            "ends": (lambda T, S: jnp.asarray([[5, 500], [-1, S], [3, 9], [S, S]]), lambda b, h: P(b)),
        },
    ),
    "positions": (
        lambda query, key: {
            "mask": masks.causal() & masks.chunked(97),
            "query_offset": None,
            "query_positions": query,
            "key_positions": key,
        },
        {
            "query": (lambda T, S: _count(BATCH, T) * 31 % 401, lambda b, h: P(b)),
            "key": (lambda T, S: _count(BATCH, HEADS, S) % 401, lambda b, h: P(b, h)),
        },
    ),
}  # fmt: skip
AUX = ("lse", "entropy", "max_score")


def _arrays(case, order, key_heads):
    T, S = LENGTHS[order]
    operands = draw((BATCH, HEADS, T, D), (BATCH, key_heads, S, D), (BATCH, key_heads, S, E), seed=7)
    return [*operands, *(make(T, S) for make, _ in CASES[case][1].values())]


def _specs(places, division, key_heads):
    b, h = DIVISIONS[division]
    keys = P(b, h) if key_heads == KEY_HEADS else P(b)
    return (P(b, h), keys, keys, *(place(b, h) for place in places))


def _put(mesh, arrays, specs):
    return jax.device_put(list(arrays), [NamedSharding(mesh, spec) for spec in specs])


def _call(case, backend, aux):
    make, data = CASES[case]

    def call(query, key, value, *rest):
        options = {"query_offset": 2} | make(**dict(zip(data, rest, strict=True)))
        output, found = attend(query, key, value, backend=backend, aux=aux, **options)
        return output, *found.values()

    return call


def _differentiable(arrays):
    return tuple(place for place, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating))


def _measure(results):
    """A number that every result moves; empty rows count nothing."""
    weights = [jnp.cos(jnp.arange(one.size, dtype=one.dtype)).reshape(one.shape) for one in results]
    parts = map(lambda weight, one: jnp.sum(weight * jnp.where(jnp.isfinite(one), one, 0)), weights, results)
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
        def of_those(*those):
            whole = list(arrays)
            for place, array in zip(wrt, those, strict=True):
                whole[place] = array
            return jax.grad(lambda *arrays: _measure(call(*arrays)), wrt)(*whole)

        those = [arrays[place] for place in wrt]
        pull = jax.vjp(of_those, *those)[1]
        return jax.jvp(of_those, those, list(map(jnp.sin, those)))[1], pull(tuple(map(jnp.cos, those)))

    return run


ORDERS = {"first": _with_gradient, "second": _second}


def check_mapped():
    """Few queries of `dense`, and statistics whose tokens alone differ, under `vmap` in `shard_map`."""

    def run(x, bias):
        add = scores.modifier(lambda score, b, h, q, k: jax.nn.relu(score) + bias[h, q, k])
        output, aux = attend(x, x, x, mask=masks.causal(), bias=bias, score=add, aux=("lse",))
        tokens = (x[0, :, 0] > 0).astype(jnp.int32)
        plain = attend(x, x, x, mask=masks.causal(), bias=bias)
        return output, aux["lse"], plain, readouts.read(bias, bias, mask=masks.causal(), tokens=tokens)

    alone, arrays = jax.vmap(run, (0, None)), draw((4, 2, 7, 3), (2, 7, 7))
    mesh = jax.make_mesh((2,), ("b",), axis_types=(AxisType.Auto,))
    divided = jax.shard_map(alone, mesh=mesh, in_specs=(P("b"), P()), out_specs=P("b"))
    learn = lambda call: _with_gradient(lambda *arrays: call(*arrays)[:3], (0, 1))
    outcome = lambda call: jax.jit(lambda *arrays: (call(*arrays), learn(call)(*arrays)))(*arrays)
    assert_close(outcome(divided), outcome(alone), atol=2e-6)


def check_explicit():
    """Trees, statistics and choices stay divided as they came, on explicit axes."""
    mesh = jax.make_mesh((2,), ("b",), axis_types=(AxisType.Explicit,))
    arrays = *draw((4, 2, 7, 3)), jnp.tile(jnp.arange(7, dtype=jnp.int32) - 1, (4, 1))

    def run(x, parents):
        chosen = readouts.choose_keys(x, x[:, 0], count=3, mask=masks.causal())
        apart = readouts.index_divergence(x, x[:, 0], attention=(x, x), indices=chosen)
        scored = readouts.index_scores(x, x[:, 0], indices=chosen)
        calls = attend(x, x, x, mask=masks.tree(parents)), linear.attend(x, x, x)
        return *calls, chosen, apart, scored, readouts.read(x, x, mask=masks.causal())

    found = run(*_put(mesh, arrays, (P("b"), P("b"))))
    assert {jax.typeof(array).sharding.spec[0] for array in jax.tree.leaves(found)} == {"b"}
    assert_close(found, run(*arrays), atol=2e-6)

    def choose(x, key):
        chosen = readouts.choose_keys(x, key, count=3, mask=masks.causal())
        apart = readouts.index_divergence(x, key, attention=(x, x), mask=masks.causal())
        return chosen, apart, readouts.index_scores(x, key)

    arrays = draw((4, 2, 7, 3), (4, 7, 3))
    assert_close(choose(*_put(mesh, arrays, (P(None, "b"), P()))), choose(*arrays), atol=2e-6)


def check(axes, case, backend, *, division="both", order="first", aux=AUX, key_heads=KEY_HEADS):
    """Run a call divided and alone; fail where they differ, or where results are not divided as they came."""
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AXES[axes],) * 2)
    arrays = _arrays(case, order, key_heads)
    specs = _specs((place for _, place in CASES[case][1].values()), division, key_heads)
    call, wrt = _call(case, backend, aux), _differentiable(arrays)
    expected = jax.jit(ORDERS[order](call, wrt))(*arrays)
    if axes == "manual":
        rows = P(*DIVISIONS[division])
        call = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(rows,) * (1 + len(aux)))
    placed = _put(mesh, arrays, specs)
    program = jax.jit(ORDERS[order](call, wrt)).lower(*placed).compile()
    found = program(*placed)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = np.abs(np.where(np.isfinite(other), other, 0)).max()
        roundings = {"first": 1e-5, "second": 5e-5}[order]
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=roundings * scale)
    if order == "first":
        wanted = [*[specs[0]] * (1 + len(aux)), *(specs[place] for place in wrt)]
        for one, spec in zip(jax.tree.leaves(found), wanted, strict=True):
            place = NamedSharding(mesh, spec)
            assert one.sharding.is_equivalent_to(place, one.ndim), (case, one.shape, one.sharding.spec, spec)
    return count_kinds(program.as_text())


# Other programs around a call: functions of the call, its arrays and their sharding.


def _in_scan(call, arrays, place):
    return jax.jit(lambda *arrays: jax.lax.scan(lambda _, row: (None, call(*row)), None, arrays)[1])(*arrays)


def _exported(call, arrays, place):
    program = jax.export.export(jax.jit(call, in_shardings=place, out_shardings=place))(*arrays)
    return jax.jit(program.call)(*arrays)


def _mapped_by_name(call, arrays, place):
    return jax.jit(jax.vmap(call, spmd_axis_name="b"))(*arrays)


def _manual_in_part(call, arrays, place):
    part = jax.shard_map(call, mesh=place.mesh, in_specs=P("b"), out_specs=P("b"), axis_names={"b"})
    return jax.jit(part)(*arrays)


def _gradient_inside(call, arrays, place):
    grad = jax.grad(lambda *arrays: jnp.sum(call(*arrays) ** 2), (0, 1, 2))
    inside = jax.shard_map(grad, mesh=place.mesh, in_specs=place.spec, out_specs=place.spec)
    assert_close(jax.jit(inside)(*arrays), jax.jit(grad)(*map(np.asarray, arrays)), 1e-4, 1e-5)
    return call(*map(np.asarray, arrays))


def _in_the_mesh_of_the_context(call, arrays, place):
    def run(*arrays):
        return call(*(jax.lax.with_sharding_constraint(array, P("b", "h")) for array in arrays))

    with jax.set_mesh(place.mesh):
        found = jax.jit(run)(*map(np.asarray, arrays))
        assert found.sharding.is_equivalent_to(place, found.ndim)
    return found


def _call_linear(query, key, value):
    return linear.attend(query, key, value, decay=-abs(value[..., 0]), segments=np.arange(59) // 23, chunk=16)


def check_programs():
    """Run programs around a call on divided arrays; fail where one differs from the call on one device."""
    place = NamedSharding(jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Auto,) * 2), P("b", "h"))
    arrays = draw(*[(BATCH, HEADS, 59, D)] * 3)

    tiled = functools.partial(attend, mask=masks.causal(), backend="tiled")
    placed = jax.device_put(arrays, place)
    programs = (_in_scan, _exported, _mapped_by_name, _manual_in_part, _gradient_inside)
    pairs = itertools.product((tiled, _call_linear), programs)
    for call, program in (*pairs, (tiled, _in_the_mesh_of_the_context)):
        found, expected = program(call, placed, place), jax.jit(call)(*arrays)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=program.__name__)


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


# Arrays of a kernel's call, how they are divided, and options of them.
KERNEL_CASES = {
    "lengths": (
        lambda: [jnp.asarray([5, 0, 3, 7], jnp.int32)],
        [lambda b, h: P(b)],
        lambda lengths: {"mask": masks.lengths(lengths)},
    ),
    # Another number of them in each row, all known to the program; each device takes its own.
    "documents": (list, [], lambda: {"mask": masks.segments(np.arange(7) // np.array([[4], [3], [9], [2]]))}),
    "sinks": (lambda: draw((HEADS,), seed=3), [lambda b, h: P(h)], lambda sinks: {"sinks": sinks}),
}  # fmt: skip


def check_kernel(backend, axes, case, key_heads):
    """Run a call by a library's kernel, or what stands in for it, divided and alone; return what is sent."""
    arrays = draw((BATCH, HEADS, 7, 8), (BATCH, key_heads, 7, 8), (BATCH, key_heads, 7, 8), seed=7)
    make, places, options = KERNEL_CASES[case]
    arrays = [*(array.astype(jnp.bfloat16) for array in arrays), *make()]

    def call(query, key, value, *rest):
        output, aux = attend(query, key, value, backend=backend, aux=("lse",), **options(*rest))
        return output.astype(jnp.float32), aux["lse"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn, "find_capability", lambda: (9, 0))
        patch.setattr(splash_tpu, "_INTERPRET", True)
        cudnn_model.install(patch)
        run = _with_gradient(call, _differentiable(arrays))
        expected = jax.jit(run)(*arrays)
        mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AXES[axes],) * 2)
        placed = _put(mesh, arrays, _specs(places, "both", key_heads))
        program = jax.jit(run).lower(*placed).compile()
        found = program(*placed)
    assert_close(found, expected, 0.02, 0.02)
    return count_kinds(program.as_text())


def check_explicit_rows():
    """Readouts, layers, tables, and caches made whole, of divided rows are as without a mesh."""
    mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2])
    sizes = {"head_dim": 4, "rotary_dim": 2, "window": 2, "compress_rate": 3, "query_latent_dim": 5}
    sizes |= {"output_latent_dim": 3, "index_count": 1, "index_heads": 2, "index_dim": 2}
    config = TransformerConfig(d_model=4, num_heads=2, d_ff=7, num_layers=1, vocab_size=11)
    documents = jnp.asarray([[0, 0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]], jnp.int32)

    compressed, embed = build_drawn(CompressedAttention, 6, 2, **sizes), build_drawn(TokenEmbedding, config)
    delta, experts = build_drawn(GatedDeltaNet, 6, 2), build_drawn(Experts, 6, 5, num_experts=3)

    def loss(query, key, weights, x, documents):
        cut = masks.causal()
        outputs = [readouts.index_divergence(query, key, weights, attention=(query, query), mask=cut)]
        outputs += [experts(x), compressed(x, segments=documents), embed(documents)]
        for layer, options in ((delta, {}), (compressed, {"capacity": 9})):
            outputs.append(layer(x, cache=layer.start_cache(2, **options)))
        first, last = query[:, :, :6], query[:, :, 6:]
        outputs.append(KVCache.create(2, 2, 7, 4).append(first, first).append(last, last))
        outputs.append(readouts.choose_keys(query, key, weights, count=2, mask=cut))
        return jnp.sum(jnp.sin(outputs[0])), outputs

    arrays = (*draw((2, 2, 7, 4), (2, 7, 4), (2, 2, 7), (2, 7, 6)), documents)
    compute = lambda *arrays: jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    alone = compute(*arrays)
    with jax.set_mesh(mesh):
        found = compute(*jax.device_put(arrays, NamedSharding(mesh, P("rows"))))
    assert all(jax.typeof(leaf).sharding.spec[0] == "rows" for leaf in jax.tree.leaves(found))
    assert_close(found, alone, 1e-4, 1e-5)
