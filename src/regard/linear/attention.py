"""The calls of linear attention: `attend` for a sequence, `step` for one token more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.lax import PrecisionLike

from regard.arguments import guided
from regard.axes import Array, ArrayLike
from regard.engine.call.canonicalization import float_array
from regard.linear.devices import run_over_devices
from regard.linear.problem import State, canonicalize


@guided
def attend(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    decay: ArrayLike | None = None,
    rate: ArrayLike | None = None,
    feature_map: str | Callable[[Array], Array] = "identity",
    normalise: bool = False,
    scale: float | Array | None = None,
    causal: bool = True,
    valid: ArrayLike | None = None,
    segments: ArrayLike | None = None,
    initial: State | None = None,
    return_state: bool = False,
    chunk: int | None = None,
    precision: PrecisionLike = None,
) -> Array | Any:
    """Read from a matrix that keys and values are written into, one after the other: linear attention.

    S_0 = initial,  S_t = A_t S_(t-1) + key_t u_t^T,  output_t = scale query_t^T S_t
    A_t = exp(decay_t), or 1 without `decay`,  u_t = value_t, or with `rate`
    u_t = rate_t (value_t - key_t^T A_t S_(t-1))

    The last is the delta rule, which replaces what is stored under key_t.

    | decay, rate   | rule        | known as                                      |
    |---------------|-------------|-----------------------------------------------|
    | None, None    | linear      | linear transformer, with `normalise`          |
    | decay         | gated       | RetNet, Mamba-2 per head; GLA per channel     |
    | rate          | delta       | DeltaNet                                      |
    | decay, rate   | gated delta | Gated DeltaNet per head; KDA per channel      |

    Shapes are `(..., heads, length, width)`: query `(*B, H, T, D)`, key `(*B, K, S, D)`, value
    `(*B, K, S, E)`; rank 2 is one unbatched head. H is K or a multiple of it (grouped heads). Time and memory
    grow linearly with the length, those of gradients too.

    Args:
        query: floating-point array; its dtype is the output's. Sums and states are float32, float64 where
            query, key or value is.
        key: floating-point array. The delta rule is stable where rate * |key|^2 is at most 2: normalise keys.
        value: floating-point array.
        decay: log of the factor in (0, 1] that a token keeps of the state before it: at most 0, -inf forgets
            all. Its axes broadcast to `(*B, K, S)`, or to `(*B, K, S, D)` for the log of one factor per
            channel of key. None keeps all. Under jit nothing can be raised: with a number above 0 there, the
            state grows by a factor above 1, as the recurrence says.
        rate: how much of what is stored under a key is replaced (beta), usually in [0, 1]; its axes broadcast
            to `(*B, K, S)`. None adds without replacing.
        feature_map: what query and key pass through first: "identity", "elu1" (elu + 1), "relu", "exp", or a
            function of one array that may change its last axis, D from there on.
        normalise: divide by the sum of the weights, `output_t = query_t^T S_t / query_t^T z_t` with
            `z_t = A_t z_(t-1) + key_t`; 0 where it is 0. For non-negative feature maps; not with `rate`.
        scale: factor on the output; None means 1/sqrt(D) of query as it came. Not with `normalise`.
        causal: query t reads the state after key t, and T = S. False: every query reads the last state.
        valid: boolean or integer array `(batch, ..., S)`, nonzero = a real token, aligned with the first
            leading axes of query. Other tokens change nothing, whatever they hold, NaN included; with
            `causal` they read 0. None means all are real.
        segments: integer array `(batch, ..., S)`, aligned as `valid`: packed documents, each of which starts
            with a state of zeros. A token whose number is another than that of the real token before it
            starts one; a number that comes back is a new document. The first token goes on from `initial`.
            The same as a `decay` of -inf at those tokens. With `causal` only.
        initial: the state to go on from; None is a state of zeros.
        return_state: also return the state after the last token.
        chunk: tokens evaluated together, a power of two; 1 is the recurrence, token by token. It changes
            rounding, speed and memory only: gradients keep one state per chunk. None picks. NaN or infinity
            in a valid token may reach all rows of its chunk, and all that follow, of other documents too.
        precision: of the matrix products, as in `jax.lax.dot_general`.

    Returns:
        The output `(*B, H, T, E)`; with `return_state`, a pair of it and a `State`. Length 0 returns the
        initial state.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes that do not fit, T other than S with `causal`, segments without it, a decay above 0
            of a valid token outside jit, an unknown feature map, `normalise` together with `rate` or `scale`,
            a chunk that is no power of two.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import linear
        >>> x = jnp.array([[1.0, 0.0], [1.0, 0.0]])
        >>> value = jnp.array([[2.0], [5.0]])
        >>> linear.attend(x, x, value, scale=1.0).tolist()
        [[2.0], [7.0]]
        >>> linear.attend(x, x, value, scale=1.0, rate=jnp.ones(2)).tolist()
        [[2.0], [5.0]]
        >>> linear.attend(x, x, value, feature_map="elu1", normalise=True).tolist()
        [[2.0], [3.5]]
        >>> linear.attend(x, x, value, scale=1.0, segments=[0, 1]).tolist()
        [[2.0], [5.0]]

    Reference: Katharopoulos et al., "Transformers are RNNs", 2020, section 3.3; Yang et al., "Gated Linear
    Attention Transformers", 2024, section 4; Yang et al., "Gated Delta Networks", 2025, section 3; rules and
    default scale as in ONNX LinearAttention.
    """
    problem = canonicalize(
        query,
        key,
        value,
        decay=decay,
        rate=rate,
        feature_map=feature_map,
        normalise=normalise,
        scale=scale,
        causal=causal,
        valid=valid,
        segments=segments,
        initial=initial,
        chunk=chunk,
        precision=precision,
    )
    output, carried = run_over_devices(problem)
    if not return_state:
        return output
    if not problem.config.leading:
        carried = jax.tree.map(lambda array: array[0], carried)
    return output, State(carried.memory, carried.key_sum)


@guided
def step(
    state: State | None,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    decay: ArrayLike | None = None,
    rate: ArrayLike | None = None,
    feature_map: str | Callable[[Array], Array] = "identity",
    normalise: bool = False,
    scale: float | Array | None = None,
    precision: PrecisionLike = None,
) -> tuple[Array, State]:
    """Write one token into a state and read it: decoding in time and memory that do not grow.

    S = A state + key u^T,  output = scale query^T S, as in `attend`

    Shapes are those of `attend` without the length: query `(*B, H, D)`, key `(*B, K, D)`, value `(*B, K, E)`.

    Args:
        state: what `attend(..., return_state=True)` or the last step returned; None is a state of zeros.
        query, key, value: floating-point arrays; the output has the dtype of query.
        decay: as in `attend`, at most 0, `(*B, K)` or `(*B, K, D)`.
        rate: as in `attend`, `(*B, K)`.
        feature_map, normalise, scale, precision: as in `attend`.

    Returns:
        The output `(*B, H, E)` and the next state.

    Raises:
        TypeError, ValueError: as `attend`.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import linear
        >>> state = None
        >>> for value in (2.0, 5.0):
        ...     output, state = linear.step(state, jnp.ones(1), jnp.ones(1), jnp.array([value]))
        >>> output.tolist()
        [7.0]

    Reference: Katharopoulos et al., "Transformers are RNNs", 2020, section 3.4.
    """
    query, key, value = _one_row("query", query), _one_row("key", key), _one_row("value", value)
    if decay is not None:
        factors: Any = float_array("decay", decay, 0)
        per_channel = factors.ndim == max(query.ndim, key.ndim, value.ndim) - 1
        decay = factors[..., None, :] if per_channel else factors[..., None]
    output, next_state = attend(
        query,
        key,
        value,
        decay=decay,
        rate=None if rate is None else float_array("rate", rate, 0)[..., None],
        feature_map=feature_map,
        normalise=normalise,
        scale=scale,
        initial=state,
        return_state=True,
        precision=precision,
    )
    return output[..., 0, :], next_state


def _one_row(name: str, array: Any) -> Array:
    array = float_array(name, array, 0)
    if array.ndim == 0:
        raise ValueError(f"{name}: expected at least one axis (..., heads, width), got a number")
    return array[..., None, :]
