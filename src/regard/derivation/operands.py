"""The operands of a call: queries, keys and values, and a metric between them."""

from __future__ import annotations

from typing import Any

from regard.derivation.course import Course
from regard.derivation.notation import spell
from regard.engine.call.problem import Problem
from regard.formulas import Sum, Symbol, product
from regard.scores.metrics import Bilinear


def add_operands(course: Course, given: Any, metric: Bilinear | None) -> None:
    """Add the steps of query, key and value; `given` is the query before the metric."""
    problem = course.problem
    chosen = "" if problem.rows is None else f" {problem.rows.size:,} of {problem.T:,} rows."
    words = f"What each query asks for.{chosen}"
    if metric is None:
        course.give("query", Symbol("Q"), problem.query, "ia", words, "features")
    else:
        asked = course.give("asked", Symbol("Q", below="0"), given, "ie", words, "features")
        words = "Which features answer which, in place of like for like."
        form = course.give("metric", Symbol("g"), metric.metric, "ea", words, "")
        names = course.notation.name(problem.query.shape, "ia")
        right = Sum("e", product(asked.formula.left, form.formula.left))
        words = "The queries seen through the metric: what meets the keys."
        value = course.pick(problem.query, names)
        subscripts = f"{spell(asked.indices)},{spell(form.indices)}->{spell(names)}"
        course.add("query", Symbol("Q", spell(names)), right, words, "features", value, names, subscripts)
    words = "What each key answers to." + _share(problem, problem.key)
    course.give("key", Symbol("K"), problem.key, "ja", words, "features", of_keys=True)
    words = "What each key hands over when it is read." + _share(problem, problem.value)
    course.give("value", Symbol("V"), problem.value, "jb", words, "features of value", of_keys=True)


def _share(problem: Problem, array: Any) -> str:
    heads = problem.leading[-1] if problem.leading else 1
    own = array.shape[-3] if array.ndim > 2 else 1
    return f" One head serves all {heads} query heads." if own == 1 < heads else ""
