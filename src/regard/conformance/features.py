"""Features that a function takes: those that promises need, and their keywords in libraries."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Features = Mapping[str, str | Callable[[Any], Mapping[str, Any]]]

# Of each feature the keywords that libraries have for it, ours first.
KEYWORDS = {
    "mask": ("mask", "attn_mask", "attention_mask"),
    "bias": ("bias", "attn_bias", "attention_bias", "attn_mask"),
    "causal": ("causal", "is_causal"),
    "window": ("window", "local_window_size", "window_size", "sliding_window"),
    "lengths": ("lengths", "key_value_seq_lengths", "key_lengths", "kv_lengths", "kv_seqlens"),
    "segments": ("segments", "segment_ids"),
    "indices": ("indices", "topk_indices", "topk_idxs", "key_indices"),
    "softcap": ("softcap", "soft_cap", "logits_soft_cap", "logit_cap", "attn_logits_soft_cap"),
    "scale": ("scale", "sm_scale", "softmax_scale"),
    "sinks": ("sinks", "sink", "learnable_sink", "attention_sinks", "s_aux"),
    "offset": ("offset", "query_offset", "q_offset"),
    "lse": ("lse", "return_lse", "return_residual", "return_softmax_lse", "return_logsumexp"),
    "dropout": ("dropout", "dropout_rate", "dropout_p"),
    "rng": ("rng", "dropout_rng"),
    "grouped": ("grouped", "enable_gqa"),
}


def find_features(fn: Callable[..., Any], features: Features | Iterable[str] | None) -> Features:
    """Return how each feature that a function takes is passed to it: by a keyword, or by a function.

    Args:
        fn: the function.
        features: a mapping; names, which are keywords themselves; or None, which reads the signature.

    Raises:
        ValueError: for names that are no features.
    """
    if features is None:
        return _read_signature(fn)
    declared = dict(features) if isinstance(features, Mapping) else {name: name for name in features}
    unknown = sorted(set(declared) - set(KEYWORDS))
    if unknown:
        raise ValueError(f"features: expected some of {', '.join(KEYWORDS)}; got {', '.join(unknown)}")
    return declared


def _read_signature(fn: Callable[..., Any]) -> Features:
    """Look for known keywords among a function's parameters; one that takes any is tried with ours."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {name: keywords[0] for name, keywords in KEYWORDS.items()}
    named = {name: [word for word in words if word in parameters] for name, words in KEYWORDS.items()}
    return {name: keywords[0] for name, keywords in named.items() if keywords}


def pass_options(features: Features, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call of the function, from options by the names of features."""
    passed: dict[str, Any] = {}
    for name, option in options.items():
        way = features[name]
        passed |= way(option) if callable(way) else {way: option}
    return passed
