"""Run a function on arrays of JAX, NumPy or PyTorch: output, lse, and gradients where there are some."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.conformance.written_calls import FLOATING, Array, Call

Apply = Callable[[Call], tuple[Any, Any]]
"""The function under check, from a call to its output and lse."""

# Settings of JAX that belong to a thread.
SETTINGS = (jax.default_device, jax.default_matmul_precision, jax.debug_nans)
SETTINGS += (jax.numpy_dtype_promotion, jax.numpy_rank_promotion)


@dataclass
class Run:
    """Results of a function, as it returned them."""

    output: Any
    lse: Any = None
    gradients: dict[str, Any] = field(default_factory=dict)
    gradient_refusal: str = ""


class LateError(Exception):
    """No answer came in time."""


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
        except BaseException as error:  # a function under check may even ask Python to exit
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise LateError(f"no answer within {seconds:g} s")
    return results[0]


def describe(error: BaseException) -> str:
    """Return an error's type and first line."""
    if isinstance(error, LateError):
        return str(error)
    words = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {words[0]}"[:400].rstrip(": ")


class JaxRunner:
    """Runs of JAX, compiled where that is possible: one program for calls that differ in numbers alone."""

    def __init__(self, apply: Apply):
        self.apply = apply
        self._compiled: dict[str, tuple[Any, Any]] = {}

    def __call__(self, arguments: Call, d_output: Array, d_lse: Array, differentiate: bool) -> Run:
        """Call the function, with its gradients if that is asked and can be."""
        with jax.enable_x64(arguments["query"].dtype == np.float64):
            arrays = {name: jnp.asarray(x) for name, x in arguments.items() if isinstance(x, np.ndarray)}
            static = {name: option for name, option in arguments.items() if name not in arrays}
            program = repr(([(name, x.shape, x.dtype) for name, x in arrays.items()], static))
            if "rng" in static:
                static["rng"] = jax.random.key(static["rng"])
            inputs = {name: arrays.pop(name) for name in FLOATING if name in arrays}

            def forward(inputs: Call, arrays: Call) -> tuple[Any, Any]:
                return self.apply({**static, **arrays, **inputs})

            def both_ways(inputs: Call, arrays: Call, d_output: Any, d_lse: Any) -> Any:
                (output, lse), pull = jax.vjp(lambda inputs: forward(inputs, arrays), inputs)
                back = None
                if lse is not None:
                    turned = turn(d_lse, lse.shape)
                    back = jnp.zeros_like(lse) if turned is None else turned.astype(lse.dtype)
                return output, lse, pull((d_output.astype(output.dtype), back))[0]

            programs = jax.jit(both_ways), jax.jit(forward)
            compiled, compiled_forward = self._compiled.setdefault(program, programs)
            refusal = ""
            if differentiate:
                try:
                    return Run(*compiled(inputs, arrays, d_output, d_lse))
                except Exception as error:
                    refusal = describe(error)
            try:
                return Run(*compiled_forward(inputs, arrays), gradient_refusal=refusal)
            except Exception:  # it may run uncompiled
                pass
            if differentiate:
                try:
                    return Run(*both_ways(inputs, arrays, jnp.asarray(d_output), jnp.asarray(d_lse)))
                except Exception as error:
                    refusal = describe(error)
            return Run(*forward(inputs, arrays), gradient_refusal=refusal)


class NumpyRunner:
    """Runs of NumPy, which has no gradients."""

    def __init__(self, apply: Apply):
        self.apply = apply

    def __call__(self, arguments: Call, d_output: Array, d_lse: Array, differentiate: bool) -> Run:
        """Call the function."""
        return Run(*self.apply(arguments))


class TorchRunner:
    """Runs of PyTorch on the CPU, with gradients by autograd."""

    def __init__(self, apply: Apply):
        self.apply = apply
        self.torch = __import__("torch")

    def __call__(self, arguments: Call, d_output: Array, d_lse: Array, differentiate: bool) -> Run:
        """Call the function, with its gradients if that is asked and can be."""
        torch = self.torch
        tensors = {name: self._make_tensor(option) for name, option in arguments.items()}
        inputs = {name: tensors[name].requires_grad_(differentiate) for name in FLOATING if name in tensors}
        if "rng" in tensors:
            torch.manual_seed(tensors.pop("rng"))
        try:
            output, lse = self.apply(tensors)
        except Exception as error:
            if not differentiate:
                raise
            run = self(arguments, d_output, d_lse, differentiate=False)
            run.gradient_refusal = describe(error)
            return run
        run = Run(_Tensor(output), None if lse is None else _Tensor(lse))
        if not differentiate or 0 in output.shape:
            return run
        try:
            loss = (output * torch.from_numpy(d_output).to(output.dtype)).sum()
            if lse is not None and lse.requires_grad:
                back = torch.from_numpy(d_lse).reshape(lse.shape).to(lse.dtype)
                loss = loss + torch.where(lse > -torch.inf, lse * back, 0).sum()
            pulled = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
            for (name, tensor), gradient in zip(inputs.items(), pulled, strict=True):
                run.gradients[name] = _Tensor(torch.zeros_like(tensor) if gradient is None else gradient)
        except Exception as error:
            run.gradient_refusal = describe(error)
        return run

    def _make_tensor(self, option: Any) -> Any:
        """Return an array as a tensor; numbers stay what they are."""
        if not isinstance(option, np.ndarray):
            return option
        if option.dtype.name == "bfloat16":
            return self.torch.from_numpy(option.astype(np.float32)).to(self.torch.bfloat16)
        return self.torch.from_numpy(np.array(option))


class _Tensor:
    """A tensor of PyTorch as NumPy reads one, with the name of its dtype."""

    def __init__(self, tensor: Any):
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(tensor.shape)
        self._numbers = tensor.detach().double().numpy() if tensor.is_floating_point() else tensor.numpy()

    def __array__(self, *_: Any, **__: Any) -> Array:
        return self._numbers


RUNNERS = {"jax": JaxRunner, "numpy": NumpyRunner, "torch": TorchRunner}


def turn(array: Any, shape: tuple[int, ...]) -> Any:
    """Give an array another order of axes, found by their sizes; return None where no order has the shape."""
    slim = array.reshape([size for size in array.shape if size > 1])
    turned = (slim.transpose(order) for order in permutations(range(slim.ndim)))
    wanted = tuple(size for size in shape if size > 1)
    return next((way.reshape(shape) for way in turned if way.shape == wanted), None)
