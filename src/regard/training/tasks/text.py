"""The text task: rows of documents, what a token may see in them, and what the text costs in bits per byte.

Documents lie end to end in one stream, a mark before, between and after them. A training row is the stream
from a random place on. The mark belongs to the document after it: there a token sees the mark and what has
been read since, and predicts the next; the last one predicts the next mark. So every token is predicted from
its own document alone, and none is left out.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from regard.training import settings
from regard.training.lazy_modules import (
    corpora,
    inspection,
    jax,
    jnp,
    masks,
    models,
    np,
    token_files,
    vocabularies,
)
from regard.training.losses import measure_losses
from regard.training.settings import Cadence, Count, DataSeed, DecoderSizes, Goal, Optimization, at_least
from regard.training.task import Batch, Example, Metrics, Picture, ProgressHook, Task, draw_heads

if TYPE_CHECKING:
    from flax import nnx
    from jaxtyping import Array, Bool, Int

NUM_BYTES = 256
SAMPLE_TEMPERATURE = 0.8  # likely tokens come more often than in the documents, which reads better
TOKENIZER, FACTS = "tokenizer.json", "corpus.json"
LEARNED_BYTES = 2**27  # the documents are shuffled: BPE learns no more from more
TOKENS_DRAWN = 32
END_OF_DOCUMENT = "■"
VISIBLE = {" ": "␣", "\n": "⏎", "\t": "→", "\r": "←"}


def configure(sizes: DecoderSizes, vocab_size: int, length: int) -> models.TransformerConfig:
    """Return the configuration of the decoder that learns text."""
    return models.TransformerConfig(
        **asdict(sizes),
        vocab_size=vocab_size,
        max_length=length,
        positions="rotary",
        norm_kind="rms",
        activation="silu",
        gated=True,
        attention_bias=False,
        feed_forward_bias=False,
        head_bias=False,
    )


@dataclass(frozen=True)
class Text(Task):
    """Predict the next token: a causal language model on documents, Python's own manual or your files.

    Rows are pieces of the documents laid end to end, and no token sees another document; the measure is bits
    per byte of held-out documents. Expect 1.96 on the manual of Python 3.11 after about two minutes on
    two CPU cores.

    Example: regard train text --files README.md docs
    """

    name: ClassVar[str] = "text"
    goal: ClassVar[Goal] = Goal("bits_per_byte", 2.2, smaller_is_better=True)
    writes_text: ClassVar[bool] = True
    shows_sample: ClassVar[bool] = True
    reads_rows: ClassVar[bool] = True
    keeps: ClassVar[tuple[str, ...]] = (TOKENIZER, FACTS)
    carries: ClassVar[tuple[str, ...]] = (TOKENIZER,)
    _report = staticmethod(lambda what, done, total: None)  # another one while `prepare` is at work

    files: tuple[str, ...] = ()
    """UTF-8 files, each one document, and directories, in which what is not text is skipped; a single file is
    cut into documents. None means the topics of Python's own manual, which come with Python."""
    document_bytes: Count = 4096
    """A single file is cut at ends of lines into documents of at most this many bytes."""
    vocab_size: Annotated[int, at_least(NUM_BYTES), settings.VOCABULARY] = NUM_BYTES
    """Tokens besides the mark between documents: 256 are the bytes, more are frequent strings (BPE) learned
    from the training documents, of which the first 128 MiB are read."""
    length: Annotated[int, at_least(2), settings.MOST] = 256
    """Tokens per row, which is as far as the model ever looks back in training."""
    held_out_fraction: Annotated[float, settings.FRACTION] = 0.1
    """Part of the bytes, in whole documents, that is held out, in (0, 1)."""
    held_out_bytes: Count = 2**20
    """Bytes that are held out at most, as every evaluation reads all of them."""
    data_seed: DataSeed = 0
    """Seed of the split and of the order of the documents."""
    model: DecoderSizes = DecoderSizes()
    optimization: Optimization = Optimization(steps=300, batch_size=16, warmup_steps=50, weight_decay=0.1)
    cadence: Cadence = Cadence(evaluate_every=100, checkpoint_every=100)

    @functools.cached_property
    def documents(self) -> tuple[corpora.Documents, corpora.Documents]:
        """Training and held-out documents, found when first asked for: a loaded model does not need them."""
        if self.files:
            corpus = corpora.read_documents(self.files, piece_bytes=self.document_bytes, report=self._report)
        else:
            corpus = corpora.Documents.of_texts(corpora.read_manual().values())
        return corpora.split_documents(corpus, self.held_out_fraction, self.data_seed, self.held_out_bytes)

    @functools.cached_property
    def vocabulary(self) -> vocabularies.ByteVocabulary:
        """Tokens; those of BPE as the run keeps them, trained on the training documents for a new run."""
        if self.vocab_size == NUM_BYTES:
            return vocabularies.ByteVocabulary()
        if (tokenizer := self._recall(TOKENIZER)) is not None:
            return vocabularies.PairVocabulary(tokenizer)
        documents = self.documents[0]
        size = min(documents.num_bytes, LEARNED_BYTES)
        what = f"learning {self.vocab_size:,} strings of bytes from {corpora.describe_size(size)} of text"
        texts = _take_bytes(documents.texts(), size, corpora.count_up(self._report, what, size))
        return vocabularies.train_pairs(texts, self.vocab_size)

    @functools.cached_property
    def tokens(self) -> token_files.Tokens:
        """Training and held-out tokens, on disk; those that the run began with."""
        split = (self.document_bytes, self.held_out_fraction, self.held_out_bytes, self.data_seed)
        tokens = token_files.open_tokens(
            self.files, split, self.vocabulary, lambda: self.documents, self._report
        )
        if len(tokens.training) <= self.length:
            rule = f"length must be below the {len(tokens.training)} training tokens, got {self.length}"
            raise ValueError(f"{rule}; ask for a shorter one, or give more text")
        if (facts := self._recall(FACTS)) is not None:
            _demand_same_facts(facts, tokens.facts)
        return tokens

    def prepare(self, report: ProgressHook) -> None:
        configure(self.model, NUM_BYTES, self.length)  # raises for sizes that do not fit before it reads
        vars(self)["_report"] = report
        try:
            _ = self.tokens
        finally:
            del vars(self)["_report"]

    def _recall(self, name: str) -> str | None:
        """Return a file that the run kept; None where it is made anew."""
        if self.kept is not None and name not in self.kept:
            raise ValueError(
                f"{name} of this run is gone; bring it back as it was, or train again in another directory="
            )
        return None if self.kept is None else self.kept[name]

    @property
    def config(self) -> models.TransformerConfig:
        return configure(self.model, self.vocabulary.size, self.length)

    def make_model(self, rngs: nnx.Rngs) -> models.Decoder:
        return models.Decoder(self.config, rngs=rngs)

    def make_batch(self, rng: jax.Array, batch_size: int) -> Batch:
        """Read rows from random places of the training tokens; on the host, not in a compiled step."""
        return jax.tree.map(jnp.asarray, self.fetch(self.choose(rng, batch_size)))

    def choose(self, rng: jax.Array, batch_size: int) -> np.ndarray:
        """Choose random places of the stream, with repetition: all are equally likely."""
        count = len(self.tokens.training) - self.length
        with jax.enable_x64(True) if count > np.iinfo(np.int32).max else contextlib.nullcontext():
            return np.asarray(jax.random.randint(rng, (batch_size,), 0, count))

    def fetch(self, chosen: np.ndarray) -> dict[str, np.ndarray]:
        read, length = self.tokens.training.read, self.length
        rows = np.stack([read(start, start + length + 1) for start in chosen.tolist()])
        return self._pack(rows[:, :-1], rows[:, 1:], np.ones((len(rows), length), bool))

    def _pack(self, inputs: np.ndarray, targets: np.ndarray, counted: np.ndarray) -> dict[str, np.ndarray]:
        sizes = self._token_bytes[targets].sum(-1, dtype=np.int32, where=counted)
        return {"inputs": inputs, "targets": targets, "counted": counted, "bytes": sizes}

    @functools.cached_property
    def _token_bytes(self) -> np.ndarray:
        return vocabularies.count_bytes(self.vocabulary)

    def make_held_out(self) -> Batch:
        """Cut all held-out text into overlapping rows; see `cut_windows`."""
        return jax.tree.map(jnp.asarray, self._pack(*cut_windows(self.tokens.held_out.read(), self.length)))

    def read(self, model: Any, batch: Batch, aux: tuple[str, ...] = ()) -> Any:
        """Compute logits of the next token, every token seeing its own document up to itself."""
        return model(batch["inputs"], mask=self._separate(batch["inputs"]), aux=aux)

    def _separate(self, inputs: jax.Array) -> masks.Mask:
        documents = number_documents(inputs, self.vocabulary.mark)
        return masks.segments(documents, documents)

    def measure(self, model: nnx.Module, batch: Batch) -> tuple[jax.Array, Metrics]:
        return _average(self._add_up(model, batch))

    def weigh(self, batch: Batch) -> Metrics:
        size = jnp.maximum(jnp.sum(batch["bytes"], dtype=jnp.float32), 1)
        return {"loss": jnp.sum(batch["counted"], dtype=jnp.float32), "bits_per_byte": size}

    def evaluate(self, model: nnx.Module, batch: Batch) -> Metrics:
        """Measure as many rows at a time as in training: memory that holds those is enough."""
        count = len(batch["inputs"])
        at_once = min(count, self.optimization.batch_size)

        def group(values: jax.Array) -> jax.Array:
            padded = jnp.pad(values, ((0, -count % at_once), *((0, 0),) * (values.ndim - 1)))
            return padded.reshape(-1, at_once, *values.shape[1:])

        sums = jax.lax.map(lambda rows: self._add_up(model, rows), jax.tree.map(group, batch))
        loss, metrics = _average(jax.tree.map(lambda values: values.sum(0), sums))
        return {"loss": loss, **metrics}

    def attention_calls(self) -> dict[str, tuple[int, int, masks.Mask | None]]:
        documents = self._separate(jnp.asarray(self.tokens.training.read(0, self.length)))
        return {"self-attention": (self.length, self.length, masks.causal() & documents)}

    def keep(self) -> dict[str, str]:
        """Return tokenizer.json where there is one, and corpus.json, by which a changed corpus is known."""
        text = self.vocabulary.to_json()
        facts = json.dumps(self.tokens.facts, indent=2) + "\n"
        return ({} if text is None else {TOKENIZER: text}) | {FACTS: facts}

    def write_sample(self, model: Any) -> str:
        """Return the beginning of a document that the model makes up, the same one every time."""
        mark, rng = self.vocabulary.mark, jax.random.key(0)
        sampling = models.Sampling(temperature=SAMPLE_TEMPERATURE)
        written = models.generate(
            model, [[mark]], max_tokens=self.length, sampling=sampling, stop_tokens=(mark,), rng=rng
        )
        return self.vocabulary.decode(written.rows()[0])

    def describe_data(self) -> dict[str, str]:
        tokens, optimization, length = self.tokens, self.optimization, self.length
        num_tokens = len(tokens.training) - 1
        epochs = optimization.steps * optimization.batch_size * length / num_tokens
        describe = "{:,} documents of {:,} bytes".format
        training, held_out = map(describe, tokens.facts["documents"], tokens.facts["bytes"])
        strings = self.vocabulary.mark
        kind = "bytes" if strings == NUM_BYTES else f"{strings:,} strings of bytes"
        return {
            "batch": f"{optimization.batch_size} rows of {length} tokens, {epochs:.1f} epochs in all",
            "corpus": f"{training}; {num_tokens:,} tokens, which are {kind} and a mark"
            f"{corpora.describe_skipped(tokens.skipped)}",
            "held out": f"{held_out} in {len(self.held_out['inputs'])} rows; "
            f"{tokens.overlap:.1%} of its lines stand in training documents too",
        }

    def example(self) -> Example:
        """Choose the first row of held-out text."""
        row = np.asarray(self.held_out["inputs"][0])
        return self._make_example(row, "text: what each token of held-out text reads")

    def read_text(self, text: str) -> Example:
        """Make an example of a text, as the beginning of a document."""
        row = [self.vocabulary.mark, *self.vocabulary.encode(text).tolist()]
        if len(row) > self.length:
            most = self.length - 1
            raise ValueError(f"text: expected at most {most} tokens, as in training, got {len(row) - 1}")
        title = f"text: {text if len(text) <= 60 else text[:59] + '…'}"
        return self._make_example(np.array(row, np.int32), title)

    def _make_example(self, row: Int[np.ndarray, " T"], title: str) -> Example:
        return Example({"inputs": jnp.asarray(row)[None]}, {"": self.spell_row(row)}, title)

    def complete(self, trace: inspection.Trace, model: Any, example: Example) -> inspection.Trace:
        """Add what each layer would predict, and what each head adds to it."""
        row = example.batch["inputs"]
        return inspection.predict_layers(trace, model, row, self.spell, mask=self._separate(row))

    def pictures(self, model: nnx.Module) -> Iterator[Picture]:
        """Draw the beginning of the held-out text: what each token reads to predict the next."""
        inputs = self.held_out["inputs"][:1, :TOKENS_DRAWN]
        _, aux = self.read_with_weights(model, {"inputs": inputs})
        labels = [_make_visible(self.spell(token)) for token in np.asarray(inputs[0])]
        for block in [block for block in aux["blocks"] if block][-1:]:  # linear attention has no weights
            weights = np.asarray(block["weights"][0])
            focus = np.trace(weights, offset=-1, axis1=1, axis2=2)
            yield from draw_heads(weights, labels, labels, "text: what each token reads", focus=focus)

    def spell(self, token: int) -> str:
        """Return the text of a token; that of a document's end is its mark."""
        return self.vocabulary.spell(int(token)).decode("utf-8", "backslashreplace") or END_OF_DOCUMENT

    def _add_up(self, model: Any, batch: Batch) -> Metrics:
        """Return sums over the counted tokens of a batch."""
        logits, targets, counted = self.read(model, batch), batch["targets"], batch["counted"]
        losses = measure_losses(logits, targets)
        return {
            "nats": jnp.sum(losses, where=counted),
            "right": jnp.sum(logits.argmax(-1) == targets, where=counted, dtype=jnp.int32),
            "tokens": jnp.sum(counted, dtype=jnp.int32),
            "bytes": jnp.sum(batch["bytes"], dtype=jnp.int32),
        }


def number_documents(inputs: Int[Array, "*B T"], mark: int) -> Int[Array, "*B T"]:
    """Return the number of each token's document within its row, from 0; a mark begins the next."""
    return jnp.cumsum(inputs == mark, axis=-1, dtype=jnp.int32)


def cut_windows(
    stream: Int[np.ndarray, " N"], length: int
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Cut a stream into overlapping rows in which every token but the first is counted exactly once.

    A row begins half a row after the one before it and counts its second half, so that what is counted has
    seen at least half a row of the stream (of its own document, where that has begun by then); the first row
    counts all of it. The last row ends with the stream; a stream shorter than a row repeats its last token.
    Returns inputs, targets and which of them count.

    Example:
        >>> inputs, targets, counted = cut_windows(np.arange(8), 4)
        >>> inputs.tolist(), counted.astype(int).tolist()
        ([[0, 1, 2, 3], [2, 3, 4, 5], [3, 4, 5, 6]], [[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]])
    """
    total = len(stream) - 1
    if total < length:
        stream = np.pad(stream, (0, length - total), mode="edge")
    last = max(total - length, 0)
    starts = [*range(0, last, length - length // 2), last]
    places = np.array(starts)[:, None] + np.arange(length)[None]
    ends = np.array([0, *(start + length for start in starts[:-1])])
    return stream[places], stream[places + 1], (places >= ends[:, None]) & (places < total)


def _make_visible(text: str) -> str:
    """Make spaces and ends of lines visible, and write what fonts may lack as its code."""
    symbols = {END_OF_DOCUMENT, *VISIBLE.values()}
    shown = (VISIBLE.get(letter, letter) for letter in text)
    return "".join(s if s in symbols or s.isascii() else ascii(s)[1:-1] for s in shown)


def _average(sums: Metrics) -> tuple[jax.Array, Metrics]:
    """Return nats per token, bits per byte (marks cost bits and are no bytes), and the share right."""
    tokens, size = sums["tokens"].astype(jnp.float32), sums["bytes"].astype(jnp.float32)
    token_accuracy = sums["right"].astype(jnp.float32) / tokens
    # A row of nothing but marks has no bytes: its cost per byte is not infinite but of no interest.
    bits_per_byte = sums["nats"] / math.log(2.0) / jnp.maximum(size, 1.0)
    return sums["nats"] / tokens, {"bits_per_byte": bits_per_byte, "token_accuracy": token_accuracy}


def _demand_same_facts(recorded: str, facts: dict[str, Any]) -> None:
    """Raise with the differences from the text that the run began with, as its corpus.json has it."""
    try:
        before = json.loads(recorded)
        if not isinstance(before, dict):
            raise ValueError(f"expected an object, got {str(before)[:80]!r}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{FACTS} of this run is damaged ({error}); bring it back as it was") from error
    differences = "".join(
        f"  {name}: it had {before.get(name)}, now {value}\n"
        for name, value in facts.items()
        if before.get(name) != value
    )
    if differences:
        raise ValueError(
            f"the text is not that with which this run began (training, held out):\n{differences}"
            "bring back the files as they were, or give another directory="
        )


def _take_bytes(texts: Iterator[str], most: int, report: Callable[[int], None]) -> Iterator[str]:
    """Yield texts until there are so many bytes; report how many each has."""
    for text in texts:
        yield text
        size = len(text.encode())
        report(size)
        most -= size
        if most <= 0:
            return
