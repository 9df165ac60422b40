"""Stand-ins for tyro and rich, which a core install lacks: marks of options, a reader of words, a printer."""

import argparse
import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Mark:
    """The words that an annotation has for an option, named as those of `tyro.conf`, which declare it too."""

    name: str | None = None
    metavar: str | None = None
    help_behavior_hint: str | None = None


arg = subcommand = Mark
Positional = Annotated[T, "positional"]
UseAppendAction = Annotated[T, "appended"]


class Printer:
    """A console of rich as far as text alone goes to it."""

    is_terminal = False
    is_dumb_terminal = True

    def __init__(self, *, stderr: bool = False, quiet: bool = False, **style: Any):
        self.quiet, self._name = quiet, "stderr" if stderr else "stdout"

    def print(self, text: str, *, end: str = "\n", **style: Any) -> None:
        if not self.quiet:
            stream = getattr(sys, self._name)
            stream.write(text + end)
            stream.flush()


class Parser(argparse.ArgumentParser):
    """A parser that raises `argparse.ArgumentError` for what it does not understand."""

    def __init__(self, **options: Any):
        super().__init__(**options, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def read_overview(program: str, description: str, named: Mapping[str, Any], words: Sequence[str]) -> None:
    """Print the help that lists commands where words ask for it; raise where they ask for nothing."""
    parser = Parser(prog=program, description=description)
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, kind in named.items():
        summary = inspect.cleandoc(kind.__doc__).partition("\n\n")[0]
        needs = f" Needs the extra regard[{kind.EXTRA}]." if kind.EXTRA else ""
        commands.add_parser(name, help=_escape(" ".join(summary.split()) + needs))
    parser.parse_args(words)


def read_command(kind: Any, program: str, words: Sequence[str]) -> Any:
    """Make a command of words; its options are numbers, texts, choices and switches, or groups of them."""
    parser = Parser(prog=program, description=inspect.cleandoc(kind.__doc__))
    _add_options(parser, kind)
    return _build(kind, vars(parser.parse_args(words)))


def _add_options(parser: Any, kind: Any) -> None:
    """Give a parser, or a group of one, an option for each field of a dataclass."""
    hints, texts = get_type_hints(kind, include_extras=True), _read_texts(kind)
    for field in dataclasses.fields(kind):
        annotated = hints[field.name]
        hint, *marks = get_args(annotated) if get_origin(annotated) is Annotated else (annotated,)
        if dataclasses.is_dataclass(hint):
            _add_options(parser.add_argument_group(f"{field.name} options", hint.__doc__), hint)
            continue
        mark = next((mark for mark in marks if hasattr(mark, "metavar")), Mark())
        is_required = field.default is dataclasses.MISSING
        default = "(required)" if is_required else mark.help_behavior_hint or f"(default: {field.default})"
        options: dict[str, Any] = {"help": _escape(f"{texts[field.name]} {default}")}
        if hint is bool:
            options["action"] = "store_true"
        else:
            options |= {"default": field.default, "required": is_required, "metavar": mark.metavar}
            kinds = (hint, *get_args(hint), str)
            options["type"] = next(plain for plain in (int, float, str) if plain in kinds)
            options["choices"] = get_args(hint) if get_origin(hint) is Literal else None
        parser.add_argument("--" + field.name.replace("_", "-"), **options)


def _build(kind: Any, values: Mapping[str, Any]) -> Any:
    hints, fields = get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        inner = hints[field.name]
        fields[field.name] = _build(inner, values) if dataclasses.is_dataclass(inner) else values[field.name]
    return kind(**fields)


def _read_texts(kind: Any) -> dict[str, str]:
    """Return the string below each field of a dataclass."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: str(text.value.value)
        for field, text in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _escape(text: str) -> str:
    return text.replace("%", "%%")
