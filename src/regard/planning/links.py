"""Links: how long what devices send one another is under way."""

from __future__ import annotations

from dataclasses import dataclass

from regard.planning.chips import Chip


@dataclass(frozen=True)
class Line:
    """Devices along one mesh axis: how many, and how far apart neighbours are in the order of all devices."""

    size: int
    stride: int

    def near(self, chip: Chip) -> int:
        """How many of them, one after the other, the fast links join."""
        return max(min(self.size, chip.near_devices // self.stride), 1)

    def is_near(self, chip: Chip) -> bool:
        return self.near(chip) == self.size


def hop_seconds(chip: Chip, line: Line, count: float, steps: int = 1) -> float:
    """Every device sends so many bytes to the one some steps further; the slowest hop counts."""
    steps = min(steps % line.size, -steps % line.size)
    if steps == 0:
        return 0.0
    if not line.is_near(chip):
        return count / chip.far_bandwidth
    # On a torus the way further leads through the neighbours, whose links carry as much of others.
    return count * (steps if chip.torus else 1) / chip.near_bandwidth


def exchange_seconds(chip: Chip, line: Line, count: float) -> float:
    """Every device sends so many bytes in all, as much to each of the others."""
    if line.size == 1:
        return 0.0
    near = line.near(chip)
    each = count / (line.size - 1)
    far = each * (line.size - near) / chip.far_bandwidth
    close = each * (near - 1) / chip.near_bandwidth
    if chip.torus and near > 1:
        # Both directions of a ring, on which a message crosses a quarter of the devices on average.
        close *= max(near / 8 * near / (near - 1), 0.5)
    return max(far, close)


def sum_seconds(chip: Chip, line: Line, count: float) -> float:
    """Every device sends so many bytes in all to add arrays up, around a ring."""
    if line.size == 1:
        return 0.0
    if not line.is_near(chip):
        return count / chip.far_bandwidth
    return count / (chip.near_bandwidth * (2 if chip.torus else 1))
