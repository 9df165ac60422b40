"""The commands and their options as dataclasses; tyro makes the flags and the help from them."""

import functools
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from regard.training.tasks import TASKS, Task


def _option(metavar: str, default: str | None = None) -> Any:
    """How a flag shows its value, and a default that depends on other flags."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=default and f"(default: {default})")


if TYPE_CHECKING:
    TaskChoice = Task
else:
    TaskChoice = functools.reduce(
        operator.or_, (Annotated[task, tyro.conf.subcommand(name)] for name, task in TASKS.items())
    )


@dataclass(frozen=True)
class Demo:
    """Train four small tasks, draw what the models attend to, make pages of it, and check the goals.

    Finished runs in the output directory are reused; --force trains them again.

    Example: regard demo
    """

    out: Annotated[Path | None, _option("DIR", "out/demo, or out/demo-smoke")] = None
    """Output directory."""
    seed: int = 0
    """Seed of parameters, batches and dropout."""
    smoke: bool = False
    """Tiny models, 20 steps each: checks the plumbing, not the goals."""
    force: bool = False
    """Delete the runs in the output directory and start again."""
    quiet: bool = False
    """Print errors only."""
    json: bool = False
    """JSON lines on standard output, text for people on standard error."""


@dataclass(frozen=True)
class Train:
    """Train a model on one task; the same command again goes on where it stopped.

    Example: regard train copy --seed 1
    """

    task: Annotated[TaskChoice, tyro.conf.arg(name="")]
    """What to learn."""
    out: Annotated[Path | None, _option("DIR", "out/TASK, or out/TASK-smoke")] = None
    """Run directory."""
    seed: int = 0
    """Seed of parameters, batches and dropout."""
    smoke: bool = False
    """Tiny model, 20 steps: checks the plumbing. Settings you give yourself stay."""
    resume: Annotated[str, _option("auto|never|DIR")] = "auto"
    """Where to start: auto goes on from this run's checkpoint; never refuses a directory that holds a run;
    DIR is another run or checkpoint of the same model, from which other steps, rates or seeds go on."""
    force: bool = False
    """Delete the run in the output directory and start again."""
    mesh: Annotated[str | None, _option("AXIS=N,...", "one device; data=* for several processes")] = None
    """Devices that share the work: data (rows of a batch), fsdp (rows, and parameters), tensor (heads and
    widths) and sequence (positions), such as data=2,fsdp=4. One N may be *: what is left. A run may go on on
    another mesh."""
    coordinator: Annotated[str | None, _option("HOST:PORT|auto", "as the launcher says")] = None
    """Of several processes, where the first one listens; auto lets JAX find all three, as on Cloud TPUs."""
    processes: Annotated[int | None, _option("N", "as the launcher says, or 1")] = None
    """How many processes run this command; Slurm, Open MPI and JAX_NUM_PROCESSES are understood."""
    process: Annotated[int | None, _option("I", "as the launcher says")] = None
    """Which one this is, from 0; the first one writes."""
    quiet: bool = False
    """Print errors only."""
    json: bool = False
    """JSON lines on standard output, text for people on standard error."""

    @property
    def directory(self) -> Path:
        """The run directory."""
        name = self.task.name
        return self.out or Path("out") / (f"{name}-smoke" if self.smoke else name)


@dataclass(frozen=True)
class Generate:
    """Write text with a trained model, shown while it is made.

    Example: regard generate out/text --prompt 'The for statement' --top-p 0.95
    """

    source: Annotated[tyro.conf.Positional[Path], _option("RUN|DIR")]
    """A run of `regard train text`, or a directory with a Hugging Face model: config.json, safetensors and
    tokenizer.json."""
    prompt: tyro.conf.UseAppendAction[tuple[Annotated[str, _option("TEXT")], ...]] = ()
    """What to go on with, or to answer; give it several times for several texts."""
    max_tokens: int = 200
    """Tokens to write at most."""
    temperature: Annotated[float | None, _option("X", "0.8")] = None
    """Below 1 likelier tokens, above 1 more variety; 0 always the most probable token."""
    top_k: Annotated[int | None, _option("N", "all")] = None
    """Draw from the most probable tokens only."""
    top_p: Annotated[float | None, _option("P", "1")] = None
    """Draw from the fewest tokens that hold this share of the probability."""
    min_p: Annotated[float | None, _option("P", "0")] = None
    """Draw from tokens at least this many times as probable as the most probable one."""
    repetition_penalty: Annotated[float | None, _option("X", "1, which is none")] = None
    """Above 1, tokens that were there before are less probable."""
    seed: int = 0
    """Seed of what is drawn."""
    beams: Annotated[int | None, _option("N", "draw instead")] = None
    """Search the likeliest text, going on with this many at a time."""
    stop: tyro.conf.UseAppendAction[tuple[Annotated[str, _option("TEXT")], ...]] = ()
    """End before this text; may be given several times."""
    quiet: bool = False
    """Print the text, and errors, only."""
    json: bool = False
    """JSON lines on standard output."""


@dataclass(frozen=True)
class Plot:
    """Draw the curves, the heads and the attention of finished or running runs; several are also compared.

    Example: regard plot out/copy
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories."""
    format: Literal["png", "svg", "pdf"] = "png"
    """Kind of files to write, into RUN/figures."""


@dataclass(frozen=True)
class Inspect:
    """Look into every head of a model at work: a table, figures, and a page to look around in.

    Of a pretrained model of text, the table says which word a word reads most; of a run, how each head
    reads an example that it was not trained on. Without a model it takes all-MiniLM-L6-v2, a small BERT, from
    the package that `make pretrained` installs.

    Example: regard inspect --text 'The cat sat on the mat because it was tired.'
    """

    model: Annotated[tyro.conf.Positional[Path | None], _option("RUN|DIR", "MiniLM")] = None
    """A run of `regard train`, or a folder with a Hugging Face model of text: config.json, safetensors,
    tokenizer.json."""
    text: Annotated[str | None, _option("TEXT", "a sentence, or held-out text")] = None
    """What to read, by a pretrained model or a run of text."""
    word: Annotated[str | None, _option("WORD", "it, or the last word")] = None
    """Whose reading is printed."""
    layer: Annotated[int | None, _option("N", "the last")] = None
    """Layer whose heads are drawn."""
    out: Annotated[Path | None, _option("DIR", "out/inspect, or RUN/figures")] = None
    """Where figures and the page, explorer.html, go."""
    format: Literal["png", "svg", "pdf"] = "png"
    """Kind of figures."""
    save: Annotated[Path | None, _option("FILE.regard", "nothing is kept")] = None
    """Keep what was seen in a file, for `regard view` and `regard.inspection.load`."""
    keep_qk: bool = False
    """Keep queries and keys in it too: then every zoom is exact, and much of the text can be guessed."""
    quiet: bool = False
    """Print errors only."""
    json: bool = False
    """JSON lines on standard output, text for people on standard error."""


@dataclass(frozen=True)
class View:
    """Look around in what a model attends to, in the browser, exactly at every zoom; Ctrl-C ends it.

    The page is served to this machine alone, at an address that holds a secret.

    Example: regard view out/digits
    """

    source: Annotated[tyro.conf.Positional[Path], _option("FILE|RUN")]
    """A file of `regard inspect --save` or `Trace.save`, or a run, of which a held-out example is watched."""
    compare: Annotated[Path | None, _option("FILE|RUN", "nothing")] = None
    """Another one, to be laid beside it."""
    port: Annotated[int, _option("N", "one that is free")] = 0
    """Where to serve."""
    no_browser: bool = False
    """Print the address only."""
    quiet: bool = False
    """Print errors only."""
    json: bool = False
    """JSON lines on standard output, text for people on standard error."""


@dataclass(frozen=True)
class Explain:
    """Say which backend would serve an attention call, why, and how much work it is; nothing is computed.

    Example: regard explain --shape 1,8,4096,64 --mask 'causal() & sliding_window(256)'
    """

    shape: Annotated[str, _option("N,N,...")]
    """Shape of query: leading axes, heads, length, width."""
    key_shape: Annotated[str | None, _option("N,N,...", "that of query")] = None
    """Shape of key."""
    value_shape: Annotated[str | None, _option("N,N,...", "that of key")] = None
    """Shape of value."""
    mask: Annotated[str | None, _option("EXPRESSION", "everybody to everybody")] = None
    """Who may attend to whom, such as 'causal() & sliding_window(256)'."""
    query_offset: Annotated[int | None, _option("N", "0 when lengths are equal")] = None
    """Position of the first query."""
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"
    """Type of query, key and value."""
    backend: Annotated[str | None, _option("NAME", "the best that serves")] = None
    """Ask for one backend."""
    picture: bool = False
    """Draw the mask too."""


@dataclass(frozen=True)
class Plan:
    """Say which mesh of devices is best for attention at a length, and what it costs; nothing is allocated.

    Example: regard plan --length 1M --heads 32 --key-heads 8 --devices 256 --chip h100 --mask 'causal()'
    """

    length: Annotated[str, _option("N")]
    """Tokens, such as 4096, 128k or 1M: powers of 1024."""
    heads: Annotated[int, _option("N")]
    """Query heads."""
    devices: Annotated[int, _option("N")]
    """How many there are."""
    chip: Annotated[str, _option("NAME")]
    """What they are: a100, h100, h200, b200, v5e, v5p, v6e, or cpu for this machine, which is measured."""
    key_heads: Annotated[int | None, _option("N", "as many as heads")] = None
    """Heads of keys and values."""
    width: int = 128
    """Of a head."""
    batch: int = 1
    """Sequences."""
    mask: Annotated[str | None, _option("EXPRESSION", "everybody to everybody")] = None
    """Who may attend to whom, such as 'causal() & sliding_window(8191)'."""
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    """Type of query, key and value."""
    backward: bool = False
    """Weigh the gradients, too."""
    fix: Annotated[str | None, _option("AXIS=N,...", "all are chosen")] = None
    """Sizes of mesh axes that are given, such as 'data=2,heads=1'; data, sequence, exchange, heads."""
    efficiency: float = 0.5
    """Share of the chip's operations per second that attention reaches."""
    top: int = 5
    """How many meshes to show."""
    quiet: bool = False
    """Print errors only."""
    json: bool = False
    """JSON lines on standard output, text for people on standard error."""


@dataclass(frozen=True)
class Tune:
    """Measure which tiles are fastest here, and from which size on; later calls of attend use it."""

    dry_run: bool = False
    """Print what was found and write nothing."""


@dataclass(frozen=True)
class Bench:
    """Time Regard beside other attention libraries that are installed; `bench tune` measures this machine.

    Example: regard bench --quick --cases window decode
    """

    action: (
        Annotated[None, tyro.conf.subcommand("measure", description="Measure cases and peers.")]
        | Annotated[Tune, tyro.conf.subcommand("tune")]
    ) = None
    """What to do."""
    cases: Annotated[tuple[str, ...], _option("WORD ...", "all")] = ()
    """Cases whose name holds one of these words."""
    dtypes: Annotated[
        tuple[Literal["float32", "bfloat16"], ...], _option("{float32,bfloat16} ...", "both")
    ] = ()
    """Types of query, key and value."""
    peers: Annotated[tuple[str, ...], _option("NAME ...", "all that are installed")] = ()
    """Whom to measure; Regard's own choice of backend always is."""
    rounds: Annotated[int | None, _option("N", "7, with --quick 3")] = None
    """How often each is timed; the median counts."""
    quick: bool = False
    """A first look: a quarter of the lengths, three rounds; for tune a few sizes, and nothing is written."""
    out: Annotated[Path | None, _option("DIR", "out/bench, or out/bench-quick")] = None
    """Output directory."""
    force: bool = False
    """Replace the results in the output directory."""
    quiet: bool = False
    """Print errors only."""
    json: bool = False
    """JSON lines on standard output, text for people on standard error."""


@dataclass(frozen=True)
class Doctor:
    """Print versions, devices, backends and optional packages, for bug reports.

    Example: regard doctor
    """

    json: bool = False
    """One JSON object instead of text."""


DESCRIPTION = "Attention for JAX: exact, composable, inspectable."

Command = Demo | Train | Generate | Plot | Inspect | View | Explain | Plan | Bench | Doctor

CommandChoice = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Plot, tyro.conf.subcommand("plot")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[View, tyro.conf.subcommand("view")]
    | Annotated[Explain, tyro.conf.subcommand("explain")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)

_STYLE = (
    tyro.conf.CascadeSubcommandArgs,  # `train copy --out DIR` as well as `train --out DIR copy`
    tyro.conf.OmitArgPrefixes,
    tyro.conf.OmitSubcommandPrefixes,
    tyro.conf.FlagCreatePairsOff,
)


@dataclass(frozen=True)
class _Line:
    """A whole command line; the field's name appears in errors about settings that do not fit together."""

    regard: Annotated[CommandChoice, tyro.conf.arg(name="")]


def parse_arguments(arguments: Sequence[str] | None = None) -> Command:
    """Turns words into a command.

    Raises:
        SystemExit: 0 after printing help, 2 after printing what was not understood and what is near it.
    """
    words = sys.argv[1:] if arguments is None else arguments
    return tyro.cli(_Line, prog="regard", description=DESCRIPTION, args=words, config=_STYLE).regard
