"""Index notation: contractions in words, and their evaluation."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array, ArrayLike
from regard.theory import operands as operand


@dataclass(frozen=True)
class Contraction:
    """A contraction and the role of each index, made by `explain_einsum`; print it to read it in words.

    Example:
        >>> from regard import theory
        >>> theory.explain_einsum("hia,hja->hij").summed
        ('a',)
    """

    operands: tuple[str, ...]
    """The indices of each operand."""
    output: str
    """The indices of the result."""
    sizes: dict[str, int] | None
    """The size of every index, where arrays were given."""
    shapes: tuple[tuple[int, ...], ...] | None
    """The shapes of the operands, where arrays were given."""

    @property
    def indices(self) -> tuple[str, ...]:
        """Every index, in order of appearance."""
        return tuple(dict.fromkeys(_letters("".join(self.operands))))

    @property
    def summed(self) -> tuple[str, ...]:
        """Indices of operands that the result lacks."""
        return tuple(index for index in self.indices if index not in self.output)

    @property
    def batch(self) -> tuple[str, ...]:
        """Indices that several operands, all of them, and the result have: one product for each value."""
        if len(self.operands) == 1:
            return ()
        return tuple(i for i in _letters(self.output) if all(i in operand for operand in self.operands))

    @property
    def free(self) -> tuple[str, ...]:
        """The other indices of the result."""
        return tuple(index for index in _letters(self.output) if index not in self.batch)

    @property
    def diagonal(self) -> tuple[str, ...]:
        """Indices that one operand has twice: only its diagonal enters."""
        return tuple(i for i in self.indices if any(operand.count(i) > 1 for operand in self.operands))

    @property
    def multiplications(self) -> int | None:
        """Products of one term each in the plain evaluation, where sizes are known."""
        if self.sizes is None:
            return None
        terms = math.prod(self.sizes.values()) * math.prod(self._ellipsis() or ())
        return terms * max(len(self.operands) - 1, 0)

    @property
    def output_shape(self) -> tuple[int, ...] | None:
        """The shape of the result, where sizes are known."""
        if self.sizes is None:
            return None
        before, dots, after = self.output.partition("...")
        shape = [self.sizes[i] for i in before]
        shape += list(self._ellipsis() or ()) if dots else []
        return (*shape, *(self.sizes[i] for i in after))

    def _ellipsis(self) -> tuple[int, ...] | None:
        if self.shapes is None:
            return None
        pairs = zip(self.operands, self.shapes, strict=True)
        return np.broadcast_shapes(*(_split(operand, shape)[1] for operand, shape in pairs))

    def __str__(self) -> str:
        names = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        factors = " ".join(f"{names[n % 26]}{_script(operand)}" for n, operand in enumerate(self.operands))
        sum_sign = f"sum_{''.join(self.summed)} " if self.summed else ""
        result = f"R{_script(self.output)}"
        lines = [f"{result} = {sum_sign}{factors}"]
        contracted = [i for i in self.summed if sum(i in operand for operand in self.operands) > 1]
        alone = [i for i in self.summed if i not in contracted]
        for role, indices, meaning in (
            ("free", self.free, "one axis of the result each"),
            ("batch", self.batch, "shared: a product of its own for each value"),
            ("summed", contracted, "contracted: multiplied in pairs, then added up"),
            ("summed", alone, "in one operand only: added up, no product involved"),
            ("diagonal", self.diagonal, "twice in one operand: only its diagonal is read"),
        ):
            listed = ", ".join(i if self.sizes is None else f"{i} = {self.sizes[i]}" for i in indices)
            lines += [f"  {role:<9} {listed}: {meaning}"] if indices else []
        if any("..." in operand for operand in self.operands):
            axes = self._ellipsis()
            lines.append(f"  ...       leading axes that broadcast{'' if axes is None else f', {axes}'}")
        if self.shapes is not None:
            shapes = ", ".join(map(str, self.shapes))
            lines.append(
                f"  shapes    {shapes} -> {self.output_shape}, {self.multiplications} multiplications"
            )
        return "\n".join(lines)


def explain_einsum(subscripts: str, *arrays: Any) -> Contraction:
    """Say what every index of a contraction does: free, batch, summed or diagonal.

    Args:
        subscripts: as `jnp.einsum` takes them, one letter per axis, "..." for leading axes. Without "->" the
            result has the indices that appear once, in alphabetical order.
        *arrays: what would be contracted: anything with a shape. None given: indices alone are explained.

    Returns:
        A `Contraction`, to be printed or asked.

    Raises:
        TypeError: subscripts that are not a string.
        ValueError: subscripts that mean nothing, or do not fit the arrays; the index is named.

    Example:
        >>> import jax.numpy as jnp
        >>> import regard
        >>> print(regard.explain_einsum("hia,hja->hij", jnp.ones((2, 3, 5)), jnp.ones((2, 7, 5))))
        R^{hij} = sum_a A^{hia} B^{hja}
          free      i = 3, j = 7: one axis of the result each
          batch     h = 2: shared: a product of its own for each value
          summed    a = 5: contracted: multiplied in pairs, then added up
          shapes    (2, 3, 5), (2, 7, 5) -> (2, 3, 7), 210 multiplications

    Reference: Einstein, "Die Grundlage der allgemeinen Relativitaetstheorie", 1916, section 5, for the sum
    over repeated indices; indices here are summed where the result lacks them, repeated or not.
    """
    operands, output = _parse(subscripts)
    shapes = tuple(np.shape(array) for array in arrays) or None
    sizes = None if shapes is None else _measure(subscripts, operands, shapes)
    return Contraction(operands, output, sizes, shapes)


def contract(subscripts: str, *arrays: ArrayLike) -> Array:
    """Multiply arrays and add up over the indices that the result lacks.

    C = `contract("hia,hja->hij", A, B)`:  C^{hij} = sum_a A^{hia} B^{hja}

    Args:
        subscripts: as for `explain_einsum`.
        *arrays: floating-point arrays, one per operand; the common dtype is computed in, float32 at least.

    Returns:
        The result, in that dtype, at the highest precision of the device.

    Example:
        >>> from regard.theory import contract
        >>> contract("ia,ja->ij", [[1.0, 0.0], [0.0, 1.0]], [[1.0, 2.0]]).tolist()
        [[1.0], [2.0]]
    """
    operands, _ = _parse(subscripts)
    factors = operand.floating(**{f"operand {n}": array for n, array in enumerate(arrays)})
    _measure(subscripts, operands, tuple(array.shape for array in factors))
    return jnp.einsum(subscripts, *factors, precision=jax.lax.Precision.HIGHEST)


def _letters(text: str) -> str:
    return text.replace(".", "")


def _script(indices: str) -> str:
    return f"^{{{indices}}}" if indices else ""


def _parse(subscripts: str) -> tuple[tuple[str, ...], str]:
    if not isinstance(subscripts, str):
        raise TypeError(f"subscripts: expected a string such as 'ia,ja->ij', got {subscripts!r}")
    text = subscripts.replace(" ", "")
    inputs, arrow, output = text.partition("->")
    operands = tuple(inputs.split(","))
    for part in (*operands, output):
        strange = re.sub(r"[A-Za-z]", "", part.replace("...", "", 1))
        if strange:
            raise ValueError(
                f"subscripts: expected letters, at most one '...' per operand, ',' and one '->';"
                f" got {strange!r} in {subscripts!r}"
            )
    every = "".join(operands)
    if not arrow:
        once = sorted(index for index in set(_letters(every)) if every.count(index) == 1)
        output = ("..." if "..." in every else "") + "".join(once)
    for index in _letters(output):
        if index not in every:
            raise ValueError(
                f"subscripts: index {index!r} of the result is in no operand of {subscripts!r};"
                " add it to an operand or leave it out"
            )
        if output.count(index) > 1:
            raise ValueError(
                f"subscripts: index {index!r} is twice in the result of {subscripts!r};"
                " an axis has one index, and an index one axis"
            )
    if "..." in every and "..." not in output:
        raise ValueError(f"subscripts: '...' is in an operand, not in the result, of {subscripts!r}; add it")
    if "..." in output and "..." not in every:
        raise ValueError(f"subscripts: '...' is in the result of {subscripts!r} only; add it to an operand")
    return operands, output


def _split(operand: str, shape: tuple[int, ...]) -> tuple[dict[int, str], tuple[int, ...]]:
    """Find the index of each named axis, and the sizes of the axes under '...'."""
    before, _, after = operand.partition("...")
    named = dict(enumerate(before))
    named |= {len(shape) - len(after) + n: index for n, index in enumerate(after)}
    return named, tuple(size for axis, size in enumerate(shape) if axis not in named)


def _measure(
    subscripts: str, operands: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]
) -> dict[str, int]:
    """Find the size of every index."""
    if len(operands) != len(shapes):
        raise ValueError(
            f"arrays: expected {len(operands)}, one per operand of {subscripts!r}; got {len(shapes)}"
        )
    sizes: dict[str, tuple[int, int]] = {}
    leading = []
    for number, (indices, shape) in enumerate(zip(operands, shapes, strict=True)):
        count = len(_letters(indices))
        if len(shape) < count or (len(shape) > count and "..." not in indices):
            least = "at least " if "..." in indices else ""
            raise ValueError(
                f"operand {number}: expected {least}{count} axes, one per index of {indices!r},"
                f" got {len(shape)}, shape {shape}"
            )
        named, rest = _split(indices, shape)
        leading.append(rest)
        for axis, index in named.items():
            size, first = sizes.setdefault(index, (shape[axis], number))
            if size != shape[axis]:
                raise ValueError(
                    f"operand {number}: expected size {size} for index {index!r}, as in operand {first};"
                    f" got {shape[axis]}, shape {shape}"
                )
    try:
        np.broadcast_shapes(*leading)
    except ValueError:
        raise ValueError(f"operands: expected axes under '...' that broadcast, got {leading}") from None
    return {index: size for index, (size, _) in sizes.items()}
