"""The explorer's head view in a browser: lines, their numbers, keys, and what stays in the link."""

import re

import numpy as np
import pytest

from explorer_pages import WORDS, long_case, make_case, trace_of
from regard import inspection, masks
from regard.inspection.explorer import pages

pytest_plugins = ("browser",)
pytestmark = pytest.mark.browser

N = len(WORDS)
TABLE = "[...document.querySelectorAll('.lines-table tbody tr')].map((one) => one.innerText)"


@pytest.fixture(scope="module")
def cases():
    causal = np.tri(N, dtype=bool)
    return [
        make_case(f"layer {n}", N, N, 3, 3, 70 + n, causal, spread=3.0, mask=masks.causal()) for n in range(2)
    ]


@pytest.fixture(scope="module")
def page(cases, tmp_path_factory):
    return pages.write(trace_of(cases, list(WORDS)), tmp_path_factory.mktemp("lines") / "page.html")


@pytest.fixture
def open_page(browser, page):
    opened = []

    def visit(part, path=page, **settings):
        opened.append(browser.visit(path.as_uri() + part, allowed=path.as_uri(), **settings))
        return opened[-1]

    yield visit
    for one in opened:
        one.check()
        browser.close(one)


def state(visit):
    return visit.evaluate("__regard.state()")


def painted(visit, least, end=2**31):
    """Wait until so many pixels between the columns have a colour, fewer than `end`; return how many."""
    return visit.until(
        "(() => { const c = document.querySelector('.lines-figure canvas');"
        " const { data } = c.getContext('2d').getImageData(0, 0, c.width, c.height);"
        " let n = 0; for (let at = 3; at < data.length; at += 4) n += data[at] > 8;"
        f" return n >= {least} && n < {end} && n; }})()"
    )


def test_a_token_shows_its_row_in_all_heads(open_page, cases):
    visit = open_page("#tab=lines&sel=0.0,0.2,1.1&row=30&key=12&dir=out")
    rows = visit.until(f"(({TABLE}).length && {TABLE})")
    heads = [(0, 0), (0, 2), (1, 1)]
    weights = np.stack([cases[c].weights[h][30] for c, h in heads])
    order = np.argsort(-weights.max(0), kind="stable")[:8]
    assert [int(row.split(" ")[0]) for row in rows] == order.tolist()
    for row, key in zip(rows, order, strict=True):
        assert WORDS[key] in row
        for said, weight in zip(row.split("\t")[1:], weights[:, key], strict=True):
            found = float(said.strip("< ").replace("\u2212", "-"))
            assert weight <= 1.05 * found if "<" in said else abs(found - weight) <= 0.055 * weight
    painted(visit, 500)
    # The products of the pair add up to its score.
    said = visit.evaluate("document.querySelector('.lines-products').innerText")
    score = cases[0].query[0, 30] @ cases[0].key[0, 12] / np.sqrt(5)
    found = re.search(r"Scaled sum (\S+),", said)[1].replace("\u2212", "-")
    assert abs(float(found) - score) <= 0.01 * abs(score) + 0.02
    # Who reads a key.
    visit.evaluate("() => { location.hash = '#tab=lines&sel=0.0,1.1&key=12&dir=in'; }")
    visit.until("document.querySelector('.lines-table caption').innerText.startsWith('Key 12')")
    rows = visit.evaluate(TABLE)
    weights = np.stack([cases[c].weights[h][:, 12] for c, h in ((0, 0), (1, 1))])
    assert [int(row.split(" ")[0]) for row in rows] == np.argsort(-weights.max(0), kind="stable")[:8].tolist()


def test_queries_are_walked_and_kept_by_keyboard_and_heads_by_buttons(open_page):
    visit = open_page("#tab=lines&sel=0.0,0.2")
    whole = painted(visit, 500)
    visit.page.locator(".lines-column").first.focus()
    visit.press("ArrowDown", "ArrowDown", "End")
    assert (state(visit)["row"], state(visit)["direction"]) == (N - 1, "out")
    active = visit.evaluate("document.activeElement.getAttribute('aria-activedescendant')")
    assert visit.evaluate("(id) => document.getElementById(id).ariaPosInSet", active) == str(N)
    visit.press("Enter", "ArrowUp", "ArrowUp", " ")
    assert state(visit)["asked"] == f"{N - 1},{N - 3}"
    painted(visit, 1, whole)
    visit.press("ArrowRight", "Home")
    assert (state(visit)["key"], state(visit)["direction"]) == (0, "in")
    visit.press("]")  # the keys of the page still work
    assert state(visit)["c"] == 1
    visit.press("[")
    visit.page.get_by_label("Add a head").select_option("1.1")
    assert state(visit)["selection"][-1] == [1, 1]
    visit.page.get_by_role("button", name="Leave out layer 1 head 1").click()
    assert [1, 1] not in state(visit)["selection"]
    # What a pointer is over shows its own lines, and is no choice.
    visit.press("Escape")
    before = state(visit)
    visit.page.locator(".lines-column").first.locator("[data-n='45']").hover()
    visit.until("document.querySelector('.lines-table caption').innerText.startsWith('Query 45')")
    assert state(visit)["row"] == before["row"]
    link = state(visit)["hash"]
    other = open_page(f"#{link}")
    parts = [one.split("&at=") for one in (link, state(other)["hash"])]
    assert parts[0][0] == parts[1][0]
    assert all(abs(int(at.split("-")[0]) - (N - 1)) < 40 for _, at in parts)
    assert other.evaluate("document.querySelectorAll('.lines-heads [aria-pressed=true]').length") == 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_head_view_fits_a_narrow_page_and_is_printed(open_page, scheme):
    settings = {"viewport": {"width": 390, "height": 800}, "color_scheme": scheme}
    visit = open_page("#tab=lines&sel=0.0,0.2,1.1&row=30&key=12&dir=out", **settings)
    wide = visit.evaluate("document.scrollingElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0
    assert not visit.probe("unreachable")
    assert not visit.probe("faint")
    painted(visit, 200)
    visit.page.emulate_media(media="print")
    visit.evaluate("dispatchEvent(new Event('beforeprint'))")
    visit.settle()
    painted(visit, 200)
    assert visit.page.locator(".lines-figure").bounding_box()["height"] >= 200
    assert not visit.page.get_by_label("Add a head").is_visible()


def test_of_a_long_text_only_what_is_in_sight_is_there(open_page, tmp_path):
    path = pages.write(trace_of([long_case()]), tmp_path / "long.html", pinned=[(0, 1)])
    visit = open_page("#tab=lines&sel=0.0,0.1&asked=900,1100&row=1200", path)
    visit.until("document.querySelector('.lines-table caption').innerText.startsWith('Query 1200')")
    assert visit.probe("nodes") < 700
    first, end = visit.evaluate(
        "(() => { const all = document.querySelectorAll('.lines-column')[0].querySelectorAll('[data-n]');"
        " return [Number(all[0].dataset.n), Number(all[all.length - 1].dataset.n)]; })()"
    )
    assert first < 1200 < end
    # The keys follow to where the strongest line leads.
    weights = long_case().weights[:, 1200]
    visit.until(
        f"document.querySelectorAll('.lines-column')[1].querySelector('[data-n=\"{weights.max(0).argmax()}\"]')"
        " !== null"
    )
    busy = visit.busy()
    for _ in range(5):
        visit.press("PageUp")
    assert visit.busy() - busy < 1.5


def test_heads_are_found_by_what_they_read_as_in_python(open_page, cases):
    trace = trace_of(cases, list(WORDS))
    visit = open_page("#tab=lines")
    form = visit.page.get_by_role("search")
    form.get_by_label("read", exact=True).fill("Mary John")
    form.get_by_label("from", exact=True).fill("the")
    form.get_by_label("from", exact=True).press("Enter")
    rows = visit.until(
        "(() => { const all = [...document.querySelectorAll('.lines-search tbody tr')];"
        " return all.length && all.map((one) => one.innerText.split('\\t')); })()"
    )
    expected = inspection.find_heads(trace, "the", ["Mary", "John"])
    assert len(rows) == len(expected) == 6
    for (name, weight, pairs), one in zip(rows, expected, strict=True):
        assert name == f"layer {one.call} head {one.head}"
        assert abs(float(weight.replace("\u2212", "-")) - one.weight) <= 6e-3 * one.weight
        assert int(pairs) == one.pairs
    form.get_by_role("button", name="show the first 4").click()
    chosen = [[one.call, one.head] for one in expected[:4]]
    assert state(visit)["selection"] == chosen
    other = open_page(f"#{state(visit)['hash']}")
    other.until("document.querySelectorAll('.lines-search tbody tr').length === 6")
    assert state(other)["selection"] == chosen


def test_notes_stay_in_the_link_and_in_the_files(open_page, cases, tmp_path):
    visit = open_page("#tab=lines&l=1&h=2")
    text = "reads <b> & 'names' 100 %"
    visit.page.locator(".rg-lines").get_by_label("Note on layer 1 head 2").fill(text)
    visit.press("Escape")
    assert text in open_page(f"#{state(visit)['hash']}").evaluate(
        "document.querySelector('.rg-lines .lines-notes').innerText"
    )
    visit.evaluate("() => { location.hash = '#tab=attention&l=1&h=2&scale=linear'; }")
    visit.settle()
    visit.page.get_by_text("Export", exact=True).click()
    files = {}
    for name in ("CSV", "HTML"):
        with visit.page.expect_download() as waiting:
            visit.page.locator(".export-box").get_by_role("button", name=name).click()
        files[name] = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(files[name])
    assert f"layer 1 head 2: {text}" in files["CSV"].read_text()
    # The saved page is a page like the one it was saved from, and opens as that was seen.
    saved = open_page("", files["HTML"])
    found = state(saved)
    assert (found["c"], found["h"], found["scale"]) == (1, 2, "linear")
    assert saved.evaluate("document.querySelector('.rg-atlas .head-note input').value") == text
    assert saved.evaluate("document.querySelector('noscript') !== null")
    pages.write(trace_of(cases), files["HTML"])  # which may be replaced
