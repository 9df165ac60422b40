"""Division of a model's parameters over a mesh: along "tensor" and "fsdp", by where an array is.

Along "tensor" the matrices of a layer are divided, so that a device has whole heads and a part of the
feed-forward width; along "fsdp" every matrix once more, on its longest axis that is free and divides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

# The axes of an array that may be divided along "tensor", best first, by the end of the array's path.
TENSOR_AXES: dict[str, tuple[int, ...]] = {
    "((query|key|value|gate|rate|forget)_projection|expansion)/kernel": (1,),  # heads lie side by side
    "(query|key|value|gate)_projection/bias": (0,),
    "(query|key|value)_taps": (1,),
    "(log_speed|forget_bias)": (0,),
    "output_projection/kernel": (0,),
    "sinks": (0,),
    "relative_table": (1,),
    "(widen|gate)/kernel": (1,),  # the width in between
    "(widen|gate)/bias": (0,),
    "narrow/kernel": (0,),
    "(widen|gate)/kernels": (2,),  # the same of every expert
    "(widen|gate)/biases": (1,),
    "narrow/kernels": (1,),
    "table/embedding": (0, 1),  # the vocabulary; where it does not divide, it is kept by width
    "head/kernel": (1, 0),
    "head/bias": (0,),
}

EXPERTS = re.compile("(^|/)(widen|gate|narrow)/(kernels|biases)$")  # whose first axis numbers them


def divide_array(
    path: str, shape: tuple[int, ...], sizes: Mapping[str, int], *, in_use: bool = False
) -> PartitionSpec:
    """Return the axes, of so many devices, that divide a parameter, or an array of the optimizer for one.

    `in_use` asks how a layer computes with it, not how it is kept: then what "fsdp" divides is gathered, and
    so are tables whose vocabulary does not divide. Vectors, each a message to gather, are whole along "fsdp".

    Example:
        >>> divide_array("blocks/0/feed_forward/widen/kernel", (64, 256), {"fsdp": 2, "tensor": 4})
        P('fsdp', 'tensor')
    """
    spec: list[Any] = [None] * len(shape)
    tensor, fsdp = sizes.get("tensor", 1), 1 if in_use else sizes.get("fsdp", 1)
    expert = sizes.get("expert", 1)
    if expert > 1 and EXPERTS.search(path) and shape[0] % expert == 0:
        spec[0] = "expert"
    wanted = next((axes for end, axes in TENSOR_AXES.items() if re.search(f"(^|/){end}$", path)), ())
    wanted = wanted[:1] if in_use else wanted
    taken = next((axis for axis in wanted if axis < len(shape) and shape[axis] % tensor == 0), None)
    if tensor > 1 and taken is not None:
        spec[taken] = "tensor"
    if fsdp > 1 and len(shape) > 1:
        free = [axis for axis, size in enumerate(shape) if spec[axis] is None and size % fsdp == 0]
        if free:
            spec[max(free, key=lambda axis: shape[axis])] = "fsdp"
        elif tensor > 1 and taken is not None and shape[taken] % (tensor * fsdp) == 0:
            spec[taken] = ("tensor", "fsdp")
    return PartitionSpec(*spec)
