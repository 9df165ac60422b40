"""Mistral."""

from typing import Any

from regard.interop.families.llama import Llama
from regard.interop.families.sliding_windows import read_window, write_windows
from regard.interop.weight_maps import Fields, Settings
from regard.models import TransformerConfig


class Mistral(Llama):
    """Mistral as a Decoder: Llama with one window in all layers."""

    kind = "mistral"
    architecture = "MistralForCausalLM"
    num_key_heads = 8

    def read_more(self, settings: Settings, fields: Fields, length: int | None) -> dict[str, Any]:
        windows = (read_window(settings.get("sliding_window", 4096)),)
        return {**super().read_more(settings, fields, length), "windows": windows}

    def write_more(self, config: TransformerConfig) -> dict[str, Any]:
        window = write_windows(config)["sliding_window"]
        return {**super().write_more(config), "sliding_window": window}
