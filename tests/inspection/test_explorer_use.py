"""The explorer's page in use: by keyboard, by address, by ear, and what it gives away as files."""

import csv
import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from explorer_pages import CELLS, WORDS, N, check_colours, go, number, state

pytest_plugins = ("browser",)
pytestmark = pytest.mark.browser


def test_keys_are_listed_move_the_page_and_are_not_taken_while_typing(open_page):
    """Every key is in the list, and has a button or another control that says so (and keys.test.js)."""
    visit = open_page()

    def after(keys, *names):
        for key in keys:
            visit.press(key)
        found = state(visit)
        return [found[name] for name in names]

    assert after(["]", ".", "m", "l", "r"], "c", "h", "channel", "scale", "rowRank") == [
        1,
        1,
        "max",
        "linear",
        True,
    ]
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
    for key, shown in (("e", True), ("Escape", False)):
        visit.press(key)
        assert visit.evaluate("document.querySelector('.export-menu').open") is shown
    visit.press("?")
    listed = visit.page.locator("dialog[open] kbd").all_text_contents()
    assert {*"[],.+-0mlrce/npd?", "Esc", "↑", "↓", "←", "→"} <= set(listed)
    visit.press("Escape")
    assert visit.page.locator("dialog[open]").count() == 0
    shown = visit.evaluate(
        """[...document.querySelectorAll("[aria-keyshortcuts]")].flatMap(
          (one) => one.getAttribute("aria-keyshortcuts").split(" "))"""
    )
    assert not {*"[],.+-0mlre/npd?", "Escape"} - set(shown)
    before = state(visit)
    visit.press("/", *"m]r")
    assert visit.evaluate("document.activeElement.value") == "m]r"
    # Letters choose in a list, and what is pressed with Control or Alt is the browser's.
    visit.page.get_by_label("Scale").focus()
    visit.press("m", "]")
    visit.evaluate("() => document.activeElement.blur()")
    visit.press("Control+m", "Alt+]", "Meta+.")
    assert state(visit) == before


def test_a_screen_reader_hears_query_key_weight_and_rank_and_details_are_a_table(open_page, layers):
    visit = open_page("#l=1&h=1&row=30&key=12")
    visit.press("ArrowDown", "ArrowRight")
    row, key = state(visit)["row"], state(visit)["key"]
    assert (row, key) == (31, 13)
    said = visit.until(
        """[...document.querySelectorAll("[aria-live=polite]")].map((one) => one.textContent).find(
          (text) => text.includes("rank"))"""
    )
    weights = layers[1].weights[1][row]
    rank = 1 + int((weights > weights[key]).sum())
    assert f"query {row} '{WORDS[row]}' to key {key} '{WORDS[key]}'" in said
    assert re.search(rf"rank {rank} of {row + 1}\b", said), said
    assert number(re.search(r", ([\d.e−]+), rank", said)[1]) == pytest.approx(weights[key], rel=0.006)
    go(visit, "#l=2&h=0&row=40&key=3")
    read = """[...document.querySelectorAll(".rg-details table tbody tr")].map(
      (row) => [...row.cells].map((one) => one.innerText))"""
    weights = layers[2].weights[0][40]
    first = int(weights.argmax())
    rows = visit.until(f"(({read})[0]?.[0] === '{first}') && {read}")
    order = np.argsort(-weights)[: len(rows)]
    assert [[int(row[0]), row[1].strip()] for row in rows] == [[key, WORDS[key]] for key in order]
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
    visit.page.keyboard.type("cat")
    cats = [n for n, word in enumerate(WORDS) if word == "cat"]
    for key, row in (("Enter", cats[0]), ("Enter", cats[1]), ("Shift+Enter", cats[0])):
        visit.press(key)
        visit.until(f"__regard.state().row === {row}")
    visit.press("Escape", "/")
    visit.page.keyboard.type("no such word")
    visit.press("Enter")
    assert state(visit)["row"] == cats[0]


def test_panes_fold_and_resize_and_a_link_keeps_it(open_page):
    visit = open_page()
    shown = lambda name: visit.page.locator(name).is_visible()
    # What nobody sees takes no time of a step from head to head.
    visit.press("]", "[")
    assert visit.page.locator(".rg-profiles figure").count() == 0
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
    # What is searched for is not left folded.
    visit.page.get_by_role("button", name="Fold reader and details").click()
    assert not shown(".reader-text")
    visit.press("/")
    assert visit.evaluate("document.activeElement.type") == "search"


def test_the_address_keeps_the_state(open_page):
    visit = open_page()
    visit.press("]", ".", "ArrowDown", "ArrowDown", "ArrowRight", "+", "m", "l")
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
    for part in ("#l=99&h=-3&q=5-1&ch=<b>&tab=nothing", "#%", "#__proto__=1&view=0&q=-5-900000"):
        go(visit, part)  # breaks nothing; state.test.js has more
        found = state(visit)
        assert (found["tab"], 0 <= found["view"]["q0"] < found["view"]["q1"] <= N) == ("attention", True)
        visit.press("]", "ArrowDown")


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
    data = download(visit, "PNG")
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert all(int.from_bytes(data[at : at + 4], "big") > 400 for at in (16, 20)), "wide and high"
    svg = ET.fromstring(download(visit, "SVG"))
    assert svg.tag.endswith("svg")
    assert svg.find("{http://www.w3.org/2000/svg}title").text == "layer 1 head 0: keys & <files>"
    images = [one.get("href")[:22] for one in svg.iter("{http://www.w3.org/2000/svg}image")]
    assert images == ["data:image/png;base64,"] * 2
    values = np.load(io.BytesIO(download(visit, "NPY")))
    remark, *lines = download(visit, "CSV").decode().splitlines()
    assert remark.startswith("# layer 1 head 0: keys & <files>: attention weights")
    header, words, *body = csv.reader(lines)
    keys, rows = [int(key) for key in header[2:]], [int(line[0]) for line in body]
    assert [json.loads(word) for word in words[2:]] == [WORDS[key] for key in keys]
    assert [json.loads(line[1]) for line in body] == [WORDS[row] for row in rows]
    found = np.array([[float(number) for number in line[2:]] for line in body])
    expected = weights[np.ix_(rows, keys)]
    assert expected.size >= 100
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-5)
    np.testing.assert_allclose(np.ravel(values), np.ravel(expected), rtol=2e-3, atol=1e-5)
    # Copied Python is Python.
    visit.press("e")
    visit.page.get_by_text("copy Python", exact=True).click()
    compile(visit.until("document.querySelector('.export-menu textarea').value"), "copied", "exec")
    visit.complaints[:] = [text for text in visit.complaints if "clipboard" not in text.lower()]


def test_the_atlas_is_one_tab_stop_with_arrows_within(open_page, layers):
    """One stop of the tab key, arrows within; with shift, heads add up and their mean is drawn."""
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
    visit.press("Control+Home")
    assert (state(visit)["c"], state(visit)["h"]) == (0, 0)
    visit.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    visit.settle()
    assert state(visit)["selection"] == [[2, 1]]
    # Counted from 0 wherever they are named, as in Python.
    assert name.startswith("layer 2 head 1,")
    assert "layer 2 head 1" in visit.evaluate("document.querySelector('.rg-map').textContent.toLowerCase()")


def test_the_colour_range_is_of_all_heads_of_one_or_locked(open_page, layers):
    visit = open_page("#l=0&h=0")
    limits = "(({ low, high }) => [low, high])(__regard.state().limits)"
    assert visit.evaluate(limits) == [2**-12, 1]
    field = visit.page.get_by_label("Range")
    field.select_option("head")
    visit.settle()
    weights = layers[0].weights[0]
    low, high = visit.evaluate(limits)
    assert high == pytest.approx(weights.max(), rel=0.01)
    least = np.quantile(weights[weights > 2**-23.8], 0.05)
    assert low == pytest.approx(least, rel=0.3)
    check_colours(visit, weights, low, high, codes=2.5)
    # Locked, the next head is drawn in the colours of this one, and so is a link.
    field.select_option("locked")
    visit.press(".", "]")
    kept = visit.evaluate(limits)
    assert kept == pytest.approx([low, high], rel=1e-3)
    visit.page.wait_for_timeout(250)
    again = open_page(visit.evaluate("location.hash"))
    assert again.evaluate(limits) == kept
    assert again.page.get_by_label("Range").input_value() == "locked"


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


def test_without_the_first_keys_rows_are_shared_out_anew(open_page, layers):
    """What is left of a row is shared out, and the page says that it was."""
    visit = open_page("#l=0&h=0&sink=1")
    assert "renormalised" in visit.evaluate("document.querySelector('.rg-map').textContent")
    weights = layers[0].weights[0] * (np.arange(N) > 3)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-9)
    check_colours(visit, weights, cells=[cell for cell in CELLS if cell[1] > 3], codes=1.6)
    assert np.isnan(visit.probe("pixels", [[30, 1]])[0][3])


def test_the_reader_asks_the_token_that_is_clicked(open_page, layers):
    """A token that is clicked is asked; its strongest key is tinted most."""
    visit = open_page("#l=0&h=1")
    token = visit.page.locator(".reader-panes [data-token='33']")
    token.scroll_into_view_if_needed()
    token.click()
    visit.settle()
    assert state(visit)["row"] == 33
    assert token.get_attribute("aria-selected") == "true"
    visit.page.get_by_role("button", name="is read by").click()
    visit.settle()
    assert visit.evaluate("__regard.state().direction") == "in"
    assert state(visit)["key"] == 33
    assert visit.evaluate("document.querySelectorAll('.reader-panes path').length") <= 32
    column = layers[0].weights[1][:, 33]
    said = visit.evaluate("document.querySelector('.rg-details table tbody tr').innerText")
    assert int(re.match(r"\d+", said)[0]) == int(column.argmax())
