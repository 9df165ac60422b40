"""Settings of tasks: plain values that check themselves, survive JSON, and load no JAX."""

import dataclasses
import json
import subprocess
import sys

import pytest

from regard.training import settings, tasks

ALL = list(tasks.TASKS.values())


@pytest.mark.parametrize("kind", ALL)
def test_settings_survive_json(kind):
    changed = dataclasses.replace(
        kind(),
        data_seed=7,
        model=dataclasses.replace(kind().model, d_model=30, num_heads=5, scan_layers=True, remat="full"),
        optimization=settings.Optimization(steps=11, schedule="constant", clip_norm=0),
    )
    text = json.dumps(tasks.to_settings(changed))
    assert tasks.from_settings(kind.name, json.loads(text)) == changed
    assert tasks.from_settings(kind.name, json.loads(text)) != kind()


def test_files_survive_json():
    changed = tasks.Text(files=("a.txt", "b"))
    settings = json.loads(json.dumps(tasks.to_settings(changed)))
    assert settings["files"] == ["a.txt", "b"], "compared with what JSON gives back"
    assert tasks.to_settings(changed)["files"] == settings["files"]
    assert tasks.from_settings("text", settings) == changed
    with pytest.raises(ValueError, match=r"text\.files must be"):
        tasks.from_settings("text", settings | {"files": [3]})


@pytest.mark.parametrize(
    ("goal", "value", "reached", "compared"),
    [
        (settings.Goal("accuracy", 0.75), 0.75, True, "0.7500 = 0.75"),
        (settings.Goal("accuracy", 0.75), 0.5, False, "0.5000 < 0.75"),
        (settings.Goal("accuracy", 0.75), float("nan"), False, "nan = 0.75"),
        (settings.Goal("loss", 1.5, smaller_is_better=True), 1.5, True, "1.5000 = 1.5"),
        (settings.Goal("loss", 1.5, smaller_is_better=True), 2.0, False, "2.0000 > 1.5"),
        (settings.Goal("loss", 1.5, smaller_is_better=True), 1.0, True, "1.0000 < 1.5"),
        (settings.Goal("loss", 1.5, smaller_is_better=True), float("nan"), False, "nan = 1.5"),
    ],
)
def test_goals_have_a_direction(goal, value, reached, compared):
    held_out = {goal.metric: value, "other": 9.0}
    assert goal.is_reached(held_out) is reached
    assert goal.compare(held_out) == compared
    assert str(goal) == ("at most 1.5" if goal.smaller_is_better else "at least 0.75")


@pytest.mark.parametrize("kind", ALL)
def test_small_settings_are_small(kind):
    small = tasks.shrink(kind())
    assert small.optimization.steps == 20
    assert small.model.d_model < kind().model.d_model
    assert getattr(small, "held_out_size", 0) < 100


def test_shrinking_respects_what_the_user_chose():
    optimization = settings.Optimization(steps=7, learning_rate=0.5, schedule="constant")
    small = tasks.shrink(tasks.Copy(length=5, optimization=optimization))
    assert (small.optimization.steps, small.optimization.learning_rate, small.length) == (7, 0.5, 5)
    assert small.model.d_model == 16


@pytest.mark.parametrize(
    ("kind", "group", "choice", "expected"),
    [
        (tasks.Copy, "optimization", {"warmup_steps": 50}, {"steps": 200, "batch_size": 16}),
        (tasks.Copy, "optimization", {"accumulate_steps": 32}, {"steps": 20, "batch_size": 128}),
        (tasks.Copy, "model", {"num_heads": 32}, {"d_model": 64, "d_ff": 32}),
        (tasks.Text, "model", {"num_heads": 32}, {"d_model": 128, "num_layers": 1}),
    ],
)
def test_shrinking_leaves_what_the_users_choice_needs(kind, group, choice, expected):
    chosen = dataclasses.replace(getattr(kind(), group), **choice)
    small = dataclasses.asdict(getattr(tasks.shrink(kind(**{group: chosen})), group))
    assert choice | expected == {name: small[name] for name in choice | expected}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: settings.Sizes(num_heads=5),
            "num_heads must divide d_model, got num_heads=5 and d_model=64",
        ),
        (lambda: settings.Sizes(num_layers=0), "num_layers must be at least 1, got 0"),
        (lambda: settings.Sizes(dropout_rate=1.0), r"dropout_rate must be in \[0, 1\), got 1.0"),
        (lambda: settings.Optimization(steps=0), "steps must be at least 1, got 0"),
        *(
            (make, rf"{name} must be at most 2\*\*31 - 1, got 1000000000000")
            for name, make in (
                ("held_out_size", lambda: tasks.Copy(held_out_size=10**12)),
                ("steps", lambda: settings.Optimization(steps=10**12)),
                ("warmup_steps", lambda: settings.Optimization(warmup_steps=10**12)),
                ("heads_every", lambda: settings.Cadence(heads_every=10**12)),
                ("max_length", lambda: tasks.Reverse(max_length=10**12)),
                ("length", lambda: tasks.Text(length=10**12)),
            )
        ),
        (lambda: tasks.Text(vocab_size=10**12), r"vocab_size must be at most 2\*\*30, got"),
        (lambda: settings.Optimization(learning_rate=0), "learning_rate must be above 0"),
        (lambda: settings.Optimization(learning_rate=float("nan")), "learning_rate must be above 0"),
        (lambda: settings.Optimization(steps=3, warmup_steps=5), "warmup_steps must be at most steps"),
        (lambda: settings.Cadence(log_every=0), "log_every must be at least 1"),
        (lambda: tasks.Threshold(vocab_size=1), "vocab_size must be at least 2"),
        (lambda: tasks.Threshold(threshold=2**31), r"threshold must be from -2\*\*31 to 2\*\*31 - 1, got"),
        (lambda: tasks.Copy(vocab_size=2**31), r"vocab_size must be at most 2\*\*30, got 2147483648"),
        (lambda: tasks.Reverse(vocab_size=2**31), r"vocab_size must be at most 2\*\*30"),
        (lambda: tasks.Copy(length=0), "length must be at least 1"),
        (lambda: tasks.Reverse(min_length=7, max_length=5), "max_length must be at least min_length"),
        (lambda: settings.DecoderSizes(num_heads=3), "num_heads must divide d_model"),
        (
            lambda: settings.DecoderSizes(d_model=12, num_heads=4),
            "must be even, as rotary positions turn pairs",
        ),
        (lambda: tasks.Text(vocab_size=255), "vocab_size must be at least 256"),
        (lambda: tasks.Text(length=1), "length must be at least 2"),
        (lambda: tasks.Text(held_out_fraction=0.0), r"held_out_fraction must be in \(0, 1\)"),
        (lambda: tasks.Digits(held_out_fraction=1.0), r"held_out_fraction must be in \(0, 1\)"),
    ],
)
def test_values_out_of_range_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("model", "d_model"), "64", "copy.model.d_model must be int, got '64'"),
        (("model", "d_model"), True, "copy.model.d_model must be int, got True"),
        (("model", "norm"), "both", "copy.model.norm must be"),
        (("optimization",), 3, "copy.optimization must have the settings"),
        (("colour",), "red", "copy must have the settings"),
    ],
)
def test_settings_of_another_kind_are_named(path, value, message):
    settings = tasks.to_settings(tasks.Copy())
    node = settings
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        tasks.from_settings("copy", settings)


def test_an_unknown_task_is_named():
    with pytest.raises(
        ValueError, match=r"threshold, copy, reverse, digits, text, or one of your own, .*; got 'sort'"
    ):
        tasks.from_settings("sort", {})


@pytest.mark.parametrize("kind", ALL)
def test_help_shows_what_to_expect_and_an_example(kind):
    assert f"Example: regard train {kind.name}" in kind.__doc__
    assert "xpect" in kind.__doc__


def test_settings_load_neither_jax_nor_flax():
    code = "import sys, regard.training.tasks; print({'jax', 'flax', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
