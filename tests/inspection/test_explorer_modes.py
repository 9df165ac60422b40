"""The explorer's page under every setting of a reader's system, and by its names and roles."""

import contextlib
import io
import time

import numpy as np
import pytest
from PIL import Image

pytest_plugins = ("browser", "explorer_layers")
pytestmark = pytest.mark.browser

TABS = ("attention", "lines", "positions", "compare", "training")
# Roles that say nothing without a name.
NAMED = {
    *("application", "button", "checkbox", "combobox", "dialog", "grid", "gridcell", "link", "listbox"),
    *("option", "radio", "region", "searchbox", "slider", "spinbutton", "switch", "tab", "table", "tablist"),
    *("textbox", "toolbar"),
}


def stage_height(visit):
    return visit.page.locator(".rg-stage").bounding_box()["height"]


@pytest.mark.parametrize(
    "settings",
    [
        {"viewport": {"width": 320, "height": 640}},
        {"viewport": {"width": 640, "height": 400}, "device_scale_factor": 2},  # 1280 x 800 at 200 %
        {"viewport": {"width": 1024, "height": 700}},
        {"viewport": {"width": 1280, "height": 800}},
        {"viewport": {"width": 2560, "height": 1300}},
    ],
    ids=["narrow", "zoomed", "small", "usual", "wide"],
)
def test_nothing_is_out_of_reach(open_page, settings):
    visit = open_page("#row=30&key=12", **settings)
    for tab in TABS:
        visit.evaluate("(tab) => { location.hash = `#row=30&key=12&tab=${tab}`; }", tab)
        visit.settle()
        wide = visit.evaluate("document.scrollingElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, tab
        assert not visit.probe("unreachable"), tab
    visit.evaluate("() => { location.hash = '#row=30&key=12'; }")
    visit.settle()
    stage = visit.page.locator(".rg-stage").bounding_box()
    assert stage["width"] >= min(280, settings["viewport"]["width"] - 40)
    assert 200 <= stage["height"] <= settings["viewport"]["height"] - 60
    if settings["viewport"]["width"] > 1000:
        visit.evaluate("() => { location.hash = '#fold=%20'; }")
        visit.settle()
        assert visit.page.locator(".rg-profiles .rg-host").is_visible()
        assert stage_height(visit) >= 310
        visit.evaluate("() => { location.hash = '#row=30&key=12'; }")
        visit.settle()
        assert visit.evaluate(
            "['.rg-atlas', '.rg-map', '.rg-reader', '.rg-details'].every((name) => {"
            " const { scrollWidth, clientWidth } = document.querySelector(`${name} .rg-host`);"
            " const { bottom } = document.querySelector(name).getBoundingClientRect();"
            " return scrollWidth <= clientWidth && bottom <= innerHeight; })"
        )


def test_focus_goes_in_the_order_of_the_page(open_page):
    """Tab goes through every control in the order of the page and leaves it at the end."""
    visit = open_page("#row=30&key=12")
    count = visit.probe("controls")
    for _ in range(count + 5):
        visit.page.keyboard.press("Tab")
    found = visit.probe("reached")
    assert found["back"] == []
    radios = visit.evaluate("document.querySelectorAll('input[type=radio]').length")
    assert count - radios <= found["count"] <= count
    assert 20 < count < 150


def test_focus_can_be_seen(open_page):
    visit = open_page("#row=30&key=12")
    unseen = []
    for _ in range(60):
        visit.page.keyboard.press("Tab")
        unseen += visit.probe("ringless")
    assert not unseen


def read_names(visit):
    session = visit.page.context.new_cdp_session(visit.page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    return [
        (node["role"]["value"], node.get("name", {}).get("value", "").strip(), node)
        for node in nodes
        if not node["ignored"]
    ]


def test_every_control_has_a_name(open_page):
    visit = open_page("#row=30&key=12")
    visit.evaluate("() => document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    seen = set()
    for tab in TABS:
        visit.evaluate("(tab) => { location.hash = `#row=30&key=12&tab=${tab}`; }", tab)
        visit.settle()
        for role, name, node in read_names(visit):
            assert role not in NAMED or name, (tab, role, node)
            seen.add(role)
    assert {
        "button",
        "combobox",
        "grid",
        "searchbox",
        "tab",
        "tablist",
        "tabpanel",
        "table",
        "toolbar",
    } <= seen
    assert "application" in seen
    grid = visit.evaluate(
        "(({ ariaRowCount, ariaColCount }) => [ariaRowCount, ariaColCount])"
        "(document.querySelector('[role=grid]'))"
    )
    assert grid == ["3", "2"]
    assert visit.evaluate("document.documentElement.lang") == "en"
    # What is read aloud holds what is seen, for those who speak to their computer.
    assert not visit.probe("misnamed")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_schemes_are_followed_and_legible(open_page, scheme):
    visit = open_page("#row=30&key=12", color_scheme=scheme)
    ground = visit.probe("ground", ".rg-map")
    assert (max(ground) < 70) if scheme == "dark" else (min(ground) > 230)
    assert not visit.probe("faint")


def test_nothing_moves_where_little_motion_is_asked_for(open_page):
    visit = open_page(reduced_motion="reduce")
    visit.press("]", "+", "m")
    assert not visit.probe("moving")
    assert visit.evaluate("document.getAnimations().length") == 0
    assert visit.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"


def test_forced_colours_tell_what_is_chosen(open_page):
    """With the system's own colours, what is chosen can still be told from what is not."""
    visit = open_page("#row=30&key=12", forced_colors="active")
    assert visit.evaluate("matchMedia('(forced-colors: active)').matches")
    looks = visit.evaluate(
        """() => {
          const { look } = window.probe;
          const tabs = [...document.querySelectorAll("[role=tab]")];
          const pressed = document.querySelector("button[aria-pressed=true]");
          const loose = pressed.parentElement.querySelector("button[aria-pressed=false]");
          return [tabs.map(look), [look(pressed), look(loose)]];
        }"""
    )
    assert looks[0][0] not in looks[0][1:]
    assert looks[1][0] != looks[1][1]
    # The map is a picture of numbers, which keeps its colours.
    assert visit.probe("colours") > 50


def test_a_printed_page_shows_the_map_without_its_tools(open_page):
    visit = open_page("#row=30&key=12", color_scheme="dark")
    visit.page.emulate_media(media="print")
    visit.settle()
    assert not visit.page.locator(".rg-tools").is_visible()
    assert visit.page.locator(".rg-stage").is_visible()
    assert visit.page.locator("h1").is_visible()
    assert visit.evaluate("document.scrollingElement.scrollWidth <= innerWidth")


def test_the_cells_of_the_map_are_on_paper(browser, open_page, layers, tmp_path):
    """The printed file, drawn by the browser: every cell lies where the crosshair says, in its colour."""
    visit = open_page("#l=1&h=1&row=30&key=12", color_scheme="dark")
    (tmp_path / "print.pdf").write_bytes(visit.page.pdf(prefer_css_page_size=True))
    (tmp_path / "print.html").write_text(
        '<body style="margin:0"><iframe src="print.pdf#toolbar=0" style="border:0;width:100vw;height:98vh">'
    )
    # The browser draws such a file by pages of its own.
    address = (tmp_path / "print.html").as_uri()
    paper = browser.visit(address, allowed="", ready=False, viewport={"width": 900, "height": 1100})
    cells = [[row, key] for row in range(0, 53, 3) for key in range(0, row + 1, 2)]
    # The chosen cell has a frame around it, its row and its key a line.
    cells = [[row, key] for row, key in cells if row != 30 and key != 12]
    expected = np.clip(1 + np.log2([layers[1].weights[1][row, key] for row, key in cells]) / 12, 0, 1)
    found, end = None, time.monotonic() + 20
    while found is None and time.monotonic() < end:
        picture = np.asarray(Image.open(io.BytesIO(paper.page.screenshot())).convert("RGB"), int)
        found = read_print(picture, cells)
    assert found is not None, "there is no crosshair on paper"
    visit.press("d")  # paper is light
    read = "(cells) => cells.map(([r, g, b]) => __regard.unit(r, g, b))"
    units = np.array(visit.evaluate(read, found.tolist()), float)
    assert np.mean(np.abs(units - expected) < 0.03) > 0.97
    # Back on the screen all is as it was.
    assert visit.page.locator("canvas.rg-base").is_visible()
    assert visit.page.locator("canvas.rg-print").count() == 0
    browser.close(paper)


def read_print(picture, cells):
    """Colours of cells, from the lines through query 30 and key 12 of 53; None before there are any."""
    line = (picture[..., 1] - picture[..., 0] > 40) & (picture[..., 2] - picture[..., 0] > 20)
    row, column = line.sum(1).argmax(), line.sum(0).argmax()
    # Colours at the edges of letters are no lines.
    (left, right), (top, bottom) = (
        np.flatnonzero(np.convolve(one, np.ones(9), "same") >= 9)[[0, -1]] + (-4, 5)
        if one.sum() > 150
        else (0, 0)
        for one in (line[row], line[:, column])
    )
    if not right or not bottom:
        return None
    return np.array(
        [
            picture[
                int(top + (i + 0.5) * (bottom - top) / 53),
                int(left + (j + 0.5) * (right - left) / 53),
            ]
            for i, j in cells
        ]
    )


def test_two_on_one_page_have_their_own_states(browser, layers_page, tmp_path):
    """As a notebook or an article might have them: each has its own state, keys go to the last one used."""
    text = layers_page.read_text(encoding="utf-8")
    start, end = text.index('<div class="regard">'), text.index('<script type="module">')
    both = tmp_path / "both.html"
    both.write_text(text[:start] + text[start:end] * 2 + text[end:], encoding="utf-8")
    visit = browser.visit(both.as_uri() + "#l=1", allowed=both.as_uri())
    states = "[...document.querySelectorAll('.regard')].map((root) => root.regard.state().c)"
    visit.evaluate("Promise.all([...document.querySelectorAll('.regard')].map((root) => root.regard.ready))")
    assert visit.evaluate(states) == [1, 0]
    visit.press("]")
    assert visit.evaluate(states) == [2, 0]
    visit.page.locator(".rg-stage").nth(1).focus()
    visit.press("]", "m")
    assert visit.evaluate(states) == [2, 1]
    visit.evaluate("() => document.activeElement.blur()")
    visit.press("]")
    assert visit.evaluate(states) == [2, 2]
    assert "l=2" in visit.evaluate("location.hash")
    assert visit.probe("repeated") == []
    visit.check()
    browser.close(visit)


_tries = []


def test_what_a_crash_of_the_browser_ends_runs_once_more(open_page):
    """By the hook in conftest.py: the first time, the page's process is ended."""
    visit = open_page("#row=30&key=12")
    _tries.append(visit)
    if len(_tries) == 1:
        with contextlib.suppress(Exception):  # it answers that it was crashed, or not at all
            visit.page.goto("chrome://crash", timeout=3000)
    visit.settle()
    assert len(_tries) == 2
