"""Parameters of a decoder, counted by where they are."""

from __future__ import annotations

from typing import Any


def count_parameters(config: Any) -> dict[str, int]:
    """Count the parameters of a `Decoder`, by where they are.

    Args:
        config: the decoder's `TransformerConfig`.

    Returns:
        Numbers of all blocks' `attention`, `feed_forward`, `experts`, `routers` and `norms`, of the
        `embedding` with all that stands before and behind the blocks, and of the `head`.

    Example:
        >>> from regard.models import preset
        >>> from regard.planning import count_parameters
        >>> parts = count_parameters(preset("qwen3-30b-a3b").config)
        >>> sum(parts.values()), parts["experts"], parts["feed_forward"]
        (30532122624, 28991029248, 0)
    """
    check_config(config)
    block, dense, sparse = count_block(config), *count_branches(config)
    every, experts = config.num_layers, (config.num_experts or 0) * sparse
    counts = {"feed_forward": dense, "experts": experts, "routers": sparse}
    parts = {name: counts.get(name, every) * count for name, count in block.items()}
    width, norm, vocabulary = config.d_model, _count_norm(config), config.vocab_size or 0
    parts["norms"] -= (not config.first_norm and every > 0) * norm
    embedding = vocabulary * width + (config.positions == "learned") * config.max_length * width
    embedding += config.num_token_types * width + (config.embedding_norm + (config.norm != "post")) * norm
    embedding += (config.positions == "relative") * config.relative_buckets * config.num_heads
    head = 0 if config.tied_output else vocabulary * (width + config.head_bias)
    return {**parts, "embedding": embedding, "head": head}


def check_config(config: Any) -> None:
    """Raise for what is no `TransformerConfig`, and for layers of which nothing is planned."""
    if not hasattr(config, "vocab_size"):
        raise TypeError(f"config: expected a TransformerConfig, got {type(config).__name__}")
    if config.is_hybrid:
        expected = "attention in every layer, of the rest nothing is planned"
        raise ValueError(f"config: expected {expected}; got {config.mixers}")
    for name in ("latent_dim", "shared_width"):
        if getattr(config, name) is not None:
            raise ValueError(
                f"config: expected {name}=None, as nothing is planned of it; got {getattr(config, name)}"
            )


def count_block(config: Any) -> dict[str, int]:
    """Count the parameters of a block's parts; of `experts`, one."""
    width, inner, bias = config.d_model, config.d_ff, config.feed_forward_bias
    queries = config.num_heads * config.head_width
    keys = (config.num_key_heads or config.num_heads) * config.head_width
    output_bias = config.attention_bias if config.output_bias is None else config.output_bias
    attention = 2 * width * queries + 2 * width * keys
    attention += config.attention_bias * (queries + 2 * keys) + output_bias * width
    attention += config.output_gate * queries * (width + config.attention_bias)
    attention += config.query_key_norm * 2 * config.head_width + config.sinks * config.num_heads
    wide = 1 + config.gated

    def count_branch(inner: int) -> int:
        return (wide + 1) * width * inner + bias * (wide * inner + width)

    return {
        "attention": attention,
        "feed_forward": count_branch(inner),
        "experts": count_branch(config.expert_width or inner),
        "routers": (width + bias) * (config.num_experts or 0),
        "norms": _count_norm(config) * (4 if config.norm == "both" else 2),
    }


def _count_norm(config: Any) -> int:
    return config.d_model * (2 if config.norm_kind == "layer" else 1)


def count_branches(config: Any) -> tuple[int, int]:
    """Return how many layers have one feed-forward branch for all tokens, and how many have experts."""
    dense = config.num_layers if config.num_experts is None else len({*config.dense_layers})
    return dense, config.num_layers - dense
