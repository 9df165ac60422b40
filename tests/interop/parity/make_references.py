"""Write the reference numbers of tests/interop/test_parity.py with PyTorch and transformers; run by hand.

    python -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers safetensors
    /tmp/torch/bin/python tests/interop/parity/make_references.py [name ...]

Each file holds the config as transformers writes it, the names and shapes of the tensors it writes, and what
its model returns in float64 for weights drawn from their names (`../drawn_weights.py`), with the error of its
own float32. Written with torch 2.13 and transformers 5.23 and 5.24.
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

LLAMA = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 11, "qk_rope_head_dim": 4, "qk_nope_head_dim": 7, "v_head_dim": 5,
    "num_experts_per_tok": 3, "moe_intermediate_size": 11,
}  # fmt: skip
T5 = {
    "vocab_size": 61, "d_model": 24, "d_kv": 6, "d_ff": 37, "num_layers": 2, "num_heads": 3,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 11,
    "decoder_start_token_id": 0,
}  # fmt: skip

# name: (model, tokens per row, config)
MODELS = {
    "bert": (transformers.BertModel, 13, transformers.BertConfig(
        vocab_size=67, hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=37,
        max_position_embeddings=19,
    )),
    "gpt2": (transformers.GPT2LMHeadModel, 11, transformers.GPT2Config(
        vocab_size=71, n_embd=30, n_layer=2, n_head=5, n_inner=41, n_positions=17, bos_token_id=1,
        eos_token_id=2,
    )),
    "llama": (transformers.LlamaForCausalLM, 13, transformers.LlamaConfig(
        **LLAMA, rope_parameters={
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 23},
    )),
    "mistral": (transformers.MistralForCausalLM, 17, transformers.MistralConfig(
        **{**LLAMA, "hidden_size": 36, "num_key_value_heads": 3}, sliding_window=5,
    )),
    "qwen2": (transformers.Qwen2ForCausalLM, 11, transformers.Qwen2Config(
        **LLAMA, use_sliding_window=True, sliding_window=4, max_window_layers=1,
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    )),
    "qwen3": (transformers.Qwen3ForCausalLM, 13, transformers.Qwen3Config(
        **LLAMA, head_dim=10, tie_word_embeddings=True, rope_parameters={
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    )),
    "gemma2": (transformers.Gemma2ForCausalLM, 13, transformers.Gemma2Config(
        **LLAMA, head_dim=10, sliding_window=4, query_pre_attn_scalar=7, attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    )),
    "gemma3_text": (transformers.Gemma3ForCausalLM, 13, transformers.Gemma3TextConfig(
        **{**LLAMA, "num_hidden_layers": 3}, head_dim=10, rms_norm_eps=0.001, sliding_window=4,
        sliding_window_pattern=3, query_pre_attn_scalar=7, rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
    )),
    "qwen3_moe": (transformers.Qwen3MoeForCausalLM, 13, transformers.Qwen3MoeConfig(
        **{**LLAMA, "num_hidden_layers": 3}, head_dim=10, num_experts=7, num_experts_per_tok=3,
        moe_intermediate_size=11, mlp_only_layers=[1],
    )),
    "qwen3_5_text": (transformers.Qwen3_5ForCausalLM, 13, transformers.Qwen3_5TextConfig(
        **{**LLAMA, "num_hidden_layers": 3}, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=6,
        linear_key_head_dim=5, linear_value_head_dim=7, linear_conv_kernel_dim=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    )),
    "qwen3_next": (transformers.Qwen3NextForCausalLM, 13, transformers.Qwen3NextConfig(
        **{**LLAMA, "num_hidden_layers": 4}, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=6,
        linear_key_head_dim=5, linear_value_head_dim=7, num_experts=7, num_experts_per_tok=3,
        moe_intermediate_size=11, shared_expert_intermediate_size=13, mlp_only_layers=[1],
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    )),
    "deepseek_v3": (transformers.DeepseekV3ForCausalLM, 13, transformers.DeepseekV3Config(
        **{**LLAMA, "num_key_value_heads": 6}, **LATENT, q_lora_rank=13, n_routed_experts=8, n_group=4,
        topk_group=2, first_k_dense_replace=1, n_shared_experts=2, rope_parameters={
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 16},
    )),
    "deepseek_v32": (transformers.DeepseekV32ForCausalLM, 13, transformers.DeepseekV32Config(
        **{**LLAMA, "num_key_value_heads": 6}, **LATENT, q_lora_rank=13, n_routed_experts=8, n_group=4,
        topk_group=2, first_k_dense_replace=1, index_topk=5, index_n_heads=19, index_head_dim=6,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )),
    "kimi_linear": (transformers.KimiLinearForCausalLM, 13, transformers.KimiLinearConfig(
        **{**LLAMA, "num_hidden_layers": 3, "num_key_value_heads": 6}, **LATENT, num_local_experts=7,
        linear_head_dim=5, linear_num_heads=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    )),
    "gpt_oss": (transformers.GptOssForCausalLM, 17, transformers.GptOssConfig(
        **{**LLAMA, "intermediate_size": 11}, head_dim=10, sliding_window=5, num_local_experts=5,
        num_experts_per_tok=2, swiglu_limit=0.75, rope_parameters={
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 16},
    )),
    "modernbert": (transformers.ModernBertModel, 13, transformers.ModernBertConfig(
        vocab_size=67, hidden_size=24, intermediate_size=37, num_hidden_layers=4, num_attention_heads=3,
        max_position_embeddings=64, norm_eps=0.001, local_attention=6, pad_token_id=0, bos_token_id=1,
        cls_token_id=1, eos_token_id=2, sep_token_id=2, rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
    )),
    "t5": (transformers.T5ForConditionalGeneration, 13, transformers.T5Config(**T5)),
    "t5_gated": (transformers.T5ForConditionalGeneration, 13,
        transformers.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    "vit": (transformers.ViTModel, None, transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=37,
        image_size=(12, 20), patch_size=4,
    )),
}  # fmt: skip

STEP = 4  # of so many positions, hidden states and weights of the first are stored
GRADIENTS = [  # of llama
    "model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight",
    "model.layers.0.post_attention_layernorm.weight", "model.layers.1.mlp.gate_proj.weight",
]  # fmt: skip


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
    """Outputs and gradients of one model, as float64 arrays by name."""
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
    if name == "llama":
        mask, chosen = inputs["attention_mask"][:, 1:].to(model.dtype), inputs["input_ids"][:, 1:, None]
        surprise = -torch.log_softmax(seen.logits[:, :-1], -1).gather(-1, chosen)[..., 0]
        found["loss"] = (surprise * mask).sum() / mask.sum()
        parameters = dict(model.named_parameters())
        grads = torch.autograd.grad(found["loss"], [parameters[one] for one in GRADIENTS])
        found.update({f"gradient {one}": grad for one, grad in zip(GRADIENTS, grads, strict=True)})
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


def reference_model(name):
    """Load drawn weights the way users load a checkpoint, in float64 and in float32."""
    build, length, config = MODELS[name]
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
    if valid is None or key == "loss" or key.startswith("gradient") or padded_target:
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
    for wanted in sys.argv[1:] or [*MODELS, "deepseek_v4_attention"]:
        (reference_model if wanted in MODELS else reference_attention)(wanted)
