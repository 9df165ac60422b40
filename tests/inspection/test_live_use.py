"""The live page in a browser: typed, changed, refused, in light and dark."""

import pytest

from regard.inspection.explorer import live
from test_live import Model

pytest_plugins = ("browser",)
pytestmark = pytest.mark.browser

TOLD = "document.querySelector('[role=status]').textContent"
INNER = "document.querySelector('iframe:not([data-waiting])').contentWindow.__regard.state()"


@pytest.fixture(scope="module")
def model():
    return Model()


@pytest.fixture(scope="module")
def page(model):
    with live.serve_live(model.record, text="abcabc", title="letters") as page:
        yield page


def wait_for(visit, tokens):
    visit.until(f"{TOLD}.startsWith({tokens!r})", 30)


def test_a_text_is_typed_and_changed_and_the_view_stays(browser, page, model):
    visit = browser.visit(page.url, page.url, ready=False)
    wait_for(visit, "6 tokens")
    assert visit.evaluate("document.querySelectorAll('iframe').length") == 1
    assert visit.evaluate(INNER)["tab"] == "attention"
    visit.page.get_by_role("button", name="Change a word").click()
    changed = visit.page.get_by_label("Changed text")
    assert changed.input_value() == "abcabc"
    assert changed.evaluate("node => node === document.activeElement")
    visit.page.keyboard.press("End")
    visit.page.keyboard.type("xyz", delay=20)
    wait_for(visit, "6 and 9 tokens")
    # Only what stood when the keys rested was read.
    assert model.read == ["abcabc", "abcabcxyz"]
    shown = visit.evaluate(INNER)
    assert (shown["tab"], shown["compareMode"]) == ("compare", "difference")
    visit.page.get_by_role("button", name="Compare no more").click()
    wait_for(visit, "6 tokens")
    assert visit.evaluate(INNER)["tab"] == "attention"
    visit.check()
    assert all(url.startswith(page.url) for url in visit.requests)
    browser.close(visit)


def test_what_cannot_be_read_is_said_and_the_last_page_stays(browser, page):
    visit = browser.visit(f"{page.url}#text=abc&changed=abd", page.url, ready=False, color_scheme="dark")
    wait_for(visit, "3 and 3 tokens")
    visit.page.get_by_label("Changed text").fill("what?")
    visit.until("document.querySelector('[role=alert]').textContent === 'text: expected no <question>'")
    assert visit.evaluate(INNER)["tab"] == "compare"
    visit.page.get_by_label("Changed text").fill(" ")
    visit.until(f"{TOLD}.startsWith('Type a text')")
    assert visit.evaluate("document.querySelector('[role=alert]').hidden")
    visit.check()
    browser.close(visit)
