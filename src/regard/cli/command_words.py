"""The words of a command line: the command, the task, and what is near a word that is neither."""

import argparse
import contextlib
import dataclasses
import difflib
import importlib.metadata
import io
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import regard
from regard.cli import MISUSED, commands, plain
from regard.cli.declaration import Command, choice, conf
from regard.paths import describe_store

_STYLE = ("CascadeSubcommandArgs", "OmitArgPrefixes", "OmitSubcommandPrefixes", "FlagCreatePairsOff")
_HELP, _TEXTS = ("--help", "-h"), ("--text", "--prompt")
ABOUT = "Attention for JAX: exact, composable, inspectable. `regard --version` prints versions."
# Names of settings in a sentence about them: with an underscore, before "must", or before their value.
_NAMES = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b|^[a-z]+(?= must)|(?<=at most )[a-z]+(?=, got)|\b[a-z]+(?==)")
# What messages of the library tell a caller in Python to do, and the same on the command line.
_CALLS = {
    "open it again: open_run(...)": "give the same command again",
    "open_run(..., resume='newest-whole')": "regard train --resume newest-whole",
}


def parse_arguments(words: Sequence[str]) -> Command:
    """Turn words into a command, or exit: 0 after help or versions, 2 after what was not understood."""
    words = list(words)
    named = {command.__name__.lower(): command for command in commands.COMMANDS}
    program = " ".join(["regard", *[word for word in words[:1] if word in named]])
    for before, word in zip(["", *words], words, strict=False):
        flag, equals, value = word.partition("=") if word.startswith("--") else (before, "=", word)
        if flag.startswith("--") and equals and not value:
            needs = f"a text, such as {flag} 'Once upon a time'" if flag in _TEXTS else "a value"
            _refuse(program, f"{flag} needs {needs}, got an empty one")
        # Paths may have any bytes.
        if flag in _TEXTS and any("\ud800" <= letter <= "\udfff" for letter in value):
            _refuse(program, f"{flag}: expected text in UTF-8, got {value!r}")
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if words[:1] in (["--version"], ["version"]):
        sys.stdout.write(f"{describe_versions()}\n")
        raise SystemExit(0)
    if not words or words[0] in _HELP:
        return _read_overview(named, words)
    command = _choose("regard", "command", words[0], named)
    program, words, description = f"regard {words[0]}", words[1:], None
    for name, kinds in command.CHOICES.items():
        index = _find_word(command, words)
        if index is not None:
            word = words.pop(index)
            kind = _choose(program, name, word, kinds)
            only: list[Any] = [(name, Annotated[kind, conf.arg(name="")])]
            if "--smoke" in words and conf is not plain:  # then its smaller settings are the defaults
                from regard.training.tasks import shrink

                only = [(*only[0], dataclasses.field(default=shrink(kind())))]
            command = dataclasses.make_dataclass(command.__name__, only, bases=(command,), frozen=True)
            program, description = f"{program} {word}", kind.__doc__
    parsed = _read(command, program, description, words)
    for name, value in _list_values(parsed):
        if value == () and _spell_flag(name) in words:
            _refuse(program, f"{_spell_flag(name)} needs at least one value")
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path) and (refusal := describe_store(path)):
                _refuse(program, refusal)
    return parsed


def describe_versions() -> str:
    """Return the versions that decide what runs, in a line."""
    jax_version = importlib.metadata.version("jax")  # without loading it
    return f"regard {regard.__version__}, jax {jax_version}, Python {sys.version.split()[0]}"


def find_extra(words: Sequence[str]) -> str:
    """Return the extra that brings what a command line needs."""
    extras = {command.__name__.lower(): command.EXTRA for command in commands.COMMANDS}
    extra = extras.get(words[0]) if words else None
    return extra or "all"


def translate_message(text: str, command: Command) -> str:
    """Return a message of the library in a command's words: options for arguments, commands for calls."""
    for call, words in _CALLS.items():
        text = text.replace(call, words)
    names = dict.fromkeys(name for name, _ in _list_values(command))  # those of the task and its groups, too
    written = "|".join((*names, *command.ALIASES))
    value = r"""'[^'\\]*'|"[^"\\]*"|True\b|(?=[\s,;:]|$)"""
    text = re.sub(rf"(?<![\w/\\.'-])({written})=({value})", partial(_write_flag, command), text)
    argument = text.partition(":")[0]
    text = command.ALIASES.get(argument, argument) + text[len(argument) :]
    inside = "|".join(name for name in names if "_" in name)
    text = re.sub(rf"^({'|'.join(names)})(?=: | must )", _name_flag, text)
    text = re.sub(rf"(?<=\n  )(?:\w+\.)?({'|'.join(names)})(?=: it has )", _name_flag, text)
    # Of columns of spaces, two are taken by the hyphens; what has slashes is a path.
    pattern = rf"(?<![\w/\\.'-])({inside})(?![\w/\\]|\.\w)(=\S+)?(?:  (?= ))?"
    return re.sub(pattern, _name_flag, text) if inside else text


def _spell_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _write_flag(command: Command, match: re.Match[str]) -> str:
    """Return the option that an argument in Python is, with its value where that is a text."""
    option, value = command.ALIASES.get(match[1], match[1]), match[2]
    flag = option if option.isupper() else _spell_flag(option)
    return flag if value in ("", "True") else f"{flag} {shlex.quote(value[1:-1])}"


def _name_flag(match: re.Match[str]) -> str:
    name, *value = match.groups(default="")
    return _spell_flag(name) + "".join(value)


def _read_overview(named: Mapping[str, type[Command]], words: list[str]) -> Any:
    """Print the help that lists commands, or refuse no words."""
    if conf is plain:
        try:
            return plain.read_overview("regard", ABOUT, named, words)
        except argparse.ArgumentError:
            _refuse("regard", f"expected a command: {', '.join(named)}")
    line = dataclasses.make_dataclass("Line", [("run", Annotated[choice(named), conf.arg(name="")])])
    return _read(line, "regard", ABOUT, words)


def _read(kind: Any, program: str, description: str | None, words: list[str]) -> Any:
    """Let tyro read the words, or argparse those of the core; wrong settings are named by their flags."""
    if conf is plain:
        if kind.EXTRA:
            raise ModuleNotFoundError(name="tyro")
        try:
            return plain.read_command(kind, program, words)
        except argparse.ArgumentError as error:
            _refuse(program, str(error))
    import tyro

    style = [getattr(conf, name) for name in _STYLE]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(kind, prog=program, description=description, args=words, config=style)
    except AttributeError as error:
        if error.name != "TypeCheckError":
            raise
        needed = "tyro needs typeguard 4 or newer, which another package took back"
        _refuse(program, f"{needed}: pip install 'typeguard>=4'")
    except ValueError as error:
        _refuse(program, _name_flags(error))
    except SystemExit as end:
        wrong = end.__context__  # of settings in a group, whose name tyro would print
        if isinstance(wrong, Exception) and isinstance(getattr(wrong, "arg", None), str):
            _refuse(program, _name_flags(wrong.__context__))
        sys.stderr.write(printed.getvalue())
        raise


def _name_flags(error: BaseException | None) -> str:
    """Return what is wrong with settings, with the flags' names in place of the settings'."""
    return _NAMES.sub(lambda name: _spell_flag(name[0]), str(error))


def _choose(program: str, kind: str, word: str, named: Mapping[str, Any]) -> Any:
    """Return what a word names; else say what is near it."""
    if word not in named:
        near = difflib.get_close_matches(word, named, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(named)}"
        _refuse(program, f"there is no {kind} {word!r}; {hint}")
    return named[word]


def _find_word(command: Any, words: Sequence[str]) -> int | None:
    """Return the index of the first word that is neither a flag nor the value of one."""
    fields = (*dataclasses.fields(command), *dataclasses.fields(type(command.output)))
    switches = {f"--{field.name}" for field in fields if field.default is False}
    index = 0
    while index < len(words) and words[index].startswith("-"):
        alone = words[index] in (*switches, *_HELP) or "=" in words[index]
        index += 1 if alone else 2
    return index if index < len(words) else None


def _list_values(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each field of a record, and of the records that it holds."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            yield from _list_values(value)
        else:
            yield field.name, value


def _refuse(program: str, message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n       for help: {program} --help\n")
    raise SystemExit(MISUSED)
