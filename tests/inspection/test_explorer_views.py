"""The explorer's other tabs: two traces compared, a run's curves, and what is known of positions."""

import re

import numpy as np
import pytest

from explorer_pages import WORDS, make_case, trace_of, walk
from regard import masks, scores
from regard.inspection.explorer import pages

pytest_plugins = ("browser",)
pytestmark = pytest.mark.browser

N = len(WORDS)
STEPS = np.arange(0, 310, 10)  # so many are listed one by one
LOSS = 3 * np.exp(-STEPS / 170)
ENTROPY = np.random.default_rng(0).random((4, len(STEPS)))
TABLE = np.random.default_rng(1).standard_normal((31, 7))


def two_layers(seed, spread, **more):
    causal = np.tri(N, dtype=bool)
    slopes = {"numbers": {"slopes": np.array([2.0**-4, 2.0**-8])}, "score": scores.alibi(2)}
    options = {"mask": masks.causal(), **more}
    return [
        make_case("a", N, N, 2, 2, seed, causal, spread=spread, **options),
        make_case("b", N, N, 2, 2, seed + 1, causal, spread=spread, **slopes, **options),
    ]


@pytest.fixture(scope="module")
def cases():
    return two_layers(50, 3.0), two_layers(60, 1.0)


@pytest.fixture(scope="module")
def page(cases, tmp_path_factory):
    ours, others = (
        trace_of(each, list(WORDS), title) for each, title in zip(cases, ("A <i>", "B"), strict=True)
    )
    training = {
        "title": "run 7",
        "curves": [
            {"name": "loss", "unit": "nats", "points": np.stack([STEPS, LOSS]), "split": "train"},
            {"name": "rate", "unit": None, "points": np.full((2, 1), np.nan), "split": None},
            {"name": "none", "unit": None, "points": np.zeros((2, 0)), "split": None},
        ],
        "maps": [
            {
                "name": "entropy",
                "unit": "nats",
                "rows": [f"layer {n // 2} head {n % 2}" for n in range(4)],
                "steps": STEPS,
                "values": ENTROPY,
            }
        ],
    }
    path = tmp_path_factory.mktemp("views") / "page.html"
    return pages.write(ours, path, compare=others, training=training, positions={"learned": TABLE})


@pytest.fixture
def open_tab(browser, page):
    opened = []

    def visit(part):
        opened.append(browser.visit(page.as_uri() + part, allowed=page.as_uri()))
        return opened[-1]

    yield visit
    for one in opened:
        one.check()
        browser.close(one)


def numbers(text):
    return [
        float(one.replace("−", "-")) for one in re.findall(r"(?<![\w.])[−-]?\d[\d.]*(?:e[−-]?\d+)?", text)
    ]


def divergence(ours, others):
    """Jensen and Shannon's, in bits, of each row."""
    middle = (ours + others) / 2
    parts = [
        np.where(p > 0, p * np.log2(np.where(p > 0, p, 1) / np.where(p > 0, middle, 1)), 0)
        for p in (ours, others)
    ]
    return (parts[0].sum(-1) + parts[1].sum(-1)) / 2


def open_numbers(visit, place):
    """The texts of the tables under the drawings of a tab."""
    visit.evaluate(
        "(place) => document.querySelectorAll(`${place} details`).forEach((one) => { one.open = true; })",
        place,
    )
    visit.settle()
    tables = "(place) => [...document.querySelectorAll(`${place} table`)].map((one) => one.innerText)"
    return visit.evaluate(tables, place)


def test_what_may_not_be_attended_to_is_not_drawn_in_compare(open_tab):
    visit = open_tab("#tab=compare&cmp=side&l=0&h=0")
    painted = visit.until(
        "(() => { const [canvas] = document.querySelectorAll('.compare-stage canvas');"
        " if (!canvas?.width) return null; const pen = canvas.getContext('2d');"
        " const at = (x, y) => pen.getImageData(x * canvas.width, y * canvas.height, 1, 1).data[3];"
        " const all = [0.3, 0.4, 0.5, 0.6].map((n) => [at(n, n + 0.1), at(n + 0.2, n)]);"
        " return all.some(([one]) => one) && all; })()"
    )
    assert painted == [[255, 0]] * 4


def test_two_traces_are_compared_in_numbers(open_tab, cases):
    ours, others = cases
    visit = open_tab("#tab=compare&l=1&h=1&row=30&key=12")
    text = visit.until(
        "(() => { const { innerText } = document.querySelector('.rg-compare');"
        " return innerText.includes('query 30') && innerText.includes('bits') && innerText; })()"
    )
    a, b = (each[1].weights[1][30, 12] for each in (ours, others))
    said = numbers(re.search(rf"query 30 ‘{WORDS[30]}’, key 12 ‘{WORDS[12]}’: (.*)", text)[1])
    assert np.allclose(said, [a, b, a - b], rtol=6e-3, atol=1e-5)
    apart = np.abs(ours[1].weights[1] - others[1].weights[1])
    size, row, key = numbers(re.search(r"Largest \|A − B\|[^:]*: (.*)", text)[1])[:3]
    assert (row, key) == np.unravel_index(apart.argmax(), apart.shape)
    assert abs(size - apart.max()) <= 0.006
    expected = np.array(
        [
            [divergence(x.weights[h], y.weights[h]).mean() for h in range(2)]
            for x, y in zip(ours, others, strict=True)
        ]
    )
    found = open_numbers(visit, ".rg-compare")
    listed = [numbers(table) for table in found if "." in table]
    assert listed
    for value in expected.ravel():
        assert min(abs(value - one) for table in listed for one in table) <= 0.006 * value


def test_texts_are_aligned_and_shown(browser, cases, tmp_path):
    """B has two words more before the tenth of A, and lacks the last two."""
    ours, others = (each[:1] for each in cases)
    moved = [*WORDS[:10], "quite", "suddenly", *WORDS[10:-2]]
    traces = (trace_of(ours, list(WORDS), "A"), trace_of(others, moved, "B"))
    path = pages.write(traces[0], tmp_path / "page.html", compare=traces[1])
    visit = browser.visit(path.as_uri() + "#tab=compare&h=1&row=30&key=12", allowed=path.as_uri())
    text = visit.until(
        "(() => { const { innerText } = document.querySelector('.rg-compare');"
        " return innerText.includes('query 30') && innerText; })()"
    )
    assert f"{N - 2} tokens are the same in both texts, in order; A has 2 of its own and B 2." in text
    one, other = (each[0].weights[1] for each in (ours, others))
    said = numbers(re.search(r"key 12 ‘\w+’: (.*)", text)[1])
    assert np.allclose(said, [one[30, 12], other[32, 14], one[30, 12] - other[32, 14]], rtol=6e-3, atol=1e-5)
    place = np.r_[0:10, 12:N]
    apart = np.abs(one[: N - 2, : N - 2] - other[np.ix_(place, place)])
    size, row, key = numbers(re.search(r"Largest \|A − B\|[^:]*: (.*)", text)[1])[:3]
    assert (row, key) == np.unravel_index(apart.argmax(), apart.shape)
    assert abs(size - apart.max()) <= 0.006
    lines = visit.evaluate(
        "[...document.querySelectorAll('.compare-tokens tr')].map((line) => [...line.cells].slice(1).map("
        "(one) => [one.innerText.trim(), one.className]))"
    )
    together = list(zip(*lines, strict=True))
    assert [(a[0], b[0]) for a, b in together if "alone" in a[1]][:2] == [("", "quite"), ("", "suddenly")]
    assert [a[0] for a, b in together if "current" in a[1]] == [WORDS[12]]
    assert all(a[0] == b[0] for a, b in together if "alone" not in a[1])
    # Side by side, a cell of B tells what A has there.
    visit.page.get_by_role("button", name="side by side").click()
    visit.settle()
    sides = visit.page.locator(".rg-compare .compare-row output").all_inner_texts()[:2]
    assert sides[0].startswith(f"query 30 ‘{WORDS[30]}’, key 12 ‘{WORDS[12]}’: ")
    assert sides[1].startswith(f"query 32 ‘{WORDS[30]}’, key 14 ‘{WORDS[12]}’: ")
    assert numbers(sides[0].split("’: ")[1]) == numbers(sides[1].split("’: ")[1])
    visit.page.get_by_role("button", name="next token of one text alone").click()
    visit.settle()
    assert "current" in visit.evaluate("document.querySelector('.compare-tokens tr').innerHTML")
    visit.check()
    browser.close(visit)


def test_a_run_is_shown_with_its_curves_and_heads(open_tab):
    visit = open_tab("#tab=training")
    found = visit.evaluate("document.querySelector('.rg-training').innerText")
    assert "run 7" in found
    assert "layer 1 head 1" in found
    shown = numbers(" ".join(open_numbers(visit, ".rg-training")))
    for value in (LOSS[0], LOSS[-1], ENTROPY[0, 0], ENTROPY[-1, 0]):
        assert min(abs(one - value) for one in shown) <= 0.006 * value
    assert (
        visit.evaluate("document.querySelectorAll('.rg-training svg path, .rg-training svg polyline').length")
        > 0
    )
    assert not visit.evaluate("document.querySelector('.rg-training').innerHTML.includes('NaN')")


def test_positions_are_shown_without_nan(open_tab):
    visit = open_tab("#tab=positions")
    text = visit.until(
        "(() => { const { innerText } = document.querySelector('.rg-positions');"
        " return innerText.includes('learned') && innerText; })()"
    )
    assert "alibi" in text.lower()
    assert not visit.evaluate("document.querySelector('.rg-positions').innerHTML.includes('NaN')")
    # However much a view holds, the tabs keep their height, and a table that scrolls is reached by keys.
    tabs, tab = (
        visit.page.locator(name).first.bounding_box()["height"] for name in (".rg-tabs", "[role=tab]")
    )
    assert tabs >= tab
    open_numbers(visit, ".rg-positions")
    tables = visit.evaluate(
        "[...document.querySelectorAll('.rg-positions table')].map(({ tabIndex }) => tabIndex)"
    )
    assert tables == [0] * 6


def test_everything_is_used(browser, page):
    visit, most = walk(browser, page)
    assert most <= 1500
    assert visit.probe("faintLetters") == []
    assert "A: A <i>" in visit.evaluate("document.querySelector('.rg-header').innerText")
    browser.close(visit)


def test_numbers_are_read_from_words():
    assert numbers("A 1.794e−4, B 0.01348, A − B −0.0133") == [1.794e-4, 0.01348, -0.0133]
