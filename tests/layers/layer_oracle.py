"""The layers' definitions in float64 NumPy, one line of mathematics per line: the truth of their tests."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy.special import erf

EPSILON = 1e-6

ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: x / 2 * (1 + erf(x / np.sqrt(2))),
    "gelu_quick": lambda x: x / (1 + np.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def float64(x):
    return np.asarray(x, np.float64)


def linear(layer: nnx.Linear, x):
    y = float64(x) @ float64(layer.kernel[...])
    return y if layer.bias is None else y + float64(layer.bias[...])


def layer_norm(layer: nnx.LayerNorm, x, epsilon=EPSILON):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * float64(layer.scale[...]) + float64(layer.bias[...])


def rms_norm(layer: nnx.RMSNorm, x, epsilon=EPSILON):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * float64(layer.scale[...])


def softmax_rows(scores, keep):
    """Softmax over the kept keys; a row that keeps none is all zero."""
    scores = np.where(keep, scores, -np.inf)
    peak = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    weights = np.where(keep, np.exp(scores - np.where(np.isfinite(peak), peak, 0.0)), 0.0)
    total = weights.sum(-1, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


def multi_head(layer, query, key=None, value=None, keep=True, bias=0.0, epsilon=EPSILON):
    """Output (B, T, M) and weights (B, H, T, S) of batched inputs; keep and bias broadcast to the weights."""
    key = query if key is None else key
    value = key if value is None else value
    projections = layer.query_projection, layer.key_projection, layer.value_projection
    q, k, v = map(linear, projections, (query, key, value))
    D, group = layer.head_dim, layer.num_heads // layer.num_key_heads
    heads, weights = [], []
    for h in range(layer.num_heads):
        mine, theirs = slice(h * D, (h + 1) * D), slice(h // group * D, (h // group + 1) * D)
        one, other = q[..., mine], k[..., theirs]
        if layer.query_norm is not None:
            one, other = rms_norm(layer.query_norm, one, epsilon), rms_norm(layer.key_norm, other, epsilon)
        scores = np.einsum("btd,bsd->bts", one, other) / np.sqrt(D)
        full = (scores.shape[0], layer.num_heads, *scores.shape[1:])
        kept = np.broadcast_to(keep, full)[:, h]
        weights.append(softmax_rows(scores + np.broadcast_to(bias, full)[:, h], kept))
        heads.append(weights[-1] @ v[..., theirs])
    out = np.concatenate(heads, axis=-1)
    if layer.output_projection is not None:
        out = linear(layer.output_projection, out)
    return out, np.stack(weights, axis=1)


def apply_gate(layer, gate, hidden):
    """The hidden layer of a branch from what its maps give; gate is None where there is none."""
    act, limit = ACTIVATIONS[layer.activation], layer.gate_limit
    if gate is None:
        return act(hidden)
    if limit is None:
        return act(gate) * hidden
    return act(np.minimum(gate, limit)) * (np.clip(hidden, -limit, limit) + 1)


def feed_forward(layer, x):
    gate = None if layer.gate is None else linear(layer.gate, x)
    return linear(layer.narrow, apply_gate(layer, gate, linear(layer.widen, x)))


def experts(layer, x):
    """Every token for itself: its best experts one after another."""
    x = float64(x)
    out = np.zeros_like(x)

    def apply(part, expert, row):
        biases = 0 if part.biases is None else float64(part.biases[expert])
        return row @ float64(part.kernels[expert]) + biases

    for place in np.ndindex(x.shape[:-1]):
        chosen, weights = choose_experts(layer, linear(layer.router, x[place]))
        for e, weight in zip(chosen, weights, strict=True):
            gate = None if layer.gate is None else apply(layer.gate, e, x[place])
            hidden = apply_gate(layer, gate, apply(layer.widen, e, x[place]))
            out[place] += layer.expert_scale * weight * apply(layer.narrow, e, hidden)
        if layer.shared is not None:
            closed = 0 if layer.shared_gate is None else np.exp(-linear(layer.shared_gate, x[place]))
            out[place] += feed_forward(layer.shared, x[place]) / (1 + closed)
    return out


def choose_experts(layer, scores):
    """The best experts of one token, and their weights."""
    if layer.choice_bias is None:
        chosen = np.argsort(-scores)[: layer.experts_per_token]
        rivals = scores[chosen] if layer.normalize_chosen else scores
        return chosen, np.exp(scores[chosen]) / np.exp(rivals).sum()
    shares = 1 / (1 + np.exp(-scores))
    groups = (shares + float64(layer.choice_bias)).reshape(layer.expert_groups, -1)
    groups[np.argsort(-np.sort(groups)[:, -2:].sum(1))[layer.groups_per_token :]] = -np.inf
    chosen = np.argsort(-groups.reshape(-1))[: layer.experts_per_token]
    return chosen, shares[chosen] / (shares[chosen].sum() if layer.normalize_chosen else 1)


def assert_close(actual, expected, ulps=128):
    """Within some float32 roundings of the largest value: sums of a few hundred terms stay well inside."""
    expected = float64(expected)
    scale = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
    np.testing.assert_allclose(float64(actual), expected, rtol=0, atol=ulps * 2.0**-24 * scale)


def precisions(layer, *arrays):
    """The precisions that the products of a call are computed with: {"None"}, where none is asked for."""
    program = program_of(layer, *arrays)
    found = re.findall(r"precision=\(?(?:Precision\.)?(\w+)", program)
    # A program says nothing of products for which nothing is asked.
    return {*found, *["None"] * (program.count("dot_general[") - len(found))}


def program_of(module: nnx.Module, *arrays, **options):
    """The text of a call's program, whose module may be in another mode the next time."""
    graph, state = nnx.split(module)
    run = lambda state, *arrays: nnx.merge(graph, state)(*arrays, **options)
    return str(jax.make_jaxpr(run)(state, *arrays))


def count_parameters(module: nnx.Module) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def widen(module: nnx.Module):
    """The module itself, with parameters in float64 where that is on."""
    state = nnx.state(module, nnx.Param)
    nnx.update(module, jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), state))
    return module


def compiled(module: nnx.Module, *arrays, **options):
    """The module's call as one program, which compiles sooner than its operations one by one."""
    graph, state = nnx.split(module)
    return jax.jit(lambda state, *arrays: nnx.merge(graph, state)(*arrays, **options))(state, *arrays)


def build_drawn(kind, /, *sizes, seed=0, **options):
    """Build a module whose parameters NumPy draws: initial values would take a program for every shape."""
    graph, state = nnx.split(nnx.eval_shape(lambda: kind(*sizes, **options, rngs=nnx.Rngs(0))))
    leaves, tree = jax.tree.flatten(state)
    rng = np.random.default_rng(seed)

    def fill(number, leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(number)
        drawn = rng.normal(size=leaf.shape) * 0.5 if jnp.issubdtype(leaf.dtype, jnp.inexact) else 0
        return jnp.asarray(np.broadcast_to(drawn, leaf.shape).astype(leaf.dtype), leaf.dtype)

    return nnx.merge(graph, tree.unflatten([fill(*pair) for pair in enumerate(leaves)]))
