"""Compiled updates: what a training step takes of devices that may be elsewhere, as their compiler says."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from regard.arguments import guided
from regard.training.programs import make_program
from regard.training.sharding import Deployment
from regard.training.task import Task


@dataclass(frozen=True)
class CompiledUpdate:
    """The compiler's own count of what each device holds while it runs an update.

    Attributes:
        device_kind: the kind of device, as its maker names it.
        devices: their number.
        mesh: how they divide the work, such as fsdp=4,tensor=2.
        state_bytes: parameters, optimizer state and batch, which are there from the beginning.
        working_bytes: all that is there in between, such as activations, gradients and gathered weights.
        peak_bytes: the most that is there at once, where the compiler says it, else the sum of both.
        seconds: how long compiling took.
    """

    device_kind: str
    devices: int
    mesh: str
    state_bytes: int
    working_bytes: int
    peak_bytes: int
    seconds: float


@guided
def compile_update(task: Task, deployment: Deployment, *, seed: int = 0) -> CompiledUpdate:
    """Compile the update of a training run for the devices of a mesh, and say what each of them holds.

    Nothing is computed and no array is made, so that the devices may be elsewhere.

    Args:
        task: what is trained, of `regard.training.tasks`; where it reads text, the text is read.
        deployment: the mesh, such as `Deployment.over(read_mesh("fsdp=8"), devices=devices)` with those of
            `regard.parallel.find_topology("v5e:2x4")`.
        seed: that of the run.

    Returns:
        The compiler's count.

    Raises:
        jax.errors.JaxRuntimeError: the compiler's words, such as that the memory of a device is too small.

    Example:
        >>> from regard.training import compiled_updates, mesh_specs, tasks
        >>> from regard.training.sharding import Deployment
        >>> deployment = Deployment.over(mesh_specs.read_mesh("data=*"))
        >>> update = compiled_updates.compile_update(tasks.shrink(tasks.Copy()), deployment)
        >>> update.mesh == deployment.name, update.state_bytes > 0
        (True, True)

    Reference: `jax.stages.Compiled.memory_analysis`.
    """
    program = make_program(task, seed, deployment)
    places = deployment.divide_state(program.shapes)
    state = jax.tree.map(_lay, program.shapes, places)
    fed: Any = ()
    if task.reads_rows:
        size = task.optimization.batch_size
        row = task.fetch(np.zeros(1, np.int64))
        shapes = {name: (size, *np.shape(array)[1:]) for name, array in row.items()}
        fed = {
            name: jax.ShapeDtypeStruct(shape, row[name].dtype, sharding=deployment.divide_batch(shape))
            for name, shape in shapes.items()
        }
    begun = time.monotonic()
    compiled = program.compile(program.update, state, np.int32(0), fed)
    seconds, memory = time.monotonic() - begun, compiled.memory_analysis()
    held = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    device = deployment.mesh.devices.flat[0]
    return CompiledUpdate(
        device.device_kind,
        math.prod(deployment.mesh.devices.shape),
        deployment.name,
        *held,
        getattr(memory, "peak_memory_in_bytes", 0) or sum(held),
        seconds,
    )


def _lay(leaf: Any, place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
