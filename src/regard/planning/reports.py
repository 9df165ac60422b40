"""Reports: the meshes in order, why the others lose, and everything that was assumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from regard.engine.dispatch.explanation import scaled
from regard.planning.amounts import spell_seconds
from regard.planning.chips import Chip
from regard.planning.estimates import Assumptions, Estimate


@dataclass(frozen=True)
class Request:
    """What is to be planned."""

    length: int
    """Tokens: queries and keys."""
    heads: int
    """Query heads."""
    key_heads: int
    """Heads of keys and values."""
    width: int
    """Of a head."""
    batch: int
    """Sequences."""
    mask: str | None
    """As an expression."""
    dtype: str
    """Of query, key and value."""
    backward: bool
    """Whether gradients are computed, too."""
    devices: int
    """How many there are."""


@dataclass(frozen=True)
class Report:
    """What `plan` found; print it to read it.

    Example:
        >>> from regard import masks, planning
        >>> report = planning.plan(
        ...     length="64k", heads=8, devices=4, chip="v5e", mask=masks.causal() & masks.sliding_window(4095)
        ... )
        >>> report.best.candidate.mesh, report.best.rounds, report.kept < 0.07
        ({'sequence': 4}, 2, True)
    """

    request: Request
    """What was asked."""
    chip: Chip
    """With the figures that were used."""
    assumptions: Assumptions
    """Shares of them that are taken to be reached."""
    ranking: tuple[Estimate, ...]
    """Every mesh that divides the call, the best one first, those that do not fit last."""
    kept: float
    """Share of the pairs of query and key that are in tiles with work."""
    tile_side: int
    """Queries and keys of these tiles; 0 where the mask is not known and every pair is counted."""

    @property
    def best(self) -> Estimate:
        """Of the fastest within 2%, the one that sends least."""
        return self.ranking[0]

    @property
    def processes(self) -> int:
        """One for each host."""
        return -(-self.request.devices // self.chip.devices_per_host)

    def explain_loss(self, other: Estimate) -> str:
        """Why a mesh is not the best one."""
        best = self.best
        if other is best:
            return "best"
        if not other.fits:
            room = self.chip.memory_bytes * self.assumptions.memory_share
            return f"out of memory: {scaled(other.memory_bytes, 'B')} of {scaled(room, 'B')}"
        reasons = []
        if other.compute_seconds > 1.05 * best.compute_seconds:
            ratio = other.compute_seconds / best.compute_seconds
            reasons.append(f"{ratio:.2g} times the work on the busiest device")
        sent, least = (item.all_bytes for item in (other, best))
        if sent > 1.05 * least:
            reasons.append(
                f"{sent / least:.2g} times the bytes" if least else "sends, where the best does not"
            )
        way, shortest = (item.travel_seconds + item.exchange_seconds for item in (other, best))
        if not reasons and way > 1.05 * shortest:
            reasons.append("slower links")
        reasons = reasons or ["as many bytes and as much work"]
        slower = other.seconds / best.seconds - 1
        return f"{slower:.0%} slower: {' and '.join(reasons)}" if slower > 0.02 else f"as fast: {reasons[0]}"

    def lines(self) -> Iterator[tuple[str, str]]:
        """Label and text of all but the ranking."""
        asked, chip, best = self.request, self.chip, self.best
        heads = f"{asked.heads} heads"
        if asked.key_heads != asked.heads:
            heads += f" on {asked.key_heads} of keys"
        trips = "forward and backward" if asked.backward else "forward"
        yield (
            "call",
            f"{asked.batch} x {asked.length:,} tokens, {heads}, width {asked.width}, {asked.dtype}, {trips}",
        )
        side = f"tiles of {self.tile_side} x {self.tile_side}"
        counted = f"{self.kept:.1%} of the pairs are in {side} with work"
        if asked.mask and not self.tile_side:
            counted = "not known here, so all pairs are counted"
        yield "mask", f"{asked.mask}: {counted}" if asked.mask else "none: every pair counts"
        joined = "one machine" if chip.shared else f"on hosts of {chip.devices_per_host}: {self.processes}"
        yield "devices", f"{asked.devices} x {chip.name}, {joined}"
        yield "best", f"{_name(best)}: {spell_seconds(best.seconds)}, bound by {best.bound}"
        yield "memory", f"{scaled(best.memory_bytes, 'B')} of {scaled(chip.memory_bytes, 'B')} per device"
        yield "work", f"{scaled(best.flops, 'FLOP')} per device, busiest over idlest {best.balance:.2f}"
        sent = f"{scaled(best.sent_bytes, 'B')} per device in {best.rounds} rounds"
        if best.summed_bytes:
            sent += f", and {scaled(best.summed_bytes, 'B')} to sum projections over heads"
        if best.gathered_bytes:
            sent += f", and {scaled(best.gathered_bytes, 'B')} as the mesh does not divide the length"
        yield "sent", sent
        yield (
            "time",
            f"compute {spell_seconds(best.compute_seconds)}, memory {spell_seconds(best.memory_seconds)},"
            f" travel {spell_seconds(best.travel_seconds)}, which overlap; exchange"
            f" {spell_seconds(best.exchange_seconds)}, which does not",
        )
        if best.balancing_bytes:
            saved = scaled(best.balancing_bytes, "B")
            yield "order", f"balanced in every call; tokens kept in zig-zag order would save sending {saved}"

    def assumed(self) -> Iterator[tuple[str, str]]:
        """Label and text of every figure behind the numbers, with its source."""
        chip, shares = self.chip, self.assumptions
        rates = ", ".join(f"{scaled(rate, 'FLOP/s')} {dtype}" for dtype, rate in chip.flops.items())
        memory = f"{scaled(chip.memory_bytes, 'B')} at {scaled(chip.memory_bandwidth, 'B/s')}"
        kind = "per link of a torus" if chip.torus else "out of each device"
        joined = "all devices" if chip.shared else f"{chip.near_devices} devices"
        near = f"{scaled(chip.near_bandwidth, 'B/s')} {kind}, among {joined}"
        yield "compute", f"{rates}; {shares.compute_efficiency:.0%} reached. {chip.name_source('compute')}"
        yield "memory", f"{memory}; {shares.memory_efficiency:.0%} reached. {chip.name_source('memory')}"
        yield "links", f"{near}; {shares.link_efficiency:.0%} reached. {chip.name_source('links')}"
        if not chip.shared:
            yield "network", f"{scaled(chip.far_bandwidth, 'B/s')} per device. {chip.name_source('network')}"
        yield "messages", f"{spell_seconds(shares.message_seconds)} each before the first byte"
        yield "room", f"{shares.memory_share:.0%} of the memory is for arrays"
        yield (
            "model",
            "products in tiles with work; arrays read once per round; a round waits for its slowest link;"
            " sequences of a batch have as much work each; heads divided before the call are summed by the"
            " projection after it",
        )

    def code(self) -> str:
        """Python that runs attention on the best mesh."""
        return self.best.candidate.code()

    def as_json(self, top: int | None = None) -> dict[str, Any]:
        """Plain values, for programs."""
        chip = dataclasses.asdict(self.chip)
        return {
            "request": dataclasses.asdict(self.request),
            "chip": chip,
            "assumptions": dataclasses.asdict(self.assumptions),
            "kept": self.kept,
            "tile_side": self.tile_side,
            "meshes": [self._row(item) for item in self.ranking[:top]],
        }

    def _row(self, item: Estimate) -> dict[str, Any]:
        row = dataclasses.asdict(item)
        del row["candidate"]
        chosen = {"mesh": item.candidate.mesh, "plan": item.candidate.plan, "layout": item.candidate.layout}
        return chosen | row | {"seconds": item.seconds, "bound": item.bound, "why": self.explain_loss(item)}

    def __str__(self) -> str:
        rows = [*self.lines(), *(("assumed", f"{label}: {text}") for label, text in self.assumed())]
        return "\n".join(f"{label:<10} {text}" for label, text in rows)


def _name(item: Estimate) -> str:
    return f"{name_mesh(item)} ({item.candidate.plan}, {item.candidate.layout})"


def name_mesh(item: Estimate) -> str:
    """As `--mesh` takes it: data=2,sequence=4."""
    return ",".join(f"{name}={size}" for name, size in item.candidate.mesh.items())
