"""Transformer blocks: attention and feed-forward branches, each with a residual, a norm and dropout."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from regard.axes import ArrayLike
from regard.layers.feed_forward import FeedForward
from regard.layers.multi_head import MultiHeadAttention, check_features, unpack
from regard.layers.residual import Residual
from regard.masks import Mask


class EncoderBlock(nnx.Module):
    """Update every position from the others by self-attention, then from itself by the feed-forward branch.

    norm="pre":   x = x + dropout(attention(norm(x)));  x = x + dropout(feed_forward(norm(x)))
    norm="post":  x = norm(x + dropout(attention(x)));  x = norm(x + dropout(feed_forward(x)))

    Args:
        d_model: width M.
        num_heads: H.
        d_ff: width F of the feed-forward branch.
        norm: where the LayerNorms (epsilon 1e-6) sit: "pre", before each branch, leaves the residual stream
            itself unnormalised; "post" is the 2017 form.
        activation: as in `FeedForward`.
        dropout_rate: in [0, 1), on both branches before they are added, and on the hidden layer of the
            feed-forward branch.
        attention_dropout_rate: in [0, 1), on the attention weights.
        num_key_heads: as in `MultiHeadAttention`.
        head_dim: as in `MultiHeadAttention`.
        attention_bias: whether the attention projections have biases.
        dtype: dtype to compute in; None means that of inputs and parameters.
        param_dtype: dtype of the parameters.
        rngs: random streams: "params", and "dropout" where something drops.

    Raises:
        ValueError: as for the parts, or an unknown `norm`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard import masks
        >>> from regard.layers import EncoderBlock
        >>> block = EncoderBlock(6, 3, 11, rngs=nnx.Rngs(0))
        >>> block(jnp.ones((2, 5, 6)), mask=masks.lengths([5, 2])).shape
        (2, 5, 6)

    Reference: Vaswani et al., "Attention Is All You Need", 2017, section 3.1 ("post"); Xiong et al., "On
    Layer Normalization in the Transformer Architecture", 2020 ("pre").
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        *,
        norm: str = "pre",
        activation: str = "gelu_tanh",
        dropout_rate: float = 0.0,
        attention_dropout_rate: float = 0.0,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        attention_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.attention = MultiHeadAttention(
            d_model,
            num_heads,
            num_key_heads=num_key_heads,
            head_dim=head_dim,
            use_bias=attention_bias,
            dropout_rate=attention_dropout_rate,
            **dtypes,
            rngs=rngs,
        )
        self.feed_forward = FeedForward(
            d_model, d_ff, activation=activation, dropout_rate=dropout_rate, **dtypes, rngs=rngs
        )
        residual = {"norm": norm, "dropout_rate": dropout_rate, **dtypes, "rngs": rngs}
        self.attention_residual = Residual(d_model, **residual)
        self.feed_forward_residual = Residual(d_model, **residual)

    def __call__(
        self,
        x: ArrayLike,
        *,
        mask: Mask | ArrayLike | None = None,
        query_offset: Any = None,
        aux: tuple[str, ...] = (),
    ) -> Any:
        """Run the block.

        Args:
            x: `(*B, T, M)`, the residual stream.
            mask: as in `MultiHeadAttention`; None means that every position may attend to every other.
            query_offset: as in `MultiHeadAttention`.
            aux: names as in `attend`.

        Returns:
            Array of x's shape; with `aux`, also the dict of the attention.

        Raises:
            ValueError: an input of the wrong rank or width.
        """
        x = check_features("x", x, self.attention.d_model)
        result = self.attention(
            self.attention_residual.enter(x), mask=mask, query_offset=query_offset, aux=aux
        )
        attended, seen = unpack(result, aux)
        x = self.attention_residual.leave(x, attended)
        x = self.feed_forward_residual.leave(x, self.feed_forward(self.feed_forward_residual.enter(x)))
        return (x, seen) if aux else x


class DecoderBlock(nnx.Module):
    """Update every position from its sequence, then from a memory, then from itself.

    With norm="pre" (and as in `EncoderBlock` for "post"):

    x = x + dropout(self_attention(norm(x)))
    x = x + dropout(cross_attention(norm(x), memory))
    x = x + dropout(feed_forward(norm(x)))

    The block adds no mask of its own: a causal decoder passes `mask=masks.causal()`.

    Args:
        d_model: width M.
        num_heads: H, in both attentions.
        d_ff: width F of the feed-forward branch.
        memory_width: width of the memory. None means `d_model`.
        norm: as in `EncoderBlock`.
        activation: as in `FeedForward`.
        dropout_rate: in [0, 1), on the three branches before they are added, and on the hidden layer of the
            feed-forward branch.
        attention_dropout_rate: in [0, 1), on the weights of both attentions.
        num_key_heads: as in `MultiHeadAttention`.
        head_dim: as in `MultiHeadAttention`.
        attention_bias: whether the attention projections have biases.
        dtype: dtype to compute in; None means that of inputs and parameters.
        param_dtype: dtype of the parameters.
        rngs: random streams: "params", and "dropout" where something drops.

    Raises:
        ValueError: as for the parts, or an unknown `norm`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard import masks
        >>> from regard.layers import DecoderBlock
        >>> block = DecoderBlock(6, 3, 11, rngs=nnx.Rngs(0))
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
        activation: str = "gelu_tanh",
        dropout_rate: float = 0.0,
        attention_dropout_rate: float = 0.0,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        attention_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        attention = {
            "num_key_heads": num_key_heads,
            "head_dim": head_dim,
            "use_bias": attention_bias,
            "dropout_rate": attention_dropout_rate,
            **dtypes,
            "rngs": rngs,
        }
        self.self_attention = MultiHeadAttention(d_model, num_heads, **attention)
        self.cross_attention = MultiHeadAttention(d_model, num_heads, memory_width=memory_width, **attention)
        self.feed_forward = FeedForward(
            d_model, d_ff, activation=activation, dropout_rate=dropout_rate, **dtypes, rngs=rngs
        )
        residual = {"norm": norm, "dropout_rate": dropout_rate, **dtypes, "rngs": rngs}
        self.self_residual = Residual(d_model, **residual)
        self.cross_residual = Residual(d_model, **residual)
        self.feed_forward_residual = Residual(d_model, **residual)

    def __call__(
        self,
        x: ArrayLike,
        memory: ArrayLike,
        *,
        mask: Mask | ArrayLike | None = None,
        memory_mask: Mask | ArrayLike | None = None,
        aux: tuple[str, ...] = (),
    ) -> Any:
        """Run the block.

        Args:
            x: `(*B, T, M)`, the residual stream.
            memory: `(*B, S, W)`, what the cross-attention reads, of any length.
            mask: who may attend to whom within x; None means everyone to everyone.
            memory_mask: who may attend to what in the memory; None means everyone to everything.
            aux: names as in `attend`.

        Returns:
            Array of x's shape; with `aux`, also {"self": dict, "cross": dict}.

        Raises:
            ValueError: inputs of the wrong rank or width.
        """
        x = check_features("x", x, self.self_attention.d_model)
        memory = check_features("memory", memory, self.cross_attention.memory_width)
        result = self.self_attention(self.self_residual.enter(x), mask=mask, aux=aux)
        attended, seen_self = unpack(result, aux)
        x = self.self_residual.leave(x, attended)
        result = self.cross_attention(self.cross_residual.enter(x), memory, mask=memory_mask, aux=aux)
        attended, seen_cross = unpack(result, aux)
        x = self.cross_residual.leave(x, attended)
        x = self.feed_forward_residual.leave(x, self.feed_forward(self.feed_forward_residual.enter(x)))
        return (x, {"self": seen_self, "cross": seen_cross}) if aux else x
