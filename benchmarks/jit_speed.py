"""What `jax.jit` buys for one attention call: `python benchmarks/jit_speed.py [ROUNDS]`.

The ways to run the same causal self-attention are described in `regard.benchmarking.jit_gain`; they take
turns, so that a busy moment of the machine hits all of them. Printed are medians, and what jit gains: the
first of a pair over the second.
"""

from __future__ import annotations

import sys

import jax

from regard.benchmarking.jit_gain import SHAPES, compute_gains, make_ways, measure, ways_agree


def main(arguments: list[str]) -> int:
    if len(arguments) > 1 or not all(argument.isdigit() and int(argument) > 0 for argument in arguments):
        print("usage: python benchmarks/jit_speed.py [ROUNDS]", file=sys.stderr)
        return 2
    rounds = int(arguments[0]) if arguments else 200
    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.platform} ({device.device_kind}), {rounds} rounds, medians")
    for label, shape in SHAPES.items():
        ways = make_ways(shape)
        if not ways_agree(ways):
            print(f"{label}: the ways disagree", file=sys.stderr)
            return 1
        medians = measure(ways, rounds)
        gains = compute_gains(medians)
        print(f"\n{label}, (batch, heads, length, width) = {shape}")
        for name, seconds in medians.items():
            gain = f"{gains[name]:.1f} x" if name in gains else ""
            print(f"  {name:<13} {seconds * 1e6:>8.1f} us  {gain:>7}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
