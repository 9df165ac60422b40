"""Edges to a prediction are the derivative by their weights, and their direct parts what heads add."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layer_oracle import build_drawn, widen
from regard import inspection
from regard.inspection.recorders import Recorder
from regard.models import Decoder, TransformerConfig
from small_models import build
from test_score_parts import KINDS, ROTARY, TOKENS

EDGE_KINDS = {"pre": ROTARY, "post": {**KINDS["relative"], "norm": "post", "scan_layers": True}}
EDGE_KINDS["hybrid"] = {**KINDS["hybrid"], "remat": "full"}


@pytest.mark.parametrize("kind", EDGE_KINDS)
def test_edges_are_the_derivative_by_their_weights(kind, wide):
    sizes = {"d_model": 24, "num_heads": 6, "d_ff": 13, "num_layers": 2, "vocab_size": 31}
    model = widen(build_drawn(Decoder, TransformerConfig(**sizes, **EDGE_KINDS[kind])))
    trace = inspection.record(model, TOKENS[None])[1]
    observed = inspection.observe(model, ("weights",))(TOKENS[None])[1]

    @functools.partial(jax.jit, static_argnums=0)
    @functools.partial(jax.grad, argnums=1)
    def differentiate(call, weights):
        with inspection.intervene({call: inspection.Change(weights=weights[None])}):
            return model(TOKENS[None])[0, 5, 7]

    weights = jnp.concatenate([call["weights"].reshape((-1, 6, 8, 8)) for call in observed])
    wanted = [rows * differentiate(call, rows) for call, rows in enumerate(weights)]
    edges = inspection.trace_paths(model, TOKENS, query=5, target=7, count=2000).edges
    totals, direct = np.zeros((2, len(wanted), *wanted[0].shape))
    for edge in edges:
        cell = edge.call, edge.head, edge.query, edge.key
        totals[cell], direct[cell] = edge.total, edge.direct
    assert np.allclose(totals, wanted, rtol=0, atol=1e-13)
    predicted = inspection.predict_layers(trace, model, TOKENS, targets=jnp.full(8, 7)).predictions
    if predicted.contributions is None or kind == "hybrid":
        assert np.isnan(direct[:, :, 5]).any()
        assert kind != "hybrid" or predicted.contributions is trace[0].value_norms is None, "behind a gate"
    else:
        assert np.allclose(direct.sum(-1)[:, :, 5], predicted.contributions[:, :, 5], atol=1e-5)
        assert not np.delete(direct, 5, 2).any()


def test_padding_is_not_seen_and_paths_are_connected():
    model = build(num_layers=3)
    paths, padded = inspection.trace_paths(model, TOKENS, query=-2), Recorder(model).trace_paths(TOKENS, 6)
    assert (padded.query, padded.target) == (6, paths.target)
    assert padded.logit == pytest.approx(paths.logit, abs=1e-5)
    totals = [sum(edge.total for edge in read.edges) for read in (padded, paths)]
    assert totals[0] == pytest.approx(totals[1], abs=1e-5)
    connected = paths.connected(0.2)
    stray = inspection.Edge(2, 0, 3, 0, 9.0, 0.0)  # of a query behind which nothing is predicted
    assert stray not in inspection.Paths(6, 1, 0.0, (stray, *paths.edges)).connected()
    assert [-edge.call for edge in connected] == sorted(-edge.call for edge in connected)
    for wrong, words in (({"query": 8}, "below 8"), ({"target": 13}, "13"), ({"count": 0}, "count")):
        with pytest.raises(ValueError, match=words):
            inspection.trace_paths(model, TOKENS, **wrong)
