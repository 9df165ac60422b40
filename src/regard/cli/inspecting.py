"""`regard inspect`: what every head of a pretrained model reads in a text, in words, and as figures."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.table import Table

from regard.cli.commands import Inspect
from regard.cli.console import Console, UsageError
from regard.cli.pictures import Picture, save_pictures
from regard.cli.training import expected_errors
from regard.inspection import figures
from regard.inspection.words import WordReading, join_pieces
from regard.training.compilation import run_once

DEFAULT_WORD = "it"
CELL_WIDTH = 14  # of the table: a word and its share
TOKENS_SHOWN = 40  # more would not be legible in a figure
TITLE_LENGTH = 80


def run_inspecting(command: Inspect, console: Console) -> int:
    """Reads a text with a model, prints who reads what, and draws it."""
    if not command.text.strip():
        raise UsageError("--text is empty; give a sentence")
    directory, out = command.model, command.out or Path("out") / "inspect"
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; give another --out")
    with expected_errors():
        from regard.interop import huggingface

        loaded = huggingface.load(huggingface.find_minilm() if directory is None else directory)
        reading = read_words(loaded, command.text)
        reader = reading.find(_choose_word(command.word, reading))
    word = reading.words[reader]
    drawn = len(reading.weights) - 1 if command.layer is None else command.layer
    if not 0 <= drawn < len(reading.weights):
        raise UsageError(f"--layer must be in 0..{len(reading.weights) - 1}, got {drawn}")
    num_layers, num_heads = reading.weights.shape[:2]
    best, share = reading.most_read(reader)
    name = "all-MiniLM-L6-v2" if directory is None else str(directory)
    console.say(
        f"{name}: {loaded.kind}, {num_layers} layers of {num_heads} heads; {len(reading.words)} words"
    )
    console.say(f'the word that "{word}" reads most in every head, and the share of its attention')
    console.say()
    for part in _tabulate(reading, best, share, console.human.width):
        console.say(part)
        console.say()
    layer, head = np.unravel_index(share.argmax(), share.shape)
    if best[layer, head] >= 0:
        read = reading.words[best[layer, head]]
        amount = f"{share[layer, head]:.2f} in layer {layer}, head {head}"
        console.say(f'most of all, "{word}" reads "{read}": {amount}')
    for path in save_pictures(_draw(reading, reader, drawn, command.text), out, command.format):
        console.say(f"written: {path}")
    for layer, head in np.ndindex(best.shape):
        read = None if best[layer, head] < 0 else reading.words[best[layer, head]]
        console.emit("head", layer=layer, head=head, word=word, reads=read, share=float(share[layer, head]))
    return 0


def read_words(loaded: Any, text: str) -> WordReading:
    """The attention of an encoder or a decoder over a text, in words: weights `(L, H, words, words)`.

    Raises:
        ValueError: when the model has no tokenizer, reads no single text, or the text is too long for it.
    """
    if loaded.tokenizer is None:
        raise ValueError(f"{loaded.directory} has no tokenizer; put its tokenizer.json there")
    if loaded.kind in ("t5", "vit"):
        raise ValueError(f"{loaded.directory} holds {loaded.kind}; give an encoder or a decoder of text")
    encoding = loaded.tokenizer.encode(text)
    if not encoding.ids:
        raise ValueError("text: expected at least one token, got none")
    tokens = jnp.asarray([encoding.ids], jnp.int32)
    _, seen = run_once(lambda tokens: loaded.model(tokens, aux=("weights",)), tokens)
    weights = np.stack([np.asarray(block["weights"][0]) for block in seen["blocks"]])
    return join_pieces(weights, encoding.tokens, encoding.offsets, text)


def _choose_word(asked: str | None, reading: WordReading) -> str:
    """The word asked for; else "it" where the text has one, else its last word."""
    if asked is not None:
        return asked
    known = [word for word, special in zip(reading.words, reading.is_special, strict=True) if not special]
    written = [word for word in known if word[0].isalnum()] or known
    return DEFAULT_WORD if DEFAULT_WORD in known else written[-1]


def _tabulate(reading: WordReading, best: np.ndarray, share: np.ndarray, width: int) -> Iterator[Table]:
    """Heads down and layers across, in as many tables as the terminal's width asks for."""
    num_tables = -(-len(best) // max(1, (width - 4) // CELL_WIDTH))
    per_table = -(-len(best) // num_tables)
    for first in range(0, len(best), per_table):
        layers = range(first, min(first + per_table, len(best)))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("head", justify="right")
        for layer in layers:
            table.add_column(f"layer {layer}", no_wrap=True, max_width=CELL_WIDTH)
        for head in range(best.shape[1]):
            cells = (
                "-"
                if best[layer, head] < 0
                else f"{share[layer, head]:.2f} {reading.words[best[layer, head]]}"
                for layer in layers
            )
            table.add_row(str(head), *cells)
        yield table


def _draw(reading: WordReading, reader: int, layer: int, text: str) -> Iterator[Picture]:
    """What the word reads in every head, and every word in the heads of one layer."""
    shown = slice(0, TOKENS_SHOWN)
    words, word = list(reading.words[shown]), reading.words[reader]
    title = text if len(text) <= TITLE_LENGTH else f"{text[: TITLE_LENGTH - 1]}…"
    layers, heads = reading.weights.shape[:2]
    reads = figures.head_grid(
        reading.weights[:, :, reader, shown],
        head_labels=[f"Layer {number}" for number in range(layers)],
        query_labels=list(map(str, range(heads))),
        key_labels=words,
        title=f'what "{word}" reads: {title}',
    )
    for ax in reads.figure.axes:
        if ax.get_ylabel() == "Query position":
            ax.set_ylabel("Head")
        if ax.get_xlabel() == "Key position":
            ax.set_xlabel("Word")
    yield "reads", reads
    yield (
        f"heads-layer-{layer}",
        figures.head_grid(
            reading.weights[layer, :, shown, shown],
            query_labels=words,
            key_labels=words,
            title=f"layer {layer}: {title}",
        ),
    )
