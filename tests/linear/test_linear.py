"""Linear attention is its recurrence, whatever the chunk, in linear memory."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import linear_oracle
import plain
from economy import mostly_slow
from regard import linear

B, H, K, T, D, E = 2, 6, 3, 11, 7, 5
# Axes of decay and rate per rule, as (B, K, T) and (B, K, T, D).
RULES = {
    "linear": (None, None),
    "gated per head": ((B, K, T), None),
    "gated per channel": ((B, K, T, D), None),
    "delta": (None, (B, K, T)),
    "gated delta per head": ((B, K, T), (B, K, T)),
    "gated delta per channel": ((B, K, T, D), (B, K, T)),
    "one decay per head": ((1, K, 1), None),
    "one decay per channel": ((1, K, 1, D), (B, 1, T)),
}


def draw(rule, heads=(H, K), length=T, seed=0):
    """Arrays of a call by name, keys of unit length, a state to begin with."""
    rng = np.random.default_rng(seed)
    decay, rate = RULES[rule]

    def sized(shape):
        sizes = {K: heads[1], T: length}
        return tuple(sizes.get(n, n) for n in shape)

    arrays = {
        "query": rng.normal(size=(B, heads[0], length, D)),
        "key": rng.normal(size=(B, heads[1], length, D)),
        "value": rng.normal(size=(B, heads[1], length, E)),
        "decay": None if decay is None else -(rng.random(sized(decay)) ** 3) * 4,
        "rate": None if rate is None else rng.random(sized(rate)),
        "memory": rng.normal(size=(B, heads[1], D, E)),
    }
    arrays["key"] /= np.linalg.norm(arrays["key"], axis=-1, keepdims=True)
    return {name: None if x is None else x.astype(np.float32) for name, x in arrays.items()}


def run(arrays, **options):
    """Output and state of a call on arrays by name."""
    arrays = dict(arrays)
    memory = arrays.pop("memory", None)
    initial = None if memory is None else linear.State(memory)
    return linear.attend(**arrays, initial=initial, return_state=True, **options)


def close(actual, expected):
    """The same sums in another order: 16 roundings of the largest value; records leaf by leaf."""

    def compare(actual, expected):
        rounding = float(jnp.finfo(actual.dtype).eps) * np.abs(expected).max(initial=0)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=16 * rounding)

    jax.tree.map(compare, actual, expected)


def numpy(arrays):
    return {name: None if x is None else np.asarray(x) for name, x in arrays.items()}


@pytest.mark.parametrize("rule", RULES)
def test_the_recurrence_and_its_gradients(rule):
    arrays = draw(rule)
    cotangent = np.random.default_rng(1).normal(size=(B, H, T, E)).astype(np.float32)
    given = {name: x for name, x in arrays.items() if x is not None}

    def loss(given):
        output, state = run({**arrays, **given}, chunk=4)
        return jnp.sum(output * cotangent), (output, state)

    grads, (output, state) = jax.jit(jax.grad(loss, has_aux=True))(given)
    truth = linear_oracle.batched(numpy(arrays), cotangent)
    same = linear_oracle.batched(numpy(arrays), cotangent, dtype=np.float32)
    plain.assert_as_exact(output, truth[0], same[0], "output")
    plain.assert_as_exact(state.memory, truth[1], same[1], "memory")
    assert state.key_sum is None
    for name in given:
        plain.assert_as_exact(grads[name], truth[2][name], same[2][name], name)


@pytest.mark.parametrize("rule", RULES)
def test_chunks_of_one_token_are_the_recurrence(rule):
    arrays = draw(rule)
    output, state = run(arrays, chunk=1)
    truth, same = (linear_oracle.batched(numpy(arrays), dtype=dtype) for dtype in (np.float64, np.float32))
    plain.assert_as_exact(output, truth[0], same[0], "output")
    plain.assert_as_exact(state.memory, truth[1], same[1], "memory")


@pytest.mark.parametrize("heads", [(3, 3), (6, 1)])
@pytest.mark.parametrize("rule", ["linear", "gated delta per channel"])
def test_grouped_heads_are_the_recurrence(rule, heads):
    arrays = draw(rule, heads)
    output, state = run(arrays, chunk=4)
    truth, same = (linear_oracle.batched(numpy(arrays), dtype=dtype) for dtype in (np.float64, np.float32))
    plain.assert_as_exact(output, truth[0], same[0], "output")
    plain.assert_as_exact(state.memory, truth[1], same[1], "memory")


def test_more_and_fewer_leading_axes_give_the_same():
    arrays = draw("gated delta per channel")
    output, state = run(arrays, chunk=4)
    one = {name: x[1] for name, x in arrays.items()}
    alone, alone_state = run(one, chunk=4)
    close(alone, output[1])
    close(alone_state.memory, state.memory[1])
    single = {name: x[1, 2 * (name == "query")] for name, x in arrays.items()}
    bare, bare_state = run(single, chunk=4)
    assert bare.shape == (T, E)
    assert bare_state.memory.shape == (D, E)
    # Query heads 0 and 1 share key head 0; head 2 of query belongs to the next.
    single = {name: x[1, (name == "query") * 1] for name, x in arrays.items()}
    bare, _ = run(single, chunk=4)
    close(bare, output[1, 1])
    # Matrix products of so many batch axes abort on some CPUs.
    wide = {name: x[:, None, None, None, None] for name, x in arrays.items()}
    far, far_state = run(wide, chunk=4)
    close(far, output[:, None, None, None, None])
    assert far_state.memory.shape == (B, 1, 1, 1, 1, K, D, E)


def test_leading_axes_broadcast():
    arrays = draw("gated delta per head")
    shared = {**arrays, "key": arrays["key"][:1], "value": arrays["value"][:, :1]}
    spread = {
        **arrays,
        "key": jnp.tile(shared["key"], (B, 1, 1, 1)),
        "value": jnp.tile(shared["value"], (1, K, 1, 1)),
    }
    for found, expected in zip(run(shared, chunk=4), run(spread, chunk=4), strict=True):
        close(found, expected)
    one_query = {**arrays, "query": arrays["query"][:1, :1]}
    output, _ = run(one_query)
    assert output.shape == (B, K, T, E)
    tiled = {**arrays, "query": jnp.tile(arrays["query"][:1, :1], (B, K, 1, 1))}
    close(output, run(tiled)[0])


def test_float64_is_float64(x64):
    for rule in ("gated delta per head", "gated delta per channel"):
        arrays = {name: jnp.asarray(np.asarray(x), jnp.float64) for name, x in draw(rule).items()}
        output, state = run(arrays, chunk=4)
        assert output.dtype == state.memory.dtype == jnp.float64
        truth = linear_oracle.batched(numpy(arrays))
        close(output, truth[0])
        close(state.memory, truth[1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_inputs_are_summed_in_float32(dtype):
    arrays = draw("gated delta per channel", length=67)
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    output, state = run(arrays)
    assert output.dtype == dtype
    assert state.memory.dtype == jnp.float32
    wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    truth, memory, _ = linear_oracle.batched(numpy(wide))
    same = linear_oracle.batched(numpy(wide), dtype=np.float32)
    # The output is rounded once; the state not at all.
    half = float(ml_dtypes.finfo(dtype).eps) / 2
    error = np.abs(np.asarray(output, np.float64) - truth)
    assert (error <= half * np.abs(truth) + 2e-6).all()
    plain.assert_as_exact(state.memory, memory, same[1], "memory")


# A longer sequence than one chunk of any rule.


@pytest.mark.parametrize(
    "rule", ["linear", "gated per head", "gated delta per head", "gated delta per channel"]
)
def test_many_chunks_are_as_exact_as_the_recurrence(rule):
    arrays = draw(rule, length=211)
    output, state = run(arrays)
    truth, same = (linear_oracle.batched(numpy(arrays), dtype=dtype) for dtype in (np.float64, np.float32))
    plain.assert_as_exact(output, truth[0], same[0], "output")
    plain.assert_as_exact(state.memory, truth[1], same[1], "memory")


@pytest.mark.parametrize("rule", ["linear", "gated per channel", "gated delta per head"])
def test_no_causality_means_that_every_query_reads_the_last_state(rule):
    arrays = draw(rule)
    queries = jnp.asarray(np.random.default_rng(3).normal(size=(B, H, 13, D)), jnp.float32)
    output, state = run({**arrays, "query": queries}, causal=False, chunk=4)
    truth = linear_oracle.batched(numpy(arrays))[1]
    same = linear_oracle.batched(numpy(arrays), dtype=np.float32)[1]
    plain.assert_as_exact(state.memory, truth, same, "memory")

    def read(queries, memory):
        return queries @ np.repeat(memory, H // K, axis=1) / queries.dtype.type(np.sqrt(D))

    expected = read(np.asarray(queries, np.float64), truth)
    plain.assert_as_exact(output, expected, read(np.asarray(queries), same), "output")


# Feature maps and the sum of weights.

FEATURES = {
    "elu1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu": lambda x: np.maximum(x, 0),
    "exp": np.exp,
}
MAPS = {
    "elu1": lambda x: jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0))),
    "relu": jax.nn.relu,
    "exp": jnp.exp,
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["elu1", "relu", "exp"])
def test_features_weigh_keys(name, causal):
    """T x T weights phi(q) phi(k), divided by their sum."""
    arrays = draw("linear")
    query, key, value = (np.asarray(arrays[n], np.float64) for n in ("query", "key", "value"))
    key, value = (np.repeat(x, H // K, axis=1) for x in (key, value))

    def weigh(dtype):
        phi_q, phi_k = (FEATURES[name](x.astype(dtype)) for x in (query, key))
        weights = phi_q @ np.swapaxes(phi_k, -1, -2)
        weights = np.tril(weights) if causal else weights
        total = weights.sum(-1, keepdims=True)
        return np.where(total == 0, 0, weights / np.where(total == 0, 1, total)) @ value.astype(dtype)

    arrays.pop("memory")
    options = {"normalise": True, "causal": causal, "chunk": 4}
    output, state = run(arrays, feature_map=name, **options)
    plain.assert_as_exact(output, weigh(np.float64), weigh(np.float32), name)
    assert state.key_sum.shape == (B, K, D)
    mapped = run(arrays, feature_map=MAPS[name], **options)[0]
    close(mapped, output)


@pytest.mark.parametrize("rule", ["linear", "gated per head", "gated per channel"])
def test_normalised_output_is_divided_by_decayed_sums(rule):
    arrays = draw(rule)
    arrays |= {name: jnp.abs(arrays[name]) + 0.1 for name in ("query", "key")}
    arrays.pop("memory")
    cotangent = np.random.default_rng(1).normal(size=(B, H, T, E)).astype(np.float32)
    given = {name: x for name, x in arrays.items() if x is not None}

    def loss(given):
        output, _ = run({**arrays, **given}, chunk=4, normalise=True)
        return jnp.sum(output * cotangent), output

    grads, output = jax.jit(jax.grad(loss, has_aux=True))(given)
    truth = linear_oracle.batched(numpy(arrays), cotangent, normalise=True)
    same = linear_oracle.batched(numpy(arrays), cotangent, normalise=True, dtype=np.float32)
    plain.assert_as_exact(output, truth[0], same[0], "output")
    for name in given:
        plain.assert_as_exact(grads[name], truth[2][name], same[2][name], name)


@pytest.mark.parametrize(("x", "expected"), [([100.0, -100.0], [2.0, 0.0]), ([0.0, -0.0], [2.0, 4.0])])
def test_features_of_large_numbers_and_of_0_have_gradients(x, expected):
    ones = jnp.ones((2, 1))
    grad = jax.grad(lambda x: jnp.sum(linear.attend(x, ones, ones, feature_map="elu1")))
    np.testing.assert_allclose(grad(jnp.array(x)[:, None])[:, 0], expected)


def test_a_sum_of_zero_gives_zero_and_no_gradient():
    query, key, value = (-jnp.ones(shape) for shape in ((3, D), (3, D), (3, E)))

    def loss(query, key, value):
        return jnp.sum(linear.attend(query, key, value, feature_map="relu", normalise=True) + 1)

    grads = jax.grad(loss, (0, 1, 2))(query, key, value)
    assert not linear.attend(query, key, value, feature_map="relu", normalise=True).any()
    assert not any(np.asarray(grad).any() for grad in grads)


def test_a_function_may_widen_features_and_learn():
    arrays = draw("linear")
    weights = np.random.default_rng(5).normal(size=(D, 13)) / 3
    query, key, value = (arrays[name] for name in ("query", "key", "value"))

    def call(weights, chunk):
        output, state = linear.attend(
            query, key, value, feature_map=lambda x: jnp.exp(x @ weights), return_state=True, chunk=chunk
        )
        return jnp.sum(output**2), state

    def expected(weights):
        phi = [np.exp(np.asarray(x, np.float64) @ weights) for x in (query, key)]
        return np.sum(linear_oracle.batched(
            {"query": phi[0] * np.sqrt(13 / D), "key": phi[1], "value": value}
        )[0] ** 2)  # fmt: skip

    (found, state), grad = jax.jit(jax.value_and_grad(call, has_aux=True), static_argnums=1)(
        jnp.asarray(weights, jnp.float32), 4
    )
    np.testing.assert_allclose(found, expected(weights), rtol=1e-5)
    assert state.memory.shape == (B, K, 13, E)
    tangent = np.random.default_rng(6).normal(size=(D, 13))
    numeric = (expected(weights + 1e-5 * tangent) - expected(weights - 1e-5 * tangent)) / 2e-5
    np.testing.assert_allclose(np.sum(np.asarray(grad) * tangent), numeric, rtol=1e-4)


# Going on from a state.


@pytest.mark.parametrize("cut", [0, 4, 7])
@pytest.mark.parametrize("rule", ["gated per head", "gated delta per channel"])
def test_two_calls_are_one(rule, cut):
    arrays = draw(rule)
    memory = arrays.pop("memory")
    output, last = run({**arrays, "memory": memory}, chunk=4)

    def part(rows, memory):
        taken = {n: x if x is None else x[:, :, rows] for n, x in arrays.items()}
        return run({**taken, "memory": memory}, chunk=4)

    first, between = part(slice(None, cut), memory)
    second, end = part(slice(cut, None), between.memory)
    close(jnp.concatenate((first, second), 2), output)
    close(end.memory, last.memory)
    if cut == 0:
        np.testing.assert_array_equal(between.memory, memory)


@pytest.mark.parametrize(
    ("rule", "normalise"),
    [
        ("gated per head", True),
        ("gated per channel", False),
        ("gated delta per channel", False),
    ],
)
def test_steps_are_a_sequence(rule, normalise):
    """Decoding in a scan, from a state that is a carry."""
    arrays = draw(rule)
    arrays.pop("memory")
    options = {"normalise": normalise, "feature_map": "elu1" if normalise else "identity"}
    output, state = run(arrays, chunk=4, **options)
    tokens = {name: jnp.moveaxis(x, 2, 0) for name, x in arrays.items() if x is not None}

    def decode(state, token):
        out, state = linear.step(state, **token, **options)
        return state, out

    first, begin = linear.step(None, **{name: x[0] for name, x in tokens.items()}, **options)
    end, rest = jax.lax.scan(decode, begin, {name: x[1:] for name, x in tokens.items()})
    steps = jnp.concatenate((first[None], rest))
    close(jnp.moveaxis(steps, 0, 2), output)
    close(end, state)
    alone, _ = linear.step(
        None, **{name: x[0, 0, 0] for name, x in arrays.items() if x is not None}, **options
    )
    close(alone, output[0, 0, 0])


@pytest.mark.parametrize("rule", ["gated per head", "gated per channel"])
def test_a_step_may_share_one_query_among_the_rows(rule):
    arrays = draw(rule, (K, K), length=1)
    tokens = {name: x[:, :, 0] for name, x in arrays.items() if name != "memory" and x is not None}
    step = jax.jit(lambda memory, tokens: linear.step(linear.State(memory), **tokens))
    output, state = step(arrays["memory"], {**tokens, "query": tokens["query"][1]})
    shared = {**arrays, "query": jnp.stack([arrays["query"][1]] * B)}
    truth, same = (linear_oracle.batched(numpy(shared), dtype=dtype) for dtype in (np.float64, np.float32))
    plain.assert_as_exact(output, truth[0][:, :, 0], same[0][:, :, 0], "output")
    plain.assert_as_exact(state.memory, truth[1], same[1], "memory")


def test_a_state_may_begin_a_normalised_sequence():
    arrays = draw("gated per head")
    arrays.pop("memory")
    output, state = run(arrays, feature_map="elu1", normalise=True)

    def part(rows, initial):
        taken = {n: x if x is None else x[:, :, rows] for n, x in arrays.items()}
        return linear.attend(**taken, feature_map="elu1", normalise=True, initial=initial, return_state=True)

    first, between = part(slice(None, 5), None)
    second, end = part(slice(5, None), between)
    close(jnp.concatenate((first, second), 2), output)
    close(end.key_sum, state.key_sum)


# Tokens that are not there.


@pytest.mark.parametrize(
    ("rule", "kind"),
    mostly_slow(
        [("gated per head", "named"), ("gated per head", "function"), ("gated delta per channel", "named")],
        ("gated delta per channel", "named"),
    ),
)
def test_padding_changes_nothing(rule, kind):
    arrays = draw(rule)
    real = np.array([1, 1, 0, 1, 0, 0, 1, 1, 1, 1, 0], bool)
    normalise = rule != "gated delta per channel"
    memory = arrays.pop("memory")
    if not normalise:
        arrays["memory"] = memory
    options = {"feature_map": "elu1" if kind == "named" else MAPS["elu1"], "normalise": normalise, "chunk": 4}
    taken = {n: x if x is None or n == "memory" else x[:, :, real] for n, x in arrays.items()}
    expected, last = run(taken, **options)

    def spoil(array):
        shape = (1, 1, T) + (1,) * (array.ndim - 3)
        return jnp.where(real.reshape(shape), array, jnp.nan)

    given = {n: x for n, x in arrays.items() if x is not None}
    dirty = {n: x if n == "memory" else spoil(x) for n, x in given.items()}
    for valid in (real[None], np.stack([[real] * K] * B).astype(int)):
        output, state = run({**arrays, **dirty}, valid=valid, **options)
        close(output[:, :, real], expected)
        assert not np.asarray(output[:, :, ~real]).any()
        close(state, last)
    # Per key head, which makes query heads of one group share it.
    loss = lambda given: jnp.sum(run({**arrays, **given}, valid=valid, **options)[0] ** 2)
    grads = jax.jit(jax.grad(loss))(dirty)
    assert all(np.isfinite(grad).all() for grad in grads.values())
    for name, grad in grads.items():
        assert name == "memory" or not np.asarray(grad[:, :, ~real]).any()


def test_rows_of_a_batch_may_be_of_unequal_length():
    arrays = draw("gated delta per head")
    valid = np.arange(T) < np.array([[4], [9]])
    output, state = run(arrays, valid=valid, chunk=4)
    for b, length in enumerate((4, 9)):
        one = {n: x[b : b + 1] if n == "memory" else x[b : b + 1, :, :length] for n, x in arrays.items()}
        expected, last = run(one, chunk=4)
        close(output[b, :, :length], expected[0])
        close(state.memory[b], last.memory[0])


def test_without_causality_queries_are_not_the_tokens_of_keys():
    arrays = draw("linear")
    valid = np.arange(T) < 4
    output, _ = run(arrays, valid=valid, causal=False)
    taken = {n: x[:, :, :4] if n in ("key", "value") else x for n, x in arrays.items()}
    close(output, run(taken, causal=False)[0])
    assert np.asarray(output[:, :, 4:]).all()
    mapped, _ = run(arrays, valid=valid, causal=False, feature_map=MAPS["elu1"])
    close(mapped, run(taken, causal=False, feature_map="elu1")[0])


# Decay.


@pytest.mark.parametrize("axes", mostly_slow(["per head", "per channel"], "per channel"))
def test_strong_decay_neither_overflows_nor_loses_digits(axes):
    """A few tokens forget almost all, their neighbours almost nothing; ratios of cumulated decay overflow."""
    rng = np.random.default_rng(8)
    arrays = draw(f"gated delta {axes}", length=37)
    shape = arrays["decay"].shape
    strong = rng.choice([-0.001, -0.5, -20.0, -300.0, -3e4], size=shape, p=[0.6, 0.2, 0.1, 0.05, 0.05])
    arrays["decay"] = jnp.asarray(strong, jnp.float32)
    cotangent = rng.normal(size=(B, H, 37, E)).astype(np.float32)

    def loss(arrays):
        output, state = run(arrays, chunk=16)
        return jnp.sum(output * cotangent), (output, state)

    grads, (output, state) = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    truth = linear_oracle.batched(numpy(arrays), cotangent)
    same = linear_oracle.batched(numpy(arrays), cotangent, dtype=np.float32)
    plain.assert_as_exact(output, truth[0], same[0], "output")
    plain.assert_as_exact(state.memory, truth[1], same[1], "memory")
    for name, grad in grads.items():
        plain.assert_as_exact(grad, truth[2][name], same[2][name], name)


@pytest.mark.parametrize("axes", mostly_slow(["per head", "per channel"], "per channel"))
def test_minus_infinity_begins_anew(axes):
    arrays = draw(f"gated delta {axes}")
    arrays["decay"][:, :, 6] = -np.inf
    output, state = run(arrays, chunk=8)
    taken = {n: x if n == "memory" else x[:, :, 6:] for n, x in arrays.items()}
    expected, last = run({**taken, "memory": None}, chunk=8)
    close(output[:, :, 6:], expected)
    close(state.memory, last.memory)
    grads = jax.jit(jax.grad(lambda arrays: jnp.sum(run(arrays, chunk=8)[0][:, :, 6:])))(arrays)
    assert all(np.isfinite(grad).all() for grad in grads.values())
    assert not np.asarray(grads["memory"]).any()


def test_one_key_for_all_tokens_holds_the_last_value():
    """The delta rule at rate 1; powers of this chunk's matrix would reach 10^17.

    What is written is what changes, and 64 changes are summed, each with its rounding.
    """
    key = jnp.zeros((64, D)).at[:, 2].set(1)
    value = jnp.asarray(np.random.default_rng(9).normal(size=(64, E)), jnp.float32)
    output = linear.attend(key, key, value, rate=jnp.ones(64), scale=1, chunk=64)
    rounding = float(jnp.finfo(jnp.float32).eps) * float(jnp.abs(value).max())
    np.testing.assert_allclose(output, value, rtol=0, atol=64 * rounding)
    np.testing.assert_allclose(
        linear.attend(key, key, value, rate=jnp.ones(64), scale=1, chunk=1), value, rtol=0, atol=rounding
    )


# Memory, transforms, edges.


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "causal"), [("gated delta per head", True), ("linear", False)])
def test_memory_of_gradients_doubles_with_the_length(rule, causal):
    def temporary_bytes(length):
        shapes = {
            "query": (1, 2, length, 16), "key": (1, 2, length, 16), "value": (1, 2, length, 16),
            "decay": (1, 2, length), "rate": (1, 2, length),
        }  # fmt: skip
        names = ("query", "key", "value") + (("decay", "rate") if "delta" in rule else ())
        arrays = {name: jax.ShapeDtypeStruct(shapes[name], jnp.float32) for name in names}

        def loss(arrays):
            return jnp.sum(linear.attend(**arrays, causal=causal) ** 2)

        return jax.jit(jax.grad(loss)).lower(arrays).compile().memory_analysis().temp_size_in_bytes

    short, long = (temporary_bytes(length) for length in (4096, 8192))
    assert 1.8 < long / short < 2.2
    # A few arrays of T x D; the weights alone would be 512 of them.
    assert long < 10 * 2 * 8192 * 16 * 4


def test_first_and_second_derivatives_are_finite_differences(x64):
    arrays = draw("gated delta per channel", length=5)
    arrays = {name: jnp.asarray(np.asarray(x), jnp.float64) for name, x in arrays.items()}
    rng = np.random.default_rng(4)
    tangents = {name: jnp.asarray(rng.normal(size=x.shape)) for name, x in arrays.items()}
    step = 1e-5

    def moved(by):
        return {name: arrays[name] + by * tangents[name] for name in arrays}

    def loss(arrays):
        return jnp.sum(jnp.sin(run(arrays, chunk=2)[0]))

    def exact(arrays):
        return np.sum(np.sin(linear_oracle.batched(numpy(arrays))[0]))

    def inner(grads):
        return sum(jnp.sum(grads[name] * tangents[name]) for name in arrays)

    grad = jax.jit(jax.grad(loss))
    along = inner(grad(arrays))
    np.testing.assert_allclose(along, (exact(moved(step)) - exact(moved(-step))) / (2 * step), rtol=1e-7)
    np.testing.assert_allclose(
        jax.jit(jax.jvp, static_argnums=0)(loss, (arrays,), (tangents,))[1], along, rtol=1e-12
    )
    twice = jax.jit(jax.grad(lambda arrays: inner(jax.grad(loss)(arrays))))(arrays)
    numeric = jax.tree.map(lambda a, b: (a - b) / (2 * step), grad(moved(step)), grad(moved(-step)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), twice, numeric)
    bent = jax.jit(lambda arrays: jax.jvp(jax.grad(loss), (arrays,), (tangents,))[1])(arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), bent, twice)


def test_vmap_and_jit_agree_with_the_plain_call():
    arrays = draw("gated delta per channel")
    output, state = run(arrays, chunk=4)
    for found, last in (
        jax.vmap(lambda arrays: run(arrays, chunk=4))(arrays),
        jax.jit(lambda arrays: run(arrays, chunk=4))(arrays),
    ):
        close(found, output)
        close(last.memory, state.memory)


def test_length_zero_leaves_the_state_alone():
    arrays = draw("gated delta per channel", length=0)
    output, state = run(arrays)
    assert output.shape == (B, H, 0, E)
    np.testing.assert_array_equal(state.memory, arrays["memory"])
    queries = jnp.ones((B, H, T, D))
    held = jnp.repeat(arrays["memory"].sum(2, keepdims=True), H // K, 1) / np.sqrt(D)
    close(run({**arrays, "query": queries}, causal=False)[0], jnp.tile(held, (1, 1, T, 1)))
    normal = {name: arrays[name] for name in ("query", "key", "value")}
    nothing = linear.attend(**{**normal, "query": queries}, causal=False, normalise=True)
    assert not np.asarray(nothing).any()
    assert run({name: x[:0] for name, x in draw("gated delta per head").items()})[0].shape == (0, H, T, E)


def test_the_default_scale_is_that_of_attend():
    arrays = draw("linear")
    output, _ = run(arrays)
    close(run(arrays, scale=1 / np.sqrt(D))[0], output)
    close(run(arrays, scale=jnp.float32(2))[0], 2 * np.sqrt(D) * output)


# Bad input.

Q, N = np.ones((2, 6, 11, 7), np.float32), np.ones((2, 3, 11, 7), np.float32)
STATE = linear.State(jnp.ones((2, 3, 7, 7)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear.attend(Q, N[..., :5], N), "key: expected the head width of query, D = 7"),
        (lambda: linear.attend(Q[:, :5], N, N), r"query heads \(5\) to be a multiple of key heads \(3\)"),
        (lambda: linear.attend(Q, N, N[:, :, :5]), "value: expected one row per key, S = 11"),
        (lambda: linear.attend(Q.astype(int), N, N), "query: expected a floating-point array, got int"),
        (lambda: linear.attend(Q[:, :, :5], N, N), "query: .*T = S; got T = 5, S = 11.*causal=False"),
        (lambda: linear.attend(Q, N, N, decay=N[:, :, 0, 0]), r"decay: expected 3 axes.*\(2, 3, 11\).*\(2, 3\)"),
        (lambda: linear.attend(Q, N, N, decay=-N[..., :5]), r"decay: .*4 that.*\(2, 3, 11, 7\).*\(2, 3, 11, 5\)"),
        (lambda: linear.attend(Q, N, N, decay=-Q[..., 0]), r"decay: .*got shape \(2, 6, 11\)"),
        (lambda: linear.attend(Q, N, N, decay=np.zeros((2, 3, 11), int)), "decay: .*floating-point array, got int"),
        (lambda: linear.attend(Q, N, N, decay="slow"), "decay: expected a floating-point array, got str"),
        (lambda: linear.attend(Q, N, N, rate=N), r"rate: expected 3 axes.*\(2, 3, 11\).*got shape \(2, 3, 11, 7\)"),
        (lambda: linear.attend(Q, N, N, rate=np.ones((2, 3, 11), bool)), "rate: .*got bool"),
        (lambda: linear.attend(Q, N, N, feature_map="elu"), "feature_map: .*identity, elu1, relu, exp; got 'elu'"),
        (lambda: linear.attend(Q, N, N, feature_map=3), "feature_map: expected a function or one of.*got 3"),
        (lambda: linear.attend(Q, N, N, feature_map=lambda x: x[:, :, 1:]), r"feature_map: .*\(2, 6, 10, 7\)"),
        (lambda: linear.attend(Q, N, N, feature_map=lambda x: x > 0), "feature_map: .*floating-point array from query"),
        (lambda: linear.attend(Q, N, N, normalise=True, rate=N[..., 0]), "normalise: expected False with rate"),
        (lambda: linear.attend(Q, N, N, normalise=True, scale=1.0), "scale: expected None with normalise=True"),
        (lambda: linear.attend(Q, N, N, scale=Q), "scale: expected one number"),
        (lambda: linear.attend(Q, N, N, valid=N[..., 0]), "valid: expected a boolean or integer array.*float32"),
        (lambda: linear.attend(Q, N, N, valid=np.ones((3, 11), bool)), r"valid: expected leading axes.*\(3,\)"),
        (lambda: linear.attend(Q, N, N, valid=np.ones((2, 10), bool)), "valid: expected 11 entries.*got 10"),
        (lambda: linear.attend(Q, N, N, initial=N), "initial: expected a regard.linear.State or None, got ndarray"),
        (lambda: linear.attend(Q, N, N, causal="no"), "causal: expected True or False, .*got 'no'"),
        (lambda: linear.attend(Q, N, N, normalise=1), "normalise: expected True or False, .*got 1"),
        (lambda: linear.attend(Q, N, N, valid=[[1], [1, 0]]), "valid: expected an array, got list.*of one length"),
        (lambda: linear.step(Q, N[:, :, 0], N[:, :, 0], STATE), "value: expected a floating-point array, got State"),
        (lambda: linear.step(None, Q[:, :, 0], N[:, :, 0], N[:, :, 0], decay="slow"), "decay: .*got str"),
        (lambda: linear.attend(Q, N, N[..., :5], initial=STATE), r"initial.memory: expected shape \(2, 3, 7, 5\)"),
        (lambda: linear.attend(Q, N, N, initial=STATE, normalise=True), "initial: .*key_sum because normalise=True"),
        (lambda: linear.attend(Q, N, N, chunk=48), "chunk: expected a power of two, or None for 64; got 48"),
        (lambda: linear.attend(Q, N, N, rate=N[..., 0], chunk=48), "chunk: .*None for 32; got 48"),
        (lambda: linear.attend(Q, N, N, chunk=8.0), "chunk: expected an integer .* got 8.0"),
        (lambda: linear.step(None, 1.0, N[0, 0, 0], N[0, 0, 0]), "query: expected at least one axis"),
        (lambda: linear.step(STATE, Q[:, :, 0], N[:, :, 0], N[:, :, 0, :5]), r"initial.memory: .*\(2, 3, 7, 5\)"),
    ],
)  # fmt: skip
def test_bad_input_is_explained(call, message):
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert re.search(message, str(caught.value)), str(caught.value)
