"""Meshes of devices of several slices, which stand for hosts and need none."""

import numpy as np
import pytest

from regard.parallel import build_mesh


class Device:
    platform = device_kind = "cpu"
    client = None

    def __init__(self, number, slice_index):
        self.id, self.slice_index, self.process_index = number, slice_index, slice_index


def devices_of(slices, each):
    # In another order than that of their slices.
    return [Device(number, number % slices) for number in range(slices * each)]


@pytest.mark.parametrize(
    ("slices", "each", "sizes"),
    [
        (2, 4, {"data": 4, "tensor": 2}),
        (6, 2, {"data": 2, "fsdp": 3, "tensor": 2}),
        (3, 4, {"data": 1, "fsdp": 6, "sequence": 2}),
        (4, 1, {"data": 4}),
    ],
)
def test_the_first_axes_go_from_slice_to_slice(slices, each, sizes):
    devices = devices_of(slices, each)
    mesh = build_mesh(sizes, devices=devices)
    assert dict(mesh.shape) == sizes
    assert {device.id for device in mesh.devices.flat} == {device.id for device in devices}
    slice_of = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    for part in slice_of.reshape(-1, each):  # neighbours along the last axes
        assert len(set(part)) == 1


def test_sizes_and_slices_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="devices: expected as many of each slice or host; got 4, 2"):
        build_mesh({"data": 6}, devices=[Device(number, number // 4) for number in range(6)])
    with pytest.raises(
        ValueError, match=r"sizes: expected sizes that multiply to 8, .* got data=2, tensor=3"
    ):
        build_mesh({"data": 2, "tensor": 3}, devices=devices_of(2, 4))
