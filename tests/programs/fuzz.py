"""Run random programs: python tests/programs/fuzz.py --seed 1 --count 200, which is `make fuzz`."""

import argparse
import collections
import multiprocessing
import os
import re
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from checking import Outcome, examine, shrink
from generator import generate
from regard import parallel


def compile_one(seed, topology, number):
    """Compile a program for a device that is elsewhere, on whose mesh its arrays lie."""
    start, program = time.process_time(), generate(seed, number, False)
    if program.family == "ring" or "float64" in program.dtypes.values():
        return number, program.family, Outcome("left out"), 0.0
    mesh = parallel.build_mesh({"x": 1}, devices=parallel.find_topology(topology)[:1])
    lay = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    text = re.sub(r"found = .*\n$", "", program.text())
    try:
        exec(text, space := {})
        arrays = jax.tree.map(lambda x: lay(np.asarray(x)), (space["floats"], space["ints"]))
        jax.jit(space["run"]).lower(*arrays).compile()
        outcome = Outcome("compiled")
    except NotImplementedError as error:
        outcome = Outcome("refused", str(error))
    except Exception:
        outcome = Outcome("broken", f"{text}\n{traceback.format_exc(limit=-4)}")
    return number, program.family, outcome, time.process_time() - start


def try_one(seed, poison, number):
    """Run one program, and the simplest that fails as it does; return what became of it, and CPU seconds."""
    start = time.process_time()
    if number % 20 == 0:  # thousands of compiled programs would add up to gigabytes
        jax.clear_caches()
    program = generate(seed, number, poison)
    outcome = examine(program)
    if outcome.kind in ("wrong", "broken"):
        program, outcome = shrink(program, outcome)
    return number, program.family, outcome, time.process_time() - start


def pretend():
    """Keep what runs on several devices out of the cache of programs: from there, it may wait for ever."""
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # benchmarks/NOTES.md


def run_all(seed, numbers, jobs=1, poison=True):
    """Yield what becomes of programs; those of a ring run in a process that has several devices."""
    spawn, attempt = multiprocessing.get_context("spawn"), partial(try_one, seed, poison)
    rings = [number for number in numbers if generate(seed, number, poison).family == "ring"]
    others = [number for number in numbers if number not in rings]
    if jobs == 1:
        yield from map(attempt, others)
    else:
        with ProcessPoolExecutor(jobs, spawn) as pool:
            yield from pool.map(attempt, others)
    if rings:
        with ProcessPoolExecutor(1, spawn, pretend) as pool:
            yield from pool.map(attempt, rings)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--only", type=int, help="this number alone")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--compile-for", help="a topology, such as v5e:2x2: programs are compiled, not run")
    parser.add_argument("--finite", action="store_true", help="plant no NaN and no inf")
    asked = parser.parse_args(arguments)
    numbers = range(asked.count) if asked.only is None else [asked.only]
    kinds, spent = collections.Counter(), 0.0
    found = run_all(asked.seed, numbers, asked.jobs, not asked.finite)
    if asked.compile_for:
        found = map(partial(compile_one, asked.seed, asked.compile_for), numbers)
    for number, family, outcome, seconds in found:
        kinds[outcome.kind] += 1
        spent += seconds
        print(f"{asked.seed} {number} {family}: {outcome.kind}, {seconds:.1f} s", flush=True)
        if outcome.kind in ("wrong", "broken"):
            print(f"\n{outcome.words}\n", flush=True)
    print(f"{dict(kinds)} with seed {asked.seed}, {spent / max(len(numbers), 1):.2f} CPU seconds each")
    return 1 if kinds["wrong"] + kinds["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
