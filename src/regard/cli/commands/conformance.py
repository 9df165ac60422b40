"""`regard conformance`: what a function of attention promises, checked against the definition."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from regard.cli.console import Console, UsageError, expected_errors
from regard.cli.declaration import Command, Output, conf, option


@dataclass(frozen=True)
class Conformance(Command):
    """Check a function of attention: by which conventions it answers, and where it is wrong.

    Ends with 0 where something holds and nothing is wrong, with 1 otherwise, and with 2 for a wrong argument.

    Example: regard conformance jax.nn:dot_product_attention --layout BTHD
    """

    EXTRA = "train"
    ALIASES: ClassVar = {"features": "feature"}

    function: Annotated[str, conf.Positional, option("MODULE:FUNCTION")]
    """A module or a file, and the function in it to check."""
    layout: Annotated[str, option("LETTERS")] = "BHTD"
    """Axes of query: batch, heads, tokens, width."""
    feature: Annotated[tuple[str, ...], option("NAME=KEYWORD ...", "those of the signature")] = ()
    """Features that the function takes, and their keywords."""
    sizes: Literal["quick", "full"] = "quick"
    """The size of the check."""
    arrays: Literal["jax", "numpy", "torch"] = "jax"
    """The arrays that the function takes."""
    dtypes: Annotated[tuple[str, ...], option("NAME ...")] = ("float32", "float64", "bfloat16", "float16")
    """Types that are checked."""
    tolerance: Annotated[float, option("FACTOR")] = 2.0
    """The factor on the error of a plain evaluation that is allowed."""
    only: Annotated[str, option("WORDS", "all")] = ""
    """Promises whose name holds these words."""
    seconds: Annotated[float, option("N")] = 60.0
    """The longest time that one call may take."""
    markdown: bool = False
    """Print a Markdown table."""
    output: Output = Output()

    def run(self, console: Console) -> int:
        """Check the function and print its report; return 1 where a row is wrong."""
        from regard.conformance import check

        fn = find_function(self.function)
        pairs = (word.partition("=") for word in self.feature)
        features: dict[str, str] | None = {name: keyword or name for name, _, keyword in pairs} or None
        # Nothing but the report goes to a file.
        steps = console.show_steps() if console.is_live else nullcontext()
        with expected_errors(), steps as begin:
            report = check(
                fn, layout=self.layout, features=features, dtypes=self.dtypes, sizes=self.sizes,
                tolerance=self.tolerance, arrays=self.arrays, seconds=self.seconds, only=self.only,
                progress=begin,
            )  # fmt: skip
        console.say(report.to_markdown() if self.markdown else str(report))
        console.emit("conformance", **report.to_dict())
        return 0 if report.passed else 1


def find_function(text: str) -> Callable[..., Any]:
    """Return the function that `module:name` or `file.py:name` names."""
    home, _, name = text.rpartition(":")
    if not home or not name:
        raise UsageError(f"expected MODULE:FUNCTION such as jax.nn:dot_product_attention, got {text!r}")
    if (home, name) in (("regard", "attend"), ("regard.attention", "attend")):
        home, name = "regard.conformance.ours", "attend_by_keywords"
    try:
        module: Any = _load_file(Path(home)) if home.endswith(".py") else import_module(home)
    except (Exception, SystemExit) as error:  # whatever the file does
        if Path(home).exists() and not home.endswith(".py"):
            raise UsageError(f"{home}: expected a module, or a file that ends in .py") from error
        raise UsageError(f"{home}: cannot be imported: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        module = getattr(module, part, None)
    if not callable(module):
        instead = "which is not there" if module is None else f"got {module!r}, which cannot be called"
        raise UsageError(f"{home}: expected a function of the name {name}, {instead}")
    return module


def _load_file(path: Path) -> Any:
    """Import a module from a file; the files beside it can be imported from it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"{path} is not a Python file")
    loaded = getattr(sys.modules.get(path.stem, path), "__file__", str(path))
    if loaded != str(path):
        raise ImportError(f"a module {path.stem} is loaded already; give the file another name")
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.path.remove(folder)
        del sys.modules[path.stem]
        raise
    return module
