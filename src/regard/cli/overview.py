"""The overview before a training: devices, model, attention and data."""

import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.padding import Padding

import regard
from regard import parallel
from regard.cli.console import LABEL_WIDTH, Console, count_things, new_table
from regard.training import runs
from regard.training.sharding import Deployment
from regard.training.tasks import Task


def print_overview(console: Console, run: runs.Run, deployment: Deployment | None = None) -> None:
    """Print where and with what a run is about to train."""
    task = run.task
    shapes = nnx.eval_shape(lambda: task.make_model(nnx.Rngs(0)))
    params = nnx.state(shapes, nnx.Param)
    modules = _count_parameters(params)
    table = new_table("module", "arrays", "parameters")
    for module, sizes in modules.items():
        table.add_row(module, str(len(sizes)), f"{sum(sizes):,}")
    first_line = (type(task).__doc__ or "").strip().splitlines()[:1]
    console.note("task", ": ".join([task.name, *first_line]))
    console.note("devices", describe_devices())
    if deployment is not None:
        console.note("mesh", describe_mesh(deployment, params))
    total = sum(map(sum, modules.values()))
    console.note("model", f"{type(shapes).__name__}, {total:,} parameters, {jnp.dtype(jnp.float32).name}")
    console.say(Padding.indent(table, LABEL_WIDTH))
    for line in describe_attention(task, deployment):
        console.note("attention", line)
    data, optimization = task.describe_data(), task.optimization
    rise = f"{optimization.warmup_steps} warm-up steps, then " if optimization.warmup_steps else ""
    rate = f"Adam at {optimization.learning_rate:g}, {rise}{optimization.schedule}"
    console.note("training", f"{count_things(optimization.steps, 'step')} of {data.pop('batch')}, {rate}")
    for label, text in data.items():
        console.note(label, text)
    console.note("output", f"{run.directory} ({describe_start(run)})")
    if run.note:
        console.note("note", run.note)
    console.say()


def describe_devices() -> str:
    """Describe the devices that JAX uses."""
    devices = jax.devices()
    kind = f"cpu with {os.cpu_count()} cores" if devices[0].platform == "cpu" else devices[0].device_kind
    return f"{len(devices)} x {kind}, jax {jax.__version__}"


def describe_mesh(deployment: Deployment, params: Any) -> str:
    """Describe the mesh, and the share of the parameters that a device keeps."""
    kept_bytes, all_bytes = deployment.count_bytes(params)
    several = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    several += f", {deployment.outer} between slices" if deployment.outer else ""
    share = (
        "all parameters" if kept_bytes == all_bytes else f"1/{all_bytes / kept_bytes:.1f} of the parameters"
    )
    return f"{deployment.name}{several}; {share} on each device"


def describe_start(run: runs.Run) -> str:
    """Say where a run's parameters come from."""
    if run.start is None:
        return "new run"
    step = f"from step {run.start.step}"
    return f"goes on {step}" if run.source is None else f"starts {step} of {run.source}"


def describe_attention(task: Task, deployment: Deployment | None = None) -> Iterator[str]:
    """Yield a line per kind of attention in the task's model: shapes, the backend or plan and why."""
    config, rows = task.config, task.optimization.batch_size
    for name, (queries, keys, mask) in task.attention_calls().items():
        query = jax.ShapeDtypeStruct((rows, config.num_heads, queries, config.head_width), jnp.float32)
        key = jax.ShapeDtypeStruct((rows, config.num_heads, keys, config.head_width), jnp.float32)
        report = regard.explain(query, key, key, mask=mask)
        masked = f", {report.mask.split('(')[0]} mask" if report.mask else ""
        chosen = f"{report.backend}, {report.reason}"
        if deployment is not None and deployment.mesh.shape["sequence"] > 1:
            with deployment.within():
                plan = parallel.explain(query, key, key, mask=mask)
            chosen = f"{plan.plan} over {plan.devices} devices, {plan.reason}"
        yield f"{name} {query.shape} on {keys} keys{masked}: {chosen}"


def _count_parameters(params: Any) -> dict[str, list[int]]:
    """Return the sizes of the arrays of each module, or of each part of a block."""
    modules: dict[str, list[int]] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        names = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value").split(".")[:-1]
        block = next((index for index, name in enumerate(names) if name.isdigit()), len(names))
        modules.setdefault(".".join(names[: block + 2]), []).append(leaf.size)
    return modules
