"""The promises of attention that one call each can tell: sizes, options and the line that they are about."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# Sizes that every kernel serves; those that show more replace them where the function takes them.
SIZES = {"B": 2, "H": 4, "K": 4, "T": 128, "S": 128, "D": 64, "E": 64}


@dataclass(frozen=True)
class Promise:
    """One promise: the options and sizes of its call, and the line of the definition that it is about."""

    name: str
    line: str  # or "", where a wrong number alone says nothing of its line
    options: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "float32"
    magnitude: float = 1.0
    edits: tuple[str, ...] = ()  # of the arrays
    adopts: Mapping[str, int] = field(default_factory=dict)  # sizes of later calls, where these are served


# In this order: what comes first finds conventions and sizes that later calls follow.
FIRST = [
    Promise("the definition", ""),
    Promise("T != S", "", {}, {"T": 64}, adopts={"T": 64}),
    Promise("heads and lengths that are primes", "", {}, {"H": 3, "K": 3, "T": 101, "S": 131},
            adopts={"H": 3, "K": 3, "T": 101, "S": 131}),
    Promise("widths that are no power of two", "", {}, {"D": 11, "E": 11}, adopts={"D": 11, "E": 11}),
    # Blocks of 8 to 1024 end at different keys of 127 and, filled up, of 1025.
    Promise("a last block that is not whole: 127 tokens", "", {},
            {"B": 1, "H": 2, "K": 2, "T": 127, "S": 127}),
    Promise("a last block that is not whole: 1025 tokens", "", {},
            {"B": 1, "H": 1, "K": 1, "T": 1025, "S": 1025}),
    Promise("one query and one key", "", {}, {"T": 1, "S": 1}),
    Promise("values of another width", "", {}, {"E": 32}),
    Promise("grouped heads", "", {}, {"H": 6, "K": 3}),
    Promise("one key head", "", {}, {"H": 6, "K": 1}),
    Promise("large scores", "", magnitude=30.0),
    Promise("scores far below 0", "", edits=("query[:] = 9 * np.abs(query)", "key[:] = -9 * np.abs(key)")),
]  # fmt: skip

MASK = "rng.random((B, H, T, S)) < 0.7"
BIAS = "rng.normal(size=(B, H, T, S))"
LENGTHS = "np.array([S - 5, 3])[:B]"
SEGMENTS = "np.sort(rng.integers(0, 4, size=(B, T)), -1)"
INDICES = "np.where(rng.random((B, T, min(17, S))) < 0.8, rng.random((B, T, S)).argsort()[..., :17], -1)"
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
    Promise("causal", "masked", {"causal": "True"}, {"T": 131, "S": 131}),
    Promise("causal, T < S", "masked", {"causal": "True"}, {"T": 101, "S": 131}),
    Promise("causal, T > S", "masked", {"causal": "True"}, {"T": 131, "S": 101}),
    Promise("causal and grouped heads", "masked", {"causal": "True"}, {"H": 6, "K": 3, "T": 131, "S": 131}),
    Promise("causal with an offset", "masked", {"causal": "True", "offset": "5"}),
    Promise("a window", "masked", {"window": "(7, 3)"}, {"T": 131, "S": 131}),
    Promise("a window and causal", "masked", {"window": "(7, 0)", "causal": "True"}, {"T": 131, "S": 131}),
    Promise("a window, T < S", "masked", {"window": "(7, 3)"}, {"T": 101, "S": 131}),
    Promise("a window without a right side", "masked", {"window": "(7, 0)"}, {"T": 131, "S": 131}),
    Promise("lengths", "masked", {"lengths": LENGTHS}),
    Promise("segments", "masked", {"segments": SEGMENTS}, {"T": 131, "S": 131}),
    Promise("segments and causal", "masked", {"segments": SEGMENTS, "causal": "True"}, {"T": 131, "S": 131}),
    Promise("listed keys", "masked", {"indices": INDICES}, {"T": 101, "S": 131}),
    Promise("listed keys, causal", "masked", {"indices": INDICES, "causal": "True"}, {"T": 131, "S": 131}),
    Promise("listed keys and grouped heads", "masked", {"indices": INDICES}, {"H": 6, "K": 3}),
    Promise("keys that are listed twice", "masked", {"indices": "rng.integers(-1, S, (B, T, 17))"}),
    Promise("a softcap", "capped", {"softcap": "2.0"}, magnitude=1.5),
    Promise("a softcap and a scale", "capped", {"softcap": "2.0", "scale": "0.7"}),
    Promise("a softcap and a bias", "biased", {"softcap": "2.0", "bias": BIAS}, magnitude=1.5),
    Promise("a softcap and a mask", "masked", {"softcap": "2.0", "mask": MASK}, magnitude=1.5),
    Promise("sinks", "weights", {"sinks": SINKS}),
    Promise("sinks and a mask", "weights", {"sinks": SINKS, "mask": MASK}),
    Promise("lse", "lse", {"lse": "True"}),
    Promise("lse and a mask", "lse", {"lse": "True", "mask": MASK}),
    Promise("lse, causal", "lse", {"lse": "True", "causal": "True"}, {"T": 131, "S": 131}),
    Promise("lse and a softcap", "lse", {"lse": "True", "softcap": "2.0"}),
    Promise("lse and sinks", "lse", {"lse": "True", "sinks": SINKS}),
    Promise("lse in bfloat16", "lse", {"lse": "True"}, dtype="bfloat16"),
    Promise("float64", "", dtype="float64"),
    Promise("bfloat16", "", dtype="bfloat16"),
    Promise("bfloat16, causal", "masked", {"causal": "True"}, {"T": 131, "S": 131}, dtype="bfloat16"),
    Promise("float16", "", dtype="float16"),
]  # fmt: skip

_WHOLE = {
    "a mask": {"mask": MASK},
    "causal": {"causal": "True"},
    "a window": {"window": "(29, 0)", "causal": "True"},
    "listed keys": {"indices": INDICES},
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
                {"H": 6, "K": 2, "T": 131, "S": 131}, dtype)
        for name, options in _WHOLE.items()
        for dtype in ("float64", "bfloat16")
    ),
    Promise("one query of many keys", "output", {"mask": "rng.random((B, 1, 1, S)) < 0.7"},
            {"T": 1, "S": 1030}),
    Promise("all options at once", "output", {
        "mask": MASK, "bias": BIAS, "causal": "True", "softcap": "3.0", "scale": "0.4", "sinks": SINKS,
    }, {"H": 6, "K": 3}),
]  # fmt: skip
