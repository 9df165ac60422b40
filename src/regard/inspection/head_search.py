"""Search of heads by what they read: weights averaged over the pairs that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard import readouts
from regard.arguments import LARGEST, check_kind, whole_number
from regard.inspection.tokens import SPACES

_CELLS = 1 << 22  # of all heads, formed at once
_AROUND = SPACES + "\t\r\n"  # the same in web/head_search.js


@dataclass(frozen=True)
class FoundHead:
    """A head, and how much weight it gives to what was asked for.

    Example:
        >>> from regard import inspection
        >>> inspection.FoundHead(call=1, head=2, weight=0.5, pairs=7).pairs
        7
    """

    call: int
    """Number of the call in the trace."""
    head: int
    """The head."""
    weight: float
    """Mean over the pairs; the label's share where a label alone was asked for."""
    pairs: int
    """The number of pairs, or of the queries that the label stands on."""


def find_heads(
    trace: Any,
    query: str | Sequence[str] | None = None,
    key: str | Sequence[str] | None = None,
    *,
    offset: int | None = None,
    label: str | None = None,
) -> list[FoundHead]:
    """Find the heads that read chosen keys from chosen queries, the largest mean weight first.

    weight_h = sum_{ts in P} p_hts / |P|,  P: queries t and keys s that match and that may attend

    Args:
        trace: of `capture` or `load`, with queries and keys.
        query: texts of tokens, one or several, whatever the case and white space around; None matches all.
        key: likewise, of the key's token.
        offset: by how many positions the query is after the key; 1 is the token before. None: any.
        label: a label of `readouts.LABELS` that a head must have.

    Returns:
        The heads that have such pairs; weights that are not numbers count for nothing.

    Raises:
        TypeError: an offset that is no integer.
        ValueError: nothing asked for; a label that does not exist; queries and keys that are not kept.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import attend, inspection, masks
        >>> x = jnp.eye(3)[None]
        >>> with inspection.capture(tokens=["a", "b", "A"]) as trace:
        ...     _ = attend(x, x, x, mask=masks.causal(), scale=0.0)
        >>> (found,) = inspection.find_heads(trace, key="a")
        >>> found.call, found.head, round(found.weight, 3), found.pairs
        (0, 0, 0.542, 4)
    """
    if all(wanted is None for wanted in (query, key, offset, label)):
        raise ValueError("query: expected a query, a key, an offset or a label to look for, got none of them")
    if not hasattr(trace, "calls"):
        raise TypeError(f"trace: expected a Trace, as of capture; got {type(trace).__name__}")
    for name, words in (("query", query), ("key", key)):
        check_kind(name, words, str, Sequence, type(None))
        for text in words or ():
            check_kind(name, text, str)
    if label is not None and label not in readouts.LABELS:
        raise ValueError(f"label: expected one of {', '.join(readouts.LABELS)}, got {label!r}")
    offset = None if offset is None else whole_number("offset", offset, -LARGEST)
    matches: list[FoundHead] = []
    for number, call in enumerate(trace.calls):
        named = None if label is None else _read_labels(call, label)
        if query is None and key is None and offset is None:
            matches += [FoundHead(number, head, *measured) for head, measured in (named or {}).items()]
            continue
        sums, pairs = _sum_pairs(call, query, key, offset)
        matches += [
            FoundHead(number, head, float(sums[head] / pairs[head]), int(pairs[head]))
            for head in range(call.heads)
            if pairs[head] and (named is None or head in named)
        ]
    return sorted(matches, key=lambda match: (-match.weight, match.call, match.head))


def _sum_pairs(call: Any, query: Any, key: Any, offset: int | None) -> tuple[np.ndarray, np.ndarray]:
    rows = _match(query, call.query_tokens, call.rows, call.query_offset)
    columns = _match(key, call.key_tokens, call.keys, call.key_offset)
    sums, pairs = np.zeros(call.heads), np.zeros(call.heads, np.int64)
    wide = len(columns) if offset is None else 256
    step = max(1, min(256, _CELLS // max(1, wide * call.heads)))
    for start in range(0, len(rows), step):
        own, keys = rows[start : start + step], columns
        if offset is not None:
            keys = np.intersect1d(keys, own + call.query_offset - call.key_offset - offset)
        if not len(keys):
            continue
        weights = call.window(rows=own, columns=keys).astype(np.float64)
        wanted = call.permit(own, keys) & ~np.isnan(weights)
        if offset is not None:
            away = own[:, None] + call.query_offset - keys - call.key_offset
            wanted = wanted & (away == offset)
        sums += np.where(wanted, weights, 0).sum((1, 2))
        pairs += wanted.sum((1, 2))
    return sums, pairs


def _match(wanted: str | Sequence[str] | None, tokens: Any, size: int, offset: int) -> np.ndarray:
    if wanted is None:
        return np.arange(size)
    texts = [wanted] if isinstance(wanted, str) else wanted
    names = {_fold(text) for text in texts}
    if tokens is None and not all(name.lstrip("-").isdecimal() for name in names):
        got = f"{wanted!r}. Name them by capture(tokens=...)"
        raise ValueError(f"query, key: expected numbers of positions, as the trace has no tokens; got {got}")
    spellings = [str(n + offset) for n in range(size)] if tokens is None else tokens.texts
    return np.asarray([n for n, text in enumerate(spellings) if _fold(text) in names], int)


def _fold(text: str) -> str:
    return (text.strip(_AROUND) or text).lower()


def _read_labels(call: Any, name: str) -> dict[int, tuple[float, int]]:
    labelled = readouts.label(call.readout(exact=False)).items()
    fitting = ((head, label) for (head,), labels in labelled for label in labels if label.name == name)
    return {head: (label.value, label.rows) for head, label in fitting}
