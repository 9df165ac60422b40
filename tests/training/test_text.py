"""Learning from text: which documents, which tokens, who sees whom, what a byte costs, and going on."""

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from regard.training import checkpoints, corpora, loop, runs, settings, tasks, token_files, vocabularies
from regard.training.tasks.text import cut_windows, number_documents
from small_runs import (
    Compiled,
    read_lines,
    snapshot,
    stop_after,
    train,
)

LENGTH = 19
MARK = 256


def write_corpus(folder):
    """Thirteen documents of 3 to about 170 bytes, some beyond ASCII."""
    folder.mkdir()
    random = np.random.default_rng(5)
    words = ["low", "lower", "tide", "naïve", "漢字", "🙂", "of", "the"]
    for index in range(13):
        chosen = [words[word] for word in random.integers(0, len(words), 1 + 2 * index)]
        (folder / f"{index:02d}.txt").write_text(" ".join([str(index), *chosen]) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


def small(corpus, **changes):
    """A text task of 11 steps."""
    chosen = {
        "files": (str(corpus),),
        "length": LENGTH,
        "held_out_fraction": 0.3,
        "model": settings.DecoderSizes(d_model=12, num_heads=2, d_ff=13, num_layers=2, dropout_rate=0.25),
        "optimization": settings.Optimization(steps=11, batch_size=5, warmup_steps=3),
        "cadence": settings.Cadence(log_every=2, evaluate_every=5, checkpoint_every=3),
    }
    return tasks.Text(**(chosen | changes))


@pytest.fixture(scope="module")
def task(corpus):
    return small(corpus)


def make_model(task):
    model = task.make_model(nnx.Rngs(0))
    model.eval()
    return model


# Documents


def test_the_manual_holds_nothing_twice():
    documents = corpora.read_manual()
    assert len(documents) > 50
    assert sum(len(text) for text in documents.values()) > 300_000
    assert {"compound", "types", "formatstrings"} <= set(documents)
    assert not {"while", "for", "try", "else"} & set(documents), "these are sections of `compound`"
    listed = corpora.Documents.of_texts(documents.values())
    training, held_out = corpora.split_documents(listed, 0.1, 0, 2**20)
    assert corpora.measure_overlap(training, held_out) < 0.05
    assert corpora.measure_overlap(listed, held_out) == 1.0


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4])
def test_about_a_tenth_is_held_out_and_nothing_is_lost(seed):
    texts = ["x" * (7 + index * index) + str(index) for index in range(101)]
    documents = corpora.Documents.of_texts(texts)
    sides = corpora.split_documents(documents, 0.1, seed, 2**20)
    training, held_out = (list(some.texts()) for some in sides)
    assert sorted(training + held_out) == sorted(texts)
    total, part = documents.num_bytes, sides[1].num_bytes
    assert total == sum(map(len, texts))
    assert 0.097 * total < part <= 0.1 * total
    again = corpora.split_documents(documents, 0.1, seed, 2**20)
    assert [list(some.texts()) for some in again] == [training, held_out], "order too"
    assert list(corpora.split_documents(documents, 0.1, seed + 1, 2**20)[1].texts()) != held_out
    assert corpora.split_documents(documents, 0.1, seed, 20_000)[1].num_bytes in range(19_000, 20_001)


def split(texts, fraction, most):
    sides = corpora.split_documents(corpora.Documents.of_texts(texts), fraction, 0, most)
    return [list(some.texts()) for some in sides]


def test_something_is_held_out_of_any_two_documents():
    assert split(["aaaa", "b"], 0.1, 99) == [["aaaa"], ["b"]]
    assert all(split(["aaaa", "b"], 0.99, 99)), "and something to train on stays"


def test_of_large_documents_the_end_of_the_smallest_is_held_out():
    long = "x" * 40
    training, held_out = split([long, "first line\nlast\n"], 0.1, 9)
    assert (sorted(training), held_out) == (["first line\n", long], ["last\n"])
    sides = split(["漢漢漢漢漢", "漢漢漢"], 0.1, 4)
    assert sorted(map(len, sides[0])) == [2, 5], "no character is cut in two"
    assert sides[1] == ["漢"]
    for most in (1, 2):
        training, held_out = split(["漢漢漢漢漢", "漢漢漢"], 0.1, most)
        assert (sorted(training), held_out) == (["漢漢", "漢漢漢漢漢"], ["漢"]), (
            "nor where it alone is too long"
        )
    assert split(["漢漢漢", "é"], 0.1, 1) == [["漢漢漢"], ["é"]], (
        "nothing stays of a document that is held out"
    )


def test_files_and_directories_are_documents_by_path(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "b.md").write_bytes("ü\r\n".encode())
    (tmp_path / "deep" / "a.txt").write_text("one")
    (tmp_path / "deep" / "copy.txt").write_text("one")
    (tmp_path / "deep" / "empty.txt").write_text("")
    (tmp_path / "deep" / ".hidden").write_bytes(b"\xff")
    (tmp_path / "own.txt").write_text("two")
    (tmp_path / "deep" / "er" / "digits.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "deep" / "latin.txt").write_bytes("naïve".encode("latin-1"))
    before = snapshot(tmp_path)
    documents = corpora.read_documents([tmp_path / "own.txt", tmp_path / "deep"])
    assert documents.skipped == tuple(
        str(tmp_path / "deep" / name) for name in ("er/digits.png", "latin.txt")
    )
    assert list(documents.texts()) == ["one", "ü\r\n", "two"]
    assert documents.sources == tuple(
        tmp_path / name for name in ("deep/a.txt", "deep/copy.txt", "deep/er/b.md", "own.txt")
    )
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("most", [1, 2, 3, 5, 7, 11, 13, 29, 1000])
def test_one_file_is_cut_without_losing_a_byte(tmp_path, most):
    text = "añ漢🙂\nzz🙂🙂🙂\n\nlast line without an end 漢漢漢漢"
    (tmp_path / "one.txt").write_bytes(text.encode())
    if most >= len(text.encode()):
        with pytest.raises(ValueError, match="at least two different documents"):
            corpora.read_documents([tmp_path / "one.txt"], piece_bytes=most)
        return
    pieces = cut(tmp_path / "one.txt", most)
    assert "".join(pieces) == text
    assert all(len(piece.encode()) <= most or len(piece) == 1 for piece in pieces)
    documents = corpora.read_documents([tmp_path / "one.txt"], piece_bytes=most)
    assert list(documents.texts()) == list(dict.fromkeys(pieces)), "each once"


def cut(path, most):
    return [
        path.read_bytes()[start:stop].decode() for _, start, stop in corpora._cut(path, most, bytearray())
    ]


def test_pieces_end_with_lines_where_they_can(tmp_path):
    (tmp_path / "one.txt").write_text("a\nbc\nd\nefghijk\n")
    assert cut(tmp_path / "one.txt", 5) == ["a\nbc\n", "d\n", "efghi", "jk\n"]


@pytest.mark.parametrize("part", [4, 5, 7, 11, 13, 29, 97, 211, 100_000])
def test_parts_of_a_long_document_are_the_document(tmp_path, monkeypatch, part):
    """Cut where lines or words end, they have the tokens of the whole, and the same BPE is learned."""
    monkeypatch.setattr(corpora, "PART_BYTES", part)
    manual = corpora.read_manual()["compound"][:3001].replace("\n", "\r\n", 7)
    texts = [f"low tide's naïve\u2003tide? 🙂\n\n\t漢漢漢 .\x1c. \r\rlow {manual}", "other"]
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.txt").write_bytes(text.encode())
    documents = corpora.read_documents([tmp_path])
    parts = list(documents.read())
    assert (len(parts) == 2) == (part == 100_000)
    assert "".join(text for text, _ in parts) == "".join(texts)
    assert [is_end for _, is_end in parts].count(True) == 2
    if part > 80:  # no word is longer
        for own in map(vocabulary, ("bytes", "pairs")):
            together = np.concatenate(own.encode_all([text for text, _ in parts]))
            assert np.array_equal(together, np.concatenate([own.encode(text) for text in texts]))
        learned = vocabularies.train_pairs(documents.texts(), 263).to_json()
        assert learned == vocabularies.train_pairs(texts, 263).to_json()
    if part == 211:
        assert all(text.startswith(("\n", "\r\n")) for text, _ in parts[1:-1]), "a line is not cut in two"


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "PART_BYTES", 5)
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"{name}, and many more words\n")
    documents = corpora.read_documents([tmp_path])
    (tmp_path / "b").write_text("less now")
    with pytest.raises(ValueError, match="b changed while it was read"):
        list(documents.read())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "bad is empty"),
        (b"text\0text", "bad is binary, not text: a zero byte at offset 4"),
        ("naïve".encode("latin-1"), r"bad is not UTF-8: byte 0xef at offset 2 \(invalid continuation byte\)"),
        ("漢".encode()[:2], r"bad is not UTF-8: byte 0xe6 at offset 0 \(unexpected end of data\)"),
    ],
)
def test_what_is_no_text_is_named_with_its_place(tmp_path, content, message):
    (tmp_path / "bad").write_bytes(content)
    (tmp_path / "good").write_text("good")
    with pytest.raises(ValueError, match=message):
        corpora.read_documents([tmp_path / "bad", tmp_path / "good"])


def test_a_fault_is_found_across_parts_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "PART_BYTES", 5)
    (tmp_path / "good").write_text("漢" * 9)
    for content, message in (("漢" * 9, "is not UTF-8: byte 0xff at offset 27"), ("", "empty")):
        (tmp_path / "bad").write_bytes(content.encode() + (b"\xff" if content else b""))
        with pytest.raises(ValueError, match=message):
            corpora.read_documents([tmp_path / "bad", tmp_path / "good"])
    (tmp_path / "bad").write_bytes(("漢" * 9).encode()[:-1])
    with pytest.raises(ValueError, match=r"byte 0xe6 at offset 24 \(unexpected end of data\)"):
        corpora.read_documents([tmp_path / "bad", tmp_path / "good"])


def test_paths_that_cannot_serve_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a").write_text("same")
    (tmp_path / "b").write_text("same")
    with pytest.raises(ValueError, match=r"got an empty name; \. is this directory"):
        corpora.read_documents([""])
    with pytest.raises(ValueError, match="missing, which does not exist"):
        corpora.read_documents([tmp_path / "missing"])
    with pytest.raises(ValueError, match="directory without a file"):
        corpora.read_documents([tmp_path / "empty"])
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "digits.png").write_bytes(b"\0")
    with pytest.raises(
        ValueError, match=r"pictures; 1 file that is not text was skipped \(.*digits\.png\); give"
    ):
        corpora.read_documents([tmp_path / "pictures"])
    shutil.rmtree(tmp_path / "pictures")
    with pytest.raises(ValueError, match="a comes twice"):
        corpora.read_documents([tmp_path / "a", tmp_path])
    with pytest.raises(ValueError, match="at least two different documents"):
        corpora.read_documents([tmp_path / "a", tmp_path / "b"])


# Tokens


@functools.cache
def vocabulary(kind):
    if kind == "bytes":
        return vocabularies.ByteVocabulary()
    return vocabularies.train_pairs(corpora.read_manual().values(), 311)


EVERYTHING = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))


@pytest.mark.parametrize("kind", ["bytes", "pairs"])
@pytest.mark.parametrize(
    "text",
    ["", "while True:\n    pass\n", "\r\n\t  \0", "<|endoftext|> ■", EVERYTHING[:5000], EVERYTHING[-499:]],
)
def test_any_text_comes_back(kind, text):
    tokens = vocabulary(kind).encode(text)
    assert vocabulary(kind).decode(tokens) == text
    assert b"".join(vocabulary(kind).spell(token) for token in tokens.tolist()) == text.encode()
    assert vocabulary(kind).mark not in tokens
    assert tokens.dtype == np.int32


@pytest.mark.parametrize("kind", ["bytes", "pairs"])
def test_any_byte_has_a_token_and_half_a_character_is_shown_as_such(kind):
    own = vocabulary(kind)
    assert {own.spell(token) for token in range(own.size)} >= {bytes([byte]) for byte in range(256)} | {b""}
    assert own.decode([*own.encode("é")[:1], own.mark, *own.encode("!")]) in ("\ufffd!", "é!")
    for token in (-1, own.size):
        with pytest.raises(ValueError, match=rf"token must be in 0\.\.{own.size - 1}, got {token}"):
            own.spell(token)


def test_pairs_shorten_text_and_are_the_same_every_time():
    own = vocabulary("pairs")
    text = corpora.read_manual()["compound"]
    assert own.size == 312
    assert own.mark == 311
    assert len(own.encode(text)) < 0.75 * len(text.encode())
    assert vocabularies.train_pairs(corpora.read_manual().values(), 311).to_json() == own.to_json()
    again = vocabularies.PairVocabulary(own.to_json())
    assert np.array_equal(again.encode(text), own.encode(text))


@pytest.mark.parametrize("kind", ["bytes", "pairs"])
def test_a_stream_has_a_mark_around_every_document(tmp_path, kind):
    own, texts, told = vocabulary(kind), ["while", "", "naïve"], []
    documents = corpora.Documents.of_texts(texts)
    count, digest = token_files.write_tokens(tmp_path / "tokens", own, documents, told.append)
    stream = token_files.TokenFile(tmp_path / "tokens", np.dtype(np.uint16), count).read()
    assert sum(told) == documents.num_bytes == 11
    assert digest == hashlib.sha256(stream.tobytes()).hexdigest()
    assert (tmp_path / "tokens").stat().st_size == 2 * count == 2 * len(stream)
    places = np.flatnonzero(stream == own.mark)
    assert (places[0], places[-1], len(places)) == (0, len(stream) - 1, 4)
    parts = [own.decode(part[1:]) for part in np.split(stream, places[1:])[:-1]]
    assert parts == texts
    assert vocabularies.count_bytes(own)[stream].sum() == sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("text", ["", "{}", "not json"])
def test_a_damaged_tokenizer_is_refused(text):
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        vocabularies.PairVocabulary(text)


def test_a_tokenizer_with_special_tokens_is_refused():
    import tokenizers

    foreign = tokenizers.Tokenizer.from_str(vocabulary("pairs").to_json())
    foreign.add_special_tokens(["<|end of text|>"])
    with pytest.raises(ValueError, match="byte-level BPE without special tokens"):
        vocabularies.PairVocabulary(foreign.to_str())


# Rows


def test_rows_are_pieces_of_the_stream(task):
    stream = task.tokens.training.read().tolist()
    batch = task.make_batch(jax.random.key(0), 997)
    pieces = {tuple(stream[place : place + LENGTH + 1]) for place in range(len(stream) - LENGTH)}
    drawn = {
        (*inputs, targets[-1])
        for inputs, targets in zip(batch["inputs"].tolist(), batch["targets"].tolist(), strict=True)
    }
    assert drawn <= pieces
    assert len(drawn) > 0.6 * len(pieces)
    assert {tuple(stream[: LENGTH + 1]), tuple(stream[-LENGTH - 1 :])} <= drawn, "the ends are drawn too"
    assert np.array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert np.array_equal(batch["bytes"], (np.asarray(batch["targets"]) != MARK).sum(1))
    assert batch["counted"].all()


def test_a_batch_is_a_function_of_its_key(task):
    one, again, other = (task.make_batch(jax.random.key(seed), 7)["inputs"] for seed in (3, 3, 5))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_training_reads_no_held_out_document(task):
    training, held_out = ("".join(documents.texts()) for documents in task.documents)
    assert training
    assert held_out
    assert task.vocabulary.decode(task.tokens.training.read()) == training
    assert task.vocabulary.decode(task.tokens.held_out.read()) == held_out


def test_places_beyond_two_gibibytes_are_drawn_too(task, monkeypatch):
    """Where a number of 32 bits ends; below, the numbers are those of a program on the device."""
    key = jax.random.key(5)
    count = len(task.tokens.training) - LENGTH
    assert np.array_equal(task.choose(key, 97), jax.random.randint(key, (97,), 0, count))
    long = token_files.TokenFile(task.tokens.training.path, np.dtype(np.uint16), 5 * 2**31)
    larger = dataclasses.replace(task)
    vars(larger)["tokens"] = dataclasses.replace(task.tokens, training=long)
    places = larger.choose(key, 997)
    assert places.dtype == np.int64
    assert 0 <= places.min() < 2**31 < 4 * 2**31 < places.max() < 5 * 2**31


@pytest.mark.slow
def test_no_token_sees_another_document(task):
    """Weights across documents are 0, and what the other documents hold changes no bit."""
    inputs = np.array([[7, 8, MARK, 9, 3, 5, MARK, MARK, 11, 2, 2]], np.int32)
    documents = np.array([0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 3])
    assert number_documents(jnp.asarray(inputs), MARK)[0].tolist() == documents.tolist()
    model = make_model(task)
    look = jax.jit(lambda inputs: task.read(model, {"inputs": inputs}, aux=("weights",)))
    logits, aux = look(inputs)
    sees = (documents[:, None] == documents[None]) & np.tri(11, dtype=bool)
    for block in aux["blocks"]:
        weights = np.asarray(block["weights"])
        assert (weights[..., ~sees] == 0).all()
        assert (weights[..., sees] > 0).all()
    for document in range(4):
        own = documents == document
        others = np.where(own | (inputs == MARK), inputs, (inputs + 13) % 251)
        assert not np.array_equal(others, inputs) or document == 2
        assert np.array_equal(look(others)[0][0, own], logits[0, own])


@pytest.mark.parametrize("length", [2, 3, 5, 8, 19, 97, 120])
@pytest.mark.parametrize("total", [1, 2, 18, 19, 20, 37, 96])
def test_every_held_out_token_counts_once_with_half_a_row_before_it(length, total):
    stream = np.random.default_rng(3).permutation(total + 1)
    inputs, targets, counted = cut_windows(stream, length)
    assert inputs.shape == targets.shape == counted.shape
    assert sorted(targets[counted].tolist()) == sorted(stream[1:].tolist())
    follows = dict(zip(stream[:-1].tolist(), stream[1:].tolist(), strict=True))
    assert all(
        follows[a] == b for a, b in zip(inputs[counted].tolist(), targets[counted].tolist(), strict=True)
    )
    assert counted[0].sum() == min(length, total)
    assert not counted[1:, : length // 2].any()


# What a byte costs


def evaluate_by_hand(documents, nats):
    """The definition in a plain loop: nats of every token and mark given what its document holds so far."""
    total = count = size = 0
    for text in documents.texts():
        tokens = [MARK, *text.encode(), MARK]
        for place in range(1, len(tokens)):
            total += nats(tokens[:place], tokens[place])
            count += 1
        size += len(text.encode())
    return total / count, total / math.log(2) / size


def test_bits_per_byte_by_the_definition(task):
    """A model that reads one token back: the windows may not change what it costs."""
    table = np.random.default_rng(7).normal(size=(257, 257)) * 3

    def model(inputs, **options):
        return jnp.asarray(table, jnp.float32)[inputs]

    def nats(read, token):
        row = table.astype(np.float32).astype(np.float64)[read[-1]]
        return float(np.log(np.exp(row).sum()) - row[token])

    loss, bits = evaluate_by_hand(task.documents[1], nats)
    measured = task.evaluate(model, task.held_out)
    assert set(measured) == {"loss", "bits_per_byte", "token_accuracy"}
    assert float(measured["loss"]) == pytest.approx(loss, rel=3e-6)
    assert float(measured["bits_per_byte"]) == pytest.approx(bits, rel=3e-6)
    assert int(task.held_out["bytes"].sum()) == sum(len(text.encode()) for text in task.documents[1].texts())


@pytest.mark.slow
def test_rows_cost_what_each_document_alone_costs(corpus):
    """With rows twice as long as documents, all that a document holds is seen: as if it were alone."""
    task = small(corpus, length=401)
    assert all(len(text.encode()) < 200 for text in task.documents[1].texts())
    model = make_model(task)
    read = jax.jit(model)
    padded = 211
    costs = {}
    for text in task.documents[1].texts():
        tokens = [MARK, *text.encode(), MARK]
        row = np.pad(tokens, (0, padded - len(tokens)))[None].astype(np.int32)
        logits = np.asarray(read(row))[0].astype(np.float64)
        for place in range(1, len(tokens)):
            own = logits[place - 1]
            costs[tuple(tokens[:place]), tokens[place]] = np.log(np.exp(own).sum()) - own[tokens[place]]
    loss, bits = evaluate_by_hand(task.documents[1], lambda read, token: costs[tuple(read), token])
    measured = jax.jit(lambda batch: task.evaluate(model, batch))(task.held_out)
    assert float(measured["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(measured["bits_per_byte"]) == pytest.approx(bits, rel=1e-5)


def test_uniform_predictions_cost_the_logarithm_of_the_vocabulary(task):
    batch = task.make_batch(jax.random.key(0), 11)
    loss, measured = task.measure(lambda inputs, **options: jnp.zeros((*inputs.shape, 257)), batch)
    tokens, size = 11 * LENGTH, int(batch["bytes"].sum())
    assert float(loss) == pytest.approx(math.log(257), rel=1e-6)
    assert float(measured["bits_per_byte"]) == pytest.approx(math.log2(257) * tokens / size, rel=1e-6)


def test_a_perfect_model_costs_nothing_and_a_wrong_token_is_seen(task):
    batch = task.held_out
    perfect = 50.0 * jax.nn.one_hot(batch["targets"], 257)
    _, measured = task.measure(lambda inputs, **options: perfect, batch)
    assert float(measured["token_accuracy"]) == 1.0
    assert float(measured["bits_per_byte"]) < 1e-6
    row, place = np.argwhere(np.asarray(batch["counted"]))[-1]
    wrong = perfect.at[row, place].set(0.0).at[row, place, 0].set(50.0)
    _, measured = task.measure(lambda inputs, **options: wrong, batch)
    tokens, size = int(batch["counted"].sum()), int(batch["bytes"].sum())
    assert float(measured["token_accuracy"]) == pytest.approx(1 - 1 / tokens)
    assert float(measured["bits_per_byte"]) == pytest.approx(50 / math.log(2) / size, rel=1e-3)
    assert not batch["counted"][-1, 0]
    uncounted = perfect.at[-1, 0].set(0.0)
    assert task.measure(lambda inputs, **options: uncounted, batch)[1]["token_accuracy"] == 1.0


@pytest.mark.slow
def test_more_is_held_out_than_is_evaluated_at_once(task):
    """As a mean of groups it would weigh the short last one wrongly."""
    model = make_model(task)
    assert len(task.held_out["inputs"]) % 5, "the last group of rows is a short one"
    loss, measured = jax.jit(lambda batch: task.measure(model, batch))(task.held_out)
    whole = {"loss": loss, **measured}
    grouped = jax.jit(lambda batch: task.evaluate(model, batch))(task.held_out)
    assert all(float(grouped[name]) == pytest.approx(float(whole[name]), rel=1e-5) for name in whole)


def test_the_announced_attention_is_that_of_the_model(task):
    ((queries, keys, mask),) = task.attention_calls().values()
    assert (queries, keys) == (LENGTH, LENGTH)
    assert mask.dense(LENGTH, LENGTH).shape[-2:] == (LENGTH, LENGTH)
    words = task.describe_data()
    assert "5 rows of 19 tokens" in words["batch"]
    assert "tokens, which are bytes and a mark" in words["corpus"]
    assert "of its lines stand in training documents too" in words["held out"]


def test_text_shorter_than_a_row_is_refused(corpus):
    task = small(corpus, length=100_000)
    with pytest.raises(ValueError, match=r"length must be below the .* training tokens, got 100000"):
        _ = task.tokens


# Runs


class Killer(loop.Progress):
    """A listener that dies at its nth checkpoint."""

    def __init__(self, saves):
        self.saves = saves

    def compiling(self, what):
        return contextlib.nullcontext()

    def stepped(self, *ignored):
        pass

    def evaluated(self, *ignored):
        pass

    def saved(self, step):
        self.saves -= 1
        if not self.saves:
            raise RuntimeError("killed")


@pytest.fixture(scope="module")
def compiled():
    return Compiled()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus, compiled):
    """A whole run over pairs of bytes."""
    directory = tmp_path_factory.mktemp("text") / "whole"
    train(directory, small(corpus, vocab_size=271), compiled=compiled)
    return directory


def assert_same_run(one, other):
    a, b = (
        checkpoints.load(checkpoints.list_checkpoints(directory / "checkpoints")[-1]).arrays
        for directory in (one, other)
    )
    assert a.keys() == b.keys()
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)
    assert read_lines(one) == read_lines(other)
    for name in tasks.Text.keeps:
        assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.slow
def test_killed_and_resumed_is_uninterrupted(finished, corpus, compiled, tmp_path, monkeypatch):
    task = small(corpus, vocab_size=271)
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "run", task, compiled=compiled, progress=Killer(2))
    # What was kept is read back, not made again.
    monkeypatch.setattr(vocabularies, "train_pairs", None)
    assert train(tmp_path / "run", task, compiled=compiled).status == "finished"
    assert_same_run(finished, tmp_path / "run")


@pytest.mark.slow
def test_a_run_keeps_what_it_needs(finished, corpus):
    assert sorted(path.name for path in finished.iterdir()) == [
        "checkpoints",
        "config.json",
        "corpus.json",
        "metrics.jsonl",
        "tokenizer.json",
    ]
    task, model = runs.load_run(finished)
    assert task.vocabulary.size == 272
    recorded = checkpoints.load(finished / "checkpoints" / "00000011").record["held_out"]
    found = task.evaluate(model, task.held_out)
    assert float(found["bits_per_byte"]) == pytest.approx(recorded["bits_per_byte"], rel=1e-5)
    assert read_lines(finished)[-1]["held_out_bits_per_byte"] == recorded["bits_per_byte"]


@pytest.mark.slow
def test_a_model_loads_without_its_corpus(finished, corpus, tmp_path):
    """As for generating: tokens and parameters are in the run."""
    directory = shutil.copytree(finished, tmp_path / "run")
    config = json.loads((directory / "config.json").read_text())
    config["settings"]["files"] = [str(tmp_path / "gone")]
    (directory / "config.json").write_text(json.dumps(config))
    task, model = runs.load_run(directory)
    tokens = task.vocabulary.encode("low tide")
    assert np.isfinite(np.asarray(model(jnp.asarray(tokens)[None]))).all()
    with pytest.raises(ValueError, match="gone, which does not exist"):
        _ = task.held_out


@pytest.fixture
def stopped(corpus, compiled, tmp_path):
    """A run on a corpus of its own, stopped at step 3."""
    files = shutil.copytree(corpus, tmp_path / "texts")
    task = small(files, vocab_size=271)
    train(tmp_path / "run", task, compiled=compiled, stop=stop_after(3))
    return tmp_path / "run", files, task


def refuse(directory, task, message):
    before = snapshot(directory)
    with pytest.raises(ValueError, match=message):
        train(directory, task)
    assert snapshot(directory) == before


@pytest.mark.slow
def test_another_corpus_under_the_same_name_is_refused(stopped):
    directory, files, task = stopped
    (files / "00.txt").write_text("changed\n")
    refuse(directory, task, "not that with which this run began")


def test_what_a_run_kept_is_there_as_it_was_or_named(stopped):
    """Learned anew, a tokenizer may be another one, in whose tokens the model does not speak."""
    directory, _, task = stopped
    other = vocabularies.train_pairs(["entirely other words, other words"], 271).to_json().encode()
    for name, contents, told in (
        ("tokenizer.json", None, r"tokenizer\.json of this run is gone; bring it back"),
        ("tokenizer.json", other, r"tokenizer\.json is not what this run began with; bring it back"),
        ("corpus.json", None, r"corpus\.json of this run is gone; bring it back"),
        ("corpus.json", b"[1]", r"corpus\.json is not what this run began with"),
        ("corpus.json", b"\xff", r"corpus\.json cannot be read"),
    ):
        own = (directory / name).read_bytes()
        (directory / name).unlink()
        if contents is not None:
            (directory / name).write_bytes(contents)
        refuse(directory, task, told)
        with pytest.raises(ValueError, match=told):
            _ = runs.load_run(directory)[0].tokens
        (directory / name).write_bytes(own)
    (directory / "corpus.json").unlink()
    assert runs.load_run(directory)[0].vocabulary.size == 272, "which is all that generating needs"


def test_force_forgets_the_kept_files(stopped):
    directory, files, task = stopped
    (files / "00.txt").write_text("changed\n")
    task = dataclasses.replace(task, vocab_size=277)
    opened = runs.open_run(directory, task, force=True)
    assert opened.task.kept is None
    opened.begin({})
    assert [path.name for path in directory.iterdir()] == ["config.json"]


@pytest.mark.slow
def test_a_branch_takes_the_tokens_of_its_source(stopped, tmp_path, monkeypatch):
    directory, _, task = stopped
    longer = dataclasses.replace(task, optimization=settings.Optimization(steps=13, batch_size=5))
    monkeypatch.setattr(vocabularies, "train_pairs", None)
    assert train(tmp_path / "branch", longer, resume=str(directory)).step == 13
    for name in tasks.Text.keeps:
        assert (tmp_path / "branch" / name).read_bytes() == (directory / name).read_bytes()


# Tokens on disk


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of this test, and the folders of tokens in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "regard" / "tokens"
    return lambda: sorted(path for path in folder.iterdir() if path.is_dir())


def test_text_becomes_tokens_once(corpus, tmp_path, cache, monkeypatch):
    files = shutil.copytree(corpus, tmp_path / "texts")
    told = []
    first = small(files, vocab_size=271)
    first.prepare(lambda *what: told.append(what))
    (folder,) = cache()
    total = sum(path.stat().st_size for path in files.iterdir())
    said = [
        "looking for documents in 0.0 MB of files",
        "learning 271 strings of bytes from 0.0 MB of text",
        f"0.0 MB of text to at most 0.0 MB of tokens in {folder}",  # before the room is taken
    ]
    assert list(dict.fromkeys(what for what, _, _ in told)) == said
    for what in said:
        (start, size), *_, end = ((done, of) for name, done, of in told if name == what)
        assert (start, end) == (0, (size, size))
        assert size == total or what.startswith("learning")
    before = snapshot(folder)
    monkeypatch.setattr(corpora, "read_documents", None)
    again = small(files, vocab_size=271).restore(first.keep())
    assert len(again.tokens.training) > 300
    assert again.describe_data()
    assert snapshot(folder) == before


@pytest.mark.parametrize("damage", ["changed file", "new file", "cut short", "no record"])
def test_tokens_of_other_files_are_written_again(corpus, tmp_path, cache, damage):
    files = shutil.copytree(corpus, tmp_path / "texts")
    facts = small(files).tokens.facts
    (folder,) = cache()
    if damage == "changed file":
        text = (files / "07.txt").read_text()
        (files / "07.txt").write_text(text.replace("7", "8", 1))  # as long as before
    elif damage == "new file":
        (files / "14.txt").write_text("more")
    elif damage == "cut short":
        (folder / "training").write_bytes((folder / "training").read_bytes()[:-2])
    else:
        (folder / "record.json").write_text("[" * 100_000)
    found = small(files).tokens
    assert (found.facts == facts) == (damage in ("cut short", "no record"))
    assert hashlib.sha256(found.training.read().tobytes()).hexdigest() == found.facts["sha256"][0]
    assert cache() == [folder], "in the place of what was there"


def test_what_was_interrupted_is_not_taken_for_whole(corpus, cache, monkeypatch):
    def stop(what, done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small(corpus).prepare(stop)
    assert cache() == []
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *arguments, **options: None)
        with pytest.raises(KeyboardInterrupt):
            small(corpus).prepare(stop)
    assert [path.suffix for path in cache()] == [".draft"]
    assert len(small(corpus).tokens.training.read()) == small(corpus).tokens.facts["tokens"][0]
    assert [path.suffix for path in cache()] == [""]


def test_a_cache_that_cannot_be_written_is_named(corpus, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot be kept in .*file.* name another folder in XDG_CACHE_HOME"):
        _ = small(corpus).tokens


class Sparing(io.FileIO):
    """A file of a system that reads 5 bytes at once, where others read 2 GiB."""

    def read(self, size=-1):
        return super().read(min(size, 5))

    def readinto(self, buffer):
        return super().readinto(memoryview(buffer)[:5])


def test_more_tokens_than_a_system_reads_at_once_come_whole(tmp_path):
    class Place(type(tmp_path)):
        def open(self, mode, buffering=-1):
            return io.BufferedReader(Sparing(self)) if buffering else Sparing(self)

    np.arange(7, 1007).astype(np.uint16).tofile(tmp_path / "tokens")
    file = token_files.TokenFile(Place(tmp_path / "tokens"), np.dtype(np.uint16), 1000)
    assert file.read().tolist() == [*range(7, 1007)]
    assert file.read(11, 29).tolist() == [*range(18, 36)]


def test_a_training_goes_on_where_the_cache_is_deleted(corpus, cache):
    """The files are open; the next training writes them again."""
    task = small(corpus)
    before = task.make_batch(jax.random.key(0), 3)["inputs"]
    shutil.rmtree(cache()[0])
    assert np.array_equal(task.make_batch(jax.random.key(0), 3)["inputs"], before)
