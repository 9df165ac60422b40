"""Programs for devices that are elsewhere: what is chosen for them, lowered, and compiled."""

import contextlib
import re
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from mesh_cases import on_eight_devices
from regard import attend, explain, masks, parallel
from regard.engine.backends import cudnn
from regard.engine.platforms import Platform, find_platform
from regard.engine.softmax import products

TPU = AbstractDevice("TPU v5 lite", 1, "tpu")
H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
SHAPE = (2, 3, 1031, 64)
compiles_for_tpus = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")


def shape_on(device, kind=AxisType.Auto, count=1):
    mesh = AbstractMesh((count,), ("x",), (kind,), abstract_device=device)
    return jax.ShapeDtypeStruct(SHAPE, "bfloat16", sharding=NamedSharding(mesh, PartitionSpec()))


def causal(x, **options):
    return attend(x, x, x, mask=masks.causal(), **options)


def test_a_call_is_for_the_devices_that_its_arrays_lie_on():
    here, there = jax.ShapeDtypeStruct(SHAPE, "bfloat16"), shape_on(TPU)
    assert explain(here, here, here).backend in ("tiled", "dense")
    assert explain(there, there, there).backend == "splash_tpu"
    several = explain(*[shape_on(TPU, count=2)] * 3)
    assert "use regard.parallel.use(mesh, ...)" in several.refusals["splash_tpu"]
    offsets = {"query_offset": np.array([3, 5]), "key_offset": np.array([1, 2])}
    moved = explain(there, there, there, mask=masks.causal(), **offsets)
    assert "offsets that are arrays" in moved.refusals["splash_tpu"]
    call, mesh = jax.jit(causal), there.sharding.mesh
    for platform in ("cpu", "tpu", "cpu", "tpu"):  # neither is taken for the other
        context = jax.sharding.use_abstract_mesh(mesh) if platform == "tpu" else contextlib.nullcontext()
        with context:
            text = call.trace(here).lower(lowering_platforms=(platform,)).as_text()
        assert ("tpu_custom_call" in text) == (platform == "tpu")
    assert find_platform() == Platform("cpu", "cpu")


def test_a_gpu_that_is_elsewhere_is_known_by_its_name(monkeypatch):
    arrays = [shape_on(H100)] * 3
    monkeypatch.setattr(cudnn._inner(), "check_cudnn_version", lambda: 91000)
    cudnn._read_capability.cache_clear()
    assert explain(*arrays).backend == "cudnn"

    def fail():
        raise RuntimeError("no cuDNN")

    monkeypatch.setattr(cudnn._inner(), "check_cudnn_version", fail)
    cudnn._read_capability.cache_clear()
    words = "to compile it for a GPU that is elsewhere takes its library: no cuDNN"
    assert explain(*arrays).refusals["cudnn"] == words
    old = [shape_on(AbstractDevice("NVIDIA Tesla P100", 56, "gpu"))] * 3
    assert explain(*old).refusals["cudnn"] == "it needs an NVIDIA GPU, this is NVIDIA Tesla P100"
    cudnn._read_capability.cache_clear()


def test_a_program_is_traced_for_what_it_is_lowered_for(monkeypatch):
    """A kernel's batch is divided by a maximum on CPUs alone."""
    monkeypatch.setattr(products, "BATCH_ON_ONE_CORE", True)
    x = jax.ShapeDtypeStruct((2, 3, 131, 64), "float32")
    traced = jax.jit(lambda x: causal(x, backend="tiled")).trace(x)
    texts = [traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "tpu")]
    assert texts[0].count("stablehlo.abs") > texts[1].count("stablehlo.abs")


def test_each_device_of_a_mesh_runs_its_own_kernel():
    """Under `parallel.use`, and inside a `shard_map` that checks what varies."""
    mesh = AbstractMesh((2, 1), ("x", "y"), (AxisType.Auto,) * 2, abstract_device=TPU)
    x = jax.ShapeDtypeStruct((4, 2, 256, 128), "bfloat16", sharding=NamedSharding(mesh, PartitionSpec("x")))
    with parallel.use(mesh, "y", batch_axis="x"):
        assert "regard_plain_kernel" in str(jax.jit(causal).trace(x).jaxpr)
    part = jax.shard_map(causal, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"))
    assert "regard_plain_kernel" in str(jax.jit(part).trace(x).jaxpr)


DIVIDED = """
import jax
from jax.sharding import NamedSharding, PartitionSpec
from regard import attend, masks, parallel
places = NamedSharding(parallel.build_mesh({"x": 8}), PartitionSpec("x"))
x = jax.ShapeDtypeStruct((8, 2, 2048, 64), "bfloat16", sharding=places)
traced = jax.jit(lambda x: attend(x, x, x, mask=masks.causal())).trace(x)
for platform in ("cpu", "tpu"):
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    print("CustomSPMDPartitioning" in text, "custom_call @tpu" in text)
"""


def test_of_divided_arrays_no_custom_partitioning_is_asked_of_tpus():
    assert on_eight_devices(DIVIDED).splitlines() == ["True False", "False False"]


@compiles_for_tpus
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_divided_calls_compile_for_tpus_and_send_nothing(kind):
    """The compiler for TPUs knows no custom partitioning: jax#38196."""
    devices = np.array(parallel.find_topology("v5e:2x2"))[:, None]
    mesh = Mesh(devices, ("x", "y"), (kind,) * 2)

    def compile_for(function, length, dtype):
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        x = jax.ShapeDtypeStruct((4, 2, length, 128), dtype, sharding=sharding)
        with jax.set_mesh(mesh):
            compiled = jax.jit(function).lower(x).compile()
        text = compiled.as_text()
        sent = re.findall(r"(all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(", text)
        return text.count("tpu_custom_call"), sent, compiled.memory_analysis().temp_size_in_bytes

    kernels, sent, held = compile_for(causal, 4096, "float32")
    assert (kernels, sent) == (0, [])
    assert held < 2 * 4096**2 * 4 / 2  # of the scores that a device would have
    grad = jax.grad(lambda x: causal(x).astype(jnp.float32).sum())
    assert compile_for(grad, 2048, "float32")[:2] == (0, [])
    assert compile_for(causal, 2048, "bfloat16")[0] == 0
    if kind == AxisType.Auto:
        with parallel.use(mesh, "y", batch_axis="x"):
            assert compile_for(grad, 2048, "bfloat16")[:2] == (3, [])


@compiles_for_tpus
def test_slices_are_those_of_the_topology():
    devices = parallel.find_topology("v5e:2x2", slices=2)
    mesh = parallel.build_mesh({"data": 2, "tensor": 4}, devices=devices)
    assert [{device.slice_index for device in row} for row in mesh.devices] == [{0}, {1}]
    for name in ("v5e:3x3", "v99:2"):
        with pytest.raises(ValueError, match="name: the compiler knows no"):
            parallel.find_topology(name)


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="libtpu is installed")
def test_a_missing_compiler_is_told():
    for name, package in {"v5e:2x2": r"jax\[tpu\]", "h100:8": r"jax\[cuda12\]"}.items():
        with pytest.raises(ModuleNotFoundError, match=f"name: {name.partition(':')[0]} needs .*{package}"):
            parallel.find_topology(name)


def test_a_topology_that_is_none_is_refused():
    for name, slices in (("v5e", 1), ("h100:2x4", 1), ("h100:8", 2)):
        with pytest.raises(ValueError, match=r"such as .*h100:8"):
            parallel.find_topology(name, slices=slices)
