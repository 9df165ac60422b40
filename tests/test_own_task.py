"""A task of one's own: one class and one registration, and every command knows it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from regard.cli import main
from regard.inspection import Tokens, figures
from regard.models import Classifier, TransformerConfig
from regard.training import loop, runs, tasks
from regard.training.accuracy import measure_labels
from regard.training.settings import Cadence, Goal, Optimization, Sizes
from regard.training.task import Picture


@dataclass(frozen=True)
class Parity(tasks.SyntheticTask):
    """Tell if a row of bits holds an odd number of ones.

    Expect nothing of three steps. Example: regard train parity
    """

    name: ClassVar[str] = "parity"
    goal: ClassVar[Goal] = Goal("accuracy", 0.9)

    length: int = 5
    """Bits of a row."""
    held_out_size: int = 7
    model: Sizes = Sizes(d_model=6, num_heads=2, d_ff=7)
    optimization: Optimization = Optimization(steps=3, batch_size=5)
    cadence: Cadence = Cadence(log_every=1, heads_every=1)

    @property
    def config(self):
        return TransformerConfig(vocab_size=2, max_length=self.length, **asdict(self.model))

    def make_model(self, rngs):
        return Classifier(self.config, 2, pooling="mean", rngs=rngs)

    def make_batch(self, rng, batch_size):
        bits = jax.random.randint(rng, (batch_size, self.length), 0, 2)
        return {"inputs": bits, "labels": (bits.sum(-1) % 2).astype(jnp.int32)}

    def measure(self, model, batch):
        return measure_labels(self.read(model, batch), batch["labels"])

    def example(self):
        batch = self.pick(3)
        tokens = Tokens([("zero", "one")[bit] for bit in batch["inputs"][0]])
        return tasks.Example(batch, {"": tokens}, "parity: a row of bits")

    def pictures(self, model) -> Iterator[Picture]:
        _, aux = self.read_with_weights(model, self.example().batch)
        yield "bits", figures.head_grid(np.asarray(aux["blocks"][0]["weights"][0]), title="parity")


def test_a_task_of_ones_own_trains_is_plotted_and_is_inspected(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(tasks.TASKS, Parity.name, Parity)
    directory = tmp_path / "parity"
    stop = iter([False, True, False])
    assert loop.train(runs.open_run(directory, Parity()), stop=lambda: next(stop)).step == 2
    assert loop.train(runs.open_run(directory, Parity())).status == "finished"
    task, model = runs.load_run(directory)
    assert task == Parity()
    call = task.watch(model).calls[0]
    assert call.query_tokens is not None
    assert call.query_tokens.texts == tuple(("zero", "one")[bit] for bit in task.held_out["inputs"][3])

    assert main(["plot", str(directory)]) == 0
    drawn = {path.stem for path in (directory / "figures").iterdir()}
    assert {"curves", "heads-entropy", "heads-max-score", "bits"} <= drawn
    capsys.readouterr()
    assert main(["inspect", str(directory)]) == 0
    assert "parity: a row of bits: Classifier, 1 attention layer" in capsys.readouterr().out
    assert (directory / "figures" / "explorer.html").exists()
