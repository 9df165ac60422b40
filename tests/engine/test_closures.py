"""Functions of masks and scores that read what changes between two calls."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard import attend, masks, readouts, scores

BACKENDS = pytest.mark.parametrize(("size", "backend"), [(7, None), (131, "tiled")])
EXACT = {"rtol": 0, "atol": 2e-6}


def draw(size, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((2, size, 5)), jnp.float32)


@BACKENDS
def test_every_call_reads_what_is_there_now(size, backend):
    x, state = draw(size, 0), SimpleNamespace()
    by_array = masks.predicate(lambda query, key: jnp.asarray(state.documents)[query] == state.documents[key])
    by_number = masks.predicate(lambda query, key: abs(query - key) <= state.width)
    later = masks.predicate(lambda head, query, key: query - key <= jnp.asarray(state.reach)[head])
    for step in (1, 2, 1):
        state.documents, state.width, state.reach = jnp.arange(size) // (3 * step), step, [step, 2 * step]
        near = masks.sliding_window(step, step)
        reach = np.array([[[step]], [[2 * step]]]) >= np.subtract.outer(range(size), range(size))
        pairs = ((by_array, masks.segments(state.documents)), (by_number, near), (later, reach))
        for mask, known in pairs:
            expected, aux = attend(x, x, x, mask=known, aux=("entropy",))
            np.testing.assert_allclose(attend(x, x, x, mask=mask, backend=backend), expected, **EXACT)
            np.testing.assert_allclose(readouts.read(x, x, mask=mask).entropy, aux["entropy"], **EXACT)
        np.testing.assert_array_equal(by_number.dense(size), near.dense(size))


@BACKENDS
def test_a_score_that_is_changed_has_its_value_and_its_gradient(size, backend):
    x, state = draw(size, 0), SimpleNamespace()
    state.table = jnp.zeros((size, size))
    score = scores.modifier(lambda s, b, h, query, key: s + state.table[query, key])
    run = lambda x: attend(x, x, x, score=score, backend=backend)
    run(x)

    def total(table, biased):
        state.table = table
        return jnp.sin(attend(x, x, x, bias=table) if biased else run(x)).sum()

    for seed in (1, 2):
        table = 0.3 * draw(size, seed)[0] @ draw(size, seed)[1].T
        state.table = table
        expected = attend(x, x, x, bias=table)
        np.testing.assert_allclose(run(x), expected, **EXACT)
        for gradient in (jax.grad(total), jax.jit(jax.grad(total), static_argnums=1)):
            np.testing.assert_allclose(gradient(table, False), jax.grad(total)(table, True), **EXACT)
    state.table = table
    np.testing.assert_allclose(jax.jit(run)(x), expected, **EXACT)


@pytest.mark.parametrize(("leading", "size", "backend"), [((2,), 53, "tiled"), ((4, 8), 200, None)])
def test_no_derivative_calls_a_function_later_than_its_call_did(leading, size, backend):
    """What a loop counts has gone on by then; the larger call has derivatives in tiles."""
    x = jnp.sin(jnp.arange(np.prod(leading) * size * 5.0)).reshape((*leading, size, 5))

    def run(x, is_known):
        for number in (2, 9):
            near = masks.predicate(lambda query, key: abs(query - key) <= number)  # noqa: B023
            scaled = scores.modifier(lambda s, b, h, query, key: s * number)  # noqa: B023
            near = masks.sliding_window(number, number) if is_known else near
            scaled = scores.temperature(1 / number) if is_known else scaled
            x = attend(attend(x, x, x, mask=near, backend=backend), x, x, score=scaled, backend=backend)
        return jnp.sin(x).sum()

    gradients = [jax.grad(jax.jit(lambda x, known=known: run(x, known)))(x) for known in (False, True)]
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-4)


def test_a_prepared_mask_says_if_its_function_has_changed():
    x, state = draw(53, 0), SimpleNamespace(width=3)
    mask = masks.predicate(lambda query, key: abs(query - key) < state.width).prepare(53, 53)
    expected = attend(x, x, x, mask=mask)
    state.width = 7
    with pytest.raises(ValueError, match="<lambda> to compute what it did when its mask was prepared, or"):
        attend(x, x, x, mask=mask)
    state.width = 3
    np.testing.assert_array_equal(attend(x, x, x, mask=mask), expected)


@BACKENDS
def test_a_score_has_the_derivative_of_its_own_rule(size, backend):
    x = draw(size, 0)
    total = lambda query, **options: jnp.sin(attend(query, x, x, backend=backend, **options)).sum()
    for factor in (2.0, -1.0):
        same = jax.custom_vjp(lambda s: s)
        same.defvjp(lambda s: (s, None), lambda _, cotangent, factor=factor: (factor * cotangent,))
        score = scores.modifier(lambda s, b, h, query, key, same=same: jax.lax.cond(key > 2, same, same, s))
        np.testing.assert_allclose(jax.grad(total)(x, score=score), factor * jax.grad(total)(x), **EXACT)


def test_a_score_has_the_second_derivative_of_its_own_rule():
    def differentiate(factor):
        slope, bend = jax.custom_jvp(jnp.cos), jax.custom_jvp(jnp.sin)
        slope.defjvp(lambda primals, tangents: (slope(*primals), factor * tangents[0]))
        bend.defjvp(lambda primals, tangents: (bend(*primals), slope(*primals) * tangents[0]))
        score = scores.modifier(lambda s, b, h, query, key: bend(s))
        return jax.hessian(lambda x: attend(x, x, x, score=score).sum())(draw(7, 0))

    others = differentiate(0.0)
    found = differentiate(5.0)
    jax.clear_caches()
    np.testing.assert_allclose(found, differentiate(5.0), **EXACT)
    assert jnp.abs(found - others).max() > 0.1


def test_functions_that_compute_the_same_share_a_program(caplog, x64):
    x = draw(53, 0).astype(np.float64)  # which no float32 score meets

    def call(add):
        relu = lambda s, b, h, query, key: jax.nn.relu(s) + jnp.where(key >= 0, add[query], np.nan)
        causal = masks.predicate(lambda query, key: query >= key)
        return attend(x, x, x, score=scores.modifier(relu), mask=causal)

    call(jnp.zeros(53))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        call(jnp.ones(53))
    assert "Compiling" not in caplog.text
