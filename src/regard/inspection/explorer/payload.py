"""The page's data of a trace: what of it is carried, under a budget."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.inspection.explorer import budgets
from regard.inspection.explorer.budgets import TARGET_BYTES, TOP_K, Plan
from regard.inspection.explorer.head_records import CallRecords
from regard.inspection.explorer.page_document import Payload, Writer
from regard.readouts import LABELS, average, label


def collect(
    traces: Sequence[Any],
    *,
    max_bytes: float | None = None,
    shell_bytes: int = 0,
    served: bool = False,
    pinned: int | Sequence[tuple[int, int]] = 8,
    cut: Sequence[tuple[int, int]] = (),
    **shown: Any,
) -> Payload:
    """Gather what a page shows of one trace or two, in `max_bytes` with the `shell_bytes` around the data."""
    chosen, cut = choose_pinned(traces[0], pinned), _check_heads("cut", "", traces[-1], cut)
    calls = [call for trace in traces for call in trace.calls]
    cells = sum(call.heads * call.rows * call.keys for call in calls)
    code = None if cells > budgets.LARGEST_EXACT else "f16" if cells <= budgets.LARGEST_HALF else "log8"
    if served and code == "log8":
        code = None  # the server gives the weights themselves
    featured = _choose_featured(traces, chosen)
    records: list[list[CallRecords]] = []
    for trace, own in zip(traces, featured, strict=True):
        records.append([])
        for index, (call, few) in enumerate(zip(trace.calls, own, strict=True)):
            pins = [head for number, head in chosen if number == index and head < call.heads]
            records[-1].append(CallRecords(call, pins, code, few))
    exact = any(record.weights_code for own in records for record in own)
    writer = Writer(traces, records, chosen, served, cut=cut, **shown)
    notes = _remarks(traces)
    has_features = any(heads for own in featured for heads in own)
    sizes = [t.predictions.tokens.size for t in traces if t.predictions is not None]
    predicted = bool(sizes) and sum(sizes) <= budgets.LARGEST_PREDICTIONS
    if sizes and not predicted:
        notes.append("What layers would predict is left out: the text is long.")
    # Where weights are at hand, in the page or at the server, the largest of them follow.
    listed = not (exact or served)
    plan = Plan(pinned=len(chosen), exact=exact, top_k=listed, features=has_features, predictions=predicted)
    steps = budgets.degrade(plan)
    if listed and TOP_K * sum(call.heads * call.rows for call in calls) > TARGET_BYTES:
        plan, left_out = next(steps)
        notes.append(f"To keep the file small, {left_out}.")
    while True:
        payload, size = writer.write(plan, notes)
        limit = min(TARGET_BYTES, max_bytes or TARGET_BYTES) if plan.top_k else max_bytes
        if limit is None or size + shell_bytes <= limit:
            return payload
        step = next(steps, None)
        if step is None:
            least = -(-(size + shell_bytes) // 100_000) / 10
            expected = f"at least {least:g} for this trace, with all left out that may be"
            hint = "raise max_mb, or capture fewer layers"
            raise ValueError(f"max_mb: expected {expected}, got {(max_bytes or 0) / 1e6:g}; {hint}")
        plan, left_out = step
        notes = [*notes, f"To keep the file small, {left_out}."]


def choose_pinned(trace: Any, pinned: int | Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pick heads to carry in detail, as (call, head): the clearest of each label, then those least spread."""
    if not isinstance(pinned, int | np.integer):
        return _check_heads("pinned", "a number of heads, or ", trace, pinned)
    if pinned < 0:
        raise ValueError(f"pinned: expected a number of heads of at least 0, got {pinned}")
    clearest: dict[str, list[tuple[float, int, int]]] = {name: [] for name in LABELS}
    quiet: list[tuple[float, int, int]] = []
    for index, call in enumerate(trace.calls if pinned else ()):
        readout = call.readout(grid=64, top_k=TOP_K, exact=False)
        entropy = np.asarray(average(readout)["entropy"])
        for (head,), labels in label(readout).items():
            quiet.append((float(entropy[head]), index, head))
            for named in labels:
                clearest[named.name].append((-named.value, index, head))
    ranked = [min(heads) for name, heads in clearest.items() if heads and name != "uniform"]
    order = dict.fromkeys((call, head) for _, call, head in [*ranked, *sorted(quiet)])
    return list(order)[:pinned]


def _check_heads(name: str, other: str, trace: Any, pairs: Any) -> list[tuple[int, int]]:
    """Return pairs of a call's number and a head, each once, that a trace has; `other` is expected, too."""
    try:
        heads = list(dict.fromkeys((int(call), int(head)) for call, head in pairs))
    except (TypeError, ValueError):
        expected = f"{other}pairs of a call's number and a head"
        raise TypeError(f"{name}: expected {expected}; got {pairs!r}") from None
    for call, head in heads:
        if not (0 <= call < len(trace.calls) and 0 <= head < trace.calls[call].heads):
            expected = f"pairs of a call in 0..{len(trace.calls) - 1} and one of its heads"
            raise ValueError(f"{name}: expected {expected}, got {(call, head)}")
    return heads


def _choose_featured(traces: Sequence[Any], chosen: list[tuple[int, int]]) -> list[list[list[int]]]:
    """Choose heads whose queries and keys are carried: all, else those pinned of the first trace, or none."""
    every = [
        [range(call.heads) if call.problem is not None and call.description.width else () for call in t.calls]
        for t in traces
    ]
    pinned = [
        [[head for head in heads if t == 0 and (c, head) in chosen] for c, heads in enumerate(own)]
        for t, own in enumerate(every)
    ]
    for featured in (every, pinned):
        numbers = sum(
            len(heads) * (call.rows + call.keys) * call.description.width
            for trace, own in zip(traces, featured, strict=True)
            for call, heads in zip(trace.calls, own, strict=True)
        )
        if numbers <= budgets.LARGEST_FEATURES:
            return [[list(heads) for heads in own] for own in featured]
    return [[[] for _ in own] for own in every]


def _remarks(traces: Sequence[Any]) -> list[str]:
    """Collect the notes that a reader of the numbers needs."""
    remarks = [note for trace in traces for note in trace.notes]
    for trace in traces:
        if any(call.problem is None for call in trace.calls):
            reason = "saved without queries and keys, so there is nothing finer than these blocks"
            remarks.append(f"{trace.title}: {reason}.")
        for call in trace.calls:
            if not np.isfinite(np.asarray(call.readout(grid=64, top_k=TOP_K, exact=False).trust)).all():
                remarks.append(f"{call.name}: some weights are not numbers; they are drawn as 0.")
    return remarks
