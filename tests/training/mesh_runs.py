"""Trainings over a mesh, for tests: run in a process of its own, which has eight devices; not a test."""

import dataclasses
import re
import tempfile
from pathlib import Path

import jax
import numpy as np

from mesh_cases import *  # noqa: F403
from regard.training import checkpoints, loop, runs, settings, tasks
from regard.training.mesh_specs import read_mesh
from regard.training.programs import make_feed
from regard.training.sharding import Deployment
from small_runs import assert_same_arrays, last_arrays, read_lines, stop_after

STEPS = 4
CADENCE = settings.Cadence(log_every=1, evaluate_every=3, checkpoint_every=3, heads_every=0)
OPTIMIZATION = settings.Optimization(steps=11, batch_size=16, learning_rate=0.01, weight_decay=0.1)


def copy(length, dropout_rate=0.0, **changes):
    """Eleven steps; a row is one longer than `length`, a table has 12 rows."""
    model = settings.Sizes(d_model=24, num_heads=4, d_ff=40, dropout_rate=dropout_rate)
    options = {"model": model, "optimization": dataclasses.replace(OPTIMIZATION, **changes)}
    return tasks.Copy(vocab_size=11, length=length, held_out_size=32, cadence=CADENCE, **options)


def text(length, **sizes):
    folder, random = Path(tempfile.mkdtemp()), np.random.default_rng(5)
    for index in range(7):
        chosen = random.choice(["low", "lower", "tide", "naïve", "of", "the"], 10 + 2 * index)
        (folder / f"{index}.txt").write_text(" ".join(chosen), encoding="utf-8")
    loop = {"num_layers": 3, "scan_layers": True, "remat": "dots_saveable"}
    model = settings.DecoderSizes(d_model=24, num_heads=4, d_ff=40, **loop, **sizes)
    options = {"model": model, "optimization": OPTIMIZATION, "cadence": CADENCE}
    return tasks.Text(files=(str(folder),), length=length, held_out_fraction=0.3, **options)


def deploy(spec):
    return None if spec is None else Deployment.over(read_mesh(spec))


def measure(task, spec):
    """Loss, gradient norm and loads of the first steps, then of held-out data; and the last state."""
    program = loop.make_program(task, 0, deploy(spec))
    state = program.start()
    feed, held_out = make_feed(task, 0, program.deployment), program.place(task.held_out)
    update = program.compile(program.update, state, np.int32(0), feed(0))
    numbers = []
    for step in range(STEPS):
        state, measured = update(state, np.int32(step), feed(step))
        numbers += [float(measured.get(name, 0)) for name in ("loss", "grad_norm", "expert_load")]
    found = program.compile(program.evaluate, state.params, held_out)(state.params, held_out)
    return np.array([*numbers, *(float(found[name]) for name in sorted(found))]), state


def check_losses(task, *specs):
    """What one device computes, and the parameters too, but for rounding."""
    expected, _ = measure(task, None)
    assert expected[0] != expected[3]
    for spec in specs:
        found, state = measure(task, spec)
        np.testing.assert_allclose(found, expected, rtol=2e-5, err_msg=spec)
        check_shards(state, spec)


def check_shards(state, spec):
    """Every matrix, with its two moments, is kept once among the devices that divide it."""
    sizes = read_mesh(spec).fit(8)
    leaves = checkpoints._leaves(state)
    assert sum("kernel" in name for name in leaves) > 10
    for name, leaf in leaves.items():
        own = leaf.addressable_shards[0].data.size
        parts = sizes.fsdp if leaf.ndim > 1 else 1
        layers = ("projection/kernel", "widen/kernel", "narrow/kernel", "gate/kernel", "table/embedding")
        parts *= sizes.tensor if any(part in name for part in layers) else 1
        parts *= sizes.expert if name.endswith("/kernels/value") else 1
        if leaf.ndim > 1 and "head" not in name:
            assert own * parts == leaf.size, (spec, name, leaf.sharding)
        for shard in leaf.addressable_shards:
            assert shard.data.size == own


def check_own_rows(task, batch_size):
    """No device makes more than its rows of a batch: nothing in the program is as long as the whole one."""
    deployment = deploy("data=4,fsdp=2")

    def draw(divide):
        compiled = jax.jit(lambda rng: divide(task.make_batch(rng, batch_size))).lower(KEY).compile()
        return compiled(KEY), compiled.as_text()

    batch, program = draw(deployment.constrain)
    check_rows(batch, task.make_batch(KEY, batch_size), batch_size)
    rows = re.compile(rf"\[{batch_size}[,\]]")
    assert not rows.search(program)
    assert rows.search(draw(lambda batch: batch)[1])


def check_fetched_rows(task, batch_size):
    """No more rows are read than those of one device at a time, and each once."""
    fetched = []

    def fetch(chosen):
        fetched.append(len(chosen))
        return task.fetch(chosen)

    chosen = task.choose(KEY, batch_size)
    check_rows(deploy("data=2,fsdp=2,sequence=2").feed(fetch, chosen), task.fetch(chosen), batch_size, 4)
    assert fetched == [1, *[batch_size // 4] * 4]


def check_rows(batch, alone, batch_size, parts=8):
    for name, array in batch.items():
        np.testing.assert_array_equal(array, alone[name])
        assert array.addressable_shards[0].data.shape[0] == batch_size // parts


KEY = jax.random.key(3)


def train(directory, task, spec, *, seed=0, stop=None):
    deployment = deploy(spec)
    run = runs.open_run(directory, task, seed=seed, mesh=deployment and deployment.name)
    return loop.train(run, deployment=deployment, **({} if stop is None else {"stop": stop_after(stop)}))


def check_resumed(task, first, *others):
    """Begun on one mesh: goes on there bit for bit, elsewhere but for rounding."""
    folder = Path(tempfile.mkdtemp())
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    train(folder / "whole", task, first)
    expected = read_lines(folder / "whole")
    for number, spec in enumerate((first, *others)):
        directory = folder / str(number)
        assert train(directory, task, first, stop=5).step == 5
        assert train(directory, task, spec).status == "finished"
        found = read_lines(directory)
        if spec == first:
            assert found == expected
            assert_same_arrays(last_arrays(directory), last_arrays(folder / "whole"))
            continue
        assert [line["step"] for line in found] == [line["step"] for line in expected]
        assert found[:5] == expected[:5]
        assert found[5:] != expected[5:] or spec is None, "another mesh rounds otherwise: were both the same?"
        for line, wanted in zip(found, expected, strict=True):
            assert line.keys() == wanted.keys()
            np.testing.assert_allclose(line["loss"], wanted["loss"], rtol=1e-4)


def check_experts():
    """A mixture of experts over meshes: the output and gradients of one device, kernels divided by rule.

    Along "expert" no device has the kernels of all, which nothing but they is as long as.
    """
    from flax import nnx

    from layer_oracle import build_drawn
    from regard.layers import Experts

    layer = build_drawn(Experts, 24, 10, num_experts=6, experts_per_token=2, router_kind="sigmoid")
    layer.set_attributes(counts_loads=True, balance_loss=40.0)
    graph, state = nnx.split(layer)
    x = np.random.default_rng(0).normal(size=(4, 46, 24)).astype(np.float32)
    run = jax.value_and_grad(lambda state, x: (nnx.merge(graph, state)(x) ** 2).sum(), argnums=(0, 1))
    whole = jax.jit(run)
    flops = whole.lower(state, x).compile().cost_analysis()["flops"]
    for spec, kept in (
        ("data=2,fsdp=2,tensor=2", (None, "fsdp", "tensor")),
        ("data=4,sequence=2", (None,) * 3),
        ("fsdp=2,expert=2,tensor=2", ("expert", "fsdp", "tensor")),
        ("expert=2,sequence=4", ("expert", None, None)),
    ):
        deployment = deploy(spec)
        places = deployment.divide_state(state)
        assert tuple(nnx.to_pure_dict(places)["widen"]["kernels"].spec) == kept
        given = (jax.device_put(state, places), jax.device_put(x, deployment.divide_batch(x.shape)))
        with deployment.within():
            divided = jax.jit(lambda state, x: run(deployment.gather(state), x)).lower(*given).compile()  # noqa: B023
        share = divided.cost_analysis()["flops"] / flops
        assert share < 1.3 / 8, f"each device computes its own tokens: {share}"
        assert ("f32[6,24," in divided.as_text()) == ("expert" not in spec)
        compare = lambda one, other: np.testing.assert_allclose(one, other, 0, 1e-5 * np.abs(other).max())
        jax.tree.map(compare, divided(*given), whole(state, x))
