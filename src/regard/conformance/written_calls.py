"""Calls of attention as text: sizes, options in NumPy, and the arrays that they draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Call = dict[str, Any]
"""Arguments by name: query (B, H, T, D), key (B, K, S, D), value (B, K, S, E) and whatever is asked for."""

FLOATING = ("query", "key", "value", "bias", "sinks")


@dataclass(frozen=True)
class Case:
    """One call, as the text of a program that draws it."""

    sizes: Mapping[str, int]
    options: Mapping[str, str] = field(default_factory=dict)
    edits: tuple[str, ...] = ()
    dtype: str = "float32"
    magnitude: float = 1.0

    def resize(self, **sizes: int) -> Case:
        return dataclasses.replace(self, sizes={**self.sizes, **sizes})

    def draw(self) -> Call:
        """Run the text: the same arrays each time."""
        room: dict[str, Any] = {**self.sizes, "np": np, "rng": np.random.default_rng(0)}
        exec("\n".join(self._lines()), room)
        call = {name: room[name] for name in ("query", "key", "value", *self.options)}
        dtype = np.dtype(self.dtype)  # bfloat16 too, which JAX makes known to NumPy
        return {name: array.astype(dtype) if name in FLOATING else array for name, array in call.items()}

    def _lines(self) -> list[str]:
        times = "" if self.magnitude == 1 else f" * {self.magnitude:g}"
        shapes = {"query": "(B, H, T, D)", "key": "(B, K, S, D)", "value": "(B, K, S, E)"}
        lines = [f"{name} = rng.normal(size={shape}){times}" for name, shape in shapes.items()]
        return [*lines, *(f"{name} = {text}" for name, text in self.options.items()), *self.edits]

    def write_program(self, imported: str, layout: str, passed: str, kind: str = "jax") -> str:
        """Return a program that draws the case and calls a function on it."""
        imports = {"jax": ["import jax", "import jax.numpy as jnp"], "torch": ["import torch"], "numpy": []}
        lines = ["# in a process with JAX_ENABLE_X64=1"] * (kind == "jax" and self.dtype == "float64")
        lines += ["import numpy as np", *imports[kind], imported, "", "rng = np.random.default_rng(0)"]
        lines += [f"{', '.join(self.sizes)} = {', '.join(map(str, self.sizes.values()))}", *self._lines()]
        plain, floating = {
            "jax": ("jnp.asarray({})", f"jnp.asarray({{}}, jnp.{self.dtype})"),
            "torch": ("torch.tensor({})", f"torch.tensor({{}}, dtype=torch.{self.dtype})"),
            "numpy": ("{}", f'{{}}.astype("{self.dtype}")'),
        }[kind]
        lacking = [letter for letter in "BH" if letter not in layout]
        axes = [letter for letter in "BHTD" if letter in layout]
        order = [axes.index(letter) for letter in layout]
        turn = "" if order == sorted(order) else f".transpose({', '.join(map(str, order))})"
        for name, option in self.draw().items():
            if isinstance(option, np.ndarray):
                leading = {"sinks": "", "lengths": "B", "segments": "B"}.get(name, "BH")
                index = "[0]" * sum(letter in leading for letter in lacking)
                text = name + index + turn * (name in ("query", "key", "value"))
                convert = floating if name in FLOATING else plain
                if convert.format(text) != name:
                    lines.append(f"{name} = {convert.format(text)}")
        return "\n".join([*lines, f"result = {passed}"])
