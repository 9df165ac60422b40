"""Arguments, read and checked: numbers, flags and arrays, each told by its name where it is none."""

import difflib
import functools
import inspect
import operator
import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.export import is_symbolic_dim

LARGEST = np.iinfo(np.int32).max  # positions lie below: as a bound, it is none
Guided = TypeVar("Guided", bound=Callable[..., Any])
Made = TypeVar("Made")

# What is written here for other libraries' options: the first whose first word the function knows.
_HERE = {
    "mask=masks.causal()": "is_causal causal", "causal=": "is_causal",
    "mask=, where True = may attend, or bias= for numbers to add": "attn_mask",
    "mask=masks.from_hf_attention_mask(array)": "attention_mask",
    "mask=masks.valid_keys(array), where True = may attend": "key_padding_mask",
    "valid=, where True = a real token, and causal=": "mask",
    "mask=masks.predicate(fn), with its mask_mod as fn": "block_mask",
    "mask=masks.sliding_window(before, after)": "local_window_size window_size sliding_window window",
    "windows=(before,)": "window_size sliding_window window", "before=": "window_size sliding_window window",
    "max_distance=": "relative_attention_max_distance",
    "nothing: the table has a row for each bucket": "num_buckets relative_attention_num_buckets",
    "first=": "sinks", "score=scores.modifier(fn)": "score_mod",
    "score=scores.softcap(cap)": "logits_soft_cap logit_softcap softcap", "attention_softcap=": "softcap",
    "nothing: heads of query may be a multiple of those of key and value": "enable_gqa",
    "scale=": "softmax_scale sm_scale", 'aux=("weights",)': "need_weights return_weights output_attentions",
    "dropout_rate=": "dropout dropout_p", "rng=jax.random.key(0)": "seed key dropout_rng",
    "rngs=nnx.Rngs(0)": "seed key", "score=scores.temperature(0.8)": "temperature",
    "sampling=Sampling(temperature=0.8, top_p=0.95)": "temperature do_sample top_k top_p min_p",
    "experts_per_token=": "top_k", "max_tokens=": "max_new_tokens max_length",
    "capacity=": "max_length max_seq_len max_position_embeddings", "stop_tokens=": "eos_token_id",
    "num_heads=": "heads nhead n_head n_heads num_attention_heads", "key_width=": "head_dim",
    "num_key_heads=": "kv_heads num_kv_heads num_key_value_heads",
    "key_heads=": "heads num_heads kv_heads num_kv_heads num_key_value_heads",
    "d_model=": "embed_dim hidden_size in_features n_embd dim",
    "num_layers=": "layers n_layer n_layers num_hidden_layers",
    "d_ff=": "hidden intermediate_size dim_feedforward ffn_dim", "length=": "seq_len sequence_length",
    "max_length=": "max_seq_len max_position_embeddings", "rotary_base=": "rope_theta",
    "base=": "rope_theta theta", "tied_output=": "tie_word_embeddings",
    "use_bias=": "bias qkv_bias", "attention_bias=": "bias",
    "activation=": "act hidden_act", 'norm="pre" or "post"': "norm_first", "latent_dim=": "kv_lora_rank",
    "num_classes=": "num_labels", "positions=": "position_ids", "query_positions=": "position_ids",
    "rate=": "beta", "decay=": "g gate", "return_state=": "output_final_state",
    "devices=": "gpus num_devices", "page_size=": "block_size",
    "MultiHeadAttention(...)(x, mask=masks.causal())": "causal is_causal",
    "nothing here, and call models.beam_search": "num_beams num_return_sequences length_penalty",
    "KVCache.create(...)": "batch", "PagedKVCache.create(...)": "batch",
}  # fmt: skip


def check_option(name: str, options: Collection[str], *places: str, title: str = "") -> None:
    """Raise for an option that is not known, and say what to write instead."""
    if name in options:
        return
    heard = {*options, *places, "nothing"}
    hints = [
        hint for hint, words in _HERE.items() if name in words.split() and re.split(r"\W", hint)[0] in heard
    ]
    hint = f"; write {hints[0]}" if hints else ""
    if not hint and (nearest := difflib.get_close_matches(name, options, n=1)):
        hint = f"; did you mean {nearest[0]!r}?"
    raise TypeError(f"{title or name}: expected an option among {', '.join(options)}{hint}")


def guided(function: Guided) -> Guided:
    """Make a function, or a class that is made and called, say what to write for an option that it lacks."""
    made: Any = function
    if inspect.isclass(made):
        for name in {"__init__", "__call__"} & {*vars(made)}:
            setattr(made, name, guided(vars(made)[name]))
        return made  # pyright: ignore
    parameters = [*inspect.signature(function).parameters.values()]
    names = [parameter.name for parameter in parameters if parameter.name not in ("self", "cls")]
    placed = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    first = [name for name in placed if name in names]
    places = [part for part in function.__qualname__.split(".") if "__" not in part]

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        for name in options:
            check_option(name, names, *places)
        if len(args) > len(placed) and len(names) > len(first):
            raise TypeError(
                f"{places[-1]}: expected at most {', '.join(first)} by position, all others by name, such"
                f" as {names[len(first)]}=; got {len(args) - len(placed) + len(first)} by position"
            )
        return function(*args, **options)

    return checked  # type: ignore[return-value]


def check_kind(name: str, value: Any, *kinds: Any, hint: str = "") -> None:
    """Raise unless a value is of one of several classes."""
    if not isinstance(value, kinds):
        expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}{hint and '; ' + hint}")


def whole_number(name: str, value: Any, least: int, *, clamp: bool = False) -> int:
    """Return a size that is known before tracing; `clamp` where beyond `LARGEST` all sizes mean the same."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer known before tracing, got {value!r}") from None
    if number < least or isinstance(value, bool):
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return min(number, LARGEST) if clamp else number


def read_size(name: str, value: Any, least: int = 1) -> Any:
    """Return the size of an axis; in a program to be exported, it may be symbolic."""
    return value if is_symbolic_dim(value) else whole_number(name, value, least)


def read_number(name: str, value: Any) -> float:
    """Return a number that is known before tracing."""
    try:
        return float(+value)  # text of a number has no sign
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name}: expected a number known before tracing, got {value!r}") from None


def check_flag(name: str, flag: Any) -> bool:
    """Return True or False."""
    if not isinstance(flag, bool | np.bool_):
        raise TypeError(f"{name}: expected True or False, known before tracing; got {flag!r}")
    return bool(flag)


def check_reach(name: str, end: int) -> None:
    """Raise where positions that end before this one are too many for int32."""
    if isinstance(end, int) and end > LARGEST:  # a symbolic one is not known
        raise ValueError(
            f"{name}: expected positions below {LARGEST}, which int32 holds; got up to {end - 1}"
        )


def read_array(name: str, value: Any, dtype: Any = None) -> Any:
    """Return arrays of NumPy and JAX, and shapes, as they are, other libraries' and lists through NumPy.

    Numbers and lists, which have no dtype of their own, take this one, or int32 if empty.
    """
    if isinstance(value, jax.Array):
        return value
    if hasattr(value, "__jax_array__"):  # a variable of a model
        return as_array(name, "an array", jnp.asarray, value)
    if isinstance(getattr(value, "dtype", None), np.dtype):
        return value
    if hasattr(value, "dtype"):
        return as_array(name, "an array", np.asarray, value)
    # A list may hold them, too. A symbolic size is known where an exported program is called.
    is_traced = any(isinstance(leaf, Tracer) or is_symbolic_dim(leaf) for leaf in jax.tree.leaves(value))
    array: Any = as_array(name, "an array", jnp.asarray if is_traced else np.asarray, value, dtype)
    return array if array.size or dtype is not None else array.astype(np.int32)


def keep_array(array: Any) -> Any:
    """Return an array to keep: a copy of NumPy's, which its owner may write into; any other as it is."""
    return np.array(array) if isinstance(array, np.ndarray) else array


def as_array(name: str, expected: str, make: Callable[..., Made], value: Any, *options: Any) -> Made:
    """Return an array made of an argument, or say why none can be."""
    try:
        return make(value, *options)
    except (TypeError, ValueError, OverflowError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        hint = "; lists within a list must be of one length" if isinstance(value, list | tuple) else ""
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__} ({reason}){hint}") from None


def integers(
    name: str,
    value: Any,
    *,
    least: int | None = None,
    most: int = LARGEST,
    clamp: bool = False,
    wide: bool = False,
) -> Any:
    """Return an int32 array; NumPy stays NumPy, so that what is known while tracing stays known.

    Numbers beyond int32 are refused where they are known; else, and with `clamp` everywhere, the nearest up
    to `most` takes their place. With `wide`, those that are not known keep their 64 bits. Numbers below
    `least` are refused where the host has them.
    """
    array: Any = read_array(name, value)
    if array.dtype == object and all(isinstance(number, int) for number in array.flat):
        array = np.asarray(np.clip(array, np.iinfo(np.int64).min, np.iinfo(np.int64).max), np.int64)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        got = repr(value)[:60] if array.dtype == object else array.dtype
        raise TypeError(f"{name}: expected integers, got {got}")
    if isinstance(array, jax.ShapeDtypeStruct):
        width = jax.dtypes.canonicalize_dtype(array.dtype).itemsize
        return jax.ShapeDtypeStruct(array.shape, np.int64 if wide and width > 4 else np.int32)
    on_host = not isinstance(array, jax.Array)
    if least is not None and on_host and np.any(array < least):
        raise ValueError(f"{name}: expected integers of at least {least}, got {array.min()}")
    if jnp.iinfo(array.dtype).max > LARGEST:
        lowest = max(-LARGEST - 1, int(jnp.iinfo(array.dtype).min))
        if clamp:
            array = array.clip(lowest, LARGEST)
        elif on_host or (not isinstance(array, Tracer) and array.is_fully_addressable):
            with jax.transfer_guard_device_to_host("allow"):
                numbers: Any = np.asarray(array)
            beyond = numbers[(numbers < lowest) | (numbers > LARGEST)]
            if beyond.size:
                raise ValueError(f"{name}: expected integers that int32 holds, got {beyond[0]}")
        elif wide:  # of 32 bits, each unsigned number has one of its own
            return array.astype(np.int64 if array.dtype.itemsize > 4 else np.int32)
        else:
            array = array.clip(lowest, most)
    return array if array.dtype == np.int32 else array.astype(np.int32)


def evaluate(function: Callable[..., Any], *arrays: Any) -> Any:
    """Call a function of arrays; of shapes, return the shape of what it would return."""
    if not any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
        return function(*arrays)
    # With the widths that arrays would have, of which jax 0.12 warns.
    dtypes = (jax.dtypes.canonicalize_dtype(array.dtype) for array in arrays)
    shapes = (jax.ShapeDtypeStruct(array.shape, dtype) for array, dtype in zip(arrays, dtypes, strict=True))
    return jax.eval_shape(function, *shapes)


def indices(name: str, value: Any, size: Any, expected: str = "a list of integers") -> Any:
    """Return indices along an axis of this size as an int32 array; those that are known must lie within."""
    array: Any = read_array(name, value)
    if array.ndim != 1 or not (array.size == 0 or jnp.issubdtype(array.dtype, jnp.integer)):
        got = f"{array.dtype} of shape {tuple(array.shape)}" if hasattr(value, "shape") else repr(value)
        raise TypeError(f"{name}: expected {expected}, got {got}")
    is_known = isinstance(size, int) and not isinstance(array, Tracer | jax.ShapeDtypeStruct)
    if is_known and not np.all((np.asarray(array) >= 0) & (np.asarray(array) < size)):
        raise ValueError(f"{name}: expected indices in 0..{size - 1}, got {np.asarray(array).tolist()}")
    return integers(name, array) if array.size else np.zeros(0, np.int32)
