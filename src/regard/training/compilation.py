"""Programs that run once, where compiling takes longer than running, and what is computed while tracing."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

# Optimized, a small program would take several times longer to compile than the run can win back.
LITTLE_WORK: dict[str, Any] = {"xla_backend_optimization_level": 0}


def run_once(function: Callable[..., Any], *arguments: Any, places: Any = None) -> Any:
    """Run a function compiled with hardly any optimization, its results placed by these shardings."""
    # Op by op, every shape would be compiled by itself.
    compiled = jax.jit(function, out_shardings=places).lower(*arguments).compile(LITTLE_WORK)
    # Waited for: where memory was too small, this raises, while reading the results would end the process.
    return jax.block_until_ready(compiled(*arguments))


def compute_now() -> AbstractContextManager[None]:
    """Return the context in which arrays are computed, not traced, also where somebody traces."""
    # Where nobody does, a program's own large constants would be computed, too, while it is lowered.
    is_tracing = isinstance(jnp.zeros(()), Tracer)
    return jax.ensure_compile_time_eval() if is_tracing else nullcontext()
