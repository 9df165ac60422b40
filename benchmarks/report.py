"""The measurements as a table, as JSON and as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.measuring import Measurement, Outcome
from benchmarks.peers import OWN

HEADERS = ("ms", "/ regard", "/ best", "GFLOP/s", "of product", "MiB", "first s")
LEGEND = (
    "ms         median time of a call\n"
    "/ regard   over that of Regard's own choice of backend; / best: of the fastest other library\n"
    "GFLOP/s    matrix products over kept pairs; of product: over the rate of {side} x {side} matrices\n"
    "MiB        temporary memory of the compiled program\n"
    "first s    the first call, compilation included"
)


def tabulate(outcomes: Sequence[Outcome], title: str) -> Table:
    """Return a table with a line per case, and one below it per peer with times."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(title, no_wrap=True)
    for header in HEADERS:
        table.add_column(header, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(outcome.case.name)
        for one in outcome.measurements:
            if one.median_seconds is not None:
                table.add_row(f"  {_name(one)}", *_format_row(outcome, one))
    return table


def _name(one: Measurement) -> str:
    return f"{one.peer} ({one.note})" if one.note else one.peer


def _format_row(outcome: Outcome, one: Measurement) -> list[str]:
    rate = outcome.gflops(one)
    return [
        show_digits(one.median_seconds, 1e3),
        show_digits(outcome.ratio_to_own(one)),
        show_digits(outcome.ratio_to_best(one)),
        show_digits(rate),
        "" if rate is None else f"{rate / outcome.product_gflops:.0%}",
        "" if one.temporary_bytes is None else show_digits(one.temporary_bytes / 2**20),
        show_digits(one.first_seconds),
    ]


def show_digits(value: float | None, factor: float = 1.0) -> str:
    """Return three digits."""
    if value is None:
        return ""
    value *= factor
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 else f"{value:.1g}"


def list_absent(outcomes: Sequence[Outcome]) -> list[str]:
    """Return why peers have no times, cases with the same reason together."""
    absent: dict[tuple[str, str, str], list[str]] = {}
    for outcome in outcomes:
        for one in outcome.measurements:
            if one.status != "measured":
                cases = absent.setdefault((one.peer, one.status, one.reason), [])
                cases.append(f"{outcome.case.name} {outcome.case.dtype}")
    return [
        f"{peer} {status}: {reason} ({'every case' if len(cases) == len(outcomes) else ', '.join(cases)})"
        for (peer, status, reason), cases in absent.items()
    ]


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Return one case with all its peers as plain values."""
    case = outcome.case
    return {
        "case": case.name,
        "dtype": case.dtype,
        "query_shape": case.query,
        "key_shape": case.key,
        "mask": case.mask,
        "passes": case.passes,
        "kept_pairs": outcome.kept_pairs,
        "flops": outcome.flops,
        "product_gflops": outcome.product_gflops,
        "process_peak_mib": outcome.process_peak_bytes / 2**20,
        "peers": [_measurement_to_json(outcome, one) for one in outcome.measurements],
    }


def _measurement_to_json(outcome: Outcome, one: Measurement) -> dict[str, Any]:
    entry: dict[str, Any] = {"peer": one.peer, "status": one.status}
    if one.median_seconds is None or one.least_seconds is None:
        return entry | {"reason": one.reason}
    rate = outcome.gflops(one)
    return entry | {
        "note": one.note,
        "median_ms": one.median_seconds * 1e3,
        "least_ms": one.least_seconds * 1e3,
        "ratio_to_regard": outcome.ratio_to_own(one),
        "ratio_to_best_peer": outcome.ratio_to_best(one),
        "gflops": rate,
        "share_of_product": rate and rate / outcome.product_gflops,
        "temporary_mib": None if one.temporary_bytes is None else one.temporary_bytes / 2**20,
        "first_call_seconds": one.first_seconds,
    }


def draw_ratios(outcomes: Sequence[Outcome], title: str) -> Any:
    """Draw bars of time over Regard's time, a group per case, on a logarithmic axis; a matplotlib figure."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    names = list(dict.fromkeys(m.peer for o in outcomes for m in o.measurements if m.peer != OWN))
    # Okabe and Ito's colours: told apart by everybody, also in grey.
    palette = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#CC79A7", "#009E73", "#999999", "#000000")
    colors = {name: palette[index % len(palette)] for index, name in enumerate(names)}
    bars = [
        [(m.peer, ratio) for m in o.measurements if m.peer != OWN and (ratio := o.ratio_to_own(m))]
        for o in outcomes
    ]
    height = sum(len(group) + 1 for group in bars)
    figure = Figure(figsize=(7.5, 1.3 + 0.17 * height), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    place, ticks = 0.0, []
    for group in bars:
        ticks.append(place + (len(group) - 1) / 2)
        for name, ratio in group:
            axes.barh(place, ratio - 1, left=1, color=colors[name], height=0.86)
            side = "left" if ratio >= 1 else "right"
            shift = (3, 0) if ratio >= 1 else (-3, 0)
            axes.annotate(
                show_digits(ratio),
                (ratio, place),
                shift,
                textcoords="offset points",
                ha=side,
                va="center",
                fontsize=6.5,
            )
            place += 1
        place += 1
    axes.set_xscale("log")
    ratios = [ratio for group in bars for _, ratio in group] or [1.0]
    axes.set_xlim(min(0.5, min(ratios) / 1.6), max(2.0, max(ratios) * 1.6))
    axes.set_ylim(max(place - 0.4, 0.6), -0.8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(ticks, [outcome.case.name for outcome in outcomes], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(
        "time over that of Regard's own choice of backend: right of the line is slower", fontsize=8
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    for name, color in colors.items():
        if any(name == peer for group in bars for peer, _ in group):
            axes.barh(0, 0, left=1, color=color, label=name)
    if any(bars):
        figure.legend(loc="outside lower center", ncols=4, fontsize=7.5, frameon=False)
    axes.set_title(title, fontsize=10)
    return figure
