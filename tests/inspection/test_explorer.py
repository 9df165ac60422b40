"""The explorer's page in a browser: alone with itself, true to a dense reference, and small."""

import numpy as np
import pytest

from economy import optimized
from explorer_pages import WORDS, long_case, many_cases, trace_of

pytest_plugins = ("browser",)
pytestmark = pytest.mark.browser

MOST_NODES = 1500
HALF = 2.0**-11  # of float16, half a step
LOG8 = 2 ** (12 / 254) - 1  # of the byte code, half a step
ROW_STATS = ("entropy", "max_weight", "first_mass", "local_mass", "distance", "sink_mass")


@pytest.fixture(scope="module")
def cases():
    return many_cases()


@pytest.fixture(scope="module")
def page(cases, tmp_path_factory):
    return trace_of(cases, list(WORDS)).explore(tmp_path_factory.mktemp("exact") / "page.html")


@pytest.fixture(scope="module")
def visit(browser, page):
    visit = browser.visit(page.as_uri())
    yield visit
    browser.close(visit)


@pytest.fixture(scope="module")
def long():
    return long_case()


@pytest.fixture(scope="module")
def long_visit(browser, long, tmp_path_factory):
    with optimized():
        path = trace_of([long]).explore(tmp_path_factory.mktemp("long") / "page.html", pinned=[(0, 1)])
    visit = browser.visit(path.as_uri())
    yield visit
    browser.close(visit)


def each(cases):
    return [(c, case, head) for c, case in enumerate(cases) for head in range(len(case.query))]


def ask_blocks(visit, c, head, level, shape, channel):
    up, across = level["queryBlock"], level["keyBlock"]
    found = visit.probe("blocks", [c, head, up, across, *shape, channel])
    return np.array(found, np.float64).reshape(shape)


def test_it_asks_for_nothing(visit, page):
    visit.press("]", ".", "m", "c", "c")
    assert visit.requests == [page.as_uri()]
    visit.check()
    policy = visit.evaluate("document.querySelector('meta[http-equiv]').content")
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe-inline'" not in policy


def test_the_policy_holds(browser, page):
    """What a token's text might try is refused, and the harness would see it."""
    visit = browser.visit(page.as_uri())
    tried = visit.evaluate(
        """async () => {
          const tries = {};
          tries.inline = await new Promise((done) => {
            const script = document.createElement("script");
            script.textContent = "window.__ran = true";
            document.body.append(script);
            setTimeout(() => done(window.__ran === true), 30);
          });
          tries.fetch = await fetch("https://example.org/").then(() => true, () => false);
          tries.image = await new Promise((done) => {
            const image = new Image();
            image.onload = () => done(true);
            image.onerror = () => done(false);
            image.src = "https://example.org/x.png";
          });
          return tries;
        }"""
    )
    assert tried == {"inline": False, "fetch": False, "image": False}
    assert visit.requests == [page.as_uri()]
    assert sum("policy" in complaint for complaint in visit.complaints) == 3
    browser.close(visit)


def test_cells_are_the_weights(visit, cases):
    for c, case, head in each(cases):
        expected = case.weights[head]
        found = np.array(visit.probe("cells", [c, head, *expected.shape]), float).reshape(expected.shape)
        # float16 of float32 weights
        assert np.all(np.abs(found - expected) <= HALF * expected + 1e-5), case.name
        assert np.all(found[~case.keep[head]] == 0), case.name
        assert np.all(np.abs(found.sum(-1) + case.sunk[head] - case.alive[head]) <= 2e-3), case.name


def test_blocks_are_sums_and_maxima_of_the_weights(visit, cases):
    for c, case, head in each(cases):
        for level in visit.evaluate("([c, h]) => __regard.levels(0, c, h)", [c, head]):
            mass, largest = case.level(head, level["queryBlock"], level["keyBlock"])
            found = ask_blocks(visit, c, head, level, mass.shape, "mass")
            peaks = ask_blocks(visit, c, head, level, mass.shape, "max")
            assert np.all(np.abs(found - mass) <= HALF * mass + 1e-5), (case.name, level)
            assert np.all(np.abs(peaks - largest) <= HALF * largest + 1e-5), (case.name, level)


def test_row_statistics_are_those_of_the_weights(visit, cases):
    for c, case, head in each(cases):
        found = visit.evaluate("([c, h]) => __regard.rowStats(0, c, h)", [c, head])
        assert found.pop("bin") == 1
        assert tuple(found) == ROW_STATS
        for name, expected in case.row_stats(head).items():
            values = np.array(found[name], np.float64)
            assert np.array_equal(np.isnan(values), np.isnan(expected)), (case.name, name)
            known = ~np.isnan(expected)
            error = np.abs(values - expected)[known]
            assert np.all(error <= HALF * np.abs(expected[known]) + 3e-5), (case.name, name)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pixels_have_the_colour_of_their_weight(browser, page, cases, theme):
    visit = browser.visit(page.as_uri() + "#l=0&h=0", allowed=page.as_uri(), color_scheme=theme)
    for c, case, head in each(cases)[::2] if theme == "light" else each(cases)[:3]:
        visit.evaluate("([c, h]) => { location.hash = `#l=${c}&h=${h}`; }", [c, head])
        visit.settle()
        visit.evaluate("__regard.drawn()")
        expected = case.weights[head]
        rows, keys = expected.shape
        cells = np.argwhere(case.keep[head] & (expected > 0))[:: 1 + rows * keys // 400].tolist()
        found = np.array(visit.probe("pixels", cells), float)
        low = 2.0 ** -max(12, np.ceil(np.log2(keys)) + 4)
        units = np.log([expected[i, j] / low for i, j in cells]) / np.log(1 / low)
        codes = 255 * np.clip(units, 0, 1)
        wrong = np.abs(255 * found[:, 3] - codes) > 1.01
        assert not wrong.any(), (case.name, np.array(cells)[wrong][:5], found[wrong][:5], codes[wrong][:5])
        # A map of one colour would be within a code of nothing.
        assert np.unique(np.rint(codes)).size > 5, case.name
    visit.check()
    browser.close(visit)


def test_blocks_of_a_long_call_are_within_half_a_step(long_visit, long):
    """What is stored is within half a step of a byte's code, and every coarser level follows from it."""
    for head in range(2):
        levels = long_visit.evaluate("([c, h]) => __regard.levels(0, c, h)", [0, head])
        assert levels[0]["queryBlock"] == (4 if head == 1 else 32)
        assert levels[-1]["queryBlock"] >= len(long.query[0])
        finer = None
        for level in levels:
            up, across = level["queryBlock"], level["keyBlock"]
            mass, largest = long.level(head, up, across)
            found = ask_blocks(long_visit, 0, head, level, mass.shape, "mass")
            peaks = ask_blocks(long_visit, 0, head, level, mass.shape, "max")
            assert np.all(np.abs(found - mass) <= LOG8 * mass + 2.0**-24), (head, level)
            assert np.all(np.abs(peaks - largest) <= LOG8 * largest + 2.0**-24), (head, level)
            # The laws, of what the page gives and nothing else.
            assert np.all(np.abs(found.sum(-1) - 1) <= LOG8), (head, level)
            assert np.all(peaks * (1 + LOG8) * across >= found * (1 - LOG8)), (head, level)
            rows, columns = np.indices(mass.shape)
            later = columns * across > rows * up + up - 1
            assert np.all(found[later] == 0), (head, level)
            assert np.all(peaks[later] == 0), (head, level)
            if finer is not None:
                check_parents(found, peaks, *finer)
            finer = found, peaks, living_rows(long, up)


def living_rows(case, block):
    rows = len(case.query[0])
    return np.minimum(block, rows - np.arange(0, rows, block))


def check_parents(mass, largest, finer_mass, finer_largest, rows):
    """Four blocks as one; two steps of the code apart at most, where the levels are stored each by itself."""
    shape = [2 * size for size in mass.shape]
    rows = np.pad(rows, (0, shape[0] - len(rows)))
    pad = [(0, size - given) for size, given in zip(shape, finer_mass.shape, strict=True)]
    cut = (mass.shape[0], 2, mass.shape[1], 2)
    sums = (np.pad(finer_mass, pad) * rows[:, None]).reshape(cut).sum((1, 3))
    parents = sums / np.maximum(rows.reshape(-1, 2).sum(-1), 1)[:, None]
    assert np.all(np.abs(parents - mass) <= 2.1 * LOG8 * mass + 2.0**-23)
    peaks = np.pad(finer_largest, pad).reshape(cut).max((1, 3))
    assert np.all(np.abs(peaks - largest) <= 2.1 * LOG8 * largest + 2.0**-23)


def test_nothing_finer_is_made_up(long_visit):
    """Below the stored blocks the page says that it does not know."""
    assert long_visit.evaluate("__regard.cell(0, 0, 0, 1000, 7)") is None
    assert long_visit.evaluate("__regard.block(0, 0, 1, 2, 2, 3, 3, 'mass')") is None
    long_visit.check()
