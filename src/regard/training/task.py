"""What a task is: a model, endless training batches, held-out data and their measure, all from one preset.

Batches are pure functions of a random key, so the training step makes its own; held-out data never come from
the stream of training.
"""

import abc
import functools
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import jax
from flax import nnx

from regard import masks
from regard.models import TransformerConfig
from regard.training import presets

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
PresetT = TypeVar("PresetT", bound=presets.Preset)

# Streams of one seed. Held-out data have their own: no seed makes training draw what is held out.
INITIALISATION, TRAINING, DROPOUT, HELD_OUT = range(4)
PROBE_SIZE = 8  # examples: a hundredth of a step's work where steps are many and batches are large


def make_stream(seed: int, stream: int) -> jax.Array:
    """Returns the key of one of the independent random streams of a seed."""
    return jax.random.fold_in(jax.random.key(seed), stream)


class Task(abc.ABC, Generic[PresetT]):
    """What to learn: a model, data and a measure, all derived from one preset.

    Args:
        preset: the settings.
        kept: what `keep` returned when the run began, read back; None for a new run.

    Attributes:
        training_data: arrays that batches are drawn from; `draw` takes them as an argument, so that a
            compiled step need not hold them as constants.
    """

    training_data: Any = ()

    def __init__(self, preset: PresetT, kept: Mapping[str, str] | None = None):
        self.preset = preset
        self.kept = dict(kept or {})

    @property
    def name(self) -> str:
        return self.preset.name

    @property
    @abc.abstractmethod
    def config(self) -> TransformerConfig:
        """The model's configuration."""

    @abc.abstractmethod
    def make_model(self, rngs: nnx.Rngs) -> nnx.Module:
        """Builds the model with fresh parameters."""

    @functools.cached_property
    def held_out(self) -> Batch:
        """The held-out batch; depends on the preset alone, not on a run's seed."""
        with jax.ensure_compile_time_eval():  # whoever asks first may be tracing
            return self.make_held_out()

    @functools.cached_property
    def probe(self) -> Batch:
        """The first few held-out examples, on which the heads are watched."""
        return jax.tree.map(lambda values: values[:PROBE_SIZE], self.held_out)

    @abc.abstractmethod
    def make_held_out(self) -> Batch:
        """Draws the held-out examples."""

    @abc.abstractmethod
    def make_batch(self, rng: jax.Array, batch_size: int) -> Batch:
        """Draws training examples; pure, so it may run inside a compiled step."""

    def draw(self, training_data: Any, rng: jax.Array, batch_size: int) -> Batch:
        """As `make_batch`, from arrays that are given."""
        return self.make_batch(rng, batch_size)

    @abc.abstractmethod
    def measure(self, model: nnx.Module, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Returns the mean loss on a batch, and metrics; the model's mode decides about dropout."""

    def look(self, model: Any, batch: Batch, aux: tuple[str, ...]) -> Any:
        """Returns what the attention layers say of a batch beside the output; names as in `attend`."""
        return model(batch["inputs"], aux=aux)[1]

    def attention_calls(self) -> dict[str, tuple[int, int, masks.Mask | None]]:
        """Returns the model's kinds of attention: numbers of queries and keys, and the mask."""
        return {"self-attention": (self.config.max_length, self.config.max_length, None)}

    def evaluate(self, model: nnx.Module, batch: Batch) -> Metrics:
        """Returns the metrics that count, `loss` and the goal's among them, of a model in evaluation mode."""
        loss, metrics = self.measure(model, batch)
        return {"loss": loss, **metrics}

    def keep(self) -> dict[str, str]:
        """Returns what a run keeps beside its settings, text by file name, to go on from the same data."""
        return {}

    def describe_data(self) -> dict[str, str]:
        """Says in words what a batch and the held-out data are."""
        return {
            "batch": f"{self.preset.optimization.batch_size} examples",
            "held out": f"{len(jax.tree.leaves(self.held_out)[0]):,} examples",
        }
