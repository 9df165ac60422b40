"""Speculative decoding against the model alone: the same tokens, or tokens of the same law."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from economy import mostly_slow
from regard.models import Sampling, generate, speculation, stream
from regard.models.sampling import row_keys
from test_generation import CONFIGS, GREEDY, PROMPTS, SOURCE, START, WARM, N, build, build_pair
from test_sampling import adjust_plainly, softmax

TINY, LONG, AHEAD = 5, 3, 2
SETTINGS = {
    "plain": Sampling(temperature=1.2),
    "all": Sampling(temperature=1.0, top_k=4, top_p=0.95, repetition_penalty=8.0),
}


def disturb(model, scale, seed=1):
    """A draft that agrees with a model here and there."""
    draft, rng = nnx.clone(model), np.random.default_rng(seed)
    state = nnx.state(draft, nnx.Param)
    noise = jax.tree.map(lambda x: jnp.asarray(scale * rng.normal(size=x.shape), x.dtype), state)
    nnx.update(draft, jax.tree.map(jnp.add, state, noise))
    return draft


def logits_after(model):
    """Logits after a text, in float64."""
    run = nnx.jit(lambda model, tokens: model(tokens))

    @functools.cache
    def logits(text):
        padded = np.pad(text, (0, 8 - len(text)))[None].astype(np.int32)
        return np.asarray(run(model, padded)[0, len(text) - 1], np.float64)

    return logits


def assert_same(written, plain):
    assert written.rows() == plain.rows()
    for name in ("tokens", "lengths", "finished", "healthy"):
        np.testing.assert_array_equal(getattr(written, name), getattr(plain, name))
    np.testing.assert_allclose(written.log_probabilities, plain.log_probabilities, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", mostly_slow(CONFIGS, "learned"))
@pytest.mark.parametrize("draft_tokens", mostly_slow([1, 3], 3))
def test_greedy_tokens_are_those_of_the_model_alone(name, draft_tokens):
    model, most = build(**CONFIGS[name]), 13
    draft = disturb(model, 0.1)
    plain = generate(model, PROMPTS, max_tokens=most)
    written = generate(model, PROMPTS, max_tokens=most, draft=draft, draft_tokens=draft_tokens)
    assert_same(written, plain)
    assert written.reads.min() < most
    assert name not in ("learned", "windowed") or len(set(written.reads.tolist())) > 1
    stops = (plain.rows()[0][4], plain.rows()[1][7])
    settings = {"max_tokens": most, "stop_tokens": stops, "pad_token": 17, "chunk": 3}
    ended = generate(model, PROMPTS, **settings, draft=draft, draft_tokens=draft_tokens)
    assert_same(ended, generate(model, PROMPTS, **settings))
    assert ended.finished[:2].all()
    assert (ended.reads <= written.reads).all()


@pytest.mark.slow
@pytest.mark.parametrize("draft_tokens", [1, 4, 9])
def test_a_draft_that_knows_is_never_refused(draft_tokens):
    model = build()
    for settings in ({}, {"sampling": WARM, "rng": jax.random.key(3)}):
        written = generate(model, PROMPTS, max_tokens=N, draft=model, draft_tokens=draft_tokens, **settings)
        assert written.lengths.tolist() == [N] * 3
        assert written.reads.tolist() == [1 + -(-(N - 1) // (draft_tokens + 1))] * 3
    assert generate(model, PROMPTS, max_tokens=N).reads is None
    assert generate(model, PROMPTS, max_tokens=1, draft=model).reads.tolist() == [1] * 3


def find_law(target, draft, prompt, settings):
    """Probabilities of all texts, by every way that proposals may be kept and refused."""

    def share(logits, text):
        seen = np.isin(np.arange(TINY), text)
        return speculation.probabilities(jnp.asarray(logits(text), jnp.float32), settings, jnp.asarray(seen))

    law = np.zeros((TINY,) * LONG)
    open_ = [(prompt, 1.0, 0)]
    while open_:
        text, chance, place = open_.pop()
        if len(text) == len(prompt) + LONG:
            law[text[len(prompt) :]] += chance
            continue
        p = share(target, text)
        # The first token is the model's; every round ends with one of its own.
        is_own = len(text) == len(prompt) or place == AHEAD
        q = jnp.zeros_like(p) if is_own else share(draft, text)
        kept = np.asarray(q * speculation.acceptance(p, q), np.float64)
        rest = np.asarray(speculation.residual(p, q), np.float64)
        refused = (1 - kept.sum()) * rest / rest.sum()
        open_ += [((*text, v), chance * kept[v], place + 1) for v in range(TINY) if kept[v]]
        open_ += [((*text, v), chance * refused[v], 0) for v in range(TINY) if refused[v]]
    return law


def find_truth(target, prompt, settings):
    """Probabilities of all texts, by the model alone."""
    truth = np.ones((TINY,) * LONG)
    for text in itertools.product(range(TINY), repeat=LONG):
        for place in range(LONG):
            before = (*prompt, *text[:place])
            seen = np.isin(np.arange(TINY), before)
            own = adjust_plainly(target(before)[None].copy(), seen[None], settings, np.float64)
            truth[text] *= softmax(own)[0, text[place]]
    return truth


@pytest.mark.parametrize("name", mostly_slow(SETTINGS, "plain"))
def test_the_law_of_the_texts_is_that_of_the_model(name):
    settings, prompt, draws = SETTINGS[name], (1, 2), 20_000
    model = build(vocab_size=TINY)
    draft = disturb(model, 1.0)
    target, proposals = logits_after(model), logits_after(draft)
    truth = find_truth(target, prompt, settings)
    np.testing.assert_allclose(find_law(target, proposals, prompt, settings), truth, atol=1e-6)
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


@pytest.mark.slow
def test_a_draft_with_windows_forgets_nothing_that_a_refusal_brings_back():
    """It proposes what it would without a cache that moves."""
    model = build(**CONFIGS["windowed"])
    settings = {"max_tokens": 40, "draft": disturb(model, 0.2), "draft_tokens": 6}
    moved, whole = (generate(model, PROMPTS, **settings, chunk=chunk) for chunk in (1, 64))
    assert moved.rows() == whole.rows()
    assert moved.reads.tolist() == whole.reads.tolist()
    assert int(min(whole.reads)) > 1 + 40 // 7


@pytest.mark.slow
def test_windows_leave_room_for_proposals():
    model = build(**CONFIGS["windowed"])
    written = generate(model, [[1, 2, 3]], max_tokens=20, chunk=1, draft=model, draft_tokens=6)
    assert written.rows() == generate(model, [[1, 2, 3]], max_tokens=20).rows()
    assert written.reads.tolist() == [1 + 3]


@pytest.mark.slow
def test_each_row_is_what_it_is_alone():
    model = build()
    settings = {"max_tokens": N, "sampling": WARM, "draft": disturb(model, 0.1), "draft_tokens": 3}
    keys = row_keys(jax.random.key(3), 3)
    together = generate(model, PROMPTS, rng=keys, **settings)
    assert len(set(together.reads.tolist())) > 1
    for row, prompt in enumerate(PROMPTS):
        alone = generate(model, [prompt], rng=keys[row : row + 1], **settings)
        assert alone.rows()[0] == together.rows()[row]
        assert alone.reads[0] == together.reads[row]


@pytest.mark.slow
def test_an_encoder_decoder_may_have_a_draft_under_jit():
    model, lengths = build_pair(norm="pre", positions="relative"), np.array([7, 3, 0])
    settings = {"lengths": lengths, "max_tokens": N, "start_token": START}
    draft = disturb(model, 0.1)
    write = nnx.jit(lambda model, draft, source: generate(model, source, draft=draft, **settings))
    assert_same(write(model, draft, SOURCE), generate(model, SOURCE, **settings))


@pytest.mark.slow
def test_a_wide_model_may_have_a_narrow_draft(x64):
    narrow = build()
    wide = nnx.clone(narrow)
    nnx.update(wide, jax.tree.map(lambda x: x.astype(jnp.float64), nnx.state(wide, nnx.Param)))
    settings = {"max_tokens": N, "sampling": WARM, "rng": jax.random.key(1)}
    with jax.numpy_dtype_promotion("standard"):  # flax's norms of float64 ask for it
        written = generate(wide, PROMPTS, draft=narrow, draft_tokens=5, **settings)
    assert written.log_probabilities.dtype == jnp.float64
    assert written.reads.tolist() == [2] * 3


@pytest.mark.slow
def test_numbers_that_are_not_finite_end_rows_or_proposals():
    model = build(head_bias=True)
    broken = nnx.clone(model)
    broken.head.kernel[...] = broken.head.kernel[...].at[0, 0].set(jnp.nan)
    settings = {"max_tokens": N, "draft_tokens": 3}
    written = generate(model, PROMPTS, draft=broken, **settings)
    assert_same(written, generate(model, PROMPTS, max_tokens=N))
    assert written.reads.tolist() == [N] * 3
    for sampling in (Sampling(), WARM):
        ended = generate(broken, PROMPTS, draft=model, sampling=sampling, rng=jax.random.key(0), **settings)
        assert ended.reasons() == ["not finite"] * 3
        assert ended.lengths.tolist() == [0] * 3


def test_drafts_that_cannot_propose_are_refused():
    model = build()
    cache = generate(model, PROMPTS, max_tokens=1, return_cache=True).cache
    for settings, error, message in (
        ({"draft": build(vocab_size=TINY)}, ValueError, "draft: expected the model's vocabulary, 19 tokens"),
        ({"draft": build_pair()}, TypeError, "draft: expected a Decoder, as model is; got EncoderDecoder"),
        ({"draft_tokens": 0}, ValueError, "draft_tokens: expected an integer of at least 1, got 0"),
        ({"cache": cache}, ValueError, "cache: expected one of a call with a draft, whose own cache it has"),
    ):
        with pytest.raises(error, match=message):
            generate(model, PROMPTS, max_tokens=3, **{"draft": model, **settings})


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_stream_with_a_draft_gives_the_same_tokens(sampling):
    model = build()
    settings = {"max_tokens": N, "draft": disturb(model, 0.1), "draft_tokens": 3, "stop_tokens": (1, 7)}
    settings |= {"sampling": sampling, "rng": jax.random.key(7)}
    whole = generate(model, PROMPTS, **settings)
    for burst in (1, 5):
        parts = list(stream(model, PROMPTS, burst=burst, **settings))
        assert [[token for part in parts for token in part[row]] for row in range(3)] == whole.rows()
        assert all(any(part) for part in parts)
        assert burst > 1 or len(parts) == whole.reads.max(), (
            "handed over after each time that the model reads"
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "windowed"])
def test_a_conversation_goes_on_with_a_draft(name):
    """Both read what is new alone: texts are those of the model, and no guess of itself is refused."""
    model = build(**CONFIGS[name])
    draft = disturb(model, 0.1)
    for helper in (draft, model):
        settings = {"max_tokens": N, "draft": helper, "draft_tokens": 3}
        stops = (generate(model, PROMPTS, max_tokens=N).rows()[0][2],)
        written = generate(model, PROMPTS, **settings, stop_tokens=stops, capacity=48, return_cache=True)
        more = [[8, 2], [], [5, 5, 7]]
        again = generate(model, more, **settings, cache=written.cache)
        texts = [[*one, *row, *end] for one, row, end in zip(PROMPTS, written.rows(), more, strict=True)]
        assert again.rows() == generate(model, texts, max_tokens=N).rows()
        assert again.reads.tolist() == generate(model, texts, **settings).reads.tolist()
    assert again.reads.tolist() == [1 + -(-(N - 1) // 4)] * 3
    alone = generate(model, more, max_tokens=N, cache=written.cache, return_cache=True)
    assert alone.rows() == again.rows()
    assert alone.cache.draft is None
    if name == "windowed":
        with pytest.raises(ValueError, match="draft_tokens: expected at most 15, as many as windows"):
            generate(model, more, **settings | {"max_tokens": 20, "draft_tokens": 16}, cache=written.cache)
        with pytest.raises(ValueError, match="draft_tokens: expected at most 3, as many as windows"):
            generate(model, more, **settings | {"draft_tokens": 4}, cache=written.cache)
