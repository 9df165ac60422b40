"""Attention weights, positions and masks as pictures: artists, scales, inks, ticks, labels and refusals."""

import json
import subprocess
from importlib import resources

import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from javascript import NODE
from regard import masks
from regard.inspection import figures
from regard.inspection.figures import palette
from regard.inspection.figures.cells import grid_shape

RNG = np.random.default_rng(11)


def panel():
    """Axes of the caller's own, which skip the layout of a new figure."""
    return Figure(figsize=(5, 4)).subplots()


def weights(*shape):
    return RNG.dirichlet(np.ones(shape[-1]), size=shape[:-1])


def ticks(axis):
    low, high = sorted(axis.get_view_interval())
    return [place for place in axis.get_ticklocs() if low <= place <= high]


def shown_labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


# Attention weights.


@pytest.mark.parametrize("peak", [0.03, 0.4, 1.0])
def test_the_scale_is_fixed_whatever_the_weights(peak):
    drawing = figures.attention_heatmap(np.full((3, 5), peak), ax=panel(), title="Head 2")
    (ax,) = drawing.axes
    assert drawing.images[0].get_clim() == (0.0, 1.0)
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("Key position", "Query position", "Head 2")
    assert drawing.colorbar.ax.get_ylabel() == "Attention weight\n(colour: w^0.4)"
    assert drawing.colorbar.vmin == 0.0
    assert drawing.colorbar.vmax == 1.0


def test_queries_go_down_and_keys_across():
    matrix = weights(3, 5)
    drawing = figures.attention_heatmap(matrix, ax=panel())
    np.testing.assert_array_equal(drawing.images[0].get_array(), matrix)
    assert drawing.axes[0].get_ylim() == (2.5, -0.5)
    assert drawing.axes[0].get_xlim() == (-0.5, 4.5)


def test_every_cell_says_its_weight_in_ink_that_reads_on_it():
    matrix = np.linspace(0.0, 1.0, 13 * 11).reshape(13, 11)
    drawing = figures.attention_heatmap(matrix, ax=Figure(figsize=(9, 9)).subplots())
    texts = np.reshape(drawing.texts, matrix.shape)
    cells = drawing.images[0].to_rgba(matrix)
    for (row, column), weight in np.ndenumerate(matrix):
        text = texts[row, column]
        assert text.get_text() == f"{weight:.2f}"
        assert text.get_position() == (column, row)
        assert palette.contrast_ratio(text.get_color(), tuple(cells[row, column])) >= 4.5
    assert {text.get_color() for text in drawing.texts} == {"black", "white"}


@pytest.mark.parametrize(
    "colors", [palette.weight_colors(), palette.signed_colors(), matplotlib.colormaps["jet"]]
)
def test_ink_reads_on_every_colour_of_a_map(colors):
    for rgba in [*colors(np.arange(256)), colors.get_bad()]:
        assert palette.contrast_ratio(palette.readable_ink(tuple(rgba[:3])), tuple(rgba[:3])) >= 4.5


def test_contrast_is_that_of_the_web_guidelines():
    assert palette.contrast_ratio("black", "white") == pytest.approx(21.0)
    assert palette.contrast_ratio("#767676", "white") == pytest.approx(
        4.54, abs=0.005
    )  # the known limit grey
    assert palette.contrast_ratio("red", "white") == palette.contrast_ratio("white", "red")
    assert palette.contrast_ratio("red", "white") == pytest.approx(4.0, abs=0.005)
    assert palette.relative_luminance("lime") == pytest.approx(0.7152)


@pytest.mark.parametrize(("size", "count"), [(16, 256), (17, 0)])
def test_numbers_stop_at_sixteen(size, count):
    large = Figure(figsize=(20, 20))
    assert len(figures.attention_heatmap(np.eye(size), ax=large.subplots()).texts) == count


def test_numbers_are_left_out_where_they_would_not_fit_unless_asked_for():
    tiny = Figure(figsize=(1, 1))
    assert figures.attention_heatmap(np.eye(7), ax=tiny.subplots()).texts == ()
    assert len(figures.attention_heatmap(np.eye(7), ax=tiny.subplots(), annotate=True).texts) == 49
    assert figures.attention_heatmap(np.eye(2), ax=panel(), annotate=False).texts == ()


@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (2, 3), (5, 13), (17, 101), (29, 997)], ids=str)
def test_ticks_sit_on_whole_positions(shape):
    (ax,) = figures.attention_heatmap(np.zeros(shape), ax=panel()).axes
    for axis, size in ((ax.yaxis, shape[0]), (ax.xaxis, shape[1])):
        places = ticks(axis)
        assert len(places) >= min(size, 2)
        assert all(place == round(place) and 0 <= place < size for place in places)


def test_rows_of_zeros_and_rows_of_nan_are_told_apart():
    drawing = figures.attention_heatmap([[0.25, 0.75], [0.0, 0.0], [np.nan, np.nan]], ax=panel())
    assert [text.get_text() for text in drawing.texts[2:]] == ["0.00", "0.00", "NaN", "NaN"]
    image = drawing.images[0]
    assert tuple(image.to_rgba(image.get_array())[2, 0]) == to_rgba(palette.MISSING)
    assert tuple(image.to_rgba(image.get_array())[1, 0]) == image.get_cmap()(0)
    assert drawing.texts[-1].get_color() == "black"
    assert figures.attention_heatmap(np.full((2, 3), np.nan), ax=panel()).images[0].get_clim() == (0.0, 1.0)


def test_rounding_never_shows_as_minus_zero():
    drawing = figures.attention_heatmap([[-1e-4, 1.0004]], ax=panel())
    assert [text.get_text() for text in drawing.texts] == ["0.00", "1.00"]


class Foreign:
    """An array of another library, as NumPy meets it."""

    def __array__(self, dtype=None, copy=None):
        return np.array([[0.25, 0.75]], dtype=np.float16)


@pytest.mark.parametrize(
    "given",
    [
        jnp.array([[0.25, 0.75]], dtype=jnp.bfloat16),
        jnp.array([[0.25, 0.75]], dtype=jnp.float16),
        np.array([[0.25, 0.75]], dtype=np.float64),
        [[0.25, 0.75]],
        Foreign(),
    ],
)
def test_any_array_will_do(given):
    assert figures.attention_heatmap(given, ax=panel()).images[0].get_array().tolist() == [[0.25, 0.75]]


def test_labels_are_shown_as_they_are():
    drawing = figures.attention_heatmap(
        np.eye(3),
        ax=panel(),
        query_labels=["$5", "a\nb", 7],
        key_labels=["cost", "$x$", "_"],
        title="$5 to $7",
    )
    drawing.figure.draw_without_rendering()
    assert shown_labels(drawing.axes[0].yaxis) == [r"\$5", "a↵b", "7"]
    assert shown_labels(drawing.axes[0].xaxis) == ["cost", r"\$x\$", "_"]
    assert drawing.axes[0].xaxis.get_ticklabels()[1].get_rotation() == 45
    assert drawing.axes[0].get_title() == r"\$5 to \$7"
    grid = figures.head_grid(weights(1, 5, 7), head_labels=[r"\$x$"], title="$5 to $7")
    assert (grid.axes[0].get_title(), grid.figure.get_suptitle()) == (r"\\$x\$", r"\$5 to \$7")


@pytest.mark.slow
def test_every_word_is_named_where_it_fits():
    words = [f"word{index}" for index in range(17)]
    drawing = figures.head_grid(weights(6, 12, 17), key_labels=words, query_labels=range(12))
    assert shown_labels(drawing.axes[-1].xaxis) == words
    assert shown_labels(drawing.axes[0].yaxis) == [str(index) for index in range(12)]


@pytest.mark.parametrize("draw", [figures.attention_heatmap, figures.head_grid])
def test_the_words_that_matter_are_named_where_few_fit(draw):
    names = [f"t{index}" for index in range(101)]
    matrix = np.full((2, 101), 0.001)
    matrix[1, [7, 50, 93]] = [0.2, 0.3, 0.2]
    sheet = Figure(figsize=(4, 3))
    if draw is figures.attention_heatmap:
        (ax,) = draw(matrix, ax=sheet.subplots(), key_labels=names).axes
    else:
        *_, ax = draw(np.stack([0 * matrix, matrix]), fig=sheet, key_labels=names).axes
    places = ticks(ax.xaxis)
    assert {7, 50, 93} <= {*places}
    assert 10 < len(places) < 101
    assert shown_labels(ax.xaxis) == [names[int(place)] for place in places]
    # One label is as far from the next as it is high.
    sheet.draw_without_rendering()
    pitch = 72 * ax.get_window_extent().width / sheet.dpi / 101
    assert np.diff(places).min() * pitch >= 0.99 * ax.xaxis.get_ticklabels()[0].get_fontsize()


def test_small_weights_are_seen_and_the_bar_says_how():
    matrix = np.array([[0.0, 0.01, 0.05, 0.94]])
    power, linear = (figures.attention_heatmap(matrix, ax=panel(), scale=s) for s in ("power", "linear"))
    (image,) = power.images
    np.testing.assert_allclose(image.norm(matrix[0]), matrix[0] ** 0.4)
    shades = [palette.relative_luminance(tuple(rgba[:3])) for rgba in image.to_rgba(matrix)[0]]
    assert shades[0] - shades[1] > 0.15
    assert shades == sorted(shades, reverse=True)
    assert [tick.get_text() for tick in power.colorbar.ax.get_yticklabels()][:3] == ["0", "0.01", "0.05"]
    np.testing.assert_allclose(linear.images[0].norm(matrix[0]), matrix[0])
    assert linear.colorbar.ax.get_ylabel() == "Attention weight"
    with pytest.raises(ValueError, match="scale: expected 'power' or 'linear', got 'log'"):
        figures.head_grid(matrix[None], scale="log")


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_figures_have_the_colours_of_the_page():
    page = resources.files("regard.inspection.explorer").joinpath("web", "colours.js")
    program = f"""
      const page = await import("file://{page}");
      console.log(JSON.stringify([[...page.sequential], [...page.diverging]]));
    """
    run = [NODE, "--input-type=module", "-e", program]
    tables = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    for table, colors in zip(tables, (palette.weight_colors(), palette.signed_colors()), strict=True):
        own = colors(np.arange(256))[:, :3] * 255
        assert np.abs(own - np.reshape(table, (256, 3))).max() < 2.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: figures.attention_heatmap(weights(2, 8, 5, 7)),
            r"\(T, S\), got \(2, 8, 5, 7\); .*weights\[0, 0\]",
        ),
        (lambda: figures.attention_heatmap(weights(2, 8, 5, 7)), r"head_grid\(weights\[0\]\)"),
        (lambda: figures.attention_heatmap(weights(8, 5, 7)), r"got \(8, 5, 7\); .*weights\[0\]"),
        (lambda: figures.attention_heatmap(weights(7)), r"got \(7,\); .*weights\[None, :\]"),
        (lambda: figures.attention_heatmap(0.5), r"weights: expected shape \(T, S\), got \(\)$"),
        (lambda: figures.attention_heatmap(np.ones((0, 5))), r"no axis of length 0, got \(0, 5\)"),
        (
            lambda: figures.attention_heatmap([[1.0], [0.5, 0.5]]),
            r"weights: expected shape \(T, S\), got list",
        ),
        (lambda: figures.attention_heatmap([[3.0, -2.0]]), r"\[0, 1\], got values from -2 to 3; .*softmax"),
        (lambda: figures.attention_heatmap([[np.inf]]), r"values from inf to inf"),
        (
            lambda: figures.attention_heatmap([[1.0]], vmax=0.0),
            r"vmax: expected a number in \(0, 1\], got 0.0",
        ),
        (
            lambda: figures.attention_heatmap([[1.0]], key_labels="ab"),
            r"key_labels: expected 1 labels, .* got 2",
        ),
        (
            lambda: figures.attention_heatmap([[1.0]], query_labels=[]),
            r"query_labels: expected 1 labels, .* got 0",
        ),
        (lambda: figures.head_grid(weights(2, 3, 5, 7)), r"\(H, T, S\), got \(2, 3, 5, 7\); .*weights\[0\]"),
        (lambda: figures.head_grid(weights(5, 7)), r"got \(5, 7\); .*weights\[None\]"),
        (
            lambda: figures.head_grid(weights(2, 5, 7), head_labels=["a"]),
            r"head_labels: expected 2 labels, .* got 1",
        ),
        (
            lambda: figures.head_grid(weights(2, 5, 7), columns=0),
            r"columns: expected an integer of at least 1, got 0",
        ),
    ],
)
def test_weights_that_cannot_be_drawn_are_refused_with_the_way_out(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_weights_must_be_numbers():
    with pytest.raises(
        TypeError, match=r"weights: expected real numbers of shape \(T, S\), got list of dtype <U1"
    ):
        figures.attention_heatmap([["a"]])
    with pytest.raises(TypeError, match="complex64"):
        figures.attention_heatmap(jnp.ones((2, 3), dtype=jnp.complex64))


@pytest.mark.parametrize(("vmax", "arrow"), [(0.25, "max"), (0.5, "neither")])
def test_a_lower_scale_says_when_weights_lie_above_it(vmax, arrow):
    drawing = figures.attention_heatmap(np.full((2, 2), 0.5), ax=panel(), vmax=vmax)
    assert drawing.images[0].get_clim() == (0.0, vmax)
    assert drawing.colorbar.extend == arrow


def test_heads_share_one_scale_and_one_bar():
    stack = weights(5, 3, 7)
    drawing = figures.head_grid(stack, fig=Figure(), head_labels="abcde", title="Block 1")
    assert [ax.get_title() for ax in drawing.axes] == list("abcde")
    for image, matrix in zip(drawing.images, stack, strict=True):
        np.testing.assert_array_equal(image.get_array(), matrix)
        assert image.get_clim() == (0.0, 1.0)
    assert len(drawing.figure.axes) == 5 + 1
    assert drawing.figure.get_suptitle() == "Block 1"
    assert [ax.get_ylabel() != "" for ax in drawing.axes] == [True, False, False, True, False]
    assert [ax.xaxis.get_tick_params()["labelbottom"] for ax in drawing.axes] == [
        False,
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize("count", range(1, 34))
def test_grids_hold_every_panel_without_an_empty_row(count):
    for columns in (None, 1, 3, 50):
        rows, width = grid_shape(count, columns)
        assert (rows - 1) * width < count <= rows * width


# Positions.


def test_a_position_table_is_symmetric_about_zero_with_positions_across():
    table = RNG.normal(size=(13, 7)).astype(np.float32)
    drawing = figures.position_table(jnp.asarray(table), ax=panel())
    low, high = drawing.images[0].get_clim()
    assert high == -low == np.abs(table).max()
    np.testing.assert_array_equal(drawing.images[0].get_array(), table.T)
    (ax,) = drawing.axes
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Position", "Dimension")
    white = drawing.images[0].get_cmap()(0.5)
    assert min(white[:3]) > 0.93
    assert all(place == round(place) for axis in (ax.xaxis, ax.yaxis) for place in ticks(axis))


def test_a_table_of_zeros_or_nan_still_has_a_scale():
    assert figures.position_table(np.zeros((3, 2)), ax=panel()).images[0].get_clim() == (-1.0, 1.0)
    assert figures.position_table([[np.nan, -3.0]], ax=panel()).images[0].get_clim() == (-3.0, 3.0)


def test_similarity_of_rotating_pairs_depends_on_the_distance_alone():
    angle = np.arange(11)[:, None] * np.array([[1.0, 0.1, 0.01]])
    table = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    cosine = figures.position_similarity(5.0 * table, ax=panel()).images[0].get_array()
    expected = np.cos((np.arange(11)[:, None] - np.arange(11))[..., None] * np.array([1.0, 0.1, 0.01])).mean(
        -1
    )
    np.testing.assert_allclose(cosine, expected, atol=1e-12)


def test_a_zero_vector_has_no_direction():
    image = figures.position_similarity([[1.0, 0.0], [0.0, 0.0]], ax=panel()).images[0]
    assert np.isnan(np.ma.filled(image.get_array(), np.nan)).tolist() == [[False, True], [True, True]]
    assert image.get_clim() == (-1.0, 1.0)


@pytest.mark.parametrize("draw", [figures.position_table, figures.position_similarity])
def test_tables_that_cannot_be_drawn_are_refused(draw):
    with pytest.raises(ValueError, match=r"\(length, d_model\), got \(2, 3, 5\); .*table\[0\]"):
        draw(np.ones((2, 3, 5)))
    with pytest.raises(ValueError, match="finite values, got 2 infinite"):
        draw([[np.inf, -np.inf]])


# Masks.


def test_a_mask_is_drawn_cell_by_cell():
    mask = masks.causal() & masks.sliding_window(2)
    drawing = figures.mask_picture(mask, 7, ax=panel())
    np.testing.assert_array_equal(drawing.images[0].get_array(), mask.dense(7, 7))
    assert drawing.axes[0].get_title() == repr(mask)
    assert [text.get_text() for text in drawing.legend.get_texts()] == ["may attend", "masked"]


def test_rows_are_numbered_from_the_query_offset():
    drawing = figures.mask_picture(masks.causal(), 3, 11, query_offset=8, ax=panel(), title="")
    np.testing.assert_array_equal(drawing.images[0].get_array(), np.tri(3, 11, 8))
    assert ticks(drawing.axes[0].yaxis) == [8, 9, 10]
    assert list(drawing.images[0].get_extent()) == [-0.5, 10.5, 10.5, 7.5]
    assert drawing.axes[0].get_title() == ""


def test_the_two_colours_differ_in_lightness_and_match_the_legend():
    drawing = figures.mask_picture(np.eye(3, dtype=bool), ax=panel())
    image = drawing.images[0]
    kept, masked = (patch.get_facecolor() for patch in drawing.legend.get_patches())
    assert palette.contrast_ratio(kept, masked) >= 3.0
    colors = image.to_rgba(image.get_array())
    assert tuple(colors[0, 0]) == kept
    assert tuple(colors[0, 1]) == masked


def test_whole_numbers_are_masks_and_nonzero_keeps():
    drawing = figures.mask_picture(jnp.array([[2, 0, -1]]), ax=panel())
    assert drawing.images[0].get_array().tolist() == [[1, 0, 1]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: figures.mask_picture(masks.causal()), ValueError, r"T: .*mask_picture\(mask, T, S\)"),
        (
            lambda: figures.mask_picture(masks.lengths(jnp.array([2, 3])), 5),
            ValueError,
            r"dense\(T, S\)\[0\]",
        ),
        (lambda: figures.mask_picture(np.ones((2, 3, 5, 7), bool)), ValueError, r"mask\[0, 0\]"),
        (lambda: figures.mask_picture(np.ones((5, 0), bool)), ValueError, r"length 0, got \(5, 0\)"),
        (lambda: figures.mask_picture(np.ones((5, 7), bool), 7), ValueError, r"= \(7, 7\), got \(5, 7\)"),
        (lambda: figures.mask_picture(np.zeros((5, 7))), TypeError, r"mask: .*float64 .*bias"),
    ],
)
def test_masks_that_cannot_be_drawn_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
