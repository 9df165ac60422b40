"""The interface of a task: settings, and from them a model, data, a measure, an example and pictures.

Batches are pure functions of a random key, so the training step makes its own; held-out data never come from
the stream of training. Importing this module loads no JAX, so that the command line can read settings fast.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeAlias

from regard.training.lazy_modules import compilation, figures, inspection, jax, np
from regard.training.settings import Cadence, Count, DataSeed, Goal, Optimization, Settings, Sizes

if TYPE_CHECKING:
    from flax import nnx

    from regard.inspection import Tokens, Trace
    from regard.inspection.figures import Drawing
    from regard.masks import Mask
    from regard.models import TransformerConfig

Batch: TypeAlias = "dict[str, jax.Array]"
Metrics: TypeAlias = "dict[str, jax.Array]"
ProgressHook: TypeAlias = "Callable[[str, int, int], None]"  # hears what is done, how much, and of how much
Picture: TypeAlias = "tuple[str, Drawing]"
# Streams of one seed. Held-out data have their own: no seed makes training draw what is held out.
INITIALISATION, TRAINING, DROPOUT, HELD_OUT = range(4)
SAMPLE_SIZE = 3
PROBE_SIZE = 8  # examples: a hundredth of a step's work where steps are many and batches are large


def make_stream(seed: int, stream: int) -> jax.Array:
    """Return the key of one of the independent random streams of a seed; without x64 a key reads 32 bits."""
    high, low = divmod(seed, 2**32)
    key = jax.random.key(np.uint32(low))
    return jax.random.fold_in(jax.random.fold_in(key, high % 2**32) if high else key, stream)


class Example(NamedTuple):
    """A batch of one example, the tokens of its sequences as `inspection.capture` takes them, and a title."""

    batch: Batch
    tokens: Mapping[Any, Tokens]
    title: str


@dataclass(frozen=True)
class Task(Settings, abc.ABC):
    """Something to learn: settings, and from them a model, data, a measure, an example and pictures.

    A task is a frozen dataclass whose fields are its settings; the docstring of a field is what `regard train
    TASK --help` prints. Its class declares a `name` of its own and a `goal`, gives `model` a default, and
    implements `config`, `make_model`, `make_batch`, `measure` and, if it is no `SyntheticTask`,
    `make_held_out`; `example` and `pictures` as they are here serve batches whose "inputs" are tokens.
    `open_run` and `load_run` know every class that is defined, or that the variable REGARD_TASKS names.

    Attributes:
        name: a word for the command line and for run directories.
        goal: the held-out result that a full-size run must reach.
        shows_sample: True for a task that writes a sample at the end of a run.
        writes_text: True for a task whose model is a `Decoder` of text: `regard generate` goes on with it.
        reads_rows: True for a task whose training rows `choose` and `fetch` read on the host, between two
            compiled steps, and not `make_batch` within one.
        keeps: names of the files that `keep` may return.
        carries: those of them that a run on other data takes over from the one that it starts from.
        kept: the contents of these files as the run began, by name (None: made anew); None for a new run. No
            setting.
    """

    name: ClassVar[str]
    goal: ClassVar[Goal]
    shows_sample: ClassVar[bool] = False
    writes_text: ClassVar[bool] = False
    reads_rows: ClassVar[bool] = False
    keeps: ClassVar[tuple[str, ...]] = ()
    carries: ClassVar[tuple[str, ...]] = ()
    example_title: ClassVar[str] = "the first held-out example"

    model: Any = Sizes()
    optimization: Optimization = Optimization()
    cadence: Cadence = Cadence()
    data_seed: DataSeed = 0
    """Seed of the held-out data; training draws from another stream, whatever the seeds."""
    kept: Mapping[str, str | None] | None = field(default=None, init=False, repr=False, compare=False)

    def restore(self, kept: Mapping[str, str | None] | None) -> Self:
        """Return this task with the files that it kept when a run began, those that are there."""
        restored = replace(self)  # without what was derived from other files
        object.__setattr__(restored, "kept", kept)
        return restored

    @property
    @abc.abstractmethod
    def config(self) -> TransformerConfig:
        """The model's configuration."""

    @abc.abstractmethod
    def make_model(self, rngs: nnx.Rngs) -> nnx.Module:
        """Build the model with fresh parameters, all of it that may change as it learns."""

    def prepare(self, report: ProgressHook) -> None:
        """Make now what takes long and is asked for later, such as files of tokens; report how far it is."""

    @functools.cached_property
    def held_out(self) -> Batch:
        """The held-out batch; depends on the settings alone, not on a run's seed."""
        with compilation.compute_now():
            return self.make_held_out()

    @property
    def probe(self) -> Batch:
        """The first few held-out examples, on which the heads are measured during training."""
        return jax.tree.map(lambda values: values[:PROBE_SIZE], self.held_out)

    @abc.abstractmethod
    def make_held_out(self) -> Batch:
        """Draw the held-out examples."""

    @abc.abstractmethod
    def make_batch(self, rng: jax.Array, batch_size: int) -> Batch:
        """Draw training examples; pure, so it may run inside a compiled step, but see `reads_rows`."""

    def choose(self, rng: jax.Array, batch_size: int) -> np.ndarray:
        """Choose the rows of a batch, for `fetch`."""
        raise NotImplementedError(f"{self.name} reads no rows")

    def fetch(self, chosen: np.ndarray) -> dict[str, np.ndarray]:
        """Read rows on the host, from data that are too large for a program."""
        raise NotImplementedError(f"{self.name} reads no rows")

    @abc.abstractmethod
    def measure(self, model: nnx.Module, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Return the mean loss on a batch, and metrics; the model's mode decides about dropout."""

    def weigh(self, batch: Batch) -> Mapping[str, float | jax.Array]:
        """Return the weights of what `measure` gives for one of `accumulate_steps` parts among the others.

        Where its means are of other numbers of terms in parts of as many rows, these numbers: "loss" of the
        loss and its gradients, and of each metric that is not named itself.
        """
        return {"loss": 1.0}

    def evaluate(self, model: nnx.Module, batch: Batch) -> Metrics:
        """Return the metrics that count, `loss` and the goal's among them, of a model in evaluation mode."""
        loss, metrics = self.measure(model, batch)
        return {"loss": loss, **metrics}

    def read(self, model: Any, batch: Batch, aux: tuple[str, ...] = ()) -> Any:
        """Apply the model to a batch; with `aux`, named as in `attend`, return what its layers return too."""
        return model(batch["inputs"], aux=aux)

    def attention_calls(self) -> dict[str, tuple[int, int, Mask | None]]:
        """Return the model's kinds of attention: numbers of queries and keys, and the mask."""
        return {"self-attention": (self.config.max_length, self.config.max_length, None)}

    def keep(self) -> dict[str, str]:
        """Return what a run keeps beside its settings, text by file name, to go on from the same data."""
        return {}

    def describe_data(self) -> dict[str, str]:
        """Return descriptions of a batch and of the held-out data."""
        held_out = len(jax.tree.leaves(self.held_out)[0])
        return {"batch": f"{self.optimization.batch_size} examples", "held out": f"{held_out:,} examples"}

    def write_sample(self, model: Any) -> str:
        """Return a text that shows what a trained model writes, where it writes."""
        raise NotImplementedError(f"{self.name} writes no text")

    def example(self) -> Example:
        """Choose the held-out example that `regard inspect` shows: the first one, spelled by `spell`."""
        batch = self.pick(0)
        return Example(batch, {"": self.spell_row(batch["inputs"][0])}, f"{self.name}: {self.example_title}")

    def spell(self, token: int) -> str:
        """Return the text of a token, for people to read."""
        return str(token)

    def spell_row(self, row: Any) -> Tokens:
        """Return the tokens of a row as `inspection.capture` takes them."""
        ids = np.asarray(row)
        return inspection.Tokens([self.spell(token) for token in ids.tolist()], ids=ids)

    def read_text(self, text: str) -> Example:
        """Make an example of a user's text.

        Raises:
            ValueError: for a task whose model reads no text, or a text that is too long.
        """
        raise ValueError(
            f"text: expected a task that reads text, got {self.name}; leave it out for an example of its own"
        )

    def pictures(self, model: Any) -> Iterator[Picture]:
        """Draw what a trained model attends to, for `regard plot`; here the weights of the last block."""
        batch, tokens, title = self.example()
        _, aux = self.read_with_weights(model, batch)
        texts = list(tokens[""].texts)
        yield from draw_heads(np.asarray(aux["blocks"][-1]["weights"][0]), texts, texts, title)

    def pick(self, row: int) -> Batch:
        """Return one held-out example, as a batch."""
        return jax.tree.map(lambda values: values[row : row + 1], self.held_out)

    def read_with_weights(self, model: Any, batch: Batch) -> tuple[Any, Any]:
        """Return a model's output for a batch, and what its layers return with their attention weights."""
        return compilation.run_once(lambda batch: self.read(model, batch, ("weights",)), batch)

    def watch(self, model: Any, text: str | None = None) -> Trace:
        """Let a trained model read the example, or a text, and record what it attends to.

        Args:
            model: in evaluation mode.
            text: what a model of text reads; None means the example.

        Raises:
            ValueError: a text for a model that reads none, or one that is too long.
        """
        example = self.example() if text is None else self.read_text(text)
        with inspection.capture(model, tokens=example.tokens, title=example.title) as trace:
            self.read(model, example.batch, ("lse",))
        return self.complete(trace, model, example)

    def complete(self, trace: Trace, model: Any, example: Example) -> Trace:
        """Return the trace of an example with what else is known of it."""
        del model, example
        return trace


@dataclass(frozen=True)
class SyntheticTask(Task):
    """A task whose held-out examples are drawn as training examples are, from a stream of their own."""

    held_out_size: Count = 1_000
    """Held-out sequences."""

    def make_held_out(self) -> Batch:
        rng = make_stream(self.data_seed, HELD_OUT)
        return compilation.run_once(lambda rng: self.make_batch(rng, self.held_out_size), rng)


class MarkedTask(SyntheticTask):
    """A task on tokens below `vocab_size`, after which marks follow: of the start, the end and padding."""

    shows_sample: ClassVar[bool] = True

    vocab_size: int

    @property
    def start_token(self) -> int:
        return self.vocab_size

    @property
    def end_token(self) -> int:
        return self.vocab_size + 1

    @property
    def pad_token(self) -> int:
        return self.vocab_size + 2

    def spell(self, token: int) -> str:
        """Return a mark's name, or the number of another token; where a task has no padding, none is PAD."""
        marks = {self.start_token: "SOS", self.end_token: "EOS", self.pad_token: "PAD"}
        return marks.get(token, str(token))

    @abc.abstractmethod
    def answer(self, model: Any, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return rows of tokens: what a model reads, what it should write, and what it writes."""

    def write_sample(self, model: Any) -> str:
        """Return the first held-out sequences with the right answers and the model's."""
        batch = jax.tree.map(lambda values: values[:SAMPLE_SIZE], self.held_out)
        answers = compilation.run_once(lambda batch: self.answer(model, batch), batch)
        names = "input     ", "target    ", "prediction"
        texts = [[" ".join(self.spell_row(row).texts) for row in rows] for rows in answers]
        return "\n\n".join(
            "\n".join(map("{}  {}".format, names, example)) for example in zip(*texts, strict=True)
        )


def draw_heads(
    weights: np.ndarray,
    queries: list[str],
    keys: list[str],
    title: str,
    *,
    focus: np.ndarray | None = None,
    name: str = "attention",
) -> Iterator[Picture]:
    """Draw one head as an annotated heatmap (the one with most focus) and all heads side by side."""
    head = 0 if focus is None else int(np.argmax(focus))
    heatmap = figures.attention_heatmap(
        weights[head], query_labels=queries, key_labels=keys, title=f"{title} (head {head})"
    )
    yield name, heatmap
    yield f"{name}-heads", figures.head_grid(weights, query_labels=queries, key_labels=keys, title=title)
