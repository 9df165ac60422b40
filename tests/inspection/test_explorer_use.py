"""The explorer's page in use: by keyboard, by address, by ear, and what it gives away as files."""

import csv
import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from explorer_pages import WORDS

pytest_plugins = ("browser", "explorer_layers")
pytestmark = pytest.mark.browser

N = len(WORDS)
STATE = "(({ hash, ...all }) => all)(__regard.state())"


def state(visit):
    return visit.evaluate(STATE)


def test_keys_move_through_layers_heads_rows_and_tabs(open_page):
    visit = open_page()
    start = state(visit)
    assert (start["c"], start["h"], start["row"], start["key"]) == (0, 0, None, None)
    visit.press("]")
    assert state(visit)["c"] == 1
    visit.press("]", "]")  # there is no fourth layer
    assert state(visit)["c"] == 2
    visit.press("[", ".")
    assert (state(visit)["c"], state(visit)["h"]) == (1, 1)
    visit.press(",")
    assert state(visit)["h"] == 0
    visit.press("m")
    assert state(visit)["channel"] == "max"
    visit.press("m")
    scales = []
    for _ in range(3):
        visit.press("l")
        scales.append(state(visit)["scale"])
    assert scales == ["linear", "power", "log"]
    visit.press("r")
    assert state(visit)["rowRank"] is True
    visit.press("r")
    # The crosshair comes where the eye is, then moves by cells.
    visit.press("ArrowDown")
    first = state(visit)
    visit.press("ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowUp", "ArrowLeft")
    moved = state(visit)
    assert (moved["row"] - first["row"], moved["key"] - first["key"]) == (-1, 1)
    visit.press("+", "+")
    near = state(visit)["view"]
    assert near["q1"] - near["q0"] < N / 2
    visit.press("-")
    assert state(visit)["view"]["q1"] - state(visit)["view"]["q0"] > near["q1"] - near["q0"]
    visit.press("0")
    assert state(visit)["view"] == {"q0": 0, "q1": N, "k0": 0, "k1": N}
    visit.press("c")
    assert state(visit)["tab"] == "compare"
    visit.press("c")
    assert state(visit)["tab"] == "attention"
    visit.press("d")
    assert visit.evaluate("document.querySelector('.regard').dataset.theme") == "dark"
    visit.press("d", "Escape")
    assert state(visit)["row"] is None
    visit.press("e")
    assert visit.evaluate("document.querySelector('.export-menu').open")
    visit.press("Escape")
    assert not visit.evaluate("document.querySelector('.export-menu').open")


def test_the_list_of_keys_is_whole(open_page):
    """Every key is in the list, and has a button or another control that says so."""
    visit = open_page()
    visit.press("?")
    listed = visit.evaluate(
        "[...document.querySelectorAll('dialog[open] kbd')].map((one) => one.textContent)"
    )
    assert {*"[],.+-0mlrce/npd?", "Esc", "↑", "↓", "←", "→"} <= set(listed)
    visit.press("Escape")
    assert visit.evaluate("document.querySelector('dialog[open]')") is None
    shown = visit.evaluate(
        """[...document.querySelectorAll("[aria-keyshortcuts]")].flatMap(
          (one) => one.getAttribute("aria-keyshortcuts").split(" "))"""
    )
    missing = {*"[],.+-0mlre/npd?", "Escape"} - set(shown)
    assert not missing


def test_typing_is_not_a_shortcut(open_page):
    visit = open_page()
    before = {**state(visit), "hash": ""}
    visit.press("/", *"m]r")
    assert visit.evaluate("document.activeElement.value") == "m]r"
    assert {**state(visit), "hash": ""} == before
    # Letters choose in a list, and what is pressed with Control or Alt is the browser's.
    visit.page.get_by_label("Scale").focus()
    visit.press("m", "]")
    assert {**state(visit), "hash": ""} == before
    visit.evaluate("() => document.activeElement.blur()")
    visit.press("Control+m", "Alt+]", "Meta+.")
    assert {**state(visit), "hash": ""} == before
    visit.press("m")
    assert state(visit)["channel"] == "max"


def test_a_screen_reader_hears_query_key_weight_and_rank(open_page, layers):
    """A screen reader hears query, key, weight and rank."""
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
    number = float(re.search(r", ([\d.e−]+), rank", said)[1].replace("−", "-"))
    assert abs(number - weights[key]) <= 0.006 * weights[key]


def test_details_are_a_table(open_page, layers):
    visit = open_page("#l=2&h=0&row=40&key=3")
    rows = visit.until(
        """[...document.querySelectorAll(".rg-details table tbody tr")].map(
          (row) => [...row.cells].map((one) => one.innerText))"""
    )
    weights = layers[2].weights[0][40]
    order = np.argsort(-weights)[: len(rows)]
    assert [int(row[0]) for row in rows] == order.tolist()
    assert [row[1].strip() for row in rows] == [WORDS[key] for key in order]
    found = np.array([float(row[3]) for row in rows])
    assert np.all(np.abs(found - weights[order]) <= 0.006 * weights[order])
    # A row of the table leads to the key.
    visit.page.locator(".rg-details table tbody tr button").nth(2).click()
    visit.settle()
    assert state(visit)["key"] == order[2]


def test_of_several_heads_each_part_says_what_it_shows(open_page, layers):
    visit = open_page("#l=1&h=1&sel=1.0,1.1&row=40&key=3")
    assert visit.page.locator(".rg-what").inner_text().startswith("Mean of 2 heads (layer.head 1.0, 1.1)")
    caption = visit.page.locator(".rg-details caption:visible").inner_text()
    assert caption.startswith("layer 1 head 1, one of 2: Query 40")
    shown = visit.page.locator(".rg-details td.details-weight").first.inner_text()
    assert float(shown) == pytest.approx(layers[1].weights[1][40].max(), rel=0.01)
    line = visit.page.locator(".rg-head-line").inner_text()
    largest = re.search(r"layer 1 head 1 · largest weight ([\d.]+)", line)
    assert float(largest[1]) == pytest.approx(layers[1].weights[1].max(), rel=0.01)
    visit.page.locator(".rg-controls select").first.select_option("max_weight")
    visit.settle()
    mean = re.search(r"mean of row maxima ([\d.]+)", visit.page.locator(".rg-head-line").inner_text())
    assert float(mean[1]) == pytest.approx(layers[1].weights[1].max(-1).mean(), rel=0.01)


def test_far_edges_are_visited_from_the_strongest_on(open_page, layers):
    visit = open_page("#l=0&h=1")
    visit.press("n")
    visit.until("__regard.state().row !== null")
    first = state(visit)
    weights = layers[0].weights[1]
    away = np.abs(np.arange(N)[:, None] - np.arange(N))
    best = np.argmax(np.where(weights >= 0.05, weights * np.log2(1 + away), 0))
    assert (first["row"], first["key"]) == np.unravel_index(best, weights.shape)
    visit.press("n")
    second = state(visit)
    assert (second["row"], second["key"]) != (first["row"], first["key"])
    visit.press("p")
    assert (state(visit)["row"], state(visit)["key"]) == (first["row"], first["key"])


def test_search_goes_from_match_to_match(open_page):
    visit = open_page()
    visit.press("/")
    visit.page.keyboard.type("cat")
    visit.press("Enter")
    places = [n for n, word in enumerate(WORDS) if word == "cat"]
    visit.until("__regard.state().row !== null")
    assert state(visit)["row"] == places[0]
    visit.press("Enter")
    assert state(visit)["row"] == places[1]
    visit.press("Shift+Enter")
    assert state(visit)["row"] == places[0]
    visit.press("Escape", "/")
    visit.page.keyboard.type("no such word")
    visit.press("Enter")
    assert state(visit)["row"] == places[0]


def test_panes_fold_and_resize_and_a_link_keeps_it(open_page):
    visit = open_page("", viewport={"width": 1440, "height": 900})
    stage = visit.page.locator(".rg-stage")
    # The map comes first: it takes most of its stage, with the curves below folded.
    box = stage.bounding_box()
    (left, top), (right, bottom) = (middle_of(visit, n, n) for n in (0, N - 1))
    assert min(right - left, bottom - top) > 0.68 * max(box["width"], box["height"])
    assert not visit.page.locator(".rg-profiles .rg-host").is_visible()
    # What nobody sees takes no time of a step from head to head.
    visit.press("]", "[")
    assert visit.page.locator(".rg-profiles figure").count() == 0
    visit.page.get_by_role("button", name="Fold heads").click()
    visit.page.get_by_role("button", name="Fold profiles").press("Enter")
    visit.page.locator(".rg-profiles svg").first.wait_for()
    assert not visit.page.locator(".rg-grid").is_visible()
    assert stage.bounding_box()["width"] > box["width"] + 200
    edge = visit.page.get_by_role("separator", name="Size of profiles")
    edge.press("ArrowUp")
    edge.press("ArrowUp")
    text = visit.page.get_by_role("separator", name="Size of reader and details")
    place = text.bounding_box()
    visit.page.mouse.move(place["x"] + 4, place["y"] + 40)
    visit.page.mouse.down()
    visit.page.mouse.move(place["x"] - 96, place["y"] + 40, steps=3)
    visit.page.mouse.up()
    visit.page.wait_for_timeout(250)
    found = state(visit)
    assert found["fold"] == "heads"
    sizes = [int(size) for size in found["sizes"].split("-")]
    panes = [".rg-side", ".rg-profiles"]
    drawn = [visit.page.locator(pane).bounding_box() for pane in panes]
    assert abs(drawn[0]["width"] - sizes[1]) <= 2
    assert abs(drawn[1]["height"] - sizes[2]) <= 2
    again = open_page(visit.evaluate("location.hash"), viewport={"width": 1440, "height": 900})
    assert [again.page.locator(pane).bounding_box() for pane in panes] == drawn
    # What is searched for is not left folded.
    again.settle()
    again.page.get_by_role("button", name="Fold reader and details").click()
    assert not again.page.locator(".reader-text").is_visible()
    again.press("/")
    assert again.evaluate("document.activeElement.type") == "search"


def test_the_address_keeps_the_state(open_page):
    visit = open_page()
    visit.press("]", ".", "ArrowDown", "ArrowDown", "ArrowRight", "+", "m", "l")
    visit.page.wait_for_timeout(250)  # moving about renews the address a little later
    address = visit.evaluate("location.hash")
    kept = state(visit)
    assert re.fullmatch(r"#[\w=&.,:%-]+", address)
    again = state(open_page(address))
    for name, value in kept.items():
        if name == "view":
            assert np.allclose(list(again[name].values()), list(value.values()), atol=0.01)
        elif name != "hash":
            assert again[name] == value, name
    # Going back undoes the last step that was a step: not the walk from head to head before it.
    assert visit.evaluate("history.length") == 3
    visit.page.go_back()
    visit.settle()
    found = state(visit)
    assert (found["channel"], found["c"], found["h"]) == ("mass", 1, 1)
    assert found["row"] == kept["row"]


@pytest.mark.parametrize(
    "part",
    [
        "#l=99&h=-3&q=5-1&k=abc&row=1e9&key=NaN&ch=<b>&tab=nothing&scale=%00&sel=9.9,x",
        "#%",
        "#" + "l=1&" * 2000,
        "#__proto__=1&constructor=2&toString=x&view=0&q=-5-900000&k=1-1",
    ],
)
def test_an_address_that_makes_no_sense_breaks_nothing(open_page, part):
    visit = open_page(part)
    found = state(visit)
    assert 0 <= found["c"] < 3
    assert 0 <= found["h"] < 2
    assert found["tab"] == "attention"
    assert 0 <= found["view"]["q0"] < found["view"]["q1"] <= N
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
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width > 400
    assert height > 400
    svg = ET.fromstring(download(visit, "SVG"))
    assert svg.tag.endswith("svg")
    assert svg.find("{http://www.w3.org/2000/svg}title").text == "layer 1 head 0: keys & <files>"
    assert [one.get("href")[:22] for one in svg.iter("{http://www.w3.org/2000/svg}image")] == [
        "data:image/png;base64,"
    ] * 2
    values = np.load(io.BytesIO(download(visit, "NPY")))
    assert values.shape[0] >= 10
    assert values.shape[1] >= 10
    remark, *lines = download(visit, "CSV").decode().splitlines()
    assert remark.startswith("# layer 1 head 0: keys & <files>: attention weights")
    header, words, *body = csv.reader(lines)
    keys, rows = [int(key) for key in header[2:]], [int(line[0]) for line in body]
    assert [json.loads(word) for word in words[2:]] == [WORDS[key] for key in keys]
    assert [json.loads(line[1]) for line in body] == [WORDS[row] for row in rows]
    found = np.array([[float(number) for number in line[2:]] for line in body])
    expected = weights[np.ix_(rows, keys)]
    assert np.all(np.abs(found - expected) <= 2e-3 * expected + 1e-5)
    assert expected.size >= 100
    assert np.all(np.abs(np.ravel(values) - np.ravel(expected)) <= 2e-3 * np.ravel(expected) + 1e-5)


def test_copied_python_is_python(open_page):
    visit = open_page("#l=1&h=0&q=10-20&k=4-14")
    visit.press("e")
    visit.page.get_by_text("copy Python", exact=True).click()
    compile(visit.until("document.querySelector('.export-menu textarea').value"), "copied", "exec")
    visit.complaints[:] = [text for text in visit.complaints if "clipboard" not in text.lower()]


def test_the_atlas_is_one_tab_stop_with_arrows_within(open_page, layers):
    """One stop of the tab key, arrows within; with shift, heads add up and their mean is drawn."""
    visit = open_page()
    stops = visit.evaluate(
        "[...document.querySelectorAll('[role=gridcell]')].filter((one) => one.tabIndex === 0).length"
    )
    assert stops == 1
    visit.page.locator("[role=gridcell][tabindex='0']").focus()
    visit.press("ArrowDown", "ArrowRight")
    assert (state(visit)["c"], state(visit)["h"]) == (1, 1)
    assert visit.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    visit.press("Home", "ArrowUp", "Shift+ArrowRight", "Shift+Space")
    assert state(visit)["selection"] == [[0, 0], [0, 1]]
    visit.evaluate("__regard.drawn()")
    mean = (layers[0].weights[0] + layers[0].weights[1]) / 2
    cells = [[row, key] for row in range(3, N, 5) for key in range(0, row, 4)]
    found = np.array(visit.probe("pixels", cells))
    codes = 255 * np.clip(1 + np.log2([mean[row, key] for row, key in cells]) / 12, 0, 1)
    assert np.all(np.abs(255 * found[:, 3] - codes) <= 1.01)
    # The same with a pointer: the picture knows which head lies where.
    visit.page.locator("[role=gridcell][tabindex='0']").focus()
    visit.press("Control+End")
    cell = visit.page.locator("[role=gridcell][tabindex='0']")
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
    cells = [[row, key] for row in range(3, N, 5) for key in range(0, row, 4)]
    found = np.array(visit.probe("pixels", cells))
    expected = [weights[row, key] for row, key in cells]
    codes = np.clip(np.log(np.array(expected) / low) / np.log(high / low), 0, 1)
    assert np.all(np.abs(found[:, 3] - codes) <= 0.01)
    # Locked, the next head is drawn in the colours of this one, and so is a link.
    field.select_option("locked")
    visit.press(".", "]")
    kept = visit.evaluate(limits)
    assert kept == pytest.approx([low, high], rel=1e-3)
    visit.page.wait_for_timeout(250)
    again = open_page(visit.evaluate("location.hash"))
    assert again.evaluate(limits) == kept
    assert again.page.get_by_label("Range").input_value() == "locked"


def test_pictures_of_heads_have_their_own_contrast_and_keep_their_names(open_page):
    read = """() => {
      const canvas = document.querySelector(".rg-grid canvas");
      const cells = [...document.querySelectorAll("[role=gridcell]")].map((one) => one.style);
      const pen = canvas.getContext("2d");
      const corners = cells.map(({ left, top, width }) => {
        const at = [left, top, width].map(parseFloat);
        const { data } = pen.getImageData(at[0] + at[2] - 20, at[1] + 1, 18, 12);
        return data.filter((_, n) => n % 4 === 0).reduce((all, red) => all + (red < 90), 0);
      });
      return [canvas.toDataURL(), corners];
    }"""
    visit = open_page("#sort=entropy")
    visit.page.wait_for_timeout(300)
    own, corners = visit.evaluate(read)
    assert len(corners) == 6
    assert min(corners) >= 6, "dark letters where a causal head is empty"
    assert "strong in each head" in visit.page.locator(".rg-legend").inner_text()
    visit.page.get_by_label("contrast per head").uncheck()
    visit.page.wait_for_timeout(300)
    assert visit.evaluate(read)[0] != own
    assert "strong" not in visit.page.locator(".rg-legend").inner_text()
    assert "contrast=0" in visit.evaluate("__regard.state().hash")
    visit.page.locator(".rg-controls select").nth(1).select_option("model")
    visit.page.wait_for_timeout(300)
    assert max(visit.evaluate(read)[1]) < 6


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
    weights = layers[0].weights[0].copy()
    weights[:, :4] = 0
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-9)
    cells = [[row, key] for row in range(7, N, 5) for key in range(4, row, 4)]
    found = np.array(visit.probe("pixels", cells))
    codes = 255 * np.clip(1 + np.log2([weights[row, key] for row, key in cells]) / 12, 0, 1)
    assert np.all(np.abs(255 * found[:, 3] - codes) <= 1.6)
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
