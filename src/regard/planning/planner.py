"""The planner: the best mesh for a call, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from regard.engine.call.canonicalization import canonicalize
from regard.engine.call.problem import Problem
from regard.engine.dispatch.explanation import scaled
from regard.masks import Mask
from regard.planning.amounts import read_amount
from regard.planning.candidates import AXES, list_candidates
from regard.planning.chips import Chip, find_chip
from regard.planning.estimates import Assumptions, Estimate, estimate, memory_of
from regard.planning.host import measure_host
from regard.planning.reports import Report, Request
from regard.planning.workload import Work

_ALIKE = 1.02  # times that differ by less are the same: bytes decide
_MOST_DEVICES = 1 << 20


class MemoryTooSmallError(ValueError):
    """No mesh of so many devices holds the call."""


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
    is weighed by this roofline, on the device with most work. Nothing is allocated or compiled.

    Args:
        length: tokens, such as 1_048_576 or "1M"; k, M and G are powers of 1024.
        heads: query heads.
        devices: how many there are.
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
        A report to read or print, with every mesh in order.

    Raises:
        ValueError: a number below 1, heads that are no multiple of key heads, an unknown chip or axis, or
            devices that no mesh divides; with what would do.
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
    sizes = {name: _read(name, number) for name, number in numbers.items()}
    sizes["key_heads"] = _read("key_heads", heads if key_heads is None else key_heads)
    if sizes["heads"] % sizes["key_heads"]:
        raise ValueError(
            f"heads: expected a multiple of key_heads, {sizes['key_heads']}; got {sizes['heads']}. Each key"
            " head serves as many query heads"
        )
    fixed = _check_axes(fixed or {}, sizes["devices"])
    problem = _canonicalize(sizes, mask, dtype)
    chosen = _share(
        measure_host() if chip == "cpu" else find_chip(chip) if isinstance(chip, str) else chip, sizes
    )
    if problem.matmul_dtype.name not in chosen.flops:
        known = ", ".join(chosen.flops)
        raise ValueError(
            f"dtype: expected one that {chosen.name} multiplies, {known}; got {dtype}, which is multiplied as"
            f" {problem.matmul_dtype.name}"
        )
    assumptions = assumptions or Assumptions()
    candidates = list(list_candidates(problem, sizes["devices"], fixed))
    if not candidates:
        raise ValueError(_say_indivisible(sizes, fixed))
    room = chosen.memory_bytes * assumptions.memory_share
    least = min(memory_of(problem, candidate, backward) for candidate in candidates)
    if least > room:
        raise MemoryTooSmallError(_say_too_small(problem, sizes, fixed, chosen, least, room, backward))
    work = Work.count(problem)
    rounds: dict[Any, Any] = {}
    found = [
        estimate(problem, item, item.divide(problem, rounds), work, chosen, assumptions, backward)
        for item in candidates
    ]
    request = Request(**sizes, mask=None if mask is None else repr(mask), dtype=dtype, backward=backward)
    return Report(request, chosen, assumptions, rank(found), work.kept, work.side)


def rank(found: list[Estimate]) -> tuple[Estimate, ...]:
    """Those that fit by time, but first, of those as fast as the fastest, the one that sends least."""
    fitting = sorted((item for item in found if item.fits), key=lambda item: item.seconds)
    rest = sorted((item for item in found if not item.fits), key=lambda item: item.memory_bytes)
    alike = [item for item in fitting if item.seconds <= _ALIKE * fitting[0].seconds]
    best = min(alike, key=lambda item: (item.all_bytes, item.seconds))
    return (best, *(item for item in fitting if item is not best), *rest)


def _canonicalize(sizes: dict[str, int], mask: Mask | None, dtype: str) -> Problem:
    batch, length, width = sizes["batch"], sizes["length"], sizes["width"]
    with jax.enable_x64(dtype == "float64"):
        query, key = (
            jax.ShapeDtypeStruct((batch, sizes[name], length, width), dtype)
            for name in ("heads", "key_heads")
        )
        return canonicalize(query, key, key, mask=mask)


def _read(name: str, number: Any) -> int:
    try:
        return read_amount(number)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check_axes(fixed: Mapping[str, int], devices: int) -> dict[str, int]:
    if unknown := [name for name in fixed if name not in AXES]:
        raise ValueError(f"fixed: expected axes among {', '.join(AXES)}; got {', '.join(unknown)}")
    product = math.prod(fixed.values())
    if product < 1 or devices % product:
        raise ValueError(
            f"fixed: expected sizes whose product divides the {devices} devices; got {dict(fixed)}"
        )
    return dict(fixed)


def _share(chip: Chip, sizes: dict[str, int]) -> Chip:
    """What each of the devices of a machine has of it."""
    return chip.divide(sizes["devices"]) if chip.shared else chip


def _say_indivisible(sizes: dict[str, int], fixed: dict[str, int]) -> str:
    wanted = ", ".join(f"{name}={size}" for name, size in fixed.items())
    wanted = f" with {wanted}" if wanted else ""
    return (
        f"devices: no mesh of {sizes['devices']}{wanted} divides the call; data must"
        f" divide the batch, {sizes['batch']}; heads times exchange the {sizes['key_heads']} key heads; and"
        f" sequence times exchange is at most the length, {sizes['length']}"
    )


def _say_too_small(
    problem: Problem,
    sizes: dict[str, int],
    fixed: dict[str, int],
    chip: Chip,
    least: int,
    room: float,
    backward: bool,
) -> str:
    text = (
        f"devices: no mesh of {sizes['devices']} {chip.name} holds the call: it takes"
        f" {scaled(least, 'B')} per device of the {scaled(room, 'B')} there are for arrays"
    )
    count = sizes["devices"]
    while not chip.shared and count < _MOST_DEVICES:
        count *= 2
        more = list_candidates(problem, count, fixed)
        if any(memory_of(problem, candidate, backward) <= room for candidate in more):
            return f"{text}; {count} devices would do"
    return f"{text}; more devices do not help, a smaller batch or a shorter sequence would"
