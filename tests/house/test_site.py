"""The documentation: its text keeps its word, and the built site is whole, complete and alive.

What needs the site is skipped where `make docs` has not built it; `make docs-check` builds it first.
"""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys

import pytest

import regard
from site_pages import ROOT, SITE, Page, find_broken, is_elsewhere, read_inventory, read_site
from test_docstrings import NAMES
from test_tutorial_account import resolve

pytest_plugins = ("browser",)

DOCS = ROOT / "docs"
TEXTS = {path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
OWN = "tutorials/induction_heads.md"
TUTORIALS = [name for name in TEXTS if name.startswith("tutorials/") and name != OWN]
ROOMS = ("masks", "scores", "positions", "linear", "readouts", "theory", "interop", "figures", "inspection")
ROOMS += ("layers", "models", "training")
IN_ROOMS = re.compile(rf"(regard\.)?({'|'.join(ROOMS)})(\.[a-zA-Z_]\w*)+")


def quoted(text):
    """Names of Regard between backticks, calls without their arguments, outside of cells."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    pieces = (piece.partition("(")[0] for piece in re.findall(r"`([^`\n]+)`", prose))
    return sorted({piece for piece in pieces if IN_ROOMS.fullmatch(piece)})


def find_name(name):
    """What a name in the text means; figures are inspection's."""
    name = name.removeprefix("regard.")
    return resolve("regard." + ("inspection." if name.startswith("figures.") else "") + name)


def cells(text):
    return re.findall(r"^```\{code-cell\} python\n(?::tags: [^\n]*\n)?(.*?)^```", text, re.S | re.M)


# The text.


def test_the_five_documents_are_retold_with_their_numbers():
    assert len(TUTORIALS) == 5
    for name in TUTORIALS:
        code = "\n".join(cells(TEXTS[name]))
        assert code.count("check(") >= 4, name
        assert "assert_allclose" in code, name
        assert "## Which mistakes this page avoids" in TEXTS[name], name


@pytest.mark.parametrize("page", TEXTS)
def test_names_in_the_text_exist(page):
    for name in quoted(TEXTS[page]):
        assert find_name(name) is not None, name


def test_names_that_do_not_exist_are_found_out():
    assert quoted("`masks.nowhere(3)` and `x.y`") == ["masks.nowhere"]
    with pytest.raises(AttributeError):
        find_name("masks.nowhere")
    assert sum(len(quoted(text)) for text in TEXTS.values()) > 60


@pytest.mark.parametrize("page", TEXTS)
def test_commands_in_the_text_exist(page):
    from regard.cli import commands

    known = {command.__name__.lower() for command in commands.COMMANDS}
    for line in re.findall(r"(?:`|^!)(regard [a-z]+[^`\n]*)", TEXTS[page], re.M):
        assert line.split()[1] in known, line


@pytest.mark.parametrize("page", TEXTS)
def test_every_cell_is_python(page):
    for cell in cells(TEXTS[page]):
        lines = [line for line in cell.splitlines() if not line.startswith("!")]
        compile("\n".join(lines), page, "exec")
        assert [line for line in lines if len(line) > 92] == [], "wider than the page"


def load_extension(name):
    sys.path.insert(0, str(DOCS / "_extensions"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def test_navigation_speaks_to_those_who_know_nothing_of_us():
    titles = [re.search(r"^# (.+)$", text, re.M)[1] for text in TEXTS.values() if "\n# " in f"\n{text}"]
    assert len(titles) > 30
    assert [title for title in titles if re.search(r"seeds|[Dd]ocument \d|session", title)] == []


def test_formulas_are_typeset():
    formulas = load_extension("formulas")
    drawn = formulas.typeset("S^{hij} = scale sum_a Q^{hia} K^{hja}")
    assert "<munder><mo>∑</mo>" in drawn
    assert "<msup><mi>S</mi><mrow><mi>h</mi><mi>i</mi><mi>j</mi></mrow></msup>" in drawn
    assert " scale " in drawn
    drawn = formulas.typeset("query_position_t <= sqrt(1 + e^(-x / T))  dL/dQ")
    assert "<msub><mi>query_position</mi><mrow><mi>t</mi></mrow></msub>" in drawn
    assert re.search(r"<msqrt>.*<msup><mi>e</mi>.*</msqrt>", drawn)
    assert "≤" in drawn
    assert drawn.count("<span>") == 2
    drawn = formulas.typeset("F = -T f(x)^2 = dV_jb")
    assert '<mo stretchy="false">−</mo><mi>T</mi>' in drawn
    assert "<msub><mrow><mi>d</mi><mi>V</mi></mrow><mrow><mi>j</mi><mi>b</mi></mrow></msub>" in drawn
    assert re.search(r"<msup><mrow>.*\)</mo></mrow><mrow><mn>2</mn></mrow></msup>", drawn)
    for text in ("a_", "f(x^{2", "_b"):
        with pytest.raises(formulas.UnreadableError):
            formulas.typeset(text)


def test_formulas_of_the_reference_can_be_read():
    pytest.importorskip("sphinx")
    formulas, docstrings = load_extension("formulas"), load_extension("docstrings")
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


def test_the_workflow_calls_targets_of_make():
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    targets = {
        word for line in re.findall(r"run: make (.+)", workflow) for word in line.split() if word.islower()
    }
    assert targets == {"setup", "lint", "types", "test", "test-kernel", "dist", "docs-check"}
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def test_the_citation_is_of_this_version():
    assert f"\nversion: {regard.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_reference_lists_the_modules_of_its_pages():
    """Each module has one page; none is forgotten on the other side."""
    MODULES = load_extension("names").MODULES
    shown = re.findall(
        r"public:: (\S+)\n```", "".join(TEXTS[name] for name in TEXTS if name.startswith("api/"))
    )
    assert sorted(shown) == sorted(MODULES)


# The site.


@pytest.fixture(scope="module")
def site():
    if not (SITE / "index.html").is_file():
        told = "the site is not built: make docs"
        (pytest.fail if os.environ.get("REQUIRE_SITE") == "1" else pytest.skip)(told)
    return read_site()


@pytest.mark.slow
def test_it_has_every_page(site):
    built = {path.relative_to(SITE.resolve()).with_suffix(".md").as_posix() for path in site}
    assert set(TEXTS) <= built


@pytest.mark.slow
def test_every_link_leads_somewhere(site):
    assert sum(len(page.links) for page in site.values()) > 1000
    assert find_broken(site) == []


def test_nothing_is_fetched_from_elsewhere(site):
    """Pages open without a network."""
    fetched = {address for page in site.values() for address in page.parts if is_elsewhere(address)}
    assert {address for address in fetched if not address.startswith("data:")} == set()


def test_broken_links_are_found_out(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#x"></a><a href="#y"></a><img src="c.png"><a href="b.html#z">'
    )
    (tmp_path / "b.html").write_text('<p id="x">')
    assert find_broken(read_site(tmp_path)) == [
        "a.html: no place #y",
        "a.html: no place b.html#z",
        "a.html: no file c.png",
    ]


def test_every_public_name_is_in_the_reference(site):
    places = read_inventory(SITE / "objects.inv")
    documented = {id(resolve(name)) for name in places}
    assert len(NAMES) > 100
    assert [name for name, value in NAMES.items() if id(value) not in documented] == []


def test_no_cell_failed(site):
    for path, page in site.items():
        text = path.read_text(encoding="utf-8")
        assert "Traceback (most recent call last)" not in text, path.name
        assert "code-cell}" not in text, path.name
        assert isinstance(page, Page)


def visit_page(browser, page, **settings):
    return browser.visit((SITE / page).as_uri(), allowed=SITE.as_uri(), ready=False, **settings)


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_home_page_opens_in_its_scheme_and_leads_on(browser, site, scheme):
    visit = visit_page(browser, "index.html", color_scheme=scheme)
    assert visit.evaluate("document.querySelector('h1').textContent").startswith("Regard")
    assert visit.evaluate("document.documentElement.dataset.theme") == scheme
    assert "tiles" in visit.evaluate("document.querySelector('.cell_output').textContent")
    cards = visit.page.locator(".sd-card")
    assert cards.count() == (DOCS / "index.md").read_text(encoding="utf-8").count("{grid-item-card}")
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
    browser.close(visit)


@pytest.mark.browser
@pytest.mark.parametrize("page", ["guides/inspection.html", "tutorials/tired_cat.html"])
def test_the_explorer_lives_in_a_page(browser, site, page):
    visit = visit_page(browser, page)
    assert site[(SITE / page).resolve()].frames == 1
    (frame,) = [frame for frame in visit.page.frames if frame != visit.page.main_frame]
    browser.wait(frame)
    assert frame.evaluate("window.origin") == "null"
    assert frame.evaluate("window.probe.colours()") > 20
    # A frame out of sight draws nothing, so it would never come to rest.
    visit.evaluate("document.querySelector('iframe').scrollIntoView({ block: 'center' })")
    visit.settle()
    visit.page.frame_locator("iframe").locator(".rg-stage").click()
    before = frame.evaluate("__regard.state().h")
    visit.press(".")
    assert frame.evaluate("__regard.state().h") == before + 1
    visit.press("]")
    assert frame.evaluate("__regard.state().c") == 1
    visit.check()
    browser.close(visit)


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


@pytest.mark.browser
def test_no_page_is_wider_than_the_window(browser, site):
    visit, wide = visit_page(browser, "index.html"), {}
    for path in site:
        query = "?q=sliding_window" if path.name == "search.html" else ""
        visit.page.goto(path.as_uri() + query)
        for width in (390, 1200):
            visit.page.set_viewport_size({"width": width, "height": 800})
            found = visit.evaluate("document.documentElement.scrollWidth")
            if found > width:
                wide[path.name, width] = found
    assert wide == {}
    browser.close(visit)


@pytest.mark.browser
@pytest.mark.parametrize("page", ["theory.html", "api/theory.html", "api/attend.html"])
def test_formulas_are_drawn_and_whole(browser, site, page):
    visit = visit_page(browser, page, viewport={"width": 1200, "height": 800})
    formulas = visit.evaluate(
        "[...document.querySelectorAll('.formula')].map((block) => [block.querySelectorAll('math').length,"
        " block.scrollWidth - block.clientWidth])"
    )
    assert len(formulas) >= (1 if page == "api/attend.html" else 5)
    assert all(drawn > 1 and cut <= 1 for drawn, cut in formulas), formulas
    browser.close(visit)


@pytest.mark.browser
def test_names_of_the_reference_stand_on_one_line(browser, site):
    visit = visit_page(browser, "api/attend.html", viewport={"width": 1200, "height": 800})
    heights = visit.evaluate(
        "[...document.querySelectorAll('table.names td:first-child code')].map((code) => code.offsetHeight)"
    )
    assert len(heights) > 5
    assert max(heights) < 40, heights
    browser.close(visit)


@pytest.mark.browser
def test_search_finds_a_function(browser, site):
    visit = visit_page(browser, "index.html")
    visit.page.goto((SITE / "search.html").as_uri() + "?q=sliding_window")
    visit.until("document.querySelectorAll('#search-results li').length > 2")
    found = visit.evaluate("document.querySelector('#search-results').textContent")
    assert "sliding_window" in found
    browser.close(visit)


def test_make_says_how(site):
    """The targets exist, and ask for what they need."""
    done = subprocess.run(["make", "-n", "docs-check"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "-m sphinx" in done.stdout
    assert "tests/house/test_site.py" in done.stdout
