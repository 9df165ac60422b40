"""Strict arrays and shape checking while testing."""

import gc
import os
import signal
from importlib.util import find_spec
from pathlib import Path

os.environ.update(
    {
        # One deterministic CPU device, and no pop-up windows.
        "JAX_PLATFORMS": "cpu",
        "MPLBACKEND": "agg",
        # Tokens of texts, and no measurements of this machine.
        "XDG_CACHE_HOME": str(Path(__file__).parents[1] / "build" / "cache"),
        # Compiled programs are kept for the other workers, for what tests start, and for the next run.
        "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parents[1] / "build" / "compilation-cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # One process may read what another is still writing; it then compiles the program itself.
        "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache entry",
    }
    | os.environ
)

import jax
import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Whoever runs this in the background, or by nohup, may have signals ignored, in what tests start as well.
for number, handler in {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}.items():
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

# Shapes and dtypes are checked on every internal call. The public boundary is left out, so that its own
# error messages are what a wrong call meets, and so are the pytrees, whose leaves JAX
# replaces by placeholders.
CHECKED = ["regard.engine.backends.dense", "regard.engine.softmax.dropout", "regard.linear.halving"]
CHECKED += ["regard.layers", "regard.models"]
# A borrowed python, as `make gpu-check` may take, need not have beartype.
_hook = install_import_hook(CHECKED, "beartype.beartype") if find_spec("beartype") else None

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile(
    "regard", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("regard")


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    yield
    jax.clear_caches()  # thousands of compiled shapes would add up to gigabytes


@pytest.fixture
def x64():
    """Float64 arrays within one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def loose():
    """Ranks and dtypes that JAX promotes, as other libraries count on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def wide(x64):
    """Float64 models: Flax's norms ask for at least float32, which strict promotion takes for a mixture."""
    with jax.numpy_dtype_promotion("standard"):
        yield


# Cases of half a second and more without which 93 in a hundred faults of MUTANTS.md are still seen.
SLOW = frozenset((Path(__file__).parent / "slow_cases.txt").read_text().splitlines())


def pytest_itemcollected(item):
    """Mark what the list of slow cases holds: a case, or a test with all of its cases."""
    if SLOW & {item.nodeid, item.nodeid.partition("[")[0]}:
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)  # after `-m` and `-k` have chosen
def pytest_collection_modifyitems(config, items):
    """Begin with what takes longest: one worker would still be at it when the others have nothing left."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_runtest_protocol(item, nextitem):
    """Run once more what ended because the browser's own process did, as was seen once."""
    if item.get_closest_marker("browser") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    if any(report.failed and "Target crashed" in str(report.longrepr) for report in reports):
        item._initrequest()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_collection_finish():
    """Look less often for garbage among the tracers of a test, and not at all among what was imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)
