"""Entries of a config.json: each is read, known to mean nothing to the numbers, or refused by name."""

import math
from collections import UserDict
from collections.abc import Mapping
from typing import Any

# What any config.json may say beside the model: who wrote it, how it was trained, how it writes.
_HARMLESS = """
    architectures model_type transformers_version dtype torch_dtype _name_or_path name_or_path use_cache
    id2label label2id num_labels problem_type task_specific_params finetuning_task tokenizer_class prefix
    return_dict return_dict_in_generate output_hidden_states output_attentions output_scores output_past
    torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward gradient_checkpointing pretraining_tp
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id max_length min_length do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
    remove_invalid_values suppress_tokens begin_suppress_tokens bad_words_ids
    exponential_decay_length_penalty initializer_range initializer_factor attention_dropout hidden_dropout
    hidden_dropout_prob attention_probs_dropout_prob attn_pdrop embd_pdrop resid_pdrop dropout_rate
    classifier_dropout _attn_implementation attn_implementation _attn_implementation_autoset
    cache_implementation transformers.js_config unsloth_fixed unsloth_version
"""
HARMLESS = frozenset(_HARMLESS.split())

# What transformers 5.24 passes over in these families, though in others it shapes the model; `rotary.py` says
# the same of partial_rotary_factor.
_FIXED = ("mistral", "qwen2")
IGNORED = {
    "attention_bias": _FIXED,
    "mlp_bias": (*_FIXED, "qwen3", "qwen3_moe", "qwen3_5_text", "gemma2", "gemma3_text", "gpt_oss"),
}


class Entries(UserDict[str, Any]):
    """A config.json, or a part of it, that knows which of its entries were looked at."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(values)
        self._seen = set[str]()

    def __getitem__(self, name: str) -> Any:
        self._seen.add(name)
        return super().__getitem__(name)

    def list_unread(self) -> dict[str, Any]:
        """Return the entries that nobody looked at and that say something."""
        unseen = {name: value for name, value in self.data.items() if name not in self._seen}
        return {name: value for name, value in unseen.items() if value not in (None, {}, [], "")}


def refuse_unread(kind: str, unread: Mapping[str, Any]) -> None:
    """Raise for entries that were not looked at, and name them all."""
    if unread:
        listed = ", ".join(f"{name} = {value!r}" for name, value in unread.items())
        raise ValueError(
            f"config.json: expected entries that are known for {kind}, got {listed}, which may change what"
            " the model computes; take out those that do not, or use the library that the model was made with"
        )


def demand_same(settings: Mapping[str, Any], name: str, expected: Any, other: str) -> None:
    """Raise for an entry that says something again, and says otherwise."""
    if settings.get(name) not in (None, expected):
        raise ValueError(
            f"{name}: expected {expected!r}, as {other} says, or no such entry; got {settings[name]!r};"
            " leave out the wrong one"
        )


def read_number(name: str, value: Any) -> float:
    """Return a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a number above 0, got {value!r}")
    return float(value)


def read_flag(name: str, value: Any) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false in config.json, got {value!r}")
    return value


def read_size(name: str, value: Any, where: str = "config.json") -> int:
    """Return an integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: expected an integer in {where}, got {value!r}")
    return value
