"""A docstring's first line can be read once: no question that is none, and a verb for what is called."""

import ast
import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "regard"

# A clause in place of a sentence: "Whether x fits", "Of a call whose layer did not say".
QUESTIONS = {"What", "How", "Whether", "Which", "Where", "Of", "Why"}

# Imperatives that the house uses; a new one is added here, so that a noun or "Returns" is not taken for one.
WORDS = """
Add Adjust Align Answer Append Apply Arrange Ask Assemble Assign Attend Average Begin Bind Bound Bring
Broadcast Build Bundle Cache Call Canonicalize Cast Catch Chain Check Choose Classify Close Coarsen Collect
Combine Compare Compile Complete Compose Compute Configure Contract Convert Copy Count Cover Create Cut Decide
Declare Decode Defer Define Delete Demand Derive Describe Differentiate Distribute Divide Do Draw Drop Embed
Empty Encode End Enter Estimate Evaluate Exchange Expand Explain Extend Extract Fetch Fill Find Finish Fit
Flatten Fold Follow Forget Form Format Forward Gather Generate Get Give Go Guess Halve Hand Handle Hide Hold
Ignore Import Infer Insert Inspect Interleave Invert Join Keep Label Lay Leave Let List Load Look Loop Lower
Make Map Mark Mask Match Measure Mend Merge Move Multiply Name Narrow Norm Normalise Number Open Order
Overwrite Pack Pad Pair Parse Pass Pick Place Plan Predict Prepare Print Probe Process Project Put Raise
Read Rebuild Receive Record Reduce Refuse Reject Release Remember Remove Rename Render Repeat Replace Report
Reset Reshape Resize Resolve Restore Restrict Retrieve Return Reverse Roll Rotate Round Run Sample Save Say
Scale Scan Score Select Send Separate Serve Set Shape Shard Share Sharpen Shift Shorten Show Shrink Shuffle
Slice Sort Spell Split Spread Stack Start Step Stop Store Stream Suggest Sum Surround Swap Sweep Tabulate
Take Tell Tile Time Trace Train Transform Turn Undo Unflatten Unpack Update Use Validate Verify Visit Wait
Walk Watch Weigh Widen Wrap Write Yield Zero
"""
VERBS = set(WORDS.split())


def room(path):
    """The folder of a module, `engine` or `inspection/figures`; of a module on the top floor, its name."""
    folder = path.relative_to(ROOT).with_suffix("").parent.as_posix()
    return path.stem if folder == "." else folder


def is_property(function):
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


def find_docstrings(source):
    """Kind, name, line and first line of every docstring; kind is "call" for public functions and methods."""

    def visit(node, public):
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from visit(child, public)
                continue
            known = public and (not child.name.startswith("_") or child.name == "__call__")
            is_class = isinstance(child, ast.ClassDef)
            if text := ast.get_docstring(child):
                kind = "call" if known and not is_class and not is_property(child) else "other"
                yield kind, child.name, child.lineno, text.splitlines()[0]
            yield from visit(child, known and is_class)

    tree = ast.parse(source)
    if text := ast.get_docstring(tree):
        yield "other", "the module", 1, text.splitlines()[0]
    yield from visit(tree, True)


def find_field_texts(source):
    """Line and text of what stands below the fields of classes; the command line shows it as help."""
    for parent in ast.walk(ast.parse(source)):
        if isinstance(parent, ast.ClassDef):
            for field, below in itertools.pairwise(parent.body):
                is_field = isinstance(field, ast.AnnAssign | ast.Assign) and isinstance(below, ast.Expr)
                if is_field and isinstance(getattr(below.value, "value", None), str):
                    yield below.lineno, below.value.value.strip()


def is_question(line):
    return line.split()[0].rstrip(",:.") in QUESTIONS


def is_command(line):
    first, second, *_ = [*line.split(), ""]
    return first.rstrip(",:") in VERBS and second != "of"  # "Sum of ..." is a noun


FILES = {}
for _path in sorted(ROOT.rglob("*.py")):
    FILES.setdefault(room(_path), []).append(_path)


def find_in(place):
    """File, line and name of every docstring of a room; its kind; its first line."""
    for path in FILES[place]:
        for kind, name, number, line in find_docstrings(path.read_text()):
            yield f"{path.relative_to(ROOT)}:{number} {name}: {line}", kind, line


@pytest.mark.parametrize("place", FILES)
def test_no_first_line_opens_with_a_question(place):
    lines = [text for text, _, line in find_in(place) if is_question(line)]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("place", FILES)
def test_a_public_function_opens_with_a_verb(place):
    """A verb that is not in `VERBS` yet is added there."""
    lines = [text for text, kind, line in find_in(place) if kind == "call" and not is_command(line)]
    assert not lines, "\n".join(lines)


def test_no_text_of_a_field_opens_with_a_question():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {text}"
        for path in sorted(ROOT.rglob("*.py"))
        for number, text in find_field_texts(path.read_text())
        if text and is_question(text)
    ]
    assert not found, "\n".join(found)


def test_the_check_sees_what_it_should():
    source = '''"""Where things are."""
class Thing:
    """A thing."""
    def make(self):
        """Makes it."""
    @property
    def size(self):
        """The size."""
    def _size(self):
        """The size."""
def size():
    """The size."""
    def inner():
        """A part."""
def compute():
    """Compute it."""
'''
    found = list(find_docstrings(source))
    assert [name for _, name, _, line in found if is_question(line)] == ["the module"]
    assert [(kind, line) for kind, _, _, line in found if kind == "call" and not is_command(line)] == [
        ("call", "Makes it."),
        ("call", "The size."),
    ]
    assert len(found) == 8


def test_verbs_are_imperatives():
    assert [verb for verb in VERBS if verb != verb.capitalize() or re.search("([^s]s|[^r]ing)$", verb)] == []
