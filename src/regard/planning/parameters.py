"""Parameters of a decoder: their shapes, what a device has of them on a mesh, and their numbers by part."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

_PARTS = ("attention", "feed_forward", "experts", "routers", "norms", "embedding", "head")


class Parameter(NamedTuple):
    """An array of a decoder, or one of several layers that are alike."""

    path: str
    shape: tuple[int, ...]
    layers: int
    """Layers that have one."""
    layer: int | None
    """The first of them; None outside of blocks."""

    @property
    def part(self) -> str:
        """Where it is, of the keys of `count_parameters`."""
        if self.layer is None:
            return "head" if self.path.startswith("head/") else "embedding"
        if self.path.endswith(("kernels", "biases")):
            return "experts"
        branch = re.split(r"blocks/\d+/", self.path)[1].split("/")
        if branch[0].endswith("_residual"):
            return "norms"
        return "routers" if branch[1] == "router" else branch[0]


class Share(NamedTuple):
    """What a device has of parameters, and sends for them, in numbers."""

    stored: float = 0.0
    """Kept, with optimizer state."""
    used: float = 0.0
    """Computed with: whole along fsdp."""
    gathered: float = 0.0
    """Sent to gather what is used from what is stored, once."""
    summed: float = 0.0
    """Sent to sum gradients into what is stored, once."""
    borrowed: float = 0.0
    """Computed with, of arrays that are gathered."""

    def copies(self, size: int) -> float:
        """Return the numbers that are there once more in a dtype of such a size."""
        return self.used if size < 4 else self.borrowed

    def __add__(self, other: Any) -> Share:
        return Share(*(one + more for one, more in zip(self, other, strict=True)))


def count_parameters(config: Any) -> dict[str, int]:
    """Count the parameters of a `Decoder`, by where they are.

    Args:
        config: the decoder's `TransformerConfig`.

    Returns:
        Numbers of all blocks' `attention`, `feed_forward`, `experts`, `routers` and `norms`, of the
        `embedding` with all that stands before and behind the blocks, and of the `head`.

    Example:
        >>> from regard.models import preset
        >>> from regard.planning import count_parameters
        >>> parts = count_parameters(preset("qwen3-30b-a3b").config)
        >>> sum(parts.values()), parts["experts"], parts["feed_forward"]
        (30532122624, 28991029248, 0)
    """
    check_config(config)
    parts = dict.fromkeys(_PARTS, 0)
    for leaf in list_parameters(config):
        parts[leaf.part] += leaf.layers * math.prod(leaf.shape)
    return parts


def check_config(config: Any) -> None:
    """Raise for what is no `TransformerConfig`, and for layers of which nothing is planned."""
    if not hasattr(config, "vocab_size"):
        raise TypeError(f"config: expected a TransformerConfig, got {type(config).__name__}")
    if config.is_hybrid:
        expected = "attention in every layer, of the rest nothing is planned"
        raise ValueError(f"config: expected {expected}; got {config.mixers}")
    for name in ("latent_dim", "shared_width"):
        if getattr(config, name) is not None:
            raise ValueError(
                f"config: expected {name}=None, as nothing is planned of it; got {getattr(config, name)}"
            )


@functools.lru_cache(64)
def list_parameters(config: Any) -> tuple[Parameter, ...]:
    """List the parameters of a decoder, those of layers that are alike once; nothing is computed."""
    from flax import nnx

    from regard.models.decoder import Decoder

    # Layers with experts and without, and the first where its norm is left out: in this order, one of each.
    kinds = collections.Counter(
        (config.num_experts is None or layer in config.dense_layers, config.first_norm or layer > 0)
        for layer in range(config.num_layers)
    )
    dense = () if config.num_experts is None else [n for n, (is_dense, _) in enumerate(kinds) if is_dense]
    fewer = dataclasses.replace(config, num_layers=len(kinds), dense_layers=tuple(dense))
    state = nnx.state(nnx.eval_shape(lambda: Decoder(fewer, rngs=nnx.Rngs(0))), nnx.Param)
    leaves, counts = [], list(kinds.values())
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        path = jax.tree_util.keystr(keys, simple=True, separator="/").removesuffix("/value")
        block = re.search(r"blocks/(\d+)/", path)
        layer = int(block[1]) if block else None
        leaves.append(Parameter(path, leaf.shape, 1 if layer is None else counts[layer], layer))
    return tuple(leaves)


def count_branches(config: Any) -> tuple[int, int]:
    """Return how many layers have one feed-forward branch for all tokens, and how many have experts."""
    dense = config.num_layers if config.num_experts is None else len({*config.dense_layers})
    return dense, config.num_layers - dense


@functools.lru_cache(4096)
def _divide(config: Any, fsdp: int, tensor: int) -> tuple[tuple[Parameter, float, float], ...]:
    """Return each parameter with the numbers of it that a device keeps and computes with."""
    from regard.models.sharding import divide_array

    sizes = {"fsdp": fsdp, "tensor": tensor}

    def count(leaf: Parameter, *, in_use: bool) -> float:
        named = jax.tree.leaves(tuple(divide_array(leaf.path, leaf.shape, sizes, in_use=in_use)))
        return math.prod(leaf.shape) / math.prod(sizes[axis] for axis in named)

    return tuple(
        (leaf, count(leaf, in_use=False), count(leaf, in_use=True)) for leaf in list_parameters(config)
    )


def share_parameters(config: Any, sizes: Mapping[str, int]) -> tuple[Share, Share, Share]:
    """Return what a device of a mesh of such sizes has of all that is outside of blocks, of blocks, of one.

    A gradient is summed over all devices with other tokens. Where these keep parts of it, each is sent the
    sums of its part, which are then summed with those who keep the same: the fewest bytes that do.
    """
    outside, blocks, single = Share(), Share(), collections.defaultdict(Share)
    adding = sizes["data"] * sizes["fsdp"] * sizes["sequence"]
    for leaf, stored, used in _divide(config, sizes["fsdp"], sizes["tensor"]):
        parts = min(used / stored, adding)
        alike = adding / parts
        summed = used * (parts - 1) / parts + 2 * used / parts * (alike - 1) / alike
        share = Share(stored, used, used - stored, summed, used * (used > stored))
        if leaf.layer is None:
            outside += share
        else:
            single[leaf.layer] += share
            blocks += Share(*(leaf.layers * number for number in share))
    return outside, blocks, max(single.values(), key=lambda share: share.used, default=Share())
