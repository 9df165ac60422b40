"""Speculative decoding against the model alone: the same tokens, or tokens of the same law."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import test_generation
from layer_oracle import widen
from regard.models import Sampling, generate, stream
from test_generation import PROMPTS, WINDOWED, N, build, build_pair, cut_at, read_slowly, spoil, write_rows
from test_sampling import adjust_plainly, softmax

TINY, LONG, AHEAD = 5, 3, 2


def disturb(model, scale, seed=1):
    draft, rng = nnx.clone(model), np.random.default_rng(seed)
    state = nnx.state(draft, nnx.Param)
    noisy = lambda x: np.asarray(x + scale * rng.normal(size=x.shape), x.dtype)
    nnx.update(draft, jax.tree.map(noisy, state))
    return draft


MOST = 13
SPECULATIVE = {"max_tokens": MOST, "draft_tokens": 3, "chunk": 1}


@functools.cache
def write_alone():
    """A model with windows, a draft of it, the rows and scores of the model alone, and where they stop."""
    model = build(**WINDOWED)
    rows, scores = write_rows(model, count=MOST)
    stops = (rows[2][6],)
    rows = [cut_at(row, stops) for row in rows]
    assert min(map(len, rows)) < len(rows[2]) < max(map(len, rows)) == MOST
    return model, disturb(model, 0.2, 2), stops, rows, scores


def count_reads(draft, prompt, row):
    """How often a model reads that writes this row, with a draft that was told all of it before."""
    logits, text, reads = read_slowly(draft), list(prompt), 1
    text += row[:1]
    while len(text) < len(prompt) + len(row):
        reads += 1
        for proposed in range(4):  # three tokens of the draft, and one of the model
            place = len(text) - len(prompt)
            guess = int(np.argmax(logits(tuple(text)))) if proposed < 3 and place < len(row) else None
            text += row[place : place + 1]
            if guess != text[-1]:
                break
    return reads


def test_greedy_tokens_are_those_of_the_model_alone():
    """The model reads as often as the draft is right, whose cache keeps nothing that was refused."""
    model, draft, stops, rows, scores = write_alone()
    least = [1 + -(-(len(row) - 1) // 4) for row in rows]
    for helper in (draft, model):
        written = generate(model, PROMPTS, **SPECULATIVE, draft=helper, stop_tokens=stops, pad_token=17)
        test_generation.check_written(written, rows, scores, stops, pad_token=17)
        reads = [count_reads(helper, *pair) for pair in zip(PROMPTS, rows, strict=True)]
        assert written.reads.tolist() == reads
        assert (reads == least) == (helper is model), "only a draft that knows is never refused"


def test_a_stream_with_a_draft_gives_the_same_tokens():
    model, draft, stops, rows, _ = write_alone()
    most = max(count_reads(draft, *pair) for pair in zip(PROMPTS, rows, strict=True))
    for burst in (1, 5):
        parts = list(stream(model, PROMPTS, burst=burst, **SPECULATIVE, draft=draft, stop_tokens=stops))
        assert [[token for part in parts for token in part[row]] for row in range(3)] == rows
        assert all(any(part) for part in parts)
        assert burst > 1 or len(parts) == most, "handed over after each time that the model reads"


def test_numbers_that_are_not_finite_end_rows_or_proposals():
    model, draft, stops, rows, _ = write_alone()
    written = generate(model, PROMPTS, **SPECULATIVE, draft=spoil(draft), stop_tokens=stops)
    assert written.rows() == rows
    assert written.reads.tolist() == [*map(len, rows)]
    ended = generate(spoil(model), PROMPTS, **SPECULATIVE, draft=draft, stop_tokens=stops)
    assert ended.reasons() == ["not finite"] * 3
    assert ended.lengths.tolist() == [0] * 3


def find_truth(target, prompt, settings):
    truth = np.ones((TINY,) * LONG)
    for text in itertools.product(range(TINY), repeat=LONG):
        for place in range(LONG):
            before = (*prompt, *text[:place])
            seen = np.isin(np.arange(TINY), before)
            own = adjust_plainly(target(before)[None].copy(), seen[None], settings, np.float64)
            truth[text] *= softmax(own)[0, text[place]]
    return truth


def test_the_law_of_the_texts_is_that_of_the_model():
    settings = Sampling(temperature=1.0, top_k=4, top_p=0.95, repetition_penalty=8.0)
    prompt, draws = (1, 2), 20_000
    model = build(vocab_size=TINY)
    draft = disturb(model, 1.0)
    target, proposals = read_slowly(model), read_slowly(draft)
    truth = find_truth(target, prompt, settings)
    # The draft alone would write other texts.
    assert np.abs(find_truth(proposals, prompt, settings) - truth).sum() > 0.1

    prompts = np.broadcast_to(np.array(prompt, np.int32), (draws, len(prompt)))
    options = {"max_tokens": LONG, "sampling": settings, "rng": jax.random.key(7)}
    written = generate(model, prompts, **options, draft=draft, draft_tokens=AHEAD)
    counts = np.zeros_like(truth)
    np.add.at(counts, tuple(np.asarray(written.tokens).T), 1)
    assert counts[truth == 0].sum() == 0
    assert set(written.reads.tolist()) == {2, 3}
    # Pearson's statistic, rare texts together; the bound is about 5 sigma.
    for other, fits in ((truth, True), (find_truth(proposals, prompt, settings), False)):
        rare = other * draws < 5
        expected = draws * np.append(other[~rare], other[rare].sum() + 1e-9)
        found = np.append(counts[~rare], counts[rare].sum())
        statistic, degrees = np.sum((found - expected) ** 2 / expected), found.size - 1
        assert (statistic < degrees + 5 * np.sqrt(2 * degrees)) == fits


def test_models_of_other_kinds_and_dtypes_may_have_a_draft(x64):
    narrow, pair = build(), build_pair()
    wide = widen(nnx.clone(narrow))
    write = lambda *given, **more: jax.eval_shape(lambda: generate(*given, max_tokens=N, **more))
    with jax.numpy_dtype_promotion("standard"):  # flax's norms of float64 ask for it
        warm = {"sampling": Sampling(temperature=1.5), "rng": jax.random.key(1)}
        written = write(wide, PROMPTS, draft=narrow, **warm)
    assert written.log_probabilities.dtype == jnp.float64
    assert write(pair, PROMPTS, draft=pair, start_token=16).reads.shape == (3,)


def test_drafts_that_cannot_propose_are_refused():
    model = build()
    cache = jax.eval_shape(lambda: generate(model, PROMPTS, max_tokens=1, return_cache=True)).cache
    for settings, message in (
        ({"draft": build(vocab_size=TINY)}, "draft: expected the model's vocabulary, 19 tokens"),
        ({"draft": build_pair()}, "draft: expected a Decoder, as model is; got EncoderDecoder"),
        ({"draft_tokens": 0}, "draft_tokens: expected an integer of at least 1, got 0"),
        ({"cache": cache}, "cache: expected one of a call with a draft, whose own cache it has"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            generate(model, PROMPTS, max_tokens=3, **{"draft": model, **settings})


@pytest.mark.slow
def test_a_conversation_goes_on_with_a_draft():
    """Both read what is new alone: texts are those of the model, and no guess of itself is refused."""
    model, draft, stops, *_ = write_alone()
    more = [[8, 2], [], [5, 5, 7]]
    for helper in (draft, model):
        settings = {"max_tokens": N, "draft": helper, "draft_tokens": 3}
        first = {**settings, "max_tokens": 2, "capacity": 48}  # fewer than the draft proposes later
        written = generate(model, PROMPTS, **first, stop_tokens=stops, return_cache=True)
        again = generate(model, more, **settings, cache=written.cache)
        if helper is draft:
            texts = [[*one, *row, *end] for one, row, end in zip(PROMPTS, written.rows(), more, strict=True)]
            assert again.rows() == generate(model, texts, max_tokens=N).rows()
            assert again.reads.tolist() == generate(model, texts, **settings).reads.tolist()
    assert again.reads.tolist() == [1 + -(-(N - 1) // 4)] * 3
    alone = generate(model, more, max_tokens=N, cache=written.cache, return_cache=True)
    assert alone.rows() == again.rows()
    assert alone.cache.draft is None
    with pytest.raises(ValueError, match="draft_tokens: expected at most 3, as many as windows"):
        generate(model, more, max_tokens=N, draft_tokens=4, draft=model, cache=written.cache)
