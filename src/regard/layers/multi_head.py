"""Multi-head attention as a layer."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from regard.arguments import as_array, guided
from regard.attention import attend
from regard.axes import Array, ArrayLike, Float
from regard.cache import KVCache, PagedKVCache
from regard.engine.call.canonicalization import float_array, read_scale
from regard.engine.call.hooks import called_by
from regard.engine.dispatch.placement import place_here
from regard.layers.choices import (
    check_choice,
    check_counts,
    check_initializers,
    check_kind,
    check_options,
    check_rotary,
)
from regard.layers.dropout import build_dropout, draw_dropout
from regard.layers.heads import check_heads, match_leading, merge_heads, place_bias, place_mask, split_heads
from regard.layers.residual import EPSILON, build_norm
from regard.masks import Mask
from regard.masks.alignment import place_queries, settle_positions
from regard.masks.offsets import positions_of
from regard.positions import Rotary
from regard.scores import Score


class Memory(NamedTuple):
    """Projected keys and values in heads, which a decoder keeps of its source."""

    key: Float[Array, "*B K S D"]
    value: Float[Array, "*B K S D"]


def unpack(result: Any, is_pair: Any) -> tuple[Any, Any]:
    """Return output and aux of a call, which returns a pair only where more than the output was asked for."""
    return result if is_pair else (result, {})


def pack(out: Array, stats: Any, rank: int, cache: Any, aux: tuple[str, ...]) -> Any:
    """Return what a call on inputs of this rank gives: its output, and with a cache or aux a dict as well."""
    if rank == 2:
        out, stats = jax.tree.map(lambda x: x[0], (out, stats))
    if cache is not None:
        return out, {**stats, "cache": cache}
    return (out, stats) if aux else out


@guided
class MultiHeadAttention(nnx.Module):
    """Multi-head attention: in every head, positions of `query` attend to those of `key` and `value`.

    head_h = attend(query Wq_h + bq_h, key Wk_g + bk_g, value Wv_g + bv_g),  g = h // (H / K)
    output = concat(head_1, ..., head_H) Wo + bo

    Self-attention when only `query` is given; cross-attention, with a length of its own, when `key` is. The
    kernels of all heads are stored side by side: column block h of `query_projection.kernel` is Wq_h.

    Args:
        d_model: width M of the query input and, with `project_output`, of the output.
        num_heads: H.
        num_key_heads: K, a divisor of `num_heads`: grouped heads (1 is multi-query). None means H.
        head_dim: D, the width of one head. None means `d_model // num_heads`.
        memory_width: width of the key and value inputs. None means `d_model`.
        use_bias, output_bias: whether the projections, and that of the output, have biases; None means alike.
        project_output: whether the concatenated heads, `(*B, T, H * D)`, go through Wo.
        scale: what scores are multiplied by. None means 1/sqrt(D).
        rotary: how queries and keys are turned by their positions. None means not at all.
        query_key_norm: whether every head's queries and keys go through an RMSNorm first (`query_norm` and
            `key_norm`, one for all heads), which bounds the scores.
        norm_kind, norm_epsilon: of these norms: "rms" or "zero_centered_rms", as in `EncoderBlock`.
        sinks: whether each head has a learned logit, `sinks`, that joins the softmax and reads nothing.
        output_gate: whether what the heads have read is multiplied by sigmoid(query Wz + bz), feature by
            feature, before Wo: `gate_projection`, as in Qwen3.5.
        dropout_rate: in [0, 1), on the attention weights.
        dtype: dtype to compute in; None means that of inputs and parameters.
        param_dtype: dtype of the parameters.
        kernel_init, bias_init: initializers. The default is Glorot's uniform one over the whole `(M, H * D)`
            matrix, of standard deviation sqrt(2 / (M + H * D)), and 0 for biases.
        precision: as in `jax.lax.dot_general`.
        rngs: random streams: "params", and "dropout" where something drops, as at first and after `train()`.

    Raises:
        ValueError: sizes below 1, heads that do not divide, a dropout rate outside [0, 1).

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard import layers, masks
        >>> layer = layers.MultiHeadAttention(6, num_heads=3, rngs=nnx.Rngs(0))
        >>> out, aux = layer(jnp.ones((2, 5, 6)), mask=masks.causal(), aux=("weights",))
        >>> out.shape, aux["weights"].shape
        ((2, 5, 6), (2, 3, 5, 5))

    Reference: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2; grouped heads from Ainslie
    et al., "GQA", 2023; query_key_norm from Henry et al., "Query-Key Normalization for Transformers", 2020,
    with the RMSNorm of Qwen3; output_gate from Qiu et al., "Gated Attention for Large Language Models", 2025.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        memory_width: int | None = None,
        use_bias: bool = True,
        output_bias: bool | None = None,
        project_output: bool = True,
        scale: float | None = None,
        rotary: Rotary | None = None,
        query_key_norm: bool = False,
        norm_kind: str = "rms",
        norm_epsilon: float = EPSILON,
        sinks: bool = False,
        output_gate: bool = False,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = nnx.initializers.glorot_uniform(),  # noqa: B008 (a pure function)
        bias_init: Any = nnx.initializers.zeros_init(),  # noqa: B008
        precision: Any = None,
        rngs: nnx.Rngs,
    ):
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        memory_width = d_model if memory_width is None else memory_width
        sizes = {"d_model": d_model, "num_heads": num_heads, "num_key_heads": num_key_heads}
        sizes |= {"memory_width": memory_width} | ({} if head_dim is None else {"head_dim": head_dim})
        shared = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        flags = {"use_bias": use_bias, "output_bias": output_bias, "project_output": project_output}
        flags |= {"query_key_norm": query_key_norm, "sinks": sinks, "output_gate": output_gate}
        check_options(sizes, precision=precision, **shared, **flags)
        check_initializers(kernel_init=kernel_init, bias_init=bias_init)
        head_dim = check_heads(d_model, num_heads, num_key_heads, head_dim)
        check_rotary(rotary, head_dim)
        self.d_model, self.num_heads, self.num_key_heads = d_model, num_heads, num_key_heads
        self.head_dim, self.memory_width, self.precision = head_dim, memory_width, precision
        if scale is not None:
            read_scale(scale)
        self.scale, self.rotary = scale, rotary

        linear = functools.partial(
            nnx.Linear, kernel_init=kernel_init, bias_init=bias_init, precision=precision, **shared
        )
        width, key_width = num_heads * head_dim, num_key_heads * head_dim
        self.query_projection = linear(d_model, width, use_bias=use_bias)
        self.key_projection = linear(memory_width, key_width, use_bias=use_bias)
        self.value_projection = linear(memory_width, key_width, use_bias=use_bias)
        self.gate_projection = linear(d_model, width, use_bias=use_bias) if output_gate else None
        output_bias = use_bias if output_bias is None else output_bias
        self.output_projection = linear(width, d_model, use_bias=output_bias) if project_output else None
        check_choice("norm_kind", norm_kind, ("rms", "zero_centered_rms"))
        norm = functools.partial(build_norm, head_dim, norm_kind, epsilon=norm_epsilon, **shared)
        self.query_norm = norm() if query_key_norm else None
        self.key_norm = norm() if query_key_norm else None
        self.sinks = nnx.Param(jnp.zeros(num_heads, param_dtype)) if sinks else None
        self.dropout = build_dropout(dropout_rate, rngs)

    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike | Memory | None = None,
        value: ArrayLike | None = None,
        *,
        mask: Mask | ArrayLike | None = None,
        bias: ArrayLike | None = None,
        score: Score | Sequence[Score] | None = None,
        query_offset: int | ArrayLike | None = None,
        query_positions: ArrayLike | None = None,
        key_positions: ArrayLike | None = None,
        cache: KVCache | PagedKVCache | None = None,
        counts: ArrayLike | None = None,
        deterministic: Any = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        aux: tuple[str, ...] = (),
    ) -> Array | Any:
        """Attend from `query` to itself, or to `key` and `value`.

        Args:
            query: `(*B, T, M)`, where the queries come from; `(T, M)` is one example.
            key: `(*B, S, W)`, where the keys come from, or what `remember` made of it; None means `query`.
            value: `(*B, S, W)`, where the values come from; None means `key`.
            mask: who may attend to whom, True = may. A `Mask`, or a boolean array (T, S), (*B, T, S) or
                (*B, H, T, S), as in `masks.from_array`. Padding (batch, S) is `masks.valid_keys(array)`.
            bias: float array (T, S) or (*B, H, T, S), added to the scaled scores.
            score: score functions, as in `attend`.
            query_offset: position of the first query; needed when T != S and positions are read.
            query_positions: in its place, where each query sits, `(T,)` or `(batch, T)`.
            key_positions: where each key sits, `(S,)` or `(batch, S)`. None means 0..S-1, or in
                self-attention query_positions.
            cache: the tokens so far, for decoding: T new tokens `(batch, T, M)` are appended after them, and
                attend to all. The mask must hide the future, as `masks.causal()` does.
            counts: with a cache, how many of the T tokens are real, `(batch,)`; None means all.
            deterministic: whether dropout is off in this call; None means as `train()` or `eval()` left it.
            rngs: where this call's dropout comes from; None means the layer's own stream.
            aux: names as in `attend`.

        Returns:
            Output `(*B, T, M)`, or `(*B, T, H * D)` without output projection; with `aux`, also a dict of
            arrays `(*B, H, T, ...)`; with a cache, also a dict that holds the longer one as "cache". The
            weights are those before dropout. A query that may attend to nothing gets Wo's bias alone. In
            cross-attention, NaN or inf in a key and value that no query may attend to reaches no output
            and no gradient, those of the parameters included.

        Raises:
            ValueError: inputs of the wrong rank or width, a mask with two readings, dropout without rngs.
            TypeError: inputs that are not floating point, a traced `deterministic`.
        """
        if key is None and value is not None:
            raise ValueError("key: expected an array where value is given, got None; pass key=")
        kind = "self" if key is None or key is query else "cross"
        query = check_features("query", query, self.d_model)
        check_counts(counts, cache)
        if cache is not None:
            check_kind("cache", cache, KVCache, PagedKVCache)
            more = (key, query_offset, query_positions, key_positions)
            has_more = any(option is not None for option in more)
            if has_more or query.shape[:-2] != (cache.batch,):
                raise ValueError(
                    f"cache: expected query ({cache.batch}, T, {self.d_model}) alone, without key, value,"
                    f" query_offset or positions; got query {tuple(query.shape)}"
                    f"{' and more' if has_more else ''}"
                )
        rank, query_leading = query.ndim, query.shape[:-2]
        # An unbatched example becomes a batch of 1: per-row masks align with the first leading axis, which
        # would otherwise be that of the heads.
        if isinstance(key, Memory):
            if value is not None:
                raise ValueError(
                    "value: expected None, as what `remember` made holds the values; got an array"
                )
            rank = max(rank, key.key.ndim - 1)
            leading = match_leading(query_leading, key.key.shape[:-3])
            query = jax.lax.broadcast_to_rank(query, max(rank, 3))
            memory = Memory(*(jax.lax.broadcast_to_rank(x, max(rank, 3) + 1) for x in key))
        elif key is None:
            key_positions = query_positions if key_positions is None else key_positions
            leading, query = query_leading, jax.lax.broadcast_to_rank(query, 3)
            memory = self._project(query, query, operator.call)
        else:
            key = check_features("key", key, self.memory_width)
            value = key if value is None else check_features("value", value, self.memory_width)
            rank = max(rank, key.ndim, value.ndim)
            leading = match_leading(query_leading, key.shape[:-2], value.shape[:-2])
            widen = functools.partial(jax.lax.broadcast_to_rank, rank=max(rank, 3))
            query, memory = widen(query), self._project(widen(key), widen(value), project_memory)
        heads = split_heads(self.query_projection(query), self.num_heads)
        heads = heads if self.query_norm is None else self.query_norm(heads)
        if self.rotary is not None:
            T, S = heads.shape[-2], memory.key.shape[-2]
            if cache is None:
                query_start = settle_positions("query", query_offset, query_positions, T, leading)
                key_start = settle_positions("key", None, key_positions, S, leading)
                query_start = place_queries(T, S, query_start, True, key_start)
                query_rows = place_here(positions_of(query_start).rows(T), T)
                key_rows = place_here(positions_of(key_start).rows(S), S)
            else:
                query_rows = key_rows = cache.lengths[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
            heads = self.rotary(heads, query_rows)
            memory = memory._replace(key=self.rotary(memory.key, key_rows))
        if cache is None:
            positions = {"query_offset": query_offset, "query_positions": query_positions}
            positions |= {"key_positions": key_positions}
            call, num_keys = functools.partial(attend, heads, *memory, **positions), memory.key.shape[-2]
        else:
            cache = cache.append(*memory, counts)
            call, num_keys = functools.partial(cache.attend, heads, counts=counts), cache.slots
        rate, rng = draw_dropout(self.dropout, deterministic, rngs)
        # Behind a gate, the projection does not take what heads have read as it is.
        with called_by(self, kind, self.output_projection if self.gate_projection is None else None):
            out = call(
                mask=place_mask(mask, leading, query.shape[-2], num_keys),
                bias=place_bias(bias, leading),
                score=score,
                scale=self.scale,
                sinks=None if self.sinks is None else self.sinks[...],
                dropout_rate=rate,
                rng=rng,
                aux=aux,
                precision=self.precision,
            )
        out, stats = unpack(out, aux)
        out = merge_heads(out)
        if self.gate_projection is not None:
            out = out * jax.nn.sigmoid(self.gate_projection(query))
        if self.output_projection is not None:
            out = self.output_projection(out)
        return pack(out, stats, rank, cache, aux)

    def remember(self, memory: ArrayLike) -> Memory:
        """Project a memory `(batch, S, W)` once, to be read by many calls as `key`."""
        memory = check_features("memory", memory, self.memory_width)
        return self._project(memory, memory, project_memory)

    def _project(self, key: Array, value: Array, project: Any) -> Memory:
        """Project keys and values into heads, before positions."""
        key = split_heads(project(self.key_projection, key), self.num_key_heads)
        value = split_heads(project(self.value_projection, value), self.num_key_heads)
        return Memory(key if self.key_norm is None else project(self.key_norm, key), value)


def project_memory(layer: nnx.Linear | nnx.RMSNorm, memory: Float[Array, "*B S W"]) -> Float[Array, "*B S X"]:
    """Project a memory; a row that is not finite becomes NaN, and gives the layer no gradient."""
    # A kernel's gradient is input times gradient, and NaN times the 0 of a masked row would be NaN.
    finite = jnp.all(jnp.isfinite(memory), axis=-1, keepdims=True)
    return jnp.where(finite, layer(jnp.where(finite, memory, jnp.zeros_like(memory))), jnp.nan)


def check_features(name: str, x: Any, width: int) -> Array:
    """Return a floating-point array, checked for the layer's width on its last axis."""
    x = as_array(name, "a floating-point array", jnp.asarray, float_array(name, x, 0))
    if x.ndim < 2 or x.shape[-1] != width:
        raise ValueError(
            f"{name}: expected shape (*B, length, {width}), got {tuple(x.shape)}; one example is"
            f" (length, {width}), a batch (batch, length, {width})"
        )
    return x
