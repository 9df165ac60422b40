"""derive: every option of attend step by step; numbers are those of attend, formulas those of the numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from economy import mostly_slow
from oracle import batched
from regard import attend, masks, scores
from regard.attention import attend as attend_function
from regard.derivation import Step

B, H, K, T, S, D, E = 2, 6, 3, 5, 7, 11, 13
STATISTICS = ("weights", "scores", "lse", "entropy")


def draw(dtype=np.float32, query=(B, H, T, D), key=(B, K, S, D), value=(B, K, S, E), seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal(shape).astype(dtype)) for shape in (query, key, value))


def near(score, batch, head, query, key):
    return score - 0.125 * jnp.abs(query - key + head - batch).astype(score.dtype)


RNG = np.random.default_rng(1)
BIAS = RNG.standard_normal((H, T, S)).astype(np.float32)
HOLES = np.where(RNG.random((B, 1, T, S)) < 0.3, -np.inf, 0).astype(np.float32)
OPTIONS = {
    "plain": {},
    "causal": {"mask": masks.causal(), "query_offset": 2},
    "offsets": {
        "mask": masks.causal(),
        "query_offset": jnp.asarray([4, 1]),
        "key_offset": jnp.asarray([0, 2]),
    },
    "lengths": {"mask": masks.lengths(jnp.asarray([7, 3]))},
    "array": {"mask": RNG.random((B, H, T, S)) < 0.5},
    "empty_rows": {"mask": np.arange(T)[:, None] > 1},
    "bias": {"bias": BIAS},
    "bias_row": {"bias": BIAS[0, 0]},
    "bias_removes": {"bias": HOLES},
    "scale": {"scale": 0.7},
    "softcap": {"score": scores.softcap(1.5)},
    "temperature": {"score": scores.temperature(jnp.linspace(0.5, 2, H, dtype=jnp.float32))},
    "alibi": {"score": scores.alibi(H), "query_offset": 2},
    "relative_bias": {
        "score": scores.relative_bias(RNG.standard_normal((8, H)).astype(np.float32), max_distance=5),
        "query_offset": 1,
    },
    "modifier": {"score": scores.modifier(near), "query_offset": 0},
    "bilinear": {"score": scores.bilinear(RNG.standard_normal((D, D)).astype(np.float32))},
    "bilinear_heads": {"score": scores.bilinear(RNG.standard_normal((H, D, D)).astype(np.float32))},
    "twice": {"score": [scores.softcap(3.0), scores.softcap(2.0)]},
    "sinks": {"sinks": np.linspace(-1, 2, H, dtype=np.float32)},
    "sink_alone": {"sinks": np.float32(0.5), "mask": np.arange(T)[:, None] > 1},
    "dropout": {"dropout_rate": 0.3, "rng": jax.random.key(5)},
    "everything": {
        "mask": masks.causal() & masks.lengths(jnp.asarray([7, 4])),
        "bias": BIAS,
        "score": [scores.softcap(3.0), scores.alibi(H)],
        "sinks": np.linspace(-1, 2, H, dtype=np.float32),
        "dropout_rate": 0.2,
        "rng": jax.random.key(6),
        "query_offset": 2,
        "scale": 0.5,
    },
}


def compare(derivation, inputs, options, tolerance, pick=lambda name, array: array):
    expected, aux = attend(*inputs, **options, aux=STATISTICS)
    for name, want in {"output": expected, **aux}.items():
        got, want = np.asarray(derivation[name].value, np.float64), np.asarray(pick(name, want), np.float64)
        assert got.shape == want.shape, name
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=name)
    assert derivation["output"].dtype == expected.dtype
    assert derivation.output is derivation["output"].value


# In the quick run: the axes of heads and rows, what is left of no key, and every step at once.
USUAL = ("plain", "offsets", "empty_rows", "bias_row", "bilinear_heads", "sinks", "dropout", "everything")


@pytest.mark.parametrize("case", mostly_slow(OPTIONS, "plain", "dropout", "everything"))
def test_it_computes_what_attend_computes(case):
    inputs = draw()
    compare(regard.derive(*inputs, **OPTIONS[case]), inputs, OPTIONS[case], 4e-6)


@pytest.mark.parametrize("case", mostly_slow(OPTIONS, *USUAL))
def test_in_float64_it_agrees_to_twelve_digits(case, x64):
    inputs = draw(np.float64)
    derivation = regard.derive(*inputs, **OPTIONS[case])
    assert derivation["weights"].dtype == np.float64
    compare(derivation, inputs, OPTIONS[case], 1e-12)


@pytest.mark.parametrize("case", mostly_slow(OPTIONS, *USUAL))
def test_chosen_rows_and_heads_are_those_of_the_whole(case):
    inputs, rows, heads = draw(), [3, 0], [4, 1, 5]

    def pick(name, array):
        axis = -1 if name in ("lse", "entropy") else -2
        return np.take(np.take(array, rows, axis), heads, axis - 1)

    derivation = regard.derive(*inputs, **OPTIONS[case], rows=rows, heads=heads)
    compare(derivation, inputs, OPTIONS[case], 4e-6, pick)
    assert "\n    n=0 h=4" in str(derivation)
    assert "i=3" in str(derivation)


@pytest.mark.parametrize(
    "shapes",
    [
        ((T, D), (S, D), (S, E)),
        ((H, T, D), (S, D), (S, E)),
        ((H, T, D), (1, S, D), (H, S, E)),
        ((H, T, D), (K, S, D), (1, S, E)),
        ((T, D), (K, S, D), (K, S, E)),
        ((3, B, H, T, D), (1, B, K, S, D), (B, K, S, E)),
        ((B, H, 0, D), (B, K, S, D), (B, K, S, E)),
        ((B, H, T, D), (B, K, 0, D), (B, K, 0, E)),
    ],
    ids=str,
)
def test_any_leading_axes_are_derived(shapes):
    inputs = draw(query=shapes[0], key=shapes[1], value=shapes[2])
    derivation = regard.derive(*inputs)
    compare(derivation, inputs, {}, 4e-6)
    for step in derivation:
        assert len(step.indices) == len(step.shape), step
    assert derivation.to_html()
    assert str(derivation)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (np.float16, {}),
        (jnp.bfloat16, {}),
        (jnp.bfloat16, {"sinks": np.float32(4), "dropout_rate": 0.2, "rng": jax.random.key(6)}),
    ],
)
def test_narrow_dtypes_round_as_attend_does(dtype, options):
    inputs = [x.astype(dtype) for x in draw()]
    derivation = regard.derive(*inputs, **options)
    # Sums in another order may round a few to the other side.
    assert np.mean(np.asarray(derivation.output != attend(*inputs, **options))) < 0.02
    assert derivation["scores"].dtype == np.float32
    assert "rounded to" in derivation["output"].words


def test_it_agrees_with_the_definition():
    query, key, value = draw(np.float32)
    keep = RNG.random((B, H, T, S)) < 0.6
    truth = batched(query, key, value, keep, BIAS)
    derivation = regard.derive(query, key, value, mask=keep, bias=BIAS)
    for name in ("output", *STATISTICS):
        np.testing.assert_allclose(derivation[name].value, getattr(truth, name), rtol=2e-5, atol=1e-5)


def test_every_contraction_is_what_its_subscripts_say():
    """The index expression is not decoration: evaluated, it gives the numbers beside it."""
    inputs = draw(key=(B, H, S, D), value=(B, H, S, E))
    derivation = regard.derive(
        *inputs, mask=masks.causal(), query_offset=2, dropout_rate=0.2, rng=jax.random.key(0)
    )
    values = {step.name: np.asarray(step.value, np.float64) for step in derivation}
    operands = {
        "products": ("query", "key"),
        "lse": ("scores",),
        "entropy": ("weights",),
        "output": ("kept_weights", "value"),
    }
    before = {"lse": np.exp, "entropy": lambda p: -p * np.log(np.where(p > 0, p, 1))}
    after = {"lse": np.log}
    found = [step.name for step in derivation if step.subscripts]
    assert found == list(operands)
    for name in found:
        parts = [before.get(name, lambda x: x)(values[operand]) for operand in operands[name]]
        total = after.get(name, lambda x: x)(np.einsum(derivation[name].subscripts, *parts))
        np.testing.assert_allclose(total, values[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert derivation["products"].summed == ("a",)
    assert derivation["products"].batch == ("n", "h")
    assert derivation["products"].free == ("i", "j")


def test_formulas_read_as_theory_writes_them():
    derivation = regard.derive(*draw(), **OPTIONS["everything"])
    assert [step.expression for step in derivation] == [
        "Q^{nhia}",
        "K^{ngja}",
        "V^{ngjb}",
        "g(h) = floor(h / 2)",
        "p^{i} = 2 + i",
        "r^{j} = j",
        "P^{nhij} = sum_a Q^{nhia} K^{ng(h)ja}",
        "scale = 0.5",
        "S_0^{nhij} = scale P^{nhij}",
        "S_1^{nhij} = cap tanh(S_0^{nhij} / cap)",
        "S_2^{nhij} = S_1^{nhij} - slope^{h} |p^{i} - r^{j}|",
        "B^{hij}",
        "S_3^{nhij} = S_2^{nhij} + B^{hij}",
        "M^{nij}",
        "S^{nhij} = S_3^{nhij} + log M^{nij}",
        "z^{h}",
        "L^{nhi} = log(e^{z^{h}} + sum_j e^{S^{nhij}})",
        "A^{nhij} = e^{S^{nhij} - L^{nhi}}",
        "A_sink^{nhi} = e^{z^{h} - L^{nhi}}",
        "H^{nhi} = sum_j A^{nhij} log(1 / A^{nhij}) + A_sink^{nhi} log(1 / A_sink^{nhi})",
        "d^{nhij}",
        "D^{nhij} = d^{nhij} A^{nhij}",
        "O^{nhib} = sum_j D^{nhij} V^{ng(h)jb}",
    ]
    units = {step.name: step.unit for step in derivation}
    assert (units["scores"], units["lse"], units["entropy"]) == ("logits", "nats", "nats")


@pytest.mark.parametrize(
    ("case", "name", "expression"),
    [
        ("plain", "scores", "S^{nhij} = scale P^{nhij}"),
        ("plain", "scale", "scale = 1 / sqrt(11)"),
        ("softcap", "softcap", "S^{nhij} = cap tanh(S_0^{nhij} / cap)"),
        ("temperature", "temperature", "S^{nhij} = S_0^{nhij} / temperature^{h}"),
        ("relative_bias", "relative_bias", "S^{nhij} = S_0^{nhij} + table(bucket(r^{j} - p^{i}), h)"),
        ("modifier", "modifier", "S^{nhij} = near(S_0^{nhij}, n, h, p^{i}, r^{j})"),
        ("bilinear_heads", "query", "Q^{nhia} = sum_e Q_0^{nhie} g^{hea}"),
        ("twice", "softcap_2", "S^{nhij} = cap tanh(S_1^{nhij} / cap)"),
        ("offsets", "query_position", "p^{ni} = offset^{n} + i"),
        ("bias_row", "biased", "S^{nhij} = S_0^{nhij} + B^{j}"),
        ("sink_alone", "sinks", "z"),
        ("empty_rows", "mask", "M^{ij}"),
    ],
)
def test_a_step_says_what_its_option_does(case, name, expression):
    derivation = regard.derive(*draw(), **OPTIONS[case])
    assert name in derivation
    assert derivation[name].expression == expression


def test_nobody_reads_what_is_masked():
    query, key, value = draw()
    key, value = key.at[:, :, 5:].set(jnp.nan), value.at[:, :, 5:].set(jnp.inf)
    derivation = regard.derive(query, key, value, mask=masks.prefix(5))
    compare(derivation, (query, key, value), {"mask": masks.prefix(5)}, 4e-6)
    assert np.isfinite(derivation.output).all()
    assert "whatever it holds" in derivation["output"].words


def test_scores_that_are_no_numbers_stay_so_to_the_end():
    query, key, value = draw()
    query = query.at[0, 0, 0].set(jnp.nan)
    compare(regard.derive(query, key, value), (query, key, value), {}, 4e-6)


def test_empty_rows_are_told():
    derivation = regard.derive(*draw(), **OPTIONS["empty_rows"])
    assert "24 rows may attend to nothing: -inf" in derivation["lse"].words  # 2 of 5 rows, B * H times
    assert not np.asarray(derivation.output)[..., :2, :].any()


def test_a_long_sequence_asks_for_rows():
    long = jnp.zeros((100_000, 2))
    with pytest.raises(
        ValueError, match=r"rows: expected at most 1,048,576 scores .* as in rows=\[0, 99999\]"
    ):
        regard.derive(long, long, long)
    derivation = regard.derive(long, long, long, mask=masks.causal(), rows=[0, 99_999])
    assert derivation["weights"].shape == (2, 100_000)
    assert len(str(derivation)) < 10_000
    assert len(derivation.to_html()) < 60_000


def test_of_long_rows_the_keys_with_most_weight_are_printed_in_every_step():
    query, key, value = draw(query=(1, D), key=(97, D), value=(97, E))
    derivation = regard.derive(query, key, value)
    best = sorted(np.argsort(-np.asarray(derivation["weights"].value)[0])[:8])
    assert derivation.view.shown["j"] == tuple(best)
    for name in ("products", "scores", "weights"):
        block = str(derivation).split(f"  {name} ")[1]
        assert all(f"j={column} " in block or f"j={column}\n" in block for column in best)


def test_wrong_arguments_are_told():
    x = jnp.eye(3)
    with pytest.raises(TypeError, match=r"outside jax\.jit"):
        jax.jit(lambda x: regard.derive(x, x, x).output)(x)
    with pytest.raises(TypeError, match="bias="):
        regard.derive(x, x, x, mask=jnp.zeros((3, 3)))
    with pytest.raises(ValueError, match="expected query with a heads axis"):
        regard.derive(x, x, x, heads=[0])
    with pytest.raises(ValueError, match=r"rows: expected indices in 0\.\.2"):
        regard.derive(x, x, x, rows=[3])
    with pytest.raises(KeyError, match="expected the name of a step, one of query, key, value, products"):
        regard.derive(x, x, x)["softmax"]
    with pytest.raises(ValueError, match="as many as there are letters"):
        regard.derive(*[jnp.ones((1,) * 24 + (2, 2))] * 3)


def test_it_takes_what_attend_takes():
    x = jnp.eye(3)
    derivation = regard.derive(
        x, x, x, mask=masks.causal(), scale=0.5, bias=x, sinks=0.1, precision="highest"
    )
    given = attend_function(x, x, x, mask=masks.causal(), scale=0.5, bias=x, sinks=0.1, precision="highest")
    np.testing.assert_allclose(derivation.output, given, rtol=1e-6)
    with pytest.raises(TypeError, match="droput_rate: expected an option among"):
        regard.derive(x, x, x, droput_rate=0.1)


def test_a_derivation_is_a_sequence_of_steps():
    x = jnp.eye(3)
    derivation = regard.derive(x, x, x, score=scores.softcap(2.0))
    assert len(derivation) == len(list(derivation)) == 11
    assert all(isinstance(step, Step) for step in derivation)
    assert derivation[0] is derivation["query"]
    assert derivation["softcap"] is derivation["scores"]
    assert "nothing" not in derivation
    assert repr(derivation).startswith(
        "Derivation(Attention, step by step: query -> key -> value -> products"
    )
    assert repr(derivation[0]) == "Step(query: Q^{ia}, (3, 3) float32, features)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        derivation.title = ""
