"""Tasks: data by hand, padding that is masked, held-out data that training never draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard.cli.overview import describe_attention
from regard.training import settings, tasks
from regard.training.task import HELD_OUT, TRAINING, make_stream
from regard.training.tasks import digits
from small_runs import SIZES

SMALL = {
    "threshold": tasks.Threshold(vocab_size=13, length=5, threshold=29, held_out_size=17, model=SIZES),
    "copy": tasks.Copy(vocab_size=11, length=5, held_out_size=17, model=SIZES),
    "reverse": tasks.Reverse(vocab_size=11, min_length=2, max_length=7, held_out_size=17, model=SIZES),
    "digits": tasks.Digits(model=SIZES, distortion=0.0),
}


@functools.cache
def compile_draw(task):
    return jax.jit(task.make_batch, static_argnums=1)


@pytest.fixture(params=SMALL)
def task(request):
    return SMALL[request.param]


def draw(task, seed=0, size=23):
    return jax.device_get(compile_draw(task)(jax.random.key(seed), size))


def test_training_never_draws_the_held_out_stream():
    """The same seed on both sides: long sequences would repeat if the streams met."""
    task = tasks.Copy(vocab_size=97, length=11, held_out_size=53, data_seed=1, model=SIZES)
    held_out = {tuple(row) for row in np.asarray(task.held_out["inputs"]).tolist()}
    for step in range(29):
        assert not held_out & draw_raw(task, jax.random.fold_in(make_stream(1, TRAINING), step))
    assert held_out == draw_raw(task, make_stream(1, HELD_OUT)), "of the data's own seed"
    assert not held_out & draw_raw(task, make_stream(0, HELD_OUT))
    assert held_out != draw_raw(task, make_stream(2**32 + 1, HELD_OUT)), "not that of its last 32 bits"


def draw_raw(task, rng):
    return {tuple(row) for row in np.asarray(compile_draw(task)(rng, task.held_out_size)["inputs"]).tolist()}


def test_threshold_labels_are_sums():
    batch = draw(SMALL["threshold"], size=101)
    tokens = batch["inputs"]
    assert tokens.shape == (101, 5)
    assert (tokens.min(), tokens.max()) == (0, 12)
    assert np.array_equal(batch["labels"], tokens.sum(1) > 29)
    assert 0 < np.mean(batch["labels"]) < 1


def test_copy_moves_by_one():
    task = SMALL["copy"]
    inputs, targets = (draw(task)[name] for name in ("inputs", "targets"))
    assert inputs.shape == targets.shape == (23, 6)
    assert (inputs[:, 0] == task.start_token).all()
    assert (targets[:, -1] == task.end_token).all()
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    assert inputs[:, 1:].max() < task.start_token < task.end_token


def test_reverse_is_backwards_then_an_end_mark_then_padding():
    task = SMALL["reverse"]
    batch = draw(task, size=67)
    assert set(batch["lengths"].tolist()) == {2, 3, 4, 5, 6, 7}
    for source, length, target in zip(batch["source"], batch["lengths"], batch["target"], strict=True):
        tokens = source[:length].tolist()
        assert max(tokens) < 11
        assert source[length:].tolist() == [task.pad_token] * (7 - length)
        assert target.tolist() == [*tokens[::-1], task.end_token] + [task.pad_token] * (7 - length)


def test_reverse_is_given_the_lengths_and_the_answer_so_far():
    task, seen = SMALL["reverse"], {}
    batch = draw(task)
    task.read(lambda *inputs, **options: seen.update(options, inputs=inputs), batch)
    assert seen["source_lengths"].tolist() == batch["lengths"].tolist()
    assert seen["target_lengths"].tolist() == (batch["lengths"] + 1).tolist()
    source, given = seen["inputs"]
    assert np.array_equal(source, batch["source"])
    assert (np.asarray(given)[:, 0] == task.start_token).all()
    assert np.array_equal(np.asarray(given)[:, 1:], batch["target"][:, :-1])


def test_a_perfect_model_scores_exactly_one_and_one_wrong_token_is_seen():
    task = SMALL["reverse"]
    batch = draw(task)
    measure = jax.jit(lambda logits: task.measure(lambda *inputs, **options: logits, batch))
    perfect = 50 * np.eye(14, dtype=np.float32)[batch["target"]]
    loss, measured = measure(perfect)
    assert float(loss) < 1e-6
    assert measured == {"accuracy": 1.0, "token_accuracy": 1.0}
    # Wrong in the padding: counts for nothing. Wrong in one real token: one sequence of 23.
    row, tokens = int(batch["lengths"].argmin()), int((batch["lengths"] + 1).sum())
    perfect[row, -1] = 50 * np.eye(14)[0]
    assert measure(perfect)[1]["accuracy"] == 1.0
    perfect[row, 0] = 50 * np.eye(14)[task.end_token]
    loss, measured = measure(perfect)
    assert float(measured["accuracy"]) == pytest.approx(22 / 23)
    assert float(measured["token_accuracy"]) == pytest.approx(1 - 1 / tokens)
    assert float(loss) == pytest.approx(50 / tokens, rel=1e-3)


def test_reverse_is_judged_by_what_it_generates(monkeypatch):
    """Teacher forcing shows the model the right answer so far; the evaluation must not."""
    task = SMALL["reverse"]
    batch, model = draw(task), lambda *inputs, **options: jnp.zeros((23, 8, 14))
    for answer, accuracy in ((batch["target"], 1.0), (np.zeros_like(batch["target"]), 0.0)):
        monkeypatch.setattr(tasks.Reverse, "generate", lambda *_, answer=answer: jnp.asarray(answer))
        assert task.evaluate(model, batch)["accuracy"] == accuracy
    monkeypatch.setattr(tasks.Reverse, "generate", lambda _, __, batch: jnp.flip(batch["target"], 1))
    _, right, written = (words.split()[1:] for words in task.write_sample(model).split("\n")[:3])
    assert written == right[::-1] != right


def test_attention_calls_are_of_batches_larger_than_the_held_out_data():
    task = tasks.Reverse(held_out_size=5, optimization=settings.Optimization(batch_size=7))
    assert len(list(describe_attention(task))) == 3


def test_digits_are_split_by_class_without_overlap():
    pixels, labels = digits.load_scans()
    assert pixels.shape == (1797, 8, 8)
    assert (pixels.min(), pixels.max(), pixels.dtype) == (0, 1, np.float32)
    held_out = digits.split_stratified(labels, 0.2, seed=0)
    assert held_out.sum() == 359
    for label in range(10):
        assert abs(held_out[labels == label].mean() - 0.2) < 0.5 / (labels == label).sum() + 1e-9
    assert not np.array_equal(held_out, digits.split_stratified(labels, 0.2, seed=1))
    held_out = digits.split_stratified(labels, 0.001, seed=0)
    assert set(labels[held_out]) == set(labels[~held_out]) == set(range(10))


def test_digits_train_on_no_held_out_scan():
    task = SMALL["digits"]
    assert len(task.held_out["labels"]) == 359
    held_out = {scan.tobytes() for scan in np.asarray(task.held_out["scans"])}
    pixels, labels = digits.load_scans()
    drawn = draw(task, size=20_000)
    seen = {scan.tobytes() for scan in drawn["scans"]}
    # 1,438 training scans, each drawn with probability 1 - (1 - 1/1438)^20000, which is 0.999999.
    assert len(seen) >= 1430
    assert not held_out & seen
    by_scan = {scan.tobytes(): label for scan, label in zip(pixels, labels, strict=True)}
    assert [by_scan[scan.tobytes()] for scan in drawn["scans"]] == drawn["labels"].tolist()


def test_distortions_are_those_computed_by_hand():
    """A shift moves the window, so the scan the other way; turn and shear are about the centre."""
    scan = np.float32([[0, 0, 0], [0, 0, 0], [3, 5, 7]])
    table = {
        (0, 0, 0, 0, 0, 0): scan.tolist(),
        (0, 0, 0, 0, 1, 0): [[0, 0, 0], [3, 5, 7], [0, 0, 0]],
        (0, 0, 0, 0, 0, -1): [[0, 0, 0], [0, 0, 0], [0, 3, 5]],
        (0, 0, 0, 0, 0.5, 0): [[0, 0, 0], [1.5, 2.5, 3.5], [1.5, 2.5, 3.5]],
        (np.pi / 2, 0, 0, 0, 0, 0): [[3, 0, 0], [5, 0, 0], [7, 0, 0]],
        (0, 1, 0, 0, 0, 0): [[0, 0, 0], [0, 0, 0], [5, 7, 0]],
    }
    distort = jax.jit(jax.vmap(digits._distort, (None, 0)))
    np.testing.assert_allclose(distort(scan, np.float32(list(table))), list(table.values()), atol=1e-5)
