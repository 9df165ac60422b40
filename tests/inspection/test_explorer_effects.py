"""What layers would predict and what heads add to a logit, on the explorer's page in a browser."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from explorer_pages import WORDS
from regard import inspection
from regard.inspection.explorer import pages
from regard.inspection.explorer.server import serve
from regard.models import Decoder, TransformerConfig

pytest_plugins = ("browser",)
pytestmark = [pytest.mark.browser, pytest.mark.slow]

HOSTILE = "<img src=x onerror=alert(1)>"
HEADS, LAYERS, ROW = 3, 4, 30
TABLES = (
    "[...document.querySelectorAll('.effects')].map((table) => table.hidden ? null : "
    "[...table.querySelectorAll('tbody tr')].map((row) => [...row.children].map((cell) => cell.textContent)))"
)


@pytest.fixture(scope="module")
def predicted():
    """A trace of a language model that predicts a hostile token."""
    names = [*sorted(set(WORDS)), HOSTILE]
    sizes = {"d_model": 24, "num_heads": HEADS, "d_ff": 31, "num_layers": LAYERS}
    config = TransformerConfig(**sizes, vocab_size=len(names), tied_output=False, head_bias=True)
    model = Decoder(config, rngs=nnx.Rngs(0))
    model.head.bias[...] = model.head.bias[...].at[-1].set(5.0)
    model.eval()
    ids = jnp.array([[names.index(word) for word in WORDS]])
    with inspection.capture(model, tokens=list(WORDS), title="effects") as trace:
        model(ids)
    return inspection.predict_layers(trace, model, ids, lambda token: names[token])


def number(text):
    return float(text.replace("−", "-"))


@pytest.mark.parametrize("served", [False, True])
def test_details_tell_what_layers_predict_and_heads_add(browser, predicted, tmp_path, served):
    loaded = inspection.load(predicted.save(tmp_path / "one.regard", keep="qk"))
    server = serve(loaded) if served else None
    address = server.url if server else pages.write(loaded, tmp_path / "page.html").as_uri()
    visit = browser.visit(f"{address}#l=1&h=2&row={ROW}", allowed=address)
    lens, parts = visit.until(f"(({{0: one, 1: other}}) => one && other && [one, other])({TABLES})")
    found = predicted.predictions
    assert HOSTILE in [found.texts[n] for n in found.tokens[:, ROW].ravel()]
    assert [int(line[0]) for line in lens] == list(range(LAYERS))
    for layer, line in enumerate(lens):
        tokens = [found.texts[n] for n in found.tokens[layer, ROW]]
        assert [line[1], line[3].strip()] == [tokens[0], " ".join(tokens[1:])]
        assert number(line[2]) == pytest.approx(found.probabilities[layer, ROW, 0], rel=0.006)
    assert visit.evaluate("document.querySelectorAll('.effects img').length") == 0
    values = found.contributions[:, :, ROW]
    order = np.argsort(-np.abs(values), axis=None)[:10]
    wanted = [np.unravel_index(one, values.shape) for one in order]
    assert [line[0] for line in parts] == [f"layer {layer} head {head}" for layer, head in wanted]
    np.testing.assert_allclose([number(line[1]) for line in parts], values.ravel()[order], rtol=0.006)
    # Captions and headings name what the tables show.
    table = visit.page.get_by_role("table", name=f"After {ROW} ‘{WORDS[ROW]}’, layers would predict")
    assert table.get_by_role("columnheader").all_inner_texts() == ["layer", "token", "probability", "then"]
    layer, head = wanted[3]
    name = f"Show layer {layer} head {head}"
    visit.page.locator(".effects").get_by_role("button", name=name, exact=True).click()
    visit.until(f"(({{c, h}}) => c === {layer} && h === {head})(__regard.state())")
    # A key's readers have no prediction.
    visit.page.evaluate("location.hash = '#l=1&h=2&key=30&dir=in'")
    visit.page.locator(".reader-switch").get_by_text("is read by", exact=True).click()
    visit.until(f"{TABLES}.every((table) => table === null)")
    visit.check()
    browser.close(visit)
    if server:
        server.close()
