"""`regard inspect`: its options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from regard.cli.declaration import Command, Output, conf, option


@dataclass(frozen=True)
class Inspect(Command):
    """Look into every head of a model at work: a table, figures, and a page to look around in.

    Of a pretrained model of text, the table says which other word a word reads most, special tokens left out;
    of a run, how each head reads an example that it was not trained on. Without a model it takes
    all-MiniLM-L6-v2, a small BERT, from the package that `make pretrained` installs.

    Example: regard inspect --text 'The cat sat on the mat because it was tired.'
    """

    RUNS = "regard.cli.inspecting:run_inspecting"

    model: Annotated[conf.Positional[Path | None], option("RUN|DIR", "MiniLM")] = None
    """A run of `regard train`, or a folder with a Hugging Face model of text: config.json, safetensors,
    tokenizer.json."""
    text: Annotated[str | None, option("TEXT", "a sentence, or held-out text")] = None
    """Text to read, by a pretrained model or a run of text."""
    word: Annotated[str | None, option("WORD", "it, or the last word")] = None
    """Whose reading is printed: of several, that of the first that reads another word."""
    layer: Annotated[int | None, option("N", "the last")] = None
    """Layer whose heads are drawn; of a hybrid, one of those with weights."""
    out: Annotated[Path | None, option("DIR", "out/inspect, or RUN/figures")] = None
    """Folder for figures and the page, explorer.html."""
    format: Literal["png", "svg", "pdf"] = "png"
    """Kind of figures."""
    save: Annotated[Path | None, option("FILE.regard", "nothing is kept")] = None
    """Keep what was seen in a file, for `regard view` and `regard.inspection.load`."""
    keep_qk: bool = False
    """Keep queries and keys in it too: then every zoom is exact, and much of the text can be guessed."""
    output: Output = Output()
