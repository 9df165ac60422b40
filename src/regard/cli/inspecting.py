"""`regard inspect`: what every head of a model reads, as a table, as figures and as a page."""

import itertools
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.table import Table

from regard import inspection, readouts
from regard.cli import continuation, text_readers
from regard.cli.commands import Inspect
from regard.cli.console import Console, UsageError, expected_errors, new_table
from regard.cli.pictures import Picture, draw_trace, save_pictures, shorten_name
from regard.cli.sources import load_run
from regard.inspection import Trace, figures
from regard.inspection.traces.files import check_target
from regard.inspection.words import WordReading, join_pieces
from regard.models import Decoder
from regard.paths import find_file
from regard.training import history, runs

DEFAULT_WORD = "it"
CELL_WIDTH = 14  # of the table: a word and its share
TOKENS_SHOWN = 40  # more would not be legible in a figure


def run_inspecting(command: Inspect, console: Console, page: Path | None = None) -> int:
    """Look into a run or a pretrained model; the page goes beside the figures unless said otherwise."""
    run = command.model if command.model is not None and runs.is_run(command.model) else None
    out = command.out or (Path("out") / "inspect" if run is None else run / "figures")
    _check_arguments(command, out)
    if run is not None:
        return _inspect_run(command, run, console, out, page)
    if command.text is not None and not command.text.strip():
        raise UsageError("--text is empty; give a sentence")
    directory = command.model
    text = text_readers.DEFAULT_TEXT if command.text is None else command.text
    with expected_errors():
        from regard.interop import huggingface

        loaded = huggingface.load(huggingface.find_minilm() if directory is None else directory)
        reading, trace = watch_text(loaded, text)
        reader = reading.find(_choose_word(command.word, reading))
    word = reading.words[reader]
    drawn = len(reading.weights) - 1 if command.layer is None else command.layer
    if not 0 <= drawn < len(reading.weights):
        raise UsageError(f"--layer must be in 0..{len(reading.weights) - 1}, got {drawn}")
    num_layers, num_heads = reading.weights.shape[:2]
    best, share = reading.most_read(reader)
    most_read = np.array([*reading.words, None], object)[best]  # -1 is no word
    name = "all-MiniLM-L6-v2" if directory is None else str(directory)
    size = f"{num_layers} layers of {num_heads} heads; {len(reading.words)} words"
    console.say(f"{name}: {loaded.kind}, {size}")
    console.say(f'the word that "{word}" reads most in every head, and the share of its attention\n')
    for part in _tabulate(most_read, share, console.human.width):
        console.say(part)
        console.say()
    layer, head = np.unravel_index(share.argmax(), share.shape)
    if best[layer, head] >= 0:
        amount = f"{share[layer, head]:.2f} in layer {layer}, head {head}"
        console.say(f'most of all, "{word}" reads "{most_read[layer, head]}": {amount}')
    drawings = itertools.chain(_draw(reading, reader, drawn, trace.title), draw_trace(trace))
    _write(command, console, trace, drawings, out, page)
    for layer, head in np.ndindex(best.shape):
        read, part = most_read[layer, head], float(share[layer, head])
        console.emit("head", layer=layer, head=head, word=word, reads=read, share=part)
    return 0


def watch_text(loaded: Any, text: str) -> tuple[WordReading, Trace]:
    """Return a model's attention over a text: between words, `(L, H, words, words)`, and the whole trace."""
    text_readers.demand_text_reader(loaded)
    encoding = text_readers.encode(loaded, text)
    tokens, title = text_readers.name_tokens(encoding), text_readers.shorten_title(text)
    with inspection.capture(loaded.model, tokens=tokens, title=title) as trace:
        loaded.model(jnp.asarray([encoding.ids], jnp.int32))
    if isinstance(loaded.model, Decoder):
        spell = partial(text_readers.spell_token, loaded)
        trace = inspection.predict_layers(trace, loaded.model, encoding.ids, spell)
    weights = np.stack([call.window() for call in trace.calls])
    return join_pieces(weights, encoding.tokens, encoding.offsets, text), trace


def _check_arguments(command: Inspect, out: Path) -> None:
    """Raise for arguments that would be found wrong only after the work is done."""
    if file := find_file(out):
        raise UsageError(f"{file} is a file; give another --out")
    if command.keep_qk and command.save is None:
        raise UsageError("--keep-qk says what --save keeps; give --save FILE.regard too")
    if command.save is not None and command.save.is_dir():
        file = command.save / "trace.regard"
        raise UsageError(f"--save: {command.save} is a folder; give a file in it, such as {file}")
    # Figures are saved first, and make these.
    new_folders = {folder.absolute() for folder in (out, *out.parents) if not folder.exists()}
    if command.save is not None and command.save.parent.absolute() not in new_folders:
        try:
            check_target(command.save)
        except OSError as error:
            raise UsageError(str(error).replace("path:", "--save:", 1)) from error
    if command.model is not None and not command.model.is_dir():
        is_file = command.model.is_file()
        problem = f"{command.model} is a file" if is_file else f"there is no {command.model}"
        hint = ""
        if is_file and command.model.suffix == ".regard":
            view = continuation.spell_command("view", command.model)
            hint = f"; what is kept in a file is shown by: {view}"
        raise UsageError(f"{problem}; give the folder of a run, or of a Hugging Face model{hint}")


def _inspect_run(command: Inspect, directory: Path, console: Console, out: Path, page: Path | None) -> int:
    """Show how each head of a run's model reads an example."""
    if command.word is not None or command.layer is not None:
        raise UsageError("--word and --layer are for pretrained models of text, not for runs")
    with expected_errors():
        task, model = load_run(directory)
        trace = task.watch(model, command.text)
        training = history.training_document(directory)
    layers = f"{len(trace.calls)} attention layer{'s' if len(trace.calls) != 1 else ''}"
    console.say(f"{trace.title}: {type(model).__name__}, {layers}\n")
    table = new_table("attention", "head", "entropy", "largest logit", "reads")
    table.columns[0].no_wrap, table.columns[-1].justify = True, "left"
    for call in trace.calls:
        readout = call.readout()
        entropies, labels = np.asarray(readouts.average(readout)["entropy"]), readouts.label(readout)
        for head in range(call.heads):
            entropy, largest = float(entropies[head]), float(call.max_score[head].max(initial=-math.inf))
            by_label = {label.name: float(label.value) for label in labels[(head,)]}
            layer = "" if head else shorten_name(call.name)
            reads = ", ".join(f"{name} {value:.2f}" for name, value in by_label.items())
            table.add_row(layer, str(head), f"{entropy:.2f}", f"{largest:.2f}", reads)
            values = {"entropy_nats": entropy, "max_score": largest, "labels": by_label}
            console.emit("head", attention=call.name, head=head, **values)
    console.say(table)
    console.say()
    _write(command, console, trace, draw_trace(trace), out, page, training)
    return 0


def _write(
    command: Inspect,
    console: Console,
    trace: Trace,
    drawings: Iterator[Picture],
    out: Path,
    page: Path | None,
    training: dict[str, Any] | None = None,
) -> None:
    """Write figures, the page and, if asked for, the trace; say where."""
    with expected_errors():
        written = save_pictures(drawings, out, command.format)
        written.append(trace.explore(page or out / "explorer.html", training=training))
        if command.save is not None:
            written.append(trace.save(command.save, keep="qk" if command.keep_qk else "statistics"))
    for path in written:
        console.say(f"written: {path}")
    if command.save is not None:
        console.say(f"next: {continuation.spell_command('view', command.save)}")


def _choose_word(asked: str | None, reading: WordReading) -> str:
    """Return the word asked for; else "it" where the text has one, else its last word."""
    if asked is not None:
        return asked
    words = [word for word, special in zip(reading.words, reading.is_special, strict=True) if not special]
    written = [word for word in words if word[0].isalnum()] or words
    return DEFAULT_WORD if DEFAULT_WORD in words else written[-1]


def _tabulate(most_read: np.ndarray, share: np.ndarray, width: int) -> Iterator[Table]:
    """Lay heads down and layers across, in as many tables as the terminal's width asks for."""
    num_tables = -(-len(share) // max(1, (width - 4) // CELL_WIDTH))
    per_table = -(-len(share) // num_tables)
    for first in range(0, len(share), per_table):
        layers = range(first, min(first + per_table, len(share)))
        table = new_table(gap=2)
        table.add_column("head", justify="right")
        for layer in layers:
            table.add_column(f"layer {layer}", no_wrap=True, max_width=CELL_WIDTH)
        for head in range(share.shape[1]):
            parts = [(most_read[layer, head], share[layer, head]) for layer in layers]
            table.add_row(str(head), *("-" if word is None else f"{part:.2f} {word}" for word, part in parts))
        yield table


def _draw(reading: WordReading, reader: int, layer: int, title: str) -> Iterator[Picture]:
    """Draw what the word reads in every head, and every word in the heads of one layer."""
    shown = slice(0, TOKENS_SHOWN)
    words, word = list(reading.words[shown]), reading.words[reader]
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
    weights, title = reading.weights[layer, :, shown, shown], f"layer {layer}: {title}"
    heads_of_layer = figures.head_grid(weights, query_labels=words, key_labels=words, title=title)
    yield f"heads-layer-{layer}", heads_of_layer
