"""Public names are listed, load on first use, and say which extra they need."""

import importlib
import inspect
import pkgutil
import pydoc
import subprocess
import sys

import pytest

import regard
from regard.loading import remedy
from test_docstrings import MODULES, list_objects

PACKAGES = [
    module.name
    for module in pkgutil.walk_packages(regard.__path__, "regard.")
    if module.ispkg and hasattr(importlib.import_module(module.name), "__all__")
]
WITHOUT = "import sys; sys.modules[{!r}] = None\n"


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("package", ["regard", *PACKAGES])
def test_every_listed_name_exists(package):
    module = importlib.import_module(package)
    assert {*module.__all__} <= {*dir(module)}
    assert all(getattr(module, name) is not None for name in module.__all__)


@pytest.mark.parametrize("package", ["regard", *PACKAGES])
def test_help_lists_the_functions_that_users_call(package):
    module = importlib.import_module(package)
    text = pydoc.plain(pydoc.render_doc(module))
    functions = [name for name in module.__all__ if inspect.isfunction(getattr(module, name))]
    assert [name for name in functions if f"\n    {name}(" not in text] == []


def test_help_names_attend_and_causal():
    assert "\n    attend(query" in pydoc.plain(pydoc.render_doc(regard))
    assert "\n    causal()" in pydoc.plain(pydoc.render_doc(regard.masks))


def test_every_name_of_the_reference_is_listed():
    """By its package, or its module is."""
    for module in MODULES:
        package, _, last = module.rpartition(".")
        if hasattr(importlib.import_module(module), "__all__"):
            assert {name for name, _, _ in list_objects(module)} <= {*importlib.import_module(module).__all__}
        if package:
            assert last in importlib.import_module(package).__all__, module


def test_every_room_is_an_attribute():
    done = run_python(
        "import regard; print(regard.layers.MultiHeadAttention, regard.interop.jax_nn.__name__)"
    )
    assert done.stdout == "<class 'regard.layers.multi_head.MultiHeadAttention'> regard.interop.jax_nn\n"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=f"it has {', '.join(sorted(regard.__all__))}"):
        _ = regard.attention_please
    with pytest.raises(ImportError, match="cannot import name 'Perceiver'"):
        from regard.models import Perceiver  # pyright: ignore  # noqa: F401


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "statement", "extra"),
    [
        ("flax", "import regard; regard.layers.MultiHeadAttention", "models"),
        ("flax", "from regard.models import Decoder", "models"),
        ("optax", "from regard.training import train", "train"),
        ("flax", "from regard.interop import huggingface", "weights"),
        ("matplotlib", "from regard.inspection.figures import save", "look"),
    ],
)
def test_a_missing_extra_is_named(package, statement, extra):
    done = run_python(WITHOUT.format(package) + statement)
    assert done.returncode == 1
    assert f"needs {package}, which is not installed: {remedy(extra)}" in done.stderr


@pytest.mark.slow
def test_help_and_star_do_without_extras():
    without = "".join(WITHOUT.format(package) for package in ("flax", "optax", "matplotlib"))
    done = run_python(
        without + "import pydoc, regard; pydoc.render_doc(regard); from regard import *; print(attend)"
    )
    assert done.stdout.startswith("<function attend"), done.stderr


def test_the_package_runs_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "regard", "explain", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--shape" in done.stdout
