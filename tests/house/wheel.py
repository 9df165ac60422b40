"""Try a wheel as those will who install it: in a fresh environment, elsewhere, by what README says.

    python tests/house/wheel.py build/dist

`make dist` runs it.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.S)
LOCAL_LINK = re.compile(r"\]\((?!https?:)")


def read_blocks(text):
    """Pairs of code and what it is said to print."""
    return BLOCK.findall(text)


def run(*command, where):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=where, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))[:200]}\n{done.stdout}{done.stderr}")
    return done.stdout


def main(folder):
    (wheel,) = Path(folder).resolve().glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        description = archive.read(metadata).decode()
    if LOCAL_LINK.search(description):
        sys.exit("expected no link into the repository in what a package index shows of README")
    version = ".".join(map(str, sys.version_info[:2]))
    constraints = ROOT / "constraints" / f"python{version}.txt"
    pinned = ["--constraint", constraints] if constraints.exists() else []
    with tempfile.TemporaryDirectory() as where:
        run(sys.executable, "-m", "venv", "clean", where=where)
        python = Path(where) / "clean" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}[all]", *pinned, where=where)
        found = run(python, "-c", "import regard; print(regard.__file__)", where=where)
        if not Path(found).is_relative_to(Path(where).resolve() / "clean"):
            sys.exit(f"expected the installed package, got {found}")
        code, shown = zip(*read_blocks((ROOT / "README.md").read_text()), strict=True)
        printed = run(python, "-c", "".join(code), where=where)
        if printed != "".join(shown):
            sys.exit(f"README says\n{''.join(shown)}\nthe installed package prints\n{printed}")
        print(run(python.parent / "regard", "--version", where=where), end="")  # noqa: T201
    print(f"{wheel.name}: what README says is true of the wheel")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
