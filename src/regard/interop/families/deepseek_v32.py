"""DeepSeek-V3.2: DeepSeek-V3 with an indexer in every layer, which chooses the keys of each query."""

from typing import Any, ClassVar

from regard.interop.families.deepseek_v3 import DeepSeekV3
from regard.interop.families.llama import BLOCK, LAYER
from regard.interop.weight_maps import Fields, Settings, WeightMap, linear, norm
from regard.models import TransformerConfig

_STORED, _INDEXER = f"{LAYER}.self_attn.indexer", f"{BLOCK}.attention.indexer"
_KIND = "indexed_attention"


class DeepSeekV32(DeepSeekV3):
    """DeepSeek-V3.2 as a Decoder, whose queries attend to the keys that indexers choose, exactly."""

    kind = "deepseek_v32"
    architecture = "DeepseekV32ForCausalLM"
    sizes: ClassVar = {
        **DeepSeekV3.sizes, "index_topk": "index_count", "index_n_heads": "index_heads",
        "index_head_dim": "index_dim",
    }  # fmt: skip
    required: ClassVar = {**DeepSeekV3.required, "mlp_bias": False}
    names_branches = True

    def read_more(self, settings: Settings, fields: Fields, length: int | None) -> dict[str, Any]:
        kinds = settings.get("layer_types") or [_KIND]
        if {*kinds} != {_KIND}:
            raise ValueError(f"layer_types: expected {_KIND} for every layer, got {kinds!r}")
        return super().read_more(settings, fields, length)

    def write_more(self, config: TransformerConfig) -> dict[str, Any]:
        return {**super().write_more(config), "layer_types": [_KIND] * config.num_layers}

    def weight_map(self, config: TransformerConfig) -> WeightMap:
        indexer = (
            *linear(f"{_STORED}.wq_b", f"{_INDEXER}.query_projection"),
            *linear(f"{_STORED}.wk", f"{_INDEXER}.key_projection"),
            *norm(f"{_STORED}.k_norm", f"{_INDEXER}.key_norm"),
            *linear(f"{_STORED}.weights_proj", f"{_INDEXER}.weight_projection"),
        )
        return super().weight_map(config).adding(*indexer)
