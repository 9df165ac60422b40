"""Library kernels in the place of ours: every transform, what is translated, what refused, what lowered."""

import functools
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from economy import mostly_slow
from regard import attend, explain, masks, scores
from regard.engine.backends import cudnn, kernel_primitives, splash_tpu
from regard.engine.backends.kernel_masks import read_kernel_mask, row_bounds
from regard.engine.call.canonicalization import canonicalize
from regard.engine.dispatch import registry

B, H, K, T, S, D = 2, 6, 3, 7, 11, 8


# A kernel with a gradient and nothing else, as libraries give them.


def _definition(query, key, value, keep):
    """Of matrices alone: what has more axes is a mistake, as it is for a library's kernel."""
    logits = jnp.einsum("td,sd->ts", query, key)
    return jnp.einsum("ts,sd->td", jax.nn.softmax(jnp.where(keep, logits, -1e9)), value)


@jax.custom_vjp
def _opaque(query, key, value, keep):
    return _definition(query, key, value, keep)


def _opaque_forward(*arrays):
    return _definition(*arrays), arrays


def _opaque_backward(arrays, pull):
    *grads, _ = jax.vjp(lambda q, k, v: _definition(q, k, v, arrays[3]), *arrays[:3])[1](pull), None
    return (*grads[0], None)


_opaque.defvjp(_opaque_forward, _opaque_backward)


@dataclass(frozen=True)
class Toy:
    """Doubles its gradient, if asked, so that one can see whose it is."""

    def call(self, query, key, value, *data):
        return _opaque(query, key, value, data[0])

    def reference(self, query, key, value, *data):
        return _definition(query, key, value, data[0])


def toy_inputs():
    rng = np.random.default_rng(5)
    arrays = [jnp.asarray(rng.normal(size=(n, 3)), jnp.float32) for n in (T, S, S)]
    return (*arrays, jnp.asarray(rng.random((T, S)) < 0.7))


ours = functools.partial(kernel_primitives.call_kernel, Toy())
TRANSFORMS = {
    "value": lambda f: f,
    "grad": lambda f: jax.grad(lambda q, k, v: (f(q, k, v) ** 2).sum(), (0, 1, 2)),
    "grad of one": lambda f: jax.grad(lambda q, k, v: (f(q, k, v) ** 2).sum(), 1),
    "jvp": lambda f: lambda q, k, v: jax.jvp(f, (q, k, v), (q + 1, k - 1, v * 2)),
    "jvp of one": lambda f: lambda q, k, v: jax.jvp(lambda k: f(q, k, v), (k,), (k - 1,)),
    "linearize": lambda f: lambda q, k, v: jax.linearize(f, q, k, v)[1](q, k, v),
    "transpose": lambda f: (
        lambda q, k, v: jax.linear_transpose(lambda pull: jax.vjp(lambda k: f(q, k, v), k)[1](pull)[0], q)(k)
    ),
    "checkpoint": lambda f: jax.grad(lambda q, k, v: (jax.checkpoint(f)(q, k, v) ** 2).sum(), (0, 2)),
    "hessian-vector": lambda f: (
        lambda q, k, v: jax.jvp(
            jax.grad(lambda q, k, v: (f(q, k, v) ** 3).sum(), (0, 1, 2)), (q, k, v), (q, k, v)
        )
    ),
    "reverse over reverse": lambda f: jax.grad(
        lambda q, k, v: (jax.grad(lambda q: (f(q, k, v) ** 3).sum())(q) ** 2).sum(), (0, 1, 2)
    ),
    "reverse over forward": lambda f: jax.grad(
        lambda q, k, v: (jax.jvp(f, (q, k, v), (q, k, v))[1] ** 2).sum(), (0, 1, 2)
    ),
}


@functools.cache
def transform_definition(name):
    *arrays, keep = toy_inputs()
    return jax.jit(TRANSFORMS[name](lambda *a: _definition(*a, keep)))(*arrays)


@pytest.mark.parametrize(
    ("name", "compiled"),
    mostly_slow(
        itertools.product(TRANSFORMS, [False, True]),
        ("grad", False),
        *((name, True) for name in TRANSFORMS),
    ),
)
def test_every_transform_of_a_kernel_that_knows_its_gradient_only(name, compiled):
    *arrays, keep = toy_inputs()
    wrap = jax.jit if compiled else lambda function: function
    got = wrap(TRANSFORMS[name](lambda *a: ours(*a, keep)))(*arrays)
    expected = transform_definition(name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected)


@pytest.mark.parametrize("name", ["value", "grad", "jvp", "hessian-vector", "reverse over forward"])
@pytest.mark.parametrize("inside", [pytest.param(False, marks=pytest.mark.slow), True])
def test_vmap_with_a_shared_operand_agrees_under_every_transform(name, inside):
    *arrays, keep = toy_inputs()
    many = [jnp.stack([arrays[0], arrays[0] * 2, -arrays[0]]), arrays[1], arrays[2]]
    transform = TRANSFORMS[name]

    def run(f, many):
        g = lambda *a: f(*a, keep)
        if inside and name in ("grad", "reverse over forward"):
            batched = jax.vmap(g, (0, None, None))
            return transform(batched)(*many)
        return jax.vmap(transform(g), (0, None, None))(*many)

    got, expected = run(ours, many), jax.jit(functools.partial(run, _definition))(many)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected)


def test_vmap_along_any_axis_and_within_another_is_a_loop_over_calls():
    query, key, value, keep = toy_inputs()
    queries = jnp.stack([query, -query], 1)
    keys = jnp.stack([key * scale for scale in (1, 2, -1, 0.5, -3)], 2)
    inner = jax.vmap(lambda query, key: ours(query, key, value, keep), (1, None))
    found = jax.jit(jax.vmap(inner, (None, 2)))(queries, keys)
    define = jax.jit(_definition)
    queries, keys = np.asarray(queries), np.asarray(keys)
    for j, i in np.ndindex(5, 2):
        expected = define(queries[:, i], keys[..., j], value, keep)
        np.testing.assert_allclose(found[j, i], expected, rtol=2e-5, atol=2e-5)


def test_values_without_a_gradient_save_nothing():
    *arrays, keep = toy_inputs()
    plain = str(jax.make_jaxpr(lambda *a: ours(*a, keep))(*arrays))
    assert "regard_plain_kernel" in plain
    assert "saving" not in plain
    graded = str(jax.make_jaxpr(jax.grad(lambda *a: ours(*a, keep).sum()))(*arrays))
    assert "regard_saving_kernel" in graded
    assert "regard_backward_kernel" in graded
    assert "tangent" not in graded


# cuDNN's calls: what they say, answered by jax.nn on CPU, and what they lower to.


@pytest.fixture
def hopper(monkeypatch):
    """As if a GPU were there that computes what jax.nn says cuDNN would."""
    monkeypatch.setattr(cudnn, "find_capability", lambda: (9, 0))
    monkeypatch.setattr(cudnn, "_library", lambda: functools.partial(cudnn.call_public, implementation="xla"))


@pytest.fixture
def interpreted(monkeypatch):
    """Splash attention in interpret mode, which runs anywhere."""
    monkeypatch.setattr(splash_tpu, "_INTERPRET", True)


def draw(*shapes, dtype="bfloat16"):
    rng = np.random.default_rng(11)
    return [jnp.asarray(rng.normal(size=shape).astype(jnp.dtype(dtype))) for shape in shapes]


SHAPES = ((B, H, T, D), (B, K, S, D), (B, K, S, D))
SQUARE = ((B, H, S, D), (B, K, S, D), (B, K, S, D))
SERVED = {
    "plain": (SHAPES, {}),
    "one head": (((T, D), (S, D), (S, D)), {}),
    "three leading axes": (((2, 1, H, T, D), (3, K, S, D), (2, 3, K, S, D)), {}),
    "causal": (SQUARE, {"mask": masks.causal()}),
    "causal, more keys": (SHAPES, {"mask": masks.causal(), "query_offset": 0}),
    "last query": (((B, H, 1, D), *SHAPES[1:]), {"mask": masks.causal(), "query_offset": S - 1}),
    "window": (SQUARE, {"mask": masks.sliding_window(3)}),
    "causal and window": (SQUARE, {"mask": masks.causal() & masks.sliding_window(4, 2)}),
    "wide window": (SQUARE, {"mask": masks.sliding_window(90, 90)}),
    "lengths": (SHAPES, {"mask": masks.lengths([5, 11])}),
    "an empty row": (SHAPES, {"mask": masks.lengths([0, 3])}),
    "causal and lengths": (SQUARE, {"mask": masks.causal() & masks.lengths([5, 1])}),
    "one length": (SHAPES, {"mask": masks.prefix(4)}),
    "scale": (SHAPES, {"scale": 0.7}),
}
SPLASHED = {
    **SERVED,
    "both ways": (SQUARE, {"mask": masks.sliding_window(2, 3)}),
    "documents": (SQUARE, {"mask": masks.segments([[7, 7, 7, -5, -5, 3, 3, 3, 3, 3, 0]]) & masks.causal()}),
    "wide values": (((B, H, T, D), (B, K, S, D), (B, K, S, 13)), {}),
}
# 9 bits and their sums; weights and the scaled query are rounded before they are multiplied.
CLOSE = {"rtol": 0.03, "atol": 0.03}


def _vjp(call, arrays, cotangent):
    """The output and the gradients of arrays, as one program."""

    @jax.jit
    def run(arrays, cotangent):
        output, pull = jax.vjp(call, *arrays)
        return output, pull(cotangent)

    return run(arrays, cotangent)


def check(backend, shapes, options):
    """Output and gradients against float64."""
    arrays = draw(*shapes)
    call = functools.partial(attend, backend=backend, **options)
    cotangent = np.random.default_rng(2).normal(size=jax.eval_shape(call, *arrays).shape)
    cotangent = jnp.asarray(cotangent.astype(arrays[0].dtype))
    output, grads = _vjp(call, arrays, cotangent)
    keep, mask = None, options.get("mask")
    if mask is not None:
        sizes = {"query_offset": options.get("query_offset"), "leading_axes": output.ndim - 2}
        keep = np.asarray(mask.dense(output.shape[-2], shapes[1][-2], **sizes))
    exact = [np.asarray(array, np.float64) for array in (*arrays, cotangent)]
    truth = oracle.batched(*exact[:3], keep, scale=options.get("scale"), cotangent=exact[3])
    np.testing.assert_allclose(np.asarray(output, np.float64), truth.output, **CLOSE)
    for got, want in zip(grads, (truth.d_query, truth.d_key, truth.d_value), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0.06, atol=0.06)


@pytest.mark.parametrize("name", SERVED)
def test_what_cudnn_is_asked_means_the_same(hopper, name):
    # jax.nn's own lowering on CPU, which stands in here, promotes.
    with jax.numpy_dtype_promotion("standard"):
        check("cudnn", *SERVED[name])


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no NVIDIA GPU")
@pytest.mark.parametrize("name", SERVED)
def test_cudnn_itself_agrees_with_the_definition(name):
    check("cudnn", *SERVED[name])


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        SPLASHED,
        "three leading axes",
        "both ways",
        "documents",
        "causal and lengths",
        "wide values",
        "an empty row",
    ),
)
def test_splash_attention_agrees_in_interpret_mode(interpreted, name):
    check("splash_tpu", *SPLASHED[name])


def test_splash_attention_takes_any_number_for_a_document(interpreted):
    """The least of all numbers, too, which marks the keys that fill up the last tile."""
    arrays, mask = draw(*SQUARE), masks.segments([5] * 4 + [np.iinfo(np.int32).min] * 7)
    truth = oracle.batched(*arrays, np.asarray(mask.dense(S)))
    output = np.asarray(attend(*arrays, mask=mask, backend="splash_tpu"), np.float64)
    np.testing.assert_allclose(output, truth.output, **CLOSE)


def check_moves(backend, shapes, options):
    """The tangent of the output, which is Regard's part, against differences in float64."""
    arrays = draw(*shapes, *shapes)
    call = functools.partial(attend, backend=backend, **options)
    found = jax.jit(lambda *arrays: jax.jvp(call, arrays[:3], arrays[3:])[1])(*arrays)
    keep = np.asarray(options["mask"].dense(shapes[0][-2], shapes[1][-2], leading_axes=2))
    exact = [np.asarray(array, np.float64) for array in arrays]
    ahead, behind = (
        oracle.batched(
            *(array + step * move for array, move in zip(exact[:3], exact[3:], strict=True)),
            keep,
            scale=options["scale"],
        ).output
        for step in (1e-5, -1e-5)
    )
    np.testing.assert_allclose(np.asarray(found, np.float64), (ahead - behind) / 2e-5, rtol=0.06, atol=0.06)


def test_forward_mode_of_cudnn_is_that_of_the_same_call(hopper):
    options = {"mask": masks.causal() & masks.lengths([5, 11]), "scale": 0.7}
    with jax.numpy_dtype_promotion("standard"):
        check_moves("cudnn", SQUARE, options)


def test_forward_mode_of_splash_attention_is_that_of_the_same_call(interpreted):
    check_moves("splash_tpu", SQUARE, {"mask": masks.sliding_window(1, 4), "scale": 0.7})


ALIGNED = {
    "a window after the first key": (SHAPES, {"mask": masks.sliding_window(5), "query_offset": 4}),
    "a window that leaves out one key of the last query": (SHAPES, {"mask": masks.sliding_window(T - 2)}),
    "lengths of keys that were moved": (SHAPES, {"mask": masks.lengths([5, 12]), "key_offset": 3}),
    "lengths of the first of two batch axes": (
        ((2, 3, H, T, D), (3, K, S, D), (2, 3, K, S, D)),
        {"mask": masks.lengths([5, 2])},
    ),
}


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


def test_of_two_bounds_a_kernel_would_be_told_one():
    mask = masks.lengths([9, 3]) & masks.prefix(5)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES]
    assert (
        read_kernel_mask(canonicalize(*arrays, mask=mask)) == "the mask has prefix(5), which it does not know"
    )


def lower_for_cuda(function, *arrays):
    """The program for an NVIDIA GPU, which lowering alone needs none for."""
    # Under shard_map, as JAX's wrapper asks for devices otherwise.
    whole = jax.sharding.PartitionSpec()
    mesh = jax.make_mesh((1,), ("one",))
    specs = {"in_specs": (whole,) * len(arrays), "out_specs": whole}
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, **specs))
    return mapped.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def cuda(monkeypatch):
    """JAX's wrapper, as if it had found cuDNN on Hopper."""
    inner = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(cudnn, "find_capability", lambda: (9, 0))
    monkeypatch.setattr(inner, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(inner, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(inner, "is_cuda_compute_capability_equal", lambda capability: False)


WIDE = ((2, 8, 256, 64), (2, 2, 256, 64), (2, 2, 256, 64))
PROGRAMS = {
    "plain": ({}, "NO_MASK", 0),
    "causal": ({"mask": masks.causal()}, "CAUSAL", 0),
    # A window alone is causal for us; cuDNN counts the query's own key.
    "window": ({"mask": masks.sliding_window(100)}, "CAUSAL", 101),
    "lengths": ({"mask": masks.lengths([3, 256])}, "PADDING", 0),
    "causal and lengths": ({"mask": masks.causal() & masks.lengths([3, 0])}, "PADDING_CAUSAL", 0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_for_a_gpu_calls_cudnn_once_each_way(cuda, name):
    options, mask_type, window = PROGRAMS[name]
    call = lambda *arrays: attend(*arrays, backend="cudnn", **options)
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in (*WIDE, WIDE[0])]
    program = lower_for_cuda(lambda *a: jax.vjp(call, *a[:3])[1](a[3]), *arrays)
    for target in ("fmhaSoftmax(", "fmhaSoftmaxBackward("):
        assert program.count(f"@__cudnn${target}") == 1
    assert program.count(f"mask_type\\22: \\22{mask_type}\\22") == 2
    assert program.count(f"sliding_window_length\\22: {window},") == 2
    assert "while" not in program
    assert "x256x256x" not in program, "an array over queries and keys"
    # Heads stand first in Regard and in what cuDNN is given: nothing is rearranged.
    moves = [line for line in program.splitlines() if "stablehlo.transpose" in line]
    assert all("dims = [0, 1, 2, 3]" in line for line in moves)


REFUSED = {
    "float32": ({"dtype": "float32"}, {}, "bfloat16 or float16 alone, got float32"),
    "width": ({"width": 12}, {}, "that 8 divides, got 12"),
    "too wide": ({"width": 512}, {}, "up to 256"),
    "after": ({}, {"mask": masks.sliding_window(3, 3)}, "no band of 3 keys before to 3 after"),
    "other diagonal": ({"keys": 13}, {"mask": masks.causal(), "query_offset": 2}, "no band"),
    "fewer keys": ({"keys": 5}, {"mask": masks.causal(), "query_offset": 0}, "no more queries than keys"),
    "documents": ({}, {"mask": masks.segments(jnp.zeros(11, jnp.int32))}, "no segments"),
    "either": ({}, {"mask": masks.causal() | masks.prefix(3)}, "which it does not know"),
    "chunks": ({}, {"mask": masks.causal() & masks.chunked(4)}, r"has chunked\(4\)"),
    "lengths in a window": ({}, {"mask": masks.sliding_window(3) & masks.lengths([2, 3])}, "not both"),
    "lengths of heads": ({}, {"mask": masks.lengths(jnp.ones((2, 6), jnp.int32))}, "differ between heads"),
    "score": ({}, {"score": scores.softcap(3.0)}, "no score functions"),
    "bias": ({}, {"bias": jnp.zeros((11, 11))}, "NaN"),
    "sinks": ({}, {"sinks": jnp.zeros(6)}, "no sinks"),
    "statistics": ({}, {"aux": ("lse",)}, "no statistics"),
    "dropout": ({}, {"dropout_rate": 0.1, "rng": jax.random.key(0)}, "another pattern"),
    "precision": ({}, {"precision": "highest"}, "asks for more"),
    "nothing": ({"keys": 0}, {}, "nothing to compute"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cudnn_would_answer_otherwise_is_refused(hopper, name):
    changed, options, reason = REFUSED[name]
    width, keys = changed.get("width", D), changed.get("keys", 11)
    arrays = draw((B, H, 11, width), (B, K, keys, width), (B, K, keys, width))
    arrays = [array.astype(changed.get("dtype", "bfloat16")) for array in arrays]
    with pytest.raises(NotImplementedError, match=f"backend 'cudnn' cannot serve this call: .*{reason}"):
        attend(*arrays, backend="cudnn", **options)
    assert np.isfinite(attend(*arrays, **{**options, "aux": ()})).all()


def test_before_hopper_cudnn_takes_heads_half_as_wide(monkeypatch, hopper):
    whole, half, odd = ([jax.ShapeDtypeStruct((B, T, width), "bfloat16")] * 3 for width in (256, 128, 136))
    assert explain(*whole, backend="cudnn").backend == "cudnn"
    monkeypatch.setattr(cudnn, "find_capability", lambda: (8, 9))
    assert explain(*half, backend="cudnn").backend == "cudnn"
    with pytest.raises(NotImplementedError, match="head widths up to 128 that 8 divides, got 136"):
        explain(*odd, backend="cudnn")


def test_cudnn_takes_one_dtype_for_all_arrays(hopper):
    query, other = (jax.ShapeDtypeStruct((B, T, D), dtype) for dtype in ("bfloat16", "float16"))
    assert explain(other, other, other, backend="cudnn").backend == "cudnn"
    with pytest.raises(NotImplementedError, match="bfloat16 or float16 alone, got bfloat16, float16"):
        explain(query, other, other, backend="cudnn")


def test_a_precision_set_for_the_whole_program_counts_for_cudnn(hopper):
    query = jax.ShapeDtypeStruct((B, T, D), "bfloat16")
    with (
        jax.default_matmul_precision("float32"),
        pytest.raises(NotImplementedError, match="precision='float32' asks for more"),
    ):
        explain(query, query, query, backend="cudnn")


def test_a_traced_scale_or_offset_is_refused(hopper):
    arrays = draw(*SQUARE)
    with pytest.raises(NotImplementedError, match="its scale is part of the program"):
        jax.jit(lambda scale: attend(*arrays, scale=scale, backend="cudnn"))(0.5)
    with pytest.raises(NotImplementedError, match="not known until it runs"):
        jax.jit(lambda p: attend(*arrays, mask=masks.causal(), query_offset=p, backend="cudnn"))(0)
    with pytest.raises(NotImplementedError, match="offsets that are arrays"):
        attend(*arrays, mask=masks.causal(), query_offset=jnp.array([0, 1]), backend="cudnn")


def test_masked_nan_stays_out(hopper):
    """Of keys beyond a length, and of those after the last query, which cuDNN would multiply by 0."""
    query, key, value = draw(*SHAPES)
    bad = [jnp.asarray(array).at[:, :, 8:].set(jnp.nan) for array in (key, value)]
    with jax.numpy_dtype_promotion("standard"):
        for options in ({"mask": masks.lengths([8, 2])}, {"mask": masks.causal(), "query_offset": 0}):
            call = functools.partial(attend, query, backend="cudnn", **options)
            expected, pull = jax.vjp(call, key, value)
            output, pull_bad = jax.vjp(call, *bad)
            np.testing.assert_array_equal(output, expected)
            for got, want in zip(pull_bad(output), pull(output), strict=True):
                np.testing.assert_array_equal(got, want)


def test_lengths_never_reach_beyond_the_keys_that_are_left(monkeypatch, hopper):
    """A causal call with more keys than queries leaves the last keys out."""
    seen = []

    def library(query, key, value, lengths, *rest):
        seen.append((lengths, key.shape[2]))
        return cudnn.call_public(query, key, value, lengths, *rest, implementation="xla")

    monkeypatch.setattr(cudnn, "_library", lambda: library)
    kernel = cudnn.Cudnn(1.0, True, None)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        kernel.call(*draw((B, H, T, D), (B, K, T, D), (B, K, T, D)), jnp.array([S, 0], jnp.int32))
    ((lengths, keys),) = seen
    assert keys == T
    np.testing.assert_array_equal(lengths, [T, 1])
    with jax.numpy_dtype_promotion("standard"):
        options = {"mask": masks.causal() & masks.lengths([S, 3]), "query_offset": 0}
        check("cudnn", SHAPES, options)


def test_the_device_chooses(monkeypatch, hopper):
    """On a GPU, cuDNN where it serves; elsewhere nobody hears of it unless they ask."""
    query, key, _ = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in WIDE)
    here = explain(query, key, key, mask=masks.causal())
    assert here.backend in registry.COMPLETE
    assert "cudnn" not in here.refusals
    monkeypatch.setattr(registry.jax, "default_backend", lambda: "gpu")
    assert explain(query, key, key, mask=masks.causal()).backend == "cudnn"
    other = explain(query, key, key, mask=masks.chunked(7))
    assert other.backend in registry.COMPLETE
    assert other.refusals == {"cudnn": "the mask has chunked(7), which it does not know"}


def test_without_the_device_the_reason_is_told():
    arrays = draw(*SQUARE)
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU, and JAX computes on cpu here"):
            attend(*arrays, backend="cudnn")
    if jax.default_backend() != "tpu":
        with pytest.raises(NotImplementedError, match="needs a TPU, and JAX computes on"):
            attend(*arrays, backend="splash_tpu")


def test_splash_attention_refuses_what_it_was_not_checked_for(interpreted):
    arrays = draw(*SQUARE)
    for options, reason in (
        ({"score": scores.softcap(3.0)}, "takes none here"),
        ({"mask": masks.sliding_window(3) & masks.lengths([3, 4])}, "not both"),
        ({"mask": masks.segments([0] * 11, [1] * 11)}, "rows without a key"),
        ({"precision": "highest"}, "asks for more"),
        ({"mask": masks.causal(), "query_offset": -2}, "rows without a key"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            attend(*arrays, backend="splash_tpu", **options)
    query, key, value = arrays
    few = key[:, :, :5], value[:, :, :5]
    with pytest.raises(NotImplementedError, match="no more queries than keys"):
        attend(query, *few, mask=masks.causal(), query_offset=0, backend="splash_tpu")
    with pytest.raises(NotImplementedError, match="no query that several heads share"):
        attend(query[:, :1], key, value, backend="splash_tpu")
    with pytest.raises(NotImplementedError, match="takes bfloat16"):
        attend(*(array.astype("float32") for array in arrays), backend="splash_tpu")
