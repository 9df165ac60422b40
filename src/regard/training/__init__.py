"""Training: tasks, a reproducible loop, checkpoints, metrics and statistics of the heads.

Start from a task of `tasks`, such as `tasks.Copy`; `open_run` makes a run's folder for it, `train` trains it,
and `load_model` reads a trained model from one. Importing this package loads nothing else, so that reading
settings costs nothing. Needs the extra `regard[train]`.
"""

from typing import TYPE_CHECKING

from regard.loading import defer

if TYPE_CHECKING:
    from regard.training import compiled_updates, loop, optimization, runs, settings, tasks
    from regard.training.loop import Outcome, train
    from regard.training.runs import Run, load_model, load_run, open_run

__all__ = ["Outcome", "Run", "compiled_updates", "load_model", "load_run", "loop", "open_run", "optimization"]
__all__ += ["runs", "settings", "tasks", "train"]

__getattr__, __dir__ = defer(
    __name__, "train", __all__, loop="Outcome train", runs="Run load_model load_run open_run"
)
