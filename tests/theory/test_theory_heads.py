"""Heads compared, by loops over their definitions."""

import jax
import numpy as np

from oracle import close
from refusals import assert_refused
from regard.theory import heads

H, T, S = 3, 5, 7


@jax.jit
def compare(weights):
    measures = heads.cosine_similarity, heads.jensen_shannon, heads.diversity, heads.head_entropy
    return {measure.__name__: measure(weights) for measure in measures}


def entropy(p):
    p = p[p > 0]
    return -(p * np.log(p)).sum()


def draw():
    """Weights with one row that only the second head leaves empty."""
    weights = np.random.default_rng(0).dirichlet(np.ones(S), size=(2, H, T))
    weights[:, 1, 2, :] = 0
    return weights


def test_pairs_of_heads_compare_as_loops_say(x64):
    weights = draw()
    found = compare(weights)
    for batch, g, h in np.ndindex(2, H, H):
        a, b = weights[batch, g], weights[batch, h]
        cosine = (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
        close(found["cosine_similarity"][batch, g, h], cosine)
        pairs = [(p, q) for p, q in zip(a, b, strict=True) if p.any() and q.any()]
        rows = [entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2 for p, q in pairs]
        assert len(rows) == (4 if 1 in (g, h) else 5)
        close(found["jensen_shannon"][batch, g, h], np.mean(rows))
    for batch, g in np.ndindex(2, H):
        expected = np.mean([entropy(row) for row in weights[batch, g] if row.any()])
        close(found["head_entropy"][batch, g], expected)
    other = ~np.eye(H, dtype=bool)
    close(found["diversity"], 1 - np.asarray(found["cosine_similarity"])[:, other].mean(-1))


def test_comparisons_keep_their_bounds(x64):
    """Heads with nothing in common, heads alike, and heads without any weight."""
    apart = np.stack([np.roll(np.eye(S)[:T], head, -1) for head in range(H)])
    found = compare(np.stack([apart, np.stack([apart[0]] * H), np.zeros((H, T, S))]))
    close(found["diversity"][:2], [1, 0])
    close(found["jensen_shannon"], [np.log(2) * ~np.eye(H, dtype=bool), *np.zeros((2, H, H))])
    for name in ("cosine_similarity", "jensen_shannon", "head_entropy"):
        assert not np.any(found[name][2]), name
    assert float(compare(apart[:1])["diversity"]) == 0


def test_effective_rank_is_the_exponential_of_entropy(x64):
    rng = np.random.default_rng(2)
    turn, _ = np.linalg.qr(rng.normal(size=(T, T)))
    matrices = [rng.normal(size=(T, T)), turn, np.ones((T, T)), np.zeros((T, T)), 1e200 * turn, np.nan * turn]
    found = np.asarray(jax.jit(heads.effective_rank)(np.stack(matrices)))
    values = np.linalg.svd(matrices[0], compute_uv=False)
    close(found[0], np.exp(entropy(values / values.sum())))
    close(found[1:], [T, 1, 0, T, np.nan], 1e-6)


def test_rollout_is_the_product_computed_by_hand(x64):
    layers = list(np.random.default_rng(3).dirichlet(np.ones(T), size=(4, 2, H, T)))
    expected = np.broadcast_to(np.eye(T), (2, T, T))
    for layer in layers:
        expected = (0.5 * np.eye(T) + 0.5 * layer.mean(1)) @ expected
    rollout = jax.jit(heads.rollout)
    close(rollout(layers), expected)
    layers[1][:, :, 2] = 0
    close(np.asarray(rollout(layers)).sum(-1), np.ones((2, T)))
    alone = jax.jit(lambda layer: heads.rollout([layer], residual=1.0))(layers[0])
    close(alone, np.broadcast_to(np.eye(T), (2, T, T)))


def test_gradients_are_finite_beside_empty_rows(x64):
    @jax.jit
    @jax.grad
    def slope(weights):
        return heads.jensen_shannon(weights).sum() + heads.head_entropy(weights).sum()

    assert np.isfinite(slope(draw())).all()
    lost = [f(np.nan * draw()) for f in (heads.jensen_shannon, heads.head_entropy)]
    assert all(np.isnan(value).all() for value in lost)


def test_errors_are_explained():
    ones = lambda *shape: np.ones(shape, np.float32)
    wrong = {
        r"weights: expected \(..., H, T, S\), got .* \(2, 3\)": lambda: heads.diversity(ones(2, 3)),
        "layers: expected the weights of one layer at least": lambda: heads.rollout([]),
        "layers: expected square weights": lambda: heads.rollout([ones(2, 3, 5)]),
        "layers: expected one shape": lambda: heads.rollout([ones(2, 3, 3), ones(2, 5, 5)]),
        "residual": lambda: heads.rollout([ones(2, 3, 3)], residual=2),
        "layers: expected the weights of each layer, got NoneType": lambda: heads.rollout(None),
    }
    assert_refused(*((call, message) for message, call in wrong.items()), error=(TypeError, ValueError))
