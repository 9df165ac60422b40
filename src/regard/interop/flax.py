"""Flax's attention functions, answered by Regard: the `attention_fn` of its multi-head layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard import masks
from regard.arguments import as_array, check_flag, check_kind
from regard.axes import Array, ArrayLike
from regard.engine.call.canonicalization import check_rate
from regard.engine.call.hooks import called_by
from regard.interop import layouts
from regard.loading import name_extra
from regard.masks import Mask
from regard.masks.grid import is_concrete

with name_extra(__name__, "models"):
    from flax import nnx
    from flax.nnx.nn.dtypes import promote_dtype as promote


def attention_fn(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: Mask | ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Callable[..., Any] = promote,
    is_causal: bool = False,
    *,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    input_positions: Any = None,
    **options: Any,
) -> Array | Any:
    """Answer a call of Flax's `dot_product_attention`, of `nnx` or `linen`, with `regard.attend`.

    score_hqk = sum_d query_qhd key_khd / sqrt(D) + bias_hqk over the keys that mask keeps
    output_qhe = sum_k softmax_k(score_hqk) value_khe

    Pass it as `attention_fn=` to `nnx.MultiHeadAttention`, `linen.MultiHeadDotProductAttention` or
    `linen.MultiHeadAttention`. Arguments have Flax's names, order and defaults; shapes are `(*B, length,
    heads, width)`. Query q sits at position q and key k at k, also where the lengths differ. What differs:

    - `mask` may also be a `masks.Mask`, save with `decode=True`, where Flax joins it with an array.
    - A query that may attend to nothing gets output 0 and weights 0; Flax gives it the mean of all values.
    - Scores and softmax are float32 (float64 for float64); the output has the dtype of the computation.
    - `is_causal` and a padding mask may come together; the width of values may differ from that of keys.
    - `options` of `attend` that Flax lacks, such as score, scale or sinks, are bound by `functools.partial`.

    Args:
        query, key, value: `(*B, Q, H, D)`, `(*B, K, heads, D)` and `(*B, K, heads, E)`, where heads divide H
            and *B may be any number of axes, none included.
        bias: floating-point, added to the scaled scores; broadcasts to `(*B, H, Q, K)`.
        mask: nonzero = may attend; broadcasts to `(*B, H, Q, K)`. Floating-point masks are read, too, because
            those that Flax makes are float32, but may hold only 0 and 1: other numbers are refused, or, where
            they are traced, make the output NaN. None means all may.
        broadcast_dropout: taken, without effect: every weight is dropped by a draw of its own, also where
            Flax would share a draw among batch and heads. Both are right on average.
        dropout_rng: random key, needed where something drops. The pattern is that of `attend`, not Flax's.
        dropout_rate: chance in [0, 1) that a weight is dropped; the others grow by 1 / (1 - rate).
        deterministic: whether nothing drops.
        dtype: dtype of the computation; None means what query, key and value promote to.
        precision: as in `attend`.
        module: where to sow the weights before dropout, `(*B, H, Q, K)`, as `attention_weights`: the
            `intermediates` of a linen module, `nnx.Intermediate` of an nnx module. None means nowhere.
        promote_dtype: what casts `(query, key, value)` to `dtype`, as in nnx.
        is_causal: keep keys up to the query's position only.
        force_fp32_for_softmax: whether weights are sown in float32 instead of `dtype`.
        einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: None.
        input_positions: None; rotate query and key before.
        options: all others of `regard.attend`, as they are there.

    Returns:
        The output `(*B, Q, H, E)`, in the dtype of the computation; with `aux`, which layers of Flax do not
        take, a pair of it and the dict that `attend` returns, whose arrays are `(*B, H, Q, ...)`.

    Raises:
        TypeError: a dtype that is not of floating point, a module that sows nothing, wrong flags.
        ValueError: shapes or heads that do not fit, a floating-point mask with other numbers than 0 and 1, a
            mask with two readings, dropout without a key, `is_causal` for one query of a cache.
        NotImplementedError: an einsum or a dot_general of your own, input_positions.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard.interop.flax import attention_fn
        >>> settings = {"num_heads": 2, "in_features": 4, "decode": False}
        >>> ours = nnx.MultiHeadAttention(**settings, attention_fn=attention_fn, rngs=nnx.Rngs(0))
        >>> theirs = nnx.MultiHeadAttention(**settings, rngs=nnx.Rngs(0))
        >>> x = jnp.arange(12.0).reshape(1, 3, 4)
        >>> mask = nnx.make_causal_mask(x[..., 0])
        >>> bool(jnp.allclose(ours(x, mask=mask), theirs(x, mask=mask), atol=1e-5))
        True

    Reference: `flax.nnx.dot_product_attention` and `flax.linen.dot_product_attention` of Flax 0.12.
    """
    del broadcast_dropout
    reason = "Regard forms no product by einsum; use Flax's own attention function"
    _refuse("einsum_dot_general", einsum_dot_general, reason)
    _refuse("qk_attn_weights_einsum", qk_attn_weights_einsum, reason)
    _refuse("attn_weights_value_einsum", attn_weights_value_einsum, reason)
    reason = "rotate query and key with regard.positions.rotary in an attention_fn of your own, and call this"
    _refuse("input_positions", input_positions, f"{reason} one from it")
    _check_arguments(dtype, module, promote_dtype, options.get("aux", ()))
    for name, flag in {
        "deterministic": deterministic,
        "force_fp32_for_softmax": force_fp32_for_softmax,
    }.items():
        check_flag(name, flag)
    options = layouts.further_options(options, attention_fn, rng="write dropout_rng=")
    arrays = layouts.read_arrays(query=query, key=key, value=value)
    promoted = layouts.apply_to_three("promote_dtype", promote_dtype, (*arrays.values(),), dtype=dtype)
    call = layouts.HeadsLast(*promoted, ranks=range(3, 33), score=options.get("score"))
    options = layouts.from_the_first(options, mask, call.shape)
    mask, sound = _read_mask(mask)
    allowed = layouts.read_mask("mask", mask, call.shape)
    if check_flag("is_causal", is_causal):
        num_queries, num_keys = call.shape[-2:]
        if allowed is not None and num_queries == 1 < num_keys:
            raise ValueError(
                f"is_causal: expected False for one query, with a mask, on {num_keys} keys, got True: Flax"
                " counts it from the first key, and all others would be lost. decode=True masks its cache by"
                " itself"
            )
        allowed = layouts.all_of([allowed, masks.causal()])
    rate = 0.0 if deterministic else check_rate("dropout_rate", dropout_rate)
    layouts.demand_key("dropout_rng", dropout_rng, rate, f"dropout_rate = {rate}", "deterministic=True")
    asked = tuple(options.pop("aux", ()))
    names = asked if module is None else tuple(dict.fromkeys((*asked, "weights")))
    options |= {"mask": allowed, "bias": layouts.read_bias("bias", bias, call.shape), "precision": precision}
    options |= {"dropout_rate": rate, "rng": dropout_rng, "aux": names}
    with nullcontext() if module is None else called_by(module):
        output, aux = call.attend(**options)
    if sound is not None:
        output = jnp.where(sound, output, jnp.nan)
    if module is not None:
        weights = aux["weights"] if force_fp32_for_softmax else aux["weights"].astype(call.query.dtype)
        collection = nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates"
        module.sow(collection, "attention_weights", weights)
    return (output, {name: aux[name] for name in asked}) if asked else output


def _check_arguments(dtype: Any, module: Any, promote_dtype: Any, aux: Any) -> None:
    """Raise for what Flax or JAX would refuse in words of their own."""
    if dtype is not None and not jnp.issubdtype(as_array("dtype", "a dtype", jnp.dtype, dtype), jnp.floating):
        raise TypeError(f"dtype: expected None or a floating-point dtype, such as jnp.float32; got {dtype!r}")
    if module is not None and not callable(getattr(module, "sow", None)):
        raise TypeError(f"module: expected a Flax module, to sow weights in, or None; got {module!r}")
    if not callable(promote_dtype):
        expected = "a function of (query, key, value) and dtype"
        raise TypeError(f"promote_dtype: expected {expected}, as by default; got {promote_dtype!r}")
    check_kind("aux", aux, tuple, list, hint='write aux=("weights",)')


def _refuse(name: str, value: Any, reason: str) -> None:
    if value is not None:
        raise NotImplementedError(f"{name}: expected None, got {type(value).__name__}; {reason}")


def _read_mask(mask: Any) -> tuple[Any, Array | None]:
    """Return the mask as booleans, and for a traced floating-point one a flag: True if it is all 0 and 1."""
    if mask is None or isinstance(mask, Mask):
        return mask, None
    array = mask if hasattr(mask, "dtype") else np.asarray(mask)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array, None
    if not is_concrete(array):
        array = jax.lax.stop_gradient(array)
        # The barrier keeps XLA from evaluating a constant mask while it compiles.
        return array != 0, _is_binary(jax.lax.optimization_barrier(array))
    with jax.ensure_compile_time_eval():
        array = jnp.asarray(array)
        if not _is_binary(array):
            raise ValueError(
                "mask: expected 0 and 1, nonzero = may attend, got a floating-point mask with other numbers;"
                " an additive mask goes in as `bias`, or as `mask=additive == 0`"
            )
        return array != 0, None


def _is_binary(array: Array) -> Array:
    return jnp.all((array == 0) | (array == 1))
