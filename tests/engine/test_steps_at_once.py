"""Tiles of all batch rows and heads at once, as devices with many threads want them, forced on the CPU."""

import contextlib
import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from mesh_cases import on_eight_devices
from oracle import assert_close
from regard import attend, explain, masks, scores
from regard.engine.backends import dense, tiled
from regard.engine.call.canonicalization import canonicalize
from regard.engine.flash import measurements, preparation, primitives, tile_calls, tile_choice
from regard.engine.flash.blocking import Blocking
from regard.engine.flash.tile_choice import choose_tiles
from regard.engine.platforms import Platform
from test_tiled import draw

B, H, K, T, S, D, E = 2, 6, 3, 19, 23, 5, 7
GPU = dataclasses.replace(
    measurements.DEFAULTS["gpu"][0], dense_scores=0, dense_side=0, dense_rows=0, tile_side=8, full_side=8
)
TIGHT = dataclasses.replace(GPU, step_bytes=4 * 8 * H * 8 * 8)  # of float64: the key heads of one batch row


@pytest.fixture
def tune(monkeypatch):
    def use(found=GPU):
        monkeypatch.setattr(measurements, "_LEAST_SIDE", min(found.tile_side, 128))
        tile_choice._count_once.cache_clear()
        holding.enter_context(measurements.using(found))

    with contextlib.ExitStack() as holding:
        use()
        yield use
    tile_choice._count_once.cache_clear()


def compare(function, *arrays):
    """A function of the backend and arrays: by tiles as by the definition."""
    found, expected = (jax.jit(lambda *a, by=by: function(by, *a))(*arrays) for by in ("tiled", "dense"))
    assert_close(found, expected, rtol=2e-5, atol=5e-6)


def test_bfloat16_that_a_program_holds_is_read_as_what_it_is():
    """Constants lie in an order of axes of their own."""
    arrays = [jnp.asarray(array, jnp.bfloat16) for array in draw((B, H, 7, D), (B, H, 9, D), (B, H, 9, E))]
    block = Blocking(16, 24, at_once=H)

    def call(*arrays):
        return tiled.run(canonicalize(*arrays), block, block)[0]

    np.testing.assert_array_equal(jax.jit(lambda: call(*arrays))(), jax.jit(call)(*arrays))


def test_a_call_whose_rows_do_not_fit_at_once_has_the_derivatives_of_the_definition(tune, x64):
    """Documents of rows, a mask and a score by head, a bias of all."""
    tune(TIGHT)
    rng = np.random.default_rng(4)
    ids = rng.integers(0, 2, (B, 1, S)).cumsum(-1)
    by_head = masks.predicate(lambda head, query, key: (query + key) % (head + 2) != 1)
    options = {"mask": masks.causal() & masks.segments(ids[..., -T:], ids) & by_head, "query_offset": S - T}
    score = [scores.relative_bias(jnp.asarray(rng.normal(size=(32, H)))), scores.softcap(3.0)]
    arrays = draw((B, H, T, D), (B, K, S, D), (B, K, S, E), (B, H, T, S), dtype="float64")

    def everything(run, *arrays):
        def loss(query, key, value, bias):
            call = canonicalize(query, key, value, bias=bias, score=score, aux=("lse", "entropy"), **options)
            output, aux = run(call)
            found = jnp.sum(jnp.sin(output)) + jnp.sum(jnp.where(aux["lse"] == -jnp.inf, 0, aux["lse"]))
            return found + jnp.sum(aux["entropy"])

        return jax.value_and_grad(loss, (0, 1, 2, 3))(*arrays)

    found, expected = (jax.jit(everything, static_argnums=0)(run, *arrays) for run in (tiled.run, dense.run))
    assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("mask", [masks.causal(), masks.predicate(lambda q, k: (q >= 32) | (k >= 32))])
def test_merged_blocks_visit_what_any_of_them_visits(mask, tune):
    tune(dataclasses.replace(GPU, most_loops=2))

    def grads(backend, *arrays):
        loss = lambda *a: jnp.sum(jnp.sin(attend(*a, mask=mask, query_offset=3, backend=backend)))
        return jax.grad(loss, (0, 1, 2))(*arrays)

    compare(grads, *draw((2, 40, D), (2, 40, D), (2, 40, E)))


def equations(jaxpr):
    """The equations of a program, and of those in it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def trace_passes(problem, choice):
    """The equations of the forward and of the backward pass."""
    inputs, context, config = preparation.prepare(problem, choice.forward, choice.backward)
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, context))
    spec = tile_calls.TileSpec(present=tuple(inputs.named()), context=structure, config=config)

    def run(*operands):
        results = primitives.evaluate("forward", spec, *operands, *leaves)
        shapes = tuple((name, inputs.named()[name].shape) for name in ("query", "key", "value"))
        grads = dataclasses.replace(spec, linear=spec.results, shapes=shapes)
        return primitives.evaluate("backward", grads, *operands, *results, *results[:2], *leaves)

    return list(equations(jax.make_jaxpr(run)(*inputs.named().values()).jaxpr))


def test_what_memory_does_not_hold_is_looped_over(tune, x64):
    tune(TIGHT)
    arrays = draw((B, H, T, D), (B, K, T, D), (B, K, T, E), dtype="float64")
    problem = canonicalize(*arrays, mask=masks.causal())
    choice = choose_tiles(problem)
    assert choice.forward.at_once == K
    assert choice.steps == B * sum(trips.blocks * trips.kept for trips in choice.forward.trips)
    products = (each for each in trace_passes(problem, choice) if each.primitive.name == "dot_general")
    sizes = [equation.outvars[0].aval.size for equation in products]
    assert max(sizes) == H * 8 * 8, sizes


@pytest.mark.slow
def test_a_program_that_knows_its_mask_never_asks_the_device_how_to_go_on(tune):
    arrays = draw((B, H, T, D), (B, K, T, D), (B, K, T, E))
    for mask in (None, masks.sliding_window(2)):
        problem = canonicalize(*arrays, mask=mask)
        found = {equation.primitive.name for equation in trace_passes(problem, choose_tiles(problem))}
        assert "scan" in found
        assert not found & {"while", "cond"}, found


def test_what_a_traced_offset_keeps_is_seen_in_every_step(tune):
    arrays = draw((H, T, D), (K, S, D), (K, S, E))

    def call(backend, offset, *arrays):
        return attend(*arrays, mask=masks.causal(), query_offset=offset, backend=backend)

    for offset in (0, 3, S - T):
        compare(call, offset, *arrays)


def test_the_program_of_one_mask_serves_others(tune):
    arrays = draw((H, T, D), (K, T, D), (K, T, E))
    for length in (3, 17, T):
        mask = masks.lengths(length)
        assert choose_tiles(canonicalize(*arrays, mask=mask)).steps is None
        found, expected = (attend(*arrays, mask=mask, backend=backend) for backend in ("tiled", "dense"))
        assert_close(found, expected, atol=2e-6)


def test_rows_that_vmap_adds_go_together(tune):
    def grads(backend, *arrays):
        attended = jax.vmap(lambda query, *rest: attend(query, *rest, backend=backend), (0, None, None))
        return jax.grad(lambda *a: jnp.sum(jnp.sin(attended(*a))), (0, 1, 2))(*arrays)

    compare(grads, *draw((5, 3, T, D), (3, S, D), (3, S, E)))


def test_explain_counts_the_steps(tune):
    tune(measurements.DEFAULTS["gpu"][0])
    arrays = [jax.ShapeDtypeStruct((8, 16, 2048, 64), jnp.float32)] * 3
    told = str(explain(*arrays, mask=masks.causal(), backend="tiled"))
    assert "62% of pairs computed, in 10 steps of tiles of 512 x 512" in told
    tune(measurements.Tuning())
    assert "in 320 steps of tiles" in str(explain(*arrays, mask=masks.causal(), backend="tiled"))


def test_every_platform_says_where_its_numbers_come_from(monkeypatch):
    assert set(measurements.DEFAULTS) == {"cpu", "gpu", "tpu"}

    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 80 << 30})
    monkeypatch.setattr(measurements, "find_platform", lambda: Platform("gpu", ""))
    monkeypatch.setattr(measurements, "find_present", lambda _: device)
    assert measurements.default_tuning().step_bytes == 5 << 30


DIVIDED = """
import jax, numpy as np
from regard import attend, masks
from regard.engine.flash import measurements
from test_steps_at_once import GPU
kept, measurements._LEAST_SIDE = measurements._LEAST_SIDE, 8
place = jax.sharding.NamedSharding(make_mesh(b=2, h=4), jax.sharding.PartitionSpec("b", "h"))
arrays = draw((4, 8, 19, 3), (4, 4, 19, 3), (4, 4, 19, 5))

def loss(*arrays):
    return jnp.sum(jnp.sin(attend(*arrays, mask=masks.causal(), backend="tiled")))

program = jax.jit(jax.grad(loss, (0, 1, 2)))
with measurements.using(GPU):
    found, expected = (program(*jax.device_put(arrays, where)) for where in (place, jax.devices()[0]))
measurements._LEAST_SIDE = kept  # other tests run in this process
for one, other in zip(found, expected, strict=True):
    assert one.sharding.is_equivalent_to(place, 4)
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
"""


def test_each_device_does_its_own_rows_and_heads_at_once():
    on_eight_devices(DIVIDED)
