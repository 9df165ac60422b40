"""Keys chosen for each query are gathered: the same numbers as of the matrix that they make, on every way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from collectives import count_kinds
from mesh_cases import evaluate, make_mesh, on_eight_devices
from regard import attend, explain, masks, parallel, scores

T, S, CHOICES = 53, 131, 11
STATS = ("lse", "max_score", "argmax", "entropy")
rng, stripes = np.random.default_rng(3), jnp.arange(S) % 3


def draw_lists(*leading, rows=T, keys=S, choices=CHOICES):
    """Some keys twice, some that are none."""
    return rng.integers(-2, keys + 2, (*leading, rows, choices))


def tabulate(lists, keys=S, group=1):
    """The matrix that the lists make, by NumPy."""
    return np.repeat((lists[..., None] == np.arange(keys)).any(-2), group, -3 if group > 1 else 0)


def draw(leading, heads, rows=T, keys=S, dtype=float):
    shapes = (*leading, rows, 7), (*leading[:-1], *heads, keys, 7), (*leading[:-1], *heads, keys, 5)
    return [jnp.asarray(rng.normal(size=shape).astype(dtype), dtype) for shape in shapes]


two, row_ids = masks.segments(np.arange(T) // 20, np.arange(S) // 40), rng.integers(0, 99, (2, T))
# Leading axes, key heads, axes of the lists, what joins them, and options.
CASES = {
    "one head": ((), (), (), None, {}),
    "each head": (
        *((2, 3), (3,), (2, 3), masks.causal()),
        {"query_offset": jnp.asarray([70, 78]), "dropout_rate": 0.4, "rng": jax.random.key(1)},
    ),
    "key heads": ((2, 6), (2,), (1, 2), None, {"scale": 0.3}),
    "heads on a key head": (
        *((2, 6), (1,), (2, 6), two, {"bias": rng.normal(size=(6, T, S)), "sinks": rng.normal(size=6)}),
    ),
    "scores, all heads": (
        *((2, 4), (2,), (2,), masks.predicate(lambda query, key: query % 3 != stripes[key])),
        {"score": [scores.softcap(2.0), scores.alibi(4)], "query_offset": 9,
         "bias": rng.normal(size=(2, 1, 1, S))},
    ),
    "tokens": (
        *((2, 4), (2,), (1, 4), masks.causal() & ~masks.chosen_keys(draw_lists(1, 4))),
        {"query_positions": row_ids, "key_positions": rng.integers(0, 99, (2, S)),
         "score": scores.relative_bias(jnp.asarray(rng.normal(size=(32, 4))))},
    ),
}  # fmt: skip


def differentiate(arrays, options, cotangent, **rest):
    """Output, statistics, and gradients by all arrays of what they make."""

    def loss(arrays, options):
        output, stats = attend(*arrays, aux=STATS, **options, **rest)
        lse = jnp.where(jnp.isfinite(stats["lse"]), stats["lse"] + stats["entropy"], 0)
        return jnp.sum(output * cotangent) + jnp.sum(lse * cotangent[..., 0]), (output, stats)

    with jax.enable_x64(True):
        by, found = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(arrays, options)
    return jax.tree.leaves((found, by))


@pytest.mark.parametrize("name", CASES)
def test_it_is_attention_under_the_matrix_of_the_lists(name):
    leading, heads, own, mask, options = CASES[name]
    with jax.enable_x64(True):
        arrays, lists = draw(leading, heads), draw_lists(*own)
        by = {key: jnp.asarray(options[key]) for key in options.keys() & {"bias", "sinks"}}
        rest = {key: value for key, value in options.items() if key not in by}
        cotangent = rng.normal(size=(*leading, T, 5))
        matrix = tabulate(lists, group=3 if name == "key heads" else 1)
        pair = masks.chosen_keys(lists), masks.from_array(matrix[:, None] if "all heads" in name else matrix)
        listed, matrix = (kind if mask is None else kind & mask for kind in pair)
        truth = differentiate(arrays, by, cotangent, mask=matrix, backend="dense", **rest)
        found = differentiate(arrays, by, cotangent, mask=listed, backend="gathered", **rest)
        oracle.assert_close(found, truth, 1e-11, 1e-12)


def test_lists_of_any_order_are_those_of_the_definition_at_length():
    arrays, lists = draw((3,), (1,), 331, 1031, "float32"), np.sort(draw_lists(1, rows=331, keys=1031), -1)
    lists[..., 1:][lists[..., 1:] == lists[..., :-1]] = -1
    cotangent = rng.normal(size=(3, 331, 5)).astype("float32")
    spelled = {"keep": tabulate(lists, 1031), "cotangent": cotangent}
    truth, plain = (oracle.batched(*arrays, **spelled, dtype=dtype) for dtype in (float, "float32"))
    shuffled = rng.permuted(lists, axis=-1)
    for mask in (masks.chosen_keys(lists, ascending=True), masks.chosen_keys(np.tile(shuffled, 2))):
        assert explain(*arrays, mask=mask).backend == "gathered"
        found = evaluate(functools.partial(attend, mask=mask), arrays, cotangent)
        for name, array in zip(oracle.PARTS, found, strict=True):
            oracle.assert_as_exact(array, getattr(truth, name), getattr(plain, name), name)
    with pytest.raises(ValueError, match="indices: expected ascending numbers, each once; leave out"):
        masks.chosen_keys(shuffled, ascending=True)


def test_transforms_and_what_nobody_may_attend_to():
    arrays = draw((2, 4), (2,), dtype="float32")
    lists = draw_lists(2, 2)
    bias = jnp.where(jnp.arange(S) == 5, -jnp.inf, 0.0).astype("float32")[None]  # which lists may name
    lists[:, :, 7] = -1
    hidden = [arrays[0], arrays[1].at[..., 5, :].set(jnp.nan), arrays[2].at[..., 5, :].set(jnp.inf)]

    def twice(backend, arrays, lists):
        one = lambda *arrays: attend(*arrays, mask=masks.chosen_keys(lists) & two, bias=bias, backend=backend)
        loss = lambda query: jnp.sum(jnp.sin(jax.vmap(one)(query, *arrays[1:])))
        return jax.jvp(jax.grad(loss), (arrays[0][None],), (jnp.ones_like(arrays[0])[None],))

    hidden = [array[None] if place else array for place, array in enumerate(hidden)]
    visible = [array[None] if place else array for place, array in enumerate(arrays)]
    run = jax.jit(twice, static_argnums=0)
    truth = run("dense", visible, lists)
    for actual, expected in zip(run("gathered", hidden, lists), truth, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5)
        assert not actual[..., 7, :].any()
    lists[lists == 5] = -1
    lists[:, :, 9, 2] = 5  # in row 9 alone
    hidden = (array.reshape(array.shape[-4:]) for array in hidden)
    call = jax.jit(lambda *a: attend(*a, mask=masks.chosen_keys(lists), backend="gathered", aux=STATS))
    found, stats = call(*hidden)
    ninth = np.arange(T) == 9
    assert (np.isnan(np.asarray(found)).all(-1) == ninth).all()
    assert all((np.isnan(np.asarray(stats[name])) == ninth).all() for name in STATS if name != "argmax")
    assert not stats["argmax"][..., 9].any()


def test_gradients_of_half_precision_are_added_up_in_float32():
    """Of a value that 600 queries list: in bfloat16 a sum of ones stops growing at 256."""
    ones, mask = jnp.ones((600, 1), "bfloat16"), masks.chosen_keys(np.zeros((600, 1), int))
    total = lambda value: attend(ones, ones, value, mask=mask, backend="gathered").astype("float32").sum()
    assert jax.grad(total)(ones)[0] == 600


def test_memory_is_linear_and_what_is_done_is_told():
    def temporaries(length):
        arrays = [jax.ShapeDtypeStruct((1, length, 64), "float32")] * 3
        lists = jax.ShapeDtypeStruct((length, 16), "int32")
        loss = lambda lists, *arrays: attend(*arrays, mask=masks.chosen_keys(lists) & masks.causal()).sum()
        compiled = jax.jit(jax.grad(loss, (1, 2, 3))).lower(lists, *arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes / length

    assert temporaries(1 << 16) < 1.2 * temporaries(1 << 13) < 10_000
    query = jax.ShapeDtypeStruct((8, 4096, 64), "bfloat16")
    mask = masks.chosen_keys(np.zeros((4096, 64), int))
    assert explain(query, query, query, mask=mask).reason == "64 of 4,096 keys are gathered for each query"
    assert "gathered" not in explain(query, query, query).refusals
    short = jax.ShapeDtypeStruct((8, 128, 64), "bfloat16")
    assert explain(*[short] * 3, mask=masks.chosen_keys(np.zeros((128, 64), int))).backend != "gathered"
    refused = ({"mask": ~mask}, "no chosen_keys"), ({"mask": mask, "aux": ("weights",)}, "weights")
    for options, reason in refused:
        with pytest.raises(NotImplementedError, match=f"'gathered' cannot serve this call: {reason}"):
            explain(query, query, query, backend="gathered", **options)


def divide():
    """Batch and heads stay divided, without a collective; sequences are rings."""
    lists = jnp.asarray(draw_lists(4, 2, rows=64, keys=64))
    arrays = draw((4, 4), (2,), 64, 64, "float32")

    def loss(*arrays, **options):
        mask = masks.chosen_keys(arrays[3]) & masks.causal()
        return jnp.sum(jnp.sin(attend(*arrays[:3], mask=mask, **options)))

    truth = jax.jit(lambda *arrays: jax.grad(loss, (0, 1, 2))(*arrays, backend="dense"))(*arrays, lists)
    for kind in jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit:
        mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(kind,) * 2)
        spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch", "heads"))
        with jax.set_mesh(mesh):
            placed = [jax.device_put(array, spec) for array in (*arrays, lists)]
            call = jax.jit(lambda *arrays: jax.grad(loss, (0, 1, 2))(*arrays, backend="gathered"))
            compiled = call.lower(*placed).compile()
            assert not count_kinds(compiled.as_text())
            oracle.assert_close(compiled(*placed), truth, 5e-5)
    mesh, mask = make_mesh(seq=4), masks.chosen_keys(lists) & masks.causal()
    expected = attend(*arrays, mask=mask)
    for layout in ("contiguous", "balanced"):
        found = parallel.ring_attend(*arrays, mask=mask, mesh=mesh, axis="seq", layout=layout)
        np.testing.assert_allclose(found, expected, rtol=5e-5, atol=2e-5)


def test_divided_programs():
    on_eight_devices("import test_gathered; test_gathered.divide()")
