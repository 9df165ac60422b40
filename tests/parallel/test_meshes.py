"""Meshes of devices of several slices, which stand for hosts and need none."""

import numpy as np
import pytest

from regard.parallel import build_mesh
from regard.parallel.meshes import measure_spans


class Device:
    platform = device_kind = "cpu"
    client = None

    def __init__(self, number, slice_index):
        self.id, self.slice_index, self.process_index = number, slice_index, slice_index


def devices_of(slices, each):
    # In another order than that of their slices.
    return [Device(number, number % slices) for number in range(slices * each)]


@pytest.mark.parametrize(
    ("slices", "each", "sizes", "outer", "spans"),
    [
        (2, 4, {"data": 4, "tensor": 2}, None, (2, 1)),
        (6, 2, {"data": 2, "fsdp": 3, "tensor": 2}, None, (2, 3, 1)),
        (6, 12, {"data": 6, "sequence": 4, "tensor": 3}, {"tensor": 3, "sequence": 2}, (1, 2, 3)),
    ],
)
def test_axes_span_slices_the_first_ones_unless_told(slices, each, sizes, outer, spans):
    devices = devices_of(slices, each)
    mesh = build_mesh(sizes, outer=outer, devices=devices)
    assert dict(mesh.shape) == sizes
    assert {device.id for device in mesh.devices.flat} == {device.id for device in devices}
    assert tuple(measure_spans(mesh).values()) == spans
    slice_of = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    parts = [n for size, span in zip(sizes.values(), spans, strict=True) for n in (span, size // span)]
    blocks = slice_of.reshape(parts).transpose(*range(0, len(parts), 2), *range(1, len(parts), 2))
    assert (np.ptp(blocks.reshape(slices, each), 1) == 0).all(), "each slice has a block of the mesh"


def test_sizes_and_slices_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="devices: expected as many of each slice or host; got 4, 2"):
        build_mesh({"data": 6}, devices=[Device(number, number // 4) for number in range(6)])
    with pytest.raises(ValueError, match="multiply to 8, the number of devices; got data=2, tensor=3"):
        build_mesh({"data": 2, "tensor": 3}, devices=devices_of(2, 4))
    for outer, slices, message in (
        ({"dta": 2}, 2, "axes among data, tensor; got 'dta'"),
        ({"tensor": 4}, 4, "a divisor of tensor=2, .* got tensor=4"),
        ({"data": 2}, 4, "numbers that multiply to 4, .* got data=2"),
        ({"data": 2}, 1, "None, as all devices are of one slice or host; got data=2; leave it out"),
    ):
        with pytest.raises(ValueError, match=f"outer: expected {message}"):
            build_mesh({"data": 4, "tensor": 2}, outer=outer, devices=devices_of(slices, 8 // slices))
