"""Sliding windows as config.json spells them; its numbers count the query's own key as well."""

from typing import Any

from regard.interop.families.entries import read_size
from regard.interop.weight_maps import Settings
from regard.models import TransformerConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def read_window(window: int | None) -> int | None:
    """Return the number of keys before the query's own."""
    return None if window is None else read_size("sliding_window", window) - 1


def read_windows(settings: Settings, window: int | None, sliding: list[bool]) -> tuple[int | None, ...]:
    """Return the window of every layer; `sliding` says which have one, without `layer_types`."""
    names = read_layer_types(settings, SLIDING, sliding)
    return shorten(tuple(read_window(window) if name == SLIDING else None for name in names), (None,))


def read_layer_types(settings: Settings, other: str, is_other: list[bool]) -> list[str]:
    """Return the kind of every layer, full attention or the other, as `is_other` without `layer_types`."""
    kinds = settings.get("layer_types") or [other if flag else FULL for flag in is_other]
    unknown = [kind for kind in kinds if kind not in (other, FULL)]
    if len(kinds) != len(is_other) or unknown:
        got = ", ".join(sorted({*map(repr, unknown)})) or f"{len(kinds)} entries"
        raise ValueError(
            f"layer_types: expected {other} or {FULL} for each of {len(is_other)} layers, got {got}"
        )
    return kinds


def shorten(kinds: tuple[Any, ...], empty: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the shortest run that repeats to what every layer is; `empty` without layers."""
    runs = (kinds[:size] for size in range(1, len(kinds) + 1))
    repeats = (run for run in runs if all(kind == run[n % len(run)] for n, kind in enumerate(kinds)))
    return next(repeats, empty)


def write_windows(config: TransformerConfig, *, unused: int | None = None) -> dict[str, Any]:
    """Return `sliding_window` and `layer_types`; all layers that have a window share one number.

    Where none has one, `unused` is written, without which transformers runs some families not at all.
    """
    windows = [config.window(layer) for layer in range(config.num_layers)]
    before = next((window for window in windows if window is not None), None)
    kinds = [FULL if window is None else SLIDING for window in windows]
    return {"sliding_window": unused if before is None else before + 1, "layer_types": kinds}
