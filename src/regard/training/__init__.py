"""Training: typed tasks, a reproducible loop, and runs that resume bit for bit.

Start from a preset of `presets`, such as `presets.Copy`, `make_task`, which turns it into a model and data,
and `train`; `open_run` makes a run's folder, and `load_model` reads a trained model from one. Importing this
package loads nothing else, and `presets` no JAX, so that reading settings costs nothing. Needs the extra
`regard[train]`.
"""

from typing import TYPE_CHECKING

from regard.loading import defer

if TYPE_CHECKING:
    from regard.training import loop, presets, runs, tasks
    from regard.training.loop import Outcome, train
    from regard.training.runs import Run, load_model, load_run, open_run
    from regard.training.tasks import make_task

__all__ = [
    "Outcome",
    "Run",
    "load_model",
    "load_run",
    "loop",
    "make_task",
    "open_run",
    "presets",
    "runs",
    "tasks",
    "train",
]

__getattr__, __dir__ = defer(
    __name__,
    "train",
    __all__,
    loop="Outcome train",
    runs="Run load_model load_run open_run",
    tasks="make_task",
)
