"""RunningTopK: the k largest scores of each row, as keys arrive in tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.manual_meshes import vary, varying_axes

CHUNK = 16  # keys of a tile that are looked through at once


class RunningTopK(NamedTuple):
    """The best keys so far, best first; of equal scores the smaller key comes first."""

    scores: Array  # (k, R), -inf where there is none
    keys: Array  # (k, R) int32, -1 where there is none

    @classmethod
    def none(cls, count: int, rows: int, dtype: Any) -> RunningTopK:
        return cls(jnp.full((count, rows), -jnp.inf, dtype), jnp.full((count, rows), -1, jnp.int32))

    def meet(self, scores: Array, tops: Array, first_key: Any) -> RunningTopK:
        """Merge the best with a tile of scores (C, R), whose chunks of keys have maxima `tops`.

        Rows take their candidates out of the tile in order, all rows at a time, until no row gains. Chunks
        keep that cheap: of the tile itself only the one chunk in which a row's candidate lies is read.
        """
        count, rows = tops.shape
        numbers = jnp.arange(count, dtype=jnp.int32)[:, None]
        members = jnp.arange(CHUNK, dtype=jnp.int32)[:, None]
        flat = scores.reshape(-1)
        row_index = np.arange(rows, dtype=np.int32)[None]

        def find_candidate(tops: Array) -> tuple[Array, Array]:
            """Find the next candidate's score, and its chunk."""
            best = tops.max(0)
            return best, jnp.where(tops == best[None], numbers, count - 1).min(0)

        def gains(state: Any) -> Array:
            running_top, _, (best, chunk), _ = state
            least = first_key + chunk * np.int32(CHUNK)
            return _before(best, least, running_top.scores[-1], running_top.keys[-1]).any()

        def take(state: Any) -> Any:
            running_top, tops, (expected, chunk), (last, last_index) = state
            index = chunk[None] * np.int32(CHUNK) + members
            # A gather from a flat array is three times as fast as one along an axis, or as a masked maximum.
            cells = flat.at[index * np.int32(rows) + row_index]
            values = cells.get(mode="promise_in_bounds", unique_indices=True)
            untaken = (values < last[None]) | ((values == last[None]) & (index > last_index[None]))
            # Of what is stored: another kernel may have made `expected` anew, rounded otherwise.
            has_candidate = expected > -jnp.inf  # a row without keeps none, whatever its chunks hold
            best = jnp.where(untaken & has_candidate[None], values, -jnp.inf).max(0)
            best_index = jnp.where(untaken & (values == best[None]), index, count * CHUNK).min(0)
            rest = jnp.where(untaken & (index != best_index[None]), values, -jnp.inf).max(0)
            running_top = running_top.insert(best, first_key + best_index)
            tops = jnp.where((numbers == chunk[None]) & has_candidate[None], rest[None], tops)
            is_taken = best > -jnp.inf
            taken = jnp.where(is_taken, best, last), jnp.where(is_taken, best_index, last_index)
            return running_top, tops, find_candidate(tops), taken

        start = jnp.full((rows,), jnp.inf, scores.dtype), jnp.full((rows,), -1, jnp.int32)
        state = self, tops, find_candidate(tops), start
        return jax.lax.while_loop(gains, take, vary(state, varying_axes(state)))[0]

    def insert(self, score: Array, key: Array) -> RunningTopK:
        """Insert one key per row, where it is good enough."""
        ahead = _before(score[None], key[None], self.scores, self.keys)
        above = jnp.concatenate([jnp.zeros_like(ahead[:1]), ahead[:-1]])

        def shift(array: Array, entry: Array) -> Array:
            down = jnp.concatenate([array[:1], array[:-1]])
            return jnp.where(ahead, jnp.where(above, down, entry[None]), array)

        return RunningTopK(shift(self.scores, score), shift(self.keys, key))


def _before(score: Array, key: Array, other: Array, other_key: Array) -> Array:
    """Return whether one comes before the other; NaN and -inf come before nothing."""
    return (score > other) | ((score == other) & (key < other_key))
