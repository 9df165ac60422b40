"""Parts of a score: one query and one key, split over what wrote into their residual streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import integers, whole_number
from regard.axes import ArrayLike
from regard.engine.call.hooks import CallEvent, watch
from regard.inspection.contributions import check_decoder

if TYPE_CHECKING:
    from regard.models import Decoder

Parts = dict[str, np.ndarray]  # what each writer adds to the stream, (2, M): at the query and at the key
BIAS = "biases"


@dataclass(frozen=True)
class ScoreParts:
    """The score of one query and one key, as a sum over pairs of writers.

    score = sum_ab parts_ab

    Writers are "tokens" and "positions", the embedding's parts; "layer 2 head 5", what a head wrote; "layer 2
    attention bias", "layer 2 feed-forward", "layer 2 delta"; and "biases" of the norms and maps on the way.

    Example:
        >>> import numpy as np
        >>> from regard.inspection import ScoreParts
        >>> split = ScoreParts(("tokens", "biases"), np.array([[2.0, 0.5], [-1.0, 0.0]]), 1.5)
        >>> split.by_key.tolist(), split.largest(1)
        ([1.0, 0.5], [('tokens', 'tokens', 2.0)])
    """

    writers: tuple[str, ...]
    """Names, of the rows and of the columns of `parts`."""
    parts: np.ndarray
    """float64 `(C, C)`: what writer a, by the query, and writer b, by the key, add to the score together."""
    score: float
    """The scaled product as the model has it, before score functions, biases and the mask."""

    @property
    def by_query(self) -> np.ndarray:
        """Sums over keys' writers: what each adds by way of the query, `(C,)`."""
        return self.parts.sum(1)

    @property
    def by_key(self) -> np.ndarray:
        """Sums over queries' writers: what each adds by way of the key, `(C,)`."""
        return self.parts.sum(0)

    def largest(self, count: int = 5) -> list[tuple[str, str, float]]:
        """Return the pairs of writers that add most, of either sign: (by the query, by the key, how much)."""
        order = np.argsort(-np.abs(self.parts), axis=None)[: whole_number("count", count, 1)]
        places = zip(*np.unravel_index(order, self.parts.shape), strict=True)
        return [(self.writers[a], self.writers[b], float(self.parts[a, b])) for a, b in places]

    def __str__(self) -> str:
        rows = [f"{value:+8.3f}  {a} x {b}" for a, b, value in self.largest(8)]
        return "\n".join([f"score {self.score:.3f}, of which (query x key)", *rows])


def decompose_score(
    model: Decoder, tokens: ArrayLike, *, layer: int, head: int, query: int, key: int, **options: Any
) -> ScoreParts:
    """Split the score of one query and one key over all that wrote into their residual streams.

    score = scale (turn_i(norm(x_i) Wq + bq)) . (turn_j(norm(x_j) Wk + bk)),  x = sum_a x_a

    It is the scaled product, before score functions (a softcap, say), biases and the mask: pairs that may not
    attend have one, too. `call.permit` of a trace says which pairs may.

    Every x_a is what the embedding, a head, a feed-forward branch or a bias wrote at that position. Norms on
    the way have the size that they had, so that all is linear, and the parts sum to the score up to rounding;
    without a writer these sizes would change, too, which the parts do not show. It runs outside `jit`.

    Args:
        model: a `regard.models.Decoder`, in evaluation mode.
        tokens: `(T,)` or `(1, T)`.
        layer, head: whose score; of a hybrid, a layer of attention.
        query, key: positions in the row of tokens, from 0.
        **options: of the model's call: mask, positions.

    Returns:
        Parts, in float64, whose sum is the score.

    Raises:
        TypeError: a model of another kind, numbers that are none.
        ValueError: no such layer, head or position; a layer without attention, or latent attention.

    Example:
        >>> from flax import nnx
        >>> from regard import inspection, models
        >>> config = models.TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=2, vocab_size=13)
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> split = inspection.decompose_score(model, [1, 2, 3], layer=1, head=2, query=2, key=0)
        >>> split.writers[:3], len(split.writers), bool(abs(split.parts.sum() - split.score) < 1e-5)
        (('tokens', 'positions', 'layer 0 head 0'), 8, True)

    Reference: Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021, on composition.
    """
    from regard.layers import DeltaBlock
    from regard.models.encoder import find_segments

    check_decoder(model)
    if model.config.latent_dim is not None:
        raise ValueError(
            "model: expected heads with keys of their own, whose scores can be split; got"
            f" latent_dim={model.config.latent_dim}"
        )
    ids = jnp.atleast_2d(integers("tokens", tokens))
    if ids.shape[0] != 1:
        raise ValueError(f"tokens: expected those of one row, (T,) or (1, T), got shape {ids.shape}")
    limits = {"layer": model.config.num_layers, "head": model.config.num_heads}
    limits |= {"query": ids.shape[-1], "key": ids.shape[-1]}
    for name, number in {"layer": layer, "head": head, "query": query, "key": key}.items():
        if whole_number(name, number, 0) >= limits[name]:
            raise ValueError(f"{name}: expected a number below {limits[name]}, got {number}")
    blocks: Any = model.trunk.stack.blocks
    if isinstance(blocks[layer], DeltaBlock):
        raise ValueError(f"layer: expected one of attention, got {layer}, which is of the delta rule")
    events: list[CallEvent] = []
    with watch(events.append):
        _, seen = model.trunk(ids, aux=("hidden",), **options)
    streams = [seen["embedding"], *(block["hidden"] for block in seen["blocks"])]
    calls, places = iter(events), [query, key]
    parts = _split_embedding(model.trunk.embedding, ids, streams[0], places)
    for number, block in enumerate(blocks[:layer]):
        entered = _find_residual(block).enter(streams[number])
        if isinstance(block, DeltaBlock):
            read = block.delta(entered, segments=find_segments(options.get("mask")))
            branch = {f"layer {number} delta": _read(read)[0, places]}
        else:
            branch = _split_heads(f"layer {number}", block.attention, next(calls), entered, places)
        parts = _add_block(parts, f"layer {number}", block, branch, streams[number : number + 2], places)
    attention, event = blocks[layer].attention, next(calls)
    residual = blocks[layer].attention_residual
    inputs = parts if residual.place == "post" else _hold_norm(parts, residual.norm)
    group = attention.num_heads // attention.num_key_heads
    sides = []
    for side, (map_, head_norm) in enumerate(
        ((attention.query_projection, attention.query_norm), (attention.key_projection, attention.key_norm))
    ):
        own = head if side == 0 else head // group
        columns = slice(own * attention.head_dim, (own + 1) * attention.head_dim)
        rows = {name: part[side] @ _read(map_.kernel)[:, columns] for name, part in inputs.items()}
        if map_.bias is not None:
            rows[BIAS] = rows.get(BIAS, 0) + _read(map_.bias)[columns]
        rows = _hold_norm(rows, head_norm)
        sides.append(_turn(attention.rotary, rows, event, side, places[side]))
    writers = tuple(dict.fromkeys([*sides[0], *sides[1]]))
    empty = np.zeros(attention.head_dim)
    stacks = [np.stack([side.get(name, empty) for name in writers]) for side in sides]
    scale, asked = float(event.problem.scale), _read(event.problem.query)[0, head, query]
    score = scale * float(asked @ _read(event.problem.key)[0, head // group, key])
    return ScoreParts(writers, scale * stacks[0] @ stacks[1].T, score)


def _read(array: Any) -> np.ndarray:
    return np.asarray(array[...], np.float64)


def _split_embedding(embedding: Any, ids: Any, stream: Any, places: list[int]) -> Parts:
    whole = _read(stream)[0, places]
    if embedding.norm is not None:
        return {"tokens": whole}
    tokens = _read(embedding.entry(ids, None))[0, places]
    return {"tokens": tokens, "positions": whole - tokens} if (whole != tokens).any() else {"tokens": tokens}


def _find_residual(block: Any) -> Any:
    """Return the residual connection around what mixes the tokens."""
    return getattr(block, "delta_residual", None) or block.attention_residual


def _add_block(
    parts: Parts, title: str, block: Any, branch: Parts, streams: list[Any], places: list[int]
) -> Parts:
    """Add what both branches of a block wrote, given the first and the streams before and after the block."""
    before, after = _read(streams[0])[0, places], _read(streams[1])[0, places]
    residual = _find_residual(block)
    branch = _hold_norm(branch, residual.branch_norm)
    parts = parts | {name: parts[name] + part if name in parts else part for name, part in branch.items()}
    if residual.place != "post":
        return parts | {f"{title} feed-forward": after - (before + sum(branch.values()))}
    parts = _hold_norm(parts, residual.norm)
    middle = jnp.asarray(sum(parts.values()), streams[0].dtype)
    parts[f"{title} feed-forward"] = _read(block.feed_forward(middle[None]))[0]
    return _hold_norm(parts, block.feed_forward_residual.norm)


def _split_heads(title: str, attention: Any, event: CallEvent, entered: Any, places: list[int]) -> Parts:
    """Return what each head wrote, and the bias of the projection."""
    read = _read(event.output)[0][:, places]  # (H, 2, E)
    if attention.gate_projection is not None:
        gate = _read(jax.nn.sigmoid(attention.gate_projection(entered)))[0, places]
        read = read * np.moveaxis(gate.reshape((len(places), *read.shape[::2])), 0, 1)
    kernel = _read(attention.output_projection.kernel).reshape((*read.shape[::2], -1))
    wrote = np.einsum("hpe,hem->hpm", read, kernel)
    parts = {f"{title} head {head}": wrote[head] for head in range(len(wrote))}
    bias = attention.output_projection.bias
    if bias is not None:
        parts[f"{title} attention bias"] = np.stack([_read(bias)] * len(places))
    return parts


def _hold_norm(parts: Parts, norm: Any) -> Parts:
    """Norm the parts with the size that their sum has, so that they sum to the norm of the sum."""
    if norm is None:
        return dict(parts)
    total, scale, bias = sum(parts.values()), _read(norm.scale), getattr(norm, "bias", None)
    has_mean = hasattr(norm, "use_bias")  # a LayerNorm
    center = (lambda x: x - x.mean(-1, keepdims=True)) if has_mean else (lambda x: x)
    size = np.sqrt((center(total) ** 2).mean(-1, keepdims=True) + norm.epsilon)
    normed = {name: center(part) * scale / size for name, part in parts.items()}
    if bias is not None:
        normed[BIAS] = normed.get(BIAS, 0) + np.broadcast_to(_read(bias), np.shape(total))
    return normed


def _turn(rotary: Any, rows: Parts, event: CallEvent, side: int, index: int) -> Parts:
    """Turn the parts of a query or key by its position."""
    if rotary is None:
        return rows
    grid = event.problem.grid()
    positions = grid.query_position[..., 0] if side == 0 else grid.key_position[..., 0, :]
    where = np.asarray(positions).reshape((-1, np.shape(positions)[-1]))[0, index]
    stacked = np.stack([*rows.values()])
    turned = rotary(jnp.asarray(stacked, jnp.result_type(float)), jnp.full(len(stacked), where, jnp.int32))
    return dict(zip(rows, np.asarray(turned, np.float64), strict=True))
