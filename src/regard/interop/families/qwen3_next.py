"""Qwen3-Next: the hybrid of Qwen 3.5, with experts, of which every token passes one."""

from typing import ClassVar

from regard.interop.families.llama import BLOCK, LAYER, pair_branch
from regard.interop.families.qwen3_5 import DELTA, STORED, Qwen35, measure_delta
from regard.interop.families.qwen3_moe import EXPERTS, Qwen3Moe
from regard.interop.weight_maps import TRANSPOSED, Pair, take_rows_of_heads
from regard.models import TransformerConfig

_SHARED, _BRANCH = f"{LAYER}.mlp.shared_expert", f"{BLOCK}.feed_forward.shared"


class Qwen3Next(Qwen35, Qwen3Moe):
    """Qwen3-Next as a Decoder: layers as of Qwen 3.5, with a shared expert beside those chosen."""

    kind = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"
    sizes: ClassVar = {**Qwen3Moe.sizes, "shared_expert_intermediate_size": "shared_width"}
    entries: ClassVar = {**Qwen35.entries, **Qwen3Moe.entries}
    defaults: ClassVar = {**Qwen35.defaults, "shared_gate": True}
    required: ClassVar = {**Qwen3Moe.required, **Qwen35.required}
    assumed: ClassVar = {}
    num_key_heads = 2

    def pair_projections(self, config: TransformerConfig) -> list[Pair]:
        heads, key_heads, width, value_width = measure_delta(config)
        group = heads // key_heads  # of value heads that share a key head
        sizes = (width, width, group * value_width, group * value_width)
        joined = {
            "in_proj_qkvz": (("query", "key", "value", "gate"), sizes),
            "in_proj_ba": (("rate", "forget"), (group, group)),
        }
        return [
            Pair(
                f"{STORED}.{tensor}.weight",
                f"{DELTA}.{name}_projection.kernel",
                take_rows_of_heads(index, key_heads, sizes),
            )
            for tensor, (names, sizes) in joined.items()
            for index, name in enumerate(names)
        ]

    def pair_experts(self) -> list[Pair]:
        return [
            *EXPERTS,
            Pair(f"{_SHARED}_gate.weight", f"{_BRANCH}_gate.kernel", TRANSPOSED),
            *pair_branch(_SHARED, _BRANCH),
        ]
