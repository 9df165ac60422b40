"""Beam search against every text there is, and against the same search in plain Python."""

import itertools

import numpy as np
import pytest
from flax import nnx

from regard.models import beam_search, generate
from test_generation import PROMPTS, SOURCE, START, N, build, build_pair, ends_at
from test_sampling import softmax


@pytest.fixture(scope="module")
def model():
    return build()


def log_softmax(row):
    return np.log(softmax(np.asarray(row, np.float64)))


def gains_of_all(model, vocab_size, size):
    """Log-probabilities after every text of up to `size` tokens, read at once."""
    texts = np.array([*itertools.product(range(vocab_size), repeat=size)], np.int32)
    logs, gains = log_softmax(nnx.jit(lambda model: model(texts))(model)), {}
    for text, own in zip(texts.tolist(), logs, strict=True):
        gains |= {tuple(text[: place + 1]): row for place, row in enumerate(own)}
    return gains.__getitem__


def find_all(gains, prompt, vocab_size, length, stops, penalty):
    found = []
    for size in range(1, length + 1):
        for text in itertools.product(range(vocab_size), repeat=size):
            ends = [token in stops for token in text]
            if any(ends[:-1]) or not (ends[-1] or size == length):
                continue
            total = sum(gains((*prompt, *text[:t]))[text[t]] for t in range(size))
            found.append((total / size**penalty, list(text)))
    return sorted(found, reverse=True)


def search_slowly(gains, prompt, width, length, stops, penalty):
    """The search as its docstring tells it."""
    live, ended = [(0.0, ())], []
    for step in range(1, length + 1):
        every = ((total, text, enumerate(gains((*prompt, *text)))) for total, text in live)
        trials = [(total + gain, (*text, token)) for total, text, own in every for token, gain in own]
        trials = sorted(trials, reverse=True)
        aside = [(total / step**penalty, text) for total, text in trials[:width] if ends_at(text, stops)]
        ended = sorted([*ended, *aside], reverse=True)[:width]
        live = [trial for trial in trials if not ends_at(trial[1], stops)][:width]
        hope = max(live[0][0] / size**penalty for size in range(min(step + 1, length), length + 1))
        if len(ended) == width and ended[-1][0] >= hope:
            break
    else:
        ended = sorted([*ended, *((total / length**penalty, text) for total, text in live)], reverse=True)
    return [(score, list(text)) for score, text in ended[:width]]


def test_beams_that_change_places_take_their_caches_along():
    """From every prompt of two tokens, to fewer texts than there are."""
    vocab_size, length, stops = 3, 5, (1, (2, 0))
    model = build(vocab_size=vocab_size)
    gains = gains_of_all(model, vocab_size, 2 + length - 1)
    prompts = [*itertools.product(range(vocab_size), repeat=2)]
    for width in (2, 1):
        found = beam_search(model, prompts, num_beams=width, max_tokens=length, stop_tokens=stops)
        for row, prompt in enumerate(prompts):
            expected = search_slowly(gains, prompt, width, length, stops, 1.0)
            assert found.rows()[row] == [text for _, text in expected]
            np.testing.assert_allclose(found.scores[row], [score for score, _ in expected], rtol=1e-5)
            assert found.lengths[row].tolist() == [len(text) for _, text in expected]
            assert found.finished[row].tolist() == [ends_at(text, stops) for _, text in expected]


@pytest.mark.slow
def test_a_search_goes_on_from_a_conversation(model):
    written = generate(model, PROMPTS, max_tokens=3, capacity=48, return_cache=True)
    more, settings = [[8, 2], [], [5]], {"num_beams": 3, "max_tokens": N, "stop_tokens": (1, 7)}
    texts = [[*one, *row, *end] for one, row, end in zip(PROMPTS, written.rows(), more, strict=True)]
    for _ in range(2):  # the cache stays as it is
        found = beam_search(model, more, cache=written.cache, **settings)
        assert found.rows() == beam_search(model, texts, **settings).rows()


@pytest.mark.slow
def test_an_encoder_decoders_memory_follows_its_beams():
    model, lengths = build_pair(), np.array([7, 3, 5])
    settings = {"num_beams": 3, "max_tokens": N, "start_token": START}
    found = beam_search(model, SOURCE, lengths=lengths, **settings)
    run = nnx.jit(lambda model, target, source, length: model(source, target, source_lengths=length))
    for row in range(len(SOURCE)):

        def gains(text, row=slice(row, row + 1)):
            target = np.pad(text, (0, 1 + N - len(text)))[None].astype(np.int32)
            return log_softmax(run(model, target, SOURCE[row], lengths[row])[0, len(text) - 1])

        assert found.rows()[row] == [text for _, text in search_slowly(gains, (START,), 3, N, (), 1.0)]
    assert len(np.unique(np.round(found.scores[:, 0], 3))) == 3, "the sources matter"


def test_impossible_searches_are_refused(model):
    for change, message in (
        ({"num_beams": 0}, "num_beams: expected an integer of at least 1, got 0"),
        ({"num_beams": 10**9}, r"num_beams: expected at most \d+, as int32 counts"),
        ({"length_penalty": float("inf")}, "length_penalty: expected a finite number, got inf"),
    ):
        with pytest.raises(ValueError, match=message):
            beam_search(model, PROMPTS, **{"num_beams": 2, "max_tokens": N, **change})
