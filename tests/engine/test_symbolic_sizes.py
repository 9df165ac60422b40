"""Programs exported once for every batch, number of heads and length, against calls whose sizes are known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from oracle import assert_close
from regard import attend, explain, linear, masks, readouts, scores
from regard.engine.backends.symbolic import ROWS

B, K, T, S = export.symbolic_shape("B, K, T, S")
D = 7
SIZES = {"B": 3, "K": 2, "T": 2 * ROWS + 3, "S": 71}
# Leading axes of query and of key; lengths; whether the definition takes the matrix at once.
CALLS = {
    "batch": ((B, 2), (B, 2), 37, 37, None), "length": ((2,), (2,), T, S, None),
    "batch and length": ((B, 4), (B, 2), T, S, None), "heads in groups": ((B, 3 * K), (B, K), T, S, None),
    "one head for all": ((B, K), (B, 1), T, 71, None), "dense": ((B, 4), (B, 2), T, S, "dense"),
    "a few queries": ((B, 4), (B, 2), 3, S, None),
}  # fmt: skip
KINDS = {
    "positions": lambda data: {
        "mask": masks.causal() & masks.sliding_window(19) | masks.prefix(3) & ~masks.chunked(8),
        "query_offset": data["lengths"],
        "score": scores.softcap(3.0),
    },
    "lengths": lambda data: {"mask": masks.lengths(data["lengths"]), "sinks": data["sinks"]},
    "stored": lambda data: {"mask": masks.segments(data["queries"], data["keys"]), "bias": data["bias"]},
    "cells": lambda data: {
        "mask": masks.predicate(lambda query, key: (query + key) % 3 > 0) & masks.from_array(data["pairs"]),
        "query_offset": 0,
    },
    "dropout": lambda data: {"dropout_rate": 0.25, "rng": jax.random.key(3), "query_offset": 2},
}


def sizes_of(shape):
    """The sizes that symbols stand for."""
    return tuple(size if isinstance(size, int) else int(eval(str(size), {}, SIZES)) for size in shape)


def arguments(call, dtype=np.float32):
    """Query, key and value, and data that masks read, with the symbolic shape of each."""
    queries, keys, num_queries, num_keys, _ = CALLS[call]
    rng = np.random.default_rng(7)
    batch = queries[:1] if len(queries) > 1 else ()
    shapes = {
        "arrays": [(*queries, num_queries, D), (*keys, num_keys, D), (*keys, num_keys, 5)],
        "sinks": queries[-1:], "lengths": batch, "queries": (*batch, num_queries),
        "keys": (*batch, num_keys), "bias": (1, num_queries, num_keys),
        "pairs": (*queries, num_queries, num_keys),
    }  # fmt: skip

    def draw(name, shape):
        shape = sizes_of(shape)
        if name in ("arrays", "bias", "sinks"):
            return jnp.asarray(rng.standard_normal(shape), dtype)
        if name == "pairs":
            return jnp.asarray(rng.random(shape) < 0.8)
        return jnp.asarray(rng.integers(0, 40 if name == "lengths" else 3, shape), jnp.int32)

    is_shape = lambda shape: isinstance(shape, tuple)
    drawn = {
        name: jax.tree.map(functools.partial(draw, name), shape, is_leaf=is_shape)
        for name, shape in shapes.items()
    }
    described = jax.tree.map(
        lambda shape, array: jax.ShapeDtypeStruct(shape, array.dtype), shapes, drawn, is_leaf=is_shape
    )
    return drawn, described


def learn(call, kind, backend=None):
    """Value, statistics and gradients of a call."""

    def loss(data):
        output, found = attend(*data["arrays"], backend=backend, aux=("lse", "entropy"), **KINDS[kind](data))
        lse = jnp.where(jnp.isfinite(found["lse"]), found["lse"], 0)
        return jnp.sum(output**2) + jnp.sum(jnp.sin(lse)), (output, found)

    def differentiate(data):
        floating = {name: data[name] for name in ("arrays", "bias", "sinks")}
        return jax.grad(lambda part: loss(data | part), has_aux=True)(floating)

    return jax.jit(differentiate)


PAIRS = [
    ("batch", "dropout"), ("length", "cells"), ("batch and length", "stored"),
    ("heads in groups", "lengths"), ("heads in groups", "positions"), ("one head for all", "cells"),
    ("dense", "positions"), ("a few queries", "stored"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind"), PAIRS)
def test_an_exported_program_answers_as_calls_of_known_sizes_do(call, kind):
    data, shapes = arguments(call)
    program = export.export(learn(call, kind, CALLS[call][-1]))(shapes)
    answers = export.deserialize(program.serialize()).call(data)
    expected = learn(call, kind, "dense")(data)
    assert_close(answers, expected, 2e-4)


def shapes_of(*leading, length=T, width=D, dtype=np.float32):
    return jax.ShapeDtypeStruct((*leading, length, width), dtype)


PAIR = [shapes_of(B, 2)] * 3
EXPORTED = (lambda x: attend(x, x, x, mask=masks.causal())), (lambda x: linear.attend(x, x, x))


@pytest.mark.parametrize("function", EXPORTED)
def test_what_was_exported_is_differentiated_where_it_is_read(function):
    call = jax.jit(function)
    program = export.export(call)(shapes_of(B, 2)).serialize(vjp_order=1)
    read, x = export.deserialize(program), jax.random.normal(jax.random.key(0), (2, 2, 141, D))
    got, want = (jax.vjp(one, x)[1](x)[0] for one in (read.call, call))
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


def test_a_mask_is_an_argument_of_a_serialized_program():
    call = jax.jit(lambda x, mask: attend(x, x, x, mask=mask))
    x, mask = jnp.ones((2, 1, 15, 3)), masks.neighbourhood((3, 5), 1) & masks.lengths(np.array([15, 7]))
    x = x * jnp.arange(15.0).reshape(1, 1, 15, 1)
    program = export.deserialize(export.export(call)(x, mask).serialize())
    assert_close(program.call(x, mask), call(x, mask))
    with pytest.raises(TypeError, match=r"Predicate: expected what JSON holds .* make it within the program"):
        export.export(call)(x, masks.predicate(lambda query, key: query > key)).serialize()


def test_nan_beyond_reach_stays_where_it_is_in_a_short_last_block():
    """Rows that fill the last block up attend to nothing, whatever they could reach."""
    program = export.export(jax.jit(lambda q, k: attend(q, k, k, mask=masks.causal(), query_offset=0)))
    query, key = (jax.random.normal(jax.random.key(0), (length, D)) for length in (ROWS + 3, ROWS + 70))
    output = program(shapes_of(), shapes_of(length=S)).call(query, key.at[ROWS + 3 :].set(jnp.nan))
    expected = attend(query, key, key, mask=masks.causal(), query_offset=0)
    np.testing.assert_allclose(output, expected, rtol=2e-4, atol=2e-5)


def test_symbols_are_offsets_lengths_and_prefixes():
    def look(query, key):
        num_queries, num_keys = query.shape[0], key.shape[0]
        mask = masks.causal() & masks.lengths(num_keys - 2) | masks.prefix(num_keys - 60)
        return attend(query, key, key, mask=mask, query_offset=num_keys - num_queries)

    query, key = (jax.random.normal(jax.random.key(0), (length, D)) for length in (5, 71))
    output = export.export(jax.jit(look))(shapes_of(), shapes_of(length=S)).call(query, key)
    np.testing.assert_allclose(output, look(query, key), rtol=2e-4, atol=2e-5)


def test_an_indexer_chooses_among_any_number_of_keys():
    def choose(query, key):
        options = {"mask": masks.causal(), "query_offset": 2}
        chosen = readouts.choose_keys(query, key, count=4, **options)
        pair = {"attention": (query, key[:, None])}
        divergence = readouts.index_divergence(query, key, **pair, **options)
        return chosen, divergence, readouts.index_divergence(query, key, **pair, indices=chosen)

    program = export.export(jax.jit(choose))(shapes_of(B, 2), shapes_of(B, length=S))
    for num_keys in (3, 11):
        rng = np.random.default_rng(num_keys)
        query, key = (rng.standard_normal((3, *shape, D), np.float32) for shape in ((2, 5), (num_keys,)))
        chosen, *nats = program.call(query, key)
        expected, *expected_nats = choose(query, key)
        np.testing.assert_array_equal(chosen[..., : expected.shape[-1]], expected)
        assert np.all(chosen[..., num_keys:] == -1)
        np.testing.assert_allclose(nats, expected_nats, rtol=2e-4, atol=2e-5)
    with pytest.raises(NotImplementedError, match="expected sizes known before tracing"):
        jax.eval_shape(readouts.read, shapes_of(B, 2), shapes_of(B, 2))


def test_memory_of_gradients_is_linear_in_the_length():
    def loss(x):
        return jnp.sum(attend(x, x, x, mask=masks.causal()) ** 2)

    program = export.export(jax.jit(jax.grad(loss)))(shapes_of())

    def bytes_of(length):
        compiled = jax.jit(program.call).lower(shapes_of(length=length)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert bytes_of(4096) < 2.2 * bytes_of(2048)


def test_explain_says_what_is_done_of_unknown_sizes():
    told = str(explain(*PAIR, mask=masks.causal()))
    assert "backend    tiled: sizes are symbolic: every pair is computed" in told
    assert "B*T^2 B of scores" in told


@pytest.mark.parametrize(
    ("shapes", "options", "error", "words"),
    [
        (PAIR, {"batch_invariant": True}, NotImplementedError, "without batch_invariant"),
        (PAIR, {"backend": "cudnn"}, NotImplementedError, "its sizes are symbolic"),
        ([shapes_of(B), shapes_of(K), shapes_of(K)], {}, ValueError, r"query heads \(B\) to be a multiple"),
        ([shapes_of(2, width=K)] * 3, {}, ValueError, "at least 1, no symbol"),
        ([shapes_of(B, 2), shapes_of(B, 2), shapes_of(B, 2, length=S)], {}, ValueError, "one row per key"),
        (PAIR, {"mask": masks.segments(np.zeros(5, np.int32))}, ValueError, "expected T entries on the last"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_as_others_are(shapes, options, error, words):
    with pytest.raises(error, match=words):
        jax.eval_shape(lambda *arrays: attend(*arrays, **options), *shapes)


def test_chosen_rows_of_a_symbolic_length():
    drawn, described = arguments("length")
    options = {"query_offset": 0, "aux": ("weights", "scores"), "rows": [1, 40], "heads": [1]}
    weigh = lambda *arrays: attend(*arrays, **options)[1]
    exported = export.export(jax.jit(weigh))(*described["arrays"])
    assert_close(exported.call(*drawn["arrays"]), weigh(*drawn["arrays"]), 1e-7, 1e-5)
