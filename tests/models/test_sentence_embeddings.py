"""Sentence embeddings: pooling and batching on a small drawn model, and MiniLM where it is installed."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from flax import nnx

import drawn_weights
from refusals import assert_refused
from regard.interop import huggingface
from regard.interop.sentence_embeddings import embed
from regard.interop.weight_files import write_weights

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", "##a", "##b", "hello", "world", "!"]
SENTENCES = ["c d e f g h i j c d e f g h i j c", "Hello world!", "ab b"]
IDS = [[2, *range(7, 15), *range(7, 15), 7, 3], [2, 17, 18, 19, 3], [2, 5, 16, 6, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as sentence-transformers saves it: a small BERT with a vocabulary of its own."""
    facts, _ = drawn_weights.read_reference("bert")
    root = tmp_path_factory.mktemp("sentences")
    (root / "config.json").write_text(json.dumps(facts["config"]))
    write_weights(root / "model.safetensors", drawn_weights.draw_all(facts["shapes"], "bert"))
    (root / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (root / "1_Pooling").mkdir()
    set_pooling(root, "pooling_mode_mean_tokens")
    return root


@pytest.fixture(scope="module")
def pretrained(folder):
    return huggingface.load(folder)


def set_pooling(root, name):
    known = ("pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_max_tokens")
    modes = {"word_embedding_dimension": 24} | {one: one == name for one in known}
    (root / "1_Pooling" / "config.json").write_text(json.dumps(modes))


read = nnx.jit(lambda model, tokens: model(tokens))


def by_hand(model, pool=lambda hidden: hidden.mean(0), rows=IDS):
    pooled = [pool(np.asarray(read(model, np.array([ids])))[0]) for ids in rows]
    return np.stack([row / np.linalg.norm(row) for row in pooled])


def test_rows_are_means_of_length_one(pretrained):
    rows = embed(pretrained, SENTENCES, batch_size=2)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, by_hand(pretrained.model), atol=2e-6)
    assert embed(pretrained, []).shape == (0, 24)
    # Long ones keep their end.
    short = embed(pretrained, SENTENCES[:2], max_length=5, batch_size=2)
    np.testing.assert_allclose(short, by_hand(pretrained.model, rows=[[2, 7, 8, 9, 3], IDS[1]]), atol=2e-6)


def write_modules(root, *names):
    modules = [{"path": name, "type": f"sentence_transformers.models.{name[2:]}"} for name in names]
    (root / "modules.json").write_text(json.dumps(modules))


def test_older_folders_are_pooled_as_they_say(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "0_Transformer")
    (tmp_path / "0_Transformer" / "1_Pooling").rename(tmp_path / "1_Pooling")
    set_pooling(tmp_path, "pooling_mode_cls_token")
    write_modules(tmp_path, "0_Transformer", "1_Pooling", "2_Normalize")
    pretrained = huggingface.load(tmp_path)
    found, expected = embed(pretrained, SENTENCES[1:]), by_hand(pretrained.model, lambda hidden: hidden[0])
    np.testing.assert_allclose(found, expected[1:], atol=2e-6)
    set_pooling(tmp_path, "pooling_mode_max_tokens")
    with pytest.raises(ValueError, match=r"expected one of pooling_mode_mean.* got pooling_mode_max_tokens"):
        embed(pretrained, SENTENCES)
    write_modules(tmp_path, "0_Transformer", "1_Pooling", "2_Dense", "3_Normalize")
    with pytest.raises(ValueError, match="expected a Transformer, Pooling and Normalize, got Dense as well"):
        embed(pretrained, SENTENCES)


def test_what_cannot_be_embedded_is_explained(pretrained, tmp_path):
    change = lambda **fields: dataclasses.replace(pretrained, **fields)
    assert_refused(
        (lambda: embed(pretrained, "hello"), "sentences: expected a sequence of strings, got one"),
        (lambda: embed(change(kind="vit", model=None), ["a"]), r"an encoder of tokens \(bert\), got vit"),
        (lambda: embed(change(tokenizer=None), ["a"]), "expected a tokenizer in .*found neither"),
        (lambda: embed(pretrained, ["a"], batch_size=0), "batch_size: .* of at least 1, got 0"),
        (lambda: embed(pretrained, ["a"], max_length=2), "max_length: .* of at least 3, got 2"),
        error=(ValueError, TypeError),
    )
    wrong = '{"max_seq_length": "256"}'
    for text, message in (("[1]", "expected a JSON object"), (wrong, "max_seq_length: expected an integer")):
        (tmp_path / "sentence_bert_config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            embed(change(directory=tmp_path), ["hello"])


def test_modules_that_cannot_be_read_or_lie_elsewhere_are_refused(tmp_path):
    entry = '[{{"type": "sentence_transformers.models.Transformer", "path": "{}"}}]'
    unread = ["{", "[" * 100_000, "[1]", '[{"type": 3, "path": ""}]']
    for text in (*unread, *map(entry.format, ("..", "/etc", "a/../.."))):
        (tmp_path / "modules.json").write_text(text)
        told = "expected a list of modules" if text in unread else "expected folders in"
        with pytest.raises(ValueError, match=rf"modules\.json: {told}"):
            huggingface.load(tmp_path)


def installed_minilm():
    try:
        return huggingface.find_minilm()
    except FileNotFoundError:
        return None


def test_an_absent_minilm_is_explained(monkeypatch):
    monkeypatch.setattr(huggingface, "MINILM", "no_such_package_anywhere")
    assert_refused((huggingface.find_minilm, r"not installed; run `make pretrained`", FileNotFoundError))


@pytest.mark.slow
@pytest.mark.skipif(installed_minilm() is None, reason="MiniLM is not installed: make pretrained")
def test_minilm_embeds_as_in_torch():
    with np.load(drawn_weights.PARITY / "minilm.npz") as file:
        sentences, rows = json.loads(file["facts"].tobytes()), file["rows"].astype(np.float64)
        similarity = file["similarity"]
    found = embed(huggingface.load(installed_minilm()), sentences)
    assert len(sentences) == 50
    assert ((found * rows).sum(-1) / np.linalg.norm(rows, axis=-1)).min() > 0.99999
    pairs = (found[0:40:2] * found[1:40:2]).sum(-1)
    np.testing.assert_allclose(pairs, similarity, atol=2e-6)
    assert (np.argsort(pairs) == np.argsort(similarity)).all()
