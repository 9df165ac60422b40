"""`regard demo`: four tasks trained, what they attend to drawn, the goals checked, everything summed up."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

from regard.cli import FAILED, INTERRUPTED, overview, pictures
from regard.cli.commands import Demo, Inspect
from regard.cli.console import Console, UsageError, expected_errors, new_table
from regard.cli.continuation import describe_next, spell_command
from regard.cli.inspecting import run_inspecting
from regard.cli.training import advance_run
from regard.paths import find_file
from regard.training import history, loop, metrics, run_configs, runs, tasks

TASKS = ("threshold", "copy", "reverse", "digits")  # those that take seconds
PAGES = {"digits": "explorer.html", "copy": "explorer-copy.html"}


def run_demonstration(command: Demo, console: Console) -> int:
    """Train, draw and sum up; return 1 when a task misses its goal or diverges, 130 when interrupted."""
    start = time.perf_counter()
    out = command.out or Path("out") / ("demo-smoke" if command.smoke else "demo")
    if file := find_file(out):
        raise UsageError(f"--out: expected a directory, or a new name; got {out}, and {file} is a file")
    for folder in (out.absolute(), *out.absolute().parents):
        if runs.is_run(folder):
            raise UsageError(f"--out: expected a directory of its own; {folder} is a run")
    console.say(f"Four tasks on {overview.describe_devices()}; results go to {out}")
    trained: list[runs.Run] = []
    results: dict[str, dict[str, Any]] = {}
    for run in open_all(command, out):
        outcome = advance_run(command, console, run)
        if outcome is None:
            return FAILED
        if outcome.status == "interrupted":
            console.say(f"stopped with a checkpoint; {describe_next(console.words)}")
            return INTERRUPTED
        trained.append(run)
        results[run.task.name] = summarise(run, outcome)
    with expected_errors():
        console.say("drawing figures ...")
        figures = draw_figures(trained, out / "figures")
        console.say("writing pages ...")
        pages = write_pages(trained, out)
        summary = {
            "tasks": results,
            "seconds": round(time.perf_counter() - start, 3),
            "smoke": command.smoke,
            "figures": [str(figure.relative_to(out)) for figure in figures],
            "pages": [str(page.relative_to(out)) for page in pages],
            "versions": run_configs.read_versions(),
        }
        metrics.replace_text(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    console.emit("end", **summary)
    code = report(console, out, summary)
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


def summarise(run: runs.Run, outcome: loop.Outcome) -> dict[str, Any]:
    """Return a task's part of summary.json; a reused run keeps the seconds that it took when it ran."""
    goal, clocks = run.task.goal, ("seconds", "compile_seconds", "elapsed_seconds")
    return {
        "steps": outcome.step,
        "metric": goal.metric,
        "value": outcome.held_out[goal.metric],
        "goal": goal.bound,
        "reached": goal.is_reached(outcome.held_out),
        **{name: round(getattr(outcome, name), 3) for name in clocks},
        "held_out": outcome.held_out,
        "reused": outcome.status == "already finished",
        "run": run.directory.name,
    }


def draw_figures(trained: list[runs.Run], folder: Path) -> list[Path]:
    """Draw the figures of every task, then masks; return the files."""
    written = []
    for run in trained:
        model = runs.load_model(run.task, run.directory)
        drawn = pictures.draw_run(run.task, model, metrics.read(run.metrics_path))
        written += pictures.save_pictures(drawn, folder, "png", prefix=f"{run.task.name}-")
    common = itertools.chain(pictures.draw_sinusoids(64), pictures.draw_masks())
    return written + pictures.save_pictures(common, folder, "png")


def write_pages(trained: list[runs.Run], out: Path) -> list[Path]:
    """Write the explorer's page of every task that has one; return the files."""
    written, by_task = [], {run.task.name: run for run in trained}
    for name, page in PAGES.items():
        task, directory = by_task[name].task, by_task[name].directory
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


def report(console: Console, out: Path, summary: dict[str, Any]) -> int:
    """Print the table and what to try next; return the exit code."""
    smoke, results = summary["smoke"], summary["tasks"]
    table = new_table("task", "steps", "held out", "goal", "training", "compiling", "")
    for name, result in results.items():
        goal = tasks.TASKS[name].goal
        verdict = "" if smoke else "reached" if result["reached"] else "MISSED"
        measured = f"{goal.title} {result['value']:.4f}"
        times = f"{result['seconds']:.1f} s", f"{result['compile_seconds']:.1f} s"
        remark = " ".join(filter(None, [verdict, "(reused)" if result["reused"] else ""]))
        table.add_row(name, str(result["steps"]), measured, str(goal), *times, remark)
    console.say()
    console.say(table)
    count = len(summary["figures"])
    console.say(f"\n{count} figures in {out / 'figures'}, all numbers in {out / 'summary.json'}")
    note = ", a smoke test: goals are not checked" if smoke else ""
    console.say(f"{summary['seconds']:.1f} s in all{note}")
    if any(result["reused"] for result in results.values()):
        console.say("Reused runs were trained before; --force trains them again.")
    console.say(
        "\nNext:\n"
        "  regard train copy --seed 1 --out out/copy-1\n"
        f"  {spell_command('plot', out / 'copy', 'out/copy-1')}\n"
        f"  {spell_command('view', out / 'reverse')}\n"
        "  regard explain --shape 1,8,4096,64 --mask 'causal() & sliding_window(256)'"
    )
    missed = [name for name, result in results.items() if not result["reached"]]
    if missed and not smoke:
        goals = (f"{name} ({tasks.TASKS[name].goal.compare(results[name]['held_out'])})" for name in missed)
        console.fail(f"missed the goal: {', '.join(goals)}")
        return 1
    return 0
