"""derive: every option of attend step by step; numbers are those of attend, formulas those of the numbers."""

import dataclasses
import functools
import re
import sys
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.mathtext import MathTextParser
from rich.console import Console

import regard
from regard import attend, masks, scores
from regard.derivation import Step

B, H, K, T, S, D, E = 2, 6, 3, 5, 7, 11, 13
STATISTICS = ("weights", "scores", "lse", "entropy")


def draw(dtype=np.float32, query=(B, H, T, D), key=(B, K, S, D), value=(B, K, S, E)):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(shape).astype(dtype)) for shape in (query, key, value))


def near(score, batch, head, query, key):
    return score - 0.125 * jnp.abs(query - key + head - batch).astype(score.dtype)


RNG = np.random.default_rng(1)
BIAS = RNG.standard_normal((H, T, S)).astype(np.float32)
EVERYTHING = {
    "mask": masks.causal() & masks.lengths(jnp.asarray([7, 4])), "bias": BIAS,
    "score": [scores.softcap(3.0), scores.alibi(H)], "sinks": np.linspace(-1, 2, H, dtype=np.float32),
    "dropout_rate": 0.2, "rng": jax.random.key(6), "query_offset": 2, "scale": 0.5,
}  # fmt: skip
ROWS = np.arange(T)[:, None] > 1
OFFSETS = {"query_offset": jnp.asarray([4, 1]), "key_offset": jnp.asarray([0, 2])}
TABLE = RNG.standard_normal((8, H)).astype(np.float32)
OPTIONS = {
    "plain": {}, "offsets": {"mask": masks.causal(), **OFFSETS},
    "array": {"mask": RNG.random((B, H, T, S)) < 0.5}, "empty_rows": {"mask": ROWS},
    "bias_row": {"bias": BIAS[0, 0]},
    "bias_removes": {"bias": np.where(RNG.random((B, 1, T, S)) < 0.3, -np.inf, 0).astype(np.float32)},
    "temperature": {"score": scores.temperature(jnp.linspace(0.5, 2, H, dtype=jnp.float32))},
    "relative_bias": {"score": scores.relative_bias(TABLE, max_distance=5), "query_offset": 1},
    "modifier": {"score": scores.modifier(near), "query_offset": 0},
    "bilinear_heads": {"score": scores.bilinear(RNG.standard_normal((H, D, D)).astype(np.float32))},
    "twice": {"score": [scores.softcap(3.0), scores.softcap(2.0)]},
    "sink_alone": {"sinks": np.float32(0.5), "mask": ROWS}, "everything": EVERYTHING,
}  # fmt: skip


@functools.cache
def derived(case):
    """The derivation of a case as a whole, made once."""
    return regard.derive(*draw(), **OPTIONS[case])


def compare(derivation, want, tolerance=4e-6):
    expected, aux = want
    for name, want in {"output": expected, **aux}.items():
        got, want = np.asarray(derivation[name].value, np.float64), np.asarray(want, np.float64)
        assert got.shape == want.shape, name
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=name)
    assert derivation["output"].dtype == expected.dtype
    assert derivation.output is derivation["output"].value


# The axes of heads and rows, what is left of no key, and every step at once.
@pytest.mark.parametrize("case", ["offsets", "empty_rows", "bilinear_heads", "everything"])
def test_it_computes_what_attend_computes(case):
    inputs = draw()
    output, aux = jax.jit(lambda *inputs: attend(*inputs, **OPTIONS[case], aux=STATISTICS))(*inputs)
    compare(derived(case), (output, aux))
    if case != "everything":
        return
    # All of them, in another order: what is computed has the shapes that are compiled already.
    rows, heads = [3, 0, 4, 1, 2], [4, 1, 5, 0, 3, 2]

    def pick(name, array):
        axis = -1 if name in ("lse", "entropy") else -2
        return np.take(np.take(array, rows, axis), heads, axis - 1)

    chosen = regard.derive(*inputs, **OPTIONS[case], rows=rows, heads=heads)
    compare(chosen, (pick("output", output), {name: pick(name, array) for name, array in aux.items()}))
    assert re.search(r"\n    n=0 h=4 .*\n        i=3 .*\n        i=0 ", str(chosen))


def test_in_float64_it_agrees_to_twelve_digits_whatever_the_leading_axes(x64):
    inputs = draw(np.float64, (3, B, H, T, D), (1, B, K, S, D), (B, K, S, E))
    derivation = regard.derive(*inputs)
    compare(derivation, jax.jit(functools.partial(attend, aux=STATISTICS))(*inputs), 1e-12)
    for step in derivation:
        assert len(step.indices) == len(step.shape), step
    assert derivation.to_html()
    assert str(derivation)


def test_chosen_heads_name_their_own_key_heads_and_masks():
    mask, rows, heads = OPTIONS["array"]["mask"], [3, 0], [4, 1, 5]
    derivation = regard.derive(*draw(), mask=mask, rows=rows, heads=heads)
    np.testing.assert_array_equal(derivation["groups"].value, [2, 0, 2])
    np.testing.assert_array_equal(derivation["mask"].value, mask[:, heads][:, :, rows])
    options = {"mask": masks.causal(), "query_offset": np.arange(H), "rows": rows, "heads": heads}
    derivation = regard.derive(*(array[0] for array in draw()), **options)  # each head sits elsewhere
    np.testing.assert_array_equal(derivation["query_position"].value, np.add.outer(heads, rows))


def test_narrow_dtypes_round_as_attend_does():
    inputs, sinks = draw(jnp.bfloat16), np.float32(4)
    derivation, want = regard.derive(*inputs, sinks=sinks), attend(*inputs, sinks=sinks)
    # Sums in another order may round a few to the other side.
    assert np.mean(np.asarray(derivation.output) != np.asarray(want)) < 0.02
    assert derivation["scores"].dtype == np.float32
    assert "rounded to" in derivation["output"].words


def test_every_contraction_is_what_its_subscripts_say():
    options = {"mask": masks.causal(), "query_offset": 2, "dropout_rate": 0.2, "rng": jax.random.key(0)}
    derivation = regard.derive(*draw(key=(B, H, S, D), value=(B, H, S, E)), **options)
    values = {step.name: np.asarray(step.value, np.float64) for step in derivation}
    operands = {"products": ("query", "key"), "lse": ("scores",), "entropy": ("weights",)}
    operands["output"] = ("kept_weights", "value")
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
    derivation = derived("everything")
    assert [step.expression for step in derivation] == [
        "Q^{nhia}", "K^{ngja}", "V^{ngjb}", "g(h) = floor(h / 2)", "p^{i} = 2 + i", "r^{j} = j",
        "P^{nhij} = sum_a Q^{nhia} K^{ng(h)ja}", "scale = 0.5", "S_0^{nhij} = scale P^{nhij}",
        "S_1^{nhij} = cap tanh(S_0^{nhij} / cap)", "S_2^{nhij} = S_1^{nhij} - slope^{h} |p^{i} - r^{j}|",
        "B^{hij}", "S_3^{nhij} = S_2^{nhij} + B^{hij}", "M^{nij}", "S^{nhij} = S_3^{nhij} + log M^{nij}",
        "z^{h}", "L^{nhi} = log(e^{z^{h}} + sum_j e^{S^{nhij}})", "A^{nhij} = e^{S^{nhij} - L^{nhi}}",
        "A_sink^{nhi} = e^{z^{h} - L^{nhi}}",
        "H^{nhi} = sum_j A^{nhij} log(1 / A^{nhij}) + A_sink^{nhi} log(1 / A_sink^{nhi})", "d^{nhij}",
        "D^{nhij} = d^{nhij} A^{nhij}", "O^{nhib} = sum_j D^{nhij} V^{ng(h)jb}",
    ]  # fmt: skip
    units = {step.name: step.unit for step in derivation}
    assert (units["scores"], units["lse"], units["entropy"]) == ("logits", "nats", "nats")


EXPRESSIONS = {
    "plain scores": "S^{nhij} = scale P^{nhij}",
    "plain scale": "scale = 1 / sqrt(11)",
    "temperature temperature": "S^{nhij} = S_0^{nhij} / temperature^{h}",
    "relative_bias relative_bias": "S^{nhij} = S_0^{nhij} + table(bucket(r^{j} - p^{i}), h)",
    "modifier modifier": "S^{nhij} = near(S_0^{nhij}, n, h, p^{i}, r^{j})",
    "bilinear_heads query": "Q^{nhia} = sum_e Q_0^{nhie} g^{hea}",
    "twice softcap_2": "S^{nhij} = cap tanh(S_1^{nhij} / cap)",
    "offsets query_position": "p^{ni} = offset^{n} + i",
    "bias_row biased": "S^{nhij} = S_0^{nhij} + B^{j}",
    "sink_alone sinks": "z",
    "empty_rows mask": "M^{ij}",
}


def test_a_step_says_what_its_option_does():
    for step, expression in EXPRESSIONS.items():
        case, name = step.split()
        assert derived(case)[name].expression == expression


def test_nobody_reads_what_is_masked_and_what_is_no_number_stays_so_to_the_end():
    query, key, value = draw()
    query = query.at[0, 0, 0].set(jnp.nan)
    key, value = key.at[:, :, 5:].set(jnp.nan), value.at[:, :, 5:].set(jnp.inf)
    derivation = regard.derive(query, key, value, mask=masks.prefix(5))
    compare(derivation, attend(query, key, value, mask=masks.prefix(5), aux=STATISTICS))
    assert np.isnan(derivation.output[0, 0, 0]).all()
    assert np.isfinite(derivation.output[1]).all()
    assert "whatever it holds" in derivation["output"].words


def test_empty_rows_are_told():
    derivation = derived("empty_rows")
    assert "24 rows may attend to nothing: -inf" in derivation["lse"].words  # 2 of 5 rows, B * H times
    assert not np.asarray(derivation.output)[..., :2, :].any()


def test_a_long_sequence_asks_for_rows():
    long = np.zeros((100_000, 2), np.float32)
    with pytest.raises(ValueError, match=r"rows: expected at most 1,048,576 .* as in rows=\[0, 99999\]"):
        regard.derive(long, long, long)


def test_of_long_rows_the_keys_with_most_weight_are_printed_in_every_step():
    long = np.random.default_rng(0).standard_normal((100_000, 2)).astype(np.float32)
    derivation = regard.derive(long, long, long, mask=masks.causal(), rows=[99_999])
    text, weights = str(derivation), np.asarray(derivation["weights"].value)
    assert weights.shape == (1, 100_000)
    assert len(text) < 10_000
    assert len(derivation.to_html()) < 60_000
    best = sorted(np.argsort(-weights[0])[:8])
    assert derivation.view.shown["j"] == tuple(best)
    for name in ("products", "scores", "weights"):
        block = text.split(f"  {name} ")[1]
        assert all(f"j={column} " in block or f"j={column}\n" in block for column in best)


def test_wrong_arguments_are_told():
    x, derive = np.eye(2, dtype=np.float32), regard.derive
    for message, call in {
        r"outside jax\.jit": lambda: jax.jit(lambda x: derive(x, x, x).output)(x),
        "bias=": lambda: derive(x, x, x, mask=x),
        "droput_rate: expected an option among": lambda: derive(x, x, x, droput_rate=0.1),
        "expected query with a heads axis": lambda: derive(x, x, x, heads=[0]),
        r"rows: expected indices in 0\.\.1": lambda: derive(x, x, x, rows=[2]),
        "name of a step, one of query, key, value, products": lambda: derive(x, x, x)["softmax"],
        "as many as there are letters": lambda: derive(*[np.ones((1,) * 26, np.float32)] * 3),
    }.items():
        with pytest.raises((TypeError, ValueError, KeyError), match=message):
            call()


def test_a_derivation_is_a_sequence_of_steps():
    x = np.eye(2, dtype=np.float32)
    derivation = regard.derive(x, x, x, score=scores.softcap(2.0))
    assert len(derivation) == len(list(derivation)) == 11
    assert all(isinstance(step, Step) for step in derivation)
    assert derivation[0] is derivation["query"]
    assert derivation["softcap"] is derivation["scores"]
    assert "nothing" not in derivation
    beginning = "Derivation(Attention, step by step: query -> key -> value -> products"
    assert repr(derivation).startswith(beginning)
    assert repr(derivation[0]) == "Step(query: Q^{ia}, (2, 2) float32, features)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        derivation.title = ""


# How it looks: text, colour, HTML and LaTeX, all of the same steps.

PLAIN = """\
Attention, step by step
i: 2 queries   j: 2 keys   a: 2 features of query and key   b: 2 features of value

 1  query           Q^{ia}                                                  (2, 2) float32, features
    What each query asks for.
         a=0  a=1
    i=0    1    0
    i=1    0    2
"""
WEIGHTS = """\
    Softmax: the share of key j in what query i reads. Every row adds up to 1.
          j=0   j=1
    i=0  1.00     0
    i=1  0.06  0.94
"""


@functools.cache
def small():
    x = np.float32([[1, 0], [0, 2]])
    return regard.derive(x, x, x, mask=masks.causal())


def test_it_prints_as_text():
    text = str(small())
    assert text.startswith(PLAIN)
    assert WEIGHTS in text
    assert "    i=0    ■    ·\n    i=1    ■    ■\n" in text
    assert "S^{ij} = S_0^{ij} + log M^{ij}" in text
    assert "    i=0  0.71    -∞\n" in text


def test_it_shows_itself_with_and_without_rich(capsys, monkeypatch):
    text = str(small())
    console = Console(width=200, color_system="truecolor", force_terminal=True, highlight=False)
    with console.capture() as captured:
        console.print(small(), soft_wrap=True)
    assert "\x1b[1;36m" in captured.get()
    small().show()
    for shown in (re.sub(r"\x1b\[[0-9;]*m", "", captured.get()), capsys.readouterr().out):
        assert [line.rstrip() for line in shown.splitlines()] == text.splitlines()
    monkeypatch.setitem(sys.modules, "rich.console", None)
    small().show()
    assert capsys.readouterr().out == f"{text}\n"


@pytest.mark.parametrize("case", OPTIONS)
def test_every_step_is_whole_in_text_html_and_latex(case):
    derivation = derived(case)
    text, html, latex = str(derivation), derivation._repr_html_(), derivation.to_latex()
    assert max(map(len, text.splitlines())) <= 100
    assert all(line == line.rstrip() for line in text.splitlines())

    tree = [*ElementTree.fromstring(html).iter()]
    tags = [element.tag for element in tree]
    assert not {"script", "link", "img", "iframe"} & {*tags}
    assert not [name for element in tree for name in element.attrib if name.startswith(("on", "src", "href"))]
    assert tags.count("section") == tags.count("math") == len(derivation)
    assert "url(" not in derivation.to_html()
    assert html in derivation.to_html()
    # The same numbers as in the terminal, minus signs aside.
    assert all(element.text.replace("−", "-") in text for element in tree if element.tag == "td")

    for step in derivation:
        MathTextParser("path").parse(f"${step.formula_latex}$")
        assert step.formula_latex.count("{") == step.formula_latex.count("}")
    assert latex.startswith("\\begin{aligned}\n")
    assert latex.count("&=") == sum(step.formula.right is not None for step in derivation)


def test_names_from_outside_are_escaped():
    def hostile(score, batch, head, query, key):
        return score

    hostile.__qualname__ = "<script>alert('1 & 2')</script>"
    x = np.eye(2, dtype=np.float32)
    derivation = regard.derive(x, x, x, score=scores.modifier(hostile))
    assert "<script" not in derivation.to_html()
    assert "&lt;script&gt;" in derivation.to_html()
    assert "$" not in derivation.to_latex()
    assert r"\_" in derivation.to_latex()


def test_html_leaves_ink_and_ground_to_the_page():
    style = re.search(r"<style>\n(.*?)</style>", small()._repr_html_(), re.S)[1]
    assert set(re.findall(r"background:([^;}]*)", style)) == {"none"}
    rules = ".regard-derivation", "display", "padding", "font-variant", "color"
    assert all(rule.startswith(rules) for rule in style.split("\n") if rule)
    shades = re.findall(r"rgba\((\d+),(\d+),(\d+),([.\d]+)\)", small().to_html())
    assert shades
    assert all(float(alpha) <= 0.5 for *_, alpha in shades)


def test_latex_shows_numbers_on_request():
    latex = small().to_latex(numbers=True)
    assert r"A^{ij} &= \left[\begin{array}{rr} 1.00 & 0 \\ 0.06 & 0.94 \end{array}\right]" in latex
    assert r"S^{ij} &= \left[\begin{array}{rr} 0.71 & -\infty \\ 0 & 2.83 \end{array}\right]" in latex
    assert latex.count(r"\begin{array}") == latex.count(r"\end{array}")
    latex = regard.derive(*[np.ones((1, 1), np.float32)] * 3, scale=2e-5).to_latex(numbers=True)
    assert latex.count(r"2 \cdot 10^{-5}") == 1
    assert latex.count(r"2.0 \cdot 10^{-5}") == 3


def test_nothing_is_printed_of_no_rows_and_no_keys():
    for T, S in ((0, 3), (2, 0)):
        key = np.ones((2, S, 5), np.float32)
        derivation = regard.derive(np.ones((2, T, 5), np.float32), key, key)
        assert derivation.output.shape == (2, T, 5)
        assert not np.any(derivation.output)
        latex = derivation.to_latex(numbers=True)
        assert latex.count(r"\begin{array}") == latex.count(r"\end{array}")
        assert "output" in str(derivation)
        assert "output" in derivation.to_html()


def test_numbers_show_as_many_digits_as_matter():
    x = np.float32([[1e-6, -2e-7]] * 2)
    derivation = regard.derive(x, x, np.float32([[123456, np.nan]] * 2))
    assert all(shade in derivation.to_html() for shade in ("rgba(47,143,208", "rgba(217,115,13"))
    text = str(derivation)
    assert "1.0e-06  -2.0e-07" in text
    assert "nan" in text
