"""README and the pages of docs keep their word: blocks print what they show, and what they name exists."""

import contextlib
import importlib
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest
from packaging.version import Version

import regard
from mesh_cases import WITHOUT_CACHE
from regard import theory
from regard.cli import commands, main
from regard.cli.command_words import parse_arguments
from regard.training.tasks import TASKS
from wheel import LOCAL_LINK, read_blocks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {path: path.read_text() for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]}
README, SCALE, THEORY = (PAGES[path] for path in (ROOT / "README.md", DOCS / "scale.md", DOCS / "theory.md"))
ROOMS = "masks|scores|positions|linear|readouts|theory|interop|figures|inspection|layers|models|training"
NAME = re.compile(rf"regard(\.\w+)+|({ROOMS})(\.[a-zA-Z_]\w*)+")
COMMANDS = {command.__name__.lower() for command in commands.COMMANDS}
KNOWN_TASKS = {*TASKS, "TASK", "--mesh", "parity", "repeat"}  # two are written on a page
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in (path.name, *re.findall(r"^def (test_\w+)\(", path.read_text(), re.M))
}


def resolve(name):
    """The object behind a dotted name; figures are inspection's."""
    name = name.removeprefix("regard.")
    module, attributes = ("regard.inspection." if name.startswith("figures.") else "regard.") + name, []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
    for attribute in attributes:
        found = getattr(found, attribute)
    return found


def cells(text):
    return re.findall(r"^```\{code-cell\} python\n(?::tags: [^\n]*\n)?(.*?)^```", text, re.S | re.M)


def quoted(text):
    """What stands between backticks, outside of cells."""
    return sorted(set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))))


def name_anchors(text):
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    anchors = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
    return anchors | set(re.findall(r"^\(([\w-]+)\)=$", text, re.M))


def find_faults(path, text):
    """What a page names and is not there: names, commands, tests, files, places of pages; faults of cells."""
    for piece in quoted(text):
        if NAME.fullmatch(piece.partition("(")[0]):
            try:
                resolve(piece.partition("(")[0])
            except AttributeError:
                yield piece
        is_path = re.fullmatch(r"(src|tests|docs|benchmarks|examples)/[\w./]*", piece)
        if is_path and not (ROOT / piece).exists():
            yield piece
        if re.fullmatch(r"test_\w+", piece) and piece not in TESTS:
            yield piece
    for line in re.findall(r"(?:`|^!?)(regard [a-z]+[^`\n]*)", text, re.M):
        words = line.split()
        if words[1] not in COMMANDS or (words[1] == "train" and not {*words[2:3]} <= KNOWN_TASKS):
            yield line
    for target in re.findall(r"\]\((?!https?:)([\w./-]*(?:#[\w-]+)?)\)", text):
        file, _, place = target.partition("#")
        there = path.parent / file if file else path
        if not there.exists() or (place and place not in name_anchors(there.read_text())):
            yield target
    for cell in cells(text):
        lines = [line for line in cell.splitlines() if not line.startswith("!")]
        compile("\n".join(lines), path.name, "exec")
        yield from (line for line in lines if len(line) > 92)  # wider than the page


def test_what_the_pages_name_exists():
    assert [(path.name, fault) for path, text in PAGES.items() for fault in find_faults(path, text)] == []
    names = [piece for text in PAGES.values() for piece in quoted(text) if NAME.match(piece)]
    assert len(names) > 160, "the pages name a good part of the package"


def test_what_does_not_exist_is_found_out():
    wrong = ("masks.nowhere(3)", "tests/nowhere.py", "test_nobody_wrote", "regard play", "regard train sheep")
    text = " ".join(f"`{piece}`" for piece in (*wrong, "x.y", "masks.causal()")) + " [a](#b) [a](c.md)\n# A\n"
    assert set(find_faults(DOCS / "faq.md", text)) == {*wrong, "#b", "c.md"}
    wide = "```{code-cell} python\n" + "x" * 93 + "\n```\n"
    assert list(find_faults(DOCS / "faq.md", wide)) == ["x" * 93]


def run_here(code, names):
    """What code prints, typed by a reader after what was typed before."""
    printed = io.StringIO()
    relaxed = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with relaxed[0], relaxed[1], contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(("page", "count"), [("README.md", 5), ("docs/derive.md", 4)])
def test_the_examples_print_what_is_shown(page, count, tmp_path, monkeypatch):
    """One after the other, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    examples, names = read_blocks(PAGES[ROOT / page]), {}
    assert len(examples) == PAGES[ROOT / page].count("```python") == count
    for code, shown in examples:
        assert re.sub("; here are .*", "", run_here(code, names)) == shown  # on whichever machine
    assert page != "README.md" or (tmp_path / "attention.html").stat().st_size > 10_000


@pytest.mark.slow
def test_the_page_about_scale_prints_what_is_shown(tmp_path):
    """In a process of its own, as it wants eight devices."""
    code, shown = zip(*read_blocks(SCALE), strict=True)
    assert len(code) == SCALE.count("```python") == 3
    (tmp_path / "page.py").write_text("\n".join(code))
    command, environment = [sys.executable, tmp_path / "page.py"], os.environ | WITHOUT_CACHE
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(shown)


def test_commands_of_the_page_about_scale_are_understood(capsys):
    lines = [shlex.split(line, comments=True) for line in SCALE.splitlines() if line.startswith("regard ")]
    assert [words[1] for words in lines] == ["plan", *["train"] * 7]
    for words in lines:
        assert type(parse_arguments(words[1:])).__name__.lower() == words[1]
    shown = re.search(r"--backward\n```\n\n```text\n(.*?)```", SCALE, re.S)[1]
    assert main(lines[0][1:]) == 0
    assert shown in capsys.readouterr().out


def test_the_page_about_theory_is_whole():
    """Each name of a peer has one row, each module is there, and the example runs."""
    rows = re.findall(r"^\| (`.*) \| (.*) \|$", THEORY, re.M)
    theirs = [name for left, _ in rows for name in re.findall(r"`(\w+)`", left)]
    assert len(theirs) == len(set(theirs)) == 84
    assert len({name for _, right in rows for name in re.findall(r"`(regard\.theory\.[\w.]+)`", right)}) < 35
    assert all(right for _, right in rows)
    modules = {name for name, value in vars(theory).items() if hasattr(value, "__file__")} - {"operands"}
    assert len(modules) == 9
    assert [name for name in modules if name not in THEORY] == []
    assert "summed    a = 5" in run_here(re.search(r"```python\n(.*?)```", THEORY, re.S)[1], {})


def test_a_package_index_is_shown_no_link_into_the_repository():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shown = README
    for one in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        shown = re.sub(one["pattern"], one["replacement"], shown)
    assert not LOCAL_LINK.search(shown)
    assert "- docs/start.md, and the tutorials" in shown
    assert "its every step in index notation |" in shown
    assert "digits classifier" not in shown, "a caption goes with its picture"
    assert read_blocks(shown) == read_blocks(README)


def test_the_five_documents_are_retold_with_their_numbers():
    tutorials = {path: text for path, text in PAGES.items() if path.parent.name == "tutorials"}
    del tutorials[DOCS / "tutorials" / "induction_heads.md"]  # our own
    assert len(tutorials) == 5
    for path, text in tutorials.items():
        code = "\n".join(cells(text))
        assert code.count("check(") >= 4, path
        assert "assert_allclose" in code, path
        assert "## Which mistakes this page avoids" in text, path


def test_the_oldest_versions_that_are_allowed_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (project["optional-dependencies"][extra] for extra in ("models", "weights", "look", "train"))
    needs = [*project["dependencies"], *itertools.chain(*extras)]
    oldest = dict(need.split(">=") for need in needs if not need.startswith("regard["))
    pins = dict(line.split("==") for line in (ROOT / "constraints" / "oldest.txt").read_text().splitlines())
    assert len(oldest) == 13
    for package, version in oldest.items():
        assert Version(pins[package]) == Version(version), package
    for page in ("README.md", "docs/index.md", "docs/start.md"):
        assert f"jax {oldest['jax']} or newer" in (ROOT / page).read_text(), page


def test_the_workflow_calls_targets_of_make_and_the_citation_is_of_this_version():
    lines = re.findall(r"run: make (.+)", (ROOT / ".github" / "workflows" / "tests.yml").read_text())
    targets = {word for line in lines for word in line.split() if word.islower()}
    assert targets == {"setup", "lint", "types", "test", "test-newest", "test-oldest", "dist", "docs-check"}
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert f"\nversion: {regard.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"version = {{{regard.__version__}}}" in PAGES[DOCS / "faq.md"]
