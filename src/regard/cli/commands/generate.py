"""`regard generate`: its options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from regard.cli.declaration import Command, Output, conf, option


@dataclass(frozen=True)
class TextOutput(Output):
    """The streams that words go to."""

    quiet: bool = False
    """Print the text, and errors, only."""


@dataclass(frozen=True)
class Generate(Command):
    """Write text with a trained model, shown while it is made.

    Example: regard generate out/text --prompt 'The for statement' --top-p 0.95
    """

    RUNS = "regard.cli.generating:run_generating"

    source: Annotated[conf.Positional[Path], option("RUN|DIR")]
    """A run of `regard train text`, or a directory with a Hugging Face model: config.json, safetensors and
    tokenizer.json."""
    prompt: conf.UseAppendAction[tuple[Annotated[str, option("TEXT")], ...]] = ()
    """Text to go on with, or to answer; give it several times for several texts."""
    max_tokens: int = 200
    """Tokens to write at most."""
    temperature: Annotated[float | None, option("X", "0.8")] = None
    """Below 1 likelier tokens, above 1 more variety; 0 always the most probable token."""
    top_k: Annotated[int | None, option("N", "all")] = None
    """Draw from the most probable tokens only."""
    top_p: Annotated[float | None, option("P", "1")] = None
    """Draw from the fewest tokens that hold this share of the probability."""
    min_p: Annotated[float | None, option("P", "0")] = None
    """Draw from tokens at least this many times as probable as the most probable one."""
    repetition_penalty: Annotated[float | None, option("X", "1, which is none")] = None
    """Above 1, tokens that were there before are less probable."""
    seed: Annotated[int | None, option("N", "0")] = None
    """Seed of what is drawn."""
    beams: Annotated[int | None, option("N", "draw instead")] = None
    """Search the likeliest text, going on with this many at a time."""
    stop: conf.UseAppendAction[tuple[Annotated[str, option("TEXT")], ...]] = ()
    """End before this text; may be given several times."""
    cache_dtype: Literal[None, "int8"] = None
    """Keep keys and values of the text in int8, a quarter of float32's memory, at the cost of rounding."""
    output: TextOutput = TextOutput()
