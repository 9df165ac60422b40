"""Library kernels in the place of ours: every transform, what is translated, what refused, what lowered."""

import functools
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_model
import oracle
from economy import mostly_slow
from regard import attend, explain, masks, scores
from regard.engine.backends import cudnn, kernel_primitives, splash_tpu
from regard.engine.backends.kernel_masks import read_kernel_mask, row_bounds
from regard.engine.call.canonicalization import canonicalize
from regard.engine.dispatch import registry

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

    def backward(self, query, key, value, data, *found):
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


def plain(*operands):
    return kernel_primitives.plain_p.bind(*operands, spec=kernel_primitives.Spec(Toy()))[0]


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


def agree(got, expected):
    def one(a, b):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * max(1, np.abs(b).max()))

    jax.tree.map(one, got, expected)


@functools.cache
def transform_definition(name):
    *arrays, keep = toy_inputs()
    return jax.jit(TRANSFORMS[name](lambda *a: theirs(*a, keep)))(*arrays)


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
    agree(got, expected)


def test_a_gradient_of_lse_that_no_column_is_left_for_is_that_of_the_definition():
    *arrays, keep = toy_inputs()
    narrow = functools.partial(ours, kernel=Toy(widest=3))
    got = jax.jit(TRANSFORMS["grad"](lambda *a: narrow(*a, keep)))(*arrays)
    expected = transform_definition("grad")
    agree(got, expected)


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

    got, expected = run(ours, many), jax.jit(functools.partial(run, theirs))(many)
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
        expected = define(queries[:, i], keys[..., j], value, keep)
        agree(found[j, i], expected)


def test_values_without_a_gradient_save_nothing():
    *arrays, keep = toy_inputs()
    found = str(jax.make_jaxpr(lambda *a: plain(*a, keep))(*arrays))
    assert "regard_plain_kernel" in found
    assert "saving" not in found
    graded = str(jax.make_jaxpr(jax.grad(lambda *a: plain(*a, keep).sum()))(*arrays))
    assert "regard_saving_kernel" in graded
    assert "regard_backward_kernel" in graded
    assert "of_lse=True" not in graded
    assert "tangent" not in graded


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
    "documents": (SQUARE, {"mask": masks.segments([[7, 7, 7, -5, -5, 3, 3, 3, 3, 3, 0], [4] * 11])}),
    "causal documents": (SQUARE, {"mask": masks.segments([7] * 3 + [-5] * 2 + [3] * 6) & masks.causal()}),
}
SPLASHED = {
    **SERVED,
    "both ways": (SQUARE, {"mask": masks.sliding_window(2, 3)}),
    "documents again": (SQUARE, {"mask": masks.segments([0, 1, 0, 2, 2, 1, 0, 0, 5, 5, 1])}),
    "documents of other keys": (SHAPES, {"mask": masks.segments([0, 1, 2, 3, 9, 9, 3], [3, 2] * 5 + [0])}),
    "a window of lengths": (SQUARE, {"mask": masks.sliding_window(3) & masks.lengths([2, 9])}),
    "documents of lengths": (SQUARE, {"mask": masks.segments([0] * 4 + [1] * 7) & masks.lengths([6, 3])}),
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


def define(query, key, value, keep, *, scale, cap, sinks, pull, lse_pull):
    """Output, lse, gradients of query, key, value and sinks, of the sum of both times what is pulled."""
    group = query.shape[1] // key.shape[1]
    keys, values = (np.repeat(array, group, 1) for array in (key, value))
    raw = scale * query @ np.swapaxes(keys, 2, 3)
    slope = 1.0
    if cap is not None:
        raw = cap * np.tanh(raw / cap)
        slope = 1 - (raw / cap) ** 2
    weights = np.where(keep, np.exp(raw), 0)
    total = weights.sum(-1) + (0 if sinks is None else np.exp(sinks)[:, None])
    with np.errstate(divide="ignore", invalid="ignore"):
        lse, weights = np.log(total), np.where(total[..., None] > 0, weights / total[..., None], 0)
    output = weights @ values
    rest = lse_pull - (output * pull).sum(-1)
    change = weights * (pull @ np.swapaxes(values, 2, 3) + rest[..., None]) * slope * scale
    of_keys = np.swapaxes(change, 2, 3) @ query, np.swapaxes(weights, 2, 3) @ pull
    d_key, d_value = (array.reshape((len(key), -1, group, *array.shape[2:])).sum(2) for array in of_keys)
    d_sinks = None if sinks is None else (np.exp(sinks[:, None] - lse) * rest).sum((0, 2))
    return output, lse, (change @ keys, d_key, d_value, d_sinks)


MORE = {
    "lse": (SHAPES, {}),
    "lse of lengths": (SHAPES, {"mask": masks.lengths([0, 3])}),
    "lse of documents": (
        SQUARE,
        {"mask": masks.segments([[4] * 11, [7] * 3 + [5] * 2 + [3] * 6]) & masks.causal()},
    ),
    "lse of three numbers": (((B, H, T, 24), (B, K, S, 24), (B, K, S, 24)), {}),
    "sinks": (SQUARE, {"mask": masks.sliding_window(3), "sinks": True}),
    "sinks of lengths": (SHAPES, {"mask": masks.lengths([0, 3]), "sinks": True}),
    "softcap": (SQUARE, {"mask": masks.causal(), "score": scores.softcap(0.7)}),
    "softcap and sinks": (SQUARE, {"mask": masks.causal(), "score": scores.softcap(0.7), "sinks": True}),
}


def check_lse(backend, shapes, options):
    """Output, lse and gradients of both, against float64."""
    options = {"scale": 0.4} | options
    arrays = draw(*shapes)
    sinks = jnp.linspace(-1.0, 2.0, H) if options.pop("sinks", False) else None
    rng = np.random.default_rng(2)
    pull = jnp.asarray(rng.normal(size=(*shapes[0][:3], shapes[2][-1])), "bfloat16")
    lse_pull = jnp.asarray(3 * rng.normal(size=shapes[0][:3]), "float32")

    @jax.jit
    def run(arrays, sinks, pull, lse_pull):
        call = lambda q, k, v, sinks: attend(q, k, v, sinks=sinks, backend=backend, aux=("lse",), **options)
        (output, aux), back = jax.vjp(call, *arrays, sinks)
        return output, aux["lse"], back((pull, {"lse": lse_pull}))

    output, lse, grads = run(arrays, sinks, pull, lse_pull)
    keep, score = np.ones((shapes[0][2], shapes[1][2]), bool), options.get("score")
    if "mask" in options:
        keep = np.asarray(options["mask"].dense(*keep.shape, leading_axes=2))
    exact = [np.asarray(array, np.float64) for array in (*arrays, pull, lse_pull)]
    want = define(
        *exact[:3],
        keep,
        scale=options["scale"],
        cap=None if score is None else float(score.cap),
        sinks=None if sinks is None else np.asarray(sinks, np.float64),
        pull=exact[3],
        lse_pull=np.where(keep.any(-1) if sinks is None else True, exact[4], 0),
    )
    np.testing.assert_allclose(np.asarray(output, np.float64), want[0], **CLOSE)
    np.testing.assert_allclose(lse, want[1], rtol=2e-2, atol=2e-2)
    for got, one in zip(grads, want[2], strict=True):
        if one is not None:
            np.testing.assert_allclose(np.asarray(got, np.float64), one, rtol=0.06, atol=0.1)


def takes(inner, options):
    return "score" not in options or cudnn._takes_scores(inner)


@pytest.mark.parametrize("name", mostly_slow(MORE, "lse of lengths", "sinks", "softcap"))
def test_lse_sinks_and_softcap_of_cudnn_and_their_gradients(hopper, name):
    shapes, options = MORE[name]
    if not takes(hopper, options):
        with pytest.raises(NotImplementedError, match="gives it no score functions"):
            check_lse("cudnn", shapes, options)
    else:
        check_lse("cudnn", shapes, options)


@pytest.mark.parametrize("name", mostly_slow(MORE, "softcap and sinks"))
def test_lse_sinks_and_softcap_of_splash_attention_and_their_gradients(interpreted, name):
    check_lse("splash_tpu", *MORE[name])


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no NVIDIA GPU")
@pytest.mark.parametrize("name", MORE)
def test_lse_of_cudnn_itself_agrees_with_the_definition(name):
    shapes, options = MORE[name]
    if not takes(cudnn._inner(), options):
        pytest.skip("no score functions in this JAX")
    check_lse("cudnn", shapes, options)


@pytest.mark.parametrize("name", mostly_slow(SERVED, *SERVED.keys() - {"causal documents"}))
def test_what_cudnn_is_asked_means_the_same(hopper, name):
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
        "causal and lengths",
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
    check_moves("cudnn", SQUARE, options)


def test_forward_mode_of_splash_attention_is_that_of_the_same_call(interpreted):
    check_moves("splash_tpu", SQUARE, {"mask": masks.sliding_window(1, 4), "scale": 0.7})


ALIGNED = {
    "a window after the first key": (SHAPES, {"mask": masks.sliding_window(5), "query_offset": 4}),
    "a window that leaves out one key of the last query": (SHAPES, {"mask": masks.sliding_window(T - 2)}),
    "lengths beyond all keys that were moved": (
        SHAPES,
        {"mask": masks.lengths(np.array([2**31 - 1, 3], np.int64)), "key_offset": -3},
    ),
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


WIDE = ((2, 8, 256, 64), (2, 2, 256, 64), (2, 2, 256, 64))
PROGRAMS = {
    "plain": ({}, "NO_MASK", 0),
    "causal": ({"mask": masks.causal()}, "CAUSAL", 0),
    # A window alone is causal for us; cuDNN counts the query's own key.
    "window": ({"mask": masks.sliding_window(100)}, "CAUSAL", 101),
    "lengths": ({"mask": masks.lengths([3, 256])}, "PADDING", 0),
    "causal and lengths": ({"mask": masks.causal() & masks.lengths([3, 0])}, "PADDING_CAUSAL", 0),
    "sinks": ({"mask": masks.sliding_window(100), "sinks": np.ones(8, np.float32)}, "CAUSAL", 101),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_for_a_gpu_calls_cudnn_once_each_way(hopper, name):
    options, mask_type, window = PROGRAMS[name]
    call = lambda *arrays: attend(*arrays, backend="cudnn", **options)
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in (*WIDE, WIDE[0])]
    program = lower_for_cuda(lambda *a: jax.vjp(call, *a[:3])[1](a[3]), *arrays)
    for target in ("fmhaSoftmax(", "fmhaSoftmaxBackward("):
        assert program.count(f"@__cudnn${target}") == 1
    assert program.count(f"mask_type\\22: \\22{mask_type}\\22") == 2
    assert program.count(f"sliding_window_length\\22: {window},") == 2
    assert "while" not in program
    assert "x72x" not in program, "columns for the gradient of lse"
    assert "x256x256x" not in program, "an array over queries and keys"
    assert not moves_of(program)


def moves_of(program):
    """What is rearranged: nothing, as heads stand first in Regard and in what cuDNN is given."""
    moves = [line for line in program.splitlines() if "stablehlo.transpose" in line]
    return [line for line in moves if "dims = [0, 1, 2, 3]" not in line and "x1x" not in line]


PARTS = masks.segments(np.repeat([4, 2, 9], [100, 1, 155])) & masks.causal()
LSE_PROGRAMS = {
    # Columns for the gradient of lse; the softcap's is Regard's.
    "lse": ({}, "<2x8x256x72xbf16>", "max_seg_per_batch\\22: 1", 1),
    "documents": ({"mask": PARTS}, "<16x256x1x72xbf16>", "max_seg_per_batch\\22: 3", 1),
    "softcap": ({"score": scores.softcap(30.0)}, None, "called_computations = [@softcap]", 0),
}


@pytest.mark.parametrize("name", LSE_PROGRAMS)
def test_the_program_of_lse_calls_cudnn_once_each_way(hopper, name):
    options, columns, told, backward = LSE_PROGRAMS[name]
    if not takes(hopper, options):
        pytest.skip("no score functions in this JAX")

    def run(query, key, value, pull, lse_pull):
        call = lambda *arrays: attend(*arrays, backend="cudnn", aux=("lse",), **options)
        (output, aux), back = jax.vjp(call, query, key, value)
        return output, aux["lse"], back((pull, {"lse": lse_pull}))

    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in (*WIDE, WIDE[0])]
    program = lower_for_cuda(run, *arrays, jax.ShapeDtypeStruct(WIDE[0][:3], "float32"))
    calls = {way: [] for way in ("fmhaSoftmax(", "fmhaSoftmaxBackward(")}
    for line in program.splitlines():
        for way, found in calls.items():
            found += [line] if f"@__cudnn${way}" in line else []
    assert [len(found) for found in calls.values()] == [1, backward]
    assert all(told in line for found in calls.values() for line in found)
    if backward:
        (line,) = calls["fmhaSoftmaxBackward("]
        assert line.count(columns) >= 4  # query, output and their cotangents
        assert "x256x256x" not in program, "an array over queries and keys"
        assert not moves_of(program)


def test_numbers_of_few_digits_hold_a_cotangent_together():
    exact = np.random.default_rng(4).normal(size=97).astype(np.float32) * np.logspace(-3, 3, 97)
    for dtype in ("bfloat16", "float16"):
        split = jax.jit(functools.partial(kernel_primitives._pieces, dtype=jnp.dtype(dtype)))
        parts = np.asarray(split(jnp.asarray(exact, "float32")), np.float64)
        scales = np.asarray(jnp.asarray(kernel_primitives._SCALES, dtype), np.float64)
        np.testing.assert_allclose(parts @ scales, exact, rtol=3e-7, atol=1e-8)


REFUSED = {
    "float32": ({"dtype": "float32"}, {}, "bfloat16 or float16 alone, got float32"),
    "width": ({"width": 12}, {}, "that 8 divides, got 12"),
    "too wide": ({"width": 512}, {}, "up to 256"),
    "after": ({}, {"mask": masks.sliding_window(3, 3)}, "no band of 3 keys before to 3 after"),
    "other diagonal": ({"keys": 13}, {"mask": masks.causal(), "query_offset": 2}, "no band"),
    "fewer keys": ({"keys": 5}, {"mask": masks.causal(), "query_offset": 0}, "no more queries than keys"),
    "documents again": ({}, {"mask": masks.segments([0, 1, 1, 0, 2, 2, 2, 2, 2, 2, 2])}, "in one piece"),
    "documents of queries": ({}, {"mask": masks.segments([0] * 11, [0] * 5 + [1] * 6)}, "same rows"),
    "documents moved": (
        {},
        {"mask": masks.segments([0] * 5 + [1] * 6), "query_offset": 2},
        "other rows than theirs",
    ),
    "documents in a window": (
        {},
        {"mask": masks.segments([0] * 5 + [1] * 6) & masks.sliding_window(3)},
        "not both",
    ),
    "either": ({}, {"mask": masks.causal() | masks.prefix(3)}, "which it does not know"),
    "chunks": ({}, {"mask": masks.causal() & masks.chunked(4)}, r"has chunked\(4\)"),
    "lengths in a window": ({}, {"mask": masks.sliding_window(3) & masks.lengths([2, 3])}, "not both"),
    "lengths of heads": ({}, {"mask": masks.lengths(jnp.ones((2, 6), jnp.int32))}, "differ between heads"),
    "score": ({}, {"score": scores.temperature(3.0)}, "softcap alone"),
    "two scores": ({}, {"score": [scores.softcap(3.0)] * 2}, "softcap alone"),
    "caps of heads": ({}, {"score": scores.softcap(jnp.arange(1.0, 7.0))}, "one cap for all heads"),
    "bias": ({}, {"bias": jnp.zeros((11, 11))}, "NaN"),
    "statistics": ({}, {"aux": ("lse", "entropy")}, "lse alone, aux asks for entropy"),
    "dropout": ({}, {"dropout_rate": 0.1, "rng": jax.random.key(0)}, "which no gradient could draw again"),
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
    with pytest.raises(NotImplementedError, match="ids are not known until it runs"):
        jax.jit(lambda ids: attend(*arrays, mask=masks.segments(ids), backend="cudnn"))(jnp.zeros(11, int))
    with pytest.raises(NotImplementedError, match="cap of a softcap is part of its program"):
        jax.jit(lambda cap: attend(*arrays, score=scores.softcap(cap), backend="cudnn"))(0.5)
    with pytest.raises(NotImplementedError, match="offsets that are arrays"):
        attend(*arrays, mask=masks.causal(), query_offset=jnp.array([0, 1]), backend="cudnn")


def test_masked_nan_stays_out(hopper):
    """Of keys beyond a length, and of those after the last query, which cuDNN would multiply by 0."""
    query, key, value = draw(*SHAPES)
    bad = [jnp.asarray(array).at[:, :, 8:].set(jnp.nan) for array in (key, value)]
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
    call = hopper._dot_product_attention_fwd

    @functools.wraps(call)
    def recorded(*arguments):
        seen.append((arguments[5], arguments[1].shape[2]))
        return call(*arguments)

    monkeypatch.setattr(hopper, "_dot_product_attention_fwd", recorded)
    kernel = cudnn.Cudnn(1.0, True, None, False, None, 256)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        kernel.forward(False, *draw((B, H, T, D), (B, K, T, D), (B, K, T, D)), jnp.array([S, 0], jnp.int32))
    ((lengths, keys),) = seen
    assert keys == T
    np.testing.assert_array_equal(lengths, [T, 1])
    check("cudnn", SHAPES, {"mask": masks.causal() & masks.lengths([S, 3]), "query_offset": 0})


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
        ({"score": scores.temperature(3.0)}, "softcap alone"),
        ({"aux": ("entropy",)}, "lse alone"),
        ({"bias": jnp.zeros((11, 11))}, "no bias"),
        ({"mask": masks.segments([0] * 5 + [1] * 6), "query_offset": 1}, "other rows than theirs"),
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
    with pytest.raises(NotImplementedError, match="no query that several heads share"):
        attend(query[0, 0], key[0], value[0], backend="splash_tpu")
    with pytest.raises(NotImplementedError, match="takes bfloat16"):
        attend(*(array.astype("float32") for array in arrays), backend="splash_tpu")
