"""Embeddings: tokens or real vectors and their positions as a residual stream."""

import math
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import regard.positions as positions
from regard.arguments import integers
from regard.axes import Array, ArrayLike, Float, Size
from regard.engine.dispatch.placement import demand_whole, divided_here, place_here
from regard.explicit_meshes import explicit_sharding, take_rows
from regard.layers.choices import check_rngs
from regard.layers.dropout import build_dropout
from regard.layers.residual import build_norm
from regard.masks.grid import is_concrete
from regard.models.config import TransformerConfig
from regard.models.padding import blank_padding, check_lengths, check_range, mark_valid
from regard.wide_sums import gather


class TokenEmbedding(nnx.Module):
    """Embedding of tokens, or of real vectors, with their positions.

    tokens:  hidden_t = dropout(norm(sqrt(M) table[token_t] + type_t + position_t))
    vectors: hidden_t = dropout(norm(x_t W + b + position_t))

    The parts, and a learned vector in front of real vectors (`class_token`), are there where the config says.

    The table starts at standard deviation 1/sqrt(M) and is read times sqrt(M), so tokens enter with unit
    variance beside sinusoids of mean square 1/2: neither drowns the other at any width, and a step of Adam
    moves an entry by a share of its size that does not shrink with the width. Learned positions are
    stored and read the same way. Real vectors pass a LeCun-normal kernel, which keeps their mean square.

    Reference: Vaswani et al., "Attention Is All You Need", 2017, sections 3.4 and 3.5; Devlin et al., "BERT",
    2019, and Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021, for the other parts.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        check_rngs(rngs)
        self.config = config
        # What is read times sqrt(d_model) starts smaller by as much; the rest starts as in BERT and GPT-2.
        self.scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        start = nnx.initializers.normal(1.0 / self.scale if config.scale_embedding else 0.02)

        def build_table(num_rows: int) -> nnx.Embed:
            table: Any = nnx.Embed(num_rows, config.d_model, embedding_init=start, rngs=rngs)
            table.dtype = None  # it would cast to the dtype it was built with, whatever its parameter became
            return table

        if config.vocab_size is not None:
            self.entry = TokenTable(build_table(config.vocab_size), self.scale)
        else:
            self.entry = VectorProjection(config.input_width or 1, config.d_model, rngs=rngs)
        learned, types = config.positions == "learned", config.num_token_types
        self.position_table = build_table(config.max_length) if learned else None
        self.type_table = build_table(types) if types else None
        shape = (config.d_model,)
        self.class_token = nnx.Param(start(rngs.params(), shape, jnp.float32)) if config.class_token else None
        norm = {"epsilon": config.norm_epsilon, "rngs": rngs}
        self.norm = build_norm(config.d_model, config.norm_kind, **norm) if config.embedding_norm else None
        self.dropout = build_dropout(config.dropout_rate, rngs)

    def __call__(
        self,
        inputs: ArrayLike,
        *,
        lengths: ArrayLike | None = None,
        token_types: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        positions: ArrayLike | None = None,
    ) -> Float[Array, "*B T M"]:
        """Embed the inputs.

        Args:
            inputs: tokens in 0..V-1, `(batch, T)` or `(T,)`, or real vectors with one more axis.
            lengths, token_types, positions: as in `Encoder`.
            offset: position of the first token per row, `(batch,)`, in decoding; None means 0.

        Returns:
            Residual stream, one position longer with a `class_token`. Under jit, a token out of range is NaN.

        Raises:
            TypeError: tokens that are not integers, vectors that are not floating point.
            ValueError: outside jit, a token out of range; an input longer than `max_length` with learned
                positions; inputs or lengths of the wrong shape.
        """
        if positions is not None and self.class_token is not None:
            raise ValueError(
                "positions: expected None, as the config has a class_token, which would need a position of"
                " its own; got one for each input"
            )
        hidden = self.entry(inputs, lengths)
        if self.class_token is not None:
            demand_whole("class_token")
            front = self.class_token[...].astype(hidden.dtype)
            front = jnp.broadcast_to(front, (*hidden.shape[:-2], 1, hidden.shape[-1]))
            hidden = jnp.concatenate((front, hidden), axis=-2)
        hidden = self._add_positions(self._add_types(hidden, token_types), offset, positions)
        return self.dropout(hidden if self.norm is None else self.norm(hidden))

    def _add_types(self, hidden: Array, token_types: Any) -> Array:
        if self.type_table is None:
            if token_types is not None:
                raise ValueError("token_types: expected None, as the config has num_token_types=0")
            return hidden
        types = jnp.zeros(hidden.shape[:-1], jnp.int32) if token_types is None else jnp.asarray(token_types)
        if types.shape != hidden.shape[:-1] or not jnp.issubdtype(types.dtype, jnp.integer):
            raise ValueError(
                f"token_types: expected integers of shape {hidden.shape[:-1]}, one per token; got"
                f" {types.dtype} of shape {types.shape}"
            )
        if is_concrete(types):
            most = self.config.num_token_types - 1
            check_range("token_types", "values", types, most, f"num_token_types={most + 1}")
        return hidden + _look_up(self.type_table, types) * self.scale

    def _add_positions(self, hidden: Array, offset: Any, places: Any) -> Array:
        """Add the positions from `offset` on, those given, or 0..T-1 on every row."""
        if self.config.positions not in ("sinusoidal", "learned"):
            return hidden
        num_positions, d_model = hidden.shape[-2:]
        limit = self.config.max_length
        index = place_here(jnp.arange(num_positions, dtype=jnp.int32), num_positions)
        if offset is not None:
            index = jnp.asarray(offset)[:, None] + index[None]
        if places is not None:
            index = self._check_places(places, hidden.shape[:-1])
        if self.position_table is None:
            is_known = isinstance(num_positions, int) and not divided_here()
            if offset is None and places is None and is_known:
                rows = positions.sinusoidal(num_positions, d_model, dtype=hidden.dtype)
            else:
                rows = positions.sinusoidal_at(index, d_model, dtype=hidden.dtype)
        elif places is None and isinstance(num_positions, int) and num_positions > limit:
            raise ValueError(
                f"inputs: expected at most max_length = {limit} positions, got {num_positions}; raise"
                " max_length, or use positions='sinusoidal', which has no limit"
            )
        else:
            rows = _look_up(self.position_table, index) * self.scale
        return hidden + jnp.broadcast_to(rows, hidden.shape)

    def _check_places(self, places: Any, shape: tuple[Size, ...]) -> Array:
        """Return the position of each token, checked; out of the table's range under jit, one that is NaN."""
        index = integers("positions", places)
        if index.shape not in (shape, shape[-1:]):
            raise ValueError(f"positions: expected integers {shape[-1:]} or {shape}, got shape {index.shape}")
        if self.position_table is None:
            return jnp.asarray(index)
        limit = self.config.max_length
        if is_concrete(index):
            check_range("positions", "values", index, limit - 1, f"max_length={limit}")
        return jnp.where(jnp.asarray(index) < 0, limit, index)  # a negative index would count from the end


class TokenTable(nnx.Module):
    """One learned row per token, read times a factor."""

    def __init__(self, table: nnx.Embed, scale: float):
        self.vocab_size, self.scale, self.table = table.num_embeddings, scale, table

    def __call__(self, tokens: Any, lengths: Any) -> Array:
        """Look up rows of the table; NaN, never a neighbour's row, where a traced token is out of range."""
        tokens = tokens if hasattr(tokens, "dtype") else np.asarray(tokens)
        self._check(tokens, lengths)
        tokens = jnp.asarray(tokens)
        zero = jnp.zeros_like(tokens)
        if lengths is not None:
            tokens = jnp.where(mark_valid(lengths, tokens.shape[-1]), tokens, zero)
        # Compared in the tokens' own dtype: a cast to int32 first could wrap a wrong token into range.
        last = min(self.vocab_size - 1, jnp.iinfo(tokens.dtype).max)
        inside = (tokens >= 0) & (tokens <= last)
        rows = _look_up(self.table, jnp.where(inside, tokens, zero).astype(jnp.int32)) * self.scale
        return jnp.where(inside[..., None], rows, jnp.nan)

    def _check(self, tokens: Any, lengths: Any) -> None:
        """Raise for what cannot be tokens; values count where they are known and not padding."""
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(
                f"tokens: expected integers (vocab_size={self.vocab_size}), got {tokens.dtype}; configure"
                " input_width for real vectors"
            )
        if tokens.ndim not in (1, 2):
            raise ValueError(f"tokens: expected shape (batch, T) or (T,), got {tuple(tokens.shape)}")
        lengths = check_lengths("lengths", lengths, tokens.shape[:-1], tokens.shape[-1])
        if is_concrete((tokens, lengths)):
            reason = f"vocab_size={self.vocab_size}"
            check_range("tokens", "values", tokens, self.vocab_size - 1, reason, lengths)


class VectorProjection(nnx.Module):
    """A learned linear map from real vectors to the model width."""

    def __init__(self, input_width: int, d_model: int, *, rngs: nnx.Rngs):
        self.input_width = input_width
        self.linear = nnx.Linear(input_width, d_model, rngs=rngs)

    def __call__(self, vectors: Any, lengths: Any) -> Array:
        """Map the vectors; the padding is zeroed before the map."""
        vectors, width = jnp.asarray(vectors), self.input_width
        if vectors.ndim not in (2, 3) or vectors.shape[-1] != width:
            raise ValueError(
                f"inputs: expected real vectors (batch, T, {width}) or (T, {width}), got shape"
                f" {tuple(vectors.shape)}"
            )
        if not jnp.issubdtype(vectors.dtype, jnp.floating):
            raise TypeError(
                f"inputs: expected floating point vectors (input_width={width}), got {vectors.dtype};"
                " convert with .astype, or configure vocab_size for tokens"
            )
        lengths = check_lengths("lengths", lengths, vectors.shape[:-2], vectors.shape[-2])
        # A kernel's gradient is input times gradient, and NaN in the padding times 0 would be NaN.
        return self.linear(blank_padding(vectors, lengths))


def _look_up(table: nnx.Embed, rows: Array) -> Array:
    """Return rows of a table, with NaN for no row there."""
    read = partial(jnp.take, axis=0) if explicit_sharding(rows) is None else take_rows
    return gather(read, table.embedding[...], rows)
