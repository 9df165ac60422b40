"""The work of one update: its tokens, the model's floating-point operations, and the devices' peak."""

from typing import Any, NamedTuple

import jax

from regard.planning import CHIPS
from regard.training.task import Task


class Work(NamedTuple):
    """The work of one update; a recomputation (`remat`) is no work of the model."""

    tokens: int
    flops: float
    peak: float | None = None
    """Operations per second of all devices together; None where `planning.CHIPS` has no such device."""

    def describe(self, steps_per_second: float) -> str:
        """Describe a rate: tokens per second and, where the peak is known, model FLOP utilisation.

        Example:
            >>> Work(1000, 2e9, 1e10).describe(3.0)
            '3,000 tokens/s  60% MFU'
        """
        share = "" if self.peak is None else f"  {self.flops * steps_per_second / self.peak:.0%} MFU"
        return f"{self.tokens * steps_per_second:,.0f} tokens/s{share}"


def count_work(task: Task, params: Any, num_devices: int, device_kind: str) -> Work:
    """Count the work of an update: 6 N + 12 L d T operations per token, as PaLM's utilisation has it.

    N is the number of parameters, L that of layers, d the width and T the positions of a row; the 6 N are two
    for each product, forward and twice backward, and the rest are attention's products, masked ones too.

    Reference: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B,
    https://arxiv.org/abs/2204.02311
    """
    config, optimization = task.config, task.optimization
    tokens = optimization.batch_size * config.max_length
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    attention = 12 * config.num_layers * config.d_model * config.max_length
    chip = next((chip for name, chip in CHIPS.items() if name in device_kind.lower()), None)
    peak = None if chip is None else num_devices * chip.flops[optimization.precision]
    return Work(tokens, float(tokens) * (6 * size + attention), peak)
