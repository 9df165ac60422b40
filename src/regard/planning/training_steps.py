"""Steps: what a training step of a whole decoder takes, on the best mesh of up to so many devices."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

from regard import masks
from regard.arguments import guided
from regard.engine.call.canonicalization import canonicalize
from regard.engine.dispatch.explanation import scaled
from regard.planning.candidates import Candidate
from regard.planning.chips import Chip
from regard.planning.estimates import Assumptions, Estimate
from regard.planning.parameters import check_config
from regard.planning.planner import MemoryTooSmallError, check_divisible, prepare, read_fixed, read_sizes
from regard.planning.reports import spell_seconds, spell_sizes
from regard.planning.search import Search
from regard.planning.step_costs import AXES, StepModel

if TYPE_CHECKING:
    from regard.models.config import TransformerConfig


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
    parameters with their optimizer state), expert (rows, and experts), sequence (positions), tensor (heads,
    widths and vocabulary)."""
    outer: Mapping[str, int]
    """Slices that these axes span, for `--outer`; empty where that is the rule of `parallel.build_mesh`."""
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
    divide), attention (keys that travel, their tokens' balanced order, or sequence exchanged for heads),
    where experts are divided, experts (tokens to them, and what they give back), and where the sequence of
    a hybrid is, states (of the delta rule, and tokens that convolutions read)."""
    seconds_of: Mapping[str, float]
    """Seconds of attention, products of all else, weights that are gathered and summed (while products are
    computed), activations that are summed, update, and tokens on their way to divided experts, or states."""

    @property
    def candidate(self) -> Candidate:
        """The mesh, as attention is divided over it."""
        return self.attention.candidate

    @property
    def seconds(self) -> float:
        """Time of the step: products and weights on their way overlap, the rest follows one another."""
        times = self.seconds_of
        rest = sum(times.get(name, 0.0) for name in ("attention", "sums", "update", "experts", "states"))
        return rest + max(times["products"], times["weights"])

    def __str__(self) -> str:
        asked, mesh = self.request, self.candidate
        axes = spell_sizes(self.mesh) or "one device"
        axes += f" ({spell_sizes(self.outer)} between slices)" if self.outer else ""
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
    config: TransformerConfig,
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
    Along `expert` they are divided: tokens are gathered in their place, and a device computes its share, if
    tokens choose all experts alike, and half a tile more of each expert; in the backward pass once more.
    Of a hybrid, heads of the delta rule are divided as those of attention; parts of a sequence run the rule
    twice, the first time for what they make of a state, which all others are sent.

    Args:
        config: the decoder's `TransformerConfig`; `remat` says whether blocks are run again.
        length: tokens of a sequence, as in `plan`.
        batch: sequences of a step.
        devices, chip, assumptions: as in `plan`.
        precision: in which is computed, "bfloat16" or "float32".
        accumulate_steps: equal parts of the batch that are computed one after the other.
        fixed: sizes of mesh axes that are not to be chosen, by name: data, fsdp, expert, sequence, tensor.
            Beside data or fsdp, those of data, fsdp and expert that are left out are 1.

    Returns:
        The best mesh of at most so many devices, its bytes and its seconds, part by part.

    Raises:
        TypeError: as in `plan`; a config that is none.
        ValueError: as in `plan`; a config without `vocab_size`, attention, or with an indexer; layers that
            no loop runs, with `scan_layers`; parts that do not divide the batch.
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
    if not config.num_layers:
        raise ValueError("config: expected num_layers of at least 1, got 0")
    if config.index_count is not None:
        problem = f"expected index_count=None, as nothing is planned of it; got {config.index_count}"
        raise ValueError(f"config: {problem}")
    attending = [layer for layer in range(config.num_layers) if config.mixer(layer) == "attention"]
    if not attending:
        raise ValueError(f"config: expected a layer of attention, got mixers={config.mixers}")
    numbers = {"length": length, "batch": batch, "devices": devices, "accumulate_steps": accumulate_steps}
    sizes = read_sizes(numbers)
    batch, devices, parts = sizes["batch"], sizes["devices"], sizes["accumulate_steps"]
    if batch % parts:
        raise ValueError(f"accumulate_steps: expected a divisor of the batch, {batch}; got {parts}")
    if precision not in ("bfloat16", "float32"):
        raise ValueError(f"precision: expected bfloat16 or float32, got {precision!r}")
    fixed, shares = read_fixed(fixed, devices, AXES), Assumptions() if assumptions is None else assumptions
    if (config.num_experts or 1) % fixed.get("expert", 1):
        wanted = f"expert to divide num_experts={config.num_experts}" if config.num_experts else "expert=1"
        model = "" if config.num_experts else ", as the model has no experts"
        raise ValueError(f"fixed: expected {wanted}{model}, got expert={fixed['expert']}")
    heads, key_heads = config.num_heads, config.num_key_heads or config.num_heads
    width = config.head_width + (config.latent_rotary_dim or 0)  # of latents all heads have keys of their own
    of_arrays = (heads, width), (key_heads, width), (key_heads, config.latent_value_dim or config.head_width)
    query, key, value = [
        jax.ShapeDtypeStruct((batch // parts, count, sizes["length"], size), precision)
        for count, size in of_arrays
    ]
    runs = 9 / 7 if _runs_again(config) else 1.0  # of 2 products forward and 5 back, the 2 once more
    windows = collections.Counter(map(config.window, attending))
    ordered = sorted(windows, key=lambda window: float("inf") if window is None else window, reverse=True)
    calls = []
    for window in ordered:
        mask = masks.causal() if window is None else masks.causal() & masks.sliding_window(window)
        search = prepare(
            canonicalize(query, key, value, mask=mask), chip, shares, True, _fix_attention(fixed)
        )
        chip = search.chip  # measured once
        adapt = functools.cache(functools.partial(_adapt, search))
        times = windows[window] * parts * runs
        calls.append(replace(search, times=times, adapt=adapt, projects=False))
    first, *others = calls
    model = StepModel(config, sizes, first.chip, shares, precision, fixed, functools.cache(first.peak))
    serves = functools.partial(_is_chosen, config, first, fixed)
    beside = functools.cache(model.weigh)
    search = replace(first, beside=beside, least=model.find_least, also=tuple(others), serves=serves)
    best = search.find_best(devices)
    if best is None:
        check_divisible(search, devices, sizes)
        most = 1 if search.chip.shared else devices  # what devices share, one alone has
        least, room = model.find_least(most).bytes, search.room(most)
        needed = f"each takes at least {scaled(least, 'B')} of the {scaled(room, 'B')} there are for arrays; "
        raise MemoryTooSmallError(
            f"devices: no mesh of up to {devices} {first.chip.name} holds the step; {needed * (least > room)}"
            f"take {'more devices, ' * (not search.chip.shared)}a smaller batch, a shorter sequence, or remat"
        )
    candidate, on_mesh = best.candidate, model.divide(best.candidate)
    attention = search.total(best) - model.weigh(candidate).seconds
    travelling = 0.0
    for window, call in zip(ordered, calls, strict=True):
        forward, backward = call.send(call.adapt(candidate))
        travelling += windows[window] * parts * (forward * (1 + _runs_again(config)) + backward)
    request = {**sizes, "precision": precision, "remat": config.remat}
    mesh = {axis: size for axis, size in on_mesh.sizes.items() if size > 1}
    return Step(
        request=request,
        chip=search.chip_of(candidate.devices),
        mesh=mesh,
        outer=on_mesh.outer,
        attention=best,
        parameters=sum(model.parts.values()),
        held=on_mesh.hold(),
        sent={**on_mesh.send(), "attention": travelling},
        seconds_of={"attention": attention, **on_mesh.time()},
    )


def _runs_again(config: Any) -> bool:
    """Return whether the backward pass runs attention once more."""
    return config.remat not in (None, "everything_saveable")


def _fix_attention(fixed: Mapping[str, int]) -> dict[str, int]:
    """Return what sizes of a training mesh fix of attention's own."""
    rows = {"data": math.prod(fixed.get(name, 1) for name in ("data", "fsdp", "expert"))}
    heads = {"heads": fixed["tensor"]} if "tensor" in fixed else {}
    return (rows if {"data", "fsdp"} & fixed.keys() else {}) | heads


def _is_chosen(config: Any, search: Search, fixed: Mapping[str, int], candidate: Candidate) -> bool:
    """Return whether the trainer runs on the mesh, and divides attention like this."""
    names = ("num_key_heads", "d_ff", "shared_width", "delta_heads", "delta_key_heads")
    widths = *(getattr(config, name) for name in names), config.num_experts and config.expert_width
    if candidate.rows or candidate.data % fixed.get("expert", 1):
        return False
    if any((width or 0) % candidate.heads for width in widths):
        return False  # which it refuses
    shared = candidate.sequence * candidate.exchange
    return fixed.get("sequence", shared) == shared and search.adapt(candidate) == candidate


def _adapt(search: Search, candidate: Candidate) -> Candidate:
    """Return how the trainer divides attention on a mesh: by what sends least, in its own order."""
    shared = candidate.sequence * candidate.exchange
    ring = replace(candidate, sequence=shared, exchange=1, layout="contiguous")
    if shared == 1:
        return ring
    ring = replace(ring, layout=search.lay_out(ring))
    key_heads = search.problem.key_heads
    if key_heads == 1 or key_heads // candidate.heads % shared:
        return ring
    exchange = replace(ring, sequence=1, exchange=shared, layout="contiguous")
    return ring if sum(search.send(ring)) <= sum(search.send(exchange)) else exchange
