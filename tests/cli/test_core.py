"""The command line where jax, numpy and jaxtyping alone are installed: what runs, and what the rest needs."""

import re
import subprocess
import sys

from command_runs import run_command
from regard.cli import EXTRAS, command_words, plain
from regard.cli.commands import COMMANDS
from regard.cli.commands.explain import Explain
from regard.loading import remedy

CORE = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in {EXTRAS}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
from regard.cli import main
for line in sys.argv[1:]:
    try:
        code = main(line.split())
    except SystemExit as end:
        code = end.code
    print("code", code)
"""


def run_core(*lines):
    done = subprocess.run([sys.executable, "-c", CORE, *lines], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parts = re.split(r"code (\d)\n", done.stdout)
    return parts[:-1:2], [int(code) for code in parts[1::2]], done.stderr


def test_the_core_says_what_it_is_and_explains(capsys):
    explained = "explain --shape 2,1,4,7 --mask causal() --picture"
    lines = ["--version", "--help", "doctor", explained, "explain --help", f"{explained} --json --quiet"]
    printed, codes, errors = run_core(*lines)
    assert (codes, errors) == ([0] * 6, "")
    version, overview, doctor, report, help_text, objects = printed
    assert version == f"{command_words.describe_versions()}\n"
    for command in COMMANDS:
        assert f"\n    {command.__name__.lower()}" in overview
    assert "backend    dense: serves a plain call" in doctor
    assert report == run_command(capsys, *explained.split()).out
    assert "heads      1 query head\n" in report
    assert "--key-shape N,N,..." in help_text
    assert "Shape of key. (default: that of query)" in help_text
    assert '"query_heads": 1' in objects
    assert "query head\n" not in objects


def test_the_core_refuses_with_what_would_help():
    lines = {
        "": "error: expected a command: demo, train, ",
        "explan": "error: there is no command 'explan'; did you mean explain?",
        "explain": "error: the following arguments are required: --shape",
        "explain --shape 2,3 --dtype fp16": "error: argument --dtype: invalid choice: 'fp16'",
        "explain --shape 2,3 --query-offset x": "error: argument --query-offset: invalid int value: 'x'",
        "doctor --jsn": "error: unrecognized arguments: --jsn",
    }
    needs = {"plan": "train", "tune": "train", "train copy": "train", "view out --help": "all", "demo": "all"}
    printed, codes, errors = run_core(*lines, *needs)
    assert ("".join(printed), codes) == ("", [2] * len([*lines, *needs]))
    told = [line for line in errors.splitlines() if line.startswith("error:")]
    for message, line in zip(lines.values(), told, strict=False):
        assert line.startswith(message)
    needed = "error: this needs tyro, which is not installed: "
    assert told[len(lines) :] == [needed + remedy(extra) for extra in needs.values()]


def test_the_core_reads_words_as_tyro_does():
    for line in (
        "--shape 2,3",
        "--shape=2,3 --quiet --dtype bfloat16",
        "--key-shape 2,3 --shape 2,5 --query-offset -3 --mask causal() --json --picture --backend dense",
    ):
        command = plain.read_command(Explain, "regard explain", line.split())
        assert command == command_words.parse_arguments(["explain", *line.split()])
