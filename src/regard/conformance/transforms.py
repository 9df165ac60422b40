"""Promises about transforms of JAX, and about dropout, whose pattern is read off a call."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.conformance.expectations import expect
from regard.conformance.judging import Judge
from regard.conformance.report import Row
from regard.conformance.runners import call_in_time, describe
from regard.conformance.written_calls import Case

RATE = 0.25
STEP = 1e-2  # of central differences, in float32


def check_dropout(judge: Judge) -> Iterator[Row]:
    """Check that a weight survives with probability 1 - rate and is divided by that; and its gradient."""
    if not judge.subject.takes(["dropout"]):
        return
    options = {"dropout": str(RATE)} | ({"rng": "7"} if judge.subject.takes(["rng"]) else {})
    case = Case(judge.sizes, options)
    call = case.draw()
    # Values that are the identity make the output the weights.
    shape = (*call["value"].shape[:-1], call["value"].shape[-2])
    eye = call | {"value": np.broadcast_to(np.eye(shape[-1], dtype=np.float32), shape)}
    first, _ = judge.ask(eye, differentiate=False)
    again, _ = judge.ask(eye, differentiate=False)
    write = judge.row_writer("dropout", case)
    if first.output is None or again.output is None:
        yield write("value", "refused", first.reason or again.reason)
        return
    plain = judge.spell({name: value for name, value in eye.items() if name not in options})
    zeros = np.zeros(first.output.shape), np.zeros(first.output.shape[:-1])
    factors = first.output / expect(plain, zeros, differentiate=False)["output"].truth.astype(np.float64)
    survives = factors > 1e-6
    finding = describe_dropout(factors, survives, first.output.sum(-1))
    if not finding and not np.array_equal(first.output, again.output):
        finding = "the same random key drops other weights"
    yield write("value", "wrong" if finding else "holds", finding, "dropped" if finding else "")
    answer, cotangents = judge.ask(call)
    if finding or answer.output is None or not answer.gradients:
        return
    # The same key drops the same weights of other values, and their gradients follow.
    spelled = judge.spell({name: value for name, value in call.items() if name not in options})
    spelled |= {"survivors": np.where(survives, 1 / (1 - RATE), 0)}
    gradients = {f"d_{name}": gradient for name, gradient in answer.gradients.items()}
    explanation = judge.explain(spelled, gradients, "gradient", "float32", cotangents, None, "d_weights")
    yield write("gradient", *explanation[:3])


def describe_dropout(factors: Any, survives: Any, row_sums: Any) -> str:
    """Return what is wrong with the factors on weights, or nothing."""
    grown, share = factors[survives], survives.mean()
    if survives.all() and np.allclose(grown, 1, atol=1e-3):
        return "dropout has no effect"
    if np.allclose(grown, 1, atol=1e-3):
        return "weights that survive do not grow by 1 / (1 - rate)"
    if np.allclose(row_sums, 1, atol=1e-3):
        return "weights are divided by their sum again after dropout"
    if np.allclose(grown, 1 / RATE, atol=1e-2):
        return "the rate is taken for the probability to survive"
    if not np.allclose(grown, 1 / (1 - RATE), atol=1e-3):
        return f"weights that survive grow by {grown[0]:.4g}, not by {1 / (1 - RATE):.4g}"
    if abs(share - (1 - RATE)) > 0.02 + 5 * (RATE * (1 - RATE) / survives.size) ** 0.5:
        return f"{share:.2f} of the weights survive a rate of {RATE}"
    return ""


def measure_error(way: Callable[[], tuple[Any, Any]]) -> float:
    """Return the largest difference of what a transform gave and what it should, to the size of that."""
    actual, expected = map(jax.tree.leaves, way())
    pairs = zip(actual, expected, strict=True)
    differences = [jnp.abs(ours - theirs).max() / (1 + jnp.abs(theirs).max()) for ours, theirs in pairs]
    return float(jnp.max(jnp.stack(differences)))


def check_transforms(judge: Judge) -> Iterator[Row]:
    """Check that jit, vmap, jvp and second derivatives agree with plain calls."""
    if judge.subject.kind != "jax":
        return
    case = Case(judge.sizes)
    arrays = [jnp.asarray(judge.subject.arrange(name, array)) for name, array in case.draw().items()]
    tangents = [jnp.cos(array) for array in arrays]

    def attend(*arrays: Any) -> Any:
        return judge.subject.split(judge.subject.fn(*arrays), False)[0]

    gradient = jax.grad(lambda *arrays: jnp.sum(jnp.sin(attend(*arrays))), (0, 1, 2))

    def differ(function: Callable[..., Any]) -> Any:
        ends = [
            jax.jit(function)(*(a + sign * STEP * t for a, t in zip(arrays, tangents, strict=True)))
            for sign in (1, -1)
        ]
        return jax.tree.map(lambda ahead, behind: (ahead - behind) / (2 * STEP), *ends)

    def push(function: Callable[..., Any]) -> Any:
        return jax.jit(lambda *arrays: jax.jvp(function, arrays, tuple(tangents))[1])(*arrays)

    def batch() -> tuple[Any, Any]:
        doubled = [2 * array for array in arrays]
        stacked = (jnp.stack(pair) for pair in zip(arrays, doubled, strict=True))
        expected = jnp.stack([jax.jit(attend)(*arrays), jax.jit(attend)(*doubled)])
        return jax.jit(jax.vmap(attend))(*stacked), expected

    ways: dict[str, tuple[Callable[[], tuple[Any, Any]], float]] = {
        "jit": (lambda: (jax.jit(attend)(*arrays), attend(*arrays)), 1e-5),
        "vmap": (batch, 1e-5),
        "jvp": (lambda: (push(attend), differ(attend)), 2e-3),
        "second derivatives": (lambda: (push(gradient), differ(gradient)), 2e-3),
    }
    for name, (way, allowed) in ways.items():
        write = judge.row_writer(f"transforms: {name}", case)
        try:
            error = call_in_time(partial(measure_error, way), judge.subject.seconds)
        except KeyboardInterrupt:
            raise
        except BaseException as refusal:
            yield write("value", "refused", describe(refusal))
            continue
        finding = "" if error <= allowed else f"off by {error:.2g} from the plain call"
        yield write("value", "wrong" if finding else "holds", finding)
