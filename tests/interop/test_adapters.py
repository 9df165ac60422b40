"""What the adapters of all libraries share: the options of attend that the libraries lack."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusals import assert_refused
from regard import attend, masks, scores
from regard.interop import flax, jax_nn, torch_sdpa

B, T, S, H, K, D = 2, 5, 11, 6, 3, 7
heads_first = functools.partial(jnp.swapaxes, axis1=-3, axis2=-2)
grouped_sdpa = functools.partial(torch_sdpa.scaled_dot_product_attention, enable_gqa=True)
dropped = {"dropout_rate": 0.25, "rng": jax.random.key(2)}
ADAPTERS = {
    "jax.nn": (jax_nn.dot_product_attention, heads_first, dropped),
    "flax": (flax.attention_fn, heads_first, {"dropout_rate": 0.25, "dropout_rng": jax.random.key(2)}),
    "torch": (grouped_sdpa, lambda array: array, {"dropout_p": 0.25, "rng": jax.random.key(2)}),
}


def draw():
    rng = np.random.default_rng(8)
    shapes = (B, H, T, D), (B, K, S, D), (B, K, S, 3)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("library", ADAPTERS)
def test_options_that_a_library_lacks_are_those_of_attend(library):
    adapter, lay, dropout = ADAPTERS[library]
    arrays = draw()
    options = {"score": scores.softcap(2.0), "scale": 0.3, "sinks": jnp.arange(6.0), "query_offset": 4}
    options |= {"aux": ("weights", "lse"), "rows": [3, 0]}
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
    with pytest.raises(ValueError, match="query_offset: expected where the queries sit"):
        adapter(*map(lay, arrays), score=[scores.alibi(H)])


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
    traced = jax.jit(lambda flag: call(is_causal=flag))
    assert_refused(
        (lambda: call(scor=scores.softcap(2.0)), r"scor: expected an option among .* did you mean 'score'"),
        (lambda: call(logits_soft_cap=30.0), r"logits_soft_cap: .*; write score=scores.softcap"),
        (lambda: call(is_casual=True), r"is_casual: .* did you mean 'is_causal'"),
        (lambda: traced(True), "is_causal: expected True or False, known before tracing"),
        error=TypeError,
    )


def test_options_that_a_library_calls_otherwise_are_told_its_name():
    residual = {"return_residual": True, "aux": ("lse",)}
    for library, options, message in (
        ("torch", {"dropout_rate": 0.1}, "dropout_rate: expected none here; write dropout_p="),
        ("torch", {"mask": masks.causal()}, "mask: expected none here; write attn_mask="),
        ("flax", {"rng": jax.random.key(0)}, "rng: expected none here; write dropout_rng="),
        ("flax", {"dropout_rate": 0.1, "dropout_rng": 1}, "dropout_rng: expected one random key"),
        ("jax.nn", residual, "aux: expected none beside return_residual=True"),
    ):
        adapter, lay, _ = ADAPTERS[library]
        with pytest.raises((TypeError, ValueError), match=message):
            adapter(*map(lay, draw()), **options)


x, y, z = (np.ones((2, *sizes, 7), np.float32) for sizes in ((5, 6), (11, 3), (5, 2)))
u, v, flags = x.swapaxes(1, 2), y.swapaxes(1, 2), lambda *shape: np.ones(shape, bool)
WRONG = {jax_nn.dot_product_attention: [
    ((x[0, 0], y, y), {}, ValueError, r"query: expected \(batch, length, heads, width\) or"),
    ((x, y[..., :5], y), {}, ValueError, r"key: expected the head width of query, 7"),
    ((x, y, y[:, :4]), {}, ValueError, r"value: expected the length and the heads of key, \(11, 3\)"),
    ((x, *(np.swapaxes(y, 1, 2),) * 2), {}, ValueError, "swap axes -3 and -2"),
    ((x, y, y), {"mask": np.zeros((5, 11))}, TypeError, "mask: .*pass additive masks as `bias=`"),
    ((x, y, y), {"mask": flags(5, 7)}, ValueError, r"mask: expected .*\(2, 6, 5, 11\)"),
    ((x, y, y), {"bias": flags(5, 11)}, TypeError, "bias: .*as `mask=`"),
    ((z, z, z), {"mask": flags(2, 5, 5)}, ValueError, r"mask: .*Write mask\[None\] if"),
    ((z, z, z), {"bias": z[..., 0, :5]}, ValueError, r"bias: .*Write bias\[None\] if"),
    ((x, y, y), {"query_seq_lengths": [1, 6]}, ValueError, r"query_seq_lengths: .*0\.\.5, got"),
    ((x, y, y), {"local_window_size": -2}, ValueError, "at least 0"),
    ((x, y, y), {"return_residual": 2}, TypeError, "return_residual: expected True or False"),
    ((x, y, y), {"implementation": "flash"}, ValueError, "implementation: expected None.* backend="),
], flax.attention_fn: [
    ((x[0, 0], y, y), {}, ValueError, r"query: expected \(\.\.\., length, heads, width\) or"),
    ((x, y[0], y[0]), {}, ValueError, "key: expected the batch axes of query"),
    ((x, y, y), {"mask": flags(5, 7)}, ValueError, r"mask: .*\(2, 6, 5, 11\)"),
    ((x, y, y), {"bias": x[0, 0, 0]}, ValueError, r"bias: expected .*\(2, 6, 5, 11\)"),
    ((x, y, y), {"dropout_rate": 0.1}, ValueError, "dropout_rng: expected a random key"),
    ((x[:, :1], y, y), {"mask": flags(2, 1, 1, 11), "is_causal": True}, ValueError, "is_causal: expected"),
    ((x, y, y), {"qk_attn_weights_einsum": jnp.einsum}, NotImplementedError, "qk_attn_weights_einsum: exp"),
    ((x, y, y), {"dtype": int}, TypeError, "dtype: expected None or a floating-point dtype"),
    ((x, y, y), {"module": 3}, TypeError, "module: expected a Flax module"),
    ((x, y, y), {"dropout_rate": "0.1"}, TypeError, "dropout_rate: expected a number"),
    ((x, y, y), {"deterministic": "no"}, TypeError, "deterministic: expected True or False"),
    ((x, y, y), {"einsum_dot_general": 1}, NotImplementedError, "einsum_dot_general"),
    ((x, y, y), {"input_positions": x}, NotImplementedError, "rotate query and key"),
], torch_sdpa.scaled_dot_product_attention: [
    ((u, v, v), {"enable_gqa": "no"}, TypeError, "enable_gqa: expected True or False"),
    ((u, v, v), {}, ValueError, "enable_gqa: expected True where .*got False with query"),
    ((u, v[:, [0, 0, 1, 2]], v), {"enable_gqa": True}, ValueError, "query, key, value: expected"),
    ([array.swapaxes(1, 2) for array in (u, v, v)], {}, ValueError, r"\(\.\.\., heads, len"),
    ((u, u, u, np.ones((5, 5), int)), {}, TypeError, "attn_mask: expected booleans .*attn_mask != 0"),
    ((u, u, u, flags(5, 7)), {}, ValueError, r"attn_mask: expected .*\(2, 6, 5, 5\)"),
    ((u, u, u, u[..., :5, :5][:, 0]), {}, ValueError, r"attn_mask: .*attn_mask\[:, None\]"),
    ((u, u, u), {"dropout_p": 0.1}, ValueError, "rng: expected a random key because dropout_p = 0.1"),
]}  # fmt: skip


@pytest.mark.parametrize(("call", "case"), [(call, case) for call in WRONG for case in WRONG[call]])
def test_a_wrong_call_is_told_what_to_do(call, case):
    arrays, options, kind, message = case
    assert_refused((lambda: jax.eval_shape(lambda: call(*arrays, **options)), message, kind))
