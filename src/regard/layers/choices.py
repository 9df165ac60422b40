"""Options that are one of several names, and the error for a name that is none of them."""

import difflib
from collections.abc import Iterable
from typing import Any, Literal

NormKind = Literal["layer", "rms", "layer_no_bias"]
NormPlace = Literal["pre", "post", "both"]

# What other libraries call these things.
_ELSEWHERE = {
    "rope": "rotary",
    "sine": "sinusoidal",
    "absolute": "learned",
    "t5": "relative",
    "swish": "silu",
}


def check_choice(name: str, value: Any, choices: Iterable[str], error: type[Exception] = ValueError) -> None:
    """Raise an error that lists the choices and names the nearest, unless the value is one of them."""
    known = [*choices]
    if value in known:
        return
    word = str(value).lower()
    hint = f"nearest: {difflib.get_close_matches(word, known, n=1, cutoff=0.0)[0]}"
    if _ELSEWHERE.get(word) in known:
        hint = f"did you mean {_ELSEWHERE[word]}?"
    if value == "gelu" and "gelu_tanh" in known:
        hint = "'gelu' has two meanings: choose gelu_tanh, the approximation, or gelu_erf, the exact one"
    raise error(f"{name}: expected one of {', '.join(known)}; got {value!r} ({hint})")
