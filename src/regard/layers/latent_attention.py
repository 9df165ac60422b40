"""Multi-head latent attention (MLA): keys and values of all heads are remembered as one short vector."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from regard import masks
from regard.arguments import guided, integers
from regard.attention import attend
from regard.axes import Array, ArrayLike, Size
from regard.cache import KVCache
from regard.engine.call.canonicalization import read_scale
from regard.engine.call.hooks import called_by
from regard.engine.dispatch.placement import place_here
from regard.layers.choices import check_counts, check_initializers, check_kind, check_options, check_rotary
from regard.layers.heads import merge_heads, place_mask, split_heads
from regard.layers.indexer import Indexer
from regard.layers.multi_head import check_features, pack, unpack
from regard.layers.residual import EPSILON, build_norm
from regard.masks import Mask
from regard.positions import Rotary
from regard.scores import Score


class _Tokens(NamedTuple):
    """The new tokens of a call: what they are, what queries are made of, where they sit, parts of heads."""

    x: Array
    source: Array
    index: Array
    query: Array  # of every head
    turned_query: Array
    latent: Array  # of all heads
    turned: Array


@guided
class LatentAttention(nnx.Module):
    """Self-attention whose heads read keys and values off one latent vector per token.

    latent, turned = split(x Wl);  latent = norm(latent)
    key_h = concat(latent Wk_h, rotary(turned)),  value_h = latent Wv_h
    query_h = concat(query, rotary(query)) of x Wq_h, or of norm(x Wd) Wq_h with `query_latent_dim`
    output = concat(attend(query_h, key_h, value_h)) Wo

    With a cache, only latent and turned key are kept, `latent_dim + rotary_dim` numbers per token whatever
    the number of heads, and neither keys nor values are made of them: as `(q Wk^T) latent = q (latent Wk)`,
    Wk goes to the queries, and Wv to what the heads have read. All heads then share one key head.

    With `index_count`, an indexer of a few small heads chooses so many keys for each query, and all heads
    attend to these alone (DeepSeek's sparse attention), in memory linear in T `index_count`; the indexer
    scores all pairs, some queries at a time. Its keys are kept beside the turned ones.

    Args:
        d_model, num_heads: width M of input and output, and H.
        latent_dim: width of the latent vector.
        head_dim, rotary_dim: widths of the parts of queries and keys that are not turned, and that are.
        value_dim: width of a head's values. None means `head_dim`.
        query_latent_dim: width of a latent vector of the queries. None means that they have none.
        rotary: how that part is turned, by default as DeepSeek stores it; None leaves it as it is.
        index_count: keys that each query attends to; None means all.
        index_heads, index_dim: heads of the indexer, and their width, of which `rotary_dim` are turned.
        scale: what scores are multiplied by. None means 1/sqrt(head_dim + rotary_dim).
        use_bias: whether the maps from the input, and the one to the output, have biases; others have none.
        norm_epsilon: of the latent vectors' norms.
        dtype, param_dtype, kernel_init, precision, rngs: as in `MultiHeadAttention`.

    Raises:
        ValueError: sizes below 1, an odd `rotary_dim`, an indexer without its sizes.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard import layers, masks
        >>> layer = layers.LatentAttention(6, 3, latent_dim=5, head_dim=4, rotary_dim=2, rngs=nnx.Rngs(0))
        >>> cache = layer.start_cache(batch=2, capacity=7)
        >>> out, seen = layer(jnp.ones((2, 3, 6)), mask=masks.causal(), cache=cache)
        >>> out.shape, seen["cache"].value.shape, seen["cache"].key.shape
        ((2, 3, 6), (2, 1, 7, 5), (2, 1, 7, 2))

    Reference: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1 and appendix C; for the indexer DeepSeek-AI,
    "DeepSeek-V3.2", 2025, section 2.1.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        latent_dim: int,
        head_dim: int,
        rotary_dim: int,
        value_dim: int | None = None,
        query_latent_dim: int | None = None,
        index_count: int | None = None,
        index_heads: int | None = None,
        index_dim: int | None = None,
        rotary: Rotary | None = Rotary(interleaved=True),  # noqa: B008 (immutable)
        scale: float | None = None,
        use_bias: bool = False,
        norm_epsilon: float = EPSILON,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = nnx.initializers.glorot_uniform(),  # noqa: B008 (a pure function)
        precision: Any = None,
        rngs: nnx.Rngs,
    ):
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"d_model": d_model, "num_heads": num_heads, "latent_dim": latent_dim, "head_dim": head_dim}
        sizes |= {"rotary_dim": rotary_dim, "value_dim": value_dim}
        sizes |= {} if query_latent_dim is None else {"query_latent_dim": query_latent_dim}
        sizes |= check_indexer(index_count, index_heads, index_dim, rotary_dim)
        indexer: Any = {"num_heads": index_heads, "head_dim": index_dim, "count": index_count}
        shared = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        check_options(sizes, precision=precision, use_bias=use_bias, **shared)
        check_initializers(kernel_init=kernel_init)
        if rotary_dim % 2:
            raise ValueError(f"rotary_dim: expected an even number, as pairs are turned; got {rotary_dim}")
        check_rotary(rotary, rotary_dim)
        self.d_model, self.num_heads, self.latent_dim = d_model, num_heads, latent_dim
        self.head_dim, self.rotary_dim, self.value_dim = head_dim, rotary_dim, value_dim
        self.rotary = rotary
        if scale is not None:
            read_scale(scale)
        self.scale = (head_dim + rotary_dim) ** -0.5 if scale is None else scale
        self.precision = precision
        linear = functools.partial(nnx.Linear, kernel_init=kernel_init, precision=precision, **shared)
        norm = functools.partial(build_norm, kind="rms", epsilon=norm_epsilon, **shared)
        width = num_heads * (head_dim + rotary_dim)
        if query_latent_dim is None:
            self.query_latent = self.query_norm = None
        else:
            self.query_latent = linear(d_model, query_latent_dim, use_bias=use_bias)
            self.query_norm = norm(query_latent_dim)
        if index_count is None:
            self.indexer = None
        else:
            indexer |= {"rotary": self.rotary, "rotary_dim": rotary_dim, "kernel_init": kernel_init}
            indexer |= {"precision": precision, **shared}
            self.indexer = Indexer(d_model, query_latent_dim or d_model, **indexer)
        self.query_projection = linear(query_latent_dim or d_model, width, use_bias=False)
        self.latent = linear(d_model, latent_dim + rotary_dim, use_bias=use_bias)
        self.latent_norm = norm(latent_dim)
        self.expansion = linear(latent_dim, num_heads * (head_dim + self.value_dim), use_bias=False)
        self.output_projection = linear(num_heads * self.value_dim, d_model, use_bias=use_bias)

    def start_cache(self, batch: Size, capacity: Size, *, window: int | None = None) -> KVCache:
        """Make an empty cache in the dtype of the layer, or of its parameters, as `KVCache.create` does.

        Its `value` is for the latent vectors of tokens, its `key` for their turned keys. A ValueError refuses
        a window beside an indexer.
        """
        self._check_window(window)
        dtype = self.latent.kernel.dtype if self.latent.dtype is None else self.latent.dtype
        return KVCache.create(batch, 1, capacity, *self.cache_widths, dtype=dtype, window=window)

    @property
    def cache_widths(self) -> tuple[int, int]:
        """Widths of a token's `key`, its turned key and that of an indexer, and `value` in the cache."""
        return self.rotary_dim + (0 if self.indexer is None else self.indexer.head_dim), self.latent_dim

    def __call__(
        self,
        x: ArrayLike,
        *,
        mask: Mask | ArrayLike | None = None,
        score: Score | Sequence[Score] | None = None,
        positions: ArrayLike | None = None,
        cache: KVCache | None = None,
        counts: ArrayLike | None = None,
        aux: tuple[str, ...] = (),
    ) -> Array | Any:
        """Attend from x to itself, or to the tokens of a cache with those of x behind them.

        Args:
            x: `(*B, T, M)`; with a cache, of `start_cache`, `(batch, T, M)`.
            positions: where each token sits, `(T,)` or `(batch, T)`; None means 0..T-1, or behind the cache.
            mask, score, cache, counts, aux: as in `MultiHeadAttention`.

        Returns:
            Array of x's shape; with `aux` or a cache, also a dict that holds the longer one as "cache".

        Raises:
            ValueError: an input of the wrong rank or width, positions beside a cache, another layer's cache.
        """
        x = check_features("x", x, self.d_model)
        check_counts(counts, cache)
        if cache is not None:
            self._check_cache(cache, x, positions)
        rank, leading = x.ndim, x.shape[:-2]
        x = jax.lax.broadcast_to_rank(x, 3)
        row = jnp.arange(x.shape[-2], dtype=jnp.int32)
        index: Any = row if positions is None else integers("positions", positions)
        if index.shape not in ((row.size,), (1, row.size), (x.shape[0], row.size)):
            raise ValueError(
                f"positions: expected one integer per token, ({row.size},) or ({x.shape[0]}, {row.size}); got"
                f" shape {tuple(index.shape)}"
            )
        if cache is not None:
            index = cache.lengths[:, None] + row[None]
        elif positions is None:
            index = place_here(row, row.size)
        source = x
        if self.query_latent is not None and self.query_norm is not None:
            source = self.query_norm(self.query_latent(x))
        heads = split_heads(self.query_projection(source), self.num_heads)
        query, turned_query = jnp.split(heads, [self.head_dim], axis=-1)
        latent, turned = jnp.split(self.latent(x), [self.latent_dim], axis=-1)
        latent = self.latent_norm(latent)[..., None, :, :]
        turned = self._turn(turned[..., None, :, :], index)
        tokens = _Tokens(x, source, index, query, self._turn(turned_query, index), latent, turned)
        num_keys = x.shape[-2] if cache is None else cache.slots
        options: dict[str, Any] = {"score": score, "scale": self.scale, "aux": aux}
        options["precision"] = self.precision
        options["mask"] = place_mask(mask, leading, x.shape[-2], num_keys)
        # From a cache, heads read latent vectors, which the projection does not take as they are.
        with called_by(self, "self", self.output_projection if cache is None else None):
            if cache is None:
                places = {} if positions is None else {"query_positions": index, "key_positions": index}
                out, stats = unpack(self._attend_whole(tokens, options, places), aux)
            else:
                result, cache = self._attend_cached(tokens, options, cache, counts)
                out, stats = unpack(result, aux)
                out = self._multiply("bhtr,rhv->bhtv", out, self._expand()[..., self.head_dim :])
        out = self.output_projection(merge_heads(out))
        return pack(out, stats, rank, cache, aux)

    def _attend_whole(self, tokens: _Tokens, options: dict[str, Any], places: dict[str, Any]) -> Any:
        """Attend from the tokens to themselves, with keys and values of every head."""
        heads = split_heads(self.expansion(tokens.latent[..., 0, :, :]), self.num_heads)
        key, value = jnp.split(heads, [self.head_dim], axis=-1)
        turned = jnp.broadcast_to(tokens.turned, (*key.shape[:-1], self.rotary_dim))
        key = jnp.concatenate([key, turned.astype(key.dtype)], axis=-1)
        query = jnp.concatenate([tokens.query, tokens.turned_query], axis=-1)
        if self.indexer is not None:
            index_key = self.indexer.make_keys(tokens.x, tokens.index)
            options["mask"] = self.indexer.choose(*tokens[:3], index_key, options["mask"], **places)
        return attend(query, key, value, **options, **places)

    def _attend_cached(
        self, tokens: _Tokens, options: dict[str, Any], cache: KVCache, counts: ArrayLike | None
    ) -> tuple[Any, KVCache]:
        """Attend to the latent vectors of a cache; return what the heads read, and the longer cache."""
        turned, before = tokens.turned, cache.lengths
        if self.indexer is not None:
            index_key = self.indexer.make_keys(tokens.x, tokens.index)[..., None, :, :]
            turned = jnp.concatenate([turned, index_key.astype(turned.dtype)], axis=-1)
        cache = cache.append(turned, tokens.latent, counts)
        stored: Any = cache
        turned_keys, index_keys = jnp.split(stored.key, [self.rotary_dim], axis=-1)
        if self.indexer is not None:
            written = masks.lengths(cache.lengths)
            mask = written if options["mask"] is None else options["mask"] & written
            chooser = (*tokens[:3], index_keys[..., 0, :, :], mask)
            options["mask"] = self.indexer.choose(*chooser, query_offset=before)
        query = self._multiply("bhtn,rhn->bhtr", tokens.query, self._expand()[..., : self.head_dim])
        query = jnp.concatenate([query, tokens.turned_query.astype(query.dtype)], axis=-1)
        read = dataclasses.replace(cache, key=jnp.concatenate([stored.value, turned_keys], axis=-1))
        return read.attend(query, counts=counts, **options), cache

    def _expand(self) -> Array:
        """Return the map from latent vectors to keys and values, `(R, H, N + V)`."""
        return self.expansion.kernel[...].reshape((self.latent_dim, self.num_heads, -1))

    def _check_window(self, window: int | None) -> None:
        """Raise where a cache with so long a window would drop keys that an indexer chooses among."""
        if window is not None and self.indexer is not None:
            raise ValueError(
                f"window: expected None with an indexer, which chooses among all keys; got {window}."
                " Leave out window= of the cache"
            )

    def _check_cache(self, cache: KVCache, x: Array, positions: Any) -> None:
        """Raise unless the cache is this layer's, and x what may be appended to it."""
        check_kind("cache", cache, KVCache)
        self._check_window(cache.window)
        key, value = cache.key, cache.value
        is_plain = isinstance(key, jax.Array) and isinstance(value, jax.Array)
        widths = (*key.shape[1::2], value.shape[-1]) if is_plain else ()
        key_width, value_width = self.cache_widths
        if widths != (1, key_width, value_width):
            raise ValueError(
                f"cache: expected one key head of width {key_width} with values of {value_width},"
                f" as arrays, got {cache!r}; make it with the layer's start_cache"
            )
        if positions is not None or x.shape[:-2] != (cache.batch,):
            raise ValueError(
                f"cache: expected x ({cache.batch}, T, {self.d_model}) without positions, got {x.shape}"
                f"{'' if positions is None else ' with positions'}"
            )

    def _turn(self, features: Array, index: ArrayLike) -> Array:
        """Turn the parts of queries or keys that positions turn, where there is a rule."""
        return features if self.rotary is None else self.rotary(features, index)

    def _multiply(self, axes: str, features: Array, kernel: Array) -> Array:
        return jnp.einsum(axes, features, kernel.astype(features.dtype), precision=self.precision)


def check_indexer(
    count: int | None, num_heads: int | None, head_dim: int | None, rotary_dim: int
) -> dict[str, Any]:
    """Check that an indexer has all of its sizes, which are returned by their names, or none."""
    sizes = {"index_count": count, "index_heads": num_heads, "index_dim": head_dim}
    if len({size is None for size in sizes.values()}) == 2:
        raise ValueError(f"index_count: expected all of {', '.join(sizes)}, or none of them; got {sizes}")
    if head_dim is not None and head_dim < rotary_dim:
        raise ValueError(f"index_dim: expected at least rotary_dim = {rotary_dim}, got {head_dim}")
    return {} if count is None else sizes
