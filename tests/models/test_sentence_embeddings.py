"""Sentence embeddings: pooling and batching on a small drawn model, and MiniLM where it is installed."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import drawn_weights
from regard.interop import huggingface
from regard.interop.sentence_embeddings import embed
from regard.interop.weight_files import write_weights

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", "##a", "##b", "hello", "world", "!"]


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


def set_pooling(root, name):
    known = ("pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_max_tokens")
    modes = {"word_embedding_dimension": 24} | {one: one == name for one in known}
    (root / "1_Pooling" / "config.json").write_text(json.dumps(modes))


SENTENCES = ["Hello world!", "a", "", "ab ba aa", "c d e f g h i j c d e f g h i j c d e f"]
IDS = [
    [2, 17, 18, 19, 3],
    [2, 5, 3],
    [2, 3],
    [2, 5, 16, 6, 15, 5, 15, 3],
    [2, *range(7, 15), *range(7, 15), 7, 3],
]


def by_hand(model, pooling="mean"):
    """One sentence at a time."""
    rows = []
    for ids in IDS:
        hidden = np.asarray(model(jnp.asarray([ids])))[0]
        pooled = hidden.mean(0) if pooling == "mean" else hidden[0]
        rows.append(pooled / np.linalg.norm(pooled))
    return np.stack(rows)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [2, 32])
def test_rows_are_means_of_length_one(folder, batch_size):
    pretrained = huggingface.load(folder)
    rows = embed(pretrained, SENTENCES, batch_size=batch_size)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, by_hand(pretrained.model), atol=2e-6)
    assert embed(pretrained, []).shape == (0, 24)


@pytest.mark.slow
def test_the_first_token_where_the_folder_says_so(folder):
    set_pooling(folder, "pooling_mode_cls_token")
    pretrained = huggingface.load(folder)
    np.testing.assert_allclose(embed(pretrained, SENTENCES), by_hand(pretrained.model, "first"), atol=2e-6)
    set_pooling(folder, "pooling_mode_max_tokens")
    with pytest.raises(ValueError, match=r"expected one of pooling_mode_mean.* got pooling_mode_max_tokens"):
        embed(pretrained, SENTENCES)
    set_pooling(folder, "pooling_mode_mean_tokens")


def test_long_sentences_keep_their_end(folder):
    pretrained = huggingface.load(folder)
    short = embed(pretrained, SENTENCES[-1:], max_length=5)
    hidden = np.asarray(pretrained.model(jnp.asarray([[2, 7, 8, 9, 3]])))[0].mean(0)
    np.testing.assert_allclose(short[0], hidden / np.linalg.norm(hidden), atol=2e-6)


def test_what_cannot_be_embedded_is_explained(folder):
    pretrained = huggingface.load(folder)
    with pytest.raises(TypeError, match="sentences: expected a sequence of strings, got one string"):
        embed(pretrained, "hello")
    with pytest.raises(ValueError, match=r"pretrained: expected an encoder of tokens \(bert\), got vit"):
        embed(dataclasses.replace(pretrained, kind="vit", model=None), ["hello"])
    with pytest.raises(ValueError, match=r"expected a tokenizer in .*found neither"):
        embed(dataclasses.replace(pretrained, tokenizer=None), ["hello"])


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]", "expected a JSON object"), ('{"max_seq_length": "256"}', "max_seq_length: expected an integer")],
)
def test_a_damaged_limit_is_refused(folder, tmp_path, text, message):
    pretrained = dataclasses.replace(huggingface.load(folder), directory=tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        embed(pretrained, ["hello"])


@pytest.mark.parametrize(("option", "least"), [("batch_size", 1), ("max_length", 3)])
def test_sizes_that_are_too_small_are_refused(folder, option, least):
    for size in (least - 1, -1):
        with pytest.raises(
            ValueError, match=f"{option}: expected an integer of at least {least}, got {size}"
        ):
            embed(huggingface.load(folder), ["a"], **{option: size})


def write_modules(root, *names):
    """As sentence-transformers lists them."""
    modules = [{"path": name, "type": f"sentence_transformers.models.{name[2:]}"} for name in names]
    (root / "modules.json").write_text(json.dumps(modules))


def test_older_folders_are_pooled_as_they_say(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "0_Transformer")
    (tmp_path / "0_Transformer" / "1_Pooling").rename(tmp_path / "1_Pooling")
    set_pooling(tmp_path, "pooling_mode_cls_token")
    write_modules(tmp_path, "0_Transformer", "1_Pooling", "2_Normalize")
    pretrained = huggingface.load(tmp_path)
    np.testing.assert_allclose(embed(pretrained, SENTENCES), by_hand(pretrained.model, "first"), atol=2e-6)
    write_modules(tmp_path, "0_Transformer", "1_Pooling", "2_Dense", "3_Normalize")
    with pytest.raises(ValueError, match="expected a Transformer, Pooling and Normalize, got Dense as well"):
        embed(pretrained, SENTENCES)


@pytest.mark.parametrize("path", ["..", "/etc", "a/../.."])
def test_modules_of_another_folder_are_refused(tmp_path, path):
    modules = [{"path": path, "type": "sentence_transformers.models.Transformer"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=r"modules\.json: expected folders in"):
        huggingface.load(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        pytest.param("[" * 100_000, id="deep"),
        "[1]",
        "{}x",
        '[{"type": 3, "path": ""}]',
        '[{"path": "a"}]',
    ],
)
def test_modules_that_cannot_be_read_are_refused(tmp_path, text):
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ValueError, match=r"modules\.json: expected a list of modules"):
        huggingface.load(tmp_path)


def installed_minilm():
    try:
        return huggingface.find_minilm()
    except FileNotFoundError:
        return None


def test_an_absent_minilm_is_explained(monkeypatch):
    monkeypatch.setattr(huggingface, "MINILM", "no_such_package_anywhere")
    with pytest.raises(FileNotFoundError, match=r"not installed; run `make pretrained`"):
        huggingface.find_minilm()


@pytest.mark.slow
@pytest.mark.skipif(installed_minilm() is None, reason="MiniLM is not installed: make pretrained")
def test_minilm_embeds_as_in_torch():
    with np.load(drawn_weights.PARITY / "minilm.npz") as file:
        sentences, rows = json.loads(file["facts"].tobytes()), file["rows"].astype(np.float64)
        similarity = file["similarity"]
    found = embed(huggingface.load(installed_minilm()), sentences)
    assert len(sentences) == 50
    cosine = (found * rows).sum(-1) / np.linalg.norm(rows, axis=-1)
    assert cosine.min() > 0.99999
    pairs = (found[0:40:2] * found[1:40:2]).sum(-1)
    np.testing.assert_allclose(pairs, similarity, atol=2e-6)
    assert (np.argsort(pairs) == np.argsort(similarity)).all()
