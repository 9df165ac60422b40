"""The explorer's page with texts that mean harm and numbers that are none, in a notebook, and served."""

import dataclasses
import time
import urllib.error
import urllib.request

import jax.numpy as jnp
import numpy as np
import pytest

from explorer_pages import huge_trace, long_case, make_case, run, trace_of, walk
from regard import attend, inspection, masks
from regard.inspection.explorer import server
from regard.inspection.explorer.server import serve

pytest_plugins = ("browser",)
pytestmark = pytest.mark.browser

TOKENS = [
    "</script><img src=x onerror=document.title='broken'>",
    "<!--<script>",
    "]]></style></textarea></title>",
    "שלום עולם",
    "مرحبا",
    "\u202eright to left\u202c",
    "👩\u200d👩\u200d👧\u200d👦",
    "e\u0301",
    "line\nbreak\r\n\ttab",
    "nul\0byte\x1b[31m",
    "a" * 10_000,
    "{{constructor}} ${alert(1)} `",
    "\u2028\u2029",
    "\ud800",
    "",
    " ",
    "&amp;&lt;",
    "javascript:alert(1)",
    "__proto__",
]
N = len(TOKENS)
TITLE = "</title><script>document.title = 'broken'</script>"


@pytest.fixture(scope="module")
def trace():
    """One call over these tokens."""
    case = make_case("hostile", N, N, 2, 1, 3, np.tri(N, dtype=bool), spread=3.0, mask=masks.causal())
    return trace_of([case], TOKENS, TITLE)


@pytest.fixture(scope="module")
def page(trace, tmp_path_factory):
    return trace.explore(tmp_path_factory.mktemp("hostile") / "page.html")


def test_tokens_stay_text(browser, page):
    visit, _ = walk(browser, page)
    assert visit.evaluate("document.title") == TITLE
    assert visit.evaluate("document.querySelector('h1').textContent") == TITLE
    assert visit.evaluate("document.querySelectorAll('img, iframe, object, embed').length") == 0
    # Every token can be chosen, is spoken of, and keeps within its bounds.
    for row in range(N):
        visit.evaluate("(row) => { location.hash = `#row=${row}&key=0`; }", row)
        said = visit.until(
            f"""(() => {{ const said = document.querySelector('.rg-sentence').textContent;
              return said.includes('query {row} ') && said.includes('rank') && said; }})()"""
        )
        assert len(said) < 300
        assert visit.evaluate("document.scrollingElement.scrollWidth <= innerWidth"), repr(TOKENS[row][:20])
        name = visit.evaluate("document.querySelector('.rg-details caption').textContent")
        assert len(name) < 100
    visit.check()
    browser.close(visit)


def test_names_stay_text(browser, trace, tmp_path):
    names = ["<b>bold</b>", "a" * 500, "'\"><svg onload=document.title='broken'>"]
    call = trace.calls[0]
    calls = tuple(
        dataclasses.replace(call, name=name, description=dataclasses.replace(call.description, mask=name))
        for name in names
    )
    hostile = dataclasses.replace(trace, calls=calls, model=names[2], title="plain", notes=tuple(names))
    visit, _ = walk(browser, hostile.explore(tmp_path / "page.html"))
    assert visit.evaluate("document.title") == "plain"
    assert visit.evaluate("document.querySelectorAll('.regard b, svg[onload]').length") == 0
    assert visit.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    assert visit.evaluate("document.querySelector('.rg-facts').textContent").startswith(names[2])
    browser.close(visit)


def test_odd_sizes_and_numbers_are_drawn(browser, tmp_path):
    i, j = np.arange(23)[:, None], np.arange(23)
    kept = (i >= j) & (j % 5 != 1) & (i != 17)
    bad = range(1, 23, 5)
    no = np.zeros((7, 11), bool)
    cases = [
        make_case("one", 1, 1, 1, 1, 0, np.ones((1, 1), bool), mask=masks.causal()),
        make_case("one query", 1, 41, 4, 2, 1, np.ones((1, 41), bool), offset=40, mask=masks.causal()),
        make_case("NaN", 23, 23, 1, 1, 4, kept, bad_keys=bad, mask=masks.from_array(jnp.asarray(kept))),
        make_case("nothing", 7, 11, 1, 1, 5, no, mask=masks.from_array(jnp.asarray(no))),
        make_case("other lengths", 29, 1, 3, 3, 2, np.ones((29, 1), bool)),
    ]
    query = np.ones((1, 1, 7, 3), np.float32)
    query[0, 0, 4] = np.nan
    with inspection.capture(title="odd") as trace:
        for case in cases:
            run(case)
        # A broken model: its own scores are no numbers.
        attend(*(jnp.asarray(one) for one in (query, np.ones_like(query), np.ones_like(query))))
        for T, S in ((0, 5), (5, 0)):
            attend(jnp.zeros((1, 1, T, 3)), jnp.zeros((1, 1, S, 3)), jnp.zeros((1, 1, S, 3)))
    visit, _ = walk(browser, trace.explore(tmp_path / "page.html"))
    for c, call in enumerate(trace.calls):
        visit.evaluate("(c) => { location.hash = `#l=${c}&h=0`; }", c)
        visit.press("ArrowDown", "ArrowRight", "n", "+", "0")
        visit.evaluate("__regard.drawn()")
        shape = call.rows, call.keys
        for head in range(call.heads if c < len(cases) else 0):
            expected = cases[c].weights[head]
            found = np.array(visit.probe("cells", [c, head, *shape]), float).reshape(shape)
            assert np.all(np.abs(found - expected) <= 2.0**-11 * expected + 1e-5), cases[c].name
    assert "not numbers" in visit.evaluate("document.querySelector('.rg-notes').textContent")
    visit.check()
    browser.close(visit)


def test_in_a_notebook_each_output_stays_in_its_frame(browser, trace, tmp_path):
    """Two outputs of one notebook, each in a frame of its own that may run its script and nothing more."""
    bundle = trace._repr_mimebundle_()
    assert bundle["text/html"].count('sandbox="allow-scripts allow-downloads"') == 1
    # Notebooks load require.js, which breaks what comes as a script of the notebook itself.
    require = "<script>window.define = Object.assign(() => { throw 1; }, { amd: true });</script>"
    cell = f'<div class="jp-OutputArea"><div class="jp-RenderedHTML">{bundle["text/html"]}</div></div>'
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{require}{cell}{cell}", encoding="utf-8")
    visit = browser.visit(path.as_uri(), ready=False)
    frames = [frame for frame in visit.page.frames if frame != visit.page.main_frame]
    assert len(frames) == 2
    for frame in frames:
        browser.wait(frame)
        assert frame.evaluate("window.origin") == "null"
        assert frame.evaluate("window.probe.colours()") > 20
        assert frame.evaluate("document.querySelector('h1').textContent") == TITLE
    visit.page.frame_locator("iframe").nth(1).locator(".rg-stage").click()
    visit.press("m", ".")
    states = [frame.evaluate("(({ channel, h }) => [channel, h])(__regard.state())") for frame in frames]
    assert states == [["mass", 0], ["max", 1]]
    with visit.page.expect_download() as waiting:
        frames[1].evaluate("() => { document.querySelector('.export-menu').open = true; }")
        frames[1].get_by_text("CSV", exact=True).click()
    assert waiting.value.suggested_filename.endswith(".csv")
    assert visit.requests == [path.as_uri()]
    visit.check()
    browser.close(visit)


def test_a_served_page_is_exact_and_asks_its_server_alone(browser):
    """The same page from a server: every cell of a long call is exact, and nothing else is asked."""
    case = long_case(701)
    with serve(trace_of([case], title="served")) as serving:
        visit = browser.visit(f"{serving.url}#h=1&q=400-440&k=60-100", allowed=serving.url)
        visit.evaluate("__regard.drawn()")
        cells = [[i, j] for i in range(402, 438, 3) for j in range(62, 98, 3)]
        expected = np.array([case.weights[1][i, j] for i, j in cells])
        exact = visit.evaluate(
            "(cells) => Promise.all(cells.map(([i, j]) => __regard.cell(0, 0, 1, i, j)))", cells[::9]
        )
        assert np.allclose(exact, expected[::9], rtol=1e-4, atol=1e-7)
        found = np.array(visit.probe("pixels", cells))
        codes = 255 * np.clip(1 + np.log2(expected) / 14, 0, 1)
        assert np.all(np.abs(255 * found[:, 3] - codes) <= 1.01)
        assert visit.evaluate("document.querySelector('.rg-lock').hidden")
        visit.press("n", "ArrowDown", "m", "0")
        assert len(visit.requests) > 3
        assert all(url.startswith(serving.url) for url in visit.requests)
        visit.check()
        browser.close(visit)
        for wrong in (f"http://127.0.0.1:{serving.port}/", serving.url[:-3] + "/", serving.url + "../"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(wrong)
            assert refused.value.code == 404
            refused.value.close()


def test_a_page_waits_for_its_server_and_goes_on(browser):
    """While the server is gone one line says so, few requests are sent, and what was wanted comes at last."""
    case = long_case(701)
    with serve(trace_of([case], title="served")) as serving:
        visit = browser.visit(f"{serving.url}#h=1&q=400-440&k=60-100", allowed=serving.url)
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
        found = visit.probe("pixels", [[430, 80]])[0][3]
        assert 0 < found <= 1
    visit.complaints[:] = [text for text in visit.complaints if "ERR_CONNECTION_REFUSED" not in text]
    visit.check()
    browser.close(visit)


def test_levels_that_the_wheel_passes_by_are_not_waited_for(browser):
    """At 16,381 tokens the wheel goes to exact cells, past tiles of which each takes a second and more."""
    with serve(huge_trace(16_381)) as serving:
        visit = browser.visit(serving.url, allowed=serving.url, ready=False)
        visit.until("window.__regard && __regard.state() && __regard.pixel(9000, 8990)")
        x, y = middle_of(visit, 9000, 8990)
        visit.page.mouse.move(x, y)
        visit.page.locator(".rg-stage").focus()
        before = len(visit.requests)
        # A first request for exact cells compiles its program.
        visit.evaluate("__regard.tile(0, 0, 0, 1, 1, 3, 3)")
        for _ in range(40):
            visit.page.mouse.wheel(0, -120)
        started = time.monotonic()
        visit.evaluate("__regard.drawn()")
        taken = time.monotonic() - started
        assert visit.evaluate("__regard.state().level") == {"queryBlock": 1, "keyBlock": 1}
        asked = {
            tuple(url.split("/tile/0/0/0/")[1].split("/")[:2])
            for url in visit.requests[before:]
            if "/tile/" in url
        }
        assert len(asked) <= 2, asked
        assert taken < 3, taken
        visit.complaints[:] = [text for text in visit.complaints if "ERR_ABORTED" not in text]
        visit.check()
        browser.close(visit)


def middle_of(visit, row, key):
    box = visit.page.locator("canvas.rg-base").bounding_box()
    at = visit.evaluate("([row, key]) => __regard.pixel(row, key)", [row, key])
    return box["x"] + at["x"], box["y"] + at["y"]


def test_an_unreadable_page_says_so(browser, page, tmp_path):
    text = page.read_text(encoding="utf-8")
    start = text.index('id="regard-document">') + len('id="regard-document">')
    broken = tmp_path / "broken.html"
    broken.write_text(text[:start] + '{"format"' + text[text.index("</script>", start) :], encoding="utf-8")
    visit = browser.visit(broken.as_uri(), ready=False)
    said = visit.until("document.querySelector('[role=alert]')?.textContent")
    assert said.startswith("This page could not be opened")
    browser.close(visit)
