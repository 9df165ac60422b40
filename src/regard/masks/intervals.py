"""Masks by which every query has a number and every key an interval of the numbers that may attend to it."""

from regard.axes import Array
from regard.masks.grid import Blocks, Grid
from regard.masks.mask import Mask
from regard.masks.tile_kinds import tile_kind


class Intervals(Mask):
    """keep(q, k) = (enter(k) <= number(q) < leave(k)); a FULL tile is found exactly, an EMPTY one safely."""

    def number(self, position: Array, leading_axes: int) -> Array:
        """Return the numbers of queries at these positions, which have `leading_axes + 2` axes."""
        raise NotImplementedError

    def interval(self, position: Array, leading_axes: int) -> tuple[Array, Array]:
        """Return the first number that sees the keys at these positions, and the one after the last."""
        raise NotImplementedError

    def keep(self, grid: Grid) -> Array:
        number = self.number(grid.query_position, grid.leading_axes)
        enter, leave = self.interval(grid.key_position, grid.leading_axes)
        return (enter <= number) & (number < leave)

    def classify(self, blocks: Blocks) -> Array:
        axes = blocks.leading_axes
        number = self.number(blocks.row_positions, axes)
        enter, leave = self.interval(blocks.column_positions, axes)
        low, high = number.min(-1)[..., None], number.max(-1)[..., None]
        enter, leave = enter[..., None, :, :], leave[..., None, :, :]
        empty = (high < enter.min(-1)) | (low >= leave.max(-1))
        return tile_kind(empty, full=(enter.max(-1) <= low) & (high < leave.min(-1)))
