"""Reports: the meshes in order, why the others lose, and everything that was assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from regard.engine.dispatch.explanation import scaled
from regard.planning.chips import Chip
from regard.planning.estimates import PARTS, Assumptions, Estimate


@dataclass(frozen=True)
class Report:
    """Every mesh for a call, and the costs of the call on it; print it to read it.

    Example:
        >>> from regard import masks, planning
        >>> report = planning.plan(
        ...     length="64k", heads=8, devices=4, chip="v5e", mask=masks.causal() & masks.sliding_window(4095)
        ... )
        >>> report.best.candidate.mesh, report.best.rounds, report.kept < 0.07
        ({'sequence': 4}, 2, True)
    """

    request: Mapping[str, Any]
    """Arguments of `plan` by name; the mask as an expression."""
    chip: Chip
    """With the figures that were used."""
    assumptions: Assumptions
    """Shares of them that are taken to be reached."""
    ranking: tuple[Estimate, ...]
    """The best mesh, then those of exactly as many devices as were given, those that do not fit last."""
    kept: float
    """Share of the pairs of query and key that are in tiles with work."""
    tile_side: int
    """Queries and keys of these tiles; 0 where the mask is not known and every pair is counted."""

    @property
    def best(self) -> Estimate:
        """The first mesh within 2% of the fastest: without padding, of few devices, sending little."""
        return self.ranking[0]

    @property
    def spread(self) -> Estimate | None:
        """The best mesh of exactly as many devices as were given; None if none holds the call."""
        every = [item for item in self.ranking if item.candidate.devices == self.request["devices"]]
        return next((item for item in every if item.fits), None)

    @property
    def processes(self) -> int:
        """Processes, one for each host."""
        return -(-self.best.candidate.devices // self.chip.devices_per_host)

    def explain_loss(self, other: Estimate) -> str:
        """Say why a mesh is not the best one."""
        best = self.best
        if other is best:
            return "best"
        if not other.fits:
            more = other.candidate.devices / best.candidate.devices if self.chip.shared else 1
            room = self.chip.memory_bytes * self.assumptions.memory_share / more
            return f"out of memory: {scaled(other.memory_bytes, 'B')} of {scaled(room, 'B')}"
        reasons = []
        if other.compute_seconds > 1.05 * best.compute_seconds:
            ratio = other.compute_seconds / best.compute_seconds
            reasons.append(f"{ratio:.2g} times the work on the busiest device")
        sent, least = other.all_bytes, best.all_bytes
        if sent > 1.05 * least:
            more = f"{sent / least:.2g} times the bytes" if least else "sends, where the best does not"
            reasons.append(more)
        way = other.travel_seconds + other.exchange_seconds
        if not reasons and way > 1.05 * (best.travel_seconds + best.exchange_seconds):
            reasons.append("slower links")
        reasons = reasons or ["as many bytes and as much work"]
        if other.seconds <= 1.02 * best.seconds:
            return f"as fast: {reasons[0]}"
        much = f"{other.seconds / best.seconds - 1:.0%}" if best.seconds else spell_seconds(other.seconds)
        return f"{much} slower: {' and '.join(reasons)}"

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield label and text of all but the ranking."""
        asked, chip, best = self.request, self.chip, self.best
        heads = f"{asked['heads']} heads"
        if asked["key_heads"] != asked["heads"]:
            heads += f" on {asked['key_heads']} of keys"
        trips = "forward and backward" if asked["backward"] else "forward"
        tokens = f"{asked['batch']} x {asked['length']:,} tokens"
        yield "call", f"{tokens}, {heads}, width {asked['width']}, {asked['dtype']}, {trips}"
        counted = "not known here, so all pairs are counted"
        if self.tile_side:
            side = f"tiles of {self.tile_side} x {self.tile_side}"
            counted = f"{self.kept:.1%} of the pairs are in {side} with work"
        yield "mask", f"{asked['mask']}: {counted}" if asked["mask"] else "none: every pair counts"
        joined = "one machine" if chip.shared else f"on hosts of {chip.devices_per_host}: {self.processes}"
        used, available = best.candidate.devices, asked["devices"]
        count = f"{used:,}" if used == available else f"{used:,} of {available:,}"
        yield "devices", f"{count} x {chip.name}, {joined}"
        if used < available:
            slower = "no mesh of all of them divides and holds the call"
            if self.spread is not None:
                slower = f"all {available:,} take {spell_seconds(self.spread.seconds)}"
            yield "fewer", f"{used:,} of {available:,} devices are best; {slower}"
        if best.candidate.tokens or best.candidate.rows:
            length, rows = asked["length"] + best.candidate.tokens, asked["batch"] + best.candidate.rows
            yield "padding", f"to {rows} x {length:,} tokens, masked out, so that the mesh divides them"
        mesh = f"{spell_sizes(best.candidate.mesh)} ({best.candidate.plan}, {best.candidate.layout}"
        outer = spell_sizes(best.candidate.outer(chip))
        mesh += f", {outer} between slices)" if outer else ")"
        yield "best", f"{mesh}: {spell_seconds(best.seconds)}, bound by {best.bound}"
        yield "memory", f"{scaled(best.memory_bytes, 'B')} of {scaled(chip.memory_bytes, 'B')} per device"
        yield "work", f"{scaled(best.flops, 'FLOP')} per device, busiest over idlest {best.balance:.2f}"
        sent = f"{scaled(best.sent_bytes, 'B')} per device in {best.rounds} rounds"
        if best.summed_bytes:
            sent += f", and {scaled(best.summed_bytes, 'B')} to sum projections over heads"
        if best.gathered_bytes:
            sent += f", and {scaled(best.gathered_bytes, 'B')} as the mesh does not divide the length"
        yield "sent", sent
        parts = [f"{part} {spell_seconds(getattr(best, f'{part}_seconds'))}" for part in PARTS]
        yield "time", f"{', '.join(parts[:-1])}, which overlap; {parts[-1]}, which does not"
        if best.balancing_bytes:
            saved = scaled(best.balancing_bytes, "B")
            yield "order", f"balanced in every call; tokens kept in zig-zag order would save sending {saved}"

    def assumed(self) -> Iterator[tuple[str, str]]:
        """Yield label and text of every figure behind the numbers, with its source."""
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
            " projection after it; of fewer devices, all numbers to 64 and 32 in each doubling are weighed",
        )

    def code(self) -> str:
        """Return Python that runs attention on the best mesh."""
        return self.best.candidate.code(self.chip, self.request["devices"])

    def as_json(self, top: int | None = None) -> dict[str, Any]:
        """Return plain values, for programs."""
        return {
            "request": self.request,
            "chip": asdict(self.chip),
            "assumptions": asdict(self.assumptions),
            "kept": self.kept,
            "tile_side": self.tile_side,
            "meshes": [self._row(item) for item in self.ranking[:top]],
        }

    def _row(self, item: Estimate) -> dict[str, Any]:
        row = asdict(item)
        del row["candidate"]
        names = ("devices", "tokens", "rows", "mesh", "plan", "layout")
        chosen = {name: getattr(item.candidate, name) for name in names}
        chosen["outer"] = item.candidate.outer(self.chip)
        return chosen | row | {"seconds": item.seconds, "bound": item.bound, "why": self.explain_loss(item)}

    def __str__(self) -> str:
        rows = [*self.lines(), *(("assumed", f"{label}: {text}") for label, text in self.assumed())]
        return "\n".join(f"{label:<10} {text}" for label, text in rows)


def spell_sizes(sizes: Mapping[str, int]) -> str:
    """Spell sizes of axes as `--mesh` takes them: data=2,sequence=4."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def spell_seconds(seconds: float) -> str:
    """Spell a time in the unit that suits it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us" if seconds else "0 s"
