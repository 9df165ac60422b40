"""Rollout on the explorer's page, in a browser, against the product of the layers in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from explorer_pages import WORDS
from regard import attend, inspection, masks
from regard.inspection.explorer import pages
from regard.inspection.explorer.server import serve

pytest_plugins = ("browser",)
pytestmark = [pytest.mark.browser, pytest.mark.slow]

N, LAYERS, HEADS = len(WORDS), 3, 2
STATUS = "document.querySelector('.reader-status').textContent"
TABLE = (
    "[...document.querySelectorAll('.details-table tbody tr')]"
    ".map((row) => [...row.children].map((cell) => cell.textContent))"
)


@pytest.fixture(scope="module")
def rolled():
    """A trace of three layers, the last of them with cross attention beside it, and its rollouts."""
    rng = np.random.default_rng(0)
    with inspection.capture(tokens=list(WORDS), title="rolled") as trace:
        for _ in range(LAYERS):
            query, key = (jnp.asarray(rng.normal(size=(1, HEADS, N, 5)), jnp.float32) for _ in "qk")
            attend(query, key, key, mask=masks.causal(), scale=2.0)
        attend(query, key[..., :7, :], key[..., :7, :])
    found, rollouts = np.eye(N), []
    for call in trace.calls[:LAYERS]:
        found = (np.eye(N) + call.window().astype(np.float64).mean(0)) / 2 @ found
        rollouts.append(found)
    return trace, rollouts


def check_table(visit, row):
    """Compare the ten largest shares that Details lists."""
    visit.until("document.querySelector('.details-table caption').textContent.includes('takes in')")
    table = visit.evaluate(TABLE)
    keys, shares = [int(line[0]) for line in table], [float(line[3]) for line in table]
    assert set(keys) == set(np.argsort(-row)[:10])
    np.testing.assert_allclose(shares, row[keys], rtol=0.006)


@pytest.mark.parametrize("served", [False, True])
def test_words_show_what_reaches_the_chosen_query(browser, rolled, tmp_path, served):
    trace, rollouts = rolled
    server = serve(trace) if served else None
    address = server.url if server else pages.write(trace, tmp_path / "page.html").as_uri()
    visit = browser.visit(f"{address}#l=2&h=1&row=30", allowed=address)
    visit.page.get_by_text("rollout", exact=True).click()
    said = visit.until(f"{STATUS}.includes('takes in') && {STATUS}")
    assert said.startswith(f"Query 30 ‘{WORDS[30]}’ takes in through 3 layers; tint: root of the share")
    check_table(visit, rollouts[2][30])
    visit.press("[")
    visit.until(f"{STATUS}.includes('through 2 layers')")
    check_table(visit, rollouts[1][30])
    # The link says so; a head's own reading is a press away.
    visit.page.wait_for_timeout(250)
    other = browser.visit(f"{address}{visit.evaluate('location.hash')}", allowed=address)
    check_table(other, rollouts[1][30])
    other.page.locator(".reader-switch").get_by_text("reads", exact=True).click()
    other.until(f"{STATUS}.includes('reads;')")
    assert other.page.get_by_text("rollout", exact=True).get_attribute("aria-pressed") == "false"
    # Cross attention has no rollout.
    visit.page.evaluate("location.hash = '#l=3&h=0&row=30&rollout=1'")
    visit.until(f"{STATUS}.includes('reads;')")
    assert not visit.page.get_by_text("rollout", exact=True).is_visible()
    for one in (visit, other):
        one.check()
        browser.close(one)
    if server:
        server.close()


def test_where_weights_are_missing_there_is_no_rollout(browser, rolled, tmp_path):
    trace = inspection.load(rolled[0].save(tmp_path / "one.regard"))
    page = pages.write(trace, tmp_path / "page.html").as_uri()
    visit = browser.visit(f"{page}#row=30&rollout=1", allowed=page)
    visit.until(f"{STATUS}.includes('reads;')")
    assert not visit.page.get_by_text("rollout", exact=True).is_visible()
    visit.check()
    browser.close(visit)
