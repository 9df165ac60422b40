"""Rollouts, of weights and of one query of a trace, against the product of the layers in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from refusals import assert_refused
from regard import attend, inspection, masks
from regard.inspection.traces.padded import PaddedCall
from small_models import build

RNG = np.random.default_rng(0)
T, HEADS = 7, 3
Trace = inspection.Trace


def multiply(layers, residual=0.5):
    """Multiply layers (H, T, T), first layer first; what no key gets stays."""
    rolled = np.eye(len(layers[0][0]))
    for layer in layers:
        mean = np.asarray(layer, np.float64).mean(0)
        kept = residual + (1 - residual) * (1 - mean.sum(-1))
        rolled = (np.diag(kept) + (1 - residual) * mean) @ rolled
    return rolled


def check_row(trace, row, layers, width=T, **options):
    wanted = multiply([call.window() for call in layers], options.get("residual", 0.5))[row, :width]
    found = inspection.roll_out_row(trace, row, **options)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def run(layers=4, **options):
    with inspection.capture(tokens=list(map(str, range(T)))) as trace:
        for _ in range(layers):
            query, key = (RNG.normal(size=(1, n, T, 5)).astype(np.float32) for n in (2 * HEADS, HEADS))
            attend(query, key, key, scale=1.5, **options)
    return trace


@pytest.fixture(scope="module")
def plain():
    return run(mask=masks.causal())


def test_a_rollout_is_the_product_of_the_layers():
    weights = RNG.dirichlet(np.ones(5), size=(3, 2, 4, 5))
    weights[1, :, :2, 3] = 0  # a row that attends to nothing in some heads
    found = inspection.roll_out(weights.astype(np.float32), residual=0.25)
    for example in range(2):
        np.testing.assert_allclose(found[example], multiply(weights[:, example], 0.25), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)


def test_a_row_of_a_trace_is_that_of_the_product():
    # Rows 0 and 1 attend to nothing; a sink takes its share of the others.
    sinks = np.linspace(-1, 1, 2 * HEADS, dtype=np.float32)
    trace = run(3, mask=masks.sliding_window(3) & ~masks.prefix(2), sinks=sinks)
    for row in (0, 4, T - 1):
        check_row(trace, row, trace)
    check_row(trace, 5, trace.calls[:2], call=1, residual=0.25)


def test_padding_and_other_tokens_take_no_part(plain):
    tokens = plain[0].query_tokens
    cut = Trace(tuple(PaddedCall.cut(call, T - 2, tokens.part(0, T - 2)) for call in plain))
    check_row(cut, T - 3, plain, width=T - 2)
    with inspection.capture() as mixed:
        x = RNG.normal(size=(1, 2, T, 5)).astype(np.float32)
        for keys in (x[:, :, :5], x, x[:, :, :5], x):
            attend(x if keys is x else 2 * x, keys, keys)
    check_row(mixed, 3, [mixed[1], mixed[3]])
    named = [dataclasses.replace(call, name=f"{n % 2}.{'ab'[n // 2]}") for n, call in enumerate(plain)]
    check_row(Trace(tuple(named)), 3, named[2:])
    with pytest.raises(ValueError, match=r"call: expected self-attention over one sequence, got Call\("):
        inspection.roll_out_row(mixed, 3, call=2)
    # A second run of a model stands on its own layers.
    calls = [dataclasses.replace(call, name=f"blocks.{n % 2}", layer=n % 2) for n, call in enumerate(plain)]
    check_row(Trace(tuple(calls)), 3, calls[2:])


def test_a_model_of_one_layer_that_runs_twice_is_no_model_of_two(tmp_path):
    model = build(num_layers=1)
    with inspection.capture(model) as trace:
        for first in (1, 4):
            model(jnp.arange(first, first + T)[None])
    for seen in (trace, inspection.load(trace.save(tmp_path / "two.regard", keep="qk"))):
        check_row(seen, 3, [trace[1]])


def test_what_cannot_be_rolled_out_is_refused(plain):
    roll, trace = inspection.roll_out_row, Trace(plain.calls[:1])
    kept = Trace((dataclasses.replace(plain[0], problem=None),))
    assert_refused(
        (lambda: roll(trace, 7), r"row: expected one in 0\.\.6, got 7"),
        (lambda: roll(trace, 0, call=1), "call: expected one of the 1 of the trace, got 1"),
        (lambda: roll(trace, 0, call=0.5), "call: expected an integer known before tracing", TypeError),
        (lambda: roll(trace, 0, residual=1.5), r"residual: expected a share in \[0, 1\], got 1.5"),
        (lambda: roll(kept, 0), "trace: expected one with queries and keys, got statistics"),
        (lambda: inspection.roll_out(np.ones((1, 1, 2, 2)), residual=2), r"residual: .*, got 2"),
        (lambda: inspection.roll_out(np.eye(5)), r"weights: expected shape .*, got \(5, 5\)"),
    )
