"""The course of one attention call: every step from queries, keys and values to the output."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.derivation.letters import Notation, spell
from regard.derivation.numbers import compute_numbers
from regard.derivation.step import Step
from regard.engine.call.problem import Problem
from regard.formulas import (
    Equation,
    Exponential,
    Formula,
    Fraction,
    Function,
    Number,
    Row,
    Sum,
    Symbol,
    Terms,
    product,
)
from regard.masks.offsets import positions_of
from regard.scores.bilinear_forms import Bilinear

SCORES = "logits"


class Course:
    """A walk through a call, of whose rows and heads every step is kept; letters stand for whole axes."""

    def __init__(self, problem: Problem, notation: Notation):
        self.problem, self.notation = problem, notation
        self.steps: list[Step] = []
        self.terms: Terms | None = None
        self.aliases: dict[str, str] = {}
        self.numbers = compute_numbers(problem)
        shape = (*problem.leading, problem.T, problem.S)
        self.pair_names = notation.name(shape, "ij")
        self.pairs = spell(self.pair_names)
        self.queries = spell(self.pair_names[:-1])

    def walk(self, last: str = "output") -> None:
        """Add all steps after those of query, key and value; the last one gets the name given."""
        if self.notation.is_grouped:
            self._add_groups()
        self._add_scores(self.terms or self._name_terms())
        self._add_weights()
        if self.problem.dropout_rate:
            self._add_dropout()
        self._add_output(last)

    def add_operands(self, raw_query: Any, metric: Bilinear | None) -> None:
        """Add the steps of query, key and value; `raw_query` is the query before the metric."""
        problem = self.problem
        chosen = "" if problem.rows is None else f" {problem.rows.size:,} of {problem.T:,} rows."
        words = f"What each query asks for.{chosen}"
        if metric is None:
            self.give("query", Symbol("Q"), problem.query, "ia", words, "features")
        else:
            asked = self.give("asked", Symbol("Q", below="0"), raw_query, "ie", words, "features")
            words = "Which features answer which, in place of like for like."
            form = self.give("metric", Symbol("g"), metric.metric, "ea", words, "")
            names = self.notation.name(problem.query.shape, "ia")
            right = Sum("e", product(asked, form))
            words = "The queries seen through the metric: what meets the keys."
            value = self.pick(problem.query, names)
            subscripts = f"{asked.indices},{form.indices}->{spell(names)}"
            self.add("query", Symbol("Q"), right, words, "features", value, names, subscripts)
        words = "What each key answers to." + self._describe_sharing(problem.key)
        self.give("key", Symbol("K"), problem.key, "ja", words, "features", of_keys=True)
        words = "What each key hands over when it is read." + self._describe_sharing(problem.value)
        self.give("value", Symbol("V"), problem.value, "jb", words, "features of value", of_keys=True)

    def _describe_sharing(self, array: Any) -> str:
        heads = self.problem.leading[-1] if self.problem.leading else 1
        is_shared = heads > 1 and (array.ndim < 3 or array.shape[-3] == 1)
        return f" One head serves all {heads} query heads." if is_shared else ""

    def add(
        self,
        name: str,
        left_side: Formula,
        right: Formula | None,
        words: str,
        unit: str,
        value: Any,
        names: tuple[str, ...],
        subscripts: str | None = None,
    ) -> Any:
        """Add a step, and return its left side, a symbol with the axes' names as indices.

        A name that is taken gets a number.
        """
        if isinstance(left_side, Symbol):
            left_side = dataclasses.replace(left_side, indices="".join(names))
        equation = Equation(left_side, right)
        self.steps.append(Step(self._unused(name), equation, words, unit, value, names, subscripts))
        return left_side

    def give(
        self, name: str, symbol: Symbol, array: Array, tail: str, words: str, unit: str, of_keys: bool = False
    ) -> Symbol:
        """Add a step of an array over leading axes and `tail` that is given, not computed."""
        names = self.notation.name(array.shape, tail, of_keys=of_keys)
        return self.add(name, symbol, None, words, unit, self.pick(array, names), names)

    def _unused(self, name: str) -> str:
        """Return the name, with a number where it is taken."""
        taken = {step.name for step in self.steps}
        names = (name, *(f"{name}_{number}" for number in range(2, len(taken) + 3)))
        return next(free for free in names if free not in taken)

    def pick(self, array: Array, names: tuple[str, ...]) -> Array:
        """Take the derived rows and heads of an array whose axes have these names."""
        chosen = {"i": self.problem.rows, "h": self.problem.heads}
        for axis, name in enumerate(names):
            if (entries := chosen.get(name)) is not None:
                array = jnp.take(array, entries, axis)
        return array

    def _step(self, name: str) -> Step:
        return next(step for step in reversed(self.steps) if step.name == name)

    def _add_groups(self) -> None:
        shared, heads = self.problem.key_heads, self.problem.leading[-1]
        size = self.problem.group
        words = f"{heads} query heads share {shared} key heads, {size} each; none is copied."
        left_side = Function("g", (Symbol("h"),))
        right = Function("floor", (Fraction(Symbol("h"), Number(str(size))),))
        self.add("groups", left_side, right, words, "key head", self.numbers.key_head, ("h",))

    def _name_terms(self) -> Terms:
        """Return symbols for score functions; add positions where a mask or score reads them."""
        parts = (self.problem.mask, self.problem.score)
        if any(part is not None and part.reads_positions for part in parts):
            return self.add_positions()
        return self._terms_of(Symbol("p", "i"), Symbol("r", "j"))

    def _terms_of(self, query_position: Symbol, key_position: Symbol) -> Terms:
        letters = self.notation.leading
        example, head = letters[0] if len(letters) > 1 else "", letters[-1] if letters else ""
        return Terms(Symbol("S"), query_position, key_position, example, head)

    def add_positions(self) -> Terms:
        """Add the positions of queries and keys."""
        problem, numbers = self.problem, self.numbers
        key_offset = 0 if problem.key_offset is None else problem.key_offset
        query = self._add_position("query", "p", "i", numbers.query_position, problem.query_offset)
        key = self._add_position("key", "r", "j", numbers.key_position, key_offset)
        self.terms = self._terms_of(query, key)
        return self.terms

    def _add_position(self, noun: str, letter: str, index: str, array: Array, start: Any) -> Symbol:
        if all(size == 1 for size in array.shape[:-1]):
            array = array.reshape(-1)
        names = self.notation.name((*array.shape[:-1], self.notation.sizes[index]), index)
        array = self.pick(array, names[:-1])  # rows are those derived
        if not positions_of(start).is_consecutive:
            right = None
        elif isinstance(start, int):
            right = Symbol(index) if start == 0 else Row((Number(str(start)), Symbol(index)), "+")
        else:
            right = Row((Symbol("offset", spell(names[:-1])), Symbol(index)), "+")
        words = f"Where {noun} {index} stands in the sequence."
        return self.add(f"{noun}_position", Symbol(letter), right, words, "tokens", array, names)

    def _add_scores(self, terms: Terms) -> None:
        problem = self.problem
        query, key = self._step("query"), self._step("key")
        products, *stages = self.numbers.stages
        query_indices = spell(query.indices)
        right = Sum("a", product(Symbol("Q", query_indices), Symbol("K", spell(key.indices))))
        words = "How well key j answers query i: their scalar product."
        subscripts = f"{query_indices},{_of_query_heads(key.indices)}->{self.pairs}"
        self.add("products", Symbol("P"), right, words, "features²", products, self.pair_names, subscripts)
        D, factor = problem.D, np.asarray(problem.scale)
        right, words = Number(f"{factor:.4g}"), "The factor given."
        if factor == np.asarray(1 / np.sqrt(D), problem.accumulation):
            right = Fraction(Number("1"), Function("sqrt", (Number(str(D)),)))
            words = f"A sum of {D} products spreads as the root of {D}; this brings it back to 1."
        unit = f"{SCORES} per features²"
        self.add("scale", Symbol("scale"), right, words, unit, jnp.asarray(problem.scale), ())
        numbered = iter(enumerate(stages))

        def advance(name: str, right: Formula, words: str) -> Symbol:
            number, value = next(numbered)
            is_last = number == len(stages) - 1
            if is_last and name != "scores":
                self.aliases[self._unused(name)], name = "scores", "scores"
            symbol = Symbol("S", below="" if is_last else str(number))
            return self.add(name, symbol, right, words, SCORES, value, self.pair_names)

        words = "The products on the scale of the softmax."
        if len(stages) == 1:
            words += " Nothing else is done to them: these are the scores."
        now = advance("scaled", product(Symbol("scale"), Symbol("P", self.pairs)), words)
        for part in () if problem.score is None else problem.score.parts:
            now = advance(part.title, part.formula(dataclasses.replace(terms, before=now)), part.words)
        if problem.bias is not None:
            words = "What is added to the scores; -inf removes a key."
            bias = self.give("bias", Symbol("B"), problem.bias, "ij", words, SCORES)
            now = advance("biased", Row((now, bias), "+"), "Scores with what is added.")
        if problem.mask is not None:
            keep: Any = self.numbers.keep
            names = self.notation.name((*keep.shape[:-2], problem.T, problem.S), "ij")
            keep = self.pick(keep, names[:-2])
            share = f"{int(keep.sum()):,} of {keep.size:,} pairs may"
            words = f"{problem.mask!r}: whether query i may attend to key j; {share}."
            mask = self.add("mask", Symbol("M"), None, words, "yes or no", keep, names)
            words = "log 1 = 0 changes nothing; log 0 = -inf takes a key away, whatever its score."
            advance("scores", Row((now, Function("log", (mask,))), "+"), words)

    def _add_weights(self) -> None:
        """Add lse, weights and entropy, with what sinks leave of them."""
        numbers, names = self.numbers, self.pair_names
        score = Symbol("S", self.pairs)
        terms: Formula = Sum("j", Exponential(score))
        logit: Formula = Symbol("z")
        sinks = self.problem.sinks
        if sinks is not None:
            words = "A logit per head that joins the softmax and hands nothing over."
            logit = self.give("sinks", Symbol("z"), sinks, "", words, SCORES)
            terms = Row((Exponential(logit), terms), "+")
        empty = int(numbers.empty_rows)
        words = "Log of the partition function, what all exponentials of a row add up to."
        if empty:
            rows = f"{empty} row{'s' if empty > 1 else ''} may attend to nothing"
            words += f" {rows}{': -inf' if sinks is None else ''}."
        subscripts = f"{self.pairs}->{self.queries}"
        right: Formula = Function("log", (terms,))
        total = self.add("lse", Symbol("L"), right, words, "nats", numbers.lse, names[:-1], subscripts)
        words = "Softmax: the share of key j in what query i reads."
        whole = "1" if sinks is None else "what the sink leaves"
        words += f" Every row adds up to {whole}{', an empty one to 0' if empty else ''}."
        right = Exponential(Row((score, total), "-"))
        weight = self.add("weights", Symbol("A"), right, words, "shares", numbers.weights, names)
        formula: Formula = Sum("j", _surprise_of(weight))
        if sinks is not None:
            words = "What the sink takes of each row, and hands nothing over for."
            right, symbol = Exponential(Row((logit, total), "-")), Symbol("A", below="sink")
            share = self.add("sink_weight", symbol, right, words, "shares", numbers.sink_weight, names[:-1])
            formula = Row((formula, _surprise_of(share)), "+")
        words = "How spread out the weights are: as uncertain as e^H keys of equal weight."
        self.add("entropy", Symbol("H"), formula, words, "nats", numbers.entropy, names[:-1], subscripts)

    def _add_dropout(self) -> None:
        problem, numbers = self.problem, self.numbers
        names, rate = self.pair_names, f"{problem.dropout_rate:g}"
        words = f"A weight is dropped with chance {rate}; the others grow by 1 / (1 - {rate})."
        factor = self.add("dropout", Symbol("d"), None, words, "factor", numbers.dropout_factor, names)
        words, right = "The weights that values are averaged with.", product(factor, Symbol("A", self.pairs))
        self.add("kept_weights", Symbol("D"), right, words, "shares", numbers.dropped_weights, names)

    def _add_output(self, last: str) -> None:
        problem = self.problem
        names = self.notation.name((*problem.leading, problem.T, problem.E), "ib")
        value = self._step("value")
        words = "Every query takes home the values, each in its share."
        if bool(self.numbers.hides_nonfinite_values):
            words += " A value that nobody may read counts as 0, whatever it holds."
        if problem.accumulation != problem.query.dtype:
            words += f" Added up in {problem.accumulation}, rounded to {problem.query.dtype}."
        weight = Symbol("D" if problem.dropout_rate else "A", self.pairs)
        right = Sum("j", product(weight, Symbol("V", spell(value.indices))))
        subscripts = f"{self.pairs},{_of_query_heads(value.indices)}->{spell(names)}"
        value = self.numbers.output
        self.add(last, Symbol("O"), right, words, "features of value", value, names, subscripts)


def _of_query_heads(indices: tuple[str, ...]) -> str:
    return "".join("h" if index == "g" else index for index in indices)


def _surprise_of(share: Symbol) -> Formula:
    return product(share, Function("log", (Fraction(Number("1"), share),)))
