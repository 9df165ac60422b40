"""`regard inspect` on a small model of its own: what is printed, written and refused."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers

from command_runs import run_command
from layer_oracle import build_drawn
from regard.cli import inspecting, text_readers
from regard.interop import huggingface
from regard.models import Decoder, Encoder, preset

TEXT = "The cat sat because it was unseen."
WORDS = ["the", "cat", "sat", "because", "it", "was", "un", "##seen", "."]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
SIZES = {"d_model": 12, "num_heads": 3, "d_ff": 17, "num_layers": 2, "vocab_size": len(PIECES)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT with fresh parameters and a WordPiece vocabulary."""
    directory = tmp_path_factory.mktemp("bert")
    config = dataclasses.replace(preset("minilm-l6").config, **SIZES, max_length=23)
    huggingface.save(build_drawn(Encoder, config), directory, "bert", force=True)
    (directory / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return directory


def run(capsys, *words, code=0):
    return run_command(capsys, "inspect", *words, code=code)


@pytest.mark.slow
def test_every_head_says_what_the_word_reads(folder, tmp_path, capsys):
    out = tmp_path / "out"
    printed = run(capsys, folder, "--text", TEXT, "--out", out, "--json").out
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [(line["layer"], line["head"]) for line in lines] == [(n, h) for n in range(2) for h in range(3)]
    reading = inspecting.watch_text(huggingface.load(folder), TEXT)[0]
    assert " ".join(reading.words) == "[CLS] The cat sat because it was unseen . [SEP]"
    np.testing.assert_allclose(reading.weights.sum(-1), 1.0, rtol=1e-5)
    for line in lines:
        row = reading.weights[line["layer"], line["head"], 5].copy()
        row[[0, 5, 9]] = 0  # special tokens and the word itself
        assert line["reads"] == reading.words[row.argmax()]
        assert line["share"] == pytest.approx(row.max(), rel=1e-6)
    files = " ".join(sorted(path.name for path in out.iterdir()))
    assert files == "atlas.png explorer.html heads-layer-1.png reads.png"


def test_a_table_for_people_of_the_last_word_where_there_is_no_it(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inspecting, "save_pictures", lambda drawings, out, kind: [])
    text = "the cat sat because the cat unseen."  # as many pieces as before, whose programs are there
    printed = run(capsys, folder, "--text", text, "--layer", 0, "--out", tmp_path).out
    assert "2 layers of 3 heads; 10 words" in printed
    assert 'the other word that "unseen" reads most in every head' in printed
    assert (
        'that "cat", no. 1 of 2, reads'
        in run(capsys, folder, "--text", text, "--word", "cat", "--out", tmp_path).out
    )
    assert "head  layer 0" in printed


@pytest.mark.slow
def test_decoders_are_read_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inspecting, "save_pictures", lambda drawings, out, kind: [])
    config = dataclasses.replace(preset("llama-7b").config, **SIZES)
    huggingface.save(build_drawn(Decoder, config), tmp_path / "llama", "llama")
    vocabulary = {word: number for number, word in enumerate(PIECES)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "llama" / "tokenizer.json"))
    asked = ["--text", "the cat sat", "--word", "the", "--out", tmp_path]
    assert '"the" reads no other word: there is none, or' in run(capsys, tmp_path / "llama", *asked).out
    again = run(capsys, tmp_path / "llama", "--text", "the cat the sat", *asked[2:]).out
    assert 'that "the", no. 2 of 2, reads' in again
    printed = run(capsys, tmp_path / "llama", *asked, "--json").out
    # The first word of a causal model has nobody else to read.
    lines = map(json.loads, printed.splitlines())
    assert {(line["reads"], line["share"]) for line in lines} == {(None, 0.0)}
    # The page asks the same of a folder as of a run.
    reader = text_readers.open_text_reader(tmp_path / "llama")
    assert len(reader.record("the cat sat").calls) == 2
    parts = reader.explain("the cat sat", layer=1, head=0, query=2, key=1)
    np.testing.assert_allclose(parts.parts.sum(), parts.score, rtol=1e-4, atol=1e-5)
    paths, target, words = reader.trace("the cat sat", 2)
    assert (PIECES[paths.target], words) == (target, ("the", "cat", "sat"))
    # Of a hybrid, layers keep the model's numbers.
    config = dataclasses.replace(config, mixers=("gated_delta", "attention"), delta_head_dim=4)
    loaded = dataclasses.replace(huggingface.load(tmp_path / "llama"), config=config)
    monkeypatch.setattr(
        huggingface, "load", lambda *_: dataclasses.replace(loaded, model=build_drawn(Decoder, config))
    )
    printed = run(capsys, tmp_path / "llama", "--text", "the cat sat", "--layer", 1, "--out", tmp_path).out
    assert "2 layers, 1 with weights, of 3 heads; 3 words" in printed
    assert "head  layer 1" in printed
    told = run(capsys, tmp_path / "llama", "--text", "the cat sat", "--layer", 0, code=2).err
    assert "--layer must be one of those with weights, 1, got 0" in told


def test_what_cannot_be_looked_at_is_refused(folder, tmp_path, capsys):
    for words, message in (
        ((" ",), "--text is empty"),
        ((TEXT, "--word", "dog"), "word: expected one of The, cat, sat, because, it, was, unseen, ."),
        ((TEXT, "--layer", "2"), "--layer must be in 0..1, got 2"),
        (("the " * 30,), "at most max_length = 23 positions"),
    ):
        assert message in run(capsys, folder, "--out", tmp_path / "out", "--text", *words, code=2).err
        assert not (tmp_path / "out").exists()


def test_what_is_no_folder_is_refused_before_the_work(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(huggingface, "MINILM", "no_such_package")
    (tmp_path / "README.md").write_text("# A file")
    (tmp_path / "it is kept.regard").write_text("a trace")
    for words, message in (
        (["--text", TEXT, "--save", tmp_path / "out" / "new.regard"], "make pretrained"),
        ([tmp_path, "--text", TEXT], "config.json"),
        (["--text", TEXT], "make pretrained"),
        ([folder, "--text", TEXT, "--out", tmp_path / "README.md" / "new"], "README.md is a file;"),
        ([tmp_path / "README.md"], "README.md is a file; give the folder of a run, or of a Hugging Face mod"),
        ([tmp_path / "it is kept.regard"], f"shown by: regard view '{tmp_path / 'it is kept.regard'}'"),
        ([tmp_path / "nowhere"], "there is no"),
        ([folder, "--save", tmp_path], "is a folder; give a file in it"),
        ([folder, "--save", tmp_path / "README.md"], "--save: expected nothing, or a trace that may be repl"),
    ):
        assert message in run(capsys, "--out", tmp_path / "out", *words, code=2).err
    assert not (tmp_path / "out").exists()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").write_text("a file where figures go unless asked otherwise")
    assert "out is a file; give another --out" in run(capsys, folder, "--text", TEXT, code=2).err
    assert (tmp_path / "README.md").read_text() == "# A file"
