"""Ring attention: a sequence divided over eight devices, here eight parts of a CPU.

    python examples/ring_attention.py

Each device keeps its queries; keys and values travel around. No device ever works on the whole length, and
the gradient is a second trip. On accelerators, leave out the line about CPU devices.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

from regard import attend, masks, parallel


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)  # before anything asks for devices
    mesh = jax.make_mesh((8,), ("sequence",), axis_types=(AxisType.Auto,))
    mask = masks.causal()
    everywhere = NamedSharding(mesh, Spec(None, None, "sequence", None))
    query, key, value, pull = jax.random.normal(jax.random.key(0), (4, 1, 4, 4096, 32))

    def divided(query, key, value):
        # "balanced" gives every device early and late tokens, so that a causal mask leaves none idle.
        return parallel.ring_attend(
            query, key, value, mesh=mesh, axis="sequence", mask=mask, layout="balanced"
        )

    @jax.jit
    def run(query, key, value, pull):
        output, back = jax.vjp(divided, query, key, value)
        return output, back(pull)

    placed = jax.device_put((query, key, value, pull), everywhere)
    output, gradients = run(*placed)
    part = output.addressable_shards[0].data.shape[-2]
    print(f"{query.shape[-2]} tokens, {part} on each of {mesh.size} devices")

    whole, back = jax.vjp(lambda *inputs: attend(*inputs, mask=mask), query, key, value)
    pairs = zip(("output", "query", "key", "value"), (output, *gradients), (whole, *back(pull)), strict=True)
    for name, ours, theirs in pairs:
        print(f"  {name:<7} largest difference from one device: {float(jnp.abs(ours - theirs).max()):.0e}")
    print(parallel.explain(query, key, value, mesh=mesh, axis="sequence", mask=mask, layout="balanced"))


if __name__ == "__main__":
    main()
