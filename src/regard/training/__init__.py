"""Training: tasks, a reproducible loop, checkpoints, metrics and statistics of the heads.

`tasks` holds what can be trained, `runs.open_run` decides how a run directory starts or goes on, `loop.train`
trains it, and `runs.load_run` gives the trained model back. Importing this package loads none of them, so
that reading settings or printing help costs nothing.
"""
