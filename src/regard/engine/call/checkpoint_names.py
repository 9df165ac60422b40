"""Names by which `jax.checkpoint` policies know what a call of attention computes."""

from collections.abc import Iterable

from jax.ad_checkpoint import checkpoint_name

from regard.axes import Array

OUTPUT, LSE = "attention_output", "attention_lse"

CHECKPOINT_NAMES = (OUTPUT, LSE)
"""Names of the output and of what is kept per row, as the log of the sum of exponentials.

A policy of `jax.checkpoint` that saves both, `save_only_these_names(*regard.CHECKPOINT_NAMES)`, spares the
backward pass a second forward pass of attention.
"""


def name_results(names: Iterable[str], results: Iterable[Array]) -> list[Array]:
    """Name the results of a forward pass: "output" the one way, all that there is per row the other."""
    return [
        checkpoint_name(result, OUTPUT if name == "output" else LSE)
        for name, result in zip(names, results, strict=True)
    ]
