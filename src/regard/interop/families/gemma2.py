"""Gemma 2."""

from typing import Any, ClassVar

from regard.interop.families.entries import demand_same, read_number
from regard.interop.families.family import WRITTEN_ACTIVATIONS, read_activation
from regard.interop.families.llama import BLOCK, LAYER, Llama, build_map
from regard.interop.families.sliding_windows import read_windows, write_windows
from regard.interop.weight_maps import Fields, Pair, Settings
from regard.models import TransformerConfig
from regard.models.presets import GEMMA2


def pair_norm(tensor: str, norm: str) -> Pair:
    """Pair a norm's tensor with its parameter, which is the factor less 1."""
    return Pair(f"{tensor}.weight", f"{norm}.scale_less_one")


class Gemma2(Llama):
    """Gemma 2 as a Decoder: Llama with norms on both sides, softcaps, and windows in every other layer."""

    kind = "gemma2"
    architecture = "Gemma2ForCausalLM"
    entries: ClassVar = {
        **{name: field for name, field in Llama.entries.items() if field != "activation"},
        "attn_logit_softcapping": "attention_softcap",
        "final_logit_softcapping": "output_softcap",
    }
    defaults: ClassVar = GEMMA2
    required: ClassVar = {**Llama.required, "use_bidirectional_attention": False}
    # transformers, too, goes by hidden_activation alone.
    harmless: ClassVar = (*Llama.harmless, "hidden_act")
    weights = build_map(
        pair_norm(f"{LAYER}.input_layernorm", f"{BLOCK}.attention_residual.norm"),
        pair_norm(f"{LAYER}.post_attention_layernorm", f"{BLOCK}.attention_residual.branch_norm"),
        pair_norm(f"{LAYER}.pre_feedforward_layernorm", f"{BLOCK}.feed_forward_residual.norm"),
        pair_norm(f"{LAYER}.post_feedforward_layernorm", f"{BLOCK}.feed_forward_residual.branch_norm"),
        pair_norm("norm", "trunk.stack.final_norm"),
        # Gemma 3's.
        pair_norm(f"{LAYER}.self_attn.q_norm", f"{BLOCK}.attention.query_norm"),
        pair_norm(f"{LAYER}.self_attn.k_norm", f"{BLOCK}.attention.key_norm"),
    )
    head_dim = 256
    num_key_heads = 4

    def read_more(self, settings: Settings, fields: Fields, length: int | None) -> dict[str, Any]:
        sliding = [layer % 2 == 0 for layer in range(fields["num_layers"])]
        window = settings.get("sliding_window", 4096)
        demand_same(settings, "sliding_window_size", window, "sliding_window")
        scalar = read_number("query_pre_attn_scalar", settings.get("query_pre_attn_scalar", 256))
        activation = settings.get("hidden_activation")
        return {
            **super().read_more(settings, fields, length),
            **({} if activation is None else {"activation": read_activation(activation)}),
            "attention_scale": scalar**-0.5,
            "windows": read_windows(settings, window, sliding),
        }

    def write_more(self, config: TransformerConfig) -> dict[str, Any]:
        scale = config.head_width**-0.5 if config.attention_scale is None else config.attention_scale
        # transformers takes a whole number, and it is one in every released model.
        whole = round(scale**-2)
        activation = WRITTEN_ACTIVATIONS[config.activation]
        return {
            **super().write_more(config),
            **write_windows(config, unused=4096),
            "hidden_act": activation,
            "hidden_activation": activation,
            "query_pre_attn_scalar": whole if whole**-0.5 == scale else scale**-2,
        }
