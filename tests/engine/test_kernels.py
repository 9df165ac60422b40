"""Library kernels in the place of ours: every transform, what is translated, what refused, what lowered."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_model
import mesh_cases
from oracle import assert_close
from regard import attend, explain, masks, scores
from regard.engine.backends import cudnn, kernel_primitives, mosaic_gpu, splash_tpu
from regard.engine.backends.kernel_masks import read_kernel_mask, row_bounds
from regard.engine.call.canonicalization import canonicalize
from regard.engine.dispatch import registry
from regard.engine.platforms import Platform

B, H, K, T, S, D = 2, 6, 3, 7, 11, 8


# A kernel with a gradient and nothing else, as libraries give them.


def _define(query, key, value, keep):
    """Output and lse of one row of a batch; what has more axes is a mistake, as for a library's kernel."""
    logits = jnp.where(keep, jnp.einsum("htd,hsd->hts", query, key), -1e9)
    return jnp.einsum("hts,hsd->htd", jax.nn.softmax(logits), value), jax.nn.logsumexp(logits, -1)


def _definition(query, key, value, keep):
    return jax.vmap(_define)(query, key, value, keep)


def _forbid(*_):
    raise AssertionError("the gradient of a library's kernel has no derivative")


@dataclass(frozen=True)
class Toy:
    """Its gradient is that of float32 arrays as they are, from what was saved, and knows nothing of lse."""

    widest: int = 64

    def forward(self, lse, query, key, value, *data):
        return list(_definition(query, key, value, data[0]))[: 1 + lse]

    def backward(self, arrays, data, *found):
        query, key, value = arrays
        assert max(query.shape[-1], value.shape[-1]) <= self.widest
        gradient = jax.custom_vjp(self._gradient)
        gradient.defvjp(_forbid, _forbid)
        return gradient(query, key, value, *data, *found)

    def _gradient(self, query, key, value, keep, output, lse, cotangent):
        logits = jnp.einsum("bhtd,bhsd->bhts", query, key)
        weights = jnp.where(keep[:, None], jnp.exp(logits - lse[..., None]), 0)
        delta = (output * cotangent).sum(-1, keepdims=True)
        change = weights * (jnp.einsum("bhte,bhse->bhts", cotangent, value) - delta)
        return [
            jnp.einsum("bhts,bhsd->bhtd", change, key),
            jnp.einsum("bhts,bhtd->bhsd", change, query),
            jnp.einsum("bhts,bhte->bhse", weights, cotangent),
        ]

    def reference(self, query, key, value, *data):
        return list(_definition(query, key, value, data[0]))


def toy_inputs():
    rng = np.random.default_rng(5)
    arrays = [jnp.asarray(rng.normal(size=(B, 2, n, 3)), jnp.float32) for n in (T, S, S)]
    return (*arrays, jnp.asarray(rng.random((B, T, S)) < 0.7))


def ours(*operands, kernel=Toy()):
    """Of output and lse, one number each, so that both have a cotangent; or none."""
    output, lse = kernel_primitives.saving_p.bind(*operands, spec=kernel_primitives.Spec(kernel))
    return output * lse[..., None]


def theirs(*operands):
    output, lse = _definition(*operands)
    return output * lse[..., None]


def summed(f, power):
    return lambda *arrays: (f(*arrays) ** power).sum()


def transpose(f, q, k, v):
    return jax.linear_transpose(lambda cotangent: jax.vjp(lambda k: f(q, k, v), k)[1](cotangent)[0], q)(k)


ALL = (0, 1, 2)
TRANSFORMS = {
    "grad of one": lambda f, *a: jax.grad(summed(f, 3), 1)(*a),
    "jvp of one": lambda f, q, k, v: jax.jvp(lambda k: f(q, k, v), (k,), (k - 1,)),
    "linearize": lambda f, *a: jax.linearize(f, *a)[1](*a),
    "transpose": transpose,
    "checkpoint": lambda f, *a: jax.grad(summed(jax.checkpoint(f), 3), (0, 2))(*a),
    "forward over reverse": lambda f, *a: jax.jvp(jax.value_and_grad(summed(f, 3), ALL), a, a),
    "reverse over reverse": lambda f, *a: jax.grad(summed(jax.grad(summed(f, 3)), 2), ALL)(*a),
    "reverse over forward": lambda f, *a: jax.grad(summed(lambda *a: jax.jvp(f, a, a)[1], 2), ALL)(*a),
}


def agree(got, expected):
    def one(a, b):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * max(1, np.abs(b).max()))

    jax.tree.map(one, got, expected)


def test_every_transform_of_a_kernel_that_knows_its_gradient_only():
    *arrays, keep = toy_inputs()
    every = lambda f, *a: {name: make(lambda *b: f(*b, keep), *a) for name, make in TRANSFORMS.items()}
    got, expected = (jax.jit(functools.partial(every, f))(*arrays) for f in (ours, theirs))
    for name in TRANSFORMS:
        agree(got[name], expected[name])


def test_a_gradient_of_lse_that_no_column_is_left_for_is_that_of_the_definition():
    *arrays, keep = toy_inputs()
    narrow = functools.partial(ours, kernel=Toy(widest=3))
    got, expected = (
        jax.jit(jax.grad(summed(lambda *a, f=f: f(*a, keep), 3), ALL))(*arrays) for f in (narrow, theirs)
    )
    agree(got, expected)


def test_vmap_along_any_axis_and_within_another_is_a_loop_over_calls():
    query, key, value, keep = toy_inputs()
    queries = jnp.stack([query, -query], 1)
    keys = jnp.stack([key * scale for scale in (1, 2, -1, 0.5, -3)], 4)
    inner = jax.vmap(lambda query, key: ours(query, key, value, keep), (1, None))
    found = jax.jit(jax.vmap(inner, (None, 4)))(queries, keys)
    define = jax.jit(theirs)
    queries, keys = np.asarray(queries), np.asarray(keys)
    for j, i in np.ndindex(5, 2):
        agree(found[j, i], define(queries[:, i], keys[..., j], value, keep))


def test_values_without_a_gradient_save_nothing():
    *arrays, keep = toy_inputs()
    spec = kernel_primitives.Spec(Toy())
    plain = lambda *arrays: kernel_primitives.plain_p.bind(*arrays, keep, spec=spec)[0]
    found = str(jax.make_jaxpr(plain)(*arrays))
    assert "regard_plain_kernel" in found
    assert "saving" not in found
    graded = str(jax.make_jaxpr(jax.grad(lambda *a: plain(*a).sum()))(*arrays))
    assert "regard_saving_kernel" in graded
    assert "regard_backward_kernel" in graded
    assert "of_lse=True" not in graded
    assert "tangent" not in graded


def test_numbers_of_few_digits_hold_a_cotangent_together():
    exact = np.random.default_rng(4).normal(size=97).astype(np.float32) * np.logspace(-3, 3, 97)
    for dtype in ("bfloat16", "float16"):
        split = jax.jit(functools.partial(kernel_primitives._pieces, dtype=jnp.dtype(dtype)))
        parts = np.asarray(split(jnp.asarray(exact, "float32")), np.float64)
        scales = np.asarray(jnp.asarray(kernel_primitives._SCALES, dtype), np.float64)
        np.testing.assert_allclose(parts @ scales, exact, rtol=3e-7, atol=1e-8)


# cuDNN's calls: what they say, answered by a model of it on CPU, and what they lower to.


@pytest.fixture
def hopper(monkeypatch):
    """As if a GPU were there that computes what cuDNN would."""
    monkeypatch.setattr(cudnn, "find_capability", lambda: (9, 0))
    return cudnn_model.install(monkeypatch)


@pytest.fixture
def interpreted(monkeypatch):
    """Splash attention in interpret mode, which runs anywhere."""
    monkeypatch.setattr(splash_tpu, "_INTERPRET", True)


draw = functools.partial(mesh_cases.draw, dtype="bfloat16")
SHAPES = ((B, H, T, D), (B, K, S, D), (B, K, S, D))
SQUARE = ((B, H, S, D), (B, K, S, D), (B, K, S, D))
LSE, CAP = {"aux": ("lse",), "scale": 0.4}, scores.softcap(0.7)
MIXED = masks.segments([[4] * 11, [7] * 3 + [5] * 2 + [3] * 6]) & masks.causal()
# The least of all numbers, too, which marks the keys that fill up the last tile.
LEAST = np.iinfo(np.int32).min
OTHERS = masks.segments([0, 1, LEAST, 3, 9, 9, 3], [3, LEAST] * 5 + [0])
SERVED = {
    "one head": (((T, D), (S, D), (S, D)), {}),
    "three leading axes": (((2, 1, H, T, D), (3, K, S, D), (2, 3, K, S, D)), {}),
    # The last keys are left out, and lengths do not reach beyond the others.
    "causal, more keys": (SHAPES, {"mask": masks.causal() & masks.lengths([S, 3]), "query_offset": 0}),
    "last query": (((B, H, 1, D), *SHAPES[1:]), {"mask": masks.causal(), "query_offset": S - 1}),
    "causal and window": (SQUARE, {"mask": masks.causal() & masks.sliding_window(4, 2)}),
    "wide window": (SQUARE, {"mask": masks.sliding_window(90, 90)}),
    "an empty row": (SHAPES, LSE | {"mask": masks.lengths([0, 3])}),
    "causal and lengths": (SQUARE, {"mask": masks.causal() & masks.lengths([5, 1]), "scale": 0.7}),
    "documents": (SQUARE, {"mask": masks.segments([[7, 7, 7, -5, -5, 3, 3, 3, 3, 3, 0], [4] * 11])}),
    "lse of documents": (SQUARE, LSE | {"mask": MIXED}),
    "lse of three numbers": (((B, H, T, 24), (B, K, S, 24), (B, K, S, 24)), LSE),
    "sinks of lengths": (SHAPES, LSE | {"mask": masks.lengths([0, 3]), "sinks": True}),
    "softcap and sinks": (SQUARE, LSE | {"mask": masks.causal(), "score": CAP, "sinks": True}),
}
SPLASHED = {
    "other keys, wide values": (((B, H, T, D), (B, K, S, D), (B, K, S, 13)), {"mask": OTHERS}),
    "a window of lengths": (SQUARE, {"mask": masks.sliding_window(3) & masks.lengths([2, 9])}),
    "softcap and sinks": SERVED["softcap and sinks"],
}


def gradients(call, *arrays):
    """Results, and gradients of all arrays by all results."""
    found, pull = jax.vjp(call, *arrays)
    pulls = jax.tree.map(lambda x: 2 * jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype), found)
    return found, pull(pulls)


def check(backend, shapes, options, function=gradients):
    """A function of a call by a kernel, against the definition in float32."""
    options, arrays = dict(options), draw(*shapes)
    if options.pop("sinks", False):
        arrays.append(jnp.linspace(-1.0, 2.0, H))

    def run(backend, *arrays):
        call = lambda *a: attend(*a[:3], sinks=(*a[3:], None)[0], backend=backend, **options)
        return function(call, *arrays)

    found = jax.jit(functools.partial(run, backend))(*arrays)
    expected = jax.jit(functools.partial(run, "dense"))(*(array.astype("float32") for array in arrays))
    # 9 bits and their sums; weights and the scaled query are rounded before they are multiplied.
    assert_close(found, expected, 0.06, 0.06)


def takes(inner, options):
    return "score" not in options or cudnn._takes_scores(inner)


@pytest.mark.parametrize(
    "name",
    sorted(SERVED.keys() - {"one head", "last query", "wide window", "documents", "lse of three numbers"}),
)
def test_what_cudnn_is_asked_means_the_same(hopper, name):
    shapes, options = SERVED[name]
    if takes(hopper, options):
        check("cudnn", shapes, options)
    else:
        with pytest.raises(NotImplementedError, match="gives it no score functions"):
            check("cudnn", shapes, options)


@pytest.mark.parametrize("name", SPLASHED)
def test_splash_attention_agrees_in_interpret_mode(interpreted, name):
    check("splash_tpu", *SPLASHED[name])


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no NVIDIA GPU")
@pytest.mark.parametrize("name", SERVED)
def test_cudnn_itself_agrees_with_the_definition(name):
    shapes, options = SERVED[name]
    if not takes(cudnn._inner(), options):
        pytest.skip("no score functions in this JAX")
    check("cudnn", shapes, options)


@pytest.mark.parametrize(
    ("backend", "mask"),
    [("cudnn", masks.causal() & masks.lengths([5, 11])), ("splash_tpu", masks.sliding_window(1, 4))],
)
def test_forward_mode_of_a_kernel_is_that_of_the_same_call(hopper, interpreted, backend, mask):
    tangent = lambda call, *arrays: jax.jvp(call, arrays, tuple(map(jnp.cos, arrays)))[1]
    check(backend, SQUARE, {"mask": mask, "scale": 0.7}, tangent)


FAR = masks.lengths(np.array([2**31 - 1, 3], np.int64))
ALIGNED = {
    "a window after the first key": (SHAPES, {"mask": masks.sliding_window(5), "query_offset": 4}),
    "a window that leaves out one key of the last query": (SHAPES, {"mask": masks.sliding_window(T - 2)}),
    "lengths beyond all keys that were moved": (SHAPES, {"mask": FAR, "key_offset": -3}),
    "lengths of keys that were moved": (SHAPES, {"mask": masks.lengths([5, 12]), "key_offset": 3}),
    "lengths of the first of two batch axes": (
        ((2, 3, H, T, D), (3, K, S, D), (2, 3, K, S, D)), {"mask": masks.lengths([5, 2])}
    ),
}  # fmt: skip


def test_the_pattern_that_a_kernel_is_told_keeps_what_the_mask_keeps():
    rows, columns = np.indices((T, S))
    for name, (shapes, options) in ALIGNED.items():
        options = {"query_offset": 0} | options
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        problem = canonicalize(*arrays, **options)
        kernel_mask, bounds = read_kernel_mask(problem), row_bounds(read_kernel_mask(problem), problem)
        found = np.ones((*problem.leading[:-1], T, S), bool)
        if kernel_mask.before is not None:
            found &= columns >= rows - kernel_mask.before
        if kernel_mask.after is not None:
            found &= columns <= rows + kernel_mask.after
        if bounds is not None:
            found &= columns < np.asarray(bounds).reshape((*problem.leading[:-1], 1, 1))
        mask, places = options["mask"], {key: options.get(key) for key in ("query_offset", "key_offset")}
        expected = mask.dense(T, S, **places, leading_axes=len(problem.leading))
        np.testing.assert_array_equal(*np.broadcast_arrays(found, expected[..., 0, :, :]), err_msg=name)


def lower_for_cuda(function, *arrays):
    """The program for an NVIDIA GPU, which lowering alone needs none for."""
    # Under shard_map, as JAX's wrapper asks for devices otherwise.
    whole = jax.sharding.PartitionSpec()
    mesh = jax.make_mesh((1,), ("one",))
    specs = {"in_specs": (whole,) * len(arrays), "out_specs": whole}
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, **specs))
    return mapped.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


WIDE = ((2, 8, 256, 64), (2, 2, 256, 64), (2, 2, 256, 64))
PARTS = masks.segments(np.repeat([4, 2, 9], [100, 1, 155])) & masks.causal()
LSE_ALONE = {"aux": ("lse",)}
# Options; what both calls say; how many are backward (a softcap's is Regard's); columns for dlse.
PROGRAMS = {
    "plain": ({}, ["NO_MASK", "window_length\\22: 0,"], 1, ""),
    "causal": ({"mask": masks.causal()}, ["mask_type\\22: \\22CAUSAL\\22"], 1, ""),
    # A window alone is causal for us; cuDNN counts the query's own key.
    "window": ({"mask": masks.sliding_window(100)}, ["CAUSAL", "window_length\\22: 101,"], 1, ""),
    "lengths": ({"mask": masks.lengths([3, 256])}, ["\\22PADDING\\22"], 1, ""),
    "causal and lengths": ({"mask": masks.causal() & masks.lengths([3, 0])}, ["PADDING_CAUSAL"], 1, ""),
    "sinks": ({"mask": masks.sliding_window(100), "sinks": np.ones(8, np.float32)}, ["h\\22: 101,"], 1, ""),
    "lse": (LSE_ALONE, ["max_seg_per_batch\\22: 1"], 1, "<2x8x256x72xbf16>"),
    "documents": (LSE_ALONE | {"mask": PARTS}, ["max_seg_per_batch\\22: 3"], 1, "<16x256x1x72xbf16>"),
    "softcap": (LSE_ALONE | {"score": scores.softcap(30.0)}, ["called_computations = [@softcap]"], 0, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_for_a_gpu_calls_cudnn_once_each_way(hopper, name):
    options, told, backward, columns = PROGRAMS[name]
    if not takes(hopper, options):
        pytest.skip("no score functions in this JAX")
    call = lambda *arrays: attend(*arrays, backend="cudnn", **options)
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in WIDE]
    program = lower_for_cuda(lambda *arrays: gradients(call, *arrays), *arrays)
    lines = program.splitlines()
    calls = [[line for line in lines if f"@__cudnn$fmhaSoftmax{way}(" in line] for way in ("", "Backward")]
    assert [len(found) for found in calls] == [1, backward]
    assert all(word in line for found in calls for line in found for word in told)
    if backward:  # elsewhere tiles may be visited in a loop
        assert "while" not in program
        assert "x256x256x" not in program, "an array over queries and keys"
        # Nothing is rearranged, as heads stand first in Regard and in what cuDNN is given.
        moves = [line for line in lines if "stablehlo.transpose" in line]
        assert all("dims = [0, 1, 2, 3]" in line or "x1x" in line for line in moves)
        if columns:  # of query, output and their cotangents
            assert calls[1][0].count(columns) >= 4
        else:
            assert "x72x" not in program


# Of the arrays, what is changed; options; the reason.
TWO = masks.segments([0] * 5 + [1] * 6)
REFUSED = {
    "float32": ({"dtype": "float32"}, {}, "bfloat16 or float16 alone, got float32"),
    "two dtypes": ({"others": "float16"}, {}, "bfloat16 or float16 alone, got bfloat16, float16"),
    "width": ({"width": 12}, {}, "that 8 divides, got 12"),
    "too wide": ({"width": 512}, {}, "up to 256"),
    "after": ({}, {"mask": masks.sliding_window(3, 3)}, "no band of 3 keys before to 3 after"),
    "other diagonal": ({"keys": 13}, {"mask": masks.causal(), "query_offset": 2}, "no band"),
    "fewer keys": ({"keys": 5}, {"mask": masks.causal(), "query_offset": 0}, "no more queries than keys"),
    "documents again": ({}, {"mask": masks.segments([0, 1, 1, 0, 2, 2, 2, 2, 2, 2, 2])}, "in one piece"),
    "documents of queries": ({}, {"mask": masks.segments([0] * 11, [0] * 5 + [1] * 6)}, "same rows"),
    "documents moved": ({}, {"mask": TWO, "query_offset": 2}, "other rows than theirs"),
    "documents in a window": ({}, {"mask": TWO & masks.sliding_window(3)}, "not both"),
    "either": ({}, {"mask": masks.causal() | masks.prefix(3)}, "which it does not know"),
    "chunks": ({}, {"mask": masks.causal() & masks.chunked(4)}, r"has chunked\(4\)"),
    "two bounds": ({}, {"mask": masks.lengths([9, 3]) & masks.prefix(5)}, r"has prefix\(5\)"),
    "lengths in a window": ({}, {"mask": masks.sliding_window(3) & masks.lengths([2, 3])}, "not both"),
    "lengths of heads": ({}, {"mask": masks.lengths(np.ones((2, 6), int))}, "differ between heads"),
    "score": ({}, {"score": scores.temperature(3.0)}, "softcap alone"),
    "two scores": ({}, {"score": [scores.softcap(3.0)] * 2}, "softcap alone"),
    "caps of heads": ({}, {"score": scores.softcap(np.arange(1.0, 7.0))}, "one cap for all heads"),
    "bias": ({}, {"bias": np.zeros((11, 11))}, "NaN"),
    "statistics": ({}, {"aux": ("lse", "entropy")}, "lse alone, aux asks for entropy"),
    "dropout": ({}, {"dropout_rate": 0.1, "rng": jax.random.key(0)}, "which no gradient could draw again"),
    "precision": ({}, {"precision": "highest"}, "asks for more"),
    "nothing": ({"keys": 0}, {}, "nothing to compute"),
    "offsets": ({}, {"mask": masks.causal(), "query_offset": np.array([0, 1])}, "offsets that are arrays"),
}
SPLASH_REFUSED = {
    **{name: REFUSED[name] for name in ("score", "documents moved", "precision", "fewer keys")},
    "bias": ({}, {"bias": np.zeros((11, 11))}, "no bias"),
    "before": ({}, {"mask": masks.causal(), "query_offset": -2}, "rows without a key"),
    "shared": ({"heads": 1}, {}, "no query that several heads share"),
    "float32": ({"dtype": "float32"}, {}, "takes bfloat16"),
}
REFUSALS = [("cudnn", name, *REFUSED[name]) for name in REFUSED]
REFUSALS += [("splash_tpu", name, *SPLASH_REFUSED[name]) for name in SPLASH_REFUSED]


@pytest.mark.parametrize(("backend", "name", "changed", "options", "reason"), REFUSALS)
def test_what_a_kernel_would_answer_otherwise_is_refused(
    hopper, interpreted, backend, name, changed, options, reason
):
    sizes = {"width": D, "keys": 11, "heads": H, "dtype": "bfloat16"} | changed
    query = jax.ShapeDtypeStruct((B, sizes["heads"], 11, sizes["width"]), sizes["dtype"])
    key = jax.ShapeDtypeStruct((B, K, sizes["keys"], sizes["width"]), sizes.get("others", sizes["dtype"]))
    arrays = query, key, key
    with pytest.raises(NotImplementedError, match=f"backend '{backend}' cannot serve this call: .*{reason}"):
        explain(*arrays, backend=backend, **options)
    assert explain(*arrays, **options).backend in registry.BACKENDS


def test_before_hopper_cudnn_takes_heads_half_as_wide(monkeypatch, hopper):
    whole, half, odd = ([jax.ShapeDtypeStruct((B, T, width), "bfloat16")] * 3 for width in (256, 128, 136))
    assert explain(*whole, backend="cudnn").backend == "cudnn"
    monkeypatch.setattr(cudnn, "find_capability", lambda: (8, 9))
    assert explain(*half, backend="cudnn").backend == "cudnn"
    with pytest.raises(NotImplementedError, match="head widths up to 128 that 8 divides, got 136"):
        explain(*odd, backend="cudnn")


def test_what_came_with_hopper_and_new_versions_is_refused_by_their_names(monkeypatch, hopper):
    query = jax.ShapeDtypeStruct((B, H, T, D), "bfloat16")
    options = {"mask": masks.segments([0, 0, 0, 1, 1, 1, 1]), "backend": "cudnn"}
    assert explain(query, query, query, **options).backend == "cudnn"
    monkeypatch.setattr(hopper, "check_cudnn_version", lambda: 90500)
    with pytest.raises(NotImplementedError, match="for documents it needs cuDNN 90600, this is 90500"):
        explain(query, query, query, **options)
    monkeypatch.setattr(cudnn, "find_capability", lambda: (8, 9))
    with pytest.raises(NotImplementedError, match=r"needs compute capability 9.0, this is 8.9"):
        explain(query, query, query, **options)
    monkeypatch.setattr(hopper, "_dot_product_attention_fwd", lambda query, key, value: None)
    cudnn._inner.cache_clear()
    try:
        with pytest.raises(NotImplementedError, match="calls it in a way that is not known here"):
            explain(query, query, query, backend="cudnn")
    finally:
        cudnn._inner.cache_clear()


def test_a_precision_set_for_the_whole_program_counts_for_cudnn(hopper):
    query = jax.ShapeDtypeStruct((B, T, D), "bfloat16")
    refused = pytest.raises(NotImplementedError, match="precision asks for more")
    with jax.default_matmul_precision("float32"), refused:
        explain(query, query, query, backend="cudnn")


@pytest.mark.parametrize(
    ("options", "given", "reason"),
    [
        (lambda scale: {"scale": scale}, 0.5, "its scale is part of the program"),
        (lambda place: {"mask": masks.causal(), "query_offset": place}, 0, "not known until it runs"),
        (lambda ids: {"mask": masks.segments(ids)}, np.zeros(11, int), "ids are not known until it runs"),
        (lambda cap: {"score": scores.softcap(cap)}, 0.5, "cap of a softcap is part of its program"),
    ],
)
def test_what_is_traced_and_part_of_cudnns_program_is_refused(hopper, options, given, reason):
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in SQUARE]
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(lambda given, *a: attend(*a, backend="cudnn", **options(given)), given, *arrays)


def test_masked_nan_stays_out(hopper):
    """Of keys beyond a length, and of those after the last query, which cuDNN would multiply by 0."""
    query, key, value = draw(*SHAPES)
    bad = [jnp.asarray(array).at[:, :, 8:].set(jnp.nan) for array in (key, value)]
    for options in ({"mask": masks.lengths([8, 2])}, {"mask": masks.causal(), "query_offset": 0}):
        call = functools.partial(attend, query, backend="cudnn", **options)
        run = jax.jit(functools.partial(gradients, call))
        jax.tree.map(np.testing.assert_array_equal, run(*bad), run(key, value))


def test_the_device_chooses(monkeypatch, hopper):
    """On a GPU, cuDNN where it serves, then our kernel; elsewhere nobody hears of them unless they ask."""
    query, key, _ = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in WIDE)
    here = explain(query, key, key, mask=masks.causal())
    assert here.backend in registry.COMPLETE
    assert "cudnn" not in here.refusals
    monkeypatch.setattr(registry, "find_platform", lambda: Platform("gpu", ""))
    assert explain(query, key, key, mask=masks.causal()).backend == "cudnn"
    monkeypatch.setattr(mosaic_gpu, "_OLDEST", (0,))
    unknown = {"cudnn": "the mask has chunked(7), which it does not know"}
    own = explain(query, key, key, mask=masks.chunked(7))
    assert (own.backend, own.refusals) == ("mosaic_gpu", unknown)
    few = jax.ShapeDtypeStruct((*WIDE[0][:-2], 15, WIDE[0][-1]), "bfloat16")
    for rows, mask, reason in (
        (few, masks.chunked(7), "a block of it has 128 rows, and this call 15: it serves by name"),
        (query, ~masks.chunked(7), "it has not run 'not' over pairs on its device yet: it serves by name"),
    ):
        other = explain(rows, key, key, mask=mask, query_offset=0)
        assert other.backend in registry.COMPLETE
        assert other.refusals["mosaic_gpu"] == reason


def test_without_the_device_the_reason_is_told():
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in SQUARE]
    here = jax.default_backend()
    for backend, device in {"cudnn": "an NVIDIA GPU", "splash_tpu": "a TPU"}.items():
        if registry.PLATFORMS[backend] != here:
            with pytest.raises(NotImplementedError, match=f"needs {device}, and this call is for a {here}"):
                explain(*arrays, backend=backend)
