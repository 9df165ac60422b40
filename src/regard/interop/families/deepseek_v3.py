"""DeepSeek-V3: latent attention, and experts that sigmoids choose, in groups."""

import math
from typing import Any, ClassVar

from regard.interop.families.entries import read_number, read_size
from regard.interop.families.llama import BLOCK, LAYER, NORMS, Llama, build_map, pair_branch
from regard.interop.families.qwen3_moe import EXPERTS
from regard.interop.families.rotary import read_rotary, write_rotary
from regard.interop.weight_maps import Fields, Pair, Settings, WeightMap, linear
from regard.models import TransformerConfig
from regard.models.presets import LLAMA
from regard.positions import Scaling, YaRN

_SHARPNESS = "mscale_all_dim"  # of YaRN: how much the scores grow beside sines and cosines


def pair_latent(config: TransformerConfig) -> list[Pair]:
    """Pair the tensors of latent attention; queries have one map, or two with a norm between."""
    layer, attention = f"{LAYER}.self_attn", f"{BLOCK}.attention"
    last = "q_proj" if config.latent_query_dim is None else "q_b_proj"
    return [
        *linear(f"{layer}.q_a_proj", f"{attention}.query_latent"),
        Pair(f"{layer}.q_a_layernorm.weight", f"{attention}.query_norm.scale"),
        *linear(f"{layer}.{last}", f"{attention}.query_projection"),
        *linear(f"{layer}.kv_a_proj_with_mqa", f"{attention}.latent"),
        Pair(f"{layer}.kv_a_layernorm.weight", f"{attention}.latent_norm.scale"),
        *linear(f"{layer}.kv_b_proj", f"{attention}.expansion"),
    ]


class DeepSeekV3(Llama):
    """DeepSeek-V3 as a Decoder; layers that predict tokens further ahead are left out."""

    kind = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    sizes: ClassVar = {
        **Llama.sizes, "kv_lora_rank": "latent_dim", "qk_nope_head_dim": "head_dim",
        "qk_rope_head_dim": "latent_rotary_dim", "v_head_dim": "latent_value_dim",
        "n_routed_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
        "moe_intermediate_size": "expert_width", "n_group": "expert_groups", "topk_group": "groups_per_token",
    }  # fmt: skip
    entries: ClassVar = {
        "rms_norm_eps": "norm_epsilon", "hidden_act": "activation", "attention_bias": "attention_bias",
        "tie_word_embeddings": "tied_output", "norm_topk_prob": "normalize_chosen",
        "routed_scaling_factor": "expert_scale",
    }  # fmt: skip
    layer_counts: ClassVar = (*Llama.layer_counts, "n_routed_experts")
    defaults: ClassVar = {**LLAMA, "router_kind": "sigmoid", "expert_scale": 2.5}
    required: ClassVar = {
        **Llama.required, "rope_interleave": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
    }  # fmt: skip
    harmless: ClassVar = (
        *Llama.harmless, "output_router_logits", "num_nextn_predict_layers", "num_mtp_layers", "ep_size",
        "aux_loss_alpha", "seq_aux", "head_dim", "qk_head_dim", "num_key_value_heads", "auto_map",
    )  # fmt: skip
    count_of_shared, query_rank, num_dense = "n_shared_experts", 1536, 3
    names_branches = False  # True if transformers writes the kind of every layer's branch

    def read_more(self, settings: Settings, fields: Fields, length: int | None) -> dict[str, Any]:
        rank = settings.get("q_lora_rank", self.query_rank)
        shared = read_size(self.count_of_shared, settings.get(self.count_of_shared, 1))
        return {
            "latent_query_dim": None if rank is None else read_size("q_lora_rank", rank),
            "shared_width": shared * fields["expert_width"] or None,
            "dense_layers": self.read_dense_layers(settings, fields["num_layers"]),
            **self.read_positions(settings, fields["max_length"], length, fields),
        }

    def write_more(self, config: TransformerConfig) -> dict[str, Any]:
        expert_width = config.expert_width or config.d_ff
        return {
            "moe_intermediate_size": expert_width,
            "qk_nope_head_dim": config.head_width,
            "v_head_dim": config.latent_value_dim or config.head_width,
            "num_key_value_heads": config.num_heads,
            "q_lora_rank": config.latent_query_dim,
            self.count_of_shared: (config.shared_width or 0) // expert_width,
            **self.write_dense_layers(config),
            **self.write_positions(config),
        }

    def read_dense_layers(self, settings: Settings, num_layers: int) -> tuple[int, ...]:
        """Return the layers that have one branch for all tokens."""
        first = read_size("first_k_dense_replace", settings.get("first_k_dense_replace", self.num_dense))
        kinds = settings.get("mlp_layer_types")
        if kinds is None:
            return tuple(range(min(first, num_layers)))
        if len(kinds) != num_layers or not {*kinds} <= {"dense", "sparse"}:
            raise ValueError(
                f"mlp_layer_types: expected dense or sparse for each of {num_layers} layers, got {kinds!r}"
            )
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")

    def write_dense_layers(self, config: TransformerConfig) -> dict[str, Any]:
        """Return the entry of these layers; the inverse of `read_dense_layers`."""
        if not self.names_branches:
            return {"first_k_dense_replace": len(config.dense_layers)}
        kinds = ["dense" if layer in config.dense_layers else "sparse" for layer in range(config.num_layers)]
        return {"mlp_layer_types": kinds}

    def read_positions(self, settings: Settings, *sizes: Any) -> dict[str, Any]:
        *lengths, fields = sizes
        rotary = read_rotary(settings, *lengths)
        growth = _grow(rotary["rotary_scaling"], _find_rules(settings).get(_SHARPNESS))
        if growth != 1:
            width = fields["head_dim"] + fields["latent_rotary_dim"]
            rotary["attention_scale"] = width**-0.5 * growth**2
        return rotary

    def write_positions(self, config: TransformerConfig) -> dict[str, Any]:
        written, scaling = write_rotary(config), config.rotary_scaling
        width = config.head_width + (config.latent_rotary_dim or 0)
        growth = ((config.attention_scale or width**-0.5) * width**0.5) ** 0.5
        if not isinstance(scaling, YaRN) or growth == 1:
            return written
        # Decimals that were read are written again.
        slope = 0.1 * math.log(scaling.factor)
        parts = {_SHARPNESS: (growth - 1) / slope}
        if scaling.sharpness is not None:
            parts = {"mscale": (scaling.amplitude * growth - 1) / slope, **parts}
        rules = {name: round(part, 9) for name, part in parts.items()}
        for name in ("rope_parameters", "rope_scaling"):
            plain = {key: value for key, value in written[name].items() if key != "attention_factor"}
            written[name] = {**plain, **rules}
        return written

    def weight_map(self, config: TransformerConfig) -> WeightMap:
        gate = f"{LAYER}.mlp.gate.e_score_correction_bias"
        table = build_map(
            *NORMS,
            *pair_latent(config),
            *EXPERTS,
            Pair(gate, f"{BLOCK}.feed_forward.choice_bias"),
            *pair_branch(f"{LAYER}.mlp.shared_experts", f"{BLOCK}.feed_forward.shared"),
        )
        return table.ignoring(rf"layers\.{config.num_layers}\..*")


def _find_rules(settings: Settings) -> dict[str, Any]:
    return {**(settings.get("rope_scaling") or {}), **(settings.get("rope_parameters") or {})}


def _grow(scaling: Scaling | None, part: Any) -> float:
    """Return what a rule multiplies queries and keys by, beside what it does to sines and cosines."""
    if not isinstance(scaling, YaRN) or not part:
        return 1.0
    return 0.1 * read_number(f"rope_scaling.{_SHARPNESS}", part) * math.log(scaling.factor) + 1
