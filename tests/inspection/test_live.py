"""The live page: what is typed is read by few programs, and answered to this machine alone."""

import dataclasses
import http.client
import json
import threading
import urllib.parse
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from economy import mostly_slow
from regard import attend, inspection, masks
from regard.inspection import Tokens
from regard.inspection.explorer import live, pages
from regard.inspection.recorders import Recorder
from regard.models import Decoder, Encoder, TransformerConfig

CONFIG = TransformerConfig(
    d_model=12,
    num_heads=6,
    num_key_heads=2,
    d_ff=7,
    num_layers=2,
    vocab_size=29,
    positions="rotary",
    windows=(5, None),
)


# `first` and `local` follow from the padded length; rounding orders keys of equal weight.
OTHERWISE = ("first_mass", "local_mass", "pattern_keys", "trust", "top_keys")


def make_tokens(count):
    ids = np.random.default_rng(count).integers(0, 29, count)
    return Tokens([chr(65 + token) for token in ids], ids=ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Decoder, Encoder])
def test_padding_is_not_seen_and_one_program_serves_for_many_lengths(kind, caplog):
    model = kind(CONFIG, rngs=nnx.Rngs(0))
    model.eval()
    recorder = Recorder(model)
    pages.fill_page(recorder.record(make_tokens(19), "first"), served=True, pinned=0)
    tokens = make_tokens(31)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        trace = recorder.record(tokens, "a title")
        pages.fill_page(trace, served=True, pinned=0)
    assert "Compiling" not in caplog.text
    _, expected = inspection.record(model, jnp.asarray(tokens.ids)[None], tokens=tokens)
    assert (trace.title, trace.model) == ("a title", expected.model)
    for mine, theirs in zip(trace, expected, strict=True):
        for name in ("name", "layer", "kind", "heads", "rows", "keys", "positions", "query_tokens"):
            assert getattr(mine, name) == getattr(theirs, name), name
        np.testing.assert_allclose(mine.window(), theirs.window(), rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(
            mine.window(slice(3, 8), [30, 2], [4]), theirs.window(slice(3, 8), [30, 2], [4]), atol=2e-6
        )
        np.testing.assert_allclose(mine.value_norms, theirs.value_norms, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(mine.max_score, theirs.max_score, rtol=2e-5, atol=2e-6)
        found, wanted = mine.readout(), theirs.readout()
        for field in dataclasses.fields(found):
            one, other = getattr(found, field.name), getattr(wanted, field.name)
            if hasattr(one, "shape") and field.name not in OTHERWISE:
                np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5, err_msg=field.name)
        with pytest.raises(ValueError, match=r"rows: expected indices in 0\.\.30"):
            mine.window(rows=[31])


@pytest.mark.parametrize("kind", mostly_slow([Decoder, Encoder], Encoder))
def test_padding_is_not_saved(kind, tmp_path):
    model = kind(dataclasses.replace(CONFIG, num_layers=1, windows=(5,)), rngs=nnx.Rngs(0))
    model.eval()
    (call,) = trace = Recorder(model).record(make_tokens(7), "a title")
    document = pages.fill_page(trace)[0].document
    head = document["traces"][0]["calls"][0]["head"][0]
    assert [document["chunks"][head[name]]["shape"] for name in ("query", "key")] == [[7, 2], [7, 2]]
    (kept,) = inspection.load(trace.save(tmp_path / "one.regard", keep="qk"))
    assert (kept.problem.query.shape, kept.problem.key.shape) == ((6, 7, 2), (2, 7, 2))
    np.testing.assert_allclose(kept.window(), call.window(), rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(kept.readout().keys, call.readout().keys)


@pytest.mark.slow
def test_texts_that_do_not_fit_are_named():
    recorder = Recorder(Decoder(CONFIG, rngs=nnx.Rngs(0)), most=17)
    with pytest.raises(ValueError, match="text: expected at most 17 tokens for this model, got 18"):
        recorder.record(make_tokens(18), "")
    with pytest.raises(ValueError, match="tokens: expected at least one, with ids"):
        recorder.record(Tokens([]), "")


# The server


class Model:
    """Reads letters: one head, which reads evenly; says what it was asked for, and may be made to wait."""

    def __init__(self):
        self.read, self.gate = [], threading.Event()
        self.gate.set()

    def record(self, text):
        self.read.append(text)
        assert self.gate.wait(60)
        if "?" in text:
            raise ValueError("text: expected no <question>")
        x = jnp.ones((1, len(text), 3))
        with inspection.capture(tokens=list(text), title=text) as trace:
            attend(x, x, x, mask=masks.causal())
        return trace


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def page(model):
    with live.serve_live(model.record, text="</script>&", title="<b>", training=None) as page:
        yield page


def ask(page, path):
    with urllib.request.urlopen(page.url + path, timeout=60) as answer:
        return answer.read(), answer.headers


def read(page, *texts):
    return json.loads(ask(page, "read?" + urllib.parse.urlencode([("text", one) for one in texts]))[0])


@pytest.mark.slow
def test_texts_are_read_once_and_shown_alone_or_compared(page, model):
    assert read(page, "abc") == {"view": "view/1/", "tokens": [3]}
    assert read(page, "abc", "abd") == {"view": "view/1-2/", "tokens": [3, 3]}
    assert model.read == ["abc", "abd"]
    text, headers = ask(page, "view/1-2/")
    assert b'"title":"abd"' in text
    assert headers["X-Frame-Options"] == "SAMEORIGIN"
    assert "frame-ancestors 'self'" in headers["Content-Security-Policy"]
    row = np.frombuffer(ask(page, "view/1-2/row/1/0/0/2")[0], "<f4")
    np.testing.assert_allclose(row, 1 / 3, rtol=1e-6)
    assert read(page, "what?") == {"refused": "text: expected no <question>"}


@pytest.mark.slow
def test_the_page_itself_is_in_no_frame_and_its_settings_are_text(page):
    text, headers = ask(page, "")
    assert b"\\u003c/script\\u003e\\u0026" in text
    assert b"<title>&lt;b&gt;</title>" in text
    assert headers["X-Frame-Options"] == "DENY"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("read", 400),
        ("read?text=a&text=b&text=c", 400),
        ("read?texts=a", 400),
        ("read/x?text=a", 404),
        ("view/1", 404),
        ("view/9/", 404),
        ("nothing", 404),
        ("../read?text=a", 404),
    ],
)
def test_nothing_else_is_answered(page, model, path, status):
    assert request(page, f"/{page.url.split('/')[3]}/{path}") == status
    assert model.read == []


def test_without_the_secret_or_under_another_name_nothing_is_read(page, model):
    secret = page.url.split("/")[3]
    assert request(page, "/read?text=a") == 404
    assert request(page, f"/{secret}/read?text=a", {"Host": "example.org"}) == 403
    assert model.read == []


def request(page, path, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    try:
        connection.request("GET", path, headers=headers or {})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.slow
def test_a_text_that_nobody_waits_for_is_not_read(page, model):
    model.gate.clear()
    answers = []
    threads = [
        threading.Thread(target=lambda text=text: answers.append(read(page, text))) for text in ("abc", "abe")
    ]
    threads[0].start()
    while not model.read:
        threading.Event().wait(0.01)
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    connection.request("GET", f"/{page.url.split('/')[3]}/read?text=abd")
    assert page.is_busy()
    connection.close()
    threading.Event().wait(0.3)
    threads[1].start()
    model.gate.set()
    for thread in threads:
        thread.join()
    assert model.read == ["abc", "abe"]
    assert len(answers) == 2


@pytest.fixture
def forgetful(monkeypatch):
    """Pages served from here on keep two texts and one view."""
    monkeypatch.setattr(live, "MOST_TRACES", 2)
    monkeypatch.setattr(live, "MOST_VIEWS", 1)


@pytest.mark.slow
def test_old_texts_and_pages_are_dropped(forgetful, page, model):
    for text in ("abc", "abd", "abc", "abe", "abc"):
        last = read(page, text)
    assert model.read == ["abc", "abd", "abe"]
    assert last["view"] == "view/1/"
    assert read(page, "abd")["view"] == "view/4/"
    assert request(page, f"/{page.url.split('/')[3]}/view/1/") == 404
