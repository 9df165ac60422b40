"""Judge calls of a function: hold what it gives to the definition, and name what it is instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from regard.conformance.alternatives import Alternative, propose
from regard.conformance.expectations import (
    HALF,
    Difference,
    Expected,
    expect,
    find_difference,
    find_empty,
    round_to,
)
from regard.conformance.promises import SIZES, Promise
from regard.conformance.report import Row, Verdict
from regard.conformance.subjects import Answer, Subject, pass_options
from regard.conformance.written_calls import FLOATING, Array, Call, Case

Cotangents = tuple[Array, Array]

# Sizes in place of primes, for functions that refuse those; and the order in which programs get smaller.
FRIENDLY = {101: 64, 131: 128, 6: 8, 3: 4}
SMALLER = {"B": (1,), "H": (1, 2), "E": (1, 2), "D": (1, 2, 3), "T": (1, 2, 3, 5, 8), "S": (1, 2, 3, 5, 8)}
ANYTHING = "whatever the numbers are"


class Explanation(NamedTuple):
    """The verdict on some numbers, and what they are instead of the definition's."""

    verdict: Verdict
    finding: str = ""
    line: str = ""
    convention: Alternative | None = None


class Judge:
    """Knowledge of a function so far: the sizes that it serves and the conventions that it follows."""

    def __init__(self, subject: Subject, imported: str, name: str, tolerance: float):
        self.subject, self.imported, self.name, self.tolerance = subject, imported, name, tolerance
        self.sizes = self._fit(SIZES)
        self.conventions: list[Alternative] = []

    def keep_promise(self, promise: Promise) -> list[Row]:
        """Judge the call of a promise: its value, lse and gradients."""
        sizes = {**self.sizes, **promise.sizes}
        if promise.options and self.sizes["T"] != 101:
            sizes = {letter: FRIENDLY.get(size, size) for letter, size in sizes.items()}
        if "H" not in self.subject.layout and promise.sizes.get("H") != promise.sizes.get("K"):
            return []
        case = Case(self._fit(sizes), promise.options, promise.edits, promise.dtype, promise.magnitude)
        rows = list(self.judge(promise, case))
        if rows[0].verdict != "refused":
            self.sizes = self._fit({**self.sizes, **promise.adopts})
        return [self._shrink(promise, case, row) if row.verdict == "wrong" else row for row in rows]

    def _fit(self, sizes: Any) -> dict[str, int]:
        """Return sizes of one where the layout lacks an axis."""
        lacking = {letter: 1 for letter in "BH" if letter not in self.subject.layout}
        return {**sizes, **lacking} | ({"K": 1} if "H" in lacking else {})

    def ask(self, call: Call, *, differentiate: bool = True) -> tuple[Answer, Cotangents]:
        """Call the function; return its answer and the cotangents of output and lse."""
        rng, kind = np.random.default_rng(1), np.asarray(call["query"]).dtype
        live = ~find_empty(self.spell(call))
        d_output = round_to(rng.normal(size=(*live.shape, call["value"].shape[-1])), kind) * live[..., None]
        d_lse = round_to(rng.normal(size=live.shape), kind if kind.name in HALF else np.float32) * live
        d_lse = d_lse * ("lse" in call)
        return self.subject.answer(call, d_output, d_lse, differentiate=differentiate), (d_output, d_lse)

    def spell(self, call: Call) -> Call:
        """Return the call whose definition the function computes, by the conventions found so far."""
        kind = np.asarray(call["query"]).dtype.name
        marked = call | {{"float64": "double", "float32": "single"}.get(kind, "half"): True}
        if call["key"].shape[1] < call["query"].shape[1]:
            marked["grouped"] = True
        for convention in self.conventions:
            if convention.applies(marked):
                marked = convention.apply(marked)
        return marked

    def ask_case(self, case: Case, *, differentiate: bool = True) -> Answer:
        """Ask for a case, its mask by the function's own polarity."""
        return self.ask(self.turn_mask(case.draw()), differentiate=differentiate)[0]

    def turn_mask(self, call: Call) -> Call:
        """Return a call whose mask says the same by the function's own polarity."""
        hides = any(convention.name.startswith("True hides") for convention in self.conventions)
        return call | {"mask": ~call["mask"]} if hides and "mask" in call else call

    def judge(self, promise: Promise, case: Case, like: str = "") -> Iterator[Row]:
        """Yield a row each for the value, lse and gradients of one call.

        With `like`, only the alternative of that name is looked for, and nothing is learnt of conventions.
        """
        row = partial(Row, promise.name)
        call = case.draw()
        answer, cotangents = self.ask(call)
        if answer.output is None:
            verdict, line = ("refused", "") if answer.refusal else ("wrong", "output")
            yield row("value", verdict, answer.reason, line)
            return
        spelled = self.spell(call)
        live = ~find_empty(spelled)
        explain = partial(self.explain, like=like)
        output, rows = {"output": answer.output}, live[..., None]
        value = explain(spelled, output, "value", answer.dtype, cotangents, rows, promise.line)
        yield row("value", *value[:3])
        if answer.dtype != case.dtype:
            finding = f"an output of {answer.dtype} for arrays of {case.dtype}"
            yield row("dtype", "wrong", finding, "output")
        if answer.changed:
            yield row("inputs", "wrong", f"the function writes to {', '.join(answer.changed)}")
        if value.verdict == "wrong":
            return  # nothing else can be said
        if value.convention is not None:
            self.conventions += [] if like else [value.convention]
            spelled = value.convention.apply(spelled)
        if "lse" in call and answer.lse is None:
            yield row("lse", "wrong", answer.fault or "no lse came beside the output", "lse")
        elif answer.lse is not None:
            working = "float64" if case.dtype == "float64" else "float32"
            if answer.lse_dtype != working:
                finding = f"lse is {answer.lse_dtype}, its sums are {working}"
                yield row("lse dtype", "wrong", finding, "lse")
            lse = explain(spelled, {"lse": answer.lse}, "lse", answer.lse_dtype, cotangents, live, "lse")
            yield row("lse", *lse[:3])
            if lse.convention is not None:
                return  # whose gradient is another's
        if answer.gradient_refusal:
            yield row("gradient", "refused", answer.gradient_refusal)
        elif answer.gradients:
            gradients = {f"d_{name}": gradient for name, gradient in answer.gradients.items()}
            gradient = explain(spelled, gradients, "gradient", case.dtype, cotangents, None, "d_products")
            yield row("gradient", *gradient[:3])

    def explain(
        self,
        call: Call,
        actual: dict[str, Array],
        aspect: str,
        dtype: str,
        cotangents: Cotangents,
        where: Array | None,
        line: str,
        like: str = "",
    ) -> Explanation:
        """Hold numbers to the definition, then to alternatives; `like` names the only one that is tried."""
        differentiate = aspect == "gradient"
        expected = expect(call, cotangents, differentiate=differentiate)
        worst = self._differ(actual, expected, dtype, where)
        if worst is None:
            return Explanation("holds")
        for other in propose(call, aspect):
            if not like or other.name == like:
                changed = other.apply(call)
                back = (cotangents[0], cotangents[1] * ("stopped" not in changed))
                try:
                    with np.errstate(all="ignore"):
                        expected = expect(changed, back, differentiate=differentiate)
                except (ValueError, IndexError):
                    continue
                if self._differ(actual, expected, dtype, where) is None:
                    if other.is_convention:
                        return Explanation("differs", other.name, other.line, other)
                    return Explanation("wrong", other.name, other.line)
        name, difference = worst
        own_line = name in ("d_value", "d_bias", "d_sinks")
        return Explanation("wrong", f"{name}{difference}", name if own_line else line)

    def _differ(
        self, actual: dict[str, Array], expected: dict[str, Expected], dtype: str, where: Array | None
    ) -> tuple[str, Difference] | None:
        for name, array in actual.items():
            if name in expected:
                difference = find_difference(array, expected[name], dtype, self.tolerance, where)
                if difference is not None:
                    return name, difference
        return None

    def compare(self, actual: Array, expected: Expected, where: Array | None = None) -> Difference | None:
        """Return where numbers in float32 differ from what is expected, or None."""
        return find_difference(actual, expected, "float32", self.tolerance, where)

    def _shrink(self, promise: Promise, case: Case, row: Row) -> Row:
        """Look for the smallest call that is wrong in the same way, and add its program to the row."""
        like = ANYTHING if "[" in row.finding else row.finding
        for letter, choices in SMALLER.items():
            for size in choices:
                sizes = {letter: size}
                if letter == "H":
                    sizes["K"] = max(1, size * case.sizes["K"] // max(case.sizes["H"], 1))
                if size >= case.sizes[letter] or sizes.get("H", 0) % sizes.get("K", 1):
                    continue
                smaller = case.resize(**sizes)
                try:
                    rows = list(self.judge(promise, smaller, like))
                except (ValueError, IndexError):  # an option has no such size
                    continue
                wrong = [other for other in rows if other.verdict == "wrong" and other.aspect == row.aspect]
                if wrong and (like == ANYTHING or wrong[0].finding == row.finding):
                    case, row = smaller, wrong[0]
                    break
        program = self.write_program(promise.name, case, gradient=row.aspect == "gradient")
        return dataclasses.replace(row, program=f"{program}\n# {row.finding}")

    def row_writer(self, promise: str, case: Case) -> Callable[..., Row]:
        """Return a function that makes a promise's rows; what is wrong gets its program."""

        def write(aspect: str, verdict: Verdict, finding: str = "", line: str = "") -> Row:
            wrong = verdict == "wrong"
            program = self.write_program(promise, case, gradient=aspect == "gradient") if wrong else ""
            return Row(promise, aspect, verdict, finding, line, program)

        return write

    def write_program(self, promise: str, case: Case, *, gradient: bool = False) -> str:
        """Return a program that calls the function on a case, and may take gradients of a sum.

        They are of the output's sum, or of lse where the promise is about it.
        """
        words = ["query", "key", "value"]
        call = case.draw()
        for name in case.options:
            way = self.subject.features[name]
            words += [f"{word}={name}" for word in pass_options({name: way}, {name: call[name]})]
        passed = f"{self.name}({', '.join(words)})"
        program = case.write_program(self.imported, self.subject.layout, passed, self.subject.kind)
        if not gradient or self.subject.kind != "jax":
            return program
        inputs = ", ".join(name for name in FLOATING if name in call)
        summed = passed if "lse" not in case.options else f"{passed}[{int(promise.startswith('lse'))}]"
        numbers = ", ".join(map(str, range(inputs.count(",") + 1)))
        return f"{program}\ngradients = jax.grad(lambda {inputs}: jnp.sum({summed}), ({numbers}))({inputs})"
