"""Presets: plain settings that check themselves, survive JSON, and load no JAX."""

import dataclasses
import json
import subprocess
import sys

import pytest

from regard.training import presets

ALL = list(presets.PRESETS.values())


@pytest.mark.parametrize("kind", ALL)
def test_settings_survive_json(kind):
    changed = dataclasses.replace(
        kind(),
        data_seed=7,
        model=presets.Sizes(d_model=15, num_heads=5, dropout_rate=0.25, norm="post"),
        optimization=presets.Optimization(steps=11, schedule="constant", clip_norm=0),
    )
    text = json.dumps(presets.to_settings(changed))
    assert presets.from_settings(kind.name, json.loads(text)) == changed
    assert presets.from_settings(kind.name, json.loads(text)) != kind()


@pytest.mark.parametrize("kind", ALL)
def test_small_settings_are_small(kind):
    small = presets.shrink(kind())
    assert small.optimization.steps == 20
    assert small.model.d_model < kind().model.d_model
    assert getattr(small, "held_out_size", 0) < 100


def test_shrinking_respects_what_the_user_chose():
    optimization = presets.Optimization(steps=7, learning_rate=0.5, schedule="constant")
    small = presets.shrink(presets.Copy(length=5, optimization=optimization))
    assert (small.optimization.steps, small.optimization.learning_rate, small.length) == (7, 0.5, 5)
    assert small.model.d_model == 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: presets.Sizes(num_heads=5), "num_heads must divide d_model, got num_heads=5 and d_model=64"),
        (lambda: presets.Sizes(num_layers=0), "num_layers must be at least 1, got 0"),
        (lambda: presets.Sizes(dropout_rate=1.0), r"dropout_rate must be in \[0, 1\), got 1.0"),
        (lambda: presets.Optimization(steps=0), "steps must be at least 1, got 0"),
        (lambda: presets.Optimization(learning_rate=0), "learning_rate must be above 0"),
        (lambda: presets.Optimization(learning_rate=float("nan")), "learning_rate must be above 0"),
        (lambda: presets.Optimization(steps=3, warmup_steps=5), "warmup_steps must be at most steps"),
        (lambda: presets.Cadence(log_every=0), "log_every must be at least 1"),
        (lambda: presets.Threshold(vocab_size=1), "vocab_size must be at least 2"),
        (lambda: presets.Copy(length=0), "length must be at least 1"),
        (lambda: presets.Reverse(min_length=7, max_length=5), "max_length must be at least min_length"),
        (lambda: presets.Digits(held_out_fraction=1.0), r"held_out_fraction must be in \(0, 1\)"),
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
    settings = presets.to_settings(presets.Copy())
    node = settings
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        presets.from_settings("copy", settings)


def test_an_unknown_task_is_named():
    with pytest.raises(ValueError, match="threshold, copy, reverse, digits, got 'sort'"):
        presets.from_settings("sort", {})


@pytest.mark.parametrize("kind", ALL)
def test_help_shows_what_to_expect_and_an_example(kind):
    assert f"Example: regard train {kind.name}" in kind.__doc__
    assert "xpect" in kind.__doc__


def test_settings_load_neither_jax_nor_flax():
    code = "import sys, regard.training.presets; print({'jax', 'flax', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
