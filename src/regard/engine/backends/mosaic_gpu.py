"""Backend `mosaic_gpu`: Regard's own kernel for Hopper GPUs, checked in interpret mode and on an H100."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.backends import cudnn, tiled
from regard.engine.call.problem import Problem
from regard.engine.flash.preparation import statistics
from regard.engine.hopper.kernel_calls import InterpretedSpec, KernelSpec, prepare, trace_pairs
from regard.engine.hopper.pair_programs import UnpairedError

_WIDEST = 128
_FEWEST = 16  # rows, below which the score matrix was faster on an H100
_OLDEST = (0, 11)  # jax, which the kernel was checked with
_INTERPRET = False  # True in tests: the kernel then runs anywhere, slowly


def refuses(problem: Problem) -> str | None:
    """Return why the kernel, or what it was checked for, does not cover the call, or None."""
    capability = (9, 0) if _INTERPRET else cudnn.find_capability()
    if isinstance(capability, str):
        return capability
    if capability[0] != 9:
        return (
            f"it is written for Hopper, and this GPU has compute capability {'.'.join(map(str, capability))}"
        )
    if jax.__version_info__ < _OLDEST:
        return f"it was checked with jax 0.11, and this is {jax.__version__}"
    return _refuses_options(problem) or _refuses_pairs(problem)


def leaves_to_others(problem: Problem) -> str | None:
    """Return why others should serve a call that does not name the kernel, or None."""
    if problem.T < _FEWEST:
        return f"a block of it has 128 rows, and this call {problem.T}: it serves by name"
    for name in _read_pairs.eval_shape(problem)["unproven"]:
        return f"it has not run {name!r} over pairs on its device yet: it serves by name"
    return None


def _refuses_options(problem: Problem) -> str | None:
    if statistics(problem) or "max_score" in problem.aux:
        return "of statistics it keeps lse alone: aux asks for others"
    if problem.bias is not None:
        return "it reads no number for every pair: a bias is one"
    if problem.dropout_rate:
        return "it has no dropout"
    if any(array.dtype != jnp.bfloat16 for array in (problem.query, problem.key, problem.value)):
        return "it takes bfloat16 alone: how to multiply float32 is not decided"
    if not problem.low_precision:
        return "it rounds weights to bfloat16, and precision asks for more"
    if max(problem.D, problem.E) > _WIDEST:
        return f"it takes heads of width {_WIDEST} at most, got {max(problem.D, problem.E)}"
    if 0 in (*problem.leading, problem.T, problem.S, problem.D, problem.E):
        return "there is nothing to compute"
    return None


def _refuses_pairs(problem: Problem) -> str | None:
    for need in _read_pairs.eval_shape(problem)["needs"]:
        return f"its mask and scores are arithmetic on pairs in registers, and this call needs {need}"
    return None


@jax.jit
def _read_pairs(problem: Problem) -> dict[str, dict[str, int]]:
    """Return what the call needs beyond arithmetic on pairs, and does that no device has run yet, as keys."""
    # `jit` remembers them: to trace the pairs takes a tenth of a second.
    try:
        pairs = trace_pairs(*prepare(problem))
    except UnpairedError as need:
        return {"needs": {str(need): 0}, "unproven": {}}
    unproven = {name: 0 for program in pairs.programs for name in program.unproven}
    return {"needs": {}, "unproven": unproven}


def run(problem: Problem) -> tuple[Array, dict[str, Array]]:
    """Compute the output by the kernel, and its first gradients; other derivatives are those of `tiled`."""
    return tiled.run(problem, spec=InterpretedSpec if _INTERPRET else KernelSpec)
