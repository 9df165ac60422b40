"""Attention over a scan: each veil on its patch, as strong as its weight."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from regard.inspection import figures

RNG = np.random.default_rng(13)


def panel():
    """Axes of the caller's own, which skip the layout of a new figure."""
    return Figure(figsize=(5, 4)).subplots()


def weights(*shape):
    return RNG.dirichlet(np.ones(shape[-1]), size=shape[:-1])


def test_the_veil_lies_over_its_patch():
    patches = np.zeros(6)
    patches[4] = 0.5  # row 1, column 1 of 2 x 3
    drawing = figures.scan_attention(np.ones((4, 9)), patches, patch_grid=(np.int64(2), 3), ax=panel())
    scan, veil = drawing.images
    assert veil.get_array().tolist() == [[0, 0, 0], [0, 0.5, 0]]
    assert list(veil.get_extent()) == list(scan.get_extent()) == [-0.5, 8.5, 3.5, -0.5]
    opacity = veil.to_rgba(veil.get_array())[..., 3]
    assert opacity[1, 1] == pytest.approx(0.8)
    assert np.delete(opacity.ravel(), 4).tolist() == [0.0] * 5
    across, down = drawing.outlines
    assert [segment[0, 1] for segment in across.get_segments()] == [1.5]
    assert [segment[0, 0] for segment in down.get_segments()] == [2.5, 5.5]


def test_opacity_is_proportional_to_the_weight():
    drawing = figures.scan_attention(np.eye(2), [0.1, 0.2, 0.3, 0.4], patch_grid=(2, 2), ax=panel())
    opacity = drawing.images[1].to_rgba(drawing.images[1].get_array())[..., 3]
    np.testing.assert_allclose(opacity.ravel(), [0.2, 0.4, 0.6, 0.8], atol=0.8 / 255)
    assert drawing.colorbar.vmax == 0.4


@pytest.mark.parametrize("empty", [np.zeros(4), np.full(4, np.nan)])
def test_no_weight_is_no_veil(empty):
    veil = figures.scan_attention(np.eye(4), empty, patch_grid=(2, 2), ax=panel()).images[1]
    assert not veil.to_rgba(np.ma.masked_invalid(veil.get_array()))[..., 3].any()


@pytest.mark.parametrize("large_is_dark", [True, False])
def test_a_scan_is_grey_and_never_too_dark_to_take_colour(large_is_dark):
    scan = figures.scan_attention(
        [[0.0, 16.0]], [1.0], patch_grid=(1, 1), ax=panel(), large_is_dark=large_is_dark
    ).images[0]
    small, large = scan.to_rgba(scan.get_array())[0]
    assert bool(small[0] > large[0]) is large_is_dark
    assert min(small[0], large[0]) == pytest.approx(0.5)
    assert len(set(small[:3])) == len(set(large[:3])) == 1


@pytest.mark.parametrize(
    ("labels", "title", "weight"),
    [
        ({"predicted_label": 3, "true_label": np.int64(3)}, "predicted 3, true 3", "normal"),
        ({"predicted_label": 3, "true_label": 8}, "predicted 3, true 8", "bold"),
        ({"true_label": 8}, "true 8", "normal"),
        ({"predicted_label": 3, "true_label": 8, "title": "mine"}, "mine", "normal"),
        ({}, "", "normal"),
    ],
)
def test_the_title_says_what_the_model_said(labels, title, weight):
    (ax,) = figures.scan_attention(np.eye(2), [1.0], patch_grid=(1, 1), ax=panel(), **labels).axes
    assert ax.get_title() == title
    assert ax.title.get_fontweight() == weight


def test_scans_share_the_scale_of_weights_and_of_grey():
    images = np.arange(5.0)[:, None, None] * np.ones((5, 6, 4))
    stack = weights(5, 6)
    drawing = figures.scan_attention_grid(
        images, stack, patch_grid=(3, 2), fig=Figure(), predicted_labels=[0] * 5, true_labels=range(5)
    )
    assert {image.get_clim() for image in drawing.images[::2]} == {(0.0, 4.0)}
    assert {image.get_clim() for image in drawing.images[1::2]} == {(0.0, stack.max())}
    np.testing.assert_array_equal(drawing.images[7].get_array(), stack[3].reshape(3, 2))
    assert [ax.title.get_fontweight() for ax in drawing.axes] == ["normal"] + ["bold"] * 4
    assert len(drawing.figure.axes) == 5 + 1


@pytest.mark.parametrize(
    ("image", "patches", "grid", "message"),
    [
        (np.ones((3, 8, 8)), np.ones(16), (4, 4), r"\(height, width\), got \(3, 8, 8\); .*image\[0\]"),
        (np.ones((8, 8)), np.ones((2, 3, 1, 16)), (4, 4), r"\(num_patches,\), .*weights\[example, head, 0\]"),
        (np.ones((8, 8)), np.ones(15), (3, 5), r"patch_grid: .* divide 8 x 8 pixels, got \(3, 5\)"),
        (np.ones((8, 8)), np.ones(15), (4, 4), r"weights: expected 16 patches \(4 x 4\) .* got 15"),
        (np.ones((8, 8)), np.ones(16), (4, 0), r"patch_grid: expected \(rows, columns\), whole and positive"),
        (np.ones((8, 8)), np.ones(16), (2, 2, 4), r"patch_grid: expected \(rows, columns\)"),
        (np.full((8, 8), np.nan), np.ones(16), (4, 4), r"image: expected finite"),
        (np.ones((8, 8)), -np.ones(16), (4, 4), r"weights: expected finite values of at least 0, got -1"),
    ],
)
def test_scans_that_cannot_be_drawn_are_refused(image, patches, grid, message):
    with pytest.raises(ValueError, match=message):
        figures.scan_attention(image, patches, patch_grid=grid)


def test_scan_grids_that_cannot_be_drawn_are_refused():
    with pytest.raises(ValueError, match=r"true_labels: expected 3 labels, one a scan, got 2"):
        figures.scan_attention_grid(
            np.ones((3, 2, 2)), np.ones((3, 1)), patch_grid=(1, 1), true_labels=[1, 2]
        )
    with pytest.raises(ValueError, match=r"weights\[:, head, 0\]"):
        figures.scan_attention_grid(np.ones((3, 2, 2)), np.ones((3, 5, 1, 4)), patch_grid=(2, 2))
    with pytest.raises(ValueError, match=r"for 3 image\(s\), got 4 for 2"):
        figures.scan_attention_grid(np.ones((3, 2, 2)), np.ones((2, 4)), patch_grid=(2, 2))
    with pytest.raises(ValueError, match=r"vmax: expected a positive weight, got 0"):
        figures.scan_attention_grid(np.ones((3, 2, 2)), np.ones((3, 4)), patch_grid=(2, 2), vmax=0)
