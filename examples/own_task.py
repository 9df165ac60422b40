"""A task of one's own, trained by Regard's loop: it resumes, has figures, and runs on any mesh.

    python examples/own_task.py
    REGARD_TASKS=examples/own_task.py regard train parity --length 9 --mesh 'data=*'
    REGARD_TASKS=examples/own_task.py regard plot out/parity

The task: is the number of ones in a row of bits odd? Its settings are the fields, and options of the command.
"""

from dataclasses import asdict, dataclass
from typing import ClassVar

import jax

from regard.models import Classifier, TransformerConfig
from regard.training import load_run, open_run, tasks, train
from regard.training.losses import measure_labels
from regard.training.settings import Cadence, Goal, Optimization, Sizes


@dataclass(frozen=True)
class Parity(tasks.SyntheticTask):
    """Tell if a row of bits holds an odd number of ones."""

    name: ClassVar[str] = "parity"
    goal: ClassVar[Goal] = Goal("accuracy", 0.95)

    length: int = 5
    """Bits of a row."""
    model: Sizes = Sizes(d_model=32, num_heads=2, d_ff=64)
    optimization: Optimization = Optimization(steps=200)
    cadence: Cadence = Cadence(checkpoint_every=50)

    @property
    def config(self):
        return TransformerConfig(vocab_size=2, max_length=self.length, **asdict(self.model))

    def make_model(self, rngs):
        return Classifier(self.config, 2, pooling="mean", rngs=rngs)

    def make_batch(self, rng, batch_size):
        bits = jax.random.bernoulli(rng, 0.5, (batch_size, self.length)).astype(int)
        return {"inputs": bits, "labels": bits.sum(-1) % 2}

    def measure(self, model, batch):
        return measure_labels(self.read(model, batch), batch["labels"])


if __name__ == "__main__":
    steps = iter(range(1, 1000))
    first = train(open_run("out/parity", Parity()), stop=lambda: next(steps) == 120)
    print(f"{first.status} at step {first.step}")
    outcome = train(open_run("out/parity", Parity()))
    print(f"{outcome.status} at step {outcome.step}, held-out accuracy {outcome.held_out['accuracy']:.3f}")
    task, model = load_run("out/parity")
    print(task.watch(model))
