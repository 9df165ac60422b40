"""Writing against the slow way: a full forward pass for every token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

from layer_oracle import build_drawn, draw
from refusals import assert_refused
from regard import models
from regard.models import (
    Decoder,
    Encoder,
    EncoderDecoder,
    Sampling,
    TransformerConfig,
    beam_search,
    generate,
    stream,
)
from regard.models.prompts import TextCache, canonicalize
from regard.models.sampling import row_keys
from test_sampling import adjust_plainly

V, N, MAX = 19, 7, 40
PROMPTS = [[3, 1, 4, 1, 5], [2], [7, 18, 2, 8, 0, 1, 7, 8, 2, 8, 3]]
LENGTHS = np.array([len(prompt) for prompt in PROMPTS])
SOURCE = np.array([[1, 2, 3, 4, 5, 6, 7], [15, 14, 13, 12, 11, 10, 9], [3, 1, 4, 1, 5, 9, 2]], np.int32)
START = 16
GREEDY = Sampling()
WARM = Sampling(temperature=1.5, repetition_penalty=1.3)
ALL = Sampling(temperature=1.5, top_k=11, top_p=0.95, min_p=0.001, repetition_penalty=1.3)
WINDOWED = {"positions": "rotary", "num_heads": 4, "num_key_heads": 2, "head_dim": 6, "sinks": True}
WINDOWED |= {"windows": (2, None), "num_layers": 2}


def prepare(model):
    """Loud embeddings and no preferences of its own: tokens then differ from step to step."""
    for _, layer in nnx.iter_modules(model):
        if isinstance(layer, nnx.Embed):
            layer.embedding[...] = 4 * np.asarray(layer.embedding[...])
        if isinstance(layer, nnx.Linear | nnx.LayerNorm) and layer.bias is not None:
            layer.bias[...] = np.zeros(layer.bias.shape, np.float32)
    return model


def configure(**options):
    options = {"num_heads": 3, "num_layers": 1, "vocab_size": V, **options}
    return TransformerConfig(d_model=12, d_ff=13, **options)


@functools.cache
def build(**options):
    """One model for all tests that ask alike: who changes it clones it."""
    return prepare(build_drawn(Decoder, configure(**options)))


@functools.cache
def build_pair(**options):
    return prepare(build_drawn(EncoderDecoder, configure(**options), target_vocab_size=V))


def spoil(model):
    broken = nnx.clone(model)
    broken.head.kernel = nnx.Param(jnp.asarray(broken.head.kernel[...]).at[0, 0].set(jnp.nan))
    return broken


@nnx.jit
def read_whole(model, tokens):
    return model(tokens)


def read_slowly(model):
    """Logits after a text, by reading all of it; noise behind it must not matter."""

    @functools.cache
    def logits(text):
        noise = np.random.default_rng(len(text)).integers(0, model.config.vocab_size, MAX - len(text))
        read = read_whole(model, np.concatenate([text, noise])[None].astype(np.int32))
        return np.asarray(read)[0, len(text) - 1]

    return logits


def write_slowly(logits, prompt, key=None, count=N, sampling=GREEDY):
    text, scores = list(prompt), []
    for step in range(count):
        row = np.asarray(logits(tuple(text)), np.float64)
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


def write_rows(model, sampling=GREEDY, rng=None, prompts=PROMPTS, count=N):
    """Rows after the prompts and their log-probabilities, each by itself and its own key."""
    logits = read_slowly(model)
    keys = [None] * 3 if rng is None else row_keys(rng, 3)
    texts = [write_slowly(logits, *pair, count, sampling) for pair in zip(prompts, keys, strict=True)]
    return [list(part) for part in zip(*texts, strict=True)]


def ends_at(text, stops):
    """Say whether a text ends with one of the tokens, or of the sequences of tokens."""
    return any([*text][-len(stop) :] == [*stop] for stop in (np.atleast_1d(stop).tolist() for stop in stops))


def cut_at(row, stops):
    ends = [size for size in range(1, len(row)) if ends_at(row[:size], stops)]
    return row[: ends[0]] if ends else row


def check_written(written, rows, scores, stops, pad_token):
    """Compare all that is told of rows; scores may reach beyond their ends."""
    assert written.rows() == rows
    for row, tokens in enumerate(np.asarray(written.tokens)):
        length, logs = len(rows[row]), np.asarray(written.log_probabilities[row])
        assert np.all(tokens[length:] == pad_token)
        assert np.all(logs[length:] == 0)
        np.testing.assert_allclose(logs[:length], scores[row][:length], rtol=1e-4, atol=1e-4)
        ended = ends_at(rows[row], stops)
        assert bool(written.finished[row]) == ended
        assert written.reasons()[row] == ("stop token" if ended else "max_tokens")


def test_writing_is_a_forward_pass_per_token_up_to_a_stop_token(monkeypatch):
    """By generate and by streams; for shapes that a capacity makes equal, nothing is compiled anew."""
    traces, read = [], Decoder.read
    monkeypatch.setattr(Decoder, "read", lambda *given, **more: traces.append(1) or read(*given, **more))
    model, rng = build(), jax.random.key(1, impl="rbg")
    rows, scores = write_rows(model, ALL, rng)
    stops = rows[0][2], rows[1][3:5], [rows[2][1], rows[2][0]], [18, 18, rows[2][0]]
    cut = [cut_at(row, stops) for row in rows]
    settings = {"max_tokens": N, "sampling": ALL, "rng": rng, "stop_tokens": stops, "capacity": 24}
    written = generate(model, PROMPTS, **settings, pad_token=18)
    first = len(traces)
    assert first > 0
    assert (written.tokens.shape, written.tokens.dtype) == ((3, N), jnp.int32)
    assert min(map(len, cut)) <= 3 < max(map(len, cut))
    check_written(written, cut, scores, stops, pad_token=18)
    for burst in (1, 3, 2**31 - 1):
        parts = list(stream(model, PROMPTS, burst=burst, **settings))
        assert [[token for part in parts for token in part[row]] for row in range(3)] == cut
        assert len(parts) == 1 + -(-(max(map(len, cut)) - 1) // burst)
        assert all(len(row) <= burst for part in parts for row in part)
    # What is not a number is no token.
    broken = spoil(model)
    assert list(stream(broken, PROMPTS, **settings)) == [[[], [], []]]
    ended = generate(broken, PROMPTS, **settings)
    assert ended.tokens.tolist() == [[-1] + [0] * (N - 1)] * 3
    assert (ended.rows(), ended.reasons()) == ([[], [], []], ["not finite"] * 3)
    assert not ended.finished.any()
    cool = Sampling(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.1)
    settings |= {"rng": jax.random.key(2), "stop_tokens": (5, 7, 1, [2, 3, 4]), "sampling": cool}
    generate(model, [[1, 2], [3, 4, 5], [6]], pad_token=3, **settings)
    assert len(traces) == first


def test_arrays_may_be_padded_on_the_left_and_under_jit():
    """A wrong token there cannot be refused; it spoils its own row only."""
    left = np.full((3, 13), V - 1, np.int32)
    for row, prompt in enumerate(PROMPTS):
        left[row, 13 - len(prompt) :] = prompt
    left[1, -1] = V
    options = {"padding": "left", "max_tokens": N}
    write = nnx.jit(lambda model, prompts: generate(model, prompts, lengths=LENGTHS, **options))
    written, (rows, scores) = write(build(), left), write_rows(build())
    assert written.healthy.tolist() == [True, False, True]
    assert written.rows() == [rows[0], [], rows[2]]
    np.testing.assert_allclose(written.log_probabilities[::2], scores[::2], rtol=1e-4, atol=1e-4)


FIRST = {"max_tokens": N, "sampling": Sampling(temperature=1.5), "capacity": 48}


def test_a_conversation_goes_on_without_reading_its_beginning(monkeypatch):
    """What is read again is the last token, which nobody had read; a penalty knows all the text before."""
    model = build(**WINDOWED, dropout_rate=0.5, attention_dropout_rate=0.5)
    quiet, rng = nnx.clone(model), jax.random.key(3)
    quiet.eval()
    rows, _ = write_rows(quiet, FIRST["sampling"], rng)
    settings = {**FIRST, "rng": rng, "stop_tokens": (rows[0][2], rows[1][4]), "chunk": 3}
    parts = stream(model, PROMPTS, **settings, return_cache=True)
    found = [next(parts)]
    assert parts.cache is None, "not before its end"
    found += parts
    found, cache = [[token for part in found for token in part[row]] for row in range(3)], parts.cache
    rows = [cut_at(row, settings["stop_tokens"]) for row in rows]
    assert found == rows, "dropout is off"
    assert len({*map(len, rows)}) > 1
    texts = [[*prompt, *row] for prompt, row in zip(PROMPTS, rows, strict=True)]
    assert cache.model.lengths.tolist() == [len(text) - 1 for text in texts]
    more, read, original = [[8, 2], [], [5, 5, 7]], [], Decoder.read
    watch = lambda self, tokens, *rest: read.append(tokens.shape[1]) or original(self, tokens, *rest)
    monkeypatch.setattr(Decoder, "read", watch)
    settings = {"max_tokens": N, "sampling": WARM, "rng": jax.random.key(5)}
    again = generate(model, more, **settings, cache=cache)
    # What is pending, the prompts in as many pieces as a window takes, and one token at a time.
    assert sum(read) <= 2 * 16 + 1
    texts = [[*text, *prompt] for text, prompt in zip(texts, more, strict=True)]
    assert again.rows() == write_rows(quiet, WARM, settings["rng"], texts)[0]


def test_a_cache_that_does_not_fit_is_refused():
    model = build(**WINDOWED)
    cache = dataclasses.replace(model.start_cache(3, 48), lengths=jnp.array([11, 8, 17]))
    cache = TextCache(cache, jnp.array([1, 2, 3]))
    go_on = functools.partial(generate, model=model, prompts=PROMPTS, max_tokens=1, cache=cache)
    assert_refused(
        (lambda: go_on(max_tokens=40), r"expected room for \d+ tokens, .* Give capacity= to the first"),
        (lambda: go_on(prompts=[[1]]), "prompts: expected one for each of the cache's 3 rows, got 1"),
        (lambda: go_on(start_token=5), "start_token: expected None with a cache, whose first"),
        (lambda: go_on(capacity=5), "capacity: expected None with a cache, whose first call"),
        (lambda: go_on(cache=cache.model), r"cache: expected the `cache` of an earlier .*got Dec"),
        (lambda: go_on(model=build_pair(), start_token=START), "a Decoder to go on with it, got EncoderDeco"),
        error=(ValueError, TypeError),
    )


def test_a_cache_counts_as_its_layers_do():
    model = build()
    cache = model.start_cache(1, 200)
    count = lambda cache: (cache.lengths.tolist(), *(layer.lengths.tolist() for layer in cache.layers))
    _, cache = nnx.jit(lambda model, cache: model.read(jnp.array([[1, 2, 3, 4]]), cache))(model, cache)
    assert count(jax.jit(lambda cache: cache.rewind(99))(cache)) == count(cache) == ([4], [4])
    back = cache.rewind(np.array([3], np.int8))
    assert (count(back), back.lengths.dtype) == (([3], [3]), jnp.int32)
    with pytest.raises(ValueError, match="chunk: expected an integer of at least 1, got -3"):
        model.start_cache(1, 4, chunk=-3)
    with pytest.raises(ValueError, match=r"memory: expected \(batch, S, 12\), got shape \(5, 12\)"):
        build_pair().start_cache(jnp.ones((5, 12)), 4)


def test_a_cache_of_int8_is_small_and_near_however_it_is_read():
    model = build(**WINDOWED)
    small = functools.partial(generate, model, PROMPTS, max_tokens=N, cache_dtype="int8")
    written = small(return_cache=True, capacity=MAX)
    assert written.rows() == small(chunk=3, draft=model).rows()
    size = lambda cache: sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers[-1]))
    assert 0 < size(written.cache.model) <= 0.5 * size(model.start_cache(3, MAX)), "with scales"
    by_hand, text = model.start_cache(3, MAX, dtype=np.int8), jnp.asarray(SOURCE)
    near = model.predict(nnx.jit(type(model).read)(model, text, by_hand)[0])
    whole = read_whole(model, text)
    assert 1e-4 < abs(near - whole).max() < 0.03 * abs(whole).max()
    latent = build(latent_dim=4, positions="rotary", latent_rotary_dim=2)
    assert_refused(
        (lambda: small(cache_dtype="bfloat16"), "cache_dtype: expected None, .* or int8; got bfloat16"),
        (lambda: small(cache=written.cache), "cache_dtype: expected None with a cache, whose first call"),
        (
            lambda: beam_search(latent, PROMPTS, num_beams=2, max_tokens=3, cache_dtype="int8"),
            "cache_dtype: expected None for latent attention",
        ),
    )


def ask(model, prompts, lengths=None, max_tokens=2, start_token=None, **options):
    return canonicalize(model, prompts, lengths, max_tokens, start_token, None, None, **options)


def test_a_start_token_stands_before_every_prompt():
    asked = ask(build(), [[3, 1], [], [2]], start_token=5)
    np.testing.assert_array_equal(asked.start[:, :3], [[5, 3, 1], [5, 0, 0], [5, 2, 0]])
    assert asked.counts.tolist() == [3, 1, 2]
    # Also where bytes could not say it, under jit.
    model = build(vocab_size=257)
    start = jax.jit(lambda prompts: ask(model, prompts, start_token=256).start)
    assert start(jnp.array([[5, 9]], jnp.uint8)).tolist() == [[256, 5, 9]]


def test_vectors_may_be_padded_on_the_left():
    model, real = build_pair(vocab_size=None, input_width=11), draw(1, 2, 3, 11)
    left = np.concatenate([np.ones((2, 2, 11), np.float32), real], 1)
    asked = ask(model, left, np.array([3, 3]), start_token=0, padding="left")
    np.testing.assert_array_equal(asked.source[:, :3], real)
    with pytest.raises(ValueError, match=r"prompts: expected real vectors \(batch, S, 11\); got list"):
        ask(model, [[1, 2]], start_token=0)


def test_learned_positions_and_caches_limit_what_can_be_written():
    model, pair = (kind(positions="learned", max_length=13) for kind in (build, build_pair))
    assert ask(model, PROMPTS, max_tokens=3).capacity >= 13
    with pytest.raises(ValueError, match=r"within the 13 learned .*, at most 3 tokens after 11; got 4"):
        ask(model, PROMPTS, max_tokens=4)
    with pytest.raises(ValueError, match="at most 13 tokens after 1; got 14"):
        ask(pair, SOURCE, max_tokens=14, start_token=1)
    # A conversation takes the places that each row needs: 10 + 1 tokens, or 1 + 9.
    cache = dataclasses.replace(build().start_cache(2, 16), lengths=jnp.array([10, 1]))
    goes_on = functools.partial(ask, build(), [[], [3] * 8], cache=TextCache(cache, jnp.array([1, 2])))
    goes_on(max_tokens=6)
    assert_refused((lambda: goes_on(max_tokens=7), "cache: expected room for 17 tokens"))


def test_impossible_requests_are_refused():
    assert_refused(
        ({"max_tokens": 0}, "max_tokens: expected an integer of at least 1, got 0"),
        ({"prompts": [[1], []]}, "at least one token each, got none in prompt 1; give start"),
        ({"prompts": [1, 2]}, r"got 1 as prompt 0; for one prompt write \[prompt\]"),
        ({"prompts": ["text"]}, "prompts: expected lists of tokens, got text; encode it", TypeError),
        ({"prompts": [[1.5]]}, "prompts: expected integer tokens, got float64 in prompt 0", TypeError),
        ({"prompts": [[1, V]]}, r"tokens in 0\.\.18 \(vocab_size=19\), got 19 at \[0, 1\]"),
        ({"padding": "both"}, "padding: expected one of right, left; got 'both'"),
        ({"start_token": V}, r"start_token: expected a token in 0\.\.18, got 19"),
        ({"stop_tokens": 3}, r"stop_tokens: expected a sequence of tokens, such as \(2,\); got 3", TypeError),
        ({"stop_tokens": [2, []]}, "stop_tokens: expected at least one token in a sequence"),
        ({"sampling": Sampling([0.0, 1.0]), "rng": jax.random.key(0)}, r"per prompt, shape \(3,\); got \(2"),
        ({"sampling": WARM}, r"rng: expected a random key, .*temperature=1\.5"),
        ({"sampling": WARM, "rng": 3}, "rng: expected a random key, .*got int", TypeError),
        ({"capacity": 12}, r"capacity: expected at least 13, a place .*got 12\. None chooses it"),
        ({"max_tokens": 2**31}, "capacity: expected at most 2147483647 places, which int32 cou"),
        run=lambda changes: generate(build(), **{"prompts": PROMPTS, "max_tokens": 3, **changes}),
    )


def test_only_models_that_write_write():
    encoder = build_drawn(Encoder, configure())
    assert_refused(
        (lambda: generate(encoder, PROMPTS, max_tokens=3), "Decoder"),
        (lambda: generate(build_pair(), SOURCE, max_tokens=3), "start_token: expected the token"),
        (lambda: stream(build(), PROMPTS, max_tokens=3, burst=0), "burst: expected an integer of"),
        (lambda: stream(build(), PROMPTS, max_tokens=0), "max_tokens: expected an integer of"),
        error=(ValueError, TypeError),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("wide", "cached"), [("value_projection", "float32"), ("router", "bfloat16")])
def test_parameters_may_have_several_dtypes(wide, cached):
    """Traced: where a cache had another dtype than what is put there, that fails."""
    options = {"num_experts": 3, "experts_per_token": 2, "num_layers": 2}
    narrow = lambda path, leaf: leaf if wide in jax.tree_util.keystr(path) else leaf.astype(jnp.bfloat16)
    for own, start in ((build(**options), None), (build_pair(**options), 2)):
        model = nnx.clone(own)
        nnx.update(model, jax.tree.map_with_path(narrow, nnx.state(model, nnx.Param)))
        write = functools.partial(generate, max_tokens=N, return_cache=True, start_token=start)
        with jax.numpy_dtype_promotion("standard"):
            written = jax.eval_shape(lambda: write(model, SOURCE))  # noqa: B023
        assert written.log_probabilities.dtype == jnp.float32
        for layer in written.cache.model.layers:
            assert (layer.key.dtype, layer.value.dtype) == (cached, cached)


EXPORTED = {
    "windows": lambda: build(**WINDOWED),
    "learned positions": lambda: build(positions="learned", max_length=MAX),
    "a hybrid": lambda: build(num_layers=2, mixers=("gated_delta", "attention")),
    "an encoder-decoder": build_pair,
}


@pytest.mark.parametrize("name", EXPORTED)
def test_one_exported_program_writes_after_prompts_of_any_number_and_length(name):
    model = EXPORTED[name]()
    settings = {"max_tokens": N, "start_token": START if isinstance(model, EncoderDecoder) else None}
    write = lambda prompts, lengths: generate(model, prompts, lengths=lengths, **settings)
    batch, length = export.symbolic_shape("batch, length", constraints=[f"length <= {MAX - N}"])
    shapes = jax.ShapeDtypeStruct((batch, length), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    program = export.deserialize(export.export(jax.jit(write))(*shapes).serialize())
    for prompts, lengths in ((SOURCE, [7, 2, 5]), (SOURCE[:2, :3], [1, 3])):
        found, expected = (call(prompts, np.array(lengths, np.int32)) for call in (program.call, write))
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.log_probabilities, expected.log_probabilities, rtol=1e-4, atol=1e-5)


def test_no_way_of_writing_takes_a_token_that_a_bias_bars():
    model, rng = build(), jax.random.key(1)
    barred = np.arange(model.config.vocab_size) % 2 == np.arange(len(PROMPTS))[:, None] % 2
    bias = np.where(barred, np.float32(-np.inf), np.float32(0))
    texts = []
    for heat, draft in ((0.0, None), (0.0, model), (1.3, None), (1.3, model)):
        options = {"sampling": Sampling(temperature=heat, logit_bias=bias), "draft": draft, "rng": rng}
        texts.append(generate(model, PROMPTS, max_tokens=N, **options).tokens)
    for width in (1, 3):
        beams = models.beam_search(model, PROMPTS, num_beams=width, max_tokens=N, logit_bias=bias)
        assert np.all(beams.scores > -np.inf)
        texts += jnp.unstack(beams.tokens, axis=1)
    for tokens in texts:
        assert not np.take_along_axis(barred, np.asarray(tokens), axis=1).any()
    for same in (texts[1], texts[4]):
        np.testing.assert_array_equal(same, texts[0])


def test_a_serialized_program_takes_settings_and_stop_tokens_of_every_request():
    model, rng, stops = build(), jax.random.key(3), jnp.array([[5, 7], [3, 3]])

    def serve(prompts, settings, stop_tokens):
        options = {"sampling": settings, "rng": rng, "stop_tokens": stop_tokens}
        return generate(model, prompts, max_tokens=N, **options).tokens

    write = lambda prompts, heat, stops: serve(prompts, Sampling(temperature=heat, top_p=0.8), stops)
    settings = Sampling(temperature=1.3, top_p=0.8)
    for call, asked, other in ((write, 1.3, 9.0), (serve, settings, Sampling(temperature=9.0, top_p=0.8))):
        program = export.deserialize(export.export(jax.jit(call))(SOURCE, asked, stops).serialize())
        expected = serve(SOURCE, settings, stops)
        np.testing.assert_array_equal(program.call(SOURCE, asked, stops), expected)
        assert np.any(program.call(SOURCE, other, stops) != expected)


def test_an_exported_program_has_its_own_capacity_and_a_draft_but_no_chunks():
    model, shape = build(), jax.ShapeDtypeStruct(export.symbolic_shape("batch, length"), jnp.int32)

    def write(prompts, **options):
        return generate(model, prompts, max_tokens=N, **options).tokens

    program = jax.jit(lambda prompts: write(prompts, draft=model, capacity=prompts.shape[1] + 2 * N))
    np.testing.assert_array_equal(export.export(program)(shape).call(SOURCE), write(SOURCE))
    with pytest.raises(NotImplementedError, match="chunk: expected None for prompts of symbolic length"):
        jax.eval_shape(lambda prompts: write(prompts, chunk=2), shape)
