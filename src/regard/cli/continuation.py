"""The command that goes on with a run, and what is said where training could not go on."""

import errno
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from regard.paths import name_final
from regard.training.mesh_specs import read_mesh

MEMBERSHIP = ("--coordinator", "--processes", "--process")
REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or ask for a larger quota",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "give an --out where you may write"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "give an --out below directories alone"),
}
BEGUN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # troubles that the same directory can get over


def spell_continuation(words: Sequence[str], *, lost_devices: bool = False) -> str:
    """Spell the command that goes on after another: without what starts anew, and who is which process.

    After a loss of devices, a mesh of so many becomes one of all that there are, and axes span what they may.

    Example:
        >>> spell_continuation(["train", "copy", "--force", "--mesh", "fsdp=2,tensor=2"], lost_devices=True)
        "regard train copy --mesh 'fsdp=*'"
    """
    continued: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in (*MEMBERSHIP, "--mesh", "--outer", "--resume"):
            value = value if equals else next(rest, "")
            layout = {"--mesh": _fit_mesh(value)} if lost_devices else {"--mesh": value, "--outer": value}
            new_value = {**layout, "--resume": value}.get(name)
            if new_value and new_value != "never":
                continued += [name, new_value]
        elif name != "--force":
            continued.append(word)
    return spell_command(*continued)


def spell_command(*words: str | Path) -> str:
    """Spell a command of these words for pasting into a shell.

    Example:
        >>> spell_command("plot", Path("my runs"))
        "regard plot 'my runs'"
    """
    return shlex.join(["regard", *map(str, words)])


def describe_next(words: Sequence[str]) -> str:
    """Say which command goes on from the checkpoint that a command has stopped with."""
    again = spell_continuation(words)
    is_same = again == spell_command(*words)
    return "the same command goes on from there" if is_same else f"this goes on from there\n  {again}"


def describe_trouble(error: OSError, directory: Path, words: Sequence[str]) -> str:
    """Describe what the system refused to write, and how to go on."""
    remedy = REMEDIES.get(error.errno or 0, "see to it, then give the same command again")
    path = name_final(Path(os.fsdecode(error.filename or directory)))
    refusal = f"{path}: {error.strerror or error}; {remedy}"
    if error.errno not in BEGUN:
        return refusal
    again = f"this {describe_start(directory)}\n  {spell_continuation(words)}"
    return f"{refusal}: what was saved before is whole, and {again}"


def describe_start(directory: Path) -> str:
    """Say where a run goes on."""
    steps = [int(path.name) for path in directory.glob("checkpoints/*") if path.name.isdecimal()]
    return f"goes on from step {max(steps)}, the last checkpoint" if steps else "starts again"


def _fit_mesh(text: str) -> str:
    """Return a mesh like this one for any number of devices."""
    try:
        sizes = read_mesh(text).sizes
    except ValueError:
        return text
    several = [axis for axis, size in sizes.items() if size != 1]
    if len(several) == 1 and "*" in text:
        return text
    return "fsdp=*" if {"fsdp", "expert"} & {*several} else "data=*"
