"""Mesh specifications, such as data=2,tensor=4: read, completed and checked. No JAX here."""

import difflib
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

REST = -1
OTHER_NAMES = {"model": "tensor"}


@dataclass(frozen=True)
class MeshSpec:
    """The number of devices that share each kind of work; axes of size 1 divide nothing.

    The order is that of the devices: those of one machine are nearest along the last axes, which send most.
    """

    data: int = 1
    """Rows of a batch: every device has all parameters."""
    fsdp: int = 1
    """Rows of a batch, and parameters with their optimizer state, which are gathered where they are used."""
    expert: int = 1
    """Rows of a batch, and the experts of each layer that has some: tokens travel, kernels do not."""
    sequence: int = 1
    """Positions of every row; in attention, keys travel."""
    tensor: int = 1
    """Heads, feed-forward width and vocabulary: the matrices of every layer."""

    @property
    def sizes(self) -> dict[str, int]:
        return asdict(self)

    def fit(self, num_devices: int) -> "MeshSpec":
        """Return the specification for so many devices: an axis of size -1 gets what the others leave.

        Example:
            >>> str(read_mesh("fsdp=*,tensor=2").fit(8))
            'fsdp=4,tensor=2'
        """
        sizes = self.sizes
        product = math.prod(size for size in sizes.values() if size != REST)
        open_axis = next((axis for axis, size in sizes.items() if size == REST), None)
        if open_axis and num_devices % product == 0:
            return replace(self, **{open_axis: num_devices // product})
        if open_axis or product != num_devices:
            needed = f"a divisor of {num_devices}" if open_axis else f"{num_devices}"
            fitting = (
                axis for axis, size in sizes.items() if not open_axis and num_devices % (product // size) == 0
            )
            count = "1 device" if num_devices == 1 else f"{num_devices} devices"
            tried = num_devices == 1 and not open_axis
            hint = f"; to try it on a CPU, set JAX_NUM_CPU_DEVICES={product}" if tried else ""
            problem = f"expected sizes that multiply to {needed}, as there are {count}; got {self}"
            remedy = f"{next(fitting, 'data')}=* takes what is there{hint}"
            raise ValueError(f"mesh: {problem}, which is {product}; {remedy}")
        return self

    def demand_divides(self, task: Any) -> None:
        """Raise where a task's batch, heads or widths cannot be divided, with sizes that could be."""
        batch_size, parts = task.optimization.batch_size, task.optimization.accumulate_steps
        rows = self.data * self.fsdp * self.expert * parts
        if batch_size % rows:
            below = batch_size - batch_size % rows
            factors = "data * fsdp" + " * expert" * (self.expert > 1) + " * accumulate_steps" * (parts > 1)
            problem = f"expected a batch size that {factors} = {rows} divides, got batch_size={batch_size}"
            fitting = f"{f'{below} or ' if below else ''}{below + rows}"
            raise ValueError(f"mesh: {problem}; choose batch_size {fitting}, or another mesh")
        names = ("num_heads", "num_key_heads", "d_ff", "expert_width", "shared_width")
        names = (*names, "delta_heads", "delta_key_heads")
        for name, axis in [*((name, "tensor") for name in names), ("num_experts", "expert")]:
            count = getattr(self, axis)
            size = getattr(task.model, name, None) or count
            if size % count:
                divisors = [divisor for divisor in range(1, size + 1) if size % divisor == 0]
                fitting = f"{', '.join(map(str, divisors[:8]))}{', ...' if len(divisors) > 8 else ''}"
                problem = f"expected {axis} to divide {name}={size}, got {axis}={count}"
                raise ValueError(f"mesh: {problem}; it can be {fitting}")
        if self.expert > 1 and not getattr(task.model, "num_experts", None):
            problem = f"expected expert=1 for a model without num_experts, got expert={self.expert}"
            raise ValueError(f"mesh: {problem}; data or fsdp divide rows alike")

    def __str__(self) -> str:
        parts = [f"{axis}={'*' if size == REST else size}" for axis, size in self.sizes.items() if size != 1]
        return ",".join(parts) or "data=1"


def read_mesh(text: str, argument: str = "mesh") -> MeshSpec:
    """Read a specification such as `data=2,fsdp=2,sequence=2,tensor=2`; axes left out have size 1.

    At most one size is `*` or -1, which means as many devices as the others leave. `model` is another name
    of `tensor`. Errors name the argument.
    """
    if not isinstance(text, str):
        raise TypeError(f"{argument}: expected text such as data=2,tensor=4; got {text!r}")
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = map(str.strip, part.partition("="))
        axis = OTHER_NAMES.get(name, name)
        if not equals:
            raise ValueError(f"{argument}: expected axes with sizes, such as data=2,tensor=4; got {part!r}")
        if axis not in MeshSpec().sizes:
            near = difflib.get_close_matches(name, [*MeshSpec().sizes, *OTHER_NAMES], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            names = "data, fsdp, expert, sequence and tensor"
            raise ValueError(f"{argument}: expected axes {names}, got {name!r}{hint}")
        if axis in sizes:
            raise ValueError(f"{argument}: expected every axis once, got {axis} twice in {text!r}")
        if size in ("*", str(REST)):
            sizes[axis] = REST
        elif size.isascii() and size.isdigit() and int(size):
            sizes[axis] = int(size)
        else:
            raise ValueError(f"{argument}: expected a number for {axis}, 1 or more, or *; got {size!r}")
    if list(sizes.values()).count(REST) > 1:
        raise ValueError(f"{argument}: expected at most one size * or -1, got {text!r}")
    return MeshSpec(**sizes)
