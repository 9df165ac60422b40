"""`regard view`, and `regard inspect` of runs: what is watched, written, served and refused."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import urllib.request
from unittest import mock

import numpy as np
import pytest
from flax import nnx

from regard import inspection
from regard.cli import inspecting, main, pictures
from regard.cli.commands import view
from regard.inspection.explorer import server
from regard.training import runs, settings, tasks
from regard.training.tasks.text import END_OF_DOCUMENT
from small_runs import (
    begin,
    snapshot,
    tiny_copy,
    train,
)


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A tiny run of copy that watched its heads."""
    directory = tmp_path_factory.mktemp("viewing") / "copy"
    cadence = settings.Cadence(log_every=3, evaluate_every=5, checkpoint_every=7, heads_every=5)
    train(directory, tiny_copy(cadence=cadence))
    return directory


@pytest.fixture(scope="module")
def kept(copied, tmp_path_factory):
    """What inspect kept of it, with queries and keys."""
    out = tmp_path_factory.mktemp("kept")
    words = ["--out", str(out), "--save", str(out / "copy.regard"), "--keep-qk", "--quiet"]
    with mock.patch.object(inspecting, "draw_trace", draw_nothing):
        assert main(["inspect", str(copied), *words]) == 0
    return out


def draw_nothing(trace):
    """For tests that look at no picture."""
    return iter(())


def make(task, **sizes):
    """A task and a fresh model of it."""
    sizes = {"d_model": 10, "num_heads": 2, "d_ff": 7} | sizes
    kind = settings.DecoderSizes if isinstance(task, tasks.Text) else settings.Sizes
    task = dataclasses.replace(task, model=kind(**sizes))
    model = task.make_model(nnx.Rngs(3))
    model.eval()
    return task, model


# What is watched


@pytest.mark.slow
def test_copy_is_watched_with_its_symbols(copied):
    task, model = runs.load_run(copied)
    trace = task.watch(model)
    (call,) = trace.calls
    inputs = task.held_out["inputs"][:1]
    assert call.query_tokens.texts == ("SOS", *(str(token) for token in inputs[0, 1:].tolist()))
    assert call.query_tokens.ids.tolist() == inputs[0].tolist()
    weights = model(inputs, aux=("weights",))[1]["blocks"][0]["weights"][0]
    np.testing.assert_allclose(call.window(), weights, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_reverse_is_watched_with_both_sequences():
    task, model = make(tasks.Reverse(vocab_size=7, min_length=2, max_length=5, held_out_size=13))
    trace = task.watch(model)
    encoder, own, cross = trace.calls
    lengths = task.held_out["lengths"]
    row = int(np.argmax(lengths))
    source = [str(token) if token < 7 else "PAD" for token in task.held_out["source"][row].tolist()]
    assert list(encoder.key_tokens.texts) == list(cross.key_tokens.texts) == source
    length = int(lengths[row])
    assert own.query_tokens.texts[: length + 1] == ("SOS", *reversed(source[:length]))
    assert cross.query_tokens.texts == own.query_tokens.texts
    assert (encoder.kind, own.kind, cross.kind) == ("self", "self", "cross")


@pytest.mark.slow
def test_digits_are_watched_in_patches_of_their_picture():
    task, model = make(tasks.Digits(), num_layers=1)
    trace = task.watch(model)
    patches, pooling = trace.calls
    tokens = patches.query_tokens
    assert (tokens.kind, tokens.patch_grid, len(tokens)) == ("patches", (4, 4), 16)
    scan = np.asarray(task.held_out["scans"][0])
    np.testing.assert_allclose(tokens.picture, 1 - scan / scan.max(), rtol=1e-6)
    assert pooling.query_tokens.texts == ("prediction",)
    assert pooling.key_tokens.patch_grid == (4, 4)
    assert f"a scan of {int(task.held_out['labels'][0])}" in trace.title


@pytest.mark.slow
def test_threshold_is_watched():
    task, model = make(tasks.Threshold(length=5, held_out_size=3))
    trace = task.watch(model)
    assert trace.calls[0].query_tokens.texts == tuple(map(str, task.held_out["inputs"][0].tolist()))
    with pytest.raises(ValueError, match="--text is for models that read text; threshold"):
        task.watch(model, "some text")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for index in range(7):
        (folder / f"{index}.txt").write_text(f"{index} naïve tides and low tides\n" * (3 + index))
    return make(tasks.Text(files=(str(folder),), length=23, held_out_fraction=0.2), d_model=8)


@pytest.mark.slow
def test_text_is_watched_within_its_documents(texts):
    task, model = texts
    trace = task.watch(model)
    call = trace.calls[0]
    row = task.held_out["inputs"][0].tolist()
    assert call.query_tokens.ids.tolist() == row
    assert call.query_tokens.texts[0] == END_OF_DOCUMENT
    spelled = b"".join(task.vocabulary.spell(token) for token in row[1:])
    assert b"tides" in spelled
    _, aux = task.read(model, {"inputs": task.held_out["inputs"][:1]}, ("weights",))
    weights = aux["blocks"][0]["weights"][0]
    np.testing.assert_allclose(call.window(), weights, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_text_of_ones_own_is_read(texts):
    trace = texts[0].watch(texts[1], "low <b>\n")
    tokens = trace.calls[0].query_tokens
    assert tokens.texts == (END_OF_DOCUMENT, *"low <b>\n")
    assert len(texts[0].watch(texts[1], "").calls[0].query_tokens) == 1
    with pytest.raises(ValueError, match="expected at most 22 tokens, as in training, got 23"):
        texts[0].watch(texts[1], "x" * 23)
    assert len(texts[0].watch(texts[1], "x" * 22).calls[0].query_tokens) == 23


def test_names_of_layers_are_short():
    assert pictures.shorten_name("encoder.stack.blocks.3.attention") == "encoder.blocks.3"
    assert pictures.shorten_name("decoder.blocks.0.cross_attention") == "decoder.blocks.0.cross"
    assert pictures.shorten_name("attention") == "attention"


# inspect


@pytest.fixture(scope="module")
def inspected(copied, tmp_path_factory):
    """What inspect wrote about it and what it printed; queries and keys are not kept."""
    folder = tmp_path_factory.mktemp("inspected")
    words = ["--out", str(folder / "out"), "--save", str(folder / "s.regard"), "--json", "--format", "svg"]
    out, err = io.StringIO(), io.StringIO()
    before = snapshot(copied)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(["inspect", str(copied), *words]) == 0
    assert snapshot(copied) == before, "the run is left as it was"
    return folder, out.getvalue(), err.getvalue()


@pytest.mark.slow
def test_inspect_says_how_each_head_of_a_run_reads(copied, inspected):
    folder, printed, remarks = inspected
    events = [json.loads(line) for line in printed.splitlines()]
    assert [(event["event"], event["head"]) for event in events] == [("head", 0), ("head", 1)]
    task, model = runs.load_run(copied)
    call = task.watch(model).calls[0]
    weights = np.asarray(call.window(), np.float64)
    entropies = -(weights * np.log(weights)).sum(-1).mean(-1)
    for event in events:
        assert event["entropy_nats"] == pytest.approx(entropies[event["head"]], rel=1e-4)
        assert event["max_score"] == pytest.approx(call.max_score[event["head"]].max())
    assert "1 attention layer" in remarks
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["atlas.svg", "explorer.html"]
    document = read_document((folder / "out" / "explorer.html").read_text())
    assert [chart["name"] for chart in document["training"]["maps"]] == ["entropy", "max_score"]
    assert document["training"]["maps"][0]["steps"] == [0, 5, 10, 15, 17]


def read_document(text):
    start = text.index(">", text.index('id="regard-document"')) + 1
    return json.loads(text[start : text.index("</script>", start)])


@pytest.mark.slow
def test_figures_of_a_run_go_into_it(copied, tmp_path, capsys):
    import shutil

    run = shutil.copytree(copied, tmp_path / "run")
    assert main(["inspect", str(run)]) == 0
    assert sorted(path.name for path in (run / "figures").iterdir()) == ["atlas.png", "explorer.html"]
    assert f"written: {run / 'figures' / 'explorer.html'}" in capsys.readouterr().out
    assert main(["inspect", str(run)]) == 0, "pages of its own are replaced"


@pytest.mark.slow
def test_inspect_keeps_what_it_saw(kept, copied, inspected):
    trace = inspection.load(kept / "copy.regard")
    task, model = runs.load_run(copied)
    again = task.watch(model)
    np.testing.assert_allclose(trace.calls[0].window(), again.calls[0].window(), rtol=1e-6)
    with pytest.raises(ValueError, match="not kept"):
        inspection.load(inspected[0] / "s.regard").calls[0].window()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "some"], "--text is for models that read text; copy reads examples of its own"),
        (["--word", "some"], "--word and --layer are for pretrained models of text"),
        (["--layer", "0"], "--word and --layer are for pretrained models of text"),
        (["--keep-qk"], "give --save FILE.regard too"),
        (["--save", "nowhere/x.regard"], "there is no folder nowhere"),
    ],
)
def test_inspect_refuses_what_makes_no_sense_for_a_run(copied, tmp_path, capsys, words, message):
    assert main(["inspect", str(copied), "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_inspect_does_not_replace_what_is_not_its_own(copied, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inspecting, "draw_trace", draw_nothing)
    (tmp_path / "explorer.html").write_text("my page")
    (tmp_path / "mine.regard").write_text("my notes")
    assert main(["inspect", str(copied), "--out", str(tmp_path)]) == 2
    assert (tmp_path / "explorer.html").read_text() == "my page"
    words = ["--out", str(tmp_path / "out"), "--save", str(tmp_path / "mine.regard")]
    assert main(["inspect", str(copied), *words]) == 2
    assert (tmp_path / "mine.regard").read_text() == "my notes"
    assert "Traceback" not in capsys.readouterr().err


def test_a_damaged_run_is_named(copied, tmp_path, capsys):
    import shutil

    run = shutil.copytree(copied, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"seed": "three"}))
    for command in ("inspect", "view"):
        assert main([command, str(run)]) == 2
        assert "is damaged or not Regard's" in capsys.readouterr().err


# view


def read_url(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read()


class Viewing:
    """`regard view` in a process of its own, until the block ends."""

    def __init__(self, *words):
        code = "import sys; from regard.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "view", *map(str, words), "--json"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = {name: value for name, value in os.environ.items() if name != "DISPLAY"}
        self.process = subprocess.Popen(command, env=environment, **options)
        line = self.process.stdout.readline()
        self.event = json.loads(line) if line else None

    def read(self, path=""):
        return read_url(self.event["url"] + path)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate()

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.mark.slow
def test_a_file_is_served_until_ctrl_c(kept):
    with Viewing(kept / "copy.regard", "--no-browser") as view:
        assert view.event["event"] == "serving"
        assert view.event["url"].startswith(f"http://127.0.0.1:{view.event['port']}/")
        document = read_document(view.read().decode())
        assert document["title"].startswith("copy: ")
        row = np.frombuffer(view.read("row/0/0/1/2"), "<f4")
        expected = inspection.load(kept / "copy.regard").calls[0].window(rows=[2], heads=[1])[0, 0]
        np.testing.assert_allclose(row, expected, rtol=1e-6)
        code, out, err = view.interrupt()
    assert (code, out) == (0, "")
    assert "Ctrl-C ends it" in err
    assert "Traceback" not in err
    assert "error" not in err


@pytest.mark.slow
def test_ctrl_c_while_tiles_are_computed_ends_quietly(kept, monkeypatch, capsys):
    """Compiled code that is still running is not waited for: the process ends under it at once."""

    def press(event):
        raise KeyboardInterrupt

    class EndError(Exception):
        pass

    def end(code):
        raise EndError(code)

    monkeypatch.setattr(view.threading.Event, "wait", wait_in_threads(press))
    monkeypatch.setattr(server.Serving, "is_busy", lambda page, seconds: True)
    monkeypatch.setattr(view.os, "_exit", end)
    with pytest.raises(EndError, match=r"^0$"):
        main(["view", str(kept / "copy.regard"), "--no-browser"])
    assert capsys.readouterr().out.endswith("ended\n")


@pytest.mark.slow
def test_a_run_is_served_beside_a_file_with_its_training(copied, kept, monkeypatch, capsys):
    read = {}

    def look(event):
        url = json.loads(capsys.readouterr().out)["url"]
        read.update({path: read_url(url + path) for path in ("", "row/0/0/0/1", "row/1/0/0/1")})
        raise KeyboardInterrupt

    monkeypatch.setattr(view.threading.Event, "wait", wait_in_threads(look))
    words = [str(copied), "--compare", str(kept / "copy.regard"), "--no-browser", "--json"]
    assert main(["view", *words]) == 0
    document = read_document(read.pop("").decode())
    assert len(document["traces"]) == 2
    assert document["training"]["title"] == "copy"
    one, other = (np.frombuffer(row, "<f4") for row in read.values())
    np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.slow
def test_a_run_of_text_reads_what_is_typed(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    for word in ("low", "high"):
        (folder / word).with_suffix(".txt").write_text(f"{word} tides and tides\n" * 9)
    sizes = settings.DecoderSizes(d_model=8, num_heads=2, d_ff=7, num_layers=1)
    task = tasks.Text(files=(str(folder),), length=23, held_out_fraction=0.5, model=sizes)
    begin(tmp_path / "run", task)
    found = []

    def look(event):
        url = json.loads(capsys.readouterr().out)["url"]
        found.append(json.loads(read_url(url + "read?text=low+tides")))
        found.append(read_document(read_url(url + found[0]["view"]).decode()))
        found.append(json.loads(read_url(url + "read?text=" + 23 * "x")))
        raise KeyboardInterrupt

    monkeypatch.setattr(view.threading.Event, "wait", wait_in_threads(look))
    assert main(["view", str(tmp_path / "run"), "--no-browser", "--json"]) == 0
    answer, document, refused = found
    assert answer["tokens"] == [10]
    assert document["title"] == "text: low tides"
    assert document["training"] is not None
    assert refused == {"refused": "--text: expected at most 22 tokens, as in training, got 23"}


def test_a_text_is_for_models_of_text(copied, kept, capsys):
    for words in ([copied], [kept / "copy.regard"], [copied, "--compare", kept / "copy.regard"]):
        assert main(["view", *map(str, words), "--text", "some"]) == 2
        assert "--text is what a model of text reads" in capsys.readouterr().err
    assert main(["view", str(copied), "--text", " "]) == 2
    assert "--text is empty; give a sentence" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.regard", None, "there is no"),
        ("empty.regard", b"", "expected a trace that Trace.save wrote"),
        ("text.regard", b"hello", "expected a trace that Trace.save wrote"),
        ("page.html", b"<html>", "open it in a browser"),
    ],
)
def test_what_is_no_trace_is_refused(kept, tmp_path, capsys, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    for words in ([str(path)], [str(kept / "copy.regard"), "--compare", str(path)]):
        assert main(["view", *words]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""
        assert "Traceback" not in captured.err


def test_a_file_cut_short_is_refused(kept, tmp_path, capsys):
    whole = (kept / "copy.regard").read_bytes()
    (tmp_path / "cut.regard").write_bytes(whole[: len(whole) // 2])
    assert main(["view", str(tmp_path / "cut.regard")]) == 2
    assert "cut.regard" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert main(["view", str(tmp_path)]) == 2
    assert "is not a run; give one of `regard train`, or a file: regard inspect" in capsys.readouterr().err


@pytest.mark.slow
def test_ports_that_cannot_be_are_refused(kept, capsys):
    from regard.inspection.explorer.server import serve

    assert main(["view", str(kept / "copy.regard"), "--port", "65536"]) == 2
    assert "port: expected a number in 0..65535" in capsys.readouterr().err
    with serve(inspection.load(kept / "copy.regard")) as page:
        assert main(["view", str(kept / "copy.regard"), "--port", str(page.port)]) == 2
        assert f"--port {page.port} is in use; leave --port out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "display", "opened"),
    [([], ":0", True), ([], None, False), (["--no-browser"], ":0", False)],
)
def test_a_browser_opens_where_there_is_a_screen(kept, monkeypatch, capsys, words, display, opened):
    asked = []

    def interrupt(event):
        raise KeyboardInterrupt

    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if display:
        monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(view.webbrowser, "open", asked.append)
    monkeypatch.setattr(view.threading.Event, "wait", wait_in_threads(interrupt))
    assert main(["view", str(kept / "copy.regard"), *words]) == 0
    printed = capsys.readouterr().out
    assert len(asked) == opened
    assert all(url in printed for url in asked)
    assert "ended" in printed


def wait_in_threads(interrupt):
    """Waiting goes on everywhere but where nothing else would end it."""
    wait = view.threading.Event.wait

    def waiting(event, timeout=None):
        caller = sys._getframe(1).f_globals["__name__"]
        return interrupt(event) if caller == view.__name__ else wait(event, timeout)

    return waiting


@pytest.mark.slow
def test_quiet_says_nothing(kept, monkeypatch, capsys):
    def interrupt(event):
        raise KeyboardInterrupt

    monkeypatch.setattr(view.threading.Event, "wait", wait_in_threads(interrupt))
    assert main(["view", str(kept / "copy.regard"), "--quiet", "--no-browser"]) == 0
    assert capsys.readouterr() == ("", "")


def test_runs_are_known_by_their_settings(copied, tmp_path):
    assert runs.is_run(copied)
    assert not runs.is_run(tmp_path)
    for text in ("", "[]", "{", '{"model_type": "bert"}'):
        (tmp_path / "config.json").write_text(text)
        assert not runs.is_run(tmp_path)
