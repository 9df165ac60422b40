"""Step costs: what a training step holds, sends and takes on one mesh, all but attention's own work."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from regard.engine.flash.measurements import DEFAULTS
from regard.linear.problem import CHUNK_OF_DELTA
from regard.parallel.meshes import divide_slices
from regard.planning.candidates import Candidate, name_outer
from regard.planning.chips import Chip, Line, sum_seconds
from regard.planning.estimates import Assumptions
from regard.planning.parameters import (
    LayerKind,
    Share,
    count_kinds,
    count_parameters,
    count_sparse,
    find_period,
    share_parameters,
)
from regard.planning.search import Beside

AXES = ("data", "fsdp", "expert", "sequence", "tensor")  # as `regard train --mesh` has them
_HALO = 3  # times the tokens that a convolution reads of a neighbour are sent
# Bytes of a logit and of its gradient, float32 whatever is computed in; for TPUs one takes the other's place.
_LOGIT = {"cpu": 8, "gpu": 8, "tpu": 4}
_FLOAT = 4  # bytes of a parameter, of each of Adam's two moments, and of sums of gradients


class Delta(NamedTuple):
    """The delta rule of a hybrid: its layers, and numbers of one of them."""

    layers: int
    products: float  # multiplications per token, beside projections
    state: int  # of a row: what a part of a sequence keeps of a state, and what it adds
    features: int  # of a token, which convolutions read

    @classmethod
    def read(cls, config: Any) -> Delta:
        """Return the numbers of a config."""
        width = config.delta_head_dim or config.head_width
        value_width = config.delta_value_dim or width
        heads = config.delta_heads or config.num_heads
        products = 2 * CHUNK_OF_DELTA * (width + value_width) + 3 * width * value_width
        layers = sum(config.mixer(layer) != "attention" for layer in range(config.num_layers))
        features = 2 * (config.delta_key_heads or heads) * width + heads * value_width
        return cls(layers, heads * products, heads * width * (width + value_width), features)


@dataclass(frozen=True)
class StepModel:
    """A step, and the devices that it is for."""

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
        """Parameters by where they are."""
        return count_parameters(self.config)

    @functools.cached_property
    def delta(self) -> Delta:
        """The delta rule in all its layers."""
        return Delta.read(self.config)

    def weigh(self, candidate: Candidate) -> Beside:
        """Return seconds and bytes beside attention."""
        return self.divide(candidate).weigh()

    def find_least(self, devices: int) -> Beside:
        """Return what a step takes at least of each device: all is spread evenly, and nothing is gathered.

        Experts multiply as many rows as tokens choose, and keep what comes into their blocks.
        """
        from regard.planning.residuals import count_residuals  # which loads models

        config, asked = self.config, self.sizes
        multiplied = sum(self.parts[name] for name in ("attention", "feed_forward", "routers"))
        if count_sparse(config):
            multiplied += self.parts["experts"] * config.experts_per_token / config.num_experts
        products = (3 if config.remat is None else 4) * multiplied + 3 * config.d_model * config.vocab_size
        rate = self.chip.divide(devices).flops[self.precision] * self.shares.compute_efficiency
        seconds = 2 * asked["batch"] * asked["length"] * products / (devices * rate)
        tokens = asked["batch"] // asked["accumulate_steps"] * asked["length"] / devices
        activations, how = 0.0, {"remat": config.remat, "has_rows": False}
        for kind, layers in count_kinds(config).items():
            block = self.size * config.d_model
            if kind.is_dense:
                block = count_residuals(config, asked["length"], 1, self.precision, kind=kind, **how)
            activations += tokens * layers * block
        stored = sum(self.parts.values()) / devices
        averaged = _FLOAT * stored if asked["accumulate_steps"] > 1 else 0.0
        working = max(tokens * config.vocab_size * _LOGIT[self.chip.platform], self.size * stored)
        fullest = max(averaged + activations + working, 2 * _FLOAT * stored)
        return Beside(seconds, 3 * _FLOAT * stored + fullest)

    def divide(self, candidate: Candidate) -> StepOnMesh:
        """Return the step on a mesh: parameters and experts are divided as rows are, unless it is slower."""
        expert, rows = self.fixed.get("expert", 1), candidate.data
        if {"data", "fsdp"} & self.fixed.keys():
            return StepOnMesh(self, candidate, self.fixed.get("fsdp", 1), expert)
        most = math.gcd(rows, self.config.num_experts or 1)
        sizes = [size for size in range(1, most + 1) if most % size == 0]
        sizes = [expert] if "expert" in self.fixed else sizes
        ways = [(fsdp, size) for size in sizes for fsdp in sorted({1, rows // size})]
        steps = [StepOnMesh(self, candidate, *way) for way in ways]
        if len(steps) == 1:
            return steps[0]
        chip = self.chip.divide(candidate.devices)
        room = chip.memory_bytes * self.shares.memory_share - self.peak(candidate)
        beside = [step.weigh() for step in steps]
        # Those that fit by time, then the rest by memory.
        order = [(cost.bytes > room, cost.seconds if cost.bytes <= room else cost.bytes) for cost in beside]
        return steps[order.index(min(order))]


@dataclass(frozen=True)
class StepOnMesh:
    """A step on one mesh."""

    model: StepModel
    candidate: Candidate
    fsdp: int
    expert: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """Devices by axis of the trainer's mesh."""
        data, heads = self.candidate.data, self.candidate.heads
        sequence = self.candidate.sequence * self.candidate.exchange
        rest = data // (self.fsdp * self.expert)
        return dict(zip(AXES, (rest, self.fsdp, self.expert, sequence, heads), strict=True))

    @property
    def spans(self) -> dict[str, int]:
        """Slices that each axis spans."""
        spans, of_rows = self.candidate.spans(self.model.chip), ("data", "fsdp", "expert")
        rows = divide_slices({axis: self.sizes[axis] for axis in of_rows}, spans["data"])
        return rows | {"sequence": spans["sequence"] * spans["exchange"], "tensor": spans["heads"]}

    @property
    def outer(self) -> dict[str, int]:
        """The same; empty where that is the rule of `parallel.build_mesh`."""
        return name_outer(self.sizes, self.spans)

    @functools.cached_property
    def shares(self) -> tuple[Share, Share, Share]:
        """Parameters outside of blocks, of blocks, and of the largest one."""
        sizes = self.sizes
        devices = sizes["data"] * sizes["fsdp"] * sizes["sequence"]
        return share_parameters(self.model.config, devices, self.fsdp, self.expert, sizes["tensor"])

    @property
    def stored(self) -> float:
        """Parameters that a device stores."""
        return sum(share.stored for share in self.shares[:2])

    @property
    def rows(self) -> float:
        """Sequences of which a device has a part, in one part of a batch."""
        asked, candidate = self.model.sizes, self.candidate
        return (asked["batch"] // asked["accumulate_steps"] + candidate.rows) / candidate.data

    @property
    def states(self) -> float:
        """Bytes that a part of a sequence makes of states in a layer, for the others to go on from."""
        is_divided = self.sizes["sequence"] > 1
        return is_divided * _FLOAT * self.rows * self.model.delta.state / self.candidate.heads

    @property
    def tokens(self) -> float:
        """Tokens of a device in one part of a batch, in all its layers but the parts that heads divide."""
        asked, candidate = self.model.sizes, self.candidate
        return self.rows * (asked["length"] + candidate.tokens) / self.sizes["sequence"]

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of a layer's experts, and the rows of a tile: as `layers.Experts` lays them."""
        config = self.model.config
        choices, experts = math.ceil(self.tokens * config.experts_per_token), config.num_experts or 1
        size = -(-choices // experts)
        return (choices + min(experts, choices) * (size - 1)) // size, size

    @property
    def expert_rows(self) -> float:
        """Rows that a device's experts compute in a layer, where they are divided if tokens choose evenly."""
        if self.expert == 1:
            return math.prod(self.tiles)
        # Of each expert half a tile is empty, which is a quarter of its choices.
        return 1.25 * self.tokens * self.model.config.experts_per_token

    @property
    def vocabulary(self) -> float:
        """Tokens of the vocabulary whose logits a device computes: all where heads do not divide them."""
        count, head_shards = self.model.config.vocab_size, self.candidate.heads
        return count if count % head_shards else count / head_shards

    def weigh(self) -> Beside:
        """Return seconds and bytes beside attention."""
        times = self.time()
        seconds = times["sums"] + times["update"] + max(times["products"], times["weights"])
        seconds += times.get("experts", 0.0) + times.get("states", 0.0)
        return Beside(seconds, sum(self.hold().values()) - self.model.peak(self.candidate))

    def hold(self) -> dict[str, float]:
        """Return bytes per device when they are most: in the loss, a block's gradient, or the update."""
        model, config, size, tokens = self.model, self.model.config, self.model.size, self.tokens
        outside, blocks, block = self.shares
        averaged = _FLOAT * self.stored if model.sizes["accumulate_steps"] > 1 else 0.0
        kinds = count_kinds(config)
        loss = {
            "gradients": averaged + size * (outside.used + outside.stored),  # as they come, and summed
            "gathered": size * (outside.copies(size) + (not config.scan_layers) * blocks.copies(size)),
            "activations": tokens
            * sum(layers * self.keep(kind, config.remat) for kind, layers in kinds.items()),
            "attention": 0.0,
            "working": tokens * self.vocabulary * _LOGIT[model.chip.platform],
        }
        period = find_period(config) if config.scan_layers else 1
        insides = {kind: tokens * self.keep(kind, None) for kind in kinds}
        inside = max(insides.values(), default=0.0)
        if self.states:  # Between what devices send, XLA computes all blocks of a step side by side.
            inside = period / config.num_layers * sum(kinds[kind] * insides[kind] for kind in kinds)
        attention = model.peak(self.candidate)
        gradient = loss | {
            "gradients": averaged + size * self.stored,
            "attention": attention,
            # And gradients of the block's parameters and of the stream, each as it comes and as it goes.
            "working": max(inside - attention, 0.0) + 2 * size * (block.used + tokens * config.d_model),
        }
        if config.scan_layers:  # Parameters of a step's blocks, taken out of all, and as they are gathered.
            share = period / config.num_layers
            gradient["gathered"] += share * (_FLOAT * blocks.stored + size * blocks.copies(size))
        if self.expert > 1:  # Of all tokens that travel the gradients, in and out, and sums in float32.
            gradient["working"] += tokens * self.expert * config.d_model * (2 * size + 4)
        elif count_sparse(config):  # Of experts one map's of all tiles, and those of a step's other blocks.
            width = (config.expert_width or config.d_ff) / self.candidate.heads
            maps = 1 + 3 * (period - 1)
            gradient["gathered"] += size * maps * self.tiles[0] * config.d_model * width
        # Gradients, and as they are clipped.
        update = dict.fromkeys(loss, 0.0) | dict.fromkeys(("gradients", "working"), _FLOAT * self.stored)
        fullest = max(loss, gradient, update, key=lambda held: sum(held.values()))
        return {"parameters": _FLOAT * self.stored, "optimizer": 2 * _FLOAT * self.stored, **fullest}

    def keep(self, kind: LayerKind, remat: Any) -> float:
        """Return the bytes per token that a block keeps."""
        from regard.planning.residuals import count_residuals  # which loads models

        model, candidate = self.model, self.candidate
        # Few scores are computed at once, and kept; the kernel for TPUs, of bfloat16, keeps none.
        has_kernel = model.chip.platform == "tpu" and model.precision == "bfloat16"
        few = 0 if has_kernel else DEFAULTS[model.chip.platform][0].dense_scores
        scores = self.tokens * model.sizes["length"] * model.config.num_heads / candidate.heads
        has_rows = self.sizes["sequence"] == 1 and scores <= few
        sizes, how = (model.sizes["length"], candidate.heads), {"remat": remat, "kind": kind}
        how |= {"expert_shards": 1 if kind.is_dense else self.expert, "has_rows": has_rows}
        return count_residuals(model.config, *sizes, model.precision, **how)

    def send(self) -> dict[str, float]:
        """Return the bytes that a device sends for weights, and to sum over heads."""
        model, config, head_shards = self.model, self.model.config, self.candidate.heads
        outside, blocks, _ = self.shares
        # Of blocks in a loop gathered forward and back.
        trips = 2 if config.scan_layers else 1
        weights = outside.gathered + trips * blocks.gathered + outside.summed + blocks.summed
        weights += (_FLOAT / model.size - 1) * outside.looked_up
        # Behind both branches, forward and back; behind attention, where it runs again. Of experts all rows.
        sparse = count_sparse(config)
        again = config.remat in ("full", "nothing_saveable")
        rows = (1 + again + 2) * config.num_layers * self.tokens
        if sparse and self.expert == 1:
            # Run again, for the gradient of the weights of what experts give.
            rows += sparse * ((2 + again) * self.expert_rows - 2 * self.tokens)
        if config.shared_width is not None:
            rows += 2 * sparse * self.tokens
        if self.vocabulary < config.vocab_size:
            rows += 2 * self.tokens  # of embedded tokens, of the head's gradient
        entering = sum(layers * _count_entries(config, kind) for kind, layers in count_kinds(config).items())
        summed = 2 * (head_shards - 1) / head_shards * (rows * config.d_model + self.tokens * entering)
        steps = model.sizes["accumulate_steps"] * model.size
        sent = {"weights": steps * weights, "sums": steps * summed}
        runs = 1 if config.remat in (None, "everything_saveable") else 2
        if self.expert > 1:
            # Tokens to the experts, and where blocks run again; sums back; the gradients of both. With tokens
            # their choices and weights, of 4 bytes each; gradients of weights come back.
            size = (runs + 3) * model.size * config.d_model + (8 * runs + 4) * config.experts_per_token
            rows = sparse * self.tokens * (self.expert - 1)
            sent["experts"] = model.sizes["accumulate_steps"] * rows * size
        if self.states:
            # Forward, where blocks run again, and the gradients back.
            halo = _HALO * (config.conv_width - 1) * model.delta.features / head_shards * model.size
            travelling = (self.sizes["sequence"] - 1) * self.states + self.rows * halo
            sent["states"] = model.sizes["accumulate_steps"] * (runs + 1) * model.delta.layers * travelling
        return sent

    def time(self) -> dict[str, float]:
        """Return seconds by part."""
        model, config, sent = self.model, self.model.config, self.send()
        shares, parts, head_shards = model.shares, model.sizes["accumulate_steps"], self.candidate.heads
        chip = model.chip.divide(self.candidate.devices)
        trips = 3 if config.remat is None else 4
        sparse = count_sparse(config)
        multiplied = self.tokens * sum(model.parts[name] for name in ("attention", "feed_forward", "routers"))
        of_experts = self.expert_rows * model.parts["experts"] / (config.num_experts or 1) if sparse else 0
        # Divided experts compute their tiles again in the backward pass, and the delta rule its chunks.
        multiplied = trips * multiplied + (trips if self.expert == 1 else 4) * of_experts
        # Parts of a sequence run the rule once more for what they make of a state.
        runs = (trips + 1) * (2 if self.states else 1)
        multiplied += runs * self.tokens * model.delta.layers * model.delta.products
        products = multiplied / head_shards + 3 * self.tokens * config.d_model * self.vocabulary
        line = self.candidate.line(chip, "data", "sequence", "exchange")
        along = self.candidate.line(chip, "heads")
        messages = parts * config.num_layers
        ways = (3 if config.scan_layers and self.fsdp > 1 else 2) * (line.size > 1)
        state = (3 * _FLOAT + model.size) * self.stored
        times = {
            "products": 2 * parts * products / (chip.flops[model.precision] * shares.compute_efficiency),
            "weights": shares.reach(sum_seconds(chip, line, sent["weights"]), ways * messages),
            "sums": shares.reach(sum_seconds(chip, along, sent["sums"]), 2 * messages * (head_shards > 1)),
            "update": 2 * state / (chip.memory_bandwidth * shares.memory_efficiency),
        }
        if self.expert > 1:
            travel = Line(self.expert, self.expert // self.spans["expert"])
            seconds = sum_seconds(chip, travel, sent["experts"])
            times["experts"] = shares.reach(seconds, 5 * parts * sparse)
        if self.states:
            seconds = sum_seconds(chip, self.candidate.line(chip, "sequence", "exchange"), sent["states"])
            times["states"] = shares.reach(seconds, 2 * trips * parts * model.delta.layers)
        return times


def _count_entries(config: Any, kind: LayerKind) -> int:
    """Count the features of a token, as they enter the maps that heads divide: their gradients are summed."""
    if kind.mixer == "kimi_delta":  # Decay and gate are made of vectors as wide as a head.
        return config.d_model + 2 * (config.delta_head_dim or config.head_width)
    if kind.mixer == "gated_delta" or config.latent_dim is None:
        return config.d_model
    return (config.latent_query_dim or config.d_model) + config.latent_dim + config.latent_rotary_dim
