"""A mixture of experts (MoE) as the feed-forward branch of a block."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.sharding import PartitionSpec

from regard.arguments import guided, read_number
from regard.axes import Array, ArrayLike, Hidden, Size
from regard.engine.call.problem import accumulation_dtype
from regard.engine.dispatch.explicit_axes import run_with_specs
from regard.engine.dispatch.placement import ExpertAxes, active
from regard.explicit_meshes import explicit_mesh
from regard.layers.choices import check_choice, check_initializers, check_options
from regard.layers.dropout import build_dropout, draw_dropout
from regard.layers.expert_balance import add_balance_loss, count_loads
from regard.layers.expert_shards import share_experts
from regard.layers.feed_forward import FeedForward, activate, check_activation
from regard.layers.multi_head import check_features

RouterKind = Literal["softmax", "sigmoid"]
_SYMBOLIC_ROWS = 64  # of a tile, where the number of tokens is known only when an exported program is called


@guided
class Experts(nnx.Module):
    """Feed-forward branch of which every token passes the `experts_per_token` experts that score highest.

    scores = x Wr + br
    chosen = the experts of the largest scores;  p = softmax(scores over the chosen)
    output = sum_(e in chosen) p_e FeedForward_e(x)

    Without `normalize_chosen`, p is the softmax over all experts, and those not chosen are left out of the
    sum alone. No token is dropped, however many choose one expert: choices are sorted into tiles of the mean
    number of tokens to an expert, so that at most about twice the rows needed are computed, and weights of
    experts that no token chose are not read. One program serves every way that tokens are sent.

    With router_kind="sigmoid", s = sigmoid(scores), and the chosen have the largest s + choice_bias, among
    those of the `groups_per_token` groups whose best two add up to the most; p_e = s_e, divided by the sum
    over the chosen with `normalize_chosen`. The bias has no gradient; `balance_experts` moves it, so that all
    experts are chosen alike often. With either kind, `model.set_attributes(balance_loss=0.01)` trains the
    router to that end: gradients are as if so much of num_experts * sum_e f_e P_e were added to the loss for
    every layer, with f_e the share of e among all choices and P_e its mean p over all experts. That is 1
    where all are chosen alike often, and no output shows it.

    A shared expert, which every token passes, is added: FeedForward_s(x), or sigmoid(x Ws) FeedForward_s(x).

    Args:
        d_model, d_ff: width M of input and output, and F in between, of one expert.
        num_experts, experts_per_token: how many there are, and how many each token passes.
        normalize_chosen: whether the weights of the chosen sum to 1.
        router_kind: "softmax", or "sigmoid" as in DeepSeek-V3.
        expert_groups, groups_per_token: with "sigmoid", groups of experts of one size, and how many of them a
            token may choose from.
        expert_scale: what the weights of the chosen are multiplied by.
        shared_width: the width in between of the shared expert; None means that there is none.
        shared_gate: whether each token weighs what the shared expert gives.
        use_bias: whether the router and the maps of the experts have biases.
        activation, gated, gate_limit, dropout_rate: as in `FeedForward`.
        dtype, param_dtype, kernel_init, bias_init, precision, rngs: as in `MultiHeadAttention`.

    Raises:
        ValueError: as `FeedForward`; more experts per token than there are.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard.layers import Experts
        >>> layer = Experts(3, 7, num_experts=5, experts_per_token=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 11, 3))).shape, layer.widen.kernels.shape
        ((2, 11, 3), (5, 3, 7))

    Reference: Shazeer et al., "Outrageously Large Neural Networks", 2017, section 2, without its noise;
    Gale et al., "MegaBlocks", 2023, section 4, for tiles in place of a capacity; Dai et al., "DeepSeekMoE",
    2024, section 3.2, for shared experts; DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1.2, for sigmoids;
    Fedus et al., "Switch Transformers", 2021, equations 4 to 6, for the loss of balance.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        num_experts: int,
        experts_per_token: int = 1,
        normalize_chosen: bool = True,
        router_kind: RouterKind = "softmax",
        expert_groups: int = 1,
        groups_per_token: int = 1,
        expert_scale: float = 1.0,
        shared_width: int | None = None,
        shared_gate: bool = False,
        activation: str = "gelu_tanh",
        gated: bool = False,
        gate_limit: float | None = None,
        dropout_rate: float = 0.0,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = nnx.initializers.glorot_uniform(batch_axis=0),  # noqa: B008 (a pure function)
        bias_init: Any = nnx.initializers.zeros_init(),  # noqa: B008
        precision: Any = None,
        rngs: nnx.Rngs,
    ):
        sizes = {"d_model": d_model, "d_ff": d_ff, "num_experts": num_experts}
        sizes |= {"experts_per_token": experts_per_token, "expert_groups": expert_groups}
        sizes |= {"groups_per_token": groups_per_token}
        sizes |= {} if shared_width is None else {"shared_width": shared_width}
        shared = {"use_bias": use_bias, "dtype": dtype, "param_dtype": param_dtype, "precision": precision}
        shared |= {"rngs": rngs}
        flags = {"gated": gated, "normalize_chosen": normalize_chosen, "shared_gate": shared_gate}
        check_options(sizes, **flags, **shared)
        check_initializers(kernel_init=kernel_init, bias_init=bias_init)
        check_experts(num_experts, experts_per_token)
        check_router(router_kind, num_experts, experts_per_token, expert_groups, groups_per_token)
        read_number("expert_scale", expert_scale)
        check_shared(shared_width, shared_gate)
        check_activation(activation, gated, gate_limit)
        self.d_model, self.d_ff, self.activation, self.gate_limit = d_model, d_ff, activation, gate_limit
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.normalize_chosen, self.expert_scale = normalize_chosen, expert_scale
        self.expert_groups, self.groups_per_token = expert_groups, groups_per_token
        shared |= {"bias_init": bias_init}
        self.router = nnx.Linear(d_model, num_experts, **shared)
        is_sigmoid = router_kind == "sigmoid"
        self.choice_bias = nnx.Param(jnp.zeros(num_experts, param_dtype)) if is_sigmoid else None
        self.counts_loads, self.balance_loss = False, 0.0
        branch = {"activation": activation, "gated": gated, "gate_limit": gate_limit}
        branch |= {"dropout_rate": dropout_rate, **shared}
        self.shared = None if shared_width is None else FeedForward(d_model, shared_width, **branch)
        self.shared_gate = nnx.Linear(d_model, 1, **{**shared, "use_bias": False}) if shared_gate else None
        shared |= {"kernel_init": kernel_init}
        self.gate = _ExpertLinear(num_experts, d_model, d_ff, **shared) if gated else None
        self.widen = _ExpertLinear(num_experts, d_model, d_ff, **shared)
        self.narrow = _ExpertLinear(num_experts, d_ff, d_model, **shared)
        self.dropout = build_dropout(dropout_rate, rngs)

    def __call__(self, x: ArrayLike) -> Hidden:
        """Apply the branch to every position, as in `FeedForward`."""
        x = check_features("x", x, self.d_model)
        if not x.size:
            return x.astype(self.router(x).dtype)
        output = self._place_chosen(x)
        if self.shared is None:
            return output
        shared = self.shared(x)
        return output + (shared if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * shared)

    def _place_chosen(self, x: Array) -> Hidden:
        """Return what the chosen experts give, divided over explicit axes as the tokens are."""
        rng = draw_dropout(self.dropout, None, None)[1]
        graph, state = nnx.split(self)
        if explicit_mesh((x, state)) is None:
            return self._apply_chosen(x, rng)
        divided = PartitionSpec(*jax.typeof(x).sharding.spec[:-1], None)
        apply = lambda state, *inputs: nnx.merge(graph, state)._apply_chosen(*inputs)  # noqa: E731
        return run_with_specs(apply, (state, x, rng), divided)

    def _apply_chosen(self, x: Array, rng: Any) -> Hidden:
        """Return the weighted sum of what the chosen experts give."""
        # Each group by itself: a device sorts and computes its own tokens.
        placement, shape = active(), (math.prod(x.shape[:-2]), x.shape[-2], x.shape[-1])
        groups, join = _group_tokens(x, placement, shape)
        weights, chosen = self.route(groups)
        axes = None if placement is None else placement.divide_experts(shape, self.num_experts, self.d_ff)
        if axes is not None:
            return join(self._apply_shards(axes, groups, (weights, chosen), rng))
        lay = functools.partial(_lay_tiles, num_experts=self.num_experts)
        experts, slots = jax.vmap(lay)(chosen.reshape(len(chosen), -1))
        size = count_tile_rows(chosen[0].size, self.num_experts)
        # Every token once for each of its choices. Slots are unique, so that no gradient is a race of sums.
        rows = jnp.repeat(groups, self.experts_per_token, axis=1)
        empty = jnp.zeros((len(experts), experts.shape[1] * size, self.d_model), x.dtype)
        put = jax.vmap(lambda tiles, slots, rows: tiles.at[slots].set(rows, unique_indices=True))
        tiles = put(empty, slots, rows).reshape((*experts.shape, size, self.d_model))
        outputs = self._apply_maps(tiles, experts, rng=rng).reshape((len(experts), -1, self.d_model))
        outputs = jax.vmap(lambda rows, slots: rows.at[slots].get(unique_indices=True))(outputs, slots)
        outputs = outputs.reshape((*chosen.shape, self.d_model))
        weights = weights.astype(outputs.dtype)
        return join(jnp.einsum("gnk,gnkm->gnm", weights, outputs, precision=self.widen.precision))

    def _apply_maps(self, tiles: Array, experts: Array, arrays: Any = None, rng: Any = None) -> Array:
        """Map tiles `(G, I, R, M)` by their experts `(G, I)`; `arrays` are other kernels and biases."""
        of_gate, of_widen, of_narrow = (None, None, None) if arrays is None else arrays
        gate = None if self.gate is None else self.gate(tiles, experts, of_gate)
        hidden = activate(self.activation, gate, self.widen(tiles, experts, of_widen), self.gate_limit)
        return self.narrow(self.dropout(hidden, rngs=rng), experts, of_narrow)

    def _apply_shards(self, axes: ExpertAxes, groups: Array, routes: tuple[Array, Array], rng: Any) -> Array:
        """Return the weighted sum of what the chosen experts give, over devices with their own experts."""
        maps = self.gate, self.widen, self.narrow
        arrays = [None if linear is None else linear.arrays for linear in maps]
        groups, _ = promote_dtype((groups, self.widen.kernels[...]), dtype=self.widen.dtype)
        widens = PartitionSpec(axes.experts, None, axes.widths), PartitionSpec(axes.experts, axes.widths)
        narrows = PartitionSpec(axes.experts, axes.widths), PartitionSpec(axes.experts)

        def apply(arrays: Any, rows: Array, rng: Any) -> Array:
            gate, widen, (kernels, biases) = jax.tree.map(lambda array: array[None], arrays)
            if biases is not None and axes.widths:  # of sums over devices in one of them
                biases = jnp.where(jax.lax.axis_index(axes.widths) == 0, biases, jnp.zeros_like(biases))
            expert = jnp.zeros((1, 1), jnp.int32)
            return self._apply_maps(rows[None, None], expert, (gate, widen, (kernels, biases)), rng)[0, 0]

        specs = [None if self.gate is None else widens, widens, narrows]
        return share_experts(axes, apply, arrays, specs, groups, routes, rng)

    def route(self, tokens: Array) -> tuple[Array, Array]:
        """Return the weights of the chosen experts of each token, `(*B, k)`, and their numbers."""
        scores = self.router(tokens)
        scores = scores.astype(accumulation_dtype(scores))
        if self.choice_bias is None:
            shares = jax.nn.softmax(scores)
            chosen = _find_largest(scores, self.experts_per_token)
            weights = jnp.take_along_axis(scores if self.normalize_chosen else shares, chosen, axis=-1)
            weights = jax.nn.softmax(weights) if self.normalize_chosen else weights
        else:
            shares = jax.nn.sigmoid(scores)
            weights, chosen = self._weigh_by_sigmoid(shares, self.choice_bias[...])
        if self.balance_loss:
            shares = shares / shares.sum(-1, keepdims=True)
            weights = add_balance_loss(weights, shares, chosen, self.balance_loss)
        return weights * self.expert_scale, chosen

    def _weigh_by_sigmoid(self, shares: Array, bias: Array) -> tuple[Array, Array]:
        bias = jnp.expand_dims(bias.astype(shares.dtype), range(shares.ndim - 1))
        preferred = shares + bias
        if self.groups_per_token < self.expert_groups:
            groups = preferred.reshape((*shares.shape[:-1], self.expert_groups, -1))
            best = _find_largest(jnp.sort(groups, axis=-1)[..., -2:].sum(-1), self.groups_per_token)
            numbers = jnp.arange(self.num_experts) // groups.shape[-1]
            may_choose = (best[..., None] == jnp.expand_dims(numbers, range(best.ndim))).any(-2)
            preferred = jnp.where(may_choose, preferred, -jnp.inf)
        chosen = _find_largest(preferred, self.experts_per_token)
        weights = jnp.take_along_axis(shares, chosen, axis=-1)
        if self.normalize_chosen:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        if self.counts_loads:
            weights = count_loads(weights, bias, chosen)
        return weights, chosen


def check_experts(num_experts: int, experts_per_token: int) -> None:
    """Check for no more experts per token than there are."""
    if experts_per_token > num_experts:
        raise ValueError(
            f"experts_per_token: expected at most num_experts = {num_experts}, got {experts_per_token}"
        )


def check_router(
    router_kind: str, num_experts: int, experts_per_token: int, expert_groups: int, groups_per_token: int
) -> None:
    """Check the kind of a router, and groups that its experts can be divided into and chosen from."""
    check_choice("router_kind", router_kind, get_args(RouterKind))
    if expert_groups > 1 and router_kind != "sigmoid":
        raise ValueError(f'expert_groups: expected 1 unless router_kind is "sigmoid", got {expert_groups}')
    if num_experts % expert_groups:
        raise ValueError(
            f"expert_groups: expected a divisor of num_experts = {num_experts}, got {expert_groups}"
        )
    least = -(-experts_per_token * expert_groups // num_experts)
    if not least <= groups_per_token <= expert_groups:
        raise ValueError(
            f"groups_per_token: expected {least} to {expert_groups}, groups that hold {experts_per_token}"
            f" experts, got {groups_per_token}"
        )


def check_shared(shared_width: int | None, shared_gate: bool) -> None:
    """Check that a gate has a shared expert to weigh."""
    if shared_gate and shared_width is None:
        raise ValueError("shared_gate: expected False without a shared expert; give its width, too")


class _ExpertLinear(nnx.Module):
    """A linear map for each expert, with the options of `nnx.Linear`."""

    def __init__(
        self, num_experts: int, width: int, out_width: int, *, use_bias: bool, rngs: nnx.Rngs, **options: Any
    ):
        self.dtype, self.precision = options["dtype"], options["precision"]
        dtype, kernel_init = options["param_dtype"], options["kernel_init"]
        self.kernels = nnx.Param(kernel_init(rngs.params(), (num_experts, width, out_width), dtype))
        biases = options["bias_init"](rngs.params(), (num_experts, out_width), dtype) if use_bias else None
        self.biases = None if biases is None else nnx.Param(biases)

    @property
    def arrays(self) -> tuple[Array, Array | None]:
        """The kernels and biases of all experts."""
        return self.kernels[...], None if self.biases is None else self.biases[...]

    def __call__(self, tiles: Array, experts: Array, arrays: Any = None) -> Array:
        """Map every tile by its expert; `arrays` are kernels and biases in place of the layer's own."""
        arrays = self.arrays if arrays is None else arrays
        tiles, kernels, biases = promote_dtype((tiles, *arrays), dtype=self.dtype)

        # Not array[experts], which JAX refuses of an array on a mesh that `shard_map` makes manual.
        pick = functools.partial(jnp.take, axis=0, mode="clip")

        def multiply(tiles: Array, kernels: Array, experts: Array) -> Array:
            return jnp.einsum("gcti,gcio->gcto", tiles, pick(kernels, experts), precision=self.precision)

        # The kernels of all tiles, up to twice those of the layer, are taken again in the backward pass.
        out = jax.checkpoint(multiply, prevent_cse=False)(tiles, kernels, experts)
        return out if biases is None else out + pick(biases, experts)[:, :, None]


def _find_largest(scores: Array, count: int) -> Array:
    """Return where the largest numbers are, not by top_k, for which XLA gathers all devices' on each."""
    return jnp.argsort(scores, axis=-1, descending=True)[..., :count]


def _group_tokens(
    x: Array, placement: Any, shape: tuple[Size, Size, Size]
) -> tuple[Array, Callable[[Array], Array]]:
    """Divide `(*B, T, M)` into the tokens `(G, N, M)` of each device; return what joins them again, too."""
    rows, positions, constrain = placement.divide_tokens(shape) if placement else (1, 1, lambda array: array)
    parts = (rows, shape[0] // rows, positions, shape[1] // positions, shape[2])

    def join(groups: Array) -> Array:
        parted = constrain(groups).reshape((rows, positions, parts[1], parts[3], -1))
        return parted.swapaxes(1, 2).reshape(x.shape)

    return constrain(x.reshape(parts).swapaxes(1, 2).reshape((rows * positions, -1, shape[2]))), join


def count_tile_rows(choices: Size, num_experts: int) -> Size:
    """Return the rows of a tile: the mean number of choices of an expert, where it is known."""
    return -(-choices // num_experts) if isinstance(choices, int) else _SYMBOLIC_ROWS


def _lay_tiles(chosen: Array, num_experts: int) -> tuple[Array, Array]:
    """Lay choices `(R,)` of experts in tiles of one each: which every tile has, where each choice lies."""
    num_rows = chosen.shape[0]
    size = count_tile_rows(num_rows, num_experts)
    # Each of the experts that are chosen leaves at most size - 1 rows of its last tile empty.
    used = min(num_experts, num_rows) if isinstance(num_rows, int) else num_experts
    num_tiles = (num_rows + used * (size - 1)) // size
    counts = jnp.bincount(chosen, length=num_experts)
    tiles = -(-counts // size)
    ends = jnp.cumsum(tiles)
    ranks = jnp.argsort(jnp.argsort(chosen)) - (jnp.cumsum(counts) - counts)[chosen]
    slots = (ends - tiles)[chosen] * size + ranks
    experts = jnp.searchsorted(ends, jnp.arange(num_tiles, dtype=ends.dtype), side="right")
    # Tiles beyond the last are empty, whatever their expert.
    return jnp.minimum(experts, num_experts - 1), slots
