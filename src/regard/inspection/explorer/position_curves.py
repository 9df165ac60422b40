"""Curves and tables of positions: rotary kernels, biases by distance, similarities, and what a bias adds."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import as_array
from regard.axes import Array
from regard.engine.softmax.score_rows import score_cells
from regard.masks.bounds import Bounds
from regard.positions import Rotary, Scaling
from regard.scores import Score
from regard.scores.cells import Picks
from regard.scores.score import compose

MOST_POINTS = 512
LARGEST_SPLIT = 256


def rotary_curve(turn: Rotary, head_dim: int, longest: int) -> dict[str, Any]:
    """Average q . k over turned copies of one unit vector, by distance up to the longest.

    kernel(d) = ((D - width) + 2 a^2 sum_i cos(d frequency_i)) / D, a the amplitude of the scaling

    Frequencies are in radians per token; a trained_length of None is not known.

    Example:
        >>> from regard.inspection.explorer.position_curves import rotary_curve
        >>> from regard.positions import Rotary, Scaling
        >>> [f"{value:.3f}" for value in rotary_curve(Rotary(), 2, 2)["kernel"]]
        ['1.000', '0.540', '-0.416']
    """
    width = head_dim if turn.width is None else turn.width
    rule = Scaling() if turn.scaling is None else turn.scaling
    frequencies, amplitude = rule.frequencies(width, turn.base), rule.amplitude
    distances = spaced(0, longest)
    turned = np.cos(distances[:, None] * frequencies).sum(-1)
    kernel = (head_dim - width + 2 * amplitude**2 * turned) / head_dim
    short = [float(f"{frequency:.6g}") for frequency in frequencies]
    return {
        "kind": "rotary",
        "name": f"rotary, base {turn.base:g}",
        "head_dim": head_dim,
        "frequencies": short,
        "trained_length": getattr(rule, "trained_length", None),
        "kernel": kernel,
        "distances": distances.tolist(),
    }


def bias_curves(call: Any) -> list[dict[str, Any]]:
    """Evaluate what each score of a call that only adds by position adds, for every head, by distance."""
    problem = call.problem
    if problem is None or problem.score is None or not call.rows or not call.keys:
        return []
    query, key = call.query_offset, call.key_offset
    least, most = query - (key + call.keys - 1), query + call.rows - 1 - key
    bounds = Bounds() if problem.mask is None else problem.mask.bounds
    least = least if bounds.after is None else max(least, -bounds.after)
    most = most if bounds.before is None else min(most, bounds.before)
    if least > most:
        return []
    distances = spaced(least, most)
    heads = np.arange(call.heads, dtype=np.int32)
    curves = []
    for part in _parts(problem.score):
        if part.adds and part.reads_positions:
            values = np.asarray(_add_by_distance(part, distances.astype(np.int32), heads))
            named = {"kind": "bias", "name": part.expression().split("(")[0]}
            curves.append(named | {"distances": distances.tolist(), "values": values})
    return curves


@jax.jit
def _add_by_distance(part: Score, distances: Array, heads: Array) -> Array:
    zero = jnp.int32(0)
    cells = Picks(distances[None], zero, heads[:, None], zero)
    return part.apply(jnp.zeros((heads.size, distances.size), jnp.float32), cells)


def table_picture(name: str, table: Any, trained_length: int | None = None) -> dict[str, Any]:
    """Compare the rows of a position table, at most 512 of them, a step apart; None: all were trained.

    similarity_ij = x_i . x_j / (|x_i| |x_j|), not a number where a row is 0

    Example:
        >>> import numpy as np
        >>> from regard.inspection.explorer.position_curves import table_picture
        >>> table_picture("learned", np.eye(2))["similarity"].tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    rows = as_array(f"positions: the table {name!r}", "numbers", np.asarray, table, np.float64)
    if rows.ndim != 2:
        raise ValueError(f"positions: expected the table {name!r} as (positions, width), got {rows.shape}")
    step = -(-len(rows) // MOST_POINTS) or 1
    taken = rows[::step]
    norms = np.sqrt((taken**2).sum(-1))
    unit = taken / np.where(norms > 0, norms, np.nan)[:, None]
    trained = len(rows) if trained_length is None else trained_length
    about = {"kind": "table", "name": name, "trained_length": trained, "step": step}
    return about | {"similarity": np.clip(unit @ unit.T, -1, 1), "norms": norms}


def split_scores(
    call: Any, head: int, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
) -> dict[str, Any] | None:
    """Take a head's scores apart: what the features say, and what scores by position and biases add.

    both_ts = content_ts + bias_ts, not a number where the mask lets nothing through

    Rows and columns are a first one and the first no longer taken; None means the last 256. Returns None
    where queries and keys are not kept or nothing is added.
    """
    problem = call.problem
    if problem is None or not (call.rows and call.keys and call.description.width):
        return None
    if problem.bias is None and not any(part.adds for part in _parts(problem.score)):
        return None
    first_row, end_row = (max(call.rows - LARGEST_SPLIT, 0), call.rows) if rows is None else rows
    first_key, end_key = (max(call.keys - LARGEST_SPLIT, 0), call.keys) if columns is None else columns
    places = jnp.arange(first_row, end_row, dtype=jnp.int32), jnp.arange(first_key, end_key, dtype=jnp.int32)
    which = jnp.asarray([head], jnp.int32)
    score = compose([part for part in _parts(problem.score) if not part.adds])
    plain = dataclasses.replace(problem, score=score, bias=None, mask=None)
    shape = (end_row - first_row, end_key - first_key)
    content = np.asarray(jax.jit(score_cells)(plain, *places, which), np.float64).reshape(shape)
    both = np.asarray(jax.jit(score_cells)(problem, *places, which), np.float64).reshape(shape)
    alive = both != -np.inf
    content, both = np.where(alive, content, np.nan), np.where(alive, both, np.nan)
    window = {"rows": shape[0], "keys": shape[1], "first_row": first_row, "first_key": first_key}
    return window | {"content": content, "bias": both - content, "both": both}


def spaced(least: int, most: int) -> np.ndarray:
    """Return whole numbers between bounds, at most 512: each one near 0, geometrically spaced afar."""
    if most - least < MOST_POINTS:
        return np.arange(least, most + 1)
    half = MOST_POINTS // (2 if least < 0 < most else 1)
    far = max(abs(least), abs(most))
    dense = np.arange(min(half // 2, far + 1))
    steps = np.union1d(dense, np.rint(np.geomspace(1, far, half)).astype(np.int64))
    signed = np.union1d(-steps, steps)
    return np.union1d(signed[(signed >= least) & (signed <= most)], [least, most])


def _parts(score: Score | None) -> tuple[Score, ...]:
    return () if score is None else score.parts
