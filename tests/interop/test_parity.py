"""Pretrained architectures against transformers: equal in float64, and in float32 as exact as torch's own.

The references are stored (parity/, made by make_references.py); their weights are drawn again here, written
as a checkpoint and loaded like one.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import drawn_weights
from economy import mostly_slow
from regard.interop import huggingface
from regard.interop.families import FAMILIES
from regard.interop.weight_files import write_weights
from regard.interop.weight_maps import name_tensors, parameter_paths
from regard.models import generate
from regard.models.padding import mask_padding

DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss")
NAMES = ("bert", "modernbert", "vit", *DECODERS, "t5", "t5_gated")
ASKED = ("weights", "hidden")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder as transformers would have saved it."""
    folders = {}

    def build(name):
        if name not in folders:
            facts, _ = drawn_weights.read_reference(name)
            folder = folders[name] = tmp_path_factory.mktemp(name)
            (folder / "config.json").write_text(json.dumps(facts["config"]))
            tensors = drawn_weights.draw_all(facts["shapes"], facts["config"]["model_type"])
            write_weights(folder / "model.safetensors", tensors)
        return folders[name]

    return build


def mark_padding(arrays):
    """Lengths per row, and 1 at the valid positions."""
    mask = arrays.get("input attention_mask")
    return (None, None) if mask is None else (mask.sum(-1), mask.astype(bool))


def run(name, pretrained, arrays, dtype):
    """What the references hold, from a loaded model."""
    graph, state = nnx.split(pretrained.model)
    return jax.jit(lambda state: look(name, nnx.merge(graph, state), pretrained.settings, arrays, dtype))(
        state
    )


def look(name, model, settings, arrays, dtype):
    """The outputs and all that was asked for on the way."""
    lengths, _ = mark_padding(arrays)
    inputs = arrays.get("input input_ids")
    if name.startswith("t5"):
        target = arrays["input decoder_input_ids"]
        logits, _ = model(inputs, target, source_lengths=lengths, aux=ASKED)
        memory, read = model.encoder(inputs, lengths=lengths, aux=ASKED)
        written = model._target_embedding(target)
        final, wrote = model.decoder(written, memory, memory_mask=mask_padding(lengths), aux=ASKED)
        return {
            "logits": logits,
            "memory": memory,
            "source_hidden": [read["embedding"], *(block["hidden"] for block in read["blocks"][:-1]), memory],
            "hidden": [*(block["hidden"] for block in wrote[:-1]), final],
            "weights": [block["self"]["weights"] for block in wrote],
            "cross_weights": [block["cross"]["weights"] for block in wrote],
        }
    found = {}
    if name in DECODERS:
        found["logits"], seen = model(inputs, lengths=lengths, aux=ASKED)
        final = model.trunk(inputs, lengths=lengths)
    elif name == "vit":
        images = jnp.asarray(arrays["input pixel_values"], dtype).transpose(0, 2, 3, 1)
        final, seen = model(huggingface.cut_patches(images, settings), aux=ASKED)
        found["output"] = final
    else:
        types = arrays.get("input token_type_ids")
        final, seen = model(inputs, lengths=lengths, token_types=types, aux=ASKED)
        found["output"] = final
    blocks = seen["blocks"]
    # The last entry there comes after the final norm, but for ViT.
    last = blocks[-1]["hidden"] if name == "vit" else final
    found["hidden"] = [seen["embedding"], *(block["hidden"] for block in blocks[:-1]), last]
    found["weights"] = [block["weights"] for block in blocks]
    return found


def place(name, key, value, arrays, step):
    """Results as the references hold them: layers first, some positions, zero at padded queries."""
    _, valid = mark_padding(arrays)
    whole = key in ("logits", "output", "memory")
    value = np.asarray(value) if whole else np.stack([np.asarray(one) for one in value])[..., ::step, :]
    if valid is None or (name.startswith("t5") and key not in ("memory", "source_hidden")):
        return value
    keep = valid if whole else valid[:, ::step]
    return value * (keep[:, None, :, None] if "weights" in key else keep[..., None])


def take_loss_gradients(name, pretrained, arrays, wanted):
    """The loss of the references and its gradients, named and laid out as there."""
    graph, state = nnx.split(pretrained.model)
    lengths, valid = mark_padding(arrays)
    tokens = arrays["input input_ids"]

    def measure(state):
        model = nnx.merge(graph, state)
        if name == "bert":
            hidden = model(tokens, lengths=lengths, token_types=arrays["input token_type_ids"])
            cotangent = drawn_weights.uniform("cotangent", hidden.shape) * valid[..., None]
            return jnp.sum(hidden * jnp.asarray(cotangent, hidden.dtype))
        logits = model(tokens, lengths=lengths)[:, :-1]
        surprise = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]
        weight = jnp.asarray(valid[:, 1:] / valid[:, 1:].sum(), logits.dtype)
        return jnp.sum(surprise * weight)

    loss, grads = jax.jit(jax.value_and_grad(measure))(state)
    grads = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(grads)}
    sizes = {path: (leaf.shape, leaf.dtype) for path, leaf in grads.items()}
    plans = name_tensors(FAMILIES[name].weights, sizes, grads.get, pretrained.settings)
    shift = "" if name == "bert" else "model."
    named = {key if key.startswith(shift) else shift + key: plan for key, plan in plans.items()}
    found = {f"gradient {key}": named[key].compute() for key in wanted}
    return found if name == "bert" else found | {"loss": loss}


def assert_within(actual, truth, error, name):
    """Root mean square at most twice torch's own in float32, which counts as one rounding of the largest."""
    actual = np.asarray(actual)
    rounding = np.finfo(actual.dtype).eps * np.abs(truth).max()
    allowed = 2 * max(error, rounding)
    assert actual.shape == truth.shape, f"{name}: {actual.shape} for {truth.shape}"
    found = np.sqrt(np.mean((actual.astype(np.float64) - truth) ** 2))
    assert found <= allowed, f"{name}: error {found:.3g}, allowed {allowed:.3g}"


def assert_same(actual, truth, name):
    """Float64 that nowhere went through float32: every number within a thousand roundings of the largest."""
    actual = np.asarray(actual)
    assert actual.dtype == np.float64
    assert actual.shape == truth.shape, f"{name}: {actual.shape} for {truth.shape}"
    # Weights are stored rounded to float32.
    rounding = np.finfo(truth.dtype).eps * (1 if truth.dtype == np.float32 else 1000)
    error = np.abs(actual - truth).max()
    assert error <= rounding * np.abs(truth).max(), f"{name}: error {error:.3g} of {np.abs(truth).max():.3g}"


USUAL = ("bert", "vit", "llama", "gemma2", "t5_gated")


@pytest.mark.parametrize("name", mostly_slow(NAMES, *USUAL))
def test_float32_is_as_exact_as_torch(name, checkpoint):
    facts, arrays = drawn_weights.read_reference(name)
    pretrained = huggingface.load(checkpoint(name))
    for key, value in run(name, pretrained, arrays, jnp.float32).items():
        value, truth = place(name, key, value, arrays, facts["step"]), arrays[key]
        truth = truth[1:] if name.startswith("t5") and key == "hidden" else truth
        assert value.dtype == np.float32
        assert_within(value, truth, facts["errors"][key], f"{name} {key}")


@pytest.mark.parametrize("name", mostly_slow(NAMES, "bert", "llama"))
def test_float64_is_that_of_torch(name, checkpoint, x64):
    facts, arrays = drawn_weights.read_reference(name)
    pretrained = huggingface.load(checkpoint(name), dtype=jnp.float64)
    # flax's norms compare dtypes in a way that strict promotion refuses for float64.
    with jax.numpy_dtype_promotion("standard"):
        results = run(name, pretrained, arrays, jnp.float64)
    for key, value in results.items():
        value, truth = place(name, key, value, arrays, facts["step"]), arrays[key]
        truth = truth[1:] if name.startswith("t5") and key == "hidden" else truth
        assert_same(value, truth, f"{name} {key}")


CACHES = [("gemma3_text", (10, 10, 13)), ("gpt_oss", (11, 17)), ("qwen3_moe", (13, 13, 13))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "capacities"), CACHES)
def test_what_is_written_through_a_cache_is_what_torch_would(name, capacities, checkpoint, x64):
    """Past the window, where layers of both kinds have dropped and kept keys turned by their own bases."""
    _, arrays = drawn_weights.read_reference(name)
    tokens, truth, size = arrays["input input_ids"][:1], arrays["logits"][:1], capacities[-1]
    with jax.numpy_dtype_promotion("standard"):
        model = huggingface.load(checkpoint(name), dtype=jnp.float64).model
        read, cache, found = nnx.jit(type(model).read), model.start_cache(1, size, chunk=7), []
        for first, last in ((0, 7), *((place, place + 1) for place in range(7, size))):
            hidden, cache = read(model, tokens[:, first:last], cache)
            found.append(model.predict(hidden))
        assert tuple(layer.capacity for layer in cache.layers) == capacities
        assert_same(jnp.concatenate(found, axis=1), truth, "logits")
        written = generate(model, tokens[:, :7], max_tokens=6).tokens
        whole = model(jnp.concatenate([tokens[:, :7], written], axis=1))
    np.testing.assert_array_equal(whole[:, 6:-1].argmax(-1), written)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_are_those_of_torch(name, dtype, checkpoint):
    facts, arrays = drawn_weights.read_reference(name)
    wanted = [key.removeprefix("gradient ") for key in arrays if key.startswith("gradient ")]
    assert len(wanted) == 5
    with jax.enable_x64(dtype == np.float64), jax.numpy_dtype_promotion("standard"):
        pretrained = huggingface.load(checkpoint(name), dtype=dtype)
        found = take_loss_gradients(name, pretrained, arrays, wanted)
    for key, value in found.items():
        if dtype == np.float64:
            assert_same(value, arrays[key], f"{name} {key}")
        else:
            assert_within(value, arrays[key], facts["errors"][key], f"{name} {key}")


def test_references_fit_their_checkpoints(checkpoint):
    """Changing one weight by a little is seen: the comparison can fail."""
    facts, arrays = drawn_weights.read_reference("llama")
    pretrained = huggingface.load(checkpoint("llama"))
    kernel = parameter_paths(pretrained.model)["trunk.stack.blocks.1.attention.key_projection.kernel"]
    kernel[...] = kernel[...] * (1 + 1e-4)
    logits = np.asarray(run("llama", pretrained, arrays, jnp.float32)["logits"])
    logits = place("llama", "logits", logits, arrays, facts["step"])
    with pytest.raises(AssertionError, match="error"):
        assert_within(logits, arrays["logits"], facts["errors"]["logits"], "logits")
