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
from regard.planning.parameters import (
    Share,
    check_config,
    count_branches,
    count_parameters,
    share_parameters,
)
from regard.planning.planner import MemoryTooSmallError, check_divisible, prepare, read_fixed, read_sizes
from regard.planning.reports import spell_seconds
from regard.planning.search import Beside, Search

AXES = ("data", "fsdp", "sequence", "tensor")  # as `regard train --mesh` has them
_FLOAT = 4  # bytes of a parameter, of each of Adam's two moments, and of sums of gradients


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
    sent: Mapping[str, float]
    """Bytes that a device sends: weights (gathered, and their gradients summed), sums (over what heads
    divide), attention (keys that travel, or sequence exchanged for heads)."""
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
        sent = ", ".join(f"{name} {scaled(count, 'B')}" for name, count in self.sent.items())
        times = ", ".join(f"{name} {spell_seconds(seconds)}" for name, seconds in self.seconds_of.items())
        ways = f"{asked['precision']}, remat {asked['remat']}"
        rows = {
            "step": f"{asked['batch']} x {asked['length']:,} tokens in {ways}",
            "parameters": f"{self.parameters:,}",
            "best": f"{axes}, {mesh.devices:,} of {asked['devices']:,} x {self.chip.name}:"
            f" {spell_seconds(self.seconds)}",
            "memory": f"{scaled(sum(self.held.values()), 'B')} of {room} per device: {held}",
            "sent": f"{scaled(sum(self.sent.values()), 'B')} per device: {sent}",
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
    accumulate_steps: int = 1,
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
        accumulate_steps: equal parts of the batch that are computed one after the other.
        fixed: sizes of mesh axes that are not to be chosen, by name: data, fsdp, sequence, tensor. Of data
            and fsdp, that which is left out beside the other is 1.

    Returns:
        The best mesh of at most so many devices, its bytes and its seconds, part by part.

    Raises:
        TypeError: as in `plan`; a config that is none.
        ValueError: as in `plan`; a config without `vocab_size`; parts that do not divide the batch.
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
    numbers = {"length": length, "batch": batch, "devices": devices, "accumulate_steps": accumulate_steps}
    sizes = read_sizes(numbers)
    batch, devices, parts = sizes["batch"], sizes["devices"], sizes["accumulate_steps"]
    if batch % parts:
        raise ValueError(f"accumulate_steps: expected a divisor of batch, {batch}; got {parts}")
    if precision not in ("bfloat16", "float32"):
        raise ValueError(f"precision: expected bfloat16 or float32, got {precision!r}")
    fixed, shares = read_fixed(fixed, devices, AXES), Assumptions() if assumptions is None else assumptions
    key_heads = config.num_key_heads or config.num_heads
    query = jax.ShapeDtypeStruct(
        (batch // parts, config.num_heads, sizes["length"], config.head_width), precision
    )
    key = jax.ShapeDtypeStruct((batch // parts, key_heads, sizes["length"], config.head_width), precision)
    runs = 9 / 7 if _runs_again(config) else 1.0  # of 2 products forward and 5 back, the 2 once more
    windows = collections.Counter(config.window(layer) for layer in range(config.num_layers))
    ordered = sorted(windows, key=lambda window: float("inf") if window is None else window, reverse=True)
    calls = []
    for window in ordered:
        mask = masks.causal() if window is None else masks.causal() & masks.sliding_window(window)
        search = prepare(canonicalize(query, key, key, mask=mask), chip, shares, True, _fix_attention(fixed))
        chip = search.chip  # measured once
        calls.append(replace(search, times=windows[window] * parts * runs))
    first, *others = calls
    model = _Model(config, sizes, first.chip, shares, precision, fixed, first.peak)
    serves = functools.partial(_is_chosen, first, fixed.get("sequence"))
    search = replace(first, beside=model.weigh, also=tuple(others), serves=serves)
    best = search.find_best(devices)
    if best is None:
        check_divisible(search, devices, sizes)
        remedy = "take more devices, a smaller batch, a shorter sequence, or remat"
        name = first.chip.name
        raise MemoryTooSmallError(f"devices: no mesh of up to {devices} {name} holds the step; {remedy}")
    candidate, on_mesh = best.candidate, model.divide(best.candidate)
    attention = search.total(best) - model.weigh(candidate).seconds
    travelling = 0.0
    for window, call in zip(ordered, calls, strict=True):
        forward, backward = call.send(candidate)
        travelling += windows[window] * parts * (forward * (1 + _runs_again(config)) + backward)
    request = {**sizes, "precision": precision, "remat": config.remat}
    mesh = {axis: size for axis, size in on_mesh.sizes.items() if size > 1}
    return Step(
        request=request,
        chip=search.chip_of(candidate.devices),
        mesh=mesh,
        attention=best,
        parameters=model.total,
        held=on_mesh.hold(),
        sent={**on_mesh.send(), "attention": travelling},
        seconds_of={"attention": attention, **on_mesh.time()},
    )


def _runs_again(config: Any) -> bool:
    """Return whether the backward pass runs attention once more."""
    return config.remat not in (None, "everything_saveable")


def _fix_attention(fixed: Mapping[str, int]) -> dict[str, int]:
    """Return what sizes of a training mesh fix of attention's own."""
    rows = {"data": math.prod(fixed.get(name, 1) for name in ("data", "fsdp"))}
    heads = {"heads": fixed["tensor"]} if "tensor" in fixed else {}
    return (rows if {"data", "fsdp"} & fixed.keys() else {}) | heads


def _is_chosen(search: Search, sequence: int | None, candidate: Candidate) -> bool:
    """Return whether the trainer divides attention like this: by what sends least, tokens in their order."""
    shared = candidate.sequence * candidate.exchange
    is_plain = candidate.layout == "contiguous" and shared in (candidate.sequence, candidate.exchange)
    if shared == 1 or not is_plain or sequence not in (None, shared):
        return is_plain and sequence in (None, shared)
    key_heads = search.problem.key_heads
    if key_heads == 1 or key_heads // candidate.heads % shared:
        return candidate.exchange == 1
    ring, exchange = (replace(candidate, sequence=one, exchange=shared // one) for one in (shared, 1))
    return (candidate.exchange == 1) == (sum(search.send(ring)) <= sum(search.send(exchange)))


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

    def weigh(self, candidate: Candidate) -> Beside:
        """Return seconds and bytes beside attention."""
        return self.divide(candidate).weigh()

    def divide(self, candidate: Candidate) -> _Divided:
        """Return the step on a mesh: parameters are divided as rows are, unless that is slower."""
        if {"data", "fsdp"} & self.fixed.keys():
            return _Divided(self, candidate, self.fixed.get("fsdp", 1))
        whole, divided = _Divided(self, candidate, 1), _Divided(self, candidate, candidate.data)
        room = self.chip.memory_bytes * self.shares.memory_share
        is_better = whole.weigh().bytes <= room and whole.weigh().seconds <= divided.weigh().seconds
        return whole if is_better else divided


@dataclass(frozen=True)
class _Divided:
    """A step on one mesh, all but attention's own work."""

    model: _Model
    candidate: Candidate
    fsdp: int

    @property
    def sizes(self) -> dict[str, int]:
        """Devices by axis of the trainer's mesh."""
        candidate = self.candidate
        sequence = candidate.sequence * candidate.exchange
        counts = (candidate.data // self.fsdp, self.fsdp, sequence, candidate.heads)
        return dict(zip(AXES, counts, strict=True))

    @functools.cached_property
    def shares(self) -> tuple[Share, Share, Share]:
        """Parameters outside of blocks, of blocks, and of the largest one."""
        return share_parameters(self.model.config, self.sizes)

    @property
    def tokens(self) -> float:
        """Tokens of a device in one part of a batch, in all its layers but the parts that heads divide."""
        asked, candidate = self.model.sizes, self.candidate
        rows = (asked["batch"] // asked["accumulate_steps"] + candidate.rows) / candidate.data
        return rows * (asked["length"] + candidate.tokens) / self.sizes["sequence"]

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of a layer's experts, and the rows of a tile: as `layers.Experts` lays them."""
        config = self.model.config
        choices, experts = math.ceil(self.tokens * config.experts_per_token), config.num_experts or 1
        size = -(-choices // experts)
        return (choices + min(experts, choices) * (size - 1)) // size, size

    @functools.cached_property
    def vocabulary(self) -> float:
        """Tokens of the vocabulary whose logits a device computes: all where heads do not divide them."""
        count, head_shards = self.model.config.vocab_size or 0, self.candidate.heads
        return count / head_shards if count % head_shards == 0 else count

    def weigh(self) -> Beside:
        """Return seconds and bytes beside attention."""
        times, held = self.time(), self.hold()
        seconds = times["sums"] + times["update"] + max(times["products"], times["weights"])
        return Beside(seconds, sum(held.values()) - held["attention"])

    def hold_state(self) -> dict[str, float]:
        """Return bytes per device that are there throughout."""
        stored = sum(share.stored for share in self.shares[:2])
        return {"parameters": _FLOAT * stored, "optimizer": 2 * _FLOAT * stored}

    def hold(self) -> dict[str, float]:
        """Return bytes per device at the fullest moment: of the loss, of a block's gradient, of the update."""
        moments = self._hold_loss(), self._hold_gradient(), self._hold_update()
        return self.hold_state() | max(moments, key=lambda held: sum(held.values()))

    @functools.cached_property
    def _kept(self) -> float:
        """Bytes that blocks keep for the backward pass."""
        dense, sparse = count_branches(self.model.config)
        branches = ((True, dense), (False, sparse))
        return self.tokens * sum(
            count * self.keep(is_dense, self.model.config.remat) for is_dense, count in branches if count
        )

    def _hold_loss(self) -> dict[str, float]:
        """Return bytes beside the state while logits are differentiated, after all blocks have run."""
        size, config = self.model.size, self.model.config
        outside, blocks, _ = self.shares
        copies = outside.copies(size) + (0 if config.scan_layers else blocks.copies(size))
        # Logits and their gradient in float32, and as they are computed.
        logits = self.tokens * self.vocabulary * 2 * (4 if size == 4 else 4 + 2)
        return {
            "gradients": self._sums + size * outside.used,
            "gathered": size * copies,
            "activations": self._kept,
            "attention": 0.0,
            "working": logits,
        }

    def _hold_gradient(self) -> dict[str, float]:
        """Return bytes beside the state while the last block is differentiated."""
        model, config, size = self.model, self.model.config, self.model.size
        outside, blocks, block = self.shares
        dense, sparse = count_branches(config)
        branches = [is_dense for is_dense, count in ((True, dense), (False, sparse)) if count]
        inside = self.tokens * max((self.keep(is_dense, None) for is_dense in branches), default=0.0)
        attention = model.peak(self.candidate)
        working = (
            max(inside - attention, 0.0) + 2 * size * block.used
        )  # its gradient, and what that is summed to
        copies = outside.copies(size)
        if config.scan_layers:
            # Its parameters, taken out of all, and as they are gathered.
            copies += block.copies(size) + block.stored * _FLOAT / size
        else:
            copies += blocks.copies(size)
        if sparse:  # One map's of all tiles.
            copies += (
                self.tiles[0] * config.d_model * (config.expert_width or config.d_ff) / self.candidate.heads
            )
        return {
            "gradients": self._sums + size * (outside.stored + blocks.stored),
            "gathered": size * copies,
            "activations": self._kept,
            "attention": attention,
            "working": working,
        }

    def _hold_update(self) -> dict[str, float]:
        """Return bytes beside the state as parameters change: gradients, and as they are clipped."""
        gradients = _FLOAT * sum(share.stored for share in self.shares[:2])
        nothing = dict.fromkeys(("gathered", "activations", "attention"), 0.0)
        return {"gradients": gradients, **nothing, "working": gradients}

    @property
    def _sums(self) -> float:
        """Bytes of the sums of gradients of the parts of a batch."""
        is_summed = self.model.sizes["accumulate_steps"] > 1
        return is_summed * _FLOAT * sum(share.stored for share in self.shares[:2])

    def keep(self, is_dense: bool, remat: Any) -> float:
        """Return the bytes per token that a block keeps."""
        from regard.planning.residuals import count_residuals  # which loads models

        model, candidate = self.model, self.candidate
        has_rows = self.sizes["sequence"] * candidate.heads == 1
        return count_residuals(
            model.config,
            model.sizes["length"],
            candidate.heads,
            model.precision,
            remat=remat,
            is_dense=is_dense,
            has_rows=has_rows,
        )

    def send(self) -> dict[str, float]:
        """Return the bytes that a device sends for weights, and to sum over heads."""
        model, config, head_shards = self.model, self.model.config, self.candidate.heads
        outside, blocks, _ = self.shares
        # Of blocks in a loop gathered forward and back.
        trips = 2 if config.scan_layers else 1
        weights = outside.gathered + trips * blocks.gathered + outside.summed + blocks.summed
        # Behind both branches, forward and back; behind attention, where it runs again. Of experts all rows.
        dense, sparse = count_branches(config)
        again = config.remat in ("full", "nothing_saveable")
        rows = (2 + again + 2) * (dense + sparse) * self.tokens
        if sparse:
            rows += 2 * sparse * (math.prod(self.tiles) - self.tokens)
        if self.vocabulary < (config.vocab_size or 0):
            rows += 2 * self.tokens  # of embedded tokens, of the head's gradient
        summed = 2 * (head_shards - 1) / head_shards * rows * config.d_model
        steps = model.sizes["accumulate_steps"] * model.size
        return {"weights": steps * weights, "sums": steps * summed}

    def time(self) -> dict[str, float]:
        """Return seconds by part."""
        model, config, candidate, head_shards = (
            self.model,
            self.model.config,
            self.candidate,
            self.candidate.heads,
        )
        shares, chip, devices = model.shares, model.chip, candidate.devices
        chip = chip.divide(devices) if chip.shared else chip
        parts = model.sizes["accumulate_steps"]
        trips = 3 if config.remat is None else 4
        _, sparse = count_branches(config)
        rows = math.prod(self.tiles) if sparse else 0
        multiplied = self.tokens * sum(model.parts[name] for name in ("attention", "feed_forward", "routers"))
        multiplied += rows * model.parts["experts"] / (config.num_experts or 1)
        head = 3 * self.tokens * config.d_model * self.vocabulary
        flops = 2 * parts * (trips * multiplied / head_shards + head)
        line, sent = Line(devices // head_shards, head_shards), self.send()
        ways = 3 if config.scan_layers and self.fsdp > 1 else 2
        messages = parts * ways * config.num_layers * (line.size > 1)
        state = (3 * _FLOAT + model.size) * sum(share.stored for share in self.shares[:2])
        sums = parts * 2 * config.num_layers * (head_shards > 1)
        return {
            "products": flops / (chip.flops[model.precision] * shares.compute_efficiency),
            "weights": shares.reach(sum_seconds(chip, line, sent["weights"]), messages),
            "sums": shares.reach(sum_seconds(chip, Line(head_shards, 1), sent["sums"]), sums),
            "update": 2 * state / (chip.memory_bandwidth * shares.memory_efficiency),
        }
