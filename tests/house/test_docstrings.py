"""Public names say what they take, what they give, show it, and say whose idea it is."""

import dataclasses
import importlib
import inspect
import re
import sys
from pathlib import Path


def load_extension(name):
    """A module with which the site is built."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_extensions"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


MODULES, list_objects = load_extension("names").MODULES, load_extension("names").list_objects
# What the command line stands for has its examples there.
NAMES = {
    f"{module}.{name}": value
    for module in MODULES
    if not module.startswith("regard.training")
    for name, value, _ in list_objects(module)
    if callable(value)
}
# Seldom called by users: records that functions return, an enumeration, and the parts of `pages.write`.
RECORDS = """
conformance.Report conformance.Row theory.definition.Forward masks.TileKind
inspection.explorer.pages.bundle inspection.explorer.pages.fill_page inspection.explorer.pages.html
inspection.explorer.server.Serving inspection.figures.Drawing interop.onnx_ops.AttentionOutputs
interop.onnx_ops.LinearAttentionOutputs planning.Estimate planning.MemoryTooSmallError
theory.bilinear.MetricReport theory.gibbs.Equilibrium theory.gradients.Gradients theory.hebbian.Recall
theory.hopfield.Retrieval theory.steps.HeadSteps
"""
# What a name may follow instead: software, which is no publication.
SOFTWARE = (
    "jax", "JAX", "flax", "Equinox", "PyTorch", "transformers 5", "of transformers", "ONNX",
    "flash-attention",
)  # fmt: skip


def list_faults(name, value):
    """What the docstring of a public name lacks."""
    text = inspect.getdoc(value) or ""
    if ">>>" not in text.partition("Example:")[2]:
        yield f"{name}: no example"
    parameters = [p for p in inspect.signature(value).parameters if p not in ("self", "args", "kwargs")]
    if dataclasses.is_dataclass(value) and "Args:" not in text:
        # Fields are described where they are declared.
        if inspect.getsource(value).count('"""') < 2 * len(parameters):
            yield f"{name}: fields without words"
    elif name != "regard.masks.Mask":
        # "key, value: as in `attend`"
        lists = re.findall(r"^ +([\w*, ]+):", text.partition("Args:")[2], re.M)
        described = {parameter.strip(" *") for names in lists for parameter in names.split(",")}
        yield from (f"{name}: {one} is not described" for one in parameters if one not in described)
    if inspect.isfunction(value) and "Returns:" not in text:
        yield f"{name}: no word on what it returns"


def test_public_names_are_documented():
    records = {f"regard.{name}" for name in RECORDS.split()}
    assert records < set(NAMES)
    assert len(NAMES) > 150
    described = {name: value for name, value in NAMES.items() if name not in records}
    assert [fault for name, value in described.items() for fault in list_faults(name, value)] == []


def test_a_published_idea_names_its_source():
    """With the year; and no fewer do than did."""
    told = {name: " ".join((inspect.getdoc(value) or "").split()) for name, value in NAMES.items()}
    references = {name: doc.partition("Reference:")[2] for name, doc in told.items() if "Reference:" in doc}
    papers = {n: text for n, text in references.items() if not any(word in text for word in SOFTWARE)}
    year = re.compile(r"\b(1[5-9]|20)\d\d\b")
    assert [name for name, text in papers.items() if not year.search(text)] == []
    assert len(papers) >= 100
