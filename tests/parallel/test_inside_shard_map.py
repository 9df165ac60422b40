"""Inside `jax.shard_map` that divides the sequence: what reads positions or earlier tokens knows of them."""

from mesh_cases import on_eight_devices

SETTING = """
import dataclasses
from flax import nnx
from regard import layers, linear, models, positions, readouts
from oracle import assert_close

mesh, along = make_mesh(sequence=8), jax.P(None, "sequence")
rng = np.random.default_rng(5)
documents = np.repeat([[0, 1, 2, 1]], [5, 9, 23, 11], axis=1).repeat(2, 0).astype(np.int32)

def divide(function, arrays, specs, out_specs):
    def part(arrays):
        with parallel.use(mesh, "sequence"):
            return function(arrays)

    return jax.jit(jax.shard_map(part, mesh=mesh, in_specs=(specs,), out_specs=out_specs))(arrays)
"""

LINEAR = """
draw = lambda *shape: rng.standard_normal((2, 2, 48, *shape), np.float32) / 2
arrays = {"query": draw(5), "key": draw(5), "value": draw(7), "decay": -abs(draw())}
arrays |= {"rate": rng.random((2, 2, 48), np.float32), "segments": documents}
arrays["valid"] = rng.random((2, 48)) < 0.8
of_heads = jax.P(None, None, "sequence")
specs = {name: along if array.ndim == 2 else of_heads for name, array in arrays.items()}
for names, options in (
    (("decay", "rate", "segments", "valid"), {}),
    (("segments", "decay"), {"normalise": True, "feature_map": "exp"}),
    (("decay", "valid"), {"causal": False}),
):
    chosen = {name: arrays[name] for name in ("query", "key", "value", *names)}

    def call(arrays):
        output, state = linear.attend(**arrays, **options, return_state=True)
        return output, state.memory

    got = divide(call, chosen, {name: specs[name] for name in chosen}, (of_heads, jax.P()))
    assert_close(got, call(chosen))
"""

LAYERS = """
x, tokens = rng.standard_normal((2, 48, 8), np.float32), rng.integers(0, 11, (2, 48), np.int32)
rngs, size = nnx.Rngs(0), {"d_model": 8, "num_heads": 2}
config = models.TransformerConfig(**size, vocab_size=11, num_layers=1, d_ff=9)
hybrid = dataclasses.replace(config, num_layers=2, mixers=("gated_delta", "attention"))
learned = dataclasses.replace(config, positions="learned", max_length=50)
latent = {"latent_dim": 4, "head_dim": 3, "rotary_dim": 2}
whole = masks.segments(documents) & masks.valid_keys(documents != 2) | masks.from_array(np.eye(48, dtype=int))
for layer, inputs, options in (
    (layers.MultiHeadAttention(**size, rotary=positions.Rotary(), rngs=rngs), x, {"mask": masks.causal()}),
    (layers.MultiHeadAttention(**size, rngs=rngs), x, {"mask": whole}),
    (models.Decoder(hybrid, rngs=rngs), tokens, {"mask": masks.segments(documents)}),
    (layers.LatentAttention(**size, **latent, rngs=rngs), x, {"mask": masks.causal()}),
    (layers.KimiDelta(**size, rngs=rngs), x, {"segments": documents}),
    (models.Decoder(hybrid, rngs=rngs), tokens, {}),
    (models.Decoder(learned, rngs=rngs), tokens, {}),
    (models.Encoder(learned, rngs=rngs), tokens, {"lengths": np.array([29, 7])}),
):
    graph, state = nnx.split(layer)
    own = {name: value for name, value in options.items() if name in ("segments", "lengths")}
    rest = {name: value for name, value in options.items() if name not in own}
    call = lambda arrays: nnx.merge(graph, arrays[0])(arrays[1], **arrays[2], **rest)
    spec = {name: along if name == "segments" else jax.P() for name in own}
    got = divide(call, (state, inputs, own), (jax.P(), along, spec), along)
    assert_close(got, call((state, inputs, own)))
"""

REFUSED = """
from refusals import assert_refused

rngs, latent = nnx.Rngs(0), {"latent_dim": 4, "head_dim": 3, "rotary_dim": 2}
chooser = {"index_count": 3, "index_heads": 2, "index_dim": 4}
chosen = layers.LatentAttention(8, 2, **latent, **chooser, rngs=rngs)
sizes = {"head_dim": 4, "query_latent_dim": 8, "output_groups": 1, "output_latent_dim": 8}
sizes |= {"window": 4, "compress_rate": 2, "rotary_dim": 2}
pooled = layers.CompressedAttention(8, 2, **sizes, rngs=rngs)
config = models.TransformerConfig(d_model=8, num_heads=2, vocab_size=11, num_layers=1, d_ff=9)
classifier = models.Classifier(config, 3, rngs=rngs)
viewing = dataclasses.replace(config, vocab_size=None, input_width=8, class_token=True)
viewer, encoder = models.Encoder(viewing, rngs=rngs), models.Encoder(config, rngs=rngs)
tokens, lengths = np.ones((2, 48), np.int32), np.array([29, 7])
padded = lambda tokens: encoder(tokens, lengths=lengths, positions=jnp.arange(6))
delta, x = layers.GatedDeltaNet(8, 2, rngs=rngs), np.ones((2, 48, 8), np.float32)

run = lambda layer, x=x: divide(layer, x, along, along)
assert_refused(
    (lambda: run(lambda x: chosen(x, mask=masks.causal())), "index_count: expected whole sequences"),
    (lambda: run(pooled), "CompressedAttention: expected whole sequences"),
    (lambda: run(classifier, tokens), "pooling: expected whole sequences"),
    (lambda: run(viewer), "class_token: expected whole sequences"),
    (lambda: run(padded, tokens), "positions, beside lengths: expected whole sequences"),
    (lambda: run(lambda x: readouts.read(x, x).max_weight), "readouts: expected whole sequences"),
    (lambda: run(lambda x: readouts.index_scores(x[:, None], x)), "readouts: expected whole"),
    (lambda: run(lambda x: attend(x, x, x, query_positions=np.arange(48))), "query_positions: expected none"),
    (lambda: run(lambda x: attend(x, x, x, mask=masks.segments([0] * 6))), "of the whole", ValueError),
    (lambda: run(delta, x[:, :8]), "x: expected at least 3 tokens on each device.* got 1", ValueError),
    error=NotImplementedError,
)
"""


def test_linear_attention_goes_on_from_the_devices_before():
    on_eight_devices(SETTING + LINEAR)


def test_layers_know_where_a_part_begins():
    on_eight_devices(SETTING + LAYERS)


def test_what_needs_whole_sequences_is_refused():
    on_eight_devices(SETTING + REFUSED)
