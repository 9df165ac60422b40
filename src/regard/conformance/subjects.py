"""The function that is checked, its features and its layout; whatever it does becomes an answer."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.conformance.runners import RUNNERS, Run, call_in_time, describe, turn
from regard.conformance.written_calls import Array, Call

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
    """Return how each feature is passed: as declared, by its own name, or (None) as the signature has it."""
    if features is not None:
        declared = dict(features) if isinstance(features, Mapping) else {name: name for name in features}
        unknown = sorted(set(declared) - set(KEYWORDS))
        if unknown:
            raise ValueError(f"features: expected some of {', '.join(KEYWORDS)}; got {', '.join(unknown)}")
        return declared
    # Known keywords among a function's parameters; one that takes any is tried with ours.
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


@dataclass
class Answer:
    """An answer of a function: numbers with the axes of `Call`, or why there are none."""

    output: Array | None = None
    lse: Array | None = None
    gradients: dict[str, Array] = field(default_factory=dict)
    dtype: str = ""
    lse_dtype: str = ""
    refusal: str = ""  # an error, or that no answer came
    fault: str = ""  # an answer that is no attention: other shapes, integers
    gradient_refusal: str = ""
    changed: tuple[str, ...] = ()  # inputs that it wrote to

    @property
    def reason(self) -> str:
        return self.refusal or self.fault


class Subject:
    """A function of attention, its layout, the features that it takes and the kind of its arrays."""

    def __init__(self, fn: Callable[..., Any], layout: str, features: Features, kind: str, seconds: float):
        self.fn, self.layout, self.features, self.kind, self.seconds = fn, layout, features, kind, seconds
        self._run = RUNNERS[kind](self._apply)

    def takes(self, names: Any) -> bool:
        """Return whether all features of these names can be passed, each by a keyword of its own."""
        if not set(names) <= set(self.features):
            return False
        keywords = [self.features[name] for name in names if isinstance(self.features[name], str)]
        return len(set(keywords)) == len(keywords)

    def arrange(self, name: str, array: Array) -> Array:
        """Give an argument the function's axes: its layout, or the leading ones that the layout has."""
        leading = tuple(slice(None) if letter in self.layout else 0 for letter in "BH")
        if name in ("query", "key", "value"):
            axes = [letter for letter in "BHTD" if letter in self.layout]
            return array[leading].transpose([axes.index(letter) for letter in self.layout])
        if name in ("mask", "bias"):
            return array[leading]
        return array[0] if name in ("lengths", "segments", "indices") and "B" not in self.layout else array

    def restore(self, array: Array) -> Array:
        """Give what is shaped as query the axes (B, H, T, D)."""
        axes = [letter for letter in "BHTD" if letter in self.layout]
        array = array.transpose([self.layout.index(letter) for letter in axes])
        lacking = [axis for axis, letter in enumerate("BHTD") if letter not in self.layout]
        return np.expand_dims(array, lacking)

    def answer(self, call: Call, d_output: Array, d_lse: Array, *, differentiate: bool = True) -> Answer:
        """Call the function; nothing that it does is raised here."""
        arguments = {
            name: np.ascontiguousarray(self.arrange(name, option))
            if isinstance(option, np.ndarray)
            else option
            for name, option in call.items()
        }
        before = {name: np.array(x) for name, x in arguments.items() if isinstance(x, np.ndarray)}
        turned = self.arrange("query", d_output)
        try:
            run = call_in_time(lambda: self._run(arguments, turned, d_lse, differentiate), self.seconds)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return Answer(refusal=describe(error))
        try:
            answer = self._read(call, run)
        except Exception as error:  # an lse of text, numbers of another kind
            return Answer(fault=f"an answer that is no attention: {describe(error)}")
        same = {name: np.array_equal(arguments[name], x, equal_nan=True) for name, x in before.items()}
        answer.changed = tuple(name for name in same if not same[name])
        return answer

    def _apply(self, arguments: Call) -> tuple[Any, Any]:
        """Call the function by its own keywords; return its output and lse."""
        options = dict(arguments)
        query, key, value = options.pop("query"), options.pop("key"), options.pop("value")
        if "grouped" in self.features and key.shape != query.shape:
            options["grouped"] = True
        result = self.fn(query, key, value, **pass_options(self.features, options))
        return self.split(result, "lse" in options)

    def split(self, result: Any, asked: bool) -> tuple[Any, Any]:
        """Tell the output from lse, of which one comes first and the other, if asked for, next."""
        while isinstance(result, tuple | list) and len(result) == 1:
            result = result[0]
        if not isinstance(result, tuple | list) or not result:
            return result, None
        lse = result[1] if asked else None
        while isinstance(lse, tuple | list | dict):
            lse = next(iter(lse.values() if isinstance(lse, dict) else lse))
        return result[0], lse

    def _read(self, call: Call, run: Run) -> Answer:
        """Check what came, and give it the axes of the call."""
        answer = Answer(gradient_refusal=run.gradient_refusal)
        if not hasattr(run.output, "dtype"):
            answer.fault = f"an output of {type(run.output).__name__}"
            return answer
        shape = (*call["query"].shape[:-1], call["value"].shape[-1])
        expected = self.arrange("query", np.empty(shape)).shape
        answer.dtype, number = str(run.output.dtype), np.asarray(run.output)
        if number.shape != expected:
            answer.fault = f"an output of shape {number.shape}, not {expected}"
        elif number.dtype.kind in "iubcOSU":
            answer.fault = f"an output of {answer.dtype}"
        else:
            answer.output = self.restore(number.astype(np.float64))
        if run.lse is not None:
            answer.lse_dtype, number = str(run.lse.dtype), np.asarray(run.lse).astype(np.float64)
            answer.lse = turn(number, shape[:-1])
            if answer.lse is None:
                answer.fault = answer.fault or f"an lse of shape {number.shape}"
        for name, gradient in run.gradients.items():
            number = np.asarray(gradient).astype(np.float64)
            number = self.restore(number) if name in ("query", "key", "value") else number
            answer.gradients[name] = number.reshape(call[name].shape)
        return answer
