"""Heads compared, by loops over their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard.theory import heads

H, T, S = 3, 5, 7


def drawn(leading=(2,), empty=True):
    """Weights with one row that only the second head leaves empty."""
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(S), size=(*leading, H, T))
    if empty:
        weights[..., 1, 2, :] = 0
    return weights


def close(actual, expected, tolerance=1e-10):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tolerance, atol=tolerance)


def entropy(p):
    p = p[p > 0]
    return -(p * np.log(p)).sum()


def test_pairs_of_heads_compare_as_loops_say(x64):
    weights = drawn()
    cosine, divergence = heads.cosine_similarity(weights), heads.jensen_shannon(weights)
    for batch, g, h in np.ndindex(2, H, H):
        a, b = weights[batch, g], weights[batch, h]
        close(cosine[batch, g, h], (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
        rows = [
            entropy((a[t] + b[t]) / 2) - (entropy(a[t]) + entropy(b[t])) / 2
            for t in range(T)
            if a[t].any() and b[t].any()
        ]
        assert len(rows) == (4 if 1 in (g, h) else 5)
        close(divergence[batch, g, h], np.mean(rows))
    other = ~np.eye(H, dtype=bool)
    close(heads.diversity(weights), 1 - np.asarray(cosine)[:, other].mean(-1))
    close(heads.head_entropy(weights)[1, 0], np.mean([entropy(row) for row in weights[1, 0]]))
    close(
        heads.head_entropy(weights)[1, 1],
        np.mean([entropy(r) for t, r in enumerate(weights[1, 1]) if t != 2]),
    )


def test_diversity_keeps_its_bounds(x64):
    apart = np.stack([np.roll(np.eye(S)[:T], head, -1) for head in range(H)])
    assert float(heads.diversity(apart)) == 1
    close(heads.jensen_shannon(apart), np.log(2) * ~np.eye(H, dtype=bool))
    close(heads.diversity(np.stack([apart[0]] * H)), 0)
    assert float(heads.diversity(apart[:1])) == 0
    nothing = np.zeros((H, T, S))
    for measure in (heads.cosine_similarity, heads.jensen_shannon, heads.head_entropy):
        assert not np.asarray(measure(nothing)).any()


def test_effective_rank_is_the_exponential_of_entropy(x64):
    rng = np.random.default_rng(2)
    matrices = rng.normal(size=(2, T, S))
    for found, matrix in zip(heads.effective_rank(matrices), matrices, strict=True):
        values = np.sqrt(np.linalg.eigvalsh(matrix @ matrix.T))
        close(found, np.exp(entropy(values / values.sum())))
    turn, _ = np.linalg.qr(rng.normal(size=(T, T)))
    close(heads.effective_rank(turn), T)
    close(heads.effective_rank(np.outer(np.ones(T), np.ones(S))), 1, 1e-6)
    assert float(heads.effective_rank(np.zeros((T, S)))) == 0
    close(heads.effective_rank(1e200 * turn), T)


def test_rollout_is_the_product_computed_by_hand(x64):
    rng = np.random.default_rng(3)
    layers = list(rng.dirichlet(np.ones(T), size=(4, 2, H, T)))
    expected = np.broadcast_to(np.eye(T), (2, T, T))
    for layer in layers:
        expected = (0.5 * np.eye(T) + 0.5 * layer.mean(1)) @ expected
    found = jax.jit(heads.rollout)(layers)
    close(found, expected)
    close(found.sum(-1), np.ones((2, T)))
    layers[1][:, :, 2] = 0
    close(heads.rollout(layers).sum(-1), np.ones((2, T)))
    close(heads.rollout(layers[:1], residual=1.0), np.broadcast_to(np.eye(T), (2, T, T)))


def test_gradients_are_finite_beside_empty_rows(x64):
    for measure in (heads.jensen_shannon, heads.head_entropy):
        grad = jax.grad(lambda weights, measure=measure: measure(weights).sum())(jnp.asarray(drawn()))
        assert np.isfinite(grad).all()
        assert not np.asarray(grad)[:, 1, 2].any() or measure is heads.jensen_shannon


def test_errors_are_explained():
    with pytest.raises(
        ValueError, match=r"weights: expected \(..., H, T, S\), got an array of shape \(2, 3\)"
    ):
        heads.diversity(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="layers: expected the weights of one layer at least"):
        heads.rollout([])
    with pytest.raises(ValueError, match=r"layers: expected square weights"):
        heads.rollout([jnp.ones((2, 3, 5))])
    with pytest.raises(ValueError, match="residual"):
        heads.rollout([jnp.ones((2, 3, 3))], residual=2)
