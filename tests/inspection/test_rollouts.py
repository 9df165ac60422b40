"""Rollouts, of weights and of one query of a trace, against the product of the layers in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from regard import attend, inspection, masks
from regard.inspection.traces.padded import PaddedCall
from regard.models import Decoder, TransformerConfig

RNG = np.random.default_rng(0)
T, HEADS = 7, 3


def multiply(layers, residual=0.5):
    """Multiply layers (H, T, T), first layer first; what no key gets stays."""
    rolled = np.eye(len(layers[0][0]))
    for layer in layers:
        mean = np.asarray(layer, np.float64).mean(0)
        kept = residual + (1 - residual) * (1 - mean.sum(-1))
        rolled = (np.diag(kept) + (1 - residual) * mean) @ rolled
    return rolled


def run(layers=3, length=T, **options):
    """A trace of layers with grouped heads."""
    with inspection.capture(tokens=list(map(str, range(length)))) as trace:
        for _ in range(layers):
            query, key = (
                jnp.asarray(RNG.normal(size=(1, heads, length, 5)), jnp.float32)
                for heads in (2 * HEADS, HEADS)
            )
            attend(query, key, key, scale=1.5, **options)
    return trace


def test_a_rollout_is_the_product_of_the_layers():
    weights = RNG.dirichlet(np.ones(5), size=(3, 2, 4, 5))
    weights[1, :, :2, 3] = 0  # a row that attends to nothing in some heads
    found = inspection.roll_out(weights.astype(np.float32), residual=0.25)
    for example in range(2):
        wanted = multiply(weights[:, example], 0.25)
        np.testing.assert_allclose(found[example], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)
    with pytest.raises(ValueError, match=r"weights: expected shape \(L, \*B, H, T, T\), got \(5, 5\)"):
        inspection.roll_out(np.eye(5))


@pytest.mark.parametrize(
    "options",
    [
        {"mask": masks.causal() & masks.segments(jnp.array([[0, 0, 0, 1, 1, 1, 1]]))},
        # Rows 0 and 1 attend to nothing; a sink takes its share of the others.
        {"mask": masks.sliding_window(3) & ~masks.prefix(2), "sinks": jnp.linspace(-1, 1, 2 * HEADS)},
    ],
)
def test_a_row_of_a_trace_is_that_of_the_product(options):
    trace = run(**options)
    wanted = multiply([call.window() for call in trace])
    for row in (0, 4, T - 1):
        found = inspection.roll_out_row(trace, row)
        np.testing.assert_allclose(found, wanted[row], rtol=1e-5, atol=1e-6)
    lower = multiply([trace[0].window(), trace[1].window()], 0.25)
    found = inspection.roll_out_row(trace, 5, call=1, residual=0.25)
    np.testing.assert_allclose(found, lower[5], rtol=1e-5, atol=1e-6)


def test_padding_and_other_tokens_take_no_part():
    trace = run(2, length=11, mask=masks.causal())
    cut = inspection.Trace(tuple(PaddedCall.cut(call, T, trace[0].query_tokens.part(0, T)) for call in trace))
    wanted = multiply([call.window() for call in trace])
    found = inspection.roll_out_row(cut, T - 1)
    assert found.shape == (T,)
    np.testing.assert_allclose(found, wanted[T - 1, :T], rtol=1e-5, atol=1e-6)
    with inspection.capture() as mixed:
        x = jnp.asarray(RNG.normal(size=(1, 2, T, 5)), jnp.float32)
        for keys in (x[:, :, :5], x, x[:, :, :5], x):
            attend(x if keys is x else 2 * x, keys, keys)
    found = inspection.roll_out_row(mixed, 3)
    wanted = multiply([mixed[1].window(), mixed[3].window()])
    np.testing.assert_allclose(found, wanted[3], rtol=1e-5, atol=1e-6)
    named = [dataclasses.replace(call, name=f"{n % 2}.{'ab'[n // 2]}") for n, call in enumerate(run(4))]
    found = inspection.roll_out_row(inspection.Trace(tuple(named)), 3)
    np.testing.assert_allclose(
        found, multiply([call.window() for call in named[2:]])[3], rtol=1e-5, atol=1e-6
    )
    with pytest.raises(ValueError, match=r"call: expected self-attention over one sequence, got Call\("):
        inspection.roll_out_row(mixed, 3, call=2)


def test_a_second_run_of_a_model_stands_on_its_own_layers():
    trace = run(4)
    calls = [dataclasses.replace(call, name=f"blocks.{n % 2}", layer=n % 2) for n, call in enumerate(trace)]
    found = inspection.roll_out_row(inspection.Trace(tuple(calls)), 3)
    wanted = multiply([call.window() for call in calls[2:]])
    np.testing.assert_allclose(found, wanted[3], rtol=1e-5, atol=1e-6)


def test_a_model_of_one_layer_that_runs_twice_is_no_model_of_two(tmp_path):
    config = TransformerConfig(d_model=6, num_heads=3, d_ff=5, num_layers=1, vocab_size=13)
    model = Decoder(config, rngs=nnx.Rngs(0))
    with inspection.capture(model) as trace:
        for first in (1, 4):
            model(jnp.arange(first, first + T)[None])
    for seen in (trace, inspection.load(trace.save(tmp_path / "two.regard", keep="qk"))):
        found = inspection.roll_out_row(seen, 3)
        np.testing.assert_allclose(found, multiply([trace[1].window()])[3], rtol=1e-5, atol=1e-6)


def test_what_cannot_be_rolled_out_is_refused(tmp_path):
    trace = run(1)
    with pytest.raises(ValueError, match=r"row: expected one in 0\.\.6, got 7"):
        inspection.roll_out_row(trace, 7)
    with pytest.raises(ValueError, match="call: expected one of the 1 of the trace, got 1"):
        inspection.roll_out_row(trace, 0, call=1)
    with pytest.raises(ValueError, match="call: expected one of the 0 of the trace, got -1"):
        inspection.roll_out_row(inspection.Trace(), 0)
    for wrong in ({"row": 1.5}, {"row": 0, "call": 0.5}):
        with pytest.raises(TypeError, match=f"{[*wrong][-1]}: expected an integer known before tracing"):
            inspection.roll_out_row(trace, **wrong)
    with pytest.raises(ValueError, match=r"residual: expected a share in \[0, 1\], got 1.5"):
        inspection.roll_out_row(trace, 0, residual=1.5)
    kept = inspection.load(trace.save(tmp_path / "one.regard"))
    with pytest.raises(ValueError, match="trace: expected one with queries and keys, got statistics"):
        inspection.roll_out_row(kept, 0)
