"""Updates: parts of a batch, dropout, lower precision, a moving average, schedules, the optimizer, work."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from flax import nnx

from mesh_runs import OPTIMIZATION, text
from regard.cli.displays import describe_step
from regard.training import checkpoints, programs, runs, settings, tasks
from regard.training.mesh_specs import MeshSpec
from regard.training.optimization import make_optimizer, make_schedule
from regard.training.programs import make_feed
from regard.training.work import count_work
from small_runs import SIZES, read_lines, tiny_copy, train

DRY = dataclasses.replace(SIZES, dropout_rate=0.0)


@functools.cache
def updated(**changes):
    program = programs.make_program(tiny_copy(batch_size=10, model=DRY, **changes), 3)
    lowered = jax.jit(program.update).lower(program.start(), np.int32(0), ())
    state, measured = lowered.compile()(program.start(), np.int32(0), ())
    return jax.device_get(state), jax.device_get(measured), lowered.as_text()


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A run whose batches come in five parts, with an average; its checkpoints after each of three steps."""
    every = {"log_every": 1, "evaluate_every": 3, "checkpoint_every": 1, "heads_every": 0}
    cadence = settings.Cadence(**every, keep_checkpoints=3)
    options = {"accumulate_steps": 5, "ema_decay": 0.75, "steps": 3, "cadence": cadence}
    directory = tmp_path_factory.mktemp("averaged")
    outcome = train(directory, tiny_copy(batch_size=10, model=DRY, **options), seed=3)
    saved = checkpoints.list_checkpoints(directory / "checkpoints")
    return directory, outcome, [checkpoints.load(path).arrays for path in saved]


def test_parts_with_other_numbers_of_tokens_are_weighed_by_them():
    sizes = {"d_model": 8, "num_heads": 2, "d_ff": 12, "num_layers": 1, "dropout_rate": 0.0}
    reverse = tasks.Reverse(model=dataclasses.replace(tasks.Reverse().model, **sizes))
    for task in (reverse, text(22)):
        measured = []
        for parts in (1, 4):
            asked = dataclasses.replace(task.optimization, batch_size=12, accumulate_steps=parts)
            in_parts = dataclasses.replace(task, optimization=asked)
            program, fed = programs.make_program(in_parts, 0), make_feed(in_parts, 0)(0)
            measured.append(jax.jit(program.update)(program.start(), np.int32(0), fed)[1])
        for name, whole in measured[0].items():
            np.testing.assert_allclose(measured[1][name], whole, rtol=1e-5, err_msg=name)


def test_a_batch_in_parts_is_the_batch(averaged):
    directory, _, (arrays, *_) = averaged
    state, measured, _ = updated()
    # Moments are of gradients; Adam's first updates have the size of the rate even where these are 0.
    moments = {name: value for name, value in checkpoints._leaves(state).items() if "optimizer" in name}
    assert len(moments) > 30
    for name, value in moments.items():
        np.testing.assert_allclose(arrays[name], value, rtol=1e-4, atol=1e-7, err_msg=name)
    line = read_lines(directory)[0]
    assert line.keys() == measured.keys() | {"step"}
    for name in measured.keys() - {"parameter_norm"}:
        np.testing.assert_allclose(line[name], measured[name], rtol=2e-5)
    program = programs.make_program(tiny_copy(batch_size=10, model=DRY, accumulate_steps=5), 3)
    lowered = jax.jit(program.update).lower(program.shapes, np.int32(0), ()).as_text()
    assert "tensor<2x4x6xf32>" in lowered
    assert "tensor<10x4x6xf32>" not in lowered, "no activation of the whole batch"


def test_routers_learn_to_balance_where_asked():
    asked = dataclasses.replace(OPTIMIZATION, balance_loss=7.3125)
    task = dataclasses.replace(text(22, num_experts=3, expert_width=7), optimization=asked)
    program = programs.make_program(task, 0)
    batch = make_feed(task, 0, program.deployment)(0)
    assert "7.3125" in str(jax.make_jaxpr(program.update)(program.shapes, np.int32(0), batch))


def test_an_update_that_is_not_finite_is_left_out_where_asked():
    options = {"batch_size": 10, "model": DRY, "ema_decay": 0.5}
    skipping, plain = (programs.make_program(tiny_copy(**options, nan=nan), 3) for nan in ("skip", "stop"))
    # What both compute is compiled once.
    both = jax.jit(lambda *given: (*skipping.update(*given), plain.update(*given)[0]))
    run = lambda *given: both(*given)[:2]
    sound, measured, usual = both(plain.start(), np.int32(0))
    jax.tree.map(np.testing.assert_array_equal, sound, usual)
    assert measured["skipped"] == 0
    rates = [float(run(sound, np.int32(index))[1]["learning_rate"]) for index in (1, 900)]
    assert rates[0] == rates[1] == float(make_schedule(tiny_copy(**options).optimization)(1))
    leaves, tree = jax.tree.flatten(sound)
    bad = jax.tree.unflatten(tree, [leaves[0] * np.nan, *leaves[1:]])
    found, measured = run(bad, np.int32(1))
    jax.tree.map(np.testing.assert_array_equal, found, bad)
    assert (float(measured["skipped"]), np.isnan(measured["loss"])) == (1, True)


def test_dropout_is_on_and_a_function_of_seed_step_and_part(monkeypatch):
    measure = tasks.Copy.measure

    def watch(self, model, batch):
        drawn = jax.random.uniform(jax.tree.leaves(nnx.state(model, nnx.RngKey))[0])
        change = abs(self.read(model, batch) - self.read(model, batch)).max()
        return measure(self, model, batch)[0], {"drawn": drawn, "square": drawn**2, "change": change}

    monkeypatch.setattr(tasks.Copy, "measure", watch)
    program = programs.make_program(tiny_copy(batch_size=10, accumulate_steps=5), 3)
    update, state = jax.jit(program.update), program.start()
    one, again, other = (jax.device_get(update(state, np.int32(step), ())[1]) for step in (0, 0, 1))
    assert one["change"] > 1e-3
    assert one["square"] - one["drawn"] ** 2 > 1e-3, "the spread over the parts"
    assert one["drawn"] == again["drawn"] != other["drawn"]


def test_a_model_that_changes_what_no_run_keeps_is_refused(monkeypatch):
    monkeypatch.setattr(tasks.Copy, "make_model", lambda self, rngs: nnx.BatchNorm(9, rngs=rngs))
    monkeypatch.setattr(tasks.Copy, "measure", lambda self, model, batch: (model(np.eye(9)).sum(), {}))
    program = programs.make_program(tiny_copy(model=DRY), 3)
    with pytest.raises(ValueError, match=r"model: .*, got mean, var, which change and which no run keeps"):
        jax.eval_shape(program.update, program.shapes, np.int32(0))


def test_parts_must_divide_the_batch_and_the_mesh():
    with pytest.raises(ValueError, match="must divide batch_size, got accumulate_steps=3 and batch"):
        tiny_copy(batch_size=10, accumulate_steps=3)
    with pytest.raises(ValueError, match=r"data \* fsdp \* accumulate_steps = 20 divides, got batch_size=10"):
        MeshSpec(data=4).demand_divides(tiny_copy(batch_size=10, accumulate_steps=5))


def test_bfloat16_multiplies_in_it_and_keeps_parameters_and_sums_in_float32():
    (state, measured, _), (low, found, lowered) = updated(), updated(precision="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(low.params)} == {np.dtype(np.float32)}
    assert {value.dtype for value in found.values()} == {np.dtype(np.float32)}
    np.testing.assert_allclose(found["loss"], measured["loss"], rtol=2e-2)
    assert found["loss"] != measured["loss"]
    # Of layers: attention's backward products are float32 where all scores are held.
    products = [line for line in lowered.splitlines() if "dot_general" in line and "x6x" in line]
    assert len(products) > 15
    assert all("bf16" in line and "f32" not in line.replace("bf16", "") for line in products)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=0.03), low.params, state.params)


def test_a_moving_average_is_what_is_evaluated_and_loaded(averaged):
    directory, outcome, saved = averaged
    find = lambda part: [np.float64(arrays[f"{part}/head/kernel/value"]) for arrays in saved]
    params, averages = find("params"), find("average")
    for step in (1, 2):
        np.testing.assert_allclose(averages[step], 0.75 * averages[step - 1] + 0.25 * params[step], rtol=1e-6)
    task, model = runs.load_run(directory)
    np.testing.assert_array_equal(model.head.kernel[...], averages[2])
    assert not np.array_equal(params[2], averages[2])
    loss = float(jax.jit(lambda batch: task.evaluate(model, batch))(task.held_out)["loss"])
    assert loss == pytest.approx(outcome.held_out["loss"], rel=1e-6)


def test_schedules_in_closed_form():
    """Four updates of a linear rise, ten of the schedule; or a rise and nothing more."""
    for schedule, rates in (
        ("linear", {0: 0.5, 5: 0.25, 10: 0.0}),
        ("exponential", {0: 0.5, 5: 0.05, 10: 0.005}),
        ("stable", {0: 0.5, 8: 0.5, 9: 0.25, 10: 0.0}),
        ("cosine", {0: 0.5, 2: 0.25 * (1 + math.cos(0.2 * math.pi)), 5: 0.25, 10: 0.0}),
        ("constant", {0: 0.5, 5: 0.5, 10: 0.5}),
    ):
        options = {"learning_rate": 0.5, "schedule": schedule, "warmup_steps": 4}
        find = make_schedule(settings.Optimization(steps=14, **options))
        found = [float(find(step)) for step in (0, 1, *(4 + step for step in rates))]
        assert found == pytest.approx([0.0, 0.125, *rates.values()], abs=1e-7)
        assert float(make_schedule(settings.Optimization(steps=4, **options))(3)) == pytest.approx(0.375)


@pytest.mark.parametrize(("clip_norm", "weight_decay"), [(0.0, 0.0), (1.5, 0.25)])
def test_the_optimizer_is_adamw_after_clipping(clip_norm, weight_decay):
    """Against the definition in float64; decay touches matrices alone."""
    options = {"steps": 5, "learning_rate": 0.125, "schedule": "constant", "clip_norm": clip_norm}
    optimizer = make_optimizer(settings.Optimization(**options, weight_decay=weight_decay))
    rng = np.random.default_rng(7)
    params = {"matrix": rng.normal(size=(2, 3)), "gain": rng.normal(size=5)}
    moving = jax.tree.map(np.float32, params)
    state = jax.jit(optimizer.init)(moving)
    moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in params.items()}
    update = jax.jit(optimizer.update)
    for step in range(1, 4):
        gradients = {name: rng.normal(size=value.shape) for name, value in params.items()}
        with jax.numpy_dtype_promotion("standard"):
            change, state = update(jax.tree.map(np.float32, gradients), state, moving)
        moving = jax.tree.map(lambda value, more: value + np.asarray(more), moving, change)
        norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
        scale = min(1.0, clip_norm / norm) if clip_norm else 1.0
        for name, gradient in gradients.items():
            first, second = moments[name]
            first = 0.9 * first + 0.1 * scale * gradient
            second = 0.999 * second + 0.001 * (scale * gradient) ** 2
            moments[name] = first, second
            direction = (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
            decay = weight_decay * params[name] if params[name].ndim > 1 else 0.0
            params[name] = params[name] - 0.125 * (direction + decay)
    for name, value in params.items():
        np.testing.assert_allclose(moving[name], value, rtol=2e-5, atol=2e-6)


def test_work_is_counted_by_hand():
    """B T (6 N + 12 L d T), over the peak of the chips."""
    task = tiny_copy(batch_size=5, length=3, precision="bfloat16")
    params = {"a": np.zeros((7, 11)), "b": np.zeros(13)}
    found = count_work(task, params, 8, "NVIDIA H100 80GB HBM3")
    assert found.tokens == 5 * 4
    assert found.flops == 20 * (6 * 90 + 12 * 1 * 6 * 4)
    assert found.peak == 8 * 989.5e12
    assert count_work(task, params, 8, "cpu").peak is None
    told = describe_step(1, 3, {"loss": 0.5}, 4.0, found)
    assert told == "loss 0.5  250 ms/step  80 tokens/s  0% MFU  0 s left"
