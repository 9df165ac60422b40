"""Rotary positions as config.json spells them, in the old way and in that of transformers 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from regard.positions import DynamicNTK, Linear, Llama3, YaRN
from regard.positions.scaling import Scaling

_TRAINED = {"factor": "factor", "original_max_position_embeddings": "trained_length"}
_SHARPNESS = {"beta_fast": "fast_turns", "beta_slow": "slow_turns", "attention_factor": "sharpness"}
# The `rope_type` of each rule, and its entries beside.
_WRITTEN: dict[Any, tuple[str, dict[str, str]]] = {
    type(None): ("default", {}),
    Linear: ("linear", {"factor": "factor"}),
    DynamicNTK: ("dynamic", {"factor": "factor"}),
    Llama3: (
        "llama3",
        {**_TRAINED, "low_freq_factor": "low_frequency", "high_freq_factor": "high_frequency"},
    ),
    YaRN: ("yarn", {**_TRAINED, **_SHARPNESS, "truncate": "whole_features"}),
}
KINDS = tuple(kind for kind, _ in _WRITTEN.values())


def read_rotary(
    settings: Mapping[str, Any], head_width: int, max_length: int, length: int | None
) -> dict[str, Any]:
    """Return the rotary fields of a TransformerConfig.

    Args:
        settings: config.json; `rope_parameters`, or `rope_theta` with `rope_scaling`.
        head_width: width of one head.
        max_length: `max_position_embeddings`.
        length: tokens to serve, which "dynamic" depends on; None means `max_length`.

    Raises:
        ValueError: a kind of scaling that is not supported; two rules that differ.
    """

    def read_rule(rules: Mapping[str, Any]) -> dict[str, Any]:
        if any(isinstance(value, Mapping) for value in rules.values()):
            raise ValueError("rope_parameters: expected one rule for all layers, got one per kind of layer")
        share = rules.get("partial_rotary_factor", settings.get("partial_rotary_factor"))
        return {
            "rotary_base": float(rules.get("rope_theta") or settings.get("rope_theta") or 10_000.0),
            "rotary_width": None if share in (None, 1, 1.0) else int(head_width * share),
            "rotary_scaling": _read_scaling(settings, rules, max_length, length),
        }

    spellings = (settings.get("rope_parameters"), settings.get("rope_scaling"))
    found = [read_rule(rules) for rules in spellings if rules] or [read_rule({})]
    if found[0] != found[-1]:
        raise ValueError(
            "rope_scaling: expected the same rule as in rope_parameters, where both are given; got"
            f" {spellings[1]} beside {spellings[0]}; leave out the wrong one"
        )
    return found[0]


def _read_scaling(
    settings: Mapping[str, Any], rules: Mapping[str, Any], max_length: int, length: int | None
) -> Scaling | None:
    """Return the rule by which positions serve longer sequences; None for none."""
    kind = rules.get("rope_type") or rules.get("type") or "default"
    trained = int(
        settings.get("original_max_position_embeddings")
        or rules.get("original_max_position_embeddings")
        or max_length
    )
    match kind:
        case "default":
            return None
        case "linear":
            return Linear(_number(rules, "factor"))
        case "dynamic":
            # Its frequencies follow the length at hand, and the length it starts to act at is this one.
            return DynamicNTK(_number(rules, "factor"), max_length, max_length if length is None else length)
        case "llama3":
            low, high = (_number(rules, f"{end}_freq_factor") for end in ("low", "high"))
            return Llama3(_number(rules, "factor"), trained, low, high)
        case "yarn":
            factor = float(rules.get("factor") or max_length / trained)
            return YaRN(
                factor,
                trained,
                float(rules.get("beta_fast") or 32),
                float(rules.get("beta_slow") or 1),
                _read_sharpness(rules, factor),
                rules.get("truncate", True),
            )
    raise ValueError(f"rope_type: expected one of {', '.join(KINDS)}; got {kind!r}, which is not supported")


def _number(rules: Mapping[str, Any], name: str) -> float:
    """Return an entry that the rule cannot do without."""
    if rules.get(name) is None:
        kind = rules.get("rope_type") or rules.get("type")
        raise ValueError(f"rope_scaling: expected the entry {name} for {kind}, got {', '.join(rules)}")
    return float(rules[name])


def _read_sharpness(rules: Mapping[str, Any], factor: float) -> float | None:
    """Return the factor of sines and cosines; None for YaRN's own formula."""
    if rules.get("attention_factor") is not None:
        return float(rules["attention_factor"])
    parts = [rules.get(name) for name in ("mscale", "mscale_all_dim")]
    if not all(parts):
        return None
    over, under = (0.1 * float(part) * math.log(factor) + 1 for part in parts if part)
    return over / under


def write_rotary(base: float, width: int | None, scaling: Scaling | None, head_width: int) -> dict[str, Any]:
    """Return `rope_parameters` and, for releases before transformers 5, `rope_theta` and `rope_scaling`.

    Raises:
        ValueError: a rule that config.json has no word for.
    """
    kind, names = _WRITTEN.get(type(scaling), ("", {}))
    if not kind:
        raise ValueError(f"rotary_scaling: expected one of {', '.join(KINDS)}, got {scaling!r}")
    said = {name: getattr(scaling, field) for name, field in names.items()}
    rules = {"rope_type": kind, **{name: value for name, value in said.items() if value is not None}}
    share = {} if width is None else {"partial_rotary_factor": width / head_width}
    scaled = {} if scaling is None else {"rope_scaling": dict(rules)}
    return {"rope_parameters": {**rules, **share, "rope_theta": base}, "rope_theta": base, **share, **scaled}
