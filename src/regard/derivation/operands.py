"""What enters a call: queries, keys and values, and a metric between them."""

from __future__ import annotations

from typing import Any

from regard.derivation.course import pick
from regard.derivation.formulas import Equation, Sum, Symbol, product
from regard.derivation.notation import Notation, spell
from regard.derivation.steps import Step
from regard.engine.call.problem import Problem
from regard.scores.metrics import Bilinear
from regard.scores.score import Chain


def split_metric(score: Chain | None) -> Bilinear | None:
    """The metric that a score begins with."""
    first = None if score is None else score.parts[0]
    return first if isinstance(first, Bilinear) else None


def operand_steps(problem: Problem, notation: Notation, given: Any, metric: Bilinear | None) -> list[Step]:
    """Query, key and value as given; `given` is the query before the metric."""
    steps = query_steps(problem, notation, given, metric)
    names = notation.name(problem.key.shape, "ja", of_keys=True)
    words = "What each key answers to." + _share(problem, problem.key)
    steps.append(
        give("key", Symbol("K", "".join(names)), words, "features", pick(problem.key, names, problem), names)
    )
    names = notation.name(problem.value.shape, "jb", of_keys=True)
    words = "What each key hands over when it is read." + _share(problem, problem.value)
    value = pick(problem.value, names, problem)
    steps.append(give("value", Symbol("V", "".join(names)), words, "features of value", value, names))
    return steps


def query_steps(problem: Problem, notation: Notation, given: Any, metric: Bilinear | None) -> list[Step]:
    """The query as given, and what a metric makes of it."""
    chosen = "" if problem.rows is None else f" {problem.rows.size:,} of {problem.T:,} rows."
    words = f"What each query asks for.{chosen}"
    if metric is None:
        names = notation.name(problem.query.shape, "ia")
        symbol = Symbol("Q", spell(names))
        return [give("query", symbol, words, "features", pick(problem.query, names, problem), names)]
    names = notation.name(given.shape, "ie")
    before = Symbol("Q", spell(names), "0")
    own = notation.name(metric.metric.shape, "ea")
    form = Symbol("g", spell(own))
    after = notation.name(problem.query.shape, "ia")
    return [
        give("asked", before, words, "features", pick(given, names, problem), names),
        give(
            "metric", form, "Which features answer which, in place of like for like.", "", metric.metric, own
        ),
        Step(
            "query",
            Equation(Symbol("Q", spell(after)), Sum("e", product(before, form))),
            "The queries seen through the metric: what meets the keys.",
            "features",
            pick(problem.query, after, problem),
            after,
            f"{spell(names)},{spell(own)}->{spell(after)}",
        ),
    ]


def give(name: str, symbol: Symbol, words: str, unit: str, value: Any, names: tuple[str, ...]) -> Step:
    """A step that is given, not computed."""
    return Step(name, Equation(symbol), words, unit, value, names)


def _share(problem: Problem, array: Any) -> str:
    heads = problem.leading[-1] if problem.leading else 1
    own = array.shape[-3] if array.ndim > 2 else 1
    return f" One head serves all {heads} query heads." if own == 1 < heads else ""
