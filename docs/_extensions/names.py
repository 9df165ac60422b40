"""Which names are public, and where each is documented.

Public is what a module lists in `__all__`; without one, what it defines without an underscore and what it
imports under its own name (`X as X`).
"""

import ast
import importlib
import importlib.util
import inspect
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

# The pages of docs/api, by module.
MODULES = (
    "regard",
    "regard.masks",
    "regard.scores",
    "regard.positions",
    "regard.cache",
    "regard.linear",
    "regard.readouts",
    "regard.derivation",
    "regard.parallel",
    "regard.planning",
    "regard.layers",
    "regard.models",
    "regard.models.sampling",
    "regard.training",
    "regard.training.tasks",
    "regard.training.settings",
    "regard.training.optimization",
    "regard.training.compiled_updates",
    "regard.training.loop",
    "regard.training.runs",
    "regard.inspection",
    "regard.inspection.figures",
    "regard.inspection.explorer.pages",
    "regard.inspection.explorer.server",
    "regard.inspection.explorer.live",
    "regard.interop.jax_nn",
    "regard.interop.flax",
    "regard.interop.equinox",
    "regard.interop.torch_sdpa",
    "regard.interop.flex",
    "regard.interop.onnx_ops",
    "regard.interop.huggingface",
    "regard.interop.sentence_embeddings",
    "regard.conformance",
    "regard.theory.definition",
    "regard.theory.notation",
    "regard.theory.steps",
    "regard.theory.bilinear",
    "regard.theory.gibbs",
    "regard.theory.gradients",
    "regard.theory.hopfield",
    "regard.theory.hebbian",
    "regard.theory.heads",
)


@cache
def parse_statements(module: str) -> list[tuple[ast.stmt, str]]:
    """Statements of a module, in branches too, each with the text that stands below it."""
    source = importlib.util.find_spec(module)
    assert source is not None, module
    assert source.origin is not None, module
    body = ast.parse(Path(source.origin).read_text()).body
    found: list[tuple[ast.stmt, str]] = []
    for node, below in zip(body, [*body[1:], None], strict=True):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        text = inspect.cleandoc(str(below.value.value)) if is_text else ""  # type: ignore[union-attr]
        found += [(inner, text) for inner in (node.body if isinstance(node, ast.If) else [node])]
    return found


@cache
def read_names(module: str) -> dict[str, str]:
    """Public names of a module, each with the text that stands below a constant."""
    if listed := getattr(importlib.import_module(module), "__all__", None):
        return {name: read_text(module, name) for name in listed}
    names: dict[str, str] = {}
    for node, text in parse_statements(module):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name: "" for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = ""
        elif isinstance(node, ast.Assign | ast.AnnAssign) and text:
            names[read_target(node)] = text
    return {name: text for name, text in names.items() if not name.startswith("_")}


def read_target(node: ast.Assign | ast.AnnAssign) -> str:
    """The name that is assigned."""
    return ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])


@cache
def read_text(module: str, name: str) -> str:
    """The text below a constant, wherever the module has it from."""
    for node, text in parse_statements(module):
        if isinstance(node, ast.Assign | ast.AnnAssign) and read_target(node) == name:
            return text
        if (
            isinstance(node, ast.ImportFrom)
            and str(node.module).startswith("regard.")
            and node.module != module
        ):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return read_text(str(node.module), alias.name)
    return ""


def list_objects(module: str) -> list[tuple[str, Any, str]]:
    """Name, object and text of what is public in a module and is no module; constants come last."""
    home = importlib.import_module(module)
    found = ((name, getattr(home, name), text) for name, text in read_names(module).items())
    return sorted(
        (one for one in found if not isinstance(one[1], ModuleType)), key=lambda one: not callable(one[1])
    )


@cache
def place_objects() -> dict[int, str]:
    """The path under which each object is documented: what several modules show, in the last of them."""
    return {id(value): f"{module}.{name}" for module in MODULES for name, value, _ in list_objects(module)}


def place(module: str, name: str, value: Any) -> str:
    """The path under which a public name of a module is documented."""
    return place_objects().get(id(value), f"{module}.{name}")


# Words with many meanings, and words of the language, lead nowhere.
AMBIGUOUS = {"regard", "read", "step", "window", "label", "loop", "cache", "heads", "flax", "bilinear"}
AMBIGUOUS |= {"Text", "plan", "use", "attention", "check", "gradients", "capacity", "choose", "lengths"}


@cache
def name_homes() -> dict[str, str]:
    """Where each public name is documented: by its path, and by ever shorter ends of the path."""
    homes: dict[str, str] = {module: module for module in MODULES}
    for module in MODULES:
        for name, value, _ in list_objects(module):
            words = f"{module}.{name}".split(".")
            for start in range(len(words)):
                homes.setdefault(".".join(words[start:]), place(module, name, value))
    return {short: home for short, home in homes.items() if short not in AMBIGUOUS}


def find_home(code: str) -> str | None:
    """The full name of what a piece of code in a docstring names, or None."""
    return name_homes().get(code)
