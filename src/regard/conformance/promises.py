"""The promises of attention that one call each can tell: sizes, options and the line that they are about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Sizes that every kernel serves; those that show more replace them where the function takes them.
SIZES = {"B": 2, "H": 4, "K": 4, "T": 128, "S": 128, "D": 64, "E": 64}


@dataclass(frozen=True)
class Promise:
    """One promise: the options and sizes of its call, and the line of the definition that it is about."""

    name: str
    line: str
    options: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "float32"
    magnitude: float = 1.0
    adopts: Mapping[str, int] = field(default_factory=dict)  # sizes of later calls, where these are served


# In this order: what comes first finds conventions and sizes that later calls follow.
FIRST = [
    Promise("the definition", "output"),
    Promise("T != S", "products", {}, {"T": 64}, adopts={"T": 64}),
    Promise("heads and lengths that are primes", "output", {}, {"H": 3, "K": 3, "T": 37, "S": 53},
            adopts={"H": 3, "K": 3, "T": 37, "S": 53}),
    Promise("widths that are no power of two", "scaled", {}, {"D": 11, "E": 11}, adopts={"D": 11, "E": 11}),
    # Blocks of 8 to 1024 end at different keys of 127 and, filled up, of 1025.
    Promise("a last block that is not whole: 127 tokens", "weights", {},
            {"B": 1, "H": 2, "K": 2, "T": 127, "S": 127}),
    Promise("a last block that is not whole: 1025 tokens", "weights", {},
            {"B": 1, "H": 1, "K": 1, "T": 1025, "S": 1025}),
    Promise("one query and one key", "output", {}, {"T": 1, "S": 1}),
    Promise("values of another width", "output", {}, {"E": 32}),
    Promise("grouped heads", "products", {}, {"H": 6, "K": 3}),
    Promise("one key head", "products", {}, {"H": 6, "K": 1}),
    Promise("large scores", "weights", magnitude=30.0),
]  # fmt: skip

MASK = "rng.random((B, H, T, S)) < 0.7"
BIAS = "rng.normal(size=(B, H, T, S))"
LENGTHS = "np.array([S - 5, 3])[:B]"
SEGMENTS = "np.sort(rng.integers(0, 4, size=(B, T)), -1)"
SINKS = "rng.normal(size=H)"

OPTIONS = [
    Promise("a scale", "scaled", {"scale": "0.3"}),
    Promise("a boolean mask", "masked", {"mask": MASK}),
    Promise("a boolean mask of keys", "masked", {"mask": "rng.random((B, 1, 1, S)) < 0.7"}),
    Promise("a boolean mask and grouped heads", "masked", {"mask": MASK}, {"H": 6, "K": 3}),
    Promise("a bias", "biased", {"bias": BIAS}),
    Promise("a bias that heads share", "biased", {"bias": "rng.normal(size=(1, 1, T, S))"}),
    Promise("a bias of -inf", "masked", {"bias": f"np.where({MASK}, {BIAS}, -np.inf)"}),
    Promise("a mask and a bias", "biased", {"mask": MASK, "bias": BIAS}),
    Promise("causal", "masked", {"causal": "True"}, {"T": 37, "S": 37}),
    Promise("causal, T < S", "masked", {"causal": "True"}, {"T": 37, "S": 53}),
    Promise("causal, T > S", "masked", {"causal": "True"}, {"T": 53, "S": 37}),
    Promise("causal and grouped heads", "masked", {"causal": "True"}, {"H": 6, "K": 3, "T": 37, "S": 37}),
    Promise("causal with an offset", "masked", {"causal": "True", "offset": "5"}),
    Promise("a window", "masked", {"window": "(7, 3)"}, {"T": 37, "S": 37}),
    Promise("a window and causal", "masked", {"window": "(7, 0)", "causal": "True"}, {"T": 37, "S": 37}),
    Promise("a window, T < S", "masked", {"window": "(7, 3)"}, {"T": 37, "S": 53}),
    Promise("a window without a right side", "masked", {"window": "(7, 0)"}, {"T": 37, "S": 37}),
    Promise("lengths", "masked", {"lengths": LENGTHS}),
    Promise("segments", "masked", {"segments": SEGMENTS}, {"T": 37, "S": 37}),
    Promise("segments and causal", "masked", {"segments": SEGMENTS, "causal": "True"}, {"T": 37, "S": 37}),
    Promise("a softcap", "capped", {"softcap": "2.0"}, magnitude=1.5),
    Promise("a softcap and a scale", "capped", {"softcap": "2.0", "scale": "0.7"}),
    Promise("a softcap and a bias", "biased", {"softcap": "2.0", "bias": BIAS}, magnitude=1.5),
    Promise("a softcap and a mask", "masked", {"softcap": "2.0", "mask": MASK}, magnitude=1.5),
    Promise("sinks", "weights", {"sinks": SINKS}),
    Promise("sinks and a mask", "weights", {"sinks": SINKS, "mask": MASK}),
    Promise("lse", "lse", {"lse": "True"}),
    Promise("lse and a mask", "lse", {"lse": "True", "mask": MASK}),
    Promise("lse, causal", "lse", {"lse": "True", "causal": "True"}, {"T": 37, "S": 37}),
    Promise("lse and a softcap", "lse", {"lse": "True", "softcap": "2.0"}),
    Promise("lse and sinks", "lse", {"lse": "True", "sinks": SINKS}),
    Promise("lse in bfloat16", "lse", {"lse": "True"}, dtype="bfloat16"),
    Promise("float64", "products", dtype="float64"),
    Promise("bfloat16", "products", dtype="bfloat16"),
    Promise("bfloat16, causal", "masked", {"causal": "True"}, {"T": 37, "S": 37}, dtype="bfloat16"),
    Promise("float16", "products", dtype="float16"),
]  # fmt: skip

_WHOLE = {
    "a mask": {"mask": MASK},
    "causal": {"causal": "True"},
    "a window": {"window": "(29, 0)", "causal": "True"},
    "a bias": {"bias": "rng.normal(size=(1, H, T, S))"},
    "a softcap": {"softcap": "3.0", "causal": "True"},
    "sinks": {"sinks": SINKS, "causal": "True"},
}

# Beside those of a quick check: lengths on both sides of what kernels take for blocks, and more at once.
FULL = [
    *(
        Promise(f"{name}, {T} tokens", "output", options, {"B": 1, "H": 2, "K": 2, "T": T, "S": T})
        for T in (7, 131, 513, 1025)
        for name, options in {"nothing": {}, **_WHOLE}.items()
    ),
    *(
        Promise(f"{name}, grouped heads, {dtype}", "output", options,
                {"H": 6, "K": 2, "T": 37, "S": 37}, dtype)
        for name, options in _WHOLE.items()
        for dtype in ("float64", "bfloat16")
    ),
    Promise("one query of many keys", "output", {"mask": "rng.random((B, 1, 1, S)) < 0.7"},
            {"T": 1, "S": 1030}),
    Promise("all options at once", "output", {
        "mask": MASK, "bias": BIAS, "causal": "True", "softcap": "3.0", "scale": "0.4", "sinks": SINKS,
    }, {"H": 6, "K": 3}),
]  # fmt: skip
