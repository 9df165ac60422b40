"""The explorer's views on paper: what is drawn where, on which scale, and refusals."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from economy import mostly_slow
from regard import masks, readouts
from regard.inspection import figures
from regard.readouts import Readout

H, T, S, D = 3, 37, 53, 5


def panel():
    """Axes of the caller's own, which skip the layout of a new figure."""
    return Figure(figsize=(5, 4)).subplots()


@functools.cache
def read_all(heads, rows, keys):
    """A readout of every key by every query."""
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=(heads, n, D)).astype(np.float32) for n in (rows, keys))
    return readouts.read(query, key, query_offset=0)


def make_arrays(rows=T, keys=S, seed=0):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.normal(size=(H, n, D)), jnp.float32) for n in (rows, keys))


def weigh(query, key, allowed):
    """Weights in float64, by the definition."""
    scores = np.asarray(query, np.float64) @ np.asarray(key, np.float64).swapaxes(-1, -2) / math.sqrt(D)
    scores = np.where(allowed, scores, -np.inf)
    peak = scores.max(-1, keepdims=True, initial=-np.inf)
    shares = np.exp(scores - np.where(np.isfinite(peak), peak, 0))
    total = shares.sum(-1, keepdims=True)
    return np.divide(shares, total, where=total > 0, out=np.zeros_like(shares))


@pytest.fixture(scope="module")
def causal():
    """A readout of queries that are the last of the keys, its weights in float64, and window's arguments."""
    query, key = make_arrays()
    mask = masks.causal()
    readout = readouts.read(query, key, mask=mask, query_offset=S - T, grid=8)
    allowed = np.arange(S)[None] <= np.arange(T)[:, None] + S - T
    return readout, weigh(query, key, allowed), (query, key, readout.lse)


def shown(image):
    return np.ma.filled(np.ma.masked_invalid(image.get_array()), 0.0)


@pytest.mark.slow
def test_the_atlas_has_a_thumbnail_a_head(causal):
    readout, weights, _ = causal
    two = jax.tree.map(lambda array: array[:2], readout)
    drawing = figures.head_atlas([readout, two], ax=panel(), title="Atlas", layer_labels=["first", "second"])
    assert len(drawing.images) == 5
    assert (readout.query_block, readout.key_block) == (8, 8)
    for image, (layer, head) in zip(drawing.images, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)], strict=True):
        left, right, bottom, top = image.get_extent()
        assert ((left + right) / 2, (bottom + top) / 2) == pytest.approx((head, layer))
        assert top < bottom, "queries go down"
        expected = [
            [weights[head, i : i + 8, j : j + 8].sum(-1).mean() for j in range(0, S, 8)]
            for i in range(0, T, 8)
        ]
        np.testing.assert_allclose(shown(image), expected, rtol=1e-5)
        assert image.norm.vmin == 1e-4
        assert image.norm.vmax == 1.0
    assert [label.get_text() for label in drawing.axes[0].get_yticklabels()] == ["first", "second"]
    assert drawing.colorbar.ax.get_ylabel() == "Weight per row and block"


def test_the_atlas_can_show_the_largest_weights(causal):
    readout, weights, _ = causal
    drawing = figures.head_atlas(readout, ax=panel(), channel="max", scale="linear")
    expected = [[weights[1, i : i + 8, j : j + 8].max() for j in range(0, S, 8)] for i in range(0, T, 8)]
    np.testing.assert_allclose(shown(drawing.images[1]), expected, rtol=1e-5)
    assert drawing.images[0].get_clim() == (0.0, 1.0)
    assert drawing.colorbar.ax.get_ylabel() == "Largest weight in the block"


def test_thumbnails_have_at_most_64_blocks_a_side():
    readout = readouts.read(*make_arrays(131, 131), grid=256)
    assert readout.block_mass.shape == (H, 131, 131)
    assert figures.head_atlas(readout, ax=panel()).images[0].get_array().shape == (33, 33)


def test_the_map_of_a_head_shows_its_blocks(causal):
    readout, weights, _ = causal
    drawing = figures.head_map(readout, 2, ax=panel(), title="Head 2")
    ax, right, above = drawing.axes
    expected = [
        [weights[2, i : i + 8, j : j + 8].sum(-1).mean() for j in range(0, S, 8)] for i in range(0, T, 8)
    ]
    np.testing.assert_allclose(shown(drawing.images[0]), expected, rtol=1e-5)
    assert drawing.images[0].get_extent() == [-0.5, 55.5, 39.5, -0.5], "the last blocks reach beyond"
    assert (ax.get_xlim(), ax.get_ylim()) == ((-0.5, S - 0.5), (T - 0.5, -0.5))
    assert (above.get_xlim(), right.get_ylim()) == (ax.get_xlim(), ax.get_ylim())
    terms = weights * np.log(weights, where=weights > 0, out=np.zeros_like(weights))
    entropy, mass = drawing.lines
    np.testing.assert_allclose(entropy.get_xdata(), -terms[2].sum(-1), rtol=1e-4, atol=1e-5)
    assert entropy.get_ydata().tolist() == list(range(T))
    np.testing.assert_allclose(mass.get_ydata(), weights[2].sum(0), rtol=1e-5)
    assert above.get_title() == "Head 2"


def test_the_map_of_a_window_shows_its_weights(causal):
    readout, weights, (query, key, lse) = causal
    window = readouts.window(
        query,
        key,
        lse,
        mask=masks.causal(),
        query_offset=S - T,
        rows=slice(11, 18),
        columns=slice(5, 24),
        heads=[1],
    )[0]
    drawing = figures.head_map(readout, 1, weights=window, first_row=11, first_column=5, ax=panel())
    np.testing.assert_allclose(shown(drawing.images[0]), weights[1, 11:18, 5:24], rtol=1e-5, atol=1e-7)
    assert drawing.images[0].get_extent() == [4.5, 23.5, 17.5, 10.5]
    assert drawing.axes[0].get_ylim() == (17.5, 10.5)
    assert drawing.lines[0].get_ydata().tolist() == list(range(11, 18))
    assert drawing.colorbar.ax.get_ylabel() == "Attention weight"


def test_rows_that_read_nothing_are_gaps():
    query, key = make_arrays(7, 7)
    none = jnp.zeros((7, 7), bool).at[4:].set(True)
    readout = readouts.read(query, key, mask=none, grid=7)
    drawing = figures.head_map(readout, ax=panel())
    assert np.isnan(drawing.lines[0].get_xdata()).tolist() == [True] * 4 + [False] * 3
    assert np.ma.masked_invalid(drawing.images[0].get_array()).mask[:4].all()
    curve = figures.entropy_profile(readout, ax=panel()).lines[0].get_ydata()
    assert np.isnan(curve).tolist() == [True] * 4 + [False] * 3


def test_the_profile_of_distances_is_that_of_the_weights(causal):
    readout, weights, _ = causal
    drawing = figures.distance_profile(readout, ax=panel(), heads=[2, 0], head_labels=["$two", "_zero"])
    distance = np.arange(T)[:, None] + S - T - np.arange(S)[None]
    bins = [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64)]
    labels = [label.get_text() for label in drawing.axes[0].get_xticklabels()]
    assert labels == ["0", "1", "2-3", "4-7", "8-15", "16-31", "32-63"]
    for line, head in zip(drawing.lines, [2, 0], strict=True):
        expected = [
            np.where((distance >= low) & (distance < high), weights[head], 0).sum(-1).mean()
            for low, high in bins
        ]
        np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-5)
    assert [text.get_text() for text in drawing.legend.get_texts()] == [r"\$two", "_zero"]


def test_keys_ahead_have_negative_distances():
    readout = read_all(13, 5, 5)
    labels = [
        tick.get_text() for tick in figures.distance_profile(readout, ax=panel()).axes[0].get_xticklabels()
    ]
    minus = "\N{MINUS SIGN}"
    assert labels == [f"{minus}4-7", f"{minus}2-3", f"{minus}1", "0", "1", "2-3", "4-7"]


def test_the_profile_of_entropy_is_that_of_the_weights(causal):
    readout, weights, _ = causal
    terms = weights * np.log(weights, where=weights > 0, out=np.zeros_like(weights))
    drawing = figures.entropy_profile(readout, ax=panel())
    for head in range(H):
        line = drawing.lines[head]
        np.testing.assert_allclose(line.get_ydata(), -terms[head].sum(-1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(drawing.lines[-1].get_ydata(), np.log(np.arange(S - T, S) + 1), rtol=1e-6)
    assert drawing.lines[-1].get_label() == "even, log(keys)"


def test_many_positions_are_averaged():
    """521 queries are 174 means over three, the last over two."""
    readout = readouts.read(*make_arrays(521, 7), query_offset=0)
    line = figures.entropy_profile(readout, heads=[1], ax=panel()).lines[0]
    assert len(line.get_xdata()) == 174
    assert line.get_xdata()[[0, 1, -1]].tolist() == [1.0, 4.0, 519.5]
    entropy = np.asarray(readout.entropy[1], np.float64)
    np.testing.assert_allclose(line.get_ydata()[[0, -1]], [entropy[:3].mean(), entropy[519:].mean()])


def test_many_heads_have_no_legend():
    many = read_all(13, 5, 5)
    assert figures.distance_profile(many, ax=panel()).legend is None
    assert figures.distance_profile(many, heads=[3], ax=panel()).legend is not None


def test_the_history_of_heads_leaves_gaps_for_what_is_not_finite():
    values = [[1.0, 2.0, math.nan], [0.5, -math.inf, 3.0]]
    drawing = figures.head_history([0, 20, 31], ["a $", "b"], values, ax=panel(), label="$x$", title="Run")
    image = drawing.images[0].get_array()
    assert np.ma.masked_invalid(image).mask.tolist() == [[False, False, True], [False, True, False]]
    ax = drawing.axes[0]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "20", "31"]
    assert [label.get_text() for label in ax.get_yticklabels()] == [r"a \$", "b"]
    assert (drawing.colorbar.ax.get_ylabel(), ax.get_title()) == (r"\$x\$", "Run")


@pytest.mark.slow
def test_one_head_without_leading_axes_is_drawn():
    readout = jax.tree.map(lambda array: array[0], read_all(13, 5, 5))
    for draw in (figures.head_map, figures.distance_profile, figures.entropy_profile, figures.head_atlas):
        assert draw(readout, ax=panel()).axes
    one = readouts.read(jnp.eye(1), jnp.eye(1))
    for draw in (figures.head_map, figures.distance_profile, figures.entropy_profile, figures.head_atlas):
        assert draw(one, ax=panel()).axes


DRAWN = {
    "atlas": figures.head_atlas,
    "map": lambda readout: figures.head_map(readout, 1),
    "distances": figures.distance_profile,
    "entropies": figures.entropy_profile,
    "history": lambda _: figures.head_history([1, 2], ["a"], [[0.5, 0.25]]),
}


@pytest.fixture(scope="module")
def twins(causal):
    """Each figure drawn twice from the same readout."""
    return functools.cache(lambda name: [DRAWN[name](causal[0]) for _ in range(2)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    mostly_slow(
        itertools.product(DRAWN, ["png", "svg", "pdf"]),
        ("map", "png"),
        ("entropies", "svg"),
        ("history", "pdf"),
    ),
)
def test_saving_twice_gives_the_same_bytes(twins, name, kind):
    one, other = twins(name)
    first = figures.render(one, kind)
    assert first == figures.render(one, kind) == figures.render(other, kind)


BATCH = jax.tree.map(lambda array: jnp.stack([array, array]), read_all(H, 5, 5))
EMPTY = readouts.read(*(jnp.ones((H, n, D)) for n in (0, 0)))


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda r: figures.head_atlas([]), "expected at least one, got none"),
        (lambda r: figures.head_atlas(BATCH), r"leading axes \(H,\), got \(2, 3\)"),
        (lambda r: figures.head_atlas(EMPTY), "at least one head, row and key"),
        (lambda r: figures.head_atlas(r, channel="sum"), "channel: expected 'mass' or 'max', got 'sum'"),
        (lambda r: figures.head_atlas(r, scale="sqrt"), "scale: expected 'log' or 'linear', got 'sqrt'"),
        (lambda r: figures.head_atlas(r, layer_labels=["a", "b"]), "expected 1 labels, one a readout, got 2"),
        (lambda r: figures.head_map(r, 3), r"head: expected a number in 0\.\.2, got 3"),
        (lambda r: figures.head_map(r, -1), r"head: expected a number in 0\.\.2, got -1"),
        (lambda r: figures.head_map(r, 0.5), r"head: expected a number in 0\.\.2, got 0.5"),
        (lambda r: figures.head_map(BATCH), "leading axes"),
        (
            lambda r: figures.head_map(r, weights=np.ones((3, 4)), first_row=T - 2),
            f"a window inside {T} x {S}",
        ),
        (lambda r: figures.head_map(r, weights=np.ones((3, 4)), first_column=-1), "first_column"),
        (lambda r: figures.head_map(r, weights=np.ones(4)), r"weights: expected shape \(R, C\)"),
        (lambda r: figures.distance_profile(BATCH), "leading axes"),
        (
            lambda r: figures.distance_profile(r, heads=[0, 7]),
            r"heads: expected numbers in 0\.\.2, got \[7\]",
        ),
        (lambda r: figures.distance_profile(r, heads=[]), r"heads: expected numbers in 0\.\.2, got \[\]"),
        (lambda r: figures.entropy_profile(r, head_labels=["a"]), "expected 3 labels, one a head, got 1"),
        (lambda r: figures.entropy_profile(EMPTY), "expected at least one query"),
        (lambda r: figures.head_history([1], ["a"], [[1.0, 2.0]]), r"expected shape \(1, 1\)"),
        (lambda r: figures.head_history([], [], np.zeros((0, 0))), "no axis of length 0"),
    ],
)
def test_refusals_say_what_was_expected(causal, draw, message):
    with pytest.raises(ValueError, match=message):
        draw(causal[0])


def test_the_figures_take_what_a_trace_gives(causal):
    """The record is the one of `readouts`, whoever made it."""
    assert isinstance(causal[0], Readout)
    kept = dataclasses.replace(causal[0], block_rows=np.asarray(causal[0].block_rows))
    assert len(figures.head_atlas(kept, ax=panel()).images) == H
