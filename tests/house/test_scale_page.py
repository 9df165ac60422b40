"""The page about scale: its Python prints what it says, and its commands are understood."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import economy
from regard.cli import main
from regard.cli.arguments import parse_arguments

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()


@pytest.mark.slow
def test_its_python_prints_what_is_shown(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.S)
    assert len(blocks) == PAGE.count("```python") == 3
    program = tmp_path / "page.py"
    program.write_text("\n".join(code for code, _ in blocks))
    environment = os.environ | economy.WITHOUT_CACHE
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(shown for _, shown in blocks)


COMMANDS = [shlex.split(line, comments=True) for line in PAGE.splitlines() if line.startswith("regard ")]


def test_it_has_commands():
    assert [words[1] for words in COMMANDS] == ["plan", "train", "train", "train"]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_its_commands_are_understood(words):
    assert type(parse_arguments(words[1:])).__name__.lower() == words[1]


def test_its_plan_is_what_the_command_prints(capsys):
    shown = re.search(r"--backward\n```\n\n```text\n(.*?)```", PAGE, re.S)[1]
    (command,) = (words[1:] for words in COMMANDS if words[1] == "plan")
    assert main(command) == 0
    assert shown in capsys.readouterr().out
