"""Learning a language: rows of text, what a token may see in them, and what the text costs in bits per byte.

Documents lie end to end in one stream, a mark before, between and after them. A training row is the stream
from a random place on. The mark belongs to the document after it: there a token sees the mark and what has
been read since, and predicts the next; the last one predicts the next mark. So every token is predicted from
its own document alone, and none is left out.
"""

import functools
import hashlib
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Int

from regard import masks
from regard.models import Decoder, Sampling, TransformerConfig, generate
from regard.training import presets
from regard.training.corpora import Documents, measure_overlap, read_documents, read_manual, split_documents
from regard.training.task import Batch, Metrics, Task
from regard.training.vocabularies import (
    NUM_BYTES,
    ByteVocabulary,
    PairVocabulary,
    count_bytes,
    lay_end_to_end,
    train_pairs,
)

SAMPLE_TEMPERATURE = 0.8  # likely tokens come more often than in the documents, which reads better
TOKENIZER, FACTS = "tokenizer.json", "corpus.json"


class TextTask(Task[presets.Text]):
    """Documents packed into rows; the next token at every position, none of it across documents."""

    @functools.cached_property
    def documents(self) -> tuple[Documents, Documents]:
        """Training and held-out documents, read when first asked for: a loaded model does not need them."""
        preset = self.preset
        found = (
            read_documents(preset.files, piece_bytes=preset.document_bytes) if preset.files else read_manual()
        )
        return split_documents(found, preset.held_out_fraction, preset.data_seed)

    @functools.cached_property
    def vocabulary(self) -> ByteVocabulary:
        """Tokens; those of BPE as the run keeps them, trained on the training documents for a new run."""
        if self.preset.vocab_size == NUM_BYTES:
            return ByteVocabulary()
        if TOKENIZER in self.kept:
            return PairVocabulary(self.kept[TOKENIZER])
        return train_pairs(self.documents[0].values(), self.preset.vocab_size)

    @functools.cached_property
    def streams(self) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " M"]]:
        """Training and held-out tokens.

        Raises:
            ValueError: when they are not those that the run began with, or too short for a row.
        """
        training, held_out = (
            lay_end_to_end(self.vocabulary, list(documents.values())) for documents in self.documents
        )
        if len(training) <= self.preset.length:
            raise ValueError(
                f"length must be below the {len(training)} training tokens, got {self.preset.length}; "
                "ask for a shorter --length, or give more text"
            )
        if FACTS in self.kept:
            _demand_same_facts(json.loads(self.kept[FACTS]), self._describe(training, held_out))
        return training, held_out

    @functools.cached_property
    def training_data(self) -> dict[str, np.ndarray]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The stream of training documents, and how many bytes each token stands for."""
        small = np.uint16 if self.vocabulary.size <= 2**16 else np.int32
        return {"stream": self.streams[0].astype(small), "bytes": count_bytes(self.vocabulary)}

    @property
    def config(self) -> TransformerConfig:
        sizes = self.preset.model
        return TransformerConfig(
            d_model=sizes.d_model,
            num_heads=sizes.num_heads,
            d_ff=sizes.d_ff,
            num_layers=sizes.num_layers,
            dropout_rate=sizes.dropout_rate,
            vocab_size=self.vocabulary.size,
            max_length=self.preset.length,
            positions="rotary",
            norm_kind="rms",
            activation="silu",
            gated=True,
            attention_bias=False,
            feed_forward_bias=False,
            tied_output=True,
        )

    def make_model(self, rngs: nnx.Rngs) -> Decoder:
        return Decoder(self.config, rngs=rngs)

    def make_batch(self, rng: jax.Array, batch_size: int) -> Batch:
        return self.draw(jax.tree.map(jnp.asarray, self.training_data), rng, batch_size)

    def draw(self, training_data: dict[str, Any], rng: jax.Array, batch_size: int) -> Batch:
        """Rows from random places of the stream, with repetition: every place is as likely as any other."""
        stream, length = training_data["stream"], self.preset.length
        places = jax.random.randint(rng, (batch_size,), 0, stream.shape[0] - length)
        rows = jax.vmap(lambda place: jax.lax.dynamic_slice(stream, (place,), (length + 1,)))(places)
        rows = rows.astype(jnp.int32)
        targets = rows[:, 1:]
        return {
            "inputs": rows[:, :-1],
            "targets": targets,
            "counted": jnp.ones(targets.shape, bool),
            "bytes": training_data["bytes"][targets].sum(-1),
        }

    def make_held_out(self) -> Batch:
        """All held-out text in overlapping rows; see `cut_windows`."""
        inputs, targets, counted = cut_windows(self.streams[1], self.preset.length)
        sizes = np.where(counted, count_bytes(self.vocabulary)[targets], 0).sum(-1)
        batch = {"inputs": inputs, "targets": targets, "counted": counted, "bytes": sizes.astype(np.int32)}
        return jax.tree.map(jnp.asarray, batch)

    def read(self, model: Any, inputs: Int[Array, "B T"], aux: tuple[str, ...] = ()) -> Any:
        """Logits of the next token, every token seeing its own document up to itself."""
        documents = number_documents(inputs, self.vocabulary.mark)
        return model(inputs, mask=masks.segments(documents, documents), aux=aux)

    def look(self, model: Any, batch: Batch, aux: tuple[str, ...]) -> Any:
        return self.read(model, batch["inputs"], aux)[1]

    def measure(self, model: nnx.Module, batch: Batch) -> tuple[jax.Array, Metrics]:
        return _average(self._add_up(model, batch))

    def evaluate(self, model: nnx.Module, batch: Batch) -> Metrics:
        """As measured, as many rows at a time as in training: memory that holds those is enough."""
        count = len(batch["inputs"])
        at_once = min(count, self.preset.optimization.batch_size)
        missing = -count % at_once

        def group(values: jax.Array) -> jax.Array:
            padded = jnp.pad(values, ((0, missing), *((0, 0),) * (values.ndim - 1)))
            return padded.reshape(-1, at_once, *values.shape[1:])

        sums = jax.lax.map(lambda rows: self._add_up(model, rows), jax.tree.map(group, batch))
        loss, metrics = _average(jax.tree.map(lambda values: values.sum(0), sums))
        return {"loss": loss, **metrics}

    def attention_calls(self) -> dict[str, tuple[int, int, masks.Mask | None]]:
        length = self.preset.length
        documents = number_documents(jnp.asarray(self.streams[0][:length]), self.vocabulary.mark)
        return {"self-attention": (length, length, masks.causal() & masks.segments(documents, documents))}

    def keep(self) -> dict[str, str]:
        """tokenizer.json where there is one, and corpus.json, by which a changed corpus is known."""
        text = self.vocabulary.to_json()
        facts = json.dumps(self._describe(*self.streams), indent=2) + "\n"
        return ({} if text is None else {TOKENIZER: text}) | {FACTS: facts}

    def write_sample(self, model: Any) -> str:
        """Returns the beginning of a document that the model makes up, the same one every time."""
        written = generate(
            model,
            [[self.vocabulary.mark]],
            max_tokens=self.preset.length,
            sampling=Sampling(temperature=SAMPLE_TEMPERATURE),
            stop_tokens=(self.vocabulary.mark,),
            rng=jax.random.key(0),
        )
        return self.vocabulary.decode(written.rows()[0])

    def describe_data(self) -> dict[str, str]:
        training, held_out = self.documents
        optimization, length = self.preset.optimization, self.preset.length
        tokens = len(self.streams[0]) - 1
        epochs = optimization.steps * optimization.batch_size * length / tokens
        overlap = measure_overlap(training, held_out)
        kind = (
            "bytes" if self.vocabulary.size == NUM_BYTES + 1 else f"{self.vocabulary.mark:,} strings of bytes"
        )
        return {
            "batch": f"{optimization.batch_size} rows of {length} tokens, {epochs:.1f} epochs in all",
            "corpus": f"{_describe_documents(training)}; {tokens:,} tokens, which are {kind} and a mark",
            "held out": f"{_describe_documents(held_out)} in {len(self.held_out['inputs'])} rows; "
            f"{overlap:.1%} of its lines stand in training documents too",
        }

    def _add_up(self, model: Any, batch: Batch) -> Metrics:
        """Sums over the counted tokens of a batch."""
        logits, targets, counted = self.read(model, batch["inputs"]), batch["targets"], batch["counted"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return {
            "nats": jnp.sum(losses, where=counted),
            "right": jnp.sum(logits.argmax(-1) == targets, where=counted, dtype=jnp.int32),
            "tokens": jnp.sum(counted, dtype=jnp.int32),
            "bytes": jnp.sum(batch["bytes"], dtype=jnp.int32),
        }

    def _describe(self, training: np.ndarray, held_out: np.ndarray) -> dict[str, Any]:
        """The contents of corpus.json."""
        text = self.vocabulary.to_json()
        return {
            "documents": [len(documents) for documents in self.documents],
            "bytes": [_count_bytes(documents) for documents in self.documents],
            "tokens": [len(training), len(held_out)],
            "sha256": [_digest(training.tobytes()), _digest(held_out.tobytes())],
            "tokenizer": None if text is None else _digest(text.encode()),
        }


def number_documents(inputs: Int[Array, "*B T"], mark: int) -> Int[Array, "*B T"]:
    """Returns the number of each token's document within its row; a mark begins the next.

    Example:
        >>> number_documents(jnp.array([[5, 9, 3, 3, 9]]), 9).tolist()
        [[0, 1, 1, 1, 2]]
    """
    return jnp.cumsum(inputs == mark, axis=-1, dtype=jnp.int32)


def cut_windows(
    stream: Int[np.ndarray, " N"], length: int
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Cuts a stream into overlapping rows in which every token but the first is counted exactly once.

    A row begins half a row after the one before it and counts its second half, so that what is counted has
    seen at least half a row of the stream (of its own document, where that has begun by then); the first row
    counts all of it. The last row ends with the stream.

    Args:
        stream: at least two tokens.
        length: tokens that a row reads, at least 2.

    Returns:
        Inputs, targets (the stream one place on) and which of them count. A stream shorter than a row is
        one row that repeats its last token.

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


def _average(sums: Metrics) -> tuple[jax.Array, Metrics]:
    """Nats per token, bits per byte of the text (marks cost bits and are no bytes), and the share right."""
    tokens, size = (sums[name].astype(jnp.float32) for name in ("tokens", "bytes"))
    loss = sums["nats"] / tokens
    right = sums["right"].astype(jnp.float32)
    # A row of nothing but marks has no bytes: its cost per byte is not infinite but of no interest.
    bits_per_byte = sums["nats"] / math.log(2.0) / jnp.maximum(size, 1.0)
    return loss, {"bits_per_byte": bits_per_byte, "token_accuracy": right / tokens}


def _demand_same_facts(kept: dict[str, Any], found: dict[str, Any]) -> None:
    """Raises with what has changed since the run began."""
    differences = [
        f"  {name}: it had {kept.get(name)}, now {found[name]}"
        for name in found
        if kept.get(name) != found[name]
    ]
    if differences:
        raise ValueError(
            "\n".join(
                [
                    "the text is not that with which this run began (training, held out):",
                    *differences,
                    "bring back the files and tokenizer.json as they were, or give another --out",
                ]
            )
        )


def _describe_documents(documents: Documents) -> str:
    return f"{len(documents):,} documents of {_count_bytes(documents):,} bytes"


def _count_bytes(documents: Documents) -> int:
    return sum(len(text.encode()) for text in documents.values())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
