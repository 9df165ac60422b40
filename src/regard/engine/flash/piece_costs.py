"""Costs of a pair in pieces, over that in whole tiles, as measured on two cores (benchmarks/NOTES.md)."""

from dataclasses import dataclass

from regard.engine.flash.blocking import Blocking
from regard.engine.flash.measurements import Tuning
from regard.engine.softmax.products import BATCH_ON_ONE_CORE

_EVEN_ROWS = 1024  # of all blocks of a step: two cores share a multiple of it evenly


@dataclass(frozen=True, eq=False)
class Lines:
    """Blocks of one line of pieces, of two, or of half of one in pieces half as wide."""

    halves: int
    most_blocks: int  # at once
    pieces: tuple[int, ...]  # that a block may meet at once
    forward: tuple[float, ...]  # the cost with as many
    backward: tuple[float, ...]

    def blocking(self, tuning: Tuning, group: int, pieces: int, count: int) -> Blocking:
        """Return so many pieces for as many of `count` blocks as a step holds, which two cores share."""
        half = tuning.piece_side // 2
        line, side = self.halves * half, min(self.halves, 2) * half
        blocks = min(self.most_blocks, count)
        if self.halves <= 2:
            blocks = min(max(tuning.piece_cells // (group * line * side * pieces), 1), blocks)
            shared = _EVEN_ROWS // line
            blocks -= blocks % (shared if blocks > shared else min(blocks, 2))
            even = -(-count // -(-count // blocks))  # as many steps, of equally many
            blocks = min(even + even % 2, blocks)
        return Blocking(line, side, 1, blocks, pieces)


# Up to jax 0.10, XLA's CPU needs help to use both cores (`products.py`), which costs something.
HALF_LINES, ONE_LINE, TWO_LINES = (
    (
        Lines(1, 32, (2, 3, 4, 5, 6, 7),
              (2.0, 1.75, 1.55, 1.45, 1.45, 1.42),
              (2.05, 1.85, 1.62, 1.55, 1.5, 1.48)),
        Lines(2, 16, (2, 3, 4, 5, 6, 7, 8, 9, 10, 12),
              (1.42, 1.5, 1.38, 1.3, 1.35, 1.4, 1.35, 1.3, 1.25, 1.3),
              (1.4, 1.45, 1.33, 1.2, 1.22, 1.18, 1.2, 1.18, 1.17, 1.15)),
        Lines(4, 4, (3, 4, 5, 6, 8),
              (1.37, 1.25, 1.2, 1.2, 1.12),
              (1.25, 1.15, 1.12, 1.08, 1.04)),
    )
    if not BATCH_ON_ONE_CORE
    else (
        Lines(1, 32, (2, 3, 4, 5, 6, 7),
              (2.1, 1.8, 1.7, 1.68, 1.65, 1.62),
              (2.1, 1.9, 1.8, 1.75, 1.7, 1.68)),
        Lines(2, 16, (2, 3, 4, 5, 6, 7, 8, 9, 10, 12),
              (1.6, 1.5, 1.45, 1.45, 1.33, 1.2, 1.25, 1.25, 1.25, 1.25),
              (1.75, 1.62, 1.55, 1.35, 1.25, 1.2, 1.16, 1.14, 1.14, 1.14)),
        Lines(4, 4, (4, 6), (1.17, 1.2), (1.05, 1.06)),  # 2, 3 and 5 blocks take a tenth to a fifth longer
    )
)  # fmt: skip
