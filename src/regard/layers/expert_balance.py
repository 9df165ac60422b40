"""Balance of experts: what one is chosen too often is the gradient of its bias, or a loss of the router."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from regard.arguments import guided, read_number
from regard.axes import Array


@guided
def balance_experts(
    optimizer: optax.GradientTransformation, rate: float = 0.001
) -> optax.GradientTransformation:
    """Let an optimizer move the choice biases of `Experts` so that all experts are chosen alike often.

    choice_bias_e <- choice_bias_e - rate (s_e - mean of all s),  s_e = sign(load_e - mean of all loads)

    A load is the number of tokens of a batch that choose the expert. After
    `model.set_attributes(counts_loads=True)` it comes as the gradient of the bias, load_e / mean - 1, and so
    through loops, rematerialization, parts of a batch and meshes, without a second output. All other
    parameters, and every norm by which gradients are clipped, are as if these gradients were 0. The loss is
    as before: no auxiliary term pulls at the router. Choice biases are told by that name, `choice_bias`.

    Args:
        optimizer: what updates all other parameters; its state is that of the result.
        rate: what a bias moves by in an update, before the mean of all is taken off.

    Returns:
        An optax transformation, for `nnx.Optimizer(model, ..., wrt=nnx.Param)` or for states of parameters.

    Raises:
        TypeError, ValueError: a rate that is no number of at least 0.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> from regard.layers import Experts, balance_experts
        >>> layer = Experts(3, 7, num_experts=5, router_kind="sigmoid", rngs=nnx.Rngs(0))
        >>> layer.set_attributes(counts_loads=True)
        >>> optimizer = nnx.Optimizer(layer, balance_experts(optax.adam(0.01)), wrt=nnx.Param)
        >>> _ = optimizer.update(layer, nnx.grad(lambda layer: layer(jnp.ones((2, 11, 3))).sum())(layer))
        >>> [round(float(bias), 3) for bias in sorted(layer.choice_bias[...])]
        [-0.002, 0.0, 0.0, 0.0, 0.0]

    Reference: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024,
    algorithm 1, https://arxiv.org/abs/2408.15664; torchtitan takes the mean off, too.
    """
    if not 0 <= read_number("rate", rate) < math.inf:
        raise ValueError(f"rate: expected a number of at least 0, got {rate}")

    def move(surplus: Any) -> Array:
        sign = jnp.sign(surplus)
        # The mean, which moves no choice, would drift to where half precision tells no biases apart.
        return (-rate * (sign - sign.mean(-1, keepdims=True))).astype(sign.dtype)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        change, state = optimizer.update(split_loads(updates)[0], state, params)
        return _map_biases(move, updates, change), state

    return optax.GradientTransformation(optimizer.init, update)


def split_loads(gradients: Any) -> tuple[Any, list[Array]]:
    """Return gradients with 0 for choice biases, and what those had: load / mean load - 1 of every expert."""
    surpluses: list[Array] = []

    def clear(surplus: Any) -> Array:
        surpluses.append(surplus)
        return jnp.zeros_like(surplus)

    return _map_biases(clear, gradients, gradients), surpluses


def is_choice_bias(path: Any) -> bool:
    """Return whether a leaf's path in a tree is that of a choice bias, by its name."""
    return any("choice_bias" in (getattr(key, "key", None), getattr(key, "name", None)) for key in path)


def _map_biases(function: Callable[[Any], Array], gradients: Any, others: Any) -> Any:
    """Map the choice biases among gradients, and leave in place of all else what the others have."""

    def apply(path: Any, gradient: Any, other: Any) -> Any:
        return function(gradient) if is_choice_bias(path) else other

    return jax.tree_util.tree_map_with_path(apply, gradients, others)


def count_loads(weights: Array, bias: Array, chosen: Array) -> Array:
    """Return the weights `(*B, k)` as they are; the gradient by the bias `(.., E)` counts who was chosen."""
    num_experts, choices = bias.shape[-1], chosen.shape[-1]
    hits = jax.nn.one_hot(chosen, num_experts, dtype=jnp.int32).sum(-2)
    # Whole numbers until they are added up, so that even loads are 0 exactly.
    surplus = (hits * num_experts - choices).astype(bias.dtype)
    resting = jax.lax.stop_gradient(bias)
    scaled = resting + (bias - resting) / jnp.asarray(math.prod(chosen.shape), bias.dtype)
    return _attach(weights, jnp.broadcast_to(scaled, hits.shape), surplus)


def add_balance_loss(weights: Array, shares: Array, chosen: Array, factor: float) -> Array:
    """Return the weights `(*B, k)` as they are; gradients are as if the loss had one of imbalance beside it.

    factor E sum_e f_e P_e,  f_e = the share of expert e among `chosen`,  P_e = the mean of its `shares`
    """
    tokens = range(shares.ndim - 1)
    choices = jax.nn.one_hot(chosen, shares.shape[-1], dtype=shares.dtype).mean((*tokens, -2))
    imbalance = shares.shape[-1] * jnp.sum(choices * shares.mean(tokens))
    return _attach(weights, imbalance, jnp.full_like(imbalance, factor))


@jax.custom_vjp
def _attach(weights: Array, biases: Array, surplus: Array) -> Array:
    return weights


_attach.defvjp(
    lambda weights, biases, surplus: (weights, surplus),
    lambda surplus, slope: (slope, surplus, jnp.zeros_like(surplus)),
)
