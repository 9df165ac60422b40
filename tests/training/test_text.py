"""Learning from text: which documents, which tokens, who sees whom, what a byte costs, and going on."""

import dataclasses
import functools
import hashlib
import io
import itertools
import math
import shutil

import jax
import numpy as np
import pytest
import tokenizers

from layer_oracle import build_drawn
from refusals import assert_refused
from regard.training import checkpoints, corpora, runs, settings, tasks, token_files, vocabularies
from regard.training.runs import RunError
from regard.training.tasks.text import cut_windows, number_documents
from small_runs import Killer, assert_same_run, begin, read_lines, snapshot, train

LENGTH, MARK, KEPT = 19, 256, tasks.Text.keeps


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Thirteen documents of 3 to about 170 bytes, some beyond ASCII."""
    folder, random = tmp_path_factory.mktemp("texts"), np.random.default_rng(5)
    words = ["low", "lower", "tide", "naïve", "漢字", "🙂", "of", "the"]
    for index in range(13):
        chosen = [words[word] for word in random.integers(0, len(words), 1 + 2 * index)]
        (folder / f"{index:02d}.txt").write_text(" ".join([str(index), *chosen]) + "\n", encoding="utf-8")
    return folder


def small(corpus, **changes):
    chosen = {
        "files": (str(corpus),),
        "length": LENGTH,
        "held_out_fraction": 0.3,
        "model": settings.DecoderSizes(d_model=12, num_heads=2, d_ff=13, num_layers=1, dropout_rate=0.25),
        "optimization": settings.Optimization(steps=11, batch_size=5, warmup_steps=3),
        "cadence": settings.Cadence(log_every=2, evaluate_every=5, checkpoint_every=3),
    }
    return tasks.Text(**(chosen | changes))


@pytest.fixture(scope="module")
def task(corpus):
    return small(corpus)


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


def split(texts, fraction, most, seed=0):
    sides = corpora.split_documents(corpora.Documents.of_texts(texts), fraction, seed, most)
    return [list(some.texts()) for some in sides]


def test_about_a_tenth_is_held_out_and_nothing_is_lost():
    texts = ["x" * (7 + index * index) + str(index) for index in range(101)]
    training, held_out = split(texts, 0.1, 2**20)
    assert sorted(training + held_out) == sorted(texts)
    total = sum(map(len, texts))
    assert 0.097 * total < sum(map(len, held_out)) <= 0.1 * total
    assert split(texts, 0.1, 2**20) == [training, held_out], "order too"
    assert split(texts, 0.1, 2**20, seed=1)[1] != held_out
    assert sum(map(len, split(texts, 0.1, 20_000)[1])) in range(19_000, 20_001)


def test_something_is_held_out_of_any_two_documents_and_no_character_is_cut_in_two():
    """Of large ones it is the end of the smallest, at the beginning of a line if it can be."""
    long = "x" * 40
    for texts, fraction, most, training, held_out in (
        (["aaaa", "b"], 0.1, 99, ["aaaa"], ["b"]),
        (["aaaa", "b"], 0.99, 99, ["b"], ["aaaa"]),
        ([long, "first line\nlast\n"], 0.1, 9, ["first line\n", long], ["last\n"]),
        (["漢漢漢漢漢", "漢漢漢"], 0.1, 4, ["漢漢", "漢漢漢漢漢"], ["漢"]),
        (["漢漢漢", "é"], 0.1, 1, ["漢漢漢"], ["é"]),
    ):
        assert [*map(sorted, split(texts, fraction, most))] == [training, held_out]


def lay(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def test_files_and_directories_are_documents_by_path(tmp_path):
    lay(tmp_path, {"deep/a.txt": "one", "deep/copy.txt": "one", "deep/empty.txt": "", "own.txt": "two"})
    lay(tmp_path, {"deep/er/b.md": "ü\r\n", "deep/er/digits.png": b"\x89PNG\0", "deep/.hidden": b"\xff"})
    lay(tmp_path, {"deep/latin.txt": "naïve".encode("latin-1")})
    documents = corpora.read_documents([tmp_path / "own.txt", tmp_path / "deep"])
    skipped = ("deep/er/digits.png", "deep/latin.txt")
    assert documents.skipped == tuple(str(tmp_path / name) for name in skipped)
    assert list(documents.texts()) == ["one", "ü\r\n", "two"]
    sources = ("deep/a.txt", "deep/copy.txt", "deep/er/b.md", "own.txt")
    assert documents.sources == tuple(tmp_path / name for name in sources)


def test_one_file_is_cut_without_losing_a_byte(tmp_path):
    text = "añ漢🙂\nzz🙂🙂🙂\n\nlast line without an end 漢漢漢漢"
    (tmp_path / "one.txt").write_bytes(text.encode())
    for most in (1, 2, 3, 5, 7, 11, 13, 29):
        pieces = cut(tmp_path / "one.txt", most)
        assert "".join(pieces) == text
        assert all(len(piece.encode()) <= most or len(piece) == 1 for piece in pieces)
        documents = corpora.read_documents([tmp_path / "one.txt"], piece_bytes=most)
        assert list(documents.texts()) == list(dict.fromkeys(pieces)), "each once"
    with pytest.raises(ValueError, match="at least two different documents"):
        corpora.read_documents([tmp_path / "one.txt"], piece_bytes=1000)
    (tmp_path / "two.txt").write_text("a\nbc\nd\nefghijk\n")
    assert cut(tmp_path / "two.txt", 5) == ["a\nbc\n", "d\n", "efghi", "jk\n"], "with lines where it can"


def cut(path, most):
    places = corpora._cut(path, most, bytearray())
    return [path.read_bytes()[start:stop].decode() for _, start, stop in places]


@pytest.mark.parametrize("part", [5, 211, 100_000])
def test_parts_of_a_long_document_are_the_document(tmp_path, monkeypatch, part):
    """Cut where lines or words end, they have the tokens of the whole, and the same BPE is learned."""
    monkeypatch.setattr(corpora, "PART_BYTES", part)
    manual = corpora.read_manual()["compound"][:3001].replace("\n", "\r\n", 7)
    texts = [f"low tide's naïve\u2003tide? 🙂\n\n\t漢漢漢 .\x1c. \r\rlow {manual}", "other"]
    lay(tmp_path, dict(zip("ab", texts, strict=True)))
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


def test_what_cannot_serve_is_named_with_its_place(tmp_path, monkeypatch):
    """A fault is found across parts of a file."""
    monkeypatch.setattr(corpora, "PART_BYTES", 5)
    latin, kanji = "naïve".encode("latin-1"), ("漢" * 9).encode()
    bad = ("bad", "good")
    for files, asked, message in (
        ({"bad": b""}, bad, "bad is empty"),
        ({"bad": b"text\0text"}, bad, "bad is binary, not text: a zero byte at offset 4"),
        ({"bad": latin}, bad, r"bad is not UTF-8: byte 0xef at offset 2 \(invalid continuation byte\)"),
        ({"bad": kanji + b"\xff"}, bad, "is not UTF-8: byte 0xff at offset 27"),
        ({"bad": kanji[:-1]}, bad, r"byte 0xe6 at offset 24 \(unexpected end of data\)"),
        ({"pictures/digits.png": b"\0"}, ["pictures"], r"; 1 file that is not text was skipped \(.*\.png\)"),
        ({}, ["missing"], "missing, which does not exist"),
        ({"empty/file": b""}, ["empty"], "directory without a file"),
        ({"deep/good": b"good"}, ["deep/good", "deep"], "good comes twice"),
        ({"same": b"good"}, ["same", "good"], "at least two different documents"),
    ):
        lay(tmp_path, files | {"good": b"good"})
        with pytest.raises(ValueError, match=message):
            corpora.read_documents([tmp_path / name for name in asked])
    assert_refused((lambda: corpora.read_documents([""]), r"got an empty name; \. is this directory"))
    lay(tmp_path, {"a": b"a, and many more words", "b": b"b, and many more words"})
    documents = corpora.read_documents([tmp_path / "a", tmp_path / "b"])
    lay(tmp_path, {"b": b"less now"})
    assert_refused((lambda: list(documents.read()), "b changed while it was read"))


@functools.cache
def vocabulary(kind):
    if kind == "bytes":
        return vocabularies.ByteVocabulary()
    return vocabularies.train_pairs(corpora.read_manual().values(), 311)


@pytest.mark.parametrize("kind", ["bytes", "pairs"])
def test_any_text_comes_back_and_any_byte_has_a_token(kind):
    own = vocabulary(kind)
    characters = "".join(map(chr, [*range(5000), *range(0x10FF00, 0x110000)]))
    for text in ("", "\r\n\t  \0<|endoftext|> ■", characters):
        tokens = own.encode(text)
        assert own.decode(tokens) == text
        assert b"".join(own.spell(token) for token in tokens.tolist()) == text.encode()
        assert own.mark not in tokens
        assert tokens.dtype == np.int32
    assert {own.spell(token) for token in range(own.size)} >= {bytes([byte]) for byte in range(256)} | {b""}
    assert own.decode([*own.encode("é")[:1], own.mark, *own.encode("!")]) in ("\ufffd!", "é!")
    assert_refused((lambda: own.spell(own.size), rf"token must be in 0\.\.{own.size - 1}, got {own.size}"))


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
    assert [own.decode(part[1:]) for part in np.split(stream, places[1:])[:-1]] == texts
    assert vocabularies.count_bytes(own)[stream].sum() == sum(len(text.encode()) for text in texts)


def test_a_tokenizer_that_is_damaged_or_has_special_tokens_is_refused():
    foreign = tokenizers.Tokenizer.from_str(vocabulary("pairs").to_json())
    foreign.add_special_tokens(["<|end of text|>"])
    for text, told in (("{}", "damaged"), (foreign.to_str(), "byte-level BPE without special tokens")):
        with pytest.raises(ValueError, match=rf"tokenizer\.json .*{told}"):
            vocabularies.PairVocabulary(text)


def test_rows_are_pieces_of_the_stream(task):
    stream = task.tokens.training.read().tolist()
    batch = task.make_batch(jax.random.key(0), 997)
    pieces = {tuple(stream[place : place + LENGTH + 1]) for place in range(len(stream) - LENGTH)}
    rows = zip(batch["inputs"].tolist(), batch["targets"].tolist(), strict=True)
    drawn = {(*inputs, targets[-1]) for inputs, targets in rows}
    assert drawn <= pieces
    assert {tuple(stream[: LENGTH + 1]), tuple(stream[-LENGTH - 1 :])} <= drawn, "the ends are drawn too"
    assert np.array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert np.array_equal(batch["bytes"], (np.asarray(batch["targets"]) != MARK).sum(1))
    assert batch["counted"].all()
    again, other = (task.make_batch(jax.random.key(seed), 997)["inputs"] for seed in (0, 1))
    assert np.array_equal(batch["inputs"], again)
    assert not np.array_equal(batch["inputs"], other)


def test_training_reads_no_held_out_document(task):
    for documents, tokens in zip(task.documents, (task.tokens.training, task.tokens.held_out), strict=True):
        assert task.vocabulary.decode(tokens.read()) == "".join(documents.texts()) != ""


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


def test_no_token_sees_another_document(task):
    """Weights across documents are 0, and what the other documents hold changes no bit."""
    inputs = np.array([[7, 8, MARK, 9, 3, 5, MARK, MARK, 11, 2, 2]], np.int32)
    documents = np.array([0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 3])
    assert np.asarray(number_documents(inputs, MARK))[0].tolist() == documents.tolist()
    model = build_drawn(lambda rngs: task.make_model(rngs))
    model.eval()
    look = jax.jit(lambda inputs: task.read(model, {"inputs": inputs}, aux=("weights",)))
    logits, aux = look(inputs)
    sees = (documents[:, None] == documents[None]) & np.tri(11, dtype=bool)
    weights = np.asarray(aux["blocks"][0]["weights"])
    assert (weights[..., ~sees] == 0).all()
    assert (weights[..., sees] > 0).all()
    for document in range(4):
        own = documents == document
        others = np.where(own | (inputs == MARK), inputs, (inputs + 13) % 251)
        assert not np.array_equal(others, inputs) or document == 2
        assert np.array_equal(np.asarray(look(others)[0])[0, own], np.asarray(logits)[0, own])


def test_every_held_out_token_counts_once_with_half_a_row_before_it():
    for length, total in itertools.product((2, 3, 8, 19, 120), (1, 2, 18, 19, 20, 37, 96)):
        stream = np.random.default_rng(3).permutation(total + 1)
        inputs, targets, counted = cut_windows(stream, length)
        assert inputs.shape == targets.shape == counted.shape
        assert sorted(targets[counted].tolist()) == sorted(stream[1:].tolist())
        follows = dict(zip(stream[:-1].tolist(), stream[1:].tolist(), strict=True))
        pairs = zip(inputs[counted].tolist(), targets[counted].tolist(), strict=True)
        assert all(follows[a] == b for a, b in pairs)
        assert counted[0].sum() == min(length, total)
        assert not counted[1:, : length // 2].any()


def test_bits_per_byte_by_the_definition(task):
    """Of a model that reads one token back; neither windows nor groups of rows change what it costs."""
    table = np.float32(np.random.default_rng(7).normal(size=(257, 257)) * 3)
    total = count = size = 0
    for text in task.documents[1].texts():
        tokens = [MARK, *text.encode(), MARK]
        for before, token in itertools.pairwise(tokens):
            row = np.float64(table[before])
            total += np.log(np.exp(row).sum()) - row[token]
        count, size = count + len(tokens) - 1, size + len(text.encode())
    assert len(task.held_out["inputs"]) % 5, "the last group of rows is a short one"
    assert int(task.held_out["bytes"].sum()) == size
    read = lambda inputs, **_: jax.numpy.asarray(table)[inputs]
    found = jax.jit(lambda batch: task.evaluate(read, batch))(task.held_out)
    assert set(found) == {"loss", "bits_per_byte", "token_accuracy"}
    assert float(found["loss"]) == pytest.approx(total / count, rel=3e-6)
    assert float(found["bits_per_byte"]) == pytest.approx(total / math.log(2) / size, rel=3e-6)


def test_a_perfect_model_costs_nothing_and_a_wrong_token_is_seen(task):
    batch = jax.device_get(task.held_out)
    measure = jax.jit(lambda logits: task.measure(lambda inputs, **options: logits, batch)[1])
    logits = 50 * np.eye(257, dtype=np.float32)[batch["targets"]]
    assert not batch["counted"][-1, 0]
    logits[-1, 0] = 0
    measured = measure(logits)
    assert float(measured["token_accuracy"]) == 1.0
    assert float(measured["bits_per_byte"]) < 1e-6
    row, place = np.argwhere(batch["counted"])[-1]
    logits[row, place] = 50 * np.eye(257)[0]
    measured = measure(logits)
    assert float(measured["token_accuracy"]) == pytest.approx(1 - 1 / int(batch["counted"].sum()))
    cost = 50 / math.log(2) / int(batch["bytes"].sum())
    assert float(measured["bits_per_byte"]) == pytest.approx(cost, rel=1e-3)


def test_text_shorter_than_a_row_is_refused(task):
    with pytest.raises(ValueError, match=r"length must be below the .* training tokens, got 100000"):
        _ = dataclasses.replace(task, length=100_000).tokens


def paired(files, vocab_size=271):
    return small(files, vocab_size=vocab_size)


def test_a_run_keeps_what_it_needs_and_goes_on_with_it_after_a_kill(corpus, tmp_path, monkeypatch):
    finished, killed = tmp_path / "whole", tmp_path / "run"
    train(finished, paired(corpus))
    with pytest.raises(RuntimeError, match="killed"):
        train(killed, paired(corpus), progress=Killer("saved", 6))
    # What was kept is read back, not made again.
    monkeypatch.setattr(vocabularies, "train_pairs", None)
    assert train(killed, paired(corpus)).status == "finished"
    assert_same_run(finished, killed)
    assert all((finished / name).read_bytes() == (killed / name).read_bytes() for name in KEPT)
    files = " ".join(sorted(path.name for path in finished.iterdir()))
    assert files == "checkpoints config.json corpus.json metrics.jsonl tokenizer.json"
    task, model = runs.load_run(finished)
    assert task.vocabulary.size == 272
    recorded = checkpoints.load(finished / "checkpoints" / "00000011").record["held_out"]
    found = jax.jit(lambda batch: task.evaluate(model, batch))(task.held_out)
    assert float(found["bits_per_byte"]) == pytest.approx(recorded["bits_per_byte"], rel=1e-5)
    assert read_lines(finished)[-1]["held_out_bits_per_byte"] == recorded["bits_per_byte"]


def test_sizes_that_do_not_fit_are_told_before_a_text_is_read():
    unlike = settings.DecoderSizes(latent_rotary_dim=4)
    with pytest.raises(ValueError, match="latent_rotary_dim: expected none without latent_dim, got 4"):
        tasks.Text(files=("none",), model=unlike).prepare(lambda what, done, total: None)


@pytest.fixture
def stopped(corpus, tmp_path):
    files = shutil.copytree(corpus, tmp_path / "texts")
    begin(tmp_path / "run", paired(files))
    return tmp_path / "run", files, paired(files)


def refuse(directory, task, message):
    before = snapshot(directory)
    assert_refused((lambda: train(directory, task), message))
    assert snapshot(directory) == before


def test_another_corpus_under_the_same_name_is_refused_and_force_forgets_what_was_kept(stopped):
    directory, files, task = stopped
    (files / "00.txt").write_text("changed\n")
    refuse(directory, task, "not that with which this run began")
    opened = runs.open_run(directory, dataclasses.replace(task, vocab_size=277), force=True)
    assert opened.task.kept is None
    opened.begin({})
    assert [path.name for path in directory.iterdir()] == ["config.json"]


def test_what_a_run_kept_is_there_as_it_was_or_named(stopped):
    """Learned anew, a tokenizer may be another one, in whose tokens the model does not speak."""
    directory, files, task = stopped
    other = vocabularies.train_pairs(["entirely other words, other words"], 271).to_json().encode()
    for name, contents, told in (
        ("tokenizer.json", other, r"tokenizer\.json is not what this run began with; bring it back"),
        ("corpus.json", b"\xff", r"corpus\.json cannot be read"),
    ):
        own = (directory / name).read_bytes()
        (directory / name).write_bytes(contents)
        refuse(directory, task, told)
        (directory / name).unlink()
        refuse(directory, task, rf"{name} of this run is gone; bring it back")
        (directory / name).write_bytes(own)
    (directory / "corpus.json").unlink()
    with pytest.raises(ValueError, match=r"corpus\.json of this run is gone; bring it back"):
        _ = runs.load_run(directory)[0].tokens
    shutil.rmtree(files)
    assert runs.load_run(directory)[0].vocabulary.size == 272, "which is all that generating needs"


def test_a_branch_takes_the_tokens_of_its_source(stopped, tmp_path, monkeypatch):
    directory, _, task = stopped
    monkeypatch.setattr(vocabularies, "train_pairs", None)
    run = runs.open_run(tmp_path / "branch", task, resume=str(directory))
    run.begin(run.task.keep())
    assert len(run.task.make_batch(jax.random.key(0), 3)["inputs"]) == 3
    assert all((tmp_path / "branch" / name).read_bytes() == (directory / name).read_bytes() for name in KEPT)


def test_a_branch_on_other_data_keeps_the_tokenizer_alone(stopped, tmp_path, monkeypatch):
    directory, files, task = stopped
    monkeypatch.setattr(vocabularies, "train_pairs", None)
    (files / "00.txt").write_text("changed\n")
    branch, other = tmp_path / "branch", dataclasses.replace(task, length=task.length + 4)
    with pytest.raises(RunError, match=r"length: it has 19, asked for 23\n.*, or give new_data=True"):
        runs.open_run(branch, other, resume=str(directory))
    with pytest.raises(RunError, match=r"vocab_size: it has 271, asked for 272\nask for the same [a-z ]*$"):
        runs.open_run(branch, paired(files, vocab_size=272), resume=str(directory), new_data=True)
    with pytest.raises(RunError, match="new_data=True needs resume="):
        runs.open_run(branch, other, new_data=True)
    for _ in range(2):  # again after a kill before the first checkpoint
        run = runs.open_run(branch, other, resume=str(directory), new_data=True)
        run.begin(run.task.keep())
    assert (run.start.step, run.note) == (1, f"other data than in {directory}: length")
    assert [(branch / name).read_bytes() == (directory / name).read_bytes() for name in KEPT] == [True, False]
    assert train(branch, other, resume=str(directory), new_data=True).status == "finished"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "regard" / "tokens"
    return lambda: sorted(path for path in folder.iterdir() if path.is_dir())


def test_text_becomes_tokens_once(corpus, tmp_path, cache, monkeypatch):
    files = shutil.copytree(corpus, tmp_path / "texts")
    told = []
    first = paired(files)
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
    again = paired(files).restore(first.keep())
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

    read = lambda self, size=-1: io.FileIO.read(self, min(size, 5))
    readinto = lambda self, buffer: io.FileIO.readinto(self, memoryview(buffer)[:5])


def test_more_tokens_than_a_system_reads_at_once_come_whole(tmp_path):
    class Place(type(tmp_path)):
        def open(self, mode, buffering=-1):
            return io.BufferedReader(Sparing(self)) if buffering else Sparing(self)

    np.arange(7, 1007).astype(np.uint16).tofile(tmp_path / "tokens")
    file = token_files.TokenFile(Place(tmp_path / "tokens"), np.dtype(np.uint16), 1000)
    assert file.read().tolist() == [*range(7, 1007)]
    assert file.read(11, 29).tolist() == [*range(18, 36)]


def test_a_training_goes_on_where_the_cache_is_deleted(corpus, cache):
    task = small(corpus)
    before = task.make_batch(jax.random.key(0), 3)["inputs"]
    shutil.rmtree(cache()[0])
    assert np.array_equal(task.make_batch(jax.random.key(0), 3)["inputs"], before)
