"""Steps: what a training step of a whole decoder takes, on the best mesh of up to so many devices."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from regard import masks
from regard.arguments import guided
from regard.engine.call.canonicalization import canonicalize
from regard.engine.dispatch.explanation import scaled
from regard.planning.candidates import Candidate
from regard.planning.chips import Chip, Line, sum_seconds
from regard.planning.estimates import Assumptions, Estimate
from regard.planning.parameters import check_config, count_block, count_branches, count_parameters
from regard.planning.planner import MemoryTooSmallError, check_divisible, prepare, read_fixed, read_sizes
from regard.planning.reports import spell_seconds
from regard.planning.search import Beside

AXES = ("data", "fsdp", "sequence", "tensor")  # as `regard train --mesh` has them
_STATE = {"parameters": 4, "optimizer": 8}  # bytes per parameter: float32, Adam's two moments


@dataclass(frozen=True)
class Step:
    """The best mesh for a training step, and what the step takes there; print it to read it.

    Example:
        >>> from regard import planning
        >>> from regard.models import preset
        >>> step = planning.plan_step(preset("gpt2").config, length=1024, batch=64, devices=8, chip="a100")
        >>> step.mesh, step.held["optimizer"] < step.held["activations"]
        ({'fsdp': 8}, True)
    """

    request: Mapping[str, Any]
    """Arguments of `plan_step` by name."""
    chip: Chip
    """The kind of device."""
    mesh: Mapping[str, int]
    """Axes of `regard train --mesh` with more than one device: data (rows of a batch), fsdp (rows, and
    parameters with their optimizer state), sequence (positions), tensor (heads, widths and vocabulary)."""
    attention: Estimate
    """One layer's attention, forward and back, on the mesh; of the widest window."""
    parameters: int
    """Numbers that are trained."""
    held: Mapping[str, float]
    """Bytes per device: parameters, gradients, optimizer, gathered (whole weights, of one layer at a time
    where layers are scanned), activations (what blocks keep for the backward pass, as JAX counts it),
    attention, and what else is working beside it (a block or the loss, with its gradient)."""
    seconds_of: Mapping[str, float]
    """Seconds of attention, products of all else, weights that are gathered and summed (while products are
    computed), activations that are summed, update."""

    @property
    def candidate(self) -> Candidate:
        """The mesh, as attention is divided over it."""
        return self.attention.candidate

    @property
    def seconds(self) -> float:
        """Time of the step: products and weights on their way overlap, the rest follows one another."""
        times = self.seconds_of
        rest = times["attention"] + times["sums"] + times["update"]
        return rest + max(times["products"], times["weights"])

    def __str__(self) -> str:
        asked, mesh = self.request, self.candidate
        axes = ",".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "one device"
        room = scaled(self.chip.memory_bytes, "B")
        held = ", ".join(f"{name} {scaled(count, 'B')}" for name, count in self.held.items())
        times = ", ".join(f"{name} {spell_seconds(seconds)}" for name, seconds in self.seconds_of.items())
        ways = f"{asked['precision']}, remat {asked['remat']}"
        rows = {
            "step": f"{asked['batch']} x {asked['length']:,} tokens in {ways}",
            "parameters": f"{self.parameters:,}",
            "best": f"{axes}, {mesh.devices:,} of {asked['devices']:,} x {self.chip.name}:"
            f" {spell_seconds(self.seconds)}",
            "memory": f"{scaled(sum(self.held.values()), 'B')} of {room} per device: {held}",
            "time": times,
        }
        return "\n".join(f"{label:<10} {text}" for label, text in rows.items())


@guided
def plan_step(
    config: Any,
    *,
    length: int | str,
    batch: int,
    devices: int,
    chip: str | Chip,
    precision: str = "bfloat16",
    fixed: Mapping[str, int] | None = None,
    assumptions: Assumptions | None = None,
) -> Step:
    """Find the mesh on which a training step of a `Decoder` is fastest, and say what it takes there.

    seconds = attention + max(products, weights on their way) + sums over heads + update

    Parameters and Adam's moments are float32. Along `fsdp` they are divided; with `config.scan_layers`, each
    layer's weights are gathered in `precision` when it is their turn, forward and back, else all of them at
    once; gradients are summed into parts. Along `data` every device has all of them, and gradients are
    summed. With `config.remat`, only the stream between blocks is kept, and each block is run again.
    Experts are gathered as all weights are, and their widths divided as heads; computed and kept are the
    rows that `layers.Experts` lays for the tokens of a device, up to twice those that its tokens choose.

    Args:
        config: the decoder's `TransformerConfig`; `remat` says whether blocks are run again.
        length: tokens of a sequence, as in `plan`.
        batch: sequences of a step.
        devices, chip, assumptions: as in `plan`.
        precision: in which is computed, "bfloat16" or "float32".
        fixed: sizes of mesh axes that are not to be chosen, by name: data, fsdp, sequence, tensor. Of data
            and fsdp, that which is left out beside the other is 1.

    Returns:
        The best mesh of at most so many devices, its bytes and its seconds, part by part.

    Raises:
        TypeError: as in `plan`; a config that is none.
        ValueError: as in `plan`; a config without `vocab_size`.
        MemoryTooSmallError: no mesh holds the step.

    Example:
        >>> import dataclasses
        >>> from regard import planning
        >>> from regard.models import preset
        >>> config = dataclasses.replace(preset("llama-3.1-8b").config, scan_layers=True, remat="full")
        >>> step = planning.plan_step(config, length="8k", batch=64, devices=64, chip="h100")
        >>> step.candidate.devices, step.parameters
        (64, 8030261248)

    Reference: Rajbhandari et al., "ZeRO", 2020, stage 3; Chen et al., "Training Deep Nets with Sublinear
    Memory Cost", 2016.
    """
    check_config(config)
    if config.vocab_size is None:
        raise ValueError("config: expected vocab_size, as a Decoder predicts tokens; got input_width")
    sizes = read_sizes({"length": length, "batch": batch, "devices": devices})
    batch, devices = sizes["batch"], sizes["devices"]
    if precision not in ("bfloat16", "float32"):
        raise ValueError(f"precision: expected bfloat16 or float32, got {precision!r}")
    fixed, shares = read_fixed(fixed, devices, AXES), Assumptions() if assumptions is None else assumptions
    divided = _divide_attention(fixed)
    key_heads = config.num_key_heads or config.num_heads
    query = jax.ShapeDtypeStruct((batch, config.num_heads, sizes["length"], config.head_width), precision)
    key = jax.ShapeDtypeStruct((batch, key_heads, sizes["length"], config.head_width), precision)
    again = 1.0 if config.remat is None else 9 / 7  # of 2 products forward and 5 back, the 2 once more
    windows = collections.Counter(config.window(layer) for layer in range(config.num_layers))
    ordered = sorted(windows, key=lambda window: float("inf") if window is None else window, reverse=True)
    calls = []
    for window in ordered:
        mask = masks.causal() if window is None else masks.causal() & masks.sliding_window(window)
        search = prepare(canonicalize(query, key, key, mask=mask), chip, shares, True, divided)
        chip = search.chip  # measured once
        calls.append(replace(search, times=windows[window] * again))
    first, *others = calls
    model = _Model(config, sizes, first.chip, shares, precision, fixed, first.peak)
    search = replace(first, beside=model.weigh, also=tuple(others))
    best = search.find_best(devices)
    if best is None:
        check_divisible(search, devices, sizes)
        remedy = "take more devices, a smaller batch, a shorter sequence, or remat"
        name = first.chip.name
        raise MemoryTooSmallError(f"devices: no mesh of up to {devices} {name} holds the step; {remedy}")
    candidate, fsdp = best.candidate, model.fsdp(best.candidate)
    attention = search.total(best) - model.weigh(candidate).seconds
    times = {"attention": attention, **model.time(candidate)}
    request = {**sizes, "precision": precision, "remat": config.remat}
    axes = zip(AXES, (candidate.data // fsdp, fsdp, candidate.sequence, candidate.heads), strict=True)
    mesh = {axis: size for axis, size in axes if size > 1}
    held = model.hold(candidate)
    return Step(request, search.chip_of(candidate.devices), mesh, best, model.total, held, times)


def _divide_attention(fixed: Mapping[str, int]) -> dict[str, int]:
    """Return what sizes of a training mesh fix of attention's own: in training, keys travel."""
    rows = {"data": math.prod(fixed.get(name, 1) for name in ("data", "fsdp"))}
    rows = rows if {"data", "fsdp"} & fixed.keys() else {}
    others = {"sequence": "sequence", "tensor": "heads"}
    return rows | {own: fixed[name] for name, own in others.items() if name in fixed} | {"exchange": 1}


@dataclass(frozen=True)
class _Model:
    """All of a step but attention's own work."""

    config: Any
    sizes: Mapping[str, int]
    chip: Chip
    shares: Assumptions
    precision: str
    fixed: Mapping[str, int]
    peak: Callable[[Candidate], float]  # bytes of attention alone

    @property
    def size(self) -> int:
        """Bytes of a number in which is computed."""
        return 2 if self.precision == "bfloat16" else 4

    @functools.cached_property
    def parts(self) -> dict[str, int]:
        return count_parameters(self.config)

    @functools.cached_property
    def total(self) -> int:
        """Parameters of the model."""
        return sum(self.parts.values())

    @functools.cached_property
    def block(self) -> int:
        """Parameters of the largest block."""
        counts, experts = count_block(self.config), self.config.num_experts or 0
        dense, sparse = count_branches(self.config)
        mixture = counts["routers"] + experts * counts["experts"]
        branch = max((dense > 0) * counts["feed_forward"], (sparse > 0) * mixture)
        return counts["attention"] + counts["norms"] + branch

    def weigh(self, candidate: Candidate, fsdp: int | None = None) -> Beside:
        """Return seconds and bytes beside attention."""
        fsdp = self.fsdp(candidate) if fsdp is None else fsdp
        times = self.time(candidate, fsdp)
        seconds = times["sums"] + times["update"] + max(times["products"], times["weights"])
        held = self.hold(candidate, fsdp)
        return Beside(seconds, sum(held.values()) - held["attention"])

    def fsdp(self, candidate: Candidate) -> int:
        """Return how many of the devices that divide rows divide parameters, too: none, if that is faster."""
        if {"data", "fsdp"} & self.fixed.keys():
            return self.fixed.get("fsdp", 1)
        whole, divided = self.weigh(candidate, 1), self.weigh(candidate, candidate.data)
        room = self.chip.memory_bytes * self.shares.memory_share
        return 1 if whole.bytes <= room and whole.seconds <= divided.seconds else candidate.data

    def tokens(self, candidate: Candidate) -> float:
        """Return the tokens that a device has, in all its layers but the parts that heads divide."""
        rows = (self.sizes["batch"] + candidate.rows) / candidate.data
        return rows * (self.sizes["length"] + candidate.tokens) / (candidate.sequence * candidate.exchange)

    def lay(self, tokens: float) -> tuple[int, int]:
        """Return the tiles of a layer's experts, and the rows of a tile: as `layers.Experts` lays them."""
        choices, experts = math.ceil(tokens * self.config.experts_per_token), self.config.num_experts or 1
        size = -(-choices // experts)
        return (choices + min(experts, choices) * (size - 1)) // size, size

    def hold(self, candidate: Candidate, fsdp: int | None = None) -> dict[str, float]:
        """Return bytes per device."""
        config, tokens, head_shards = self.config, self.tokens(candidate), candidate.heads
        fsdp = self.fsdp(candidate) if fsdp is None else fsdp
        sizes = {"parameters": _STATE["parameters"], "gradients": self.size, "optimizer": _STATE["optimizer"]}
        held = {name: size * self.total / (fsdp * head_shards) for name, size in sizes.items()}
        dense, sparse = count_branches(config)
        branches = {is_dense: count for is_dense, count in ((True, dense), (False, sparse)) if count}
        blocks = sum(
            count * self.keep(candidate, is_dense, config.remat) for is_dense, count in branches.items()
        )
        # Beside what blocks keep: one that is differentiated, or the loss; attention alone has its own bytes.
        is_again = config.scan_layers or config.remat is not None
        inside = is_again and max(
            (self.keep(candidate, is_dense, None) for is_dense in branches), default=0.0
        )
        # In float32, with their gradient; and as they are computed.
        logits = 2 * (4 + self.size * (self.size < 4)) * (config.vocab_size or 0) / head_shards
        attention = self.peak(candidate) if is_again else 0.0
        working = max(tokens * max(inside, logits) - attention, 0.0)
        # Those outside of blocks, this layer's and the next one's; or those of all. One map's of all tiles.
        outside = self.parts["embedding"] + self.parts["head"]
        copied = outside + 2 * self.block if config.scan_layers else self.total
        gathered = (fsdp > 1 or self.size < 4) * copied
        gathered += sparse and self.lay(tokens)[0] * config.d_model * (config.expert_width or config.d_ff)
        held |= {"gathered": self.size * gathered / head_shards, "activations": tokens * blocks}
        return held | {"attention": attention, "working": working}

    def keep(self, candidate: Candidate, is_dense: bool, remat: Any) -> float:
        """Return the bytes per token that a block keeps."""
        from regard.planning.residuals import count_residuals  # which loads models

        options = {
            "remat": remat,
            "is_dense": is_dense,
            "has_rows": candidate.sequence * candidate.heads == 1,
        }
        return count_residuals(self.config, self.sizes["length"], candidate.heads, self.precision, **options)

    def time(self, candidate: Candidate, fsdp: int | None = None) -> dict[str, float]:
        """Return seconds by part."""
        config, shares, chip = self.config, self.shares, self.chip
        fsdp = self.fsdp(candidate) if fsdp is None else fsdp
        chip = chip.divide(candidate.devices) if chip.shared else chip
        tokens, head_shards, devices = self.tokens(candidate), candidate.heads, candidate.devices
        trips = 3 if config.remat is None else 4
        dense, sparse = count_branches(config)
        rows = sparse and math.prod(self.lay(tokens))
        multiplied = tokens * sum(self.parts[name] for name in ("attention", "feed_forward", "routers"))
        multiplied += rows * self.parts["experts"] / (config.num_experts or 1)
        flops = (
            2 * (trips * multiplied + 3 * tokens * config.d_model * (config.vocab_size or 0)) / head_shards
        )
        # Gathered once, or by the layer forward and back; gradients summed into parts, or everywhere.
        line = Line(devices // head_shards, head_shards)
        ways = (3 if config.scan_layers else 2) if fsdp > 1 else 2
        moved = ways * self.size * self.total / head_shards * (line.size - 1) / line.size
        count = ways * config.num_layers * (line.size > 1)
        # One sum after the feed-forward branch, forward and back, of all rows of experts; that after
        # attention is counted there.
        summed = (
            2
            * 2
            * (head_shards - 1)
            / head_shards
            * self.size
            * (dense * tokens + sparse * rows)
            * config.d_model
        )
        along = Line(head_shards, 1)
        state = (sum(_STATE.values()) + self.size) * self.total / (fsdp * head_shards)
        return {
            "products": flops / (chip.flops[self.precision] * shares.compute_efficiency),
            "weights": shares.reach(sum_seconds(chip, line, moved), count),
            "sums": shares.reach(sum_seconds(chip, along, summed), 2 * config.num_layers * (head_shards > 1)),
            "update": 2 * state / (chip.memory_bandwidth * shares.memory_efficiency),
        }
