"""Linear attention is its recurrence, whatever the chunk, in linear memory."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import oracle
from mesh_cases import on_eight_devices
from refusals import assert_refused
from regard import linear

B, H, K, T, D, E = 2, 6, 3, 11, 7, 5
# Axes of decay and rate per rule, as (B, K, T) and (B, K, T, D).
RULES = {
    "linear": (None, None),
    "gated per head": ((B, K, T), None),
    "gated delta per head": ((B, K, T), (B, K, T)),
    "gated delta per channel": ((B, K, T, D), (B, K, T)),
}


def draw(rule, heads=(H, K), length=T, seed=0):
    """Arrays of a call by name, keys of unit length, a state to begin with."""
    rng = np.random.default_rng(seed)
    decay, rate = RULES[rule]

    def sized(shape):
        return tuple({K: heads[1], T: length}.get(n, n) for n in shape)

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


def compiled(arrays, **options):
    return jax.jit(functools.partial(run, **options))(arrays)


def close(actual, expected):
    """The same sums in another order: 16 roundings of the largest value; records leaf by leaf."""

    def compare(actual, expected):
        rounding = float(jnp.finfo(actual.dtype).eps) * np.abs(expected).max(initial=0)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=16 * rounding)

    jax.tree.map(compare, actual, expected)


def assert_recurrence(found, arrays, cotangent=None, grads=None, **options):
    """As exact as the definition in the same dtype."""
    arrays = {name: np.asarray(x) for name, x in arrays.items() if x is not None}
    truth, same = (
        oracle.recurrent(arrays, cotangent, dtype=dtype, **options) for dtype in (np.float64, np.float32)
    )
    output, state = found
    oracle.assert_as_exact(output, truth[0], same[0], "output")
    if not options:
        oracle.assert_as_exact(state.memory, truth[1], same[1], "memory")
    for name, grad in (grads or {}).items():
        oracle.assert_as_exact(grad, truth[2][name], same[2][name], name)


def differentiate(arrays, **options):
    """Output and state, cotangents, and gradients of all arrays."""
    cotangent = np.random.default_rng(1).normal(size=(*arrays["query"].shape[:3], E)).astype(np.float32)

    def loss(given):
        output, state = run(given, **options)
        return jnp.sum(output * cotangent), (output, state)

    grads, found = jax.jit(jax.grad(loss, has_aux=True))({n: x for n, x in arrays.items() if x is not None})
    return found, cotangent, grads


@pytest.mark.parametrize("rule", ["linear", "gated delta per channel"])
def test_the_recurrence_and_its_gradients(rule):
    arrays = draw(rule)
    found, cotangent, grads = differentiate(arrays, chunk=4)
    assert_recurrence(found, arrays, cotangent, grads)
    assert found[1].key_sum is None


def test_narrow_inputs_are_summed_in_float32():
    arrays = draw("gated delta per channel", length=67)
    arrays = {name: jnp.asarray(x, jnp.bfloat16) for name, x in arrays.items()}
    output, state = compiled(arrays)
    assert output.dtype == jnp.bfloat16
    assert state.memory.dtype == jnp.float32
    wide = {name: np.asarray(x, np.float32) for name, x in arrays.items()}
    truth, memory, _ = oracle.recurrent(wide)
    # The output is rounded once; the state not at all.
    half = float(ml_dtypes.finfo(jnp.bfloat16).eps) / 2
    assert (np.abs(np.asarray(output, np.float64) - truth) <= half * np.abs(truth) + 2e-6).all()
    oracle.assert_as_exact(state.memory, memory, oracle.recurrent(wide, dtype=np.float32)[1], "memory")


def test_no_causality_means_that_every_query_reads_the_last_state():
    arrays = draw("gated delta per head")
    queries = np.random.default_rng(3).normal(size=(B, H, 13, D)).astype(np.float32)
    output, state = compiled({**arrays, "query": queries}, causal=False, chunk=4)
    truth, same = (oracle.recurrent(arrays, dtype=dtype)[1] for dtype in (np.float64, np.float32))
    oracle.assert_as_exact(state.memory, truth, same, "memory")

    def read(queries, memory):
        return queries @ np.repeat(memory, H // K, axis=1) / queries.dtype.type(np.sqrt(D))

    oracle.assert_as_exact(output, read(queries.astype(np.float64), truth), read(queries, same), "output")


# Feature maps and the sum of weights.


def test_normalised_output_is_divided_by_decayed_sums():
    arrays = draw("gated per head")
    arrays |= {name: np.abs(arrays[name]) + np.float32(0.1) for name in ("query", "key")}
    arrays.pop("memory")
    found, cotangent, grads = differentiate(arrays, chunk=4, normalise=True)
    assert_recurrence(found, arrays, cotangent, grads, normalise=True)


def test_features_of_large_numbers_and_of_0_have_gradients():
    x, ones = jnp.array([100.0, -100.0, 0.0, -0.0])[:, None], jnp.ones((4, 1))
    grad = jax.grad(lambda x: jnp.sum(linear.attend(x, ones, ones, feature_map="elu1")))
    np.testing.assert_allclose(grad(x)[:, 0], [2.0, 0.0, 6.0, 8.0])


def test_a_sum_of_zero_gives_zero_and_no_gradient():
    query, key, value = (-jnp.ones(shape) for shape in ((3, D), (3, D), (3, E)))

    def loss(*arrays):
        output = linear.attend(*arrays, feature_map="relu", normalise=True)
        return jnp.sum(output + 1), output

    grads, output = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(query, key, value)
    assert not any(np.asarray(array).any() for array in (output, *grads))


# Going on from a state.


def test_steps_are_a_sequence():
    """Decoding in a scan, from a state that is a carry; leading axes are as many as there are."""
    arrays = {name: x for name, x in draw("gated delta per channel").items() if name != "memory"}
    # Matrix products of so many batch axes abort on some CPUs.
    wide = {name: x[:, None, None, None, None] for name, x in arrays.items()}

    @jax.jit
    def everything(arrays):
        tokens = {name: jnp.moveaxis(x, 2, 0) for name, x in arrays.items()}
        step = lambda state, token: linear.step(state, **token)[::-1]
        first, begin = linear.step(None, **{name: x[0] for name, x in tokens.items()})
        end, rest = jax.lax.scan(step, begin, {name: x[1:] for name, x in tokens.items()})
        alone, _ = linear.step(None, **{name: x[0, 0, 0] for name, x in arrays.items()})
        steps = jnp.moveaxis(jnp.concatenate((first[None], rest)), 0, 2)
        return run(arrays, chunk=4), (steps, end), alone, run(wide, chunk=4)[0]

    whole, steps, alone, far = everything(arrays)
    close(steps, whole)
    close(alone, whole[0][0, 0, 0])
    close(far, whole[0][:, None, None, None, None])


def test_a_step_may_share_one_query_among_the_rows():
    arrays = draw("gated per head", (K, K), length=1)
    tokens = {name: x[:, :, 0] for name, x in arrays.items() if name != "memory" and x is not None}
    step = jax.jit(lambda memory, tokens: linear.step(linear.State(memory), **tokens))
    output, state = step(arrays["memory"], {**tokens, "query": tokens["query"][1]})
    assert_recurrence((output[:, :, None], state), {**arrays, "query": np.stack([arrays["query"][1]] * B)})


def test_one_token_may_share_its_rate_under_vmap():
    """With gradients: the inverse of one row is 1, of which JAX knows no axis that is mapped."""
    arrays = draw("gated delta per head", length=1)
    arrays, rate = {name: arrays[name] for name in ("query", "key", "value")}, arrays["rate"][0]
    run = lambda arrays: jax.vmap(lambda row: linear.attend(**row, rate=rate))(arrays)
    output, _ = jax.jit(lambda arrays: jax.vjp(run, arrays))(arrays)
    close(output, linear.attend(**arrays, rate=rate[None]))


# Tokens that are not there.


@pytest.mark.parametrize("rule", ["gated per head", "gated delta per channel"])
def test_padding_changes_nothing(rule):
    arrays = {name: x for name, x in draw(rule).items() if x is not None}
    real = np.array([1, 1, 0, 1, 0, 0, 1, 1, 1, 1, 0], bool)
    normalise = rule == "gated per head"
    if normalise:
        arrays.pop("memory")
    options = {"feature_map": "elu1", "normalise": normalise, "chunk": 4}
    spoil = lambda x: np.where(real.reshape((1, 1, T) + (1,) * (x.ndim - 3)), x, np.float32(np.nan))
    dirty = {name: x if name == "memory" else spoil(x) for name, x in arrays.items()}
    by_head = np.stack([[real] * K] * B).astype(int)  # which makes query heads of one group share it

    @jax.jit
    def everything(arrays, dirty):
        def loss(dirty):
            found = run(dirty, valid=by_head, **options)
            return jnp.sum(found[0] ** 2), found

        taken = {name: x if name == "memory" else x[:, :, real] for name, x in arrays.items()}
        grads, found = jax.grad(loss, has_aux=True)(dirty)
        return run(taken, **options), [found, run(dirty, valid=real[None], **options)], grads

    expected, some, grads = everything(arrays, dirty)
    for output, state in some:
        close((output[:, :, real], state), expected)
        assert not np.asarray(output[:, :, ~real]).any()
    for name, grad in grads.items():
        assert np.isfinite(grad).all()
        assert name == "memory" or not np.asarray(grad[:, :, ~real]).any()


@pytest.mark.parametrize("rule", ["linear", "gated per head", "gated delta per channel"])
def test_packed_documents_are_documents_apart(rule):
    normalise = rule == "linear"
    tokens = {name: x for name, x in draw(rule, length=23).items() if x is not None}
    state = linear.State(tokens.pop("memory"))
    initial = [None if normalise else state, None, None, None]
    # A number that comes back, a document of one token, and padding at a document's start and within.
    ids, real = np.array([4] * 9 + [7] + [4] * 6 + [-1] * 7), np.ones(23, bool)
    real[[10, 11, 14, 22]] = rule == "gated per head"  # where all are real, none is marked
    attend = functools.partial(linear.attend, feature_map="elu1", normalise=normalise, chunk=8)

    def together(tokens):
        return attend(**tokens, segments=ids, valid=None if real.all() else real[None], initial=initial[0])

    def apart(tokens):
        spans = [slice(0, 9), slice(9, 10), slice(10, 16), slice(16, 23)]
        each = [({name: x[:, :, span] for name, x in tokens.items()}, real[None, span]) for span in spans]
        parts = zip(each, initial, strict=True)
        return jnp.concatenate([attend(**part, valid=own, initial=state) for (part, own), state in parts], 2)

    def differentiate(call):
        loss = lambda tokens: (lambda out: (jnp.sum(out**3), out))(call(tokens))
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(tokens)

    close(*map(differentiate, (together, apart)))


def test_without_causality_queries_are_not_the_tokens_of_keys():
    arrays = draw("linear")
    taken = {n: x[:, :, :4] if n in ("key", "value") else x for n, x in arrays.items()}

    @jax.jit
    def everything(arrays, taken):
        each = [{"feature_map": one} for one in ("identity", lambda x: jax.nn.elu(x) + 1, "elu1")]
        valid = [run(arrays, valid=np.arange(T) < 4, causal=False, **one)[0] for one in each[:2]]
        return valid, [run(taken, causal=False, **one)[0] for one in each[::2]]

    found, expected = everything(arrays, taken)
    close(found, expected)
    assert np.asarray(found[0][:, :, 4:]).all()


# Decay.


@pytest.mark.slow
def test_strong_decay_neither_overflows_nor_loses_digits():
    """A few tokens forget almost all, their neighbours almost nothing; ratios of cumulated decay overflow."""
    rng = np.random.default_rng(8)
    arrays = draw("gated delta per channel", length=37)
    choices = {"p": [0.6, 0.2, 0.1, 0.05, 0.03, 0.02], "size": arrays["decay"].shape}
    arrays["decay"] = rng.choice(np.float32([-0.001, -0.5, -20.0, -300.0, -3e4, -np.inf]), **choices)
    arrays["decay"][:, :, 6] = -np.inf  # begins anew
    found, cotangent, grads = differentiate(arrays, chunk=16)
    assert_recurrence(found, arrays, cotangent, grads)


def test_one_key_for_all_tokens_holds_the_last_value():
    """The delta rule at rate 1; powers of this chunk's matrix would reach 10^17.

    What is written is what changes, and 64 changes are summed, each with its rounding.
    """
    key = jnp.zeros((64, D)).at[:, 2].set(1)
    value = jnp.asarray(np.random.default_rng(9).normal(size=(64, E)), jnp.float32)
    call = functools.partial(linear.attend, key, key, value, rate=jnp.ones(64), scale=1)
    output, one_by_one = jax.jit(lambda: (call(chunk=64), call(chunk=1)))()
    rounding = float(jnp.finfo(jnp.float32).eps) * float(jnp.abs(value).max())
    np.testing.assert_allclose(output, value, rtol=0, atol=64 * rounding)
    np.testing.assert_allclose(one_by_one, value, rtol=0, atol=rounding)


# Memory, transforms, edges.


@pytest.mark.slow
def test_memory_of_gradients_doubles_with_the_length():
    def temporary_bytes(length):
        shapes = dict.fromkeys(("query", "key", "value"), (1, 2, length, 16)) | {"decay": (1, 2, length)}
        arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        grad = jax.grad(lambda arrays: jnp.sum(linear.attend(**arrays) ** 2))
        return jax.jit(grad).lower(arrays).compile().memory_analysis().temp_size_in_bytes

    short, long = (temporary_bytes(length) for length in (4096, 8192))
    assert 1.8 < long / short < 2.2
    # A few arrays of T x D; the weights alone would be 512 of them.
    assert long < 10 * 2 * 8192 * 16 * 4


def test_length_zero_leaves_the_state_alone():
    arrays = draw("gated delta per channel", length=0)
    output, state = run(arrays)
    assert output.shape == (B, H, 0, E)
    np.testing.assert_array_equal(state.memory, arrays["memory"])
    queries = jnp.ones((B, H, T, D))
    held = jnp.repeat(arrays["memory"].sum(2, keepdims=True), H // K, 1) / np.sqrt(D)
    close(run({**arrays, "query": queries}, causal=False)[0], jnp.tile(held, (1, 1, T, 1)))
    normal = {name: arrays[name] for name in ("query", "key", "value")}
    assert not np.asarray(linear.attend(**{**normal, "query": queries}, causal=False, normalise=True)).any()
    assert run({name: x[:0] for name, x in draw("gated delta per head").items()})[0].shape == (0, H, T, E)


# Bad input.

Q, N = np.ones((2, 6, 11, 7), np.float32), np.ones((2, 3, 11, 7), np.float32)
STATE = linear.State(jnp.ones((2, 3, 7, 7)))
WRONG = [
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
    (lambda: linear.attend(Q, N, N, feature_map=lambda x: x[:, :, 1:]), r"feature_map: .*\(2, 6, 10, 7\)"),
    (lambda: linear.attend(Q, N, N, normalise=True, rate=N[..., 0]), "normalise: expected False with rate"),
    (lambda: linear.attend(Q, N, N, normalise=True, scale=1.0), "scale: expected None with normalise=True"),
    (lambda: linear.attend(Q, N, N, valid=N[..., 0]), "valid: expected a boolean or integer array.*float32"),
    (lambda: linear.attend(Q, N, N, valid=np.ones((3, 11), bool)), r"valid: expected leading axes.*\(3,\)"),
    (lambda: linear.attend(Q, N, N, valid=np.ones((2, 10), bool)), "valid: expected 11 entries.*got 10"),
    (lambda: linear.attend(Q, N, N, segments=np.ones((2, 10), int)), "segments: expected 11 entries.*got 10"),
    (lambda: linear.attend(Q, N, N, segments=N[0, 0, 0]), "segments: expected .*integer"),
    (lambda: linear.attend(Q, N, N, segments=np.arange(11), causal=False), "segments: expected None with causal"),
    (lambda: linear.attend(Q, N, N, initial=N), "initial: expected a regard.linear.State or None, got ndarray"),
    (lambda: linear.step(Q, N[:, :, 0], N[:, :, 0], STATE), "value: expected a floating-point array, got State"),
    (lambda: linear.step(None, Q[:, :, 0], N[:, :, 0], N[:, :, 0], decay="slow"), "decay: .*got str"),
    (lambda: linear.attend(Q, N, N[..., :5], initial=STATE), r"initial.memory: expected shape \(2, 3, 7, 5\)"),
    (lambda: linear.attend(Q, N, N, initial=STATE, normalise=True), "initial: .*key_sum because normalise=True"),
    (lambda: linear.attend(Q, N, N, chunk=48), "chunk: expected a power of two, or None for 64; got 48"),
    (lambda: linear.step(None, 1.0, N[0, 0, 0], N[0, 0, 0]), "query: expected at least one axis"),
    (lambda: linear.step(STATE, Q[:, :, 0], N[:, :, 0], N[:, :, 0, :5]), r"initial.memory: .*\(2, 3, 7, 5\)"),
]  # fmt: skip


def test_bad_input_is_explained():
    assert_refused(*WRONG, error=(ValueError, TypeError))


DIVIDED = """
from collectives import count_kinds
from jax.sharding import NamedSharding, PartitionSpec
from regard import linear
mesh = jax.make_mesh(SHAPE, ("rows", "sequence", "heads"), axis_types=(AUTO,) * 3)
query, key, value, *logs, memory = draw((4, 8, 36, 6), (4, 4, 36, 6), (4, 4, 36, 5), *[(4, 4, 36)] * 2, (4, 4, 6, 5))
arrays = query, key / 3, value, -abs(logs[0]), abs(logs[1][:1]), memory
def call(query, key, value, decay, rate, memory):
    options = {"segments": np.arange(36) // 17, "initial": linear.State(memory), "return_state": True}
    return linear.attend(query, key, value, decay=decay, rate=rate, **options)
def average(query, key, value, decay, rate, memory):
    options = {"valid": np.arange(36) % 7 > 1, "feature_map": "elu1", "normalise": True, "return_state": True}
    return linear.attend(query, key, value, decay=decay[..., None] * abs(key), **options)
def differentiate(*arrays):
    results, pull = jax.vjp(lambda *arrays: [call(*arrays) for call in CALLS], *arrays)
    return results, pull(results)
specs = [PartitionSpec("rows" if len(array) > 1 else None, "heads") for array in arrays]
placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs)]
odd = [array[:3, :2, :5] for array in (query, key, value)]
expected = jax.jit(differentiate)(*arrays), linear.attend(*odd)
with parallel.use(mesh, "sequence", batch_axis="rows", head_axis="heads"):
    program = jax.jit(differentiate).lower(*placed).compile()
    found = program(*placed), linear.attend(*odd)
for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=4e-6 * max(abs(other).max(), 1))
print(count_kinds(program.as_text()))
"""


STATES = {"all-gather": 5, "all-reduce": 3, "collective-permute": 1, "reduce-scatter": 5}


@pytest.mark.parametrize(
    ("shape", "calls", "sent"),
    [("(2, 1, 4)", "[call]", {"all-reduce": 1}), ("(2, 4, 1)", "[call, average]", STATES)],
    ids=["rows and heads", "a part of the sequence"],
)
def test_each_device_runs_its_own(shape, calls, sent):
    """Sent are the gradients of the rates that rows share; between parts, what each makes of a state."""
    assert on_eight_devices(DIVIDED.replace("SHAPE", shape).replace("CALLS", calls)).strip() == str(sent)
