"""The live page in a browser: typed, changed, refused, in light and dark."""

import pytest

from regard.inspection.explorer import live
from test_live import Model

pytest_plugins = ("browser",)
pytestmark = pytest.mark.browser

TOLD = "document.querySelector('[role=status]').textContent"
ALERT = "document.querySelector('[role=alert]')"
INNER = "document.querySelector('iframe:not([data-waiting])').contentWindow.__regard.state()"


def test_a_text_is_typed_changed_and_refused_and_the_view_stays(browser):
    model = Model()
    with live.serve_live(model.record, text="abcabc", title="letters") as page:
        visit = browser.visit(page.url, page.url, ready=False, color_scheme="dark")
        wait_for = lambda told: visit.until(f"{TOLD}.startsWith({told!r})", 30)
        wait_for("6 tokens")
        assert visit.evaluate("document.querySelectorAll('iframe').length") == 1
        assert visit.evaluate(INNER)["tab"] == "attention"
        visit.page.get_by_role("button", name="Change a word").click()
        changed = visit.page.get_by_label("Changed text")
        assert changed.input_value() == "abcabc"
        assert changed.evaluate("node => node === document.activeElement")
        visit.page.keyboard.press("End")
        visit.page.keyboard.type("xyz", delay=20)
        wait_for("6 and 9 tokens")
        # Only what stood when the keys rested was read.
        assert model.read == ["abcabc", "abcabcxyz"]
        shown = visit.evaluate(INNER)
        assert (shown["tab"], shown["compareMode"]) == ("compare", "difference")
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
        visit.page.goto(f"{page.url}#text=abc&changed=abd")
        visit.page.reload()
        wait_for("3 and 3 tokens")
        visit.check()
        assert all(url.startswith(page.url) for url in visit.requests)
        browser.close(visit)
