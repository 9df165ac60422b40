"""The reverse task: sources of many lengths, padded; targets are the source backwards and an end mark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from regard.training.lazy_modules import jax, jnp, masks, models, np
from regard.training.losses import count_right, measure_tokens
from regard.training.settings import VOCABULARY, Cadence, Count, Goal, Optimization, Sizes, at_least
from regard.training.task import Batch, Example, MarkedTask, Metrics, Picture, draw_heads

if TYPE_CHECKING:
    from flax import nnx
    from jaxtyping import Array, Int


@dataclass(frozen=True)
class Reverse(MarkedTask):
    """Write a sequence backwards: encoder, decoder and cross-attention; lengths vary, padding is masked.

    Evaluated by greedy generation. Expect every held-out sequence right after about 20 s on two CPU cores.

    Example: regard train reverse --seed 1
    """

    name: ClassVar[str] = "reverse"
    goal: ClassVar[Goal] = Goal("accuracy", 1.0)

    vocab_size: Annotated[int, at_least(1), VOCABULARY] = 16
    """Different tokens, besides the start, end and padding marks."""
    min_length: Count = 5
    """Shortest sequence."""
    max_length: Count = 10
    """Longest sequence."""
    model: Sizes = Sizes(d_model=64, num_heads=4, d_ff=128)
    optimization: Optimization = Optimization(steps=500, batch_size=64, learning_rate=5e-3)
    cadence: Cadence = Cadence(evaluate_every=250)

    def __post_init__(self) -> None:
        super().__post_init__()
        is_longer = self.max_length >= self.min_length
        self._demand(is_longer, "max_length must be at least min_length", "max_length", "min_length")

    @property
    def config(self) -> models.TransformerConfig:
        return models.TransformerConfig(
            vocab_size=self.vocab_size + 3, max_length=self.max_length + 1, **asdict(self.model)
        )

    def make_model(self, rngs: nnx.Rngs) -> models.EncoderDecoder:
        return models.EncoderDecoder(self.config, rngs=rngs)

    def make_batch(self, rng: jax.Array, batch_size: int) -> Batch:
        length_rng, token_rng = jax.random.split(rng)
        longest = self.max_length
        lengths = jax.random.randint(length_rng, (batch_size,), self.min_length, longest + 1)
        tokens = jax.random.randint(token_rng, (batch_size, longest), 0, self.vocab_size)
        source = jnp.where(jnp.arange(longest)[None] < lengths[:, None], tokens, self.pad_token)
        # The tokens backwards, then the end mark, then padding: one longer than the source.
        positions = jnp.arange(longest + 1)[None]
        backwards = jnp.clip(lengths[:, None] - 1 - positions, 0, longest - 1)
        tokens = jnp.take_along_axis(source, backwards, axis=1)
        marks = jnp.where(positions == lengths[:, None], self.end_token, self.pad_token)
        target = jnp.where(positions < lengths[:, None], tokens, marks)
        return {"source": source, "lengths": lengths, "target": target}

    def _shift(self, target: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Return what the decoder is given: the right answer, one place to the right."""
        return jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=self.start_token)

    def read(self, model: Any, batch: Batch, aux: tuple[str, ...] = ()) -> Any:
        """Compute logits with teacher forcing."""
        lengths, shifted = batch["lengths"], self._shift(batch["target"])
        return model(batch["source"], shifted, source_lengths=lengths, target_lengths=lengths + 1, aux=aux)

    def measure(self, model: nnx.Module, batch: Batch) -> tuple[jax.Array, Metrics]:
        target = batch["target"]
        return measure_tokens(self.read(model, batch), target, target != self.pad_token)

    def weigh(self, batch: Batch) -> Metrics:
        return {
            "loss": jnp.sum(batch["target"] != self.pad_token, dtype=jnp.float32),
            "accuracy": jnp.float32(1),
        }

    def evaluate(self, model: nnx.Module, batch: Batch) -> Metrics:
        """Measure a model; sequences count as right only when greedy generation writes them alone."""
        loss, _ = self.measure(model, batch)
        right = self.generate(model, batch) == batch["target"]
        return {"loss": loss, **count_right(right, batch["target"] != self.pad_token)}

    def generate(self, model: Any, batch: Batch) -> Int[Array, "B T"]:
        """Generate the model's own answers, token by token; padding follows an end mark."""
        return models.generate(
            model,
            batch["source"],
            lengths=batch["lengths"],
            max_tokens=self.max_length + 1,
            start_token=self.start_token,
            stop_tokens=(self.end_token,),
            pad_token=self.pad_token,
        ).tokens

    def answer(self, model: nnx.Module, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        return batch["source"], batch["target"], self.generate(model, batch)

    def attention_calls(self) -> dict[str, tuple[int, int, masks.Mask | None]]:
        source, target = self.max_length, self.max_length + 1
        padding = masks.lengths(np.resize(self.held_out["lengths"], self.optimization.batch_size))
        return {
            "encoder self-attention": (source, source, padding),
            "decoder self-attention": (target, target, masks.causal()),
            "cross-attention": (target, source, padding),
        }

    def example(self) -> Example:
        """Choose the longest held-out sequence."""
        batch = self.pick(int(jnp.argmax(self.held_out["lengths"])))
        read = self.spell_row(batch["source"][0])
        written = self.spell_row(self._shift(batch["target"])[0])
        tokens = {"encoder": read, "memory": read, "decoder": written}
        return Example(batch, tokens, "reverse: the decoder reads the source backwards")

    def pictures(self, model: nnx.Module) -> Iterator[Picture]:
        """Draw where each written token of the example looks in the source."""
        batch, tokens, _ = self.example()
        length = int(batch["lengths"][0])
        logits, aux = self.read_with_weights(model, batch)
        answers = self.spell_row(logits[0, : length + 1].argmax(-1)).texts
        weights = np.asarray(aux["decoder"][-1]["cross"]["weights"][0])[:, : length + 1, :length]
        focus = np.trace(weights[:, :, ::-1], axis1=1, axis2=2)
        read = list(tokens["encoder"].texts[:length])
        title = "reverse: each token written reads the source backwards"
        yield from draw_heads(weights, list(answers), read, title, focus=focus, name="cross-attention")
