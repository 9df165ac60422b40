"""The live page: what is typed is read by few programs, and answered to this machine alone."""

import dataclasses
import json
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusals import assert_refused
from regard import attend, inspection, masks
from regard.inspection import Tokens
from regard.inspection.explorer import live, pages
from regard.inspection.recorders import Recorder
from regard.models import Decoder, Encoder
from small_models import build
from test_server import ask, ask_raw, request_only

OPTIONS = {"num_heads": 6, "num_key_heads": 2, "num_layers": 1, "positions": "rotary", "windows": (5,)}
# `first` and `local` follow from the padded length; rounding orders keys of equal weight.
OTHERWISE = ("first_mass", "local_mass", "pattern_keys", "trust", "top_keys")


def make_tokens(count):
    ids = np.random.default_rng(count).integers(0, 13, count)
    return Tokens([chr(65 + token) for token in ids], ids=ids)


def test_padding_is_not_saved(caplog, tmp_path):
    model = build(Encoder, **OPTIONS)
    recorder, tokens = Recorder(model), make_tokens(31)
    pages.fill_page(recorder.record(make_tokens(19), "first"), served=True, pinned=0)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        (call,) = trace = recorder.record(tokens, "a title")
        pages.fill_page(trace, served=True, pinned=0)
    assert "Compiling" not in caplog.text
    _, expected = inspection.record(model, jnp.asarray(tokens.ids)[None], tokens=tokens)
    (plain,) = expected
    assert (trace.title, trace.model) == ("a title", expected.model)
    for name in ("name", "layer", "kind", "heads", "rows", "keys", "positions", "query_tokens"):
        assert getattr(call, name) == getattr(plain, name), name
    window = plain.window()
    np.testing.assert_allclose(call.window(), window, rtol=2e-5, atol=2e-6)
    cut = call.window(slice(3, 8), [30, 2], [4])
    np.testing.assert_allclose(cut, window[[4], 3:8][..., [30, 2]], atol=2e-6)
    np.testing.assert_allclose(call.value_norms, plain.value_norms, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(call.max_score, plain.max_score, rtol=2e-5, atol=2e-6)
    wanted = vars(plain.readout())
    for name, one in vars(call.readout()).items():
        if hasattr(one, "shape") and name not in OTHERWISE:
            np.testing.assert_allclose(one, wanted[name], rtol=2e-4, atol=2e-5, err_msg=name)
    assert_refused((lambda: call.window(rows=[31]), r"rows: expected indices in 0\.\.30"))
    document = pages.fill_page(trace)[0].document
    head = document["traces"][0]["calls"][0]["head"][0]
    assert [document["chunks"][head[name]]["shape"] for name in ("query", "key")] == [[31, 2], [31, 2]]
    (kept,) = inspection.load(trace.save(tmp_path / "one.regard", keep="qk"))
    assert (kept.problem.query.shape, kept.problem.key.shape) == ((6, 31, 2), (2, 31, 2))
    np.testing.assert_allclose(kept.window(), window, rtol=2e-5, atol=2e-6)
    short = Recorder(model, most=17)
    assert_refused(
        (lambda: short.record(make_tokens(18), ""), "text: expected at most 17 tokens .*, got 18"),
        (lambda: short.record(Tokens([]), ""), "tokens: expected at least one, with ids"),
    )


@pytest.mark.parametrize("by", ["zero", "double", "mean", "uniform"])
def test_heads_are_cut_within_the_same_program_as_by_hand(by, caplog, tmp_path):
    hybrid = {"num_layers": 4, "mixers": ("attention", "gated_delta"), "delta_head_dim": 4}
    model = build(Decoder, positions="rotary", remat="full", **hybrid if by == "mean" else {})
    tokens, spell = make_tokens(11), "<{}>".format
    cut = ((0, 1), (1, 2), *[(1, 0, 7, 3)] * (by in ("zero", "double")))
    recorder, ids = Recorder(model, spell=spell), jnp.asarray(tokens.ids)[None]
    recorder.record(make_tokens(13), "")
    with jax.log_compiles(), caplog.at_level("WARNING"):
        trace = recorder.record(tokens, "", cut, by)
    assert "Compiling" not in caplog.text
    observed = inspection.observe(lambda: model(ids), lambda problem, output: output)
    changes, edges = {}, {1: inspection.Change(edges=((0, 7, 3),), share=-1.0 if by == "double" else 1.0)}
    for call, head in cut[:2]:
        with inspection.intervene(changes):
            own = jax.jit(lambda: observed()[1])()[call]
        new = {"zero": 0.0, "double": 2 * own, "mean": own.mean(-2, keepdims=True)}
        new = {"query": 0.0} if by == "uniform" else {"output": new[by]}
        changes[call] = inspection.Change(**new, heads=(head,))
    with inspection.intervene(changes), inspection.intervene(edges if cut[2:] else {}):
        logits, expected = inspection.record(model, ids, tokens=tokens)
    with inspection.intervene(changes), inspection.intervene(edges if cut[2:] else {}):
        expected = inspection.predict_layers(expected, model, ids, spell)
    for call, plain in zip(trace, expected, strict=True):
        np.testing.assert_allclose(call.window(), plain.window(), rtol=2e-5, atol=2e-6)
    mine = vars(inspection.load(trace.save(tmp_path / "one.regard")).predictions)
    theirs = vars(expected.predictions)
    assert mine.pop("texts") == theirs.pop("texts")
    for name, array in mine.items():
        np.testing.assert_allclose(array, theirs[name], rtol=2e-5, atol=2e-6, err_msg=name)
    found, run = [], {"model": lambda ids: found.append(model(ids)), "tokens": ids, "inspection": inspection}
    exec(live._Reading("", cut, by).python, run)
    np.testing.assert_allclose(found[0], logits, rtol=2e-5, atol=2e-6 * np.abs(logits).max())
    logits = np.asarray(logits[0], np.float64)
    coming = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(10), tokens.ids[1:]]
    np.testing.assert_allclose(trace.predictions.next_log_probability, coming, rtol=2e-5)
    assert_refused(
        (lambda: recorder.record(tokens, "", [(0, 3)]), r"layers 0\.\.[13], heads 0\.\.2 .* got 0\.3"),
        (lambda: recorder.record(tokens, "", [(0, 1, 9, 11)]), r"tokens 0\.\.10, got 0\.1:9-11"),
        (lambda: recorder.record(tokens, "", [(0, 1, 9, 0)], "mean"), "16 edges, by zero, .*; got 1, by"),
        (lambda: recorder.record(tokens, "", [(2, 0)]), "cut: expected layer.head or .* 2.0|calls below 2"),
        (lambda: recorder.record(tokens, "", [(0, 0)], "no"), "by: expected one of zero, half, double, mean"),
    )


@pytest.mark.parametrize("kind", [Decoder, Encoder])
def test_heads_get_what_they_wrote_in_another_run_as_by_the_line_of_the_page(kind):
    model, tokens = build(kind, **OPTIONS | {"num_layers": 3}), make_tokens(11)
    other, cut = Tokens(tokens.texts, ids=tokens.ids[::-1]), ((0, 1), (1, 2), (0, 4, 7), (0, 1, 3))
    recorder = Recorder(model, spell=str)
    ask = lambda *more: recorder.record(tokens, "", *more)
    trace = ask(cut, "patch", other)
    ids, source = (jnp.asarray(read.ids)[None] for read in (tokens, other))
    first, last, _ = inspection.observe(model, lambda problem, output: output)(source)[1]
    row = inspection.Change(output=first, heads=(4,), rows=(7,))
    changes = {0: inspection.Change(output=first, heads=(1,)), 1: inspection.Change(output=last, heads=(2,))}
    with inspection.intervene(changes), inspection.intervene({0: row}):
        wanted, expected = inspection.record(model, ids, tokens=tokens)
    for call, plain in zip(trace, expected, strict=True):
        np.testing.assert_allclose(call.window(), plain.window(), rtol=2e-5, atol=2e-6)
    found, line = [], live._Reading("", cut, "patch", "").python
    run = {"model": lambda pair: found.append(model(pair)), "tokens": ids, "source": source}
    exec(line, run | {"inspection": inspection, "jnp": jnp})
    np.testing.assert_allclose(found[0], [wanted[0], model(source)[0]], rtol=2e-5, atol=2e-6)
    if kind is Decoder:
        likeliest = jax.nn.softmax(wanted[0]).max(-1)
        np.testing.assert_allclose(trace.predictions.probabilities[-1, :, 0], likeliest, rtol=2e-5)
    assert_refused(
        (lambda: ask([(0, 1)], "patch"), 'source: expected a second text by "patch"'),
        (lambda: ask([(0, 1, 7)]), 'one position of a head by "patch" alone'),
        (lambda: ask(cut, "patch", make_tokens(7)), "source: expected 11 tokens, .*, got 7; change words"),
    )


class Model:
    """Reads letters: evenly, but with heads cut; says what it was asked for, and may be made to wait."""

    def __init__(self, layers=1, first=0):
        self.read, self.gate, self.layers, self.first = [], threading.Event(), layers, first
        self.gate.set()

    def record(self, text, cut=(), by="zero", **source):
        self.read.append((text, cut, by, *source.values()) if cut else text)
        assert self.gate.wait(60)
        if "?" in text:
            raise ValueError("text: expected no <question>")
        x = np.ones((2, len(text), 3), np.float32) * np.arange(len(text))[:, None]
        with inspection.capture(tokens=list(text), title=text) as trace:
            for share in ([3, 0], [0.5, 1])[: self.layers]:  # how much each head changes
                attend(np.reshape(share, (2, 1, 1)) * bool(cut) * x, x, x, mask=masks.causal())
        calls = [dataclasses.replace(call, layer=call.layer + self.first) for call in trace]
        return dataclasses.replace(trace, calls=tuple(calls))


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def page(model):
    with live.serve_live(model.record, text="</script>&", title="<b>", training=None) as page:
        yield page


def read(page, *texts, **more):
    asked = urllib.parse.urlencode([*(("text", one) for one in texts), *more.items()])
    return json.loads(ask(page, f"read?{asked}")[1])


def test_a_text_stands_beside_itself_without_heads_and_a_cell_is_split_into_its_parts(model):
    parts = inspection.ScoreParts(("tokens", "biases"), np.array([[2.0, 0.5], [-1.0, 0.0]]), 1.5)
    asked = []

    def explain(text, **place):
        asked.append((text, place))
        if place["key"] > 2:
            raise ValueError("key: expected a number below 3")
        return parts

    edges = inspection.Edge(1, 0, 2, 1, 0.5, float("nan")), inspection.Edge(0, 1, 0, 0, 0.4, 0.0)
    trace = lambda text, query: (inspection.Paths(query % 3, 5, np.nan, edges), "<t>", list(text))
    with live.serve_live(model.record, cuts=True, explain=explain, trace=trace) as page:
        found = read(page, "abc", cut="0.0, 1.2 1.2:2-1 3.0:1-1", by="zero")
        assert model.read == ["abc", ("abc", ((0, 0), (1, 2), (1, 2, 2, 1), (3, 0, 1, 1)), "zero")]
        assert (found["view"], found["tokens"]) == ("view/1-2/", [3, 3])
        changes = "0: inspection.Change(output=0.0, heads=(0,)), 1: inspection.Change(output=0.0, heads=(2,)"
        changes += ", edges=((2, 2, 1),)), 3: inspection.Change(edges=((0, 1, 1),))"
        assert found["python"] == f"with inspection.intervene({{{changes}}}): model(tokens)"
        assert b'"title":"abc (0.0 1.2 1.2:2-1 3.0:1-1 switched off)"' in ask(page, "view/1-2/")[1]
        assert read(page, "abc", cut=" ", by="zero")["view"] == "view/1/"
        found = read(page, "abc", "<b>", cut="0.0 0.0:1", by="patch")
        assert model.read[2:] == ["<b>", ("abc", ((0, 0), (0, 0, 1)), "patch", "<b>")]
        assert (found["view"], found["tokens"]) == ("view/1-4/", [3, 3])
        assert b"(0.0 0.0:1 from \\u201c\\u003cb\\u003e\\u201d)" in ask(page, "view/1-4/")[1]
        assert 'press "Change a word"' in read(page, "abc", cut="0.0", by="patch")["refused"]
        why = "why?text=abc&layer=0&head=0&query=2&key="
        found = json.loads(ask(page, f"{why}1")[1])
        assert (found["score"], found["parts"][0]) == (1.5, ["tokens", "tokens", 2.0])
        later = why.replace("query=2", "query=0")
        assert [json.loads(ask(page, f"{cell}1")[1])["permitted"] for cell in (why, later)] == [True, False]
        assert found["python"].endswith("layer=0, head=0, query=2, key=1)")
        assert json.loads(ask(page, f"{why}3")[1]) == {"refused": "key: expected a number below 3"}
        graph = json.loads(ask(page, "paths?text=abc&query=-1")[1], parse_constant=pytest.fail)
        assert graph["logit"] is None, "NaN is no JSON"
        assert [(edge["call"], edge["key"], edge["direct"]) for edge in graph["edges"]] == [(1, 1, None)]
        assert (graph["query"], graph["target"], graph["tokens"]) == (2, "<t>", {"1": "b", "2": "c"})
        assert b"3.0:1-1 switched off" in ask(page, "save/1-2/")[1]
        paths = [f"read?text=a&cut={cut}" for cut in ("1", "0.1:x&by=zero", "0.0&by=x", "0.0&cut=0.1")]
        paths += [f"{why}-1", "why?text=abc&layer=0", why.replace("layer=0", "layer=1") + "1"]
        for path in (*paths, "paths?text=abc&query=-2", "paths?text=abc"):
            assert ask(page, path)[0] == 400, path
    assert asked[0] == ("abc", {"layer": 0, "head": 0, "query": 2, "key": 1})
    # Of a hybrid, heads that are cut are those of the layers shown.
    model = Model(first=2)
    with live.serve_live(model.record, cuts=True) as page:
        found = read(page, "abc", cut="2.1", by="zero")
        assert model.read == ["abc", ("abc", ((0, 1),), "zero")]
        assert "{0: inspection" in found["python"]
        assert b"(2.1 switched off)" in ask(page, "view/1-2/")[1]
        assert read(page, "abc", cut="0.1", by="zero")["refused"].endswith("with weights, 2; got 0.1")


def test_texts_are_read_once_shown_alone_or_compared_and_old_ones_dropped(model, monkeypatch):
    monkeypatch.setattr(live, "MOST_TRACES", 2)
    monkeypatch.setattr(live, "MOST_VIEWS", 1)
    with live.serve_live(model.record, text="", title="", training=None) as page:
        assert read(page, "abc") == {"view": "view/1/", "tokens": [3]}
        assert read(page, "abc", "abd") == {"view": "view/1-2/", "tokens": [3, 3]}
        assert model.read == ["abc", "abd"]
        _, text, headers = ask(page, "view/1-2/")
        assert b'"title":"abd"' in text
        assert headers["X-Frame-Options"] == "SAMEORIGIN"
        assert "frame-ancestors 'self'" in headers["Content-Security-Policy"]
        row = np.frombuffer(ask(page, "view/1-2/row/1/0/0/2")[1], "<f4")
        np.testing.assert_allclose(row, 1 / 3, rtol=1e-6)
        assert read(page, "what?") == {"refused": "text: expected no <question>"}
        for text in ("abc", "abe", "abc"):
            last = read(page, text)
        assert model.read == ["abc", "abd", "what?", "abe"]
        assert last["view"] == "view/1/"
        assert read(page, "abd")["view"] == "view/4/"
        assert ask(page, "view/1/")[0] == 404


def test_the_page_itself_is_in_no_frame_and_nothing_else_is_answered(page, model):
    _, text, headers = ask(page, "")
    assert b"\\u003c/script\\u003e\\u0026" in text
    assert b"<title>&lt;b&gt;</title>" in text
    assert headers["X-Frame-Options"] == "DENY"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    paths = dict.fromkeys(("read", "read?text=a&text=b&text=c", "read?texts=a"), 400)
    paths |= dict.fromkeys(("read/x?text=a", "view/1", "view/9/", "nothing", "../read?text=a"), 404)
    for path, status in paths.items():
        assert ask(page, path)[0] == status, path
    # Nor without the secret, or under another name.
    assert ask_raw(page, "/read?text=a")[0] == 404
    assert ask(page, "read?text=a", Host="example.org")[0] == 403
    assert model.read == []


def test_a_text_that_nobody_waits_for_is_not_read(page, model):
    model.gate.clear()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(read, page, "abc")
        while not model.read:
            time.sleep(0.01)
        connection = request_only(page, "read?text=abd")
        assert page.is_busy()
        connection.close()
        time.sleep(0.3)
        last = pool.submit(read, page, "abe")
        model.gate.set()
        assert [answer.result()["tokens"] for answer in (first, last)] == [[3], [3]]
    assert model.read == ["abc", "abe"]
