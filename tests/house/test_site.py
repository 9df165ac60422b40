"""The built site is whole, complete and alive; formulas of its pages can be read.

What needs the site is skipped where `make docs` has not built it; `make docs-check` builds it first.
"""

import html
import inspect
import json
import os
import re

import pytest

from site_pages import SITE, find_broken, is_elsewhere, read_inventory, read_site
from test_docstrings import MODULES, NAMES, load_extension
from test_documents import DOCS, PAGES, cells, resolve

pytest_plugins = ("browser",)

TEXTS = {path.relative_to(DOCS).as_posix(): text for path, text in PAGES.items() if DOCS in path.parents}
UNWANTED = "Traceback (most recent call last)|code-cell}| at 0x|<lambda>|<function|ForwardRef(|numpy._typing"
UNWANTED += "|jaxlib._jax|Alias for field number|new empty dictionary|``"
TUTORIALS = [name for name in TEXTS if name.startswith(("tutorials/", "guides/")) and cells(TEXTS[name])]


def test_formulas_of_the_reference_can_be_read():
    pytest.importorskip("sphinx")
    formulas, docstrings = load_extension("formulas"), load_extension("docstrings")
    drawn = formulas.typeset("S^{hij} = scale sum_a Q^{hia} K^{hja} x'")
    assert all(part in drawn for part in ("<munder><mo>∑</mo>", "<msup><mi>x</mi><mo>′</mo></msup>"))
    assert "<msup><mi>S</mi><mrow><mi>h</mi><mi>i</mi><mi>j</mi></mrow></msup>" in drawn
    for wrong in ("a_", "f(x^{2", "_b", "g^ab", "x^2_i", "`x"):
        with pytest.raises(formulas.UnreadableError):
            formulas.typeset(wrong)
    unread, read = [], 0
    for name, value in NAMES.items():
        for paragraph in (inspect.getdoc(value) or "").split("\n\n")[1:]:
            if docstrings.SECTION.match(paragraph):
                break
            if docstrings.is_formula(paragraph.split("\n")):
                read += 1
                try:
                    formulas.typeset(paragraph)
                except formulas.UnreadableError:
                    unread.append(name)
    assert (unread, read > 60) == ([], True)


def test_the_reference_lists_the_modules_of_its_pages():
    """Each module has one page; none is forgotten on the other side."""
    reference = "".join(text for name, text in TEXTS.items() if name.startswith("api/"))
    assert sorted(re.findall(r"public:: (\S+)\n```", reference)) == sorted(MODULES)


@pytest.fixture(scope="module")
def site():
    if not (SITE / "index.html").is_file():
        refuse = pytest.fail if os.environ.get("REQUIRE_SITE") == "1" else pytest.skip
        refuse("the site is not built: make docs")
    return read_site()


def test_it_has_every_page_and_every_link_leads_somewhere(site):
    assert set(TEXTS) <= {path.relative_to(SITE.resolve()).with_suffix(".md").as_posix() for path in site}
    assert sum(len(page.links) for page in site.values()) > 1000
    assert find_broken(site) == []
    # Pages open without a network.
    fetched = {address for page in site.values() for address in page.parts if is_elsewhere(address)}
    assert {address for address in fetched if not address.startswith("data:")} == set()


def test_broken_links_are_found_out(tmp_path):
    links = '<a href="b.html#x"></a><a href="#y"></a><img src="c.png"><a href="b.html#z">'
    (tmp_path / "a.html").write_text(links)
    (tmp_path / "b.html").write_text('<p id="x">')
    broken = ["a.html: no place #y", "a.html: no place b.html#z", "a.html: no file c.png"]
    assert find_broken(read_site(tmp_path)) == broken


def test_every_public_name_is_in_the_reference(site):
    documented = {id(resolve(name)) for name in read_inventory(SITE / "objects.inv")}
    assert [name for name, value in NAMES.items() if id(value) not in documented] == []


def test_no_cell_failed_and_no_page_shows_what_only_python_reads(site):
    for path in (path for path in site if "_modules" not in path.parts):  # sources are Python
        text = html.unescape(re.sub(r"<[^>]+>", "", path.read_text(encoding="utf-8")))
        assert [words for words in UNWANTED.split("|") if words in text] == [], path.name


@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_is_a_notebook_too(site, page):
    """With the same cells in the same order, after one that says what it needs."""
    path = (SITE / page).with_suffix(".ipynb")
    book = json.loads(path.read_text())
    (needs, *code) = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    assert "pip install '.[all]'" in needs
    assert [cell.strip() for cell in code] == [cell.strip() for cell in cells(TEXTS[page])]
    assert book["metadata"]["kernelspec"]["name"] == "python3"
    assert path.resolve().name in (SITE / page).with_suffix(".html").read_text()


# The site in a browser.


@pytest.fixture
def visit_page(browser, site):
    visits = []

    def visit(page, **settings):
        visits.append(browser.visit((SITE / page).as_uri(), allowed=SITE.as_uri(), ready=False, **settings))
        return visits[-1]

    yield visit
    for one in visits:
        browser.close(one)


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_home_page_opens_in_its_scheme_and_leads_on(visit_page, scheme):
    visit = visit_page("index.html", color_scheme=scheme)
    assert visit.evaluate("document.querySelector('h1').textContent").startswith("Regard")
    assert visit.evaluate("document.documentElement.dataset.theme") == scheme
    assert "tiles" in visit.evaluate("document.querySelector('.cell_output').textContent")
    cards = visit.page.locator(".sd-card")
    assert cards.count() == TEXTS["index.md"].count("{grid-item-card}")
    cards.nth(1).click()
    visit.page.wait_for_load_state()
    assert visit.evaluate("document.querySelector('h1').textContent").startswith("The tired cat")
    # Formulas are drawn by the browser, so they have a size.
    assert visit.evaluate("document.querySelector('math[display=block]').getBoundingClientRect().height") > 20
    # Pictures are there, and not wider than the text.
    widths = visit.evaluate(
        "[...document.querySelectorAll('.cell_output img')].map((img) =>"
        " [img.naturalWidth, img.getBoundingClientRect().right,"
        " img.closest('article').getBoundingClientRect().right])"
    )
    assert len(widths) >= 6
    assert all(natural > 100 and right <= edge + 1 for natural, right, edge in widths)
    visit.check()


@pytest.mark.browser
def test_no_page_is_wider_than_the_window_and_search_finds_a_function(visit_page, site):
    visit, wide = visit_page("index.html"), {}
    for path in (path for path in site if "_modules" not in path.parts or path.stem == "index"):
        query = "?q=sliding_window" if path.name == "search.html" else ""
        visit.page.goto(path.as_uri() + query)
        for width in (390, 1200):
            visit.page.set_viewport_size({"width": width, "height": 800})
            if (needed := visit.evaluate("document.documentElement.scrollWidth")) > width:
                wide[path.name, width] = needed
    assert wide == {}
    visit.page.goto((SITE / "search.html").as_uri() + "?q=sliding_window")
    visit.until("document.querySelectorAll('#search-results li').length > 2")
    assert "sliding_window" in visit.evaluate("document.querySelector('#search-results').textContent")


@pytest.mark.browser
@pytest.mark.parametrize("page", ["theory.html", "api/theory.html", "api/attend.html"])
def test_formulas_are_drawn_whole_and_names_stand_on_one_line(visit_page, page):
    visit = visit_page(page, viewport={"width": 1200, "height": 800})
    formulas = visit.evaluate(
        "[...document.querySelectorAll('.formula')].map((block) => [block.querySelectorAll('math').length,"
        " block.scrollWidth - block.clientWidth])"
    )
    assert len(formulas) >= (1 if page == "api/attend.html" else 5)
    assert all(drawn > 1 and cut <= 1 for drawn, cut in formulas), formulas
    heights = visit.evaluate(
        "[...document.querySelectorAll('table.names td:first-child code')].map((code) => code.offsetHeight)"
    )
    assert len(heights) > 5 or page != "api/attend.html"
    assert max(heights, default=0) < 40, heights
