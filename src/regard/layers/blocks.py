"""Transformer blocks: attention and feed-forward branches, each with a residual, a norm and dropout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from regard.arguments import guided
from regard.axes import Array, ArrayLike
from regard.cache import KVCache, PagedKVCache
from regard.layers.choices import check_arguments, check_choice
from regard.layers.delta import GatedDeltaNet, KimiDelta
from regard.layers.delta_cache import DeltaCache
from regard.layers.experts import Experts
from regard.layers.feed_forward import FeedForward
from regard.layers.latent_attention import LatentAttention
from regard.layers.multi_head import Memory, MultiHeadAttention, check_features, unpack
from regard.layers.residual import EPSILON, Residual
from regard.masks import Mask
from regard.scores import Score

DELTAS = {"gated_delta": GatedDeltaNet, "kimi_delta": KimiDelta}


@guided
class EncoderBlock(nnx.Module):
    """Transformer block of self-attention and a feed-forward branch.

    `norm="pre"`:   x = x + dropout(attention(norm(x)));  x = x + dropout(feed_forward(norm(x)))
    `norm="post"`:  x = norm(x + dropout(attention(x)));  x = norm(x + dropout(feed_forward(x)))
    `norm="both"`:  as `"pre"`, with one more norm at the end of each branch

    Args:
        d_model: width M.
        num_heads: H.
        d_ff: width F of the feed-forward branch.
        norm: where the norms sit: "pre", before each branch, leaves the residual stream itself unnormalised;
            "post" is the 2017 form; "both" is Gemma 2's.
        norm_kind: "layer" for LayerNorm, "layer_no_bias" for one without biases, "rms" for RMSNorm,
            "zero_centered_rms" for one that holds its scale less 1.
        norm_epsilon: what the norms add to the variance or mean square.
        dropout_rate: in [0, 1), on both branches, and on the hidden layer of the feed-forward branch.
        norm_input: False leaves out the first norm of "pre" and "both", where the block reads what is normed.
        attention: further arguments of `MultiHeadAttention`, such as {"num_key_heads": 2}; with "latent_dim"
            among them, of `LatentAttention`, which then takes its place.
        feed_forward: further arguments of `FeedForward`, such as {"activation": "silu", "gated": True}; with
            "num_experts" among them, of `Experts`, which then takes its place.
        dtype, param_dtype, rngs: as in `MultiHeadAttention`.

    Raises:
        ValueError: as for the parts, or an unknown `norm`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard import layers, masks
        >>> block = layers.EncoderBlock(6, 3, 11, feed_forward={"activation": "relu"}, rngs=nnx.Rngs(0))
        >>> block(jnp.ones((2, 5, 6)), mask=masks.lengths([5, 2])).shape
        (2, 5, 6)

    Reference: Vaswani et al., "Attention Is All You Need", 2017, section 3.1 ("post"); Xiong et al., "On
    Layer Normalization in the Transformer Architecture", 2020 ("pre"); Gemma Team, "Gemma 2", 2024, section
    2 ("both").
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        *,
        norm: str = "pre",
        norm_kind: str = "layer",
        norm_epsilon: float = EPSILON,
        dropout_rate: float = 0.0,
        norm_input: bool = True,
        attention: Mapping[str, Any] | None = None,
        feed_forward: Mapping[str, Any] | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        shared = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        is_latent = isinstance(attention, Mapping) and "latent_dim" in attention
        layer = LatentAttention if is_latent else MultiHeadAttention
        _check_branches("attention", attention, layer, feed_forward)
        options = {"norm_epsilon": norm_epsilon, **(attention or {})}
        self.attention = layer(d_model, num_heads, **options, **shared)
        self.feed_forward = _build_feed_forward(d_model, d_ff, feed_forward, dropout_rate, **shared)
        residual = {"place": norm, "kind": norm_kind, "epsilon": norm_epsilon, "dropout_rate": dropout_rate}
        self.attention_residual = Residual(d_model, norm_input=norm_input, **residual, **shared)
        self.feed_forward_residual = Residual(d_model, **residual, **shared)

    def __call__(
        self,
        x: ArrayLike,
        *,
        mask: Mask | ArrayLike | None = None,
        score: Score | Sequence[Score] | None = None,
        query_offset: int | ArrayLike | None = None,
        positions: ArrayLike | None = None,
        cache: KVCache | PagedKVCache | None = None,
        counts: ArrayLike | None = None,
        aux: tuple[str, ...] = (),
    ) -> Array | Any:
        """Run the block.

        Args:
            x: `(*B, T, M)`, the residual stream.
            mask, score, query_offset, cache, counts, aux: as in `MultiHeadAttention`.
            positions: where each token sits, `(T,)` or `(batch, T)`; None means 0..T-1. For packed rows.

        Returns:
            Array of x's shape; with `aux` or a cache, also the dict of the attention.

        Raises:
            ValueError: an input of the wrong rank or width.
        """
        x = check_features("x", x, self.attention.d_model)
        options = {"score": score, "cache": cache, "counts": counts, "aux": aux}
        if isinstance(self.attention, LatentAttention):
            if query_offset is not None:
                raise ValueError(f"query_offset: expected None with latent_dim, got {query_offset!r}")
            options |= {"positions": positions}
        else:
            options |= {"query_offset": query_offset, "query_positions": positions}
        result = self.attention(self.attention_residual.enter(x), mask=mask, **options)
        has_more = bool(aux) or cache is not None
        attended, stats = unpack(result, has_more)
        x = self.attention_residual.leave(x, attended)
        x = self.feed_forward_residual.leave(x, self.feed_forward(self.feed_forward_residual.enter(x)))
        return (x, stats) if has_more else x


@guided
class DeltaBlock(nnx.Module):
    """Transformer block whose attention is the delta rule, of linear attention: most blocks of a hybrid.

    With norm="pre" (and as in `EncoderBlock` for the others):

    x = x + dropout(delta_rule(norm(x)));  x = x + dropout(feed_forward(norm(x)))

    Args:
        num_heads: H, of values.
        kind: "gated_delta" for `GatedDeltaNet`, "kimi_delta" for `KimiDelta`.
        delta: further arguments of that layer, such as {"num_key_heads": 2}.
        d_model, d_ff, norm, norm_kind, norm_epsilon, dropout_rate, norm_input: as in `EncoderBlock`.
        feed_forward, dtype, param_dtype, rngs: as in `EncoderBlock`.

    Raises:
        ValueError: as for the parts, or an unknown `norm` or `kind`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard.layers import DeltaBlock
        >>> block = DeltaBlock(6, 3, 11, rngs=nnx.Rngs(0))
        >>> block(jnp.ones((2, 5, 6)), segments=jnp.array([0, 0, 1, 1, 1])).shape
        (2, 5, 6)

    Reference: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2025, section 3.4.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        *,
        kind: str = "gated_delta",
        delta: Mapping[str, Any] | None = None,
        norm: str = "pre",
        norm_kind: str = "layer",
        norm_epsilon: float = EPSILON,
        dropout_rate: float = 0.0,
        norm_input: bool = True,
        feed_forward: Mapping[str, Any] | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        shared = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        check_choice("kind", kind, DELTAS)
        _check_branches("delta", delta, DELTAS[kind], feed_forward)
        options = {"norm_epsilon": norm_epsilon, **(delta or {})}
        self.delta = DELTAS[kind](d_model, num_heads, **options, **shared)
        self.feed_forward = _build_feed_forward(d_model, d_ff, feed_forward, dropout_rate, **shared)
        residual = {"place": norm, "kind": norm_kind, "epsilon": norm_epsilon, "dropout_rate": dropout_rate}
        self.delta_residual = Residual(d_model, norm_input=norm_input, **residual, **shared)
        self.feed_forward_residual = Residual(d_model, **residual, **shared)

    def __call__(
        self,
        x: ArrayLike,
        *,
        segments: ArrayLike | None = None,
        cache: DeltaCache | None = None,
        counts: ArrayLike | None = None,
    ) -> Array | Any:
        """Run the block on x, the residual stream `(*B, T, M)`, as `GatedDeltaNet` is called."""
        x = check_features("x", x, self.delta.d_model)
        result = self.delta(self.delta_residual.enter(x), segments=segments, cache=cache, counts=counts)
        read, stats = unpack(result, cache is not None)
        x = self.delta_residual.leave(x, read)
        x = self.feed_forward_residual.leave(x, self.feed_forward(self.feed_forward_residual.enter(x)))
        return x if cache is None else (x, stats)


@guided
class DecoderBlock(nnx.Module):
    """Transformer block of self-attention, cross-attention to a memory, and a feed-forward branch.

    With norm="pre" (and as in `EncoderBlock` for "post"):

    x = x + dropout(self_attention(norm(x)))
    x = x + dropout(cross_attention(norm(x), memory))
    x = x + dropout(feed_forward(norm(x)))

    The block adds no mask of its own: a causal decoder passes `mask=masks.causal()`.

    Args:
        num_heads: H, in both attentions.
        memory_width: width of the memory. None means `d_model`.
        dropout_rate: in [0, 1), on the three branches and on the hidden layer of the last.
        attention: further arguments of `MultiHeadAttention`, for both attentions; `rotary` turns only in the
            first, as a memory has positions of its own.
        d_model, d_ff, norm, norm_kind, norm_epsilon, norm_input: as in `EncoderBlock`.
        feed_forward, dtype, param_dtype, rngs: as in `EncoderBlock`.

    Raises:
        ValueError: as for the parts, or an unknown `norm`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard import layers, masks
        >>> block = layers.DecoderBlock(6, 3, 11, rngs=nnx.Rngs(0))
        >>> x, memory = jnp.ones((2, 5, 6)), jnp.ones((2, 7, 6))
        >>> out, aux = block(x, memory, mask=masks.causal(), aux=("weights",))
        >>> aux["self"]["weights"].shape, aux["cross"]["weights"].shape
        ((2, 3, 5, 5), (2, 3, 5, 7))

    Reference: Vaswani et al., "Attention Is All You Need", 2017, section 3.1.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        *,
        memory_width: int | None = None,
        norm: str = "pre",
        norm_kind: str = "layer",
        norm_epsilon: float = EPSILON,
        dropout_rate: float = 0.0,
        norm_input: bool = True,
        attention: Mapping[str, Any] | None = None,
        feed_forward: Mapping[str, Any] | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        shared = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        _check_branches("attention", attention, MultiHeadAttention, feed_forward, "memory_width")
        options = {"norm_epsilon": norm_epsilon, **(attention or {})}
        self.self_attention = MultiHeadAttention(d_model, num_heads, **options, **shared)
        self.cross_attention = MultiHeadAttention(
            d_model, num_heads, memory_width=memory_width, **{**options, "rotary": None}, **shared
        )
        self.feed_forward = _build_feed_forward(d_model, d_ff, feed_forward, dropout_rate, **shared)
        residual = {"place": norm, "kind": norm_kind, "epsilon": norm_epsilon, "dropout_rate": dropout_rate}
        self.self_residual = Residual(d_model, norm_input=norm_input, **residual, **shared)
        self.cross_residual = Residual(d_model, **residual, **shared)
        self.feed_forward_residual = Residual(d_model, **residual, **shared)

    def __call__(
        self,
        x: ArrayLike,
        memory: ArrayLike | Memory,
        *,
        mask: Mask | ArrayLike | None = None,
        memory_mask: Mask | ArrayLike | None = None,
        score: Score | Sequence[Score] | None = None,
        positions: ArrayLike | None = None,
        cache: KVCache | PagedKVCache | None = None,
        counts: ArrayLike | None = None,
        aux: tuple[str, ...] = (),
    ) -> Array | Any:
        """Run the block.

        Args:
            x, aux: as in `EncoderBlock`.
            memory: `(*B, S, W)`, what the cross-attention reads, or what its `remember` made of it.
            mask, score, positions, cache, counts: of the self-attention, as in `EncoderBlock`.
            memory_mask: who may attend to what in the memory; None means everyone to everything.

        Returns:
            Array of x's shape; with `aux` or a cache, also {"self": dict, "cross": dict}.

        Raises:
            ValueError: inputs of the wrong rank or width.
        """
        x = check_features("x", x, self.self_attention.d_model)
        if not isinstance(memory, Memory):
            memory = check_features("memory", memory, self.cross_attention.memory_width)
        options = {"score": score, "query_positions": positions}
        options |= {"cache": cache, "counts": counts, "aux": aux}
        result = self.self_attention(self.self_residual.enter(x), mask=mask, **options)
        has_more = bool(aux) or cache is not None
        attended, self_stats = unpack(result, has_more)
        x = self.self_residual.leave(x, attended)
        result = self.cross_attention(self.cross_residual.enter(x), memory, mask=memory_mask, aux=aux)
        attended, cross_stats = unpack(result, aux)
        x = self.cross_residual.leave(x, attended)
        x = self.feed_forward_residual.leave(x, self.feed_forward(self.feed_forward_residual.enter(x)))
        return (x, {"self": self_stats, "cross": cross_stats}) if has_more else x


def _build_feed_forward(
    d_model: int, d_ff: int, options: Mapping[str, Any] | None, dropout_rate: float, **shared: Any
) -> FeedForward | Experts:
    """Build the feed-forward branch, of experts where the options number them."""
    options = {"dropout_rate": dropout_rate, **(options or {})}
    return (Experts if "num_experts" in options else FeedForward)(d_model, d_ff, **options, **shared)


def _check_branches(name: str, options: Any, layer: type, feed_forward: Any, *passed: str) -> None:
    """Raise for further arguments of branches that they do not take, or that the block passes itself."""
    passed = ("d_model", "num_heads", "d_ff", "dtype", "param_dtype", "rngs", *passed)
    check_arguments(name, options, layer, passed)
    has_experts = isinstance(feed_forward, Mapping) and "num_experts" in feed_forward
    check_arguments("feed_forward", feed_forward, Experts if has_experts else FeedForward, passed)
