"""Figure files: the same bytes each time, whole or not at all, nothing cut off, nothing left behind."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from regard.inspection import figures

RECORDS = [{"step": step, "loss": 1 / (step + 1), "accuracy": step / 29} for step in range(29)]
WORDS = ["The", "animal", "did", "not", "cross", "because", "it"]


def test_nothing_is_cut_off_and_little_is_wasted():
    heads = np.random.default_rng(5).dirichlet(np.ones(7), size=(3, 7))
    for drawing in (
        figures.attention_heatmap([[1.0]], title="a title far longer than a single cell is wide"),
        figures.head_grid(heads, query_labels=WORDS, key_labels=WORDS, title="Block 0"),
        figures.mask_picture(np.tri(3, 11, 5, dtype=bool), query_offset=5, title="causal " * 9),
        figures.training_curves({"first": RECORDS, "a much longer name": RECORDS[:7]}),
    ):
        drawing.figure.draw_without_rendering()
        ink = drawing.figure.get_tightbbox()
        width, height = drawing.figure.get_size_inches()
        margins = (ink.x0, ink.y0, width - ink.x1, height - ink.y1)
        assert min(margins) > 0.0
        assert max(margins) < 0.2
        if drawing.colorbar:  # as tall as the panels
            boxes, bar = [ax.get_position() for ax in drawing.axes], drawing.colorbar.ax.get_position()
            ends = max(box.y1 for box in boxes), min(box.y0 for box in boxes)
            assert (bar.y1, bar.y0) == pytest.approx(ends, abs=0.03)


PROGRAM = """
import hashlib, numpy as np
from regard.inspection import figures
drawing = figures.head_grid(np.full((2, 3, 5), 0.2))
for kind in ("png", "svg", "pdf"):
    print(hashlib.md5(figures.render(drawing, kind)).hexdigest())
"""


def test_another_process_writes_the_same_bytes_and_never_loads_pyplot(capsys):
    exec(PROGRAM, {})
    own = capsys.readouterr().out
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": seed}
    run = [sys.executable, "-c", PROGRAM + "import sys; assert 'matplotlib.pyplot' not in sys.modules"]
    assert subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout == own
    assert len(set(own.split())) == 3


def test_save_makes_folders_obeys_the_ending_and_takes_drawings_figures_and_strings(tmp_path):
    drawing = figures.position_table([[0.5, 1.0]])
    for ending, start in (("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")):
        path = tmp_path / "new" / ending / f"run.1.{ending}"
        assert figures.save(drawing, path) == path
        assert path.read_bytes().startswith(start)
        assert [file.name for file in path.parent.iterdir()] == [path.name]
    paths = [figures.save(drawing, str(tmp_path / "a.svg")), drawing.save(tmp_path / "b.svg")]
    paths.append(figures.save(drawing.figure, tmp_path / "c.svg"))
    assert len({path.read_bytes() for path in paths}) == 1
    (tmp_path / "plain").write_bytes(b"")
    assert paths[0].stat().st_mode == (tmp_path / "plain").stat().st_mode


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
