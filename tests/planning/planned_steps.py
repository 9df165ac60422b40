"""Training steps as planned and as compiled, for tests: run on eight devices; not a test by itself."""

import dataclasses
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np

from collectives import PARTITIONED, count_sent
from mesh_runs import deploy, loop, settings, text
from regard import planning

CHIP = dataclasses.replace(planning.CHIPS["h100"], memory_bytes=1e15)


def draw(seed):
    """A task over a vocabulary of some size, and a mesh of eight devices."""
    choose = random.Random(seed).choice
    sizes, order = {}, random.Random(seed).sample(("data", "fsdp", "sequence", "tensor"), 4)
    for axis in order[:-1]:
        rest = 8 // int(np.prod([*sizes.values()], dtype=int))
        sizes[axis] = choose([size for size in (1, 2, 4, 8) if size <= rest])
    sizes[order[-1]] = 8 // int(np.prod([*sizes.values()]))
    key_heads = sizes["tensor"] * choose([1, 2, 3])
    scan_layers = choose([True, True, False])
    model = settings.DecoderSizes(
        d_model=choose([64, 96, 160, 256]),
        num_key_heads=key_heads,
        num_heads=key_heads * choose([1, 2, 4]),
        head_dim=choose([8, 16, 32]),
        d_ff=8 * choose(range(12, 80)),
        num_layers=choose([2, 3, 5]),
        scan_layers=scan_layers,
        # Unrolled, XLA's CPU merges what would be computed again.
        remat=choose([None, "full", "dots_saveable"]) if scan_layers else None,
        tied_output=choose([True, False]),
    )
    parts = choose([1, 1, 2])
    options = {"precision": choose(["float32", "bfloat16"]), "accumulate_steps": parts}
    batch = sizes["data"] * sizes["fsdp"] * parts * choose([1, 2, 4])
    optimization = settings.Optimization(batch_size=batch, **options)
    task = dataclasses.replace(text(64), length=8 * choose([13, 32, 64, 96]))
    task = dataclasses.replace(task, model=model, optimization=optimization)
    vars(task)["vocabulary"] = SimpleNamespace(size=choose([257, 1000, 2048, 5003]), mark=0)
    return task, sizes


def compile_step(task, sizes):
    """Bytes that a device of the trainer's own program holds, and sends."""
    program = loop.make_program(task, 0, deploy(",".join(f"{axis}={size}" for axis, size in sizes.items())))
    places = program.deployment.divide_state(program.shapes)
    state = jax.tree.map(lambda leaf, place: leaf.update(sharding=place), program.shapes, places)
    rows = (task.optimization.batch_size, task.length)
    fed = {"inputs": (rows, np.int32), "targets": (rows, np.int32), "counted": (rows, bool)}
    fed = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=program.deployment.divide_batch(shape))
        for name, (shape, dtype) in {**fed, "bytes": (rows[:1], np.int32)}.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        options = PARTITIONED | {"xla_dump_to": folder, "xla_backend_optimization_level": 0}
        compiled = program.compile(program.update, state, np.int32(0), fed, options=options)
        (written,) = Path(folder).glob("*jit_update*before_all-reduce-promotion.txt")
        sent = count_sent(written.read_text(), 8)
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes, sum(sent.values())


def compare(*seeds):
    """Say of each setting what is planned over what is compiled: of memory, of bytes sent."""
    lines = []
    for seed in seeds:
        task, sizes = draw(seed)
        held, sent = compile_step(task, sizes)
        asked = task.optimization
        options = {"precision": asked.precision, "accumulate_steps": asked.accumulate_steps, "fixed": sizes}
        options |= {"length": task.length, "batch": asked.batch_size, "devices": 8, "chip": CHIP}
        step = planning.plan_step(task.config, **options)
        shares = sum(step.held.values()) / held, sum(step.sent.values()) / sent
        lines.append(" ".join(map(str, (seed, *shares, sizes, asked, task.model))))
    return "\n".join(lines)
