"""One contract for every backend: values, statistics, gradients, empty rows, masked slots, dtypes, bits."""

import functools
import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from regard import attend, conformance, explain, masks, scores
from regard.conformance.ours import attend_by_keywords
from regard.engine.backends import cudnn, mosaic_gpu, splash_tpu
from regard.engine.call.canonicalization import AUX, canonicalize
from regard.engine.dispatch.registry import BACKENDS, COMPLETE, PLATFORMS


@dataclass(frozen=True)
class Case:
    """One call: shapes without the widths' names, and what else is passed."""

    query: tuple = (2, 3, 5, 7)
    key: tuple = (2, 3, 11, 7)
    value: tuple = (2, 3, 11, 13)
    mask: object = None
    offset: object = None
    bias: tuple | None = None
    bias_drops: bool = False
    size: float = 1.0
    dtype: str = "float32"
    one_hot: bool = False  # all but one weight of a row are nearly 0

    def arrays(self):
        rng = np.random.default_rng(7)
        draw = lambda shape: jnp.asarray((rng.normal(size=shape) * self.size).astype(self.dtype), self.dtype)
        query, key, value = draw(self.query), draw(self.key), draw(self.value)
        bias = None if self.bias is None else draw(self.bias)
        if self.bias_drops:
            bias = jnp.where(rng.random(self.bias) < 0.4, jnp.asarray(-jnp.inf, bias.dtype), bias)
        return query, key, value, bias

    def options(self):
        return {"mask": self.mask, "query_offset": self.offset}

    def leading(self):
        query, key, value = self.query[:-2], self.key[:-2], self.value[:-2]
        heads = max([shape[-1] for shape in (query, key, value) if shape], default=1)
        batch = np.broadcast_shapes(query[:-1], key[:-1], value[:-1])
        return (*batch, heads) if query or key or value else ()

    def keep(self):
        """The mask spelled out, for the oracle."""
        T, S, leading = self.query[-2], self.key[-2], self.leading()
        if self.mask is None:
            return None
        mask = self.mask if isinstance(self.mask, masks.Mask) else masks.from_array(self.mask)
        offset = 0 if self.offset is None and not mask.reads_positions else self.offset
        return np.asarray(mask.dense(T, S, query_offset=offset, leading_axes=len(leading)))


def parity(query, key):
    return (query + key) % 2 == 0


def holes(*shape):
    return np.random.default_rng(3).random(shape) < 0.5


# Shapes that are ours alone, with all statistics; what any function promises is in regard.conformance, masks,
# scores and the like are drawn at random in tests/programs, sizes stand in test_sizes.py.
CASES = {
    "rank 2": Case((5, 7), (11, 7), (11, 13)),
    "one of each": Case((1, 1), (1, 1), (1, 1), one_hot=True),
    "shared keys": Case((2, 3, 5, 7), (11, 7), (11, 13), masks.lengths([4, 0])),
    "keys and values broadcast apart": Case((3, 5, 7), (2, 1, 11, 7), (1, 3, 11, 13)),
    "three leading axes": Case((2, 3, 4, 5, 7), (3, 2, 11, 7), (2, 1, 2, 11, 13), masks.lengths([4, 0])),
    "causal with offsets by row": Case(mask=masks.causal(), offset=np.array([6, -2])),
    "stored by head": Case(mask=holes(3, 1, 11)),
    "chosen keys": Case(
        mask=masks.chosen_keys(np.random.default_rng(3).integers(-2, 12, (2, 1, 5, 4))), dtype="bfloat16"
    ),
    "all rows empty": Case(mask=~masks.causal() & masks.causal(), offset=0),
    "no keys, masked": Case((2, 3, 5, 7), (2, 3, 0, 7), (2, 3, 0, 13), masks.causal(), 0),
    "no batch": Case((0, 3, 5, 7), (0, 3, 11, 7), (0, 3, 11, 13)),
    "bfloat16, values shared by rows": Case(value=(3, 11, 13), dtype="bfloat16"),
    "bfloat16, width 16": Case((2, 6, 11, 16), *[(2, 3, 11, 16)] * 2, masks.causal(), dtype="bfloat16"),
    "float16, large scores": Case(mask=masks.causal(), offset=6, dtype="float16", size=30.0, one_hot=True),
    "float64": Case(mask=masks.causal(), offset=6, bias=(3, 5, 11), bias_drops=True, dtype="float64"),
}  # fmt: skip


def call(case, backend, arrays, aux=AUX):
    *operands, bias = arrays
    return attend(*operands, bias=bias, aux=aux, backend=backend, **case.options())


def problem_of(case, aux=()):
    *operands, bias = case.arrays()
    return canonicalize(*operands, bias=bias, aux=aux, **case.options())


def stats_of(case, backend):
    """All statistics, or none where the backend serves the call without them alone."""
    return AUX if backend in COMPLETE or BACKENDS[backend].refuses(problem_of(case, AUX)) is None else ()


def contract(test):
    """Run a test for every listed backend: who cannot serve must say why, the complete ones must serve."""

    @functools.wraps(test)
    def hold(backend, **arguments):
        try:
            test(backend=backend, **arguments)
        except NotImplementedError as refusal:
            assert backend not in COMPLETE, refusal
            opening, reason = str(refusal).split(": ", 1)
            assert opening == f"backend {backend!r} cannot serve this call"
            assert len(reason) > 30
            if PLATFORMS.get(backend, jax.default_backend()) != jax.default_backend():
                assert f"this call is for a {jax.default_backend()}" in reason

    return pytest.mark.parametrize("backend", BACKENDS)(hold)


def test_every_listed_backend_serves_cases_on_its_own_device(monkeypatch):
    monkeypatch.setattr(cudnn, "find_capability", lambda: (9, 0))
    monkeypatch.setattr(splash_tpu, "_INTERPRET", True)
    monkeypatch.setattr(mosaic_gpu, "_INTERPRET", True)
    monkeypatch.setattr(mosaic_gpu, "_OLDEST", (0,))
    for name, backend in BACKENDS.items():
        narrow = [case for case in CASES.values() if "float16" in case.dtype]
        with jax.default_matmul_precision("default"):
            served = [case for case in narrow if backend.refuses(problem_of(case)) is None]
        assert served, f"{name}: no case of the contract is one that it serves"


def test_attend_keeps_what_any_function_of_attention_promises():
    report = conformance.check(attend_by_keywords)
    assert not report.wrong, str(report)
    refusals = {row.promise: row.finding for row in report.rows if row.verdict == "refused"}
    # Where the lengths differ, nothing is guessed.
    assert set(refusals) == {"causal, T < S", "causal, T > S", "a window, T < S"}
    assert all(reason.startswith("ValueError: query_offset: ") for reason in refusals.values())
    assert all("reaches rows that may not attend to it" in convention for convention in report.conventions)
    assert report.count("holds") > 100
    assert not report.not_offered


@contract
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_definition(name, backend, request):
    case = CASES[name]
    if case.dtype == "float64":
        request.getfixturevalue("x64")
    arrays = case.arrays()
    query, key, value, bias = arrays
    shape = (*case.leading(), case.query[-2], case.value[-1])
    cotangent = np.random.default_rng(5).normal(size=shape).astype(np.float32)

    asked = stats_of(case, backend)

    @jax.jit
    def evaluate(arrays):
        """Return everything that is checked, of one program."""

        def weighed(arrays):
            output = call(case, backend, arrays, ())
            return jnp.sum(output * jnp.asarray(cotangent, query.dtype)), output

        (_, output), grads = jax.value_and_grad(weighed, has_aux=True)(arrays)
        return call(case, backend, arrays, asked) if asked else (output, {}), grads

    (output, aux), grads = evaluate(arrays)
    spelled = {"cotangent": jnp.asarray(cotangent, output.dtype), "keep": case.keep(), "bias": bias}
    assert output.shape == shape
    if 0 in shape[:-2]:
        return
    truth = oracle.batched(query, key, value, **spelled)
    working = np.float64 if case.dtype == "float64" else np.float32
    same = vars(oracle.batched(query, key, value, **spelled, dtype=working))

    assert output.dtype == query.dtype
    oracle.assert_as_exact(output, truth.output, same["output"], "output")
    if asked:
        assert aux["lse"].dtype == working
        np.testing.assert_array_equal(aux["argmax"], truth.argmax)
        for stat in ("weights", "scores", "lse", "max_score", "entropy"):
            assert aux[stat].shape == getattr(truth, stat).shape
            oracle.assert_as_exact(aux[stat], getattr(truth, stat), same[stat], stat, magnitude=1.0)
    for grad, part in zip(grads, ("d_query", "d_key", "d_value", "d_bias"), strict=True):
        if grad is not None:
            # Terms cancel along a row of scores.
            magnitude = 0.0 if part == "d_value" else same[f"{part}_terms"]
            if case.one_hot and backend != "dense":
                # A weight formed again from its score, not kept, carries that score's rounding.
                magnitude = max(magnitude, np.abs(same[part]).max()) * max(1.0, truth.max_score.max())
            oracle.assert_as_exact(grad, getattr(truth, part), same[part], part, magnitude)


POISON = {
    "lengths": Case(mask=masks.lengths([4, 0])),
    "causal": Case(mask=masks.causal(), offset=2),
    "grouped": Case((2, 6, 5, 7), (2, 3, 11, 7), (2, 3, 11, 13), masks.lengths([4, 0])),
    "keys shared by rows": Case((2, 3, 5, 7), (11, 7), (11, 13), masks.lengths([4, 2])),
    "stored": Case(mask=np.arange(11)[None] * np.array([1, 1, 0, 1, 1])[:, None] % 3 == 1),
    "bias": Case(bias=(1, 1, 1, 11), bias_drops=True),
}


@contract
@pytest.mark.parametrize("name", POISON)
def test_what_nobody_may_attend_to_changes_no_bit(name, backend):
    case = POISON[name]
    query, key, value, bias = case.arrays()
    keep = np.broadcast_to(True if case.mask is None else case.keep(), (*case.leading(), 5, 11))
    if bias is not None:
        keep = keep & (np.asarray(bias) != -np.inf)
    answers = keep.any(-2)
    if case.key[:-2] == ():
        answers = answers.any((0, 1))
    elif case.key[1] != answers.shape[1]:
        answers = answers.reshape(2, case.key[1], -1, 11).any(2)
    assert not answers.all(), "the case must leave a key that nobody may attend to"
    asks = keep.any(-1)

    @jax.jit
    def outcome(arrays):
        def loss(arrays):
            output, aux = call(case, backend, arrays, ("lse",))
            return jnp.sum(output**2) + jnp.sum(jnp.where(aux["lse"] > -jnp.inf, aux["lse"], 0.0))

        return *call(case, backend, arrays), jax.grad(loss)(arrays)

    clean = jax.tree.leaves(outcome((query, key, value, bias)))
    for poison in np.float32([np.nan, np.inf, -np.inf]):
        pairs = zip((query, key, value), (asks, answers, answers), strict=True)
        spoiled = [np.where(used[..., None], array, poison) for array, used in pairs]
        for dirty, expected in zip(jax.tree.leaves(outcome((*spoiled, bias))), clean, strict=True):
            np.testing.assert_array_equal(dirty, expected)


LARGE = {"temperature": scores.temperature(0.7), "softcap": scores.softcap(1e12)}
LARGE["modifier"] = scores.modifier(lambda s, b, h, q, k: s * 1.1)


@pytest.mark.parametrize("name", LARGE)
def test_large_finite_scores_without_a_mask_choose_their_largest(name):
    """A score's last product, fused with the difference to the peak, would not be rounded as the peak is."""
    rng = np.random.default_rng(1)
    query, key = (jnp.asarray(rng.normal(size=(2, 3, 37, 17)) * 1e5, jnp.float32) for _ in range(2))
    value = jnp.asarray(rng.normal(size=(2, 3, 37, 5)), jnp.float32)
    for x in (query, query[..., :1, :]):
        run = functools.partial(attend, x, key, value, score=LARGE[name], query_offset=0, aux=("argmax",))
        output, aux = run(backend="dense")
        chosen = np.take_along_axis(np.asarray(value), np.asarray(aux["argmax"])[..., None], -2)
        np.testing.assert_allclose(output, chosen, rtol=1e-5)
        np.testing.assert_allclose(run(backend="tiled")[0], chosen, rtol=1e-5)


@pytest.mark.parametrize("backend", COMPLETE)
def test_large_finite_scores_of_bfloat16_choose_their_largest(backend):
    """Their scale is such a product; the gradient of value is 1 where a query chose."""
    rng = np.random.default_rng(1)
    query, key, value = (jnp.asarray(rng.normal(size=(2, 3, 37, 17)), jnp.bfloat16) for _ in range(3))
    query = query * jnp.bfloat16(1e11)
    chosen = np.argmax(np.asarray(query, np.float64) @ np.asarray(key, np.float64).swapaxes(-1, -2), -1)
    counts = (chosen[..., None] == np.arange(37)).sum(-2)[..., None]

    @jax.jit
    def run(*arrays):
        output, vjp = jax.vjp(functools.partial(attend, backend=backend), *arrays)
        return output, vjp(jnp.ones_like(output))

    output, grads = run(query, key, value)
    np.testing.assert_array_equal(output, np.take_along_axis(np.asarray(value), chosen[..., None], -2))
    assert all(np.isfinite(np.asarray(grad, np.float32)).all() for grad in grads)
    np.testing.assert_array_equal(grads[2], np.broadcast_to(counts, value.shape))


@contract
def test_an_empty_row_is_zero_beside_rows_that_attend_to_nan(backend):
    query, key, value, _ = Case().arrays()
    mask = np.ones((5, 11), bool)
    mask[2] = False
    bad = key.at[..., 3, :].set(jnp.nan), value.at[..., 3, :].set(jnp.nan)

    @jax.jit
    def evaluate(query, bias):
        call = lambda query, bias, aux: attend(query, *bad, mask=mask, bias=bias, aux=aux, backend=backend)
        row = lambda query, bias: jnp.sum(call(query, bias, ())[:, :, 2])
        return call(query, None, AUX), jax.grad(row)(query, None), jax.grad(row, 1)(query, bias)

    (output, aux), d_query, d_bias = evaluate(query, jnp.zeros((5, 11)))
    assert not np.asarray(output)[:, :, 2].any()
    assert not np.asarray(aux["weights"])[:, :, 2].any()
    assert np.isnan(np.asarray(output)[:, :, 0]).all()
    assert not np.asarray(d_query)[:, :, 2].any()
    assert not np.asarray(d_bias)[2].any()


@contract
def test_statistics_have_gradients(backend, x64):
    """lse, entropy, max_score, scores and weights against central differences."""
    case = Case((2, 5, 7), (2, 11, 7), (2, 11, 3), masks.causal(), 6, dtype="float64")
    query, key, value, _ = case.arrays()
    names = "lse", "entropy", "max_score", "weights"
    moved = np.random.default_rng(2).normal(size=query.shape)

    @jax.jit
    def stats(query):
        options = {"mask": case.mask, "query_offset": 6, "aux": names, "backend": backend}
        aux = attend(query, key, value, **options)[1]
        return jnp.stack([jnp.sum(jnp.sin(aux[name])) for name in names])

    numeric = (stats(query + 1e-6 * moved) - stats(query - 1e-6 * moved)) / 2e-6
    exact = jnp.einsum("n...,...->n", jax.jit(jax.jacrev(stats))(query), moved)
    np.testing.assert_allclose(exact, numeric, rtol=1e-7, atol=1e-8)
    # An empty row's lse is -inf; its gradient is nevertheless zero, not NaN.
    lse = lambda q: attend(q, key, value, mask=masks.lengths([0, 3]), aux=("lse",), backend=backend)[1]["lse"]
    assert not np.asarray(jax.grad(lambda q: lse(q)[1].sum())(query))[0].any()
    # Also where what follows has none at -inf.
    mask, offset = masks.causal(), -1

    def waves(key):
        _, aux = attend(query, key, value, mask=mask, query_offset=offset, aux=("lse",), backend=backend)
        return jnp.sum(jnp.where(aux["lse"] > -jnp.inf, jnp.sin(aux["lse"]), 0))

    assert np.isfinite(jax.grad(waves)(key)).all()

    def lengths(key, value):
        output = attend(query, key, value, mask=mask, query_offset=offset, backend=backend)
        length = jnp.sqrt(jnp.sum(output**2, axis=-1, keepdims=True))
        return jnp.sum(jnp.where(length > 0, output / length, 0))

    for gradient in jax.grad(lengths, (0, 1))(key, value):
        assert np.isfinite(gradient).all()


@contract
def test_entropy_of_large_scores_keeps_its_digits_in_float32(backend):
    """Entropy by the difference lse - E[score] would lose three digits here."""
    query, key, value, _ = Case().arrays()
    _, aux = attend(query * 40, key * 40, value, aux=("entropy", "scores"), backend=backend)
    scores = np.asarray(aux["scores"], np.float64)
    assert np.abs(scores).max() > 2000
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(aux["entropy"], -(p * np.log(np.where(p > 0, p, 1))).sum(-1), atol=1e-6)


RETURNED = {"nothing": {}, "a mask": {"mask": masks.lengths([90, 0])}}


@contract
@pytest.mark.parametrize(
    ("options", "kind"), [("nothing", "float32"), ("nothing", "bfloat16"), ("a mask", "float32")]
)
def test_statistics_that_a_program_returns_change_no_bit_beside_them(options, kind, backend):
    """XLA makes one kernel of a call that nobody looks into, which rounds otherwise than several."""
    rng = np.random.default_rng(7)
    shapes = (2, 4, 131, 8), (2, 2, 127, 8), (2, 2, 127, 16), (2, 4, 131, 16)
    query, key, value, cotangent = (jnp.asarray(rng.standard_normal(shape), kind) for shape in shapes)

    @functools.partial(jax.jit, static_argnums=0)
    def step(aux, *arrays):
        def run(*arrays):
            found = attend(*arrays, aux=aux, backend=backend, **RETURNED[options])
            return found if aux else (found, {})

        output, pull, returned = jax.vjp(run, *arrays, has_aux=True)
        return (output, *pull(cotangent)), returned

    alone, _ = step((), query, key, value)
    for aux in ((), ("lse",), AUX):
        for found, expected in zip(step(aux, query, key, value)[0], alone, strict=True):
            np.testing.assert_array_equal(found, expected)


@contract
def test_inputs_of_two_dtypes_are_computed_in_the_wider_one(backend, x64):
    case = Case((3, 5, 7), (3, 11, 7), (3, 11, 13))
    for narrow, wide, allowed in (("bfloat16", "float32", 2e-6), ("float32", "float64", 1e-13)):
        arrays = [x.astype(dtype) for x, dtype in zip(case.arrays(), (wide, narrow, narrow), strict=False)]
        output, aux = attend(*arrays, aux=("lse",), backend=backend)
        truth = oracle.batched(*arrays)
        assert (output.dtype, aux["lse"].dtype) == (wide, wide)
        np.testing.assert_allclose(output, truth.output, rtol=allowed, atol=allowed)
        np.testing.assert_allclose(aux["lse"], truth.lse, rtol=allowed, atol=allowed)


@contract
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_where_integers_have_64_bits_every_option_keeps_its_dtypes(dtype, backend, x64):
    """One head, whose axis is summed away where a tile is written."""
    query, key, value, _ = replace(Case((2, 1, 11, 7), (2, 1, 11, 7), (2, 1, 11, 13)), dtype=dtype).arrays()
    keep = masks.causal() & masks.lengths(7) | masks.segments(np.arange(11) // 3) & masks.dilated(2)
    keep |= masks.chunked(4) & ~masks.sliding_window(1) | masks.prefix(1) | masks.global_tokens(1)
    keep &= masks.predicate(parity) | masks.from_array(holes(11, 11)) | masks.valid_keys(holes(11))
    table = jnp.ones((8, 1), jnp.float32)
    score = [scores.alibi(1), scores.softcap(2.0), scores.relative_bias(table), scores.temperature(0.7)]
    options = {
        "mask": keep, "bias": jnp.zeros((11, 11), dtype), "score": score, "scale": 0.3, "aux": AUX,
        "dropout_rate": 0.3, "rng": jax.random.key(0), "sinks": jnp.zeros(1, dtype), "query_offset": 2,
        "key_offset": 2,
    }  # fmt: skip

    def call(*arrays):
        return attend(*arrays, **options, backend=backend)

    def loss(*arrays):
        output, aux = call(*arrays)
        return jnp.sum(output).astype(jnp.float32) + jnp.sum(aux["entropy"]).astype(jnp.float32)

    arrays, grads = (query, key, value), jax.grad(loss, (0, 1, 2))
    output, aux = jax.eval_shape(call, *arrays)
    assert output.dtype == dtype
    wide = np.promote_types(output.dtype, np.float32)
    assert {name: stat.dtype for name, stat in aux.items()} == dict.fromkeys(AUX, wide) | {"argmax": np.int32}
    for function in (jax.vmap(call), lambda *call: (grads(*call), jax.jvp(grads, call, call))):
        jax.jit(function).lower(*arrays)
    _, aux = attend(*arrays, mask=masks.causal(), aux=("argmax", "scores"), backend=backend)
    np.testing.assert_array_equal(aux["argmax"], np.argmax(aux["scores"], -1))


@contract
def test_a_call_moves_nothing_to_the_device_but_its_own_numbers(backend):
    query, key, value = (jax.device_put(x) for x in Case((2, 3, 11, 7)).arrays()[:3])
    ids, lengths = jax.device_put([np.arange(11, dtype=np.int32) // 4, np.array([7, 3], np.int32)])
    options = {
        "mask": masks.causal() & masks.segments(ids) & masks.lengths(lengths) & masks.prefix([5, 9]),
        "score": [scores.softcap(5.0), scores.alibi(3)], "scale": 0.3, "query_offset": 2,
        "dropout_rate": 0.3, "rng": jax.random.key(0), "aux": AUX,
    }  # fmt: skip
    output = lambda *arrays: attend(*arrays, **options, backend=backend)[0]
    on_host = np.asarray(query)
    with jax.transfer_guard("disallow"):
        output(query, key, value)
        explain(query, key, value, **options, backend=backend)
        # What is the caller's to move stays guarded.
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            output(on_host, key, value)
    pulled = jax.jit(lambda *arrays: jax.vjp(output, *arrays)[1](arrays[2]))
    with jax.transfer_guard("disallow"):
        pulled(query, key, value)


def test_precision_is_heard():
    query, key, value, _ = Case().arrays()
    text = str(jax.make_jaxpr(lambda q: attend(q, key, value, precision="highest"))(query))
    assert text.count("Precision.HIGHEST") >= 2 * 2
    assert "HIGHEST" not in str(jax.make_jaxpr(lambda q: attend(q, key, value))(query))


@contract
def test_bfloat16_is_multiplied_as_such_unless_more_is_asked_for(backend, monkeypatch):
    jax.clear_caches()
    monkeypatch.setattr("regard.engine.softmax.products.lacks_bfloat16", lambda: False)
    arrays = [x.astype(jnp.bfloat16) for x in Case().arrays()[:3]]
    wide = [x.astype(jnp.float32) for x in arrays]

    def loss(*arrays, **options):
        output = attend(*arrays, mask=masks.causal(), query_offset=6, backend=backend, **options)
        return jnp.sum(output.astype(jnp.float32) ** 2)

    def cost(*arrays, **options):
        return jax.jit(jax.value_and_grad(functools.partial(loss, **options), (0, 1, 2))).lower(*arrays)

    def products(lowered):
        return re.findall(r"dot_general.*: \(tensor<[\dx]+x(\w+)>, tensor<[\dx]+x(\w+)>\)", lowered.as_text())

    with jax.default_matmul_precision("default"):
        assert ("bf16", "bf16") in products(cost(*arrays))
    assert ("bf16", "bf16") not in products(cost(*arrays, precision="highest"))
    with jax.default_matmul_precision("float32"):
        assert ("bf16", "bf16") not in products(cost(*arrays))
    run = lambda *arrays, **options: attend(*arrays, backend=backend, **options).astype(jnp.float32)
    truth = np.asarray(run(*wide))
    np.testing.assert_array_equal(run(*arrays, precision="highest"), jnp.asarray(truth, jnp.bfloat16))
    np.testing.assert_allclose(run(*arrays), truth, rtol=0, atol=2.0**-7 * np.abs(truth).max())


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", COMPLETE)
def test_scores_of_a_single_key_have_no_gradient_in_half_a_precision(backend, kind):
    rng = np.random.default_rng(23)
    query, key, value = (jnp.asarray(rng.normal(size=(n, 17)), kind) for n in (5, 1, 1))
    cotangent = jnp.asarray(rng.normal(size=(5, 17)), kind)
    call = lambda query, key: attend(query, key, value, backend=backend)
    _, pull = jax.vjp(call, query, key)
    _, push = jax.jvp(call, (query, key), (cotangent, -key))
    # Nor has what changes all scores of a row alike, however much.
    keys, hundreds = jnp.asarray(rng.normal(size=(29, 17)), kind), np.full((5, 29), 100, np.float32)
    alike = jax.jvp(lambda b: attend(query, keys, keys, bias=b, backend=backend), (hundreds,), (hundreds,))[1]
    for gradient in (*pull(cotangent), push, alike / 10):
        np.testing.assert_allclose(gradient.astype(jnp.float32), 0, atol=1e-5)  # of terms that are about 10
