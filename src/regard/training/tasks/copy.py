"""The copy task: inputs [SOS, tokens], targets [tokens, EOS], one prediction per position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from regard.training.lazy_modules import jax, jnp, models, np
from regard.training.losses import measure_tokens
from regard.training.settings import VOCABULARY, Cadence, Count, Goal, Optimization, Sizes, at_least
from regard.training.task import Batch, MarkedTask, Metrics, Picture, draw_heads

if TYPE_CHECKING:
    from flax import nnx


@dataclass(frozen=True)
class Copy(MarkedTask):
    """Read [SOS, tokens] and write [tokens, EOS]: every position looks one to its right.

    Expect every held-out sequence right after about 7 s on two CPU cores.

    Example: regard train copy --seed 1
    """

    name: ClassVar[str] = "copy"
    goal: ClassVar[Goal] = Goal("accuracy", 1.0)
    example_title: ClassVar[str] = "what each position reads to write its neighbour"

    vocab_size: Annotated[int, at_least(1), VOCABULARY] = 16
    """Different tokens, besides the start and end marks."""
    length: Count = 8
    """Tokens per sequence, besides the mark."""
    model: Sizes = Sizes(d_model=64, num_heads=4, d_ff=256)
    optimization: Optimization = Optimization(steps=200, schedule="constant")
    cadence: Cadence = Cadence(evaluate_every=50)

    @property
    def config(self) -> models.TransformerConfig:
        return models.TransformerConfig(
            vocab_size=self.vocab_size + 2, max_length=self.length + 1, **asdict(self.model)
        )

    def make_model(self, rngs: nnx.Rngs) -> models.Classifier:
        return models.Classifier(self.config, self.vocab_size + 2, pooling=None, rngs=rngs)

    def make_batch(self, rng: jax.Array, batch_size: int) -> Batch:
        tokens = jax.random.randint(rng, (batch_size, self.length), 0, self.vocab_size)
        return {
            "inputs": jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=self.start_token),
            "targets": jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=self.end_token),
        }

    def measure(self, model: nnx.Module, batch: Batch) -> tuple[jax.Array, Metrics]:
        targets = batch["targets"]
        return measure_tokens(self.read(model, batch), targets, jnp.ones(targets.shape, bool))

    def answer(self, model: nnx.Module, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        return batch["inputs"], batch["targets"], self.read(model, batch).argmax(-1)

    def pictures(self, model: nnx.Module) -> Iterator[Picture]:
        """Draw the example; a solved task looks one position to the right."""
        batch, tokens, _ = self.example()
        logits, aux = self.read_with_weights(model, batch)
        read, written = list(tokens[""].texts), self.spell_row(logits[0].argmax(-1)).texts
        queries = [f"{before} → {after}" for before, after in zip(read, written, strict=True)]
        weights = np.asarray(aux["blocks"][-1]["weights"][0])
        focus = np.trace(weights, offset=1, axis1=1, axis2=2)
        yield from draw_heads(weights, queries, read, "copy: what each position reads → writes", focus=focus)
