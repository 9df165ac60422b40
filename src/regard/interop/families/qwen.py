"""Qwen 2 and Qwen 3."""

from typing import Any, ClassVar

from regard.interop.families.llama import Llama
from regard.interop.families.sliding_windows import read_windows, write_windows
from regard.interop.weight_maps import Fields, Settings
from regard.models import TransformerConfig


class Qwen3(Llama):
    """Qwen 3 as a Decoder: Llama with norms of queries and keys, and windows in the upper layers."""

    kind = "qwen3"
    architecture = "Qwen3ForCausalLM"
    defaults: ClassVar = {**Llama.defaults, "query_key_norm": True}
    required: ClassVar = {**Llama.required, "use_mrope": False}
    head_dim = 128
    num_key_heads = 32

    def read_more(self, settings: Settings, fields: Fields, length: int | None) -> dict[str, Any]:
        window, first = settings.get("sliding_window", 4096), settings.get("max_window_layers", 28)
        window = window if settings.get("use_sliding_window") else None
        sliding = [layer >= first for layer in range(fields["num_layers"])]
        windows = read_windows(settings, window, sliding)
        return {**super().read_more(settings, fields, length), "windows": windows}

    def write_more(self, config: TransformerConfig) -> dict[str, Any]:
        windows = write_windows(config)
        used = windows["sliding_window"] is not None
        return {**super().write_more(config), **windows, "use_sliding_window": used}


class Qwen2(Qwen3):
    """Qwen 2 as a Decoder: biases of queries, keys and values in place of norms."""

    kind = "qwen2"
    architecture = "Qwen2ForCausalLM"
    defaults: ClassVar = {**Llama.defaults, "attention_bias": True, "output_bias": False}
    head_dim = None
