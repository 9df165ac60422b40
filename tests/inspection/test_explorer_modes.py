"""The explorer's page under every setting of a reader's system, and by its names and roles."""

import contextlib

import numpy as np
import pytest

from explorer_pages import CELLS, go

pytest_plugins = ("browser",)
pytestmark = pytest.mark.browser

CELL = "#row=30&key=12"
TABS = ("attention", "lines", "positions", "compare", "training")
# Roles that say nothing without a name.
NAMED = (
    "application button checkbox combobox dialog grid gridcell link listbox option radio region searchbox "
)
NAMED += "slider spinbutton switch tab table tablist textbox toolbar"
# Places of cells on the colour bar, from the picture that is printed in place of the map.
PRINTED = """(cells) => {
  const pen = document.querySelector("canvas.rg-print").getContext("2d");
  return cells.map(([row, key]) => {
    const { x, y } = __regard.pixel(row, key);
    const [r, g, b] = pen.getImageData(3 * x, 3 * y, 1, 1).data;
    return __regard.unit(r, g, b);
  });
}"""


@pytest.mark.parametrize(
    ("width", "height", "scale"),
    [(320, 640, 1), (640, 400, 2), (1280, 800, 1)],
    ids=["narrow", "zoomed", "usual"],
)
def test_nothing_is_out_of_reach(open_page, width, height, scale):
    visit = open_page(CELL, viewport={"width": width, "height": height}, device_scale_factor=scale)
    for tab in TABS:
        go(visit, f"{CELL}&tab={tab}")
        wide = visit.evaluate("document.scrollingElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, tab
        assert not visit.probe("unreachable"), tab
    go(visit, CELL)
    stage = visit.page.locator(".rg-stage").bounding_box()
    assert stage["width"] >= min(280, width - 40)
    assert 200 <= stage["height"] <= height - 60
    if width > 1000:
        assert visit.evaluate(
            "['.rg-atlas', '.rg-map', '.rg-reader', '.rg-details'].every((name) => {"
            " const { scrollWidth, clientWidth } = document.querySelector(`${name} .rg-host`);"
            " const { bottom } = document.querySelector(name).getBoundingClientRect();"
            " return scrollWidth <= clientWidth && bottom <= innerHeight; })"
        )
        go(visit, "#fold=%20")
        assert visit.page.locator(".rg-profiles .rg-host").is_visible()
        assert visit.page.locator(".rg-stage").bounding_box()["height"] >= 310


def test_focus_goes_in_the_order_of_the_page_and_can_be_seen(open_page):
    """Tab goes through every control in the order of the page and leaves it at the end."""
    visit = open_page(CELL)
    count = visit.probe("controls")
    unseen = []
    for _ in range(count + 5):
        visit.page.keyboard.press("Tab")
        unseen += visit.probe("ringless")
    assert not unseen
    found = visit.probe("reached")
    assert found["back"] == []
    radios = visit.evaluate("document.querySelectorAll('input[type=radio]').length")
    assert count - radios <= found["count"] <= count
    assert 20 < count < 150


def test_every_control_has_a_name(open_page):
    visit = open_page(CELL)
    visit.evaluate("() => document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    seen = set()
    session = visit.page.context.new_cdp_session(visit.page)
    for tab in TABS:
        go(visit, f"{CELL}&tab={tab}")
        for node in session.send("Accessibility.getFullAXTree")["nodes"]:
            if not node["ignored"]:
                role, name = node["role"]["value"], node.get("name", {}).get("value", "").strip()
                assert role not in NAMED.split() or name, (tab, role, node)
                seen.add(role)
    needed = "application button combobox grid searchbox tab tablist tabpanel table toolbar"
    assert set(needed.split()) <= seen
    grid = visit.page.locator("[role=grid]")
    assert [grid.get_attribute(f"aria-{count}count") for count in ("row", "col")] == ["3", "2"]
    assert visit.evaluate("document.documentElement.lang") == "en"
    # What is read aloud holds what is seen, for those who speak to their computer.
    assert not visit.probe("misnamed")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_schemes_are_followed_and_legible(open_page, layers, scheme):
    visit = open_page(f"{CELL}&l=1&h=1", color_scheme=scheme, reduced_motion="reduce")
    ground = visit.probe("ground", ".rg-map")
    assert (max(ground) < 70) if scheme == "dark" else (min(ground) > 230)
    assert not visit.probe("faint")
    # Nothing moves where little motion is asked for.
    visit.press("]", "+", "0")
    assert not visit.probe("moving")
    assert visit.evaluate("document.getAnimations().length") == 0
    assert visit.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    if scheme == "light":  # as paper is: every cell has its colour
        visit.evaluate("dispatchEvent(new Event('beforeprint'))")
        cells = [[row, key] for row, key in CELLS if key != 12]  # beside the crosshair
        expected = np.clip(1 + np.log2([layers[2].weights[1][row, key] for row, key in cells]) / 12, 0, 1)
        np.testing.assert_allclose(visit.evaluate(PRINTED, cells), expected, atol=0.01)
        visit.evaluate("dispatchEvent(new Event('afterprint'))")
    assert visit.page.locator("canvas.rg-print").count() == 0
    # A printed page shows the map without its tools.
    visit.page.emulate_media(media="print")
    visit.settle()
    shown = [visit.page.locator(name).is_visible() for name in (".rg-tools", ".rg-stage", "h1")]
    assert shown == [False, True, True]
    assert visit.evaluate("document.scrollingElement.scrollWidth <= innerWidth")


def test_forced_colours_tell_what_is_chosen(open_page):
    """With the system's own colours, what is chosen can still be told from what is not."""
    visit = open_page(CELL, forced_colors="active")
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


def test_two_on_one_page_have_their_own_states(open_page, page, tmp_path):
    """As a notebook or an article might have them: each has its own state, keys go to the last one used."""
    text = page.read_text(encoding="utf-8")
    start, end = text.index('<div class="regard">'), text.index('<script type="module">')
    both = tmp_path / "both.html"
    both.write_text(text[:start] + text[start:end] * 2 + text[end:], encoding="utf-8")
    visit = open_page("#l=1", both)
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


_tries = []


def test_what_a_crash_of_the_browser_ends_runs_once_more(open_page):
    """By the hook in conftest.py: the first time, the page's process is ended."""
    visit = open_page(CELL)
    _tries.append(visit)
    if len(_tries) == 1:
        with contextlib.suppress(Exception):  # it answers that it was crashed, or not at all
            visit.page.goto("chrome://crash", timeout=3000)
    visit.settle()
    assert len(_tries) == 2
