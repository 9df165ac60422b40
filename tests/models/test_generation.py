"""Writing against the slow way: a full forward pass for every token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from economy import mostly_slow
from layer_oracle import draw, randomize
from plain import assert_as_exact
from regard.models import Decoder, Encoder, EncoderDecoder, Sampling, TransformerConfig, generate, stream
from regard.models.sampling import row_keys
from test_sampling import adjust_plainly

V, N, MAX = 19, 7, 23
PROMPTS = [[3, 1, 4, 1, 5], [2], [7, 18, 2, 8, 0, 1, 7, 8, 2, 8, 3]]
SOURCE = np.array([[1, 2, 3, 4, 5, 6, 7], [15, 14, 13, 12, 11, 10, 9], [3, 1, 4, 1, 5, 9, 2]], np.int32)
START = 16
GREEDY = Sampling()
WARM = Sampling(temperature=1.5, top_k=11, top_p=0.95, min_p=0.001, repetition_penalty=1.3)

CONFIGS = {
    "sinusoidal": {},
    "learned": {"positions": "learned", "max_length": MAX},
    "grouped": {"positions": "none", "num_heads": 4, "head_dim": 5, "num_key_heads": 2},
    "llama": {
        "positions": "rotary",
        "num_heads": 4,
        "head_dim": 6,
        "num_key_heads": 2,
        "norm_kind": "rms",
        "gated": True,
        "attention_bias": False,
        "feed_forward_bias": False,
        "tied_output": True,
        "query_key_norm": True,
    },
    "windowed": {"positions": "rotary", "head_dim": 6, "windows": (2, None), "num_layers": 2, "sinks": True},
    "relative": {"positions": "relative", "relative_buckets": 8, "relative_max_distance": 11},
}


def prepare(model):
    """Loud embeddings and no preferences of its own: tokens then differ from step to step."""
    model = randomize(model)
    for _, layer in nnx.iter_modules(model):
        if isinstance(layer, nnx.Embed):
            layer.embedding[...] = 4 * layer.embedding[...]
        if isinstance(layer, nnx.Linear | nnx.LayerNorm) and layer.bias is not None:
            layer.bias[...] = jnp.zeros_like(layer.bias[...])
    return model


def configure(**options):
    options = {"num_heads": 3, "num_layers": 1, "vocab_size": V, **options}
    return TransformerConfig(d_model=12, d_ff=13, **options)


@functools.cache
def build(**options):
    """One model for all tests that ask alike: who changes it clones it."""
    return prepare(Decoder(configure(**options), rngs=nnx.Rngs(0)))


@functools.cache
def build_pair(**options):
    return prepare(EncoderDecoder(configure(**options), target_vocab_size=V, rngs=nnx.Rngs(0)))


@nnx.jit
def read_whole(model, tokens):
    return model(tokens)


def read_slowly(model):
    """Logits after a text, by reading all of it; noise behind it must not matter."""

    def logits(text):
        noise = np.random.default_rng(len(text)).integers(0, V, MAX - len(text))
        read = read_whole(model, np.concatenate([text, noise])[None].astype(np.int32))
        return np.asarray(read)[0, len(text) - 1]

    return logits


def write_slowly(logits, prompt, count, sampling=GREEDY, key=None):
    """Tokens and their log-probabilities, one forward pass each."""
    text, scores = list(prompt), []
    for step in range(count):
        row = np.asarray(logits(text), np.float64)
        adjusted = row
        if not sampling.greedy:
            seen = np.isin(np.arange(V), text)
            noise = jax.random.gumbel(jax.random.fold_in(key, step), (V,), jnp.float32)
            adjusted = adjust_plainly(row[None], seen[None], sampling, np.float64)[0] + np.asarray(noise)
        best = np.sort(adjusted)
        assert best[-1] - best[-2] > 1e-4, "no tie that a rounding could turn"
        text.append(int(np.argmax(adjusted)))
        scores.append(row[text[-1]] - row.max() - np.log(np.exp(row - row.max()).sum()))
    return text[len(prompt) :], scores


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.mark.parametrize("name", mostly_slow(CONFIGS, "llama"))
def test_writing_is_a_forward_pass_per_token(name):
    model = build(**CONFIGS[name])
    sampling, rng = GREEDY if name == "learned" else WARM, jax.random.key(1)
    written = generate(model, PROMPTS, max_tokens=N, sampling=sampling, rng=rng)
    assert written.tokens.shape == (3, N)
    assert written.tokens.dtype == jnp.int32
    logits, rows = read_slowly(model), written.rows()
    for row, prompt, key in zip(rows, PROMPTS, row_keys(rng, 3), strict=True):
        tokens, scores = write_slowly(logits, prompt, N, sampling, key)
        assert row == tokens
        np.testing.assert_allclose(written.log_probabilities[rows.index(row)], scores, rtol=1e-4, atol=1e-4)
    assert len(np.unique(np.asarray(written.tokens))) > 5
    assert written.reasons() == ["max_tokens"] * 3


@pytest.mark.slow
def test_log_probabilities_are_the_models_own(x64):
    small = build()
    wide = nnx.merge(*jax.tree.map(_widen, nnx.split(small)))
    written = generate(small, PROMPTS, max_tokens=N, sampling=WARM, rng=jax.random.key(1))
    rows = written.rows()
    assert written.log_probabilities.dtype == jnp.float32
    with jax.numpy_dtype_promotion("standard"):  # flax's norms of float64 ask for it
        truth, plain = (
            [_follow(logits, *texts) for texts in zip(PROMPTS, rows, strict=True)]
            for logits in map(read_slowly, (wide, small))
        )
        exact = generate(wide, PROMPTS, max_tokens=N, sampling=WARM, rng=jax.random.key(1))
    assert_as_exact(written.log_probabilities, truth, plain)
    assert exact.log_probabilities.dtype == jnp.float64
    assert exact.rows() == rows


def _widen(leaf):
    return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _follow(logits, prompt, row):
    """Log-probabilities of given tokens, in the dtype of the logits."""
    scores = []
    for place, token in enumerate(row):
        own = np.asarray(logits([*prompt, *row[:place]]))
        own = own - own.max()
        scores.append(own[token] - np.log(np.exp(own).sum()))
    return scores


@pytest.mark.slow
def test_a_row_is_what_it_is_alone(model):
    keys = row_keys(jax.random.key(3), 3)
    together = generate(model, PROMPTS, max_tokens=N, sampling=WARM, rng=keys)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(model, [prompt], max_tokens=N, sampling=WARM, rng=keys[row : row + 1])
        assert alone.rows()[0] == together.rows()[row]
    other = [PROMPTS[0], [9, 9], [1]]
    changed = generate(model, other, max_tokens=N, sampling=WARM, rng=jax.random.key(3))
    assert changed.rows()[0] == together.rows()[0]
    assert changed.rows() != together.rows()
    # An array is the same request, whatever its padding holds.
    padded = np.full((3, 16), 99)
    for row, prompt in enumerate(PROMPTS):
        padded[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    array = generate(model, padded, lengths=lengths, max_tokens=N, sampling=WARM, rng=keys)
    assert array.rows() == together.rows()


@pytest.mark.slow
def test_prompts_may_be_read_in_pieces(model):
    whole = generate(model, PROMPTS, max_tokens=N)
    assert generate(model, PROMPTS, max_tokens=N, chunk=3).rows() == whole.rows()
    even = generate(model, SOURCE, max_tokens=N)
    assert even.rows() == generate(model, SOURCE.tolist(), max_tokens=N).rows()
    assert generate(model, SOURCE, max_tokens=N, chunk=2).rows() == even.rows()


@pytest.mark.slow
def test_a_start_token_stands_before_every_prompt(model):
    written = generate(model, [[3, 1], [], [2]], max_tokens=N, start_token=5)
    assert written.rows() == generate(model, [[5, 3, 1], [5], [5, 2]], max_tokens=N).rows()
    empty = generate(model, np.zeros((1, 0), np.int32), max_tokens=N, start_token=5)
    assert empty.rows() == [written.rows()[1]]


def test_stop_tokens_end_rows_and_change_no_other(model):
    free = generate(model, PROMPTS, max_tokens=N)
    first, second, _ = free.rows()
    stops = (first[2], second[4])
    written = generate(model, PROMPTS, max_tokens=N, stop_tokens=stops, pad_token=18)
    cut = [_cut_at(row, stops) for row in free.rows()]
    assert written.rows() == cut
    assert len({len(row) for row in cut}) > 1
    assert min(len(row) for row in cut) <= 3
    for row, tokens in enumerate(np.asarray(written.tokens)):
        length = len(cut[row])
        assert np.all(tokens[length:] == 18)
        assert np.all(np.asarray(written.log_probabilities)[row, length:] == 0)
        np.testing.assert_array_equal(
            written.log_probabilities[row, :length], free.log_probabilities[row, :length]
        )
        ended = cut[row][-1] in stops
        assert bool(written.finished[row]) == ended
        assert written.reasons()[row] == ("stop token" if ended else "max_tokens")


def _cut_at(row, stops):
    ends = [place for place, token in enumerate(row) if token in stops]
    return row[: ends[0] + 1] if ends else row


@pytest.mark.slow
def test_writing_stops_when_all_rows_have_ended(model, monkeypatch):
    steps, predict = [], Decoder.predict

    def count(self, hidden):
        jax.debug.callback(lambda: steps.append(1))
        return predict(self, hidden)

    monkeypatch.setattr(Decoder, "predict", count)
    most = N + 2  # no other test has this program
    row = generate(model, PROMPTS[:1], max_tokens=most, stop_tokens=(V - 1,)).rows()[0]
    jax.effects_barrier()
    assert len(steps) == len(row)
    steps.clear()
    generate(model, PROMPTS[:1], max_tokens=most, stop_tokens=row[2:3])
    jax.effects_barrier()
    assert len(steps) == row.index(row[2]) + 1 < most


@pytest.mark.parametrize("burst", [1, 3, N + 5])
def test_a_stream_gives_the_same_tokens(model, burst):
    settings = {"max_tokens": N, "sampling": WARM, "rng": jax.random.key(7)}
    settings["stop_tokens"] = generate(model, PROMPTS, **settings).rows()[1][2:3]
    whole = generate(model, PROMPTS, **settings)
    parts = list(stream(model, PROMPTS, burst=burst, **settings))
    joined = [[token for part in parts for token in part[row]] for row in range(3)]
    assert joined == whole.rows()
    longest = int(whole.lengths.max())
    assert len(parts) == 1 + -(-(longest - 1) // burst)
    assert all(len(row) <= max(burst, 1) for part in parts for row in part)


def test_a_stream_ends_early_and_begins_at_once(model):
    assert list(stream(model, PROMPTS[:1], max_tokens=1)) == [
        [row] for row in generate(model, PROMPTS[:1], max_tokens=1).rows()
    ]
    with pytest.raises(ValueError, match="burst: expected an integer of at least 1, got 0"):
        stream(model, PROMPTS, max_tokens=3, burst=0)
    with pytest.raises(ValueError, match="max_tokens: expected an integer of at least 1, got 0"):
        stream(model, PROMPTS, max_tokens=0)


def test_equal_shapes_compile_nothing_anew(monkeypatch):
    traces, read = [], Decoder.read

    def count(self, *args, **kwargs):
        traces.append(1)
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Decoder, "read", count)
    settings = {"max_tokens": N + 1, "rng": jax.random.key(0), "stop_tokens": (1,)}
    generate(build(), PROMPTS, sampling=WARM, **settings)
    first = len(traces)
    assert first > 0
    other = nnx.clone(build())
    other.head.kernel[...] = 2 * other.head.kernel[...]
    cool = Sampling(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.1)
    settings |= {"rng": jax.random.key(1), "stop_tokens": (5,)}
    generate(other, [[1, 2], [3, 4, 5], [6]], sampling=cool, pad_token=3, **settings)
    list(stream(build(), PROMPTS, sampling=cool, burst=2, **settings))
    assert len(traces) == first


def test_a_capacity_makes_shapes_equal(model):
    with pytest.raises(
        ValueError, match=r"capacity: expected at least 17, a place .*got 16\. None chooses it"
    ):
        generate(model, PROMPTS, max_tokens=N, capacity=16)
    for settings in ({"max_tokens": 2**31}, {"max_tokens": N, "capacity": 2**40}):
        with pytest.raises(ValueError, match="capacity: expected at most 2147483647 places, which int32"):
            generate(model, PROMPTS, **settings)
    written = generate(model, PROMPTS, max_tokens=N, capacity=17)
    assert written.rows() == generate(model, PROMPTS, max_tokens=N).rows()


def test_not_a_number_is_no_token(model):
    broken = nnx.clone(build())
    broken.head.kernel[...] = broken.head.kernel[...].at[0, 0].set(jnp.nan)
    for sampling in (GREEDY, WARM):
        rng = jax.random.key(0)
        written = generate(broken, PROMPTS, max_tokens=N, sampling=sampling, rng=rng)
        np.testing.assert_array_equal(written.tokens[:, 0], -1)
        np.testing.assert_array_equal(written.tokens[:, 1:], 0)
        assert written.lengths.tolist() == [0, 0, 0]
        assert written.rows() == [[], [], []]
        assert written.reasons() == ["not finite"] * 3
        assert not bool(written.finished.any())
    assert list(stream(broken, PROMPTS, max_tokens=N)) == [[[], [], []]]
    # Under jit a wrong token cannot be refused; it spoils its own row only.
    wrong = SOURCE.copy()
    wrong[1, 2] = V
    write = nnx.jit(lambda model, prompts: generate(model, prompts, max_tokens=N))
    spoilt, whole = write(model, wrong), write(model, SOURCE)
    assert spoilt.healthy.tolist() == [True, False, True]
    assert spoilt.rows()[::2] == whole.rows()[::2]
    assert whole.rows() == generate(model, SOURCE, max_tokens=N).rows()


@pytest.mark.slow
def test_dropout_is_off_and_the_mode_stays():
    model = nnx.clone(build(dropout_rate=0.5, attention_dropout_rate=0.5, num_layers=1))
    written = generate(model, PROMPTS, max_tokens=N)
    assert written.rows() == generate(model, PROMPTS, max_tokens=N).rows()
    tokens = np.array(PROMPTS[:1])
    assert not np.array_equal(model(tokens), model(tokens)), "still in training mode"
    model.eval()
    assert written.rows()[0] == write_slowly(read_slowly(model), PROMPTS[0], N)[0]


@pytest.mark.parametrize(
    ("norm", "positions", "sampling"),
    [("post", "sinusoidal", GREEDY), ("pre", "relative", WARM)],
)
@pytest.mark.slow
def test_an_encoder_decoder_writes_beside_its_source(norm, positions, sampling):
    model, lengths = build_pair(norm=norm, positions=positions), np.array([7, 3, 0])
    run = nnx.jit(lambda model, target, rows, lengths: model(rows, target, source_lengths=lengths))
    settings = {"max_tokens": N, "start_token": START, "sampling": sampling, "rng": jax.random.key(2)}
    written = generate(model, SOURCE, lengths=lengths, **settings)
    for row, key in enumerate(row_keys(settings["rng"], 3)):

        def logits(text, row=row):
            target = np.pad(text, (0, N - len(text)))[None].astype(np.int32)
            read = run(model, target, SOURCE[row : row + 1], lengths[row : row + 1])
            return np.asarray(read)[0, len(text) - 1]

        assert written.rows()[row] == write_slowly(logits, [START], N, sampling, key)[0]
    assert len(np.unique(np.asarray(written.tokens))) > 2
    sources = [row[:length].tolist() for row, length in zip(SOURCE, lengths, strict=True)]
    assert generate(model, sources, **settings).rows() == written.rows()


@pytest.mark.slow
def test_sources_may_be_vectors_and_are_read_once(monkeypatch):
    model = build_pair(vocab_size=None, input_width=11)
    source = draw(0, 3, 5, 11)
    calls, encode = [], Encoder.__call__

    def count(self, *args, **kwargs):
        calls.append(1)
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(Encoder, "__call__", count)
    written = generate(model, source, max_tokens=N, start_token=START)
    assert len(calls) == 1
    target = np.concatenate([np.full((3, 1), START), written.tokens[:, :-1]], axis=1).astype(np.int32)
    logits = nnx.jit(lambda model: model(source, target))(model)
    np.testing.assert_array_equal(written.tokens, np.argmax(logits, -1))
    with pytest.raises(ValueError, match=r"prompts: expected real vectors \(batch, S, 11\); got list"):
        generate(model, [[1, 2]], max_tokens=N, start_token=START)


@pytest.mark.slow
def test_learned_positions_limit_what_can_be_written():
    model = build(positions="learned", max_length=13)
    assert generate(model, PROMPTS, max_tokens=3).tokens.shape == (3, 3)
    message = r"within the 13 learned positions .*, at most 3 tokens after 11; got 4"
    with pytest.raises(ValueError, match=message):
        generate(model, PROMPTS, max_tokens=4)
    pair = build_pair(positions="learned", max_length=7)
    assert generate(pair, SOURCE, max_tokens=7, start_token=1).tokens.shape == (3, 7)
    with pytest.raises(ValueError, match="at most 7 tokens after 1; got 8"):
        generate(pair, SOURCE, max_tokens=8, start_token=1)


# Conversations.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learned", "windowed", "llama"])
def test_a_conversation_goes_on_without_reading_its_beginning(name, monkeypatch):
    """Rows end at different places; what is read again is the last token, which nobody had read."""
    options = {**CONFIGS[name], **({"max_length": 64} if name == "learned" else {})}
    model = build(**options)
    first = generate(model, PROMPTS, max_tokens=N)
    stops = (first.rows()[0][2],)
    written = generate(model, PROMPTS, max_tokens=N, stop_tokens=stops, capacity=48, return_cache=True)
    plain = generate(model, PROMPTS, max_tokens=N, stop_tokens=stops)
    assert written.rows() == plain.rows()
    assert len({len(row) for row in written.rows()}) > 1
    texts = [[*prompt, *row] for prompt, row in zip(PROMPTS, written.rows(), strict=True)]
    assert written.cache.model.lengths.tolist() == [len(text) - 1 for text in texts]
    more = [[8, 2], [], [5, 5, 7]]
    read = []
    original = Decoder.read
    monkeypatch.setattr(
        Decoder,
        "read",
        lambda self, tokens, *rest: read.append(tokens.shape[1]) or original(self, tokens, *rest),
    )
    again = generate(model, more, max_tokens=N, cache=written.cache, return_cache=True)
    # What is pending, the prompts in as many pieces as a window takes, and one token at a time.
    assert sum(read) <= (2 * 16 if name == "windowed" else 17) + 1
    monkeypatch.undo()
    texts = [[*text, *prompt] for text, prompt in zip(texts, more, strict=True)]
    assert again.rows() == generate(model, texts, max_tokens=N).rows()
    third = generate(model, [[], [1], []], max_tokens=2, cache=again.cache)
    texts = [[*text, *row, *end] for text, row, end in zip(texts, again.rows(), ([], [1], []), strict=True)]
    assert third.rows() == generate(model, texts, max_tokens=2).rows()


@pytest.mark.slow
def test_a_conversation_remembers_what_a_penalty_applies_to(model):
    keys, options = row_keys(jax.random.key(5), 3), {"sampling": WARM, "max_tokens": 3}
    written = generate(model, PROMPTS, **options, rng=keys, capacity=40, return_cache=True)
    texts = [[*prompt, *row, 4] for prompt, row in zip(PROMPTS, written.rows(), strict=True)]
    again = generate(model, [[4]] * 3, **options, rng=keys, cache=written.cache)
    assert again.rows() == generate(model, texts, **options, rng=keys).rows()


@pytest.mark.slow
def test_a_conversation_goes_on_in_a_stream(model):
    settings = {"max_tokens": 3, "stop_tokens": (1, 7), "return_cache": True}
    first = stream(model, PROMPTS, capacity=48, **settings)
    parts = [next(first)]
    assert first.cache is None, "not before its end"
    parts += first
    written = generate(model, PROMPTS, capacity=48, **settings)
    again = list(stream(model, [[8, 2], [], [5]], cache=first.cache, max_tokens=4))
    expected = generate(model, [[8, 2], [], [5]], cache=written.cache, max_tokens=4).rows()
    assert [[token for part in again for token in part[row]] for row in range(3)] == expected
    assert stream(model, PROMPTS, max_tokens=1).cache is None


@pytest.mark.slow
def test_a_conversation_goes_on_under_jit(model):
    written = generate(model, SOURCE, max_tokens=2, capacity=30, return_cache=True)
    more = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
    inside = jax.jit(lambda cache, more: generate(model, more, max_tokens=3, cache=cache).tokens)
    expected = generate(model, more, max_tokens=3, cache=written.cache).tokens
    np.testing.assert_array_equal(inside(written.cache, more), expected)


def test_a_cache_that_does_not_fit_is_refused(model):
    written = generate(model, PROMPTS, max_tokens=2, return_cache=True)
    with pytest.raises(
        ValueError, match=r"cache: expected room for \d+ tokens, .* Give capacity= to the first"
    ):
        generate(model, PROMPTS, max_tokens=20, cache=written.cache)
    with pytest.raises(ValueError, match="prompts: expected one for each of the cache's 3 rows, got 1"):
        generate(model, [[1]], max_tokens=1, cache=written.cache)
    for name in ("start_token", "capacity"):
        with pytest.raises(ValueError, match=f"{name}: expected None with a cache, whose first call had it"):
            generate(model, PROMPTS, max_tokens=1, cache=written.cache, **{name: 5})
    with pytest.raises(TypeError, match=r"cache: expected the `cache` of an earlier .*got DecodingCache"):
        generate(model, PROMPTS, max_tokens=1, cache=written.cache.model)
    with pytest.raises(TypeError, match="cache: expected a Decoder to go on with it, got EncoderDecoder"):
        generate(build_pair(), SOURCE, max_tokens=1, start_token=START, cache=written.cache)


def test_rows_may_be_padded_on_either_side(model):
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    left = np.full((3, 13), 99)
    for row, prompt in enumerate(PROMPTS):
        left[row, 13 - len(prompt) :] = prompt
    expected = generate(model, PROMPTS, max_tokens=N).rows()
    assert generate(model, left, lengths=lengths, padding="left", max_tokens=N).rows() == expected
    write = jax.jit(
        lambda left, lengths: generate(model, left, lengths=lengths, padding="left", max_tokens=N)
    )
    assert write(np.where(left == 99, 0, left), lengths).rows() == expected
    assert generate(model, PROMPTS, padding="left", max_tokens=N).rows() == expected
    with pytest.raises(ValueError, match="padding: expected one of right, left; got 'both'"):
        generate(model, PROMPTS, padding="both", max_tokens=N)


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens: expected an integer of at least 1, got 0"),
        (
            {"prompts": [[1], []]},
            ValueError,
            "expected at least one token each, got none in prompt 1; give start",
        ),
        ({"prompts": []}, ValueError, r"array \(batch, P\) of at least one row, got shape \(0, 16\)"),
        ({"prompts": [1, 2]}, ValueError, r"got 1 as prompt 0; for one prompt write \[prompt\]"),
        (
            {"prompts": np.array([1, 2])},
            ValueError,
            r"got shape \(2,\); for one prompt write prompts\[None\]",
        ),
        ({"prompts": ["text"]}, TypeError, "prompts: expected lists of tokens, got text; encode it"),
        ({"prompts": [[1.5]]}, TypeError, "prompts: expected integer tokens, got float64 in prompt 0"),
        ({"prompts": np.ones((1, 2))}, TypeError, "prompts: expected integer tokens, got float64"),
        ({"prompts": [[1, V]]}, ValueError, r"expected tokens in 0\.\.18 \(vocab_size=19\), got 0\.\.19"),
        ({"prompts": [[1, -1]]}, ValueError, r"expected tokens in 0\.\.18 \(vocab_size=19\), got -1\.\.1"),
        ({"lengths": np.array([1])}, ValueError, "lengths: expected None with a list of prompts"),
        ({"start_token": V}, ValueError, r"start_token: expected a token in 0\.\.18, got 19"),
        ({"stop_tokens": (V,)}, ValueError, r"stop_tokens: expected a token in 0\.\.18, got 19"),
        ({"stop_tokens": 3}, TypeError, r"stop_tokens: expected a sequence of tokens, such as \(2,\); got 3"),
        ({"stop_tokens": ("a",)}, TypeError, "stop_tokens: expected a token, an integer in 0..18; got 'a'"),
        (
            {"sampling": Sampling(temperature=1.0)},
            ValueError,
            r"rng: expected a random key, .*temperature=1\.0",
        ),
        ({"sampling": WARM, "rng": 3}, TypeError, "rng: expected a random key, .*got int"),
        ({"chunk": 0}, ValueError, "chunk: expected an integer of at least 1, got 0"),
        ({"pad_token": -1}, ValueError, "pad_token: expected a token in 0.*got -1"),
    ],
)
def test_impossible_requests_are_refused(model, request_, error, message):
    request_ = {"prompts": PROMPTS, "max_tokens": 3, **request_}
    with pytest.raises(error, match=message):
        generate(model, request_.pop("prompts"), **request_)


def test_only_models_that_write_write():
    encoder = Encoder(configure(), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"Decoder"):
        generate(encoder, PROMPTS, max_tokens=3)
    with pytest.raises(ValueError, match="start_token: expected the token that targets begin with"):
        generate(build_pair(), SOURCE, max_tokens=3)


def test_vectors_may_be_padded_on_the_left():
    config = TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=1, input_width=7)
    model = EncoderDecoder(config, target_vocab_size=13, rngs=nnx.Rngs(0))
    real = jnp.asarray(np.random.default_rng(1).normal(size=(2, 2, 7)), jnp.float32)
    left, options = jnp.concatenate([jnp.zeros_like(real), real], 1), {"max_tokens": 3, "start_token": 0}
    found = generate(model, left, lengths=np.array([2, 2]), padding="left", **options)
    expected = generate(model, real, **options)
    np.testing.assert_allclose(found.log_probabilities, expected.log_probabilities, rtol=1e-5, atol=1e-6)


def small_decoder(**settings):
    sizes = {"d_model": 6, "num_heads": 3, "d_ff": 11, "num_layers": 1, "vocab_size": 13}
    return Decoder(TransformerConfig(**{**sizes, **settings}), rngs=nnx.Rngs(0))


def test_prompts_of_bytes_are_the_same_under_jit():
    model, prompts = small_decoder(vocab_size=257), jnp.array([[5, 9]], jnp.uint8)
    sampling = Sampling(repetition_penalty=1.5)
    write = lambda prompts: generate(model, prompts, max_tokens=4, start_token=256, sampling=sampling)
    np.testing.assert_array_equal(jax.jit(lambda p: write(p).tokens)(prompts), write(prompts).tokens)


def test_a_conversation_takes_the_places_that_each_row_needs():
    learned = small_decoder(positions="learned", max_length=10)
    cache = generate(learned, [[1, 2, 3]], max_tokens=2, return_cache=True).cache
    assert len(generate(learned, [[4]], max_tokens=2, cache=cache).rows()[0]) == 2
    model = small_decoder()
    cache = generate(model, [[1] * 10, [2]], max_tokens=1, capacity=16, return_cache=True).cache
    assert [len(row) for row in generate(model, [[], [3] * 8], max_tokens=2, cache=cache).rows()] == [2, 2]
    with pytest.raises(ValueError, match="cache: expected room for 17 tokens"):
        generate(model, [[], [3] * 8], max_tokens=7, cache=cache)


def test_a_penalty_of_a_later_call_knows_the_text_before():
    model, harsh = small_decoder(), {"sampling": Sampling(repetition_penalty=3.0), "max_tokens": 6}
    written = generate(model, [[1, 2, 3]], max_tokens=5, return_cache=True)
    text = [1, 2, 3, *written.rows()[0], 7]
    again = generate(model, [[7]], **harsh, cache=written.cache)
    assert again.rows() == generate(model, [text], **harsh).rows()
    assert again.rows() != generate(model, [text], max_tokens=6).rows()


def test_the_largest_numbers_ask_for_all():
    model = small_decoder()
    parts = list(stream(model, [[1]], max_tokens=5, burst=2**31 - 1))
    assert [len(rows[0]) for rows in parts] == [1, 4]
    warm = {"rng": jax.random.key(0), "max_tokens": 3}
    found = generate(model, [[1]], sampling=Sampling(temperature=1.0, top_k=2**63 - 1), **warm)
    assert found.rows() == generate(model, [[1]], sampling=Sampling(temperature=1.0), **warm).rows()


def test_a_cache_counts_as_its_layers_do():
    model = small_decoder()
    _, cache = model.read(jnp.array([[1, 2, 3, 4]]), model.start_cache(1, 200))
    kept = jax.jit(lambda cache: cache.rewind(99))(cache)
    assert kept.lengths.tolist() == kept.layers[0].lengths.tolist() == [4]
    _, longer = model.read(jnp.zeros((1, 125), int), cache.rewind(np.array([3], np.int8)))
    assert longer.lengths.tolist() == longer.layers[0].lengths.tolist() == [128]
    with pytest.raises(ValueError, match="chunk: expected an integer of at least 1, got -3"):
        model.start_cache(1, 4, chunk=-3)
    pair = EncoderDecoder(model.config, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"memory: expected \(batch, S, 6\), got shape \(5, 6\)"):
        pair.start_cache(jnp.ones((5, 6)), 4)


@pytest.mark.parametrize(
    ("wide", "cached"),
    mostly_slow(
        [
            *(
                ("embedding", "float32"),
                ("norm", "float32"),
                ("value_projection", "float32"),
                ("", "float32"),
            ),
            *(("router", "bfloat16"), ("head", "bfloat16"), ("nothing", "bfloat16")),
        ],
        ("norm", "float32"),
        ("router", "bfloat16"),
    ),
)
@pytest.mark.parametrize("kind", mostly_slow(["decoder", "pair"], "decoder"))
def test_parameters_may_have_several_dtypes(kind, wide, cached):
    options = {"num_experts": 3, "experts_per_token": 2, "num_layers": 2}
    model = nnx.clone(build(**options) if kind == "decoder" else build_pair(**options))

    def narrow(path, leaf):
        named = jax.tree_util.keystr(path)
        return leaf if wide in named else leaf.astype(jnp.bfloat16)

    nnx.update(model, jax.tree.map_with_path(narrow, nnx.state(model, nnx.Param)))
    with jax.numpy_dtype_promotion("standard"):
        if kind == "pair":
            source = jnp.array([[3, 1, 4, 1, 5]])
            cache, text = model.start_cache(model.encoder(source), N), [2]
            written = generate(model, source, start_token=2, max_tokens=N)
        else:
            cache, text = model.start_cache(1, N), [*PROMPTS[0]]
            written = generate(model, PROMPTS, max_tokens=N)
        row = jnp.asarray(written.rows()[0])
        tokens = jnp.asarray([text + written.rows()[0]])
        logits = model(source, tokens) if kind == "pair" else model(tokens)
    assert {str(leaf.dtype) for layer in cache.layers for leaf in (layer.key, layer.value)} == {cached}
    logits = logits[0, -1 - len(row) : -1].astype(jnp.float32)
    assert jnp.all(logits.max(-1) - logits[jnp.arange(len(row)), row] < 0.1)
