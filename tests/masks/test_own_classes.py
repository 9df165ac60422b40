"""A mask and a score of one's own: one class each, and everything that built-in ones can do."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from regard import attend, inspection, masks, scores
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


@record
class Named(Score):
    """A score that a file cannot hold."""

    fn: Any = static()

    def apply(self, scores, cells):
        return self.fn(scores) + cells.batch.astype(scores.dtype)


MARKED = np.arange(T) == 3
MASK, SCORE = Checkerboard(MARKED, 2), Cubic(np.asarray([0.1, -0.2], np.float32))


def draw(batch=2):
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.normal(size=(batch, H, T, D)), jnp.float32) for _ in range(3)]


def by_hand(query, key, value):
    q, k, v = (np.asarray(array, np.float64) for array in (query, key, value))
    logits = q @ np.swapaxes(k, -1, -2) / np.sqrt(D)
    logits = logits + np.asarray([0.1, -0.2])[:, None, None] * logits**3
    rows, columns = np.indices((T, T))
    weights = np.exp(logits) * ((columns - rows) % 2 == 0) + np.exp(logits) * (
        ((columns - rows) % 2 == 1) & MARKED[columns]
    )
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("backend", ["dense", "tiled"])
def test_they_are_attended_and_differentiated(backend):
    arrays = draw()

    def run(weight, mask):
        return attend(*arrays, mask=mask, score=Cubic(weight), backend=backend)

    np.testing.assert_allclose(run(SCORE.weight, MASK), by_hand(*arrays), atol=1e-5)
    joined = run(SCORE.weight, ~~MASK & masks.prefix(T))
    np.testing.assert_array_equal(joined, run(SCORE.weight, MASK))
    grad = jax.grad(lambda weight: run(weight, MASK).sum())(jnp.asarray(SCORE.weight))
    step = np.asarray([1e-2, 0], np.float32)
    slope = (run(SCORE.weight + step, MASK).sum() - run(SCORE.weight - step, MASK).sum()) / 2e-2
    np.testing.assert_allclose(grad[0], slope, rtol=2e-2, atol=1e-3)


def test_they_print_and_are_explained():
    assert repr(MASK) == f"checkerboard({MARKED.tolist()}, 2)"
    assert repr(SCORE).startswith("cubic([0.1")
    text = str(regard.explain(*draw(), mask=MASK & masks.causal(), score=SCORE))
    assert "checkerboard(" in text
    assert "partial" in text
    np.testing.assert_array_equal(MASK.tiles(T, query_block=1, key_block=1) > 0, MASK.dense(T))
    with pytest.raises(ValueError, match="query_offset"):
        attend(draw()[0][..., :3, :], *draw()[1:], mask=MASK)  # it may read positions


def test_a_score_of_ones_own_may_read_positions():
    query, key, value = draw()
    with pytest.raises(ValueError, match="query_offset"):
        attend(query[..., :3, :], key, value, score=SCORE)


def test_they_are_derived():
    arrays = draw(1)
    derivation = regard.derive(*arrays, mask=MASK, score=[scores.softcap(9.0), SCORE])
    assert derivation["cubic"].expression == "S_2^{nhij} = cubic(S_1^{nhij})"
    assert derivation["cubic"].words == f"{SCORE!r} of every score."
    output = attend(*arrays, mask=MASK, score=[scores.softcap(9.0), SCORE])
    np.testing.assert_allclose(derivation.output, output, atol=1e-6)


@pytest.mark.parametrize("keep", ["qk", "statistics"])
def test_they_are_saved_and_loaded(keep, tmp_path):
    arrays = draw()
    with inspection.capture(example=1) as trace:
        attend(*arrays, mask=MASK | masks.chunked(2), score=SCORE)
    call = trace.calls[0]
    back = inspection.load(trace.save(tmp_path / "own.regard", keep=keep)).calls[0]
    assert repr((back.mask, back.score)) == repr((call.mask, call.score))
    assert isinstance(back.mask.left, Checkerboard)
    np.testing.assert_array_equal(back.readout().entropy, call.readout().entropy)
    if keep == "qk":
        np.testing.assert_array_equal(back.window(heads=[1]), call.window(heads=[1]))
        np.testing.assert_array_equal(call.window(heads=[1])[0], call.window()[1])


def test_plain_numbers_and_numpy_numbers_are_kept_as_what_they_are_for(tmp_path):
    with inspection.capture() as trace:
        attend(*draw(1), mask=Checkerboard(MARKED, np.int64(2)), score=Cubic(jnp.float32(0.5)))
    call = dataclasses.replace(trace.calls[0], score=Cubic(0.5))
    trace = dataclasses.replace(trace, calls=(call,))
    back = inspection.load(trace.save(tmp_path / "own.regard", keep="qk")).calls[0]
    assert type(back.mask.period) is int
    assert (back.score.weight.dtype, back.score.weight.shape) == (np.float32, ())
    np.testing.assert_array_equal(back.window(), trace.calls[0].window())


def test_a_reader_that_lacks_the_class_is_told_its_name(tmp_path):
    with inspection.capture() as trace:
        attend(*draw(1), mask=MASK)
    path = trace.save(tmp_path / "own.regard")
    try:
        Checkerboard.__qualname__ = "Elsewhere"
        with pytest.raises(ValueError, match=r"a class defined before the file is read, got .*Checkerboard'"):
            inspection.load(path)
    finally:
        Checkerboard.__qualname__ = "Checkerboard"


def test_what_a_file_cannot_hold_is_noted(tmp_path):
    with inspection.capture(example=1) as trace:
        attend(*draw(), score=Named(jnp.tanh))
    path = trace.save(tmp_path / "own.regard", keep="qk")
    back = inspection.load(path)
    assert back.calls[0].score is None
    assert "of which a file can keep no more than the name" in back.notes[0]
    np.testing.assert_array_equal(back.calls[0].readout().lse, trace.calls[0].readout().lse)


LOOKED = []


@record
class Counted(Mask):
    """Keys at the distances of its data, and a note of every look."""

    distance: Any

    def keep(self, grid):
        LOOKED.append(self)
        return grid.query_position - grid.key_position == jnp.asarray(self.distance)


@pytest.mark.parametrize(
    "look", [lambda mask: mask.dense(5), lambda mask: mask.tiles(5, query_block=2, key_block=2)]
)
def test_other_data_run_the_program_that_a_mask_has(look):
    first = look(Counted(np.int32(1)))
    LOOKED.clear()
    assert not np.array_equal(look(Counted(np.int32(2))), first)
    assert not LOOKED
