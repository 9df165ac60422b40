"""Gemma 3, of text."""

from typing import Any, ClassVar

from regard.interop.families.entries import read_number, read_size
from regard.interop.families.gemma2 import Gemma2
from regard.interop.families.rotary import read_rotary_by_kind, write_rotary_by_kind
from regard.interop.families.sliding_windows import FULL, SLIDING, read_windows
from regard.interop.weight_maps import Fields, Settings
from regard.models import TransformerConfig
from regard.models.presets import GEMMA3

_BASES = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}


class Gemma3(Gemma2):
    """Gemma 3 as a Decoder: Gemma 2 with norms of queries and keys in place of softcaps, and two bases."""

    kind = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    entries: ClassVar = {
        name: field for name, field in Gemma2.entries.items() if field != "attention_softcap"
    }
    defaults: ClassVar = GEMMA3
    required: ClassVar = {**Gemma2.required, "attn_logit_softcapping": None}
    # transformers writes its own copy of the pattern, and reads the entry without the underscore.
    harmless: ClassVar = (*Gemma2.harmless, "_sliding_window_pattern")

    def read_more(self, settings: Settings, fields: Fields, length: int | None) -> dict[str, Any]:
        name, window = "sliding_window_pattern", settings.get("sliding_window", 4096)
        pattern = settings.get(name)
        pattern = 6 if pattern is None else read_number(name, read_size(name, pattern))
        if SLIDING in (settings.get("layer_types") or [SLIDING]):  # its base is that of such layers
            window = read_size("sliding_window", window)
        sliding = [bool((layer + 1) % pattern) for layer in range(fields["num_layers"])]
        windows = read_windows(settings, window, sliding)
        return {**super().read_more(settings, fields, length), "windows": windows}

    def read_positions(self, settings: Settings, *sizes: Any) -> dict[str, Any]:
        return read_rotary_by_kind(settings, _BASES, *sizes)

    def write_positions(self, config: TransformerConfig) -> dict[str, Any]:
        return write_rotary_by_kind(config, _BASES)
