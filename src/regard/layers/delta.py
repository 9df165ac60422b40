"""Layers of the gated delta rule: linear attention with a short convolution, for hybrids with attention."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from regard import linear
from regard.arguments import guided, integers, read_size
from regard.axes import Array, ArrayLike, Float, Size
from regard.cache.rows import divide_rows, row_integers
from regard.layers.choices import check_counts, check_initializers, check_kind, check_options, check_own_cache
from regard.layers.delta_cache import DeltaCache
from regard.layers.heads import check_heads, merge_heads, split_heads
from regard.layers.multi_head import check_features
from regard.layers.residual import EPSILON, check_epsilon
from regard.layers.short_convolution import convolve, keep_newest
from regard.masks.data import check_rows, check_width
from regard.masks.grid import spread


class _Delta(nnx.Module):
    """The delta rule with all that is around it; decays and gates without an entry are made of x itself."""

    _activate_gate = staticmethod(jax.nn.silu)

    d_model: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    conv_width: int
    forget_entry: nnx.Linear | None
    forget_projection: nnx.Linear
    gate_entry: nnx.Linear | None
    gate_projection: nnx.Linear

    def _build(self, sizes: dict[str, int], *, norm_epsilon: float, kernel_init: Any, **options: Any) -> Any:
        """Build the shared parts, of these sizes by name; return what makes a linear map."""
        check_options(sizes, **options)
        check_initializers(kernel_init=kernel_init)
        check_epsilon(norm_epsilon)
        for name, size in sizes.items():
            setattr(self, name, size)
        self.precision, self.norm_epsilon = options["precision"], norm_epsilon
        build = functools.partial(nnx.Linear, use_bias=False, kernel_init=kernel_init, **options)
        key_width, value_width = self.num_key_heads * self.head_dim, self.num_heads * self.value_dim
        self.query_projection = build(self.d_model, key_width)
        self.key_projection = build(self.d_model, key_width)
        self.value_projection = build(self.d_model, value_width)
        self.rate_projection = build(self.d_model, self.num_heads)
        self.output_projection = build(value_width, self.d_model)
        dtype, rngs, bound = options["param_dtype"], options["rngs"], self.conv_width**-0.5

        def draw_taps(width: int) -> nnx.Param[Array]:
            shape = (self.conv_width, width)
            return nnx.Param(jax.random.uniform(rngs.params(), shape, dtype, -bound, bound))

        self.query_taps, self.key_taps = draw_taps(key_width), draw_taps(key_width)
        self.value_taps = draw_taps(value_width)
        self.norm_scale = nnx.Param(jnp.ones(self.value_dim, dtype))
        return build

    def _draw_decay(self, width: int, dtype: Any, rngs: nnx.Rngs) -> None:
        """Draw speeds in [1, 16], and biases of softplus in [0.001, 0.1], even in its log, as in Mamba."""
        speed = jax.random.uniform(rngs.params(), (self.num_heads,), dtype, 1.0, 16.0)
        self.log_speed = nnx.Param(jnp.log(speed))
        least, most = math.log(1e-3), math.log(0.1)
        amount = jnp.exp(jax.random.uniform(rngs.params(), (width,), dtype, least, most))
        self.forget_bias = nnx.Param(amount + jnp.log(-jnp.expm1(-amount)))

    def start_cache(self, batch: Size) -> DeltaCache:
        """Make an empty cache for so many rows, of any length."""
        batch = read_size("batch", batch)
        dtype = self.query_projection.dtype or self.query_projection.kernel.dtype
        width = sum(taps.shape[-1] for taps in (self.query_taps, self.key_taps, self.value_taps))
        shape = (batch, self.num_heads, self.head_dim, self.value_dim)
        return DeltaCache(
            jnp.zeros(batch, jnp.int32),
            jnp.zeros(shape, np.promote_types(dtype, jnp.float32)),
            jnp.zeros((batch, self.conv_width - 1, width), dtype),
        )

    def __call__(
        self,
        x: ArrayLike,
        *,
        segments: ArrayLike | None = None,
        cache: DeltaCache | None = None,
        counts: ArrayLike | None = None,
    ) -> Any:
        """Read each token of x from what the tokens before it wrote.

        Args:
            x: `(*B, T, M)`; with a cache, of `start_cache`, `(batch, T, M)`.
            segments: packed documents, integers `(batch, ..., T)` or `(T,)`, each read by itself. With a
                cache, the first token is of the document that the cache ends with.
            cache: the tokens so far, for decoding: the T tokens come after them.
            counts: with a cache, how many of the T tokens are real, `(batch,)`; None means all. Padding at
                the end of rows needs nothing, as no token reads a later one.

        Returns:
            Array of x's shape; with a cache, also a dict that holds the longer one as "cache".

        Raises:
            TypeError: with a cache, an input that would lose digits there.
            ValueError: an input of the wrong rank or width, a cache of another layer.
        """
        x = check_features("x", x, self.d_model)
        check_counts(counts, cache, has_mask=False)
        T, leading = x.shape[-2], x.shape[:-2]
        if cache is not None:
            self._check_cache(cache, x)
            cache = divide_rows(cache, x)
        if segments is not None:
            documents = integers("segments", segments)
            check_rows("segments", documents.shape[:-1], leading)
            check_width("segments", "x", documents.shape[-1], T)
            segments = spread(documents, len(leading) + 1, trailing=1)
        # First: the gradients of the maps that devices divide by heads are then added, and summed, at once.
        forget = x if self.forget_entry is None else self.forget_entry(x)
        gate = x if self.gate_entry is None else self.gate_entry(x)
        projections = (self.query_projection, self.key_projection, self.value_projection)
        features = [project(x) for project in projections]
        width = self.query_taps.shape[-1]
        before = [None] * 3 if cache is None else jnp.split(cache.recent, [width, 2 * width], axis=-1)
        taps = (self.query_taps[...], self.key_taps[...], self.value_taps[...])
        # Each by itself: side by side, heads that devices divide would travel.
        query, key, value = [
            jax.nn.silu(convolve(rows, weights.astype(rows.dtype), earlier, segments))
            for rows, weights, earlier in zip(features, taps, before, strict=True)
        ]
        wide = np.promote_types(x.dtype, jnp.float32)
        query, key = self._spread_heads(query.astype(wide)), self._spread_heads(key.astype(wide))
        options: Any = {"precision": self.precision}
        if segments is not None:
            options["segments"] = segments
        if counts is not None:
            counts = row_integers("counts", counts, *leading)
            options["valid"] = jnp.arange(T, dtype=jnp.int32)[None] < counts[:, None]
        output, state = linear.attend(
            query,
            key,
            split_heads(value, self.num_heads),
            decay=self._decay(forget, wide),
            rate=jnp.moveaxis(jax.nn.sigmoid(self.rate_projection(x).astype(wide)), -1, -2),
            initial=None if cache is None else linear.State(cache.memory.astype(wide)),
            return_state=True,
            **options,
        )
        size = jnp.mean(output * output, axis=-1, keepdims=True) + jnp.asarray(self.norm_epsilon, wide)
        scale = _align(self.norm_scale[...].astype(wide), output)
        output = output * jax.lax.rsqrt(size) * scale * self._gate(gate, wide)
        output = self.output_projection(merge_heads(output).astype(x.dtype))
        if cache is None:
            return output
        added = jnp.full(leading, T, jnp.int32) if counts is None else jnp.clip(counts, 0, T)
        recent = keep_newest(cache.recent, jnp.concatenate(features, axis=-1), added, segments)
        memory = state.memory.astype(cache.memory.dtype)
        return output, {"cache": DeltaCache(cache.lengths + added, memory, recent)}

    def _spread_heads(self, features: Array) -> Array:
        """Return heads of length 1, each for the heads of values that follow one another."""
        heads = _normalise(split_heads(features, self.num_key_heads))
        return jnp.repeat(heads, self.num_heads // self.num_key_heads, axis=-3)

    def _decay(self, entry: Array, wide: Any) -> Array:
        """Return the log of what is kept, per channel `(*B, H, T, D)`, or without an entry `(*B, H, T)`."""
        bias = _align(self.forget_bias[...].astype(wide), entry)
        amount = self.forget_projection(entry).astype(wide) + bias
        speed = jnp.exp(self.log_speed[...].astype(wide))[:, None, None]
        speed = jnp.expand_dims(speed, range(entry.ndim - 2))
        decay = -speed * jax.nn.softplus(split_heads(amount, self.num_heads))
        return decay[..., 0] if self.forget_entry is None else decay

    def _gate(self, entry: Array, wide: Any) -> Array:
        return self._activate_gate(split_heads(self.gate_projection(entry), self.num_heads).astype(wide))

    def _check_cache(self, cache: Any, x: Array) -> None:
        check_kind("cache", cache, DeltaCache)
        empty_cache = jax.eval_shape(lambda: self.start_cache(cache.batch))
        check_own_cache(cache, empty_cache, x)


@guided
class GatedDeltaNet(_Delta):
    """Linear attention by the gated delta rule: every head replaces what its state holds under a key.

    query, key, value = silu(convolution(x Wq, x Wk, x Wv)),  query and key then of length 1
    S_t = A_t S_(t-1) + key_t u_t^T,  u_t = rate_t (value_t - key_t^T A_t S_(t-1))
    read_t = query_t^T S_t / sqrt(D)
    A_t = exp(-exp(log_speed) softplus(x Wa + forget_bias)),  rate_t = sigmoid(x Wb)
    output = concat(norm(read) * silu(x Wz)) Wo

    Time grows linearly with the length, and decoding has a state of one size. The convolution has taps of
    its own for each feature. As the hybrid of Qwen3.5 and Qwen3-Next: three such layers to one of attention.

    Args:
        d_model: width M of input and output.
        num_heads: H, heads of values, each with a state.
        num_key_heads: K, a divisor of `num_heads`: heads of queries and keys. None means H.
        head_dim: D, the width of a query and key. None means `d_model // num_heads`.
        value_dim: E, the width of a value. None means `head_dim`.
        conv_width: tokens that the convolution reads, a token and those before it.
        norm_epsilon: of the norm of what each head has read.
        dtype, param_dtype, kernel_init, precision, rngs: as in `MultiHeadAttention`. States, decays and norms
            are float32 at least.

    Raises:
        ValueError: sizes below 1, heads that do not divide.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard.layers import GatedDeltaNet
        >>> layer = GatedDeltaNet(6, num_heads=4, num_key_heads=2, head_dim=3, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 5, 6)), segments=jnp.array([0, 0, 1, 1, 1])).shape
        (2, 5, 6)

    Reference: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2025, section 3.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        conv_width: int = 4,
        norm_epsilon: float = EPSILON,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = nnx.initializers.glorot_uniform(),  # noqa: B008 (a pure function)
        precision: Any = None,
        rngs: nnx.Rngs,
    ):
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        head_dim = check_heads(d_model, num_heads, num_key_heads, head_dim)
        sizes = {"d_model": d_model, "num_heads": num_heads, "num_key_heads": num_key_heads}
        sizes |= {"head_dim": head_dim, "value_dim": head_dim if value_dim is None else value_dim}
        sizes["conv_width"] = conv_width
        options = {"dtype": dtype, "param_dtype": param_dtype, "precision": precision, "rngs": rngs}
        build = self._build(sizes, norm_epsilon=norm_epsilon, kernel_init=kernel_init, **options)
        self.forget_entry = self.gate_entry = None
        self.forget_projection = build(d_model, num_heads)
        self.gate_projection = build(d_model, num_heads * self.value_dim)
        self._draw_decay(num_heads, param_dtype, rngs)


@guided
class KimiDelta(_Delta):
    """The gated delta rule with a factor per channel: every feature of a key is forgotten at its own speed.

    As `GatedDeltaNet`, with E = D and

    A_t = diag(exp(-exp(log_speed) softplus((x Wf) Wa + forget_bias)))
    output = concat(norm(read) * sigmoid((x Wg) Wz)) Wo

    where Wf and Wg have `head_dim` columns. As the hybrid of Kimi Linear, beside attention without positions.

    Args:
        d_model: width M of input and output.
        num_heads: H.
        head_dim: D, the width of queries, keys and values. None means `d_model // num_heads`.
        conv_width, norm_epsilon, dtype, param_dtype, kernel_init, precision, rngs: as in `GatedDeltaNet`.

    Raises:
        ValueError: sizes below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard.layers import KimiDelta
        >>> layer = KimiDelta(6, num_heads=3, rngs=nnx.Rngs(0))
        >>> out, seen = layer(jnp.ones((2, 5, 6)), cache=layer.start_cache(batch=2))
        >>> seen["cache"].lengths.tolist()
        [5, 5]

    Reference: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025, section 3.
    """

    _activate_gate = staticmethod(jax.nn.sigmoid)

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        conv_width: int = 4,
        norm_epsilon: float = EPSILON,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = nnx.initializers.glorot_uniform(),  # noqa: B008 (a pure function)
        precision: Any = None,
        rngs: nnx.Rngs,
    ):
        head_dim = check_heads(d_model, num_heads, num_heads, head_dim)
        sizes = {"d_model": d_model, "num_heads": num_heads, "num_key_heads": num_heads}
        sizes |= {"head_dim": head_dim, "value_dim": head_dim, "conv_width": conv_width}
        options = {"dtype": dtype, "param_dtype": param_dtype, "precision": precision, "rngs": rngs}
        build = self._build(sizes, norm_epsilon=norm_epsilon, kernel_init=kernel_init, **options)
        self.forget_entry, self.gate_entry = build(d_model, head_dim), build(d_model, head_dim)
        self.forget_projection = build(head_dim, num_heads * head_dim)
        self.gate_projection = build(head_dim, num_heads * head_dim)
        self._draw_decay(num_heads * head_dim, param_dtype, rngs)


def _align(vector: Array, x: Array) -> Array:
    """Give a vector of features the axes of x."""
    return jnp.expand_dims(vector, range(x.ndim - 1))


def _normalise(array: Float[Array, "*B H T D"]) -> Float[Array, "*B H T D"]:
    """Divide by the length, with the small number added that keeps 0 at 0."""
    square = jnp.sum(array * array, axis=-1, keepdims=True)
    return array * jax.lax.rsqrt(square + jnp.asarray(1e-6, array.dtype))
