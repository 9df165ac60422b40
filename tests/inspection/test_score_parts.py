"""A score is the sum over pairs of what wrote into the streams, in every kind of decoder."""

import jax.numpy as jnp
import pytest
from flax import nnx

from layer_oracle import build_drawn, widen
from regard import inspection, positions
from regard.engine.call.hooks import watch
from regard.models import Decoder, TransformerConfig

TOKENS = jnp.array([3, 1, 4, 1, 5, 9, 2, 6])
ROTARY = {"positions": "rotary", "norm_kind": "rms", "attention_bias": False, "num_key_heads": 2}
KINDS = {
    "learned, post": {"positions": "learned", "norm": "post"},
    "both": {**ROTARY, "norm": "both", "query_key_norm": True},
    "a norm on the embedding": {"embedding_norm": True, "first_norm": False, "norm_kind": "layer_no_bias"},
    "relative": {"positions": "relative", "attention_softcap": 5.0, "attention_scale": 0.7},
    "hybrid": {**ROTARY, "output_gate": True, "mixers": ("attention", "gated_delta")},
}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_sum_to_the_score_and_are_those_by_hand(kind, wide):
    sizes = {"d_model": 24, "num_heads": 6, "d_ff": 13, "num_layers": 3, "vocab_size": 31}
    model = widen(build_drawn(Decoder, TransformerConfig(**sizes, **KINDS[kind])))
    found, events = inspection.decompose_score(model, TOKENS, layer=2, head=5, query=6, key=2), []
    with watch(events.append):
        _, seen = model.trunk(TOKENS[None], aux=("hidden",))
    problem = events[-1].problem
    score = float(problem.scale * jnp.vdot(problem.query[0, 5, 6], problem.key[0, -1, 2]))
    assert found.by_key.sum() == pytest.approx(score, abs=1e-12 * abs(found.parts).max())
    assert found.score == pytest.approx(score, rel=1e-12)
    assert found.largest(1)[0][2] == found.parts.flat[abs(found.parts).argmax()]
    if kind != "hybrid":
        return
    first, last = model.trunk.stack.blocks[0].attention, model.trunk.stack.blocks[2]
    # By the query: what head 3 of layer 0 read, weighed by its gate; by the key: the token.
    entered = model.trunk.stack.blocks[0].attention_residual.norm(model.trunk.embedding(TOKENS[None]))[0, 6]
    read = events[0].output[0, 3, 6] * nnx.sigmoid(first.gate_projection(entered))[12:16]
    wrote = [read @ first.output_projection.kernel[12:16], model.trunk.embedding(TOKENS[None])[0, 2]]
    maps = last.attention.query_projection.kernel[:, 20:24], last.attention.key_projection.kernel[:, 4:8]
    sides = []
    for part, kernel, place in zip(wrote, maps, (6, 2), strict=True):
        size = jnp.sqrt(jnp.mean(seen["blocks"][1]["hidden"][0, place] ** 2) + 1e-6)
        part = part * last.attention_residual.norm.scale[...] / size
        sides.append(positions.rotary((part @ kernel[...])[None], place))
    pair = found.parts[found.writers.index("layer 0 head 3"), found.writers.index("tokens")]
    assert pair == pytest.approx(float(jnp.vdot(*sides)) / 2, rel=1e-10)
    for wrong in ({"layer": 1}, {"layer": 3}, {"query": 8}, {"head": 6}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected"):
            inspection.decompose_score(model, TOKENS, **{"layer": 2, "head": 0, "query": 1, "key": 0} | wrong)
    config = TransformerConfig(**sizes, latent_dim=5, latent_rotary_dim=2)
    latent = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"model: expected heads with keys of their own.* got latent_dim=5"):
        inspection.decompose_score(latent, TOKENS, layer=0, head=0, query=1, key=0)
