"""Attention in divided programs: automatic, explicit and manual mesh axes, on eight devices."""

import itertools

import pytest

from divided_cases import AXES, CASES, DIVISIONS
from mesh_cases import on_eight_devices
from regard.engine.dispatch.registry import COMPLETE

# Gradients of what every batch row shares are summed over those that the rows are divided over.
SUMMED = {"alibi", "relative", "bias and sinks"}
# In shard_map a call is that of one device, whose pattern of dropout is its own.
EVERY = [pair for pair in itertools.product(AXES, CASES) if pair != ("manual", "dropout")]


def run(*given, **options):
    code = f"from divided_cases import check\nprint(check(*{given!r}, **{options!r}))"
    return eval(on_eight_devices(code))


@pytest.mark.parametrize("backend", COMPLETE)
@pytest.mark.parametrize(("axes", "case"), EVERY)
def test_batch_and_heads_stay_divided_and_nothing_is_sent(axes, case, backend):
    sent = run(axes, case, backend)
    assert set(sent) <= ({"all-reduce"} if case in SUMMED else set()), sent


@pytest.mark.parametrize("backend", COMPLETE)
@pytest.mark.parametrize("division", [name for name in DIVISIONS if name != "both"])
@pytest.mark.parametrize("axes", AXES)
def test_one_of_the_two_is_divided(axes, division, backend):
    assert run(axes, "lengths", backend, division=division) == {}


@pytest.mark.parametrize("case", ["lengths", "alibi"])
@pytest.mark.parametrize("axes", AXES)
def test_second_derivatives_are_those_of_one_device(axes, case):
    assert set(run(axes, case, "tiled", order="second")) <= ({"all-reduce"} if case in SUMMED else set())


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
