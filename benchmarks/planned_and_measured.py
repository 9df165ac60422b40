"""Times that the planner expects of a ring of CPU devices, and those that are measured.

All devices are threads of one machine and share its cores, so more of them are not faster: what is compared
is whether the planner sees what a division costs. The machine is measured before each of a few rounds, as
others use it, too; the median ratio counts.

    python benchmarks/planned_and_measured.py
"""

import json
import os
import subprocess
import sys
import time

LENGTH, HEADS, WIDTH, ROUNDS = 8192, 8, 64, 5


def measure(devices, causal, backward):
    import jax
    import jax.numpy as jnp

    from regard import masks, parallel, planning

    mask = masks.causal() if causal else None

    def plan():
        return planning.plan(
            length=LENGTH, heads=HEADS, width=WIDTH, devices=devices, chip="cpu", mask=mask, dtype="float32",
            backward=backward, fixed={"sequence": devices},
        )  # fmt: skip

    chosen = plan().best.candidate
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("sequence",), axis_types=auto)
    lie = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "sequence"))
    arrays = [
        jax.device_put(jax.random.normal(jax.random.key(seed), (1, HEADS, LENGTH, WIDTH)), lie)
        for seed in range(3)
    ]

    def call(*arrays):
        return parallel.attend(
            *arrays, mesh=mesh, axis="sequence", mask=mask, plan="ring", layout=chosen.layout
        )

    function = call
    if backward:
        function = jax.grad(lambda *arrays: jnp.sum(call(*arrays) ** 2), (0, 1, 2))
    function = jax.jit(function)
    jax.block_until_ready(function(*arrays))
    rounds = []
    for _ in range(ROUNDS):
        report = plan()
        start = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        measured = time.perf_counter() - start
        rate = report.chip.flops["float32"] * devices
        rounds.append((measured / report.best.seconds, report.best.seconds, measured, rate))
    _, planned, measured, rate = sorted(rounds)[ROUNDS // 2]
    print(json.dumps({"planned": planned, "measured": measured, "layout": chosen.layout, "rate": rate}))


def main():
    for causal in (False, True):
        for backward in (False, True):
            for devices in (1, 2, 4, 8):
                flags = f"--xla_force_host_platform_device_count={devices}"
                done = subprocess.run(
                    [sys.executable, __file__, str(devices), str(int(causal)), str(int(backward))],
                    env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
                    capture_output=True, text=True, check=True,
                )  # fmt: skip
                found = json.loads(done.stdout.splitlines()[-1])
                what = f"{'causal' if causal else 'full':<7}{'with gradients' if backward else 'forward':<15}"
                planned, measured = (found[name] * 1e3 for name in ("planned", "measured"))
                print(
                    f"{what} {devices} devices {found['layout']:<11} {found['rate'] / 1e9:5.0f} GFLOP/s  ",
                    f"planned {planned:6.0f} ms   measured {measured:6.0f} ms ",
                    f"ratio {measured / planned:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        devices, causal, backward = map(int, sys.argv[1:])
        measure(devices, bool(causal), bool(backward))
    else:
        main()
