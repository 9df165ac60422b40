"""Amounts as people write and read them: 1M, 128k, 1_048_576; 3.4 ms."""

from __future__ import annotations

_SUFFIXES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


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
    factor = _SUFFIXES.get(words[-1:], 1)
    digits = words[:-1] if factor > 1 else words
    try:
        # Of fractions only those that give whole numbers, such as 1.5k.
        amount = int(digits) * factor if "." not in digits else float(digits) * factor
    except ValueError:
        amount = 0
    if amount < 1 or amount != int(amount):
        raise ValueError(f"expected a whole number such as 4096, 128k, 1M or 1_048_576, got {text!r}")
    return int(amount)


def spell_seconds(seconds: float) -> str:
    """A time in the unit that suits it."""
    if not seconds:
        return "0 s"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError
