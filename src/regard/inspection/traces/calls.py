"""Call: one watched call of `attend`, for one example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard import readouts
from regard.arguments import whole_number
from regard.engine.call.problem import Problem
from regard.engine.softmax.score_rows import score_cells
from regard.inspection.contributions import measure_values
from regard.inspection.tokens import Tokens, find_delimiters, number_tokens
from regard.inspection.traces.slices import take_heads
from regard.masks import Mask
from regard.positions import Rotary
from regard.readouts import Readout
from regard.readouts.accumulators import choose_block
from regard.readouts.reading import choose_indices
from regard.scores import Score

NOT_KEPT = (
    "the queries and keys of this call are not kept, and without them there are only the statistics that were"
    ' saved; save the trace with keep="qk", and load that file'
)


Indices = Sequence[int] | slice | None


@dataclass(frozen=True)
class Description:
    """The settings of a call, as plain values."""

    mask: str | None
    score: str | None
    scale: float | None  # None in a file where it is not a finite number
    bias: bool
    sinks: bool
    dropout_rate: float
    query_offset: int
    key_offset: int
    dtype: str
    backend: str
    width: int  # D; 0 where weights were given, and no queries and keys


@dataclass(frozen=True)
class KnownPositions:
    """The positions of a layer, as far as they are known."""

    rotary: Rotary | None = None
    table: np.ndarray | None = None  # (n, M), a vector for each position
    table_kind: str | None = None  # "sinusoidal" or "learned"
    trained_length: int | None = None  # positions that a learned table has


@dataclass(frozen=True, eq=False, repr=False)
class CallRecord:
    """Hold what is known of a call, in memory and in a file alike: see `Call`."""

    name: str
    layer: int
    kind: str
    heads: int
    rows: int
    keys: int
    query_offset: int
    key_offset: int
    mask: Mask | None
    score: Score | None
    lse: np.ndarray
    max_score: np.ndarray
    description: Description


@dataclass(frozen=True, eq=False, repr=False)
class Call(CallRecord):
    """The attention of one layer, or one call of `attend`, in all heads and for one example.

    Args:
        name: path of the layer in the model, "trunk.stack.blocks.0.attention", or "attention 0".
        layer: number of the layer, from 0: that in its name, else the order of calling.
        kind: "self" or "cross".
        heads, rows, keys: H, T queries and S.
        query_offset, key_offset: positions of the first query and of the first key.
        mask, score: of this example; None where there was none, or where it is not kept: see `describe`.
        lse: `(H, T)` log of the sum of exponentials, sinks included, as the backend gave it.
        max_score: `(H, T)` largest score, -inf for a query that may attend to nothing.
        description: the settings that `describe` returns.
        problem: query `(H, T, D)` and key `(K, S, D)`, without values; None where they are not kept.
        query_tokens, key_tokens: what sits at the queries and keys.
        positions: of the layer, where they are known.
        output_error: largest difference of the output from that computed anew; None with dropout.
        value_norms: `(H, S)` `|v_s Wo_h|`, the length of what a weight of 1 adds; None where it is not known,
            as of layers that gate what heads read (`output_gate`).
        run: number of the model's run among those of a capture, from 1; None where it is not known.
        stored: statistics from a file.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import attend, inspection, masks
        >>> x = jnp.eye(4)[None]
        >>> with inspection.capture() as trace:
        ...     _ = attend(x, x, x, mask=masks.causal(), scale=0.0)
        >>> trace[0]
        Call('attention 0', self, 1 head, 4 x 4, causal())
        >>> [f"{weight:.2f}" for weight in trace[0].window(rows=slice(2, 3))[0, 0]]
        ['0.33', '0.33', '0.33', '0.00']
    """

    problem: Problem | None = None
    query_tokens: Tokens | None = None
    key_tokens: Tokens | None = None
    positions: KnownPositions | None = None
    output_error: float | None = None
    value_norms: np.ndarray | None = None
    run: int | None = None
    stored: Readout | None = None
    _found: dict[Any, Any] = field(default_factory=dict, init=False)

    @property
    def whole(self) -> Call:
        """The call with its padding, which programs are compiled for; itself where there is none."""
        return self

    @property
    def trimmed(self) -> Problem | None:
        """The problem without padding."""
        return self.problem

    def readout(
        self, grid: int = 64, top_k: int = 8, heads: Indices = None, *, exact: bool = True
    ) -> Readout:
        """Count the weights of all heads, or some, in linear memory; what was counted once is kept.

        Args:
            grid, top_k: as in `readouts.read`.
            heads: which query heads; None means all.
            exact: False takes what was saved where that is less than asked for, and q and k are not kept.

        Returns:
            As `readouts.read`, with leading axes `(heads,)`. `trust` compares with the `lse` of the backend
            that ran: `max_t |e^(lse'_t - lse_t) - 1|`, where lse' is the readout's own.

        Raises:
            ValueError: a head that is not there; more than was saved, where q and k are not kept.
        """
        chosen = self._choose(heads)
        sizes = whole_number("grid", grid, 1), whole_number("top_k", top_k, 1)
        whole = self._recall(*sizes, exact) if self.problem is None else self._found.get((*sizes, None))
        if chosen is None:
            return self._count(sizes, None) if whole is None else whole
        if whole is not None:
            return jax.tree.map(lambda array: array[np.asarray(chosen, np.int32)], whole)
        return self._count(sizes, tuple(chosen))

    def window(self, rows: Indices = None, columns: Indices = None, heads: Indices = None) -> np.ndarray:
        """Form weights, float32 `(heads, rows, columns)`, exactly, by work and memory of the window alone.

        Args:
            rows, columns, heads: which queries, keys and query heads, as in `readouts.window`.

        Raises:
            TypeError: indices that are not integers.
            ValueError: an index out of range; queries and keys that are not kept.
        """
        if self.problem is None:
            raise ValueError(f"window: {NOT_KEPT}")
        chosen = self._choose(heads)
        problem, lse = self.problem, self.lse
        if chosen == []:
            listed = choose_indices("rows", rows, self.rows), choose_indices("columns", columns, self.keys)
            return np.zeros((0, *map(len, listed)), np.float32)
        if chosen is not None:
            problem, lse = take_heads(problem, chosen), self.lse[chosen]
        window = {"rows": rows, "columns": columns, **options(problem)}
        return np.asarray(readouts.window(problem.query, problem.key, lse, **window), np.float32)

    def permit(self, rows: Indices = None, columns: Indices = None) -> np.ndarray:
        """Return which queries and keys may attend, bool `(heads, rows, columns)`; indices as in `window`."""
        cells = choose_indices("rows", rows, self.rows), choose_indices("columns", columns, self.keys)
        problem, shape = self.problem, (self.heads, *map(len, cells))
        if problem is None:
            raise ValueError(f"permit: {NOT_KEPT}")
        if problem.mask is None and problem.bias is None and problem.score is None:
            return np.ones(shape, bool)
        chosen = (jnp.asarray(indices, jnp.int32) for indices in (*cells, np.arange(self.heads)))
        return np.broadcast_to(np.asarray(jax.jit(score_cells)(problem, *chosen)) != -np.inf, shape)

    def describe(self) -> dict[str, Any]:
        """Return the settings of the call as a dict of plain values.

        They are mask and score as their expressions or None, scale, whether there were bias and sinks,
        dropout_rate, query_offset and key_offset, dtype, backend and width D.
        """
        return asdict(self.description)

    def __repr__(self) -> str:
        heads = f"{self.heads} head{'s' if self.heads != 1 else ''}"
        mask = f", {self.description.mask}" if self.description.mask else ""
        return f"Call({self.name!r}, {self.kind}, {heads}, {self.rows} x {self.keys}{mask})"

    def _choose(self, heads: Indices) -> list[int] | None:
        """Return the heads as a list; None, all of them."""
        chosen = choose_indices("heads", heads, self.heads).tolist()
        return None if chosen == list(range(self.heads)) else chosen

    def _count(self, sizes: tuple[int, int], heads: tuple[int, ...] | None) -> Readout:
        if (*sizes, heads) in self._found:
            return self._found[(*sizes, heads)]
        assert self.problem is not None
        problem, lse = self.problem, self.lse
        if heads is not None:
            problem, lse = take_heads(problem, heads) if heads else problem, lse[list(heads)]
        asked = {"grid": sizes[0], "top_k": sizes[1], **options(problem)}
        numbers = number_tokens(self.query_tokens, self.key_tokens)
        if numbers is not None and self.key_tokens is not None:
            asked["query_tokens"], asked["tokens"] = numbers
            asked["delimiters"] = find_delimiters(self.key_tokens, numbers[1])
        readout = readouts.read(problem.query, problem.key, **asked)
        if heads == ():
            readout = jax.tree.map(lambda array: array[:0], readout)
        readout = replace(readout, trust=_trust(readout, lse))
        self._found[(*sizes, heads)] = readout
        return readout

    def _recall(self, grid: int, top_k: int, exact: bool) -> Readout:
        """Return the saved statistics, in blocks that the grid holds; they may be fewer unless exact."""
        stored = self.stored
        if stored is None:
            raise ValueError(f"readout: {NOT_KEPT}")
        if exact and top_k > (most := stored.top_keys.shape[-1]):
            raise ValueError(f"top_k: expected at most {most}, as {NOT_KEPT}; got {top_k}")
        blocks = stored.block_mass.shape[-2:]
        needed = [choose_block(length, grid) for length in (self.rows, self.keys)]
        if exact and (needed[0] < stored.query_block or needed[1] < stored.key_block):
            raise ValueError(f"grid: expected at most {max(blocks)} blocks, as {NOT_KEPT}; got {grid}")
        number = next(n for n in range(stored.num_levels) if max(-(-size // 2**n) for size in blocks) <= grid)
        level = stored.level(number)
        top = {name: getattr(stored, name)[..., :top_k] for name in ("top_keys", "top_weights")}
        grids = {"block_mass": level.mass, "block_max": level.max, "block_rows": level.rows}
        sizes = {"query_block": level.query_block, "key_block": level.key_block}
        return replace(stored, **top, **grids, **sizes)


def make_call(
    problem: Problem,
    rows: Mapping[str, Any],
    *,
    kind: str | None,
    backend: str,
    dropout_rate: float = 0.0,
    output_error: float | None = None,
    projection: Any = None,
) -> Call:
    """Make a call, without name and tokens; with the `projection` of its outputs, with lengths of values."""
    heads = problem.leading[-1]
    scores = () if problem.score is None else problem.score.parts
    offsets: Any = {"query_offset": int(problem.query_offset), "key_offset": int(problem.key_offset or 0)}
    # Unless it is known: cross attention has other lengths for keys, and reads no positions.
    is_placed = any(part is not None and part.reads_positions for part in (problem.mask, problem.score))
    is_cross = problem.T != problem.S and not is_placed and problem.key_offset is None
    description = Description(
        mask=None if problem.mask is None else repr(problem.mask),
        score=", ".join(map(repr, scores)) or None,
        scale=float(problem.scale),
        bias=problem.bias is not None,
        sinks=problem.sinks is not None,
        dropout_rate=dropout_rate,
        **offsets,
        dtype=str(problem.query.dtype),
        backend=backend,
        width=problem.D,
    )
    return Call(
        name="",
        layer=0,
        kind=kind or ("cross" if is_cross else "self"),
        heads=heads,
        rows=problem.T,
        keys=problem.S,
        **offsets,
        mask=problem.mask,
        score=problem.score,
        lse=np.asarray(rows["lse"]),
        max_score=np.asarray(rows["max_score"]),
        description=description,
        # Values are read no more.
        problem=replace(problem, value=np.zeros((1, problem.S, 1), problem.key.dtype)),
        output_error=output_error,
        value_norms=None if projection is None else measure_values(problem.value, projection.kernel, heads),
    )


def options(problem: Problem) -> dict[str, Any]:
    """Return the options of `readouts.read` and `readouts.window` from a problem."""
    names = ("mask", "bias", "score", "scale", "sinks", "query_offset", "key_offset", "precision")
    return {name: getattr(problem, name) for name in names}


def _trust(readout: Readout, lse: np.ndarray) -> Any:
    """Return by how much, at most, the sum of weights formed with the backend's lse misses 1."""
    alive = np.asarray(readout.keys) > 0
    mine = np.where(alive, np.asarray(readout.lse), 0)
    theirs = np.where(alive, lse, 0).astype(mine.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        off = np.abs(np.expm1(mine - theirs))
    return jnp.asarray(off.max(-1, initial=0))
