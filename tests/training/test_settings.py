"""Settings of tasks: plain values that check themselves, survive JSON, and load no JAX."""

import dataclasses
import json

import pytest

from refusals import assert_refused
from regard.training import settings, tasks

ALL = list(tasks.TASKS.values())


@pytest.mark.parametrize("kind", ALL)
def test_settings_survive_json_and_help_says_what_to_expect(kind):
    model = dataclasses.replace(kind().model, d_model=30, num_heads=5, scan_layers=True, remat="full")
    optimization = settings.Optimization(steps=11, schedule="constant", clip_norm=0)
    changed = dataclasses.replace(kind(), data_seed=7, model=model, optimization=optimization)
    written = json.loads(json.dumps(tasks.to_settings(changed)))
    assert tasks.from_settings(kind.name, written) == changed
    assert tasks.from_settings(kind.name, written) != kind()
    del written["cadence"]["heads_every"]
    assert tasks.from_settings(kind.name, written) == changed, "as an older version wrote it"
    assert f"Example: regard train {kind.name}" in kind.__doc__
    assert "xpect" in kind.__doc__


def test_goals_have_a_direction():
    most, least = settings.Goal("a", 1.5, smaller_is_better=True), settings.Goal("a", 0.75)
    cases = (least, 0.75), (least, 0.5), (most, 1.5), (most, 2.0), (most, float("nan"))
    assert [goal.is_reached({"a": value}) for goal, value in cases] == [True, False, True, False, False]


def test_small_settings_are_small_but_for_what_the_user_chose():
    for kind in ALL:
        small = tasks.shrink(kind())
        assert small.optimization.steps == 20
        assert small.model.d_model < kind().model.d_model
        assert getattr(small, "held_out_size", 0) < 100
    optimization = settings.Optimization(steps=7, learning_rate=0.5, schedule="constant")
    small = tasks.shrink(tasks.Copy(length=5, optimization=optimization))
    assert (small.optimization.steps, small.optimization.learning_rate, small.length) == (7, 0.5, 5)
    assert small.model.d_model == 16


def test_shrinking_leaves_what_the_users_choice_needs():
    for kind, group, choice, expected in (
        (tasks.Copy, "optimization", {"warmup_steps": 50}, {"steps": 200, "batch_size": 16}),
        (tasks.Copy, "optimization", {"accumulate_steps": 32}, {"steps": 20, "batch_size": 128}),
        (tasks.Text, "model", {"num_heads": 32}, {"d_model": 128, "num_layers": 1}),
    ):
        chosen = dataclasses.replace(getattr(kind(), group), **choice)
        small = dataclasses.asdict(getattr(tasks.shrink(kind(**{group: chosen})), group))
        assert choice | expected == {name: small[name] for name in choice | expected}


def test_values_out_of_range_are_named():
    assert_refused(
        (lambda: settings.Sizes(num_heads=5), "num_heads must divide d_model, got num_heads=5 and d_model=6"),
        (lambda: settings.Sizes(dropout_rate=1.0), r"dropout_rate must be in \[0, 1\), got 1.0"),
        (lambda: settings.DecoderSizes(d_model=12, num_heads=4), "must be even, as rotary positions turn"),
        (lambda: settings.DecoderSizes(num_key_heads=3), "num_key_heads must divide num_heads, got num_key"),
        (lambda: settings.DecoderSizes(head_dim=5), "head_dim must be even, got head_dim=5"),
        (lambda: settings.DecoderSizes(latent_dim=5, head_dim=3), "rotary_dim must be there and even, as r"),
        (lambda: settings.DecoderSizes(delta_key_heads=3), "must divide num_heads, got delta_key_heads=3 an"),
        (lambda: settings.DecoderSizes(dense_layers=(4,)), r"must be below num_layers, got dense_layers=\(4"),
        (lambda: settings.DecoderSizes(expert_scale=2.0), "expert_scale is of models with num_experts, got"),
        (lambda: settings.DecoderSizes(delta_heads=2), "delta_heads is of mixers of the delta rule, got del"),
        (lambda: settings.DecoderSizes(experts_per_token=2), "at most num_experts, got experts_per_token=2"),
        (lambda: settings.Optimization(learning_rate=0), "learning_rate must be above 0"),
        (lambda: settings.Optimization(steps=3, warmup_steps=5), "warmup_steps must be at most steps"),
        (lambda: tasks.Threshold(threshold=2**31), r"threshold must be from -2\*\*31 to 2\*\*31 - 1, got"),
        (lambda: tasks.Copy(vocab_size=2**31), r"vocab_size must be at most 2\*\*30, got 2147483648"),
        (lambda: tasks.Reverse(min_length=7, max_length=5), "max_length must be at least min_length"),
        (lambda: tasks.Digits(held_out_fraction=1.0), r"held_out_fraction must be in \(0, 1\)"),
    )


def test_settings_of_another_kind_are_named():
    assert_refused(
        (lambda: tasks.Copy(vocab_size="many"), "vocab_size must be an integer, got 'many'"),
        (lambda: settings.Optimization(steps=2.5), "steps must be an integer, got 2.5"),
        (lambda: settings.Sizes(dropout_rate=None), "dropout_rate must be a number, got None"),
        error=TypeError,
    )
    read = tasks.from_settings
    assert_refused(
        (lambda: read("copy", {"model": {"d_model": True}}), "copy.model.d_model must be int, got True"),
        (lambda: read("copy", {"optimization": 3}), "copy.optimization must have the settings"),
        (lambda: read("copy", {"colour": "red"}), "copy must have the settings"),
        (lambda: read("sort", {}), r"threshold, copy, .*, text, or one of your own, got 'sort'; import"),
    )
