"""The explorer's map of what weights add, in a browser, against layers in float64."""

import csv
import io
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from explorer_pages import WORDS, weigh
from regard import attend, inspection, masks
from regard.inspection.explorer import pages
from regard.layers import MultiHeadAttention

pytest_plugins = ("browser",)
pytestmark = [pytest.mark.browser, pytest.mark.slow]

N, M, HEADS, GROUPS, E = len(WORDS), 12, 4, 2, 3
LIMITS = "(({ low, high }) => [low, high])(__regard.state().limits)"
SENTENCE = "document.querySelector('.rg-sentence').textContent"


@pytest.fixture(scope="module")
def added():
    """A trace of two layers and a call of nobody's, and weight x |value Wo| of the layers."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, M)).astype(np.float32)
    layers = [MultiHeadAttention(M, HEADS, num_key_heads=GROUPS, rngs=nnx.Rngs(n)) for n in range(2)]
    layers[1].value_projection.kernel[...] *= 30
    with inspection.capture(tokens=list(WORDS), title="added") as trace:
        for layer in layers:
            layer(jnp.asarray(x)[None], mask=masks.causal())
        heads = jnp.asarray(x[None]).reshape(1, N, HEADS, E).swapaxes(1, 2)
        attend(heads, heads, heads, mask=masks.causal())
    truth = []
    for call, layer in zip(trace, layers, strict=False):
        keep = np.broadcast_to(np.tri(N, dtype=bool), (HEADS, N, N))
        weights, _ = weigh(call.problem.query, call.problem.key, keep)
        kernels = [
            np.asarray(one.kernel[...], np.float64)
            for one in (layer.value_projection, layer.output_projection)
        ]
        value = (x.astype(np.float64) @ kernels[0]).reshape(N, GROUPS, E)
        wide = kernels[1].reshape(HEADS, E, M)
        norms = [np.linalg.norm(value[:, h * GROUPS // HEADS] @ wide[h], axis=-1) for h in range(HEADS)]
        truth.append(weights * np.stack(norms)[:, None])
    return trace, truth


@pytest.fixture(scope="module")
def page(added, tmp_path_factory):
    return pages.write(added[0], tmp_path_factory.mktemp("values") / "page.html", compare=added[0])


@pytest.fixture
def open_page(browser, page):
    opened = []

    def visit(part=""):
        opened.append(browser.visit(page.as_uri() + part, allowed=page.as_uri()))
        return opened[-1]

    yield visit
    for one in opened:
        one.check()
        browser.close(one)


def colours(visit, truth, low, high):
    """Compare the map's pixels with norms on a log scale."""
    cells = [[row, key] for row in range(3, N, 5) for key in range(0, row, 4)]
    found = np.array(visit.probe("pixels", cells))[:, 3]
    norms = np.array([truth[row, key] for row, key in cells])
    expected = np.clip(np.log(norms / low) / np.log(high / low), 0, 1)
    assert np.all(np.abs(found - expected) <= 0.01)


def test_the_map_shows_what_is_added(open_page, added):
    truth = added[1]
    visit = open_page("#l=1&h=3&row=30&key=12")
    before = visit.until(f"!{SENTENCE}.includes('norm') && {SENTENCE}.includes('rank') && {SENTENCE}")
    visit.page.get_by_label("Shows").select_option("weight × value")
    said = visit.until(f"{SENTENCE}.includes('norm') && {SENTENCE}")
    norm = truth[1][3, 30, 12]
    rank = 1 + (truth[1][3, 30] > norm).sum()
    assert said.startswith(before.split(", 0.")[0])
    number, place = said.split("norm of what is added ")[1].split(", ")
    assert abs(float(number) - norm) <= 0.006 * norm
    assert place == f"rank {rank} of 31"
    assert "norm of what is added" in visit.evaluate("document.querySelector('.rg-what').textContent")
    # All cells, of one query and key each and in blocks; then the colours.
    found = np.array(visit.probe("blocks", [1, 3, 1, 1, N, N, "value"]), float).reshape(N, N)
    assert np.all(np.abs(found - truth[1][3]) <= 2.0**-10 * truth[1][3] + 1e-4)
    assert found.max() > 1
    half = -(-N // 2)
    blocks = np.array(visit.probe("blocks", [1, 3, 2, 2, half, half, "value"]), float).reshape(half, half)
    padded = np.pad(truth[1][3], (0, 2 * half - N)).reshape(half, 2, half, 2)
    np.testing.assert_allclose(blocks, padded.max((1, 3)), rtol=2e-3, atol=1e-4)
    most = max(one.max() for one in truth)
    low, high = visit.evaluate(LIMITS)
    assert (low, high) == pytest.approx((most * 2**-12, most), rel=1e-4)
    colours(visit, truth[1][3], low, high)
    visit.page.get_by_label("Range").select_option("head")
    visit.press("[")
    visit.evaluate("__regard.drawn()")
    low, high = visit.evaluate(LIMITS)
    assert high == pytest.approx(truth[0][3].max(), rel=1e-3)
    colours(visit, truth[0][3], low, high)
    # A link, also with ends above 1.
    visit.page.get_by_label("Range").select_option("all")
    visit.press("]")
    visit.page.get_by_label("Range").select_option("locked")
    visit.page.wait_for_timeout(250)
    other = open_page(visit.evaluate("location.hash"))
    assert other.page.get_by_label("Shows").first.input_value() == "value"
    assert other.evaluate(LIMITS) == pytest.approx(visit.evaluate(LIMITS))
    assert other.evaluate(LIMITS)[1] == pytest.approx(most, rel=1e-3)
    colours(other, truth[1][3], *other.evaluate(LIMITS))
    # Compare goes by weights.
    other.press("c")
    assert other.page.locator(".rg-compare label", has_text="Shows").locator("select").input_value() == "mass"


def test_files_and_python_hold_what_is_added(open_page, added, tmp_path, monkeypatch):
    truth = added[1][1][2]
    visit = open_page("#l=1&h=2&ch=value&q=10-20&k=4-14")
    visit.press("e")
    with visit.page.expect_download() as waiting:
        visit.page.locator(".export-menu").get_by_text("CSV", exact=True).click()
    assert waiting.value.suggested_filename == "added-layer-1-head-2-norm-of-what-is-added.csv"
    remark, header, _, *body = csv.reader(io.StringIO(Path(waiting.value.path()).read_text()))
    assert remark == ["# layer 1 head 2", " norm of what is added: added: norm of what is added"]
    keys, rows = [int(key) for key in header[2:]], [int(line[0]) for line in body]
    found = np.array([[float(number) for number in line[2:]] for line in body])
    np.testing.assert_allclose(found, truth[np.ix_(rows, keys)], rtol=2e-3, atol=1e-4)
    visit.page.get_by_text("copy Python", exact=True).click()
    python = visit.until("document.querySelector('.export-menu textarea').value")
    visit.complaints[:] = [text for text in visit.complaints if "clipboard" not in text.lower()]
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    added[0].save("trace.regard", keep="qk")
    names = {}
    exec(compile(python, "copied", "exec"), names)
    drawn = np.asarray(names["weights"])
    np.testing.assert_allclose(
        drawn, truth[10 : 10 + len(drawn), 4 : 4 + drawn.shape[1]], rtol=1e-4, atol=1e-5
    )
    assert names["drawing"].colorbar.ax.get_ylabel() == "norm of what is added"
    assert names["drawing"].images[0].get_clim()[1] == pytest.approx(drawn.max())


def test_where_values_are_not_known_the_map_says_so(open_page, browser, added, tmp_path):
    visit = open_page("#l=2&h=0&ch=value&row=9&key=3")
    assert visit.until(f"{SENTENCE}.includes('no number') && {SENTENCE}")
    trace = inspection.Trace(added[0].calls[2:])
    alone = pages.write(trace, tmp_path / "page.html")
    plain = browser.visit(alone.as_uri())
    options = plain.page.get_by_label("Shows").first.locator("option").all_inner_texts()
    assert options == ["mass of a block", "largest weight"]
    plain.check()
    browser.close(plain)
