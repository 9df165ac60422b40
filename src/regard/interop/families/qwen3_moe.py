"""Qwen 3 MoE: mixtures of experts."""

from typing import Any, ClassVar

from regard.interop.families.entries import demand_same, read_number, read_size
from regard.interop.families.llama import BLOCK, LAYER, NORMS, Llama, build_map
from regard.interop.weight_maps import TRANSPOSED, Fields, Pair, Settings
from regard.models import TransformerConfig

_BRANCH = f"{BLOCK}.feed_forward"
EXPERTS = (
    Pair(f"{LAYER}.mlp.gate.weight", f"{_BRANCH}.router.kernel", TRANSPOSED),
    *(
        Pair(f"{LAYER}.mlp.experts.{{e}}.{name}_proj.weight", f"{_BRANCH}.{part}.kernels", TRANSPOSED)
        for name, part in (("gate", "gate"), ("up", "widen"), ("down", "narrow"))
    ),
)
"""Tensors of a layer's router and experts."""


class Qwen3Moe(Llama):
    """Qwen 3 as a Decoder with experts, in all layers or in some."""

    kind = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    num_key_heads = 4
    sizes: ClassVar = {
        **Llama.sizes, "moe_intermediate_size": "expert_width", "num_experts_per_tok": "experts_per_token",
    }  # fmt: skip
    entries: ClassVar = {**Llama.entries, "norm_topk_prob": "normalize_chosen"}
    layer_counts: ClassVar = (*Llama.layer_counts, "num_experts", "num_local_experts")
    defaults: ClassVar = {**Llama.defaults, "query_key_norm": True, "normalize_chosen": False}
    required: ClassVar = {**Llama.required, "use_sliding_window": False}
    assumed: ClassVar = {"use_sliding_window": False, "sliding_window": None}
    # Windows are off, and the loss of the router is one of training.
    harmless: ClassVar = (
        *Llama.harmless, "sliding_window", "max_window_layers", "output_router_logits",
        "router_aux_loss_coef",
    )  # fmt: skip
    weights = build_map(*NORMS, *EXPERTS)

    def read_more(self, settings: Settings, fields: Fields, length: int | None) -> dict[str, Any]:
        # transformers 5 writes the second name.
        first, second = "num_experts", "num_local_experts"
        count = read_size(first, settings.get(second) if settings.get(first) is None else settings[first])
        demand_same(settings, second, count, first)
        step = read_number("decoder_sparse_step", settings.get("decoder_sparse_step", 1))
        dense = settings.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
            raise ValueError(f"mlp_only_layers: expected a list of layers, got {dense!r}")
        layers = range(fields["num_layers"])
        return {
            **super().read_more(settings, fields, length),
            "num_experts": count,
            "dense_layers": tuple(layer for layer in layers if layer in dense or (layer + 1) % step),
        }

    def write_more(self, config: TransformerConfig) -> dict[str, Any]:
        return {
            **super().write_more(config),
            "num_experts": config.num_experts,
            "num_local_experts": config.num_experts,
            "moe_intermediate_size": config.expert_width or config.d_ff,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [*config.dense_layers],
        }
