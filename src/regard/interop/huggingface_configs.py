"""config.json as a TransformerConfig, and back."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from regard.interop.families import FAMILIES, Family
from regard.interop.families.qwen3_5 import measure_delta
from regard.layers.choices import check_choice
from regard.models import TransformerConfig
from regard.paths import read_path

_MOST_LAYERS = 1 << 14


def read_settings(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json as a dict, from a folder, a file or a dict."""
    if isinstance(source, Mapping):
        return dict(source)
    path = read_path("source", source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"{path}: expected the config.json of a model, found nothing; give the folder that holds it"
        )
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(settings).__name__}")
    return settings


def read_config(
    source: str | os.PathLike[str] | Mapping[str, Any], *, length: int | None = None
) -> tuple[str, TransformerConfig]:
    """Read what a config.json describes.

    Dropout rates are left at 0: a model just loaded predicts the same every time.

    Args:
        source: a folder with config.json, that file, or its content as a dict.
        length: tokens to serve; read only by the rotary scaling "dynamic", whose frequencies depend on it.
            None means the length that it was trained with, where it changes nothing.

    Returns:
        The kind (`model_type`), and the config of an `Encoder` (bert, modernbert, vit), a `Decoder` (gpt2,
        llama, mistral, qwen2, qwen3, qwen3_moe, qwen3_5_text, qwen3_next, deepseek_v3, deepseek_v32,
        kimi_linear, gemma2, gemma3_text, gpt_oss) or an `EncoderDecoder` (t5).

    Raises:
        ValueError: an unsupported model_type, or a setting that is missing, unsupported or unknown.

    Example:
        >>> from regard.interop import huggingface_configs
        >>> kind, config = huggingface_configs.read_config({
        ...     "model_type": "gpt2", "n_embd": 24, "n_head": 3, "n_layer": 2, "vocab_size": 61,
        ...     "n_positions": 32,
        ... })
        >>> kind, config.d_ff, config.activation, config.tied_output
        ('gpt2', 96, 'gelu_tanh', True)

    Reference: the configuration classes of transformers 5.24, and the spellings of releases before 5.
    """
    settings = read_settings(source)
    family = find_family(settings)
    packed = settings.get("quantization_config")
    method = packed.get("quant_method") if isinstance(packed, Mapping) else packed
    if packed and method not in family.packings:
        raise ValueError(
            "quantization_config: expected weights of floating point, got quantized ones; load a checkpoint"
            " that is not quantized"
        )
    family.check_layers(settings, _MOST_LAYERS, "correct config.json")
    try:
        return family.kind, family.read(settings, length)
    except (TypeError, AttributeError, ArithmeticError, LookupError) as error:
        raise ValueError(
            f"config.json: expected entries of the kinds that {family.kind} models have, got one of another"
            f" ({type(error).__name__}: {error}); correct it, or fetch the file again"
        ) from error


def find_family(settings: Mapping[str, Any]) -> Family:
    """Find the family that a config.json says its model is of."""
    kind: Any = settings.get("model_type")
    if isinstance(settings.get("text_config"), Mapping):
        raise ValueError(
            f"model_type: expected a model of text or of images, got {kind!r}, which is of both, as its"
            " text_config says; save its language model alone, as a folder of its own"
        )
    check_choice("model_type", kind, FAMILIES)
    return FAMILIES[kind]


# What a model says of itself, whatever was said of the one that it was loaded from.
_OWN = ("torch_dtype", "dtype", "head_dim", "quantization_config")


def write_settings(kind: str, config: TransformerConfig, /, **extras: Any) -> dict[str, Any]:
    """Return config.json of the same model in transformers, without dropout rates; `extras` go beside."""
    check_choice("kind", kind, FAMILIES)
    family = FAMILIES[kind]
    settings = {**family.assumed, **{name: extras[name] for name in extras if name not in _OWN}}
    settings |= {"model_type": kind, "architectures": [family.architecture], **family.write(config)}
    try:
        _, restored = read_config(settings, length=getattr(config.rotary_scaling, "length", None))
    except ValueError as error:
        raise ValueError(
            f"config: expected one that a config.json of {kind} can describe; {error}"
        ) from error
    theirs = _resolve(restored)
    lost = [
        f"\n  {name} = {getattr(config, name)!r}, read as {getattr(restored, name)!r}"
        for name, value in _resolve(config).items()
        if value != theirs[name]
    ]
    if lost:
        raise ValueError(
            f"config: expected one that a config.json of {kind} can describe; it cannot say{''.join(lost)}"
        )
    return settings


def _resolve(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields with what None stands for, and None where they do not shape the model."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    # A config.json is read without them; the last two change no number.
    silent = {"dropout_rate", "attention_dropout_rate", "scan_layers", "remat"}
    if config.positions == "relative":
        silent.add("max_length")
    if not config.is_hybrid:
        silent |= {name for name in fields if name.startswith(("delta_", "conv_"))}
    for kind in {"rotary", "relative"} - {config.positions}:
        silent |= {name for name in fields if name.startswith(f"{kind}_")}
    layers = range(config.num_layers)
    fields |= {
        "num_key_heads": config.num_key_heads or config.num_heads,
        "head_dim": config.head_width,
        "expert_width": config.expert_width or config.d_ff,
        **{f"delta_{name}": size for name, size in measure_delta(config)._asdict().items()},
        "mixers": [config.mixer(layer) for layer in layers],
        "rotary_width": config.rotary_width or config.head_width,
        "output_bias": config.attention_bias if config.output_bias is None else config.output_bias,
        "attention_scale": config.attention_scale or config.head_width**-0.5,
        "windows": [config.window(layer) for layer in layers],
        "rotary_window_base": [config.rotary(n) for n in layers if config.window(n) is not None],
    }
    return fields | dict.fromkeys(silent)
