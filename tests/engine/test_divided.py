"""Attention in divided programs: automatic, explicit and manual mesh axes, on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_cases import on_eight_devices
from regard import CHECKPOINT_NAMES, attend, masks


@pytest.mark.parametrize(
    ("axes", "case", "backend", "options"),
    [
        # Key heads that are fewer than the devices are whole on each.
        ("automatic", "data", "tiled", {"key_heads": 2, "aux": ("lse", "entropy")}),
        ("automatic", "positions", "tiled", {}),
        ("explicit", "numbers", "tiled", {"division": "heads"}),
        ("manual", "data", "tiled", {}),
        ("manual", "functions", "tiled", {}),
        ("manual", "functions", "dense", {}),
        ("explicit", "data", "dense", {"division": "batch"}),
        ("automatic", "slopes", "tiled", {"order": "second"}),
    ],
)
def test_batch_and_heads_stay_divided_and_nothing_is_sent(axes, case, backend, options):
    code = f"from divided_cases import check\nprint(check({axes!r}, {case!r}, {backend!r}, **{options!r}))"
    # Gradients of what every batch row shares are summed over those that the rows are divided over.
    kinds = set() if case in ("numbers", "positions") else {"all-reduce"}
    assert set(eval(on_eight_devices(code))) == kinds


def test_a_data_parallel_step_sends_the_gradients_of_parameters_alone():
    code = "from divided_cases import check_training_step\nprint(check_training_step())"
    sent, gradients = eval(on_eight_devices(code))
    assert sent == {"all-reduce": gradients}


@pytest.mark.parametrize("check", ["check_programs", "check_mapped", "check_explicit"])
def test_programs_around_a_call_are_those_of_one_device(check):
    on_eight_devices(f"from divided_cases import {check}\n{check}()")


def test_rows_stay_divided_on_explicit_axes():
    on_eight_devices("from divided_cases import check_explicit_rows\ncheck_explicit_rows()")


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "count"), [(None, 2), (CHECKPOINT_NAMES, 1)])
def test_what_a_policy_saves_by_name_is_not_computed_again(saved, count):
    """By `tiled`; the definition's output is named, too."""
    policy = saved and jax.checkpoint_policies.save_only_these_names(*saved)

    def branch(x):
        return attend(jnp.sin(x), jnp.cos(x), x, mask=masks.causal(), backend="tiled")

    rerun = jax.checkpoint(branch, policy=policy)
    x = jnp.linspace(0, 1, 2 * 13 * 3).reshape((2, 13, 3))
    assert str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(rerun(x))))(x)).count("regard_forward[") == count
    found, expected = (jax.jit(jax.grad(lambda x, f=f: jnp.sum(f(x))))(x) for f in (rerun, branch))
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # jax 0.12 fuses what is computed again otherwise


DIVIDED_SEQUENCE = """
import jax
from jax.sharding import NamedSharding
from mesh_cases import draw, make_mesh
from regard import attend, explain, masks, parallel
P = jax.sharding.PartitionSpec
mesh = make_mesh(b=2, seq=4)
(whole,) = draw((2, 3, 44, 5))
divided = jax.device_put(whole, NamedSharding(mesh, P("b", None, "seq")))
print(explain(divided, divided, divided).gathered, explain(whole, whole, whole).gathered)
print(str(explain(divided, divided, divided)).splitlines()[-1])
with parallel.use(mesh, "seq", batch_axis="b"):
    print(explain(divided, divided, divided).gathered)
for rows in (8, 44):  # whether an output is finite is not asked across devices
    part = jax.device_put(whole[:, :, :rows], NamedSharding(mesh, P("b")))
    run = jax.jit(lambda x: attend(x, x, x, mask=masks.causal()))
    print("all-reduce" in run.lower(part).compile().as_text())
"""


def test_explain_says_that_a_divided_sequence_is_gathered_and_short_calls_send_nothing():
    counts, line, within, *sends = on_eight_devices(DIVIDED_SEQUENCE).splitlines()
    assert (counts, within, sends) == ("('seq',) ()", "()", ["False", "False"])
    assert "with regard.parallel.use(mesh, 'seq'):" in line


@pytest.mark.parametrize(
    "given",
    [
        ("cudnn", "automatic", "lengths", 2),
        ("cudnn", "automatic", "sinks", 4),
        ("cudnn", "explicit", "documents", 4),
        ("splash_tpu", "automatic", "lengths", 2),
    ],
)
def test_kernels_of_libraries_run_on_each_devices_part(given):
    """And add up the gradients of what devices share: two key heads, or sinks."""
    code = f"from divided_cases import check_kernel\nprint(check_kernel(*{given!r}))"
    assert set(eval(on_eight_devices(code))) == (set() if given[2] == "documents" else {"all-reduce"})
