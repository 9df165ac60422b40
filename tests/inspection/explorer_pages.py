"""What the explorer's page shows in tests with a browser, and how they use it."""

import numpy as np

from page_traces import make_case
from regard import attend, inspection, masks

TEXT = """
When Mary and John went to the shop , John gave a drink to Mary . The cat that sat near the old door of the
house saw the dog , and the dog saw the cat , but neither moved . When Mary and John went to the shop , John
gave
"""
WORDS = TEXT.split()
N = len(WORDS)
CELLS = [[row, key] for row in range(3, N, 5) for key in range(0, row, 4)]


def long_case(n=1223):
    return make_case(n, heads=2, groups=1, seed=7, spread=2.0, mask=masks.causal())


def huge_trace(n=131_072):
    """One head with a window, at a length of which no matrix could be stored."""
    x = np.random.default_rng(8).standard_normal((1, 1, n, 3)).astype(np.float32)
    with inspection.capture(title="very long") as trace:
        attend(x, x, x, mask=masks.causal() & masks.sliding_window(63))
    return trace


def make_layers(layers=3, heads=2, seed=20):
    return [make_case(N, heads=heads, seed=seed + c, spread=3.0, mask=masks.causal()) for c in range(layers)]


def state(visit):
    return visit.evaluate("(({ hash, ...all }) => all)(__regard.state())")


def go(visit, part):
    visit.evaluate("(part) => { location.hash = part; }", part)
    visit.settle()


def number(text):
    return float(text.replace("\u2212", "-"))


def check_colours(visit, weights, low=2.0**-12, high=1.0, cells=CELLS, codes=1.01):
    """Compare pixels of the map with weights on a log scale, in steps of the colour bar."""
    found = np.array(visit.probe("pixels", cells), float)[:, 3]
    values = np.maximum([weights[row, key] for row, key in cells], 1e-300)
    expected = np.clip(np.log(values / low) / np.log(high / low), 0, 1)
    wrong = ~(np.abs(found - expected) <= codes / 255)
    assert not wrong.any(), (np.array(cells)[wrong][:5], found[wrong][:5], expected[wrong][:5])
    # A map of one colour would be within a code of nothing.
    assert np.unique(np.rint(255 * expected)).size > 5


STEPS = ("]", "n", "n", "ArrowDown", "ArrowRight", "+", "+", "+", "m", "l", "r", "r", "-", "0", "m")


def walk(open_page, path):
    """Open a page and use everything; the visit, and the largest number of nodes that the page had."""
    visit, most = open_page(path=path), 0
    for tab in (1, 2, 3, 0):
        visit.evaluate("(tab) => document.querySelectorAll('[role=tab]')[tab].click()", tab)
        visit.settle()
        most = max(most, visit.probe("nodes"))
    for key in (*STEPS, "e", "Escape", "?", "Escape", "/", "Escape"):
        visit.press(key)
        most = max(most, visit.probe("nodes"))
    visit.evaluate("__regard.drawn()")
    visit.check()
    assert visit.requests == [path.as_uri()]
    return visit, most
