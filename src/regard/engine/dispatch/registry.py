"""The backends in order of preference, and the choice among them."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from regard.axes import Array
from regard.engine.backends import cudnn, dense, gathered, mosaic_gpu, splash_tpu, tiled
from regard.engine.call.problem import Problem
from regard.engine.flash.measurements import load_tuning
from regard.engine.platforms import find_platform


class Backend(Protocol):
    """One way to compute attention."""

    def refuses(self, problem: Problem) -> str | None:
        """Return why it cannot serve this call, or None."""
        ...

    def run(self, problem: Problem) -> tuple[Array, dict[str, Array]]:
        """Compute the output and what `problem.aux` names."""
        ...


BACKENDS: Mapping[str, Backend] = {
    "cudnn": cudnn,
    "splash_tpu": splash_tpu,
    "mosaic_gpu": mosaic_gpu,
    "gathered": gathered,
    "tiled": tiled,
    "dense": dense,
}
COMPLETE = ("tiled", "dense")  # these serve every call, on every device
PLATFORMS = {"cudnn": "gpu", "splash_tpu": "tpu", "mosaic_gpu": "gpu"}  # where the others are thought of
_SYMBOLIC = "its sizes are symbolic, which 'tiled' and 'dense' alone serve, without batch_invariant"


@dataclass(frozen=True)
class Choice:
    """The backend that serves a call, and why those before it do not."""

    name: str
    reason: str
    refusals: dict[str, str]
    tiles_derivatives: bool = False  # of what is computed at once

    @property
    def run(self) -> Callable[[Problem], tuple[Array, dict[str, Array]]]:
        """Return what computes the output and what `problem.aux` names."""
        return tiled.run_at_once if self.tiles_derivatives else BACKENDS[self.name].run


def choose(problem: Problem, name: str | None = None) -> Choice:
    """Choose the named backend, or the fastest that serves; an error carries every refusal."""
    if name is not None:
        if not isinstance(name, str) or name not in BACKENDS:
            nearest = difflib.get_close_matches(str(name), BACKENDS, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"backend: expected one of {', '.join(BACKENDS)} or None, got {name!r}{hint}")
        refusal = BACKENDS[name].refuses(problem)
        if problem.batch_invariant and name != "tiled":
            refusal = "batch_invariant is promised by 'tiled' alone"
        if problem.is_symbolic and (name not in COMPLETE or problem.batch_invariant):
            refusal = _SYMBOLIC
        if refusal is not None:
            raise NotImplementedError(f"backend {name!r} cannot serve this call: {refusal}")
        return Choice(name, "it was asked for", {})
    if problem.is_symbolic:
        if problem.batch_invariant:
            raise NotImplementedError(f"no backend can serve this call: {_SYMBOLIC}")
        return Choice(
            "tiled", "sizes are symbolic: every pair is computed, some rows at a time, linear in memory", {}
        )
    if problem.batch_invariant:
        return Choice("tiled", "its bits do not depend on the rest of the batch", {})
    platform = find_platform().name
    left_out = () if gathered.is_fewer(problem) else ("gathered",)
    candidates = [
        name for name in BACKENDS if PLATFORMS.get(name, platform) == platform and name not in left_out
    ]
    refused: dict[str, str] = {}
    for candidate in candidates:  # those after the first that serves are not asked
        refusal = BACKENDS[candidate].refuses(problem)
        if candidate == "mosaic_gpu":
            refusal = refusal or mosaic_gpu.leaves_to_others(problem)
        if refusal is None:
            break
        refused[candidate] = refusal
    else:
        listed = "\n".join(f"  {candidate}: {refusal}" for candidate, refusal in refused.items())
        raise NotImplementedError(f"no backend can serve this call:\n{listed}")
    if candidate in PLATFORMS:
        return Choice(candidate, "it is this device's own, and fastest", refused)
    if candidate == "gathered":
        return Choice("gathered", gathered.describe_work(problem), refused)
    tuning = load_tuning()
    favour = tuning.favours_dense(problem)
    if favour is not None and "dense" not in refused:
        return Choice("dense", favour, refused, tuning.tiles_derivatives(problem))
    reason = "it is the first that serves" if refused else "tiles are faster here, and linear in memory"
    return Choice(candidate, reason, refused)
