"""`regard view`, and `regard inspect` of runs: what is watched, written, served and refused."""

import contextlib
import io
import json
import shutil
import sys
import urllib.request
from pathlib import Path

import jax
import numpy as np
import pytest

from command_runs import run_command
from regard import inspection
from regard.cli import inspecting, main
from regard.cli.commands import view
from regard.inspection.explorer import server
from regard.training import runs, settings, tasks
from regard.training.tasks.text import END_OF_DOCUMENT
from small_runs import begin, snapshot
from test_server import read_document


@pytest.fixture(scope="module")
def inspected(copied, tmp_path_factory):
    """What inspect wrote about a run, with queries and keys, and what it printed."""
    out = tmp_path_factory.mktemp("inspected")
    words = ["--out", str(out), "--save", str(out / "copy.regard"), "--keep-qk", "--json", "--format", "svg"]
    before = snapshot(copied)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["inspect", str(copied), *words]) == 0
    assert snapshot(copied) == before, "the run is left as it was"
    return out, printed.getvalue()


@pytest.fixture
def kept(inspected):
    return str(inspected[0] / "copy.regard")


def test_digits_are_shown_in_patches_of_their_picture_and_thresholds_with_their_sum():
    task = tasks.Digits()
    batch, tokens, title = task.example()
    assert (tokens[16].kind, tokens[16].patch_grid, len(tokens[16])) == ("patches", (4, 4), 16)
    scan = np.asarray(task.held_out["scans"][0])
    np.testing.assert_allclose(tokens[16].picture, 1 - scan / scan.max(), rtol=1e-6)
    assert tokens[1].texts == ("prediction",)
    assert f"a scan of {int(batch['labels'][0])}" in title
    task = tasks.Threshold(length=5, held_out_size=3)
    row = np.asarray(task.held_out["inputs"][0])
    assert task.example().tokens[""].texts == tuple(map(str, row.tolist()))
    assert f"5 tokens with sum {row.sum()}, " in task.example().title
    task = tasks.Reverse(vocab_size=7, min_length=2, max_length=5, held_out_size=13)
    row, tokens = int(np.argmax(task.held_out["lengths"])), task.example().tokens
    length, source = int(task.held_out["lengths"][row]), task.held_out["source"][row].tolist()
    source = tuple(str(token) if token < 7 else "PAD" for token in source)
    assert tokens["encoder"].texts == tokens["memory"].texts == source
    assert tokens["decoder"].texts[: length + 1] == ("SOS", *reversed(source[:length]))


def write_texts(folder):
    folder.mkdir()
    for word in ("low", "high"):
        (folder / word).with_suffix(".txt").write_text(f"{word} tides and tides\n" * 9)
    sizes = settings.DecoderSizes(d_model=8, num_heads=2, d_ff=7, num_layers=1)
    return tasks.Text(files=(str(folder),), length=23, held_out_fraction=0.5, model=sizes)


def test_a_text_of_ones_own_is_read(tmp_path):
    task = write_texts(tmp_path / "texts")
    row = task.example().tokens[""]
    assert row.ids.tolist() == task.held_out["inputs"][0].tolist()
    assert "".join(row.texts).startswith(f"{END_OF_DOCUMENT}low tides")
    assert task.read_text("low <b>\n").tokens[""].texts == (END_OF_DOCUMENT, *"low <b>\n")
    assert len(task.read_text("").tokens[""]) == 1
    assert len(task.read_text("x" * 22).tokens[""]) == 23
    with pytest.raises(ValueError, match="expected at most 22 tokens, as in training, got 23"):
        task.read_text("x" * 23)


@pytest.mark.slow
def test_inspect_says_how_each_head_of_a_run_reads(copied, inspected):
    folder, printed = inspected
    events = [json.loads(line) for line in printed.splitlines()]
    assert [(event["event"], event["head"]) for event in events] == [("head", 0), ("head", 1)]
    task, model = runs.load_run(copied)
    (call,) = task.watch(model).calls
    inputs = task.held_out["inputs"][:1]
    assert call.query_tokens.texts == ("SOS", *map(str, inputs[0, 1:].tolist()))
    assert call.query_tokens.ids.tolist() == inputs[0].tolist()
    weights = jax.jit(lambda inputs: model(inputs, aux=("weights",))[1]["blocks"][0]["weights"][0])(inputs)
    np.testing.assert_allclose(call.window(), weights, rtol=1e-5, atol=1e-7)
    entropies = -(np.float64(weights) * np.log(np.float64(weights))).sum(-1).mean(-1)
    for event in events:
        assert event["entropy_nats"] == pytest.approx(entropies[event["head"]], rel=1e-4)
        assert event["max_score"] == pytest.approx(call.max_score[event["head"]].max())
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["atlas.svg", "copy.regard", "explorer.html"]
    np.testing.assert_allclose(inspection.load(folder / files[1]).calls[0].window(), call.window(), rtol=1e-6)
    document = read_document((folder / "explorer.html").read_bytes())
    assert [chart["name"] for chart in document["training"]["maps"]] == ["entropy", "max_score"]
    assert document["training"]["maps"][0]["steps"] == [0, 4, 8, 12, 16, 17]


def test_a_page_of_a_run_goes_into_it(copied, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inspecting, "draw_trace", lambda trace: iter(()))
    run = shutil.copytree(copied, tmp_path / "run")
    (run / "figures").mkdir()
    for _ in range(2):  # pages of its own are replaced
        told = run_command(capsys, "inspect", run, "--save", tmp_path / "a run.regard").out
        assert f"written: {run / 'figures' / 'explorer.html'}" in told
        assert told.endswith(f"\nnext: regard view '{tmp_path / 'a run.regard'}'\n")
    assert [path.name for path in (run / "figures").iterdir()] == ["explorer.html"]


def test_inspect_refuses_what_makes_no_sense_for_a_run(copied, tmp_path, capsys):
    for words, message in (
        ("--text some", "--text: expected a task that reads text, got copy; leave it out"),
        ("--layer 0", "--word and --layer are for pretrained models of text"),
        ("--keep-qk", "give --save FILE.regard too"),
        ("--save nowhere/x.regard", "--save: expected a folder at nowhere, there is none"),
    ):
        words = ["inspect", copied, "--out", tmp_path / "out", *words.split()]
        assert message in run_command(capsys, *words, code=2).err
    assert not (tmp_path / "out").exists()


def read_url(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read()


@pytest.fixture
def during(monkeypatch):
    """A function to call while a page is served; Ctrl-C follows."""
    wait = view.threading.Event.wait

    def set_visit(visit):
        def waiting(event, timeout=None):
            if sys._getframe(1).f_globals["__name__"] != view.__name__:
                return wait(event, timeout)  # elsewhere nothing else would end it
            visit()
            raise KeyboardInterrupt

        monkeypatch.setattr(view.threading.Event, "wait", waiting)

    set_visit(lambda: None)
    return set_visit


def test_ctrl_c_while_tiles_are_computed_ends_quietly(kept, during, monkeypatch, capsys):
    """Compiled code that is still running is not waited for: the process ends under it at once."""

    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(server.Serving, "is_busy", lambda page, seconds: True)
    monkeypatch.setattr(view.os, "_exit", end)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["view", kept, "--no-browser"])
    assert capsys.readouterr().out.endswith("ended\n")


def test_a_run_is_served_beside_a_file_with_its_training(copied, kept, during, capsys):
    read, events = {}, []

    def look():
        events.append(json.loads(capsys.readouterr().out))
        read.update({path: read_url(events[0]["url"] + path) for path in ("", "row/0/0/1/2", "row/1/0/1/2")})

    during(look)
    assert main(["view", str(copied), "--compare", kept, "--no-browser", "--json"]) == 0
    assert events[0]["event"] == "serving"
    assert events[0]["url"].startswith(f"http://127.0.0.1:{events[0]['port']}/")
    document = read_document(read.pop(""))
    assert document["title"].startswith("copy: ")
    assert len(document["traces"]) == 2
    assert document["training"]["title"] == "copy"
    expected = inspection.load(kept).calls[0].window(rows=[2], heads=[1])[0, 0]
    for row in read.values():
        np.testing.assert_allclose(np.frombuffer(row, "<f4"), expected, rtol=1e-6)
    captured = capsys.readouterr()
    assert (captured.out, "ended" in captured.err) == ("", True)
    first, second = (trace["title"] for trace in document["traces"])
    assert (first.endswith(f" ({copied})"), second) == (True, first.replace(str(copied), kept))


@pytest.mark.slow
def test_a_run_of_text_reads_what_is_typed(tmp_path, during, capsys):
    begin(tmp_path / "run", write_texts(tmp_path / "texts"))
    looked = []

    def look():
        url = json.loads(capsys.readouterr().out)["url"]
        answer = json.loads(read_url(url + "read?text=low+tides"))
        told = answer["predicted"][0]
        assert (answer["tokens"], [text for text, _ in told["costs"]]) == ([10], list("low tides"))
        assert told["loss"] == pytest.approx(np.mean([cost for _, cost in told["costs"]]))
        document = read_document(read_url(url + answer["view"]))
        assert document["title"] == "text: low tides"
        assert document["training"] is not None
        looked.append(url)

    during(look)
    assert main(["view", str(tmp_path / "run"), "--no-browser", "--json"]) == 0
    assert looked


def test_what_is_no_trace_is_refused(copied, kept, tmp_path, capsys):
    whole = Path(kept).read_bytes()
    for name, content, message in (
        ("text.regard", b"hello", "expected a trace that Trace.save wrote"),
        ("cut.regard", whole[: len(whole) // 2], "cut.regard"),
        ("page.html", b"<html>", "open it in a browser"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        for words in ([path], [kept, "--compare", path]):
            captured = run_command(capsys, "view", *words, code=2)
            assert message in captured.err
            assert captured.out == ""
    for words, message in (
        ([tmp_path], "is not a run; give one of `regard train`, or a file: regard inspect"),
        ([kept, "--text", "some"], "--text is what a model of text reads"),
        ([copied, "--text", "some"], "--text is what a model of text reads"),
        ([kept, "--text", " "], "--text is empty; give a sentence"),
        ([kept, "--port", "65536"], "port: expected a number in 0..65535"),
    ):
        assert message in run_command(capsys, "view", *words, code=2).err
    with server.serve(inspection.load(kept)) as page:
        told = run_command(capsys, "view", kept, "--port", page.port, code=2).err
        assert f"--port {page.port} is in use; leave --port out" in told


def test_a_browser_opens_where_there_is_a_screen(kept, during, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    for words, display in (([], ":0"), ([], ""), (["--no-browser"], ":0"), (["--quiet"], "")):
        asked = []
        monkeypatch.setenv("DISPLAY", display)
        monkeypatch.setattr(view.webbrowser, "open", asked.append)
        printed = run_command(capsys, "view", kept, *words).out
        assert len(asked) == (bool(display) and not words)
        assert all(url in printed for url in asked)
        assert ("ended" in printed) == ("--quiet" not in words) == bool(printed)
