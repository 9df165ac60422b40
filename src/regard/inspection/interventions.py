"""Interventions: what heads read or write is replaced while a model runs."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import as_array, check_kind, integers
from regard.axes import Array, ArrayLike
from regard.engine.call.hooks import Finish, is_watched, rewrite
from regard.engine.call.problem import Problem
from regard.engine.softmax.score_rows import score_cells
from regard.masks.grid import is_concrete
from regard.records import record

_OPERANDS = ("query", "key", "value")
_CAPTURED_WEIGHTS = (
    "weights: what is captured meanwhile are the weights of queries and keys, not these; aux= and observe"
    " return these, and query= and key= of another run change both"
)


@record
class Change:
    """Say what replaces what in one call of `attend`; what is None stays.

    x_h <- (1 - share_h) x_h + share_h new_h  for each x of query, key, value, the weights and the output
    output_hq <- output_hq - share w_hqk v_hk  for each edge (h, q, k)

    Every field but `heads` and `rows`, and a function, may be traced: one program serves for any head,
    differentiable by `share`.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import attend, inspection
        >>> x = jnp.ones((3, 5, 2))  # three heads
        >>> with inspection.intervene({0: inspection.Change(output=0.0, heads=(1,))}):
        ...     out = attend(x, x, x)
        >>> out[:, 0, 0].tolist()
        [1.0, 0.0, 1.0]
        >>> pair = jnp.stack([x, 2 * x])  # two examples; the second one's output goes into both
        >>> with inspection.intervene({0: inspection.Change(source=1, heads=(1,), rows=(4,))}):
        ...     out = attend(pair, pair, pair)
        >>> out[0, 1, :, 0].tolist()
        [1.0, 1.0, 1.0, 1.0, 2.0]

    Reference: of `source`: Geiger et al., "Causal Abstractions of Neural Networks", 2021, section 3.
    """

    query: ArrayLike | None = None
    """Queries, as the call has them (behind rotary positions): broadcasts to `(*B, H, T, D)`."""
    key: ArrayLike | None = None
    """Keys, `(*B, K, S, D)`. Another run's queries and keys together give its pattern, in linear memory."""
    value: ArrayLike | None = None
    """Values, `(*B, K, S, E)`."""
    weights: ArrayLike | None = None
    """The pattern, `(*B, H, T, S)`: output = weights value, not normalised; NaN of weight 0 adds nothing.
    Weights, entropy and argmax of `attend` and `observe` are of it; a capture, which says so, forms those of
    queries and keys."""
    output: ArrayLike | Callable[[Array], Array] | None = None
    """The heads' output, `(*B, H, T, E)`, before the output projection: 0.0 switches them off. A function
    makes it of their own: `lambda output: output.mean(-2, keepdims=True)`, their mean over the text."""
    source: ArrayLike | None = None
    """In place of `output`: the example of the same batch, its first axis, whose output is taken (interchange
    intervention, activation patching); or one for each example. The source itself stays as it is."""
    edges: ArrayLike | None = None
    """Cells, `(n, 3)`: head, query and key of each, none of them twice. What that weight hands over is taken
    out of the output, the row's other weights stay: exact where `trace_paths` estimates, in linear memory; of
    a call without dropout, and not beside `weights`. `share` is a number then, or one per edge; `heads` says
    nothing of them."""
    share: ArrayLike = 1.0
    """The part of each head that is replaced, 0 to 1: a number, or one per head (of key, value: key head).
    Beside output=0.0 it scales: 1 - share times the head stays, half of it by 0.5, twice by -1."""
    heads: Sequence[int] | None = dataclasses.field(default=None, metadata={"static": True})
    """Numbers of the heads that are replaced; None means all."""
    rows: Sequence[int] | None = dataclasses.field(default=None, metadata={"static": True})
    """Numbers of the queries (of key and value: keys) where they are replaced; None means all."""

    def __post_init__(self) -> None:
        fields = (*_OPERANDS, "weights", "output", "source", "edges")
        if all(getattr(self, name) is None for name in fields):
            raise ValueError(f"Change: expected one of {', '.join(fields)} at least, got none")
        if self.output is not None and self.source is not None:
            raise ValueError("Change: expected output or source, which give the same thing; got both")
        if self.weights is not None and self.edges is not None:
            raise ValueError("Change: expected weights or edges, got both; put 0 into weights for each edge")
        for name in ("heads", "rows"):
            if getattr(self, name) is not None:
                numbers = np.ravel(integers(name, getattr(self, name))).tolist()
                object.__setattr__(self, name, tuple(numbers))

    def rewrite(self, problem: Problem) -> tuple[Problem, Finish]:
        """Return the changed call, and a function of its output."""
        call = problem.with_arrays()
        new = {name: getattr(self, name) for name in _OPERANDS if getattr(self, name) is not None}
        mixed = {name: self._mix(name, getattr(call, name), array) for name, array in new.items()}
        problem = dataclasses.replace(call, **mixed)
        needed = {"lse": self.edges, "weights": self.weights}
        more = [name for name, new in needed.items() if new is not None and name not in problem.aux]
        problem = dataclasses.replace(problem, aux=(*problem.aux, *more)) if more else problem
        if self.weights is not None and is_watched():
            warnings.warn(_CAPTURED_WEIGHTS, stacklevel=2)

        def finish(output: Array, extra: Any) -> Array:
            if self.edges is not None:
                output = self._take_out(problem, output, extra["lse"])
            if self.weights is not None:
                rows = _spread("weights", self.weights, output, (*problem.leading, problem.T, problem.S))
                rows = problem.fold(problem.with_heads(rows))
                values = problem.with_heads(problem.value.astype(output.dtype))
                read = (rows != 0).any(-2)[..., None]
                mixed = problem.unfold(rows @ jnp.where(read | jnp.isfinite(values), values, 0))
                output = self._mix("weights", output, mixed.reshape(output.shape))
                extra |= self._replace_pattern(problem, extra)
            if self.source is not None:
                return self._mix("output", output, self._exchange(output))
            if self.output is None:
                return output
            return self._mix("output", output, self.output(output) if callable(self.output) else self.output)

        return problem, finish

    def _replace_pattern(self, problem: Problem, extra: Any) -> dict[str, Array]:
        """Return the statistics of weights, with the new ones in place."""
        if problem.rows is not None or problem.heads is not None:
            raise ValueError(
                "weights: expected a call that returns whole rows of all heads, got rows or heads"
            )
        weights = self._mix("weights", extra["weights"], self.weights)
        logs = jnp.log(jnp.where(weights > 0, weights, 1))
        changed = {"weights": weights, "entropy": -(weights * logs).sum(-1)}
        changed["argmax"] = jnp.argmax(weights, -1).astype(jnp.int32)
        return {name: array for name, array in changed.items() if name in extra}

    def _take_out(self, problem: Problem, output: Array, lse: Array) -> Array:
        """Take what the edges hand over out of the output."""
        *batch, count = problem.leading or (1,)
        ends = integers("edges", self.edges)
        if ends.ndim != 2 or ends.shape[1] != 3:
            raise ValueError(f"edges: expected rows of head, query and key, (n, 3), got shape {ends.shape}")
        if problem.dropout_rate:
            raise ValueError(
                "edges: expected a call without dropout, which says by itself what a weight hands over; got"
                f" dropout_rate={problem.dropout_rate}; put the model in evaluation mode"
            )
        sizes = np.array([count, problem.T, problem.S])
        if is_concrete(ends) and np.any((np.asarray(ends) < 0) | (np.asarray(ends) >= sizes)):
            raise ValueError(f"edges: expected a head, a query and a key below {sizes.tolist()}, got {ends}")
        if is_concrete(ends):
            cells, counts = np.unique(np.asarray(ends), axis=0, return_counts=True)
            if np.any(counts > 1):
                named = f"{tuple(cells[counts.argmax()].tolist())} {counts.max()} times"
                raise ValueError(f"edges: expected each cell once, got {named}; share= says how much goes")

        def score_edge(edge: Array) -> Array:
            return score_cells(problem, edge[1:2], edge[2:], edge[:1]).reshape(batch)

        scores = jax.vmap(score_edge, out_axes=-1)(jnp.asarray(ends))
        head, query, key = jnp.asarray(ends).T
        lse = lse.reshape(*batch, count, -1)[..., head, query]
        weight = jnp.where(scores == -jnp.inf, 0, jnp.exp(scores - lse))
        values = problem.with_heads(problem.value)
        values = values[..., head // (count // values.shape[-3]), key, :].astype(weight.dtype)
        values = jnp.broadcast_to(values, (*weight.shape, values.shape[-1]))
        share = jnp.asarray(self.share, weight.dtype)
        if share.shape not in ((), (len(ends),)):
            raise ValueError(
                f"share: expected a number or one for each of {len(ends)} edges, got {share.shape}"
            )
        weight = (weight * jnp.broadcast_to(share, weight.shape))[..., None]
        # Where a value is a number, a share of 0 has a slope.
        handed = (weight * jnp.where((weight != 0) | jnp.isfinite(values), values, 0)).astype(output.dtype)
        rows = output.reshape(*batch, count, *output.shape[-2:])
        return rows.at[..., head, query, :].add(-handed).reshape(output.shape)

    def _exchange(self, output: Array) -> Array:
        """Return the output of the examples that are the sources."""
        count = output.shape[0] if output.ndim > 3 else 0
        source = integers("source", self.source)
        is_wrong = is_concrete(source) and np.any((np.asarray(source) < 0) | (np.asarray(source) >= count))
        if source.shape not in ((), (count,)) or is_wrong:
            expected = "an example in the first axis of (B, ..., H, T, E), or one for each"
            raise ValueError(f"source: expected {expected}, got {self.source} for shape {output.shape}")
        return output[jnp.broadcast_to(source, (count,))]

    def _mix(self, name: str, own: Array, new: Any) -> Array:
        """Put the new in place of a head's own, by its share."""
        heads = own.shape[-3] if own.ndim > 2 else 1
        share, new = jnp.asarray(self.share, own.dtype), _spread(name, new, own, own.shape)
        if share.shape not in ((), (heads,)):
            raise ValueError(f"share: expected a number or one for each of {heads} heads, got {share.shape}")
        share = jnp.broadcast_to(share, (heads,))[:, None, None]
        for axis, (field, size) in enumerate((("heads", heads), ("rows", own.shape[-2]))):
            if (chosen := getattr(self, field)) is None:
                continue
            wrong = [number for number in chosen if not 0 <= number < size]
            if wrong:
                raise ValueError(f"{field}: expected {field} in 0..{size - 1} of {name}, got {wrong}")
            is_chosen = np.expand_dims(np.isin(np.arange(size), chosen), (1 - axis, 2))
            share = jnp.where(is_chosen, share, 0)
        share = share.reshape((*(1,) * (own.ndim - 3), *share.shape)[-own.ndim :])
        # 0 times what is no number would be none.
        own = jnp.where((share != 1) | jnp.isfinite(own), own, 0)
        return (1 - share) * own + share * jnp.where((share != 0) | jnp.isfinite(new), new, 0)


def _spread(name: str, new: Any, own: Array, shape: tuple[int, ...]) -> Array:
    """Return what is new, of the dtype of a call's own array, in a shape."""
    new = as_array(name, "an array", jnp.asarray, new, own.dtype)
    try:
        return jnp.broadcast_to(new, shape)
    except ValueError:
        raise ValueError(f"{name}: expected an array that broadcasts to {shape}, got {new.shape}") from None


@contextmanager
def intervene(changes: Mapping[int, Change]) -> Iterator[None]:
    """Replace parts of calls of `attend` in the block: switch heads off, or give them another run's numbers.

    Calls are numbered as they come, from 0, as in a `Trace`: the block is for one run of a model. It may be
    inside `jit` or around what is jitted, which is then traced anew, and its changes stay in it. Models of
    Regard with `scan_layers` run their layers one by one meanwhile.

    Args:
        changes: a `Change` for each number of a call.

    Returns:
        A context manager.

    Raises:
        ValueError: when the block ends: a call that there was not. When a call comes: heads or arrays that
            do not fit it.
        TypeError: changes of another type.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from regard import attend, inspection
        >>> @jax.jit
        ... def run(x, share):
        ...     with inspection.intervene({0: inspection.Change(output=0.0, share=share)}):
        ...         return attend(x, x, x)
        >>> out = run(jnp.ones((3, 5, 2)), jnp.array([0.0, 1.0, 0.5]))
        >>> out[:, 0, 0].tolist()
        [1.0, 0.0, 0.5]

    Reference: Meng et al., "Locating and Editing Factual Associations in GPT", 2022, section 2.1; Wang et
    al., "Interpretability in the Wild", 2022, section 2.2.
    """
    check_kind("changes", changes, Mapping)
    for number, change in changes.items():
        if not isinstance(number, int | np.integer) or not isinstance(change, Change):
            got = f"{number!r}: {type(change).__name__}"
            raise TypeError(f"changes: expected a Change for each number of a call, got {got}")
    seen = 0

    def rewriter(problem: Problem) -> tuple[Problem, Finish]:
        nonlocal seen
        change, seen = changes.get(seen), seen + 1
        return (problem, lambda output, extra: output) if change is None else change.rewrite(problem)

    with rewrite(rewriter):
        yield
    if changes and not seen:
        raise ValueError("intervene: expected at least one call of regard.attend in the block, got none")
    missing = [str(number) for number in changes if not 0 <= number < seen]
    if missing:
        raise ValueError(f"changes: expected numbers of calls in 0..{seen - 1}, got {', '.join(missing)}")
