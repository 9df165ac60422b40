"""Queries, keys and values of a layer, derived from its inputs."""

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


class _Stage(NamedTuple):
    """One stage of queries, keys or values, before it has a symbol."""

    name: str
    right: Formula | None
    words: str
    value: Array
    subscripts: str | None = None


class Line:
    """Stages of queries, keys or values, each added when the next one comes; the last has the plain name."""

    newest: _Stage

    def __init__(self, course: Course, name: str, letter: str, position: str, features: str):
        self.course, self.name, self.letter = course, name, letter
        self.position, self.features = position, features
        self.count = 0

    def project(self, linear: nnx.Linear, apply: Any, read: Symbol, array: Array, heads: int) -> None:
        """Make them from rows of features, by a tensor that has heads."""
        width = read.indices[-1]
        kernel = linear.kernel[...]
        kernel = jnp.moveaxis(kernel.reshape((kernel.shape[0], heads, -1)), 1, 0)
        words = f"How the {self.name} of each head is read off the features."
        weight = self._give("weight", "W", kernel, width + self.features, words)
        right: Formula = Sum(width, product(read, weight))
        if linear.bias is not None:
            bias = linear.bias[...].reshape((heads, -1))
            words = "Added whatever the features are."
            right = Row((right, self._give("bias", "b", bias, self.features, words)), "+")
        value = split_heads(apply(linear, array), heads)
        words = f"One {self.name} per head and position, {value.shape[-1]} numbers each."
        subscripts = f"{read.indices},{weight.indices}->{''.join(self._name(value.shape))}"
        self.newest = _Stage(f"projected_{self.name}", right, words, value, subscripts)

    def begin(self, value: Array) -> None:
        """Take them as they are."""
        self.newest = _Stage(f"remembered_{self.name}", None, "Projected before, and remembered.", value)

    def adjust(self, norm: Any, rotary: Rotary | None, positions: Array) -> None:
        """Norm queries or keys and rotate them by their positions."""
        if norm is not None:
            before, gain = self._add_newest(), Symbol("gamma", self.features, self.letter)
            right = Fraction(product(gain, before), Function("rms", (before,)))
            words = "RMSNorm: divided by the root of the mean square of their features, which bounds scores."
            self.newest = _Stage(f"normed_{self.name}", right, words, norm(self.newest.value))
        if rotary is not None:
            terms = self.course.terms
            assert terms is not None
            position = terms.query_position if self.name == "query" else terms.key_position
            right = Function("turn", (self._add_newest(), position))
            # One row of positions, or one for each example.
            is_shared = positions.size == positions.shape[-1]
            value = rotary(
                self.newest.value, positions.reshape(-1 if is_shared else (-1, positions.shape[-1]))
            )
            words = f"{rotary!r} turns pairs of features by angles that grow with the position: products then"
            self.newest = _Stage(f"turned_{self.name}", right, f"{words} depend on distance alone.", value)

    def measure(self, metric: Bilinear, value: Array) -> None:
        """Let a metric change the letter of their features from e to a."""
        before, words = self._add_newest(), "Which features answer which, in place of like for like."
        form = self.course.give("metric", Symbol("g"), metric.metric, "ea", words, "")
        right = Sum("e", product(before, form))
        self.features = "a"
        words = "The queries seen through the metric: what meets the keys."
        subscripts = f"{before.indices},{form.indices}->{''.join(self._name(value.shape))}"
        self.newest = _Stage("measured", right, words, value, subscripts)

    def finish(self, value: Array) -> None:
        """Add the last stage; `value` is what entered the call."""
        self._add(self.newest._replace(name=self.name, value=value), "")

    def _add_newest(self) -> Symbol:
        """Add the newest stage, which another one follows, and return its symbol."""
        symbol = self._add(self.newest, str(self.count))
        self.count += 1
        return symbol

    def _add(self, stage: _Stage, number: str) -> Symbol:
        names = self._name(stage.value.shape)
        symbol = Symbol(self.letter, below=number)
        unit = FEATURES if self.name != "value" else "features of value"
        value, add = self.course.pick(stage.value, names), self.course.add
        return add(stage.name, symbol, stage.right, stage.words, unit, value, names, stage.subscripts)

    def _give(self, what: str, letter: str, array: Array, tail: str, words: str) -> Symbol:
        """Add a step of parameters, and return their symbol."""
        name, symbol = f"{self.name}_{what}", Symbol(letter, below=self.letter)
        return self.course.give(name, symbol, array, tail, words, "", self.name != "query")

    def _name(self, shape: tuple[int, ...]) -> tuple[str, ...]:
        return self.course.notation.name(shape, self.position + self.features, of_keys=self.name != "query")
