import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layer_oracle import draw, randomize
from regard.models import Encoder, EncoderDecoder, TransformerConfig
from regard.models.generate import greedy

B, S, V, START, COUNT = 3, 7, 17, 16, 5
SOURCE = np.array([[1, 2, 3, 4, 5, 6, 7], [15, 14, 13, 12, 11, 10, 9], [3, 1, 4, 1, 5, 9, 2]], np.int32)


def build(**options):
    options = {"vocab_size": V, **options}
    config = TransformerConfig(d_model=12, num_heads=3, d_ff=13, num_layers=1, **options)
    model = randomize(EncoderDecoder(config, target_vocab_size=V, rngs=nnx.Rngs(0)))
    # Loud embeddings and no preferences of its own: the tokens then differ from step to step.
    for _, layer in nnx.iter_modules(model):
        if isinstance(layer, nnx.Embed):
            layer.embedding[...] = 4 * layer.embedding[...]
        if isinstance(layer, nnx.Linear | nnx.LayerNorm) and layer.bias is not None:
            layer.bias[...] = jnp.zeros_like(layer.bias[...])
    return model


def write_step_by_step(model, source, count, **lengths):
    """Teacher forcing on an ever longer target; what follows its end is noise that must not matter."""
    run, rng = nnx.jit(lambda model, target: model(source, target, **lengths)), np.random.default_rng(0)
    target = np.full((len(source), 1), START, np.int32)
    for step in range(count):
        noise = rng.integers(0, V, (len(source), count - step - 1), np.int32)
        logits = run(model, np.concatenate([target, noise], axis=1))[:, step]
        target = np.concatenate([target, np.argmax(logits, -1)[:, None].astype(np.int32)], axis=1)
    return target[:, 1:]


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_greedy_is_teacher_forced_argmax(norm):
    model = build(norm=norm)
    lengths = np.array([7, 3, 0])
    written = greedy(model, SOURCE, start_token=START, num_tokens=COUNT, source_lengths=lengths)
    assert written.shape == (B, COUNT)
    assert written.dtype == jnp.int32
    expected = write_step_by_step(model, SOURCE, COUNT, source_lengths=lengths)
    np.testing.assert_array_equal(written, expected)
    assert len(np.unique(expected)) > 3


def test_greedy_under_jit_and_from_vectors():
    model = build(vocab_size=None, input_width=11)
    source = draw(0, B, S, 11)
    plain = greedy(model, source, start_token=START, num_tokens=COUNT)
    np.testing.assert_array_equal(plain, write_step_by_step(model, source, COUNT))
    write = nnx.jit(lambda model, source: greedy(model, source, start_token=START, num_tokens=COUNT))
    np.testing.assert_array_equal(write(model, source), plain)
    graph, state = nnx.split(model)
    write = jax.jit(lambda state: greedy(nnx.merge(graph, state), source, start_token=START, num_tokens=2))
    np.testing.assert_array_equal(write(state), plain[:, :2])


def test_greedy_switches_dropout_off_and_leaves_the_mode_alone():
    model = build(dropout_rate=0.5, attention_dropout_rate=0.5)
    written = greedy(model, SOURCE, start_token=START, num_tokens=COUNT)
    assert not np.array_equal(model(SOURCE, SOURCE), model(SOURCE, SOURCE))
    model.eval()
    np.testing.assert_array_equal(written, write_step_by_step(model, SOURCE, COUNT))
    greedy(model, SOURCE, start_token=START, num_tokens=1)
    np.testing.assert_array_equal(model(SOURCE, SOURCE), model(SOURCE, SOURCE))


def test_the_source_is_encoded_once(monkeypatch):
    calls, encode = [], Encoder.__call__

    def count(self, *args, **kwargs):
        calls.append(1)
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(Encoder, "__call__", count)
    greedy(build(), SOURCE, start_token=START, num_tokens=COUNT)
    assert len(calls) == 1


def test_b000_12_a_wrong_source_is_an_error_and_minus_one_under_jit():
    wrong = SOURCE.copy()
    wrong[1, 2] = V
    model = build()
    with pytest.raises(ValueError, match=r"vocab_size=17\), got 1\.\.17"):
        greedy(model, wrong, start_token=START, num_tokens=COUNT)
    write = nnx.jit(lambda model, source: greedy(model, source, start_token=START, num_tokens=COUNT))
    written = np.asarray(write(model, wrong))
    assert np.all(written[1] == -1)
    np.testing.assert_array_equal(written[[0, 2]], write(model, SOURCE)[np.array([0, 2])])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"start_token": V, "num_tokens": 3}, r"start_token: expected a target token in 0\.\.16, got 17"),
        ({"start_token": -1, "num_tokens": 3}, r"start_token: .*got -1"),
        ({"start_token": 1, "num_tokens": 0}, r"num_tokens: expected at least 1, got 0"),
    ],
)
def test_impossible_requests_are_refused(request_, message):
    with pytest.raises(ValueError, match=message):
        greedy(build(), SOURCE, **request_)


def test_learned_positions_limit_what_can_be_written():
    model = build(positions="learned", max_length=S)
    assert greedy(model, SOURCE, start_token=START, num_tokens=S).shape == (B, S)
    with pytest.raises(ValueError, match="max_length = 7"):
        greedy(model, SOURCE, start_token=START, num_tokens=S + 1)
