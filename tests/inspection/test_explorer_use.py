"""The explorer's page in use: by keyboard, address and ear, as files, and under every setting of a system."""

import csv
import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from explorer_pages import WORDS, N, check_colours, go, huge_trace, number, state, walk
from page_traces import make_case, many_heads, trace_of
from regard import masks

pytest_plugins = ("browser",)
pytestmark = pytest.mark.browser

CELL = "#row=30&key=12"
TABS = ("attention", "lines", "positions", "compare", "training")
# Roles that say nothing without a name.
NAMED = "application button checkbox combobox dialog grid gridcell link listbox option radio region "
NAMED += "searchbox slider spinbutton switch tab table tablist textbox toolbar"


def test_keys_are_listed_move_the_page_and_are_not_taken_while_typing(open_page):
    visit = open_page()

    def after(keys, *names):
        for key in keys:
            visit.press(key)
        return [*map(state(visit).get, names)]

    found = after(["]", ".", "m", "l", "r"], "c", "h", "channel", "scale", "rowRank")
    assert found == [1, 1, "max", "linear", True]
    row, key = after(["ArrowDown"], "row", "key")  # the crosshair comes where the eye is, then moves by cells
    way = [f"Arrow{where}" for where in ("Down", "Right", "Right", "Up", "Up", "Left")]
    assert after(way, "row", "key") == [row - 1, key + 1]
    (near,), (wider,) = after("++", "view"), after("-", "view")
    assert near["q1"] - near["q0"] < N / 2
    assert wider["q1"] - wider["q0"] > near["q1"] - near["q0"]
    assert after("0", "view") == [{"q0": 0, "q1": N, "k0": 0, "k1": N}]
    assert [after("c", "tab") for _ in "12"] == [["compare"], ["attention"]]
    assert after(["d", "Escape"], "row") == [None]
    assert visit.evaluate("document.querySelector('.regard').dataset.theme") == "dark"
    visit.press("?")
    listed = visit.page.locator("dialog[open] kbd").all_text_contents()
    assert {*"[],.+-0mlrce/npd?", "Esc", "↑", "↓", "←", "→"} <= set(listed)
    visit.press("Escape")
    assert visit.page.locator("dialog[open]").count() == 0
    read = "[...document.querySelectorAll('[aria-keyshortcuts]')].map((one) => one.ariaKeyShortcuts)"
    assert not {*"[],.+-0mlre/npd?", "Escape"} - set(" ".join(visit.evaluate(read)).split())
    before = state(visit)
    visit.press("/", *"m]r")
    assert visit.evaluate("document.activeElement.value") == "m]r"
    # Letters choose in a list, and what is pressed with Control or Alt is the browser's.
    visit.page.get_by_label("Scale").focus()
    visit.press("m", "]")
    visit.evaluate("() => document.activeElement.blur()")
    visit.press("Control+m", "Alt+]", "Meta+.")
    assert state(visit) == before


def test_a_screen_reader_hears_query_key_weight_and_rank_and_a_token_is_asked(open_page, layers):
    visit = open_page("#l=1&h=1&row=30&key=12")
    visit.press("ArrowDown", "ArrowRight")
    row, key = state(visit)["row"], state(visit)["key"]
    assert (row, key) == (31, 13)
    said = visit.until("probe.said('rank')")
    weights = layers[1].weights[1][row]
    rank = 1 + int((weights > weights[key]).sum())
    assert f"query {row} '{WORDS[row]}' to key {key} '{WORDS[key]}'" in said
    assert re.search(rf"rank {rank} of {row + 1}\b", said), said
    assert number(re.search(r", ([\d.e−]+), rank", said)[1]) == pytest.approx(weights[key], rel=0.006)
    # A token that is clicked is asked, and its largest weights are listed.
    token = visit.page.locator(".reader-panes [data-token='33']")
    token.scroll_into_view_if_needed()
    token.click()
    read = "probe.rows('.rg-details table')"
    weights = layers[1].weights[1][33]
    rows = visit.until(f"(({read})[0]?.[0] === '{weights.argmax()}') && {read}")
    order = np.argsort(-weights)[: len(rows)]
    assert [int(row[0]) for row in rows] == order.tolist()
    np.testing.assert_allclose([float(row[3]) for row in rows], weights[order], rtol=0.006)


def test_far_edges_and_matches_are_visited_one_by_one(open_page, layers):
    visit = open_page("#l=0&h=1")
    visit.press("n")
    visit.until("__regard.state().row !== null")
    place = lambda: (state(visit)["row"], state(visit)["key"])
    first, weights = place(), layers[0].weights[1]
    scores = np.where(weights >= 0.05, weights * np.log2(1 + np.abs(layers[0].distance)), 0)
    assert first == np.unravel_index(scores.argmax(), scores.shape), "from the strongest on"
    visit.press("n")
    assert place() != first
    visit.press("p")
    assert place() == first
    visit.press("Escape", "/")
    a, b = [n for n, word in enumerate(WORDS) if word == "cat"][:2]
    for text, row in (("cat", a), ("Enter", b), ("Shift+Enter", a), (":33", 33), ("#30", 30)):
        if "Enter" not in text:
            visit.page.locator(".reader-bar input[type=search]").fill(text)
        visit.press(text if "Enter" in text else "Enter")
        visit.until(f"__regard.state().row === {row}")


def test_panes_fold_and_resize_and_a_link_keeps_it_and_plain_leaves_heads_and_text(open_page):
    visit = open_page()
    shown = lambda name: visit.page.locator(name).is_visible()
    visit.page.get_by_role("button", name="Fold heads").click()
    visit.page.get_by_role("button", name="Fold profiles").press("Enter")
    visit.page.locator(".rg-profiles svg").first.wait_for()
    assert not shown(".rg-grid")
    visit.page.get_by_role("separator", name="Size of profiles").press("ArrowUp")
    place = visit.page.get_by_role("separator", name="Size of reader and details").bounding_box()
    visit.page.mouse.move(place["x"] + 4, place["y"] + 40)
    visit.page.mouse.down()
    visit.page.mouse.move(place["x"] - 96, place["y"] + 40, steps=3)
    visit.page.mouse.up()
    visit.page.wait_for_timeout(250)
    sizes = [int(size) for size in state(visit)["sizes"].split("-")]
    again = open_page(visit.evaluate("location.hash"))
    for one in (visit, again):
        side, below = (one.page.locator(pane).bounding_box() for pane in (".rg-side", ".rg-profiles"))
        assert [side["width"], below["height"]] == pytest.approx(sizes[1:3], abs=2)
    again.page.get_by_role("button", name="plain").click()
    again.page.locator("bdi[data-token='7']").hover()
    again.until("__regard.state().row === 7")
    assert not again.page.locator(".rg-map").is_visible()
    again.press("/")  # what is looked for needs its field, and the rest is back
    assert again.page.locator(".rg-map").is_visible()


def test_a_short_text_opens_to_be_read_by_pointing_and_in_full_where_a_link_says_so(open_page, tmp_path):
    path = trace_of([make_case(24, mask=masks.causal())], WORDS[:24]).explore(tmp_path / "page.html")
    visit, full = open_page("", path), open_page("#l=0", path)
    visit.until("probe.holding('.reader-status', ['Point at a token'])")
    visit.page.locator("bdi[data-token='5']").hover()
    said = visit.until("probe.holding('.reader-status', ['Query 5'])")
    assert re.match(r"Query 5 .* reads .* 0\.\d+, .* 0\.\d+", said)
    seen = [one.page.locator(part).is_visible() for one in (visit, full) for part in (".rg-map", ".rg-guide")]
    assert seen == [False, False, True, False]


def test_the_address_keeps_the_state(open_page, layers):
    visit = open_page()
    visit.press("]", ".", "ArrowDown", "ArrowRight", "+", "m", "l")
    visit.page.wait_for_timeout(250)  # moving about renews the address a little later
    address = visit.evaluate("location.hash")
    kept = state(visit)
    assert re.fullmatch(r"#[\w=&.,:%-]+", address)
    again = state(open_page(address))
    assert list(again.pop("view").values()) == pytest.approx([*kept["view"].values()], abs=0.01)
    assert again == {name: value for name, value in kept.items() if name != "view"}
    # Going back undoes the last step that was a step: not the walk from head to head before it.
    assert visit.evaluate("history.length") == 3
    visit.page.go_back()
    visit.settle()
    found = state(visit)
    assert (found["channel"], found["c"], found["h"], found["row"]) == ("mass", 1, 1, kept["row"])
    # Locked, the next head is drawn in the colours of this one, and so is a link.
    limits = "(({ low, high }) => [low, high])(__regard.state().limits)"
    field = visit.page.get_by_label("Range")
    assert visit.evaluate(limits) == [2**-12, 1]
    field.select_option("head")
    visit.settle()
    low, high = visit.evaluate(limits)
    assert high == pytest.approx(layers[1].weights[1].max(), rel=0.01)
    field.select_option("locked")
    visit.press(",", "]")
    locked = visit.evaluate(limits)
    assert locked == pytest.approx([low, high], rel=1e-3)
    visit.page.wait_for_timeout(250)
    assert open_page(visit.evaluate("location.hash")).evaluate(limits) == locked


def download(visit, label):
    visit.press("e")
    with visit.page.expect_download() as waiting:
        visit.page.locator(".export-menu").get_by_text(label, exact=True).click()
    visit.press("Escape")
    file = waiting.value
    assert file.suggested_filename == f"keys-files-layer-1-head-0.{label.lower()}"
    return Path(file.path()).read_bytes()


def test_saved_files_hold_what_is_seen(open_page, layers):
    visit = open_page("#l=1&h=0&q=10-20&k=4-14&row=12&key=7")
    weights = layers[1].weights[0]
    assert download(visit, "PNG")[:8] == b"\x89PNG\r\n\x1a\n"
    assert ET.fromstring(download(visit, "SVG"))[0].text == "layer 1 head 0: keys & <files>"
    remark, *lines = download(visit, "CSV").decode().splitlines()
    assert remark.startswith("# layer 1 head 0: keys & <files>: attention weights")
    header, words, *body = csv.reader(lines)
    keys, rows = [int(key) for key in header[2:]], [int(line[0]) for line in body]
    assert [json.loads(word) for word in words[2:]] == [WORDS[key] for key in keys]
    expected = weights[np.ix_(rows, keys)]
    assert expected.size >= 100
    for found in (np.load(io.BytesIO(download(visit, "NPY"))), [line[2:] for line in body]):
        np.testing.assert_allclose(np.squeeze(np.array(found, float)), expected, rtol=2e-3, atol=1e-5)
    visit.press("e")
    visit.page.get_by_label("Width").select_option("3.25")
    visit.evaluate("() => { window.print = () => null; }")
    visit.page.get_by_role("button", name="PDF").click()
    assert visit.probe("greys", ".rg-sheet image") == (np.array(keys) > np.array(rows)[:, None]).sum() > 5
    sheets = re.findall(rb"/MediaBox \[0 0 ([\d.]+)", visit.page.pdf(prefer_css_page_size=True))
    assert [float(width) for width in sheets] == [pytest.approx(234, abs=0.5)]


def test_the_atlas_is_one_tab_stop_with_arrows_within(open_page, layers):
    visit = open_page()
    cell = visit.page.locator("[role=gridcell][tabindex='0']")
    assert cell.count() == 1
    cell.focus()
    visit.press("ArrowDown", "ArrowRight")
    assert (state(visit)["c"], state(visit)["h"]) == (1, 1)
    assert visit.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    visit.press("Home", "ArrowUp", "Shift+ArrowRight", "Shift+Space")
    assert state(visit)["selection"] == [[0, 0], [0, 1]]
    visit.evaluate("__regard.drawn()")
    check_colours(visit, layers[0].weights.mean(0))
    # The same with a pointer: the picture knows which head lies where.
    cell.focus()
    visit.press("Control+End")
    box, name = cell.bounding_box(), cell.get_attribute("aria-label")
    assert name.startswith("layer 2 head 1,")  # counted from 0, as in Python
    visit.press("Control+Home")
    assert (state(visit)["c"], state(visit)["h"]) == (0, 0)
    visit.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    visit.settle()
    assert state(visit)["selection"] == [[2, 1]]
    assert visit.page.locator(".rg-guide li").count() == 3
    assert visit.page.locator(".rg-guide .rg-done").inner_text().startswith("Choose a head")


def middle_of(visit, row, key):
    box = visit.page.locator("canvas.rg-base").bounding_box()
    at = visit.evaluate("([row, key]) => __regard.pixel(row, key)", [row, key])
    return box["x"] + at["x"], box["y"] + at["y"]


def test_the_pointer_chooses_zooms_and_drags(open_page):
    visit = open_page()
    visit.page.mouse.click(*middle_of(visit, 30, 11))
    visit.settle()
    assert (state(visit)["row"], state(visit)["key"]) == (30, 11)
    # The wheel zooms about the cell under it, which stays there (once there are labels to make room for).
    visit.press("+", "+")
    before = state(visit)["view"]
    place = middle_of(visit, 31, 12)
    visit.page.mouse.move(*place)
    visit.page.mouse.wheel(0, -600)
    visit.settle()
    near = state(visit)["view"]
    assert near["q1"] - near["q0"] < 0.7 * (before["q1"] - before["q0"])
    assert np.allclose(middle_of(visit, 31, 12), place, atol=6)
    before = state(visit)["view"]
    visit.page.mouse.down()
    visit.page.mouse.move(place[0] + 60, place[1] + 40, steps=4)
    visit.page.mouse.up()
    visit.settle()
    after = state(visit)["view"]
    assert after["k0"] < before["k0"]
    assert after["q0"] < before["q0"]
    assert (state(visit)["row"], state(visit)["key"]) == (30, 11)  # a drag is no click


# True to a dense reference, small and quick, and alone with itself.


def test_it_asks_for_nothing_and_the_policy_holds(open_page, page):
    visit = open_page()
    visit.press("]", ".", "m", "c", "c")
    assert visit.requests == [page.as_uri()]
    visit.check()
    assert visit.probe("attempts") == [False, False, False]
    assert visit.requests == [page.as_uri()]
    assert sum("policy" in complaint for complaint in visit.complaints) == 3
    visit.complaints.clear()


@pytest.mark.parametrize("make", [huge_trace, lambda: many_heads(12, 12, 31)], ids=["long", "144 heads"])
def test_large_pages_are_small_and_ready_in_time(open_page, tmp_path, make):
    path = make().explore(tmp_path / "page.html")
    visit, most = walk(open_page, path)
    figures = f"{most} nodes, {visit.opened:.2f} s of work to open, {path.stat().st_size} bytes"
    assert most <= 1500, figures
    assert visit.opened <= 1.5, figures
    assert path.stat().st_size < 5e6, figures


# Under every setting of a reader's system, and by names and roles.


@pytest.mark.parametrize(("width", "height", "scale"), [(320, 640, 1), (640, 400, 2), (1280, 800, 1)])
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


def test_focus_goes_in_the_order_of_the_page_and_can_be_seen(open_page):
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
def test_light_and_dark_schemes_are_followed_and_legible(open_page, scheme):
    visit = open_page(f"{CELL}&l=1&h=1", color_scheme=scheme, reduced_motion="reduce")
    ground = visit.probe("ground", ".rg-map")
    assert (max(ground) < 70) if scheme == "dark" else (min(ground) > 230)
    assert not visit.probe("faint")
    # Nothing moves where little motion is asked for.
    visit.press("]", "+", "0")
    assert not visit.probe("moving")
    assert visit.evaluate("document.getAnimations().length") == 0
    assert visit.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"


def test_forced_colours_tell_what_is_chosen(open_page):
    visit = open_page(CELL, forced_colors="active")
    assert visit.evaluate("matchMedia('(forced-colors: active)').matches")
    pressed, loose = visit.probe("pressedAndLoose")
    assert pressed != loose


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
