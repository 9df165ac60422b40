"""How a derivation looks: text, colour, HTML and LaTeX, all of the same steps."""

import builtins
import functools
import re
from html.parser import HTMLParser

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.mathtext import MathTextParser
from rich.console import Console

import regard
from economy import mostly_slow
from regard import masks, scores
from test_derivation import OPTIONS, USUAL, draw

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
def derive_case(case):
    return regard.derive(*draw(), **OPTIONS[case])


def small():
    x = jnp.asarray([[1.0, 0.0], [0.0, 2.0]])
    return regard.derive(x, x, x, mask=masks.causal())


def test_it_prints_as_text():
    text = str(small())
    assert text.startswith(PLAIN)
    assert WEIGHTS in text
    assert "    i=0    ■    ·\n    i=1    ■    ■\n" in text
    assert "S^{ij} = S_0^{ij} + log M^{ij}" in text
    assert "    i=0  0.71    -∞\n" in text


@pytest.mark.parametrize("case", mostly_slow(OPTIONS, *USUAL))
def test_no_line_is_wider_than_a_terminal(case):
    text = str(derive_case(case))
    assert max(map(len, text.splitlines())) <= 100
    assert all(line == line.rstrip() for line in text.splitlines())


def test_rich_colours_the_same_text():
    derivation = small()
    console = Console(width=200, color_system="truecolor", force_terminal=True, highlight=False)
    with console.capture() as captured:
        console.print(derivation, soft_wrap=True)
    assert "\x1b[1;36m" in captured.get()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", captured.get())
    assert [line.rstrip() for line in plain.splitlines()] == str(derivation).splitlines()


def test_show_prints_with_and_without_rich(capsys, monkeypatch):
    derivation = small()
    derivation.show()
    shown = capsys.readouterr().out
    load = builtins.__import__

    def refuse(name, *rest, **more):
        if name.startswith("rich"):
            raise ModuleNotFoundError(name)
        return load(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    derivation.show()
    assert capsys.readouterr().out == f"{derivation}\n"
    assert [line.rstrip() for line in shown.splitlines()] == str(derivation).splitlines()


class Page(HTMLParser):
    """Collects tags and cells, and sees to it that what is opened is closed."""

    EMPTY = ("meta",)

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.cells, self.bad = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.bad += [name for name, _ in attrs if name.startswith("on") or name in ("src", "href")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


@pytest.mark.parametrize("case", OPTIONS)
def test_html_is_whole_and_carries_no_script(case):
    derivation = derive_case(case)
    page = Page(derivation.to_html())
    assert not page.open
    assert not page.bad
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert page.tags.count("section") == page.tags.count("math") == len(derivation)
    # The same numbers as in the terminal, minus signs aside.
    text = str(derivation)
    assert all(cell.replace("−", "-") in text for cell in page.cells)
    assert "url(" not in derivation.to_html()
    assert derivation._repr_html_() in derivation.to_html()


def test_names_from_outside_are_escaped():
    def hostile(score, batch, head, query, key):
        return score

    hostile.__qualname__ = "<script>alert('1 & 2')</script>"
    x = jnp.eye(2)
    derivation = regard.derive(x, x, x, score=scores.modifier(hostile))
    page = Page(derivation.to_html())
    assert "script" not in page.tags
    assert "&lt;script&gt;" in derivation.to_html()
    assert "$" not in derivation.to_latex()
    assert r"\_" in derivation.to_latex()


def test_html_leaves_ink_and_ground_to_the_page():
    style = re.search(r"<style>\n(.*?)</style>", small()._repr_html_(), re.S)[1]
    assert set(re.findall(r"background:([^;}]*)", style)) == {"none"}
    assert all(
        rule.startswith((".regard-derivation", "display", "padding", "font-variant", "color"))
        for rule in style.split("\n")
        if rule
    )
    shades = re.findall(r"rgba\((\d+),(\d+),(\d+),([.\d]+)\)", small().to_html())
    assert shades
    assert all(float(alpha) <= 0.5 for *_, alpha in shades)


@pytest.mark.parametrize("case", mostly_slow(OPTIONS, *USUAL))
def test_every_formula_is_latex(case):
    parser = MathTextParser("path")
    derivation = derive_case(case)
    for step in derivation:
        parser.parse(f"${step.formula_latex}$")
        assert step.formula_latex.count("{") == step.formula_latex.count("}")
    latex = derivation.to_latex()
    assert latex.startswith("\\begin{aligned}\n")
    assert latex.count("&=") == sum(step.formula.right is not None for step in derivation)


def test_latex_shows_numbers_on_request():
    latex = small().to_latex(numbers=True)
    assert r"A^{ij} &= \left[\begin{array}{rr} 1.00 & 0 \\ 0.06 & 0.94 \end{array}\right]" in latex
    assert r"S^{ij} &= \left[\begin{array}{rr} 0.71 & -\infty \\ 0 & 2.83 \end{array}\right]" in latex
    assert latex.count(r"\begin{array}") == latex.count(r"\end{array}")
    latex = regard.derive(*[jnp.ones((1, 1))] * 3, scale=2e-5).to_latex(numbers=True)
    assert latex.count(r"2 \cdot 10^{-5}") == 1
    assert latex.count(r"2.0 \cdot 10^{-5}") == 3


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)], ids=str)
def test_nothing_is_printed_of_no_rows_and_no_keys(shape):
    T, S = shape
    derivation = regard.derive(jnp.ones((2, T, 5)), *[jnp.ones((2, S, 5))] * 2)
    assert derivation.output.shape == (2, T, 5)
    latex = derivation.to_latex(numbers=True)
    assert latex.count(r"\begin{array}") == latex.count(r"\end{array}")
    assert "output" in str(derivation)
    assert "output" in derivation.to_html()


def test_numbers_show_as_many_digits_as_matter():
    x = jnp.asarray([[1e-6, -2e-7]])
    derivation = regard.derive(x, x, jnp.asarray([[123456.0, np.nan]]))
    text = str(derivation)
    assert "1.0e-06  -2.0e-07" in text
    assert "nan" in text
