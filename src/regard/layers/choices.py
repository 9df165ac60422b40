"""Options of layers, checked: random streams, sizes, dtypes, flags, and names out of several."""

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import jax
from flax import nnx

from regard.arguments import check_flag, check_kind, check_option, whole_number
from regard.axes import Array
from regard.engine.call.canonicalization import check_precision, float_dtype
from regard.positions import Rotary

NormKind = Literal["layer", "rms", "layer_no_bias", "zero_centered_rms"]
NormPlace = Literal["pre", "post", "both"]

# What other libraries call these things.
_ELSEWHERE = {
    "rope": "rotary", "sine": "sinusoidal", "absolute": "learned", "t5": "relative", "swish": "silu",
}  # fmt: skip


def check_options(
    sizes: Mapping[str, Any], *, rngs: Any, dtype: Any, param_dtype: Any, precision: Any, **flags: Any
) -> None:
    """Check sizes, flags and what all layers take; None is a flag that follows another."""
    for name, size in sizes.items():
        whole_number(name, size, 1)
    for name, flag in flags.items():
        if flag is not None:
            check_flag(name, flag)
    check_rngs(rngs)
    for name, kind in (("dtype", dtype), ("param_dtype", param_dtype)):
        if kind is not None:
            float_dtype(name, kind)
    check_precision(precision)


def check_rngs(rngs: Any) -> None:
    """Raise unless a layer is given random streams to start from."""
    check_kind("rngs", rngs, nnx.Rngs, hint=f"pass nnx.Rngs({rngs if isinstance(rngs, int) else 0})")


def check_own_cache(cache: Any, own: Any, x: Array) -> None:
    """Raise unless a cache has the arrays of the layer's own, and a row for each of x."""
    expected = [leaf.shape for leaf in jax.tree.leaves(own)]
    shapes = [leaf.shape for leaf in jax.tree.leaves(cache)]
    is_own = expected == shapes and jax.tree.structure(own) == jax.tree.structure(cache)
    if not is_own or x.shape[:-2] != (cache.batch,):
        raise ValueError(
            f"cache: expected the layer's own and x ({cache.batch}, T, {x.shape[-1]}); got x {x.shape}"
            f" and arrays {shapes} for {expected}; make it with the layer's start_cache"
        )


def check_initializers(**initializers: Any) -> None:
    """Raise unless all are functions that draw arrays."""
    for name, initializer in initializers.items():
        if not callable(initializer):
            raise TypeError(
                f"{name}: expected a function of a key, a shape and a dtype, such as"
                f" nnx.initializers.glorot_uniform(); got {initializer!r}"
            )


def check_arguments(name: str, options: Any, layer: type, passed: Collection[str]) -> None:
    """Raise unless `options` is None or maps arguments of a layer, less those that the caller passes."""
    check_kind(name, options, Mapping, type(None))
    names = [key for key in inspect.signature(layer.__init__).parameters if key not in ("self", *passed)]
    for argument in options or ():
        check_option(str(argument), names, *passed, title=f"{name}[{argument!r}]")


def check_rotary(rotary: Any, features: int) -> None:
    """Raise unless a layer that turns so many features is given settings that fit, or none."""
    check_kind("rotary", rotary, Rotary, type(None))
    if rotary is not None:
        rotary.fit(features, "rotary.width")


def check_counts(counts: Any, cache: Any, has_mask: bool = True) -> None:
    """Raise where tokens are counted that no cache is to hold."""
    if counts is not None and cache is None:
        advice = (
            "hide padding by mask=masks.lengths(counts)"
            if has_mask
            else "padding at the end of rows needs nothing, as no token reads a later one"
        )
        raise ValueError(f"counts: expected None without a cache, which alone leaves tokens out; {advice}")


def check_choice(name: str, value: Any, choices: Iterable[str], error: type[Exception] = ValueError) -> None:
    """Raise an error that lists the choices and names the nearest, unless the value is one of them."""
    names = [*choices]
    if isinstance(value, str) and value in names:
        return
    word = str(value).lower()
    hint = f"nearest: {difflib.get_close_matches(word, names, n=1, cutoff=0.0)[0]}"
    if _ELSEWHERE.get(word) in names:
        hint = f"did you mean {_ELSEWHERE[word]}?"
    if word == "gelu" and "gelu_tanh" in names:
        hint = "'gelu' has two meanings: choose gelu_tanh, the approximation, or gelu_erf, the exact one"
    raise error(f"{name}: expected one of {', '.join(names)}; got {value!r} ({hint})")
