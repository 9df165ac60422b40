"""A mask and a score of one's own: one class each, and everything that built-in ones can do."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import regard
from mesh_cases import draw
from regard import attend, inspection, masks
from regard.inspection.traces.codec import Reader, Writer
from regard.masks import Mask
from regard.records import record, static
from regard.scores import Score

H, T, D = 2, 7, 5


@record
class Checkerboard(Mask):
    """Keys at an even distance, and those of marked positions."""

    marked: Any
    period: int = static()

    def keep(self, grid):
        far = (grid.key_position - grid.query_position) % self.period == 0
        return far | jnp.asarray(self.marked)[grid.key_position % T]


@record
class Cubic(Score):
    """Scores with their cube, weighed by head."""

    weight: Any

    def apply(self, scores, cells):
        return scores + cells.per_head(jnp.asarray(self.weight).astype(scores.dtype)) * scores**3


MARKED = np.arange(T) == 3
ARRAYS = draw(*[(2, H, T, D)] * 3, seed=3)
MASK, SCORE = Checkerboard(MARKED, 2), Cubic(np.asarray([0.1, -0.2], np.float32))


def test_they_print_and_are_explained():
    assert repr(MASK) == f"checkerboard({MARKED.tolist()}, 2)"
    assert repr(SCORE).startswith("cubic([0.1")
    text = str(regard.explain(*ARRAYS, mask=MASK & masks.causal(), score=SCORE))
    assert "checkerboard(" in text
    assert "partial" in text
    np.testing.assert_array_equal(MASK.tiles(T, query_block=1, key_block=1) > 0, MASK.dense(T))
    with pytest.raises(ValueError, match="query_offset"):
        attend(ARRAYS[0][..., :3, :], *ARRAYS[1:], mask=MASK)  # it may read positions


def test_a_score_of_ones_own_may_read_positions():
    with pytest.raises(ValueError, match="query_offset"):
        attend(ARRAYS[0][..., :3, :], *ARRAYS[1:], score=SCORE)


def test_they_are_saved_and_loaded(tmp_path):
    with inspection.capture(example=1) as trace:
        attend(*ARRAYS, mask=MASK | masks.chunked(2), score=SCORE)
    call, path = trace.calls[0], trace.save(tmp_path / "own.regard", keep="qk")
    back = inspection.load(path).calls[0]
    assert repr((back.mask, back.score)) == repr((call.mask, call.score))
    assert isinstance(back.mask.left, Checkerboard)
    np.testing.assert_array_equal(back.window(heads=[1]), call.window(heads=[1]))
    np.testing.assert_array_equal(call.window(heads=[1])[0], call.window()[1])
    # A reader that lacks the class is told its name.
    try:
        Checkerboard.__qualname__ = "Elsewhere"
        with pytest.raises(ValueError, match=r"a class defined before the file is read, got .*Checkerboard'"):
            inspection.load(path)
    finally:
        Checkerboard.__qualname__ = "Checkerboard"


def test_plain_numbers_and_numpy_numbers_are_kept_as_what_they_are_for():
    mask, writer = Checkerboard(MARKED, np.int64(2)), Writer()
    data = json.loads(json.dumps([writer.write("mask", mask), writer.write("score", Cubic(0.5))]))
    reader = Reader(writer.arrays)
    back, score = reader.read("mask", data[0], Mask), reader.read("score", data[1], Score)
    assert type(back.period) is int
    assert (score.weight.dtype, score.weight.shape, float(score.weight)) == (np.float32, (), 0.5)


LOOKED = []


@record
class Counted(Mask):
    """Keys at the distances of its data, and a note of every look."""

    distance: Any

    def keep(self, grid):
        LOOKED.append(self)
        return grid.query_position - grid.key_position == jnp.asarray(self.distance)


@pytest.mark.parametrize("look", [lambda m: m.dense(5), lambda m: m.tiles(5, query_block=2, key_block=2)])
def test_other_data_run_the_program_that_a_mask_has(look):
    first = look(Counted(np.int32(1)))
    LOOKED.clear()
    assert not np.array_equal(look(Counted(np.int32(2))), first)
    assert not LOOKED
