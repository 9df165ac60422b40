"""`attend` as a function that is checked: with a keyword for each feature, in place of masks and scores."""

import operator
from functools import reduce
from typing import Any

from regard import masks, scores
from regard.attention import attend


def attend_by_keywords(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    lengths: Any = None,
    segments: Any = None,
    indices: Any = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Any = None,
    offset: int | None = None,
    lse: bool = False,
    dropout: float = 0.0,
    rng: Any = None,
    backend: str | None = None,
) -> Any:
    """Call `attend` with what these keywords mean to it; return the output, and lse where it is asked for."""
    parts = [masks.from_array(mask)] if mask is not None and mask.dtype == bool else []
    parts += [masks.causal()] if causal else []
    parts += [masks.sliding_window(*window)] if window is not None else []
    parts += [masks.lengths(lengths)] if lengths is not None else []
    parts += [masks.segments(segments)] if segments is not None else []
    parts += [masks.chosen_keys(indices)] if indices is not None else []
    mask = reduce(operator.and_, parts) if parts else mask
    score = None if softcap is None else scores.softcap(softcap)
    output, aux = attend(
        query, key, value, mask=mask, bias=bias, score=score, scale=scale, sinks=sinks, query_offset=offset,
        dropout_rate=dropout, rng=rng, aux=("lse",), backend=backend,
    )  # fmt: skip
    return (output, aux["lse"]) if lse else output
