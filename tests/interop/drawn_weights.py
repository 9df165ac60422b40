"""Weights of small reference models, drawn from their names: the same in every process, so never stored."""

import functools
import json
import math
import zlib
from pathlib import Path

import numpy as np

PARITY = Path(__file__).parent / "parity"
QWEN = ("qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_next")
DEEPSEEK = ("deepseek_v3", "deepseek_v32", "kimi_linear")
DECODERS = ("gpt2", "llama", "mistral", *QWEN, *DEEPSEEK, "gemma2", "gemma3_text", "gpt_oss")
NAMES = ("bert", "modernbert", "vit", *DECODERS, "t5", "t5_gated")


def uniform(name, shape):
    """Numbers in [-1, 1) that depend on the name alone, exact in float32."""
    # The raw stream of a bit generator is the only one that NumPy never changes.
    raw = np.random.Philox(key=zlib.crc32(name.encode())).random_raw(math.prod(shape))
    return ((raw >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - 1).reshape(shape)


def draw(name, shape, kind):
    """A tensor of a model of this kind, of such a size that attention is neither even nor one-hot."""
    numbers = uniform(name, shape)
    if name.endswith("bias") and (len(shape) == 1 or "experts" in name):
        return numbers * np.float32(0.25)
    if "experts" in name and len(shape) == 3:
        return numbers * np.float32(1.5 * math.sqrt(3 / shape[1]))
    if name.endswith("sinks"):
        return numbers * np.float32(2)
    if len(shape) == 1:  # the scale of a norm; Gemma adds one itself, and Qwen 3.5 but in linear attention
        adds_one = kind.startswith("gemma") or (kind in QWEN[-2:] and "linear_attn" not in name)
        return numbers * np.float32(0.25) + np.float32(not adds_one)
    if any(part in name for part in ("embed", "shared.", "wte", "wpe", "cls_token", "relative")):
        return numbers
    gain = 0.6 if ".q." in name else 1.5  # T5 does not scale its scores
    return numbers * np.float32(gain * math.sqrt(3 / math.prod(shape[1:])))


def draw_all(shapes, kind):
    """Every tensor of a model, by its name."""
    return {name: draw(name, tuple(shape), kind) for name, shape in shapes.items()}


@functools.cache
def draw_tensors(name):
    """The config of a reference model, and every tensor of it by its name."""
    facts, _ = read_reference(name)
    return facts["config"], draw_all(facts["shapes"], facts["config"]["model_type"])


def fill(folder, name, change=None):
    """Write a reference model's checkpoint, as transformers would have, with its tensors changed."""
    from regard.interop.weight_files import write_weights  # where references are made, there is none

    config, drawn = draw_tensors(name)
    tensors = dict(drawn)
    if change:
        change(tensors)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder / "model.safetensors", tensors, force=True)
    return folder


def tokens(name, shape, vocab_size):
    """Token ids that depend on the name alone."""
    return np.floor((uniform(name, shape) + 1) / 2 * vocab_size).astype(np.int32)


def read_reference(name):
    """The stored facts of a model: {"config", "shapes", ...} and its arrays by name."""
    with np.load(PARITY / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    return json.loads(arrays.pop("facts").tobytes()), arrays
