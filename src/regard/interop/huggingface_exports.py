"""Models of Regard as folders that transformers loads: config.json and model.safetensors."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from regard.interop.huggingface_configs import HEAD_DIMS, SIZES, SUPPORTED, read_config
from regard.interop.rotary_settings import write_rotary
from regard.interop.weight_files import SINGLE, WeightFileError, write_weights
from regard.interop.weight_maps import choose_table, plan_tensors
from regard.models import Decoder, Encoder, EncoderDecoder, TransformerConfig

ARCHITECTURES = {
    "bert": "BertModel",
    "vit": "ViTModel",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "t5": "T5ForConditionalGeneration",
}
_ACTIVATIONS = {"gelu_erf": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "silu": "silu"}

# Fields without a say where positions are of another kind.
_READ_ONLY_BY = {
    "rotary_base": "rotary",
    "rotary_width": "rotary",
    "rotary_scaling": "rotary",
    "relative_buckets": "relative",
    "relative_max_distance": "relative",
}
_NOT_WRITTEN = ("dropout_rate", "attention_dropout_rate")


def parameter_paths(model: nnx.Module) -> dict[str, Any]:
    """Every parameter of a model by its path, such as stack.blocks.0.attention.query_projection.kernel."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): leaf for path, leaf in state}


def save(
    model: Encoder | Decoder | EncoderDecoder,
    directory: str | os.PathLike[str],
    kind: str,
    *,
    settings: Mapping[str, Any] | None = None,
    dtype: Any = None,
    force: bool = False,
    shard_bytes: int | None = None,
) -> Path:
    """Write a model as config.json and model.safetensors, under the names that transformers reads.

    Args:
        model: an Encoder (bert, vit), a Decoder (gpt2, llama, mistral, qwen2, qwen3, gemma2) or an
            EncoderDecoder (t5), as config.json of that kind can describe it.
        directory: a folder, created when missing.
        kind: a `model_type` of transformers.
        settings: entries of config.json beside those that follow from the model, such as bos_token_id; of a
            loaded model, its `settings`. A vit's image_size, patch_size and num_channels are 224, 16 and 3
            unless given here.
        dtype: dtype to write; None means that of the parameters.
        force: whether files there may be replaced.
        shard_bytes: as in `weight_files.write_weights`.

    Returns:
        The folder.

    Raises:
        ValueError: an unknown kind, or a model that it cannot describe: the fields that would come back
            different are listed.
        WeightFileError: files there, without `force`.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> from regard.interop import huggingface
        >>> from regard.models import Decoder
        >>> _, config = huggingface.read_config({
        ...     "model_type": "gpt2", "n_embd": 6, "n_head": 3, "n_layer": 1, "vocab_size": 13,
        ...     "n_positions": 8,
        ... })
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = huggingface.save(Decoder(config, rngs=nnx.Rngs(0)), folder, "gpt2", force=True)
        ...     huggingface.load(folder).config == config
        True
    """
    directory = Path(directory)
    written = write_settings(kind, model.config, **(settings or {}))
    if isinstance(model, EncoderDecoder):
        written["num_decoder_layers"] = len(model.decoder.blocks)
    parameters = parameter_paths(model)
    sizes = {
        path: (tuple(leaf.shape), np.dtype(leaf.dtype if dtype is None else dtype))
        for path, leaf in parameters.items()
    }
    written["dtype"] = str(np.result_type(*(held for _, held in sizes.values())))
    plans = plan_tensors(
        choose_table(kind, gated=model.config.gated),
        sizes,
        lambda path: np.asarray(parameters[path][...]),
        written,
    )
    described = directory / "config.json"
    if described.exists() and not force:
        raise WeightFileError(
            f"{described} exists already; choose another folder, or pass force=True to replace it"
        )
    write_weights(directory / SINGLE, plans, force=force, shard_bytes=shard_bytes)
    draft = directory / ".config.json.writing"
    draft.write_text(json.dumps(written, indent=2) + "\n")
    draft.replace(described)
    return directory


def write_settings(kind: str, config: TransformerConfig, **known: Any) -> dict[str, Any]:
    """The content of config.json with which transformers builds the same model.

    Args:
        kind: one of `SUPPORTED`.
        config: the model's; its dropout rates are not written.
        known: entries beside those that follow from `config`.

    Raises:
        ValueError: an unknown kind, or a config that it cannot describe: the fields that would come back
            different are listed.
    """
    if kind not in SIZES:
        raise ValueError(f"kind: expected one of {', '.join(SUPPORTED)}; got {kind!r}")
    settings = {
        **({"image_size": 224, "patch_size": 16, "num_channels": 3} if kind == "vit" else {}),
        **{name: value for name, value in known.items() if name not in ("torch_dtype", "dtype", "head_dim")},
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        **{theirs: getattr(config, ours) for theirs, ours in SIZES[kind].items()},
        **_write_choices(kind, config),
    }
    length = getattr(config.rotary_scaling, "length", None)
    try:
        _, found = read_config(settings, length=length)
    except ValueError as error:
        raise ValueError(
            f"config: expected one that a config.json of {kind} can describe; {error}"
        ) from error
    faults = [
        f"{field.name} = {getattr(config, field.name)!r}, read as {getattr(found, field.name)!r}"
        for field in dataclasses.fields(config)
        if _meaning(config, field.name) != _meaning(found, field.name)
    ]
    if faults:
        raise ValueError(
            f"config: expected one that a config.json of {kind} can describe; it cannot say\n  "
            + "\n  ".join(faults)
        )
    return settings


def _meaning(config: TransformerConfig, name: str) -> Any:
    """A field with its defaults worked out; None where it has no say."""
    if name in _NOT_WRITTEN or config.positions != _READ_ONLY_BY.get(name, config.positions):
        return None
    match name:
        case "max_length":
            return None if config.positions == "relative" else config.max_length
        case "num_key_heads":
            return config.num_key_heads or config.num_heads
        case "head_dim":
            return config.head_width
        case "output_bias":
            return config.attention_bias if config.output_bias is None else config.output_bias
        case "attention_scale":
            return config.head_width**-0.5 if config.attention_scale is None else config.attention_scale
        case "windows":
            return [config.window(layer) for layer in range(config.num_layers)]
    return getattr(config, name)


def _write_choices(kind: str, config: TransformerConfig) -> dict[str, Any]:
    """What of config.json is no plain size."""
    activation = _ACTIVATIONS[config.activation]
    match kind:
        case "bert":
            return {
                "layer_norm_eps": config.norm_epsilon,
                "hidden_act": activation,
                "type_vocab_size": config.num_token_types,
            }
        case "vit":
            return {
                "layer_norm_eps": config.norm_epsilon,
                "hidden_act": activation,
                "qkv_bias": config.attention_bias,
            }
        case "gpt2":
            return {
                "n_inner": config.d_ff,
                "layer_norm_epsilon": config.norm_epsilon,
                "activation_function": activation,
                "scale_attn_weights": config.attention_scale != 1.0,
                "tie_word_embeddings": config.tied_output,
            }
        case "t5":
            name = "gelu" if config.gated and config.activation == "gelu_tanh" else activation
            return {
                "d_kv": config.head_width,
                "layer_norm_epsilon": config.norm_epsilon,
                "feed_forward_proj": f"gated-{name}" if config.gated else name,
                "relative_attention_num_buckets": config.relative_buckets,
                "relative_attention_max_distance": config.relative_max_distance,
                "scale_decoder_outputs": config.output_scale != 1.0,
                "tie_word_embeddings": config.tied_output,
            }
    return {
        "num_key_value_heads": config.num_key_heads or config.num_heads,
        # Where it follows from the other sizes, some releases have no such entry.
        **({} if config.head_dim is None and kind not in HEAD_DIMS else {"head_dim": config.head_width}),
        "rms_norm_eps": config.norm_epsilon,
        "hidden_act": activation,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.feed_forward_bias,
        **write_rotary(config.rotary_base, config.rotary_width, config.rotary_scaling, config.head_width),
        "tie_word_embeddings": config.tied_output,
        **_write_windows(kind, config),
        **(_write_gemma(config) if kind == "gemma2" else {}),
    }


def _write_windows(kind: str, config: TransformerConfig) -> dict[str, Any]:
    """Which layers see only so many keys; all that do share one number."""
    windows = [config.window(layer) for layer in range(config.num_layers)]
    before = next((window for window in windows if window is not None), None)
    window = None if before is None else before + 1
    if kind == "llama":
        return {}
    if kind == "mistral":
        return {"sliding_window": window}
    return {
        "sliding_window": window,
        "layer_types": ["full_attention" if one is None else "sliding_attention" for one in windows],
        **({} if kind == "gemma2" else {"use_sliding_window": window is not None}),
    }


def _write_gemma(config: TransformerConfig) -> dict[str, Any]:
    scalar = (_meaning(config, "attention_scale")) ** -2
    # transformers takes a whole number, and it is one in every released model.
    whole = round(scalar)
    return {
        "hidden_activation": _ACTIVATIONS[config.activation],
        "query_pre_attn_scalar": whole if whole**-0.5 == config.attention_scale else scalar,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.output_softcap,
    }
