"""Attention in divided programs: automatic, explicit and manual mesh axes, on eight devices."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from divided_cases import AXES, CASES, PROGRAMS
from economy import mostly_slow
from mesh_cases import on_eight_devices
from regard import CHECKPOINT_NAMES, attend, masks
from regard.engine.dispatch.registry import COMPLETE

# Gradients of what every batch row shares are summed over those that the rows are divided over.
SUMMED = {"alibi", "relative", "bias and sinks"}
# In shard_map a call is that of one device, whose rows, heads and pattern of dropout are its own.
OWN = {("manual", "dropout"), ("manual", "predicate")}
EVERY = [
    (backend, axes, case)
    for backend, case, axes in itertools.product(COMPLETE, CASES, AXES)
    if (axes, case) not in OWN
]
# Explicit axes in a test below. The rest takes eight devices for minutes.
QUICK = {
    ("tiled", "manual", "segments"),
    ("tiled", "automatic", "alibi"),
}


def run(*given, **options):
    code = f"from divided_cases import check\nprint(check(*{given!r}, **{options!r}))"
    return eval(on_eight_devices(code))


@pytest.mark.parametrize(("backend", "axes", "case"), mostly_slow(EVERY, *QUICK))
def test_batch_and_heads_stay_divided_and_nothing_is_sent(backend, axes, case):
    sent = run(axes, case, backend)
    assert set(sent) <= ({"all-reduce"} if case in SUMMED else set()), sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "division"),
    mostly_slow(
        [("automatic", "batch"), ("explicit", "heads"), ("manual", "batch"), ("manual", "heads")],
        ("automatic", "batch"),
        ("manual", "heads"),
    ),
)
def test_one_of_the_two_is_divided(axes, division):
    assert run(axes, "lengths", "tiled", division=division) == {}


@pytest.mark.parametrize(
    ("axes", "case"),
    [("automatic", "alibi"), ("explicit", "lengths"), ("manual", "alibi")],
)
@pytest.mark.slow
def test_second_derivatives_are_those_of_one_device(axes, case):
    assert set(run(axes, case, "tiled", order="second")) <= ({"all-reduce"} if case in SUMMED else set())


@pytest.mark.parametrize(
    ("axes", "key_heads"),
    mostly_slow(
        itertools.product(["automatic", "explicit"], [1, 2]),
        ("explicit", 1),
    ),
)
def test_fewer_key_heads_than_devices_are_whole_on_each(axes, key_heads):
    assert set(run(axes, "alibi", "tiled", aux=("lse",), key_heads=key_heads)) == {"all-reduce"}


WITHOUT_SHARDY = """
import jax
from divided_cases import check
jax.config.update("jax_use_shardy_partitioner", False)
try:
    print(check("automatic", "lengths", "tiled"))
finally:
    jax.config.update("jax_use_shardy_partitioner", True)
"""


@pytest.mark.slow
def test_gspmd_divides_as_shardy_does():
    assert on_eight_devices(WITHOUT_SHARDY).strip() == "{}"


@pytest.mark.slow
def test_a_data_parallel_step_sends_the_gradients_of_parameters_alone():
    code = "from divided_cases import check_training_step\nprint(check_training_step())"
    sent, gradients = eval(on_eight_devices(code))
    assert sent == {"all-reduce": gradients}


@pytest.mark.parametrize(
    "name",
    mostly_slow(PROGRAMS, "scan", "shard_map over one of two axes", "set_mesh", "vmap with spmd_axis_name"),
)
def test_programs_around_a_call_are_those_of_one_device(name):
    on_eight_devices(f"from divided_cases import check_program\ncheck_program({name!r})")


@pytest.mark.parametrize(("saved", "count"), [(None, 2), (CHECKPOINT_NAMES, 1)])
def test_what_a_policy_saves_by_name_is_not_computed_again(saved, count):
    """By `tiled`; the definition's output is named, too."""
    policy = saved and jax.checkpoint_policies.save_only_these_names(*saved)

    def branch(x):
        return attend(jnp.sin(x), jnp.cos(x), x, mask=masks.causal(), backend="tiled")

    rerun = jax.checkpoint(branch, policy=policy)
    x = jnp.linspace(0, 1, 2 * 13 * 3).reshape((2, 13, 3))
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(rerun(x))))(x)
    assert str(jaxpr).count("regard_forward[") == count
    np.testing.assert_allclose(
        jax.jit(jax.grad(lambda x: jnp.sum(rerun(x))))(x), jax.jit(jax.grad(lambda x: jnp.sum(branch(x))))(x)
    )


DIVIDED_SEQUENCE = """
import jax
from jax.sharding import NamedSharding
from mesh_cases import draw, make_mesh
from regard import attend, explain, parallel
P = jax.sharding.PartitionSpec
mesh = make_mesh(b=2, seq=4)
(whole,) = draw((2, 3, 44, 5))
divided = jax.device_put(whole, NamedSharding(mesh, P("b", None, "seq")))
print(explain(divided, divided, divided).gathered, explain(whole, whole, whole).gathered)
print(str(explain(divided, divided, divided)).splitlines()[-1])
with parallel.use(mesh, "seq", batch_axis="b"):
    print(explain(divided, divided, divided).gathered)
"""


def test_explain_says_that_a_divided_sequence_is_gathered():
    counts, line, within = on_eight_devices(DIVIDED_SEQUENCE).splitlines()
    assert (counts, within) == ("('seq',) ()", "()")
    assert "with regard.parallel.use(mesh, 'seq'):" in line


WHOLE_PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding
from mesh_cases import draw
from regard import attend, masks, parallel
P = jax.sharding.PartitionSpec
mesh = jax.make_mesh((2, 4), ("b", "seq"))
(x,) = draw((2, 3, 44, 5))
divided = jax.device_put(x, NamedSharding(mesh, P("b", None, "seq")))
options = {"mask": masks.causal(), "aux": ("max_score",)}
found = parallel.attend(*[divided] * 3, mesh=mesh, axis="seq", batch_axis="b", **options)
jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), found,
             attend(x, x, x, **options))
print(jax.typeof(found[0]).sharding.spec, jax.typeof(found[1]["max_score"]).sharding.spec)
"""


def test_a_plan_of_one_program_takes_explicit_axes():
    specs = "P('b', None, 'seq', None) P('b', None, 'seq')"
    assert on_eight_devices(WHOLE_PROGRAM).strip().replace("PartitionSpec", "P") == specs


GRADIENT_INSIDE = """
import jax, jax.numpy as jnp, numpy as np
from mesh_cases import draw, make_mesh
from regard import attend, masks
P = jax.sharding.PartitionSpec
mesh, arrays = make_mesh(b=2, h=4), draw(*[(2, 8, 59, 5)] * 3)

def gradient(*arrays):
    def loss(*arrays):
        return jnp.sum(attend(*arrays, mask=masks.causal(), backend=BACKEND) ** 2)
    return jax.grad(loss, (0, 1, 2))(*arrays)

spec = P("b", "h")
inside = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=spec, out_specs=(spec,) * 3))(*arrays)
for one, other in zip(inside, jax.jit(gradient)(*arrays), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.parametrize("backend", mostly_slow([None, *COMPLETE], "tiled"))
def test_a_gradient_inside_shard_map_is_that_of_one_device(backend):
    on_eight_devices(f"BACKEND = {backend!r}{GRADIENT_INSIDE}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "axes", "case"),
    mostly_slow(
        itertools.product(("cudnn", "splash_tpu"), ("automatic", "explicit"), ("lengths", "documents")),
        ("cudnn", "automatic", "lengths"),
    ),
)
def test_kernels_of_libraries_run_on_each_devices_part(backend, axes, case):
    # Documents are known to the program, all rows of them, and each device takes its own.
    code = f"from divided_cases import check_kernel\nprint(check_kernel({backend!r}, {axes!r}, {case!r}))"
    assert eval(on_eight_devices(code)) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "case", "key_heads"),
    [("cudnn", "lengths", 2), ("splash_tpu", "lengths", 2), ("cudnn", "sinks", 4)],
)
def test_kernels_of_libraries_add_up_the_gradients_of_what_devices_share(backend, case, key_heads):
    given = (backend, "automatic", case, key_heads)
    code = f"from divided_cases import check_kernel\nprint(check_kernel(*{given!r}))"
    assert set(eval(on_eight_devices(code))) == {"all-reduce"}
