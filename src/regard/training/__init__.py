"""Training: typed tasks, a reproducible loop, checkpoints and metrics.

`presets` says what to train and how (plain dataclasses, no JAX), `tasks` turns a preset into a model and
data, `runs` owns a run directory, `checkpoints` and `metrics` what lies in it, and `loop` trains. Importing
this package loads none of them, so that reading settings or printing help costs nothing.
"""
