"""Text from tokens that come one by one: the same as from all of them, and never half a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.cli.spelling import MISSING, Ending, spell_bytes, spell_pieces

TEXTS = ["naïve café", "日本語 και ελληνικά", "👩‍👩‍👧 and 🇪🇺\n", "plain words, plain words", " a  b\tc"]


def spell(data):
    return spell_bytes(lambda token: bytes([token]), data)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_make_whole_characters(text):
    # Each character comes with its last byte, no sooner and no later.
    tokens = iter(text.encode())
    pieces = spell(tokens)
    for number, character in enumerate(text, 1):
        assert next(pieces) == character
        assert tokens.__length_hint__() == len(text[number:].encode())
    assert [*pieces] == []


@given(st.binary(max_size=20))
def test_bytes_that_are_no_text_are_marked(data):
    assert "".join(spell(data)) == data.decode("utf-8", errors="replace")


def byte_pairs():
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=263, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXTS[3]], trainer)
    return made


def words():
    """A tokenizer that drops the space at the start of a text, as those of SentencePiece do."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"▁" + word: number for number, word in enumerate(["a", "bird", "in", "the", "hand"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="▁a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    return made


@pytest.mark.parametrize("text", TEXTS)
def test_a_tokenizers_text_comes_whole(text):
    tokenizer = byte_pairs()
    tokens = tokenizer.encode(text).ids
    assert len(tokens) > 3
    for size in range(len(tokens)):
        prompt = tokenizer.decode(tokens[:size])
        if prompt.endswith(MISSING):
            continue  # a prompt is whole
        spelled = "".join(spell_pieces(tokenizer, tokens[:size], tokens[size:]))
        assert prompt + spelled == text
        assert MISSING not in spelled
    pieces = [*spell_pieces(tokenizer, (), tokenizer.encode("日").ids[: len("日".encode()) - 1])]
    assert ("".join(pieces[:-1]), pieces[-1]) == ("", MISSING)


def test_spaces_between_tokens_stay():
    tokenizer = words()
    tokens = tokenizer.encode("a bird in the hand").ids
    assert tokenizer.decode(tokens[1:2]) == "bird", "alone it has lost its space"
    assert [*spell_pieces(tokenizer, tokens[:2], tokens[2:])] == [" in", " the", " hand", ""]
    assert [*spell_pieces(tokenizer, (), tokens)] == ["a", " bird", " in", " the", " hand", ""]


@given(st.text("abE", max_size=30), st.lists(st.text("abE", min_size=1, max_size=4), max_size=3))
def test_an_ending_cuts_before_the_first_word(text, words):
    ending = Ending(words)
    told = "".join(ending.cut(text))
    # Letter by letter, the word that is complete first decides.
    ends = [(text.find(word) + len(word), text.find(word)) for word in words if word in text]
    expected = text[: min(start for end, start in ends if end == min(ends)[0])] if ends else text
    assert told == expected
    assert ending.is_reached == bool(ends)


def test_an_ending_holds_back_no_more_than_it_must():
    ending, pieces = Ending(["\n\n", "END"]), ("a\n", "b", "EN", "d", "\n", "\nc")
    assert [*ending.cut(pieces)] == ["a", "\nb", "", "ENd", "", ""]
    assert ending.is_reached
    assert [*Ending([]).cut(["all"])] == ["all", ""]
