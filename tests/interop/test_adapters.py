"""What the adapters of all libraries share: the options of attend that the libraries lack."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard import attend, masks, scores
from regard.interop import flax, jax_nn, torch_sdpa

B, T, S, H, K, D = 2, 5, 11, 6, 3, 7
heads_first = functools.partial(jnp.swapaxes, axis1=-3, axis2=-2)
dropped = {"dropout_rate": 0.25, "rng": jax.random.key(2)}
ADAPTERS = {
    "jax.nn": (jax_nn.dot_product_attention, heads_first, dropped),
    "flax": (flax.attention_fn, heads_first, {"dropout_rate": 0.25, "dropout_rng": jax.random.key(2)}),
    "torch": (
        functools.partial(torch_sdpa.scaled_dot_product_attention, enable_gqa=True),
        lambda array: array,
        {"dropout_p": 0.25, "rng": jax.random.key(2)},
    ),
}


def draw():
    rng = np.random.default_rng(8)
    shapes = (B, H, T, D), (B, K, S, D), (B, K, S, 3)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("library", ADAPTERS)
def test_options_that_a_library_lacks_are_those_of_attend(library):
    adapter, lay, dropout = ADAPTERS[library]
    arrays = draw()
    options = {
        "score": scores.softcap(2.0),
        "scale": 0.3,
        "sinks": jnp.arange(6.0),
        "query_offset": 4,
        "aux": ("weights", "lse"),
        "rows": [3, 0],
    }
    output, aux = adapter(*map(lay, arrays), is_causal=True, **dropout, **options)
    expected, theirs = attend(*arrays, mask=masks.causal(), **dropped, **options)
    np.testing.assert_array_equal(lay(output), expected)
    jax.tree.map(np.testing.assert_array_equal, aux, theirs)


@pytest.mark.parametrize("library", ADAPTERS)
def test_queries_begin_at_zero_unless_they_are_placed(library):
    adapter, lay, _ = ADAPTERS[library]
    arrays, positions = draw(), jnp.array([7, 2, 0, 10, 3])
    for options in ({}, {"query_positions": positions}, {"query_offset": 6, "backend": "dense"}):
        expected = attend(*arrays, mask=masks.causal(), **(options or {"query_offset": 0}))
        output = adapter(*map(lay, arrays), is_causal=True, **options)
        np.testing.assert_allclose(lay(output), expected, atol=1e-6)


def test_lengths_of_keys_that_sit_elsewhere_count_rows():
    lengths, arrays = jnp.array([3, 11]), draw()
    options = {"key_offset": 4, "query_offset": 9}
    output = jax_nn.dot_product_attention(*map(heads_first, arrays), key_value_seq_lengths=lengths, **options)
    mask = masks.valid_keys(jnp.arange(S)[None] < lengths[:, None])
    np.testing.assert_allclose(heads_first(output), attend(*arrays, mask=mask, **options), atol=1e-6)


@pytest.mark.parametrize("library", ADAPTERS)
def test_options_that_nobody_has_are_named(library):
    adapter, lay, _ = ADAPTERS[library]
    call = functools.partial(adapter, *map(lay, draw()))
    with pytest.raises(TypeError, match=r"scor: expected an option among .* did you mean 'score'"):
        call(scor=scores.softcap(2.0))
    with pytest.raises(TypeError, match=r"logits_soft_cap: .*; write score=scores.softcap"):
        call(logits_soft_cap=30.0)
    with pytest.raises(TypeError, match="is_causal: expected True or False, known before tracing"):
        jax.jit(lambda flag: call(is_causal=flag))(True)


def test_options_that_a_library_calls_otherwise_are_told_its_name():
    query, key, value = draw()
    with pytest.raises(TypeError, match="dropout_rate: expected it as dropout_p"):
        torch_sdpa.scaled_dot_product_attention(query, key, value, dropout_rate=0.1, enable_gqa=True)
    laid = map(heads_first, (query, key, value))
    with pytest.raises(TypeError, match="rng: expected it as dropout_rng"):
        flax.attention_fn(*laid, rng=jax.random.key(0))
    laid = map(heads_first, (query, key, value))
    with pytest.raises(ValueError, match="aux: expected none beside return_residual=True"):
        jax_nn.dot_product_attention(*laid, return_residual=True, aux=("lse",))
