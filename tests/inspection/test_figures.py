"""Weights, positions, masks, curves, scans and heads as pictures: artists, scales, inks and refusals."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from javascript import WEB, run_node
from page_traces import make_case
from refusals import assert_refused
from regard import masks, readouts
from regard.inspection import figures
from regard.inspection.figures import palette
from regard.inspection.figures.cell_axes import grid_shape

RNG = np.random.default_rng(11)


def panel(*size):
    """Axes of the caller's own, which skip the layout of a new figure."""
    return Figure(figsize=size or (5, 4)).subplots()


def heatmap(weights, **options):
    return figures.attention_heatmap(weights, ax=panel(), **options)


def weights(*shape):
    return RNG.dirichlet(np.ones(shape[-1]), size=shape[:-1])


def ticks(axis):
    low, high = sorted(axis.get_view_interval())
    return [place for place in axis.get_ticklocs() if low <= place <= high]


def shown_labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def legend_of(drawing):
    return [text.get_text() for text in drawing.legend.get_texts()]


def test_the_scale_is_fixed_whatever_the_weights():
    drawing = heatmap(np.full((3, 5), 0.03), title="Head 2")
    (ax,) = drawing.axes
    assert drawing.images[0].get_clim() == (drawing.colorbar.vmin, drawing.colorbar.vmax) == (0.0, 1.0)
    names = ax.get_xlabel(), ax.get_ylabel(), ax.get_title(), drawing.colorbar.ax.get_ylabel()
    assert names == ("Key position", "Query position", "Head 2", "Attention weight\n(colour: w^0.4)")
    # A lower end says when weights lie above it; below 0.1 numbers have a third digit.
    drawing = heatmap([[0.5, 0.004]], vmax=0.05)
    assert (drawing.images[0].get_clim(), drawing.colorbar.extend) == ((0.0, 0.05), "max")
    assert [text.get_text() for text in drawing.texts] == [".500", ".004"]


def test_every_cell_says_its_weight_in_ink_that_reads_on_it():
    matrix = np.linspace(0.0, 1.0, 13 * 5).reshape(13, 5)
    drawing = figures.attention_heatmap(matrix, ax=panel(9, 9))
    np.testing.assert_array_equal(drawing.images[0].get_array(), matrix)
    (ax,) = drawing.axes
    assert (ax.get_ylim(), ax.get_xlim()) == ((12.5, -0.5), (-0.5, 4.5)), "queries go down, keys across"
    texts = np.reshape(drawing.texts, matrix.shape)
    cells = drawing.images[0].to_rgba(matrix)
    for (row, column), weight in np.ndenumerate(matrix):
        text = texts[row, column]
        assert (text.get_text(), text.get_position()) == (f"{weight:.2f}", (column, row))
        assert palette.contrast_ratio(text.get_color(), tuple(cells[row, column])) >= 4.5
    assert {text.get_color() for text in drawing.texts} == {"black", "white"}
    # No numbers where they would not fit, unless they are asked for.
    for asked, count in ((None, 0), (True, 49)):
        assert len(figures.attention_heatmap(np.eye(7), ax=panel(1, 1), annotate=asked).texts) == count


def test_rows_of_zeros_and_rows_of_nan_are_told_apart():
    drawing = heatmap([[-1e-4, 1.0004], [0.0, 0.0], [np.nan, np.nan]])
    texts = [text.get_text() for text in drawing.texts]
    assert texts == ["0.00", "1.00", "0.00", "0.00", "NaN", "NaN"], "nor is there a minus zero"
    image = drawing.images[0]
    colors = image.to_rgba(image.get_array())
    assert (tuple(colors[2, 0]), tuple(colors[1, 0])) == (to_rgba(palette.MISSING), image.get_cmap()(0))


def test_labels_are_shown_as_they_are():
    labels = {"query_labels": ["$5", "a\nb", 7], "key_labels": ["cost", "$x$", "_"]}
    drawing = heatmap(np.eye(3), **labels, title="$5 to $7")
    drawing.figure.draw_without_rendering()
    assert shown_labels(drawing.axes[0].yaxis) == [r"\$5", "a↵b", "7"]
    assert shown_labels(drawing.axes[0].xaxis) == ["cost", r"\$x\$", "_"]
    assert drawing.axes[0].get_title() == r"\$5 to \$7"
    grid = figures.head_grid(weights(1, 5, 7), head_labels=[r"\$x$"], title="$5 to $7")
    assert (grid.axes[0].get_title(), grid.figure.get_suptitle()) == (r"\\$x\$", r"\$5 to \$7")
    # What is long is cut, and leaves the picture its room.
    long = figures.attention_heatmap(np.eye(2), query_labels=["x" * 300, 1], key_labels=[0, "$" * 300])
    assert shown_labels(long.axes[0].yaxis) == ["x" * 23 + "…", "1"]
    named = figures.head_history([0], ["y" * 300 + " head 3"], np.ones((1, 1)), label="nats")
    assert shown_labels(named.axes[0].yaxis) == ["…" + "y" * 32 + " head 3"]


def test_the_words_that_matter_are_named_where_few_fit():
    names = [f"t{index}" for index in range(101)]
    matrix = np.full((2, 101), 0.001)
    matrix[1, [7, 50, 93]] = [0.2, 0.3, 0.2]
    sheet = Figure(figsize=(4, 3))
    *_, ax = figures.head_grid(np.stack([0 * matrix, matrix]), fig=sheet, key_labels=names).axes
    places = ticks(ax.xaxis)
    assert {7, 50, 93} <= {*places}
    assert 10 < len(places) < 101
    assert shown_labels(ax.xaxis) == [names[int(place)] for place in places]
    # One label is as far from the next as it is high.
    sheet.draw_without_rendering()
    pitch = 72 * ax.get_window_extent().width / sheet.dpi / 101
    assert np.diff(places).min() * pitch >= 0.99 * ax.xaxis.get_ticklabels()[0].get_fontsize()


def test_the_figures_have_the_colours_of_the_page():
    program = f"""
      const page = await import("{WEB.as_uri()}/colours.js");
      console.log(JSON.stringify([[...page.sequential], [...page.diverging]]));
    """
    tables = json.loads(run_node("--input-type=module", "-e", program))
    for table, colors in zip(tables, (palette.weight_colors(), palette.signed_colors()), strict=True):
        assert np.abs(colors(np.arange(256))[:, :3] * 255 - np.reshape(table, (256, 3))).max() < 2.0


def test_what_cannot_be_drawn_is_refused_with_the_way_out():
    one, grid = figures.attention_heatmap, figures.head_grid
    table, picture = figures.position_table, figures.mask_picture
    scan = lambda image, patches, *grid: figures.scan_attention(image, patches, patch_grid=grid)
    assert_refused(
        (lambda: one(weights(2, 8, 5, 7)), r"\(T, S\), got \(2, 8, 5, 7\); .*weights\[0, 0\]"),
        (lambda: one([[3.0, -2.0]]), r"\[0, 1\], got values from -2 to 3; .*softmax"),
        (lambda: grid(weights(2, 5, 7), scale="log"), "scale: expected 'power' or 'linear', got 'log'"),
        (lambda: table(np.ones((2, 3, 5))), r"\(length, d_model\), got \(2, 3, 5\); .*table\[0\]"),
        (lambda: picture(masks.causal()), r"T: .*mask_picture\(mask, T, S\)"),
        (lambda: picture(np.zeros((5, 7))), r"mask: .*float64 .*bias", TypeError),
        (lambda: figures.training_curves([]), r"any of loss, .*, got none in 1 run\(s\)"),
        (lambda: scan(np.ones((3, 8, 8)), np.ones(16), 4, 4), r"got \(3, 8, 8\); .*image\[0\]"),
    )


def test_heads_share_one_scale_and_one_bar():
    stack = weights(5, 3, 7)
    drawing = figures.head_grid(stack, fig=Figure(), head_labels="abcde", title="Block 1")
    assert [ax.get_title() for ax in drawing.axes] == list("abcde")
    np.testing.assert_array_equal([image.get_array() for image in drawing.images], stack)
    assert {image.get_clim() for image in drawing.images} == {(0.0, 1.0)}
    assert (len(drawing.figure.axes), drawing.figure.get_suptitle()) == (5 + 1, "Block 1")
    shapes = [grid_shape(*asked) for asked in ((7, 3), (7, 50))]
    assert shapes == [(3, 3), (1, 7)], "every panel, and no empty row"


def test_a_position_table_is_symmetric_about_zero_with_positions_across():
    table = RNG.normal(size=(13, 7)).astype(np.float32)
    drawing = figures.position_table(jnp.asarray(table), ax=panel())
    low, high = drawing.images[0].get_clim()
    assert high == -low == np.abs(table).max()
    np.testing.assert_array_equal(drawing.images[0].get_array(), table.T)
    (ax,) = drawing.axes
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Position", "Dimension")
    assert all(place == round(place) for axis in (ax.xaxis, ax.yaxis) for place in ticks(axis))
    assert figures.position_table(np.zeros((3, 2)), ax=panel()).images[0].get_clim() == (-1.0, 1.0)


def test_a_mask_is_drawn_cell_by_cell_in_colours_that_match_the_legend():
    mask = masks.causal() & masks.sliding_window(2)
    drawing = figures.mask_picture(mask, 7, ax=panel())
    image = drawing.images[0]
    np.testing.assert_array_equal(image.get_array(), np.tri(7) - np.tri(7, k=-3))
    assert drawing.axes[0].get_title() == repr(mask)
    assert legend_of(drawing) == ["may attend", "masked"]
    kept, masked = (patch.get_facecolor() for patch in drawing.legend.get_patches())
    assert palette.contrast_ratio(kept, masked) >= 3.0
    colors = image.to_rgba(image.get_array())
    assert (tuple(colors[0, 0]), tuple(colors[0, 1])) == (kept, masked)
    # Rows are numbered from the query offset.
    drawing = figures.mask_picture(masks.causal(), 3, 11, query_offset=8, ax=panel())
    np.testing.assert_array_equal(drawing.images[0].get_array(), np.tri(3, 11, 8))
    assert ticks(drawing.axes[0].yaxis) == [8, 9, 10]
    assert list(drawing.images[0].get_extent()) == [-0.5, 10.5, 10.5, 7.5]


RUN = [
    {"step": 2, "loss": 0.5, "accuracy": 0.5, "seconds": 0.1},
    {"step": 3, "loss": None},
    {"step": 5, "loss": float("nan"), "held_out_loss": 0.4, "held_out_accuracy": np.float16(0.75)},
    {"step": 7, "loss": np.float32(0.25), "accuracy": 1},
]


def draw_curves(runs, **options):
    return figures.training_curves(runs, fig=Figure(), **options)


def points(line):
    return [(x, None if np.isnan(y) else y) for x, y in np.transpose(line.get_data()).tolist()]


def test_curves_have_the_points_that_exist():
    drawing = draw_curves(RUN, title="digits")
    assert [ax.get_ylabel() for ax in drawing.axes] == ["Loss", "Accuracy"]
    assert [line.get_label() for line in drawing.lines] == ["training", "held out"] * 2
    assert [points(line) for line in drawing.lines] == [
        [(2, 0.5), (3, None), (5, None), (7, 0.25)], [(5, 0.4)], [(2, 0.5), (7, 1.0)], [(5, 0.75)],
    ]  # fmt: skip
    assert drawing.axes[1].get_ylim() == (0.0, 1.0)
    # A lone point is marked; a metric that nobody logged gets no panel.
    lone = draw_curves([{"step": 1, "held_out_loss": 0.5}])
    assert (lone.lines[0].get_marker(), len(lone.axes)) == ("o", 1)
    # Steps are sorted, and the last word on a step counts.
    records = [{"step": 5, "loss": 0.1}, {"step": 2, "loss": 0.3}, {"step": 5, "loss": 0.2}]
    drawing = draw_curves(records, loss_scale="log")
    assert points(drawing.lines[0]) == [(2, 0.3), (5, 0.2)]
    assert drawing.axes[0].get_yscale() == "log"


T, S, EMPTY = 37, 53, 4  # so many rows may attend to nothing
PLACED = {"mask": masks.causal() & ~masks.from_array(np.arange(T)[:, None] < EMPTY), "query_offset": S - T}


@pytest.fixture(scope="module")
def case():
    return make_case(T, S, **PLACED)


@pytest.fixture(scope="module")
def readout(case):
    return readouts.read(case.query, case.key, grid=8, **PLACED)


@pytest.fixture(scope="module")
def tall():
    case = make_case(521, 7)
    return readouts.read(case.query, case.key, query_offset=0, grid=256)


def shown(image):
    return np.ma.filled(np.ma.masked_invalid(image.get_array()), 0.0)


def test_the_atlas_has_a_thumbnail_a_head(case, readout, tall):
    two = jax.tree.map(lambda array: array[:2], readout)
    drawing = figures.head_atlas([readout, two], ax=panel(), layer_labels=["first", "second"])
    for image, (layer, head) in zip(drawing.images, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)], strict=True):
        left, right, bottom, top = image.get_extent()
        assert ((left + right) / 2, (bottom + top) / 2) == pytest.approx((head, layer))
        assert (top < bottom, image.norm) == (True, drawing.images[0].norm), "queries go down, on one scale"
        np.testing.assert_allclose(shown(image), case.level(head, 8, 8)[0], rtol=1e-5)
    names = shown_labels(drawing.axes[0].yaxis), drawing.colorbar.ax.get_ylabel()
    assert names == (["first", "second"], "Weight per row and\nblock"), "lines no longer than the bar"
    drawing = figures.head_atlas(readout, ax=panel(), channel="max", scale="linear")
    np.testing.assert_allclose(shown(drawing.images[1]), case.level(1, 8, 8)[1], rtol=1e-5)
    # Thumbnails have at most 64 blocks a side.
    assert tall.block_mass.shape[1] > 64 >= len(figures.head_atlas(tall, ax=panel()).images[0].get_array())


def test_the_map_of_a_head_shows_its_blocks_or_the_weights_of_a_window(case, readout):
    drawing = figures.head_map(readout, 2, ax=panel())
    ax, right, above = drawing.axes
    np.testing.assert_allclose(shown(drawing.images[0]), case.level(2, 8, 8)[0], rtol=1e-5)
    assert drawing.images[0].get_extent() == [-0.5, 55.5, 39.5, -0.5], "the last blocks reach beyond"
    assert (above.get_xlim(), right.get_ylim()) == (ax.get_xlim(), ax.get_ylim())
    entropy, mass = drawing.lines  # rows that read nothing are gaps
    np.testing.assert_allclose(entropy.get_xdata(), case.row_stats(2)["entropy"], rtol=1e-4, atol=1e-5)
    assert entropy.get_ydata().tolist() == list(range(T))
    np.testing.assert_allclose(mass.get_ydata(), case.weights[2].sum(0), rtol=1e-5)
    # Of a window, its weights.
    window = case.weights[1, 11:18, 5:24]
    drawing = figures.head_map(readout, 1, weights=window, first_row=11, first_column=5, ax=panel())
    np.testing.assert_allclose(shown(drawing.images[0]), window, rtol=1e-6)
    assert drawing.images[0].get_extent() == [4.5, 23.5, 17.5, 10.5]
    assert drawing.lines[0].get_ydata().tolist() == list(range(11, 18))


def test_the_profile_of_distances_is_that_of_the_weights(case, readout, tall):
    drawing = figures.distance_profile(readout, ax=panel(), heads=[2, 0], head_labels=["$two", "_zero"])
    assert shown_labels(drawing.axes[0].xaxis) == ["0", "1", "2-3", "4-7", "8-15", "16-31", "32-63"]
    bins = np.floor(np.log2(np.maximum(case.distance, 0.5))).astype(int) + 1
    for line, head in zip(drawing.lines, [2, 0], strict=True):
        expected = np.bincount(bins.ravel(), case.weights[head].ravel())[:7] / (T - EMPTY)
        np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-5)
    assert legend_of(drawing) == [r"\$two", "_zero"]
    # Keys ahead have negative distances; many heads have no legend.
    labels = shown_labels(figures.distance_profile(tall, ax=panel()).axes[0].xaxis)
    assert labels[:5] == ["−4-7", "−2-3", "−1", "0", "1"]
    many = jax.tree.map(lambda array: np.concatenate([array] * 5), tall)
    assert figures.distance_profile(many, ax=panel()).legend is None


def test_one_head_alone_is_drawn(readout):
    alone = jax.tree.map(lambda array: np.asarray(array)[0], readout)
    for draw in (figures.head_map, figures.distance_profile, figures.entropy_profile, figures.head_atlas):
        assert draw(alone, ax=panel()).axes
    sunk = figures.entropy_profile(readouts.read(*[np.zeros((1, 5, 3))] * 2, sinks=np.zeros(1)), ax=panel())
    np.testing.assert_allclose(*(line.get_ydata() for line in sunk.lines), rtol=1e-6)
