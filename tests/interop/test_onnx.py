"""ONNX's own cases for its attention operators, and what they leave out."""

import functools
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import plain
from regard.engine.dispatch.registry import COMPLETE
from regard.interop import onnx_ops, onnx_subgraphs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import onnx
    from onnx import helper, parser
    from onnx.backend.test.case import node as onnx_cases
    from onnx.backend.test.case.node import attention, flexattention, linear_attention, rotaryembedding
    from onnx.backend.test.runner import Runner
    from onnx.reference import ReferenceEvaluator

# Importing a module of cases makes them. Twins show an operator as a function of simpler ones.
MODULES = (attention, flexattention, linear_attention, rotaryembedding)
OPERATORS = {"Attention": 93, "RotaryEmbedding": 8, "LinearAttention": 14, "FlexAttention": 11}
CASES = {
    case.name: case
    for case in onnx_cases._NodeTestCases
    if case.model.graph.node[0].op_type in OPERATORS and "_expanded" not in case.name
}


def operator_of(name):
    return CASES[name].model.graph.node[0].op_type


def runs():
    for name in CASES:
        with_softmax = operator_of(name) in ("Attention", "FlexAttention")
        yield from ((name, backend) for backend in (COMPLETE if with_softmax else [None]))


def test_all_cases_are_there():
    found = [operator_of(name) for name in CASES]
    assert {operator: found.count(operator) for operator in OPERATORS} == OPERATORS


# In tiles, cases take a compilation each: the quick run is content with the definition.
SLOW = {"tiled": [pytest.mark.slow]}
RUNS = [pytest.param(name, backend, marks=SLOW.get(backend, [])) for name, backend in runs()]


@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_cases_of_onnx_give_their_outputs(name, backend):
    case = CASES[name]
    node, (inputs, outputs) = case.model.graph.node[0], case.data_sets[0]
    precision = [one.i for one in node.attribute if one.name == "softmax_precision"]
    wide = 11 in precision or any(array.dtype == np.float64 for array in inputs)
    with jax.enable_x64(wide):
        named = zip(filter(None, node.input), inputs, strict=True)
        found = onnx_ops.run_node(node, dict(named), backend=backend)
    found = [np.asarray(found[output]) for output in node.output if output]
    Runner.assert_similar_outputs(outputs, found, case.rtol, case.atol)


# Attention beyond ONNX's cases, against a loop over queries.

B, H, K, T, NEW, PAST, D, E = 2, 6, 3, 5, 7, 4, 13, 17


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def evaluate(query, key, value, keep, added, scale, softcap, dtype):
    """The output and the matrices of modes 0 to 3."""
    query, key, value, added = (np.asarray(array, dtype) for array in (query, key, value, added))
    shape = (*query.shape[:3], key.shape[2])
    keep, added = np.broadcast_to(keep, shape), np.broadcast_to(added, shape)
    raw, capped, biased, weights = (np.zeros(shape, dtype) for _ in range(4))
    output = np.zeros((*shape[:3], value.shape[-1]), dtype)
    for b, h, t in np.ndindex(*shape[:3]):
        k = h // (query.shape[1] // key.shape[1])
        raw[b, h, t] = dtype(scale) * (key[b, k] @ query[b, h, t])
        capped[b, h, t] = dtype(softcap) * np.tanh(raw[b, h, t] / dtype(softcap)) if softcap else raw[b, h, t]
        biased[b, h, t] = np.where(keep[b, h, t], capped[b, h, t] + added[b, h, t], -np.inf)
        if np.isneginf(biased[b, h, t]).all():
            continue
        p = np.exp(biased[b, h, t] - biased[b, h, t].max())
        weights[b, h, t] = p / p.sum()
        output[b, h, t] = weights[b, h, t] @ value[b, k]
    return output, raw, capped, biased, weights


def place(num_keys, offset, is_causal=0, left=-1, right=-1):
    """Which of the keys each query of each row may attend to, by position."""
    keep = np.ones((B, 1, T, num_keys), bool)
    for b, _, t, s in np.ndindex(*keep.shape):
        position = offset[b] + t
        keep[b, 0, t, s] = not (
            (is_causal and s > position)
            or (left >= 0 and s < position - left)
            or (right >= 0 and s > position + right)
        )
    return keep


def compare(found, expected, rounded):
    names = ("output", "raw", "capped", "biased", "weights")
    for name, one, truth, same in zip(names, found, expected, rounded, strict=True):
        plain.assert_as_exact(np.asarray(one), truth, same, name)


def all_modes(run):
    """Output and matrices of modes 0 to 3; asking leaves the output as it is."""
    outputs = [run(mode) for mode in (None, 0, 1, 2, 3)]
    for one in outputs:
        np.testing.assert_array_equal(one.output, outputs[0].output)
    assert outputs[0].qk_matmul_output is None
    return [outputs[0].output, *(one.qk_matmul_output for one in outputs[1:])], outputs[0]


@pytest.mark.slow
@pytest.mark.parametrize("backend", COMPLETE)
def test_past_window_softcap_and_a_short_mask_combine(backend):
    query, key, value = draw(B, H, T, D), draw(B, K, NEW, D), draw(B, K, NEW, E)
    past_key, past_value = draw(B, K, PAST, D, seed=1), draw(B, K, PAST, E, seed=1)
    added = draw(H, 1, PAST + NEW - 5)  # hides keys that windows show
    scale, softcap = 0.7, 1.5

    def run(mode):
        return onnx_ops.attention(
            query, key, value, added, past_key, past_value, is_causal=1, left_window_size=3, scale=scale,
            softcap=softcap, qk_matmul_output_mode=mode, backend=backend,
        )  # fmt: skip

    found, outputs = all_modes(run)
    keys, values = np.concatenate([past_key, key], 2), np.concatenate([past_value, value], 2)
    np.testing.assert_array_equal(outputs.present_key, keys)
    np.testing.assert_array_equal(outputs.present_value, values)
    keep = place(PAST + NEW, [PAST] * B, is_causal=1, left=3)
    full = np.concatenate([added, np.full((H, 1, 5), -np.inf)], -1)
    arguments = (query, keys, values, keep, full, scale, softcap)
    compare(found, evaluate(*arguments, np.float64), evaluate(*arguments, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("backend", COMPLETE)
def test_padded_keys_and_a_window_that_looks_ahead_combine(backend):
    query, key, value = draw(B, H, T, D), draw(B, K, NEW, D), draw(B, K, NEW, E)
    real = np.asarray([3, 6])  # 3 - T < 0: the first queries of row 0 sit before all keys
    mask = np.random.default_rng(3).random((H, T, NEW)) < 0.8

    def run(mode, nonpad=real, key=key, value=value):
        return onnx_ops.attention(
            query, key, value, mask, nonpad_kv_seqlen=nonpad, left_window_size=2, right_window_size=1,
            qk_matmul_output_mode=mode, backend=backend,
        )  # fmt: skip

    found, _ = all_modes(run)
    keep = place(NEW, real - T, left=2, right=1) & mask & (np.arange(NEW) < real[:, None, None, None])
    assert not keep[0, :, 0].any()
    arguments = (query, key, value, keep, 0, 1 / np.sqrt(D), 0)
    compare(found, evaluate(*arguments, np.float64), evaluate(*arguments, np.float32))
    # Lengths may be traced, and what pads is not read.
    key, value = (
        np.where(np.arange(NEW)[:, None] < real[:, None, None, None], x, np.nan) for x in (key, value)
    )
    traced = jax.jit(lambda nonpad: run(3, nonpad, key, value))(jnp.asarray(real))
    plain.assert_as_exact(
        traced.output, *(evaluate(*arguments, kind)[0] for kind in (np.float64, np.float32))
    )


@pytest.mark.parametrize("backend", COMPLETE)
def test_causal_without_a_past_starts_at_the_first_key(backend):
    query, key, value = draw(B, T, H * D), draw(B, NEW, K * D), draw(B, NEW, K * E)
    found = onnx_ops.attention(query, key, value, is_causal=1, q_num_heads=H, kv_num_heads=K, backend=backend)
    query, key, value = (
        x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) for x, heads in ((query, H), (key, K), (value, K))
    )
    np.testing.assert_array_equal(found.present_key, key)
    np.testing.assert_array_equal(found.present_value, value)
    arguments = (query, key, value, place(NEW, [0] * B, is_causal=1), 0, 1 / np.sqrt(D), 0)
    expected, rounded = (
        evaluate(*arguments, kind)[0].swapaxes(1, 2).reshape(B, T, H * E) for kind in (np.float64, np.float32)
    )
    plain.assert_as_exact(found.output, expected, rounded)


def test_masks_have_gradients():
    query, key, value, added = (
        jnp.asarray(x) for x in (draw(B, H, T, D), draw(B, K, T, D), draw(B, K, T, E), draw(T, T))
    )
    energy = lambda added, backend: jnp.sum(
        onnx_ops.attention(query, key, value, added, is_causal=1, softcap=2.0, backend=backend).output ** 2
    )
    grads = [jax.grad(energy)(added, backend) for backend in COMPLETE]
    assert np.abs(grads[0]).max() > 0.1
    np.testing.assert_array_equal(np.triu(grads[0], 1), 0)
    # Each entry sums terms, of both signs, as large as the largest entry.
    np.testing.assert_allclose(*grads, rtol=1e-5, atol=2e-6 * float(np.abs(grads[0]).max()))


@pytest.mark.parametrize("backend", COMPLETE)
def test_precision_asked_for_is_had(backend, x64):
    query, key, value = (10 * draw(B, K, T, D), draw(B, K, T, D), draw(B, K, T, E))
    arguments = (query, key, value, True, 0, 1.0, 0)
    truth = evaluate(*arguments, np.float64)[4]
    errors = []
    for precision in (None, 1, 11):
        found = onnx_ops.attention(
            query,
            key,
            value,
            scale=1.0,
            softmax_precision=precision,
            qk_matmul_output_mode=3,
            backend=backend,
        )
        assert found.output.dtype == found.qk_matmul_output.dtype == jnp.float32
        errors.append(np.abs(np.asarray(found.qk_matmul_output) - truth).max())
    assert errors[0] == errors[1]
    assert errors[2] <= 2.0**-25 < errors[1]  # one rounding of numbers up to 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("backend", COMPLETE)
def test_narrow_inputs_lose_no_more_than_their_own_roundings(backend, dtype):
    query, key, value = (
        jnp.asarray(x, dtype) for x in (draw(B, H, T, D), draw(B, K, NEW, D), draw(B, K, NEW, E))
    )
    found = onnx_ops.attention(query, key, value, qk_matmul_output_mode=3, backend=backend)
    assert found.output.dtype == found.qk_matmul_output.dtype == dtype
    arguments = (*(x.astype(jnp.float32) for x in (query, key, value)), True, 0, 1 / np.sqrt(D), 0)
    output, *_, weights = evaluate(*arguments, np.float64)
    plain.assert_as_exact(found.output, output, output, "output")
    plain.assert_as_exact(found.qk_matmul_output, weights, weights, "weights")


# RotaryEmbedding.


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("width", [0, 6])
def test_rotary_of_packed_heads_by_position(width, interleaved, dtype):
    D, F, table = 10, (width or 10) // 2, 23
    features = jnp.asarray(draw(B, T, K * D), dtype)
    position = np.random.default_rng(1).integers(0, table, (B, T))
    angle = np.random.default_rng(2).uniform(-3, 3, (table, F))
    cosine, sine = (jnp.asarray(x, dtype) for x in (np.cos(angle), np.sin(angle)))
    found = onnx_ops.rotary_embedding(
        features, cosine, sine, position, interleaved=interleaved, num_heads=K, rotary_embedding_dim=width
    )
    assert found.shape == features.shape
    assert found.dtype == dtype
    expected = np.asarray(features, np.float64).reshape(B, T, K, D)
    turn = np.asarray(cosine, np.float64) + 1j * np.asarray(sine, np.float64)
    for b, t, h in np.ndindex(B, T, K):
        first, second = (
            (slice(0, 2 * F, 2), slice(1, 2 * F, 2)) if interleaved else (slice(0, F), slice(F, 2 * F))
        )
        turned = (expected[b, t, h, first] + 1j * expected[b, t, h, second]) * turn[position[b, t]]
        expected[b, t, h, first], expected[b, t, h, second] = turned.real, turned.imag
    rounding = float(jnp.finfo(dtype).eps) / 2
    found_wide = np.asarray(found, np.float64)
    np.testing.assert_allclose(found_wide, expected.reshape(found.shape), rtol=1.01 * rounding, atol=1e-6)
    split = features.reshape(B, T, K, D).swapaxes(1, 2)
    per_token = onnx_ops.rotary_embedding(
        split, cosine[position], sine[position], interleaved=interleaved, rotary_embedding_dim=width
    )
    np.testing.assert_array_equal(per_token.swapaxes(1, 2).reshape(found.shape), found)


def test_a_position_beyond_the_table_is_seen():
    x, table = jnp.ones((1, 1, 3, 4)), jnp.ones((5, 2))
    turned = onnx_ops.rotary_embedding(x, table, table, [[-1, 5, 4]])
    np.testing.assert_array_equal(np.isnan(turned[0, 0]).all(-1), [True, True, False])


# LinearAttention.

RULES = {
    "linear": {},
    "gated": {"decay": K},
    "gated by channel": {"decay": K * D},
    "delta": {"beta": K},
    "gated_delta": {"decay": K * D, "beta": 1},
}


def recur(query, key, value, state, decay=None, beta=None, scale=1.0, dtype=np.float64):
    """Token by token, head by head, on packed arrays; the output and the last state."""
    query, key, value, state = (np.asarray(x, dtype) for x in (query, key, value, state))
    output, state = np.zeros((B, T, H * E), dtype), state.copy()
    for b, t, k in np.ndindex(B, T, K):
        one = key[b, t, k * D : (k + 1) * D]
        if decay is not None:
            kept = decay[b, t].reshape(K, -1)[k]
            state[b, k] *= np.exp(np.asarray(kept, dtype))[:, None]
        new = value[b, t, k * E : (k + 1) * E]
        if beta is not None:
            new = dtype(beta[b, t, k % beta.shape[-1]]) * (new - one @ state[b, k])
        state[b, k] += np.outer(one, new)
        for h in range(k * H // K, (k + 1) * H // K):
            read = query[b, t, h * D : (h + 1) * D] @ state[b, k]
            output[b, t, h * E : (h + 1) * E] = dtype(scale) * read
    return output, state


@pytest.mark.parametrize("rule", RULES)
def test_linear_attention_follows_its_recurrence(rule):
    query, key, value = draw(B, T, H * D), draw(B, T, K * D) / np.float32(np.sqrt(D)), draw(B, T, K * E)
    past = draw(B, K, D, E)
    gates = {name: draw(B, T, width, seed=2) for name, width in RULES[rule].items()}
    gates = {name: -np.abs(x) if name == "decay" else 1 / (1 + np.exp(-x)) for name, x in gates.items()}
    for scale, given in ((0.0, past), (0.3, None)):
        run = lambda chunk=64, scale=scale, given=given: onnx_ops.linear_attention(
            query, key, value, given, **gates, q_num_heads=H, kv_num_heads=K, scale=scale, chunk_size=chunk,
            update_rule=rule.split()[0],
        )  # fmt: skip
        start = np.zeros_like(past) if given is None else past
        arguments = (query, key, value, start)
        options = {**gates, "scale": scale or 1 / np.sqrt(D)}
        truth, rounded = (recur(*arguments, **options, dtype=kind) for kind in (np.float64, np.float32))
        for chunk in (64, 3):
            found = run(chunk)
            plain.assert_as_exact(found.output, truth[0], rounded[0], "output")
            plain.assert_as_exact(found.present_state, truth[1], rounded[1], "state")


def test_a_state_keeps_its_dtype():
    x, past = jnp.ones((B, T, K), jnp.bfloat16), jnp.zeros((B, K, 1, 1))
    run = lambda past: onnx_ops.linear_attention(
        x, x, x, past, q_num_heads=K, kv_num_heads=K, update_rule="linear"
    )
    assert [one.dtype for one in run(past)] == [jnp.bfloat16, jnp.float32]
    assert [one.dtype for one in run(None)] == [jnp.bfloat16, jnp.bfloat16]


# FlexAttention: graphs, against ONNX's own evaluation of them.

PLACES = """
    sizes = Shape(s)
    two = Constant <value_int = 2> ()
    three = Constant <value_int = 3> ()
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    rows = Gather <axis = 0> (sizes, two)
    columns = Gather <axis = 0> (sizes, three)
    q_range = Range (zero, rows, one)
    k_range = Range (zero, columns, one)
    q_shape = Constant <value_ints = [-1, 1]> ()
    q = Reshape (q_range, q_shape)
    k_axes = Constant <value_ints = [0, 1]> ()
    k = Unsqueeze (k_range, k_axes)
    distance = Sub (q, k)
"""


def graph(body, **constants):
    """A graph s -> r in float64; `q`, `k` and `distance` hold positions."""
    text = f"g (double[B, H, T, S] s) => (double[B, H, T, S] r) {{ {PLACES} {body} }}"
    made = parser.parse_graph(text)
    made.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(x), name) for name, x in constants.items()
    )
    return made


def reference(made, array):
    """What ONNX's evaluator makes of a graph."""
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return ReferenceEvaluator(model).run(None, {"s": array})[0]


GRAPHS = {
    "Add, Neg": "n = Neg (s) r = Add (n, s2)",
    "Abs, Mul": "a = Abs (s) r = Mul (a, s2)",
    "Exp, Log": "e = Exp (s) e2 = Mul (e, e) r = Log (e2)",
    "Sqrt, Reciprocal": "e = Exp (s) f = Sqrt (e) r = Reciprocal (f)",
    "Sin, Cos": "a = Sin (s) b = Cos (s) r = Sub (a, b)",
    "Tanh, Div": "a = Tanh (s) r = Div (a, s2)",
    "Sigmoid, Relu": "a = Sigmoid (s) b = Relu (s) r = Add (a, b)",
    "Floor, Ceil, Round, Sign": (
        "t = Mul (s, s2) a = Floor (t) b = Ceil (t) c = Round (t) d = Sign (t) r = Max (a, b, c, d)"
    ),
    "Round half": "f = Cast <to = 11> (distance) h = Mul (f, half) g = Round (h) r = Add (s, g)",
    "Clip": "a = Clip (s, low, high) b = Clip (s, low) r = Add (a, b)",
    "Min, Pow": "a = Pow (s, two) b = Min (a, high) r = Identity (b)",
    "Pow of whole numbers": "d = Abs (distance) p = Pow (d, half) f = Cast <to = 11> (p) r = Add (s, f)",
    "Div of whole numbers": "d = Div (distance, three) f = Cast <to = 11> (d) r = Add (s, f)",
    "Mod of whole numbers": "d = Mod (distance, three) f = Cast <to = 11> (d) r = Add (s, f)",
    "Mod as fmod": "d = Mod <fmod = 1> (distance, three) f = Cast <to = 11> (d) r = Add (s, f)",
    "Mod of scores": "d = Mod <fmod = 1> (s, half) r = Add (s, d)",
    "a window": """
        w = LessOrEqual (distance, two) c = GreaterOrEqual (distance, zero) m = And (w, c)
        r = Where (m, s, minus_infinity)
    """,
    "logic": """
        a = Less (q, k) b = Greater (q, three) c = Equal (q, k) d = Or (a, c) e = Xor (d, b) n = Not (e)
        r = Where (n, s, s2)
    """,
    "a slope per head": "f = Cast <to = 11> (distance) p = Mul (f, slopes) r = Add (s, p)",
    "a table per head": "r = Add (s, table)",
    "one number per key": "r = Add (s, per_key)",
    "a line of whole numbers": "r = Add (s, line)",
    "a line per row and column": "a = Mul (line, half) b = Cast <to = 11> (q) c = Mul (a, b) r = Add (s, c)",
    "scores of a shape made here": """
        m = Less (q, k) z = Shape (m) n = Gather (z, zero) c = Concat <axis = 0> (n_axis, k_axes)
        g = Gather (c, zero) h = Cast <to = 11> (g) r = Add (s, h)
    """,
    "Squeeze": "a = Squeeze (k, zero_axis) b = Cast <to = 11> (a) r = Add (s, b)",
    "Cast of truth": """
        m = Less (q, k) f = Cast <to = 11> (m) i = Cast <to = 7> (s) j = Cast <to = 11> (i) r = Add (f, j)
    """,
}  # fmt: skip

FLEX = (2, 3, 5, 7)
CONSTANTS = {
    "s2": np.asarray(1.7),
    "half": np.asarray(0.5),
    "low": np.asarray(-0.6),
    "high": np.asarray(0.9),
    "minus_infinity": np.asarray(-np.inf),
    "slopes": np.asarray([0.1, 0.7, -0.4]).reshape(3, 1, 1),
    "table": np.random.default_rng(5).normal(size=FLEX[1:]),
    "per_key": np.random.default_rng(6).normal(size=FLEX[3]),
    "line": np.arange(7.0) * 3 - 2,
    "n_axis": np.asarray([11]),
    "zero_axis": np.asarray([0]),
}


def test_every_operator_of_graphs_is_tried():
    words = set(re.findall(r"\b([A-Z]\w*)\b *(?:<[^>]*>)? *\(", PLACES + " ".join(GRAPHS.values())))
    assert words == {*onnx_subgraphs._OPERATORS, *onnx_subgraphs._ON_KNOWN}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_means_what_onnx_evaluates(name, x64):
    array = np.random.default_rng(1).normal(size=FLEX)
    used = {key: value for key, value in CONSTANTS.items() if re.search(rf"\b{key}\b", GRAPHS[name])}
    made = graph(GRAPHS[name], **used)
    function = onnx_subgraphs.cell_function("score_mod", made, FLEX)
    found = jax.jit(lambda array: onnx_subgraphs.spread_over(function, array))(jnp.asarray(array))
    assert found.dtype == jnp.float64
    expected = reference(made, array)
    assert not np.array_equal(expected, array)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def test_whole_numbers_of_a_graph_that_int32_does_not_hold_are_refused():
    made = graph("d = Mul (distance, distance) f = Cast <to = 11> (d) r = Add (s, f)")
    place = [jnp.int32(n) for n in (0, 0, 46_000, 0)]
    function = onnx_subgraphs.cell_function("score_mod", made, (1, 1, 46_001, 7))
    assert function(jnp.float32(0), *place) == np.float32(46_000**2)
    function = onnx_subgraphs.cell_function("score_mod", made, (1, 1, 65_536, 7))
    with pytest.raises(
        NotImplementedError, match=r"score_mod: Mul: expected whole numbers of at most 2147483647"
    ):
        function(jnp.float32(0), *place)


@pytest.mark.parametrize("backend", COMPLETE)
def test_a_mask_is_read_from_its_last_axis_on(backend):
    """Whatever sizes agree: batch, heads and queries are as many."""
    rng = np.random.default_rng(2)
    query, key, value = (jnp.asarray(rng.normal(size=(3, 3, n, 5)), jnp.float32) for n in (3, 7, 7))
    for shape in ((3, 7), (3, 3, 7), (3, 1, 1, 7), (7,)):
        added = rng.normal(size=shape).astype(np.float32)
        whole = jnp.broadcast_to(jnp.asarray(added), (3, 3, 3, 7))
        run = functools.partial(onnx_ops.attention, query, key, value, backend=backend)
        np.testing.assert_array_equal(run(jnp.asarray(added)).output, run(whole).output)
        np.testing.assert_array_equal(run(jnp.asarray(added > 0)).output, run(whole > 0).output)


def flex(query, key, value, backend=None, precision=None, **graphs):
    return onnx_ops.flex_attention(query, key, value, softmax_precision=precision, backend=backend, **graphs)


@pytest.mark.parametrize("backend", COMPLETE)
def test_graphs_of_scores_and_weights_serve_in_grouped_heads(backend):
    query, key, value = draw(B, H, T, D), draw(B, K, NEW, D), draw(B, K, NEW, E)
    score_mod = graph(
        "f = Cast <to = 11> (distance) p = Mul (f, slopes) r = Add (s, p)", slopes=draw(H, 1, 1).astype(float)
    )
    prob_mod = graph("f = Cast <to = 11> (q) p = Mul (s, s2) r = Add (p, f)", s2=np.asarray(1.5))
    found = flex(query, key, value, backend, score_mod=score_mod, prob_mod=prob_mod)

    def expect(dtype):
        repeated = [np.repeat(x, H // K, 1).astype(dtype) for x in (key, value)]
        scores = np.einsum("bhtd,bhsd->bhts", query.astype(dtype), repeated[0]) * dtype(1 / np.sqrt(D))
        scores = reference(score_mod, scores.astype(np.float64)).astype(dtype)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p = reference(prob_mod, (p / p.sum(-1, keepdims=True)).astype(np.float64)).astype(dtype)
        return p @ repeated[1]

    plain.assert_as_exact(found, expect(np.float64), expect(np.float32))


@pytest.mark.parametrize("backend", COMPLETE)
def test_graphs_have_gradients(backend):
    query, key, value = (jnp.asarray(x) for x in (draw(B, K, T, D), draw(B, K, T, D), draw(B, K, T, E)))
    capped = graph("a = Div (s, cap) b = Tanh (a) r = Mul (b, cap)", cap=np.asarray(1.5))
    same = lambda query: onnx_ops.attention(query, key, value, softcap=1.5, backend=backend).output
    by_graph = lambda query: flex(query, key, value, backend, score_mod=capped)
    np.testing.assert_allclose(same(query), by_graph(query), rtol=1e-5, atol=1e-6)
    grads = [jax.grad(lambda query, one=one: jnp.sum(one(query) ** 2))(query) for one in (same, by_graph)]
    assert np.abs(grads[0]).max() > 0.1
    np.testing.assert_allclose(*grads, rtol=1e-5, atol=2e-6 * float(np.abs(grads[0]).max()))


@pytest.mark.parametrize("backend", COMPLETE)
def test_a_query_whose_keys_a_graph_removes_reads_0(backend):
    query, key, value = (jnp.asarray(x) for x in (draw(B, H, T, D), draw(B, K, NEW, D), draw(B, K, NEW, E)))
    made = graph("m = Greater (q, one) r = Where (m, s, minus_infinity)", minus_infinity=np.asarray(-np.inf))
    run = lambda *arrays: flex(*arrays, backend, score_mod=made)
    found = np.asarray(run(query, key, value))
    np.testing.assert_array_equal(found[:, :, :2], 0)
    rest = onnx_ops.attention(query[:, :, 2:], key, value, backend=backend).output
    np.testing.assert_allclose(found[:, :, 2:], rest, rtol=1e-5, atol=1e-6)
    grads = jax.grad(lambda *arrays: jnp.sum(run(*arrays) ** 2), (0, 1, 2))(query, key, value)
    assert all(np.isfinite(grad).all() for grad in grads)
    np.testing.assert_array_equal(grads[0][:, :, :2], 0)
    assert np.abs(grads[0][:, :, 2:]).max() > 0.01


def program_of(made, shape):
    """A graph as a program on one score."""
    index = jax.ShapeDtypeStruct((), jnp.int32)
    function = onnx_subgraphs.cell_function("score_mod", made, shape)
    return jax.make_jaxpr(function)(jax.ShapeDtypeStruct((), jnp.float32), *[index] * 4)


def test_a_mask_made_of_positions_is_neither_stored_nor_looked_up():
    window = graph(GRAPHS["a window"], minus_infinity=CONSTANTS["minus_infinity"])
    program = program_of(window, (1, 1, 4096, 8192))
    assert all(np.size(constant) == 1 for constant in program.consts)
    assert "slice" not in str(program)
    assert "slice" in str(program_of(graph(GRAPHS["a table per head"], table=CONSTANTS["table"]), FLEX))


def test_a_graph_is_compiled_once():
    made = [graph("r = Relu (s)") for _ in range(2)]
    functions = [onnx_subgraphs.cell_function("score_mod", one, FLEX) for one in made]
    assert functions[0] is functions[1]
    assert functions[0] is not onnx_subgraphs.cell_function("score_mod", made[0], (2, 3, 5, 11))


@pytest.mark.slow
def test_the_package_onnx_loads_when_a_graph_does():
    code = "import sys, regard.interop.onnx_ops; print('onnx' in sys.modules, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


# Refusals.

VALUE, TYPE = ValueError, TypeError


def test_bad_inputs_of_attention_are_explained():
    x, packed = jnp.ones((2, 3, T, 4)), jnp.ones((2, T, 12))
    run = onnx_ops.attention
    cases = [
        (lambda: run(x, x, jnp.ones((2, 3, T, 4), int)), TYPE, "value: expected a floating-point tensor"),
        (lambda: run(x[0, 0], x, x), VALUE, r"query: expected 3 or 4 axes, got shape \(5, 4\)"),
        (lambda: run(packed, packed, packed), VALUE, "q_num_heads: expected a number of heads"),
        (lambda: run(packed, packed, packed, q_num_heads=3, kv_num_heads=5), VALUE, "kv_num_heads: "),
        (lambda: run(x, x, x, q_num_heads=2), VALUE, "q_num_heads: expected None or the heads on axis 1"),
        (lambda: run(x, x, x, None, x), VALUE, "past_key, past_value: expected both or neither"),
        (lambda: run(x, x, x, None, x, x[..., :3]), VALUE, "past_value: .*got float32 of shape"),
        (lambda: run(x, x, x, None, x, x[:, :, :3]), VALUE, "past_value: expected as many rows"),
        (lambda: run(x, x, x, None, x, x, [1, 1]), VALUE, "nonpad_kv_seqlen: expected None together"),
        (lambda: run(x, x, x, nonpad_kv_seqlen=[1.0, 2.0]), TYPE, "nonpad_kv_seqlen: expected integers"),
        (lambda: run(x, x, x, nonpad_kv_seqlen=[[1], [2]]), VALUE, r"nonpad_kv_seqlen: .*\(2,\); got shape"),
        (lambda: run(x, x, x, nonpad_kv_seqlen=[1, 6]), VALUE, r"nonpad_kv_seqlen: expected .* in 0..5, got"),
        (lambda: run(x, x, x, jnp.ones((4, 1, T))), VALUE, "attn_mask: expected an array that broadcasts"),
        (lambda: run(x, x, x, jnp.ones((T, T), int)), TYPE, "attn_mask: expected boolean .*got int32"),
        (lambda: run(x, x, x, jnp.ones((T, T + 1), bool)), VALUE, "attn_mask: expected at most 5 keys"),
        (lambda: run(x, x, x, left_window_size=-2), VALUE, "left_window_size: expected a number of keys"),
        (lambda: run(x, x, x, softcap=-1.0), VALUE, "softcap: expected a number above 0"),
        (lambda: run(x, x, x, softmax_precision=7), VALUE, "softmax_precision: expected None or one of 1"),
        (lambda: run(x, x, x, softmax_precision=11), VALUE, "softmax_precision: .*JAX_ENABLE_X64"),
        (lambda: run(x, x, x, qk_matmul_output_mode=4), VALUE, "qk_matmul_output_mode: expected None, 0, 1"),
    ]  # fmt: skip
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


def test_bad_inputs_of_rotary_are_explained():
    x, packed, table = jnp.ones((2, 3, T, 4)), jnp.ones((2, T, 12)), jnp.ones((9, 2))
    ids = jnp.zeros((2, T), int)
    run = onnx_ops.rotary_embedding
    cases = [
        (lambda: run(packed, table, table, ids), VALUE, "num_heads: expected a number of heads"),
        (lambda: run(x, table, table, ids, num_heads=2), VALUE, "num_heads: expected None or the heads"),
        (lambda: run(x, table, table), VALUE, r"cos_cache: expected 3 axes, got shape \(9, 2\)"),
        (lambda: run(x, table, table[None], ids), VALUE, "sin_cache: expected 2 axes"),
        (lambda: run(x, table, table[:, :1], ids), VALUE, "sin_cache: expected half of the 4 features"),
        (lambda: run(x, table, table, ids, rotary_embedding_dim=2), VALUE, "cos_cache: expected half of"),
        (lambda: run(x, table, table, ids, rotary_embedding_dim=6), VALUE, "rotary_embedding_dim: .* the 4"),
        (lambda: run(x, table[None], table[None]), VALUE, r"cos_cache: expected one row per token, \(2, 5\)"),
        (lambda: run(x, table, table, ids[:, :2]), VALUE, "position_ids: expected one row of the table per"),
        (lambda: run(x, table, table, ids.astype(float)), TYPE, "position_ids: expected integers"),
    ]  # fmt: skip
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


def test_bad_inputs_of_linear_attention_are_explained():
    x, per_head = jnp.ones((2, T, 12)), jnp.zeros((2, T, 3))
    heads = {"q_num_heads": 3, "kv_num_heads": 3}
    run = lambda *arrays, rule="linear", **options: onnx_ops.linear_attention(
        x, x, x, *arrays, update_rule=rule, **{**heads, **options}
    )
    cases = [
        (lambda: run(rule="erase"), VALUE, "update_rule: expected one of linear, gated, delta, gated_delta"),
        (lambda: run(rule="gated"), VALUE, "decay: expected an array under .*'gated', which reads decay"),
        (lambda: run(None, per_head), VALUE, "decay: expected None under the rule 'linear', .* neither"),
        (lambda: run(None, per_head, rule="gated_delta"), VALUE, "beta: expected an array .* decay and beta"),
        (lambda: run(None, x[..., :2], rule="gated"), VALUE, r"decay: expected shape \(2, 5, 3 or 12\), got"),
        (lambda: run(beta=x, rule="delta"), VALUE, r"beta: expected shape \(2, 5, 3 or 1\), got"),
        (lambda: run(chunk_size=0), VALUE, "chunk_size: expected an integer of at least 1, got 0"),
        (lambda: run(chunk_size=2.5), TYPE, "chunk_size: expected an integer known before tracing, got 2.5"),
        (lambda: run(q_num_heads=5), VALUE, "q_num_heads: expected a number of heads that divides"),
        (lambda: run(q_num_heads=4), VALUE, "key: expected the head width of query"),
        (lambda: run(x), VALUE, "past_state: expected 4 axes"),
        (lambda: run(jnp.ones((2, 3, 4, 5))), VALUE, r"past_state: expected shape \(2, 3, 4, 4\)"),
    ]  # fmt: skip
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


def test_bad_graphs_and_nodes_are_explained():
    x = jnp.ones((*FLEX[:3], 4))
    run = lambda body, **constants: flex(x, x, x, score_mod=graph(body, **constants))
    with pytest.raises(
        NotImplementedError, match="score_mod: the operator Softmax cannot be evaluated one score"
    ):
        run("r = Softmax (s)")
    with pytest.raises(NotImplementedError, match="score_mod: Reshape: expected tensors that depend neither"):
        run("r = Reshape (s, sizes)")
    with pytest.raises(NotImplementedError, match="score_mod: Add reads 'outer', which is neither"):
        run("r = Add (s, outer)")
    with pytest.raises(ValueError, match="score_mod: Add: shape mismatch"):
        run("r = Add (s, two_numbers)", two_numbers=np.ones(2))
    with pytest.raises(
        NotImplementedError, match=r"a tensor of shape \(2,\) does not broadcast to the scores"
    ):
        run("r = Neg (two_numbers)", two_numbers=np.ones(2))
    with pytest.raises(NotImplementedError, match="whole numbers of at most 2147483647"):
        run("m = Less (distance, large) r = Where (m, s, s)", large=np.asarray(2**40))
    with pytest.raises(
        ValueError, match="prob_mod: expected a graph of one input and one output, got 1 and 0"
    ):
        flex(x, x, x, prob_mod=parser.parse_graph("g (double[B, H, T, S] s) => () { r = Relu (s) }"))
    with pytest.raises(ValueError, match="query: expected 4 axes"):
        flex(x[0], x, x)
    node = helper.make_node("Softmax", ["x"], ["y"])
    with pytest.raises(
        NotImplementedError, match=r"node: expected one of Attention, .*; got Softmax of domain ''"
    ):
        onnx_ops.run_node(node, {"x": x})
    node = helper.make_node("Attention", ["x", "x", "x"], ["y"], local_window_size=3)
    with pytest.raises(
        NotImplementedError, match="Attention: the attribute 'local_window_size' is not known"
    ):
        onnx_ops.run_node(node, {"x": x})
    node = helper.make_node("Attention", ["x", "x", "x"], ["y"])
    with pytest.raises(ValueError, match="backend: expected one of"):
        onnx_ops.run_node(node, {"x": jnp.ones((2, 3, 5, 7), jnp.float32)}, backend="nothing")
