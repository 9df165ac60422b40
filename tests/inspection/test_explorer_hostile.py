"""The explorer's page with hostile texts and numbers that are none, in a notebook, served, and live."""

import re
from dataclasses import replace

import numpy as np
import pytest

from explorer_pages import check_colours, go, long_case, walk
from page_traces import make_case, trace_of
from regard import attend, inspection, masks
from regard.inspection.explorer import live, server
from regard.inspection.explorer.server import serve
from test_live import Model

pytest_plugins = ("browser",)
pytestmark = pytest.mark.browser

TOKENS = ["</script><img src=x onerror=document.title='broken'>", "<!--<script>", "]]></style></title>"]
TOKENS += ["שלום עולם", "\u202eright to left\u202c", "👩\u200d👧\u200d👦", "line\nbreak\r\n\ttab", "\ud800"]
TOKENS += ["nul\0byte\x1b[31m", "a" * 10_000, "{{constructor}} ${alert(1)} `", "\u2028\u2029", "", " "]
TOKENS += ["&amp;&lt;", "__proto__", *map(str, range(9))]  # more than open to be read by pointing alone
N = len(TOKENS)
TITLE = "</title><script>document.title = 'broken'</script>"
TOLD = "document.querySelector('[role=status]').textContent"
ALERT = "document.querySelector('[role=alert]')"
INNER = "document.querySelector('iframe:not([data-waiting])').contentWindow.__regard.state()"
FITS = "document.scrollingElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="module")
def trace():
    found = trace_of([make_case(N, heads=2, groups=1, spread=3.0, mask=masks.causal())], TOKENS, TITLE)
    names = ["<b>bold</b>", "a" * 500, "'\"><svg onload=document.title='broken'>"]
    described = [replace(found[0].description, mask=name) for name in names]
    calls = (replace(found[0], name=one.mask, description=one) for one in described)
    return replace(found, calls=tuple(calls), model=names[2], notes=tuple(names))


@pytest.fixture(scope="module")
def page(trace, tmp_path_factory):
    return trace.explore(tmp_path_factory.mktemp("hostile") / "page.html")


def test_tokens_and_names_stay_text(open_page, page):
    visit, most = walk(open_page, page)
    assert most <= 1500
    assert page.stat().st_size < 500_000
    assert visit.evaluate("[document.title, document.querySelector('h1').textContent]") == [TITLE, TITLE]
    made = ".regard img, .regard iframe, object, embed, .regard b, svg[onload]"
    assert visit.evaluate("(made) => document.querySelectorAll(made).length", made) == 0
    assert visit.evaluate("document.querySelector('.rg-facts').textContent").startswith("'\"><svg onload")
    # Every token can be chosen, is spoken of, and keeps within its bounds.
    text = "document.querySelector('.rg-sentence').textContent"
    for row in range(N):
        visit.evaluate("(row) => { location.hash = `#row=${row}&key=0`; }", row)
        assert len(visit.until(f"{text}.includes('query {row} ') && {text}.includes('rank') && {text}")) < 300
        # Nothing turns the words around a token, wherever it is written; what is left of it ends with it.
        everything = visit.evaluate("document.querySelector('.regard').innerText")
        assert not re.search("[\u202a-\u202e\u2066\u2067\u200e\u200f\u061c]", everything)
        assert all(line.count("\u2068") == line.count("\u2069") for line in everything.split("\n"))
        assert visit.evaluate(FITS), repr(TOKENS[row][:20])


def test_odd_sizes_and_numbers_are_drawn(open_page, tmp_path):
    i, j = np.arange(23)[:, None], np.arange(23)
    kept = masks.from_array((i >= j) & (j % 5 != 1) & (i != 17))
    cases = [
        make_case(1, heads=1, mask=masks.causal()),
        make_case(1, 41, heads=4, groups=2, mask=masks.causal(), query_offset=40),
        make_case(23, heads=1, mask=kept, bad_keys=range(1, 23, 5)),
        make_case(7, 11, heads=1, mask=masks.from_array(np.zeros((7, 11), bool))),
    ]
    query = np.ones((1, 1, 7, 3), np.float32)
    broken = np.where(np.arange(7)[:, None] == 4, np.float32(np.nan), query)
    trace = trace_of(cases, title="odd")
    with inspection.capture() as more:
        # A broken model: its own scores are no numbers.
        attend(broken, query, query)
        attend(query[..., :0, :], query, query)
    trace = replace(trace, calls=trace.calls + more.calls)
    visit, _ = walk(open_page, trace.explore(tmp_path / "page.html"))
    for c in range(len(trace.calls)):
        go(visit, f"#l={c}&h=0")
        visit.press("ArrowDown", "ArrowRight", "n", "+", "0")
        visit.evaluate("__regard.drawn()")
        for head, expected in enumerate(cases[c].weights if c < len(cases) else ()):
            found = np.array(visit.probe("cells", [c, head, *expected.shape]), float)
            np.testing.assert_allclose(found, expected.ravel(), rtol=2.0**-11, atol=1e-5)
    assert "not numbers" in visit.evaluate("document.querySelector('.rg-notes').textContent")


def test_in_a_notebook_each_output_stays_in_its_frame(browser, open_page, trace, tmp_path):
    bundle = trace._repr_mimebundle_()
    assert bundle["text/html"].count('sandbox="allow-scripts allow-downloads"') == 1
    # Notebooks load require.js, which breaks what comes as a script of the notebook itself.
    require = "<script>window.define = Object.assign(() => { throw 1; }, { amd: true });</script>"
    cell = f'<div class="jp-OutputArea"><div class="jp-RenderedHTML">{bundle["text/html"]}</div></div>'
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{require}{cell}{cell}", encoding="utf-8")
    visit = open_page(path=path, ready=False)
    frames = [frame for frame in visit.page.frames if frame != visit.page.main_frame]
    assert len(frames) == 2
    for frame in frames:
        browser.wait(frame)
        assert frame.evaluate("window.origin") == "null"
        assert frame.evaluate("window.probe.colours()") > 20
        assert frame.evaluate("document.querySelector('h1').textContent") == TITLE
    visit.page.frame_locator("iframe").nth(1).locator(".rg-stage").click()
    visit.press("m", ".")
    frames[1].wait_for_timeout(200)  # what the address has to say comes later
    states = [frame.evaluate("(({ channel, h }) => [channel, h])(__regard.state())") for frame in frames]
    assert states == [["mass", 0], ["max", 1]]
    with visit.page.expect_download() as waiting:
        frames[1].evaluate("() => { document.querySelector('.export-menu').open = true; }")
        frames[1].get_by_text("CSV", exact=True).click()
    assert waiting.value.suggested_filename.endswith(".csv")
    assert visit.requests == [path.as_uri()]


def test_a_served_page_is_exact_waits_for_its_server_and_goes_on(open_page):
    case = long_case()
    with serve(trace_of([case], title="served")) as serving:
        visit = open_page("#h=1&q=400-440&k=60-100", serving.url)
        visit.evaluate("__regard.drawn()")
        cells = [[i, j] for i in range(402, 438, 3) for j in range(62, 98, 3)]
        read = "(cells) => Promise.all(cells.map(([i, j]) => __regard.cell(0, 0, 1, i, j)))"
        exact = [case.weights[1][i, j] for i, j in cells[::9]]
        np.testing.assert_allclose(visit.evaluate(read, cells[::9]), exact, rtol=1e-4, atol=1e-7)
        check_colours(visit, case.weights[1], 2.0**-15, cells=cells)
        visit.press("n", "ArrowDown", "m", "0")
        visit.evaluate("__regard.drawn()")
        visit.page.wait_for_timeout(500)  # the page writes its own address, which must not replace the next
        go(visit, "#h=1&q=400-440&k=60-100")
        visit.evaluate("__regard.drawn()")
        site, port = serving._server.site, serving.port
        line = visit.page.locator(".rg-lost")
        assert not line.is_visible()
    before = len(visit.requests)
    visit.press(",", "ArrowDown", "ArrowRight", "m")
    visit.until("!document.querySelector('.rg-lost').hidden")
    assert "start it again" in line.inner_text()
    assert line.get_attribute("role") == "alert"
    visit.page.wait_for_timeout(2500)
    assert len(visit.requests) - before < 25
    assert "computed" in visit.page.locator(".rg-what").inner_text()
    site.is_open = True
    with server.Serving(site, port):
        visit.until("document.querySelector('.rg-lost').hidden", 20)
        visit.evaluate("__regard.drawn()")
        assert "computed" not in visit.page.locator(".rg-what").inner_text()
        assert 0 < visit.probe("pixels", [[430, 80]])[0][3] <= 1
    visit.complaints[:] = [text for text in visit.complaints if "ERR_CONNECTION_REFUSED" not in text]


def test_an_unreadable_page_says_so(browser, page, tmp_path):
    text = page.read_text(encoding="utf-8")
    start = text.index('id="regard-document">') + len('id="regard-document">')
    broken = tmp_path / "broken.html"
    broken.write_text(text[:start] + '{"format"' + text[text.index("</script>", start) :], encoding="utf-8")
    visit = browser.visit(broken.as_uri(), ready=False)
    said = visit.until("document.querySelector('[role=alert]')?.textContent")
    assert said.startswith("This page could not be opened")
    browser.close(visit)


def test_a_text_is_typed_changed_and_refused_and_the_view_stays(browser):
    model = Model()
    with live.serve_live(model.record, text="abcabc", title="letters") as page:
        visit = browser.visit(page.url, page.url, ready=False, color_scheme="dark")
        wait_for = lambda told: visit.until(f"{TOLD}.startsWith({told!r})", 30)
        wait_for("6 tokens")
        assert visit.evaluate("document.querySelectorAll('iframe').length") == 1
        assert [visit.evaluate(INNER)[name] for name in ("tab", "fold")] == ["attention", "profiles"]
        visit.page.get_by_role("button", name="Change a word").click()
        changed = visit.page.get_by_label("Changed text")
        assert changed.input_value() == "abcabc"
        visit.page.keyboard.press("End")
        visit.page.keyboard.type("xyz", delay=20)
        wait_for("6 and 9 tokens")
        # Only what stood when the keys rested was read.
        assert model.read == ["abcabc", "abcabcxyz"]
        assert visit.evaluate(INNER)["tab"] == "compare"
        # What cannot be read is said, and the last page stays.
        changed.fill("what?")
        visit.until(f"{ALERT}.textContent === 'text: expected no <question>'")
        assert visit.evaluate(INNER)["tab"] == "compare"
        changed.fill(" ")
        wait_for("Type a text")
        assert visit.evaluate(f"{ALERT}.hidden")
        visit.page.get_by_role("button", name="Compare no more").click()
        wait_for("6 tokens")
        assert visit.evaluate(INNER)["tab"] == "attention"
        # A link holds both texts.
        visit.page.goto("about:blank")
        visit.page.goto(f"{page.url}#text=abc&changed=abd")
        wait_for("3 and 3 tokens")
        # ... and what is looked at.
        frame = "document.querySelector('iframe:not([data-waiting])').contentWindow"
        visit.evaluate(f"() => {{ {frame}.location.hash = '#tab=lines&row=1'; }}")
        visit.until("location.hash.includes('view=') && location.hash.includes('row')")
        visit.page.reload()
        wait_for("3 and 3 tokens")
        assert (visit.evaluate(INNER)["tab"], visit.evaluate(INNER)["row"]) == ("lines", 1)
        visit.check()
        assert all(url.startswith(page.url) for url in visit.requests)
        browser.close(visit)


def test_heads_are_cut_and_restored_and_a_cell_asked_why_by_the_pointer_and_in_a_link(browser):
    parts = inspection.ScoreParts(("<b>tokens", "biases"), np.array([[2.0, 0.5], [-1.0, 0.0]]), 1.5)
    explain = lambda text, **place: parts
    edges = inspection.Edge(1, 0, 5, 3, -0.5, 0.1), inspection.Edge(0, 1, 3, 2, 0.4, 0.0)
    trace = lambda text, query: (inspection.Paths(5, 7, 1.5, edges), "<b>", ["\u202e<i>"] * 6)
    with live.serve_live(Model(2).record, text="abcabc", cuts=True, explain=explain, trace=trace) as page:
        visit = browser.visit(page.url, page.url, ready=False)
        wait_for = lambda told: visit.until(f"{TOLD}.startsWith({told!r})", 30)
        press = lambda name: visit.page.get_by_role("button", name=name).click()
        wait_for("6 tokens")
        visit.page.keyboard.press("?")  # with nothing clicked before
        frame = "document.querySelector('iframe:not([data-waiting])').contentWindow"
        visit.until(f"{frame}.document.querySelector('.rg-keys[open]')?.innerText.includes('why this cell')")
        visit.press("Escape")
        visit.press("w")
        visit.until(f"{ALERT}.textContent.startsWith('Choose a cell')")
        visit.evaluate(f"() => {{ {frame}.location.hash = '#row=4&key=1'; }}")
        press("Why this cell?")
        rows = visit.until("[...document.querySelectorAll('.live-why tr')].map((row) => row.innerText)[1]")
        assert rows.split() == ["<b>tokens", "<b>tokens", "+2"]
        press("Paths to the prediction")
        visit.page.get_by_role("button", name="Head 1.0").focus()
        visit.page.keyboard.press("ArrowDown")
        said = visit.page.locator("figcaption").inner_text()
        assert said == "Head 0.1: ‘⟨202E⟩<i>’ (3) reads ‘⟨202E⟩<i>’ (2): +0.4, of which 0 directly."
        visit.page.keyboard.press("Enter")
        visit.until(f"{frame}.location.hash.includes('row=3&key=2&l=0&h=1')")
        visit.evaluate(f"() => {{ {frame}.location.hash = '#row=4&key=1&l=0&h=0'; }}")
        press("Cut this head")
        wait_for("6 and 6 tokens")
        assert visit.evaluate("document.querySelector('.live-told code').innerText").startswith("with insp")
        told = f"{frame}.document.querySelector('.compare-told')?.textContent"
        visit.until(f"{told}.includes('Of the heads after what was cut, layer 1 head 1 changed most.')")
        assert [visit.evaluate(INNER)[name] for name in ("tab", "c", "h")] == ["compare", 1, 1]
        visit.until("location.hash.match('cut=0.0&by=zero&view=l%3D1%26h%3D1') !== null")
        visit.page.reload()
        wait_for("6 and 6 tokens")
        press("Restore 0.0")  # though the page looks at another head
        wait_for("6 tokens")
        visit.evaluate(f"() => {{ {frame}.print = () => document.title = 'printed'; }}")
        visit.page.keyboard.press("Control+p")
        visit.until("document.title === 'printed'")
        visit.page.get_by_label("Cut heads").fill("1.1")
        visit.until(f"{told}.includes('No head comes after what was cut')")
        visit.until(f"{frame}.location.hash.match('l=1&h=1.*cmp=side') !== null")
        visit.page.get_by_label("Cut heads").fill("zero")
        visit.until(f"{ALERT}.textContent.startsWith('cut: expected layer.head')")
        visit.page.get_by_label("Cut heads").fill("0.0")
        visit.until(f"{told}.includes('changed most') && {frame}.location.hash.includes('l=1&h=1')")
        visit.page.get_by_label("Cut by").select_option("double")
        visit.until("document.querySelector('.live-told code').innerText.includes('share=-1.0')")
        visit.evaluate(f"() => {{ {frame}.location.hash = '#row=4&key=1&l=0&h=0'; }}")
        press("Restore 0.0")
        wait_for("6 tokens")
        assert visit.page.get_by_label("Cut heads").input_value() == ""
        # A patch comes from a second text, whose box opens, and is in a link.
        visit.page.get_by_label("Cut by").select_option("patch")
        visit.page.get_by_label("Changed text").fill("<b>abc")
        press("Patch this query")
        visit.until("document.querySelector('.live-told code').innerText.includes('heads=(0,), rows=(4,)')")
        visit.until("location.hash.includes('changed=%3Cb%3Eabc&cut=0.0%3A4&by=patch')")
        visit.page.reload()
        wait_for("6 and 6 tokens")
        assert "Source, changed" in visit.page.locator(".live-bar").inner_text()
        visit.complaints[:] = [text for text in visit.complaints if "400" not in text]
        visit.check()
        browser.close(visit)
