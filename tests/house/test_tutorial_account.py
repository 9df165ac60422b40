"""docs/seeds.md keeps its word: every item is on it, and every name on it exists."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "seeds.md").read_text()

FEATURES = {"000": 26, "001": 6, "002": 5, "003": 14, "004": 6}
MISTAKES = {"000": 14, "001": 7, "002": 5, "003": 12, "004": 4}
ITEMS = [
    f"{kind}{document}-{number}"
    for kind, counts in (("F", FEATURES), ("B", MISTAKES))
    for document, count in counts.items()
    for number in range(1, count + 1)
]


def quoted(pattern):
    """What stands between backticks and matches, outside of blocks of code."""
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.S)
    return sorted({text for text in re.findall(r"`([^`\n]+)`", prose) if re.fullmatch(pattern, text)})


def defined_tests():
    sources = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return {name for source in sources for name in re.findall(r"^def (test_\w+)\(", source, re.M)}


def resolve(name):
    """The object behind a dotted name."""
    module, attributes = name, []
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


def missing_tests(names):
    return sorted(set(names) - defined_tests())


def missing_paths(paths):
    return [path for path in paths if not (ROOT / path).exists()]


def test_every_item_has_one_row_with_something_in_it():
    rows = dict(re.findall(r"^\| ([FB]\d{3}-\d+) \|[^|]+\|(.+)\|$", PAGE, re.M))
    listed = re.findall(r"^\| ([FB]\d{3}-\d+) \|", PAGE, re.M)
    assert listed == ITEMS
    assert [item for item in ITEMS if len(rows[item].strip()) < 5] == []


def test_every_test_it_names_exists():
    names = quoted(r"test_\w+")
    assert len(names) > 50
    assert missing_tests(names) == []


def test_every_path_it_names_exists():
    paths = quoted(r"(src|tests|docs|benchmarks|examples)/[\w./]*")
    assert len(paths) > 2
    assert missing_paths(paths) == []


@pytest.mark.parametrize("name", quoted(r"regard(\.\w+)+"))
def test_every_name_it_uses_is_there(name):
    assert resolve(name) is not None


def test_every_command_it_names_is_one():
    from regard.cli import commands
    from regard.training.tasks import TASKS

    for line in quoted(r"regard \w+.*"):
        words = line.split()[1:]
        assert words[0].capitalize() in dir(commands), line
        if words[0] == "train":
            assert words[1] in TASKS, line


def test_every_link_leads_to_a_heading_or_a_file():
    headings = re.findall(r"^#+ (.+)$", PAGE, re.M)
    anchors = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif not target.startswith("https://"):
            assert (ROOT / "docs" / target).exists(), target


def test_the_guards_see_what_is_missing():
    assert missing_tests(["test_nobody_wrote"]) == ["test_nobody_wrote"]
    assert missing_paths(["src/regard/nowhere.py"]) == ["src/regard/nowhere.py"]
    with pytest.raises(AttributeError):
        resolve("regard.positions.nowhere")
