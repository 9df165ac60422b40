"""Queries, keys and values of a layer, derived from its inputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from regard.axes import Array
from regard.derivation.course import Course
from regard.formulas import Formula, Fraction, Function, Row, Sum, Symbol, product
from regard.layers.heads import split_heads
from regard.positions import Rotary
from regard.scores.bilinear_forms import Bilinear

FEATURES = "features"
_Right = Callable[[Symbol], Formula] | None


class _Stage(NamedTuple):
    """One stage of queries, keys or values; its formula is made from the symbol before."""

    name: str
    right: _Right
    words: str
    value: Array
    features: str  # the letter of the last axis
    subscripts: str | None = None


class Line:
    """Stages of queries, keys or values; the last one has the plain symbol and name."""

    def __init__(self, course: Course, name: str, letter: str, position: str, features: str):
        self.course, self.name, self.letter = course, name, letter
        self.position, self.features = position, features
        self.stages: list[_Stage] = []

    def project(self, linear: nnx.Linear, apply: Any, read: Symbol, array: Array, heads: int) -> None:
        """Make them from rows of features, by a tensor that has heads."""
        last, width = self.features, read.indices[-1]
        kernel = linear.kernel[...]
        kernel = jnp.moveaxis(kernel.reshape((kernel.shape[0], heads, -1)), 1, 0)
        words = f"How the {self.name} of each head is read off the features."
        weight = self._give("weight", "W", kernel, width + last, words)
        right: Formula = Sum(width, product(read, weight))
        if linear.bias is not None:
            bias = linear.bias[...].reshape((heads, -1))
            words = "Added whatever the features are."
            right = Row((right, self._give("bias", "b", bias, last, words)), "+")
        value = split_heads(apply(linear, array), heads)
        result = "".join(self._name(value.shape, self.position + last))
        words = f"One {self.name} per head and position, {value.shape[-1]} numbers each."
        subscripts = f"{read.indices},{weight.indices}->{result}"
        self._follow(f"projected_{self.name}", lambda _: right, words, value, subscripts)

    def begin(self, value: Array) -> None:
        """Take them as they are."""
        self._follow(f"remembered_{self.name}", None, "Projected before, and remembered.", value)

    def adjust(self, norm: Any, rotary: Rotary | None, places: Array) -> None:
        """Norm queries or keys and rotate them by their positions."""
        if norm is not None:
            gain = Symbol("gamma", self.features, self.letter)
            words = "RMSNorm: divided by the root of the mean square of their features, which bounds scores."
            self._follow(
                f"normed_{self.name}",
                lambda before: Fraction(product(gain, before), Function("rms", (before,))),
                words,
                norm(self.stages[-1].value),
            )
        if rotary is not None:
            terms = self.course.terms
            assert terms is not None
            position = terms.query_position if self.name == "query" else terms.key_position
            # One row of positions, or one for each example.
            places = places.reshape((-1, places.shape[-1]) if places.size > places.shape[-1] else -1)
            words = f"{rotary!r} turns pairs of features by angles that grow with the position: products then"
            words += " depend on distance alone."
            self._follow(
                f"turned_{self.name}",
                lambda before: Function("turn", (before, position)),
                words,
                rotary(self.stages[-1].value, places),
            )

    def measure(self, metric: Bilinear, value: Array) -> None:
        """Let a metric change the letter of their features from e to a."""
        words = "Which features answer which, in place of like for like."
        form: Any = self.course.give("metric", Symbol("g"), metric.metric, "ea", words, "").formula.left
        before = "".join(self._name(self.stages[-1].value.shape, "ie"))
        subscripts = f"{before},{form.indices}->{''.join(self._name(value.shape, 'ia'))}"
        words = "The queries seen through the metric: what meets the keys."
        self.features = "a"
        self._follow("measured", lambda before: Sum("e", product(before, form)), words, value, subscripts)

    def finish(self, value: Array) -> None:
        """Add all stages; `value` is what entered the call."""
        symbol: Symbol | None = None
        for number, stage in enumerate(self.stages):
            is_last = stage is self.stages[-1]
            array = value if is_last else stage.value
            names = self._name(array.shape, self.position + stage.features)
            after = Symbol(self.letter, "".join(names), "" if is_last else str(number))
            self.course.add(
                self.name if is_last else stage.name,
                after,
                None if stage.right is None else stage.right(symbol or after),
                stage.words,
                FEATURES if self.name != "value" else "features of value",
                self.course.pick(array, names),
                names,
                stage.subscripts,
            )
            symbol = after

    def _follow(
        self, name: str, right: _Right, words: str, value: Array, subscripts: str | None = None
    ) -> None:
        self.stages.append(_Stage(name, right, words, value, self.features, subscripts))

    def _give(self, what: str, letter: str, array: Array, tail: str, words: str) -> Any:
        """Add a step of parameters, and return their symbol."""
        name, symbol = f"{self.name}_{what}", Symbol(letter, below=self.letter)
        return self.course.give(name, symbol, array, tail, words, "", self.name != "query").formula.left

    def _name(self, shape: tuple[int, ...], tail: str) -> tuple[str, ...]:
        return self.course.notation.name(shape, tail, of_keys=self.name != "query")
