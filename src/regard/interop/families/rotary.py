"""Rotary positions as config.json spells them, in the old way and in that of transformers 5."""

import math
from collections.abc import Mapping
from typing import Any

from regard.interop.families.entries import Entries, read_flag, read_number, refuse_unread
from regard.interop.families.sliding_windows import FULL, SLIDING
from regard.models import TransformerConfig
from regard.positions import DynamicNTK, Linear, Llama3, YaRN
from regard.positions.scaling import Scaling

_TRAINED = {"factor": "factor", "original_max_position_embeddings": "trained_length"}
_FREQUENCIES = {"low_freq_factor": "low_frequency", "high_freq_factor": "high_frequency"}
_SHARPNESS = {"beta_fast": "fast_turns", "beta_slow": "slow_turns", "attention_factor": "sharpness"}
# The `rope_type` of each rule, and its entries beside.
_WRITTEN: dict[Any, tuple[str, dict[str, str]]] = {
    type(None): ("default", {}),
    Linear: ("linear", {"factor": "factor"}),
    DynamicNTK: ("dynamic", {"factor": "factor"}),
    Llama3: ("llama3", {**_TRAINED, **_FREQUENCIES}),
    YaRN: ("yarn", {**_TRAINED, **_SHARPNESS, "truncate": "whole_features"}),
}
KINDS = tuple(kind for kind, _ in _WRITTEN.values())


def read_rotary(
    settings: Mapping[str, Any], max_length: int, length: int | None, default_base: float = 10_000.0
) -> dict[str, Any]:
    """Return the rotary fields; `length` is the number of tokens to serve, which "dynamic" depends on."""

    def read_rule(name: str) -> dict[str, Any]:
        rule = settings.get(name) or {}
        if not isinstance(rule, Mapping):
            raise ValueError(f"{name}: expected an object with rope_type and its numbers, got {rule!r}")
        if any(isinstance(value, Mapping) for value in rule.values()):
            raise ValueError(f"{name}: expected one rule for all layers, got one per kind of layer")
        entries = Entries(rule)
        base = _read_agreeing(settings, entries, "rope_theta", default_base)
        scaling = _read_scaling(settings, entries, max_length, length)
        share = _read_agreeing(settings, entries, "partial_rotary_factor", 1.0)
        # With the rule "default", transformers passes over it in every family here; with another, it fails.
        if scaling is not None and share != 1:
            raise ValueError(
                "partial_rotary_factor: expected 1, or no such entry, with a rule other than default; got"
                f" {share}; heads are turned whole in this family: take it out"
            )
        unread = {f"{name}.{key}": value for key, value in entries.list_unread().items()}
        refuse_unread("rotary positions", unread)
        return {"rotary_base": base, "rotary_scaling": scaling}

    names = ("rope_parameters", "rope_scaling")
    rules = [read_rule(name) for name in names if settings.get(name)] or [read_rule(names[0])]
    if rules[0] != rules[-1]:
        raise ValueError(
            "rope_scaling: expected the same rule as in rope_parameters, where both are given; got"
            f" {settings['rope_scaling']} beside {settings['rope_parameters']}; leave out the wrong one"
        )
    return rules[0]


def read_rotary_by_kind(
    settings: Mapping[str, Any], bases: Mapping[str, tuple[str, float]], *sizes: Any
) -> dict[str, Any]:
    """Return the rotary fields where layers with a window have a base of their own.

    `bases` holds the entry of each kind's base, and what it is without one; `sizes` are as in `read_rotary`.
    """
    rules = settings.get("rope_parameters") or {}
    if not isinstance(rules, Mapping) or not {*rules} <= {*bases}:
        raise ValueError(f"rope_parameters: expected a rule for each of {', '.join(bases)}, got {rules!r}")
    for rule in (settings.get("rope_scaling"), *rules.values()):
        if isinstance(rule, Mapping) and rule.get("type") and not rule.get("rope_type"):
            raise ValueError(
                "rope_type: expected it where layers differ, as transformers 5 passes over type there; got"
                f" {rule!r}; rename it"
            )
    by_kind = {}
    for kind, (name, default) in bases.items():
        base = settings.get(name)
        entries = {
            "rope_parameters": rules.get(kind),
            "rope_scaling": settings.get("rope_scaling") if kind == FULL else None,
            "rope_theta": None if base is None else read_number(name, base),
            "partial_rotary_factor": settings.get("partial_rotary_factor"),
        }
        by_kind[kind] = read_rotary(entries, *sizes, default_base=default)
    full, sliding = by_kind[FULL], by_kind[SLIDING]
    if sliding["rotary_scaling"] is not None:
        raise ValueError(
            f"rope_parameters: expected rope_type default for {SLIDING}, got {rules!r}; not supported"
        )
    if isinstance(full["rotary_scaling"], YaRN) and not full["rotary_scaling"].whole_features:
        raise ValueError(
            "truncate: expected true, or no such entry, where layers differ, as transformers 5 passes over it"
            " there; got false"
        )
    return {**full, "rotary_window_base": sliding["rotary_base"]}


def _read_scaling(
    settings: Mapping[str, Any], rules: Mapping[str, Any], max_length: int, length: int | None
) -> Scaling | None:
    """Return the rule by which positions serve longer sequences; None for none."""
    kinds = [rules.get(name) for name in ("rope_type", "type")]
    kind = kinds[0] or kinds[1] or "default"
    if kinds[1] not in (None, kind):
        raise ValueError(f"rope_type: expected the same as type, got {kind!r} beside {kinds[1]!r}")
    trained = int(_read_agreeing(settings, rules, "original_max_position_embeddings", max_length))
    match kind:
        case "default":
            return None
        case "linear":
            return Linear(_number(rules, "factor"))
        case "dynamic":
            # Its frequencies follow the length at hand, and the length it starts to act at is this one.
            return DynamicNTK(_number(rules, "factor"), max_length, max_length if length is None else length)
        case "llama3":
            low, high = _number(rules, "low_freq_factor"), _number(rules, "high_freq_factor")
            return Llama3(_number(rules, "factor"), trained, low, high)
        case "yarn":
            factor = read_number("rope_scaling.factor", rules.get("factor") or max_length / trained)
            fast = read_number("rope_scaling.beta_fast", rules.get("beta_fast") or 32)
            slow = read_number("rope_scaling.beta_slow", rules.get("beta_slow") or 1)
            sharpness = _read_sharpness(rules, factor)
            whole = read_flag("rope_scaling.truncate", rules.get("truncate", True))
            return YaRN(factor, trained, fast, slow, sharpness, whole)
    raise ValueError(f"rope_type: expected one of {', '.join(KINDS)}; got {kind!r}, which is not supported")


def _read_agreeing(settings: Mapping[str, Any], rules: Mapping[str, Any], name: str, default: float) -> float:
    """Return a number that config.json holds beside its rule or in it."""
    stated = [where[name] for where in (rules, settings) if where.get(name) is not None] or [default]
    if stated[0] != stated[-1]:
        raise ValueError(
            f"{name}: expected one number, got {stated[0]!r} in the rotary rule and {stated[1]!r} beside it;"
            " leave out the wrong one"
        )
    return read_number(name, stated[0])


def _number(rules: Mapping[str, Any], name: str) -> float:
    """Return an entry that the rule cannot do without."""
    if rules.get(name) is None:
        kind = rules.get("rope_type") or rules.get("type")
        raise ValueError(f"rope_scaling: expected the entry {name} for {kind}, got {', '.join(rules)}")
    return read_number(f"rope_scaling.{name}", rules[name])


def _read_sharpness(rules: Mapping[str, Any], factor: float) -> float | None:
    """Return the factor of sines and cosines; None for YaRN's own formula."""
    parts = [rules.get(name) for name in ("mscale", "mscale_all_dim")]  # known, also beside another factor
    if rules.get("attention_factor") is not None:
        return read_number("rope_scaling.attention_factor", rules["attention_factor"])
    if not all(parts):
        return None
    scales = [0.1 * read_number("rope_scaling.mscale", part) * math.log(factor) + 1 for part in parts]
    return scales[0] / scales[1]


def write_rotary(config: TransformerConfig) -> dict[str, Any]:
    """Return `rope_parameters` and, for releases before transformers 5, `rope_theta` and `rope_scaling`."""
    base, scaling = config.rotary_base, config.rotary_scaling
    kind, names = _WRITTEN.get(type(scaling), ("", {}))
    if not kind:
        raise ValueError(f"rotary_scaling: expected one of {', '.join(KINDS)}, got {scaling!r}")
    entries = {name: getattr(scaling, field) for name, field in names.items()}
    rules = {"rope_type": kind, **{name: value for name, value in entries.items() if value is not None}}
    scaled = {} if scaling is None else {"rope_scaling": dict(rules)}
    return {"rope_parameters": {**rules, "rope_theta": base}, "rope_theta": base, **scaled}


def write_rotary_by_kind(config: TransformerConfig, bases: Mapping[str, tuple[str, float]]) -> dict[str, Any]:
    """Return the rotary entries where layers with a window have a base of their own."""
    written, base = write_rotary(config), config.rotary_window_base or config.rotary_base
    rules = {FULL: written["rope_parameters"], SLIDING: {"rope_type": "default", "rope_theta": base}}
    names = {bases[FULL][0]: written.pop("rope_theta"), bases[SLIDING][0]: base}
    return {**written, "rope_parameters": rules, **names}
