"""The tasks: threshold, copy, reverse, digits, and text; `make_task` finds the one of a preset.

Accuracy always counts whole answers (a label, or a sequence right in every token); `token_accuracy` counts
tokens.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from regard import masks
from regard.models import Classifier, EncoderDecoder, TransformerConfig, generate
from regard.training import presets
from regard.training.compilation import run_once
from regard.training.language import TextTask
from regard.training.scans import cut_patches, distort_scans, load_scans, split_stratified
from regard.training.task import HELD_OUT, Batch, Metrics, Task, make_stream
from regard.training.task import TRAINING as TRAINING


def _draw_held_out(task: Task, size: int) -> Batch:
    """Draws a task's held-out batch from the stream that training never touches."""
    rng = make_stream(task.preset.data_seed, HELD_OUT)
    return run_once(lambda rng: task.make_batch(rng, size), rng)


def _configure(
    sizes: presets.Sizes, max_length: int, *, vocab_size: int | None = None, input_width: int | None = None
) -> TransformerConfig:
    """The transformer's configuration from a preset's sizes."""
    return TransformerConfig(
        d_model=sizes.d_model,
        num_heads=sizes.num_heads,
        d_ff=sizes.d_ff,
        num_layers=sizes.num_layers,
        dropout_rate=sizes.dropout_rate,
        positions=sizes.positions,
        norm=sizes.norm,
        max_length=max_length,
        vocab_size=vocab_size,
        input_width=input_width,
    )


def _measure_labels(logits: Float[Array, "B C"], labels: Int[Array, " B"]) -> tuple[jax.Array, Metrics]:
    """Cross-entropy in nats and accuracy of one label per example."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, {"accuracy": _measure_share(logits.argmax(-1) == labels)}


def _measure_tokens(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], real: Bool[Array, "B T"]
) -> tuple[jax.Array, Metrics]:
    """Cross-entropy in nats per real token, and accuracy by sequence and by token; padding counts nowhere."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    right = logits.argmax(-1) == targets
    return jnp.mean(losses, where=real), _count_right(right, real)


def _count_right(right: Bool[Array, "B T"], real: Bool[Array, "B T"]) -> Metrics:
    """Accuracy by sequence and by token."""
    return {
        "accuracy": _measure_share((right | ~real).all(-1)),
        "token_accuracy": jnp.mean(right, where=real, dtype=jnp.float32),
    }


def _measure_share(right: Bool[Array, " B"]) -> jax.Array:
    """The share of right answers; exactly 1 when all are, where a mean times 1/n may round below."""
    return jnp.where(right.all(), 1.0, jnp.mean(right, dtype=jnp.float32))


class ThresholdTask(Task[presets.Threshold]):
    """Label 1 when the sum of the tokens exceeds the threshold."""

    @property
    def config(self) -> TransformerConfig:
        return _configure(self.preset.model, self.preset.length, vocab_size=self.preset.vocab_size)

    def make_model(self, rngs: nnx.Rngs) -> Classifier:
        return Classifier(self.config, 2, pooling="mean", rngs=rngs)

    def make_held_out(self) -> Batch:
        return _draw_held_out(self, self.preset.held_out_size)

    def make_batch(self, rng: jax.Array, batch_size: int) -> Batch:
        tokens = jax.random.randint(rng, (batch_size, self.preset.length), 0, self.preset.vocab_size)
        return {"inputs": tokens, "labels": (tokens.sum(-1) > self.preset.threshold).astype(jnp.int32)}

    def measure(self, model: nnx.Module, batch: Batch) -> tuple[jax.Array, Metrics]:
        return _measure_labels(model(batch["inputs"]), batch["labels"])


class CopyTask(Task[presets.Copy]):
    """Inputs [SOS, tokens], targets [tokens, EOS], one prediction per position."""

    @property
    def start_token(self) -> int:
        return self.preset.vocab_size

    @property
    def end_token(self) -> int:
        return self.preset.vocab_size + 1

    @property
    def config(self) -> TransformerConfig:
        return _configure(self.preset.model, self.preset.length + 1, vocab_size=self.preset.vocab_size + 2)

    def make_model(self, rngs: nnx.Rngs) -> Classifier:
        return Classifier(self.config, self.preset.vocab_size + 2, pooling=None, rngs=rngs)

    def make_held_out(self) -> Batch:
        return _draw_held_out(self, self.preset.held_out_size)

    def make_batch(self, rng: jax.Array, batch_size: int) -> Batch:
        tokens = jax.random.randint(rng, (batch_size, self.preset.length), 0, self.preset.vocab_size)
        return {
            "inputs": jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=self.start_token),
            "targets": jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=self.end_token),
        }

    def measure(self, model: nnx.Module, batch: Batch) -> tuple[jax.Array, Metrics]:
        targets = batch["targets"]
        return _measure_tokens(model(batch["inputs"]), targets, jnp.ones(targets.shape, bool))


class ReverseTask(Task[presets.Reverse]):
    """Sources of many lengths, padded; targets are the source backwards and an end mark."""

    @property
    def start_token(self) -> int:
        return self.preset.vocab_size

    @property
    def end_token(self) -> int:
        return self.preset.vocab_size + 1

    @property
    def pad_token(self) -> int:
        return self.preset.vocab_size + 2

    @property
    def config(self) -> TransformerConfig:
        return _configure(
            self.preset.model, self.preset.max_length + 1, vocab_size=self.preset.vocab_size + 3
        )

    def make_model(self, rngs: nnx.Rngs) -> EncoderDecoder:
        return EncoderDecoder(self.config, rngs=rngs)

    def make_held_out(self) -> Batch:
        return _draw_held_out(self, self.preset.held_out_size)

    def make_batch(self, rng: jax.Array, batch_size: int) -> Batch:
        length_rng, token_rng = jax.random.split(rng)
        longest = self.preset.max_length
        lengths = jax.random.randint(length_rng, (batch_size,), self.preset.min_length, longest + 1)
        tokens = jax.random.randint(token_rng, (batch_size, longest), 0, self.preset.vocab_size)
        source = jnp.where(jnp.arange(longest)[None] < lengths[:, None], tokens, self.pad_token)
        return {"source": source, "lengths": lengths, "target": self._reverse(source, lengths)}

    def _reverse(self, source: Int[Array, "B S"], lengths: Int[Array, " B"]) -> Int[Array, "B T"]:
        """Tokens backwards, then the end mark, then padding; one longer than the source."""
        place = jnp.arange(source.shape[1] + 1)[None]
        backwards = jnp.clip(lengths[:, None] - 1 - place, 0, source.shape[1] - 1)
        tokens = jnp.take_along_axis(source, backwards, axis=1)
        marks = jnp.where(place == lengths[:, None], self.end_token, self.pad_token)
        return jnp.where(place < lengths[:, None], tokens, marks)

    def measure(self, model: nnx.Module, batch: Batch) -> tuple[jax.Array, Metrics]:
        target = batch["target"]
        return _measure_tokens(self.read(model, batch), target, target != self.pad_token)

    def read(self, model: Any, batch: Batch, aux: tuple[str, ...] = ()) -> Any:
        """Logits with teacher forcing: the decoder is given the right answer, one place to the right."""
        lengths = batch["lengths"]
        given = jnp.pad(batch["target"][:, :-1], ((0, 0), (1, 0)), constant_values=self.start_token)
        return model(batch["source"], given, source_lengths=lengths, target_lengths=lengths + 1, aux=aux)

    def look(self, model: Any, batch: Batch, aux: tuple[str, ...]) -> Any:
        return self.read(model, batch, aux)[1]

    def evaluate(self, model: nnx.Module, batch: Batch) -> Metrics:
        """As measured, but sequences count as right only when greedy generation writes them alone."""
        loss, _ = self.measure(model, batch)
        right = self.generate(model, batch) == batch["target"]
        return {"loss": loss, **_count_right(right, batch["target"] != self.pad_token)}

    def attention_calls(self) -> dict[str, tuple[int, int, masks.Mask | None]]:
        source, target = self.preset.max_length, self.preset.max_length + 1
        padding = masks.lengths(self.held_out["lengths"][: self.preset.optimization.batch_size])
        return {
            "encoder self-attention": (source, source, padding),
            "decoder self-attention": (target, target, masks.causal()),
            "cross-attention": (target, source, padding),
        }

    def generate(self, model: Any, batch: Batch) -> Int[Array, "B T"]:
        """The model's own answers, token by token; padding follows an end mark."""
        return generate(
            model,
            batch["source"],
            lengths=batch["lengths"],
            max_tokens=self.preset.max_length + 1,
            start_token=self.start_token,
            stop_tokens=(self.end_token,),
            pad_token=self.pad_token,
        ).tokens


class DigitsTask(Task[presets.Digits]):
    """Scans of 8x8 pixels in [0, 1], read as 4x4 patches of 2x2, row by row."""

    NUM_CLASSES: ClassVar[int] = 10
    PATCHES: ClassVar[tuple[int, int]] = (4, 4)

    @property
    def config(self) -> TransformerConfig:
        rows, columns = self.PATCHES
        return _configure(self.preset.model, rows * columns, input_width=64 // (rows * columns))

    def attention_calls(self) -> dict[str, tuple[int, int, masks.Mask | None]]:
        patches = self.config.max_length
        return {"self-attention": (patches, patches, None), "pooling": (1, patches, None)}

    def make_model(self, rngs: nnx.Rngs) -> Classifier:
        return Classifier(self.config, self.NUM_CLASSES, pooling="attention", rngs=rngs)

    def __init__(self, preset: presets.Digits, kept: Mapping[str, str] | None = None):
        super().__init__(preset, kept)
        self._scans, self._labels = load_scans()
        self._is_held_out = split_stratified(self._labels, preset.held_out_fraction, preset.data_seed)

    def make_held_out(self) -> Batch:
        chosen = self._is_held_out
        return self._pack(jnp.asarray(self._scans[chosen]), jnp.asarray(self._labels[chosen]))

    def make_batch(self, rng: jax.Array, batch_size: int) -> Batch:
        scans, labels = self._scans[~self._is_held_out], self._labels[~self._is_held_out]
        row_rng, distortion_rng = jax.random.split(rng)
        rows = jax.random.randint(row_rng, (batch_size,), 0, len(labels))
        distorted = distort_scans(distortion_rng, jnp.asarray(scans)[rows], self.preset.distortion)
        return self._pack(distorted, jnp.asarray(labels)[rows])

    def _pack(self, scans: jax.Array, labels: jax.Array) -> Batch:
        return {"inputs": cut_patches(scans, self.PATCHES), "labels": labels, "scans": scans}

    def measure(self, model: nnx.Module, batch: Batch) -> tuple[jax.Array, Metrics]:
        return _measure_labels(model(batch["inputs"]), batch["labels"])


TASKS: dict[type[presets.Preset], type[Task]] = {
    presets.Threshold: ThresholdTask,
    presets.Copy: CopyTask,
    presets.Reverse: ReverseTask,
    presets.Digits: DigitsTask,
    presets.Text: TextTask,
}


def make_task(preset: presets.Preset, kept: Mapping[str, str] | None = None) -> Task:
    """Builds the task that a preset describes.

    Args:
        preset: what to train.
        kept: the files that the run directory keeps, text by name; None for a new run.

    Raises:
        TypeError: for anything but a preset.

    Example:
        >>> make_task(presets.Copy(held_out_size=3)).held_out["inputs"].shape
        (3, 9)
    """
    if type(preset) not in TASKS:
        names = ", ".join(kind.__name__ for kind in TASKS)
        raise TypeError(f"preset must be one of regard.training.presets.{{{names}}}, got {preset!r}")
    return TASKS[type(preset)](preset, kept)
