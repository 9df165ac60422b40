"""Training steps as planned and as compiled, for tests: run on eight devices; not a test by itself."""

import dataclasses
import itertools
import math
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np

from collectives import PARTITIONED, count_sent
from mesh_runs import deploy, loop, make_feed, settings, text
from regard import planning

CHIP = dataclasses.replace(planning.CHIPS["h100"], memory_bytes=1e15, platform="cpu")
MESHES = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(sizes) == 8]


def draw(seed):
    """A task, the size of its vocabulary, and a mesh."""
    choose = random.Random(seed).choice
    mesh = dict(zip(("data", "fsdp", "sequence", "tensor"), choose(MESHES), strict=True))
    sizes = {"d_model": choose([64, 96, 160, 256]), "head_dim": choose([8, 16, 32])}
    sizes |= {"num_layers": choose([2, 3, 5]), "d_ff": 8 * choose(range(12, 80))}
    sizes |= {"num_key_heads": mesh["tensor"] * choose([1, 2, 3]), "scan_layers": choose([0, 1, 1]) > 0}
    sizes["remat"] = choose([None, "full", "dots_saveable"]) if sizes["scan_layers"] else None
    heads = sizes["num_key_heads"] * choose([1, 2, 4])
    model = settings.DecoderSizes(num_heads=heads, tied_output=choose([0, 1]) > 0, **sizes)
    parts, precision = choose([1, 1, 2]), choose(["float32", "bfloat16"])
    if seed >= 30:  # Experts, divided where rows would be.
        mesh |= {"data": 1, "expert": mesh["data"]}
        experts = {"num_experts": 8, "experts_per_token": choose([1, 2, 4]), "expert_width": sizes["d_ff"]}
        model = dataclasses.replace(model, scan_layers=True, **experts)
    if seed >= 100:  # Latents, a shared expert and the delta rule; from 200 on parts of a sequence, too.
        is_whole = seed % 2 and seed < 200
        mesh |= {"sequence": 1, "data": mesh.get("data", 1) * mesh["sequence"]} if is_whole else {}
        more = {"latent_dim": 48, "latent_rotary_dim": 8, "latent_query_dim": choose([None, 40])}
        more |= {"num_key_heads": None, "shared_width": sizes["d_ff"], "mixers": ("attention",)}
        if seed % 2:
            more |= {"mixers": (choose(["gated_delta", "kimi_delta"]), "attention"), "num_layers": 4}
        model = dataclasses.replace(model, **more)
    batch = mesh["data"] * mesh["fsdp"] * mesh.get("expert", 1) * parts * choose([1, 2, 4])
    asked = settings.Optimization(batch_size=batch, accumulate_steps=parts, precision=precision)
    task = dataclasses.replace(text(choose([104, 128, 256])), model=model, optimization=asked)
    return task, choose([257, 1000, 2048, 5003]), mesh


def compile_update(task, vocabulary, mesh):
    """Bytes that a device of the trainer's own program holds, and sends."""
    deployment = deploy(",".join(f"{axis}={size}" for axis, size in mesh.items()))
    fed = make_feed(task, 0, deployment)(0)
    vars(task)["vocabulary"] = SimpleNamespace(size=vocabulary, mark=256)
    program = loop.make_program(task, 0, deployment)
    places = deployment.divide_state(program.shapes)
    state = jax.tree.map(lambda leaf, place: leaf.update(sharding=place), program.shapes, places)
    with tempfile.TemporaryDirectory() as folder:
        options = PARTITIONED | {"xla_dump_to": folder, "xla_backend_optimization_level": 0}
        compiled = program.compile(program.update, state, np.int32(0), fed, options=options)
        (written,) = Path(folder).glob("*jit_update*before_all-reduce-promotion.txt")
        sent, memory = count_sent(written.read_text(), 8), compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes, sum(sent.values())


def compare(*seeds):
    """Say of each setting what is planned over what is compiled: of memory, and of bytes sent."""
    for seed, (task, vocabulary, mesh) in zip(seeds, map(draw, seeds), strict=True):
        (held, sent), asked = compile_update(task, vocabulary, mesh), task.optimization
        options = {"length": task.length, "batch": asked.batch_size, "devices": 8, "chip": CHIP}
        options |= {"fixed": mesh, "accumulate_steps": asked.accumulate_steps, "precision": asked.precision}
        steps = [planning.plan_step(task.config, **options | more) for more in ({}, {"precision": "float32"})]
        # XLA's CPU computes bfloat16 in float32, and keeps some in it: anything between is as planned.
        least, most = (sum(step.held.values()) for step in steps)
        shares = min(max(held, least), most) / held, sum(steps[0].sent.values()) / sent
        yield " ".join(map(str, (seed, *shares, vocabulary, task.length, mesh, asked, task.model)))
