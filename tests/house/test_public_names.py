"""Public names are listed, load on first use, and say which extra they need."""

import importlib
import inspect
import pkgutil
import pydoc
import re
import subprocess
import sys

import pytest

import regard
from regard.loading import remedy
from test_docstrings import MODULES, list_objects

PACKAGES = [regard] + [
    importlib.import_module(module.name)
    for module in pkgutil.walk_packages(regard.__path__, "regard.")
    if module.ispkg and hasattr(importlib.import_module(module.name), "__all__")
]


def run_python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


def test_every_listed_name_exists_and_help_lists_the_functions_that_users_call():
    for module in PACKAGES:
        assert {*module.__all__} <= {*dir(module)}, module
        values = {name: getattr(module, name) for name in module.__all__}
        assert None not in values.values(), module
        text = pydoc.plain(pydoc.render_doc(module))
        functions = [name for name, value in values.items() if inspect.isfunction(value)]
        assert [name for name in functions if f"\n    {name}(" not in text] == [], module
    assert re.search(r"\n    attend\(\s*query", pydoc.plain(pydoc.render_doc(regard)))
    assert "\n    causal()" in pydoc.plain(pydoc.render_doc(regard.masks))


def test_every_name_of_the_reference_is_listed():
    """By its package, or its module is."""
    for module in MODULES:
        package, _, last = module.rpartition(".")
        if hasattr(importlib.import_module(module), "__all__"):
            assert {name for name, _, _ in list_objects(module)} <= {*importlib.import_module(module).__all__}
        if package:
            assert last in importlib.import_module(package).__all__, module


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=f"it has {', '.join(sorted(regard.__all__))}"):
        _ = regard.attention_please
    with pytest.raises(ImportError, match="cannot import name 'Perceiver'"):
        from regard.models import Perceiver  # pyright: ignore  # noqa: F401


MISSING = """
import sys
sys.modules.update(dict.fromkeys(("flax", "optax", "matplotlib")))
import pydoc, regard
from regard import *
pydoc.render_doc(regard)
print(attend.__name__)
for statement in sys.argv[1:]:
    try:
        exec(statement)
    except ImportError as error:
        print(error)
"""


def test_what_needs_no_extra_does_without_and_a_missing_extra_is_named():
    statements = {
        "regard.layers.MultiHeadAttention": ("flax", "models"),
        "from regard.models import Decoder": ("flax", "models"),
        "from regard.interop import huggingface": ("flax", "weights"),
        "from regard.interop.flax import attention_fn": ("flax", "models"),
        "from regard.inspection.figures import save": ("matplotlib", "look"),
        "del sys.modules['flax']; from regard.training import train": ("optax", "train"),
    }
    done = run_python("-c", MISSING, *statements)
    assert done.returncode == 0, done.stderr
    first, *errors = done.stdout.splitlines()
    assert first == "attend"
    for (package, extra), error in zip(statements.values(), errors, strict=True):
        assert f"needs {package}, which is not installed: {remedy(extra)}" in error


def test_the_package_runs_as_the_command():
    done = run_python("-m", "regard", "explain", "--help")
    assert done.returncode == 0, done.stderr
    assert "--shape" in done.stdout
