"""Pretrained architectures against transformers: equal in float64, and in float32 as exact as torch's own.

The references are stored (parity/, made by make_references.py); their weights are drawn again here, written
as a checkpoint and loaded like one.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import drawn_weights
from drawn_weights import DECODERS, NAMES
from regard.interop import huggingface
from regard.interop.weight_maps import parameter_paths
from regard.models import generate

# Of these, other names and tests see nearly everything.
LONG = ("t5", "llama", "qwen2", "qwen3", "mistral")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder as transformers would have saved it."""
    return functools.cache(lambda name: drawn_weights.fill(tmp_path_factory.mktemp(name), name))


def mark_padding(arrays):
    """Lengths per row, and 1 at the valid positions."""
    mask = arrays.get("input attention_mask")
    return (None, None) if mask is None else (mask.sum(-1), mask.astype(bool))


def run(name, pretrained, arrays, dtype):
    """What the references hold, from a loaded model, as one program; layers first."""
    lengths, _ = mark_padding(arrays)
    options = {"aux": ("weights", "hidden")}
    if name == "vit":
        images = jnp.asarray(arrays["input pixel_values"], dtype).transpose(0, 2, 3, 1)
        inputs = (huggingface.cut_patches(images, pretrained.settings),)
    elif name.startswith("t5"):
        inputs = arrays["input input_ids"], arrays["input decoder_input_ids"]
        options["source_lengths"] = lengths
    else:
        inputs = (arrays["input input_ids"],)
        types = arrays.get("input token_type_ids")
        options |= {"lengths": lengths} if types is None else {"lengths": lengths, "token_types": types}
    out, seen = nnx.jit(lambda model, *inputs: model(*inputs, **options))(pretrained.model, *inputs)
    found = {"logits" if name in DECODERS or name.startswith("t5") else "output": out}
    if not name.startswith("t5"):
        # After the last block, the references hold what the final norm makes of it, but for ViT.
        hidden = [seen["embedding"], *(block["hidden"] for block in seen["blocks"])]
        found["hidden"] = hidden if name == "vit" else hidden[:-1]
        found["weights"] = [block["weights"] for block in seen["blocks"] if block.keys() > {"hidden"}]
        return found
    found["source_hidden"] = [block["hidden"] for block in seen["encoder"][:-1]]
    found["hidden"] = [block["hidden"] for block in seen["decoder"][:-1]]
    for kind, key in (("self", "weights"), ("cross", "cross_weights")):
        found[key] = [block[kind]["weights"] for block in seen["decoder"]]
    return found


def place(name, key, value, arrays, facts):
    """A result beside that of the reference: some positions, zero at padded queries."""
    _, valid = mark_padding(arrays)
    step, truth = facts["step"], arrays[key]
    if key in ("logits", "output"):
        value = np.asarray(value)
    else:
        first = 1 if name.startswith("t5") and "hidden" in key else 0  # the embedding is not asked for
        truth = truth[first : first + len(value)]
        value = np.stack([np.asarray(one) for one in value])[..., ::step, :]
    if valid is None or (name.startswith("t5") and key != "source_hidden"):
        return value, truth
    keep = valid if key in ("logits", "output") else valid[:, ::step]
    return value * (keep[:, None, :, None] if "weights" in key else keep[..., None]), truth


def assert_within(actual, truth, error, name):
    """Root mean square at most twice torch's own in float32, which counts as one rounding of the largest."""
    allowed = 2 * max(error, np.finfo(actual.dtype).eps * np.abs(truth).max())
    assert actual.shape == truth.shape, f"{name}: {actual.shape} for {truth.shape}"
    found = np.sqrt(np.mean((actual.astype(np.float64) - truth) ** 2))
    assert found <= allowed, f"{name}: error {found:.3g}, allowed {allowed:.3g}"


def assert_same(actual, truth, name):
    """Float64 that nowhere went through float32: every number within a thousand roundings of the largest."""
    assert actual.dtype == np.float64
    assert actual.shape == truth.shape, f"{name}: {actual.shape} for {truth.shape}"
    # Weights are stored rounded to float32.
    rounding = np.finfo(truth.dtype).eps * (1 if truth.dtype == np.float32 else 1000)
    error = np.abs(actual - truth).max()
    assert error <= rounding * np.abs(truth).max(), f"{name}: error {error:.3g} of {np.abs(truth).max():.3g}"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in NAMES])
def test_float64_is_that_of_torch(name, checkpoint, wide):
    facts, arrays = drawn_weights.read_reference(name)
    pretrained = huggingface.load(checkpoint(name), dtype=jnp.float64)
    for key, value in run(name, pretrained, arrays, jnp.float64).items():
        assert_same(*place(name, key, value, arrays, facts), f"{name} {key}")


def test_float32_is_as_exact_as_torch(checkpoint):
    """Changing one weight by a little is seen: the comparison can fail."""
    facts, arrays = drawn_weights.read_reference("llama")
    model, error = huggingface.load(checkpoint("llama")).model, facts["errors"]["logits"]
    lengths, valid = mark_padding(arrays)
    call = nnx.jit(lambda model: model(arrays["input input_ids"], lengths=lengths))
    predict = lambda: np.asarray(call(model)) * valid[..., None]
    assert predict().dtype == np.float32
    assert_within(predict(), arrays["logits"], error, "logits")
    kernel = parameter_paths(model)["trunk.stack.blocks.1.attention.key_projection.kernel"]
    kernel[...] = np.asarray(kernel[...]) * np.float32(1 + 1e-4)
    with pytest.raises(AssertionError, match="error"):
        assert_within(predict(), arrays["logits"], error, "logits")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "capacities"), [("gemma3_text", (10, 10, 13)), ("gpt_oss", (11, 17)), ("deepseek_v32", (13, 13))]
)
def test_what_is_written_through_a_cache_is_what_torch_would(name, capacities, checkpoint, wide):
    """Past the window, where layers of both kinds have dropped and kept keys turned by their own bases."""
    _, arrays = drawn_weights.read_reference(name)
    tokens, truth, size = arrays["input input_ids"][:1], arrays["logits"][:1], capacities[-1]
    model = huggingface.load(checkpoint(name), dtype=jnp.float64).model
    read, cache, found = nnx.jit(type(model).read), model.start_cache(1, size, chunk=7), []
    for first, last in ((0, 7), *((place, place + 1) for place in range(7, size))):
        hidden, cache = read(model, tokens[:, first:last], cache)
        found.append(model.predict(hidden))
    assert tuple(layer.capacity for layer in cache.layers) == capacities
    assert_same(np.concatenate(found, axis=1), truth, "logits")
    written = generate(model, tokens[:, :7], max_tokens=6).tokens
    whole = model(jnp.concatenate([tokens[:, :7], written], axis=1))
    np.testing.assert_array_equal(whole[:, 6:-1].argmax(-1), written)
