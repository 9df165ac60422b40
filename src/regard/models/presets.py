"""Presets: published architectures as data, each with the table that it comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from flax import nnx

from regard.layers.choices import check_choice
from regard.models.classifier import Classifier
from regard.models.config import TransformerConfig
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.positions import Llama3, YaRN

Kind = Literal["encoder", "decoder", "encoder_decoder"]
Model = Encoder | Decoder | EncoderDecoder | Classifier


@dataclass(frozen=True)
class Preset:
    """An architecture with its sizes, and where they are published.

    Example:
        >>> import dataclasses
        >>> from flax import nnx
        >>> from regard.models import preset
        >>> gpt2 = preset("gpt2")
        >>> sizes = {"d_model": 12, "num_heads": 2, "d_ff": 48, "num_layers": 1, "vocab_size": 9}
        >>> small = dataclasses.replace(gpt2.config, **sizes)
        >>> type(dataclasses.replace(gpt2, config=small).build(rngs=nnx.Rngs(0))).__name__
        'Decoder'
    """

    kind: Kind
    """The kind of model of `regard.models`."""
    config: TransformerConfig
    """Sizes and choices."""
    source: str
    """Paper and table."""

    def build(self, *, rngs: nnx.Rngs) -> Encoder | Decoder | EncoderDecoder:
        """Build the model with fresh parameters; `regard.interop.huggingface.load` has trained ones."""
        models = {"encoder": Encoder, "decoder": Decoder, "encoder_decoder": EncoderDecoder}
        return models[self.kind](self.config, rngs=rngs)


def preset(name: str) -> Preset:
    """Look up an architecture by its name.

    Args:
        name: a key of `PRESETS`.

    Returns:
        Kind, config and source; `dataclasses.replace(preset.config, ...)` changes sizes.

    Raises:
        KeyError: an unknown name; the error lists the known ones.

    Example:
        >>> from regard.models import preset
        >>> mistral = preset("mistral-7b")
        >>> mistral.config.num_key_heads, mistral.config.windows
        (8, (4095,))
    """
    check_choice("preset", name, PRESETS, KeyError)
    return PRESETS[name]


# What all models of a family have in common, and what their configurations mean by saying nothing.
_LEARNED: dict[str, Any] = {"positions": "learned", "scale_embedding": False}
_ENCODER: dict[str, Any] = {**_LEARNED, "norm_epsilon": 1e-12, "activation": "gelu_erf"}
_RMS: dict[str, Any] = {
    "norm_kind": "rms", "norm_epsilon": 1e-6, "attention_bias": False, "feed_forward_bias": False,
    "scale_embedding": False, "head_bias": False,
}  # fmt: skip
BERT: dict[str, Any] = {**_ENCODER, "norm": "post", "embedding_norm": True, "num_token_types": 2}
MODERNBERT: dict[str, Any] = {
    "positions": "rotary", "scale_embedding": False, "embedding_norm": True, "first_norm": False,
    "norm_kind": "layer_no_bias", "norm_epsilon": 1e-5, "attention_bias": False, "feed_forward_bias": False,
    "activation": "gelu_erf", "gated": True,
}  # fmt: skip
VIT: dict[str, Any] = {**_ENCODER, "class_token": True}
GPT2: dict[str, Any] = {**_LEARNED, "norm_epsilon": 1e-5, "tied_output": True, "head_bias": False}
LLAMA: dict[str, Any] = {**_RMS, "positions": "rotary", "activation": "silu", "gated": True}
GEMMA2: dict[str, Any] = {
    **LLAMA, "norm": "both", "norm_kind": "zero_centered_rms", "activation": "gelu_tanh",
    "attention_softcap": 50.0, "scale_embedding": True, "tied_output": True, "output_softcap": 30.0,
}  # fmt: skip
GEMMA3: dict[str, Any] = {**GEMMA2, "attention_softcap": None, "output_softcap": None, "query_key_norm": True}
QWEN3_5: dict[str, Any] = {
    **LLAMA, "norm_kind": "zero_centered_rms", "query_key_norm": True, "output_gate": True,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    **LLAMA, "norm_epsilon": 1e-5, "attention_bias": True, "feed_forward_bias": True, "sinks": True,
    "activation": "gelu_quick", "gate_limit": 7.0,
}  # fmt: skip
T5: dict[str, Any] = {
    **_RMS, "positions": "relative", "activation": "relu", "attention_scale": 1.0, "shared_embedding": True,
    "tied_output": True,
}  # fmt: skip

_MINILM = "Wang et al., MiniLM, 2020, table 2: width 384; every other of its 12 layers kept"
_RELEASED = "widths from the released configuration"
_DROPOUT = {"dropout_rate": 0.1, "attention_dropout_rate": 0.1}


def _scale(d_model: int, num_heads: int, num_layers: int, **choices: Any) -> TransformerConfig:
    """Build a config whose feed-forward branches are four times as wide as the model."""
    return TransformerConfig(d_model, num_heads, 4 * d_model, num_layers, **choices)


def _bert(*sizes: int, source: str = "Devlin et al., BERT, 2019, section 3") -> Preset:
    return Preset("encoder", _scale(*sizes, vocab_size=30_522, max_length=512, **BERT, **_DROPOUT), source)


def _gpt2(*sizes: int) -> Preset:
    config = _scale(*sizes, vocab_size=50_257, max_length=1024, **GPT2, **_DROPOUT)
    source = "Radford et al., Language Models are Unsupervised Multitask Learners, 2019, table 2"
    return Preset("decoder", config, source)


def _t5(d_model: int, *sizes: int) -> Preset:
    choices = {"vocab_size": 32_128, "head_dim": 64, "output_scale": d_model**-0.5}
    config = _scale(d_model, *sizes, **choices, **T5, **_DROPOUT)
    return Preset("encoder_decoder", config, "Raffel et al., T5, 2020, section 3.1.1 and 3.7")


def _vit(*sizes: int, patch: int) -> Preset:
    config = _scale(*sizes, input_width=3 * patch**2, max_length=(224 // patch) ** 2 + 1, **VIT)
    return Preset("encoder", config, "Dosovitskiy et al., An Image is Worth 16x16 Words, 2021, table 1")


def _build(
    kind: Kind, source: str, sizes: tuple[int, int, int, int, int], family: dict[str, Any], **choices: Any
) -> Preset:
    """Build a preset of d_model, num_heads, d_ff, num_layers and vocab_size, and what its family chooses."""
    return Preset(kind, TransformerConfig(*sizes, **{**family, **choices}), source)


_LLAMA = "Touvron et al., LLaMA, 2023, table 2"
_GROUPED = {"num_key_heads": 8, "norm_epsilon": 1e-5}
_QWEN3 = {**LLAMA, "head_dim": 128, "rotary_base": 1_000_000.0, "query_key_norm": True}

PRESETS: dict[str, Preset] = {
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 16, 24),
    "minilm-l6": _bert(384, 12, 6, source=_MINILM),
    "modernbert-base": _build(
        "encoder", f"Warner et al., ModernBERT, 2024, section 2; {_RELEASED}",
        (768, 12, 1152, 22, 50_368), MODERNBERT, max_length=8192, windows=(None, 64, 64),
        rotary_base=160_000.0, rotary_window_base=10_000.0,
    ),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 16, 24),
    "gpt2-large": _gpt2(1280, 20, 36),
    "gpt2-xl": _gpt2(1600, 25, 48),
    "llama-7b": _build("decoder", _LLAMA, (4096, 32, 11_008, 32, 32_000), LLAMA),
    "llama-13b": _build("decoder", _LLAMA, (5120, 40, 13_824, 40, 32_000), LLAMA),
    "llama-3.1-8b": _build(
        "decoder", "Grattafiori et al., The Llama 3 Herd of Models, 2024, table 3",
        (4096, 32, 14_336, 32, 128_256), {**LLAMA, **_GROUPED}, rotary_base=500_000.0,
        rotary_scaling=Llama3(factor=8.0),
    ),
    "mistral-7b": _build(
        "decoder", "Jiang et al., Mistral 7B, 2023, table 1", (4096, 32, 14_336, 32, 32_000),
        {**LLAMA, **_GROUPED}, head_dim=128, windows=(4095,),
    ),
    "qwen3-0.6b": _build(
        "decoder", f"Yang et al., Qwen3 Technical Report, 2025, table 1; {_RELEASED}",
        (1024, 16, 3072, 28, 151_936), _QWEN3, num_key_heads=8, tied_output=True,
    ),
    "qwen3-30b-a3b": _build(
        "decoder", f"Yang et al., Qwen3 Technical Report, 2025, table 2; {_RELEASED}",
        (2048, 32, 6144, 48, 151_936), _QWEN3, num_key_heads=4, num_experts=128, experts_per_token=8,
        expert_width=768,
    ),
    "qwen3-next-80b-a3b": _build(
        "decoder", "Qwen Team, Qwen3-Next, 2025; all sizes from the released configuration",
        (2048, 16, 5120, 48, 151_936), QWEN3_5, num_key_heads=2, head_dim=256, rotary_width=64,
        rotary_base=10_000_000.0, mixers=("gated_delta",) * 3 + ("attention",), delta_heads=32,
        delta_key_heads=16, delta_head_dim=128, delta_value_dim=128, num_experts=512, experts_per_token=10,
        expert_width=512, shared_width=512, shared_gate=True,
    ),
    "deepseek-v3": _build(
        "decoder", f"DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 4.2; {_RELEASED}",
        (7168, 128, 18_432, 61, 129_280), LLAMA, head_dim=128, latent_dim=512, latent_rotary_dim=64,
        latent_value_dim=128, latent_query_dim=1536,
        attention_scale=192**-0.5 * (1 + 0.1 * math.log(40)) ** 2,
        rotary_scaling=YaRN(40.0, 4096, sharpness=1.0), num_experts=256, experts_per_token=8,
        expert_width=2048, shared_width=2048, router_kind="sigmoid", expert_groups=8, groups_per_token=4,
        expert_scale=2.5, dense_layers=(0, 1, 2),
    ),
    "gpt-oss-20b": _build(
        "decoder", f"OpenAI, gpt-oss Model Card, 2025, table 1; {_RELEASED}",
        (2880, 64, 2880, 24, 201_088), GPT_OSS, num_key_heads=8, head_dim=64, windows=(127, None),
        rotary_base=150_000.0, rotary_scaling=YaRN(32.0, 4096, whole_features=False),
        num_experts=32, experts_per_token=4,
    ),
    "gemma-2-2b": _build(
        "decoder", "Gemma Team, Gemma 2, 2024, table 1, which counts both feed-forward maps: 18,432",
        (2304, 8, 9216, 26, 256_000), GEMMA2, num_key_heads=4, head_dim=256,
        attention_scale=256**-0.5, windows=(4095, None),
    ),
    "gemma-3-1b": _build(
        "decoder", f"Gemma Team, Gemma 3 Technical Report, 2025, table 1; {_RELEASED}",
        (1152, 4, 6912, 26, 262_144), GEMMA3, num_key_heads=1, head_dim=256, attention_scale=256**-0.5,
        windows=(511, 511, 511, 511, 511, None), rotary_base=1_000_000.0, rotary_window_base=10_000.0,
    ),
    "t5-small": _t5(512, 8, 6),
    "t5-base": _t5(768, 12, 12),
    "vit-base-16": _vit(768, 12, 12, patch=16),
    "vit-large-16": _vit(1024, 16, 24, patch=16),
}  # fmt: skip
"""Published models by name, each with the source of its sizes; `preset` makes a configuration of one."""
