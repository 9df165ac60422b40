"""The explorer's other views: two traces compared, heads as lines, a run, positions, what heads add."""

import re

import numpy as np
import pytest

from explorer_pages import WORDS, N, go, long_case, make_layers, number, state, walk
from page_traces import make_case, trace_of
from regard import masks, scores
from regard.inspection.explorer import pages

pytest_plugins = ("browser",)
pytestmark = pytest.mark.browser

STEPS = np.arange(0, 310, 10)  # so many are listed one by one
LOSS = 3 * np.exp(-STEPS / 170)
ENTROPY = np.random.default_rng(0).random((4, len(STEPS)))
TABLE = np.random.default_rng(1).standard_normal((31, 7))


def two_layers(seed, spread):
    slopes = np.array([2.0**-4, 2.0**-8])[:, None, None]
    alibi = {"score": scores.alibi(2), "change": lambda s, distance: s - slopes * abs(distance)}
    options = {"heads": 2, "spread": spread, "mask": masks.causal()}
    return [make_case(N, seed=seed, **options), make_case(N, seed=seed + 1, **alibi, **options)]


@pytest.fixture(scope="module")
def cases():
    return two_layers(50, 3.0), two_layers(60, 1.0)


@pytest.fixture(scope="module")
def page(cases, tmp_path_factory):
    ours, others = (trace_of(each, WORDS, title) for each, title in zip(cases, ("A <i>", "B"), strict=True))
    curves = [
        {"name": "loss", "unit": "nats", "points": np.stack([STEPS, LOSS]), "split": "train"},
        {"name": "rate", "unit": None, "points": np.full((2, 1), np.nan), "split": None},
        {"name": "none", "unit": None, "points": np.zeros((2, 0)), "split": None},
    ]
    heads = [f"layer {n // 2} head {n % 2}" for n in range(4)]
    maps = [{"name": "entropy", "unit": "nats", "rows": heads, "steps": STEPS, "values": ENTROPY}]
    training = {"title": "run 7", "curves": curves, "maps": maps}
    path = tmp_path_factory.mktemp("views") / "page.html"
    return pages.write(ours, path, compare=others, training=training, positions={"learned": TABLE})


def numbers(text):
    """All numbers in words: A 1.794e−4, B 0.01348, A − B −0.0133."""
    return [number(one) for one in re.findall(r"(?<![\w.])[−-]?\d[\d.]*(?:e[−-]?\d+)?", text)]


def open_numbers(visit, place):
    visit.evaluate(f"document.querySelectorAll('{place} details').forEach((one) => one.open = true)")
    visit.settle()
    return visit.page.locator(f"{place} table").all_inner_texts()


def wait_for_words(visit, place, *words):
    return visit.until(f"probe.holding({place!r}, {[*words]!r})")


def check_largest(text, apart):
    size, row, key = numbers(re.search(r"Largest \|A − B\|[^:]*: (.*)", text)[1])[:3]
    assert (row, key) == np.unravel_index(apart.argmax(), apart.shape)
    assert abs(size - apart.max()) <= 0.006


def test_texts_are_aligned_and_shown(open_page, cases, tmp_path):
    ours, others = (each[:1] for each in cases)
    moved = [*WORDS[:10], "quite", "suddenly", *WORDS[10:-2]]  # two words more, and two less
    traces = (trace_of(ours, WORDS, "A"), trace_of(others, moved, "B"))
    path = pages.write(traces[0], tmp_path / "page.html", compare=traces[1])
    visit = open_page("#tab=compare&h=1&row=30&key=12", path)
    text = wait_for_words(visit, ".rg-compare", "query 30")
    assert f"{N - 2} tokens are the same in both texts, in order; A has 2 of its own and B 2." in text
    one, other = (each[0].weights[1] for each in (ours, others))
    said = numbers(re.search(r"key 12 ‘\w+’: (.*)", text)[1])
    wanted = [one[30, 12], other[32, 14], one[30, 12] - other[32, 14]]
    np.testing.assert_allclose(said, wanted, rtol=6e-3, atol=1e-5)
    place = np.r_[0:10, 12:N]
    check_largest(text, np.abs(one[: N - 2, : N - 2] - other[np.ix_(place, place)]))
    alone = visit.page.locator(".compare-tokens .alone").all_inner_texts()
    assert {"quite", "suddenly"} <= {text.strip() for text in alone}
    current = visit.page.locator(".compare-tokens .current").all_inner_texts()
    assert {text.strip() for text in current} == {WORDS[12]}


def test_a_run_and_positions_are_shown_and_everything_is_used(open_page, page):
    visit, most = walk(open_page, page)
    assert most <= 1500
    assert visit.probe("faintLetters") == []
    assert "A: A <i>" in visit.evaluate("document.querySelector('.rg-header').innerText")
    go(visit, "#tab=training")
    wait_for_words(visit, ".rg-training", "run 7", "layer 1 head 1")
    shown = numbers(" ".join(open_numbers(visit, ".rg-training")))
    for value in (LOSS[0], LOSS[-1], ENTROPY[0, 0], ENTROPY[-1, 0]):
        assert min(abs(one - value) for one in shown) <= 0.006 * value
    assert visit.page.locator(".rg-training svg :is(path, polyline)").count() > 0
    go(visit, "#tab=positions")
    assert "alibi" in wait_for_words(visit, ".rg-positions", "learned").lower()
    # However much a view holds, the tabs keep their height, and a table that scrolls is reached by keys.
    tabs, tab = (visit.page.locator(f"[role={role}]").first.bounding_box() for role in ("tablist", "tab"))
    assert tabs["height"] >= tab["height"]
    open_numbers(visit, ".rg-positions")
    read = "[...document.querySelectorAll('.rg-positions table')].map(({ tabIndex }) => tabIndex)"
    assert visit.evaluate(read) == [0] * 6
    for place in (".rg-training", ".rg-positions"):
        assert "NaN" not in visit.evaluate(f"document.querySelector('{place}').innerHTML")


@pytest.fixture(scope="module")
def three():
    return make_layers(2, 3, 70)


@pytest.fixture(scope="module")
def lines_page(three, tmp_path_factory):
    return pages.write(trace_of(three, WORDS), tmp_path_factory.mktemp("lines") / "page.html")


def painted(visit, least, end=2**31):
    """Wait until so many pixels between the columns have a colour, fewer than `end`; return how many."""
    return visit.until(f"probe.painted({least}, {end})")


def test_a_token_shows_its_row_in_all_heads(open_page, lines_page, three):
    visit = open_page("#tab=lines&sel=0.0,0.2,1.1&row=30&key=12&dir=out", lines_page)
    rows = visit.until("probe.rows('.lines-table').length && probe.rows('.lines-table')")
    weights = np.stack([three[c].weights[h][30] for c, h in ((0, 0), (0, 2), (1, 1))])
    order = np.argsort(-weights.max(0), kind="stable")[:8]
    assert [int(row[0].split(" ")[0]) for row in rows] == order.tolist()
    for row, key in zip(rows, order, strict=True):
        assert WORDS[key] in row[0]
        for said, weight in zip(row[1:], weights[:, key], strict=True):
            found = number(said.strip("< "))
            assert weight <= 1.05 * found if "<" in said else abs(found - weight) <= 0.055 * weight
    # The products of the pair add up to its score.
    said = visit.evaluate("document.querySelector('.lines-products').innerText")
    score = three[0].query[0, 30] @ three[0].key[0, 12] / np.sqrt(5)
    assert number(re.search(r"Scaled sum (\S+),", said)[1]) == pytest.approx(score, rel=0.01, abs=0.02)


def test_queries_are_walked_and_kept_by_keyboard_and_heads_by_buttons(open_page, lines_page):
    visit = open_page("#tab=lines&sel=0.0,0.2", lines_page)
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
    visit.page.get_by_label("Add a head").select_option("1.1")
    assert state(visit)["selection"][-1] == [1, 1]
    visit.page.get_by_role("button", name="Leave out layer 1 head 1").click()
    assert [1, 1] not in state(visit)["selection"]


def test_notes_stay_in_the_link_and_in_the_files(open_page, lines_page, three, tmp_path):
    visit = open_page("#tab=lines&l=1&h=2", lines_page)
    text = "reads <b> & 'names' 100 %"
    visit.page.locator(".rg-lines").get_by_label("Note on layer 1 head 2").fill(text)
    visit.press("Escape")
    other = open_page(f"#{visit.evaluate('__regard.state().hash')}", lines_page)
    assert text in other.evaluate("document.querySelector('.rg-lines .lines-notes').innerText")
    go(visit, "#tab=attention&l=1&h=2&scale=linear")
    visit.page.get_by_text("Export", exact=True).click()
    files = {}
    for name in ("CSV", "HTML"):
        with visit.page.expect_download() as waiting:
            visit.page.locator(".export-box").get_by_role("button", name=name).click()
        files[name] = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(files[name])
    assert f"layer 1 head 2: {text}" in files["CSV"].read_text()
    # The saved page opens as the one that it was saved from was seen.
    saved = open_page("", files["HTML"])
    found = state(saved)
    assert (found["c"], found["h"], found["scale"]) == (1, 2, "linear")
    assert saved.evaluate("document.querySelector('.rg-atlas .head-note input').value") == text
    pages.write(trace_of(three), files["HTML"])  # which may be replaced


def test_on_paper_cells_lie_under_their_labels_and_nothing_is_cut(open_page, cases):
    visit = open_page("#tab=compare&l=1&h=1&cmp=difference")
    first, second = (case[1].weights[1] for case in cases)
    largest = np.unravel_index(np.abs(first - second).argmax(), first.shape)
    for tab in ("training", "positions", "lines", "attention", "compare"):
        visit.probe("still", False)
        visit.page.emulate_media(media="screen")
        visit.page.set_viewport_size({"width": 1280, "height": 800})
        go(visit, f"#tab={tab}&l=1&h=1&cmp=difference&row={N - 1}&key=12")
        visit.until("__regard.drawn().then(() => true)")
        visit.probe("still", True)
        visit.page.emulate_media(media="print")
        visit.until(f"window.probe.isOnPaper({tab!r})")
        for width, height in ((718, 1047), (1047, 718), (740, 980), (980, 740)):
            visit.page.set_viewport_size({"width": width, "height": height})
            assert not visit.probe("cut"), (tab, width)
            if tab == "compare":
                # Cells of the darkest orange, counted by the labels of the axis.
                labels = visit.probe("underLabels", [122, 52, 3])
                for cell, (axis, places) in zip(largest, labels, strict=True):
                    scale, start = np.polyfit(*zip(*axis, strict=True), 1)
                    found = (np.array(places) - start) / scale
                    assert (abs(found - cell) < 0.8).sum() > 0.2 * found.size, (width, cell, found)
        visit.evaluate("dispatchEvent(new Event('afterprint'))")


def test_what_may_not_be_attended_to_has_no_tint(open_page, tmp_path):
    path = trace_of([long_case()]).explore(tmp_path / "page.html", pinned=[(0, 1)])
    visit = open_page("#h=0&row=601&key=602", path)
    wait_for_words(visit, ".rg-what", "holds more than the blocks of 4 keys")
    wait_for_words(visit, ".rg-header", "opened on layer 0 head 1")
    tints = visit.until("probe.tints().some(([, tint]) => tint > 0) && probe.tints()")
    assert 590 < max(token for token, tint in tints if tint > 0) <= 601 < max(tints)[0]
    wait_for_words(visit, ".rg-sentence", "query 601 to key 602: may not attend")


def test_a_page_says_what_it_lacks_and_keeps_what_is_chosen(open_page, tmp_path):
    ours, others = make_layers(2), make_layers(2, seed=40)
    both = trace_of(ours, WORDS), trace_of([ours[0], others[1]], WORDS)
    visit = open_page("", pages.write(both[0], tmp_path / "page.html", compare=both[1]))
    wait_for_words(visit, ".rg-atlas", "mean of row maxima", "tokens back")
    assert visit.page.locator(".rg-tabs .rg-empty").all_inner_texts() == ["Positions", "Training"]
    visit.page.get_by_role("tab", name="Lines").click()
    visit.settle()
    for tab, name in (("attention", ".rg-reader"), ("lines", ".lines-column .current")):
        go(visit, f"#row=50&key=3&tab={tab}")
        visit.page.locator(name).first.wait_for()
    place = visit.page.locator(".lines-column .current").first.bounding_box()
    figure = visit.page.locator(".lines-figure").bounding_box()
    assert figure["y"] <= place["y"] <= figure["y"] + figure["height"] - 20
    # Layer 0 is the same in both: the page opens on what is not, whatever its own address says by now.
    visit.page.get_by_role("tab", name="Attention").click()
    visit.page.get_by_role("tab", name="Compare").click()
    visit.until("__regard.state().c === 1")
