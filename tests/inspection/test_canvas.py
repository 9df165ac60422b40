"""Figure files: the same bytes each time, whole or not at all, nothing cut off, nothing left behind."""

import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from economy import mostly_slow
from regard.inspection import figures

RECORDS = [{"step": step, "loss": 1 / (step + 1), "accuracy": step / 29} for step in range(29)]
WORDS = ["The", "animal", "did", "not", "cross", "because", "it"]
KINDS = ("png", "svg", "pdf")


def weights(*shape):
    return np.random.default_rng(5).dirichlet(np.ones(shape[-1]), size=shape[:-1])


DRAWINGS = {
    "heatmap": lambda: figures.attention_heatmap(weights(5, 7), key_labels=WORDS, title="Encoder"),
    "one cell": lambda: figures.attention_heatmap(
        [[1.0]], title="a title far longer than a single cell is wide"
    ),
    "one row": lambda: figures.attention_heatmap(weights(1, 13)),
    "many rows": lambda: figures.attention_heatmap(weights(41, 2)),
    "heads": lambda: figures.head_grid(
        weights(5, 7, 7), query_labels=WORDS, key_labels=WORDS, title="Block 0"
    ),
    "positions": lambda: figures.position_table(weights(31, 17), title="Learned"),
    "similarity": lambda: figures.position_similarity(weights(11, 3)),
    "mask": lambda: figures.mask_picture(np.tri(3, 11, 5, dtype=bool), query_offset=5, title="causal " * 9),
    "one run": lambda: figures.training_curves(RECORDS, title="digits"),
    "two runs": lambda: figures.training_curves({"first": RECORDS, "a much longer name": RECORDS[:7]}),
    "scan": lambda: figures.scan_attention(np.eye(8), weights(16), patch_grid=(4, 4), predicted_label=3),
    "scans": lambda: figures.scan_attention_grid(
        np.ones((5, 6, 4)), weights(5, 6), patch_grid=(3, 2), predicted_labels=[1] * 5, true_labels=range(5)
    ),
}


@functools.cache
def draw(name):
    """One drawing for all tests that only read or save it."""
    return DRAWINGS[name]()


@pytest.mark.parametrize("name", mostly_slow(DRAWINGS, "heads", "one cell", "two runs"))
def test_nothing_is_cut_off_and_little_is_wasted(name):
    figure = draw(name).figure
    figure.draw_without_rendering()
    ink = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    margins = (ink.x0, ink.y0, width - ink.x1, height - ink.y1)
    assert min(margins) > 0.0
    assert max(margins) < 0.2


@pytest.mark.parametrize(
    ("shape", "inches"), [((5, 7), (7 * 0.42, 5 * 0.42)), ((23, 23), (4.6, 4.6)), ((1, 1), (1.2, 1.2))]
)
def test_panels_have_their_size_to_the_hair_after_few_draws(monkeypatch, shape, inches):
    draws = []
    whole = Figure.draw_without_rendering
    monkeypatch.setattr(Figure, "draw_without_rendering", lambda self: (draws.append(self), whole(self)))
    (ax,) = figures.attention_heatmap(weights(*shape), title="Layer 1").axes
    box = ax.get_window_extent()
    assert (box.width / ax.figure.dpi, box.height / ax.figure.dpi) == pytest.approx(inches, abs=0.005)
    assert len(draws) <= 4


@pytest.mark.parametrize("name", [name for name in DRAWINGS if "run" not in name and name != "mask"])
def test_colour_bars_are_as_tall_as_the_panels(name):
    drawing = draw(name)
    drawing.figure.draw_without_rendering()
    boxes = [ax.get_position() for ax in drawing.axes]
    bar = drawing.colorbar.ax.get_position()
    top, bottom = max(box.y1 for box in boxes), min(box.y0 for box in boxes)
    assert bar.y1 == pytest.approx(top, abs=0.03)
    assert bar.y0 == pytest.approx(bottom, abs=0.03)


@functools.cache
def render_thrice(name):
    """The files of every kind: of one drawing, of the same once more after them all, and of another."""
    one, other = draw(name), DRAWINGS[name]()
    return [{kind: figures.render(drawing, kind) for kind in KINDS} for drawing in (one, one, other)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", mostly_slow(["heatmap", "two runs", "mask"], "two runs"))
def test_the_same_input_gives_the_same_bytes(name, kind):
    first, again, other = (files[kind] for files in render_thrice(name))
    assert first == again
    assert first == other


@pytest.mark.slow
def test_another_process_writes_the_same_bytes_and_never_loads_pyplot():
    program = (
        "import hashlib, sys, numpy as np\n"
        "from regard.inspection import figures\n"
        "drawing = figures.head_grid(np.full((2, 3, 5), 0.2))\n"
        "for kind in ('png', 'svg', 'pdf'): print(hashlib.md5(figures.render(drawing, kind)).hexdigest())\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    own_seed = os.environ.get("PYTHONHASHSEED", "random")
    environment = {
        "PATH": "",
        "PYTHONPATH": ":".join(sys.path),
        "PYTHONHASHSEED": "2" if own_seed == "1" else "1",
        "JAX_PLATFORMS": "cpu",
    }
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    drawing = figures.head_grid(np.full((2, 3, 5), 0.2))
    digests = [hashlib.md5(figures.render(drawing, kind)).hexdigest() for kind in KINDS]
    assert run.stdout.split() == [*digests, "False"]
    assert len(set(digests)) == 3


def test_no_figure_is_left_with_pyplot():
    from matplotlib import pyplot

    for name in DRAWINGS:
        draw(name)
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize(
    ("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")]
)
def test_save_makes_folders_and_obeys_the_ending(tmp_path, ending, start):
    path = tmp_path / "new" / "deeper" / f"run.1.{ending}"
    assert figures.save(figures.position_table([[0.5]], ax=Figure().subplots()), path) == path
    assert path.read_bytes().startswith(start)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_save_takes_drawings_figures_and_strings(tmp_path):
    drawing = figures.position_table([[0.5, 1.0]])
    paths = [figures.save(drawing, str(tmp_path / "a.svg")), drawing.save(tmp_path / "b.svg")]
    paths.append(figures.save(drawing.figure, tmp_path / "c.svg"))
    assert len({path.read_bytes() for path in paths}) == 1


@pytest.mark.parametrize("name", ["plot.gif", "plot", "plot.", ".png"])
def test_unknown_endings_are_refused_before_anything_happens(tmp_path, name):
    with pytest.raises(ValueError, match=r"path: expected a name ending in \.png, \.svg, \.pdf, got '.*'"):
        figures.save(Figure(), tmp_path / "new" / name)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="kind: expected one of png, svg, pdf, got 'gif'"):
        figures.render(Figure(), "gif")


@pytest.mark.parametrize("step", ["write_bytes", "replace"])
def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / "plot.png"
    path.write_bytes(b"old")
    whole = getattr(Path, step)

    def fail(self, argument):
        if step == "write_bytes":
            whole(self, argument[:11])
        raise OSError("disk full")

    monkeypatch.setattr(Path, step, fail)
    with pytest.raises(OSError, match="disk full"):
        figures.save(Figure(), path)
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_saved_files_have_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    path = figures.save(Figure(), tmp_path / "plot.png")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_drawing_is_short_in_print_and_a_picture_in_a_notebook():
    assert repr(draw("heatmap")) == "Drawing(axes=1, images=1, texts=35, outlines=2, colorbar)"
    assert repr(draw("two runs")) == "Drawing(axes=2, lines=4, legend)"
    assert draw("one cell")._repr_png_() == figures.render(draw("one cell"), "png")


def test_a_sub_figure_is_saved_with_its_whole_figure():
    figure = Figure(figsize=(7, 5), layout="constrained")
    upper, lower = figure.subfigures(2)
    heads = figures.head_grid(weights(2, 3, 5), fig=upper)
    curves = figures.training_curves(RECORDS, fig=lower)
    assert heads.figure is curves.figure is figure
    assert figure.get_size_inches().tolist() == [7, 5]
