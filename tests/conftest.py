"""Strict arrays and shape checking while testing."""

import os

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
_hook = install_import_hook(list(CHECKED), "beartype.beartype")

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
        "--every", type=int, default=1, metavar="N", help="of each test's cases, run the first of every N"
    )


def pytest_collection_modifyitems(config, items):
    """Thin out the cases of parametrised tests, and begin with the files that take longest."""
    step, met = config.getoption("--every"), {}
    kept, left_out = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        number = met[test] = met.get(test, -1) + 1
        (left_out if number % step else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    # One worker would still be at them when the other has nothing left.
    long = {item.path for item in kept if item.get_closest_marker("slow")}
    items[:] = sorted(kept, key=lambda item: item.path not in long)
