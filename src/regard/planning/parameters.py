"""Parameters of a decoder: their shapes, what a device has of them on a mesh, and their numbers by part."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

if TYPE_CHECKING:
    from regard.models.config import TransformerConfig

# Parts by what the path of a parameter matches first.
_PARTS = {
    r"/(attention|delta)/": "attention",
    r"/feed_forward/(shared/|shared_gate/|(gate|widen|narrow)/(kernel|bias)$)": "feed_forward",
    r"/feed_forward/(gate|widen|narrow)/": "experts",
    r"/router/": "routers",
    r"/blocks/": "norms",
    r"^trunk/": "embedding",
    r"^head/": "head",
}


class LayerKind(NamedTuple):
    """Parts of a layer; where they are the same, layers are alike."""

    mixer: str
    is_dense: bool  # one feed-forward branch for all tokens; else experts


class Parameter(NamedTuple):
    """An array of a decoder; of layers that are alike, that of the first."""

    path: str
    shape: tuple[int, ...]
    block: str | None
    layers: int  # that have one

    @property
    def part(self) -> str:
        """Return where it is, of the keys of `count_parameters`."""
        return _find_part(self.path)


@functools.lru_cache(4096)
def _find_part(path: str) -> str:
    return next(part for pattern, part in _PARTS.items() if re.search(pattern, path))


class Share(NamedTuple):
    """Numbers of parameters that a device has, and that it sends."""

    stored: float  # with optimizer state
    used: float  # whole along fsdp
    borrowed: float  # used, of arrays of which it stores a part
    gathered: float  # sent to gather them once
    summed: float  # sent to sum gradients once, into what is stored
    looked_up: float  # of these, of tables that tokens read, whose gradients are summed in float32

    def copies(self, size: int) -> float:
        """Return the numbers that are there once more to compute with, in a dtype of such a size."""
        return self.used if size < 4 else self.borrowed


def count_parameters(config: TransformerConfig) -> dict[str, int]:
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
    parts = dict.fromkeys(_PARTS.values(), 0)
    for leaf in list_parameters(config):
        parts[leaf.part] += leaf.layers * math.prod(leaf.shape)
    return parts


def check_config(config: Any) -> None:
    """Raise for what is no `TransformerConfig`."""
    if not hasattr(config, "vocab_size"):
        raise TypeError(f"config: expected a TransformerConfig, got {type(config).__name__}")


@functools.lru_cache(64)
def list_parameters(config: Any) -> tuple[Parameter, ...]:
    """List the parameters of a decoder, those of layers that are alike once; nothing is computed."""
    from flax import nnx

    from regard.models.decoder import Decoder

    # Of layers that are alike, and of the first where its norm is left out: in this order, one of each.
    kinds = collections.Counter(
        (find_kind(config, layer), config.first_norm or layer > 0) for layer in range(config.num_layers)
    )
    dense = tuple(number for number, (kind, _) in enumerate(kinds) if kind.is_dense and config.num_experts)
    mixers = tuple(kind.mixer for kind, _ in kinds)
    fewer = dataclasses.replace(config, num_layers=len(kinds), dense_layers=dense, mixers=mixers)
    state = nnx.state(nnx.eval_shape(lambda: Decoder(fewer, rngs=nnx.Rngs(0))), nnx.Param)
    leaves, counts = [], list(kinds.values())
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        path = jax.tree_util.keystr(keys, simple=True, separator="/").removesuffix("/value")
        block = re.search(r"/blocks/(\d+)/", path)
        layers = counts[int(block[1])] if block else 1
        leaves.append(Parameter(path, leaf.shape, block[0] if block else None, layers))
    return tuple(leaves)


def find_kind(config: Any, layer: int) -> LayerKind:
    """Return what a layer consists of."""
    return LayerKind(config.mixer(layer), config.num_experts is None or layer in config.dense_layers)


@functools.lru_cache(64)
def count_kinds(config: Any) -> collections.Counter[LayerKind]:
    """Count the layers of each kind."""
    return collections.Counter(find_kind(config, layer) for layer in range(config.num_layers))


@functools.lru_cache(64)
def find_period(config: Any) -> int:
    """Return how many layers a step of the loop over layers computes: after so many, the same come again."""
    layers = [(find_kind(config, layer), config.window(layer)) for layer in range(config.num_layers)]
    while len({kind.is_dense for kind, _ in layers}) > 1 and layers[0][0].is_dense:
        layers = layers[1:]  # The first ones are unrolled.
    for period in range(1, len(layers)):
        if 2 * period <= len(layers) and layers[period:] == layers[:-period]:
            return period
    if len(layers) > 1:
        raise ValueError(
            "config: expected layers that are alike or take turns at least twice, or scan_layers=False"
        )
    return 1


@functools.lru_cache(64)
def count_sparse(config: Any) -> int:
    """Count the layers that have experts."""
    return sum(layers for kind, layers in count_kinds(config).items() if not kind.is_dense)


@functools.lru_cache(4096)
def share_parameters(
    config: Any, devices: int, fsdp: int, expert: int, tensor: int
) -> tuple[Share, Share, Share]:
    """Return what a device of a mesh has of all outside of blocks, of blocks, and of the largest one.

    Gradients are summed over all devices with tokens of their own: so many, times `expert`. Where these
    store parts, each is sent the sums of its part, and those are summed over the devices that store the same:
    the fewest bytes that do.
    """
    groups = collections.defaultdict(lambda: np.zeros(len(Share._fields)))
    for leaf, stored, used in _divide(config, fsdp, expert, tensor):
        adding = devices * (1 if leaf.part == "experts" else expert)
        parts = min(used / stored, adding)
        summed = used * (parts - 1) / parts + 2 * (used / parts) * (1 - parts / adding)
        looked_up = summed * leaf.path.endswith("table/embedding")
        sizes = stored, used, used * (used > stored), used - stored, summed, looked_up
        groups[leaf.block, leaf.layers] += sizes
    outside = groups.pop((None, 1))
    blocks = sum(layers * share for (_, layers), share in groups.items())
    largest = max(groups.values(), key=lambda share: share[1], default=0 * outside)
    return Share(*outside.tolist()), Share(*(0 * outside + blocks).tolist()), Share(*largest.tolist())


@functools.lru_cache(4096)
def _divide(config: Any, fsdp: int, expert: int, tensor: int) -> list[tuple[Parameter, float, float]]:
    """Return each parameter with the numbers of it that a device stores, and those that it computes with."""
    from regard.models.sharding import divide_array

    sizes = {"fsdp": fsdp, "expert": expert, "tensor": tensor}

    def count(leaf: Parameter, *, in_use: bool) -> float:
        axes = jax.tree.leaves(tuple(divide_array(leaf.path, leaf.shape, sizes, in_use=in_use)))
        return math.prod(leaf.shape) / math.prod(sizes[axis] for axis in axes)

    leaves = list_parameters(config)
    return [(leaf, count(leaf, in_use=False), count(leaf, in_use=True)) for leaf in leaves]
