"""The engine: how one attention call is checked, given to a backend and run; users never need to open it.

Start from `problem.Problem`, one checked call, `registry.choose`, which picks a backend for it, and `tiled`,
the backend in plain JAX.
"""
