"""Folders of Hugging Face: configs in every spelling, weights that do not fit, saving, tokenizers."""

import dataclasses
import functools
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import drawn_weights
from command_runs import run_command
from drawn_weights import NAMES, draw_tensors, fill
from layer_oracle import build_drawn
from refusals import assert_refused
from regard.interop import huggingface
from regard.interop.families import FAMILIES
from regard.interop.families.entries import IGNORED
from regard.interop.huggingface_configs import write_settings
from regard.interop.weight_files import WeightFileError, open_weights, write_weights
from regard.interop.weight_maps import name_tensors, parameter_paths
from regard.models import PRESETS, Decoder
from regard.positions import DynamicNTK, Linear, Llama3, YaRN

LLAMA = {
    "model_type": "llama", "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": None,
    "intermediate_size": 37, "num_hidden_layers": 5, "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip


def read(**settings):
    return huggingface.read_config({**LLAMA, **settings})[1]


def assert_same_parameters(one, other):
    one, other = parameter_paths(one), parameter_paths(other)
    assert {*one} == {*other}
    for path, leaf in one.items():
        np.testing.assert_array_equal(leaf[...], other[path][...])


# Configs.


ORIGINAL = {"original_max_position_embeddings": 16}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 4.0, "attention_factor": 1.5, "truncate": False, "beta_fast": 8, "mscale": 2.0}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"type": "linear", "factor": 2.0}, Linear(2.0)),
        ({"type": "dynamic", "factor": 2.0}, DynamicNTK(2.0, 64, 64)),
        ({"rope_type": "llama3", **LLAMA3, **ORIGINAL}, Llama3(8.0, 16, 1.0, 4.0)),
        ({"type": "yarn", "factor": None, **ORIGINAL}, YaRN(4.0, 16)),
        ({"rope_type": "yarn", **YARN}, YaRN(4.0, 64, 8.0, 1.0, 1.5, False)),
        ({"rope_type": "default"}, None),
    ],
)
def test_rotary_rules_are_read_in_both_spellings(rules, expected):
    old = read(rope_theta=5e5, rope_scaling=rules)
    assert old == read(rope_parameters={**rules, "rope_theta": 5e5})
    # As files written for old and new releases have them.
    assert old == read(rope_parameters={**rules, "rope_theta": 5e5}, rope_scaling=rules, rope_theta=5e5)
    assert (old.rotary_base, old.rotary_scaling, old.rotary_width) == (5e5, expected, None)


def test_rotary_bases_widths_and_rules_are_read():
    assert read().rotary_base == 10_000.0
    assert read(rope_scaling=None, rope_theta=100.0).rotary_scaling is None
    half = {"partial_rotary_factor": 0.5}
    assert read(**half) == read(rope_parameters=half) == read(), "as in transformers; see REFUSED as well"
    yarn = {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert read(rope_scaling=yarn).rotary_scaling.amplitude == 1.0
    for part in ({"mscale_all_dim": 0.7}, {"mscale": 0.5, "mscale_all_dim": 0.9}):
        rule = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL, **part}
        config = huggingface.read_config({**draw_tensors("deepseek_v3")[0], "rope_parameters": rule})[1]
        assert huggingface.read_config(write_settings("deepseek_v3", config))[1] == config
    settings = {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert huggingface.read_config(settings, length=128)[1].rotary_scaling == DynamicNTK(2.0, 64, 128)


def test_windows_and_biases_are_those_of_each_kind():
    assert read(model_type="mistral", sliding_window=7).windows == (6,)
    gemma = {"model_type": "gemma2", "sliding_window": 7, "num_key_value_heads": 2}
    assert read(**gemma).windows == (6, None)
    assert read(**{**gemma, "num_hidden_layers": 1}).windows == (6,)
    kinds = ["full_attention", "full_attention", "sliding_attention"] * 2
    assert read(**gemma, layer_types=kinds, num_hidden_layers=6).windows == (None, None, 6)
    qwen = {"model_type": "qwen2", "sliding_window": 7, "max_window_layers": 3}
    assert read(**qwen, use_sliding_window=True).windows == (None, None, None, 6, 6)
    assert read(**qwen, use_sliding_window=False).windows == (None,)
    assert (read(**qwen).attention_bias, read(**qwen).output_bias) == (True, False)
    assert (read(model_type="qwen3").query_key_norm, read(model_type="qwen3").head_dim) == (True, 128)
    assert read(attention_bias=True, mlp_bias=True).feed_forward_bias
    for name, kind in ((name, kind) for name, kinds in IGNORED.items() for kind in kinds):
        sizes = MIXTURES.get(kind, {}) | {"model_type": kind, "num_key_value_heads": 2}
        assert read(**sizes) == read(**sizes, **{name: True})


def test_what_an_old_folder_leaves_out_is_what_its_library_assumes():
    sizes = {**LLAMA, "hidden_size": 128, "num_attention_heads": 16}
    del sizes["num_key_value_heads"]
    read = lambda kind, **more: huggingface.read_config({**sizes, **more, "model_type": kind})[1]
    mistral = read("mistral")
    assert (mistral.num_key_heads, mistral.windows) == (8, (4095,))
    mistral = read("mistral", num_key_value_heads=None, sliding_window=None)
    assert (mistral.num_key_heads, mistral.windows) == (16, (None,))
    assert read("gemma2").num_key_heads == read("gemma3_text").num_key_heads == 4
    assert read("llama").num_key_heads == 16
    assert read("gemma2", sliding_window=7, sliding_window_size=7).windows[0] == 6
    gpt2 = {"model_type": "gpt2", "n_embd": 24, "n_head": 3, "n_layer": 2, "vocab_size": 61, "n_ctx": 32}
    found = huggingface.read_config(gpt2)[1]
    assert (found.d_ff, found.max_length, found.tied_output, found.activation) == (96, 32, True, "gelu_tanh")
    assert (found.norm_epsilon, found.attention_scale) == (1e-5, None)
    assert huggingface.read_config({**gpt2, "scale_attn_weights": False})[1].attention_scale == 1.0


def test_gemma_3_has_a_rotary_base_for_each_kind_of_layer():
    gemma = lambda **more: read(**{"model_type": "gemma3_text", "num_hidden_layers": 7, **more})
    plain = gemma()
    assert plain.windows == (*(4095,) * 5, None)
    assert (plain.rotary_base, plain.rotary_window_base, plain.rotary_scaling) == (1e6, 1e4, None)
    assert (plain.attention_scale, plain.head_dim, plain.query_key_norm) == (1 / 16, 256, True)
    assert (plain.attention_softcap, plain.output_softcap, plain.tied_output) == (None, None, True)
    assert gemma(sliding_window=4, sliding_window_pattern=3, num_hidden_layers=6).windows == (3, 3, None)
    whole = gemma(sliding_window=None, layer_types=["full_attention"] * 7)
    assert (whole.windows, write_settings("gemma3_text", whole)["sliding_window"]) == ((None,), 4096)
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = gemma(rope_theta=5e5, rope_local_base_freq=7, rope_scaling=scaling)
    rules = {"full_attention": {**scaling, "rope_theta": 5e5}}
    rules["sliding_attention"] = {"rope_type": "default", "rope_theta": 7.0}
    assert old == gemma(rope_parameters=rules)
    assert (old.rotary_base, old.rotary_window_base, old.rotary_scaling) == (5e5, 7.0, Linear(8.0))
    assert gemma(rope_parameters={"full_attention": rules["full_attention"]}).rotary_window_base == 1e4
    # Written for both, and as read: one base for all is no other model.
    for config in (old, plain, dataclasses.replace(plain, rotary_window_base=None)):
        settings = write_settings("gemma3_text", config)
        again = huggingface.read_config({**settings, "rope_parameters": None})[1]
        assert huggingface.read_config(settings)[1] == again
        assert [again.rotary(layer) for layer in range(7)] == [config.rotary(layer) for layer in range(7)]
    with pytest.raises(ValueError, match=r"it cannot say\n  rotary_window_base = None, read as 500000.0$"):
        write_settings("gemma3_text", dataclasses.replace(old, rotary_window_base=None))


GPT_OSS = {**LLAMA, "model_type": "gpt_oss", "num_local_experts": 7, "num_experts_per_tok": 3}
TURNED = {"rope_type": "yarn", **YARN}
QWEN_MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 7, "num_experts_per_tok": 3}
QWEN_MOE |= {"moe_intermediate_size": 11}
MIXTURES = {"gpt_oss": GPT_OSS, "qwen3_moe": QWEN_MOE}


def test_gpt_oss_is_read_as_it_was_released():
    released = {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128,
        "rope_scaling": { "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
        "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False },
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "router_aux_loss_coef": 0.9, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088
    }  # fmt: skip
    config = dataclasses.replace(PRESETS["gpt-oss-20b"].config, max_length=131072)
    assert huggingface.read_config(released)[1] == config
    del released["rope_scaling"], released["rope_theta"], released["layer_types"]
    assert huggingface.read_config(released)[1] == config


MODERNBERT = {
    "_name_or_path": "ModernBERT-base", "architectures": ["ModernBertForMaskedLM"], "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 50281, "classifier_activation": "gelu",
    "classifier_bias": False, "classifier_dropout": 0.0, "classifier_pooling": "mean", "cls_token_id": 50281,
    "decoder_bias": True, "deterministic_flash_attn": False, "embedding_dropout": 0.0, "eos_token_id": 50282,
    "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "gradient_checkpointing": False,
    "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02, "intermediate_size": 1152, "layer_norm_eps": 1e-05, "local_attention": 128,
    "local_rope_theta": 10000.0, "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0,
    "model_type": "modernbert", "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 12,
    "num_hidden_layers": 22, "pad_token_id": 50283, "position_embedding_type": "absolute",
    "sep_token_id": 50282, "tie_word_embeddings": True, "torch_dtype": "float32",
    "transformers_version": "4.47.0.dev0", "vocab_size": 50368
}  # fmt: skip


def test_modernbert_is_read_as_it_was_released():
    assert huggingface.read_config(MODERNBERT)[1] == PRESETS["modernbert-base"].config
    rules = {kind: {"rope_theta": base} for kind, base in (("full_attention", 5e5), ("sliding_attention", 7))}
    newer = huggingface.read_config({**MODERNBERT, "global_rope_theta": None, "local_rope_theta": None,
                                     "rope_parameters": rules, "norm_bias": True})[1]  # fmt: skip
    assert (newer.rotary_base, newer.rotary_window_base, newer.norm_kind) == (5e5, 7.0, "layer")
    # Written for all releases.
    settings = write_settings("modernbert", newer)
    assert huggingface.read_config({**settings, "rope_parameters": None})[1] == newer


def test_qwen_3_has_experts_where_its_config_says():
    qwen = lambda **more: huggingface.read_config({**QWEN_MOE, **more})[1]
    plain = qwen()
    assert (plain.num_experts, plain.experts_per_token, plain.expert_width) == (7, 3, 11)
    assert (plain.normalize_chosen, plain.dense_layers, plain.windows) == (False, (), (None,))
    assert qwen(norm_topk_prob=True).normalize_chosen
    assert qwen(mlp_only_layers=[0, 3, 9]).dense_layers == (0, 3)
    assert qwen(decoder_sparse_step=2).dense_layers == (0, 2, 4)
    assert qwen(decoder_sparse_step=2, mlp_only_layers=[1]).dense_layers == (0, 1, 2, 4)
    assert qwen(num_experts=None, num_local_experts=5).num_experts == 5


def test_kimi_linear_is_read_as_it_was_released():
    written, read = draw_tensors("kimi_linear")[0], lambda settings: huggingface.read_config(settings)[1]
    anew = ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "layer_types", "mlp_layer_types")
    released = {name: value for name, value in written.items() if name not in anew}
    delta = {"num_heads": 3, "head_dim": 5, "short_conv_kernel_size": 4, "kda_layers": [1, 3]}
    released |= {"linear_attn_config": {**delta, "full_attn_layers": [2]}, "first_k_dense_replace": 1}
    assert read({**released, "mla_use_nope": True, "rope_theta": 1e4}) == read(written)


def test_t5_scales_a_tied_head_alone():
    base = {"model_type": "t5", "d_model": 16, "num_heads": 2, "d_kv": 3, "d_ff": 5, "num_layers": 1}
    t5 = lambda **more: huggingface.read_config({**base, "vocab_size": 7, **more})[1]
    assert (t5().tied_output, t5().output_scale) == (True, 0.25)
    first = t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    assert (first.tied_output, first.output_scale, first.activation) == (False, 1.0, "gelu_tanh")
    # As transformers 5 writes version 1.1 with a head that is the table.
    second = t5(feed_forward_proj="gated-gelu", tie_word_embeddings=True, scale_decoder_outputs=False)
    assert (second.tied_output, second.output_scale) == (True, 1.0)
    assert t5(feed_forward_proj="gated-silu").activation == "silu"


# Entries that are not known, that say two things, or that make no model: each is refused by its name.

REFUSED = (
    ("llama", {"hidden_size": "24"}, r"hidden_size: expected an integer .* got '24'"),
    ("llama", {"hidden_act": "mish"}, r"activation: expected one of gelu,.*got 'mish'"),
    ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings: expected true or false in config"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: expected weights of floating"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved: expected False for llama, got True"),
    ("llama", {"rope_theta": 1e4}, "rope_theta: expected one number, got"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}}, "rope_type: expected"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling: expected the entry factor for linear"),
    ("llama", {"rope_scaling": {"type": "longrope"}}, "rope_type: expected one of default, linear.*got 'lon"),
    ("llama", {"rope_scaling": {"type": "llama3", **LLAMA3, "mrope_section": [2]}}, "rope_scaling.mrope_sec"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling: expected the same rule as"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1, or no such entry, with a"),
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type: expected 'absolute' for"),
    ("vit", {"patch_size": [4, 4, 3]}, "patch_size: expected one number, or height and"),
    ("mistral", {"sliding_window": "7"}, "sliding_window: expected an integer"),
    ("t5_gated", {"dense_act_fn": "relu"}, "expected what feed_forward_proj says, got 'relu' and True"),
    ("gemma2", {"layer_types": ["chunked_attention"] * 2}, "layer_types: expected sliding_attention or full"),
    ("gemma2", {"sliding_window_size": 8}, "sliding_window_size: expected 4, as sliding_window says"),
    ("gemma3_text", {"sliding_window": None}, "sliding_window: expected an integer in config.json, got None"),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type: expected it where layers"),
    ("gemma3_text", {"rope_parameters": {"full_attention": TURNED}}, "truncate: expected true, or no such"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected None for gemma3_te"),
    ("gemma3_text", {"model_type": "gemma3", "text_config": {}}, "got 'gemma3', which is of both"),
    ("gpt_oss", {"initial_context_length": 5}, "initial_context_length: expected 16, as the rotary"),
    ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config: expected weig"),
    ("qwen3_moe", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config: expected wei"),
    ("qwen3_moe", {"num_experts": 8}, "num_local_experts: expected 8, as num_experts says, or no"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method: expected 'noaux_tc' for deepseek_v3"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope: expected True for kimi_linear, got False"),
    *(
        (name, {"hidden_act": "gelu"}, f"hidden_act: expected 'silu' for {name}, got 'gelu'")
        for name in ("qwen3_5_text", "qwen3_next", "kimi_linear")
    ),
    ("kimi_linear", {"linear_attn_config": {"head_dim": 4}}, "linear_head_dim: expected 4, as linear_attn_c"),
    ("modernbert", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: expected None for mo"),
    *((name, {"attention_sink_size": 4}, "got attention_sink_size = 4, which may change") for name in NAMES),
)  # fmt: skip


@pytest.mark.parametrize(("name", "entries", "message"), REFUSED)
def test_entries_that_are_unknown_or_make_no_model_are_refused(name, entries, message):
    config = {**draw_tensors(name)[0], "attention_sink_size": None, "note": ""}
    huggingface.read_config(config)
    assert_refused((lambda: huggingface.read_config({**config, **entries}), message))


def test_unreadable_configs_are_named(tmp_path):
    cases = [(kind, "model_type: expected one of bert, modernbert") for kind in ("mixtral", None)]
    assert_refused(*cases, run=lambda kind: read(model_type=kind))
    with pytest.raises(ValueError, match=r"config.json: expected the config.json of a model, found nothing"):
        huggingface.read_config(tmp_path)
    for text, message in (("{", "JSON"), ("[" * 100_000, "JSON"), ("[]", "a JSON object, got list")):
        (tmp_path / "config.json").write_text(text)
        refuse(tmp_path, rf"config.json: expected {message}")


# Weights of gpt-oss in four bits.


def unpack(blocks, scales):
    """Four bits after four bits: a sign, two of the exponent and one digit, as the standard has it."""
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = np.stack([blocks % 16, blocks // 16], -1).reshape(*scales.shape, 32)
    found = numbers[codes] * 2.0 ** (scales[..., None].astype(int) - 127)
    return found.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def test_packed_weights_of_gpt_oss_are_read_exactly(tmp_path):
    settings = GPT_OSS | {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 32, "head_dim": 6}
    settings |= {"num_hidden_layers": 1, "num_local_experts": 3, "num_experts_per_tok": 2}
    config = huggingface.read_config(settings)[1]
    leaves = parameter_paths(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    sizes = {path: (tuple(leaf.shape), np.dtype(ml_dtypes.bfloat16)) for path, leaf in leaves.items()}
    zeros = lambda path: np.zeros(*sizes[path])
    tensors = dict(name_tensors(FAMILIES["gpt_oss"].weights, sizes, zeros, settings))
    random, truth = np.random.default_rng(0), {}
    name = "model.layers.0.mlp.experts.{}_proj"
    for part, shape in (("gate_up", (3, 64, 2)), ("down", (3, 64, 1))):
        whole = name.format(part)
        del tensors[whole]
        blocks = tensors[f"{whole}_blocks"] = random.integers(0, 256, (*shape, 16), dtype=np.uint8)
        scales = tensors[f"{whole}_scales"] = random.integers(97, 140, shape, dtype=np.uint8)
        truth[part] = unpack(blocks, scales)
    folder = tmp_path / "it"
    path = write_weights(folder / "model.safetensors", tensors)
    settings["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(settings))
    found = huggingface.load(folder)
    branch, both = found.model.trunk.stack.blocks[0].feed_forward, truth["gate_up"]
    parts = (branch.gate, both[..., ::2]), (branch.widen, both[..., 1::2]), (branch.narrow, truth["down"])
    for part, kernels in parts:
        held = part.kernels[...]
        assert held.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(held, np.float64), kernels)
    again = huggingface.save(found.model, tmp_path / "again", "gpt_oss", settings=found.settings)
    assert "quantization_config" not in json.loads((again / "config.json").read_text())
    np.testing.assert_array_equal(open_weights(again).read(name.format("down")).astype(float), truth["down"])
    scales = f"{name.format('down')}_scales"
    tensors[scales][1, 2, 0] = 255
    write_weights(path, tensors, force=True)
    refuse(folder, r"got NaN or infinity in .*experts\.down_proj")
    del tensors[scales]
    write_weights(path, tensors, force=True)
    refuse(folder, r"extra: .*down_proj_blocks \(3, 64, 1, 16\)\n  missing: .*down_p")


# Hostile files, and weights that do not fit.


def test_layers_are_counted_before_any_is_built(tmp_path):
    folder = fill(tmp_path / "it", "t5")
    (folder / "config.json").write_text(json.dumps({**draw_tensors("t5")[0], "num_decoder_layers": 10**9}))
    refuse(folder, r"num_decoder_layers: expected at most \d+, got 1000000000; the files hold no more")


def refuse(folder, message):
    with pytest.raises(ValueError, match=message) as caught:
        huggingface.load(folder)
    return str(caught.value)


def test_integers_and_nan_are_no_weights(tmp_path):
    """Nor is the same tensor twice."""
    name, table = "model.layers.1.input_layernorm.weight", "transformer.wte.weight"
    round_it = lambda tensors: tensors.update({name: tensors[name].astype(np.int8)})
    spoil_it = lambda tensors: tensors.update({name: tensors[name] * np.float32(np.nan)})
    repeat_it = lambda tensors: tensors.update({"wte.weight": tensors[table]})
    for kind, change, message in (
        ("llama", round_it, rf"1 do not fit:\n  no floating point: {name} of I8$"),
        ("llama", spoil_it, rf"expected finite numbers, got NaN or infinity in {name}"),
        ("gpt2", repeat_it, r"weights: expected every tensor once, got a second .*wte.weight"),
    ):
        refuse(fill(tmp_path / "it", kind, change), message)


def test_a_damaged_tokenizer_is_one_sentence(tmp_path, capsys):
    folder = fill(tmp_path / "it", "llama")
    (folder / "tokenizer.json").write_text("{}")
    refuse(folder, "expected tokenizer files that `tokenizers` reads, got Exception: ")
    told = run_command(capsys, "generate", folder, "--prompt", "a", code=2).err
    assert told.startswith(f"error: {folder}: expected tokenizer files")


def test_everything_that_does_not_fit_is_in_one_error(tmp_path):
    """Experts are missed one by one; a file of another release has them in one piece."""
    experts = "model.layers.2.mlp.experts"

    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors[f"{experts}.5.up_proj.weight"]
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:7]
        tensors[f"{experts}.6.down_proj.weight"] = np.ones((24, 7), np.float32)
        tensors[f"{experts}.gate_up_proj"] = np.ones((7, 22, 24), np.float32)

    said = refuse(fill(tmp_path, "qwen3_moe", change), r"^weights: expected the \d+ tensors .*; 5 do not fit")
    branch = "trunk.stack.blocks.{}.feed_forward"
    for line in (
        f"missing: model.layers.1.mlp.up_proj.weight (37, 24), for {branch.format(1)}.widen.kernel",
        f"missing: {experts}.5.up_proj.weight (11, 24), for {branch.format(2)}.widen.kernels",
        "misshapen: model.norm.weight: expected (24,), got (7,)",
        f"misshapen: {experts}.6.down_proj.weight: expected (24, 11), got (24, 7)",
        f"extra: {experts}.gate_up_proj (7, 22, 24)",
    ):
        assert f"\n  {line}" in said


OLD_NORM = {"weight": "gamma", "bias": "beta"}
SPELLINGS = [
    ("bert", ("cls.predictions.bias", "bert.embeddings.position_ids"), "", "bert."),
    ("modernbert", ("head.dense.weight", "head.norm.weight", "decoder.bias"), "", "model."),
    ("gpt2", ("h.0.attn.bias", "h.1.attn.masked_bias", "lm_head.weight"), "transformer.", ""),
    ("llama", ("model.layers.0.self_attn.rotary_emb.inv_freq",), "model.", ""),
    ("vit", ("classifier.weight",), "", "vit."),
    ("t5", ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"), "", ""),
]


@pytest.mark.parametrize(("name", "extras", "old", "new"), SPELLINGS)
def test_old_names_and_buffers_that_mean_nothing_change_nothing(tmp_path, name, extras, old, new):
    def change(tensors):
        for key in [*tensors]:
            if key.startswith(old) and not key.startswith("lm_head"):
                tensors[new + key.removeprefix(old)] = tensors.pop(key)
        table = next((tensors[key] for key in tensors if key.endswith(("wte.weight", "shared.weight"))), None)
        for key in extras:
            tensors[key] = table if key == "lm_head.weight" else np.ones((1, 1), np.float32)
        for key in [*tensors] if name == "bert" else ():
            renamed = re.sub("(?<=LayerNorm.)(weight|bias)", lambda found: OLD_NORM[found[0]], key)
            tensors[renamed] = tensors.pop(key)

    plain = huggingface.load(fill(tmp_path / "plain", name))
    assert_same_parameters(plain.model, huggingface.load(fill(tmp_path / "other", name, change)).model)


def test_a_head_that_differs_from_its_table_is_a_head(tmp_path):
    """Whatever config.json says; as transformers 5 reads it."""
    table = "model.embed_tokens.weight"
    change = lambda tensors: tensors.update({"lm_head.weight": 2 * tensors[table]})
    tied = huggingface.load(fill(tmp_path / "tied", "qwen3"))
    other = huggingface.load(fill(tmp_path / "other", "qwen3", change))
    assert (tied.config.tied_output, other.config.tied_output) == (True, False)
    table = parameter_paths(tied.model)["trunk.embedding.entry.table.embedding"][...]
    np.testing.assert_array_equal(other.model.head.kernel[...], 2 * np.asarray(table).T)


# Filling.


@pytest.mark.parametrize(
    ("stored", "wanted"), [(ml_dtypes.bfloat16, None), (np.float64, None), (np.float64, jnp.bfloat16)]
)
def test_weights_keep_their_dtype_or_get_the_one_asked_for(tmp_path, stored, wanted):
    cast = lambda tensors: tensors.update({name: held.astype(stored) for name, held in tensors.items()})
    model = huggingface.load(fill(tmp_path, "gemma2", cast), dtype=wanted).model
    expected = (jnp.float32 if stored == np.float64 else stored) if wanted is None else wanted
    assert {leaf.dtype for leaf in parameter_paths(model).values()} == {np.dtype(expected)}
    # A norm's scale is stored less one, which is added in float32.
    less_one = drawn_weights.draw("model.norm.weight", (24,), "gemma2").astype(expected)
    np.testing.assert_array_equal(model.trunk.stack.final_norm.scale, 1 + less_one.astype(np.float32))
    with jax.numpy_dtype_promotion("standard"):
        logits = nnx.eval_shape(lambda model: model(np.array([[1, 2, 3]])), model)
    assert logits.dtype == expected


def test_weights_are_placed_as_asked(tmp_path):
    mesh = jax.make_mesh((1,), ("model",))
    place = lambda *axes: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    divided = lambda path, shape: path.endswith("kernel") and len(shape) == 2
    choose = lambda path, shape: place(*(None, "model") * divided(path, shape))
    folder = fill(tmp_path, "llama")
    for sharding in (place(), choose):
        for path, leaf in parameter_paths(huggingface.load(folder, sharding=sharding).model).items():
            assert leaf[...].sharding == (choose(path, leaf.shape) if sharding is choose else place())


def test_weights_load_into_a_loop_over_layers(tmp_path):
    folder = fill(tmp_path / "first", "llama")
    plain, looped = huggingface.load(folder), huggingface.load(folder, scan_layers=True, remat="full")
    assert looped.config == dataclasses.replace(plain.config, scan_layers=True, remat="full")
    assert_same_parameters(plain.model, looped.model)
    again = huggingface.load(huggingface.save(looped.model, tmp_path / "second", "llama"))
    assert again.config == plain.config


@pytest.mark.slow
def test_no_second_copy_in_memory(tmp_path):
    """While 64 MB are loaded as half of that, the peak grows by the model and little more.

    Pages of the mapped file count on some kernels: they are in the peak before.
    """
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1024, "num_hidden_layers": 6}
    huggingface.save(build_drawn(Decoder, read(**sizes, vocab_size=512)), tmp_path, "llama")
    script = f"""
import mmap, resource
import jax.numpy as jnp, numpy as np
from regard.interop import huggingface
from regard.interop.weight_maps import parameter_paths
folder = {str(tmp_path)!r}
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
jnp.zeros(3).block_until_ready()
with open(folder + "/model.safetensors") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
    np.frombuffer(pages, np.uint8).max()
    before = peak()
model = huggingface.load(folder, dtype=jnp.bfloat16).model
total = sum(leaf[...].nbytes for leaf in parameter_paths(model).values())
print(total, peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    total, grown = map(int, done.stdout.split())
    assert 30e6 < total < 70e6
    assert grown < 1.75 * total, "the whole float32 file would be 2 times the model"


# Saving.


WIDTHS = [ml_dtypes.bfloat16, *(pytest.param(to, marks=pytest.mark.slow) for to in (np.float32, np.float16))]


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_is_what_was_loaded(tmp_path, name, dtype):
    """Bit for bit, with numbers that would be lost beside a 1."""

    def change(tensors):
        for key, tensor in tensors.items():
            tensors[key] = tensor.astype(dtype)
            tensors[key].flat[:5] = -0.0, 1e-6, -1.0, -6e-8, 1e-40

    folder = fill(tmp_path / "first", name, change)
    pretrained = huggingface.load(folder)
    kind = pretrained.kind
    again = huggingface.save(pretrained.model, tmp_path / "second", kind, settings=pretrained.settings)
    first, second = open_weights(folder), open_weights(again)
    assert {*second} == {one for one in first if "pooler" not in one}
    for key in second:
        assert (second[key].dtype, second[key].shape) == (first[key].dtype, first[key].shape)
        assert second.read(key).tobytes() == first.read(key).tobytes()
    assert huggingface.read_config(again)[1] == pretrained.config
    known = {"image_size": [12, 20], "patch_size": 4} if kind == "vit" else {}
    assert huggingface.read_config(write_settings(kind, pretrained.config, **known))[1] == pretrained.config


@pytest.mark.parametrize("name", ["gemma2", "qwen3_5_text", "t5"])
def test_a_config_says_the_parameters_of_its_model(tmp_path, name):
    loaded = huggingface.load(fill(tmp_path, name))
    fresh = nnx.eval_shape(lambda: type(loaded.model)(loaded.config, rngs=nnx.Rngs(0)))
    assert {*parameter_paths(fresh)} == {*parameter_paths(loaded.model)}
    if name == "t5":
        settings = {**draw_tensors("t5")[0], "num_layers": 1, "num_decoder_layers": 3}
        written = write_settings("t5", config := huggingface.read_config(settings)[1])
        assert (config.num_decoder_layers, written["num_layers"], written["num_decoder_layers"]) == (3, 1, 3)


def test_a_folder_says_which_tokens_end_a_text(tmp_path):
    folder = fill(tmp_path, "llama")
    assert huggingface.load(folder).stop_tokens == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    (folder / "chat_template.jinja").write_text("hostile {{ '\0' }}")
    loaded = huggingface.load(folder)
    again = huggingface.save(loaded.model, tmp_path / "again", "llama", loaded=loaded)
    assert huggingface.load(again).stop_tokens == (5, 7)
    ends = {"settings": {"eos_token_id": 9}, "loaded": loaded, "force": True}
    assert huggingface.load(huggingface.save(loaded.model, again, "llama", **ends)).stop_tokens == (9,)
    assert (again / "chat_template.jinja").read_bytes() == (folder / "chat_template.jinja").read_bytes()
    file = lambda: huggingface.save(loaded.model, again / "config.json", "llama")
    assert_refused((file, r"directory: expected a folder, got .*config\.json, a file"))
    (again / "generation_config.json").write_text('{"eos_token_id": [5')
    assert_refused((lambda: huggingface.load(again), "generation_config.json: expected an object of JSON"))
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    loaded = huggingface.load(folder)
    assert_refused((lambda: loaded.stop_tokens, "expected a token or a list of them as eos_token_id"))


def test_special_tokens_beyond_a_small_vocabulary_are_none():
    for size, expected in ((101, [None] * 5), (50_368, [])):
        config = dataclasses.replace(PRESETS["modernbert-base"].config, vocab_size=size)
        written = write_settings("modernbert", config)
        assert [value for name, value in written.items() if name.endswith("_token_id")] == expected


KINDS = {"minilm-l6": "bert", "vit": "vit", "gemma-2-2b": "gemma2", "gemma-3-1b": "gemma3_text"}
KINDS |= {"qwen3-30b-a3b": "qwen3_moe", "qwen3-next-80b-a3b": "qwen3_next"}
KINDS |= {"deepseek-v3": "deepseek_v3", "gpt-oss-20b": "gpt_oss"}


def test_presets_have_a_config_of_their_kind():
    for name, preset in PRESETS.items():
        kind = KINDS.get(name, name.split("-")[0])
        architecture = write_settings(kind, preset.config)["architectures"][0]
        assert architecture.lower().startswith(kind.removesuffix("_text").replace("_", ""))


def test_models_are_saved_in_shards_and_another_dtype(tmp_path):
    pretrained = huggingface.load(fill(tmp_path / "first", "llama"))
    options = {"dtype": jnp.bfloat16, "shard_bytes": 3000}
    folder = huggingface.save(pretrained.model, tmp_path / "second", "llama", **options)
    assert len([*folder.glob("model-*.safetensors")]) > 3
    assert {one.dtype for one in open_weights(folder).values()} == {"BF16"}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(WeightFileError, match=r"config.json exists already; choose another folder, or"):
        huggingface.save(pretrained.model, folder, "llama")
    kernel = pretrained.model.head.kernel
    kernel[...] = kernel[...].at[0, 0].set(1e5)
    save = functools.partial(huggingface.save, pretrained.model, folder, "llama", force=True)
    assert_refused((lambda: save(dtype="float16"), "NaN or infinity in lm_head.weight as float16; nothing"))
    save(shard_bytes=9000)
    assert len({file.name.rpartition("-")[2] for file in folder.glob("model-*")}) == 1
    save()
    assert [file.name for file in folder.glob("model*")] == ["model.safetensors"]
    assert {one.dtype for one in open_weights(folder).values()} == {"F32"}
    sparse = huggingface.load(fill(tmp_path / "sparse", "deepseek_v3"), dtype=jnp.bfloat16).model
    folder = huggingface.save(sparse, tmp_path / "whole", "deepseek_v3")
    wide = {name for name, one in open_weights(folder).items() if one.dtype == "F32"}
    assert {name.rpartition(".")[2] for name in wide} == {"e_score_correction_bias"}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    model = huggingface.load(fill(tmp_path / "joined", "gpt2")).model
    attention = model.trunk.stack.blocks[0].attention  # whose query, key and value are one tensor
    for layer, kind in ((attention.query_projection, "bfloat16"), (attention.key_projection, "float16")):
        layer.kernel = nnx.Param(layer.kernel[...].astype(kind))
    again = huggingface.load(huggingface.save(model, tmp_path / "parts", "gpt2")).model.trunk.stack.blocks[0]
    np.testing.assert_array_equal(*(one.key_projection.kernel for one in (again.attention, attention)))


def test_models_that_a_kind_cannot_describe_are_refused(tmp_path):
    model = huggingface.load(fill(tmp_path / "first", "qwen3")).model
    save = functools.partial(huggingface.save, model, tmp_path / "second")
    assert_refused(
        (lambda: save("llama"), r"it cannot say\n  query_key_norm = True, read as False"),
        (lambda: write_settings("llama", dataclasses.replace(read(), rotary_width=2)), "rotary_width = 2, "),
        # Rotary fields have no say in a model of learned positions, and are those of another kind.
        (lambda: save("bert"), r"positions = 'rotary', read as 'learned'\n  rotary_base = "),
        (lambda: save("gpt3"), r"kind: expected one of bert, .*; got 'gpt3'"),
        (lambda: save("qwen3", dtype=jnp.int8), "dtype: expected a floating-point dtype, got int8"),
        (lambda: save("qwen3", settings={"a": np.int32(1)}), "settings: expected entries that JSON"),
        (lambda: save("qwen3", settings={"kind": 1}), "that are known for qwen3, got kind = 1"),
        error=(ValueError, TypeError),
    )
    assert not (tmp_path / "second").exists()


# Tokenizers and patches.


def test_tokenizers_are_made_from_vocabularies(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "wor", "##ld", "Hello", "!", "é", "e"]
    fill(tmp_path, "bert")
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = huggingface.load(tmp_path).tokenizer
    assert tokenizer.encode("Hello world!").ids == [2, 5, 6, 7, 9, 3]
    assert tokenizer.decode([2, 5, 6, 7, 3]) == "hello world"
    assert tokenizer.encode("É").ids == [2, 11, 3]
    for options, text, ids in (
        ({"do_lower_case": False}, "Hello", [2, 8, 3]),
        ({"do_lower_case": True, "strip_accents": False}, "É", [2, 10, 3]),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
        assert huggingface.load(tmp_path).tokenizer.encode(text).ids == ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=7)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    # The file of the same tokenizer wins, and its truncation and padding are left to whoever calls.
    assert huggingface.load(tmp_path).tokenizer.encode("Hello world!").ids == [2, 5, 6, 7, 9, 3]


def test_tokenizers_are_made_from_byte_pairs(tmp_path):
    """Those of other kinds are not taken for those of gpt2."""
    pieces = ["<|endoftext|>", "h", "i", "Ġ", "hi", "Ġhi"]
    for name in ("gpt2", "llama"):
        folder = fill(tmp_path / name, name)
        (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
        assert huggingface.load(folder).tokenizer is None
        (folder / "merges.txt").write_text("#version: 0.2\nh i\nĠ hi\n")
    tokenizer = huggingface.load(tmp_path / "gpt2").tokenizer
    assert tokenizer.encode("hi hi<|endoftext|>").ids == [4, 5, 0]
    assert tokenizer.decode([4, 5]) == "hi hi"
    assert huggingface.load(tmp_path / "llama").tokenizer is None


def test_patches_are_cut_row_by_row():
    image = np.arange(4 * 6 * 2).reshape(1, 4, 6, 2)
    cut = np.asarray(huggingface.cut_patches(image, 2))
    assert cut.shape == (1, 6, 8)
    np.testing.assert_array_equal(cut[0, 4], image[0, 2:4, 2:4].ravel())
    usual = jax.eval_shape(lambda: huggingface.cut_patches(np.zeros((1, 224, 224, 3)), {"model_type": "vit"}))
    assert usual.shape == (1, 196, 768)
    settings = {"patch_size": 2, "image_size": [4, 6], "num_channels": 2}
    np.testing.assert_array_equal(huggingface.cut_patches(image, settings), cut)
    turned = image.transpose(0, 3, 1, 2)
    assert_refused(
        ((turned, settings), r"expected height, width and channels \(4, 6, 2\), got \(2, 4"),
        ((image, 4), "images: expected sides that are multiples of 4 and 4, got 4, 6"),
        ((image[0, 0], 2), r"images: expected \(\*B, height, width, channels\), got shape"),
        run=lambda given: huggingface.cut_patches(*given),
    )
