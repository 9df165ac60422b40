"""Qwen 3.5, of text: a hybrid of gated delta layers and attention."""

from typing import Any, ClassVar, NamedTuple

from regard.interop import weight_maps
from regard.interop.families.entries import read_number, read_size
from regard.interop.families.gemma2 import pair_norm
from regard.interop.families.llama import BLOCK, LAYER, Llama, build_map
from regard.interop.families.rotary import read_rotary, write_rotary
from regard.interop.families.sliding_windows import FULL, read_layer_types, shorten
from regard.interop.weight_maps import Fields, Pair, Settings, WeightMap, linear, take_rows
from regard.models import TransformerConfig
from regard.models.presets import QWEN3_5

LINEAR = "linear_attention"
_MIXERS = {LINEAR: "gated_delta", FULL: "attention"}
DELTA, STORED = f"{BLOCK}.delta", f"{LAYER}.linear_attn"
# How positions of images are laid out; those of text are the same in every part.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
_SHARE = "partial_rotary_factor"
# Sizes of the delta rule, their fields, and what transformers takes where they are left out.
_SIZES = {
    "linear_num_value_heads": ("delta_heads", 32),
    "linear_num_key_heads": ("delta_key_heads", 16),
    "linear_key_head_dim": ("delta_head_dim", 128),
    "linear_value_head_dim": ("delta_value_dim", 128),
}


class Qwen35(Llama):
    """Qwen 3.5 as a Decoder: most layers are `GatedDeltaNet`, the others attention with a gate."""

    kind = "qwen3_5_text"
    architecture = "Qwen3_5ForCausalLM"
    entries: ClassVar = {**Llama.entries, "linear_conv_kernel_dim": "conv_width"}
    defaults: ClassVar = QWEN3_5
    required: ClassVar = {**Llama.required, "hidden_act": "silu"}  # which convolutions obey, too
    head_dim = 256
    num_key_heads = 4

    def read_more(self, settings: Settings, fields: Fields, length: int | None) -> dict[str, Any]:
        more = super().read_more(settings, fields, length)
        width = more["head_dim"]
        rules = {**(settings.get("rope_scaling") or {}), **(settings.get("rope_parameters") or {})}
        beside = settings.get(_SHARE)
        share = rules.get(_SHARE, 0.25 if beside is None else beside)
        turned = int(width * read_number(_SHARE, share))
        sizes = {
            field: read_size(name, settings.get(name, default)) for name, (field, default) in _SIZES.items()
        }
        every = settings.get("full_attention_interval")
        every = 4 if every is None else read_size("full_attention_interval", every)
        is_linear = [bool(number % every) for number in range(1, fields["num_layers"] + 1)]
        mixers = [_MIXERS[kind] for kind in read_layer_types(settings, LINEAR, is_linear)]
        mixers = shorten(tuple(mixers), ("attention",))
        return {**more, **sizes, "rotary_width": turned, "mixers": mixers}

    def write_more(self, config: TransformerConfig) -> dict[str, Any]:
        kinds = {mixer: kind for kind, mixer in _MIXERS.items()}
        mixers = [config.mixer(layer) for layer in range(config.num_layers)]
        return {
            **super().write_more(config),
            "layer_types": [kinds.get(mixer, mixer) for mixer in mixers],
            **dict(zip(_SIZES, measure_delta(config), strict=True)),
        }

    def read_positions(self, settings: Settings, *sizes: Any) -> dict[str, Any]:
        rules = {name: settings.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
        plain = {
            name: {key: value for key, value in rule.items() if key not in (*_OF_IMAGES, _SHARE)}
            for name, rule in rules.items()
        }
        rotary = read_rotary({**plain, "rope_theta": settings.get("rope_theta")}, *sizes)
        if rotary["rotary_scaling"] is not None:
            raise ValueError(f"rope_type: expected default for {self.kind}, got {rules}; not supported")
        return rotary

    def write_positions(self, config: TransformerConfig) -> dict[str, Any]:
        written = write_rotary(config)
        share = (config.rotary_width or config.head_width) / config.head_width
        return {**written, "rope_parameters": {**written["rope_parameters"], _SHARE: share}}

    def weight_map(self, config: TransformerConfig) -> WeightMap:
        spans = measure_delta(config).features
        attention, taps = [], []
        for index, name in enumerate(("query", "gate")):
            half = weight_maps.take_rows_of_heads(index, config.num_heads, (config.head_width,) * 2)
            projection = f"{BLOCK}.attention.{name}_projection"
            attention += linear(f"{LAYER}.self_attn.q_proj", projection, half, half)
        for index, name in enumerate(("query", "key", "value")):
            conversion = weight_maps.take_taps(index, spans)
            taps.append(Pair(f"{STORED}.conv1d.weight", f"{DELTA}.{name}_taps", conversion))
        table = build_map(
            *attention,
            *taps,
            *self.pair_projections(config),
            *self.pair_experts(),
            *linear(f"{STORED}.out_proj", f"{DELTA}.output_projection"),
            Pair(f"{STORED}.A_log", f"{DELTA}.log_speed"),
            Pair(f"{STORED}.dt_bias", f"{DELTA}.forget_bias"),
            Pair(f"{STORED}.norm.weight", f"{DELTA}.norm_scale"),
            pair_norm(f"{LAYER}.input_layernorm", f"{BLOCK}.delta_residual.norm"),
            pair_norm(f"{LAYER}.input_layernorm", f"{BLOCK}.attention_residual.norm"),
            pair_norm(f"{LAYER}.post_attention_layernorm", f"{BLOCK}.feed_forward_residual.norm"),
            pair_norm(f"{LAYER}.self_attn.q_norm", f"{BLOCK}.attention.query_norm"),
            pair_norm(f"{LAYER}.self_attn.k_norm", f"{BLOCK}.attention.key_norm"),
            pair_norm("norm", "trunk.stack.final_norm"),
        )
        return table.ignoring(r"mtp\..*")  # layers that predict tokens further ahead

    def pair_projections(self, config: TransformerConfig) -> list[Pair]:
        """Pair the linear maps that the delta rule begins with."""
        spans = measure_delta(config).features
        pairs = [
            Pair(f"{STORED}.in_proj_qkv.weight", f"{DELTA}.{name}_projection.kernel", take_rows(index, spans))
            for index, name in enumerate(("query", "key", "value"))
        ]
        for ending, name in (("z", "gate"), ("b", "rate"), ("a", "forget")):
            pairs += linear(f"{STORED}.in_proj_{ending}", f"{DELTA}.{name}_projection")
        return pairs

    def pair_experts(self) -> list[Pair]:
        """Pair the tensors of experts, which a relative has."""
        return []


class DeltaSizes(NamedTuple):
    """The sizes of a config's delta rule, with what None stands for."""

    heads: int
    key_heads: int
    head_dim: int
    value_dim: int

    @property
    def features(self) -> tuple[int, int, int]:
        """Features of all heads' queries, keys and values."""
        width = self.key_heads * self.head_dim
        return width, width, self.heads * self.value_dim


def measure_delta(config: TransformerConfig) -> DeltaSizes:
    """Return the sizes of a config's delta rule."""
    heads, width = config.delta_heads or config.num_heads, config.delta_head_dim or config.head_width
    return DeltaSizes(heads, config.delta_key_heads or heads, width, config.delta_value_dim or width)
