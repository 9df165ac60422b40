"""How large tiles should be."""

from __future__ import annotations

from regard.engine.problem import Problem
from regard.engine.tiles import Blocking


def choose_blocking(problem: Problem) -> tuple[Blocking, Blocking]:
    """Tiles of the forward and of the backward walk."""
    group = max((problem.leading or (1,))[-1] // problem.key_heads, 1)
    rows = max(512 // group, 1)
    return Blocking(rows, 512, 2), Blocking(rows, 512, 2)
