"""Strict arrays and shape checking while testing."""

import os
from importlib.util import find_spec

# One deterministic CPU device, and no pop-up windows.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")
# Most tests compile more than they compute: LLVM's costly passes would take as long as the tests.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Shapes and dtypes are checked on every internal call. The public boundary is left out, so that its own
# error messages are what a wrong call meets, and so are the pytrees, whose leaves JAX
# replaces by placeholders.
CHECKED = (
    "regard.engine.dense",
    "regard.engine.dropout",
    "regard.linear.halving",
    "regard.layers",
    "regard.models",
)
# A borrowed python, as `make gpu-check` may take, need not have beartype.
_hook = install_import_hook(list(CHECKED), "beartype.beartype") if find_spec("beartype") else None

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile(
    "regard", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("regard")


# What is promised to the last digit is tested as users run it.
OPTIMIZED = ("test_contract", "test_exponential", "test_online_softmax")


@pytest.fixture(autouse=True, scope="module")
def _compilation(request):
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", before and request.module.__name__ not in OPTIMIZED)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()  # thousands of compiled shapes would add up to gigabytes


@pytest.fixture
def x64():
    """Float64 arrays within one test."""
    with jax.enable_x64(True):
        yield


def pytest_addoption(parser):
    parser.addoption(
        "--share",
        default="1/1",
        metavar="A/B",
        help="run every B-th case of each test, from the A-th on; a test with fewer cases runs whole",
    )


def pytest_collection_modifyitems(config, items):
    """Leave out the cases of other shares, and begin with the files that take longest."""
    share, shares = map(int, config.getoption("--share").split("/"))
    cases = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = [
        item
        for test in cases.values()
        if len(test) >= shares
        for number, item in enumerate(test)
        if number % shares != share - 1
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        dropped = {id(item) for item in left_out}
        items[:] = [item for item in items if id(item) not in dropped]
    # One worker would still be at them when the other has nothing left.
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)
