"""Tasks: data by hand, padding that is masked, held-out data that training never draws."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from regard.cli.overview import describe_attention
from regard.training import settings, tasks
from regard.training.task import HELD_OUT, TRAINING, make_stream
from regard.training.tasks import digits
from small_runs import (
    SIZES,
)

SMALL = {
    "threshold": tasks.Threshold(vocab_size=13, length=5, threshold=29, held_out_size=17, model=SIZES),
    "copy": tasks.Copy(vocab_size=11, length=5, held_out_size=17, model=SIZES),
    "reverse": tasks.Reverse(vocab_size=11, min_length=2, max_length=7, held_out_size=17, model=SIZES),
    "digits": tasks.Digits(model=SIZES, distortion=0.0),
}


@functools.cache
def small(name):
    return SMALL[name]


@functools.cache
def compile_draw(task):
    return jax.jit(task.make_batch, static_argnums=1)


@pytest.fixture(params=SMALL)
def task(request):
    return small(request.param)


@functools.cache
def make_model(task):
    model = task.make_model(nnx.Rngs(0))
    model.eval()
    return model


def draw(task, seed=0, size=23):
    return compile_draw(task)(jax.random.key(seed), size)


def test_a_batch_is_a_function_of_its_key(task):
    once, again, other = draw(task, 3), draw(task, 3), draw(task, 5)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(a, b), once, again)))
    assert not all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(a, b), once, other)))
    assert {len(leaf) for leaf in jax.tree.leaves(once)} == {23}


@pytest.mark.slow
def test_held_out_data_follow_the_data_seed_alone(task):
    same = dataclasses.replace(task)
    other = dataclasses.replace(task, data_seed=1)
    names = list(task.held_out)
    assert all(np.array_equal(task.held_out[name], same.held_out[name]) for name in names)
    assert not all(np.array_equal(task.held_out[name], other.held_out[name]) for name in names)


@pytest.mark.parametrize("seed", [0, 1])
def test_training_never_draws_the_held_out_stream(seed):
    """The same seed on both sides: long sequences would repeat if the streams met."""
    task = tasks.Copy(vocab_size=97, length=11, held_out_size=53, data_seed=seed, model=SIZES)
    held_out = {tuple(row) for row in np.asarray(task.held_out["inputs"]).tolist()}
    stream = make_stream(seed, TRAINING)
    for step in range(29):
        batch = draw_raw(task, jax.random.fold_in(stream, step))
        assert not held_out & {tuple(row) for row in np.asarray(batch["inputs"]).tolist()}
    leaked = draw_raw(task, make_stream(seed, HELD_OUT))
    assert held_out == {tuple(row) for row in np.asarray(leaked["inputs"]).tolist()}


def draw_raw(task, rng):
    return compile_draw(task)(rng, task.held_out_size)


def test_threshold_labels_are_sums():
    batch = draw(small("threshold"), size=101)
    tokens = np.asarray(batch["inputs"])
    assert tokens.shape == (101, 5)
    assert (tokens.min(), tokens.max()) == (0, 12)
    assert np.array_equal(batch["labels"], tokens.sum(1) > 29)
    assert 0 < np.mean(batch["labels"]) < 1


def test_copy_moves_by_one():
    task = small("copy")
    batch = draw(task)
    inputs, targets = np.asarray(batch["inputs"]), np.asarray(batch["targets"])
    assert inputs.shape == targets.shape == (23, 6)
    assert (inputs[:, 0] == task.start_token).all()
    assert (targets[:, -1] == task.end_token).all()
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    assert inputs[:, 1:].max() < task.start_token < task.end_token


def test_reverse_is_backwards_then_an_end_mark_then_padding():
    task = small("reverse")
    batch = {name: np.asarray(values) for name, values in draw(task, size=67).items()}
    assert set(batch["lengths"].tolist()) == {2, 3, 4, 5, 6, 7}
    for source, length, target in zip(batch["source"], batch["lengths"], batch["target"], strict=True):
        tokens = source[:length].tolist()
        assert max(tokens) < 11
        assert source[length:].tolist() == [task.pad_token] * (7 - length)
        assert target.tolist() == [*tokens[::-1], task.end_token] + [task.pad_token] * (7 - length)


@pytest.mark.slow
def test_padding_changes_nothing():
    """Whatever token stands in the padding, loss, gradients and generated answers are the same."""
    task = small("reverse")
    batch = draw(task)
    padding = jnp.arange(7)[None] >= batch["lengths"][:, None]
    noisy = batch | {"source": jnp.where(padding, jnp.int32(3), batch["source"])}
    assert not np.array_equal(noisy["source"], batch["source"])
    model = make_model(task)

    @jax.jit
    def look(batch):
        return task.measure(model, batch), task.generate(model, batch)

    once, again = look(batch), look(noisy)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, once, again)))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("threshold", (23, 2)), ("copy", (23, 6, 13)), ("reverse", (23, 8, 14)), ("digits", (23, 10))],
)
def test_uniform_predictions_cost_the_logarithm_of_the_vocabulary(name, shape):
    loss, _ = small(name).measure(lambda *inputs, **options: jnp.zeros(shape), draw(small(name)))
    assert float(loss) == pytest.approx(np.log(shape[-1]), rel=1e-6)


def test_a_perfect_model_scores_exactly_one_and_one_wrong_token_is_seen():
    task = small("reverse")
    batch = draw(task)
    perfect = jax.nn.one_hot(batch["target"], 14) * 50
    loss, measured = task.measure(lambda *inputs, **options: perfect, batch)
    assert float(loss) < 1e-6
    assert measured == {"accuracy": 1.0, "token_accuracy": 1.0}
    # Wrong in the padding: counts for nothing. Wrong in one real token: one sequence of 23.
    row = int(jnp.argmin(batch["lengths"]))
    padding = perfect.at[row, -1].set(0.0).at[row, -1, 0].set(50.0)
    assert task.measure(lambda *inputs, **options: padding, batch)[1]["accuracy"] == 1.0
    real = perfect.at[row, 0].set(0.0).at[row, 0, task.end_token].set(50.0)
    loss, measured = task.measure(lambda *inputs, **options: real, batch)
    tokens = int((batch["lengths"] + 1).sum())
    assert float(measured["accuracy"]) == pytest.approx(22 / 23)
    assert float(measured["token_accuracy"]) == pytest.approx(1 - 1 / tokens)
    assert float(loss) == pytest.approx(50 / tokens, rel=1e-3)


@pytest.mark.slow
def test_reverse_is_judged_by_what_it_generates(monkeypatch):
    """Teacher forcing shows the model the right answer so far; the evaluation must not."""
    task = small("reverse")
    batch = draw(task)
    model = make_model(task)
    monkeypatch.setattr(tasks.Reverse, "generate", lambda self, model, batch: batch["target"])
    assert task.evaluate(model, batch)["accuracy"] == 1.0
    monkeypatch.setattr(tasks.Reverse, "generate", lambda self, model, batch: jnp.zeros_like(batch["target"]))
    assert task.evaluate(model, batch)["accuracy"] == 0.0


def test_metrics_come_with_their_loss(task):
    model = make_model(task)
    metrics = jax.jit(lambda batch: task.evaluate(model, batch))(draw(task))
    assert {"loss", task.goal.metric} <= set(metrics)
    assert all(np.isfinite(float(value)) and value.dtype == jnp.float32 for value in metrics.values())


def test_attention_calls_say_what_the_model_does(task):
    """The shapes announced before training are those of the weights that the model returns."""
    batch, model = draw(task), make_model(task)
    calls = task.attention_calls()
    if task.name == "reverse":
        _, aux = task.read(model, batch, aux=("weights",))
        found = {
            "encoder self-attention": aux["encoder"][0]["weights"],
            "decoder self-attention": aux["decoder"][0]["self"]["weights"],
            "cross-attention": aux["decoder"][0]["cross"]["weights"],
        }
    else:
        _, aux = model(batch["inputs"], aux=("weights",))
        found = {"self-attention": aux["blocks"][0]["weights"]}
        found |= {"pooling": aux["pooling"]["weights"]} if "pooling" in aux else {}
    assert {name: weights.shape[-2:] for name, weights in found.items()} == {
        name: (queries, keys) for name, (queries, keys, _) in calls.items()
    }


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
        share = held_out[labels == label].mean()
        assert abs(share - 0.2) < 0.5 / (labels == label).sum() + 1e-9
    assert not np.array_equal(held_out, digits.split_stratified(labels, 0.2, seed=1))


@pytest.mark.parametrize("fraction", [0.001, 0.998])
def test_neither_side_of_the_digits_is_empty(fraction):
    _, labels = digits.load_scans()
    held_out = digits.split_stratified(labels, fraction, seed=0)
    assert set(labels[held_out]) == set(labels[~held_out]) == set(range(10))


def test_digits_train_on_no_held_out_scan():
    task = small("digits")
    assert len(task.held_out["labels"]) == 359
    held_out = {scan.tobytes() for scan in np.asarray(task.held_out["scans"])}
    pixels, labels = digits.load_scans()
    drawn = draw(task, size=20_000)
    seen = {scan.tobytes() for scan in np.asarray(drawn["scans"])}
    # 1,438 training scans, each drawn with probability 1 - (1 - 1/1438)^20000, which is 0.999999.
    assert len(seen) >= 1430
    assert not held_out & seen
    by_scan = {scan.tobytes(): label for scan, label in zip(pixels, labels, strict=True)}
    for scan, label in list(zip(np.asarray(drawn["scans"]), np.asarray(drawn["labels"]), strict=True))[:100]:
        assert by_scan[scan.tobytes()] == label


def test_a_distortion_of_zero_changes_nothing_and_one_changes_little():
    pixels, labels = (values[:101] for values in digits.load_scans())
    rng = jax.random.key(0)
    assert np.array_equal(digits.distort_scans(rng, pixels, 0.0), pixels)
    distorted = np.asarray(digits.distort_scans(rng, pixels, 1.0))
    assert (distorted.min(), distorted.max() <= 1.0) == (0.0, True)
    # Still the same digits: most are nearest to an undistorted scan with their own label.
    flat, original = distorted.reshape(101, 64), pixels.reshape(101, 64)
    nearest = ((flat[:, None] - original[None]) ** 2).sum(-1).argmin(1)
    assert (labels[nearest] == labels).mean() > 0.9
    assert not np.array_equal(distorted[0], digits.distort_scans(jax.random.key(1), pixels, 1.0)[0])


@pytest.mark.parametrize(
    ("amounts", "expected"),
    [
        ((0, 0, 0, 0, 1, 0), [[0, 0, 0], [3, 5, 7], [0, 0, 0]]),
        ((0, 0, 0, 0, 0, -1), [[0, 0, 0], [0, 0, 0], [0, 3, 5]]),
        ((0, 0, 0, 0, 0.5, 0), [[0, 0, 0], [1.5, 2.5, 3.5], [1.5, 2.5, 3.5]]),
        ((np.pi / 2, 0, 0, 0, 0, 0), [[3, 0, 0], [5, 0, 0], [7, 0, 0]]),
        ((0, 1, 0, 0, 0, 0), [[0, 0, 0], [0, 0, 0], [5, 7, 0]]),
    ],
    ids=str,
)
def test_distortions_are_those_computed_by_hand(amounts, expected):
    """A shift moves the window, so the scan the other way; turn and shear are about the centre."""
    scan = jnp.array([[0.0, 0, 0], [0, 0, 0], [3, 5, 7]])
    np.testing.assert_allclose(digits._distort(scan, jnp.array(amounts, jnp.float32)), expected, atol=1e-5)


def test_patches_are_cut_row_by_row():
    image = np.arange(64.0, dtype=np.float32).reshape(1, 8, 8)
    patches = np.asarray(digits.cut_patches(jnp.asarray(image), (4, 4)))
    assert patches.shape == (1, 16, 4)
    assert patches[0, 0].tolist() == [0, 1, 8, 9]
    assert patches[0, 1].tolist() == [2, 3, 10, 11]
    assert patches[0, 4].tolist() == [16, 17, 24, 25]
    assert patches[0, 15].tolist() == [54, 55, 62, 63]
