"""Plant one fault at a time in a copy of the package, and see whether the tests that can see it fail.

The faults stand in the tables beside this file, one table a room. `make mutants` runs all of them and writes
benchmarks/MUTANTS.md; `make mutants ONLY=masks` those whose table, file or sentence holds a word.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

HERE = pathlib.Path(__file__).parent
TESTS = HERE.parent
ROOT = TESTS.parent
SOURCE = ROOT / "src" / "regard"
RESULTS = ROOT / "build" / "mutants.json"
REPORT = ROOT / "benchmarks" / "MUTANTS.md"
SECONDS = 600  # a fault may make a loop endless
# What `make test` runs, and the slow cases where that sees nothing.
MARKED = "not slow and not browser and not processes", "slow and not browser and not processes"
SCRIPTS = pathlib.Path("inspection", "explorer")  # tests of the explorer's page, which Node runs


@dataclass(frozen=True)
class Fault:
    """One mistake: text of one file that is replaced, and the tests that can see it."""

    table: str
    file: str  # below src/regard
    fault: str  # what is wrong then, in one sentence
    before: str
    after: str
    tests: tuple[str, ...]  # files of tests/, or file::test; the likeliest to fail first; or *.test.js
    unseen: str = ""  # why no test can fail, where none can
    python: str = ""  # which version sees it, such as "3.12"; any other skips the tests

    @property
    def name(self) -> str:
        return f"{self.table}: {self.file}: {self.fault}"

    def plant(self, source: str) -> str:
        """Return the file's text with the fault in it; the place must be there, and the only one."""
        found = source.count(self.before)
        if found != 1:
            raise ValueError(f"{self.table}.toml: {self.fault!r}: {self.file} has its `before` {found} times")
        planted = source.replace(self.before, self.after)
        if self.file.endswith(".py"):
            compile(planted, self.file, "exec")
        return planted

    @property
    def is_script(self) -> bool:
        """Whether Node runs its tests, and not pytest."""
        return self.tests[0].endswith(".test.js")


def read_faults() -> list[Fault]:
    """Read every table; what stands above its faults holds for all of them."""
    faults = []
    for path in sorted(HERE.glob("*.toml")):
        table = tomllib.loads(path.read_text())
        for entry in table.pop("faults"):
            faults.append(Fault(table=path.stem, **{**table, **entry, "tests": tuple(entry["tests"])}))
    return faults


def find_python(version: str) -> str:
    """Return the interpreter of a version: this one, or that of an environment beside `.venv`."""
    if version in ("", ".".join(map(str, sys.version_info[:2]))):
        return sys.executable
    found = ROOT / f".venv-{version}" / "bin" / "python"
    if not found.exists():
        sys.exit(f"some faults need Python {version}: make setup VENV=.venv-{version} PYTHON=python{version}")
    return str(found)


def run_tests(
    tests: tuple[str, ...],
    fault: Fault | None,
    *options: str,
    python: str = "",
    marked: str = " or ".join(MARKED),
) -> tuple[int | str, str]:
    """Run tests on a copy of the package, with a fault or as it is: exit code, and what was said."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        package = pathlib.Path(folder, "src", "regard")
        shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
        if fault is not None:
            target = package / fault.file
            target.write_text(fault.plant(target.read_text()))
        command = [
            find_python(python), "-B", "-m", "pytest", "--exitfirst", "--tb=no", "-p", "no:cacheprovider",
            "-m", marked, *options, *(f"{TESTS}/{test}" for test in tests),
        ]  # fmt: skip
        if tests[0].endswith(".test.js"):
            command = prepare_scripts(pathlib.Path(folder), tests, fault)
        env = os.environ | {"PYTHONPATH": str(package.parent), "OPENBLAS_NUM_THREADS": "1"}
        limit = None if fault is None else SECONDS
        try:
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return "an endless loop", ""
    if done.returncode not in (0, 1, 2, 5):
        raise RuntimeError(f"{command}: pytest ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.returncode, done.stdout


def prepare_scripts(folder: pathlib.Path, tests: tuple[str, ...], fault: Fault | None) -> list[str]:
    """Put tests of the page beside the copy of it, which they import; return what runs them."""
    sys.path.insert(0, str(TESTS / "inspection"))
    from javascript import NODE

    if NODE is None:
        sys.exit("faults of the explorer's page need Node: it comes with `pip install 'pyright[nodejs]'`")
    shutil.copytree(TESTS / SCRIPTS, folder / "tests" / SCRIPTS)
    shutil.copy(ROOT / "package.json", folder)
    if fault is not None:
        subprocess.run([NODE, "--check", folder / "src" / "regard" / fault.file], check=True)
    return [NODE, "--test", "--test-reporter=tap", *(str(folder / "tests" / test) for test in tests)]


def read_killers() -> dict[str, str]:
    """Read which test killed a fault, by its sentence, from the report that there is."""
    sources = {path.relative_to(TESTS).as_posix(): path.read_text() for path in TESTS.rglob("test_*.py")}
    row = re.compile(r"^\| \S+ \| (.*) \| `([\w/]+\.py)::(\w+)[^`]*` \|$", re.MULTILINE)
    rows = (match.groups() for match in row.finditer(REPORT.read_text()))
    defined = (named for named in rows if f"def {named[2]}(" in sources.get(named[1], ""))
    return {fault.replace("\\|", "|"): f"{file}::{test}" for fault, file, test in defined}


def try_fault(fault: Fault, killer: str | None) -> dict:
    """Run a fault's tests on a package that has it, first what killed it last; killed when one fails."""
    started = time.monotonic()
    code, said = 0, ""
    first = [] if killer is None else [(killer,)]
    turns = [(marked, tests) for marked in MARKED for tests in [*first, fault.tests]]
    for marked, tests in turns[:1] if fault.is_script else turns:
        code, said = run_tests(tests, fault, python=fault.python, marked=marked)
        if code not in (0, 5):
            break
    failed = re.search(r"^(?:FAILED|ERROR) tests/(.*?)(?: - .*)?$", said, re.MULTILINE)
    by = failed[1] if failed else str(code)
    if fault.is_script and (failed := re.search(r"^ *not ok \d+ - (.*)$", said, re.MULTILINE)):
        by = f"{fault.tests[0]}::{failed[1]}"
    seconds = round(time.monotonic() - started, 1)
    return {"killed": code in (1, 2), "by": by, "slow": marked != MARKED[0], "seconds": seconds}


def write_report(faults: list[Fault], results: dict) -> None:
    """Write benchmarks/MUTANTS.md from the results of all faults."""
    survivors = [fault for fault in faults if not results[fault.name]["killed"]]
    killed = [fault for fault in faults if results[fault.name]["killed"]]
    late = [fault for fault in killed if results[fault.name]["slow"]]

    def row(name: str, own: list[Fault], mark: str = "") -> str:
        counts = [sum(fault in own for fault in kind) for kind in (faults, killed, late, survivors)]
        quick = counts[1] - counts[2]
        cells = [name, counts[0], f"{quick}, {quick / counts[0]:.1%}", *counts[2:]]
        return "| " + " | ".join(f"{mark}{cell}{mark}" for cell in cells) + " |"

    lines = [
        "# Mutants",
        "",
        "`make mutants` plants one fault at a time (tables in `tests/mutants/`) and runs the tests that can",
        "see it: the cases of `make test`, and where all of these pass, the slow ones. Killed: one fails.",
        "",
        "| table | faults | killed by `make test` | by slow cases alone | survived |",
        "|---|---|---|---|---|",
    ]
    for table in sorted({fault.table for fault in faults}):
        lines.append(row(table, [fault for fault in faults if fault.table == table]))
    lines += [
        row("all", faults, "**"),
        "",
        "## Survivors",
        "",
        *(f"- `{fault.file}`: {fault.fault} {fault.unseen or '**No test sees it.**'}" for fault in survivors),
        *([] if survivors else ["None."]),
    ]
    others = [fault for fault in killed if fault not in late]
    titles = {"Killed by slow cases alone": late, "Killed, and by what first": others}
    for title, kind in titles.items():
        lines += ["", f"## {title}", "", "| file | fault | test |", "|---|---|---|"]
        for fault in kind:
            cells = (fault.file, fault.fault, f"`{results[fault.name]['by']}`")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    REPORT.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Try the faults, two at a time on two cores, and keep each result as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose table, file or sentence holds this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    faults = read_faults()
    for version in {fault.python for fault in faults if options.only in fault.name}:
        find_python(version)
    chosen = [fault for fault in faults if options.only in fault.name]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.parent.mkdir(exist_ok=True)
    killers = read_killers()
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = {pool.submit(try_fault, fault, killers.get(fault.fault)): fault for fault in chosen}
        for number, future in enumerate(as_completed(futures), 1):
            fault, result = futures[future], future.result()
            results[fault.name] = result
            RESULTS.write_text(json.dumps(results, indent=1))
            word = f"killed by {result['by']}" if result["killed"] else "SURVIVED"
            print(f"{number}/{len(chosen)} {result['seconds']:5.1f} s  {fault.name}: {word}", flush=True)
    # A test that fails without a fault, too, has shown nothing.
    failing: dict[tuple[str, bool], set[str]] = {}
    for fault in chosen:
        by = results[fault.name]["by"]
        if results[fault.name]["killed"] and "::" in by:
            test = fault.tests[0] if fault.is_script else by.partition("[")[0]
            failing.setdefault((fault.python, fault.is_script), set()).add(test)
    for (python, _), named in failing.items():
        code, said = run_tests(tuple(sorted(named)), None, "--numprocesses", str(options.jobs), python=python)
        if code:
            sys.exit(f"without any fault, tests that killed one fail as well:\n{said}")
    if all(fault.name in results for fault in faults):
        write_report(faults, results)
        print(f"wrote {REPORT.relative_to(ROOT)}")
    unexplained = [f for f in chosen if not results[f.name]["killed"] and not f.unseen]
    if unexplained:
        sys.exit(f"{len(unexplained)} faults survived without a reason")


if __name__ == "__main__":
    main()
