"""Labels: kinds of heads, by how much more weight than chance they put on a kind of key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import check_kind, read_number
from regard.axes import Array
from regard.masks.grid import is_concrete
from regard.readouts.accumulators import PATTERNS
from regard.readouts.readout import Readout

LABELS: dict[str, float] = {
    "self": 0.4, "previous-token": 0.4, "next-token": 0.4, "sink": 0.5, "duplicate-token": 0.3,
    "induction": 0.3, "delimiter": 0.5, "local": 0.6, "uniform": 0.9,
}  # fmt: skip
"""For each label the least share, of the weight that chance would not put there, from which it is given."""
_PATTERN_OF = {name: name.removesuffix("-token") for name in LABELS} | {"sink": "first"}
_NEIGHBOURS = ("self", "previous-token", "next-token")
_CERTAINTY = np.log(1000)  # a head that knows nothing of a pattern passes once in so many times


@dataclass(frozen=True)
class Label:
    """A name for a head, with the numbers that gave it.

    Example:
        >>> from regard import readouts
        >>> label = readouts.Label("sink", 0.8125, 0.5)
        >>> str(label)
        'sink 0.81'
    """

    name: str
    """One of `LABELS`."""
    value: float
    """The head's mean over those rows."""
    threshold: float
    """The least mean that the name is given for, with that chance and so many rows."""
    chance: float = 0.0
    """The mean of even weights; 0 for uniform, which is not a share of weight."""
    rows: int = 0
    """The number of queries that some, but not all, of their keys match the name for."""

    def __str__(self) -> str:
        return f"{self.name} {self.value:.2f}"


def average(readout: Readout) -> dict[str, Array]:
    """Average each number per query over the queries that may attend to something.

    mean_h = sum_t value_ht / |{t : keys_ht > 0}|

    The numbers of `LABELS` are averaged over the queries that have a choice: some keys match, not all.
    "sink" is the weight on the first keys and the learned sink, "uniform" the number of keys that the entropy
    is worth, as a share of those there are: `e^entropy / keys`. For duplicate-token and induction, weight
    that the query's neighbours hold is not counted again; for delimiter, that of the first keys.

    Args:
        readout: of `read`.

    Returns:
        By name, arrays `(*B)`: entropy, distance, max_weight, first_mass, sink_mass and the numbers of
        `LABELS`; 0 for a head without such a query.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import masks, readouts
        >>> x = jnp.eye(3)
        >>> means = readouts.average(readouts.read(x, x, mask=masks.causal(), scale=0.0))
        >>> f"{means['previous-token']:.3f}", f"{means['distance']:.2f}"
        ('0.417', '0.50')
    """
    check_kind("readout", readout, Readout)
    return _average_numbers(readout) | {name: measured.mean for name, measured in _measure(readout).items()}


def spread(readout: Readout) -> dict[str, tuple[Array, Array]]:
    """Compute mean and standard deviation over examples of what `average` says of each head.

    mean_h = sum_n mean_nh / N,  deviation_h = sqrt(sum_n (mean_nh - mean_h)^2 / N)

    Args:
        readout: of `read`, with leading axes `(*examples, H)`.

    Returns:
        By name, as in `average`, two arrays `(H,)`. An example without rows that count has the mean 0.

    Raises:
        ValueError: a readout without examples.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import readouts
        >>> x = jnp.stack([jnp.zeros((1, 3, 3)), 99 * jnp.eye(3)[None]])  # two examples of one head
        >>> mean, deviation = readouts.spread(readouts.read(x, x))["max_weight"]
        >>> f"{mean[0]:.3f} +- {deviation[0]:.3f}"
        '0.667 +- 0.333'
    """
    means = average(readout)
    axes = tuple(range(readout.entropy.ndim - 2))
    if not axes:
        shape = tuple(readout.entropy.shape[:-1])
        raise ValueError(f"readout: expected leading axes of examples and heads, got {shape}")
    return {name: (mean.mean(axes), mean.std(axes)) for name, mean in means.items()}


def label(
    readout: Readout, thresholds: Mapping[str, float] | None = None
) -> dict[tuple[int, ...], tuple[Label, ...]]:
    """Name what the heads do, where they do it more than chance at these lengths would.

    label_h = {name : mean_h >= chance + threshold (1 - chance), rows KL(mean_h, chance) >= log 1000}

    Chance is what even weights over the keys that each query may attend to would give. The second condition
    is Hoeffding's bound: weights that know nothing of the pattern pass it less than once in 1000 heads, so
    that few rows need a clear case. Uniform heads have no other label, and self, previous-token and
    next-token heads are not called local.

    Args:
        readout: of `read`, outside `jit`. Duplicate-token, induction and delimiter need its tokens.
        thresholds: least shares beyond chance by name, instead of those in `LABELS`; a name at infinity is
            never given.

    Returns:
        For each index on the leading axes *B, its labels, the most certain first and the narrower among
        equals; often none.

    Raises:
        TypeError: a readout inside a trace.
        ValueError: a name that is not in `LABELS`.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import masks, readouts
        >>> x = jnp.eye(11)
        >>> [str(label) for label in readouts.label(readouts.read(x, x, scale=0.0))[()]]
        ['uniform 1.00']
        >>> (label,) = readouts.label(readouts.read(x, x, scale=100.0))[()]
        >>> str(label), f"{label.chance:.2f}", label.rows
        ('self 1.00', '0.09', 11)

    Reference: Clark et al., "What Does BERT Look At?", 2019; Olsson et al., "In-context Learning and
    Induction Heads", 2022; Hoeffding, "Probability Inequalities for Sums of Bounded Random Variables", 1963,
    theorem 1. Thresholds are ours.
    """
    check_kind("readout", readout, Readout)
    check_kind("thresholds", thresholds, Mapping, type(None))
    thresholds = thresholds or {}
    thresholds = {name: read_number(f"thresholds[{name!r}]", thresholds[name]) for name in thresholds}
    unknown = [name for name in thresholds if name not in LABELS]
    if unknown:
        raise ValueError(f"thresholds: expected names among {', '.join(LABELS)}; got {', '.join(unknown)}")
    if not is_concrete(readout):
        raise TypeError(
            "readout: expected concrete arrays, got a readout inside a trace; label it outside jit"
        )
    measured = {name: _Measured(*map(np.asarray, arrays)) for name, arrays in _measure(readout).items()}
    least = {name: measured[name].threshold(thresholds.get(name, LABELS[name])) for name in measured}
    labels = {}
    for index in np.ndindex(*readout.entropy.shape[:-1]):
        reached = {
            name: Label(
                name,
                value=float(measure.mean[index]),
                threshold=float(least[name][index]),
                chance=float(measure.chance[index]),
                rows=int(measure.rows[index]),
            )
            for name, measure in measured.items()
            if measure.mean[index] >= least[name][index]
        }
        if "uniform" in reached:
            reached = {"uniform": reached["uniform"]}
        elif not reached.keys().isdisjoint(_NEIGHBOURS):
            reached.pop("local", None)
        # Among equals the narrower name, which stands first in LABELS, comes first; sums are exact to 1e-6.
        labels[index] = tuple(sorted(reached.values(), key=lambda label: -round(label.value, 5)))
    return labels


class _Measured(NamedTuple):
    """A number of `LABELS` for each head: what it is, what it is for even weights, and over how many rows."""

    mean: Any
    chance: Any
    rows: Any

    def threshold(self, least: float) -> np.ndarray:
        """Return the least mean that is far above chance, too far for the rows to be chance; inf without."""
        chance, rows = np.maximum(self.chance, 1e-12).astype(np.float64), np.asarray(self.rows, np.float64)
        low, high = chance, np.ones_like(chance)

        def divergence(share: np.ndarray) -> np.ndarray:
            with np.errstate(divide="ignore", invalid="ignore"):
                parts = ((share, chance), (1 - share, 1 - chance))
                return np.sum([np.where(p > 0, p * np.log(p / q), 0) for p, q in parts], 0)

        beyond = np.where(rows * divergence(high) >= _CERTAINTY, 1.0, np.inf)
        for _ in range(40):
            middle = (low + high) / 2
            enough = rows * divergence(middle) >= _CERTAINTY
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        above = chance + least * (1 - chance)
        least_mean = np.where(self.chance > 0, np.maximum(above, high * beyond), above)
        return np.where(self.rows > 0, least_mean, np.inf)


@jax.jit
def _average_numbers(readout: Readout) -> dict[str, Array]:
    names = ("entropy", "distance", "max_weight", "first_mass", "sink_mass")
    alive = (readout.keys > 0) & ~jnp.isnan(readout.entropy)
    return {name: _mean(getattr(readout, name), alive) for name in names}


def _mean(row: Array, counted: Array) -> Array:
    count = jnp.maximum(counted.sum(-1, dtype=jnp.int32), 1)
    return jnp.where(counted, row, 0).sum(-1) / count.astype(row.dtype)


@jax.jit
def _measure(readout: Readout) -> dict[str, _Measured]:
    dtype = readout.entropy.dtype
    alive = (readout.keys > 0) & ~jnp.isnan(readout.entropy)
    sunk = (readout.sink_mass > 0).astype(jnp.int32)
    choices = readout.keys + sunk  # a learned sink is one more
    whole = jnp.maximum(choices, 1).astype(dtype)
    neighbours = readout.self_mass + readout.previous_mass + readout.next_mass
    # Sequences that begin with a delimiter, or repeat every other token, have keys of two kinds.
    simpler = {"duplicate": neighbours, "induction": neighbours, "delimiter": readout.first_mass}
    measured = {}
    for name in LABELS:
        if name == "uniform":
            row, matching = jnp.exp(readout.entropy) / whole, jnp.ones_like(choices)
        else:
            pattern = _PATTERN_OF[name]
            row = getattr(readout, f"{pattern}_mass")
            if row is None:
                continue
            matching = readout.pattern_keys[..., PATTERNS.index(pattern)]
            if name == "sink":
                row, matching = row + readout.sink_mass, matching + sunk
            elif pattern in simpler:
                row = jnp.minimum(row, 1 - simpler[pattern])
        choosing = alive & (matching > 0) & (matching < choices)
        chance = matching.astype(dtype) / whole * (0.0 if name == "uniform" else 1.0)
        rows = choosing.sum(-1, dtype=jnp.int32)
        measured[name] = _Measured(_mean(row, choosing), _mean(chance, choosing), rows)
    return measured
