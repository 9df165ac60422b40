"""The planner: the best mesh for a call, before anything is allocated."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from heapq import nsmallest
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from regard.arguments import LARGEST, as_array, check_flag, guided
from regard.engine.call.canonicalization import canonicalize
from regard.engine.call.problem import Problem
from regard.engine.dispatch.explanation import scaled
from regard.masks import Mask
from regard.parallel.work import Work
from regard.planning.candidates import AXES
from regard.planning.chips import Chip, find_chip
from regard.planning.estimates import Assumptions, Estimate
from regard.planning.reports import Report
from regard.planning.rings import Rings
from regard.planning.search import Search, list_counts

_MOST_DEVICES = 1 << 20
_MOST_MESHES = 64  # of those of all devices that are weighed


class MemoryTooSmallError(ValueError):
    """No mesh of so many devices holds the call."""


@guided
def plan(
    *,
    length: int | str,
    heads: int,
    devices: int,
    chip: str | Chip,
    key_heads: int | None = None,
    width: int = 128,
    batch: int = 1,
    mask: Mask | None = None,
    dtype: str = "bfloat16",
    backward: bool = False,
    fixed: Mapping[str, int] | None = None,
    assumptions: Assumptions | None = None,
) -> Report:
    """Find the mesh on which a self-attention call is fastest, and say what it costs there.

    seconds = exchange + max(FLOPs / peak, bytes read / bandwidth, bytes that travel / links)

    Every division of the devices into data, sequence (keys travel), exchange (sequence for heads) and heads
    is weighed by this roofline, on the device with most work, and so are meshes of fewer devices: of all
    numbers up to 64, and of 32 in each doubling beyond. Of those within 2% of the fastest, the best needs
    no padding, has the fewest devices, and sends least, in this order. Nothing is allocated.

    Args:
        length: tokens, such as 1_048_576 or "1M"; k, M and G are powers of 1024.
        heads: query heads.
        devices: how many there are, up to 2**20; the best mesh may have fewer.
        chip: a name in `CHIPS`, "cpu" for this machine, which is measured, or a `Chip`.
        key_heads: heads of keys and values; None means `heads`.
        width: of a head.
        batch: sequences.
        mask: who may attend to whom; None is everybody to everybody.
        dtype: of query, key and value.
        backward: weigh the gradients, too.
        fixed: sizes of mesh axes that are not to be chosen, by name: data, sequence, exchange, heads.
        assumptions: shares of the chip's figures that are reached; None means `Assumptions()`.

    Returns:
        A report to read or print: the best mesh, then all of exactly `devices`, in order.

    Raises:
        ValueError: a number below 1, heads that are no multiple of key heads, an unknown chip or axis, or
            given sizes with which no mesh divides the call; with what would do.
        MemoryTooSmallError: no mesh holds the call; it says how many devices would.

    Example:
        >>> from regard import masks, planning
        >>> report = planning.plan(length="1M", heads=32, key_heads=8, devices=256, chip="h100",
        ...     mask=masks.causal(), fixed={"heads": 1})
        >>> report.best.candidate.mesh, report.best.candidate.layout
        ({'sequence': 32, 'exchange': 8}, 'balanced')

    Reference: Williams et al., "Roofline", 2009; all-to-all and ring together: Fang and Zhao, "USP", 2024.
    """
    numbers = {"length": length, "heads": heads, "devices": devices, "width": width, "batch": batch}
    sizes = read_sizes({**numbers, "key_heads": heads if key_heads is None else key_heads})
    heads, key_heads, devices = sizes["heads"], sizes["key_heads"], sizes["devices"]
    if heads % key_heads:
        reason = "Each key head serves as many query heads"
        raise ValueError(f"heads: expected a multiple of key_heads, {key_heads}; got {heads}. {reason}")
    fixed = read_fixed(fixed, devices)
    dtype = as_array("dtype", "the name of one, such as 'bfloat16'", jnp.dtype, dtype).name
    with jax.enable_x64(dtype == "float64"):
        query = jax.ShapeDtypeStruct((sizes["batch"], heads, sizes["length"], sizes["width"]), dtype)
        key = jax.ShapeDtypeStruct((sizes["batch"], key_heads, sizes["length"], sizes["width"]), dtype)
        problem = canonicalize(query, key, key, mask=mask)
    shares = Assumptions() if assumptions is None else assumptions
    search = prepare(problem, chip, shares, backward, fixed)
    best = search.find_best(devices)
    if best is None:
        check_divisible(search, devices, sizes)
        _refuse(search, devices)
    estimates = list(map(search.weigh, nsmallest(_MOST_MESHES, search.list(devices), key=search.bound)))
    best = next((item for item in estimates if item.candidate == best.candidate), best)
    request = {**sizes, "mask": None if mask is None else repr(mask), "dtype": dtype, "backward": backward}
    chosen, work = search.chip_of(best.candidate.devices), search.rings.work
    return Report(request, chosen, search.assumptions, rank(estimates, best), work.kept, work.side)


def prepare(
    problem: Problem, chip: str | Chip, assumptions: Assumptions, backward: bool, fixed: Mapping[str, int]
) -> Search:
    """Return the search for a call on chips that multiply its dtype."""
    if not isinstance(assumptions, Assumptions):
        raise TypeError(f"assumptions: expected planning.Assumptions or None, got {assumptions!r}")
    check_flag("backward", backward)
    chosen = find_chip(chip)
    if problem.matmul_dtype.name not in chosen.flops:
        multiplied = f"{problem.query.dtype}, which is multiplied as {problem.matmul_dtype.name}"
        kinds = ", ".join(chosen.flops)
        raise ValueError(f"dtype: expected one that {chosen.name} multiplies, {kinds}; got {multiplied}")
    return Search(problem, chosen, assumptions, backward, fixed, Rings(problem, Work.count(problem)))


def check_divisible(search: Search, devices: int, sizes: Mapping[str, int]) -> None:
    """Raise ValueError for a call that no mesh divides."""
    fixed, key_heads = search.fixed, search.problem.key_heads
    step = math.prod(fixed.values())
    if not any(True for count in list_counts(devices // step) for _ in search.list(count * step)):
        wanted = ", ".join(f"{name}={size}" for name, size in fixed.items())
        raise ValueError(
            f"devices: no mesh of up to {devices}{' with ' * bool(fixed)}{wanted} divides the call; data is"
            f" at most the batch, {sizes['batch']}; heads times exchange divides the {key_heads} key"
            f" heads; and sequence times exchange is at most the length, {sizes['length']}"
        )


def _refuse(search: Search, devices: int) -> NoReturn:
    chip, step = search.chip, math.prod(search.fixed.values())

    @functools.cache
    def find_least(count: int) -> float:
        """Return the bytes per device on the mesh of so many that needs least."""
        return min(map(search.peak, search.list(count)), default=math.inf)

    counts = [count * step for count in list_counts(devices // step)]
    nearest = min(counts, key=lambda count: find_least(count) / search.room(count))
    least, room = find_least(nearest), search.room(nearest)
    doubled = (devices << power for power in range(1, _MOST_DEVICES.bit_length()))
    more = [] if chip.shared else [count for count in doubled if count <= _MOST_DEVICES]
    enough = next((count for count in more if find_least(count) <= room), None)
    advice = "more devices do not help, a smaller batch or a shorter sequence would"
    advice = f"{enough} devices would do" if enough else advice
    raise MemoryTooSmallError(
        f"devices: no mesh of up to {devices} {chip.name} holds the call: it takes {scaled(least, 'B')} per"
        f" device of the {scaled(room, 'B')} there are for arrays; {advice}"
    )


def rank(estimates: list[Estimate], best: Estimate) -> tuple[Estimate, ...]:
    """Order those that fit by time, behind the best, and then the others by memory."""
    fitting = sorted((item for item in estimates if item.fits), key=lambda item: item.seconds)
    rest = sorted((item for item in estimates if not item.fits), key=lambda item: item.memory_bytes)
    return (best, *(item for item in fitting if item is not best), *rest)


def read_amount(text: str | int) -> int:
    """Read a whole number, with k, M or G for powers of 1024.

    Args:
        text: such as "1M", "128k", "1_048_576" or a number.

    Returns:
        The number, at least 1.

    Raises:
        ValueError: for anything else.

    Example:
        >>> from regard.planning import read_amount
        >>> read_amount("128k"), read_amount("1M"), read_amount("1_000")
        (131072, 1048576, 1000)
    """
    words = str(text).strip().lower()
    factor = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(words[-1:], 1)
    digits = words[:-1] if factor > 1 else words
    try:
        # Of fractions only those that give whole numbers, such as 1.5k.
        amount = int(digits) * factor if "." not in digits else float(digits) * factor
        number = int(amount)
    except (ValueError, OverflowError):
        amount = number = 0
    if number < 1 or number != amount:
        examples = "such as 4096, 128k, 1M or 1_048_576"
        raise ValueError(f"expected a whole number of at least 1, {examples}, got {text!r}")
    return number


def read_sizes(numbers: Mapping[str, Any]) -> dict[str, int]:
    """Read whole numbers of at least 1, by name."""
    sizes = {}
    for name, number in numbers.items():
        try:
            sizes[name] = read_amount(number)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        most = _MOST_DEVICES if name == "devices" else LARGEST
        if sizes[name] > most:
            raise ValueError(f"{name}: expected at most {most}, got {number!r}")
    return sizes


def read_fixed(fixed: Mapping[str, Any] | None, devices: int, axes: tuple[str, ...] = AXES) -> dict[str, int]:
    """Read the sizes of mesh axes that are not to be chosen."""
    if not isinstance(fixed, Mapping | None):
        raise TypeError(f"fixed: expected sizes by the names of axes, as a mapping; got {fixed!r}")
    if unknown := [name for name in fixed or {} if name not in axes]:
        raise ValueError(f"fixed: expected axes among {', '.join(axes)}; got {', '.join(map(str, unknown))}")
    sizes = read_sizes({f"fixed[{name!r}]": size for name, size in (fixed or {}).items()})
    if devices % math.prod(sizes.values()):
        raise ValueError(f"fixed: expected sizes whose product divides the {devices} devices; got {fixed}")
    return dict(zip(fixed or {}, sizes.values(), strict=True))
