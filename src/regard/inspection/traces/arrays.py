"""Calls made of arrays: attention weights, or queries and keys, of a model of any library."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.engine.call.options import ScoreOptions, check_names
from regard.engine.dispatch.registry import BACKENDS, choose
from regard.inspection.traces.calls import Call, make_call
from regard.inspection.traces.slices import take_example
from regard.readouts.reading import canonicalize_readable

_SUM_ERROR = 2.0**-6  # of weights that were rounded to bfloat16 on their way
_NO_WEIGHT = -1e4  # a score whose weight is 0 in any dtype
_OF_WEIGHTS = ("mask", "query_offset", "key_offset")


def read_calls(weights: Any, query: Any, key: Any, example: int, options: Mapping[str, Any]) -> list[Call]:
    """Read the calls of all layers, named by their numbers."""
    check_names(options, ScoreOptions)
    inputs = {"weights": weights, "query": query, "key": key}
    names = [name for name, layers in inputs.items() if layers is not None]
    if names not in (["weights"], ["query", "key"]):
        got = " and ".join(names) or "none of them"
        raise ValueError(f"weights, query, key: expected weights, or query and key; got {got}")
    if weights is not None and (wrong := [name for name in options if name not in _OF_WEIGHTS]):
        expected = f"{', '.join(_OF_WEIGHTS)} alone beside weights, which are final"
        got = f"{wrong[0]}={options[wrong[0]]!r}; give it with query and key"
        raise ValueError(f"{wrong[0]}: expected {expected}; got {got}")
    make: Callable[..., Call] = _score if weights is None else _weigh
    sides = [_list_layers(name, inputs[name]) for name in names]
    if len(sides[0]) != len(sides[-1]):
        raise ValueError(f"key: expected {len(sides[0])} layers, as query has; got {len(sides[1])}")
    layers = list(zip(*sides, strict=True))
    masks = options.get("mask")
    masks = masks if isinstance(masks, list | tuple) else [masks] * len(layers)
    if len(masks) != len(layers):
        raise ValueError(f"mask: expected one for all layers, or {len(layers)} in a list; got {len(masks)}")
    calls = []
    for number, (layer, mask) in enumerate(zip(layers, masks, strict=True)):
        call = make(number, *layer, example, {**options, "mask": mask})
        calls.append(dataclasses.replace(call, name=f"attention {number}", layer=number))
    return calls


def _list_layers(name: str, layers: Any) -> list[Any]:
    listed = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str | Mapping) else []
    if not listed or any(layer is None for layer in listed):
        hint = "; in transformers, load the model with attn_implementation='eager'" * (name == "weights")
        expected = "one array for each layer, in a list or tuple"
        raise ValueError(f"{name}: expected {expected}; got {str(layers)[:60]}{hint}")
    return listed


def _score(number: int, query: Any, key: Any, example: int, options: dict[str, Any]) -> Call:
    arrays = (_read_array(f"{name}[{number}]", array) for name, array in (("query", query), ("key", key)))
    problem = take_example(canonicalize_readable(*arrays, **options), example)
    asked = dataclasses.replace(problem, aux=("lse", "max_score"))
    backend = choose(asked).name
    kind = None if options.get("query_offset") is None else "self"
    return make_call(problem, BACKENDS[backend].run(asked)[1], kind=kind, backend=backend)


def _weigh(number: int, layer: Any, example: int, options: dict[str, Any]) -> Call:
    """Make the call whose scores are the logarithms of the weights: query and key are 0, the bias is all."""
    name = f"weights[{number}]"
    array = _read_array(name, layer)
    *batch, length, keys = array.shape
    dtype = jax.dtypes.canonicalize_dtype(np.float64 if array.dtype == np.float64 else np.float32)
    query, key = np.zeros((*batch, length, 1), dtype), np.zeros((1, 1, keys, 1), dtype)
    problem = take_example(canonicalize_readable(query, key, **options), example)
    weights = array[example].astype(dtype)
    if not np.all(weights >= 0):
        raise ValueError(f"{name}: expected numbers of at least 0, got {weights[~(weights >= 0)][0]}")
    total = weights.sum(-1, keepdims=True)
    off = np.where(total > 0, np.abs(total - 1), 0).max(initial=0)
    if off > _SUM_ERROR:
        expected = "weights of each query that sum to 1 over the keys, the last axis, or to 0"
        got = f"a sum that is {off:.3g} away; take them after softmax, before dropout, with all keys"
        raise ValueError(f"{name}: expected {expected}; got {got}")
    hidden = total <= 0
    if problem.mask is None:
        hidden = weights <= 0
    elif np.any(weights * ~np.asarray(problem.keep())):
        raise ValueError(f"mask: expected weights of 0 where it lets nothing through, got others in {name}")
    logs = np.log(np.where(weights > 0, weights, 1))
    bias = np.where(hidden, -np.inf, np.where(weights > 0, logs, _NO_WEIGHT)).astype(dtype)
    # Weights stand as they were given, so that `trust` tells by how much their sums miss 1.
    lse = np.where(total > 0, 0, -np.inf)[..., 0].astype(dtype)
    rows = {"lse": lse, "max_score": bias.max(-1, initial=-np.inf)}
    kind = None if options.get("query_offset") is None else "self"
    call = make_call(dataclasses.replace(problem, bias=bias), rows, kind=kind, backend="given")
    description = dataclasses.replace(call.description, dtype=str(array.dtype), bias=False, width=0)
    return dataclasses.replace(call, description=description)


def _read_array(name: str, source: Any) -> np.ndarray:
    """Return an array `(batch, heads, length, width)` of any library."""
    dtype = None
    if hasattr(source, "detach"):  # PyTorch: NumPy takes neither graphs, nor devices, nor bfloat16
        source, dtype = source.detach().cpu(), str(source.dtype).removeprefix("torch.")
        source = source.float() if dtype == "bfloat16" else source
    array = np.asarray(source)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name}: expected a floating-point array, got {array.dtype}")
    if array.ndim != 4:
        expected = "an array (batch, heads, length, keys or width), one for each layer in a list"
        hint = "add the axis of a single example by [None], and keep heads apart"
        raise ValueError(f"{name}: expected {expected}; got shape {array.shape}; {hint}")
    return array.astype(jnp.dtype(dtype)) if dtype else array
