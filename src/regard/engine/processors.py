"""Instructions that this machine's processor says it has."""

import functools
import platform
from pathlib import Path


@functools.cache
def read_flags() -> frozenset[str]:
    """Read the names of the instructions that Linux lists of an x86 processor; none elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return frozenset()
    return frozenset(text.partition("flags")[2].partition("\n")[0].split())


def name_instructions() -> str:
    """Name the vector instructions that costs depend on, or the architecture."""
    names = {"avx512f": "AVX-512", "avx2": "AVX2"}
    return next((name for flag, name in names.items() if flag in read_flags()), platform.machine())


def multiplies_tiles() -> bool:
    """Return whether the processor is known to multiply tiles of bfloat16 (Intel's AMX)."""
    return "amx_bf16" in read_flags()


def lacks_bfloat16() -> bool:
    """Return whether the processor is known to have no products of bfloat16."""
    return bool(read_flags()) and not any("bf16" in flag for flag in read_flags())
