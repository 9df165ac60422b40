"""regard.interop.equinox against Equinox's own layer, of the same weights."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard import masks
from regard.interop.equinox import MultiheadAttention, replace_attention

H, T, S = 3, 5, 11
SIZES = {"key_size": 5, "value_size": 7, "qk_size": 4, "vo_size": 2, "output_size": 8}
MASK = np.random.default_rng(0).random((H, T, S)) < 0.6
MASK[..., 0] = True


pytestmark = pytest.mark.usefixtures("loose")


def build(**options):
    return eqx.nn.MultiheadAttention(H, 12, **SIZES, key=jax.random.key(0), **options)


def draw(*leading):
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.normal(size=(*leading, n, w)), jnp.float32) for n, w in ((T, 12), (S, 5), (S, 7))]


def test_a_model_whose_attention_is_replaced_answers_and_learns_as_before():
    theirs = {"layers": [build(use_query_bias=True, use_key_bias=True, use_value_bias=True), eqx.nn.Linear]}
    ours, arrays = replace_attention(theirs), draw()
    assert ours["layers"][1] is eqx.nn.Linear
    given = [None, MASK[0], MASK]

    @eqx.filter_jit
    def learn(layer, asked, **options):
        def loss(layer):
            answers = [layer(*arrays, mask, **options) for mask in asked]
            return sum(jnp.sum(jnp.sin(answer)) for answer in answers), answers

        return eqx.filter_value_and_grad(loss, has_aux=True)(layer)

    found = learn(ours["layers"][0], [*given, masks.causal()], query_offset=0)
    expected = learn(theirs["layers"][0], [*given, np.tri(T, S, dtype=bool)])
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, atol=5e-6)


def test_batches_process_heads_and_statistics():
    ours, theirs, arrays = replace_attention(build()), build(), draw(2)
    turned = {"process_heads": lambda query, key, value: (query[::-1], key, 2 * value)}
    found = jax.vmap(lambda *x: ours(*x, masks.causal(), **turned, query_offset=0, aux=("lse",)))(*arrays)
    expected = jax.vmap(lambda *x: theirs(*x, np.tri(T, S, dtype=bool), **turned))(*arrays)
    np.testing.assert_allclose(found[0], expected, atol=1e-6)
    assert found[1]["lse"].shape == (2, H, T)


def test_dropout_is_drawn_where_the_layer_trains():
    layer = MultiheadAttention(H, 12, **SIZES, dropout_p=0.5, key=jax.random.key(0))
    arrays, rng = draw(), jax.random.key(1)
    whole = layer(*arrays, inference=True)
    assert not np.allclose(layer(*arrays, key=rng), whole)
    np.testing.assert_array_equal(eqx.nn.inference_mode(layer)(*arrays, key=rng), whole)
    with pytest.raises(ValueError, match="key: expected a random key because the layer has"):
        layer(*arrays)
