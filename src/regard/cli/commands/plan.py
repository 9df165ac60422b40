"""`regard plan`: the best mesh for attention at a length, the next ones, and everything that was assumed."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from regard.cli.console import Console, RunFailedError, UsageError, expected_errors, new_table
from regard.cli.declaration import Command, Output, option

if TYPE_CHECKING:
    from rich.table import Table

    from regard.planning import Report, Step

TOP = 5
# What a model, or a training step, says by itself.
ALONE = ("heads", "key_heads", "width", "mask", "backward", "top")


@dataclass(frozen=True)
class Plan(Command):
    """Say which mesh of up to so many devices is best for attention at a length, and what it costs there.

    Example: regard plan --length 1M --heads 32 --key-heads 8 --devices 256 --chip h100 --mask 'causal()'
    """

    EXTRA = "train"
    ALIASES: ClassVar = {"precision": "dtype", "preset": "model", "config": "model", "fixed": "fix"}

    length: Annotated[str, option("N")]
    """Tokens, such as 4096, 128k or 1M: powers of 1024."""
    devices: Annotated[int, option("N")]
    """Number of devices; the best mesh may have fewer."""
    chip: Annotated[str, option("NAME")]
    """Kind of device: a100, h100, h200, b200, v5e, v5p, v6e, or cpu for this machine, which is measured."""
    heads: Annotated[int | None, option("N", "required without --model")] = None
    """Query heads."""
    model: Annotated[str | None, option("NAME[,FIELD=VALUE,...]", "attention alone")] = None
    """Plan a training step of a whole decoder of `regard.models.PRESETS`, such as llama-3.1-8b, or of one
    with other sizes: llama-3.1-8b,num_layers=4. Its layers are scanned."""
    remat: bool = False
    """Run blocks again in the backward pass; with --model."""
    accumulate_steps: int = 1
    """Equal parts of the batch that are computed one after the other; with --model."""
    key_heads: Annotated[int | None, option("N", "as many as heads")] = None
    """Heads of keys and values."""
    width: Annotated[int | None, option("N", "128")] = None
    """Width of a head."""
    batch: int = 1
    """Sequences."""
    mask: Annotated[str | None, option("EXPRESSION", "everybody to everybody")] = None
    """Who may attend to whom, such as 'causal() & sliding_window(8191)'."""
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32", "float64"] | None,
        option("bfloat16|float16|float32|float64", "bfloat16"),
    ] = None
    """Type of query, key and value; with --model, the one in which a step computes, bfloat16 or float32."""
    backward: bool = False
    """Weigh the gradients, too."""
    fix: Annotated[str | None, option("AXIS=N,...", "all are chosen")] = None
    """Sizes of mesh axes that are given, such as 'data=2,heads=1'; data, sequence, exchange, heads; with
    --model data, fsdp, expert, sequence, tensor."""
    efficiency: float = 0.5
    """Share of the chip's operations per second that attention reaches."""
    top: Annotated[int | None, option("N", str(TOP))] = None
    """Meshes to show."""
    output: Output = Output()

    def run(self, console: Console) -> int:
        """Print a plan; return 1 when no mesh holds the call."""
        top = TOP if self.top is None else self.top
        if top < 1:
            raise UsageError(f"--top must be at least 1, got {top}")
        if not 0 < self.efficiency <= 1:
            raise UsageError(f"--efficiency must be a share above 0, at most 1, got {self.efficiency}")
        from regard.planning import MemoryTooSmallError

        with expected_errors():
            try:
                if self.model is not None:
                    self._plan_step(console, self.model)
                else:
                    self._plan_attention(console, top)
            except MemoryTooSmallError as error:
                raise RunFailedError(str(error)) from error
        return 0

    def _plan_attention(self, console: Console, top: int) -> None:
        if self.heads is None:
            raise UsageError("plan needs --heads, or a --model that says them")
        for flag, is_given in {
            "--remat": self.remat,
            "--accumulate-steps": self.accumulate_steps != 1,
        }.items():
            if is_given:
                raise UsageError(f"{flag} is for a training step; give --model, or leave it out")
        from regard import masks
        from regard.planning import plan

        same = ("length", "heads", "devices", "chip", "key_heads", "width", "batch", "dtype", "backward")
        flags = {name: getattr(self, name) for name in same if getattr(self, name) is not None}
        report = plan(**flags, mask=masks.parse(self.mask) if self.mask else None, **self._choose_sizes())
        values = report.as_json(top)
        meshes = values.pop("meshes")
        console.emit("plan", **values)
        for rank, mesh in enumerate(meshes):
            console.emit("mesh", rank=rank, **mesh)
        for label, text in report.lines():
            console.note(label, text)
        console.say()
        console.say(_tabulate(report, top))
        if (more := len(report.ranking) - top) > 0:
            console.say(f"and {more} more: --top {len(report.ranking)}")
        console.say("\nassumed")
        for label, text in report.assumed():
            console.note(label, text)
        console.say(f"\n{report.code()}")

    def _plan_step(self, console: Console, model: str) -> None:
        from regard.models import preset
        from regard.planning import plan_step

        names = [name for name in ALONE if getattr(self, name) not in (None, False)]
        if names:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            raise UsageError(f"--model plans a whole training step; leave out {flags}, for attention alone")
        name, _, changes = model.partition(",")
        try:
            chosen = preset(name)
        except KeyError as error:
            raise UsageError(str(error.args[0])) from error
        if chosen.kind != "decoder":
            raise UsageError(
                f"--model: expected a decoder, as steps of others are not planned; {name} is none"
            )
        config = _change(chosen.config, changes, remat="full" if self.remat else None, scan_layers=True)
        names = ("length", "batch", "devices", "chip", "accumulate_steps")
        same = {name: getattr(self, name) for name in names}
        precision = {} if self.dtype is None else {"precision": self.dtype}
        step = plan_step(config, **same, **precision, **self._choose_sizes())
        command = spell_training(step, config)
        facts = {"devices": step.candidate.devices, "mesh": dict(step.mesh), "outer": dict(step.outer)}
        parts = {name: dict(getattr(step, name)) for name in ("held", "sent", "seconds_of")}
        facts["command"] = command
        console.emit("step", model=model, **facts, seconds=step.seconds, parameters=step.parameters, **parts)
        console.say(f"{step}\n\n{command}")

    def _choose_sizes(self) -> dict[str, Any]:
        from regard.planning import Assumptions

        assumptions = Assumptions(compute_efficiency=self.efficiency)
        return {"fixed": _parse_sizes(self.fix), "assumptions": assumptions}


def spell_training(step: Step, config: Any) -> str:
    """Return the command that trains a model of these sizes on the mesh, and what it does otherwise."""
    from regard.planning.reports import spell_sizes
    from regard.training.settings import DecoderSizes
    from regard.training.tasks.text import NUM_BYTES, configure

    asked = step.request
    strings = max(config.vocab_size - 1, NUM_BYTES)  # a mark between documents is a token, too
    sizes = {field.name: getattr(config, field.name) for field in fields(DecoderSizes)}
    trained = configure(DecoderSizes(**sizes), strings + 1, asked["length"])
    names = [field.name for field in fields(config) if field.name != "max_length"]
    others = ", ".join(name for name in names if getattr(config, name) != getattr(trained, name))
    plain = asdict(DecoderSizes())
    flags = {name: size for name, size in sizes.items() if size != plain[name]}
    flags |= {"vocab_size": strings, "length": asked["length"], "batch_size": asked["batch"]}
    flags |= {"precision": asked["precision"]} if asked["precision"] != "float32" else {}
    flags |= {"accumulate_steps": asked["accumulate_steps"]} if asked["accumulate_steps"] > 1 else {}
    layout = {"mesh": spell_sizes(step.mesh), "outer": spell_sizes(step.outer)}
    words = ["regard train text", *(f"--{name} {sizes}" for name, sizes in layout.items() if sizes)]
    for name, value in flags.items():
        flag = name.replace("_", "-")
        switch = f"--{flag}" if value else f"--no-{flag}"
        text = " ".join(map(str, value)) if isinstance(value, tuple) else value
        words.append(switch if isinstance(value, bool) else f"--{flag} {text}")
    seen, available = step.candidate.devices, asked["devices"]
    remarks = f"# otherwise than in {others}\n" if others else ""
    if 1 < seen < available:
        remarks += f"# where {seen} of {available} devices are visible, as CUDA_VISIBLE_DEVICES can say\n"
    return remarks + " ".join(words)


def _change(config: Any, text: str, **changes: Any) -> Any:
    """Return a config with fields changed as in num_layers=4,rotary_base=1e6,scan_layers=false."""
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        changes[name] = None
        with contextlib.suppress(ValueError):
            changes[name] = json.loads(value.lower())
        if not hasattr(config, name) or not isinstance(changes[name], int | float):
            expected = "fields of TransformerConfig with a number, true or false, such as num_layers=4"
            raise UsageError(f"--model: expected {expected}; got {word!r}")
    num_layers = changes.get("num_layers", config.num_layers)
    changes.setdefault("dense_layers", tuple(layer for layer in config.dense_layers if layer < num_layers))
    return replace(config, **changes)


def _parse_sizes(text: str | None) -> dict[str, int]:
    """Read sizes such as data=2,heads=1."""
    sizes = {}
    for word in filter(str.strip, (text or "").split(",")):
        name, _, size = map(str.strip, word.partition("="))
        if not size.isdecimal():
            raise UsageError(f"--fix must be sizes of axes such as data=2,heads=1, got {text!r}")
        if name in sizes:
            raise UsageError(f"--fix: expected every axis once, got {name} twice in {text!r}")
        sizes[name] = int(size)
    return sizes


def _tabulate(report: Report, top: int) -> Table:
    from regard.engine.dispatch.explanation import scaled
    from regard.planning.reports import spell_seconds, spell_sizes

    table = new_table(gap=2)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("mesh, what it takes, and why not", overflow="fold")
    for item in report.ranking[:top]:
        times = {name: getattr(item, f"{name}_seconds") for name in ("compute", "travel", "exchange")}
        parts = ", ".join(f"{name} {spell_seconds(seconds)}" for name, seconds in times.items())
        sizes = f"{scaled(item.memory_bytes, 'B')} held, {scaled(item.all_bytes, 'B')} sent"
        mesh = f"{spell_sizes(item.candidate.mesh)} {item.candidate.layout}: {report.explain_loss(item)}"
        table.add_row(spell_seconds(item.seconds), f"{mesh}\n{parts}; {sizes}")
    return table
