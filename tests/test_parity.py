"""Pretrained architectures give what transformers gives: float64 against float64, float32 as exact as its own.

The references are stored (tests/parity, written by make_references.py); their weights are drawn again here,
written as a checkpoint and loaded like one.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import drawn_weights
from regard.interop import huggingface
from regard.interop.huggingface_exports import parameter_paths
from regard.interop.weight_files import write_weights
from regard.interop.weight_maps import choose_table

ENCODERS = ("bert", "vit")
DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2")
NAMES = (*ENCODERS, *DECODERS, "t5", "t5_gated")


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


def evaluate(name, pretrained, arrays, dtype):
    """What the references hold, from a loaded model."""
    model, aux = pretrained.model, ("weights", "hidden")
    lengths = arrays["input attention_mask"].sum(-1) if "input attention_mask" in arrays else None
    if name.startswith("t5"):
        source, target = arrays["input input_ids"], arrays["input decoder_input_ids"]
        logits, seen = model(source, target, source_lengths=lengths, aux=aux)
        memory, encoded = model.encoder(source, lengths=lengths, aux=aux)
        decoded = model.decode(target, memory, source_lengths=lengths)
        return {
            "logits": logits,
            "memory": memory,
            "hidden": None,
            "source_hidden": [encoded["embedding"], *(b["hidden"] for b in encoded["blocks"][:-1]), memory],
            "weights": [block["self"]["weights"] for block in seen["decoder"]],
            "cross_weights": [block["cross"]["weights"] for block in seen["decoder"]],
        } | {"decoded": decoded}
    if name == "vit":
        images = jnp.asarray(arrays["input pixel_values"], dtype).transpose(0, 2, 3, 1)
        output, seen = model(huggingface.cut_patches(images, pretrained.settings), aux=aux)
    elif name == "bert":
        types = arrays["input token_type_ids"]
        output, seen = model(arrays["input input_ids"], lengths=lengths, token_types=types, aux=aux)
    else:
        logits, seen = model(arrays["input input_ids"], lengths=lengths, aux=aux)
        hidden, _ = model.trunk(arrays["input input_ids"], lengths=lengths, aux=aux)
        output = None
    blocks = seen["blocks"]
    found = {
        "hidden": [seen["embedding"], *(block["hidden"] for block in blocks)],
        "weights": [block["weights"] for block in blocks],
    }
    return found | ({"logits": logits} if output is None else {"output": output})
