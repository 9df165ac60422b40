"""Write the reference numbers of tests/interop/test_parity.py with PyTorch and transformers; run by hand.

    python -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers safetensors
    /tmp/torch/bin/python tests/interop/parity/make_references.py [name ...] [new_name=config.json ...]

Each file holds the config as transformers writes it, from which it is made again, the names and shapes of the
tensors it writes, and what its model returns in float64 for weights drawn from their names
(`../drawn_weights.py`), with the error of its own float32. Written with torch 2.13 and transformers 5.23 and
5.24.
"""

# ruff: noqa: T201
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parents[1]))
import drawn_weights

ATTENTION = "deepseek_v4_attention"
STEP = 4  # of so many positions, hidden states and weights of the first are stored


class InFloat64(TorchFunctionMode):
    """Every place where transformers asks for float32 (softmax, norms, rotary angles) gets float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        kwargs = {name: _double(value) for name, value in (kwargs or {}).items()}
        return func(*map(_double, args), **kwargs)


def measure_error(actual, truth):
    """The root mean square: the largest of a few thousand roundings is a matter of chance."""
    return float(np.sqrt(np.mean((actual - truth) ** 2)))


def _double(value):
    return torch.float64 if value is torch.float32 else value


def run(name, model, arrays):
    """Outputs of one model, as float64 arrays by name."""
    inputs = {key: torch.as_tensor(value) for key, value in arrays.items()}
    if name == "vit":
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    inputs = {key: value.long() if value.dtype == torch.int32 else value for key, value in inputs.items()}
    seen = model(**inputs, output_hidden_states=True, output_attentions=True)
    found = {}
    if name.startswith("t5"):
        found["logits"], found["memory"] = seen.logits, seen.encoder_last_hidden_state
        sides = {"hidden": seen.decoder_hidden_states, "source_hidden": seen.encoder_hidden_states}
        weights = {"weights": seen.decoder_attentions, "cross_weights": seen.cross_attentions}
    else:
        if hasattr(seen, "logits"):
            found["logits"] = seen.logits
        else:
            found["output"] = seen.last_hidden_state
        sides, weights = {"hidden": seen.hidden_states}, {"weights": seen.attentions}
    for side, layers in (sides | weights).items():
        found[side] = torch.stack(layers)[..., ::STEP, :]
    return {key: value.detach().double().numpy() for key, value in found.items()}


def draw_inputs(name, config, length):
    """Inputs as transformers takes them; the last row is shorter where the model takes a mask."""
    if name == "vit":
        return {"pixel_values": drawn_weights.uniform("pixels", (2, 3, *config.image_size))}
    mask = (np.arange(length) < np.array([[length], [length - 5]])).astype(np.int32)
    tokens = drawn_weights.tokens(f"{name} tokens", (2, length), config.vocab_size)
    arrays = {"input_ids": tokens, "attention_mask": mask}
    if name == "bert":
        arrays["token_type_ids"] = drawn_weights.tokens("types", (2, length), 2)
    if name.startswith("t5"):
        arrays["decoder_input_ids"] = drawn_weights.tokens("target", (2, 11), config.vocab_size)
    return arrays


def write(name, facts, arrays):
    """One file of tests/interop/parity."""
    facts = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    path = drawn_weights.PARITY / f"{name}.npz"
    np.savez_compressed(path, facts=facts, **arrays)
    print(f"{name}: {path.stat().st_size / 1024:.1f} KiB")


def reference_model(name, path):
    """Load drawn weights the way users load a checkpoint, in float64 and in float32."""
    if path:
        settings, length = json.loads(Path(path).read_text()), 13
    else:
        facts, stored = drawn_weights.read_reference(name)
        settings = facts["config"]
        length = stored["input input_ids"].shape[1] if name != "vit" else None
    build = getattr(transformers, settings["architectures"][0])
    config = build.config_class.from_dict(settings)
    config._attn_implementation = "eager"
    with tempfile.TemporaryDirectory() as folder:
        build(config).save_pretrained(folder)
        path = Path(folder) / "model.safetensors"
        with safe_open(path, "np") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in sorted(file.keys())}
        if name == "t5_gated":  # released checkpoints of version 1.1 have a head of their own
            shapes["lm_head.weight"] = shapes["shared.weight"]
        save_file(drawn_weights.draw_all(shapes, config.model_type), path, metadata={"format": "pt"})
        text = json.loads((Path(folder) / "config.json").read_text())
        if name == "t5_gated":
            text["tie_word_embeddings"] = False
            (Path(folder) / "config.json").write_text(json.dumps(text))
        load = {"attn_implementation": "eager"}
        if hasattr(config, "num_experts_per_tok"):
            load["experts_implementation"] = "eager"
        inputs = draw_inputs(name, config, length)
        with InFloat64():
            # Built, not only cast, in float64: rotary frequencies are computed once, here.
            torch.set_default_dtype(torch.float64)
            exact = run(name, build.from_pretrained(folder, dtype=torch.float64, **load).eval(), inputs)
            torch.set_default_dtype(torch.float32)
        plain = run(name, build.from_pretrained(folder, dtype=torch.float32, **load).eval(), inputs)
    valid = inputs.get("attention_mask")
    errors = {}
    for key in exact:
        exact[key], plain[key] = (_blank(key, x[key], valid, name) for x in (exact, plain))
        errors[key] = measure_error(plain[key], exact[key])
    arrays = {f"input {key}": value for key, value in inputs.items()}
    for key, value in exact.items():
        arrays[key] = value.astype(np.float32) if "weights" in key else value
    write(name, {"config": text, "shapes": shapes, "errors": errors, "step": STEP}, arrays)


def _blank(key, value, valid, name):
    """Zero what padded queries give: it means nothing, and models here give zeros."""
    padded_target = name.startswith("t5") and key in ("logits", "hidden", "weights", "cross_weights")
    if valid is None or padded_target:
        return value
    keep = valid.astype(bool)
    if key in ("logits", "output", "memory"):
        return value * keep[..., None]
    keep = keep[:, ::STEP]
    return value * (keep[..., None] if "hidden" in key else keep[:, None, :, None])


def reference_attention(name):
    """What the two layers of DeepSeek-V4's attention with compressed keys give in float64."""
    import transformers.models.deepseek_v4.modeling_deepseek_v4 as deepseek_v4

    kinds = {"heavily_compressed_attention": 5, "compressed_sparse_attention": 3}
    config = transformers.DeepseekV4Config(
        hidden_size=24, num_attention_heads=6, head_dim=10, q_lora_rank=7, qk_rope_head_dim=4,
        num_hidden_layers=2, layer_types=[*kinds], mlp_layer_types=["moe"] * 2, compress_rates=kinds,
        sliding_window=4, o_groups=3, o_lora_rank=5, index_n_heads=19, index_head_dim=8, index_topk=2,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    )  # fmt: skip
    config._attn_implementation = "eager"
    x = torch.as_tensor(drawn_weights.uniform("x", (2, 17, 24))).double()
    index, arrays, shapes = torch.arange(17), {}, {}
    distance = index[:, None] - index
    mask = torch.zeros(2, 1, 17, 17).double().masked_fill((distance < 0) | (distance > 3), float("-inf"))
    torch.set_default_dtype(torch.float64)
    with InFloat64():
        turn = deepseek_v4.DeepseekV4RotaryEmbedding(config)
        angles = {"compress": turn(x, position_ids=index[None], layer_type="compress")}
        for number, kind in enumerate(kinds):
            layer = deepseek_v4.DeepseekV4Attention(config, number).double().eval()
            shapes[kind] = {key: tuple(value.shape) for key, value in layer.named_parameters()}
            drawn = drawn_weights.draw_all(shapes[kind], config.model_type)
            layer.load_state_dict({key: torch.as_tensor(value) for key, value in drawn.items()})
            arrays[kind] = layer(x, angles, index[None], mask)[0].detach().numpy()
    torch.set_default_dtype(torch.float32)
    write(name, {"shapes": shapes}, arrays)


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    for wanted in sys.argv[1:] or [*drawn_weights.NAMES, ATTENTION]:
        name, _, path = wanted.partition("=")
        reference_attention(name) if name == ATTENTION else reference_model(name, path)
