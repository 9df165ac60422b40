"""`regard plan`: the best mesh for attention at a length, the next ones, and everything that was assumed."""

from __future__ import annotations

from rich.table import Table

from regard.cli.commands import Plan
from regard.cli.console import Console, UsageError
from regard.engine.dispatch.explanation import scaled
from regard.planning import Assumptions, Estimate, MemoryTooSmallError, Report, plan
from regard.planning.amounts import spell_seconds
from regard.planning.reports import name_mesh


def run_planning(command: Plan, console: Console) -> int:
    """Prints a plan; exit code 1 when no mesh holds the call."""
    if command.top < 1:
        raise UsageError(f"--top must be at least 1, got {command.top}")
    if not 0 < command.efficiency <= 1:
        raise UsageError(f"--efficiency must be a share above 0, at most 1, got {command.efficiency}")
    from regard import masks

    try:
        report = plan(
            length=command.length,
            heads=command.heads,
            devices=command.devices,
            chip=command.chip,
            key_heads=command.key_heads,
            width=command.width,
            batch=command.batch,
            mask=masks.parse(command.mask) if command.mask else None,
            dtype=command.dtype,
            backward=command.backward,
            fixed=_parse_sizes(command.fix),
            assumptions=Assumptions(compute_efficiency=command.efficiency),
        )
    except MemoryTooSmallError as error:
        console.fail(str(error))
        return 1
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    _emit(report, command.top, console)
    for label, text in report.lines():
        console.note(label, text)
    console.say()
    console.say(_tabulate(report, command.top))
    if (left := len(report.ranking) - command.top) > 0:
        console.say(f"and {left} more: --top {len(report.ranking)}")
    console.say("\nassumed")
    for label, text in report.assumed():
        console.note(label, text)
    console.say(f"\n{report.code()}")
    return 0


def _emit(report: Report, top: int, console: Console) -> None:
    values = report.as_json(top)
    meshes = values.pop("meshes")
    console.emit("plan", **values)
    for rank, mesh in enumerate(meshes):
        console.emit("mesh", rank=rank, **mesh)


def _parse_sizes(text: str | None) -> dict[str, int]:
    """Sizes such as data=2,heads=1."""
    sizes = {}
    for word in (text or "").split(","):
        if not word.strip():
            continue
        name, _, size = word.partition("=")
        if not size.strip().isdigit():
            raise UsageError(f"--fix must be sizes of axes such as data=2,heads=1, got {text!r}")
        sizes[name.strip()] = int(size)
    return sizes


def _tabulate(report: Report, top: int) -> Table:
    """The first meshes, one a row."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("time", "compute", "travel", "exchange", "memory", "sent"):
        table.add_column(name, justify="right", no_wrap=True, min_width=7)
    table.add_column("mesh, and why not")
    for item in report.ranking[:top]:
        place = f"{name_mesh(item)} {item.candidate.layout}"
        table.add_row(*_describe(item), f"{place}: {report.explain_loss(item)}")
    return table


def _describe(item: Estimate) -> list[str]:
    """Times and sizes."""
    times = (item.seconds, item.compute_seconds, item.travel_seconds, item.exchange_seconds)
    sizes = (item.memory_bytes, item.all_bytes)
    return [*map(spell_seconds, times), *(scaled(size, "B") for size in sizes)]
