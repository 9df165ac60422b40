"""Backend `cudnn`: NVIDIA's fused attention, through JAX, for the calls whose meaning it shares."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import regard.masks as masks
from regard.axes import Array
from regard.engine.backends.kernel_masks import (
    compute_by_tiles,
    find_documents,
    four_axes,
    read_cap,
    read_kernel_mask,
    refuses_call,
    row_bounds,
)
from regard.engine.backends.kernel_primitives import run_kernel
from regard.engine.call.problem import Problem
from regard.engine.platforms import Platform, find_platform, find_present

_NARROW = (jnp.bfloat16, jnp.float16)


# Of devices that are not here, whose programs are compiled ahead.
_CAPABILITIES = {"A100": "8.0", "L40": "8.9", "L4": "8.9", "H100": "9.0", "H200": "9.0", "B200": "10.0"}


def find_capability() -> tuple[int, int] | str:
    """Return the GPU's compute capability, 9.0 for Hopper, or why none serves."""
    return _read_capability(find_platform())


@functools.cache
def _read_capability(platform: Platform) -> tuple[int, int] | str:
    if platform.name != "gpu":
        return f"it needs an NVIDIA GPU, and this call is for a {platform.name}"
    kind, device = platform.device_kind, find_present(platform)
    listed = (number for name, number in _CAPABILITIES.items() if name in kind)
    capability = str(getattr(device, "compute_capability", next(listed, None)))
    try:
        major, minor = map(int, capability.split("."))
    except ValueError:
        return f"it needs an NVIDIA GPU, this is {kind or 'not said'}"
    if major < 8:
        return f"it needs compute capability 8.0, {kind} has {capability}"
    if device is None and (inner := _inner()) is not None:
        try:
            inner.check_cudnn_version()
        except RuntimeError as error:
            return f"to compile it for a GPU that is elsewhere takes its library: {error}"
    return major, minor


def refuses(problem: Problem) -> str | None:
    """Return why cuDNN or JAX's wrapper of it cannot serve this call, or None."""
    capability = find_capability()
    if isinstance(capability, str):
        return capability
    if _inner() is None:
        return f"JAX {jax.__version__} calls it in a way that is not known here"
    return (
        refuses_call(problem)
        or _refuses_options(problem)
        or _refuses_score(problem, capability)
        or _refuses_shapes(problem, capability)
        or _refuses_mask(problem, capability)
    )


def _refuses_options(problem: Problem) -> str | None:
    if problem.bias is not None:
        return "rows of -inf in a bias give NaN there, not 0"
    if problem.dropout_rate:
        return "its dropout draws another pattern every time it runs, which no gradient could draw again"
    if not problem.may_round_weights:
        return "it rounds weights to the inputs' dtype, and precision asks for more"
    return None


def _refuses_score(problem: Problem, capability: tuple[int, int]) -> str | None:
    cap = read_cap(problem)
    if isinstance(cap, str) or cap is None:
        return cap
    if not _takes_scores(_inner()):
        return f"JAX {jax.__version__} gives it no score functions, 0.12 does"
    return _refuses_age(capability, 91300, "a softcap")


def _refuses_age(capability: tuple[int, int], version: int, what: str) -> str | None:
    """Return what is too old for something that came with Hopper."""
    if capability < (9, 0):
        return f"for {what} it needs compute capability 9.0, this is {capability[0]}.{capability[1]}"
    if (installed := _inner().check_cudnn_version()) < version:
        return f"for {what} it needs cuDNN {version}, this is {installed}"
    return None


def _refuses_shapes(problem: Problem, capability: tuple[int, int]) -> str | None:
    dtypes = {array.dtype for array in (problem.query, problem.key, problem.value)}
    if len(dtypes) > 1 or not dtypes <= {np.dtype(dtype) for dtype in _NARROW}:
        names = ", ".join(sorted(dtype.name for dtype in dtypes))
        return f"it takes bfloat16 or float16 alone, got {names}"
    widest = 256 if capability >= (9, 0) else 128
    if problem.D != problem.E:
        return f"it takes values as wide as keys, got E = {problem.E}, D = {problem.D}"
    if problem.D % 8 or problem.D not in range(1, widest + 1):
        return f"it takes head widths up to {widest} that 8 divides, got {problem.D}"
    return None


def _refuses_mask(problem: Problem, capability: tuple[int, int]) -> str | None:
    kernel_mask = read_kernel_mask(problem)
    if isinstance(kernel_mask, str):
        return kernel_mask
    if kernel_mask.after not in (None, 0) or (kernel_mask.before is not None and kernel_mask.after is None):
        band = f"{kernel_mask.before} keys before to {kernel_mask.after} after"
        return f"it knows no band of {band} a query's row"
    if kernel_mask.before is not None and kernel_mask.before < 0:
        return "rows without a key are not 0 there"
    if kernel_mask.after == 0 and problem.T > problem.S:
        return "its causal mask takes no more queries than keys"
    if kernel_mask.keys_below is not None and kernel_mask.before is not None:
        return "it takes lengths or a window, not both"
    bounds, documents = row_bounds(kernel_mask, problem), find_documents(kernel_mask, problem)
    if isinstance(bounds, str):
        return bounds
    if documents is None or isinstance(documents, str):
        return documents
    if kernel_mask.keys_below is not None or kernel_mask.before is not None:
        return "it takes documents, or lengths or a window, not both"
    if math.prod((*problem.leading, problem.T, problem.D)) >= 2**31:
        return "offsets of documents in arrays of 2^31 numbers are beyond its int32"
    return _refuses_age(capability, 90600, "documents")


def run(problem: Problem) -> tuple[Array, dict[str, Array]]:
    """Compute the output by cuDNN; derivatives beyond the first gradient are those of `tiled`."""
    kernel_mask, cap = read_kernel_mask(problem), read_cap(problem)
    assert not isinstance(kernel_mask, str)  # else it was refused
    assert not isinstance(cap, str)
    bounds, documents = row_bounds(kernel_mask, problem), find_documents(kernel_mask, problem)
    assert not isinstance(bounds, str)
    assert not isinstance(documents, str)
    batch = problem.leading[:-1]
    # Keys after the last query's own are nobody's: what they hold, NaN even, is not to be read.
    reach = problem.S if kernel_mask.after is None else min(problem.S, problem.T)
    arrays = [
        four_axes(array, batch)[:, :, :rows]
        for array, rows in ((problem.query, problem.T), (problem.key, reach), (problem.value, reach))
    ]
    data = [jnp.asarray(numbers) for numbers in documents or (() if bounds is None else (bounds,))]
    # JAX tells its gradient the derivative of a score function and not the function, which it needs, too.
    # Beyond 128 columns, JAX's own tests ask for gradients on Hopper alone.
    widest = 256 if find_capability()[0] == 9 else 128
    kernel = Cudnn(
        float(problem.scale),
        kernel_mask.after == 0,
        kernel_mask.before,
        packed=documents is not None,
        cap=cap,
        widest=widest if cap is None else 0,
    )
    return run_kernel(problem, kernel, arrays, data)


@dataclass(frozen=True)
class Cudnn:
    """One kind of call, with data: starts and lengths of documents, or one length per batch row, or none."""

    scale: float
    causal: bool
    before: int | None
    packed: bool
    cap: float | None
    widest: int

    def forward(self, lse: bool, query: Array, key: Array, value: Array, *data: Array) -> list[Array]:
        """Compute the output by cuDNN; keys beyond the length are not read."""
        arrays, options = self._prepare(query, key, value, data)
        outputs = _inner()._dot_product_attention_fwd(*arrays, *options, lse)
        output, *statistics = outputs if lse else (outputs,)
        if self.packed:
            output = output.reshape((*query.shape[:3], -1))
            statistics = [stat.reshape(-1)[_places(query, *data)] for stat in statistics]
        elif data:
            some = (data[0] > 0)[:, None, None]
            output = jnp.where(some[..., None], output, 0)
            statistics = [jnp.where(some, stat, -jnp.inf) for stat in statistics]
        return [output, *statistics]

    def backward(
        self, arrays: Sequence[Array], data: Sequence[Array], output: Array, lse: Array, cotangent: Array
    ) -> list[Array]:
        """Compute the gradients by cuDNN."""
        query, key, value = arrays
        operands, options = self._prepare(query, key, value, data)
        if self.packed:
            output = _heads_as_rows(output, query.shape[1])
            cotangent = _heads_as_rows(cotangent, query.shape[1])
            places = _places(query, *data)
            length = query.shape[2]
            every = jnp.zeros(places.size * data[0].shape[1], lse.dtype)
            lse = every.at[places].set(lse).reshape((-1, 1, length))
        saved = (*operands, lse, output)
        grads = _inner()._dot_product_attention_bwd_rule(*options, False, saved, cotangent)[:3]
        if self.packed:
            pairs = zip(grads, arrays, strict=True)
            return [grad.reshape((*array.shape[:2], -1, *array.shape[2:])).sum(2) for grad, array in pairs]
        if data:
            there = _there(key, data[0])
            grads = [grads[0], *(jnp.where(there, grad, 0) for grad in grads[1:])]
        return list(grads)

    def _prepare(
        self, query: Array, key: Array, value: Array, data: Sequence[Array]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return what JAX's inner functions take: arrays, and options as far as they go alike."""
        inner = _inner()
        none = jnp.zeros(0, query.dtype)
        limits = (none, none, none, none)
        layout, padded = "BNTH", False
        if self.packed:
            # Offsets count numbers of arrays with the length before heads: heads become rows of the batch.
            heads = query.shape[1]
            query = _heads_as_rows(query, heads)
            key, value = _heads_as_rows(key, heads), _heads_as_rows(value, heads)
            starts = jnp.repeat(data[0], query.shape[0] // len(data[0]), 0)
            lengths = jnp.repeat(data[1], query.shape[0] // len(data[1]), 0)
            ends = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
            limits, layout = (lengths, lengths, ends, ends), "BTNH"
        elif data:
            there = _there(key, data[0])
            key, value = jnp.where(there, key, 0), jnp.where(there, value, 0)
            # A causal call's keys may have been cut shorter than its lengths, which the kernel would follow.
            limit = jnp.clip(data[0], 1, key.shape[2])
            limits, padded = (jnp.full_like(limit, query.shape[2]), limit, none, none), True
        kinds = {
            (False, False): inner.MaskType.NO_MASK,
            (True, False): inner.MaskType.CAUSAL,
            (False, True): inner.MaskType.PADDING,
            (True, True): inner.MaskType.PADDING_CAUSAL,
        }
        window = None if self.before is None else self.before + 1
        layout = inner.AttentionLayout[layout].value
        # No bias, no pages; a seed and a rate of dropout; neither a bias nor its gradient.
        arrays = (query, key, value, none, *limits, none, none)
        options = (self.scale, 42, 0.0, (False, False), kinds[self.causal, padded], layout, window)
        if _takes_scores(inner):
            arrays, options = (*arrays, ()), (*options, _softcap(self.cap))
        return arrays, (*options, inner.check_cudnn_version())

    def reference(self, query: Array, key: Array, value: Array, *data: Array) -> list[Array]:
        """Compute the same by Regard's tiles."""
        keep: list[masks.Mask] = []
        if self.packed:
            # The number of starts up to a position is that of its document.
            begun = data[0][:, :, None] <= jnp.arange(key.shape[2])
            keep = [masks.segments((begun & (data[0][:, :, None] >= 0)).sum(1))]
        elif data:
            keep = [masks.lengths(data[0])]
        keep += [masks.causal()] if self.causal else []
        keep += [masks.sliding_window(self.before)] if self.before is not None else []
        return compute_by_tiles((query, key, value), keep, self.scale, self.cap)


def _there(key: Array, lengths: Array) -> Array:
    return (jnp.arange(key.shape[2]) < lengths[:, None])[:, None, :, None]


def _heads_as_rows(array: Array, query_heads: int) -> Array:
    """Reshape (batch, heads, length, width) to (batch * query_heads, length, 1, width)."""
    array = jnp.repeat(array, query_heads // array.shape[1], 1)
    return array.reshape((-1, array.shape[2], 1, array.shape[3]))


def _places(query: Array, starts: Array, lengths: Array) -> Array:
    """Return where cuDNN's statistics hold each query's, (batch, heads, length): documents one by one.

    They are (documents, length), those of all rows one after another; each begins at 0.
    """
    batch, heads, length, _ = query.shape
    begun = (starts[:, :, None] <= jnp.arange(length)) & (starts[:, :, None] >= 0)
    document = begun.sum(1) - 1
    within = jnp.arange(length) - jnp.take_along_axis(starts, document, 1)
    counts = jnp.repeat((lengths >= 0).sum(1), heads)
    before = (jnp.cumsum(counts) - counts).reshape((batch, heads, 1))
    return (before + document[:, None]) * length + within[:, None]


@functools.cache
def _softcap(cap: float | None) -> Any:
    """Return the score function that cuDNN evaluates, or None."""
    if cap is None:
        return None

    def softcap(scores: Array) -> Array:
        return cap * jnp.tanh(scores * (1 / cap))

    return softcap


@functools.cache
def _inner() -> Any:
    """Return JAX's module of calls to cuDNN with heads first, which copies nothing; None where it changed."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as inner

        forward, backward = inner._dot_product_attention_fwd, inner._dot_product_attention_bwd_rule
        arities = len(inspect.signature(forward).parameters), len(inspect.signature(backward).parameters)
        return inner if arities == ((21, 12) if _takes_scores(inner) else (19, 11)) else None
    except (ImportError, AttributeError):
        return None


def _takes_scores(inner: Any) -> bool:
    return "score_mod" in inspect.signature(inner._dot_product_attention_fwd).parameters
