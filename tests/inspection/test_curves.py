"""Loss and accuracy over steps: the points that exist, told apart, on honest axes."""

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from regard.inspection import figures
from regard.inspection.figures import palette

RUN = [
    {"step": 2, "loss": 0.5, "accuracy": 0.5, "seconds": 0.1},
    {"step": 3, "loss": None},
    {"step": 5, "loss": float("nan"), "held_out_loss": 0.4, "held_out_accuracy": jnp.bfloat16(0.75)},
    {"step": 7, "loss": np.float32(0.25), "accuracy": 1},
]


def points(line):
    return [
        (x, None if np.isnan(y) else y) for x, y in zip(*map(np.ndarray.tolist, line.get_data()), strict=True)
    ]


def test_curves_have_the_points_that_exist():
    drawing = figures.training_curves(RUN, fig=Figure(), title="digits")
    assert [ax.get_ylabel() for ax in drawing.axes] == ["Loss", "Accuracy"]
    assert {ax.get_xlabel() for ax in drawing.axes} == {"Step"}
    assert [line.get_label() for line in drawing.lines] == ["training", "held out"] * 2
    assert points(drawing.lines[0]) == [(2, 0.5), (3, None), (5, None), (7, 0.25)]
    assert points(drawing.lines[1]) == [(5, 0.4)]
    assert points(drawing.lines[2]) == [(2, 0.5), (7, 1.0)]
    assert points(drawing.lines[3]) == [(5, 0.75)]
    assert drawing.axes[1].get_ylim() == (0.0, 1.0)
    assert drawing.lines[0].get_color() != drawing.lines[1].get_color()
    assert [text.get_text() for text in drawing.legend.get_texts()] == ["training", "held out"]
    assert all(
        line.get_visible() for ax in drawing.axes for line in ax.get_xgridlines() + ax.get_ygridlines()
    )


def test_a_lone_point_is_marked():
    drawing = figures.training_curves([{"step": 1, "held_out_loss": 0.5}], fig=Figure())
    assert drawing.lines[0].get_marker() == "o"


def test_steps_are_sorted_and_the_last_word_on_a_step_counts():
    records = [{"step": 5, "loss": 0.1}, {"step": 2, "loss": 0.3}, {"step": 5, "loss": 0.2}]
    assert points(figures.training_curves(records, fig=Figure()).lines[0]) == [(2, 0.3), (5, 0.2)]


def test_a_metric_nobody_logged_gets_no_panel():
    assert [a.get_ylabel() for a in figures.training_curves(RUN[1:2] + RUN[3:], fig=Figure()).axes] == [
        "Loss",
        "Accuracy",
    ]
    assert [a.get_ylabel() for a in figures.training_curves([{"step": 1, "loss": 2}], fig=Figure()).axes] == [
        "Loss"
    ]


def test_runs_are_told_apart_by_colour_and_splits_by_dashes():
    drawing = figures.training_curves({"_base": RUN, "cost $2": RUN[2:]}, fig=Figure())
    assert [text.get_text() for text in drawing.legend.get_texts()] == [
        "_base",
        r"cost \$2",
        "training",
        "held out",
    ]
    looks = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in drawing.lines}
    assert looks["_base, training"] == (palette.SERIES[0], "-")
    assert looks["_base, held out"] == (palette.SERIES[0], "--")
    assert looks[r"cost \$2, training"] == (palette.SERIES[1], "-")


@pytest.mark.parametrize("count", [2, 6, 7, 23])
def test_every_run_has_a_colour_of_its_own_that_shows_on_white(count):
    colors = palette.series_colors(count)
    assert len(set(colors)) == count
    assert min(palette.contrast_ratio(color, "white") for color in colors) > 1.2


def test_loss_can_be_logarithmic_and_starts_at_zero_otherwise():
    falling = [{"step": step, "loss": 0.5**step} for step in range(13)]
    assert figures.training_curves(falling, fig=Figure(), loss_scale="log").axes[0].get_yscale() == "log"
    assert figures.training_curves(falling, fig=Figure()).axes[0].get_ylim()[0] == 0.0


@pytest.mark.parametrize(
    ("runs", "error", "message"),
    [
        (
            [],
            ValueError,
            r"any of loss, held_out_loss, bits_per_byte, .*held_out_accuracy, got none in 1 run\(s\) with 0",
        ),
        ({"a": [{"step": 1}], "b": []}, ValueError, r"got none in 2 run\(s\) with 1 record"),
        ([{"loss": 0.5}], ValueError, r"expected a 'step' beside 'loss', got only \['loss'\] in record 0"),
        (
            {"a": [{"step": 1, "accuracy": 93.0}]},
            ValueError,
            r"'accuracy' in \[0, 1\], got 93 in record 0 of run 'a'",
        ),
        ([{"step": 1, "loss": "low"}], TypeError, r"a number as 'loss', got 'low' in record 0"),
        ({"step": 1, "loss": 0.5}, TypeError, r"a list of records, .* got int under 'step'"),
        (["metrics.jsonl"], TypeError, r"expected dictionaries, got str as record 0"),
    ],
)
def test_records_that_cannot_be_drawn_are_refused(runs, error, message):
    with pytest.raises(error, match=message):
        figures.training_curves(runs)


def test_unknown_scales_are_refused():
    with pytest.raises(ValueError, match="loss_scale: expected 'linear' or 'log', got 'logarithm'"):
        figures.training_curves([], loss_scale="logarithm")
