"""Labels: kinds of heads, by thresholds that are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.masks.grid import is_concrete
from regard.readouts.record import Readout


def _evenness(readout: Readout) -> Array:
    """Divide the entropy by its largest value, the log of the number of keys, the sink included."""
    choices = readout.keys.astype(readout.entropy.dtype) + (readout.sink_mass > 0).astype(
        readout.entropy.dtype
    )
    return readout.entropy / jnp.log(jnp.maximum(choices, 2))


# For each label its number per query, and the least mean, over queries with keys, from which it is given.
LABELS: dict[str, tuple[Callable[[Readout], Any], float]] = {
    "previous-token": (attrgetter("previous_mass"), 0.4),
    "induction": (attrgetter("induction_mass"), 0.3),
    "same-token": (attrgetter("same_mass"), 0.3),
    "self": (attrgetter("self_mass"), 0.4),
    "sink": (lambda readout: readout.first_mass + readout.sink_mass, 0.5),
    "local": (attrgetter("local_mass"), 0.8),
    "uniform": (_evenness, 0.9),
}


@dataclass(frozen=True)
class Label:
    """A name for a head, with the mean and the threshold that gave it.

    Example:
        >>> from regard import readouts
        >>> label = readouts.Label("sink", 0.8125, 0.5)
        >>> str(label)
        'sink 0.81'
    """

    name: str
    """One of `LABELS`."""
    value: float
    """The head's mean."""
    threshold: float
    """The least mean that the name is given for."""

    def __str__(self) -> str:
        return f"{self.name} {self.value:.2f}"


def average(readout: Readout) -> dict[str, Array]:
    """Average each number per query over the queries that may attend to something.

    mean_h = sum_t value_ht / |{t : keys_ht > 0}|

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
        ('0.278', '0.50')
    """
    return _average(readout)


def label(
    readout: Readout, thresholds: Mapping[str, float] | None = None
) -> dict[tuple[int, ...], tuple[Label, ...]]:
    """Name what the heads do: previous-token, induction, same-token, self, sink, local, uniform.

    label_h = {name : mean_t value_t >= threshold}

    Args:
        readout: of `read`, outside `jit`. Induction and same-token need its tokens.
        thresholds: least means by name, instead of those in `LABELS`; a name at infinity is never given.

    Returns:
        For each index on the leading axes *B, its labels, the most certain first and the narrower among
        equals; often none.

    Raises:
        TypeError: a readout inside a trace.
        ValueError: a name that is not in `LABELS`.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import masks, readouts
        >>> x = jnp.eye(5)
        >>> uniform = readouts.read(x, x, scale=0.0, first=1, local=2)
        >>> [str(found) for found in readouts.label(uniform)[()]]
        ['uniform 1.00']
        >>> str(readouts.label(readouts.read(x, x, scale=100.0))[()][0])
        'self 1.00'

    Reference: Clark et al., "What Does BERT Look At?", 2019; Olsson et al., "In-context Learning and
    Induction Heads", 2022. Thresholds are ours.
    """
    thresholds = dict(thresholds or {})
    unknown = [name for name in thresholds if name not in LABELS]
    if unknown:
        raise ValueError(f"thresholds: expected names among {', '.join(LABELS)}; got {', '.join(unknown)}")
    if not is_concrete(readout):
        raise TypeError(
            "readout: expected concrete arrays, got a readout inside a trace; label it outside jit"
        )
    averages = average(readout)
    means = {name: np.asarray(averages[name]) for name in LABELS if name in averages}
    least = {name: float(thresholds.get(name, LABELS[name][1])) for name in means}
    found = {}
    for index in np.ndindex(*readout.entropy.shape[:-1]):
        given = [
            Label(name, float(mean[index]), least[name])
            for name, mean in means.items()
            if mean[index] >= least[name]
        ]
        # Among equals the narrower name, which stands first in LABELS, comes first; sums are exact to 1e-6.
        found[index] = tuple(sorted(given, key=lambda one: -round(one.value, 5)))
    return found


@jax.jit
def _average(readout: Readout) -> dict[str, Array]:
    names = ("entropy", "distance", "max_weight", "first_mass", "sink_mass")
    rows = {name: getattr(readout, name) for name in names}
    measured = {name: measure(readout) for name, (measure, _) in LABELS.items()}
    rows |= {name: row for name, row in measured.items() if row is not None}  # without tokens, some are None
    alive = (readout.keys > 0) & ~jnp.isnan(readout.entropy)
    # Over a single key, evenness has no meaning.
    counted = {name: alive & ((readout.keys > 1) if name == "uniform" else True) for name in rows}
    return {
        name: jnp.where(counted[name], row, 0).sum(-1)
        / jnp.maximum(counted[name].sum(-1, dtype=jnp.int32), 1).astype(row.dtype)
        for name, row in rows.items()
    }
