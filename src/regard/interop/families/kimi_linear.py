"""Kimi Linear: a hybrid of delta rules with a factor per channel and latent attention without positions."""

from dataclasses import replace
from typing import Any, ClassVar

from regard.interop import weight_maps
from regard.interop.families.deepseek_v3 import DeepSeekV3, pair_latent
from regard.interop.families.entries import demand_same, read_size
from regard.interop.families.llama import BLOCK, LAYER, NORMS, build_map, pair_branch
from regard.interop.families.qwen3_5 import DELTA, LINEAR, measure_delta
from regard.interop.families.sliding_windows import FULL, read_layer_types, shorten
from regard.interop.weight_maps import TRANSPOSED, Fields, Pair, Settings, WeightMap, linear
from regard.models import TransformerConfig

_ATTENTION, _BRANCH = f"{LAYER}.self_attn", f"{LAYER}.block_sparse_moe"
_MIXERS = {LINEAR: "kimi_delta", FULL: "attention"}
_PROJECTIONS = {
    "q_proj": "query_projection", "k_proj": "key_projection", "v_proj": "value_projection",
    "b_proj": "rate_projection", "f_a_proj": "forget_entry", "f_b_proj": "forget_projection",
    "g_a_proj": "gate_entry", "g_b_proj": "gate_projection", "o_proj": "output_projection",
}  # fmt: skip
_SPEED = weight_maps.Conversion(
    lambda tensor: tensor.reshape(-1),
    lambda parameters, _: parameters[0].reshape((1, 1, -1, 1)),
    lambda shape, _: (1, 1, *shape, 1),
)
# Sizes of the delta rule by their names in `linear_attn_config` of the released config.json, and others'.
_SIZES = {
    "num_heads": ("linear_num_heads", "delta_heads", 32),
    "head_dim": ("linear_head_dim", "delta_head_dim", 128),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", "conv_width", 4),
}


class KimiLinear(DeepSeekV3):
    """Kimi Linear as a Decoder."""

    kind = "kimi_linear"
    architecture = "KimiLinearForCausalLM"
    sizes: ClassVar = {
        "vocab_size": "vocab_size", "hidden_size": "d_model", "intermediate_size": "d_ff",
        "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers",
        "model_max_length": "max_length", "kv_lora_rank": "latent_dim", "qk_nope_head_dim": "head_dim",
        "qk_rope_head_dim": "latent_rotary_dim", "v_head_dim": "latent_value_dim",
        "num_experts": "num_experts", "num_experts_per_token": "experts_per_token",
        "moe_intermediate_size": "expert_width",
        "num_expert_group": "expert_groups", "topk_group": "groups_per_token",
    }  # fmt: skip
    entries: ClassVar = {
        "rms_norm_eps": "norm_epsilon", "hidden_act": "activation", "attention_bias": "attention_bias",
        "tie_word_embeddings": "tied_output", "moe_renormalize": "normalize_chosen",
        "routed_scaling_factor": "expert_scale",
    }  # fmt: skip
    layer_counts: ClassVar = ("num_hidden_layers", "num_experts")
    defaults: ClassVar = {
        **DeepSeekV3.defaults, "positions": "none", "norm_epsilon": 1e-5, "expert_scale": 2.446,
    }  # fmt: skip
    required: ClassVar = {
        "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0, "hidden_act": "silu",  # which convolutions obey, too
    }  # fmt: skip
    harmless: ClassVar = (*DeepSeekV3.harmless, "rope_theta", "rope_scaling", "use_grouped_topk")
    count_of_shared, query_rank, num_dense, names_branches = "num_shared_experts", None, 1, True

    def read_more(self, settings: Settings, fields: Fields, length: int | None) -> dict[str, Any]:
        released = settings.get("linear_attn_config") or {}
        sizes = {}
        for theirs, (name, field, default) in _SIZES.items():
            sizes[field] = read_size(name, released.get(theirs, settings.get(name, default)))
            demand_same(settings, name, sizes[field], "linear_attn_config")
        kinds = settings.get("layer_types") or _list_kinds(released, fields["num_layers"])
        kinds = read_layer_types({"layer_types": kinds}, LINEAR, [True] * fields["num_layers"])
        mixers = shorten(tuple(_MIXERS[kind] for kind in kinds), ("attention",))
        return {**super().read_more(settings, fields, length), **sizes, "mixers": mixers}

    def write_more(self, config: TransformerConfig) -> dict[str, Any]:
        kinds = {mixer: kind for kind, mixer in _MIXERS.items()}
        sizes = measure_delta(config)
        return {
            **super().write_more(config),
            "layer_types": [kinds.get(config.mixer(layer)) for layer in range(config.num_layers)],
            "linear_num_heads": sizes.heads,
            "linear_head_dim": sizes.head_dim,
        }

    def read_positions(self, settings: Settings, *sizes: Any) -> dict[str, Any]:
        return {}

    def write_positions(self, config: TransformerConfig) -> dict[str, Any]:
        return {}

    def weight_map(self, config: TransformerConfig) -> WeightMap:
        sizes = measure_delta(config)
        taps = weight_maps.take_taps(0, (sizes.heads * sizes.head_dim,))
        projections = [
            linear(f"{_ATTENTION}.{name}", f"{DELTA}.{ours}") for name, ours in _PROJECTIONS.items()
        ]
        experts, branch = f"{_BRANCH}.experts.{{e}}", f"{BLOCK}.feed_forward"
        table = build_map(
            *NORMS,
            *pair_latent(config),
            *(pair for pairs in projections for pair in pairs),
            *(
                Pair(f"{_ATTENTION}.{name[0]}_conv1d.weight", f"{DELTA}.{name}_taps", taps)
                for name in ("query", "key", "value")
            ),
            Pair(f"{_ATTENTION}.A_log", f"{DELTA}.log_speed", _SPEED),
            Pair(f"{_ATTENTION}.dt_bias", f"{DELTA}.forget_bias"),
            Pair(f"{_ATTENTION}.o_norm.weight", f"{DELTA}.norm_scale"),
            Pair(f"{LAYER}.input_layernorm.weight", f"{BLOCK}.delta_residual.norm.scale"),
            *pair_branch(_BRANCH, branch),
            *pair_branch(f"{_BRANCH}.shared_experts", f"{branch}.shared"),
            Pair(f"{_BRANCH}.gate.weight", f"{branch}.router.kernel", TRANSPOSED),
            Pair(f"{_BRANCH}.gate.e_score_correction_bias", f"{branch}.choice_bias"),
            *(
                Pair(f"{experts}.{name}.weight", f"{branch}.{part}.kernels", TRANSPOSED)
                for name, part in (("w1", "gate"), ("w3", "widen"), ("w2", "narrow"))
            ),
        )
        # Released files have the name of Llama's branch where there is one for all tokens.
        maps = ("gate_proj", "up_proj", "down_proj")
        older = tuple((f".mlp.{name}.weight", f".block_sparse_moe.{name}.weight") for name in maps)
        return replace(table, respelled=older)


def _list_kinds(released: Settings, num_layers: int) -> list[str]:
    """Return the kinds of layers that the released config.json numbers from 1, or those by default."""
    if not {"full_attn_layers", "kda_layers"} <= released.keys():
        return [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(num_layers)]
    kinds = dict.fromkeys(released["kda_layers"], LINEAR) | dict.fromkeys(released["full_attn_layers"], FULL)
    return [kinds.get(layer, "") for layer in range(1, num_layers + 1)]
