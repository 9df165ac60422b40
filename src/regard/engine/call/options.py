"""Options of a call of attention: declared here alone, and passed on by name to whoever runs the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from jax.lax import PrecisionLike

from regard.arguments import check_option
from regard.axes import Array, ArrayLike
from regard.masks import Mask
from regard.scores import Score

Function = TypeVar("Function", bound=Callable[..., Any])


class ScoreOptions(TypedDict, total=False):
    """Options that the scores of a call depend on."""

    mask: Mask | ArrayLike | None
    bias: ArrayLike | None
    score: Score | Sequence[Score] | None
    scale: float | Array | None
    sinks: ArrayLike | None
    query_offset: int | ArrayLike | None
    key_offset: int | ArrayLike | None
    query_positions: ArrayLike | None
    key_positions: ArrayLike | None
    precision: PrecisionLike
    batch_invariant: bool


class Options(ScoreOptions, total=False):
    """All options of `attend` that describe a call; `regard.attend` documents each."""

    dropout_rate: float
    rng: Array | None
    aux: Sequence[str]
    rows: ArrayLike | Sequence[int] | None
    heads: ArrayLike | Sequence[int] | None


DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(Options.__annotations__),
    "dropout_rate": 0.0,
    "aux": (),
    "batch_invariant": False,
}


def fill_in(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options, those left out at their defaults."""
    check_names(options, Options)
    return {**DEFAULTS, **options}


def check_names(options: Iterable[str], declared: type) -> None:
    """Raise for the first name that is not among those declared."""
    for name in options:
        check_option(name, declared.__annotations__)


def spell_out(function: Function) -> Function:
    """Make `help` and editors show each option of a function in place of `**options`."""
    signature = inspect.signature(function)
    *own, _ = signature.parameters.values()
    spelled = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS[name], annotation=hint.__forward_arg__
        )
        for name, hint in Options.__annotations__.items()
    ]
    first = [parameter for parameter in own if parameter.kind != parameter.KEYWORD_ONLY]
    parameters = [*first, *spelled, *own[len(first) :]]
    function.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore
    return function
