"""The function that is checked, called on arrays of its own kind and layout, whatever it does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.conformance.calls import FLOATING, Array, Call
from regard.conformance.features import Features, pass_options

KINDS = ("jax", "numpy", "torch")
# Settings that belong to a thread.
SETTINGS = (
    jax.default_device,
    jax.default_matmul_precision,
    jax.numpy_dtype_promotion,
    jax.numpy_rank_promotion,
    jax.debug_nans,
)
Run = tuple[Any, Any, dict[str, Any]]


@dataclass
class Answer:
    """What a function gave: numbers with the axes of `Call`, or why there are none."""

    output: Array | None = None
    lse: Array | None = None
    gradients: dict[str, Array] = field(default_factory=dict)
    dtype: str = ""
    lse_dtype: str = ""
    refusal: str = ""  # an error, or that no answer came
    fault: str = ""  # an answer that is no attention: other shapes, integers
    gradient_refusal: str = ""
    changed: tuple[str, ...] = ()  # inputs that it wrote to

    @property
    def reason(self) -> str:
        """Why there is no output."""
        return self.refusal or self.fault


class LateError(Exception):
    """No answer came in time."""


def describe(error: BaseException) -> str:
    """Return an error's type and first line."""
    words = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {words[0]}"[:400].rstrip(": ")


def call_in_time(function: Callable[[], Any], seconds: float) -> Any:
    """Call a function in a thread, under this one's settings of JAX; leave it behind when it takes longer."""
    results: list[Any] = []
    errors: list[BaseException] = []
    settings = [(manager, getattr(jax.config, f"jax_{manager.__name__}")) for manager in SETTINGS]

    def work() -> None:
        try:
            with ExitStack() as stack, np.errstate(all="ignore"):
                for manager, setting in settings:
                    stack.enter_context(manager(setting))
                results.append(function())
        except BaseException as error:  # a function under test may even ask Python to exit
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise LateError(f"no answer within {seconds:g} s")
    return results[0]


class Subject:
    """A function of attention, its layout, the features that it takes and the kind of its arrays."""

    def __init__(self, fn: Callable[..., Any], layout: str, features: Features, kind: str, seconds: float):
        self.fn, self.layout, self.features, self.kind, self.seconds = fn, layout, features, kind, seconds
        self._compiled: dict[Any, tuple[Any, Any]] = {}

    def takes(self, names: Any) -> bool:
        """Return whether all features of these names can be passed."""
        return set(names) <= set(self.features)

    def arrange(self, name: str, array: Array) -> Array:
        """Give an argument the function's axes: its layout, or the leading ones that the layout has."""
        if name in ("query", "key", "value"):
            leading = tuple(0 if letter not in self.layout else slice(None) for letter in "BH")
            own = [letter for letter in "BHTD" if letter in self.layout]
            return array[leading].transpose([own.index(letter) for letter in self.layout])
        if name in ("mask", "bias"):
            return array[tuple(0 if letter not in self.layout else slice(None) for letter in "BH")]
        return array[0] if name in ("lengths", "segments") and "B" not in self.layout else array

    def restore(self, array: Array) -> Array:
        """Give what is shaped as query the axes (B, H, T, D)."""
        own = [letter for letter in "BHTD" if letter in self.layout]
        array = array.transpose([self.layout.index(letter) for letter in own])
        return np.expand_dims(
            array, [axis for axis, letter in enumerate("BHTD") if letter not in self.layout]
        )

    def answer(self, call: Call, d_output: Array, d_lse: Array, *, differentiate: bool = True) -> Answer:
        """Call the function; nothing that it does is raised here."""
        given = {name: self._own(name, value) for name, value in call.items()}
        kept = {name: np.array(value) for name, value in given.items() if isinstance(value, np.ndarray)}
        run = {"jax": self._run_jax, "numpy": self._run_numpy, "torch": self._run_torch}[self.kind]
        turned = self.arrange("query", d_output), d_lse
        answer = Answer()
        try:
            output, lse, gradients = call_in_time(
                lambda: run(given, *turned, differentiate, answer), self.seconds
            )
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return Answer(refusal=str(error) if isinstance(error, LateError) else describe(error))
        answer.changed = tuple(
            name for name, value in kept.items() if not np.array_equal(given[name], value, equal_nan=True)
        )
        self._read(answer, call, output, lse, gradients)
        return answer

    def _own(self, name: str, value: Any) -> Any:
        return np.ascontiguousarray(self.arrange(name, value)) if isinstance(value, np.ndarray) else value

    def _read(self, answer: Answer, call: Call, output: Any, lse: Any, gradients: Mapping[str, Any]) -> None:
        """Check what came, and give it the axes of the call."""
        shape = (*call["query"].shape[:-1], call["value"].shape[-1])
        if not hasattr(output, "dtype"):
            answer.fault = f"an output of {type(output).__name__}"
            return
        expected = self.arrange("query", np.empty(shape)).shape
        answer.dtype, number = str(output.dtype), np.asarray(output)
        if number.shape != expected:
            answer.fault = f"an output of shape {number.shape}, not {expected}"
        elif number.dtype.kind in "iub":
            answer.fault = f"an output of {answer.dtype}"
        else:
            answer.output = self.restore(_widen(number))
        if lse is not None:
            answer.lse_dtype, number = str(lse.dtype), _widen(np.asarray(lse))
            wanted = shape[:-1]
            number = number.reshape([size for size in number.shape if size > 1])
            slim = [size for size in wanted if size > 1]
            orders = [
                order
                for order in permutations(range(number.ndim))
                if number.transpose(order).shape == tuple(slim)
            ]
            if orders:
                answer.lse = number.transpose(orders[0]).reshape(wanted)
            else:
                answer.fault = answer.fault or f"an lse of shape {np.shape(lse)}"
        for name, gradient in gradients.items():
            number = _widen(np.asarray(gradient))
            if name in ("query", "key", "value"):
                number = self.restore(number)
            answer.gradients[name] = number.reshape(call[name].shape)

    def split(self, result: Any, asked: bool) -> tuple[Any, Any]:
        """Tell the output from lse, of which one came first and the other, if asked for, next."""
        while isinstance(result, tuple | list) and len(result) == 1:
            result = result[0]
        if not isinstance(result, tuple | list) or not result:
            return result, None
        lse = result[1] if asked else None
        while isinstance(lse, tuple | list | dict):
            lse = next(iter(lse.values() if isinstance(lse, dict) else lse))
        return result[0], lse

    def _apply(self, given: Call) -> tuple[Any, Any]:
        options = {name: value for name, value in given.items() if name not in ("query", "key", "value")}
        if "grouped" in self.features and given["key"].shape != given["query"].shape:
            options["grouped"] = True
        passed = pass_options(self.features, options)
        return self.split(self.fn(given["query"], given["key"], given["value"], **passed), "lse" in options)

    def _run_numpy(
        self, given: Call, d_output: Array, d_lse: Array, differentiate: bool, answer: Answer
    ) -> Run:
        output, lse = self._apply(given)
        return output, lse, {}

    def _run_torch(
        self, given: Call, d_output: Array, d_lse: Array, differentiate: bool, answer: Answer
    ) -> Run:
        torch = __import__("torch")
        tensors = {name: _as_tensor(torch, value) for name, value in given.items()}
        inputs = {name: tensors[name].requires_grad_(differentiate) for name in FLOATING if name in tensors}
        if "rng" in tensors:
            torch.manual_seed(tensors.pop("rng"))
        output, lse = self._apply(tensors)
        gradients = {}
        try:
            if differentiate and 0 not in output.shape:
                loss = (output * torch.from_numpy(d_output).to(output.dtype)).sum()
                if lse is not None and lse.requires_grad:
                    back = torch.from_numpy(d_lse).reshape(lse.shape).to(lse.dtype)
                    loss = loss + torch.where(lse > -torch.inf, lse * back, 0).sum()
                pulled = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
                gradients = {
                    name: torch.zeros_like(inputs[name]) if gradient is None else gradient
                    for name, gradient in zip(inputs, pulled, strict=True)
                }
        except Exception as error:
            answer.gradient_refusal = describe(error)
        return tuple(jax.tree.map(lambda x: _Tensor(x), (output, lse, gradients)))

    def _run_jax(
        self, given: Call, d_output: Array, d_lse: Array, differentiate: bool, answer: Answer
    ) -> Run:
        double = given["query"].dtype == np.float64
        with jax.enable_x64(double):
            arrays = {
                name: jnp.asarray(value) for name, value in given.items() if isinstance(value, np.ndarray)
            }
            static = {name: value for name, value in given.items() if name not in arrays}
            if "rng" in static:
                static["rng"] = jax.random.key(static["rng"])
            inputs = {name: arrays.pop(name) for name in FLOATING if name in arrays}

            # One program for all calls that differ in numbers alone.
            shapes = [(name, array.shape, str(array.dtype)) for name, array in {**arrays, **inputs}.items()]
            known = repr((shapes, {name: given[name] for name in static}))

            def value(inputs: Call, arrays: Call) -> tuple[Any, Any]:
                return self._apply({**static, **arrays, **inputs})

            def value_and_gradients(inputs: Call, arrays: Call, d_output: Any, d_lse: Any) -> Run:
                (output, lse), pull = jax.vjp(lambda inputs: value(inputs, arrays), inputs)
                back = d_output.astype(output.dtype)
                back_lse = None if lse is None else _turn(d_lse, lse.shape).astype(lse.dtype)
                return output, lse, pull((back, back_lse))[0]

            compiled, compiled_value = self._compiled.setdefault(
                known, (jax.jit(value_and_gradients), jax.jit(value))
            )
            if differentiate:
                try:
                    return compiled(inputs, arrays, d_output, d_lse)
                except Exception as error:
                    answer.gradient_refusal = describe(error)
            try:
                return (*compiled_value(inputs, arrays), {})
            except Exception:
                pass
            if differentiate:
                try:
                    found = value_and_gradients(inputs, arrays, jnp.asarray(d_output), jnp.asarray(d_lse))
                    answer.gradient_refusal = ""
                    return found
                except Exception as error:
                    answer.gradient_refusal = describe(error)
            return (*value(inputs, arrays), {})


class _Tensor:
    """A tensor of PyTorch as NumPy reads one, with the name of its dtype."""

    def __init__(self, tensor: Any):
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(tensor.shape)
        self._numbers = tensor.detach().double().numpy() if tensor.is_floating_point() else tensor.numpy()

    def __array__(self, *_: Any, **__: Any) -> Array:
        return self._numbers


def _as_tensor(torch: Any, value: Any) -> Any:
    """Return an array as a tensor; numbers stay what they are."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(value))


def _turn(array: Any, shape: tuple[int, ...]) -> Any:
    """Give an array (B, H, T) the axes of an lse, found by their sizes."""
    slim = array.reshape([size for size in array.shape if size > 1])
    wanted = tuple(size for size in shape if size > 1)
    for order in permutations(range(slim.ndim)):
        if tuple(slim.shape[axis] for axis in order) == wanted:
            return slim.transpose(order).reshape(shape)
    return jnp.zeros(shape, array.dtype)


def _widen(array: Array) -> Array:
    """Return numbers in float64 at least."""
    return array.astype(np.float64) if array.dtype.kind not in "iub" else array
