"""ONNX's own cases for its attention operators, and what they leave out."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from refusals import assert_refused
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
# The first of those whose names begin alike, but for their layout, grouping and dtype.
ASIDE = "_(3d|4d|gqa|diff_heads|sizes|fp16|bf16)(?=_|$)"
TOLD_APART = {tuple(re.sub(ASIDE, "", name).split("_")[:4]): name for name in reversed(CASES)}.values()


@pytest.mark.parametrize("name", TOLD_APART)
def test_cases_of_onnx_give_their_outputs(name):
    case = CASES[name]
    node, (inputs, outputs) = case.model.graph.node[0], case.data_sets[0]
    precision = [one.i for one in node.attribute if one.name == "softmax_precision"]
    with jax.enable_x64(11 in precision or any(array.dtype == np.float64 for array in inputs)):
        found = onnx_ops.run_node(node, dict(zip(filter(None, node.input), inputs, strict=True)))
    found = [np.asarray(found[output]) for output in node.output if output]
    Runner.assert_similar_outputs(outputs, found, case.rtol, case.atol)


@pytest.mark.slow
def test_all_other_cases_of_onnx_give_their_outputs():
    found = [case.model.graph.node[0].op_type for case in CASES.values()]
    assert {operator: found.count(operator) for operator in OPERATORS} == OPERATORS
    for name in {*CASES} - {*TOLD_APART}:
        test_cases_of_onnx_give_their_outputs(name)


# Attention beyond ONNX's cases, against a loop over queries.

B, H, K, T, NEW, PAST, D, E = 2, 6, 3, 5, 7, 4, 13, 17


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def evaluate(query, key, value, keep, added, scale, softcap, dtype):
    """The output and the matrices of modes 0 to 3."""
    query, key, value, added = (np.asarray(array, dtype) for array in (query, key, value, added))
    key, value = (np.repeat(array, query.shape[1] // array.shape[1], 1) for array in (key, value))
    raw = dtype(scale) * query @ key.swapaxes(2, 3)
    capped = dtype(softcap) * np.tanh(raw / dtype(softcap)) if softcap else raw
    biased = np.where(keep, capped + added, dtype(-np.inf))
    peak = biased.max(-1, keepdims=True)
    weights = np.exp(biased - np.where(np.isinf(peak), 0, peak).astype(dtype))
    weights /= np.maximum(weights.sum(-1, keepdims=True), dtype(1e-30))
    return weights @ value, raw, capped, biased, weights


def place(num_keys, offset, left, right):
    """Which of the keys each query of each row may attend to, by position."""
    position = np.asarray(offset)[:, None, None, None] + np.arange(T)[:, None]
    return (np.arange(num_keys) >= position - left) & (np.arange(num_keys) <= position + right)


def run(*arrays, modes=(None,), **options):
    """The outputs under several modes, as one program."""
    attend = functools.partial(onnx_ops.attention, **options)
    return jax.jit(lambda arrays: [attend(*arrays, qk_matmul_output_mode=mode) for mode in modes])(arrays)


def assert_exact(found, *arguments):
    """The output and what else was found, beside a loop over queries in float64 and in float32."""
    expected = (evaluate(*arguments, kind) for kind in (np.float64, np.float32))
    for one, truth, same in zip(found, *expected, strict=False):
        oracle.assert_as_exact(np.asarray(one), truth, same)


def test_past_window_softcap_and_a_short_mask_combine():
    query, key, value = draw(B, H, T, D), draw(B, K, NEW, D), draw(B, K, NEW, E)
    past_key, past_value = draw(B, K, PAST, D, seed=1), draw(B, K, PAST, E, seed=1)
    added = draw(H, 1, PAST + NEW - 5)  # hides keys that windows show
    options = {"is_causal": 1, "left_window_size": 3, "scale": 0.7, "softcap": 1.5}
    found = run(query, key, value, added, past_key, past_value, modes=(None, 0, 1, 2, 3), **options)
    keys, values = np.concatenate([past_key, key], 2), np.concatenate([past_value, value], 2)
    np.testing.assert_array_equal(found[0].present_key, keys)
    np.testing.assert_array_equal(found[0].present_value, values)
    assert found[0].qk_matmul_output is None
    for one in found:
        np.testing.assert_allclose(one.output, found[0].output, atol=1e-6)
    keep = place(PAST + NEW, [PAST] * B, left=3, right=0)
    full = np.concatenate([added, np.full((H, 1, 5), -np.inf)], -1)
    matrices = [one.qk_matmul_output for one in found[1:]]
    assert_exact([found[0].output, *matrices], query, keys, values, keep, full, 0.7, 1.5)


def test_padded_keys_and_a_window_that_looks_ahead_combine():
    """Lengths may be traced, and what pads is not read."""
    query, key, value = draw(B, H, T, D), draw(B, K, NEW, D), draw(B, K, NEW, E)
    real = np.asarray([3, 6])  # 3 - T < 0: the first queries of row 0 sit before all keys
    valid = np.arange(NEW) < real[:, None, None, None]
    mask = np.random.default_rng(3).random((H, T, NEW)) < 0.8
    padded = (np.where(valid.swapaxes(2, 3), array, np.float32(np.nan)) for array in (key, value))
    options = {"left_window_size": 2, "right_window_size": 1}
    (found,) = run(query, *padded, mask, None, None, jnp.asarray(real), **options)
    keep = place(NEW, real - T, left=2, right=1) & mask & valid
    assert not keep[0, :, 0].any()
    assert_exact([found.output], query, key, value, keep, 0, 1 / np.sqrt(D), 0)


def test_precision_asked_for_is_had(x64):
    query, key, value = (10 * draw(B, K, T, D), draw(B, K, T, D), draw(B, K, T, E))
    truth = evaluate(query, key, value, True, 0, 1.0, 0, np.float64)[4]
    errors = []
    for precision in (None, 11):
        (found,) = run(query, key, value, modes=(3,), scale=1.0, softmax_precision=precision)
        assert found.output.dtype == found.qk_matmul_output.dtype == jnp.float32
        errors.append(np.abs(np.asarray(found.qk_matmul_output) - truth).max())
    assert errors[1] <= 2.0**-25 < errors[0]  # one rounding of numbers up to 1


def test_a_position_beyond_the_table_is_seen():
    x, table = jnp.ones((1, 1, 3, 4)), jnp.ones((5, 2))
    turned = jax.jit(lambda ids: onnx_ops.rotary_embedding(x, table, table, ids))(jnp.array([[-1, 5, 4]]))
    np.testing.assert_array_equal(np.isnan(turned[0, 0]).all(-1), [True, True, False])


def test_a_state_keeps_its_dtype():
    x, past = jnp.ones((B, T, K), jnp.bfloat16), jnp.zeros((B, K, 1, 1))
    options = {"q_num_heads": K, "kv_num_heads": K, "update_rule": "linear"}
    run = lambda past: jax.eval_shape(lambda: onnx_ops.linear_attention(x, x, x, past, **options))
    assert [one.dtype for one in run(past)] == [jnp.bfloat16, jnp.float32]
    assert [one.dtype for one in run(None)] == [jnp.bfloat16, jnp.bfloat16]


# FlexAttention: graphs, against ONNX's own evaluation of them.

PLACES = """
    zero = Constant <value_int = 0> () one = Constant <value_int = 1> ()
    two = Constant <value_int = 2> () three = Constant <value_int = 3> ()
    sizes = Shape(s) rows = Gather <axis = 0> (sizes, two) columns = Gather <axis = 0> (sizes, three)
    q_range = Range (zero, rows, one) q_shape = Constant <value_ints = [-1, 1]> ()
    k_range = Range (zero, columns, one) k_axes = Constant <value_ints = [0, 1]> ()
    q = Reshape (q_range, q_shape) k = Unsqueeze (k_range, k_axes) distance = Sub (q, k)
"""


def graph(body, **constants):
    """A graph s -> r in float64; `q`, `k` and `distance` hold positions."""
    made = parser.parse_graph(f"g (double[B, H, T, S] s) => (double[B, H, T, S] r) {{ {PLACES} {body} }}")
    held = [onnx.numpy_helper.from_array(np.asarray(x), name) for name, x in constants.items()]
    made.initializer.extend(held)
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
    "Rounding": "t = Mul (s, s2) a = Floor (t) b = Ceil (t) c = Round (t) d = Sign (t) r = Max (a, b, c, d)",
    "Round half": "f = Cast <to = 11> (distance) h = Mul (f, half) g = Round (h) r = Add (s, g)",
    "Clip": "a = Clip (s, low, high) b = Clip (s, low) r = Add (a, b)",
    "Min, Pow": "a = Pow (s, two) b = Min (a, high) r = Identity (b)",
    "Pow of whole numbers": "d = Abs (distance) p = Pow (d, half) f = Cast <to = 11> (p) r = Add (s, f)",
    "Div of whole numbers": "d = Div (distance, three) f = Cast <to = 11> (d) r = Add (s, f)",
    "Mod of whole numbers": "d = Mod (distance, three) f = Cast <to = 11> (d) r = Add (s, f)",
    "Mod as fmod": "d = Mod <fmod = 1> (distance, three) f = Cast <to = 11> (d) r = Add (s, f)",
    "Mod of scores": "d = Mod <fmod = 1> (s, half) r = Add (s, d)",
    "a window": """w = LessOrEqual (distance, two) c = GreaterOrEqual (distance, zero) m = And (w, c)
                   r = Where (m, s, minus_infinity)""",
    "logic": """a = Less (q, k) b = Greater (q, three) c = Equal (q, k) d = Or (a, c) e = Xor (d, b)
                n = Not (e) r = Where (n, s, s2)""",
    "a slope per head": "f = Cast <to = 11> (distance) p = Mul (f, slopes) r = Add (s, p)",
    "a table per head": "r = Add (s, table)",
    "one number per key": "r = Add (s, per_key)",
    "a line of whole numbers": "r = Add (s, line)",
    "a line per row and column": "a = Mul (line, half) b = Cast <to = 11> (q) c = Mul (a, b) r = Add (s, c)",
    "a shape made here": """m = Less (q, k) z = Shape (m) n = Gather (z, zero)
        c = Concat <axis = 0> (n_axis, k_axes) g = Gather (c, zero) h = Cast <to = 11> (g) r = Add (s, h)""",
    "Squeeze": "a = Squeeze (k, zero_axis) b = Cast <to = 11> (a) r = Add (s, b)",
    "Cast of truth": """m = Less (q, k) f = Cast <to = 11> (m) i = Cast <to = 7> (s)
                        j = Cast <to = 11> (i) r = Add (f, j)"""
}  # fmt: skip

FLEX = (2, 3, 5, 7)
CONSTANTS = {
    "s2": 1.7, "half": 0.5, "low": -0.6, "high": 0.9, "minus_infinity": -np.inf, "n_axis": [11],
    "zero_axis": [0], "slopes": [[[0.1]], [[0.7]], [[-0.4]]], "line": np.arange(-2.0, 19, 3),
    "table": np.sin(np.arange(105.0)).reshape(FLEX[1:]), "per_key": np.cos(np.arange(7.0)),
}  # fmt: skip


def test_every_operator_of_graphs_is_tried():
    words = set(re.findall(r"\b([A-Z]\w*)\b *(?:<[^>]*>)? *\(", PLACES + " ".join(GRAPHS.values())))
    assert words == {*onnx_subgraphs._OPERATORS, *onnx_subgraphs._ON_KNOWN}


def test_a_graph_means_what_onnx_evaluates(x64):
    array, made = np.random.default_rng(1).normal(size=FLEX), {}
    for name, body in GRAPHS.items():
        used = {key: value for key, value in CONSTANTS.items() if re.search(rf"\b{key}\b", body)}
        made[name] = graph(body, **used)
    functions = [onnx_subgraphs.cell_function("score_mod", one, FLEX) for one in made.values()]
    spread = jax.jit(lambda array: [onnx_subgraphs.spread_over(function, array) for function in functions])
    for (name, one), found in zip(made.items(), spread(jnp.asarray(array)), strict=True):
        assert found.dtype == jnp.float64
        expected = reference(one, array)
        assert not np.array_equal(expected, array)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13, err_msg=name)


def test_whole_numbers_of_a_graph_that_int32_does_not_hold_are_refused():
    made = graph("d = Mul (distance, distance) f = Cast <to = 11> (d) r = Add (s, f)")
    place = [jnp.int32(n) for n in (0, 0, 46_000, 0)]
    function = onnx_subgraphs.cell_function("score_mod", made, (1, 1, 46_001, 7))
    assert jax.jit(function)(jnp.float32(0), *place) == np.float32(46_000**2)
    function = onnx_subgraphs.cell_function("score_mod", made, (1, 1, 65_536, 7))
    with pytest.raises(NotImplementedError, match=r"score_mod: Mul: expected whole numbers of at most 21474"):
        jax.eval_shape(function, jnp.float32(0), *place)


def test_graphs_of_scores_and_weights_serve_in_grouped_heads():
    query, key, value = draw(B, H, T, D), draw(B, K, NEW, D), draw(B, K, NEW, E)
    slopes = draw(H, 1, 1).astype(float)
    score_mod = graph("f = Cast <to = 11> (distance) p = Mul (f, slopes) r = Add (s, p)", slopes=slopes)
    prob_mod = graph("f = Cast <to = 11> (q) p = Mul (s, s2) r = Add (p, f)", s2=np.asarray(1.5))
    serve = functools.partial(onnx_ops.flex_attention, score_mod=score_mod, prob_mod=prob_mod)
    found = jax.jit(serve)(query, key, value)

    def expect(dtype):
        repeated = [np.repeat(x, H // K, 1).astype(dtype) for x in (key, value)]
        scores = np.einsum("bhtd,bhsd->bhts", query.astype(dtype), repeated[0]) * dtype(1 / np.sqrt(D))
        scores = reference(score_mod, scores.astype(np.float64)).astype(dtype)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p = reference(prob_mod, (p / p.sum(-1, keepdims=True)).astype(np.float64)).astype(dtype)
        return p @ repeated[1]

    oracle.assert_as_exact(found, expect(np.float64), expect(np.float32))


def test_a_query_whose_keys_a_graph_removes_reads_0():
    """And graphs have the gradients of what they compute."""
    arrays = draw(B, H, T, D), draw(B, K, NEW, D), draw(B, K, NEW, E)
    body = "a = Div (s, cap) b = Tanh (a) c = Mul (b, cap) m = Greater (q, one) r = Where (m, c, least)"
    made = graph(body, least=np.asarray(-np.inf), cap=np.asarray(1.5))
    keep = np.broadcast_to((np.arange(T) > 1)[:, None], (T, NEW))
    by_graph = functools.partial(onnx_ops.flex_attention, score_mod=made)
    same = lambda *arrays: onnx_ops.attention(*arrays, keep, softcap=1.5).output

    @jax.jit
    def measure(*arrays):
        (found, pull), (expected, other) = (jax.vjp(call, *arrays) for call in (by_graph, same))
        return (found, *pull(jnp.ones(found.shape))), (expected, *other(jnp.ones(found.shape)))

    found, expected = measure(*arrays)
    np.testing.assert_array_equal(found[0][:, :, :2], 0)
    oracle.assert_close(found, expected, 1e-5, 1e-5)
    assert all(np.abs(other).max() > 0.1 for other in expected)


def program_of(made, shape):
    """A graph as a program on one score."""
    function = onnx_subgraphs.cell_function("score_mod", made, shape)
    return jax.make_jaxpr(function)(jnp.float32(0), *[jnp.int32(0)] * 4)


def test_a_mask_made_of_positions_is_neither_stored_nor_looked_up():
    window = graph(GRAPHS["a window"], minus_infinity=CONSTANTS["minus_infinity"])
    program = program_of(window, (1, 1, 4096, 8192))
    assert all(np.size(constant) == 1 for constant in program.consts)
    assert "slice" not in str(program)
    assert "slice" in str(program_of(graph(GRAPHS["a table per head"], table=CONSTANTS["table"]), FLEX))


def test_a_graph_is_compiled_once():
    make = lambda shape: onnx_subgraphs.cell_function("score_mod", graph("r = Relu (s)"), shape)
    assert make(FLEX) is make(FLEX) is not make((2, 3, 5, 11))


# Refusals.


def test_bad_inputs_are_explained():
    x, packed, run = jnp.ones((2, 3, T, 4)), jnp.ones((2, T, 12)), onnx_ops.attention
    heads = {"q_num_heads": 3, "kv_num_heads": 3}
    linear = functools.partial(onnx_ops.linear_attention, packed, packed, packed)
    recur = lambda *arrays, rule="linear", **more: linear(*arrays, update_rule=rule, **{**heads, **more})
    assert_refused(
        (lambda: run(x, x, x.astype(int)), "value: expected a floating-point tensor", TypeError),
        (lambda: run(packed, packed, packed), "q_num_heads: expected a number of heads"),
        (lambda: run(x, x, x, None, x), "past_key, past_value: expected both or neither"),
        (lambda: run(x, x, x, jnp.ones((T, T), int)), "attn_mask: expected boolean .*got int32", TypeError),
        (lambda: run(x, x, x, jnp.ones((T, T + 1), bool)), "attn_mask: expected at most 5 keys"),
        (lambda: recur(rule="gated"), "decay: expected an array under .*'gated', which reads decay"),
        run=jax.eval_shape,
    )


def test_bad_graphs_and_nodes_are_explained():
    x = jnp.ones((*FLEX[:3], 4))
    pair, large, flex = np.ones(2), np.asarray(2**40), functools.partial(onnx_ops.flex_attention, x, x, x)
    run = lambda body, **constants: lambda: flex(score_mod=graph(body, **constants))
    empty = parser.parse_graph("g (double[B, H, T, S] s) => () { r = Relu (s) }")
    count = {"Attention": 3, "Softmax": 1}
    node = lambda name, to="y", **more: helper.make_node(name, ["x"] * count[name], [*to], **more)
    evaluate = lambda made, **options: lambda: onnx_ops.run_node(made, {"x": x}, **options)
    UNKNOWN = NotImplementedError
    assert_refused(
        (run("r = Softmax (s)"), "score_mod: the operator Softmax cannot be evaluated one score", UNKNOWN),
        (run("r = Reshape (s, sizes)"), "score_mod: Reshape: expected tensors that depend neither", UNKNOWN),
        (run("r = Add (s, pair)", pair=pair), "score_mod: Add: shape mismatch"),
        (run("r = Neg (pair)", pair=pair), r"a tensor of shape \(2,\) does not broadcast to the s", UNKNOWN),
        (run("m = Less (distance, large) r = Where (m, s, s)", large=large), "at most 2147483647", UNKNOWN),
        (lambda: flex(prob_mod=empty), "prob_mod: expected a graph"),
        (evaluate(node("Softmax")), r"node: expected one of Attention, .*; got Softmax", UNKNOWN),
        (evaluate(node("Attention", windows=3)), "Attention: the attribute 'windows' is not known", UNKNOWN),
        run=jax.eval_shape,
    )
