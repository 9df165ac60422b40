"""The digits task: scikit-learn's 1,797 real 8x8 scans, and a classifier of their patches."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from regard.loading import name_extra
from regard.training.lazy_modules import figures, inspection, jax, jnp, models, np
from regard.training.losses import measure_labels
from regard.training.settings import FRACTION, Cadence, DataSeed, Goal, Optimization, Sizes, at_least
from regard.training.task import Batch, Example, Metrics, Picture, Task

if TYPE_CHECKING:
    from flax import nnx
    from jaxtyping import Array, Bool, Float, Int

NUM_CLASSES = 10
PATCHES = (4, 4)
NUM_SCANS = 12  # in a picture
BRIGHTEST = 16.0  # scikit-learn stores counts of dark pixels in 4x4 cells, 0 to 16
REACH = (0.15, 0.15, 0.1, 0.1, 0.5, 0.5)  # turn, shear (radians), stretch (2 axes), shift (pixels, 2 axes)


@dataclass(frozen=True)
class Digits(Task):
    """Recognise digits: 1,797 real 8x8 scans read as 16 patches; a classifier with attention pooling.

    A fifth of the scans, stratified, is held out. Expect 0.97 to 0.98 of them right after about 30 s on
    two CPU cores.

    Example: regard train digits --seed 1
    """

    name: ClassVar[str] = "digits"
    goal: ClassVar[Goal] = Goal("accuracy", 0.96)

    held_out_fraction: Annotated[float, FRACTION] = 0.2
    """Part of every class that is held out, in (0, 1)."""
    distortion: Annotated[float, at_least(0)] = 1.0
    """Random turns, stretches and moves of training scans: 1 is up to 0.15 radians, a tenth and half a pixel;
    0 leaves them alone."""
    data_seed: DataSeed = 0
    """Seed of the split into training and held-out scans."""
    model: Sizes = Sizes(d_model=64, num_heads=4, d_ff=128, num_layers=2, positions="learned")
    optimization: Optimization = Optimization(steps=800, batch_size=64, warmup_steps=50, weight_decay=0.1)
    cadence: Cadence = Cadence(evaluate_every=200)

    @property
    def config(self) -> models.TransformerConfig:
        count = PATCHES[0] * PATCHES[1]
        return models.TransformerConfig(max_length=count, input_width=64 // count, **asdict(self.model))

    def make_model(self, rngs: nnx.Rngs) -> models.Classifier:
        return models.Classifier(self.config, NUM_CLASSES, pooling="attention", rngs=rngs)

    @functools.cached_property
    def _data(self) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Scans and labels for training, and those held out."""
        scans, labels = load_scans()
        chosen = split_stratified(labels, self.held_out_fraction, self.data_seed)
        return (scans[~chosen], labels[~chosen]), (scans[chosen], labels[chosen])

    def make_held_out(self) -> Batch:
        return self._pack(*map(jnp.asarray, self._data[1]))

    def make_batch(self, rng: jax.Array, batch_size: int) -> Batch:
        scans, labels = map(jnp.asarray, self._data[0])
        row_rng, distortion_rng = jax.random.split(rng)
        rows = jax.random.randint(row_rng, (batch_size,), 0, len(labels))
        return self._pack(distort_scans(distortion_rng, scans[rows], self.distortion), labels[rows])

    def _pack(self, scans: jax.Array, labels: jax.Array) -> Batch:
        return {"inputs": cut_patches(scans, PATCHES), "labels": labels, "scans": scans}

    def measure(self, model: nnx.Module, batch: Batch) -> tuple[jax.Array, Metrics]:
        return measure_labels(self.read(model, batch), batch["labels"])

    def attention_calls(self) -> dict[str, tuple[int, int, Any]]:
        patches = self.config.max_length
        return {"self-attention": (patches, patches, None), "pooling": (1, patches, None)}

    def example(self) -> Example:
        """Choose the first held-out scan, in its patches, and the query that pools them."""
        batch = self.pick(0)
        rows, columns = PATCHES
        scan = np.asarray(batch["scans"][0])
        patches = inspection.Tokens(
            [f"{row},{column}" for row in range(rows) for column in range(columns)],
            patch_grid=PATCHES,
            picture=1 - scan / max(float(scan.max()), 1e-6),  # ink on paper
        )
        tokens = {rows * columns: patches, 1: inspection.Tokens(["prediction"])}
        title = f"digits: a scan of {int(batch['labels'][0])} in {rows} x {columns} patches"
        return Example(batch, tokens, title)

    def pictures(self, model: nnx.Module) -> Iterator[Picture]:
        """Draw held-out scans, mistakes last, with the patches that the pooled prediction reads."""
        batch = self.held_out
        logits, aux = self.read_with_weights(model, batch)
        predicted, labels = np.asarray(logits.argmax(-1)), np.asarray(batch["labels"])
        wrong, right = np.flatnonzero(predicted != labels), np.flatnonzero(predicted == labels)
        # Mistakes fill at most a third: the picture shows what is usual as well as what is hard.
        mistakes = wrong[: NUM_SCANS // 3]
        rows = np.concatenate([right[: NUM_SCANS - len(mistakes)], mistakes])
        scans = figures.scan_attention_grid(
            np.asarray(batch["scans"])[rows],
            np.asarray(aux["pooling"]["weights"])[rows, :, 0].mean(1),
            patch_grid=PATCHES,
            predicted_labels=predicted[rows].tolist(),
            true_labels=labels[rows].tolist(),
            title=f"digits: attention of the pooled prediction ({len(wrong)} of {len(labels)} wrong)",
        )
        yield "scans", scans
        patches = np.asarray(aux["blocks"][-1]["weights"])[rows[0]]
        title = "digits: patches of the first scan, last block"
        yield "attention-heads", figures.head_grid(patches, title=title)


def load_scans() -> tuple[Float[np.ndarray, "N 8 8"], Int[np.ndarray, " N"]]:
    """Read the scans that scikit-learn ships (no download): pixels in [0, 1] and labels 0 to 9.

    Reference:
        E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
        Repository, 1998 (its test set).
    """
    with name_extra("the digits task", "train"):
        from sklearn.datasets import load_digits
    digits: Any = load_digits()
    return (digits.images / BRIGHTEST).astype(np.float32), digits.target.astype(np.int32)


def split_stratified(labels: Int[np.ndarray, " N"], fraction: float, seed: int) -> Bool[np.ndarray, " N"]:
    """Hold out the same fraction of every class, at random: True is held out.

    It is rounded to whole examples, of which at least one is held out and one is not.
    """
    generator = np.random.default_rng(seed)
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = min(max(round(fraction * len(members)), 1), len(members) - 1)
        held_out[generator.permutation(members)[:count]] = True
    return held_out


def distort_scans(rng: jax.Array, scans: Float[Array, "B R C"], strength: float) -> Float[Array, "B R C"]:
    """Turn, shear, stretch and move each scan a little, at random; what enters is background, 0.

    A pixel at x (from the centre) shows the scan at A x + b, read bilinearly, with A near the identity. A
    strength of 1 allows up to 0.15 radians of turn and of shear, a tenth of stretch and half a pixel of
    shift; 0 leaves scans alone.
    """
    draws = jax.random.uniform(rng, (scans.shape[0], 6), minval=-strength, maxval=strength)
    return jax.vmap(_distort)(scans, draws * jnp.array(REACH)[None])


def _distort(scan: Float[Array, "R C"], amounts: Float[Array, " 6"]) -> Float[Array, "R C"]:
    turn, shear, stretch_down, stretch_across, down, across = amounts
    middle = [(size - 1) / 2 for size in scan.shape]
    y, x = jnp.meshgrid(*(jnp.arange(2 * half + 1) - half for half in middle), indexing="ij")
    rows = (1 + stretch_down) * (jnp.cos(turn) * y - jnp.sin(turn) * x) + down
    columns = (1 + stretch_across) * (jnp.sin(turn) * y + jnp.cos(turn) * x) + shear * y + across
    return jax.scipy.ndimage.map_coordinates(scan, [rows + middle[0], columns + middle[1]], order=1)


def cut_patches(scans: Float[Array, "B R C"], grid: tuple[int, int]) -> Float[Array, "B P W"]:
    """Cut each scan into a grid of equal patches, row by row, each flattened row by row.

    Example:
        >>> cut_patches(np.arange(16.0).reshape(1, 4, 4), (2, 2))[0, 1].tolist()
        [2.0, 3.0, 6.0, 7.0]
    """
    batch, height, width = scans.shape
    rows, columns = grid
    blocks = scans.reshape(batch, rows, height // rows, columns, width // columns)
    return blocks.transpose(0, 1, 3, 2, 4).reshape(batch, rows * columns, -1)
