"""The explorer's page of long calls and of many heads: bytes, nodes, and the work until it can be used."""

import numpy as np
import pytest

from economy import optimized
from explorer_pages import huge_trace, long_case, make_case, many_heads, trace_of, walk
from regard import masks
from regard.inspection.explorer.payload import collect

pytest_plugins = ("browser",)
pytestmark = pytest.mark.browser

MOST_NODES = 1500
MOST_SECONDS = 1.5  # of work, until the page can be used


def check_size(browser, path, record_property):
    visit, most = walk(browser, path)
    browser.close(visit)
    figures = f"{most} nodes, {visit.opened:.2f} s of work to open, {path.stat().st_size} bytes"
    record_property("page", figures)
    assert most <= MOST_NODES, figures
    assert visit.opened <= MOST_SECONDS, figures


def test_a_short_call_makes_a_small_page(browser, tmp_path, record_property):
    case = make_case("short", 128, 128, 2, 2, 1, np.tri(128, dtype=bool), mask=masks.causal())
    path = trace_of([case], [f"word{n}" for n in range(128)]).explore(tmp_path / "page.html")
    check_size(browser, path, record_property)
    assert path.stat().st_size < 500_000


def test_a_very_long_call_stays_below_5_megabytes(browser, tmp_path, record_property):
    with optimized():
        path = huge_trace(131_072).explore(tmp_path / "page.html", pinned=0)
    check_size(browser, path, record_property)
    assert path.stat().st_size < 5_000_000


@pytest.mark.parametrize(("layers", "heads"), [(12, 12), (3, 32)])
def test_pages_of_many_heads_are_small_and_ready_in_time(browser, tmp_path, record_property, layers, heads):
    path = many_heads(layers, heads, 31).explore(tmp_path / "page.html")
    check_size(browser, path, record_property)


def test_a_page_of_162_heads_stays_below_4_megabytes(record_property):
    """162 heads at N = 4096, of which eight are carried in detail: random ones, which deflate least."""
    with optimized():
        trace = many_heads(54, 3, 4096)
        payload = collect([trace], max_bytes=20_000_000, pinned=[(0, 0)])
    whole = len(payload.json()) + sum(map(len, payload.blocks())) + 100_000
    head = payload.document["traces"][0]["calls"][0]["head"][0]
    finest = head["levels"][0]
    assert finest["query_block"] == 8
    names = (finest["mass"], finest["max"], finest["rows"], head["top_keys"], head["top_weights"])
    detail = sum(4 * len(payload.chunks[name]) // 3 for name in names)
    record_property("bytes", f"{whole} with one pinned head, {detail} for each more")
    assert whole + 7 * detail <= 4_000_000


def test_dragging_a_large_map_draws_in_time(browser, tmp_path, record_property):
    """Dragging a large map draws as the hand moves."""
    with optimized():
        path = trace_of([long_case()]).explore(tmp_path / "page.html", pinned=1)
    visit = browser.visit(path.as_uri())
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
    after = visit.evaluate("__regard.state().view")
    assert after["k0"] > before["k0"] + 20
    record_property("frames", f"p95 {np.quantile(times, 0.95):.1f} ms, {1000 * work:.1f} ms of work each")
    assert work < 0.02
    visit.check()
    browser.close(visit)
