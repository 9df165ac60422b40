"""A docstring's first line can be read once: no question that is none, and a verb for what is called."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "regard"

# A clause in place of a sentence: "Whether x fits", "Of a call whose layer did not say".
QUESTIONS = {"What", "How", "Whether", "Which", "Where", "Of", "Why"}

# Imperatives that the house uses; a new one is added here, so that a noun or "Returns" is not taken for one.
VERBS = set(
    """
    Accept Add Adjust Align Allocate Allow Answer Append Apply Arrange Ask Assemble Assign Attend
    Attribute Average Begin Bind Bound Break Bring Broadcast Build Bundle Cache Call Canonicalize Cast
    Center Change Check Choose Classify Clear Close Coarsen Collect Combine Compare Compile Complete
    Compose Compute Concatenate Configure Continue Contract Convert Copy Count Cover Create Crop Cut
    Decide Declare Decode Decompose Decrease Defer Define Delete Demand Derive Describe Deserialize Detect
    Differentiate Discard Display Distribute Divide Download Draw Drop Embed Encode End Enter Entitle
    Estimate Evaluate Exchange Expand Explain Export Express Extend Extract Fail Fetch Fill Find Fit
    Flatten Flip Flush Fold Follow Forget Form Format Forward Gather Generate Get Give Go Group Guard
    Guess Hand Handle Hash Hide Hold Identify Ignore Import Index Infer Inform Initialise Initialize
    Insert Inspect Intersect Invert Iterate Join Judge Keep Label Lay Lead Learn Leave Let List Listen
    Load Locate Look Loop Lower Make Map Mark Mask Match Materialise Measure Mend Merge Minimize Mix Move
    Multiply Name Narrow Normalise Normalize Note Number Observe Open Order Overwrite Pack Pad Parse
    Partition Pass Pause Perform Permute Pick Place Plan Plot Pool Precompute Predict Prefer Prepare
    Preserve Print Probe Process Produce Project Promote Prompt Prove Prune Put Quantize Quote Raise Rank
    Read Rebuild Receive Record Reduce Refine Refuse Register Reject Release Remember Remove Rename Render
    Reorder Repeat Replace Replay Reply Report Represent Request Require Rescale Reserve Reset Reshape
    Resize Resolve Restore Resume Retrieve Return Reverse Rewrite Roll Rotate Round Route Run Sample Save
    Say Scale Scan Scatter Score Search See Select Send Separate Serialize Serve Set Shape Shard Share
    Sharpen Shift Show Shrink Shuffle Sign Skip Slice Smooth Solve Sort Split Spread Stack Standardize
    Start State Step Stop Store Stream Strip Subtract Suggest Sum Summarize Supply Support Surround Swap
    Sweep Tabulate Take Tell Test Tie Tile Time Tokenize Trace Track Train Transfer Transform Translate
    Transpose Treat Trim Truncate Try Tune Turn Unflatten Unify Unpack Update Use Validate Verify View
    Visit Wait Walk Warn Watch Weigh Widen Wrap Write Yield Zero Zoom
    """.split()
)

# First lines in rooms that are still being mended; a number may only sink.
ALLOWED_QUESTIONS: dict[str, int] = {}
ALLOWED_NOUNS: dict[str, int] = {}


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


def is_question(line):
    return line.split()[0].rstrip(",:.") in QUESTIONS


def is_command(line):
    return line.split()[0].rstrip(",:") in VERBS


FOUND = [
    (room(path), f"{path.relative_to(ROOT)}:{number} {name}: {line}", kind, line)
    for path in sorted(ROOT.rglob("*.py"))
    for kind, name, number, line in find_docstrings(path.read_text())
]
QUESTIONS_FOUND = [(place, text) for place, text, _, line in FOUND if is_question(line)]
NOUNS_FOUND = [(place, text) for place, text, kind, line in FOUND if kind == "call" and not is_command(line)]
ROOMS = sorted({place for place, *_ in FOUND})


@pytest.mark.parametrize("place", ROOMS)
def test_no_first_line_opens_with_a_question(place):
    lines = [text for where, text in QUESTIONS_FOUND if where == place]
    assert len(lines) <= ALLOWED_QUESTIONS.get(place, 0), "\n".join(lines)


@pytest.mark.parametrize("place", ROOMS)
def test_a_public_function_opens_with_a_verb(place):
    """A verb that is not in `VERBS` yet is added there."""
    lines = [text for where, text in NOUNS_FOUND if where == place]
    assert len(lines) <= ALLOWED_NOUNS.get(place, 0), "\n".join(lines)


def test_allowances_only_sink():
    """Where a room got better, its number is lowered."""
    for found, allowed in ((QUESTIONS_FOUND, ALLOWED_QUESTIONS), (NOUNS_FOUND, ALLOWED_NOUNS)):
        counts = Counter(place for place, _ in found)
        assert {place: counts[place] for place in allowed} == allowed


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


def test_every_verb_is_a_base_form():
    strange = [verb for verb in VERBS if verb != verb.capitalize() or verb.endswith(("ing", "s"))]
    assert sorted(strange) == ["Address", "Bring", "Compress", "Cross", "Express", "Pass", "Process"]
