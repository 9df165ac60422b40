"""Attention between words: which piece belongs where, and what is summed."""

import numpy as np

from refusals import assert_refused
from regard.inspection.words import join_pieces

TEXT = "It's unseen, the sea"
TOKENS = ["[CLS]", "it", "'", "s", "un", "##seen", ",", "Ġthe", "sea", "[SEP]"]
OFFSETS = [(0, 0), (0, 2), (2, 3), (3, 4), (5, 7), (7, 11), (11, 12), (12, 16), (17, 20), (0, 0)]


def draw(*shape):
    weights = np.random.default_rng(0).random(shape)
    return weights / weights.sum(-1, keepdims=True)


def test_pieces_are_summed_as_keys_and_averaged_as_queries():
    weights = draw(2, 3, 10, 10)
    reading = join_pieces(weights, TOKENS, OFFSETS, TEXT)
    assert reading.words == ("[CLS]", "It", "'", "s", "unseen", ",", "the", "sea", "[SEP]")
    assert np.flatnonzero(reading.is_special).tolist() == [0, 8]
    found = reading.weights
    assert found.shape == (2, 3, 9, 9)
    np.testing.assert_allclose(found.sum(-1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(found[..., 4, 7], weights[..., 4:6, 8].mean(-1), rtol=1e-12)
    np.testing.assert_allclose(found[..., 7, 4], weights[..., 8, 4:6].sum(-1), rtol=1e-12)
    # Words of the same unit that specials part stay apart: a token of no text between two pieces.
    reading = join_pieces(draw(3, 3), ["a", "<x>", "a"], [(0, 1), (1, 1), (2, 3)], "a a")
    assert reading.words == ("a", "<x>", "a")


def test_the_word_that_is_read_most_is_neither_special_nor_itself():
    weights = np.zeros((1, 2, 4, 4))
    weights[0, :, 1] = [[0.5, 0.3, 0.05, 0.15], [0.5, 0.3, 0.2, 0.0]]
    reading = join_pieces(weights, ["<s>", "a", "b", "c"], [(0, 0), (0, 1), (2, 3), (4, 5)], "a b c")
    best, share = reading.most_read(1)
    assert best.tolist() == [[3, 2]]
    np.testing.assert_allclose(share, [[0.15, 0.2]])
    best, share = join_pieces(np.ones((1, 1, 1)), ["a"], [(0, 1)], "a").most_read(0)
    assert (best.tolist(), share.tolist()) == ([-1], [0.0]), "a lone word reads nobody"
    # A weight that is no number stays in its words.
    weights = draw(4, 4)
    weights[0, 0] = np.nan
    found = join_pieces(weights, list("abcd"), [(0, 1), (2, 3), (4, 5), (5, 6)], "a b cd").weights
    assert np.argwhere(np.isnan(found)).tolist() == [[0, 0]]


def test_words_are_found_in_their_case_first_and_hostile_text_is_only_text():
    reading = join_pieces(draw(4, 4), ["i", "b", "I", "B"], [(0, 1), (2, 3), (4, 5), (6, 7)], "i b I B")
    assert [reading.find(word) for word in ("i", "I", "b", "B")] == [0, 2, 1, 3]
    reading = join_pieces(draw(2, 2), ["It", "is"], [(0, 2), (3, 5)], "It is")
    assert reading.find("it") == 0
    assert_refused(
        (lambda: reading.find("was"), "word: expected one of It, is; got 'was'"),
        (lambda: join_pieces(draw(2, 2), ["a"], [(0, 1)], "a"), r"one per row .* of weights \(2, 2\)"),
        (lambda: join_pieces(draw(1, 1), ["a"], [(2, 4)], "a b"), r"places in a text of 3, got \(2, 4\)"),
    )
    text = "<b>\u202eoops\n</script> 🧑‍🚀"
    offsets = [(index, index + 1) for index in range(len(text))]
    reading = join_pieces(draw(len(text), len(text)), list(text), offsets, text)
    assert "".join(reading.words) == text
    assert "script" in reading.words
