"""`regard demo`: four tasks trained, what they attend to drawn, the goals checked, everything summed up."""

import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.cli import overview, pictures
from regard.cli.commands import Demo, Inspect
from regard.cli.console import Console, UsageError, expected_errors, new_table
from regard.cli.continuation import describe_next, spell_command
from regard.cli.inspecting import run_inspecting
from regard.cli.training import advance_run
from regard.training import history, loop, metrics, run_configs, runs, tasks

TASKS = ("threshold", "copy", "reverse", "digits")  # those that take seconds
PAGES = {"digits": "explorer.html", "copy": "explorer-copy.html"}


@dataclass(frozen=True)
class Entry:
    """One trained task of the demo."""

    task: tasks.Task
    run: runs.Run
    outcome: loop.Outcome

    @property
    def reused(self) -> bool:
        return self.outcome.status == "already finished"

    @property
    def reached(self) -> bool:
        return self.task.goal.is_reached(self.outcome.held_out)

    def summarise(self) -> dict[str, Any]:
        """Return the task's part of summary.json; a reused run keeps the seconds that it took when it ran."""
        goal, outcome = self.task.goal, self.outcome
        clocks = ("seconds", "compile_seconds", "elapsed_seconds")
        return {
            "steps": outcome.step,
            "metric": goal.metric,
            "value": outcome.held_out[goal.metric],
            "goal": goal.bound,
            "reached": self.reached,
            **{name: round(getattr(outcome, name), 3) for name in clocks},
            "held_out": outcome.held_out,
            "reused": self.reused,
            "run": self.run.directory.name,
        }


def run_demonstration(command: Demo, console: Console) -> int:
    """Train, draw and sum up; return 1 when a task misses its goal or diverges, 130 when interrupted."""
    start = time.perf_counter()
    out = command.out or Path("out") / ("demo-smoke" if command.smoke else "demo")
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out: expected a directory, or a new name; got {out}, which is a file")
    for folder in (out.absolute(), *out.absolute().parents):
        if runs.is_run(folder):
            raise UsageError(f"--out: expected a directory of its own; {folder} is a run")
    console.say(f"Four tasks on {overview.describe_devices()}; results go to {out}")
    entries: list[Entry] = []
    for run in open_all(command, out):
        outcome = advance_run(console, run)
        if outcome is None:
            return 1
        if outcome.status == "interrupted":
            console.say(f"stopped with a checkpoint; {describe_next(console.words)}")
            return 130
        entries.append(Entry(run.task, run, outcome))
    with expected_errors():
        console.say("drawing figures ...")
        figures = draw_figures(entries, out / "figures")
        console.say("writing pages ...")
        pages = write_pages(entries, out)
        seconds = time.perf_counter() - start
        summary = {
            "tasks": {entry.task.name: entry.summarise() for entry in entries},
            "seconds": round(seconds, 3),
            "smoke": command.smoke,
            "figures": [str(figure.relative_to(out)) for figure in figures],
            "pages": [str(page.relative_to(out)) for page in pages],
            "versions": run_configs.read_versions(),
        }
        metrics.replace_text(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    console.emit("end", **summary)
    code = report(console, out, entries, figures, seconds, smoke=command.smoke)
    if not command.smoke:
        pages += show_pretrained(console, out)
    console.say("\nTo look around in what the models attend to, open in a browser:")
    for page in pages:
        console.say(f"  {page}")
    return code


def open_all(command: Demo, out: Path) -> list[runs.Run]:
    """Open every task's run, refused together or not at all: nobody waits a minute for a refusal.

    Runs to be replaced are deleted at once, so that the command that goes on after a stop reuses none.
    """
    chosen = [tasks.TASKS[name]() for name in TASKS]
    chosen = [tasks.shrink(task) for task in chosen] if command.smoke else chosen
    options = {"seed": command.seed, "force": command.force}
    with expected_errors():
        opened = [runs.open_run(out / task.name, task, **options) for task in chosen]
        return [run.clear() for run in opened]


def draw_figures(entries: list[Entry], folder: Path) -> list[Path]:
    """Draw the figures of every task, then masks; return the files."""
    written = []
    for entry in entries:
        model = runs.load_model(entry.task, entry.run.directory)
        drawn = pictures.draw_run(entry.task, model, metrics.read(entry.run.metrics_path))
        written += pictures.save_pictures(drawn, folder, "png", prefix=f"{entry.task.name}-")
    common = itertools.chain(pictures.draw_sinusoids(64), pictures.draw_masks())
    return written + pictures.save_pictures(common, folder, "png")


def write_pages(entries: list[Entry], out: Path) -> list[Path]:
    """Write the explorer's page of every task that has one; return the files."""
    written, trained = [], {entry.task.name: entry for entry in entries}
    for name, page in PAGES.items():
        task, directory = trained[name].task, trained[name].run.directory
        trace = task.watch(runs.load_model(task, directory))
        written.append(trace.explore(out / page, training=history.training_document(directory)))
    return written


def show_pretrained(console: Console, out: Path) -> list[Path]:
    """Inspect a pretrained model and return its page; without one, say how to get it."""
    from regard.interop import huggingface

    console.say()
    try:
        huggingface.find_minilm()
    except FileNotFoundError:
        console.say("To look into a trained model (90 MB): make pretrained, then regard inspect")
        return []
    page = out / "explorer-minilm.html"
    run_inspecting(Inspect(out=out / "pretrained"), console, page)
    return [page]


def report(
    console: Console, out: Path, entries: list[Entry], figures: list[Path], seconds: float, *, smoke: bool
) -> int:
    """Print the table and what to try next; return the exit code."""
    table = new_table("task", "steps", "held out", "goal", "training", "compiling", "")
    for entry in entries:
        goal, outcome = entry.task.goal, entry.outcome
        verdict = "" if smoke else "reached" if entry.reached else "MISSED"
        measured = f"{goal.title} {outcome.held_out[goal.metric]:.4f}"
        times = f"{outcome.seconds:.1f} s", f"{outcome.compile_seconds:.1f} s"
        remark = " ".join(filter(None, [verdict, "(reused)" if entry.reused else ""]))
        table.add_row(entry.task.name, str(outcome.step), measured, str(goal), *times, remark)
    console.say()
    console.say(table)
    console.say(f"\n{len(figures)} figures in {out / 'figures'}, all numbers in {out / 'summary.json'}")
    console.say(f"{seconds:.1f} s in all" + (", a smoke test: goals are not checked" if smoke else ""))
    if any(entry.reused for entry in entries):
        console.say("Reused runs were trained before; --force trains them again.")
    console.say(
        "\nNext:\n"
        "  regard train copy --seed 1 --out out/copy-1\n"
        f"  {spell_command('plot', out / 'copy', 'out/copy-1')}\n"
        f"  {spell_command('view', out / 'reverse')}\n"
        "  regard explain --shape 1,8,4096,64 --mask 'causal() & sliding_window(256)'"
    )
    missed = [entry for entry in entries if not entry.reached]
    if missed and not smoke:
        goals = (f"{entry.task.name} ({entry.task.goal.compare(entry.outcome.held_out)})" for entry in missed)
        console.fail(f"missed the goal: {', '.join(goals)}")
        return 1
    return 0
