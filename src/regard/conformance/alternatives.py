"""Other answers than the definition's: conventions that libraries follow, and mistakes that kernels make.

Each is the definition of a changed call; an answer that equals it is told by its name.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np

from regard.conformance.expectations import count_listed, find_positions, round_to
from regard.conformance.written_calls import Call

Change = Callable[[Call], Call]
"""Options to set in place of a call's own, from the call."""
ABSENT = object()  # in place of an option that is left out


@dataclass(frozen=True)
class Alternative:
    """One other answer: what it is about, the line that it contradicts, its name and its call."""

    needs: str  # the option that it is about, or "" for every call
    line: str
    name: str
    change: Change
    aspect: str = "value"  # or "lse" or "gradient", where the value is right
    is_convention: bool = False

    def applies(self, call: Call) -> bool:
        """Return whether the call has what it is about."""
        return self.needs in call or not self.needs

    def apply(self, call: Call) -> Call:
        """Return the call with what is changed; what is ABSENT is left out."""
        return {name: value for name, value in (call | self.change(call)).items() if value is not ABSENT}


def without(*names: str) -> Change:
    """Return a change that leaves options out."""
    return lambda _: dict.fromkeys(names, ABSENT)


def hooking(line: str, function: Callable[[Any, Any, Call], Any]) -> Change:
    """Return a change of what one line gives, from that, all lines before and the call."""
    return lambda call: {
        "steps": call.get("steps", {}) | {line: lambda array, lines: function(array, lines, call)}
    }


def ending(name: str, function: Callable[[Any, Any, Call], Any]) -> Change:
    return lambda call: {"results": {name: lambda array, lines: function(array, lines, call)}}


def keeping(function: Callable[[Any, Any, Call], Any], *dropped: str) -> Change:
    """Return a change with a mask of positions beside the others, in place of some options."""

    def change(call: Call) -> Call:
        mask = function(*find_positions(call), call)
        mask = mask & (call["mask"] != 0) if "mask" in call else mask
        return dict.fromkeys(dropped, ABSENT) | {"mask": mask}

    return change


def read_scale(call: Call) -> float:
    """Return the factor on the products."""
    return call.get("scale", call["query"].shape[-1] ** -0.5)


def read_bias(call: Call) -> Any:
    """Return the bias in float32, which NumPy computes with."""
    return np.asarray(call["bias"], np.float32)


def widen_window(before: int, after: int) -> Change:
    """Return a change to a window of more keys on either side."""
    return lambda call: {"window": (call["window"][0] + before, call["window"][1] + after)}


def repeat_first(name: str, axis: int) -> Change:
    """Return a change to an option that is everywhere what it is at the first index of an axis."""
    return lambda call: {name: np.broadcast_to(np.take(np.asarray(call[name]), [0], axis), call[name].shape)}


def round_scores(call: Call) -> Call:
    """Round scores and weights, line by line, to the dtype of query."""
    kind = call["query"].dtype
    return {"steps": call.get("steps", {}) | dict.fromkeys(ROUNDED, lambda array, _: round_to(array, kind))}


def fill_keys(call: Call, block: int) -> Call:
    """Fill keys and values up to whole blocks with zeros."""
    width = [(0, 0), (0, 0), (0, -call["key"].shape[-2] % block), (0, 0)]
    return {name: np.pad(call[name], width) for name in ("key", "value")}


def count_repeats(call: Call) -> Call:
    """Return a call in which a key counts as often as it is listed."""
    return {"bias": call.get("bias", 0) + np.log(np.maximum(count_listed(call), 1))[:, None]}


def average_shared(call: Call) -> Call:
    """Average the gradients of key and value over the heads of a group."""
    share = call["key"].shape[1] / call["query"].shape[1]
    return {"results": dict.fromkeys(("d_key", "d_value"), lambda gradient, _: gradient * share)}


mistake = Alternative
convention = partial(Alternative, is_convention=True)
BLOCKS = (1024, 512, 256, 128, 64, 32, 16, 8)
BOTTOM_RIGHT = "bottom-right: the last query sits at the last key"
ROUNDED = ("products", "scaled", "capped", "biased", "masked", "weights")
IGNORED = {
    "mask": "masked", "causal": "masked", "window": "masked", "lengths": "masked", "segments": "masked",
    "indices": "masked", "offset": "masked", "bias": "biased", "softcap": "capped", "sinks": "weights",
    "scale": "scaled",
}  # fmt: skip

# In the order in which they are tried: the first that explains an answer names it.
ALTERNATIVES = [
    convention("mask", "masked", "True hides", lambda call: {"mask": call["mask"] == 0}),
    convention("causal", "masked", BOTTOM_RIGHT, lambda _: {"alignment": "bottom-right"}),
    convention("window", "masked", BOTTOM_RIGHT, lambda _: {"alignment": "bottom-right"}),
    convention("window", "masked", "the window counts the query's own key", widen_window(-1, 0)),
    convention("window", "masked", "the window ends at the query",
               lambda call: {"window": (call["window"][0], 0)}),
    convention("lengths", "masked", "lengths count from the end: the first keys are padding", keeping(
        lambda _, column, call: column >= column.size - call["lengths"].reshape(-1, 1, 1, 1), "lengths")),
    convention("indices", "masked", "a key that is listed twice counts twice", count_repeats),
    convention("grouped", "products", "query heads take key heads in turn: h reads h mod K",
               lambda _: {"group_order": "interleaved"}),
    convention("softcap", "biased", "the softcap comes after the bias", lambda _: {"bias_first": True}),
    convention("bias", "biased", "the bias is scaled",
               lambda call: {"bias": read_bias(call) * read_scale(call)}),
    convention("", "scaled", "scores are not scaled unless a scale is given",
               lambda call: {"scale": call.get("scale", 1.0)}),
    *(mistake(name, line, f"{name} has no effect", without(name)) for name, line in IGNORED.items()),
    mistake("", "scaled", "scores are scaled twice", lambda call: {"scale": read_scale(call) ** 2}),
    mistake("scale", "scaled", "the default scale is applied as well",
            lambda call: {"scale": call["scale"] * call["query"].shape[-1] ** -0.5}),
    mistake("", "scaled", "the scale is that of the value's width",
            lambda call: {"scale": call["value"].shape[-1] ** -0.5}),
    mistake("softcap", "capped", "the softcap comes before the scale",
            lambda call: {"softcap": call["softcap"] * read_scale(call)}),
    mistake("softcap", "capped", "tanh is not multiplied by the cap",
            hooking("capped", lambda capped, _, call: capped / call["softcap"])),
    mistake("softcap", "capped", "scores are cut at the cap, not bent", hooking(
        "capped", lambda _, lines, call: np.clip(lines["scaled"], -call["softcap"], call["softcap"]))),
    mistake("causal", "masked", "a query does not see its own key",
            keeping(lambda row, column, _: column < row, "causal")),
    mistake("causal", "masked", "a query sees the key after its own",
            keeping(lambda row, column, _: column <= row + 1, "causal")),
    mistake("causal", "masked", "causal hides the keys before the query",
            keeping(lambda row, column, _: column >= row, "causal")),
    mistake("window", "masked", "the window is one key too wide on the left", widen_window(1, 0)),
    mistake("window", "masked", "the window is one key too wide on the right", widen_window(0, 1)),
    mistake("window", "masked", "the window's right side has no edge",
            lambda call: {"window": (call["window"][0], 1 << 30)}),
    mistake("window", "masked", "the window's left side has no edge",
            lambda call: {"window": (1 << 30, call["window"][1])}),
    mistake("lengths", "masked", "the key after the last counts",
            lambda call: {"lengths": call["lengths"] + 1}),
    *(mistake(name, "masked", f"all batch rows have the first row's {name}", repeat_first(name, 0))
      for name in ("lengths", "segments", "indices", "mask")),
    mistake("indices", "masked", "-1 reads the first key",
            lambda call: {"indices": np.maximum(call["indices"], 0)}),
    mistake("indices", "masked", "-1 reads the last key",
            lambda call: {"indices": call["indices"] % call["key"].shape[-2]}),
    mistake("mask", "masked", "all heads have the first head's mask", repeat_first("mask", 1)),
    mistake("mask", "masked", "a mask is added to the scores as 0 and 1", lambda call: {
        "mask": ABSENT, "bias": call.get("bias", 0) + call["mask"].astype(np.float32)}),
    mistake("bias", "biased", "all batch rows have the first row's bias", repeat_first("bias", 0)),
    mistake("bias", "biased", "all heads have the first head's bias", repeat_first("bias", 1)),
    mistake("bias", "biased", "the bias is subtracted", lambda call: {"bias": -read_bias(call)}),
    mistake("bias", "biased", "positive biases are cut to 0",
            lambda call: {"bias": np.minimum(read_bias(call), 0)}),
    mistake("bias", "masked", "-inf in a bias does not remove a key",
            lambda call: {"bias": np.where(read_bias(call) == -np.inf, 0, read_bias(call))}),
    mistake("sinks", "weights", "all heads have the first head's sink", repeat_first("sinks", 0)),
    *(mistake("sinks", "weights", f"the sink counts once per block of {block} keys",
              lambda call, block=block: {
                  "sinks": np.float32(call["sinks"]) + np.log(-(-call["key"].shape[-2] // block))})
      for block in BLOCKS),
    mistake("offset", "masked", "the offset is subtracted", lambda call: {"offset": -call["offset"]}),
    mistake("grouped", "products", "all query heads read the first key head",
            lambda call: {name: call[name][:, :1] for name in ("key", "value")}),
    *(mistake("", "weights", f"keys after the last multiple of {block} are dropped", keeping(
        lambda _, column, call, block=block: column < call["key"].shape[-2] // block * block))
      for block in BLOCKS),
    *(mistake("", "weights", f"zeros that count fill the keys up to a multiple of {block}",
              partial(fill_keys, block=block))
      for block in BLOCKS),
    *(mistake("", "output", f"queries after the last multiple of {block} are not written", ending(
        "output", lambda output, _, call, block=block: np.where(
            np.arange(output.shape[-2])[:, None] < output.shape[-2] // block * block, output, 0)))
      for block in BLOCKS),
    mistake("", "weights", "the output is not divided by the sum of exponentials", ending(
        "output", lambda output, lines, _: output * np.exp(
            lines["lse"] - lines["masked"].max(-1, keepdims=True)))),
    mistake("", "output", "the value is returned as it is",
            ending("output", lambda output, _, call: np.broadcast_to(call["value"], output.shape))),
    convention("half", "products", "scores are rounded to the arrays' dtype", round_scores),
    mistake("double", "products", "float64 is computed in float32", lambda _: {"precision": "float32"}),
    mistake("single", "products", "products multiply in bfloat16", lambda call: {
        name: round_to(np.asarray(call[name]), "bfloat16") for name in ("query", "key", "value")}),
    convention("lse", "lse", "lse has base 2", ending("lse", lambda lse, *_: lse / np.log(2)), "lse"),
    mistake("sinks", "lse", "lse leaves the sink out", without("sinks"), "lse"),
    mistake("lse", "lse", "lse lacks the largest score", ending(
        "lse", lambda lse, lines, _: lse - lines["masked"].max(-1)), "lse"),
    mistake("lse", "lse", "lse is the largest score", ending(
        "lse", lambda _, lines, call: lines["masked"].max(-1)), "lse"),
    mistake("lse", "lse", "lse is the sum, not its logarithm",
            ending("lse", lambda lse, *_: np.exp(lse)), "lse"),
    mistake("softcap", "d_scaled", "the gradient is that without a softcap",
            lambda _: {"back_softcap": None}, "gradient"),
    mistake("", "d_products", "the gradient lacks the scale", lambda _: {"back_scale": 1.0}, "gradient"),
    mistake("survivors", "d_weights", "the gradient lacks dropout",
            lambda _: {"back_survivors": np.ones(())}, "gradient"),
    mistake("lse", "d_scores", "the gradient of lse is stopped", lambda _: {"stopped": True}, "gradient"),
    *(mistake(name * (name in ("bias", "sinks")), line, f"{name} has no gradient",
              ending(f"d_{name}", lambda gradient, *_: 0 * gradient), "gradient")
      for name, line in {"query": "d_products", "key": "d_products", "value": "d_value", "bias": "d_bias",
                         "sinks": "d_sinks"}.items()),
    mistake("sinks", "d_sinks", "the gradient of sinks has the wrong sign",
            ending("d_sinks", lambda gradient, *_: -gradient), "gradient"),
    mistake("grouped", "d_products", "gradients of shared heads are averaged, not summed",
            average_shared, "gradient"),
]  # fmt: skip


def propose(call: Call, aspect: str) -> Iterator[Alternative]:
    """Yield the alternatives that a call may tell, then two conventions at once."""
    fitting = [entry for entry in ALTERNATIVES if entry.aspect == aspect and entry.applies(call)]
    yield from fitting
    for first, second in combinations([entry for entry in fitting if entry.is_convention], 2):
        if first.name != second.name:
            both = partial(_change_twice, first, second)
            yield replace(first, name=f"{first.name}; {second.name}", change=both)


def _change_twice(first: Alternative, second: Alternative, call: Call) -> Call:
    return dict.fromkeys(call, ABSENT) | second.apply(first.apply(call))
