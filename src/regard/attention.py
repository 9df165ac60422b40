"""The call of attention, and the report of one: arguments are checked, a backend is chosen and run."""

from __future__ import annotations

from typing import Any, Unpack

import jax

from regard.arguments import guided
from regard.axes import Array, ArrayLike
from regard.engine.call.canonicalization import canonicalize, check_values
from regard.engine.call.checkpoint_names import CHECKPOINT_NAMES as CHECKPOINT_NAMES
from regard.engine.call.hooks import is_hooked, report, rewritten
from regard.engine.call.options import Options, spell_out
from regard.engine.call.problem import Problem
from regard.engine.dispatch.explanation import Explanation, describe
from regard.engine.dispatch.explicit_axes import run_in_automatic_axes
from regard.engine.dispatch.placement import active
from regard.engine.dispatch.registry import choose
from regard.engine.platforms import find_platform, tracing_for
from regard.engine.softmax.merging import merge as merge


@guided
@spell_out
def attend(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    backend: str | None = None,
    **options: Unpack[Options],
) -> Array | Any:
    """Average the values, weighted by how well each key answers each query.

    score_ts = f(scale sum_d query_td key_sd) + bias_ts over the keys that query t may attend to; f is `score`
    output_te = sum_s softmax_s(score_ts) value_se

    Shapes are `(..., heads, length, width)`: query `(*B, T, D)`, key `(*B, S, D)`, value `(*B, S, E)`; rank
    2 is one unbatched head. Leading axes broadcast. The heads axis of query, the one before T, may be a
    multiple of that of key and value (grouped heads).

    Args:
        query: floating-point array; its dtype is the output's. Sums are float32, float64 for float64.
        key: floating-point array.
        value: floating-point array.
        mask: which query may attend to which key, True = may attend: a `masks.Mask`, or a boolean or integer
            array that broadcasts to `(*B, T, S)`. None means all may.
        bias: floating-point array that broadcasts to `(*B, T, S)`, added to the scores; -inf removes a key as
            the mask does.
        score: what becomes of the scaled scores before bias and mask: a `scores.Score`, or several, applied
            from left to right.
        scale: factor on the scores; None means 1/sqrt(D).
        sinks: one logit per head, an array that broadcasts to `*B`, that takes part in the softmax as a key
            with a value of 0 would: `lse = log(e^sink + sum_s e^score_s)`.
            Weights then sum to less than 1; lse and entropy count the sink, max_score and argmax do not.
        dropout_rate: chance in [0, 1) that a weight is dropped; the others grow by 1 / (1 - rate). The
            pattern depends on (rng, batch, head, query position, key position) alone; with positions per
            token, on rows in their place, as tokens may share a position.
        rng: random key, needed when dropout_rate > 0.
        query_offset: position of query row 0: an integer or one per batch row. None means 0 when T == S; with
            T != S, or with a key_offset, it is needed by masks that read positions.
        key_offset: position of key row 0, likewise; None means 0. For a piece of a longer sequence.
        query_positions: in place of query_offset, the position of each query row: integers `(T,)`, or
            `(batch..., T)` aligned with the first leading axes of query, in any order; several rows may share
            one, and it may be negative or traced; what is traced of 64 bits, here or as an offset, counts as
            the nearest that int32 holds. Keys stay at 0..S-1 unless told otherwise: for packed rows
            that restart at 0 pass the same array as key_positions, too.
        key_positions: in place of key_offset, the position of each key row, `(S,)` or `(batch..., S)`.
            Masks that read positions then need query_offset or query_positions, even with T == S.
        aux: names of what else to return: "weights" and "scores" `(*B, T, S)`; "lse" (log of the sum of
            exponentials), "max_score", "argmax" and "entropy" (nats), each `(*B, T)`. Asking does not change
            the output. Weights are those before dropout.
        rows: which query rows "weights" and "scores" in aux are wanted for; None means all. They are then
            `(*B, len(rows), S)`, formed from the saved lse; of long sequences, nothing larger is computed.
        heads: which query heads they are wanted for, likewise: the heads axis becomes `len(heads)` long.
        backend: dense, tiled, gathered, cudnn, splash_tpu or mosaic_gpu; None picks, or does as
            `parallel.use` around the call says.
        precision: of the matrix products, as in `jax.lax.dot_general`. Where all inputs are bfloat16, they
            multiply bfloat16 numbers and sum in float32 (weights are rounded when they meet values), unless
            more than the default precision is asked for.
        batch_invariant: True promises that a row's output and lse have the same bits whatever else is in the
            batch, and however its sequence is cut into prefill, chunks and single tokens, with caches or
            without. Tiles of 64 x 128 then serve every length: whole sequences take 1.1 to 1.6 times as long,
            single tokens several times.

    Returns:
        The output `(*B, T, E)`; with names in `aux`, a pair of it and a dict of arrays in the accumulation
        dtype (argmax int32). A query that may attend to nothing gives output and weights 0, lse and max_score
        -inf, argmax -1, entropy 0 and zero gradients. T = 0 and S = 0 are allowed. NaN or inf in a key or
        value that no query may attend to reaches neither output nor gradient; where a score is NaN, so are
        output and statistics, and argmax is 0. Batch, heads and lengths may be symbols of `jax.export`.

    Raises:
        TypeError: an argument of the wrong type, among them a float mask (pass it as `bias=`).
        ValueError: shapes that do not fit, a rate outside [0, 1), a missing rng or query_offset, an offset
            and positions for one side, an unknown name in aux or backend.
        NotImplementedError: the backend asked for cannot serve the call; the message says why.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import attend, masks
        >>> x = jnp.eye(3)
        >>> out, aux = attend(x, x, x, mask=masks.causal(), aux=("weights",))
        >>> [f"{weight:.2f}" for weight in aux["weights"][1]]
        ['0.36', '0.64', '0.00']

    Reference: Vaswani et al., "Attention Is All You Need", 2017, equation 1; empty rows as in ONNX Attention;
    grouped heads from Ainslie et al., "GQA", 2023; sinks from Xiao et al., "Efficient Streaming Language
    Models with Attention Sinks", 2024, as the learned logits of gpt-oss.
    """
    placement = active() if backend is None and not is_hooked() else None
    if placement is not None and placement.divided_here():
        platform = find_platform(query, key, value)
        with tracing_for(platform), jax.transfer_guard_host_to_device("allow"):
            return placement.attend_here(query, key, value, options)
    problem = canonicalize(query, key, value, **options)
    check_values(problem)
    return run_problem(problem, backend)


def run_problem(problem: Problem, backend: str | None) -> Any:
    """Choose who runs a call, run it, and return what `attend` does."""
    asked = problem.aux
    problem, finish = rewritten(problem)
    placement = active() if backend is None else None
    platform = find_platform(problem.query, problem.key, problem.value)
    # Of its own accord a call moves its numbers alone, such as its scale, which a guard is to let through.
    with tracing_for(platform), jax.transfer_guard_host_to_device("allow"):
        chosen = choose(problem, backend)  # under a placement, what one device would take
        if placement is not None or chosen.name != "dense":  # which alone reads stores
            problem = problem.with_arrays()
        output, extra = run_in_automatic_axes((placement or chosen).run, problem)
    output = finish(output, extra)
    report(problem, output, chosen.name)
    return (output, {name: extra[name] for name in asked}) if asked else output


def explain(
    query: ArrayLike | jax.ShapeDtypeStruct,
    key: ArrayLike | jax.ShapeDtypeStruct,
    value: ArrayLike | jax.ShapeDtypeStruct,
    *,
    backend: str | None = None,
    **options: Unpack[Options],
) -> Explanation:
    """Say what `attend` would do with the same arguments: sizes, backend and why, and how much work.

    Nothing is computed, so `jax.ShapeDtypeStruct` stands in for arrays.

    Args:
        query, key, value: as in `attend`, or their shapes and dtypes.
        backend: as in `attend`.
        **options: as in `attend`; shapes and dtypes may stand for arrays.

    Returns:
        A record to read or print.

    Raises:
        TypeError, ValueError, NotImplementedError: as `attend`.

    Example:
        >>> import jax
        >>> from regard import explain, masks
        >>> x = jax.ShapeDtypeStruct((1, 8, 4096, 64), "bfloat16")
        >>> report = explain(x, x, x, mask=masks.causal() & masks.sliding_window(255))
        >>> report.tiles.empty, report.tiles.partial, report.tiles.full
        (931, 62, 31)
    """
    problem = canonicalize(query, key, value, **options)
    # To look at a mask is to read it.
    with tracing_for(find_platform(query, key, value)), jax.transfer_guard("allow"):
        return describe(problem, choose(problem, backend))
