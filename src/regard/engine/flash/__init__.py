"""Flash attention in plain JAX: tiles, lists of those that hold work, passes over them, primitives."""
