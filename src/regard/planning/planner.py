"""The planner: the best mesh for a call, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from regard.engine.call.canonicalization import canonicalize
from regard.engine.dispatch.explanation import scaled
from regard.masks import Mask
from regard.planning.candidates import AXES, list_candidates
from regard.planning.chips import Chip, find_chip
from regard.planning.estimates import Assumptions, Estimate, Weighing, Work
from regard.planning.reports import Report

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
    numbers["key_heads"] = heads if key_heads is None else key_heads
    sizes = {name: _read(name, number) for name, number in numbers.items()}
    heads, key_heads, devices = sizes["heads"], sizes["key_heads"], sizes["devices"]
    if heads % key_heads:
        raise ValueError(
            f"heads: expected a multiple of key_heads, {key_heads}; got {heads}. Each key head serves as many"
            " query heads"
        )
    fixed = dict(fixed or {})
    if unknown := [name for name in fixed if name not in AXES]:
        raise ValueError(f"fixed: expected axes among {', '.join(AXES)}; got {', '.join(unknown)}")
    product = math.prod(fixed.values())
    if product < 1 or devices % product:
        raise ValueError(f"fixed: expected sizes whose product divides the {devices} devices; got {fixed}")
    with jax.enable_x64(dtype == "float64"):
        query, key = (
            jax.ShapeDtypeStruct((sizes["batch"], count, sizes["length"], sizes["width"]), dtype)
            for count in (heads, key_heads)
        )
        problem = canonicalize(query, key, key, mask=mask)
    chosen = find_chip(chip) if isinstance(chip, str) else chip
    chosen = chosen.divide(devices) if chosen.shared else chosen
    if problem.matmul_dtype.name not in chosen.flops:
        raise ValueError(
            f"dtype: expected one that {chosen.name} multiplies, {', '.join(chosen.flops)}; got {dtype},"
            f" which is multiplied as {problem.matmul_dtype.name}"
        )
    assumptions = assumptions or Assumptions()
    candidates = list(list_candidates(problem, devices, fixed))
    if not candidates:
        wanted = ", ".join(f"{name}={size}" for name, size in fixed.items())
        raise ValueError(
            f"devices: no mesh of {devices}{' with ' * bool(fixed)}{wanted} divides the call; data must"
            f" divide the batch, {sizes['batch']}; heads times exchange the {key_heads} key heads; and"
            f" sequence times exchange is at most the length, {sizes['length']}"
        )
    room = chosen.memory_bytes * assumptions.memory_share

    def find_least(count: int) -> float:
        """Return the bytes per device on the mesh of so many that needs least."""
        listed = list_candidates(problem, count, fixed)
        return min(
            (Weighing(problem, one, one.cut(problem), backward).peak() for one in listed), default=math.inf
        )

    if (least := find_least(devices)) > room:
        doubled = (devices << power for power in range(1, _MOST_DEVICES.bit_length()))
        more = [] if chosen.shared else [count for count in doubled if count < 2 * _MOST_DEVICES]
        enough = next((count for count in more if find_least(count) <= room), None)
        advice = "more devices do not help, a smaller batch or a shorter sequence would"
        raise MemoryTooSmallError(
            f"devices: no mesh of {devices} {chosen.name} holds the call: it takes {scaled(least, 'B')} per"
            f" device of the {scaled(room, 'B')} there are for arrays; "
            + (f"{enough} devices would do" if enough else advice)
        )
    work = Work.count(problem)
    rounds: dict[Any, Any] = {}
    found = [
        Weighing(problem, one, one.divide(problem, rounds), backward).estimate(work, chosen, assumptions)
        for one in candidates
    ]
    request = {**sizes, "mask": None if mask is None else repr(mask), "dtype": dtype, "backward": backward}
    return Report(request, chosen, assumptions, rank(found), work.kept, work.side)


def rank(found: list[Estimate]) -> tuple[Estimate, ...]:
    """Order those that fit by time, but first, of those as fast as the fastest, the one that sends least."""
    fitting = sorted((item for item in found if item.fits), key=lambda item: item.seconds)
    rest = sorted((item for item in found if not item.fits), key=lambda item: item.memory_bytes)
    alike = [item for item in fitting if item.seconds <= _ALIKE * fitting[0].seconds]
    best = min(alike, key=lambda item: (item.all_bytes, item.seconds))
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
    except ValueError:
        amount = 0
    if amount < 1 or amount != int(amount):
        raise ValueError(f"expected a whole number such as 4096, 128k, 1M or 1_048_576, got {text!r}")
    return int(amount)


def _read(name: str, number: Any) -> int:
    try:
        return read_amount(number)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
