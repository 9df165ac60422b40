"""Backend `cudnn`: NVIDIA's fused attention, through JAX, for the calls whose meaning it shares."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import regard.masks as masks
from regard.axes import Array
from regard.engine.backends import tiled
from regard.engine.backends.kernel_masks import four_axes, read_kernel_mask, row_bounds
from regard.engine.backends.kernel_primitives import call_kernel
from regard.engine.call.canonicalization import canonicalize
from regard.engine.call.problem import Problem
from regard.masks.grid import is_concrete

_NARROW = (jnp.bfloat16, jnp.float16)
_ORDINARY = (None, "default", "fastest", "bfloat16", jax.lax.Precision.DEFAULT)


@functools.cache
def find_capability() -> tuple[int, int] | str:
    """Return the GPU's compute capability, 9.0 for Hopper, or why none serves."""
    if jax.default_backend() != "gpu":
        return f"it needs an NVIDIA GPU, and JAX computes on {jax.default_backend()} here"
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", None))
    try:
        major, minor = map(int, capability.split("."))
    except ValueError:
        return f"it needs an NVIDIA GPU, this is {device.device_kind}"
    if major < 8:
        return f"it needs compute capability 8.0, {device.device_kind} has {capability}"
    return major, minor


def refuses(problem: Problem) -> str | None:
    """Return why cuDNN or JAX's wrapper of it cannot serve this call, or None."""
    capability = find_capability()
    if isinstance(capability, str):
        return capability
    return _refuses_options(problem) or _refuses_shapes(problem, capability) or _refuses_mask(problem)


def _refuses_options(problem: Problem) -> str | None:
    if problem.aux:
        return "it returns no statistics: aux asks for some"
    if problem.score is not None:
        return "it evaluates no score functions"
    if problem.bias is not None:
        return "rows of -inf in a bias give NaN there, not 0"
    if problem.sinks is not None:
        return "it knows no sinks"
    if problem.dropout_rate:
        return "its dropout draws another pattern"
    if not is_concrete(problem.scale):
        return "its scale is part of the program, and this one is traced"
    precision = problem.precision or jax.config.jax_default_matmul_precision  # pyright: ignore
    if precision not in _ORDINARY:
        return f"it rounds weights to the inputs' dtype, and precision={precision!r} asks for more"
    return None


def _refuses_shapes(problem: Problem, capability: tuple[int, int]) -> str | None:
    dtypes = {array.dtype for array in (problem.query, problem.key, problem.value)}
    if len(dtypes) > 1 or not dtypes <= {np.dtype(dtype) for dtype in _NARROW}:
        names = ", ".join(sorted(dtype.name for dtype in dtypes))
        return f"it takes bfloat16 or float16 alone, got {names}"
    if 0 in (*problem.leading, problem.T, problem.S):
        return "there is nothing to compute"
    widest = 256 if capability >= (9, 0) else 128
    if problem.D != problem.E:
        return f"it takes values as wide as keys, got E = {problem.E}, D = {problem.D}"
    if problem.D % 8 or problem.D not in range(1, widest + 1):
        return f"it takes head widths up to {widest} that 8 divides, got {problem.D}"
    if problem.leading and problem.leading[-1] != problem.query.shape[-3]:
        return "it takes no query that several heads share"
    return None


def _refuses_mask(problem: Problem) -> str | None:
    kernel_mask = read_kernel_mask(problem)
    if isinstance(kernel_mask, str):
        return kernel_mask
    if kernel_mask.key_ids is not None:
        return "through JAX it knows no segments but by dense masks"
    if kernel_mask.after not in (None, 0) or (kernel_mask.before is not None and kernel_mask.after is None):
        band = f"{kernel_mask.before} keys before to {kernel_mask.after} after"
        return f"it knows no band of {band} a query's row"
    if kernel_mask.before is not None and kernel_mask.before < 0:
        return "rows without a key are not 0 there"
    if kernel_mask.after == 0 and problem.T > problem.S:
        return "its causal mask takes no more queries than keys"
    if kernel_mask.keys_below is not None and kernel_mask.before is not None:
        return "it takes lengths or a window, not both"
    bounds = row_bounds(kernel_mask, problem)
    return bounds if isinstance(bounds, str) else None


def run(problem: Problem) -> tuple[Array, dict[str, Array]]:
    """Compute the output by cuDNN; derivatives beyond the first gradient are those of `tiled`."""
    kernel_mask = read_kernel_mask(problem)
    assert not isinstance(kernel_mask, str)  # else it was refused
    bounds = row_bounds(kernel_mask, problem)
    assert not isinstance(bounds, str)
    batch = problem.leading[:-1]
    # Keys after the last query's own are nobody's: what they hold, NaN even, is not to be read.
    reach = problem.S if kernel_mask.after is None else min(problem.S, problem.T)
    arrays = [
        four_axes(array, batch)[:, :, :rows]
        for array, rows in ((problem.query, problem.T), (problem.key, reach), (problem.value, reach))
    ]
    kernel = Cudnn(float(problem.scale), kernel_mask.after == 0, kernel_mask.before)
    output = call_kernel(kernel, *arrays, *([] if bounds is None else [bounds]))
    return output.reshape((*problem.leading, problem.T, problem.E)), {}


@dataclass(frozen=True)
class Cudnn:
    """One kind of call: arrays (batch, heads, length, width), and one length per batch row, or none."""

    scale: float
    causal: bool
    before: int | None

    def call(self, query: Array, key: Array, value: Array, *lengths: Array) -> Array:
        """Compute the output by cuDNN; 0 where there is no key; keys beyond the length are not read."""
        if not lengths:
            return self._attention(query, key, value, None)
        count = lengths[0]
        there = (jnp.arange(key.shape[2]) < count[:, None])[:, None, :, None]
        key, value = jnp.where(there, key, 0), jnp.where(there, value, 0)
        # A causal call's keys may have been cut shorter than its lengths, which the kernel would follow.
        output = self._attention(query, key, value, jnp.clip(count, 1, key.shape[2]))
        return jnp.where(count[:, None, None, None] > 0, output, 0)

    def _attention(self, query: Array, key: Array, value: Array, lengths: Array | None) -> Array:
        return _library()(query, key, value, lengths, self.scale, self.causal, self.before)

    def reference(self, query: Array, key: Array, value: Array, *lengths: Array) -> Array:
        """Compute the same by Regard's tiles."""
        keep = [masks.lengths(lengths[0])] if lengths else []
        keep += [masks.causal()] if self.causal else []
        keep += [masks.sliding_window(self.before)] if self.before is not None else []
        mask = functools.reduce(operator.and_, keep) if keep else None
        return tiled.run(canonicalize(query, key, value, mask=mask, scale=self.scale, query_offset=0))[0]


Library = Callable[[Array, Array, Array, Array | None, float, bool, int | None], Array]


@functools.cache
def _library() -> Library:
    """Return JAX's wrapper: the inner one where it takes heads first, as that copies nothing."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as inner

        if "qkv_layout" in inspect.signature(inner.dot_product_attention).parameters:
            return functools.partial(_call_inner, inner)
    except (ImportError, AttributeError):
        pass
    return call_public


def _call_inner(
    inner: Any,
    query: Array,
    key: Array,
    value: Array,
    lengths: Array | None,
    scale: float,
    causal: bool,
    before: int | None,
) -> Array:
    kinds = {
        (False, False): inner.MaskType.NO_MASK,
        (True, False): inner.MaskType.CAUSAL,
        (False, True): inner.MaskType.PADDING,
        (True, True): inner.MaskType.PADDING_CAUSAL,
    }
    rows = None if lengths is None else jnp.full_like(lengths, query.shape[2])
    return inner.dot_product_attention(
        query,
        key,
        value,
        q_seqlen=rows,
        kv_seqlen=lengths,
        scale=scale,
        mask_type=kinds[causal, lengths is not None],
        qkv_layout="BNTH",
        sliding_window_length=None if before is None else before + 1,
    )


def call_public(
    query: Array,
    key: Array,
    value: Array,
    lengths: Array | None,
    scale: float,
    causal: bool,
    before: int | None,
    implementation: Any = "cudnn",
) -> Array:
    """Call `jax.nn.dot_product_attention`, whose arrays have heads after the length."""
    # A window without is_causal would let queries attend to keys after them (jax PR 39576).
    output = jax.nn.dot_product_attention(
        *(jnp.swapaxes(array, 1, 2) for array in (query, key, value)),
        scale=scale,
        is_causal=causal,
        key_value_seq_lengths=lengths,
        local_window_size=None if before is None else (before, 0),
        implementation=implementation,
    )
    return jnp.swapaxes(output, 1, 2)
