"""What runs where: devices, model, attention and data of a training, said before it starts."""

import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.table import Table

import regard
from regard import parallel
from regard.cli.console import LABEL_WIDTH, Console
from regard.training import runs
from regard.training.sharding import Deployment
from regard.training.tasks import Task


def print_overview(console: Console, task: Task, run: runs.Run, deployment: Deployment | None = None) -> None:
    """Prints where and with what a run is about to train."""
    shapes = nnx.eval_shape(lambda: task.make_model(nnx.Rngs(0)))
    arrays = dict(_walk_parameters(shapes))
    total = sum(leaf.size for leaf in arrays.values())
    optimization = task.optimization
    first_line = (type(task).__doc__ or "").splitlines()[0]
    console.note("task", f"{task.name}: {first_line}")
    console.note("devices", describe_devices())
    if deployment is not None:
        console.note("mesh", describe_mesh(deployment, nnx.state(shapes, nnx.Param)))
    console.note("model", f"{type(shapes).__name__}, {total:,} parameters, {jnp.dtype(jnp.float32).name}")
    console.say(_tabulate(arrays))
    for line in describe_attention(task, deployment):
        console.note("attention", line)
    data = task.describe_data()
    console.note("training", f"{optimization.steps:,} steps of {data.pop('batch')}, {_name_rate(task)}")
    for label, text in data.items():
        console.note(label, text)
    console.note("output", f"{run.directory} ({describe_start(run)})")
    if run.note:
        console.note("note", run.note)
    console.say()


def describe_devices() -> str:
    """The devices that JAX uses, by platform."""
    devices = jax.devices()
    kind = f"cpu with {os.cpu_count()} cores" if devices[0].platform == "cpu" else devices[0].device_kind
    return f"{len(devices)} x {kind}, jax {jax.__version__}"


def describe_mesh(deployment: Deployment, params: Any) -> str:
    """The mesh, and how much of the parameters a device keeps."""
    own, whole = deployment.count_bytes(params)
    several = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    kept = "all parameters" if own == whole else f"1/{whole / own:.1f} of the parameters"
    return f"{deployment.name}{several}; {kept} on each device"


def describe_start(run: runs.Run) -> str:
    """Where a run's parameters come from."""
    if run.start is None:
        return "new run"
    if run.source is not None:
        return f"starts from step {run.start.step} of {run.source}"
    return f"goes on from step {run.start.step}"


def describe_attention(task: Task, deployment: Deployment | None = None) -> Iterator[str]:
    """One line per kind of attention in the task's model: shapes, the backend or plan and why."""
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


def _walk_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """Every parameter with its dotted path."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.state(model, nnx.Param))[0]:
        yield jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"), leaf


def _tabulate(arrays: dict[str, Any]) -> Table:
    """Parameters by module, those inside a block by its parts."""
    modules: dict[str, list[Any]] = {}
    for path, leaf in arrays.items():
        modules.setdefault(_name_module(path), []).append(leaf)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("", min_width=LABEL_WIDTH - 3)
    table.add_column("module")
    table.add_column("arrays", justify="right")
    table.add_column("parameters", justify="right")
    for module, leaves in modules.items():
        table.add_row("", module, str(len(leaves)), f"{sum(leaf.size for leaf in leaves):,}")
    return table


def _name_module(path: str) -> str:
    """The module of an array; inside a block, the block's part that holds it."""
    parts = path.split(".")[:-1]
    block = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: block + 2])


def _name_rate(task: Task) -> str:
    """The learning rate and its course."""
    optimization = task.optimization
    rise = f"{optimization.warmup_steps} warm-up steps, then " if optimization.warmup_steps else ""
    return f"Adam at {optimization.learning_rate:g}, {rise}{optimization.schedule}"
