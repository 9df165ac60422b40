"""The explorer's page in a browser: alone with itself, true to a dense reference, small, and quick."""

import numpy as np
import pytest

from explorer_pages import WORDS, check_colours, go, huge_trace, long_case, many_cases, walk
from page_traces import many_heads, trace_of

pytest_plugins = ("browser",)
pytestmark = pytest.mark.browser

MOST_NODES = 1500
MOST_SECONDS = 1.5  # of work, until the page can be used
HALF = 2.0**-11  # of float16, half a step
LOG8 = 2 ** (12 / 254) - 1  # of the byte code, half a step


@pytest.fixture(scope="module")
def cases():
    return many_cases()


@pytest.fixture(scope="module")
def page(cases, tmp_path_factory):
    return trace_of(cases, WORDS).explore(tmp_path_factory.mktemp("exact") / "page.html")


def each(cases):
    return [(c, case, head) for c, case in enumerate(cases) for head in range(len(case.query))]


def ask_blocks(visit, c, head, level, shape, channel):
    up, across = level["queryBlock"], level["keyBlock"]
    found = visit.probe("blocks", [c, head, up, across, *shape, channel])
    return np.array(found, np.float64).reshape(shape)


def test_it_asks_for_nothing_and_the_policy_holds(open_page, page):
    """What a token's text might try is refused, and the harness would see it."""
    visit = open_page()
    visit.press("]", ".", "m", "c", "c")
    assert visit.requests == [page.as_uri()]
    visit.check()
    policy = visit.evaluate("document.querySelector('meta[http-equiv]').content")
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe-inline'" not in policy
    tried = visit.evaluate(
        """async () => {
          const script = document.createElement("script");
          script.textContent = "window.__ran = true";
          document.body.append(script);
          await new Promise((done) => setTimeout(done, 30));
          const fetched = await fetch("https://example.org/").then(() => true, () => false);
          const image = new Image();
          const shown = new Promise((done) => {
            image.onload = () => done(true);
            image.onerror = () => done(false);
          });
          image.src = "https://example.org/x.png";
          return [window.__ran === true, fetched, await shown];
        }"""
    )
    assert tried == [False, False, False]
    assert visit.requests == [page.as_uri()]
    assert sum("policy" in complaint for complaint in visit.complaints) == 3
    visit.complaints.clear()


def test_cells_blocks_and_row_statistics_are_those_of_the_weights(open_page, cases):
    visit = open_page()
    for c, case, head in each(cases):
        expected, stats = case.weights[head], case.row_stats(head)
        found = np.array(visit.probe("cells", [c, head, *expected.shape]), float).reshape(expected.shape)
        # float16 of float32 weights
        assert np.all(np.abs(found - expected) <= HALF * expected + 1e-5), case.name
        assert np.all(found[~case.keep[head]] == 0), case.name
        assert np.all(np.abs(found.sum(-1) + case.sunk[head] - case.alive[head]) <= 2e-3), case.name
        for level in visit.evaluate("([c, h]) => __regard.levels(0, c, h)", [c, head]):
            truth = case.level(head, level["queryBlock"], level["keyBlock"])
            for channel, blocks in zip(("mass", "max"), truth, strict=False):
                found = ask_blocks(visit, c, head, level, blocks.shape, channel)
                assert np.all(np.abs(found - blocks) <= HALF * blocks + 1e-5), (case.name, level)
        found = visit.evaluate("([c, h]) => __regard.rowStats(0, c, h)", [c, head])
        assert found.pop("bin") == 1
        assert tuple(found) == tuple(stats)
        for name, expected in stats.items():
            values = np.array(found[name], np.float64)
            assert np.array_equal(np.isnan(values), np.isnan(expected)), (case.name, name)
            known = ~np.isnan(expected)
            error = np.abs(values - expected)[known]
            assert np.all(error <= HALF * np.abs(expected[known]) + 3e-5), (case.name, name)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pixels_have_the_colour_of_their_weight(open_page, cases, theme):
    visit = open_page("#l=0&h=0", color_scheme=theme)
    for c, case, head in each(cases)[::2] if theme == "light" else each(cases)[:1]:
        go(visit, f"#l={c}&h={head}")
        visit.evaluate("__regard.drawn()")
        weights = case.weights[head]
        cells = np.argwhere(case.keep[head] & (weights > 0))[:: 1 + weights.size // 400].tolist()
        low = 2.0 ** -max(12, np.ceil(np.log2(weights.shape[1])) + 4)
        check_colours(visit, weights, low, cells=cells)


def test_a_long_call_is_told_within_half_a_step_and_drawn_as_the_hand_moves(open_page, tmp_path):
    """What is stored is within half a step of a byte's code, and every coarser level follows from it."""
    long = long_case()
    visit = open_page(path=trace_of([long]).explore(tmp_path / "page.html", pinned=[(0, 1)]))
    for head in range(2):
        levels = visit.evaluate("([c, h]) => __regard.levels(0, c, h)", [0, head])
        assert levels[0]["queryBlock"] == (4 if head == 1 else 32)
        assert levels[-1]["queryBlock"] >= len(long.query[0])
        finer = None
        for level in levels:
            up, across = level["queryBlock"], level["keyBlock"]
            mass, largest, living = long.level(head, up, across)
            found, peaks = (ask_blocks(visit, 0, head, level, mass.shape, name) for name in ("mass", "max"))
            assert np.all(np.abs(found - mass) <= LOG8 * mass + 2.0**-24), (head, level)
            assert np.all(np.abs(peaks - largest) <= LOG8 * largest + 2.0**-24), (head, level)
            # The laws, of what the page gives and nothing else.
            assert np.all(np.abs(found.sum(-1) - 1) <= LOG8), (head, level)
            assert np.all(peaks * (1 + LOG8) * across >= found * (1 - LOG8)), (head, level)
            assert not (found + peaks)[mass == 0].any(), (head, level)
            if finer is not None:
                check_parents(found, peaks, *finer)
            finer = found, peaks, living
    # Nothing finer is made up: below the stored blocks the page says that it does not know.
    assert visit.evaluate("__regard.cell(0, 0, 0, 1000, 7)") is None
    assert visit.evaluate("__regard.block(0, 0, 1, 2, 2, 3, 3, 'mass')") is None
    check_dragging(visit)


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


def check_dragging(visit):
    """A large map is drawn as the hand moves."""
    visit.press("+", "+")
    box = visit.page.locator(".rg-stage").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    before = visit.evaluate("__regard.state().view")
    visit.page.mouse.move(x, y)
    visit.page.mouse.down()
    started = visit.busy()
    visit.evaluate("() => { window.times = window.probe.frames(60); }")
    for step in range(60):
        visit.page.mouse.move(x - 2 * step, y - step)
    times = visit.evaluate("window.times")
    work = (visit.busy() - started) / len(times)
    visit.page.mouse.up()
    assert visit.evaluate("__regard.state().view")["k0"] > before["k0"] + 20
    assert work < 0.02


@pytest.mark.parametrize(
    ("make", "pinned", "megabytes"),
    [(lambda: huge_trace(131_072), 0, 5), (lambda: many_heads(12, 12, 31), 8, 5)],
    ids=["one very long call", "144 heads"],
)
def test_large_pages_are_small_and_ready_in_time(browser, tmp_path, make, pinned, megabytes):
    path = make().explore(tmp_path / "page.html", pinned=pinned)
    visit, most = walk(browser, path)
    figures = f"{most} nodes, {visit.opened:.2f} s of work to open, {path.stat().st_size} bytes"
    assert most <= MOST_NODES, figures
    assert visit.opened <= MOST_SECONDS, figures
    assert path.stat().st_size < 1e6 * megabytes, figures
    browser.close(visit)
