"""The calls: attention over a mesh, by a plan that is asked for or chosen."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Unpack

import jax
from jax.sharding import AbstractMesh, Mesh

from regard.axes import Array, ArrayLike
from regard.engine.call.canonicalization import canonicalize
from regard.engine.call.options import Options
from regard.engine.dispatch.placement import active, within
from regard.parallel.cost_reports import CostReport
from regard.parallel.placements import MeshPlacement
from regard.parallel.shard_mapping import manual_axes

Names = str | Sequence[str]


def ring_attend(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    axis: str,
    layout: str = "contiguous",
    batch_axis: Names | None = None,
    head_axis: Names | None = None,
    **options: Unpack[Options],
) -> Array | Any:
    """Attend with the sequence divided over devices; keys and values travel around them.

    output_te = sum_r sum_s softmax_s(score_ts) value_se over rounds r, keys s on the device r steps before

    Each device keeps its queries. In every round it attends to the keys it has, while the next ones are on
    their way, and joins the result to what it has by the rules of sums of exponentials. In the backward
    pass keys go around once more, with the gradients of keys and values, which then go home; in forward
    mode their tangents go along. Rounds in which the mask, as far as it is known before tracing,
    leaves no device any work are skipped. Nothing of size T x S exists, and nothing of size T or S on one
    device, but for the mask's arrays, which are whole on each, and a bias, whose rows are divided as those of
    query.

    Inside `jax.shard_map` over `axis`, query, key, value and a bias are this device's part, and so is what
    comes back: T and S are the local lengths times the devices. All else is that of the whole call, and whole
    on every device: masks and their data, sinks, parameters of scores, offsets, rng.

    Args:
        query: as in `attend`. Lengths need not be multiples of the number of devices.
        key, value: as in `attend`.
        mesh: a `jax.sharding.Mesh`; None, inside `jax.shard_map`, is the mesh of that.
        axis: the mesh axis along which the sequence is divided.
        layout: "contiguous": device i has the i-th part. "zigzag": tokens come, and results go, in the order
            of `to_zigzag(..., mesh.shape[axis])`, which balances causal work; all else stays in the order of
            the sequence. "balanced": tokens come in the order of the sequence and are exchanged for that.
        batch_axis: mesh axes along which the first of several leading axes is divided; None is none.
        head_axis: mesh axes along which heads are divided; None is none.
        **options: as in `regard.attend`: the mask is that of the whole sequence in its own order, the dropout
            pattern is that of one device, and aux names any of "lse", "max_score", whose derivative is NaN,
            "argmax" and "entropy". In zig-zag order a bias stays in the order of the sequence; inside
            `jax.shard_map` its rows are query's.

    Returns:
        As `attend`, with derivatives of every kind and order, of a bias and score parameters too. Reverse
        mode through reverse mode keeps the keys of every round on each device; forward over reverse, as in a
        Hessian-vector product, keeps those of one.

    Raises:
        TypeError: as `attend`; a mesh that is none.
        ValueError: as `attend`; an unknown axis or layout; inside `jax.shard_map`, an axis that it leaves to
            the compiler, or an odd number of rows where the layout has two chunks per device.
        NotImplementedError: a call that cannot be divided; the message says why.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from regard import masks, parallel
        >>> mesh = jax.make_mesh((1,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> x = jnp.eye(3)
        >>> out = parallel.ring_attend(x, x, x, mesh=mesh, axis="sequence", mask=masks.causal())
        >>> [f"{number:.2f}" for number in out[1]]
        ['0.36', '0.64', '0.00']

    Reference: Liu et al., "Ring Attention with Blockwise Transformers", 2023, algorithm 1; the balanced order
    as in Brandon et al., "Striped Attention", 2023, but with two chunks per device instead of stripes.
    """
    placement = MeshPlacement.check(_mesh_around(mesh), axis, batch_axis, head_axis, layout, "ring")
    return placement.attend(query, key, value, options)


def all_to_all_attend(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    axis: str,
    ring_axis: str | None = None,
    layout: str = "contiguous",
    batch_axis: Names | None = None,
    head_axis: Names | None = None,
    **options: Unpack[Options],
) -> Array | Any:
    """Attend with the sequence divided over devices, which swap it for heads: each attends for some of them.

    output_hte = sum_s softmax_s(score_hts) value_hse, all t and s of head h on one device

    Args:
        query: as in `attend`; its heads are a multiple of the devices along `axis`.
        key, value: as in `attend`; so are their heads.
        mesh: as in `ring_attend`.
        axis: the mesh axis along which sequence is exchanged for heads.
        ring_axis: one more mesh axis, along which keys travel: the sequence is divided first along this one,
            then along `axis`. None means that each device sees all keys of its heads.
        layout: as in `ring_attend`, of the devices along `ring_axis`.
        batch_axis, head_axis: as in `ring_attend`; heads are divided before any are exchanged.
        **options: as in `ring_attend`.

    Returns:
        As `ring_attend`.

    Raises:
        TypeError, ValueError: as `ring_attend`.
        NotImplementedError: heads that do not divide, with the sizes that would; as `ring_attend`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from regard import parallel
        >>> mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> x = jnp.ones((4, 3, 2))
        >>> parallel.all_to_all_attend(x, x, x, mesh=mesh, axis="heads").shape
        (4, 3, 2)

    Reference: Jacobs et al., "DeepSpeed Ulysses", 2023, section 3; both together: Fang and Zhao, "USP", 2024.
    """
    plan, axes = ("all_to_all", axis) if ring_axis is None else ("both", (ring_axis, axis))
    placement = MeshPlacement.check(_mesh_around(mesh), axes, batch_axis, head_axis, layout, plan)
    return placement.attend(query, key, value, options)


def attend(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    axis: Names | None = None,
    batch_axis: Names | None = None,
    head_axis: Names | None = None,
    layout: str | None = None,
    plan: str | None = None,
    **options: Unpack[Options],
) -> Array | Any:
    """Attend over a mesh by the plan that serves and sends least; `explain` says which.

    output_te = sum_s softmax_s(score_ts) value_se, as `regard.attend`

    Args:
        query, key, value: as in `attend`.
        mesh: a `jax.sharding.Mesh`; None means that of the `use` around the call, or with an axis that of the
            `jax.shard_map` around it.
        axis: the mesh axis along which the sequence is divided, or two: one along which keys travel, and one
            along which heads are exchanged.
        batch_axis, head_axis: as in `ring_attend`.
        layout: as in `ring_attend`; None means "contiguous", or "balanced" where what that takes off the
            busiest device, forward and back, is worth the bytes that it sends: 1,000 operations each. What
            is not known of the mask before the program runs, such as documents, counts as attended to.
        plan: "ring", "all_to_all", "both" or "whole" (one program, which the compiler divides as it can);
            None means the one that serves and sends least, and "whole" where none serves or rows are few.
            Inside `jax.shard_map` there is no "whole".
        **options: all others of `regard.attend`.

    Returns:
        As `regard.attend`.

    Raises:
        TypeError, ValueError: as `ring_attend`; no mesh, and no `use` around the call.
        NotImplementedError: a plan asked for that cannot serve.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from regard import parallel
        >>> mesh = jax.make_mesh((1,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> x = jnp.ones((4, 3, 2))
        >>> parallel.attend(x, x, x, mesh=mesh, axis="sequence").shape
        (4, 3, 2)
    """
    return _find_placement(mesh, axis, batch_axis, head_axis, layout, plan).attend(query, key, value, options)


def explain(
    query: ArrayLike | jax.ShapeDtypeStruct,
    key: ArrayLike | jax.ShapeDtypeStruct,
    value: ArrayLike | jax.ShapeDtypeStruct,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    axis: Names | None = None,
    batch_axis: Names | None = None,
    head_axis: Names | None = None,
    layout: str | None = None,
    plan: str | None = None,
    **options: Unpack[Options],
) -> CostReport:
    """Say what `attend` would do over a mesh: plan and why, rounds, bytes sent, tiles per device.

    Nothing is computed: `jax.ShapeDtypeStruct` stands in for arrays, `jax.sharding.AbstractMesh` for a mesh.

    Args:
        query, key, value: as in `attend`, or a shape and a dtype.
        mesh, axis, batch_axis, head_axis, layout, plan: as in `attend`.
        **options: as in `attend`.

    Returns:
        A record to read or print.

    Raises:
        TypeError, ValueError, NotImplementedError: as `attend`.

    Example:
        >>> import jax
        >>> from regard import masks, parallel
        >>> x = jax.ShapeDtypeStruct((1, 8, 4096, 64), "bfloat16")
        >>> mesh = jax.sharding.AbstractMesh((4,), ("sequence",))
        >>> print(parallel.explain(x, x, x, mesh=mesh, axis="sequence", mask=masks.causal(), plan="ring"))
        plan       ring: it was asked for
        devices    4, 1024 queries each, balanced
        rounds     4; 0 without work are skipped
        sent       9.49 MB per device forward, 26.2 MB backward
        tiles      132 to 132 per device (128 x 128), balance 1.00
    """
    placement = _find_placement(mesh, axis, batch_axis, head_axis, layout, plan)
    return placement.explain(canonicalize(query, key, value, **options))


def use(
    mesh: Mesh | AbstractMesh,
    axis: Names,
    *,
    batch_axis: Names | None = None,
    head_axis: Names | None = None,
    layout: str | None = None,
    plan: str | None = None,
    expert_axis: str | None = None,
) -> AbstractContextManager[Any]:
    """Let every `regard.attend` inside run over a mesh: layers and models need no change.

    What was compiled outside is compiled anew inside, as `jax.jit` sees the context. Calls with `backend=`
    are left alone; of `regard.linear.attend` each device runs rows, heads and a part of the sequence.
    Inside `jax.shard_map` over these axes arrays are this device's part and masks are whole, as in
    `ring_attend`; `query_positions` and `key_positions` are refused.

    Args:
        mesh, axis, batch_axis, head_axis, plan: as in `attend`.
        layout: as in `attend`, but for "zigzag": layers number positions in the order of the sequence.
        expert_axis: the mesh axis that divides the kernels of `layers.Experts` by expert, and to whose
            devices tokens travel; one of `batch_axis`, or another, along which all have the same tokens. An
            axis that does not divide the number of experts divides nothing. Gradients are those of reverse
            mode alone.

    Returns:
        A context manager.

    Raises:
        TypeError, ValueError: as `attend`; zig-zag order.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import regard
        >>> mesh = jax.make_mesh((1,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> with regard.parallel.use(mesh, "sequence"):
        ...     out = regard.attend(jnp.ones((4, 3, 2)), jnp.ones((4, 3, 2)), jnp.ones((4, 3, 2)))
    """
    if layout == "zigzag":
        raise ValueError(
            "layout: expected contiguous, balanced or None, because layers number positions in the order of"
            " the sequence; got 'zigzag'. 'balanced' exchanges tokens for that order and back in every call"
        )
    return within(MeshPlacement.check(mesh, axis, batch_axis, head_axis, layout, plan, expert_axis))


def _mesh_around(mesh: Any) -> Any:
    """Return the mesh, that of the `jax.shard_map` around the call where none is given."""
    if mesh is None and manual_axes():
        return jax.sharding.get_abstract_mesh()
    if mesh is None:
        raise ValueError("mesh: expected a mesh, as there is no jax.shard_map around the call; got None")
    return mesh


def _find_placement(
    mesh: Any, axis: Any, batch_axis: Any, head_axis: Any, layout: Any, plan: Any
) -> MeshPlacement:
    if mesh is None and (axis is None or not manual_axes()):
        placement = active()
        if isinstance(placement, MeshPlacement):
            return placement
        raise ValueError(
            "mesh: expected a mesh, or `with parallel.use(mesh, axis):` around the call; got None"
        )
    mesh = _mesh_around(mesh)
    if axis is None:
        raise ValueError(f"axis: expected the mesh axis of the sequence, one of {mesh.axis_names}; got None")
    return MeshPlacement.check(mesh, axis, batch_axis, head_axis, layout, plan)
