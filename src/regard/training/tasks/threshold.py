"""The threshold task: a classifier that says if the sum of a sequence's tokens is above a number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from regard.training.lazy_modules import jax, jnp, models, np
from regard.training.losses import measure_labels
from regard.training.settings import INT32, VOCABULARY, Cadence, Count, Goal, Optimization, Sizes, at_least
from regard.training.task import Batch, Example, Metrics, Picture, SyntheticTask, draw_heads

if TYPE_CHECKING:
    from flax import nnx


@dataclass(frozen=True)
class Threshold(SyntheticTask):
    """Is the sum of eight random tokens above 400? A classifier with mean pooling.

    Expect 0.992 of the held-out sequences right after about 10 s on two CPU cores.

    Example: regard train threshold --seed 1
    """

    name: ClassVar[str] = "threshold"
    goal: ClassVar[Goal] = Goal("accuracy", 0.985)

    vocab_size: Annotated[int, at_least(2), VOCABULARY] = 100
    """Tokens are drawn from 0 .. vocab_size - 1."""
    length: Count = 8
    """Tokens per sequence."""
    threshold: Annotated[int, INT32] = 400
    """The label is 1 when the sum of the tokens exceeds this."""
    held_out_size: Count = 10_000
    """Held-out sequences."""
    model: Sizes = Sizes(d_model=32, num_heads=4, d_ff=128)
    optimization: Optimization = Optimization(steps=800, learning_rate=1e-2)
    cadence: Cadence = Cadence(evaluate_every=200)

    @property
    def config(self) -> models.TransformerConfig:
        return models.TransformerConfig(
            vocab_size=self.vocab_size, max_length=self.length, **asdict(self.model)
        )

    def make_model(self, rngs: nnx.Rngs) -> models.Classifier:
        return models.Classifier(self.config, 2, pooling="mean", rngs=rngs)

    def make_batch(self, rng: jax.Array, batch_size: int) -> Batch:
        tokens = jax.random.randint(rng, (batch_size, self.length), 0, self.vocab_size)
        return {"inputs": tokens, "labels": (tokens.sum(-1) > self.threshold).astype(jnp.int32)}

    def measure(self, model: nnx.Module, batch: Batch) -> tuple[jax.Array, Metrics]:
        return measure_labels(self.read(model, batch), batch["labels"])

    def example(self) -> Example:
        example = super().example()
        total = np.asarray(example.batch["inputs"]).sum()
        side = "above" if int(example.batch["labels"][0]) else "not above"
        title = f"threshold: {self.length} tokens with sum {total}, {side} {self.threshold}"
        return example._replace(title=title)

    def pictures(self, model: nnx.Module) -> Iterator[Picture]:
        """Draw the example; every token weighs the same in a sum, and attention learns to be even."""
        batch, tokens, _ = self.example()
        logits, aux = self.read_with_weights(model, batch)
        labels = list(tokens[""].texts)
        above = ("not above", "above")[int(logits[0].argmax())]
        title = f"threshold: the sum is {int(batch['inputs'].sum())}, predicted {above} {self.threshold}"
        yield from draw_heads(np.asarray(aux["blocks"][-1]["weights"][0]), labels, labels, title)
