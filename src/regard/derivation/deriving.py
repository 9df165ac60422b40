"""derive: one attention call, step by step."""

from __future__ import annotations

import math
from typing import Any, Unpack

import jax.numpy as jnp

from regard.axes import ArrayLike
from regard.derivation.course import Course
from regard.derivation.letters import Notation
from regard.derivation.number_tables import View
from regard.derivation.record import Derivation
from regard.engine.call.canonicalization import canonicalize
from regard.engine.call.options import Options
from regard.engine.call.problem import Problem
from regard.masks.grid import is_concrete
from regard.scores.score import compose, split_product

LARGEST_SCORES = 2**20  # that are written out, per step
LARGEST_SPREAD = 2**26  # entries of the keys of all heads, or of the values


def derive(query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Unpack[Options]) -> Derivation:
    """Derive one attention call step by step, in index notation, with its numbers.

    P^{hij} = sum_a Q^{hia} K^{hja},  S = scale P, then score functions, bias and mask
    A^{hij} = e^{S^{hij} - L^{hi}},  L^{hi} = log sum_j e^{S^{hij}},  O^{hib} = sum_j A^{hij} V^{hjb}

    The arguments are checked and filled in as those of `attend`, and the last step is its output.

    Args:
        query, key, value: as in `attend`.
        **options: as in `attend`. `rows` and `heads` say which to derive; None means all, of at most about a
            million scores. `aux` changes nothing: every statistic is a step.

    Returns:
        A `Derivation`: iterate over its steps, ask for one by name, print it, or show it in a notebook. The
        statistics "lse", "entropy", "weights" and "scores" are those that `attend` returns in aux.

    Raises:
        TypeError: as `attend`; inside `jax.jit`, where there are no numbers.
        ValueError: as `attend`; more scores than can be written out, and no rows chosen.

    Example:
        >>> import jax.numpy as jnp
        >>> import regard
        >>> from regard import masks
        >>> x = jnp.asarray([[1.0, 0.0], [0.0, 2.0]])
        >>> derivation = regard.derive(x, x, x, mask=masks.causal())
        >>> derivation["scores"].expression
        'S^{ij} = S_0^{ij} + log M^{ij}'
        >>> print(str(derivation).partition("weights")[2].splitlines()[3])
            i=0  1.00     0
        >>> bool((derivation.output == derivation["output"].value).all())
        True

    Reference: Vaswani et al., "Attention Is All You Need", 2017, equation 1; indices as in `explain_einsum`.
    """
    check_known((query, key, value, options))
    problem = canonicalize(query, key, value, **{**options, "aux": ("weights",)})
    metric, _ = split_product(compose(options.get("score")))
    sizes = {} if metric is None else {"e": metric.metric.shape[-2]}
    check_size(problem)
    course = Course(problem, name_axes(problem, **sizes))
    course.add_operands(jnp.asarray(query), metric)
    course.walk()
    return assemble(course, "Attention")


def name_axes(problem: Problem, **sizes: int) -> Notation:
    """Name the axes of a call by letters."""
    lengths = {"i": problem.T, "j": problem.S, "a": problem.D, "b": problem.E}
    return Notation.cover(problem.leading, problem.key_heads, **lengths, **sizes)


def assemble(course: Course, title: str) -> Derivation:
    """Return the record of a finished course."""
    chosen = {"i": course.problem.rows, "h": course.problem.heads}
    members = {letter: index for letter, index in chosen.items() if index is not None}
    view = View.choose(course.steps, course.notation.sizes, members)
    return Derivation(f"{title}, step by step", tuple(course.steps), view, course.aliases)


def check_size(problem: Problem) -> None:
    """Raise for what is too long to be written out."""
    batch, heads = math.prod(problem.leading[:-1]), problem.leading[-1] if problem.leading else 1
    heads = heads if problem.heads is None else problem.heads.size
    rows = problem.T if problem.rows is None else problem.rows.size
    spread = batch * heads * problem.S * max(problem.D, problem.E)
    if batch * heads * rows * problem.S <= LARGEST_SCORES and spread <= LARGEST_SPREAD:
        return
    choose = f"rows=[0, {problem.T - 1}]" + (", heads=[0]" if problem.leading else "")
    raise ValueError(
        f"rows: expected at most {LARGEST_SCORES:,} scores to write out, got {rows:,} queries x"
        f" {problem.S:,} keys in {batch * heads:,} heads; choose some, as in {choose}"
    )


def check_known(arguments: Any) -> None:
    """Raise where there are no numbers."""
    if not is_concrete(arguments):
        raise TypeError(
            "derive: expected arrays with numbers, got traced or abstract ones; call it outside jax.jit,"
            " or see `explain`, which needs shapes alone"
        )
