"""Stacks of blocks, the body of every model here, and what they keep of the tokens read in decoding."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.export import is_symbolic_dim
from jax.typing import DTypeLike

import regard.masks as masks
import regard.scores as scores
from regard.arguments import integers, read_size, whole_number
from regard.axes import Array, ArrayLike, Bool, Int, Size
from regard.cache import KVCache
from regard.cache.rows import divide_rows, row_integers
from regard.engine.call.hooks import is_read, is_rewriting, one_run
from regard.layers import DecoderBlock, DeltaBlock, DeltaCache, EncoderBlock, LatentAttention
from regard.layers.multi_head import Memory, unpack
from regard.layers.residual import EPSILON, build_norm
from regard.masks.grid import is_concrete
from regard.models.config import TransformerConfig
from regard.models.depth import Call, run_blocks, scan_blocks
from regard.models.padding import check_range, mask_padding
from regard.records import record


@record
class DecodingCache:
    """Keys and values of the tokens so far, as `Decoder.read` and `EncoderDecoder.read` need them.

    A frozen pytree; every leaf has the batch first, so `jax.tree.map(lambda leaf: leaf[rows], cache)`
    reorders rows. Make one with the model's `start_cache`.

    Example:
        >>> from flax import nnx
        >>> from regard.models import Decoder, TransformerConfig
        >>> config = TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=2, vocab_size=13)
        >>> cache = Decoder(config, rngs=nnx.Rngs(0)).start_cache(batch=2, capacity=5)
        >>> cache.lengths.tolist(), cache.layers[0].capacity
        ([0, 0], 5)
    """

    lengths: Int[Array, " batch"]
    """Tokens read so far, which is the position of the next one."""
    layers: tuple[KVCache | DeltaCache, ...]
    """Keys and values of each block's self-attention, or its state of the delta rule."""
    memory: tuple[Memory, ...] | None = None
    """Keys and values of each block's cross-attention; None without a source."""
    memory_lengths: Int[Array, " batch"] | None = None
    """Valid positions per row of the source, `(batch,)`; None means all."""

    @property
    def overflowed(self) -> Bool[Array, " batch"]:
        """True where a row has lost tokens that its next queries need, `(batch,)`."""
        return functools.reduce(operator.or_, (layer.overflowed for layer in self.layers), self.lengths < 0)

    def rewind(self, lengths: ArrayLike) -> DecodingCache:
        """Forget the newest tokens; lengths are those to keep, as in `KVCache.rewind`."""
        layers = tuple(layer.rewind(lengths) for layer in self.layers)
        remaining = jnp.clip(row_integers("lengths", lengths, *self.lengths.shape), 0, self.lengths)
        return dataclasses.replace(self, lengths=remaining, layers=layers)

    @property
    def has_states(self) -> bool:
        """True where a layer is of the delta rule, whose state cannot `rewind`."""
        return any(isinstance(layer, DeltaCache) for layer in self.layers)

    def go_back(self, before: DecodingCache) -> DecodingCache:
        """Forget what was read since an earlier cache: keys by `rewind`, and states by taking its own."""
        pairs = zip(before.layers, self.layers, strict=True)
        layers = (old if isinstance(old, DeltaCache) else new.rewind(before.lengths) for old, new in pairs)
        return dataclasses.replace(self, lengths=before.lengths, layers=tuple(layers))


class Stack(nnx.Module):
    """`config.num_layers` blocks, then a norm where they leave the stream unnormalised ("pre", "both").

    Windows, score functions and the relative bias, whose table all blocks share, come from here.
    """

    def __init__(
        self,
        config: TransformerConfig,
        block: type[EncoderBlock] | type[DecoderBlock],
        *,
        causal: bool = False,
        rngs: nnx.Rngs,
    ):
        if config.is_hybrid and (not causal or block is DecoderBlock):
            raise ValueError(
                "mixers: expected attention alone but in a Decoder, as the delta rule reads what came before;"
                f" got {config.mixers}"
            )
        if config.latent_dim is not None and block is DecoderBlock:
            raise ValueError(
                f"latent_dim: expected None in an EncoderDecoder, got {config.latent_dim}; build a Decoder"
            )
        self.config, self.causal = config, causal
        blocks = [_build_block(config, number, block, rngs) for number in range(config.num_layers)]
        self.blocks = nnx.List(blocks)
        shape = (config.relative_buckets, config.num_heads)  # a number for each bucket of distances and head
        start = nnx.initializers.normal(config.d_model**-0.5)
        is_relative = config.positions == "relative"
        self.relative_table = nnx.Param(start(rngs.params(), shape, jnp.float32)) if is_relative else None
        norm = {"epsilon": config.norm_epsilon, "rngs": rngs}
        is_open = config.norm != "post"
        self.final_norm = build_norm(config.d_model, config.norm_kind, **norm) if is_open else None

    def __call__(
        self,
        x: Array,
        memory: Array | tuple[Memory, ...] | None = None,
        *,
        mask: masks.Mask | None = None,
        memory_mask: masks.Mask | None = None,
        positions: ArrayLike | None = None,
        segments: ArrayLike | None = None,
        caches: tuple[KVCache | DeltaCache, ...] | None = None,
        counts: ArrayLike | None = None,
        aux: tuple[str, ...] = (),
    ) -> tuple[Array, tuple[dict[str, Any], ...]]:
        """Run every block on x, `(*B, T, M)`; return the residual stream, and one aux dict per block.

        `memory` is what the cross-attention of decoder blocks reads or, per block, what it remembers. `mask`
        goes beside causality and windows, `segments` to blocks of the delta rule, which take no mask. `aux`
        may name "hidden", the stream after each block; with caches, one per block, dicts hold longer ones.
        """
        asked = tuple(name for name in aux if name != "hidden")
        shared = {"score": self._scores(), "aux": asked, "positions": positions}

        def call(number: int, block: Any, x: Array) -> tuple[Array, dict[str, Any]]:
            options: dict[str, Any] = {"mask": self._mask(number, mask), **shared}
            has_more = asked or caches is not None
            if isinstance(block, DeltaBlock):
                options, has_more = {"segments": segments}, caches is not None
            if caches is not None:
                options |= {"cache": caches[number], "counts": counts}
            if memory is not None:
                layer_memory = memory[number] if isinstance(memory, tuple) else memory
                options |= {"memory": layer_memory, "memory_mask": memory_mask}
            x, seen = unpack(block(x, **options), has_more)
            return x, {**seen, "hidden": x} if "hidden" in aux else seen

        with one_run():
            x, seen = self._run(call, x, is_decoding=caches is not None or isinstance(memory, tuple))
        return (x if self.final_norm is None else self.final_norm(x)), tuple(seen)

    def start_cache(
        self,
        embedding: nnx.Module,
        batch: Size,
        capacity: Size,
        chunk: Size,
        *memory: Any,
        rewind: int = 0,
        dtype: DTypeLike | None = None,
    ) -> DecodingCache:
        """Make room for `capacity` tokens read in chunks of up to `chunk`; windows bound it.

        Windows keep as many tokens more as `rewind` takes back. Keys and values keep the dtype that they have
        in a call on what `embedding` returns, unless they are to be int8.
        """
        asked = read_cache_dtype("dtype", dtype, self.config)
        rewind, batch = whole_number("rewind", rewind, 0), read_size("batch", batch)
        capacity, chunk = read_size("capacity", capacity), read_size("chunk", chunk)
        stream_dtype = self._stream_dtype(embedding, batch, *memory[:1])

        def start(number: int) -> KVCache | DeltaCache:
            block: Any = self.blocks[number]
            if isinstance(block, DeltaBlock):
                cache, delta = block.delta.start_cache(batch), block.delta
                projections = (delta.query_projection, delta.key_projection, delta.value_projection)
                recent = cache.recent.astype(jnp.result_type(stream_dtype, *_dtypes(projections)))
                return dataclasses.replace(cache, recent=recent)
            attention = block.attention if isinstance(block, EncoderBlock) else block.self_attention
            window, slots, options = self.config.window(number), capacity, {}
            if isinstance(attention, LatentAttention):
                projections, heads, widths = (attention.latent,), 1, attention.cache_widths
            else:
                projections, heads = (
                    (attention.key_projection, attention.value_projection),
                    attention.num_key_heads,
                )
                widths = attention.head_dim, attention.head_dim
            is_known = not is_symbolic_dim(capacity + chunk)
            if window is not None and is_known and rewind + window + max(window, chunk) < capacity:
                slots, options = rewind + window + max(window, chunk), {"window": window, "spare": rewind}
            kept_dtype = jnp.result_type(stream_dtype, *_dtypes(projections)) if asked is None else asked
            return KVCache.create(batch, heads, slots, *widths, dtype=kept_dtype, **options)

        layers = tuple(start(number) for number in range(len(self.blocks)))
        return DecodingCache(jnp.zeros(batch, jnp.int32), layers, *memory)

    def read(
        self, embedding: Any, tokens: ArrayLike, cache: DecodingCache, counts: ArrayLike | None
    ) -> tuple[Array, DecodingCache]:
        """Embed tokens that follow those in the cache, and run every block on them."""
        batch = cache.lengths.shape[0]
        if np.ndim(tokens) != 2 or np.shape(tokens)[0] != batch:
            raise ValueError(f"tokens: expected shape ({batch}, n), as in the cache; got {np.shape(tokens)}")
        x = embedding(tokens, offset=cache.lengths)
        added = x.shape[1] if counts is None else jnp.clip(integers("counts", counts), 0, x.shape[1])
        lengths, most = divide_rows(cache.lengths, x) + added, self.config.max_length
        if self.config.positions == "learned" and is_concrete(lengths):
            check_range("tokens", "positions", lengths, most, f"max_length={most}")
        memory_mask = mask_padding(cache.memory_lengths)
        x, seen = self(x, cache.memory, memory_mask=memory_mask, caches=cache.layers, counts=counts)
        layers = tuple(aux.get("self", aux)["cache"] for aux in seen)
        return x, dataclasses.replace(cache, lengths=lengths, layers=layers)

    def _run(self, call: Call, x: Array, *, is_decoding: bool) -> tuple[Array, list[Any]]:
        """Run the blocks as configured, or one by one where a loop or rematerialization gains nothing."""
        blocks, config = list(self.blocks), self.config
        # In decoding, a loop would copy every layer's cache at every token. Outside a trace nothing compiles
        # or is differentiated, and who watches the calls of `attend` is told of each layer's own.
        if is_decoding or is_read() or is_concrete((x, nnx.state(self))):
            return run_blocks(blocks, call, x)
        lead = 0 if config.first_norm else 1  # blocks that are unlike the others
        if len({*config.dense_layers}) < len(blocks):
            layers = range(lead, len(blocks))
            lead = next((layer for layer in layers if layer not in config.dense_layers), len(blocks))
        if config.scan_layers and len(blocks) > lead + 1 and not is_rewriting():
            windows = [config.window(number) for number in range(len(blocks))]
            x, first = run_blocks(blocks[:lead], call, x, config.remat)
            following: Call = lambda number, *inputs: call(lead + number, *inputs)  # noqa: E731
            x, rest = scan_blocks(blocks[lead:], windows[lead:], following, x, config.remat)
            return x, first + rest
        return run_blocks(blocks, call, x, config.remat)

    def _stream_dtype(self, embedding: nnx.Module, batch: Size, memory: Any = None) -> Any:
        """Return the dtype that this stack returns, the widest of its stream."""
        embedded = _dtypes(embedding)
        if len(embedded | _dtypes(self) | {leaf.dtype for leaf in jax.tree.leaves(memory)}) == 1:
            return embedded.pop()
        x = jax.ShapeDtypeStruct((batch, 1, self.config.d_model), jnp.result_type(*embedded))
        graph, state = nnx.split(self)
        return jax.eval_shape(lambda state, x: nnx.merge(graph, state)(x, memory)[0], state, x).dtype

    def _scores(self) -> list[scores.Score] | None:
        config, functions = self.config, []
        if config.attention_softcap is not None:
            functions.append(scores.softcap(config.attention_softcap))
        if self.relative_table is not None:
            options = {"bidirectional": not self.causal, "max_distance": config.relative_max_distance}
            functions.append(scores.relative_bias(self.relative_table[...], **options))
        return functions or None

    def _mask(self, number: int, mask: masks.Mask | None) -> masks.Mask | None:
        """Combine causality, the window of one block and the mask given."""
        window = self.config.window(number)
        parts = [masks.causal()] if self.causal else []
        if window is not None:
            parts.append(masks.sliding_window(window, 0 if self.causal else window))
        parts += [] if mask is None else [mask]
        return functools.reduce(operator.and_, parts) if parts else None


def read_cache_dtype(name: str, dtype: DTypeLike | None, config: TransformerConfig) -> Any:
    """Return int8, or None where keys and values are to stay what a call computes."""
    if dtype is None:
        return None
    if np.dtype(dtype) != np.int8:
        raise ValueError(f"{name}: expected None, for the dtype of a call, or int8; got {np.dtype(dtype)}")
    if config.latent_dim is not None:
        raise ValueError(f"{name}: expected None for latent attention, whose latents are few; got int8")
    return np.dtype(np.int8)


def _dtypes(modules: Any) -> set[Any]:
    return {leaf.dtype for leaf in jax.tree.leaves(nnx.state(modules, nnx.Param))}


def _build_block(
    config: TransformerConfig, number: int, block: type[EncoderBlock] | type[DecoderBlock], rngs: nnx.Rngs
) -> nnx.Module:
    same = ("norm", "norm_kind", "norm_epsilon", "dropout_rate")
    shared: dict[str, Any] = {name: getattr(config, name) for name in same}
    shared |= {"norm_input": config.first_norm or number > 0, **config.feed_forward(number), "rngs": rngs}
    kind = config.mixer(number)
    if kind != "attention":
        sizes = {"head_dim": config.delta_head_dim or config.head_width, "conv_width": config.conv_width}
        if kind == "gated_delta":
            sizes |= {"num_key_heads": config.delta_key_heads, "value_dim": config.delta_value_dim}
        heads = config.delta_heads or config.num_heads
        return DeltaBlock(config.d_model, heads, kind=kind, delta=sizes, **shared)
    if config.latent_dim is not None:
        attention = {
            "latent_dim": config.latent_dim,
            "head_dim": config.head_width,
            "rotary_dim": config.latent_rotary_dim,
            "value_dim": config.latent_value_dim,
            "query_latent_dim": config.latent_query_dim,
            "index_count": config.index_count,
            "index_heads": config.index_heads,
            "index_dim": config.index_dim,
            "use_bias": config.attention_bias,
            "scale": config.attention_scale,
            "rotary": config.rotary(number),
            "norm_epsilon": EPSILON,  # whatever that of the stream is, in every model that has such norms
        }
        return block(config.d_model, config.num_heads, attention=attention, **shared)
    same = ("num_key_heads", "head_dim", "output_bias", "query_key_norm", "sinks", "output_gate")
    attention = {
        **{name: getattr(config, name) for name in same},
        "use_bias": config.attention_bias,
        "scale": config.attention_scale,
        "rotary": config.rotary(number),
        "norm_kind": config.norm_kind if "rms" in config.norm_kind else "rms",
        "dropout_rate": config.attention_dropout_rate,
    }
    return block(config.d_model, config.num_heads, attention=attention, **shared)
