"""Compiling for a single call: where compiling takes longer than running."""

from collections.abc import Callable
from typing import Any

import jax


def run_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a function compiled with hardly any optimization.

    For work done once, such as drawing parameters or one example's attention: op by op, every shape would be
    compiled by itself; optimized, compiling would take several times longer than the run can win back.
    """
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(function).lower(*arguments).compile(options)
    return compiled(*arguments)
