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
