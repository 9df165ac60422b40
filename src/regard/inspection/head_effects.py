"""Effects of heads: the change of a loss or a logit without each of them, by runs or to first order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import whole_number
from regard.axes import Array, ArrayLike
from regard.engine.call.hooks import Finish, rewrite
from regard.engine.call.problem import Problem
from regard.inspection.interventions import Change, intervene
from regard.inspection.observations import close_over


def sweep_heads(
    fn: Callable[..., Any], *args: Any, output: ArrayLike = 0.0, progress: bool = False, **kwargs: Any
) -> tuple[np.ndarray, ...]:
    """Measure by how much fn's number changes when each head's output is replaced, one head after another.

    effect_nh = fn(new_nh in place of output_nh) - fn(output_nh)

    One program is compiled, which takes the head as an array, and runs once per head.

    Args:
        fn: a function to a number, such as a loss or one logit, that calls `attend`.
        *args, **kwargs: of fn; what is no array, such as a model, goes through.
        output: what heads write instead, for all calls or one entry for each of them: 0.0 switches them off;
            a mean over prompts, `(H, 1, E)`, leaves what they always write.
        progress: whether to show a bar on the terminal.

    Returns:
        For each call, in the order of calling, the effects of its heads, `(H,)`.

    Raises:
        ValueError: fn that gives no single number, or calls no attention; more or fewer outputs than calls.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import attend, inspection
        >>> value = jnp.array([1.0, 2.0, 4.0])[:, None, None]  # of three heads
        >>> def total(value):
        ...     return attend(jnp.ones((3, 5, 2)), jnp.ones((3, 1, 2)), value).sum()
        >>> inspection.sweep_heads(total, value)[0].tolist()
        [-5.0, -10.0, -20.0]

    Reference: Michel et al., "Are Sixteen Heads Really Better than One?", 2019, section 3.1; Wang et al.,
    "Interpretability in the Wild", 2022.
    """
    run, shares = _switchable(fn, output, args, kwargs)
    run = jax.jit(run)
    before = run(shares)
    effects = [np.zeros(share.shape, before.dtype) for share in shares]
    every = [(n, head) for n, share in enumerate(shares) for head in range(len(share))]
    heads: Iterable[tuple[int, int]] = every
    if progress:
        from rich.progress import track

        heads = track(heads, "heads", transient=True)
    for number, head in heads:
        changed = [*shares]
        changed[number] = shares[number].at[head].set(1)
        effects[number][head] = run(changed) - before
    return tuple(effects)


def attribute_heads(
    fn: Callable[..., Any], *args: Any, output: ArrayLike = 0.0, steps: int = 1, **kwargs: Any
) -> tuple[np.ndarray, ...]:
    """Estimate what `sweep_heads` measures, for all heads at once, from gradients (attribution patching).

    effect_nh ~ (1/steps) sum_k (d fn / d output_nh) . (new_nh - output_nh),  where every head's output is
    (1 - s_k) output + s_k new,  s_k = k / (steps - 1)

    Args:
        fn, *args, output, **kwargs: as in `sweep_heads`.
        steps: gradients on the way from what all heads write to what replaces it. One, of the model as it
            is, orders heads of a trained model badly where the loss curves; five cost as many runs.

    Returns:
        As `sweep_heads`.

    Raises:
        ValueError: as `sweep_heads`; steps below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import attend, inspection
        >>> value = jnp.array([1.0, 2.0, 4.0])[:, None, None]
        >>> def total(value):
        ...     return attend(jnp.ones((3, 5, 2)), jnp.ones((3, 1, 2)), value).sum()
        >>> inspection.attribute_heads(total, value)[0].tolist()
        [-5.0, -10.0, -20.0]

    Reference: Nanda, "Attribution Patching", 2023; Syed et al., "Attribution Patching Outperforms Automated
    Circuit Discovery", 2023, equation 1; Hanna et al., "Have Faith in Faithfulness", 2024, equation 3.
    """
    steps = whole_number("steps", steps, 1)
    run, shares = _switchable(fn, output, args, kwargs)
    gradient = jax.jit(jax.grad(lambda shares, way: run([share + way for share in shares])))
    ways = [np.asarray(way, shares[0].dtype) for way in np.linspace(0, 1, steps)]
    gradients = [gradient(shares, way) for way in ways]
    return tuple(np.mean(parts, 0) for parts in zip(*gradients, strict=True))


def _switchable(
    fn: Callable[..., Any], output: Any, args: Any, kwargs: Any
) -> tuple[Callable[[list[Array]], Array], list[Array]]:
    """Return fn as a function of the share of each head that is replaced, and those shares, all 0."""
    call, arrays = close_over(fn, args, kwargs)
    heads: list[int] = []

    def count(problem: Problem) -> tuple[Problem, Finish]:
        heads.append(problem.leading[-1] if problem.leading else 1)
        return problem, lambda output, extra: output

    with rewrite(count):
        made = jax.eval_shape(call, arrays)
    if getattr(made, "shape", None) != () or not jnp.issubdtype(made.dtype, jnp.floating):
        raise ValueError(f"fn: expected a function to one floating-point number, such as a loss; got {made}")
    if not heads:
        raise ValueError("fn: expected a function that calls regard.attend, got one that does not")
    outputs = list(output) if isinstance(output, Sequence) else [output] * len(heads)
    if len(outputs) != len(heads):
        raise ValueError(f"output: expected one entry for each of {len(heads)} calls, got {len(outputs)}")

    def run(shares: list[Array]) -> Array:
        changes = [Change(output=new, share=share) for new, share in zip(outputs, shares, strict=True)]
        with intervene(dict(enumerate(changes))):
            return call(arrays)

    return run, [jnp.zeros(count, made.dtype) for count in heads]
