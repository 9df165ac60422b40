"""What a Hugging Face config.json says, as a TransformerConfig."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.interop.rotary_settings import read_rotary
from regard.interop.tensor_layouts import sides
from regard.models import TransformerConfig

ACTIVATIONS = {
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

# Their names of our sizes.
_SIZES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "num_layers",
}
_TOKENS = {"vocab_size": "vocab_size", "max_position_embeddings": "max_length"}
_GPT2 = {
    "n_embd": "d_model",
    "n_head": "num_heads",
    "n_layer": "num_layers",
    "vocab_size": "vocab_size",
    "n_positions": "max_length",
}
_T5 = {
    "d_model": "d_model",
    "num_heads": "num_heads",
    "d_kv": "head_dim",
    "d_ff": "d_ff",
    "num_layers": "num_layers",
    "vocab_size": "vocab_size",
}
SIZES = {
    "bert": {**_SIZES, **_TOKENS},
    "vit": _SIZES,
    "gpt2": _GPT2,
    "llama": {**_SIZES, **_TOKENS},
    "mistral": {**_SIZES, **_TOKENS},
    "qwen2": {**_SIZES, **_TOKENS},
    "qwen3": {**_SIZES, **_TOKENS},
    "gemma2": {**_SIZES, **_TOKENS},
    "t5": _T5,
}
SUPPORTED = tuple(SIZES)

# What a width of one head is where config.json leaves it out; None is hidden_size / num_attention_heads.
HEAD_DIMS = {"qwen3": 128, "gemma2": 256}

# Settings that only one choice of is built here.
_EXPECTED = {
    "bert": {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    "vit": {},
    "gpt2": {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"use_bidirectional_attention": False},
    "t5": {"is_encoder_decoder": True},
}


def read_settings(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """config.json as a dict, from a folder, a file or a dict.

    Raises:
        ValueError: no such file, or no JSON object in it.
    """
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"{path}: expected the config.json of a model, found nothing; give the folder that holds it"
        )
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:
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
        The kind (`model_type`), and the config of an `Encoder` (bert, vit), a `Decoder` (gpt2, llama,
        mistral, qwen2, qwen3, gemma2) or an `EncoderDecoder` (t5).

    Raises:
        ValueError: an unsupported model_type or setting, with what is supported; a setting that is missing.

    Example:
        >>> from regard.interop import huggingface_configs
        >>> kind, config = huggingface_configs.read_config({
        ...     "model_type": "gpt2", "n_embd": 24, "n_head": 3, "n_layer": 2, "vocab_size": 61,
        ...     "n_positions": 32,
        ... })
        >>> kind, config.d_ff, config.activation, config.tied_output
        ('gpt2', 96, 'gelu_tanh', True)

    Reference: the configuration classes of transformers 5.23, and the spellings of releases before 5.
    """
    settings = read_settings(source)
    kind = settings.get("model_type")
    if kind not in SIZES:
        near = difflib.get_close_matches(str(kind), SUPPORTED, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"model_type: expected one of {', '.join(SUPPORTED)}; got {kind!r} (nearest: {near})"
        )
    if settings.get("quantization_config"):
        raise ValueError(
            "quantization_config: expected weights of floating point, got quantized ones; load a checkpoint"
            " that is not quantized"
        )
    for name, expected in _EXPECTED[kind].items():
        value = settings.get(name)
        if value is not None and value != expected:
            raise ValueError(f"{name}: expected {expected!r} for {kind}, got {value!r}; not supported")
    fields = {ours: _size(settings, theirs, kind) for theirs, ours in SIZES[kind].items()}
    return kind, TransformerConfig(**_READERS[kind](settings, fields, length))


def _size(settings: Mapping[str, Any], name: str, kind: str) -> int:
    # The configs of GPT-2 and T5 were first written under these names, others are aliases of them.
    value = settings.get(name, settings.get("n_ctx") if name == "n_positions" else None)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: expected an integer in the config.json of {kind}, got {value!r}")
    return value


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}; got {name!r}")
    return ACTIVATIONS[name]


def _read_bert(settings: Mapping[str, Any], fields: dict[str, Any], length: int | None) -> dict[str, Any]:
    return {
        **fields,
        "positions": "learned",
        "norm": "post",
        "norm_epsilon": settings.get("layer_norm_eps", 1e-12),
        "activation": _activation(settings.get("hidden_act", "gelu")),
        "num_token_types": settings.get("type_vocab_size", 2),
        "embedding_norm": True,
        "scale_embedding": False,
    }


def _read_vit(settings: Mapping[str, Any], fields: dict[str, Any], length: int | None) -> dict[str, Any]:
    patch, image = (
        sides(settings.get(name, size)) for name, size in (("patch_size", 16), ("image_size", 224))
    )
    return {
        **fields,
        "input_width": patch[0] * patch[1] * settings.get("num_channels", 3),
        "max_length": (image[0] // patch[0]) * (image[1] // patch[1]) + 1,
        "positions": "learned",
        "norm_epsilon": settings.get("layer_norm_eps", 1e-12),
        "activation": _activation(settings.get("hidden_act", "gelu")),
        "attention_bias": settings.get("qkv_bias", True),
        "output_bias": True,
        "class_token": True,
        "scale_embedding": False,
    }


def _read_gpt2(settings: Mapping[str, Any], fields: dict[str, Any], length: int | None) -> dict[str, Any]:
    return {
        **fields,
        "d_ff": settings.get("n_inner") or 4 * fields["d_model"],
        "positions": "learned",
        "norm_epsilon": settings.get("layer_norm_epsilon", 1e-5),
        "activation": _activation(settings.get("activation_function", "gelu_new")),
        "attention_scale": None if settings.get("scale_attn_weights", True) else 1.0,
        "scale_embedding": False,
        "tied_output": settings.get("tie_word_embeddings", True),
        "head_bias": False,
    }


def _read_llama(settings: Mapping[str, Any], fields: dict[str, Any], length: int | None) -> dict[str, Any]:
    """Llama, and what Mistral, Qwen and Gemma share with it."""
    kind, heads = settings["model_type"], fields["num_heads"]
    head_dim = settings.get("head_dim") or HEAD_DIMS.get(kind)
    head_width = head_dim or fields["d_model"] // heads
    return {
        **fields,
        "num_key_heads": settings.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "positions": "rotary",
        "norm_kind": "rms",
        "norm_epsilon": settings.get("rms_norm_eps", 1e-6),
        "activation": _activation(settings.get("hidden_act", "silu")),
        "gated": True,
        "attention_bias": settings.get("attention_bias", False),
        "feed_forward_bias": settings.get("mlp_bias", False),
        **read_rotary(settings, head_width, fields["max_length"], length),
        "scale_embedding": False,
        "tied_output": settings.get("tie_word_embeddings", False),
        "head_bias": False,
    }


def _read_mistral(settings: Mapping[str, Any], fields: dict[str, Any], length: int | None) -> dict[str, Any]:
    return {**_read_llama(settings, fields, length), "windows": (_before(settings.get("sliding_window")),)}


def _read_qwen(settings: Mapping[str, Any], fields: dict[str, Any], length: int | None) -> dict[str, Any]:
    second = settings["model_type"] == "qwen2"
    window = settings.get("sliding_window", 4096) if settings.get("use_sliding_window") else None
    first = settings.get("max_window_layers", 28)
    layers = [layer >= first for layer in range(fields["num_layers"])]
    return {
        **_read_llama(settings, fields, length),
        **({"attention_bias": True, "output_bias": False} if second else {"query_key_norm": True}),
        "windows": _windows(settings, window, layers),
    }


def _read_gemma2(settings: Mapping[str, Any], fields: dict[str, Any], length: int | None) -> dict[str, Any]:
    layers = [layer % 2 == 0 for layer in range(fields["num_layers"])]
    return {
        **_read_llama(settings, fields, length),
        "norm": "both",
        "activation": _activation(settings.get("hidden_activation") or "gelu_pytorch_tanh"),
        "attention_scale": settings.get("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": settings.get("attn_logit_softcapping", 50.0),
        "output_softcap": settings.get("final_logit_softcapping", 30.0),
        "windows": _windows(settings, settings.get("sliding_window", 4096), layers),
        "scale_embedding": True,
        "tied_output": settings.get("tie_word_embeddings", True),
    }


def _read_t5(settings: Mapping[str, Any], fields: dict[str, Any], length: int | None) -> dict[str, Any]:
    gate, _, name = settings.get("feed_forward_proj", "relu").rpartition("-")
    tied = settings.get("tie_word_embeddings", True)
    # transformers 5 ties the head of version 1.1 as well, and says apart whether its input is scaled.
    scaled = settings.get("scale_decoder_outputs", tied)
    return {
        **fields,
        "positions": "relative",
        "norm_kind": "rms",
        "norm_epsilon": settings.get("layer_norm_epsilon", 1e-6),
        "activation": "gelu_tanh" if (gate, name) == ("gated", "gelu") else _activation(name),
        "gated": gate == "gated",
        "attention_bias": False,
        "feed_forward_bias": False,
        "relative_buckets": settings.get("relative_attention_num_buckets", 32),
        "relative_max_distance": settings.get("relative_attention_max_distance", 128),
        "attention_scale": 1.0,
        "scale_embedding": False,
        "shared_embedding": True,
        "tied_output": tied,
        "output_scale": fields["d_model"] ** -0.5 if scaled else 1.0,
        "head_bias": False,
    }


_READERS = {
    "bert": _read_bert,
    "vit": _read_vit,
    "gpt2": _read_gpt2,
    "llama": _read_llama,
    "mistral": _read_mistral,
    "qwen2": _read_qwen,
    "qwen3": _read_qwen,
    "gemma2": _read_gemma2,
    "t5": _read_t5,
}


def _before(window: int | None) -> int | None:
    """Keys before the query's own: theirs counts the query's own as well."""
    return None if window is None else window - 1


def _windows(settings: Mapping[str, Any], window: int | None, sliding: list[bool]) -> tuple[int | None, ...]:
    """The window of every layer, as the shortest run that repeats."""
    names = settings.get("layer_types") or [
        "sliding_attention" if one else "full_attention" for one in sliding
    ]
    unknown = sorted({*names} - {"sliding_attention", "full_attention"})
    if unknown:
        raise ValueError(
            f"layer_types: expected sliding_attention or full_attention, got {', '.join(unknown)}"
        )
    if len(names) != len(sliding):
        raise ValueError(
            f"layer_types: expected one entry for each of {len(sliding)} layers, got {len(names)}"
        )
    windows = tuple(_before(window) if name == "sliding_attention" else None for name in names)
    for size in range(1, len(windows) + 1):
        if all(one == windows[layer % size] for layer, one in enumerate(windows)):
            return windows[:size]
    return (None,)
