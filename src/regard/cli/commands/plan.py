"""`regard plan`: the best mesh for attention at a length, the next ones, and everything that was assumed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from rich.table import Table

from regard.cli.console import Console, UsageError, expected_errors
from regard.cli.declaration import Command, Output, option

if TYPE_CHECKING:
    from regard.planning import Report


@dataclass(frozen=True)
class Plan(Command):
    """Say which mesh of up to so many devices is best for attention at a length, and what it costs there.

    Example: regard plan --length 1M --heads 32 --key-heads 8 --devices 256 --chip h100 --mask 'causal()'
    """

    length: Annotated[str, option("N")]
    """Tokens, such as 4096, 128k or 1M: powers of 1024."""
    devices: Annotated[int, option("N")]
    """Number of devices; the best mesh may have fewer."""
    chip: Annotated[str, option("NAME")]
    """Kind of device: a100, h100, h200, b200, v5e, v5p, v6e, or cpu for this machine, which is measured."""
    heads: Annotated[int | None, option("N", "required without --model")] = None
    """Query heads."""
    model: Annotated[str | None, option("NAME", "attention alone")] = None
    """Plan a training step of a whole decoder of `regard.models.PRESETS`, such as llama-3.1-8b."""
    remat: bool = False
    """Run blocks again in the backward pass; with --model."""
    key_heads: Annotated[int | None, option("N", "as many as heads")] = None
    """Heads of keys and values."""
    width: int = 128
    """Width of a head."""
    batch: int = 1
    """Sequences."""
    mask: Annotated[str | None, option("EXPRESSION", "everybody to everybody")] = None
    """Who may attend to whom, such as 'causal() & sliding_window(8191)'."""
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    """Type of query, key and value."""
    backward: bool = False
    """Weigh the gradients, too."""
    fix: Annotated[str | None, option("AXIS=N,...", "all are chosen")] = None
    """Sizes of mesh axes that are given, such as 'data=2,heads=1'; data, sequence, exchange, heads."""
    efficiency: float = 0.5
    """Share of the chip's operations per second that attention reaches."""
    top: int = 5
    """Meshes to show."""
    output: Output = Output()

    def run(self, console: Console) -> int:
        """Print a plan; return 1 when no mesh holds the call."""
        if self.top < 1:
            raise UsageError(f"--top must be at least 1, got {self.top}")
        if not 0 < self.efficiency <= 1:
            raise UsageError(f"--efficiency must be a share above 0, at most 1, got {self.efficiency}")
        if self.model is not None:
            return self._run_step(console)
        if self.heads is None:
            raise UsageError("plan needs --heads, or a --model that says them")
        from regard import masks
        from regard.planning import Assumptions, MemoryTooSmallError, plan

        same = ("length", "heads", "devices", "chip", "key_heads", "width", "batch", "dtype", "backward")
        with expected_errors():
            try:
                report = plan(
                    **{name: getattr(self, name) for name in same},
                    mask=masks.parse(self.mask) if self.mask else None,
                    fixed=_parse_sizes(self.fix),
                    assumptions=Assumptions(compute_efficiency=self.efficiency),
                )
            except MemoryTooSmallError as error:
                console.fail(str(error))
                return 1
        values = report.as_json(self.top)
        meshes = values.pop("meshes")
        console.emit("plan", **values)
        for rank, mesh in enumerate(meshes):
            console.emit("mesh", rank=rank, **mesh)
        for label, text in report.lines():
            console.note(label, text)
        console.say()
        console.say(_tabulate(report, self.top))
        if (left := len(report.ranking) - self.top) > 0:
            console.say(f"and {left} more: --top {len(report.ranking)}")
        console.say("\nassumed")
        for label, text in report.assumed():
            console.note(label, text)
        console.say(f"\n{report.code()}")
        return 0

    def _run_step(self, console: Console) -> int:
        """Print the plan of a training step."""
        import dataclasses

        from regard.models import preset
        from regard.planning import Assumptions, MemoryTooSmallError, plan_step

        alone = {"heads": self.heads, "key_heads": self.key_heads, "mask": self.mask}
        if given := [f"--{name.replace('_', '-')}" for name, value in alone.items() if value is not None]:
            raise UsageError(f"--model says what {', '.join(given)} would; leave it out")
        try:
            config = preset(self.model or "").config
        except KeyError as error:
            raise UsageError(str(error.args[0])) from error
        with expected_errors():
            try:
                step = plan_step(
                    dataclasses.replace(config, remat="full" if self.remat else None),
                    length=self.length,
                    batch=self.batch,
                    devices=self.devices,
                    chip=self.chip,
                    fixed=_parse_sizes(self.fix),
                    assumptions=Assumptions(compute_efficiency=self.efficiency),
                )
            except MemoryTooSmallError as error:
                console.fail(str(error))
                return 1
        mesh = step.candidate
        facts = {"devices": mesh.devices, "mesh": mesh.mesh, "plan": mesh.plan, "layout": mesh.layout}
        console.emit("step", model=self.model, **facts, seconds=step.seconds, parameters=step.parameters,
                     held=dict(step.held), seconds_of=dict(step.seconds_of))  # fmt: skip
        console.say(f"{step}\n\n{mesh.code()}")
        return 0


def _parse_sizes(text: str | None) -> dict[str, int]:
    """Read sizes such as data=2,heads=1."""
    sizes = {}
    for word in (text or "").split(","):
        if not word.strip():
            continue
        name, _, size = word.partition("=")
        if not size.strip().isdecimal():
            raise UsageError(f"--fix must be sizes of axes such as data=2,heads=1, got {text!r}")
        sizes[name.strip()] = int(size)
    return sizes


def _tabulate(report: Report, top: int) -> Table:
    """Return a table of the first meshes, one a row."""
    from regard.engine.dispatch.explanation import scaled
    from regard.planning.reports import name_mesh, spell_seconds

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("mesh, what it takes, and why not", overflow="fold")
    for item in report.ranking[:top]:
        times = {name: getattr(item, f"{name}_seconds") for name in ("compute", "travel", "exchange")}
        parts = ", ".join(f"{name} {spell_seconds(seconds)}" for name, seconds in times.items())
        sizes = f"{scaled(item.memory_bytes, 'B')} held, {scaled(item.all_bytes, 'B')} sent"
        place = f"{name_mesh(item)} {item.candidate.layout}: {report.explain_loss(item)}"
        table.add_row(spell_seconds(item.seconds), f"{place}\n{parts}; {sizes}")
    return table
