"""Settings of sampling: which tokens may be drawn, and how sharply."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import LARGEST, guided
from regard.axes import ArrayLike, Size
from regard.engine.call.canonicalization import float_array
from regard.masks.grid import are_same, is_concrete
from regard.records import exportable

_KINDS = {float: (np.floating, np.integer), int: (np.integer,)}
_COLD = "logits are divided by it, and 0 takes the most probable token"
_ALL = "leave it out to keep all tokens"
_LIMITS: dict[str, tuple[type, Callable[[Any], Any], str, str]] = {
    "temperature": (
        float,
        lambda degree: (degree == 0) | ((degree >= 1e-20) & (degree < math.inf)),
        "a finite number of at least 1e-20, or 0",
        _COLD,
    ),
    "top_k": (int, lambda count: count >= 1, "at least 1", _ALL),
    "top_p": (float, lambda share: (share > 0) & (share <= 1), "a number in (0, 1]", _ALL),
    "min_p": (float, lambda share: (share >= 0) & (share <= 1), "a number in (0, 1]", _ALL),
    "repetition_penalty": (
        float,
        lambda penalty: (penalty >= 1e-20) & (penalty <= 1e20),
        "1e-20 to 1e20",
        "1 is none",
    ),
}


@guided
@exportable
@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class Sampling:
    """Settings by which a token is chosen from logits; the default takes the most probable one.

    score = repetition_penalty(logits + logit_bias) / temperature
    allowed = min_p(top_p(top_k(score)))
    token ~ softmax(allowed)

    What is None is left out. A number serves all rows; an array `(batch,)` has one for each prompt. A pytree:
    under jit the numbers are traced, so another temperature compiles nothing anew; only which settings are
    there, and whether the temperature is the number 0, belongs to the program. Numbers may be traced where
    they are put in, too, which are not checked.

    Raises:
        TypeError: settings that are not numbers.
        ValueError: settings out of range; top_k, top_p or min_p at temperature 0, where they change nothing.

    Example:
        >>> import numpy as np
        >>> from regard.models import Sampling
        >>> Sampling(temperature=0.8, top_p=0.95, logit_bias=[0.0, 0.0, -float("inf")]).top_p
        0.95
        >>> Sampling(temperature=np.array([0.0, 0.8])).greedy  # of two prompts the first one is
        False
    """

    temperature: ArrayLike = 0.0
    """Divides logits, at least 1e-20: below 1 sharper, above 1 flatter; or 0, for the most probable token."""
    top_k: ArrayLike | None = None
    """Only the k most probable tokens, at least 1."""
    top_p: ArrayLike | None = None
    """Only the fewest most probable tokens whose probabilities sum to this, in (0, 1]."""
    min_p: ArrayLike | None = None
    """Only tokens at least this many times as probable as the most probable one, in (0, 1]; 0 is all."""
    repetition_penalty: ArrayLike | None = None
    """Positive logits of tokens seen are divided by it, from 1e-20 to 1e20, negative ones multiplied."""
    logit_bias: ArrayLike | None = None
    """Added to the logits before all else, `(V,)` or `(batch, V)`, one row per prompt; -inf bars a token."""

    def __post_init__(self) -> None:
        for name, (kind, accepts, expected, hint) in _LIMITS.items():
            if getattr(self, name) is None and name != "temperature":
                continue
            value: Any = getattr(self, name)
            value = value if hasattr(value, "dtype") else np.asarray(value)
            if value.ndim > 1 or not any(jnp.issubdtype(value.dtype, accepted) for accepted in _KINDS[kind]):
                number = "a number" if kind is float else "an integer"
                raise TypeError(f"{name}: expected {number}, or one per prompt, got {getattr(self, name)!r}")
            if not is_concrete(value):
                continue
            value = np.asarray(value)
            if wrong := value[~accepts(value)].tolist():
                raise ValueError(f"{name}: expected {expected}, got {wrong[0]}; {hint}")
            if kind is int:  # at most LARGEST, more than any vocabulary
                value = np.minimum(value.astype(np.uint64), LARGEST).astype(np.int32)
            object.__setattr__(self, name, value if value.ndim else kind(value))
        if isinstance(self.min_p, float) and self.min_p == 0:
            object.__setattr__(self, "min_p", None)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", float_array("logit_bias", self.logit_bias, 1))
        idle = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        if self.greedy and idle:
            raise ValueError(
                f"{', '.join(idle)}: expected a temperature above 0 with it, got temperature 0, which takes"
                " the most probable token whatever else; give one of 1.0, or leave it out"
            )

    def __eq__(self, other: object) -> bool:
        return are_same(self, other) if isinstance(other, Sampling) else NotImplemented

    def __hash__(self) -> int:
        return hash(jax.tree.structure(self))

    @property
    def greedy(self) -> bool:
        """True if the most probable token is taken, and nothing drawn."""
        return isinstance(self.temperature, int | float) and self.temperature == 0

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.greedy:
            values["temperature"] = None
        return tuple((jax.tree_util.GetAttrKey(name), value) for name, value in values.items()), None

    @classmethod
    def tree_unflatten(cls, _: None, values: Any) -> Sampling:
        made = object.__new__(cls)  # anything may stand for a leaf: nothing is checked
        for field, value in zip(dataclasses.fields(cls), values, strict=True):
            object.__setattr__(made, field.name, value)
        if made.temperature is None:
            object.__setattr__(made, "temperature", 0.0)
        return made

    def check_rows(self, batch: Size) -> None:
        """Raise where a setting has numbers of another count of prompts."""
        for name in _LIMITS:
            shape = np.shape(getattr(self, name))
            if shape not in ((), (batch,)):
                raise ValueError(
                    f"{name}: expected a number, or one per prompt, shape ({batch},); got {shape}"
                )
