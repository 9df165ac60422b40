"""Updates: parts of a batch, lower precision, a moving average of the parameters, schedules, traces."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from economy import mostly_slow
from regard.cli.displays import describe_step
from regard.training import checkpoints, loop, programs, runs, settings, tasks
from regard.training.meshes import MeshSpec
from regard.training.optimization import make_schedule
from regard.training.work import count_work
from small_runs import SIZES, read_lines, tiny_copy

DRY = dataclasses.replace(SIZES, dropout_rate=0.0)


@functools.cache
def updated(steps=2, **changes):
    """The state after some updates, what the last one measured, and its program as text."""
    program = programs.make_program(tiny_copy(batch_size=10, model=DRY, **changes), 3)
    state, measured = program.start(), {}
    update = program.compile(program.update, state, np.int32(0), ())
    for step in range(steps):
        state, measured = update(state, np.int32(step), ())
    lowered = jax.jit(program.update).lower(state, np.int32(0), ()).as_text()
    return jax.device_get(state), jax.device_get(measured), lowered


@pytest.mark.slow
@pytest.mark.parametrize("count", mostly_slow([2, 5], 5))
def test_a_batch_in_parts_is_the_batch(count):
    (state, measured, _), (parts, averaged, lowered) = updated(1), updated(1, accumulate_steps=count)
    # Moments are of gradients; Adam's first updates have the size of the rate even where these are 0.
    for one, other in zip(jax.tree.leaves(state.optimizer), jax.tree.leaves(parts.optimizer), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)
    assert measured.keys() == averaged.keys()
    for name in measured.keys() - {"parameter_norm"}:
        np.testing.assert_allclose(measured[name], averaged[name], rtol=2e-5)
    assert f"tensor<{10 // count}x4x6xf32>" in lowered
    assert "tensor<10x4x6xf32>" not in lowered, "no activation of the whole batch"


@pytest.mark.slow
def test_every_part_has_dropout_of_its_own(monkeypatch):
    """The spread of a number drawn from the model's own stream, over the parts."""
    measure = tasks.Copy.measure

    def watch(self, model, batch):
        drawn = jax.random.uniform(jax.tree.leaves(nnx.state(model, nnx.RngKey))[0])
        return measure(self, model, batch)[0], {"drawn": drawn, "square": drawn**2}

    monkeypatch.setattr(tasks.Copy, "measure", watch)
    program = programs.make_program(tiny_copy(batch_size=10, accumulate_steps=5), 3)
    _, measured = jax.jit(program.update)(program.start(), np.int32(0), ())
    assert measured["square"] - measured["drawn"] ** 2 > 1e-3


def test_parts_must_divide_the_batch_and_the_mesh():
    with pytest.raises(
        ValueError, match="accumulate_steps must divide batch_size, got accumulate_steps=3 and batch"
    ):
        tiny_copy(batch_size=10, accumulate_steps=3)
    with pytest.raises(ValueError, match=r"data \* fsdp \* accumulate_steps = 20 divides, got batch_size=10"):
        MeshSpec(data=4).demand_divides(tiny_copy(batch_size=10, accumulate_steps=5))


@pytest.mark.slow
def test_bfloat16_multiplies_in_it_and_keeps_parameters_and_sums_in_float32():
    (state, measured, _), (low, found, lowered) = updated(), updated(precision="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(low.params)} == {np.dtype(np.float32)}
    assert {value.dtype for value in found.values()} == {np.dtype(np.float32)}
    np.testing.assert_allclose(found["loss"], measured["loss"], rtol=2e-2)
    assert found["loss"] != measured["loss"]
    products = [line for line in lowered.splitlines() if "dot_general" in line and "x6x" in line]
    assert len(products) > 15, (
        "of layers; attention's backward products are float32 where all scores are held"
    )
    assert all("bf16" in line and "f32" not in line.replace("bf16", "") for line in products)
    for one, other in zip(jax.tree.leaves(low.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(one, other, atol=0.03)


@pytest.mark.slow
def test_a_moving_average_is_what_is_evaluated_and_loaded(tmp_path):
    decay, task = 0.75, tiny_copy(model=DRY, steps=3, ema_decay=0.75)
    states = [updated(steps=steps, ema_decay=decay)[0] for steps in (0, 1, 2)]
    expected = np.float64(states[0].params["head"]["kernel"][...])
    for state in states[1:]:
        expected = decay * expected + (1 - decay) * np.float64(state.params["head"]["kernel"][...])
    average = states[-1].average["head"]["kernel"][...]
    np.testing.assert_allclose(average, expected, rtol=1e-6)
    assert states[-1].evaluated is states[-1].average
    outcome = loop.train(runs.open_run(tmp_path / "run", task))
    (saved, *_) = checkpoints.list_checkpoints(tmp_path / "run" / "checkpoints")
    arrays = checkpoints.load(saved).arrays
    _, model = runs.load_run(tmp_path / "run")
    np.testing.assert_array_equal(model.head.kernel[...], arrays["average/head/kernel/value"])
    assert not np.array_equal(model.head.kernel[...], arrays["params/head/kernel/value"])
    loss = float(task.evaluate(model, task.held_out)["loss"])
    assert loss == pytest.approx(outcome.held_out["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("linear", {0: 0.5, 5: 0.25, 10: 0.0}),
        ("exponential", {0: 0.5, 5: 0.05, 10: 0.005}),
        ("stable", {0: 0.5, 8: 0.5, 9: 0.25, 10: 0.0}),
    ],
)
def test_schedules_by_name(schedule, rates):
    rise = 4
    found = make_schedule(
        settings.Optimization(steps=10 + rise, learning_rate=0.5, schedule=schedule, warmup_steps=rise)
    )
    assert float(found(1)) == pytest.approx(0.125)
    for step, rate in rates.items():
        assert float(found(jnp.int32(rise + step))) == pytest.approx(rate, abs=1e-7)


@pytest.mark.slow
def test_lines_go_to_any_callable_some_steps_are_traced_and_more_checkpoints_kept(tmp_path):
    """And none of it touches the numbers."""
    cadence = settings.Cadence(
        log_every=3, evaluate_every=5, checkpoint_every=7, heads_every=0, keep_checkpoints=3
    )
    lines = []
    task = tiny_copy(cadence=cadence, steps=22)
    loop.train(runs.open_run(tmp_path / "run", task), log=lines.append, profile=2)
    kept = [{name: value for name, value in line.items() if name != "seconds"} for line in lines]
    assert kept == read_lines(tmp_path / "run")
    (trace,) = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 100
    saved = checkpoints.list_checkpoints(tmp_path / "run" / "checkpoints")
    assert [int(path.name) for path in saved] == [14, 21, 22]
    loop.train(runs.open_run(tmp_path / "plain", dataclasses.replace(task)))
    assert read_lines(tmp_path / "plain") == kept


def test_work_is_counted_by_hand():
    """B T (6 N + 12 L d T), over the peak of the chips."""
    task = tiny_copy(batch_size=5, length=3, precision="bfloat16")
    params = {"a": np.zeros((7, 11)), "b": np.zeros(13)}
    found = count_work(task, params, 8, "NVIDIA H100 80GB HBM3")
    assert found.tokens == 5 * 4
    assert found.flops == 20 * (6 * 90 + 12 * 1 * 6 * 4)
    assert found.peak == 8 * 989.5e12
    assert count_work(task, params, 8, "cpu").peak is None
    assert (
        describe_step(1, 3, {"loss": 0.5}, 4.0, found)
        == "loss 0.5  250 ms/step  80 tokens/s  0% MFU  0 s left"
    )
