"""Run a function on arrays of JAX, NumPy or PyTorch: output, lse, and gradients where there are some."""

import importlib
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
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


Runner = Callable[[Call, Array, Array, bool], Run]
"""The same, on NumPy's arrays: from a call, cotangents of output and lse, and whether gradients are asked."""


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


def run_with_jax(apply: Apply) -> Runner:
    """Run JAX, compiled where that is possible: one program for calls that differ in numbers alone."""
    compiled_by_kind: dict[str, tuple[Any, Any]] = {}

    def run(arguments: Call, d_output: Array, d_lse: Array, differentiate: bool) -> Run:
        with jax.enable_x64(arguments["query"].dtype == np.float64):
            arrays = {name: jnp.asarray(x) for name, x in arguments.items() if isinstance(x, np.ndarray)}
            static = {name: option for name, option in arguments.items() if name not in arrays}
            kind = repr(([(name, x.shape, x.dtype) for name, x in arrays.items()], static))
            if "rng" in static:
                static["rng"] = jax.random.key(static["rng"])
            inputs = {name: arrays.pop(name) for name in FLOATING if name in arrays}

            def forward(inputs: Call, arrays: Call) -> tuple[Any, Any]:
                return apply({**static, **arrays, **inputs})

            def both_ways(inputs: Call, arrays: Call, d_output: Any, d_lse: Any) -> Any:
                (output, lse), pull = jax.vjp(lambda inputs: forward(inputs, arrays), inputs)
                back = None
                if lse is not None:
                    turned = turn(d_lse, lse.shape)
                    back = jnp.zeros_like(lse) if turned is None else turned.astype(lse.dtype)
                return output, lse, pull((d_output.astype(output.dtype), back))[0]

            programs = jax.jit(both_ways), jax.jit(forward)
            compiled, compiled_forward = compiled_by_kind.setdefault(kind, programs)
            refusal, cotangents = "", (jnp.asarray(d_output), jnp.asarray(d_lse))
            for program, extra in ((compiled, cotangents), (compiled_forward, ()), (both_ways, cotangents)):
                if differentiate or not extra:
                    try:
                        return Run(
                            *program(inputs, arrays, *extra), gradient_refusal="" if extra else refusal
                        )
                    except Exception as error:  # it may run without gradients, or uncompiled
                        refusal = describe(error) if extra else refusal
            return Run(*forward(inputs, arrays), gradient_refusal=refusal)

    return run


def run_with_numpy(apply: Apply) -> Runner:
    """Run NumPy, which has no gradients."""
    return lambda arguments, *_: Run(*apply(arguments))


def run_with_torch(apply: Apply) -> Runner:
    """Run PyTorch on the CPU, with gradients by autograd."""
    torch: Any = importlib.import_module("torch")

    def make_tensor(option: Any) -> Any:
        if not isinstance(option, np.ndarray):
            return option
        if option.dtype.name == "bfloat16":
            return torch.from_numpy(option.astype(np.float32)).to(torch.bfloat16)
        return torch.from_numpy(np.array(option))

    def run(arguments: Call, d_output: Array, d_lse: Array, differentiate: bool) -> Run:
        tensors = {name: make_tensor(option) for name, option in arguments.items()}
        inputs = {name: tensors[name].requires_grad_(differentiate) for name in FLOATING if name in tensors}
        if "rng" in tensors:
            torch.manual_seed(tensors.pop("rng"))
        try:
            output, lse = apply(tensors)
        except Exception as error:
            if not differentiate:
                raise
            return replace(run(arguments, d_output, d_lse, False), gradient_refusal=describe(error))
        results = Run(_Tensor(output), None if lse is None else _Tensor(lse))
        if not differentiate or 0 in output.shape:
            return results
        try:
            loss = (output * torch.from_numpy(d_output).to(output.dtype)).sum()
            if lse is not None and lse.requires_grad:
                back = torch.from_numpy(d_lse).reshape(lse.shape).to(lse.dtype)
                loss = loss + torch.where(lse > -torch.inf, lse * back, 0).sum()
            pulled = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
            for (name, tensor), gradient in zip(inputs.items(), pulled, strict=True):
                results.gradients[name] = _Tensor(torch.zeros_like(tensor) if gradient is None else gradient)
        except Exception as error:
            results.gradient_refusal = describe(error)
        return results

    return run


class _Tensor:
    """A tensor of PyTorch as NumPy reads one, with the name of its dtype."""

    def __init__(self, tensor: Any):
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(tensor.shape)
        self._numbers = tensor.detach().double().numpy() if tensor.is_floating_point() else tensor.numpy()

    def __array__(self, *_: Any, **__: Any) -> Array:
        return self._numbers


RUNNERS = {"jax": run_with_jax, "numpy": run_with_numpy, "torch": run_with_torch}


def turn(array: Any, shape: tuple[int, ...]) -> Any:
    """Give an array another order of axes, found by their sizes; return None where no order has the shape."""
    slim = array.reshape([size for size in array.shape if size > 1])
    turned = (slim.transpose(order) for order in permutations(range(slim.ndim)))
    wanted = tuple(size for size in shape if size > 1)
    return next((way.reshape(shape) for way in turned if way.shape == wanted), None)
