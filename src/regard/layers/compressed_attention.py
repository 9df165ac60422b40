"""Compressed attention: a window of tokens and one entry for each block of tokens, in one softmax."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from regard import masks
from regard.arguments import guided, integers, read_size, whole_number
from regard.attention import attend, merge
from regard.axes import Array, ArrayLike, Size
from regard.cache.rows import divide_rows, row_integers
from regard.engine.call.hooks import called_by
from regard.engine.dispatch.placement import demand_whole
from regard.layers.choices import (
    check_counts,
    check_initializers,
    check_kind,
    check_options,
    check_own_cache,
    check_rotary,
)
from regard.layers.compressed_cache import CompressedCache
from regard.layers.compressor import Blocks, Compressor, turn_tail
from regard.layers.heads import merge_heads, split_heads
from regard.layers.indexer import BlockIndexer
from regard.layers.latent_attention import check_indexer
from regard.layers.multi_head import check_features
from regard.layers.residual import EPSILON, build_norm
from regard.layers.short_convolution import keep_newest
from regard.masks.data import check_rows, check_width
from regard.masks.grid import is_concrete, spread
from regard.positions import Rotary


@guided
class CompressedAttention(nnx.Module):
    """Causal self-attention to the newest tokens as they are, and to an entry for each block of all.

    latent_t = norm(x_t Wd),  query_th = turn(norm(latent_t Wq_h)),  key_t = turn(norm(x_t Wk))
    entry_i = turn(norm(sum_j softmax_j(x_j Wg + bias_j) x_j Wf)), number by number, over block i's tokens j
    read_th = attend(query_th, key_s with t - window <= s <= t, and entry_i of blocks that end by t)
    group_tg = concat_(h of g)(turn_back(read_th)) Wo_g
    output_t = concat_g(group_tg) Wo

    Keys and entries are also what is read, for all heads; their weights, and that of a sink per head, sum to
    1 together. As both are turned, reads are turned back, so that distances alone count. Blocks of
    `compress_rate` tokens follow one another from the first token on; one that has not ended is not read.

    Without an indexer this is heavily compressed attention (HCA), whose memory is linear in T. With
    `index_count` it is compressed sparse attention (CSA): an entry also reads the block before its own, with
    weights Wf, Wg and biases for it, and an indexer with entries of its own chooses so many entries for each
    query, in memory linear in T `index_count`. A choice has no gradient.

    Traces do not take its calls yet, whose keys are not consecutive: `inspection.capture` refuses them.

    Args:
        d_model, num_heads: width M of input and output, and H.
        head_dim: D, the width of queries, keys and entries.
        rotary_dim: how many of these numbers, the last ones, are turned; even.
        window: tokens before its own that a query attends to as they are.
        compress_rate: tokens of a block.
        query_latent_dim: width of the latent vector of the queries.
        output_latent_dim: width of what is made of a group of heads before the output.
        output_groups: a divisor of `num_heads`: the groups, each of heads that follow one another.
        rotary: how numbers are turned, by default as DeepSeek stores them; None leaves them as they are.
        index_count: entries that each query attends to; None means all.
        index_heads, index_dim: heads of the indexer, and their width, of which `rotary_dim` are turned.
        norm_epsilon: of all norms.
        dtype, param_dtype, kernel_init, precision, rngs: as in `MultiHeadAttention`.

    Raises:
        ValueError: sizes below 1, groups that do not divide, an odd `rotary_dim`, an indexer without its
            sizes.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard.layers import CompressedAttention
        >>> sizes = {"head_dim": 4, "rotary_dim": 2, "window": 3, "compress_rate": 5, "query_latent_dim": 7}
        >>> layer = CompressedAttention(6, 2, **sizes, output_latent_dim=3, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((2, 13, 6))
        >>> out, seen = layer(x[:, :11], cache=layer.start_cache(batch=2, capacity=100))
        >>> out, seen = layer(x[:, 11:], cache=seen["cache"])
        >>> bool(jnp.allclose(out, layer(x)[:, 11:], atol=1e-5))
        True

    Reference: DeepSeek-AI, "DeepSeek-V4: Towards Highly Efficient Million-Token Context Intelligence", 2026,
    section 2.3; where it leaves a choice, as transformers 5.24.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        head_dim: int,
        rotary_dim: int,
        window: int,
        compress_rate: int,
        query_latent_dim: int,
        output_latent_dim: int,
        output_groups: int = 1,
        rotary: Rotary | None = Rotary(interleaved=True),  # noqa: B008 (immutable)
        index_count: int | None = None,
        index_heads: int | None = None,
        index_dim: int | None = None,
        norm_epsilon: float = EPSILON,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = nnx.initializers.glorot_uniform(),  # noqa: B008 (a pure function)
        precision: Any = None,
        rngs: nnx.Rngs,
    ):
        sizes = {"d_model": d_model, "num_heads": num_heads, "head_dim": head_dim, "rotary_dim": rotary_dim}
        sizes |= {"compress_rate": compress_rate, "query_latent_dim": query_latent_dim}
        sizes |= {"output_latent_dim": output_latent_dim, "output_groups": output_groups}
        sizes |= check_indexer(index_count, index_heads, index_dim, rotary_dim)
        indexer: Any = {"num_heads": index_heads, "head_dim": index_dim, "count": index_count}
        shared = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        check_options(sizes, precision=precision, **shared)
        check_initializers(kernel_init=kernel_init)
        if rotary_dim % 2 or rotary_dim > head_dim:
            raise ValueError(
                f"rotary_dim: expected an even number of at most head_dim = {head_dim}, got {rotary_dim}"
            )
        if num_heads % output_groups:
            raise ValueError(
                f"output_groups: expected a divisor of num_heads = {num_heads}, got {output_groups}"
            )
        check_rotary(rotary, rotary_dim)
        self.d_model, self.num_heads = d_model, num_heads
        self.head_dim, self.rotary_dim = head_dim, rotary_dim
        self.window, self.compress_rate = whole_number("window", window, 0), compress_rate
        self.rotary, self.precision = rotary, precision
        linear = functools.partial(nnx.Linear, use_bias=False, kernel_init=kernel_init, precision=precision)
        norm = functools.partial(build_norm, kind="rms", epsilon=norm_epsilon, **shared)
        self.query_latent = linear(d_model, query_latent_dim, **shared)
        self.query_latent_norm = norm(query_latent_dim)
        self.query_projection = linear(query_latent_dim, num_heads * head_dim, **shared)
        self.query_norm = norm(head_dim, use_scale=False)
        self.key_projection = linear(d_model, head_dim, **shared)
        self.key_norm = norm(head_dim)
        self.sinks = nnx.Param(jnp.zeros(num_heads, param_dtype))
        options: Any = {"size": compress_rate, "overlaps": index_count is not None, "rotary": rotary}
        options |= {"rotary_dim": rotary_dim, "norm_epsilon": norm_epsilon, "kernel_init": kernel_init}
        options |= {"precision": precision, **shared}
        self.compressor = Compressor(d_model, head_dim, **options)
        has_indexer = index_count is not None
        self.indexer = BlockIndexer(d_model, query_latent_dim, **indexer, **options) if has_indexer else None
        shape = (num_heads // output_groups * head_dim, output_latent_dim)
        groups = [kernel_init(rngs.params(), shape, param_dtype) for _ in range(output_groups)]
        self.group_kernels = nnx.Param(jnp.stack(groups))
        self.output_projection = linear(output_groups * output_latent_dim, d_model, **shared)

    def start_cache(self, batch: Size, capacity: Size) -> CompressedCache:
        """Make an empty cache for so many rows of `capacity` tokens, in the dtype of the layer.

        Its size is `capacity / compress_rate` entries, `window` keys, and the tokens of up to two blocks.
        """
        batch, capacity = read_size("batch", batch), read_size("capacity", capacity)
        dtype = self.key_projection.dtype or self.key_projection.kernel.dtype
        columns = 2 * sum(part.columns for part in self._compressors)
        reach, count = len(self._compressors) * self.compress_rate - 1, capacity // self.compress_rate
        shapes = [(self.window, self.head_dim), (reach, columns)]
        shapes += [(count, part.width) for part in self._compressors]
        recent, unfinished, *entries = [jnp.zeros((batch, *shape), dtype) for shape in shapes]
        lengths = jnp.zeros(batch, jnp.int32)
        return CompressedCache(lengths, recent, unfinished, tuple(entries), self.compress_rate)

    @property
    def _compressors(self) -> tuple[Compressor, ...]:
        return (self.compressor,) if self.indexer is None else (self.compressor, self.indexer.compressor)

    def __call__(
        self,
        x: ArrayLike,
        *,
        segments: ArrayLike | None = None,
        cache: CompressedCache | None = None,
        counts: ArrayLike | None = None,
    ) -> Any:
        """Attend from each token of x to those before it, or to those of a cache as well.

        Args:
            x: `(*B, T, M)`; with a cache, of `start_cache`, `(batch, T, M)`.
            segments: packed documents, integers `(batch, ..., T)` or `(T,)`, each read by itself: its blocks
                begin with its first token. Not with a cache, whose rows are one document each.
            cache: the tokens so far, for decoding: the T tokens come after them.
            counts: with a cache, how many of the T tokens are real, `(batch,)`; None means all. Padding at
                the end of rows needs nothing, as no token reads a later one.

        Returns:
            Array of x's shape; with a cache, also a dict that holds the longer one as "cache".

        Raises:
            TypeError: with a cache, an input that would lose digits there.
            ValueError: an input of the wrong rank or width, a cache of another layer, or with documents;
                outside jit a cache without room.
        """
        x = check_features("x", x, self.d_model)
        check_counts(counts, cache, has_mask=False)
        demand_whole("CompressedAttention")
        added = None if cache is None else self._check_cache(cache, x, segments, counts)
        cache = None if cache is None else divide_rows(cache, x)
        shape = x.shape
        x = jax.lax.broadcast_to_rank(x, 3)
        length, leading = x.shape[-2], x.shape[:-2]
        index = jnp.arange(length, dtype=jnp.int32)
        if added is not None:  # NaN of padding is not read
            x = jnp.where((index[None] < added[:, None])[..., None], x, 0)
        index = index if cache is None else cache.lengths[:, None] + index[None]
        latent = self.query_latent_norm(self.query_latent(x))
        query = self.query_norm(split_heads(self.query_projection(latent), self.num_heads))
        query = self._turn(query, index)
        key = self._turn(self.key_norm(self.key_projection(x)), index)
        projected = jnp.concatenate([part.project(x) for part in self._compressors], axis=-1)
        near, far, offset = masks.causal() & masks.sliding_window(self.window), masks.causal(), 0
        if cache is None:
            blocks = Blocks.lay(length, self.compress_rate)
            if segments is not None:
                documents = _number_documents(segments, leading, length)
                blocks, owners = Blocks.divide(documents, self.compress_rate)
                near &= masks.segments(documents, documents)
                far &= masks.segments(documents, owners)
            keys, entries = key, self._pool(projected, blocks)
        else:
            offset, before = cache.lengths, cache.recent
            cache = self._extend(cache, key, projected, added)
            keys = jnp.concatenate([before.astype(key.dtype), key], axis=-2)
            near &= ~masks.prefix(0)  # of a short row, what lies before its first token
            entries = cache.entries
            blocks = Blocks.lay(entries[0].shape[-2] * self.compress_rate, self.compress_rate)
        places = {"query_offset": offset, "key_positions": blocks.ends}
        if self.indexer is not None:
            far = self.indexer.choose(x, latent, index, entries[1], far, **places)
        options: dict[str, Any] = {"precision": self.precision, "aux": ("lse",)}
        with called_by(self, "self"):
            start = offset + length - keys.shape[-2]
            window = {"mask": near, "sinks": self.sinks[...], "query_offset": offset, "key_offset": start}
            parts = [_attend(query, keys, **window, **options)]
            parts.append(_attend(query, entries[0].astype(key.dtype), mask=far, **places, **options))
        read = merge_heads(self._turn(merge(parts)[0], -index))
        kernels = self.group_kernels[...].astype(read.dtype)
        groups = read.reshape((*read.shape[:-1], *kernels.shape[:2]))
        groups = jnp.einsum("...gi,gir->...gr", groups, kernels, precision=self.precision)
        groups = groups.reshape((*leading, length, self.output_projection.in_features))
        out = self.output_projection(groups).reshape(shape)
        return out if cache is None else (out, {"cache": cache})

    def _pool(self, projected: Array, blocks: Blocks) -> tuple[Array, ...]:
        """Return the entries of blocks, and those of an indexer behind them."""
        parts = jnp.split(projected, [2 * self.compressor.columns], axis=-1)
        return tuple(part.pool(own, blocks) for part, own in zip(self._compressors, parts, strict=False))

    def _extend(self, cache: CompressedCache, key: Array, projected: Array, added: Any) -> CompressedCache:
        """Return the cache with new tokens, and the entries of the blocks that they end."""
        length, reach = key.shape[-2], cache.unfinished.shape[-2]
        rows = jnp.concatenate([cache.unfinished.astype(projected.dtype), projected], axis=-2)
        lengths = cache.lengths + added
        blocks = Blocks.finish(cache.lengths, lengths, length, reach, self.compress_rate)
        slots = blocks.ends // self.compress_rate
        pairs = zip(cache.entries, self._pool(rows, blocks), strict=True)
        return CompressedCache(
            lengths,
            keep_newest(cache.recent, key, added),
            keep_newest(cache.unfinished, projected, added),
            tuple(_write(stored, slots, entries) for stored, entries in pairs),
            self.compress_rate,
        )

    def _turn(self, features: Array, index: ArrayLike) -> Array:
        return turn_tail(features, index, self.rotary, self.rotary_dim)

    def _check_cache(self, cache: Any, x: Array, segments: Any, counts: Any) -> Array:
        """Check that the cache is this layer's, with room for x; return how many tokens are added."""
        check_kind("cache", cache, CompressedCache)
        if segments is not None:
            raise ValueError(
                "segments: expected None with a cache, as each of its rows is one document; start a cache for"
                " each document, or read them whole"
            )
        capacity = cache.entries[0].shape[1] * self.compress_rate
        own = jax.eval_shape(lambda: self.start_cache(cache.batch, max(capacity, 1)))
        check_own_cache(cache, own, x)
        added = jnp.full(cache.batch, x.shape[-2], jnp.int32)
        if counts is not None:
            added = jnp.clip(row_integers("counts", counts, cache.batch), 0, x.shape[-2])
        full, most = cache.lengths + added, capacity + self.compress_rate - 1
        if is_concrete(full) and np.any(np.asarray(full) > most):
            raise ValueError(
                f"x: expected at most {most} tokens in each row of the cache, got {np.asarray(full).tolist()}"
                " with those of x; start it with a larger capacity"
            )
        return added


@jax.vmap
def _write(stored: Array, slots: Array, entries: Array) -> Array:
    """Write entries into a row's slots, those without room nowhere."""
    return stored.at[slots].set(entries.astype(stored.dtype), mode="drop")


def _attend(query: Array, key: Array, **options: Any) -> tuple[Array, Array]:
    """Attend to keys that are values, too, of all heads; return the output and lse."""
    key = key[..., None, :, :]
    output, aux = attend(query, key, key, **options)
    return output, aux["lse"]


def _number_documents(segments: ArrayLike, leading: tuple[Size, ...], length: Size) -> Array:
    """Return numbers of the documents, in order from 0, with as many leading axes as x."""
    ids = integers("segments", segments)
    check_rows("segments", ids.shape[:-1], leading)
    check_width("segments", "x", ids.shape[-1], length)
    ids = spread(jnp.asarray(ids), len(leading) + 1, trailing=1)
    return jnp.cumsum(jnp.diff(ids, axis=-1, prepend=ids[..., :1]) != 0, axis=-1, dtype=jnp.int32)
