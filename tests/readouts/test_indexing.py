"""Keys that an indexer chooses are those of a sort of all scores, by NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_cases import on_eight_devices
from oracle import assert_close
from refusals import assert_refused
from regard import masks, readouts
from regard.readouts import indexing

H, T, S, COUNT = 3, 53, 131, 11
rng = np.random.default_rng(5)
query, key, weights = rng.normal(size=(2, H, T, 7)), rng.normal(size=(2, S, 7)), rng.normal(size=(2, H, T))
query_ids, key_ids = np.stack([np.arange(T) // 9, np.arange(T) // 5]), np.stack([np.arange(S) // 30] * 2)


@pytest.mark.parametrize("weighted", [True, False])
def test_the_largest_scores_of_what_the_mask_keeps_are_chosen(weighted, monkeypatch):
    monkeypatch.setattr(indexing, "MOST_SCORES", 2 * S * 16)  # of rows of a step: the last one is shorter
    own = weights if weighted else None
    keep = (query_ids[..., None] == key_ids[:, None]) & (np.arange(S) <= np.arange(T)[:, None] + 40)
    products = np.einsum("bhtd,bsd->bhts", query, key) * (0.3 if weighted else 7**-0.5)
    scores = np.einsum("bhts,bht->bts", np.maximum(products, 0), weights) if weighted else products.sum(1)
    scores[:, :, 9] = scores[:, :, 8]  # of equal ones, the first
    twins = key.copy()
    twins[:, 9] = key[:, 8]
    ranked = np.argsort(np.where(keep, -scores, np.inf), axis=-1, kind="stable")[..., :COUNT]
    truth = np.sort(np.where(np.take_along_axis(keep, ranked, -1), ranked, S), -1)
    truth[truth == S] = -1
    options = {"scale": 0.3 if weighted else None}
    with jax.enable_x64(True):
        mask = masks.causal() & masks.segments(query_ids, key_ids)
        arrays = (query, twins) if own is None else (query, twins, own)
        chosen = readouts.choose_keys(*arrays, count=COUNT, mask=mask, query_offset=40, **options)
        np.testing.assert_array_equal(chosen, truth)

        def total(by_chosen, *arrays):
            found = readouts.index_scores(*arrays, indices=chosen if by_chosen else None, **options)
            picked = found if by_chosen else jnp.take_along_axis(found, jnp.maximum(chosen, 0), -1)
            return jnp.sum(jnp.sin(jnp.where(chosen < 0, 0, picked))), found

        by = tuple(range(1, 1 + len(arrays)))
        arrays = [*map(jnp.asarray, arrays)]
        grad = jax.jit(jax.grad(total, by, has_aux=True), static_argnums=0)
        (grads, found), (true_grads, _) = (grad(way, *arrays) for way in (True, False))
        assert_close(grads, true_grads, 1e-11, 1e-12)
        expected = np.where(truth < 0, -np.inf, np.take_along_axis(scores, truth, -1))
        np.testing.assert_allclose(found, expected, rtol=1e-11)


@pytest.mark.parametrize("chosen", [False, True])
def test_the_divergence_of_indexer_and_attention(chosen, monkeypatch):
    """With the definition's gradients, to the indexer alone; over all keys and over the chosen."""
    monkeypatch.setattr(indexing, "MOST_SCORES", 2 * S * 16)
    heads = 2 * rng.normal(size=(2, 6, T, 5)), rng.normal(size=(2, 2, S, 5))
    keep = np.stack([np.tri(T, S, dtype=bool)] * 2)
    keep[1, 7] = False
    indices = np.where(keep, rng.random((2, T, S)).argsort(-1), S).argsort(-1)[..., :COUNT]
    indices = np.where(np.take_along_axis(keep, indices, -1), indices, -1)
    options = {"indices": indices} if chosen else {"mask": masks.from_array(keep[:, None])}
    kept = (indices[..., None] == np.arange(S)).any(-2) if chosen else keep

    def define(query, key, weights, own, read):
        products = jax.nn.relu(jnp.einsum("bhtd,bsd->bhts", query, key) / 7**0.5)
        scores = jnp.einsum("bhts,bht->bts", products, weights)
        products = jnp.einsum("bntd,bnsd->bnts", own, jnp.repeat(read, 3, 1)) / 5**0.5
        target = jax.nn.softmax(jnp.where(kept[:, None], products, -1e300), -1).mean(1)
        logs = jax.nn.log_softmax(jnp.where(kept, scores, -1e300), -1)
        return jnp.where(kept, target * (jnp.log(jnp.where(kept, target, 1)) - logs), 0).sum(-1)

    with jax.enable_x64(True):
        call, arrays = partial(readouts.index_divergence, **options), (query, key, weights, *heads)

        def differentiate(call):
            loss = lambda *arrays: (jnp.sum((found := call(*arrays)) ** 2), found)
            return jax.jit(jax.grad(loss, range(5), has_aux=True))(*arrays)

        found = differentiate(lambda *arrays: call(*arrays[:3], attention=arrays[3:]))
        (grads, numbers), (true_grads, truth) = found, differentiate(define)
        np.testing.assert_allclose(numbers, truth, rtol=0, atol=1e-13)
        for grad, true_grad in zip(grads[:3], true_grads, strict=False):
            np.testing.assert_allclose(grad, true_grad, rtol=0, atol=1e-12 * np.abs(true_grad).max())
        assert not any(np.any(grad) for grad in grads[3:])


def test_gradients_of_half_precision_are_added_up_in_float32():
    """Of a key that 600 queries list, or as many heads; in bfloat16 a sum of ones stops growing at 256."""
    ones, options = jnp.ones((600, 600, 1), "bfloat16"), {"indices": jnp.zeros((600, 1), int)}
    listed = jax.grad(lambda key: readouts.index_scores(ones[:1], key, **options).sum())(ones[0])
    of_heads = jax.grad(lambda key: readouts.index_scores(ones[:, :1], key).sum())(ones[0])
    assert listed[0] == of_heads[0] == 600


def test_memory_is_linear_and_wrong_calls_are_told():
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((4, 1 << 17, 64), (1 << 17, 64), (4, 1 << 17))]
    choose, diverge = partial(readouts.choose_keys, count=64, mask=masks.causal()), readouts.index_divergence
    assert jax.jit(choose).lower(*shapes).compile().memory_analysis().temp_size_in_bytes < 1 << 28
    arrays = [np.ones(shape, "float32") for shape in ((3, 5, 7), (5, 7), (3, 5))]
    assert readouts.choose_keys(arrays[0] * np.nan, *arrays[1:], count=2).tolist() == [[-1, -1]] * 5
    score, both = readouts.index_scores, {"indices": [[0]] * 5, "mask": masks.causal()}
    assert_refused(
        (lambda: readouts.choose_keys(*arrays, count=0), "count: expected an integer of at least 1"),
        (lambda: score(*arrays[:2], np.ones((5, 3))), "weights: expected one number per head"),
        (lambda: score(arrays[0], np.ones((5, 6))), "key: expected rows of 7 numbers"),
        (lambda: diverge(*arrays, attention=[arrays[0], arrays[0][:2]]), "attention: expected query"),
        (lambda: diverge(*arrays, attention=[np.ones((2, 3, 5, 7))] * 2), r"attention\[0\]: expected an"),
        (lambda: score(np.ones((2, 1, 5, 7)), arrays[0]), r"key: .* got \(2,\), \(3,\)"),
        (lambda: diverge(*arrays, attention=[arrays[0]] * 2, **both), "mask: expected None with indices"),
        (lambda: score(*arrays, indices=[0, 1]), r"indices: expected shape \(\*B, T, C\)"),
    )


DIVIDED = """
from collectives import count_kinds
from regard import readouts
mesh = jax.make_mesh((4, 2), ("rows", "sequence"), axis_types=(AUTO,) * 2)
arrays = draw((4, 3, 23, 5), (4, 23, 5), (4, 3, 23))
placed = jax.device_put(arrays, jax.NamedSharding(mesh, jax.P("rows")))
choose = lambda *arrays: readouts.choose_keys(*arrays, count=7, mask=masks.causal())
expected, odd = choose(*arrays), choose(*(array[:3] for array in arrays))
with parallel.use(mesh, "sequence", batch_axis="rows"):
    program = jax.jit(choose).lower(*placed).compile()
    assert (program(*placed) == expected).all() and (choose(*(array[:3] for array in arrays)) == odd).all()
print(count_kinds(program.as_text()))
"""


def test_each_device_chooses_for_its_own_rows():
    assert on_eight_devices(DIVIDED).strip() == "{}"
