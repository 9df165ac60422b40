"""What a model's layers predict, add and pass on, on the explorer's page in a browser."""

import contextlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from explorer_pages import WORDS, check_colours, number
from regard import inspection
from regard.inspection.explorer import pages
from regard.inspection.explorer.server import serve
from regard.models import Decoder, TransformerConfig

pytest_plugins = ("browser",)
pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=alert(1)>"
HEADS, LAYERS, ROW = 3, 3, 30
CELLS = ".map((row) => [...row.children].map((cell) => cell.textContent))"
DETAILS = f"[...document.querySelector('.details-table').querySelectorAll('tbody tr')]{CELLS}"
EFFECTS = "[...document.querySelectorAll('.effects')].map((table) => table.hidden ? null : "
EFFECTS += f"[...table.querySelectorAll('tbody tr')]{CELLS})"
LIMITS = "(({ low, high }) => [low, high])(__regard.state().limits)"
SENTENCE = "document.querySelector('.rg-sentence').textContent"
STATUS = "document.querySelector('.reader-status').textContent"


@pytest.fixture(scope="module")
def trace():
    names = [*sorted(set(WORDS)), HOSTILE]
    sizes = {"d_model": 24, "num_heads": HEADS, "d_ff": 31, "num_layers": LAYERS + 1, "delta_head_dim": 5}
    sizes |= {"mixers": ("attention", "gated_delta", *["attention"] * 2), "vocab_size": len(names)}
    model = Decoder(TransformerConfig(**sizes, tied_output=False, head_bias=True), rngs=nnx.Rngs(0))
    model.head.bias[...] = model.head.bias[...].at[-1].set(5.0)
    kernel = model.trunk.stack.blocks[2].attention.value_projection.kernel
    kernel[...] = 30 * kernel[...]
    model.eval()
    ids = jnp.array([[names.index(word) for word in WORDS]])
    with inspection.capture(model, tokens=WORDS, title="model") as found:
        model(ids)
    return inspection.predict_layers(found, model, ids, lambda token: names[token])


@pytest.fixture(scope="module")
def added(trace):
    return [call.window().astype(np.float64) * call.value_norms[:, None] for call in trace]


@pytest.fixture(scope="module")
def page(trace, tmp_path_factory):
    return pages.write(trace, tmp_path_factory.mktemp("models") / "page.html", compare=trace)


@pytest.fixture(params=["page", "served"])
def address(request, trace, page):
    with serve(trace) if request.param == "served" else contextlib.nullcontext() as server:
        yield server.url if server else page


def test_details_tell_what_layers_predict_and_heads_add(open_page, address, trace):
    visit = open_page(f"#l=1&h=2&row={ROW}", address)
    lens, parts = visit.until(f"(({{0: one, 1: other}}) => one && other && [one, other])({EFFECTS})")
    found = trace.predictions
    assert HOSTILE in [found.texts[n] for n in found.tokens[:, ROW].ravel()]
    assert [line[0] for line in lens] == ["0", "1 linear", "2", "3"]
    for layer, line in enumerate(lens):
        tokens = [found.texts[n] for n in found.tokens[layer, ROW]]
        assert [line[1], line[3].strip()] == [tokens[0], " ".join(tokens[1:])]
        assert number(line[2]) == pytest.approx(found.probabilities[layer, ROW, 0], rel=0.006)
    values = found.contributions[:, :, ROW]
    order = np.argsort(-np.abs(values), axis=None)
    wanted = [divmod(int(one), HEADS) for one in order]
    assert [line[0] for line in parts] == [f"layer {trace[call].layer} head {head}" for call, head in wanted]
    np.testing.assert_allclose([number(line[1]) for line in parts], values.ravel()[order], rtol=0.006)
    call, head = wanted[3]
    name = f"Show layer {trace[call].layer} head {head}"
    visit.page.locator(".effects").get_by_role("button", name=name, exact=True).click()
    visit.until(f"(({{c, h}}) => c === {call} && h === {head})(__regard.state())")
    # A key's readers have no prediction.
    visit.page.evaluate("location.hash = '#l=1&h=2&key=30&dir=in'")
    visit.page.locator(".reader-switch").get_by_text("is read by", exact=True).click()
    visit.until(f"{EFFECTS}.every((table) => table === null)")


def check_rollout(visit, row):
    """Compare the ten largest shares that Details lists."""
    visit.until("document.querySelector('.details-table caption').textContent.includes('takes in')")
    table = visit.evaluate(DETAILS)
    keys, shares = [int(line[0]) for line in table], [float(line[3]) for line in table]
    assert set(keys) == set(np.argsort(-row)[:10])
    np.testing.assert_allclose(shares, row[keys], rtol=0.006)


def test_words_show_what_reaches_the_chosen_query(open_page, address, trace):
    rollouts = [inspection.roll_out_row(trace, ROW, call=layer) for layer in range(LAYERS)]
    visit = open_page(f"#l=3&h=1&row={ROW}", address)
    visit.page.get_by_text("rollout", exact=True).click()
    said = visit.until(f"{STATUS}.includes('takes in') && {STATUS}")
    assert said.startswith(f"Query {ROW} ‘{WORDS[ROW]}’ takes in through 3 layers; tint: root of the share")
    check_rollout(visit, rollouts[2])
    visit.press("[")
    visit.until(f"{STATUS}.includes('through 2 layers')")
    check_rollout(visit, rollouts[1])
    # The link says so; a head's own reading is a press away.
    visit.page.wait_for_timeout(250)
    other = open_page(visit.evaluate("location.hash"), address)
    check_rollout(other, rollouts[1])
    other.page.locator(".reader-switch").get_by_text("reads", exact=True).click()
    other.until(f"{STATUS}.includes('reads;')")


def test_the_map_shows_what_is_added(open_page, added):
    visit = open_page("#l=1&h=2&row=30&key=12")
    visit.page.get_by_label("Shows").select_option("weight × value")
    said = visit.until(f"{SENTENCE}.includes('norm') && {SENTENCE}")
    truth, norm = added[1][2], added[1][2, 30, 12]
    size, place = said.split("norm of what is added ")[1].split(", ")
    assert float(size) == pytest.approx(norm, rel=0.006)
    assert place == f"rank {1 + (truth[30] > norm).sum()} of 31"
    assert "norm of what is added" in visit.evaluate("document.querySelector('.rg-what').textContent")
    assert truth.max() > 1
    most = max(one.max() for one in added)
    assert visit.evaluate(LIMITS) == pytest.approx([most * 2**-12, most], rel=1e-4)
    check_colours(visit, truth, *visit.evaluate(LIMITS), codes=2.5)
    # Compare goes by weights.
    visit.press("c")
    assert visit.page.locator(".rg-compare label", has_text="Shows").locator("select").input_value() == "mass"


def test_copied_python_draws_what_is_added(open_page, trace, added, tmp_path, monkeypatch):
    truth = added[1][2]
    visit = open_page("#l=1&h=2&ch=value&q=10-20&k=4-14&fold=profiles,plain")
    visit.press("e")
    visit.page.get_by_text("copy Python", exact=True).click()
    python = visit.until("document.querySelector('.export-menu textarea').value")
    visit.complaints[:] = [text for text in visit.complaints if "clipboard" not in text.lower()]
    monkeypatch.chdir(tmp_path)
    trace.save("trace.regard", keep="qk")
    names = {}
    exec(compile(python, "copied", "exec"), names)
    drawn = np.asarray(names["weights"])
    wanted = truth[10 : 10 + len(drawn), 4 : 4 + drawn.shape[1]]
    np.testing.assert_allclose(drawn, wanted, rtol=1e-4, atol=1e-5)
    assert names["drawing"].colorbar.ax.get_ylabel() == "norm of what is added"
    assert names["drawing"].images[0].get_clim()[1] == pytest.approx(drawn.max())
