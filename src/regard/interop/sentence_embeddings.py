"""Sentences as vectors whose dot products are similarities, with models of sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.loading import name_extra

with name_extra(__name__, "weights"):
    from flax import nnx

from regard.arguments import check_kind, whole_number
from regard.axes import Array, Float
from regard.interop.families.entries import read_size
from regard.interop.huggingface import Pretrained
from regard.interop.huggingface_configs import read_settings
from regard.interop.model_folders import find_modules
from regard.models import Encoder
from regard.models.classifier import FirstPooling, MeanPooling
from regard.models.prompts import pad

POOLINGS = {"pooling_mode_mean_tokens": MeanPooling, "pooling_mode_cls_token": FirstPooling}


def embed(
    pretrained: Pretrained, sentences: Sequence[str], *, batch_size: int = 32, max_length: int | None = None
) -> np.ndarray:
    """Embed sentences: hidden states, averaged over the tokens of each, of length 1.

    e = mean_t hidden_t;  embedding = e / |e|

    Sentences of similar lengths share a batch, padded to a multiple of 16, so that few shapes are compiled.

    Args:
        pretrained: an encoder with a tokenizer, as `huggingface.load` returns it. Pooling is read from the
            folder's `1_Pooling/config.json` where there is one: the mean, or the first token.
        sentences: any number of them.
        batch_size: sentences per call of the model, at least 1.
        max_length: tokens to keep of a sentence, at least 3, [CLS] and [SEP] included. None means what the
            folder's `sentence_bert_config.json` says, or else the model's own limit.

    Returns:
        One row per sentence, `(sentences, M)`, float32.

    Raises:
        TypeError: one string in place of several.
        ValueError: a model that is no encoder of tokens, one without a tokenizer, a pooling or a module after
            it that is not supported, a batch_size or max_length that is too small.

    Example:
        >>> from regard.interop import huggingface
        >>> from regard.interop.sentence_embeddings import embed
        >>> minilm = huggingface.load(huggingface.find_minilm())  # doctest: +SKIP
        >>> rows = embed(minilm, ["He disliked the film.", "He did not like it."])  # doctest: +SKIP
        >>> similarity = rows @ rows.T  # doctest: +SKIP

    Reference: Reimers and Gurevych, "Sentence-BERT", 2019, section 3.
    """
    check_kind("pretrained", pretrained, Pretrained)
    if isinstance(sentences, str):
        raise TypeError("sentences: expected a sequence of strings, got one string; put it in a list")
    if not isinstance(pretrained.model, Encoder) or pretrained.config.vocab_size is None:
        raise ValueError(f"pretrained: expected an encoder of tokens (bert), got {pretrained.kind}")
    if pretrained.tokenizer is None:
        raise ValueError(
            f"pretrained: expected a tokenizer in {pretrained.directory}, found neither tokenizer.json nor"
            " vocab.txt"
        )
    batch_size = whole_number("batch_size", batch_size, 1)
    max_length = None if max_length is None else whole_number("max_length", max_length, 3)
    pooling, limit = _read_pooling(pretrained), _read_limit(pretrained, max_length)
    uncut = [encoding.ids for encoding in pretrained.tokenizer.encode_batch(list(sentences))]
    # The last token, [SEP], stays at the end.
    tokens = [ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]] for ids in uncut]
    order = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))
    rows = np.zeros((len(tokens), pretrained.config.d_model), np.float32)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch, lengths = pad([tokens[index] for index in chosen], pretrained.config.max_length)
        rows[chosen] = _pool(pretrained.model, jnp.asarray(batch, jnp.int32), jnp.asarray(lengths), pooling)
    return rows


@nnx.jit(static_argnames="pooling")
def _pool(model: Any, tokens: Array, lengths: Array, pooling: Any) -> Float[Array, "B M"]:
    hidden = model(tokens, lengths=lengths).astype(jnp.float32)  # zero in the padding
    pooled, _ = pooling()(hidden, lengths, ())
    return pooled * jax.lax.rsqrt(jnp.maximum(jnp.sum(pooled**2, axis=-1, keepdims=True), 1e-24))


def _read_pooling(pretrained: Pretrained) -> type[MeanPooling] | type[FirstPooling]:
    modules = find_modules(pretrained.directory)
    if more := sorted({*modules} - {"Transformer", "Pooling", "Normalize"}):
        raise ValueError(
            f"pretrained: expected a Transformer, Pooling and Normalize, got {', '.join(more)} as well in"
            f" {modules['Transformer'].parent}'s modules.json; apply it to the model's own hidden states"
        )
    path = modules.get("Pooling", pretrained.directory / "1_Pooling") / "config.json"
    if not path.is_file():
        return MeanPooling
    settings = read_settings(path)
    modes = [name for name in settings if name.startswith("pooling_mode") and settings[name] is True]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ValueError(f"{path}: expected one of {', '.join(POOLINGS)}, got {', '.join(modes) or 'none'}")
    return POOLINGS[modes[0]]


def _read_limit(pretrained: Pretrained, max_length: int | None) -> int:
    path = pretrained.directory / "sentence_bert_config.json"
    if max_length is None and path.is_file():
        max_length = read_settings(path).get("max_seq_length")
        max_length = None if max_length is None else read_size("max_seq_length", max_length, str(path))
    limit = pretrained.config.max_length
    return limit if max_length is None else max(min(max_length, limit), 3)
