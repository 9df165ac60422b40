"""Tiles of all batch rows and heads at once, as devices with many threads want them, forced on the CPU."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from economy import mostly_slow
from mesh_cases import on_eight_devices
from regard import attend, explain, masks, scores
from regard.engine.backends import dense, tiled
from regard.engine.call.canonicalization import canonicalize
from regard.engine.flash import preparation, primitives, tile_calls, tile_choice, tuning
from regard.engine.flash.tile_choice import choose_tiles
from test_tiled import draw

B, H, K, T, S, D, E = 2, 6, 3, 19, 23, 5, 7
GPU = dataclasses.replace(
    tuning.DEFAULTS["gpu"][0], dense_scores=0, dense_side=0, dense_rows=0, tile_side=8, full_side=8
)
TIGHT = dataclasses.replace(GPU, step_bytes=4 * 8 * H * 8 * 8)  # of float64: the key heads of one batch row
KEEP = np.random.default_rng(3).random((B, 1, T, S)) < 0.4
KEEP[:, :, 4] = False
ID = np.random.default_rng(4).integers(0, 2, (B, 1, S)).cumsum(-1)


@pytest.fixture
def tune(monkeypatch):
    """Let the tuning of a device hold here."""

    def use(found=GPU):
        monkeypatch.setattr(tuning, "_LEAST_SIDE", min(found.tile_side, 128))
        tile_choice._count_once.cache_clear()
        for module in (tile_choice, preparation):
            monkeypatch.setattr(module, "load_tuning", lambda: found)

    use()
    yield use
    tile_choice._count_once.cache_clear()


CASES = {
    "no mask": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.causal() & masks.sliding_window(6)},
    "lengths of rows": {"mask": masks.lengths(np.array([[5], [17]]))},
    "documents of rows": {"mask": masks.causal() & masks.segments(ID[..., S - T :], ID)},
    "stored": {"mask": masks.from_array(KEEP)},
    "by head": {"mask": masks.predicate(lambda head, query, key: (query + key) % (head + 2) == 0)},
    "relative": {"score": scores.relative_bias(np.random.default_rng(5).normal(size=(32, H)))},
    "softcap": {"mask": masks.causal(), "score": scores.softcap(3.0)},
    "bias": {"mask": masks.causal(), "bias": np.random.default_rng(6).normal(size=(B, H, T, S))},
    "bias of all rows": {"bias": np.random.default_rng(6).normal(size=(1, 1, T, S))},
    "dropout": {"dropout_rate": 0.3, "rng": jax.random.key(2)},
}


def evaluate(name, run):
    """Output, statistics, gradients and a tangent of them."""
    given = draw((B, H, T, D), (B, K, S, D), (B, K, S, E), dtype=jnp.float64)
    arrays = dict(zip(("query", "key", "value"), given, strict=True))
    arrays |= {given: CASES[name][given] for given in ("bias", "score") if given in CASES[name]}
    options = {given: option for given, option in CASES[name].items() if given not in arrays}
    if "dropout_rate" not in options:
        options["aux"] = ("lse", "entropy")
    weights = np.random.default_rng(7).normal(size=(B, H, T, E))

    def loss(arrays):
        output, aux = run(canonicalize(**arrays, query_offset=S - T, **options))
        found = jnp.sum(output * weights)
        if aux:
            found += jnp.sum(jnp.where(aux["lse"] == -jnp.inf, 0, aux["lse"])) + jnp.sum(aux["entropy"])
        return found, (output, aux)

    @jax.jit
    def everything(arrays):
        grads, outputs = jax.grad(loss, has_aux=True, allow_int=True)(arrays)
        tangent = jax.jvp(
            lambda query: jax.grad(loss, has_aux=True)(arrays | {"query": query})[0]["query"],
            (arrays["query"],),
            (arrays["query"] / 3,),
        )[1]
        return outputs, grads, tangent

    return everything(arrays)


@functools.cache
def define(name):
    """By the definition, once for every tuning."""
    return evaluate(name, dense.run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "found"),
    mostly_slow(
        itertools.product(CASES, (GPU, TIGHT)),
        ("documents of rows", TIGHT),
        ("by head", GPU),
    ),
)
def test_values_and_derivatives_are_those_of_the_definition(name, found, tune, x64):
    tune(found)
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
    jax.tree.map(assert_close, evaluate(name, tiled.run), define(name))


@pytest.mark.parametrize(
    "mask", [masks.causal(), masks.predicate(lambda query, key: (key >= 32) | (query >= 32))]
)
def test_merged_blocks_visit_what_any_of_them_visits(mask, tune, monkeypatch):
    monkeypatch.setattr(tile_choice, "_MOST_LOOPS", 2)
    query, key, value = draw((2, 40, D), (2, 40, D), (2, 40, E))

    def loss(query, key, value, backend):
        return jnp.sum(jnp.sin(attend(query, key, value, mask=mask, query_offset=3, backend=backend)))

    one, other = (
        jax.jit(jax.grad(functools.partial(loss, backend=backend), (0, 1, 2)))(query, key, value)
        for backend in ("tiled", "dense")
    )
    for found, expected in zip(one, other, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_steps_of_no_tiles_run_without_jit(tune):
    query, key, value = draw((1, 9, D), (1, 9, D), (1, 9, E))
    with jax.disable_jit():
        output = attend(query, key, value, mask=masks.causal(), backend="tiled")
    np.testing.assert_allclose(output, attend(query, key, value, mask=masks.causal()), rtol=1e-5, atol=1e-6)


def test_what_memory_does_not_hold_is_looped_over(tune, x64):
    tune(TIGHT)
    problem = canonicalize(
        *draw((B, H, T, D), (B, K, T, D), (B, K, T, E), dtype=jnp.float64), mask=masks.causal()
    )
    choice = choose_tiles(problem)
    assert choice.forward.at_once == K
    assert choice.steps == B * sum(trips.blocks * trips.kept for trips in choice.forward.trips)
    inputs, context, config = preparation.prepare(problem, choice.forward, choice.backward)
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, context))
    spec = tile_calls.TileSpec(present=tuple(inputs.named()), context=structure, config=config)
    run = lambda *operands: primitives.evaluate("forward", spec, *operands, *leaves)
    program = jax.make_jaxpr(run)(*inputs.named().values())
    products = [
        equation.outvars[0].aval.size
        for equation in every(program.jaxpr)
        if equation.primitive.name == "dot_general"
    ]
    assert max(products) == H * 8 * 8, products


def call_of(leading, key_heads, length, mask, width=64):
    """The choice for a self-attention of shapes alone."""
    query = jax.ShapeDtypeStruct((*leading, length, width), jnp.float32)
    key = jax.ShapeDtypeStruct((*leading[:-1], key_heads, length, width), jnp.float32)
    return choose_tiles(canonicalize(query, key, key, mask=mask))


LONG = masks.causal() & masks.segments(np.arange(32768) // 2048)


@pytest.mark.parametrize(
    ("leading", "key_heads", "length", "mask", "most"),
    [
        ((8, 16), 16, 2048, masks.causal(), 10),
        ((8, 16), 16, 2048, None, 16),
        ((1, 8), 8, 8192, masks.causal(), 10),
        ((1, 64), 8, 32768, masks.causal() & masks.sliding_window(1024), 200),
        ((1, 64), 8, 32768, LONG, 260),
        ((1, 8), 8, 131_072, masks.sliding_window(512), 400),
        ((512, 4), 4, 256, masks.causal(), 3),
    ],
)
def test_a_call_takes_tens_of_steps_or_as_many_as_its_mask_keeps(
    tune, leading, key_heads, length, mask, most
):
    tune(tuning.DEFAULTS["gpu"][0])
    choice = call_of(leading, key_heads, length, mask)
    assert choice.steps is not None
    assert choice.steps <= most
    kept = sum(trips.blocks * trips.kept for trips in choice.forward.trips)
    assert choice.steps == kept
    assert sum(trips.blocks for trips in choice.forward.trips) == -(-length // choice.forward.queries)
    assert len(choice.forward.trips) <= 16
    rows = np.prod(leading) * choice.forward.queries * choice.forward.keys
    assert rows * 16 <= tuning.DEFAULTS["gpu"][0].step_bytes


def every(jaxpr):
    """The equations of a program, and of those in it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from every(inner)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.sliding_window(2)])
def test_a_program_that_knows_its_mask_never_asks_the_device_how_to_go_on(mask, tune):
    query, key, value = draw((B, H, T, D), (B, K, T, D), (B, K, T, E))
    problem = canonicalize(query, key, value, mask=mask)
    choice = choose_tiles(problem)
    inputs, context, config = preparation.prepare(problem, choice.forward, choice.backward)
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, context))
    spec = tile_calls.TileSpec(present=tuple(inputs.named()), context=structure, config=config)
    names = list(inputs.named().values())

    def run(*operands):
        results = primitives.evaluate("forward", spec, *operands, *leaves)
        shapes = tuple((name, inputs.named()[name].shape) for name in ("query", "key", "value"))
        grads = dataclasses.replace(spec, linear=spec.results, shapes=shapes)
        return primitives.evaluate("backward", grads, *operands, *results, *results[:2], *leaves)

    found = {equation.primitive.name for equation in every(jax.make_jaxpr(run)(*names).jaxpr)}
    assert "scan" in found
    assert not found & {"while", "cond"}, found


def test_what_a_traced_offset_keeps_is_seen_in_every_step(tune):
    arrays = draw((H, T, D), (K, S, D), (K, S, E))
    call = lambda offset: attend(*arrays, mask=masks.causal(), query_offset=offset, backend="tiled")
    for offset in (0, 3, S - T):
        np.testing.assert_allclose(
            jax.jit(call)(offset),
            attend(*arrays, mask=masks.causal(), query_offset=offset, backend="dense"),
            rtol=2e-5,
            atol=2e-6,
        )


def test_the_program_of_one_mask_serves_others(tune):
    query, key, value = draw((H, T, D), (K, T, D), (K, T, E))
    for length in (3, 17, T):
        mask = masks.lengths(length)
        assert choose_tiles(canonicalize(query, key, value, mask=mask)).steps is None
        np.testing.assert_allclose(
            attend(query, key, value, mask=mask, backend="tiled"),
            attend(query, key, value, mask=mask, backend="dense"),
            rtol=2e-5,
            atol=2e-6,
        )


def test_rows_that_vmap_adds_go_together(tune):
    query, key, value = draw((5, 3, T, D), (3, S, D), (3, S, E))

    def call(backend):
        attended = jax.vmap(lambda query, *rest: attend(query, *rest, backend=backend), (0, None, None))
        return jax.grad(lambda *arrays: jnp.sum(jnp.sin(attended(*arrays))), (0, 1, 2))(query, key, value)

    for one, other in zip(call("tiled"), call("dense"), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_steps_are_counted_in_a_shard_map_that_is_not_jitted(tune):
    mesh = jax.make_mesh((1,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("b")
    call = lambda *arrays: attend(*arrays, mask=masks.causal(), backend="tiled")
    arrays = draw((B, T, D), (B, T, D), (B, T, E))
    found = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(*arrays)
    np.testing.assert_allclose(found, call(*arrays), rtol=2e-5, atol=2e-6)


def test_explain_counts_the_steps(tune):
    tune(tuning.DEFAULTS["gpu"][0])
    arrays = [jax.ShapeDtypeStruct((8, 16, 2048, 64), jnp.float32)] * 3
    told = str(explain(*arrays, mask=masks.causal(), backend="tiled"))
    assert "62% of pairs computed, in 10 steps of tiles of 512 x 512" in told
    tune(tuning.Tuning())
    assert "in 320 steps of tiles" in str(explain(*arrays, mask=masks.causal(), backend="tiled"))


def test_every_platform_says_where_its_numbers_come_from(monkeypatch):
    assert set(tuning.DEFAULTS) == {"cpu", "gpu", "tpu"}
    for found, source in tuning.DEFAULTS.values():
        assert source.startswith("reasoned" if found.step_bytes else "measured")

    class Device:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 80 << 30}

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert tuning.default_tuning().step_bytes == 5 << 30


DIVIDED = """
import jax, numpy as np
from jax.sharding import NamedSharding
from regard import attend, masks
from regard.engine.flash import preparation, primitives, tile_calls, tile_choice, tuning
from test_steps_at_once import GPU
kept = tuning._LEAST_SIDE, tuning.load_tuning
tuning._LEAST_SIDE = 8
tile_choice.load_tuning = preparation.load_tuning = lambda: GPU
P = jax.sharding.PartitionSpec
mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AXES,) * 2, devices=jax.devices()[:4])
arrays = draw((4, 8, 19, 3), (4, 4, 19, 3), (4, 4, 19, 5))

def loss(*arrays):
    return jnp.sum(jnp.sin(attend(*arrays, mask=masks.causal(), backend="tiled")))

program = lambda *arrays: jax.grad(loss, (0, 1, 2))(*arrays)
divided = program
if MANUAL:
    divided = jax.shard_map(program, mesh=mesh, in_specs=P("b", "h"), out_specs=P("b", "h"), check_vma=True)
placed = [jax.device_put(x, NamedSharding(mesh, P("b", "h"))) for x in arrays]
try:
    pairs = list(zip(jax.jit(divided)(*placed), jax.jit(program)(*arrays), strict=True))
finally:  # other tests run in this process
    tuning._LEAST_SIDE, tile_choice.load_tuning = kept
    preparation.load_tuning = tile_choice.load_tuning
for one, other in pairs:
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
print("equal")
"""


@pytest.mark.parametrize(("axes", "manual"), [("Auto", False), ("Explicit", False), ("Auto", True)])
@pytest.mark.slow
def test_each_device_does_its_own_rows_and_heads_at_once(axes, manual):
    code = f"from jax.sharding import AxisType\nAXES, MANUAL = AxisType.{axes}, {manual}\n{DIVIDED}"
    assert on_eight_devices(code).strip() == "equal"
